//! Sums by token, for contractions over the columns of a block.

use pulp::Simd;

use super::Real;
use super::chunk::CHUNK;
use super::rows::Aligned;
use super::tile::{Pair, contract};

/// Of the tokens of a chunk, for a block of columns.
pub(super) type Values<T, S> = [Pair<<T as Real>::Vector<S>>; CHUNK];

/// Numbers `[rows, tokens, group]` as [`contract`] takes them: some tokens of all rows, then the next ones. A group is the
/// columns that share a vector, [`Real::group`]: a row has values of so many columns, or parts of a sum over columns.
pub(super) struct ByToken<T> {
    pub numbers: Aligned<T>,
    rows: usize,
    /// Tokens that are passed together, a multiple of [`CHUNK`].
    together: usize,
}

impl<T: Real> ByToken<T> {
    /// Sums in so many rows.
    pub fn sums<S: Simd>(rows: usize, tokens: usize) -> Self {
        let (lanes, group) = (T::lanes::<S>(), T::group::<S>());
        let padded = (tokens * group).next_multiple_of(lanes) / group;
        let together = (2 * lanes / group).clamp(CHUNK, padded);
        Self { numbers: Aligned::zeros(rows * padded * group), rows, together }
    }

    /// Columns of a block.
    pub fn columns<S: Simd>(tokens: usize) -> Self {
        Self::sums::<S>(2 * T::lanes::<S>() / T::group::<S>(), tokens)
    }

    /// The first number of a chunk of tokens.
    fn first<S: Simd>(&self, chunk: usize) -> usize {
        let token = chunk * CHUNK;
        (token / self.together * self.together * self.rows + token % self.together) * T::group::<S>()
    }

    /// Takes in the columns of each token of a chunk.
    #[inline(always)]
    pub fn transpose<S: Simd>(&mut self, chunk: usize, values: &Values<T, S>) {
        let group = T::group::<S>();
        let (first, width) = (self.first::<S>(chunk), self.together * group);
        for (i, value) in values.iter().enumerate() {
            let columns = T::scalars::<S>(&value.0).chunks_exact(group);
            for (row, columns) in self.numbers[first..].chunks_mut(width).zip(columns) {
                row[i * group..][..group].copy_from_slice(columns);
            }
        }
    }

    /// Adds the products of the rows of a block with `columns`, summed over its columns.
    #[inline(always)]
    pub fn add<S: Simd>(&mut self, simd: S, block: &[Pair<T::Vector<S>>], columns: &Self) {
        let (vectors, sums) = (T::vectors::<S>(&columns.numbers), T::vectors_mut::<S>(&mut self.numbers));
        let together = self.together * T::group::<S>() / T::lanes::<S>();
        let (of_columns, of_sums) = (columns.rows * together, self.rows * together);
        for (columns, sums) in vectors.chunks_exact(of_columns).zip(sums.chunks_exact_mut(of_sums)) {
            match together {
                1 => contract::<S, T, 8, 1>(simd, block, columns.as_chunks().0, sums.as_chunks_mut().0),
                2 => contract::<S, T, 4, 2>(simd, block, columns.as_chunks().0, sums.as_chunks_mut().0),
                4 => contract::<S, T, 2, 4>(simd, block, columns.as_chunks().0, sums.as_chunks_mut().0),
                _ => contract::<S, T, 1, 8>(simd, block, columns.as_chunks().0, sums.as_chunks_mut().0),
            }
        }
    }

    /// The rows of each token of a chunk, `[CHUNK, rows]`, their parts added up; there are whole chunks of rows.
    #[inline(always)]
    pub fn rows<S: Simd>(&self, chunk: usize, to: &mut [T]) {
        let group = T::group::<S>();
        let width = self.together * group;
        for (r, rows) in
            self.numbers[self.first::<S>(chunk)..].chunks(CHUNK * width).take(self.rows / CHUNK).enumerate()
        {
            let mut square = [[T::zero(); CHUNK]; CHUNK];
            for (i, row) in rows.chunks(width).enumerate() {
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
