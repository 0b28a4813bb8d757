//! The recurrent form: the definition of the operator, token by token.

use burn::tensor::Tensor;

use super::problem::{self, Dims, KdaInput, KdaOptions, KdaOutput};
use super::step;

/// The operator token by token: the definition, and the form to decode with (FLA's `naive_recurrent_kda`).
///
/// Shapes, dtypes and result as [`chunk_kda`](super::chunk_kda); `chunk_size` is checked but not used.
///
/// # Panics
///
/// If a shape, a dtype or an option does not fit; the message names the argument.
pub fn recurrent_kda(input: KdaInput, options: KdaOptions) -> KdaOutput {
    named("recurrent_kda", input, options)
}

pub(crate) fn named(function: &str, input: KdaInput, options: KdaOptions) -> KdaOutput {
    problem::run(function, input, options, |len| len, recurrence)
}

/// The whole operator in a few lines; every fast path is compared with it.
fn recurrence(input: KdaInput, state: Option<Tensor<4>>, scale: f64) -> KdaOutput {
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

    let mut state =
        state.unwrap_or_else(|| Tensor::zeros([batch, value_heads, key_dim, value_dim], (&v.device(), v.dtype())));
    let mut outputs = Vec::with_capacity(time);
    for t in 0..time {
        let beta = beta.clone().slice_dim(1, t..t + 1).squeeze_dim::<2>(1);
        let (o, next) = step::update(state, at(&q, t), at(&k, t), at(&v, t), at(&g, t), beta, scale);
        outputs.push(o.unsqueeze_dim(1));
        state = next;
    }
    KdaOutput { o: Tensor::cat(outputs, 1), final_state: state }
}
