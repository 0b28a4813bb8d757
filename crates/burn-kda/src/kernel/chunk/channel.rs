//! One key channel in half a chunk: what a unit keeps in registers.

use cubecl::prelude::*;

use super::operand::Operand;
use crate::kernel::element::read;
use crate::kernel::plan::ChunkPlan;

/// Zeros for tokens and channels that no input has.
#[derive(CubeType)]
pub(in crate::kernel) struct Channel {
    pub d: usize,
    /// The first row in the chunk.
    pub first: usize,
    pub g: Array<f32>,
}

#[cube]
impl Channel {
    /// `start` is the first token of the chunk.
    pub fn load<G: Float>(
        g: &Tensor<G>,
        batch: usize,
        head: usize,
        start: usize,
        #[comptime] plan: ChunkPlan,
    ) -> Channel {
        let (d, first) = place(plan);
        let log_decays = rows_of(g, batch, head, start + first, d, plan);
        Channel { d, first, g: log_decays }
    }
}

/// The key channel of a unit and its first row in a chunk.
#[cube]
pub(in crate::kernel) fn place(#[comptime] plan: ChunkPlan) -> (usize, usize) {
    let unit = UNIT_POS as usize;
    (unit % comptime!(plan.keys()), unit / comptime!(plan.keys()) * comptime!(plan.half()))
}

/// Of one channel, `[B, T, _, K]`, the rows of half a chunk.
#[cube]
pub(in crate::kernel) fn rows_of<X: Float>(
    from: &Tensor<X>,
    batch: usize,
    head: usize,
    start: usize,
    d: usize,
    #[comptime] plan: ChunkPlan,
) -> Array<f32> {
    let mut rows = Array::<f32>::new(comptime!(plan.half()));
    #[unroll(plan.tensor_cores)]
    for r in 0..comptime!(plan.half()) {
        rows[r] = element_of(from, batch, head, start + r, d);
    }
    rows
}

/// 0 for a token or channel that there is not.
#[cube]
pub(in crate::kernel) fn element_of<X: Float>(from: &Tensor<X>, batch: usize, head: usize, t: usize, d: usize) -> f32 {
    let mut x = 0.0f32;
    if t < from.shape(1) && d < from.shape(3) {
        x = read(from, batch, t, head, d);
    }
    x
}

/// `exp(g)`, `g <= 0`: 0 far below, and NaN stays NaN.
#[cube]
pub(in crate::kernel) fn decay(g: f32) -> f32 {
    f32::exp(select(g < -104.0f32, -104.0f32, g))
}

/// The sum of `g` over half a chunk, from token `start` on.
#[cube]
pub(in crate::kernel) fn half_of<G: Float>(
    g: &Tensor<G>,
    batch: usize,
    head: usize,
    start: usize,
    d: usize,
    #[comptime] plan: ChunkPlan,
) -> f32 {
    let mut sum = 0.0f32;
    for r in 0..comptime!(plan.half()) {
        sum += element_of(g, batch, head, start + r, d);
    }
    sum
}

/// `x exp(G)`, half a chunk of one channel from row `row` on.
#[cube]
pub(in crate::kernel) fn from_start<X: Float, G: Float, E: Float>(
    x: &Tensor<X>,
    g: &Tensor<G>,
    halves: &Shared<[f32]>,
    to: &mut Operand<E>,
    heads: (usize, usize, usize),
    start: usize,
    place: (usize, usize),
    #[comptime] plan: ChunkPlan,
) {
    let (batch, head, key_head) = heads;
    let (row, d) = place;
    let mut sum = select(row == 0, 0.0f32, halves[d]);
    for r in row..row + plan.half() {
        sum += element_of(g, batch, head, start + r, d);
        to.put(r, d, element_of(x, batch, key_head, start + r, d) * decay(sum), plan);
    }
}

/// `x exp(G_C - G)`, as [`from_start`].
#[cube]
pub(in crate::kernel) fn to_end<X: Float, G: Float, E: Float>(
    x: &Tensor<X>,
    g: &Tensor<G>,
    halves: &Shared<[f32]>,
    to: &mut Operand<E>,
    heads: (usize, usize, usize),
    start: usize,
    place: (usize, usize),
    #[comptime] plan: ChunkPlan,
) {
    let (batch, head, key_head) = heads;
    let (row, d) = place;
    let mut sum = select(row == 0, halves[comptime!(plan.keys()) + d], 0.0f32);
    for n in 0..comptime!(plan.half()) {
        let r = row + (plan.half() - 1 - n);
        to.put(r, d, element_of(x, batch, key_head, start + r, d) * decay(sum), plan);
        sum += element_of(g, batch, head, start + r, d);
    }
}
