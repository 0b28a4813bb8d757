//! Sums by token, for contractions over the columns of a block.

use pulp::Simd;

use super::Real;
use super::chunk::CHUNK;
use super::rows::Aligned;
use super::tile::{Pair, contract};

/// Numbers `[rows, tokens, group]` as [`contract`] takes them, for the tokens of a chunk. A group is the columns that share a
/// broadcast, [`Real::GROUP`]: a row has values of so many columns, or parts of a sum over columns.
pub(super) struct ByToken<T> {
    pub numbers: Aligned<T>,
    rows: usize,
}

impl<T: Real> ByToken<T> {
    /// Of a row: 128 bytes, which are whole vectors of every machine.
    const WIDTH: usize = CHUNK * T::GROUP;

    /// Sums in so many rows.
    pub fn sums(rows: usize) -> Self {
        Self { numbers: Aligned::zeros(rows * Self::WIDTH), rows }
    }

    /// Columns of a block.
    pub fn columns<S: Simd>() -> Self {
        Self::sums(2 * T::lanes::<S>() / T::GROUP)
    }

    /// Takes in the columns of each token.
    #[inline(always)]
    pub fn transpose<S: Simd>(&mut self, values: &[Pair<T::Vector<S>>; CHUNK]) {
        for (i, value) in values.iter().enumerate() {
            let columns = T::scalars::<S>(&value.0).chunks_exact(T::GROUP);
            for (row, columns) in self.numbers.chunks_exact_mut(Self::WIDTH).zip(columns) {
                row[i * T::GROUP..][..T::GROUP].copy_from_slice(columns);
            }
        }
    }

    /// Adds the products of the rows of a block with `columns`, summed over its columns.
    #[inline(always)]
    pub fn add<S: Simd>(&mut self, simd: S, block: &[Pair<T::Vector<S>>], columns: &Self) {
        let (columns, sums) = (T::vectors::<S>(&columns.numbers), T::vectors_mut::<S>(&mut self.numbers));
        match Self::WIDTH / T::lanes::<S>() {
            2 => contract::<S, T, 4, 2>(simd, block, columns.as_chunks().0, sums.as_chunks_mut().0),
            4 => contract::<S, T, 2, 4>(simd, block, columns.as_chunks().0, sums.as_chunks_mut().0),
            8 => contract::<S, T, 1, 8>(simd, block, columns.as_chunks().0, sums.as_chunks_mut().0),
            vectors => unreachable!("{vectors} vectors of 16, 32 or 64 bytes"),
        }
    }

    /// The rows of each token, `[CHUNK, rows]`, their parts added up; there are whole groups of rows.
    #[inline(always)]
    pub fn rows(&self, to: &mut [T]) {
        for (r, rows) in self.numbers.chunks_exact(T::GROUP * Self::WIDTH).enumerate() {
            for i in 0..CHUNK {
                let to = &mut to[i * self.rows + r * T::GROUP..][..T::GROUP];
                T::group_sums(&rows[i * T::GROUP..], Self::WIDTH, to);
            }
        }
    }
}
