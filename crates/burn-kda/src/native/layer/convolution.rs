//! Causal depthwise convolution with silu, carried state and the norm of the heads.

use std::ops::Range;

use ndarray::{Array1, Array2, Array3, ArrayView1, ArrayView2, ArrayView3, ArrayViewMut2, ArrayViewMut3, Axis, s};
use pulp::Simd;

use super::activation::{sigmoid, sigmoids};
use super::{WORK, add_products, by_span, count, dot, spans, total};
use crate::native::Real;
use crate::native::pages::zeros;
use crate::native::rows::{copy, paste};
use crate::native::work::{Work, cut, run_all};
use crate::plain::L2_EPS;

/// Channels at a time where there are no heads, and at least where there are: what tokens share stays in the first cache.
const CHANNELS: usize = 128;

pub(crate) struct Convolution<'a, T> {
    /// `[B, T, D]`.
    pub x: ArrayView3<'a, T>,
    /// `[D, 1, W]`.
    pub weight: ArrayView3<'a, T>,
    /// `[D]`.
    pub bias: Option<ArrayView1<'a, T>>,
    /// `[B, D, W - 1]`.
    pub state: Option<ArrayView3<'a, T>>,
    /// As [`ConvParams::head_dim`](crate::ConvParams::head_dim).
    pub head_dim: Option<usize>,
}

pub(crate) struct ConvolutionGradients<T> {
    pub x: Array3<T>,
    pub weight: Array3<T>,
    pub bias: Option<Array1<T>>,
    pub state: Option<Array3<T>>,
}

impl<T: Real> Convolution<'_, T> {
    /// Taps before the last.
    fn past(&self) -> usize {
        self.weight.dim().2 - 1
    }

    /// Channels at a time: whole heads.
    fn block(&self) -> usize {
        self.head_dim.map_or(CHANNELS, |dim| dim * CHANNELS.div_ceil(dim))
    }

    fn blocks(&self) -> impl Iterator<Item = Range<usize>> + use<T> {
        let (channels, block) = (self.x.dim().2, self.block());
        (0..channels).step_by(block).map(move |start| start..channels.min(start + block))
    }

    /// The taps, oldest first, and the bias, each for all channels: `[W + 1, D]`.
    fn taps(&self) -> Array2<T> {
        let (_, _, channels) = self.x.dim();
        let width = self.past() + 1;
        let mut taps = Array2::zeros([width + 1, channels]);
        taps.slice_mut(s![..width, ..]).assign(&self.weight.slice(s![.., 0, ..]).t());
        if let Some(bias) = self.bias {
            taps.row_mut(width).assign(&bias);
        }
        taps
    }

    /// Number `n` of the inputs that begin with the state, some channels of it; none if it is zeros.
    fn input(&self, b: usize, n: usize, channels: Range<usize>) -> Option<ArrayView1<'_, T>> {
        match n.checked_sub(self.past()) {
            Some(t) => Some(self.x.slice(s![b, t, channels])),
            None => self.state.as_ref().map(|state| state.slice(s![b, channels, n])),
        }
    }

    /// The inputs `numbers`, row by row; zeros after the last.
    #[inline(always)]
    fn gather(&self, b: usize, numbers: Range<usize>, channels: Range<usize>, rows: &mut [T]) {
        let end = self.past() + self.x.dim().1;
        for (n, row) in numbers.zip(rows.chunks_exact_mut(channels.len())) {
            match Some(n).filter(|&n| n < end).and_then(|n| self.input(b, n, channels.clone())) {
                Some(input) => copy(input, row),
                None => row.fill(T::zero()),
            }
        }
    }
}

/// The result `[B, T, D]`, and the next state.
pub(crate) fn convolution<T: Real>(inputs: &Convolution<T>) -> [Array3<T>; 2] {
    let (batch, time, channels) = inputs.x.dim();
    let past = inputs.past();
    let taps = inputs.taps();
    let mut y = zeros([batch, time, channels]);
    let tasks = spans(batch, time).zip(by_span(&mut y)).map(|((b, tokens), y)| Forward {
        inputs,
        taps: taps.view(),
        b,
        tokens,
        y: y.index_axis_move(Axis(0), 0),
    });
    run_all(tasks.collect(), batch * time * channels * WORK);

    let mut next = Array3::zeros([batch, channels, past]);
    for b in 0..batch {
        for j in 0..past {
            if let Some(input) = inputs.input(b, time + j, 0..channels) {
                next.slice_mut(s![b, .., j]).assign(&input);
            }
        }
    }
    [y, next]
}

struct Forward<'a, 'i, T> {
    inputs: &'a Convolution<'i, T>,
    taps: ArrayView2<'a, T>,
    b: usize,
    tokens: Range<usize>,
    y: ArrayViewMut2<'a, T>,
}

impl<T: Real> Work for Forward<'_, '_, T> {
    #[inline(always)]
    fn run<S: Simd, const FMA: bool>(mut self, simd: S) {
        let past = self.inputs.past();
        let rows = self.tokens.len() + past;
        let mut gathered = vec![T::zero(); rows * self.inputs.block()];
        let mut row = vec![T::zero(); self.inputs.block()];
        for channels in self.inputs.blocks() {
            let block = channels.len();
            let taps = Taps::new(self.taps, channels.clone());
            self.inputs.gather(self.b, self.tokens.start..self.tokens.start + rows, channels.clone(), &mut gathered);
            for (t, mut y) in self.y.rows_mut().into_iter().enumerate() {
                let z = &mut row[..block];
                taps.apply::<FMA>(&gathered[t * block..], z);
                z.iter_mut().for_each(|z| *z = *z * sigmoid::<T, FMA>(*z));
                if let Some(dim) = self.inputs.head_dim {
                    for head in z.chunks_exact_mut(dim) {
                        let norm = norm(dot(simd, head, head));
                        head.iter_mut().for_each(|x| *x = *x / norm);
                    }
                }
                paste(z, y.slice_mut(s![channels.clone()]));
            }
        }
    }
}

/// From the sum of the squares of a head.
#[inline(always)]
fn norm<T: Real>(square: T) -> T {
    (square + T::from(L2_EPS).expect("a float")).sqrt()
}

/// Of some channels.
struct Taps<T> {
    /// `[W + 1, block]`
    rows: Vec<T>,
    block: usize,
}

impl<T: Real> Taps<T> {
    fn new(taps: ArrayView2<T>, channels: Range<usize>) -> Self {
        let block = channels.len();
        let mut rows = vec![T::zero(); taps.nrows() * block];
        for (tap, row) in taps.rows().into_iter().zip(rows.chunks_exact_mut(block)) {
            copy(tap.slice(s![channels.clone()]), row);
        }
        Self { rows, block }
    }

    fn split(&self) -> (std::slice::ChunksExact<'_, T>, &[T]) {
        let (taps, bias) = self.rows.split_at(self.rows.len() - self.block);
        (taps.chunks_exact(self.block), bias)
    }

    /// What silu is taken of for the token whose oldest input is first in `inputs`.
    #[inline(always)]
    fn apply<const FMA: bool>(&self, inputs: &[T], z: &mut [T]) {
        let (taps, bias) = self.split();
        z.fill(T::zero());
        for (tap, input) in taps.zip(inputs.chunks_exact(self.block)) {
            add_products::<T, FMA>(z, tap, input);
        }
        z.iter_mut().zip(bias).for_each(|(z, &bias)| *z = *z + bias);
    }
}

/// From the cotangents of the result and of the next state; a missing one is zero.
pub(crate) fn convolution_gradients<T: Real>(
    inputs: &Convolution<T>,
    d_y: Option<ArrayView3<T>>,
    d_next: Option<ArrayView3<T>>,
) -> ConvolutionGradients<T> {
    let (batch, time, channels) = inputs.x.dim();
    let past = inputs.past();
    let taps = inputs.taps();
    let mut d_x = zeros([batch, time, channels]);
    let mut sums = Array3::zeros([count(batch, time), past + 2, channels]);
    // Of every input of the state, or of none.
    let mut d_state = inputs.state.map(|_| Array3::zeros([batch, channels, past]));
    {
        let mut of_states = d_state.as_mut().map(|d_state| cut(d_state.view_mut(), Axis(0), 1));
        let tasks = spans(batch, time).zip(by_span(&mut d_x)).zip(cut(sums.view_mut(), Axis(0), 1)).map(
            |(((b, tokens), d_x), sums)| Backward {
                inputs,
                taps: taps.view(),
                b,
                d_y: d_y.as_ref().map(|d_y| d_y.view()),
                d_next: d_next.as_ref().map(|d_next| d_next.view()),
                d_state: of_states.as_mut().filter(|_| tokens.start == 0).and_then(Iterator::next),
                tokens,
                d_x: d_x.index_axis_move(Axis(0), 0),
                sums: sums.index_axis_move(Axis(0), 0),
            },
        );
        run_all(tasks.collect(), 2 * batch * time * channels * WORK);
    }
    let sums = total(&sums);
    let weight = sums.slice(s![..=past, ..]).t().to_owned().insert_axis(Axis(1));
    ConvolutionGradients {
        x: d_x,
        weight: weight.as_standard_layout().into_owned(),
        bias: inputs.bias.map(|_| sums.row(past + 1).to_owned()),
        state: d_state,
    }
}

struct Backward<'a, 'i, T> {
    inputs: &'a Convolution<'i, T>,
    taps: ArrayView2<'a, T>,
    b: usize,
    tokens: Range<usize>,
    d_y: Option<ArrayView3<'a, T>>,
    d_next: Option<ArrayView3<'a, T>>,
    /// `[1, D, W - 1]`, of the first span.
    d_state: Option<ArrayViewMut3<'a, T>>,
    d_x: ArrayViewMut2<'a, T>,
    /// Of the taps, then of the bias.
    sums: ArrayViewMut2<'a, T>,
}

impl<T: Real> Work for Backward<'_, '_, T> {
    #[inline(always)]
    fn run<S: Simd, const FMA: bool>(mut self, simd: S) {
        let (past, block) = (self.inputs.past(), self.inputs.block());
        // The tokens after the span that read its inputs, too.
        let rows = self.tokens.len() + past;
        let numbers = self.tokens.start..self.tokens.start + rows + past;
        let mut gathered = vec![T::zero(); (rows + past) * block];
        let mut d_z = vec![T::zero(); rows * block];
        let [mut z, mut value, mut d_input] = [(); 3].map(|()| vec![T::zero(); block]);
        let mut d_taps = vec![T::zero(); (past + 2) * block];
        for channels in self.inputs.blocks() {
            let block = channels.len();
            let taps = Taps::new(self.taps, channels.clone());
            let [z, value, d_input] = [&mut z, &mut value, &mut d_input].map(|row| &mut row[..block]);
            self.inputs.gather(self.b, numbers.clone(), channels.clone(), &mut gathered);
            for (r, d_z) in d_z.chunks_exact_mut(block).take(rows).enumerate() {
                let Some(d_y) = self.d_y.filter(|d_y| self.tokens.start + r < d_y.dim().1) else {
                    d_z.fill(T::zero());
                    continue;
                };
                copy(d_y.slice(s![self.b, self.tokens.start + r, channels.clone()]), d_z);
                taps.apply::<FMA>(&gathered[r * block..], z);
                if let Some(dim) = self.inputs.head_dim {
                    value.iter_mut().zip(&*z).for_each(|(value, &z)| *value = z * sigmoid::<T, FMA>(z));
                    for (value, d_value) in value.chunks_exact(dim).zip(d_z.chunks_exact_mut(dim)) {
                        through_norm(simd, value, d_value);
                    }
                }
                for (d_z, &z) in d_z.iter_mut().zip(&*z) {
                    let (open, closed) = sigmoids::<T, FMA>(z);
                    *d_z = *d_z * open * (T::one() + z * closed);
                }
            }
            let d_z = &d_z[..rows * block];

            d_taps.fill(T::zero());
            for t in 0..self.tokens.len() {
                let d_z = &d_z[t * block..][..block];
                let (of_taps, of_bias) = d_taps[..(past + 2) * block].split_at_mut((past + 1) * block);
                for (sum, input) in of_taps.chunks_exact_mut(block).zip(gathered[t * block..].chunks_exact(block)) {
                    add_products::<T, FMA>(sum, input, d_z);
                }
                of_bias.iter_mut().zip(d_z).for_each(|(sum, &x)| *sum = *sum + x);
            }
            for (sum, row) in self.sums.rows_mut().into_iter().zip(d_taps.chunks_exact(block)) {
                paste(row, { sum }.slice_mut(s![channels.clone()]));
            }

            // The inputs of the state before the first span, then those of the span.
            let first = if self.d_state.is_some() { 0 } else { past };
            for i in first..rows {
                d_input.fill(T::zero());
                let (taps, _) = taps.split();
                for (j, tap) in taps.enumerate().take(i + 1) {
                    add_products::<T, FMA>(d_input, tap, &d_z[(i - j) * block..][..block]);
                }
                let kept = (self.tokens.start + i).checked_sub(self.inputs.x.dim().1);
                if let Some((d_next, j)) = self.d_next.zip(kept) {
                    let d_next = d_next.slice(s![self.b, channels.clone(), j]);
                    d_input.iter_mut().zip(d_next).for_each(|(sum, &x)| *sum = *sum + x);
                }
                match (i.checked_sub(past), &mut self.d_state) {
                    (Some(t), _) => paste(d_input, self.d_x.slice_mut(s![t, channels.clone()])),
                    (None, Some(d_state)) => paste(d_input, d_state.slice_mut(s![0, channels.clone(), i])),
                    (None, None) => {}
                }
            }
        }
    }
}

/// From the cotangent of a normalised head to that of the head.
#[inline(always)]
fn through_norm<S: Simd, T: Real>(simd: S, value: &[T], cotangent: &mut [T]) {
    let norm = norm(dot(simd, value, value));
    let along = dot(simd, value, cotangent) / (norm * norm);
    for (cotangent, &value) in cotangent.iter_mut().zip(value) {
        *cotangent = (*cotangent - value * along) / norm;
    }
}
