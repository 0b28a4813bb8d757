//! The definition of the operator, token by token.

use burn::tensor::Tensor;

use super::decay::Decay;
use crate::functions::{Dims, KdaInput, KdaOutput};

/// The whole operator in a few lines; every fast path is compared with it.
pub(crate) fn recurrence(input: KdaInput, state: Option<Tensor<4>>, scale: f64) -> KdaOutput {
    let Dims { batch, time, heads, value_heads, key_dim, value_dim } = input.dims();
    let KdaInput { q, k, v, g, beta } = input;
    let to_value_heads = |x: Tensor<4>| match value_heads / heads {
        1 => x,
        group => x.unsqueeze_dim::<5>(3).expand([batch, time, heads, group, key_dim]).reshape([
            batch,
            time,
            value_heads,
            key_dim,
        ]),
    };
    let (q, k) = (to_value_heads(q), to_value_heads(k));
    let at = |x: &Tensor<4>, t: usize| x.clone().slice_dim(1, t..t + 1).squeeze_dim::<3>(1);
    let row = |x: &Tensor<4>, t: usize| at(x, t).unsqueeze_dim::<4>(2);
    let column = |x: &Tensor<4>, t: usize| at(x, t).unsqueeze_dim::<4>(3);
    let beta = beta.unsqueeze_dim::<4>(3);

    let mut state =
        state.unwrap_or_else(|| Tensor::zeros([batch, value_heads, key_dim, value_dim], (&v.device(), v.dtype())));
    let mut outputs = Vec::with_capacity(time);
    for t in 0..time {
        let g = column(&g, t);
        state = Decay::new(g.clone(), g.exp()).apply(state);
        let error = row(&v, t) - row(&k, t).matmul(state.clone());
        state = state + column(&k, t) * (error * column(&beta, t));
        outputs.push(row(&q, t).matmul(state.clone()).swap_dims(1, 2) * scale);
    }
    KdaOutput { o: Tensor::cat(outputs, 1), final_state: state }
}
