//! The operator by its three lines, in Burn's own tensor operations: what Burn differentiates here, the crate's
//! hand-written gradients are compared with.

use burn::tensor::Tensor;
use burn_kda::{KdaInput, KdaOptions, KdaOutput, fla_read_scale};

/// With the options that change the result: scale, initial state and packing.
pub fn definition(KdaInput { q, k, v, g, beta }: KdaInput, options: KdaOptions) -> KdaOutput {
    let [batch, time, heads, key_dim] = q.dims();
    let [_, _, value_heads, value_dim] = v.dims();
    let scale = options.scale.unwrap_or_else(|| fla_read_scale(key_dim));
    let bounds = options.cu_seqlens.unwrap_or_else(|| vec![0, time]);
    let states = options.initial_state.unwrap_or_else(|| {
        Tensor::zeros([batch * (bounds.len() - 1), value_heads, key_dim, value_dim], (&v.device(), v.dtype()))
    });
    // Value head `hv` reads head `hv / (HV / H)`.
    let per_value_head = |x: Tensor<4>| {
        let of_head = |hv: usize| x.clone().slice_dim(2, hv * heads / value_heads..hv * heads / value_heads + 1);
        Tensor::cat((0..value_heads).map(of_head).collect(), 2)
    };
    let (q, k) = (per_value_head(q), per_value_head(k));
    let row = |x: &Tensor<4>, t: usize| x.clone().slice_dim(1, t..t + 1).swap_dims(1, 2);

    let (mut outputs, mut finals) = (Vec::new(), Vec::new());
    for (n, span) in bounds.windows(2).enumerate() {
        let mut state = states.clone().slice_dim(0, n..n + batch);
        for t in span[0]..span[1] {
            state = row(&g, t).exp().swap_dims(2, 3) * state;
            let beta = beta.clone().slice_dim(1, t..t + 1).swap_dims(1, 2).unsqueeze_dim::<4>(3);
            let error = row(&v, t) - row(&k, t).matmul(state.clone());
            state = state + row(&k, t).swap_dims(2, 3).matmul(error * beta);
            outputs.push(row(&q, t).matmul(state.clone()).swap_dims(1, 2) * scale);
        }
        finals.push(state);
    }
    KdaOutput { o: Tensor::cat(outputs, 1), final_state: Tensor::cat(finals, 0) }
}
