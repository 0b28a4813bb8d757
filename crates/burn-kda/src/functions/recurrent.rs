//! The recurrent form.

use super::problem::{self, KdaInput, KdaOptions, KdaOutput};
use crate::ops;

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
    problem::run(function, input, options, ops::recurrent)
}
