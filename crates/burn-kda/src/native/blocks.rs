//! A matrix in blocks of columns.

use ndarray::{ArrayView2, ArrayViewMut2, Axis};
use pulp::Simd;

use super::Real;
use super::rows::{Place, copy, paste};
use super::tile::Pair;

/// A matrix as blocks of two vectors of columns, each with its rows one after the other; columns and rows padded with zeros.
pub(super) struct Blocks<T: Real, S: Simd> {
    /// Rows, and those of the padding.
    pub height: usize,
    pub pairs: Vec<Pair<T::Vector<S>>>,
    /// A row of a matrix.
    row: Vec<T>,
}

impl<T: Real, S: Simd> Blocks<T, S> {
    pub fn zeros(simd: S, height: usize, columns: usize) -> Self {
        let count = columns.div_ceil(2 * T::lanes::<S>());
        Self {
            height,
            pairs: vec![Pair([T::splat(simd, T::zero()); 2]); height * count],
            row: vec![T::zero(); count * 2 * T::lanes::<S>()],
        }
    }

    /// Of the first rows.
    #[inline(always)]
    pub fn load(&mut self, matrix: ArrayView2<T>) {
        for (d, values) in matrix.rows().into_iter().enumerate() {
            copy(values, &mut self.row[..values.len()]);
            let (pairs, _) = T::vectors::<S>(&self.row).as_chunks();
            for (block, &pair) in self.pairs.chunks_exact_mut(self.height).zip(pairs) {
                block[d].0 = pair;
            }
        }
    }

    #[inline(always)]
    pub fn store(&mut self, mut matrix: ArrayViewMut2<impl Place<T>>) {
        for (d, values) in matrix.rows_mut().into_iter().enumerate() {
            let (pairs, _) = T::vectors_mut::<S>(&mut self.row).as_chunks_mut();
            for (block, pair) in self.pairs.chunks_exact(self.height).zip(pairs) {
                *pair = block[d].0;
            }
            paste(&self.row[..values.len()], values);
        }
    }

    /// Of a matrix whose first rows are the columns.
    #[inline(always)]
    pub fn load_columns(&mut self, matrix: ArrayView2<T>) {
        load_columns::<T, S>(matrix, self.pairs.chunks_exact_mut(self.height));
    }

    #[inline(always)]
    pub fn store_columns(&self, mut matrix: ArrayViewMut2<impl Place<T>>) {
        let rows = matrix.axis_chunks_iter_mut(Axis(0), 2 * T::lanes::<S>());
        for (mut rows, block) in rows.zip(self.pairs.chunks_exact(self.height)) {
            for (lane, mut row) in rows.rows_mut().into_iter().enumerate() {
                for (v, pair) in block[..row.len()].iter().enumerate() {
                    row[v].put(T::scalars::<S>(&pair.0)[lane]);
                }
            }
        }
    }
}

/// The first rows of a matrix as the columns of blocks.
#[inline(always)]
pub(super) fn load_columns<'a, T: Real, S: Simd>(
    matrix: ArrayView2<T>,
    blocks: impl Iterator<Item = &'a mut [Pair<T::Vector<S>>]>,
) {
    for (rows, block) in matrix.axis_chunks_iter(Axis(0), 2 * T::lanes::<S>()).zip(blocks) {
        for (lane, row) in rows.rows().into_iter().enumerate() {
            for (v, pair) in block[..row.len()].iter_mut().enumerate() {
                T::scalars_mut::<S>(&mut pair.0)[lane] = row[v];
            }
        }
    }
}
