//! The output norm with its gate.

use std::ops::Range;

use ndarray::{Array1, Array2, Array4, ArrayView1, ArrayView4, ArrayViewMut1, ArrayViewMut4, Axis, s};
use pulp::Simd;

use super::activation::{sigmoid, sigmoids};
use super::{WORK, by_span, count, dot, spans, total};
use crate::native::Real;
use crate::native::pages::zeros;
use crate::native::rows::{copy, paste};
use crate::native::work::{Work, cut, run_all};

pub(crate) struct Norm<'a, T> {
    /// `[B, T, HV, V]`.
    pub o: ArrayView4<'a, T>,
    /// `[V]`.
    pub weight: ArrayView1<'a, T>,
    /// `[B, T, HV, V]`.
    pub gate: ArrayView4<'a, T>,
    pub eps: f64,
}

pub(crate) struct NormGradients<T> {
    pub o: Array4<T>,
    pub weight: Array1<T>,
    pub gate: Array4<T>,
}

impl<T: Real> Norm<'_, T> {
    /// Of a head, from the sum of its squares.
    #[inline(always)]
    fn rms(&self, square: T) -> T {
        let [eps, dim] = [self.eps, self.weight.len() as f64].map(|x| T::from(x).expect("a float"));
        (square / dim + eps).sqrt()
    }

    fn work(&self) -> usize {
        self.o.len() * WORK
    }
}

/// `[B, T, HV, V]`.
pub(crate) fn output_norm<T: Real>(norm: &Norm<T>) -> Array4<T> {
    let (batch, time, heads, dim) = norm.o.dim();
    let mut y = zeros([batch, time, heads, dim]);
    let tasks = spans(batch, time).zip(by_span(&mut y)).map(|((b, tokens), y)| Forward { norm, b, tokens, y });
    run_all(tasks.collect(), norm.work());
    y
}

struct Forward<'a, 'i, T> {
    norm: &'a Norm<'i, T>,
    b: usize,
    tokens: Range<usize>,
    y: ArrayViewMut4<'a, T>,
}

impl<T: Real> Work for Forward<'_, '_, T> {
    #[inline(always)]
    fn run<S: Simd, const FMA: bool>(mut self, simd: S) {
        let Norm { o, weight, gate, .. } = self.norm;
        let (_, _, heads, dim) = o.dim();
        let weight = weight.to_vec();
        let [mut x, mut row] = [(); 2].map(|()| vec![T::zero(); dim]);
        for (i, t) in self.tokens.enumerate() {
            for head in 0..heads {
                copy(o.slice(s![self.b, t, head, ..]), &mut x);
                copy(gate.slice(s![self.b, t, head, ..]), &mut row);
                let rms = self.norm.rms(dot(simd, &x, &x));
                for ((y, &x), &weight) in row.iter_mut().zip(&x).zip(&weight) {
                    *y = x / rms * weight * sigmoid::<T, FMA>(*y);
                }
                paste(&row, self.y.slice_mut(s![0, i, head, ..]));
            }
        }
    }
}

/// From the cotangent `[B, T, HV, V]` of the result.
pub(crate) fn output_norm_gradients<T: Real>(norm: &Norm<T>, d_y: ArrayView4<T>) -> NormGradients<T> {
    let (batch, time, heads, dim) = norm.o.dim();
    let [mut d_o, mut d_gate] = [(); 2].map(|()| zeros([batch, time, heads, dim]));
    let mut sums = Array2::zeros([count(batch, time), dim]);
    let of_spans = by_span(&mut d_o).zip(by_span(&mut d_gate)).zip(cut(sums.view_mut(), Axis(0), 1));
    let tasks = spans(batch, time).zip(of_spans).map(|((b, tokens), ((d_o, d_gate), sums))| Backward {
        norm,
        d_y: d_y.view(),
        b,
        tokens,
        d_o,
        d_gate,
        sums: sums.index_axis_move(Axis(0), 0),
    });
    run_all(tasks.collect(), 2 * norm.work());
    NormGradients { o: d_o, weight: total(&sums), gate: d_gate }
}

struct Backward<'a, 'i, T> {
    norm: &'a Norm<'i, T>,
    d_y: ArrayView4<'a, T>,
    b: usize,
    tokens: Range<usize>,
    d_o: ArrayViewMut4<'a, T>,
    d_gate: ArrayViewMut4<'a, T>,
    sums: ArrayViewMut1<'a, T>,
}

impl<T: Real> Work for Backward<'_, '_, T> {
    #[inline(always)]
    fn run<S: Simd, const FMA: bool>(mut self, simd: S) {
        let Norm { o, weight, gate, .. } = self.norm;
        let (_, _, heads, dim) = o.dim();
        let weight = weight.to_vec();
        let mean = T::one() / T::from(dim).expect("a float");
        let [mut x, mut row, mut d, mut sum] = [(); 4].map(|()| vec![T::zero(); dim]);
        for (i, t) in self.tokens.enumerate() {
            // By token, for the rounding.
            sum.fill(T::zero());
            for head in 0..heads {
                copy(o.slice(s![self.b, t, head, ..]), &mut x);
                copy(gate.slice(s![self.b, t, head, ..]), &mut row);
                copy(self.d_y.slice(s![self.b, t, head, ..]), &mut d);
                let rms = self.norm.rms(dot(simd, &x, &x));
                x.iter_mut().for_each(|x| *x = *x / rms);
                // `d` becomes the cotangent of the normalised output, `row` that of the gate.
                for (((&x, gate), d), (sum, &weight)) in
                    x.iter().zip(&mut row).zip(&mut d).zip(sum.iter_mut().zip(&weight))
                {
                    let (open, closed) = sigmoids::<T, FMA>(*gate);
                    let d_open = *d * open;
                    let along = d_open * x;
                    *sum = *sum + along;
                    *gate = along * weight * closed;
                    *d = d_open * weight;
                }
                let along = dot(simd, &d, &x) * mean;
                for (d, &x) in d.iter_mut().zip(&x) {
                    *d = (*d - x * along) / rms;
                }
                paste(&d, self.d_o.slice_mut(s![0, i, head, ..]));
                paste(&row, self.d_gate.slice_mut(s![0, i, head, ..]));
            }
            self.sums.iter_mut().zip(&sum).for_each(|(to, &sum)| *to = *to + sum);
        }
    }
}
