//! A state in blocks of columns.

use ndarray::{ArrayView2, ArrayViewMut2};
use pulp::Simd;

use super::Real;
use super::rows::{copy, paste};
use super::tile::Pair;

/// A state as blocks of two vectors of columns, each `K` rows one after the other; the last one padded with zeros.
pub(super) struct State<T: Real, S: Simd> {
    pub width: usize,
    /// What the roundings of all decays so far have left out.
    pub carry: Vec<T>,
    pub blocks: Vec<Pair<T::Vector<S>>>,
    /// A row of a matrix.
    row: Vec<T>,
}

impl<T: Real, S: Simd> State<T, S> {
    pub fn zeros(simd: S, width: usize, columns: usize) -> Self {
        let count = columns.div_ceil(2 * T::lanes::<S>());
        Self {
            width,
            carry: vec![T::zero(); width],
            blocks: vec![Pair([T::splat(simd, T::zero()); 2]); width * count],
            row: vec![T::zero(); count * 2 * T::lanes::<S>()],
        }
    }

    #[inline(always)]
    pub fn load(&mut self, state: ArrayView2<T>) {
        for (d, values) in state.rows().into_iter().enumerate() {
            copy(values, &mut self.row[..values.len()]);
            let (pairs, _) = T::vectors::<S>(&self.row).as_chunks();
            for (block, &pair) in self.blocks.chunks_exact_mut(self.width).zip(pairs) {
                block[d].0 = pair;
            }
        }
    }

    #[inline(always)]
    pub fn store(&mut self, mut state: ArrayViewMut2<T>) {
        for (d, values) in state.rows_mut().into_iter().enumerate() {
            let (pairs, _) = T::vectors_mut::<S>(&mut self.row).as_chunks_mut();
            for (block, pair) in self.blocks.chunks_exact(self.width).zip(pairs) {
                *pair = block[d].0;
            }
            paste(&self.row[..values.len()], values);
        }
    }

    /// Takes in what the roundings of all decays have left out: the next call knows nothing of it.
    #[inline(always)]
    pub fn finish(&mut self, simd: S) {
        for block in self.blocks.chunks_exact_mut(self.width) {
            for (Pair(row), &carry) in block.iter_mut().zip(&self.carry) {
                *row = row.map(|x| T::vector_mul_add(simd, T::splat(simd, carry), x, x));
            }
        }
    }
}
