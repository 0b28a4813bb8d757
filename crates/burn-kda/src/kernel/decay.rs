//! `exp(g)` that does not lose a slow channel.

use cubecl::prelude::*;

// After Cody and Waite: the high part of ln 2 has so few bits that its multiples here are exact.
const LN_2_HIGH: f32 = 0.693_359_4;
const LN_2_LOW: f32 = -2.121_944_4e-4;
const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// `exp(g) = power (1 + change)`, `g <= 0`: `power` is a power of two, and `change` is in `-0.3..=0.42`.
///
/// `D = power S` is exact, so with a decay near 1, whose `change` is small and precise, `D + change D` rounds like `S`
/// does: not the same way at every token, as the product with a rounded `exp(g)` would. Nor may a compiler make that
/// product of it, as some do of `power S + (power change) S`. `power` is 0 where `exp(g)` is below the normal numbers,
/// and at `-inf`.
#[cube]
pub(super) fn decay_parts(g: f32) -> (f32, f32) {
    let x = select(g < -88.0f32, -88.0f32, g);
    let n = f32::round(x * LOG2_E);
    let r = (x - n * LN_2_HIGH) - n * LN_2_LOW;
    // exp(r) - 1 - r over r^2, by Taylor: |r| < 0.35, and the first term left out is below 2^-24 of the result.
    let mut tail = r * comptime!(1.0f32 / 40320.0) + comptime!(1.0f32 / 5040.0);
    tail = tail * r + comptime!(1.0f32 / 720.0);
    tail = tail * r + comptime!(1.0f32 / 120.0);
    tail = tail * r + comptime!(1.0f32 / 24.0);
    tail = tail * r + comptime!(1.0f32 / 6.0);
    tail = tail * r + 0.5f32;
    let power = f32::reinterpret(u32::cast_from(n + 127.0f32) << 23u32);
    (power, tail * r * r + r)
}

/// `exp(g)`, `g <= 0`, to a rounding or two, which the `exp` of a shading language does not promise.
#[cube]
pub(super) fn decay(g: f32) -> f32 {
    let (power, change) = decay_parts(g);
    power + power * change
}
