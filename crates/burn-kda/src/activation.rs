//! Sigmoid, silu and softplus that keep full relative precision, and a correct gradient, over the whole range.
//!
//! Burn 0.22's `sigmoid` goes through `log` and, on NdArray, through f32 for f64 input; its `softplus` is exactly 0
//! below -17 in f32. Here the argument of `exp` is never positive. With `m = min(x, 0)`, `2m - x = -|x|`; written
//! this way the gradient at `x = 0` is right whichever subgradient the clamp takes.

use burn::tensor::Tensor;

/// `(min(x, 0), exp(-|x|))`
fn split<const D: usize>(x: Tensor<D>) -> (Tensor<D>, Tensor<D>) {
    let negative = x.clone().clamp_max(0.0);
    let decayed = (negative.clone() * 2.0 - x).exp();
    (negative, decayed)
}

/// Stands in for `-inf`, whose `2m - x` is NaN: far past the point where `exp` is 0.
const FLOOR: f64 = -1e38;

/// `1 / (1 + exp(-x))`
pub(crate) fn sigmoid<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let (negative, decayed) = split(x.clamp_min(FLOOR));
    negative.exp() / (decayed + 1.0)
}

/// `x * sigmoid(x)`
pub(crate) fn silu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    x.clone() * sigmoid(x)
}

/// `log(1 + exp(x))`
pub(crate) fn softplus<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let x = x.clamp_min(FLOOR);
    let (negative, decayed) = split(x.clone());
    x - negative + decayed.log1p()
}
