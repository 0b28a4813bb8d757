//! Normalisations around the operator.

use burn::tensor::{DType, Tensor};

use crate::{ops, plain};

/// `x / sqrt(sum(x^2) + 1e-6)` over the last dimension (FLA's `l2norm`); a zero row stays zero, with a finite
/// gradient. Computed in f32 at least, returned in the dtype of `x`.
pub fn l2_normalize<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    plain::l2_normalize(x)
}

/// `o * rsqrt(mean(o^2) + eps) * weight * sigmoid(gate)` over the last dimension (FLA's `FusedRMSNormGated` with
/// a sigmoid). Computed in f32 at least, returned in the dtype of `o`.
///
/// # Shapes
///
/// - `o`, `gate`: `[B, T, HV, V]`; `weight`: `[V]`
/// - returns: `[B, T, HV, V]`
///
/// # Panics
///
/// If the shapes do not fit.
pub fn gated_rms_norm(o: Tensor<4>, weight: Tensor<1>, gate: Tensor<4>, eps: f64) -> Tensor<4> {
    let dtype = o.dtype();
    gated_rms_norm_to(o, weight, gate, eps, dtype)
}

/// As [`gated_rms_norm`], in `dtype`.
pub(crate) fn gated_rms_norm_to(o: Tensor<4>, weight: Tensor<1>, gate: Tensor<4>, eps: f64, dtype: DType) -> Tensor<4> {
    let dims = o.dims();
    assert!(gate.dims() == dims, "gated_rms_norm: `gate` must be {dims:?} like `o`, got {:?}", gate.dims());
    let [width] = weight.dims();
    assert!(width == dims[3], "gated_rms_norm: `weight` must be [V = {}], got [{width}]", dims[3]);
    ops::output_norm(o, weight, gate, eps, dtype)
}
