//! The chunked WY form.

use super::problem::{self, Caller, KdaInput, KdaOptions, KdaOutput};
use crate::ops::{self, KdaParams};

/// The operator in chunks: the form to train and prefill with (Kimi Linear, section 3; FLA's `chunk_kda`).
///
/// Takes any `T >= 0`. No decay is too strong for it: `g` may be `-inf`. Differentiable in all inputs.
///
/// # Shapes
///
/// As [`KdaInput`], [`KdaOptions`] and [`KdaOutput`] say. Arithmetic and states are f32, or f64 for f64 input.
///
/// # Panics
///
/// If a shape, a dtype or an option does not fit; the message names the argument.
pub fn chunk_kda(input: KdaInput, options: KdaOptions) -> KdaOutput {
    let KdaOptions { chunk_size, tensor_cores, .. } = options;
    problem::run(Caller::new("chunk_kda"), input, options, |input, state, scale| {
        ops::chunk(input, state, KdaParams { scale, chunk_size, tensor_cores })
    })
}
