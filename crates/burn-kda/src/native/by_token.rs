//! Sums by token, for contractions over the columns of a block.

use pulp::Simd;

use super::Real;
use super::chunk::CHUNK;
use super::rows::Aligned;
use super::tile::{Pair, contract};

/// Of the tokens of a chunk, for a block of columns.
pub(super) type Values<T, S> = [Pair<<T as Real>::Vector<S>>; CHUNK];

/// Numbers `[rows, tokens]` as [`contract`] takes them: some tokens of all rows, then the next ones.
pub(super) struct ByToken<T> {
    pub numbers: Aligned<T>,
    rows: usize,
    /// Tokens that are passed together, a multiple of [`CHUNK`].
    together: usize,
}

impl<T: Real> ByToken<T> {
    pub fn zeros<S: Simd>(rows: usize, tokens: usize) -> Self {
        let padded = tokens.next_multiple_of(T::lanes::<S>());
        let together = (2 * T::lanes::<S>()).clamp(CHUNK, padded);
        Self { numbers: Aligned::zeros(rows * padded), rows, together }
    }

    /// The first number of a chunk of tokens.
    fn first(&self, chunk: usize) -> usize {
        let token = chunk * CHUNK;
        token / self.together * self.together * self.rows + token % self.together
    }

    /// Takes in the columns of each token of a chunk.
    #[inline(always)]
    pub fn transpose<S: Simd>(&mut self, chunk: usize, values: &Values<T, S>) {
        let (first, together) = (self.first(chunk), self.together);
        for (i, value) in values.iter().enumerate() {
            for (row, &x) in self.numbers[first..].chunks_mut(together).zip(T::scalars::<S>(&value.0)) {
                row[i] = x;
            }
        }
    }

    /// Adds the products of the rows of a block with `columns`, summed over its columns.
    #[inline(always)]
    pub fn add<S: Simd>(&mut self, simd: S, block: &[Pair<T::Vector<S>>], columns: &Self) {
        let (vectors, sums) = (T::vectors::<S>(&columns.numbers), T::vectors_mut::<S>(&mut self.numbers));
        let together = self.together / T::lanes::<S>();
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

    /// The rows of each token of a chunk, `[CHUNK, rows]`; there are whole chunks of rows.
    #[inline(always)]
    pub fn rows(&self, chunk: usize, to: &mut [T]) {
        for (r, rows) in
            self.numbers[self.first(chunk)..].chunks(CHUNK * self.together).take(self.rows / CHUNK).enumerate()
        {
            let mut square = [[T::zero(); CHUNK]; CHUNK];
            for (i, row) in rows.chunks(self.together).enumerate() {
                let row = row.first_chunk::<CHUNK>().expect("whole chunks");
                for (to, &x) in square.iter_mut().zip(row) {
                    to[i] = x;
                }
            }
            for (to, row) in to.chunks_exact_mut(self.rows).zip(square) {
                to.as_chunks_mut::<CHUNK>().0[r] = row;
            }
        }
    }
}
