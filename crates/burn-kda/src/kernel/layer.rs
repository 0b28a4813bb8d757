//! What surrounds the operator in a layer, each part in one launch.
//!
//! Convolution and norm have a cube for some tokens of one head: a unit has every so many channels of it, and the units
//! sum up over the channels together. Gates have a unit for each number. Backward passes leave what a span of tokens adds
//! to the gradients of the parameters, for Burn to sum up.

pub(in crate::kernel) mod activation;
pub(in crate::kernel) mod convolution;
pub(in crate::kernel) mod convolution_gradients;
pub(in crate::kernel) mod gates;
pub(in crate::kernel) mod norm;

pub(crate) use convolution::convolution;
pub(crate) use convolution_gradients::convolution_gradients;
pub(crate) use gates::{decay_gate, decay_gate_gradients, write_strength, write_strength_gradient};
pub(crate) use norm::{output_norm, output_norm_gradients};

use burn::tensor::{DType, Shape};
use burn_cubecl::ops::numeric::empty_device_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::DeviceProperties;
use cubecl::prelude::*;

use super::plan::{BINDINGS, most_cubes, most_units};

/// Not yet written.
fn empty(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    empty_device_dtype(like.client.clone(), like.device.clone(), shape.into(), dtype)
}

/// Tokens of a cube in a backward pass, which leaves their part of the gradients of the parameters.
const SPAN: usize = 64;

/// How heads are given to cubes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct HeadPlan {
    /// Units of a cube, a power of two.
    pub units: usize,
    /// Channels of a unit.
    pub channels: usize,
    /// Tokens at a time.
    pub tokens: usize,
}

impl HeadPlan {
    /// Units of a cube at most.
    const UNITS: usize = 128;

    /// Numbers of each kind that a unit keeps in registers.
    const REGISTERS: usize = 48;

    /// None if the device cannot run the kernel on heads of `dim` channels, `heads` for each of `time` tokens of a
    /// batch, where the tokens at a time need `more` besides, and `sums` over the channels of each.
    pub fn new(
        [batch, time, heads, dim]: [usize; 4],
        more: usize,
        sums: usize,
        properties: &DeviceProperties,
    ) -> Option<Self> {
        let hardware = &properties.hardware;
        let most = 1 << Self::UNITS.min(most_units(hardware)).ilog2();
        let units = dim.next_power_of_two().min(most);
        let channels = dim.div_ceil(units);
        let fits = |&tokens: &usize| {
            let rows = tokens + more;
            tokens <= time.next_power_of_two()
                && rows * channels <= Self::REGISTERS
                && units * rows * sums * size_of::<f32>() <= hardware.max_shared_memory_size
                && batch * heads * time.div_ceil(tokens) <= most_cubes(hardware)
                && hardware.max_bindings >= BINDINGS
        };
        let tokens = [4, 2, 1].into_iter().find(fits)?;
        Some(Self { units, channels, tokens })
    }

    fn cubes(&self, [batch, time, heads, _]: [usize; 4]) -> usize {
        batch * heads * time.div_ceil(self.tokens)
    }
}

/// Spans of all rows of a batch.
pub(crate) fn spans(batch: usize, time: usize) -> usize {
    batch * time.div_ceil(SPAN)
}

/// Leaves the sum over all units of a cube of each of `sums` in it.
#[cube]
fn sum_over_cube(sums: &mut Array<f32>, #[comptime] count: usize, #[comptime] plan: HeadPlan) {
    let unit = UNIT_POS as usize;
    let mut shared = Shared::<[f32]>::new_slice(comptime!(plan.units * count));
    sync_cube(); // The sums before have been read.
    #[unroll]
    for i in 0..count {
        shared[i * plan.units + unit] = sums[i];
    }
    #[unroll]
    for level in 0..comptime!(plan.units.ilog2()) {
        sync_cube();
        let half = comptime!(plan.units >> (level + 1));
        if unit < half {
            #[unroll]
            for i in 0..count {
                shared[i * plan.units + unit] += shared[i * plan.units + unit + half];
            }
        }
    }
    sync_cube();
    #[unroll]
    for i in 0..count {
        sums[i] = shared[i * plan.units];
    }
}
