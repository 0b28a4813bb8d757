//! One token of the recurrence.

use burn::tensor::Tensor;

/// One decoding step: decay, delta write, read (FLA's `naive_recurrent_kda`, loop body).
///
/// ```text
/// S <- diag(exp(g)) S
/// S <- S + beta k (v - S^T k)^T
/// o  = scale * S^T q
/// ```
///
/// # Shapes
///
/// - `state`: `[B, HV, K, V]`, f32 or f64
/// - `q`, `k`: `[B, H, K]`, already normalised; `v`: `[B, HV, V]`
/// - `g`: `[B, HV, K]` log decay; `beta`: `[B, HV]`
/// - returns: `o` `[B, HV, V]` in the dtype of `v`, and the new state
///
/// # Panics
///
/// As [`recurrent_kda`](super::recurrent_kda), naming `kda_step`.
pub fn kda_step(
    state: Tensor<4>,
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    g: Tensor<3>,
    beta: Tensor<2>,
    scale: f64,
) -> (Tensor<3>, Tensor<4>) {
    let input = super::KdaInput {
        q: q.unsqueeze_dim(1),
        k: k.unsqueeze_dim(1),
        v: v.unsqueeze_dim(1),
        g: g.unsqueeze_dim(1),
        beta: beta.unsqueeze_dim(1),
    };
    let options = super::KdaOptions::default().with_scale(scale).with_initial_state(state);
    let output = super::recurrent::named("kda_step", input, options);
    (output.o.squeeze_dim(1), output.final_state)
}
