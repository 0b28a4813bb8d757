//! How a launch is cut into cubes and units, from the sizes of the problem and the limits of the device.

use cubecl::features::Plane;
use cubecl::ir::{DeviceProperties, HardwareProperties};

use super::gradients::{ROWS, SUMS, largest_buffer};
use crate::functions::Dims;

/// Units of a cube, where the device allows as many.
const UNITS: usize = 128;

/// Elements of the state that one unit keeps in registers.
const REGISTERS: usize = 64;

/// Shared memory of a cube in bytes: several cubes fit on one multiprocessor, and one on every device.
const SHARED: usize = 24 * 1024;

/// Most buffers of a launch, with the one that carries shapes and strides.
const BINDINGS: u32 = 10;

fn most_units(hardware: &HardwareProperties) -> usize {
    hardware.max_units_per_cube.min(hardware.max_cube_dim.0) as usize
}

/// In all three dimensions, and few enough to be counted in 32 bits.
fn most_cubes(hardware: &HardwareProperties) -> usize {
    let (x, y, z) = hardware.max_cube_count;
    (u64::from(x) * u64::from(y) * u64::from(z)).min(u64::from(u32::MAX) / 2) as usize
}

/// A cube has `columns` columns of units, and `slices` units in each of them.
///
/// A unit keeps `rows` key channels of `width` value channels. How the sums over the key channels are ordered depends on
/// the key dim and the device alone, so a sequence has the same result in every batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Plan {
    /// Units that share a column of the state.
    pub slices: usize,
    /// Key channels of a unit.
    pub rows: usize,
    /// Columns of units in a cube.
    pub columns: usize,
    /// Value channels of a unit.
    pub width: usize,
    /// Tokens whose inputs are in shared memory at once.
    pub tokens: usize,
    /// Whether units of a column sum by exchange within a plane, without shared memory.
    pub planes: bool,
}

impl Plan {
    /// None if the device cannot run the kernel on such a problem.
    pub fn new(dims: Dims, properties: &DeviceProperties) -> Option<Self> {
        let hardware = &properties.hardware;
        let units = UNITS.min(most_units(hardware));
        let Dims { key_dim, value_dim, .. } = dims;

        let slices = (key_dim.next_power_of_two() / 16).clamp(1, 8);
        let rows = key_dim.div_ceil(slices);
        let columns = (units / slices).min(value_dim.next_power_of_two());
        let enough = hardware.num_streaming_multiprocessors.map_or(128, |count| count as usize);
        let is_wide = |width: usize| dims.lanes() * value_dim.div_ceil(columns * width) >= enough;
        let width = [4, 2].into_iter().find(|&width| rows * width <= REGISTERS && is_wide(width)).unwrap_or(1);
        let planes = properties.features.plane.contains(Plane::Ops) && slices <= hardware.plane_size_min as usize;

        let plan = |tokens: usize| Self { slices, rows, columns, width, tokens, planes };
        let shared = SHARED.min(hardware.max_shared_memory_size);
        let tokens = [16, 8, 4, 2].into_iter().find(|&tokens| plan(tokens).shared_bytes() <= shared);
        let plan = plan(tokens.unwrap_or(1));
        let fits = columns > 0
            && rows <= REGISTERS
            && plan.shared_bytes() <= hardware.max_shared_memory_size
            && plan.cubes(dims) <= most_cubes(hardware)
            && hardware.max_bindings >= BINDINGS;
        fits.then_some(plan)
    }

    pub fn units(&self) -> usize {
        self.slices * self.columns
    }

    /// Key channels of a column, with some that no input has.
    pub fn padded_keys(&self) -> usize {
        self.slices * self.rows
    }

    /// Value channels of a cube.
    pub fn values(&self) -> usize {
        self.columns * self.width
    }

    pub fn cubes(&self, dims: Dims) -> usize {
        dims.lanes() * dims.value_dim.div_ceil(self.values())
    }

    /// Numbers that units of a column exchange, two of each value channel, in two halves.
    pub fn partial_sums(&self) -> usize {
        if self.planes || self.slices == 1 { 1 } else { 2 * 2 * self.units() * self.width }
    }

    /// Of the inputs of a segment and of the sums.
    fn shared_bytes(&self) -> usize {
        let token = 5 * self.padded_keys() + self.values() + 1;
        (self.tokens * token + self.partial_sums()) * size_of::<f32>()
    }
}

/// How the scan of the backward pass is cut: a cube has `groups` units for each key channel, each with `columns` value
/// channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ScanPlan {
    pub key_dim: usize,
    pub groups: usize,
    pub columns: usize,
}

impl ScanPlan {
    /// Units of a cube at most: with more, the registers of a CUDA multiprocessor are too few for one cube.
    const UNITS: usize = 256;

    /// Value channels of a unit: two numbers of each in registers.
    const COLUMNS: usize = 16;

    /// Units with the same key channel at most: they add up what they have in turns.
    const GROUPS: usize = 8;

    /// Buffers of the scan, with the one that carries shapes and strides.
    const BINDINGS: u32 = 15;

    /// None if the device cannot run the kernels on such a problem.
    pub fn new(dims: Dims, properties: &DeviceProperties) -> Option<Self> {
        let hardware = &properties.hardware;
        let units = Self::UNITS.min(most_units(hardware));
        let Dims { key_dim, value_dim, .. } = dims;
        // Small heads are spread over more units.
        let wide = value_dim.next_power_of_two();
        let columns = (wide * key_dim / UNITS).max(wide / Self::GROUPS).clamp(1, Self::COLUMNS);
        let chunks = dims.time.div_ceil(ROWS);
        let fits = |plan: &Self| {
            plan.units() <= units
                && plan.shared_bytes() <= hardware.max_shared_memory_size
                && dims.lanes() * plan.tiles(dims).max(chunks) <= most_cubes(hardware)
                && hardware.max_bindings >= Self::BINDINGS
                && largest_buffer(dims, plan) * size_of::<f32>() <= properties.memory.max_page_size as usize
                && 3 * ROWS * (key_dim + 1) * size_of::<f32>() + 2048 <= hardware.max_shared_memory_size
        };
        let groups = (wide / columns).min(Self::GROUPS);
        (0..=groups.ilog2()).rev().map(|log| Self { key_dim, groups: 1 << log, columns }).find(fits)
    }

    pub fn units(&self) -> usize {
        self.groups * self.key_dim
    }

    /// Value channels of a cube.
    pub fn values(&self) -> usize {
        self.groups * self.columns
    }

    pub fn tiles(&self, dims: Dims) -> usize {
        dims.value_dim.div_ceil(self.values())
    }

    /// From one row of the shared matrix to the next: spread over the banks of the memory.
    pub fn stride(&self) -> usize {
        self.values() + 1
    }

    /// Numbers in the shared matrix, which also adds up the sums of the groups.
    pub fn matrix(&self) -> usize {
        self.key_dim * if self.groups > 1 { self.stride().max(SUMS) } else { self.stride() }
    }

    fn shared_bytes(&self) -> usize {
        (self.matrix() + ROWS * (self.key_dim + 5 * self.values()) + 3 * ROWS * ROWS + ROWS) * size_of::<f32>()
    }
}
