//! The recurrent form.

use super::problem::{self, Caller, KdaInput, KdaOptions, KdaOutput};
use crate::ops;

/// The operator token by token: the definition, and the form to decode with (FLA's `naive_recurrent_kda`).
///
/// Shapes, dtypes and result as [`chunk_kda`](super::chunk_kda); `chunk_size` is checked but not used.
///
/// # Panics
///
/// If a shape, a dtype or an option does not fit; the message names the argument.
pub fn recurrent_kda(input: KdaInput, options: KdaOptions) -> KdaOutput {
    problem::run(Caller::new("recurrent_kda"), input, options, ops::recurrent)
}
