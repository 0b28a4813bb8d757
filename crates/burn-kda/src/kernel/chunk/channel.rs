//! One key channel in half a chunk: what a unit keeps in registers.

use cubecl::prelude::*;

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
        let d = UNIT_POS as usize % comptime!(plan.keys());
        let first = UNIT_POS as usize / comptime!(plan.keys()) * comptime!(plan.half());
        let log_decays = rows_of(g, batch, head, start + first, d, plan);
        Channel { d, first, g: log_decays }
    }
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
