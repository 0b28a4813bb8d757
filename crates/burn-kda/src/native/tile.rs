//! Small matrix products, a tile of the result in registers.

use pulp::Simd;

use super::Real;

/// Rows of a tile of the state.
const ROWS: usize = 4;

/// Rows of a tile of one column vector.
const MANY: usize = 8;

/// Of a block of columns; a vector that crosses a cache line would cost twice.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Pair<V>(pub [V; 2]);

impl<V: Copy> Pair<V> {
    /// `self + coefficient x`.
    #[inline(always)]
    pub fn add<S: Simd, T: Real<Vector<S> = V>>(self, simd: S, coefficient: T, x: Self) -> Self {
        let (Self([a, b]), Self([x, y])) = (self, x);
        let coefficient = T::splat(simd, coefficient);
        Self([T::vector_mul_add(simd, coefficient, x, a), T::vector_mul_add(simd, coefficient, y, b)])
    }
}

/// `dim` padded to whole vectors and tiles.
pub(super) fn padded<S: Simd, T: Real>(dim: usize) -> usize {
    dim.next_multiple_of(T::lanes::<S>().max(MANY))
}

/// `R` rows `[R, K]`, `stride` apart, times a block `[K, 2 vectors]`.
#[inline(always)]
pub(super) fn multiply<S: Simd, T: Real, const R: usize>(
    simd: S,
    rows: &[T],
    stride: usize,
    block: &[Pair<T::Vector<S>>],
) -> [Pair<T::Vector<S>>; R] {
    let width = block.len();
    let mut split = [rows; R];
    for (r, row) in split.iter_mut().enumerate() {
        *row = &rows[r * stride..][..width];
    }
    let mut sums = [Pair([T::splat(simd, T::zero()); 2]); R];
    for d in 0..width {
        for r in 0..R {
            sums[r] = sums[r].add::<S, T>(simd, split[r][d], block[d]);
        }
    }
    sums
}

/// `block <- diag(decay) block + rows^T u` for as many rows `[C, K]` as `u` has, `[C, 2 vectors]`.
#[inline(always)]
pub(super) fn update<S: Simd, T: Real>(
    simd: S,
    decay: &[T],
    rows: &[T],
    u: &[Pair<T::Vector<S>>],
    block: &mut [Pair<T::Vector<S>>],
) {
    let width = block.len();
    let (tiles, _) = block.as_chunks_mut::<ROWS>();
    for (t, (tile, decay)) in tiles.iter_mut().zip(decay.as_chunks::<ROWS>().0).enumerate() {
        // What is new first, so that the state is rounded once.
        let mut x = [Pair([T::splat(simd, T::zero()); 2]); ROWS];
        for (&u, row) in u.iter().zip(rows.chunks_exact(width)) {
            let row = row.as_chunks::<ROWS>().0[t];
            for r in 0..ROWS {
                x[r] = x[r].add::<S, T>(simd, row[r], u);
            }
        }
        for r in 0..ROWS {
            tile[r] = x[r].add::<S, T>(simd, decay[r], tile[r]);
        }
    }
}

/// `sums[d] += sum_v block[d][v] columns[v]` for as many rows `[2 vectors, n]` of columns as a block has columns, and
/// `n` whole vectors: the columns of the block are summed over, as broadcasts.
#[inline(always)]
pub(super) fn contract<S: Simd, T: Real>(
    simd: S,
    block: &[Pair<T::Vector<S>>],
    columns: &[T::Vector<S>],
    sums: &mut [T::Vector<S>],
) {
    let count = columns.len() / (2 * T::lanes::<S>());
    if count % 2 == 0 {
        for first in (0..count).step_by(2) {
            contract_tiles::<S, T, ROWS, 2>(simd, block, &columns[first..], &mut sums[first..], count);
        }
    } else {
        for first in 0..count {
            contract_tiles::<S, T, MANY, 1>(simd, block, &columns[first..], &mut sums[first..], count);
        }
    }
}

#[inline(always)]
fn contract_tiles<S: Simd, T: Real, const R: usize, const M: usize>(
    simd: S,
    block: &[Pair<T::Vector<S>>],
    columns: &[T::Vector<S>],
    sums: &mut [T::Vector<S>],
    count: usize,
) {
    for (t, tile) in block.as_chunks::<R>().0.iter().enumerate() {
        let mut rows: [&[T]; R] = [&[]; R];
        for r in 0..R {
            rows[r] = T::scalars::<S>(&tile[r].0);
        }
        let mut x = [[T::splat(simd, T::zero()); M]; R];
        for r in 0..R {
            x[r].copy_from_slice(&sums[(t * R + r) * count..][..M]);
        }
        for (v, column) in columns.chunks(count).enumerate() {
            let column = column.first_chunk::<M>().expect("whole columns");
            for r in 0..R {
                let value = T::splat(simd, rows[r][v]);
                for (x, &column) in x[r].iter_mut().zip(column) {
                    *x = T::vector_mul_add(simd, value, column, *x);
                }
            }
        }
        for r in 0..R {
            sums[(t * R + r) * count..][..M].copy_from_slice(&x[r]);
        }
    }
}
