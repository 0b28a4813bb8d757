//! One token of the recurrence.

use burn::tensor::{Shape, Tensor};

use super::problem::{self, Caller, KdaInput, KdaOptions};
use crate::ops;

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
    let input = KdaInput { q: one_token(q), k: one_token(k), v: one_token(v), g: one_token(g), beta: one_token(beta) };
    let options = KdaOptions::default().with_scale(scale).with_initial_state(state);
    let caller = Caller { function: "kda_step", state: "state" };
    let output = problem::run(caller, input, options, ops::recurrent);
    (output.o.squeeze_dim(1), output.final_state)
}

/// Inserts the time axis. Burn's `reshape` takes a 0 for "as before", so tensors without elements, which the checks are
/// to name, are made anew.
fn one_token<const D: usize, const D2: usize>(x: Tensor<D>) -> Tensor<D2> {
    let shape = x.dims();
    if shape.iter().product::<usize>() > 0 {
        return x.unsqueeze_dim(1);
    }
    let with_time: Vec<usize> = [&shape[..1], &[1], &shape[1..]].concat();
    Tensor::zeros(Shape::from(with_time), (&x.device(), x.dtype()))
}
