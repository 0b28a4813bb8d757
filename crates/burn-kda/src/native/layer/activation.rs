//! Sigmoid and softplus to a few roundings, as [`crate::activation`] has them, but 0 in f32 where the exponential would be
//! subnormal; branch-free, so that a loop over them becomes vector code.

use super::super::Real;

/// `1 / (1 + exp(-x))` and `1 / (1 + exp(x))`
#[inline(always)]
pub(super) fn sigmoids<T: Real, const FMA: bool>(x: T) -> (T, T) {
    let e = (-x.abs()).exp_of_negative::<FMA>();
    let upper = T::one() / (T::one() + e);
    let lower = e / (T::one() + e);
    if x < T::zero() { (lower, upper) } else { (upper, lower) }
}

#[inline(always)]
pub(super) fn sigmoid<T: Real, const FMA: bool>(x: T) -> T {
    let e = (-x.abs()).exp_of_negative::<FMA>();
    (if x < T::zero() { e } else { T::one() }) / (T::one() + e)
}

/// `log(1 + exp(x))`
#[inline(always)]
pub(super) fn softplus<T: Real, const FMA: bool>(x: T) -> T {
    let e = (-x.abs()).exp_of_negative::<FMA>();
    (if x < T::zero() { T::zero() } else { x }) + e.log1p_of_fraction::<FMA>()
}
