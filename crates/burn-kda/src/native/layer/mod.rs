//! What surrounds the operator in a layer, in one pass over memory each: the operator itself is a small part of a layer,
//! and tensor operations pass over each of these tensors ten to twenty times.
//!
//! A task has the tokens of a span of one batch row; what it leaves of the gradients of parameters is added up in f64,
//! in one order whatever the number of threads.

mod activation;
mod convolution;
mod gates;
mod norm;

pub(crate) use convolution::{Convolution, ConvolutionGradients, convolution, convolution_gradients};
pub(crate) use gates::{Gate, GateGradients, decay_gate, decay_gate_gradients};
pub(crate) use norm::{Norm, NormGradients, output_norm, output_norm_gradients};

use std::ops::Range;

use ndarray::{Array, ArrayBase, Axis, DataMut, Dimension, RemoveAxis};
use pulp::Simd;

use super::Real;
use super::work::cut;

/// Tokens of a task: few, since their sums are in the precision of the tensors.
const SPAN: usize = 32;

/// Multiply-adds that a number is counted as: an exponential and a division.
const WORK: usize = 24;

/// The spans of a batch, `(row, tokens)`.
fn spans(batch: usize, time: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    (0..batch).flat_map(move |b| (0..time).step_by(SPAN).map(move |start| (b, start..time.min(start + SPAN))))
}

fn count(batch: usize, time: usize) -> usize {
    batch * time.div_ceil(SPAN)
}

/// Of a tensor `[B, T, ..]`, in the order of [`spans`].
fn by_span<'a, T: 'a, S: DataMut<Elem = T>, D: Dimension>(
    tensor: &'a mut ArrayBase<S, D>,
) -> impl Iterator<Item = ndarray::ArrayViewMut<'a, T, D>> {
    cut(tensor.view_mut(), Axis(0), 1).flat_map(|row| cut(row, Axis(1), SPAN))
}

/// The sum over the first axis.
fn total<T: Real, D: RemoveAxis>(sums: &Array<T, D>) -> Array<T, D::Smaller> {
    let wide = sums.mapv(|x| x.to_f64().expect("a float"));
    wide.sum_axis(Axis(0)).mapv(|x| T::from(x).expect("a float"))
}

/// `a . b`
#[inline(always)]
fn dot<S: Simd, T: Real>(simd: S, a: &[T], b: &[T]) -> T {
    let [va, vb] = [a, b].map(T::vectors::<S>);
    let sum = va.iter().zip(vb).fold(T::splat(simd, T::zero()), |sum, (&a, &b)| T::vector_mul_add(simd, a, b, sum));
    let whole = va.len() * T::lanes::<S>();
    a[whole..].iter().zip(&b[whole..]).fold(T::total(simd, sum), |sum, (&a, &b)| sum + a * b)
}

/// `sums += a * b`, element by element.
#[inline(always)]
fn add_products<T: Real, const FMA: bool>(sums: &mut [T], a: &[T], b: &[T]) {
    for ((sum, &a), &b) in sums.iter_mut().zip(a).zip(b) {
        *sum = a.fma::<FMA>(b, *sum);
    }
}
