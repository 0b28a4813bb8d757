//! The decay gate.

use std::ops::Range;

use ndarray::{Array1, Array2, Array4, ArrayView1, ArrayView4, ArrayViewMut3, ArrayViewMut4, Axis, s};
use pulp::Simd;

use super::activation::{sigmoid, sigmoids, softplus};
use super::{WORK, by_span, count, spans, total};
use crate::gate::DecayFn;
use crate::native::Real;
use crate::native::pages::zeros;
use crate::native::rows::{copy, paste};
use crate::native::work::{Work, cut, run_all};
use crate::plain::A_LOG_RANGE;

pub(crate) struct Gate<'a, T> {
    /// `[B, T, HV, K]`.
    pub raw: ArrayView4<'a, T>,
    /// `[HV]`.
    pub a_log: Option<ArrayView1<'a, T>>,
    /// `[HV * K]`.
    pub dt_bias: Option<ArrayView1<'a, T>>,
    pub decay: DecayFn,
}

pub(crate) struct GateGradients<T> {
    pub raw: Array4<T>,
    pub a_log: Option<Array1<T>>,
    pub dt_bias: Option<Array1<T>>,
}

/// The parameters of every head.
struct Parameters<T> {
    /// `exp(A_log)`, `[HV]`.
    rate: Vec<T>,
    /// `[HV, K]`.
    bias: Array2<T>,
    /// None for softplus.
    lower_bound: Option<T>,
}

impl<T: Real> Gate<'_, T> {
    fn parameters(&self) -> Parameters<T> {
        let (_, _, heads, dim) = self.raw.dim();
        let (low, high) = A_LOG_RANGE;
        let [low, high] = [low, high].map(|x| T::from(x).expect("a float"));
        let rate = |head: usize| self.a_log.map_or(T::one(), |a_log| num_traits::clamp(a_log[head], low, high).exp());
        let mut bias = Array2::zeros([heads, dim]);
        if let Some(dt_bias) = self.dt_bias {
            bias.iter_mut().zip(dt_bias).for_each(|(bias, &x)| *bias = x);
        }
        let lower_bound = match self.decay {
            DecayFn::Softplus => None,
            DecayFn::Sigmoid { lower_bound } => Some(T::from(lower_bound).expect("a float")),
        };
        Parameters { rate: (0..heads).map(rate).collect(), bias, lower_bound }
    }

    fn work(&self) -> usize {
        self.raw.len() * WORK
    }
}

/// Log decays, `[B, T, HV, K]`.
pub(crate) fn decay_gate<T: Real>(gate: &Gate<T>) -> Array4<T> {
    let (batch, time, heads, dim) = gate.raw.dim();
    let parameters = gate.parameters();
    let mut g = zeros([batch, time, heads, dim]);
    let tasks = spans(batch, time).zip(by_span(&mut g));
    let tasks = tasks.map(|((b, tokens), g)| Forward { raw: gate.raw.view(), parameters: &parameters, b, tokens, g });
    run_all(tasks.collect(), gate.work());
    g
}

struct Forward<'a, T> {
    raw: ArrayView4<'a, T>,
    parameters: &'a Parameters<T>,
    b: usize,
    tokens: Range<usize>,
    g: ArrayViewMut4<'a, T>,
}

impl<T: Real> Work for Forward<'_, T> {
    #[inline(always)]
    fn run<S: Simd, const FMA: bool>(mut self, _: S) {
        let Parameters { rate, bias, lower_bound } = self.parameters;
        let mut row = vec![T::zero(); bias.ncols()];
        for (i, t) in self.tokens.enumerate() {
            for (head, (&rate, bias)) in rate.iter().zip(bias.rows()).enumerate() {
                copy(self.raw.slice(s![self.b, t, head, ..]), &mut row);
                let numbers = row.iter_mut().zip(bias.to_slice().expect("a row"));
                match *lower_bound {
                    None => numbers.for_each(|(x, &bias)| *x = -(softplus::<T, FMA>(*x + bias) * rate)),
                    Some(bound) => numbers.for_each(|(x, &bias)| *x = sigmoid::<T, FMA>((*x + bias) * rate) * bound),
                }
                paste(&row, self.g.slice_mut(s![0, i, head, ..]));
            }
        }
    }
}

/// From the cotangent `[B, T, HV, K]` of the log decays.
pub(crate) fn decay_gate_gradients<T: Real>(gate: &Gate<T>, d_g: ArrayView4<T>) -> GateGradients<T> {
    let (batch, time, heads, dim) = gate.raw.dim();
    let parameters = gate.parameters();
    let mut d_raw = zeros([batch, time, heads, dim]);
    let mut sums = Array4::zeros([count(batch, time), 2, heads, dim]);
    let tasks = spans(batch, time).zip(by_span(&mut d_raw)).zip(cut(sums.view_mut(), Axis(0), 1)).map(
        |(((b, tokens), d_raw), sums)| Backward {
            raw: gate.raw.view(),
            parameters: &parameters,
            d_g: d_g.view(),
            b,
            tokens,
            d_raw,
            sums: sums.index_axis_move(Axis(0), 0),
        },
    );
    run_all(tasks.collect(), 2 * gate.work());
    // Of the bias, and of the rate at each channel.
    let sums = total(&sums);
    let (low, high) = A_LOG_RANGE;
    let of_a_log = |a_log: ArrayView1<T>| {
        let of_head = |head: usize| {
            let is_clamped =
                a_log[head] < T::from(low).expect("a float") || a_log[head] > T::from(high).expect("a float");
            let sum: f64 = sums.slice(s![1, head, ..]).iter().map(|x| x.to_f64().expect("a float")).sum();
            if is_clamped { T::zero() } else { T::from(sum).expect("a float") * parameters.rate[head] }
        };
        (0..heads).map(of_head).collect()
    };
    GateGradients {
        raw: d_raw,
        a_log: gate.a_log.map(of_a_log),
        dt_bias: gate.dt_bias.map(|_| sums.index_axis(Axis(0), 0).iter().copied().collect()),
    }
}

struct Backward<'a, T> {
    raw: ArrayView4<'a, T>,
    parameters: &'a Parameters<T>,
    d_g: ArrayView4<'a, T>,
    b: usize,
    tokens: Range<usize>,
    d_raw: ArrayViewMut4<'a, T>,
    sums: ArrayViewMut3<'a, T>,
}

impl<T: Real> Work for Backward<'_, T> {
    #[inline(always)]
    fn run<S: Simd, const FMA: bool>(mut self, _: S) {
        let Parameters { rate, bias, lower_bound } = self.parameters;
        let dim = bias.ncols();
        let [mut raw, mut d_g, mut d_rate] = [(); 3].map(|()| vec![T::zero(); dim]);
        let mut sums = vec![T::zero(); 2 * bias.len()];
        let (of_bias, of_rate) = sums.split_at_mut(bias.len());
        for (i, t) in self.tokens.enumerate() {
            let of_heads = of_bias.chunks_exact_mut(dim).zip(of_rate.chunks_exact_mut(dim));
            for (head, ((&rate, bias), (of_bias, of_rate))) in rate.iter().zip(bias.rows()).zip(of_heads).enumerate() {
                copy(self.raw.slice(s![self.b, t, head, ..]), &mut raw);
                copy(self.d_g.slice(s![self.b, t, head, ..]), &mut d_g);
                let bias = bias.to_slice().expect("a row");
                // `d_g` becomes the cotangent of `raw`.
                let numbers = raw.iter().zip(bias).zip(d_g.iter_mut().zip(&mut d_rate));
                match *lower_bound {
                    None => numbers.for_each(|((&raw, &bias), (d, d_rate))| {
                        let z = raw + bias;
                        // A saturated gate has no gradient, whatever it is multiplied by.
                        *d_rate = if *d == T::zero() { T::zero() } else { -*d * softplus::<T, FMA>(z) };
                        *d = -*d * sigmoid::<T, FMA>(z) * rate;
                    }),
                    Some(bound) => numbers.for_each(|((&raw, &bias), (d, d_rate))| {
                        let z = raw + bias;
                        let (open, closed) = sigmoids::<T, FMA>(z * rate);
                        let d_x = *d * open * closed * bound;
                        *d_rate = if d_x == T::zero() { T::zero() } else { d_x * z };
                        *d = d_x * rate;
                    }),
                }
                of_bias.iter_mut().zip(&d_g).for_each(|(sum, &x)| *sum = *sum + x);
                of_rate.iter_mut().zip(&d_rate).for_each(|(sum, &x)| *sum = *sum + x);
                paste(&d_g, self.d_raw.slice_mut(s![0, i, head, ..]));
            }
        }
        self.sums.iter_mut().zip(sums).for_each(|(to, sum)| *to = sum);
    }
}
