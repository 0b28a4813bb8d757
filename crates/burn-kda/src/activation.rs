//! Sigmoid, silu and softplus that keep full relative precision, forward and backward, over the whole range.
//!
//! Burn 0.22's `sigmoid` goes through `log` and, on NdArray, through f32 for f64 input; its `softplus` is exactly 0
//! below -17 in f32. Here the argument of `exp` is `-|x|`, never positive, and the halves of the axis are chosen by a
//! mask: a sum over both would cancel in the gradient of the small one.

use burn::tensor::{Bool, DType, Tensor};

use crate::ops::is_on_cube;

/// `x < 0` and `exp(-|x|)`, whose gradient at 0 is that of `exp(-x)`.
fn split<const D: usize>(x: Tensor<D>) -> (Tensor<D, Bool>, Tensor<D>) {
    let negative = x.clone().lower_elem(0.0);
    let decayed = x.clone().neg().mask_where(negative.clone(), x).exp();
    (negative, decayed)
}

/// `1 / (1 + exp(-x))`
pub(crate) fn sigmoid<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let (negative, decayed) = split(x);
    let upper = (decayed.clone() + 1.0).recip();
    // `1 - upper` for x < 0: its gradient is a product, while that of its value, a quotient, would be a difference.
    let constant = upper.clone().detach();
    let lower = decayed.detach() * constant.clone() + (constant - upper.clone());
    upper.mask_where(negative, lower)
}

/// `x * sigmoid(x)`
pub(crate) fn silu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    x.clone() * sigmoid(x)
}

/// `log(1 + exp(x))`
pub(crate) fn softplus<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let (negative, decayed) = split(x.clone());
    x.mask_fill(negative, 0.0) + log1p(decayed)
}

/// `log(1 + e)`, `0 <= e <= 1`. WGSL has no such function, and Burn's is `log` of a sum there, 0 below 6e-8.
fn log1p<const D: usize>(e: Tensor<D>) -> Tensor<D> {
    if e.dtype() != DType::F32 || !is_on_cube(&e) {
        return e.log1p();
    }
    // 2 atanh(e / (2 + e)), by its series: the square is at most 1/9.
    let s = e.clone() / (e + 2.0);
    let square = s.clone().square();
    let tail = [13.0, 11.0, 9.0, 7.0, 5.0, 3.0];
    let tail = tail.iter().fold(square.clone() / 15.0, |tail, odd| (tail + 1.0 / odd) * square.clone());
    (tail * s.clone() + s) * 2.0
}
