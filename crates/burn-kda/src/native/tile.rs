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

    /// `self - x`.
    #[inline(always)]
    pub fn sub<S: Simd, T: Real<Vector<S> = V>>(self, simd: S, x: Self) -> Self {
        let (Self([a, b]), Self([x, y])) = (self, x);
        Self([T::vector_sub(simd, a, x), T::vector_sub(simd, b, y)])
    }

    /// `self + a x`, lane by lane.
    #[inline(always)]
    pub fn add_product<S: Simd, T: Real<Vector<S> = V>>(self, simd: S, a: Self, x: Self) -> Self {
        let (Self(sum), Self(a), Self(x)) = (self, a, x);
        Self([T::vector_mul_add(simd, a[0], x[0], sum[0]), T::vector_mul_add(simd, a[1], x[1], sum[1])])
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
    let tiles = block.as_chunks_mut::<ROWS>().0.iter_mut().zip(decay.as_chunks::<ROWS>().0);
    for (t, (tile, decay)) in tiles.enumerate() {
        // What is new first, so that the state is rounded once.
        let new = outer::<S, T>(simd, rows, width, u, t);
        for r in 0..ROWS {
            tile[r] = new[r].add::<S, T>(simd, decay[r], tile[r]);
        }
    }
}

/// `block <- block diag(decay) + rows^T u`: as [`update`] where it is the columns that decay.
#[inline(always)]
pub(super) fn update_columns<S: Simd, T: Real>(
    simd: S,
    decay: Pair<T::Vector<S>>,
    rows: &[T],
    u: &[Pair<T::Vector<S>>],
    block: &mut [Pair<T::Vector<S>>],
) {
    let width = block.len();
    for (t, tile) in block.as_chunks_mut::<ROWS>().0.iter_mut().enumerate() {
        let new = outer::<S, T>(simd, rows, width, u, t);
        for r in 0..ROWS {
            tile[r] = new[r].add_product::<S, T>(simd, decay, tile[r]);
        }
    }
}

/// [`update_columns`] of a block to one elsewhere.
#[inline(always)]
pub(super) fn update_columns_to<S: Simd, T: Real>(
    simd: S,
    decay: Pair<T::Vector<S>>,
    rows: &[T],
    u: &[Pair<T::Vector<S>>],
    block: &[Pair<T::Vector<S>>],
    to: &mut [Pair<T::Vector<S>>],
) {
    let width = block.len();
    let tiles = block.as_chunks::<ROWS>().0.iter().zip(to.as_chunks_mut::<ROWS>().0);
    for (t, (tile, to)) in tiles.enumerate() {
        let new = outer::<S, T>(simd, rows, width, u, t);
        for r in 0..ROWS {
            to[r] = new[r].add_product::<S, T>(simd, decay, tile[r]);
        }
    }
}

/// The tile `t` of `rows^T u`.
#[inline(always)]
fn outer<S: Simd, T: Real>(
    simd: S,
    rows: &[T],
    width: usize,
    u: &[Pair<T::Vector<S>>],
    t: usize,
) -> [Pair<T::Vector<S>>; ROWS] {
    let mut sums = [Pair([T::splat(simd, T::zero()); 2]); ROWS];
    for (&u, row) in u.iter().zip(rows.chunks_exact(width)) {
        let row = row.as_chunks::<ROWS>().0[t];
        for r in 0..ROWS {
            sums[r] = sums[r].add::<S, T>(simd, row[r], u);
        }
    }
    sums
}

/// `sums[d] += sum_v block[d][v] columns[v]`: the columns of the block are summed over, as broadcasts of a
/// [group](Real::GROUP), times as many rows `columns` of `M` vectors.
#[inline(always)]
pub(super) fn contract<S: Simd, T: Real, const R: usize, const M: usize>(
    simd: S,
    block: &[Pair<T::Vector<S>>],
    columns: &[[T::Vector<S>; M]],
    sums: &mut [[T::Vector<S>; M]],
) {
    let columns = &columns[..2 * T::lanes::<S>() / T::GROUP]; // so many, as the compiler knows
    for (tile, sums) in block.as_chunks::<R>().0.iter().zip(sums.as_chunks_mut::<R>().0) {
        let mut rows: [&[T]; R] = [&[]; R];
        for r in 0..R {
            rows[r] = &T::scalars::<S>(&tile[r].0)[..columns.len() * T::GROUP];
        }
        let mut x = *sums;
        for (v, column) in columns.iter().enumerate() {
            for r in 0..R {
                let values = T::splat_group(simd, rows[r], v);
                for m in 0..M {
                    x[r][m] = T::vector_mul_add(simd, values, column[m], x[r][m]);
                }
            }
        }
        *sums = x;
    }
}
