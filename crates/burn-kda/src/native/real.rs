//! f32 and f64.

use std::any::TypeId;

use num_traits::Float;
use pulp::bytemuck::cast;
use pulp::{Scalar, Scalar256b, Simd};

/// A float type of the native kernels.
pub(crate) trait Real: Float + Send + Sync + 'static {
    /// `exp(g)` of some key channels, rounded so that the product over many tokens stays exact, and the next carry: `carry` is
    /// what the roundings so far have left out, relative to the product, and goes into the next one.
    ///
    /// A decay near 1 is rounded to `1 - n 2^-24` in f32; without the carry, tokens with the same decay round the same
    /// way, and a state that is kept for thousands of them decays at another rate.
    fn decay<S: Simd, const FMA: bool>(simd: S, g: Self::Vector<S>, carry: Self::Vector<S>) -> [Self::Vector<S>; 2];

    /// What the rounding of the sum `g` has left out, as it goes into the carry: of a decay that is 0 nothing.
    fn rest<S: Simd>(simd: S, g: Self::Vector<S>, rest: Self::Vector<S>) -> Self::Vector<S>;

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
        let (expm1, power) = expm1_and_power::<_, FMA>(Scalar, self);
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
    fn decay<S: Simd, const FMA: bool>(simd: S, g: S::f32s, carry: S::f32s) -> [S::f32s; 2] {
        let one = simd.splat_f32s(1.0);
        let (expm1, power) = expm1_and_power::<S, FMA>(simd, g);
        let want = simd.add_f32s(expm1, carry);
        let got = simd.add_f32s(one, want);
        // Exact: `got` is within a factor of 2 of 1.
        let carry = simd.sub_f32s(want, simd.sub_f32s(got, one));
        [simd.mul_f32s(got, power), carry]
    }

    #[inline(always)]
    fn rest<S: Simd>(simd: S, g: S::f32s, rest: S::f32s) -> S::f32s {
        simd.select_f32s(simd.less_than_f32s(simd.splat_f32s(LEAST), g), rest, simd.splat_f32s(0.0))
    }
}

/// Its exponential is taken for 0.
const LEAST: f32 = -88.0;

/// `exp(x) = (1 + expm1) * power` with `power` a power of two (0 below the normal numbers, and at `-inf`).
///
/// After Cody and Waite, with a Taylor polynomial: the error of `expm1` is a few roundings of its own size.
#[inline(always)]
fn expm1_and_power<S: Simd, const FMA: bool>(simd: S, x: S::f32s) -> (S::f32s, S::f32s) {
    // Adding this leaves the integer, as an exponent is written, in the low bits.
    const ROUND: f32 = 12_582_912.0 + 127.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    const FIRST: f32 = 1.0 / 40320.0;
    const TAYLOR: [f32; 6] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5];

    let all = |x: f32| simd.splat_f32s(x);
    let fma = |a, b, c| if FMA { simd.mul_add_f32s(a, b, c) } else { simd.add_f32s(simd.mul_f32s(a, b), c) };
    let x = simd.select_f32s(simd.less_than_f32s(x, all(LEAST)), all(LEAST), x); // keeps NaN
    let shifted = fma(x, all(std::f32::consts::LOG2_E), all(ROUND));
    let n = simd.sub_f32s(shifted, all(ROUND));
    let r = fma(n, all(-LN_2_LOW), fma(n, all(-LN_2_HIGH), x));
    let mut tail = all(FIRST);
    for term in TAYLOR {
        tail = fma(tail, r, all(term));
    }
    let power = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(23));
    let power = simd.transmute_f32s_u32s(power);
    (fma(simd.mul_f32s(tail, r), r, r), power)
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
    fn decay<S: Simd, const FMA: bool>(_: S, mut g: S::f64s, carry: S::f64s) -> [S::f64s; 2] {
        for g in Self::scalars_mut::<S>(std::slice::from_mut(&mut g)) {
            *g = g.exp();
        }
        [g, carry]
    }

    #[inline(always)]
    fn rest<S: Simd>(simd: S, _: S::f64s, _: S::f64s) -> S::f64s {
        simd.splat_f64s(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decays(g: &[f32]) -> Vec<f32> {
        g.iter().map(|&g| f32::decay::<_, false>(Scalar, g, 0.0)[0]).collect()
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
            let (mut carry, mut product) = (0.0, 0.0);
            for _ in 0..10_000 {
                let [decay, next] = f32::decay::<_, false>(Scalar, g, carry);
                carry = next;
                product += f64::from(decay).ln();
            }
            let want = 1e4 * f64::from(g);
            let error = (product - want).abs();
            // One rounding of the result, and no more of the exponent than `g` itself has been rounded by.
            assert!(error < (1.0 + want.abs()) / f64::from(1 << 24), "exp({g}), 10000 times: off by {error:e}");
        }
    }
}
