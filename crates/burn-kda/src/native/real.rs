//! f32 and f64.

use std::any::TypeId;

use num_traits::Float;
use pulp::bytemuck::cast;
use pulp::{Scalar256b, Simd};

/// A float type of the native kernels.
pub(crate) trait Real: Float + Send + Sync + 'static {
    /// `exp(g)` of every key channel, rounded so that the product over many tokens stays exact: `carry` is what the
    /// roundings so far have left out, relative to the product, and goes into the next one.
    ///
    /// A decay near 1 is rounded to `1 - n 2^-24` in f32; without the carry, tokens with the same decay round the same
    /// way, and a state that is kept for thousands of them decays at another rate. `rest` belongs to `g`: what the
    /// rounding of a sum has left out.
    fn decays<const FMA: bool>(g: &[Self], rest: Option<&[Self]>, carry: &mut [Self], decay: &mut [Self]);

    /// `exp(x)` of a number that is not positive, to a rounding or two.
    fn exp_of_negative<const FMA: bool>(self) -> Self;

    /// `log(1 + e)`, `0 <= e <= 1`, likewise.
    fn log1p_of_fraction<const FMA: bool>(self) -> Self;

    /// A vector of the machine.
    type Vector<S: Simd>: Copy;

    /// The numbers of some vectors.
    fn scalars<S: Simd>(x: &[Self::Vector<S>]) -> &[Self];

    /// The numbers of some vectors.
    fn scalars_mut<S: Simd>(x: &mut [Self::Vector<S>]) -> &mut [Self];

    /// Numbers in a [`Vector`](Self::Vector).
    fn lanes<S: Simd>() -> usize;

    /// The whole vectors of a slice.
    fn vectors<S: Simd>(x: &[Self]) -> &[Self::Vector<S>];

    /// The whole vectors of a slice.
    fn vectors_mut<S: Simd>(x: &mut [Self]) -> &mut [Self::Vector<S>];

    /// The same number in every lane.
    fn splat<S: Simd>(simd: S, x: Self) -> Self::Vector<S>;

    /// Numbers in 16 bytes, which a machine broadcasts as it does a single one.
    const GROUP: usize = 16 / size_of::<Self>();

    /// The `n`th group of numbers, over and over.
    fn splat_group<S: Simd>(simd: S, x: &[Self], n: usize) -> Self::Vector<S>;

    /// The sum of each of [`GROUP`](Self::GROUP) groups, which lie `stride` apart.
    fn group_sums(groups: &[Self], stride: usize, sums: &mut [Self]);

    /// `a + b`.
    fn vector_add<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;

    /// `a - b`.
    fn vector_sub<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;

    /// `a b`.
    fn vector_mul<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;

    /// `a b + c`; in f32 as exact as if it were fused, on every machine.
    fn vector_mul_add<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>, c: Self::Vector<S>) -> Self::Vector<S>;

    /// The sum of all lanes.
    fn total<S: Simd>(simd: S, x: Self::Vector<S>) -> Self;

    /// `a b + c`; fused where the machine can.
    #[inline(always)]
    fn fma<const FMA: bool>(self, b: Self, c: Self) -> Self {
        if FMA { Float::mul_add(self, b, c) } else { self * b + c }
    }
}

/// The vectors of one float type, by pulp's names for it.
macro_rules! vectors {
    ($vector:ident, $lanes:ident, $view:ident, $view_mut:ident, $splat:ident, $add:ident, $sub:ident, $mul:ident, $sum:ident) => {
        type Vector<S: Simd> = S::$vector;

        #[inline(always)]
        fn scalars<S: Simd>(x: &[Self::Vector<S>]) -> &[Self] {
            pulp::bytemuck::cast_slice(x)
        }

        #[inline(always)]
        fn scalars_mut<S: Simd>(x: &mut [Self::Vector<S>]) -> &mut [Self] {
            pulp::bytemuck::cast_slice_mut(x)
        }

        #[inline(always)]
        fn lanes<S: Simd>() -> usize {
            S::$lanes
        }

        #[inline(always)]
        fn vectors<S: Simd>(x: &[Self]) -> &[Self::Vector<S>] {
            S::$view(x).0
        }

        #[inline(always)]
        fn vectors_mut<S: Simd>(x: &mut [Self]) -> &mut [Self::Vector<S>] {
            S::$view_mut(x).0
        }

        #[inline(always)]
        fn splat<S: Simd>(simd: S, x: Self) -> Self::Vector<S> {
            simd.$splat(x)
        }

        #[inline(always)]
        fn vector_add<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S> {
            simd.$add(a, b)
        }

        #[inline(always)]
        fn vector_sub<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S> {
            simd.$sub(a, b)
        }

        #[inline(always)]
        fn vector_mul<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S> {
            simd.$mul(a, b)
        }

        #[inline(always)]
        fn total<S: Simd>(simd: S, x: Self::Vector<S>) -> Self {
            simd.$sum(x)
        }
    };
}

impl Real for f32 {
    vectors!(
        f32s,
        F32_LANES,
        as_simd_f32s,
        as_mut_simd_f32s,
        splat_f32s,
        add_f32s,
        sub_f32s,
        mul_f32s,
        reduce_sum_f32s
    );

    /// Without fused instructions, in f64, where the product is exact: results rounded twice would leave the error bars after
    /// many tokens.
    #[inline(always)]
    fn vector_mul_add<S: Simd>(simd: S, a: S::f32s, b: S::f32s, c: S::f32s) -> S::f32s {
        if TypeId::of::<S>() != TypeId::of::<Scalar256b>() {
            return simd.mul_add_e_f32s(a, b, c);
        }
        let (a, b, mut c): ([f32; 8], [f32; 8], [f32; 8]) = (cast(a), cast(b), cast(c));
        for ((c, a), b) in c.iter_mut().zip(a).zip(b) {
            *c = (f64::from(a) * f64::from(b) + f64::from(*c)) as f32;
        }
        cast(c)
    }

    #[inline(always)]
    fn splat_group<S: Simd>(simd: S, x: &[f32], n: usize) -> S::f32s {
        cast(simd.splat_c64s(cast(x.as_chunks::<{ Self::GROUP }>().0[n])))
    }

    #[inline(always)]
    fn group_sums(groups: &[f32], stride: usize, sums: &mut [f32]) {
        let mut pairs = [[0.0; 4]; 2];
        for (i, pairs) in pairs.iter_mut().enumerate() {
            let (a, b) = (&groups[2 * i * stride..][..4], &groups[(2 * i + 1) * stride..][..4]);
            *pairs = [a[0] + a[1], a[2] + a[3], b[0] + b[1], b[2] + b[3]];
        }
        let [a, b] = pairs;
        sums.copy_from_slice(&[a[0] + a[1], a[2] + a[3], b[0] + b[1], b[2] + b[3]]);
    }

    #[inline(always)]
    fn exp_of_negative<const FMA: bool>(self) -> f32 {
        let (expm1, power) = expm1_and_power::<FMA>(self);
        expm1.fma::<FMA>(power, power)
    }

    #[inline(always)]
    fn log1p_of_fraction<const FMA: bool>(self) -> f32 {
        // 2 atanh(e / (2 + e)), by its series: the square is at most 1/9.
        const SERIES: [f32; 7] = [1.0 / 15.0, 1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0];
        let s = self / (2.0 + self);
        let square = s * s;
        let tail = SERIES.iter().fold(0.0, |sum: f32, &term| sum.fma::<FMA>(square, term));
        2.0 * (tail * square).fma::<FMA>(s, s)
    }

    #[inline(always)]
    fn decays<const FMA: bool>(g: &[f32], rest: Option<&[f32]>, carry: &mut [f32], decay: &mut [f32]) {
        let numbers = g.iter().zip(carry).zip(decay);
        match rest {
            None => numbers.for_each(|((&g, carry), decay)| *decay = with_carry::<FMA>(g, 0.0, carry)),
            Some(rest) => numbers.zip(rest).for_each(|(((&g, carry), decay), &rest)| {
                // Of a decay that is 0 nothing is left out.
                *decay = with_carry::<FMA>(g, if g > LEAST { rest } else { 0.0 }, carry);
            }),
        }
    }
}

/// Its exponential is taken for 0.
const LEAST: f32 = -88.0;

/// A decay of [`Real::decays`].
#[inline(always)]
fn with_carry<const FMA: bool>(g: f32, rest: f32, carry: &mut f32) -> f32 {
    let (expm1, power) = expm1_and_power::<FMA>(g);
    let want = expm1 + *carry + rest;
    let got = 1.0 + want;
    *carry = want - (got - 1.0); // exact: `got` is within a factor of 2 of 1
    got * power
}

/// `exp(x) = (1 + expm1) * power` with `power` a power of two (0 below the normal numbers, and at `-inf`).
///
/// Branch-free, so that a loop over it becomes vector code. After Cody and Waite, with a Taylor polynomial: the error
/// of `expm1` is a few roundings of its own size.
#[inline(always)]
fn expm1_and_power<const FMA: bool>(x: f32) -> (f32, f32) {
    // Adding this leaves the integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    const FIRST: f32 = 1.0 / 40320.0;
    const TAYLOR: [f32; 6] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5];

    let x = if x < LEAST { LEAST } else { x }; // keeps NaN
    let shifted = x.fma::<FMA>(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = (-n).fma::<FMA>(LN_2_LOW, (-n).fma::<FMA>(LN_2_HIGH, x));
    let tail = TAYLOR.iter().fold(FIRST, |sum, &term| sum.fma::<FMA>(r, term));
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0_f32.to_bits()));
    ((tail * r).fma::<FMA>(r, r), power)
}

impl Real for f64 {
    vectors!(
        f64s,
        F64_LANES,
        as_simd_f64s,
        as_mut_simd_f64s,
        splat_f64s,
        add_f64s,
        sub_f64s,
        mul_f64s,
        reduce_sum_f64s
    );

    #[inline(always)]
    fn vector_mul_add<S: Simd>(simd: S, a: S::f64s, b: S::f64s, c: S::f64s) -> S::f64s {
        // Where there is no instruction, pulp would call a function for each number.
        if TypeId::of::<S>() == TypeId::of::<Scalar256b>() {
            return simd.add_f64s(simd.mul_f64s(a, b), c);
        }
        simd.mul_add_e_f64s(a, b, c)
    }

    #[inline(always)]
    fn splat_group<S: Simd>(simd: S, x: &[f64], n: usize) -> S::f64s {
        cast(simd.splat_c64s(cast(x.as_chunks::<{ Self::GROUP }>().0[n])))
    }

    #[inline(always)]
    fn group_sums(groups: &[f64], stride: usize, sums: &mut [f64]) {
        let (a, b) = (&groups[..2], &groups[stride..][..2]);
        sums.copy_from_slice(&[a[0] + a[1], b[0] + b[1]]);
    }

    #[inline(always)]
    fn exp_of_negative<const FMA: bool>(self) -> f64 {
        self.exp()
    }

    #[inline(always)]
    fn log1p_of_fraction<const FMA: bool>(self) -> f64 {
        self.ln_1p()
    }

    #[inline(always)]
    fn decays<const FMA: bool>(g: &[f64], _: Option<&[f64]>, _: &mut [f64], decay: &mut [f64]) {
        for (&g, decay) in g.iter().zip(decay) {
            *decay = g.exp();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decays(g: &[f32]) -> Vec<f32> {
        let (mut carry, mut decay) = (vec![0.0; g.len()], vec![0.0; g.len()]);
        f32::decays::<false>(g, None, &mut carry, &mut decay);
        decay
    }

    #[test]
    fn a_decay_is_the_exponential() {
        let g: Vec<f32> = (0..200_000).map(|i| -87.3 * (i as f32 / 200_000.0).powi(3)).collect();
        for (decay, g) in decays(&g).into_iter().zip(g) {
            let want = f64::from(g).exp();
            let error = (f64::from(decay) - want).abs() / want;
            assert!(error < 1.5 / f64::from(1 << 23), "exp({g}): {decay}, error {error:e}");
        }
    }

    #[test]
    fn a_decay_saturates_and_keeps_nan() {
        assert_eq!(decays(&[0.0, -88.5, -200.0, -1e4, f32::MIN, f32::NEG_INFINITY]), [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        assert!(decays(&[f32::NAN])[0].is_nan());
    }

    #[test]
    fn the_product_of_many_decays_does_not_drift() {
        for g in [-1e-5_f32, -1e-4, -3e-3, -0.02, -0.3] {
            let (mut carry, mut decay) = ([0.0], [0.0]);
            let mut product = 0.0;
            for _ in 0..10_000 {
                f32::decays::<false>(&[g], None, &mut carry, &mut decay);
                product += f64::from(decay[0]).ln();
            }
            let want = 1e4 * f64::from(g);
            let error = (product - want).abs();
            // One rounding of the result, and no more of the exponent than `g` itself has been rounded by.
            assert!(error < (1.0 + want.abs()) / f64::from(1 << 24), "exp({g}), 10000 times: off by {error:e}");
        }
    }
}
