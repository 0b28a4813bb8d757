//! Matrices on their way to shared memory, by all units of a cube.

use cubecl::prelude::*;

use super::channel::decay;
use super::operand::Operand;
use crate::kernel::element::beta_of;
use crate::kernel::plan::ChunkPlan;

/// Sums in f32, whole tiles of them, as an operand.
#[cube]
pub(super) fn put_sums<E: Float>(
    to: &mut Operand<E>,
    sums: &Shared<[f32]>,
    #[comptime] rows: usize,
    #[comptime] columns: usize,
    #[comptime] plan: ChunkPlan,
) {
    for n in range_stepped(UNIT_POS as usize, comptime!(rows * columns), comptime!(plan.units())) {
        let (i, j) = (n / columns, n % columns);
        to.put(i, j, sums[i * comptime!(plan.sum_stride(columns)) + j], plan);
    }
}

/// Sums in f32 to global memory, row by row.
#[cube]
pub(super) fn save_sums(
    to: &mut Tensor<f32>,
    place: usize,
    sums: &Shared<[f32]>,
    #[comptime] rows: usize,
    #[comptime] columns: usize,
    #[comptime] plan: ChunkPlan,
) {
    for n in range_stepped(UNIT_POS as usize, comptime!(rows * columns), comptime!(plan.units())) {
        to[place + n] = sums[n / columns * comptime!(plan.sum_stride(columns)) + n % columns];
    }
}

/// A matrix that the scores kernel left at `place`.
#[cube]
pub(super) fn put_scores<E: Float>(
    to: &mut Operand<E>,
    scores: &Tensor<f32>,
    place: usize,
    #[comptime] plan: ChunkPlan,
) {
    let rows = comptime!(plan.rows);
    for n in range_stepped(UNIT_POS as usize, comptime!(rows * rows), comptime!(plan.units())) {
        to.put(n / rows, n % rows, scores[place + n], plan);
    }
}

/// The inverse at `place`, times `diag(beta)`.
#[cube]
pub(super) fn put_inverse<B: Float, E: Float>(
    to: &mut Operand<E>,
    scores: &Tensor<f32>,
    place: usize,
    beta: &Tensor<B>,
    heads: (usize, usize),
    start: usize,
    #[comptime] plan: ChunkPlan,
) {
    let rows = comptime!(plan.rows);
    for n in range_stepped(UNIT_POS as usize, comptime!(rows * rows), comptime!(plan.units())) {
        let (i, j) = (n / rows, n % rows);
        let mut x = 0.0f32;
        if start + j < beta.shape(1) {
            x = scores[place + n] * beta_of(beta, heads.0, start + j, heads.1);
        }
        to.put(i, j, x, plan);
    }
}

/// `diag(exp(G_C)) S`, by the sums of `g` over the halves of the chunk.
#[cube]
pub(super) fn decay_state(state: &mut Shared<[f32]>, halves: &Shared<[f32]>, #[comptime] plan: ChunkPlan) {
    let (keys, values) = comptime!((plan.keys(), plan.values()));
    for n in range_stepped(UNIT_POS as usize, comptime!(keys * values), comptime!(plan.units())) {
        let (d, e) = (n / values, n % values);
        state[d * comptime!(plan.sum_stride(values)) + e] *= decay(halves[d] + halves[keys + d]);
    }
}
