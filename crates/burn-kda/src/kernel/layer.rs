//! What surrounds the operator in a layer, each part in one launch.
//!
//! Convolution and norm have a cube for some tokens of one head: a unit has every so many channels of it, and the units
//! sum up over the channels together. Gates have a unit for each number.

pub(super) mod activation;
pub(super) mod convolution;
pub(super) mod gates;
pub(super) mod norm;

pub(crate) use convolution::convolution;
pub(crate) use gates::{decay_gate, write_strength};
pub(crate) use norm::output_norm;

use burn::tensor::{DType, Shape};
use burn_cubecl::ops::numeric::empty_device_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::DeviceProperties;
use cubecl::prelude::*;

use super::plan::{most_cubes, most_units};

/// Not yet written.
fn empty(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    empty_device_dtype(like.client.clone(), like.device.clone(), shape.into(), dtype)
}

/// How heads are given to cubes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct HeadPlan {
    /// Units of a cube, a power of two.
    pub units: usize,
    /// Channels of a unit.
    pub channels: usize,
    /// Tokens of a cube.
    pub tokens: usize,
}

impl HeadPlan {
    /// Units of a cube at most.
    const UNITS: usize = 128;

    /// Numbers that a unit keeps in registers.
    const REGISTERS: usize = 32;

    /// None if the device cannot run the kernel on heads of `dim` channels, `heads` for each of `time` tokens of a batch.
    pub fn new([batch, time, heads, dim]: [usize; 4], properties: &DeviceProperties) -> Option<Self> {
        let hardware = &properties.hardware;
        let most = 1 << Self::UNITS.min(most_units(hardware)).ilog2();
        let units = dim.next_power_of_two().min(most);
        let channels = dim.div_ceil(units);
        let tokens = [8, 4, 2, 1].into_iter().find(|&tokens| tokens <= time && tokens * channels <= Self::REGISTERS)?;
        let fits = units * tokens * size_of::<f32>() <= hardware.max_shared_memory_size
            && batch * heads * time.div_ceil(tokens) <= most_cubes(hardware);
        fits.then_some(Self { units, channels, tokens })
    }

    fn cubes(&self, [batch, time, heads, _]: [usize; 4]) -> usize {
        batch * heads * time.div_ceil(self.tokens)
    }
}

/// Leaves the sum over all units of a cube of each of `sums` in it.
#[cube]
fn sum_over_cube(sums: &mut Array<f32>, #[comptime] plan: HeadPlan) {
    let unit = UNIT_POS as usize;
    let mut shared = Shared::<[f32]>::new_slice(comptime!(plan.units * plan.tokens));
    #[unroll]
    for t in 0..plan.tokens {
        shared[t * plan.units + unit] = sums[t];
    }
    #[unroll]
    for level in 0..comptime!(plan.units.ilog2()) {
        sync_cube();
        let half = comptime!(plan.units >> (level + 1));
        if unit < half {
            #[unroll]
            for t in 0..plan.tokens {
                shared[t * plan.units + unit] += shared[t * plan.units + unit + half];
            }
        }
    }
    sync_cube();
    #[unroll]
    for t in 0..plan.tokens {
        sums[t] = shared[t * plan.units];
    }
}
