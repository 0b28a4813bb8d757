//! Batches with padding, computed as packed sequences: no token of padding is projected, read or written.

use burn::tensor::{Bool, Int, Tensor, TensorData};

use super::kda::Call;
use super::{KdaModule, KdaState};
use crate::chunk_kda;

impl KdaModule {
    /// [`forward`](Self::forward) for a padded batch: left, right or any other padding.
    ///
    /// Masked tokens are removed before the layer sees the sequence, as FLA does with an attention mask, so outputs
    /// and states are those of the unpadded sequences whatever the padding holds. The mask is read on the host.
    ///
    /// # Shapes
    ///
    /// - `x`: `[B, T, hidden]`; `mask`: `[B, T]`, true for live tokens
    /// - returns: `[B, T, hidden]`, zero where `mask` is false, and the state after each row's last live token
    ///
    /// # Panics
    ///
    /// If a shape does not fit, or as [`forward`](Self::forward).
    pub fn forward_with_mask(&self, x: Tensor<3>, mask: Tensor<2, Bool>) -> (Tensor<3>, KdaState) {
        let function = "KdaModule::forward_with_mask";
        self.check_input(function, &x);
        let [batch, time, hidden] = x.dims();
        let (want, got) = ([batch, time], mask.dims());
        assert!(got == want, "{function}: `mask` must be [B, T] = {want:?}, got {got:?}");
        let device = x.device();
        let mask: Vec<bool> = mask.into_data().iter::<bool>().collect();
        let live: Vec<i64> = (0..mask.len()).filter(|&i| mask[i]).map(|i| i as i64).collect();
        let mut cu_seqlens = vec![0];
        for row in mask.chunks(time.max(1)).chain(std::iter::repeat(&[][..])).take(batch) {
            cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + row.iter().filter(|&&live| live).count());
        }

        // Every padded position reads the row of zeros appended after the live ones.
        let mut places = vec![live.len() as i64; mask.len()];
        for (packed, &i) in live.iter().enumerate() {
            places[i as usize] = packed as i64;
        }
        let indices = |values: Vec<i64>| {
            let len = values.len();
            Tensor::<1, Int>::from_data(TensorData::new(values, [len]), &device)
        };
        let packed = match live.is_empty() {
            true => x.clone().slice([0..1, 0..0]),
            false => x.clone().reshape([1, batch * time, hidden]).select(1, indices(live)),
        };
        let call = Call { function, form: chunk_kda, cu_seqlens: Some(&cu_seqlens) };
        let (y, state) = self.run(call, packed, None);
        let zero = Tensor::zeros([1, 1, hidden], (&device, x.dtype()));
        let padded = match places.is_empty() {
            true => x,
            false => Tensor::cat(vec![y, zero], 1).select(1, indices(places)).reshape([batch, time, hidden]),
        };
        (padded, state)
    }
}
