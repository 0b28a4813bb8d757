//! Normalisations around the operator.

use burn::tensor::Tensor;

use crate::{activation::sigmoid, precision};

/// FLA's epsilon under the root of the query/key norm.
const L2_EPS: f64 = 1e-6;

/// `x / sqrt(sum(x^2) + 1e-6)` over the last dimension (FLA's `l2norm`); a zero row stays zero, with a finite
/// gradient. Computed in f32 at least, returned in the dtype of `x`.
pub fn l2_normalize<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let dtype = x.dtype();
    let x = x.cast(precision::accumulation(dtype));
    let norm = (x.clone().square().sum_dim(D - 1) + L2_EPS).sqrt();
    (x / norm).cast(dtype)
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
    let dims = o.dims();
    assert!(gate.dims() == dims, "gated_rms_norm: `gate` must be {dims:?} like `o`, got {:?}", gate.dims());
    let [width] = weight.dims();
    assert!(width == dims[3], "gated_rms_norm: `weight` must be [V = {}], got [{width}]", dims[3]);

    let dtype = o.dtype();
    let wide = precision::accumulation(dtype);
    let o = o.cast(wide);
    // Not `/ width`: going backward, burn-autodiff 0.22 divides by a scalar in f32.
    let rms = (o.clone().square().sum_dim(3) * (1.0 / width as f64) + eps).sqrt();
    let weight = weight.cast(wide).reshape([1, 1, 1, width]);
    (o / rms * weight * sigmoid(gate.cast(wide))).cast(dtype)
}
