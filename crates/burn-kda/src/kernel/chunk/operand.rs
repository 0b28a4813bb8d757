//! Matrix products of a cube, on tensor cores or as they would be.

use cubecl::prelude::*;

use crate::kernel::plan::ChunkPlan;

/// Rows and columns of the tiles that a plane multiplies.
pub(in crate::kernel) const TILE: usize = 16;

/// A matrix in shared memory, row by row, each number as the sum of a high and a low bf16: 16 significant bits.
///
/// Without tensor cores both are the halves of one word in `high`.
#[derive(CubeType)]
pub(in crate::kernel) struct Operand<E: Float> {
    high: Shared<[E]>,
    low: Shared<[E]>,
    #[cube(comptime)]
    stride: usize,
}

#[cube]
impl<E: Float> Operand<E> {
    pub fn new(#[comptime] rows: usize, #[comptime] columns: usize, #[comptime] plan: ChunkPlan) -> Operand<E> {
        let stride = comptime!(plan.operand_stride(columns));
        Operand::<E> {
            high: Shared::new_aligned_slice(comptime!(rows * stride), ALIGNMENT),
            low: Shared::new_aligned_slice(comptime!(if plan.tensor_cores { rows * stride } else { 1 }), ALIGNMENT),
            stride,
        }
    }

    pub fn put(&mut self, row: usize, column: usize, value: f32, #[comptime] plan: ChunkPlan) {
        let place = row * self.stride + column;
        if comptime!(plan.tensor_cores) {
            let high = E::cast_from(value);
            self.high[place] = high;
            self.low[place] = E::cast_from(value - f32::cast_from(high));
        } else {
            let high = bf16_bits(value);
            let low = bf16_bits(value - f32::reinterpret(high));
            self.high[place] = E::cast_from(f32::reinterpret(high | (low >> 16u32)));
        }
    }
}

/// What a tensor core wants of the address of a tile, in bytes.
pub(in crate::kernel) const ALIGNMENT: usize = 32;

/// The nearest bf16 number, as the bits of an f32.
#[cube]
fn bf16_bits(value: f32) -> u32 {
    let bits = u32::reinterpret(value);
    (bits + 0x7fffu32 + ((bits >> 16u32) & 1u32)) & 0xffff_0000u32
}

/// How the factors of a product lie, and what becomes of what was there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::kernel) struct Layout {
    left_transposed: bool,
    right_transposed: bool,
    lower: bool,
    adds: bool,
}

impl Layout {
    pub const PLAIN: Self = Self { left_transposed: false, right_transposed: false, lower: false, adds: false };

    /// Rows of the left factor are columns of its operand.
    pub const fn left_transposed(self) -> Self {
        Self { left_transposed: true, ..self }
    }

    /// Rows of the right factor are columns of its operand.
    pub const fn right_transposed(self) -> Self {
        Self { right_transposed: true, ..self }
    }

    /// The left operand is zero above its diagonal.
    pub const fn lower(self) -> Self {
        Self { lower: true, ..self }
    }

    /// The product is added to what is there.
    pub const fn added(self) -> Self {
        Self { adds: true, ..self }
    }
}

/// `left right`, of `tiles` rows, columns and inner tiles, to `out` in rows of `stride` numbers: the work of a whole
/// cube, tile by tile dealt out to its planes.
#[cube]
pub(in crate::kernel) fn product<E: Float>(
    left: &Operand<E>,
    right: &Operand<E>,
    out: &mut [f32],
    #[comptime] stride: usize,
    #[comptime] tiles: (usize, usize, usize),
    #[comptime] layout: Layout,
    #[comptime] plan: ChunkPlan,
) {
    let (rows, columns, inner) = comptime!(tiles);
    for n in range_stepped(plane(plan), comptime!(rows * columns), comptime!(plan.planes())) {
        let (i, j) = (n / columns, n % columns);
        let mut from = 0usize.runtime();
        let mut to = inner.runtime();
        if comptime!(layout.lower && layout.left_transposed) {
            from = i;
        } else if comptime!(layout.lower) {
            to = i + 1;
        }
        let place = i * comptime!(TILE * stride) + j * TILE;
        tile_product(left, right, (i, j), (from, to), out, place, stride, layout, plan);
    }
}

/// One tile of a product, by one plane: tile `(i, j)` of `left right` over the tiles `from..to` of the inner dimension, to
/// `out` from `place` on.
///
/// Without tensor cores each unit has some elements of the tile and takes the same three products of them.
#[cube]
pub(in crate::kernel) fn tile_product<E: Float>(
    left: &Operand<E>,
    right: &Operand<E>,
    tile: (usize, usize),
    inner: (usize, usize),
    out: &mut [f32],
    place: usize,
    #[comptime] stride: usize,
    #[comptime] layout: Layout,
    #[comptime] plan: ChunkPlan,
) {
    let (i, j) = tile;
    let (from, to) = inner;
    let (left_row, left_inner) = comptime!(strides(left.stride, layout.left_transposed));
    let (right_inner, right_column) = comptime!(strides(right.stride, layout.right_transposed));
    if comptime!(plan.tensor_cores) {
        let end = out.len();
        let mut sum = cmma::Matrix::<f32>::from_value(
            cmma::MatrixIdent::Accumulator,
            TILE,
            TILE,
            TILE,
            cmma::MatrixLayout::Undefined,
            0.0f32,
        );
        if comptime!(layout.adds) {
            cmma::load_with_layout(&mut sum, &out[place..end], stride as u32, cmma::MatrixLayout::RowMajor);
        }
        for n in from..to {
            let a = (i * left_row + n * left_inner) * TILE;
            let b = (n * right_inner + j * right_column) * TILE;
            let a_high = fragment(&left.high, a, cmma::MatrixIdent::A, left.stride, layout.left_transposed);
            let a_low = fragment(&left.low, a, cmma::MatrixIdent::A, left.stride, layout.left_transposed);
            let b_high = fragment(&right.high, b, cmma::MatrixIdent::B, right.stride, layout.right_transposed);
            let b_low = fragment(&right.low, b, cmma::MatrixIdent::B, right.stride, layout.right_transposed);
            cmma::execute(&a_low, &b_high, &sum, &sum);
            cmma::execute(&a_high, &b_low, &sum, &sum);
            cmma::execute(&a_high, &b_high, &sum, &sum);
        }
        cmma::store(&mut out[place..end], &sum, stride as u32, cmma::MatrixLayout::RowMajor);
    } else {
        let unit = UNIT_POS as usize % plan.plane;
        for e in range_stepped(unit, comptime!(TILE * TILE), plan.plane) {
            let (row, column) = (e / TILE, e % TILE);
            let at = place + row * stride + column;
            let mut sum = 0.0f32;
            if comptime!(layout.adds) {
                sum = out[at];
            }
            for n in from * TILE..to * TILE {
                let a = u32::reinterpret(f32::cast_from(left.high[(i * TILE + row) * left_row + n * left_inner]));
                let b =
                    u32::reinterpret(f32::cast_from(right.high[n * right_inner + (j * TILE + column) * right_column]));
                let (a_high, b_high) = (high_of(a), high_of(b));
                sum = fma(low_of(a), b_high, sum);
                sum = fma(a_high, low_of(b), sum);
                sum = fma(a_high, b_high, sum);
            }
            out[at] = sum;
        }
    }
}

#[cube]
fn high_of(bits: u32) -> f32 {
    f32::reinterpret(bits & 0xffff_0000u32)
}

#[cube]
fn low_of(bits: u32) -> f32 {
    f32::reinterpret(bits << 16u32)
}

/// From one row to the next and from one column to the next.
fn strides(stride: usize, transposed: bool) -> (usize, usize) {
    if transposed { (1, stride) } else { (stride, 1) }
}

#[cube]
fn fragment<E: Float>(
    from: &Shared<[E]>,
    place: usize,
    #[comptime] ident: cmma::MatrixIdent,
    #[comptime] stride: usize,
    #[comptime] transposed: bool,
) -> cmma::Matrix<E> {
    let layout = comptime!(if transposed { cmma::MatrixLayout::ColMajor } else { cmma::MatrixLayout::RowMajor });
    cmma::Matrix::<E>::from_slice(ident, TILE, TILE, TILE, layout, &from[place..], stride as u32)
}

/// The plane of this unit, in its cube.
#[cube]
pub(in crate::kernel) fn plane(#[comptime] plan: ChunkPlan) -> usize {
    UNIT_POS as usize / plan.plane
}
