//! Small matrix products, a tile of the result in registers.

use pulp::Simd;

use super::Real;

/// Rows of a tile of the state.
const ROWS: usize = 4;

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

    /// `coefficient self`.
    #[inline(always)]
    fn times<S: Simd, T: Real<Vector<S> = V>>(self, simd: S, coefficient: T) -> Self {
        let Self([a, b]) = self;
        let coefficient = T::splat(simd, coefficient);
        Self([T::vector_mul(simd, coefficient, a), T::vector_mul(simd, coefficient, b)])
    }
}

/// `dim` padded to whole vectors and tiles.
pub(super) fn padded<S: Simd, T: Real>(dim: usize) -> usize {
    dim.next_multiple_of(T::lanes::<S>().max(ROWS))
}

/// `R` rows `[R, K]` times a block `[K, 2 vectors]`.
#[inline(always)]
pub(super) fn multiply<S: Simd, T: Real, const R: usize>(
    simd: S,
    rows: &[T],
    block: &[Pair<T::Vector<S>>],
) -> [Pair<T::Vector<S>>; R] {
    let width = block.len();
    let mut split = [rows; R];
    for (r, row) in split.iter_mut().enumerate() {
        *row = &rows[r * width..][..width];
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
        let mut x = *tile;
        for r in 0..ROWS {
            x[r] = x[r].times::<S, T>(simd, decay[r]);
        }
        for (&u, row) in u.iter().zip(rows.chunks_exact(width)) {
            let row = row.as_chunks::<ROWS>().0[t];
            for r in 0..ROWS {
                x[r] = x[r].add::<S, T>(simd, row[r], u);
            }
        }
        *tile = x;
    }
}
