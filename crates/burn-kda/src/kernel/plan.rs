//! How a launch is cut into cubes and units, from the sizes of the problem and the limits of the device.

use cubecl::features::{MmaConfig, Plane, TypeUsage};
use cubecl::ir::{DeviceProperties, ElemType, FloatKind, HardwareProperties};

use super::chunk::gradients::largest_chunk_buffer;
use super::chunk::operand::TILE;
use super::gradients::{ROWS, SUMS, largest_buffer};
use crate::functions::Dims;

/// Units of a cube, where the device allows as many.
const UNITS: usize = 128;

/// Elements of the state that one unit keeps in registers.
const REGISTERS: usize = 64;

/// Shared memory of a cube in bytes: several cubes fit on one multiprocessor, and one on every device.
const SHARED: usize = 24 * 1024;

/// Most buffers of a launch of the recurrence, and of one around the operator, with the one that carries shapes and strides.
pub(super) const BINDINGS: u32 = 10;

pub(super) fn most_units(hardware: &HardwareProperties) -> usize {
    hardware.max_units_per_cube.min(hardware.max_cube_dim.0) as usize
}

/// In all three dimensions, each by a power of two as CubeCL spreads them, and few enough to be counted in 32 bits.
pub(super) fn most_cubes(hardware: &HardwareProperties) -> usize {
    let (x, y, z) = hardware.max_cube_count;
    let bits: u32 = [x, y, z].iter().map(|limit| limit.max(&1).ilog2()).sum();
    1 << bits.min(31)
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

        let slices = (key_dim.next_power_of_two() / 16).clamp(1, 8.min(1 << units.ilog2()));
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
        let fits = rows <= REGISTERS
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
        let columns = (wide * key_dim / UNITS).max(wide / Self::GROUPS).clamp(1, Self::COLUMNS.min(wide));
        let chunks = dims.time.div_ceil(ROWS);
        let fits = |plan: &Self| {
            plan.largest_cube() <= units
                && plan.shared_bytes() <= hardware.max_shared_memory_size
                && dims.lanes() * plan.tiles(dims).max(chunks) <= most_cubes(hardware)
                && hardware.max_bindings >= Self::BINDINGS
                && largest_buffer(dims, plan) * size_of::<f32>() <= properties.memory.max_page_size as usize
                && 3 * ROWS * (key_dim + 1) * size_of::<f32>() + 2048 <= hardware.max_shared_memory_size
        };
        let groups = (wide / columns).min(Self::GROUPS);
        (0..=groups.ilog2()).rev().map(|log| Self { key_dim, groups: 1 << log, columns }).find(fits)
    }

    /// Of the scan.
    pub fn units(&self) -> usize {
        self.groups * self.key_dim
    }

    /// Units of a cube of any of the kernels: the scores have one for each pair of rows.
    pub fn largest_cube(&self) -> usize {
        self.units().max(ROWS * ROWS)
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

/// How the chunk form on tensor cores is cut: a cube has two units for each key channel, each with half the rows of a
/// chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ChunkPlan {
    /// Rows of a chunk.
    pub rows: usize,
    /// Tiles of key channels.
    pub key_tiles: usize,
    /// Tiles of value channels of a cube.
    pub value_tiles: usize,
    /// Units of a plane.
    pub plane: usize,
    /// Otherwise the units of a plane multiply as its tensor core would.
    pub tensor_cores: bool,
}

impl ChunkPlan {
    /// A shorter sequence is no work for a chunk.
    pub const LEAST_TOKENS: usize = 32;

    /// Units that a tensor core works for.
    const PLANE: usize = 32;

    /// Units of a cube at most: with more, each has too few registers. So key dims up to 128 have tensor cores.
    const UNITS: usize = 256;

    /// Buffers of a launch, with the one that carries shapes and strides.
    const BINDINGS: u32 = 15;

    /// Of the forward pass; none if the device cannot run the kernels on such a problem.
    pub fn forward(dims: Dims, properties: &DeviceProperties, tensor_cores: bool) -> Option<Self> {
        let shared = |plan: &Self| plan.scores_bytes().max(plan.scan_bytes());
        // Tensor cores earn nothing on chunks of one tile.
        let rows: &[usize] = if tensor_cores { &[64, 32] } else { &[64, 32, 16] };
        Self::new(dims, properties, tensor_cores, (rows, &[4, 2, 1]), shared, |plan| plan.scores_len(dims, false))
    }

    /// As [`forward`](Self::forward), of the backward pass. Its units keep twice as much of each row.
    pub fn backward(dims: Dims, properties: &DeviceProperties, tensor_cores: bool) -> Option<Self> {
        let shared = |plan: &Self| plan.scores_bytes().max(plan.back_bytes()).max(plan.inputs_bytes());
        let largest = |plan: &Self| plan.scores_len(dims, true).max(largest_chunk_buffer(dims, plan));
        let rows: &[usize] = if tensor_cores { &[32] } else { &[32, 16] };
        Self::new(dims, properties, tensor_cores, (rows, &[2, 1]), shared, largest)
    }

    fn new(
        dims: Dims,
        properties: &DeviceProperties,
        tensor_cores: bool,
        (rows, value_tiles): (&[usize], &[usize]),
        shared_bytes: impl Fn(&Self) -> usize,
        largest_buffer: impl Fn(&Self) -> usize,
    ) -> Option<Self> {
        let hardware = &properties.hardware;
        let planes = [hardware.plane_size_min, hardware.plane_size_max].map(|size| size as usize);
        let has_cores = planes == [Self::PLANE; 2]
            && properties.features.matmul.cmma.contains(&Self::instruction())
            && properties.type_usage(Self::instruction().a_type).contains(TypeUsage::Conversion);
        // A multiprocessor has room for one cube or two: wide cubes on most of them beat narrow ones in a second turn.
        let enough = hardware.num_streaming_multiprocessors.map_or(1, |count| count as usize * 3 / 4);
        let fits = |plan: &Self| {
            (plan.rows..=Self::UNITS.min(most_units(hardware))).contains(&plan.units())
                && shared_bytes(plan) <= hardware.max_shared_memory_size
                && hardware.max_bindings >= Self::BINDINGS
        };
        // Not by another plan, so that a sequence has the same result in every batch.
        let has_room = |plan: &Self| {
            dims.lanes() * dims.time.div_ceil(plan.rows) <= most_cubes(hardware)
                && plan.cubes(dims) <= most_cubes(hardware)
                && largest_buffer(plan) * size_of::<f32>() <= properties.memory.max_page_size as usize
        };
        let key_tiles = dims.key_dim.div_ceil(TILE);
        let plan = |rows, value_tiles| Self { rows, key_tiles, value_tiles, plane: Self::PLANE, tensor_cores };
        let is_wide = |plan: &Self| plan.value_tiles == 1 || plan.cubes(dims) >= enough;
        let mut plans =
            rows.iter().flat_map(|&rows| value_tiles.iter().map(move |&value_tiles| plan(rows, value_tiles)));
        plans.find(|plan| (has_cores || !tensor_cores) && is_wide(plan) && fits(plan)).filter(has_room)
    }

    /// bf16 with sums in f32.
    fn instruction() -> MmaConfig {
        let [bf16, f32] = [FloatKind::BF16, FloatKind::F32].map(ElemType::Float);
        MmaConfig { a_type: bf16, b_type: bf16, cd_type: f32, m: 16, n: 16, k: 16 }
    }

    /// The dtype of an operand's numbers, all of which bf16 has.
    pub fn number(&self) -> ElemType {
        ElemType::Float(if self.tensor_cores { FloatKind::BF16 } else { FloatKind::F32 })
    }

    /// Key channels, with some that no input has.
    pub fn keys(&self) -> usize {
        self.key_tiles * TILE
    }

    /// Value channels of a cube, with some that no input has.
    pub fn values(&self) -> usize {
        self.value_tiles * TILE
    }

    /// Rows of a unit.
    pub fn half(&self) -> usize {
        self.rows / 2
    }

    pub fn units(&self) -> usize {
        2 * self.keys()
    }

    pub fn planes(&self) -> usize {
        self.units() / self.plane
    }

    pub fn cubes(&self, dims: Dims) -> usize {
        dims.lanes() * dims.value_dim.div_ceil(self.values())
    }

    /// Matrices that the scores kernel leaves of a chunk.
    pub fn matrices(&self, with_kk: bool) -> usize {
        if with_kk { 3 } else { 2 }
    }

    /// From one row of an operand to the next: spread over the banks of the memory.
    pub fn operand_stride(&self, columns: usize) -> usize {
        if self.tensor_cores { columns + 8 } else { columns }
    }

    /// As [`operand_stride`](Self::operand_stride), for sums in f32.
    pub fn sum_stride(&self, columns: usize) -> usize {
        if self.tensor_cores { columns + 4 } else { columns }
    }

    fn scores_len(&self, dims: Dims, with_kk: bool) -> usize {
        dims.lanes() * dims.time.div_ceil(self.rows) * self.matrices(with_kk) * self.rows * self.rows
    }

    /// Shared memory of the scores kernel.
    fn scores_bytes(&self) -> usize {
        let (rows, keys) = (self.rows, self.keys());
        let numbers = 2 * self.operand(rows, keys) + 2 * self.sums(rows, rows) + 2 * rows * TILE + (TILE + 1) * rows;
        numbers * size_of::<f32>()
    }

    /// Of the scan of the forward pass.
    fn scan_bytes(&self) -> usize {
        let (rows, keys, values) = (self.rows, self.keys(), self.values());
        let operands = self.operand(keys, values)
            + 2 * self.operand(rows, keys)
            + self.operand(rows, rows)
            + self.operand(rows, values);
        let sums = self.sums(keys, values) + 2 * self.sums(rows, values);
        (operands + sums + 2 * keys) * size_of::<f32>()
    }

    /// Of the scan of the backward pass.
    fn back_bytes(&self) -> usize {
        let (rows, keys, values) = (self.rows, self.keys(), self.values());
        let operands = self.operand(keys, values)
            + 2 * self.operand(rows, keys)
            + self.operand(rows, rows)
            + 3 * self.operand(rows, values);
        let sums = self.sums(keys, values) + 2 * self.sums(rows, values);
        (operands + sums + 4 * keys + rows) * size_of::<f32>()
    }

    /// Of the way from the scan to the gradients of the inputs.
    fn inputs_bytes(&self) -> usize {
        let (rows, keys) = (self.rows, self.keys());
        let operands = 2 * self.operand(rows, keys) + 2 * self.operand(rows, rows);
        (operands + 2 * self.sums(rows, keys) + rows * (2 * rows + keys) + 4 * keys) * size_of::<f32>()
    }

    /// Words of a matrix of sums and of an operand, two halves to a word.
    fn sums(&self, rows: usize, columns: usize) -> usize {
        rows * self.sum_stride(columns)
    }

    fn operand(&self, rows: usize, columns: usize) -> usize {
        rows * self.operand_stride(columns)
    }
}
