//! Sums by token, for contractions over the columns of a block.

use pulp::Simd;

use super::Real;
use super::chunk::CHUNK;
use super::rows::Aligned;
use super::tile::{Pair, contract};

/// Numbers `[rows, tokens, group]` as [`contract`] takes them, for the tokens of a chunk. A group is the columns that share a
/// vector, [`Real::group`]: a row has values of so many columns, or parts of a sum over columns.
pub(super) struct ByToken<T> {
    pub numbers: Aligned<T>,
    rows: usize,
}

impl<T: Real> ByToken<T> {
    /// Sums in so many rows.
    pub fn sums<S: Simd>(rows: usize) -> Self {
        Self { numbers: Aligned::zeros(rows * Self::vectors::<S>() * T::lanes::<S>()), rows }
    }

    /// Columns of a block.
    pub fn columns<S: Simd>() -> Self {
        Self::sums::<S>(2 * T::lanes::<S>() / T::group::<S>())
    }

    /// Of a row; whole ones.
    fn vectors<S: Simd>() -> usize {
        (CHUNK * T::group::<S>()).div_ceil(T::lanes::<S>())
    }

    /// Takes in the columns of each token.
    #[inline(always)]
    pub fn transpose<S: Simd>(&mut self, values: &[Pair<T::Vector<S>>; CHUNK]) {
        let (group, width) = (T::group::<S>(), Self::vectors::<S>() * T::lanes::<S>());
        for (i, value) in values.iter().enumerate() {
            let columns = T::scalars::<S>(&value.0).chunks_exact(group);
            for (row, columns) in self.numbers.chunks_exact_mut(width).zip(columns) {
                row[i * group..][..group].copy_from_slice(columns);
            }
        }
    }

    /// Adds the products of the rows of a block with `columns`, summed over its columns.
    #[inline(always)]
    pub fn add<S: Simd>(&mut self, simd: S, block: &[Pair<T::Vector<S>>], columns: &Self) {
        let (columns, sums) = (T::vectors::<S>(&columns.numbers), T::vectors_mut::<S>(&mut self.numbers));
        match Self::vectors::<S>() {
            1 => contract::<S, T, 8, 1>(simd, block, columns.as_chunks().0, sums.as_chunks_mut().0),
            2 => contract::<S, T, 4, 2>(simd, block, columns.as_chunks().0, sums.as_chunks_mut().0),
            4 => contract::<S, T, 2, 4>(simd, block, columns.as_chunks().0, sums.as_chunks_mut().0),
            _ => contract::<S, T, 1, 8>(simd, block, columns.as_chunks().0, sums.as_chunks_mut().0),
        }
    }

    /// The rows of each token, `[CHUNK, rows]`, their parts added up; there are whole chunks of rows.
    #[inline(always)]
    pub fn rows<S: Simd>(&self, to: &mut [T]) {
        let (group, width) = (T::group::<S>(), Self::vectors::<S>() * T::lanes::<S>());
        for (r, rows) in self.numbers.chunks_exact(CHUNK * width).enumerate() {
            let mut square = [[T::zero(); CHUNK]; CHUNK];
            for (i, row) in rows.chunks_exact(width).enumerate() {
                for (to, parts) in square.iter_mut().zip(row[..CHUNK * group].chunks_exact(group)) {
                    to[i] = parts.iter().fold(T::zero(), |sum, &part| sum + part);
                }
            }
            for (to, row) in to.chunks_exact_mut(self.rows).zip(square) {
                to.as_chunks_mut::<CHUNK>().0[r] = row;
            }
        }
    }
}
