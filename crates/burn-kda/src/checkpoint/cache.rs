//! FLA's cache of a layer.

use burn::tensor::Tensor;

use crate::{ConvState, KdaState};

/// What FLA's layer keeps in its cache (`fla.models.utils.Cache`): the states transposed, and one column more of the
/// convolutions' inputs than they need.
#[derive(Debug, Clone)]
pub struct FlaCache {
    /// `recurrent_state`, `[B, HV, V, K]`, f32.
    pub recurrent_state: Tensor<4>,
    /// `conv_state` of q, k and v, each `[B, D, W]`, oldest first; none for a layer without convolutions.
    pub conv_state: Option<[Tensor<3>; 3]>,
}

impl FlaCache {
    /// The state that the layer continues from. The oldest column of the convolutions' inputs is dropped: the next token
    /// does not see it.
    ///
    /// # Panics
    ///
    /// If `conv_state` has no column.
    pub fn into_state(self) -> KdaState {
        let conv = self.conv_state.map(|states| {
            let [q, k, v] = states.map(|state| {
                let got @ [_, _, width] = state.dims();
                assert!(
                    width > 0,
                    "FlaCache::into_state: `conv_state` must be [B, D, W] with W at least 1, got {got:?}"
                );
                state.slice_dim(2, 1..width)
            });
            ConvState { q, k, v }
        });
        KdaState { recurrent: self.recurrent_state.swap_dims(2, 3), conv }
    }
}

impl From<KdaState> for FlaCache {
    /// The column that a state does not have is zero: FLA does not read it.
    fn from(state: KdaState) -> Self {
        let conv_state = state.conv.map(|ConvState { q, k, v }| {
            [q, k, v].map(|past| {
                let [batch, channels, _] = past.dims();
                let oldest = Tensor::zeros([batch, channels, 1], (&past.device(), past.dtype()));
                Tensor::cat(vec![oldest, past], 2)
            })
        });
        Self { recurrent_state: state.recurrent.swap_dims(2, 3), conv_state }
    }
}
