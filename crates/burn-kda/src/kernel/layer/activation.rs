//! Sigmoid and softplus to a few roundings over the whole range, as [`crate::activation`] has them: neither the `exp` nor
//! the `log` of a shading language promises that.

use cubecl::prelude::*;

use crate::kernel::decay::decay;

/// `1 / (1 + exp(-x))`
#[cube]
pub(super) fn sigmoid(x: f32) -> f32 {
    let e = decay(select(x < 0.0f32, x, -x));
    select(x < 0.0f32, e, 1.0f32) / (1.0f32 + e)
}

/// `log(1 + exp(x))`
#[cube]
pub(super) fn softplus(x: f32) -> f32 {
    // log(1 + e) = 2 atanh(e / (2 + e)), by its series: the square is at most 1/9.
    let e = decay(select(x < 0.0f32, x, -x));
    let s = e / (2.0f32 + e);
    let square = s * s;
    let mut tail = square * comptime!(1.0f32 / 15.0) + comptime!(1.0f32 / 13.0);
    tail = tail * square + comptime!(1.0f32 / 11.0);
    tail = tail * square + comptime!(1.0f32 / 9.0);
    tail = tail * square + comptime!(1.0f32 / 7.0);
    tail = tail * square + comptime!(1.0f32 / 5.0);
    tail = tail * square + comptime!(1.0f32 / 3.0);
    select(x < 0.0f32, 0.0f32, x) + 2.0f32 * (tail * square * s + s)
}

/// The derivative of [`sigmoid`].
#[cube]
pub(super) fn sigmoid_slope(x: f32) -> f32 {
    let e = decay(select(x < 0.0f32, x, -x));
    e / ((1.0f32 + e) * (1.0f32 + e))
}
