//! Which kernels run the forward pass.

use std::sync::LazyLock;

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::DeviceProperties;

use super::chunk::chunked;
use super::plan::{ChunkPlan, Plan};
use super::recurrent::{Outputs, recurrent};
use crate::functions::Dims;

/// What becomes of tensor cores, by the environment variable `BURN_KDA_TENSOR_CORES`, read once.
#[derive(Debug, Clone, Copy, PartialEq)]
enum TensorCores {
    /// Not set: used where the device has them.
    Used,
    /// `imitated`: the same kernels for every dtype on any device, its units multiplying as a tensor core would: to check
    /// them where there is none.
    Imitated,
    /// Anything else.
    Off,
}

impl TensorCores {
    fn current() -> Self {
        static CORES: LazyLock<TensorCores> = LazyLock::new(|| match std::env::var_os("BURN_KDA_TENSOR_CORES") {
            None => TensorCores::Used,
            Some(value) if value == "imitated" => TensorCores::Imitated,
            Some(_) => TensorCores::Off,
        });
        *CORES
    }
}

/// The recurrence token by token, or the chunk form on tensor cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum ForwardPlan {
    Recurrent(Plan),
    Chunk(ChunkPlan),
}

impl ForwardPlan {
    /// None if the device cannot run the kernels on such a problem. Tensor cores are for half precision: the recurrence
    /// keeps f32 accuracy.
    pub fn new(dims: Dims, dtype: DType, properties: &DeviceProperties) -> Option<Self> {
        let chunk = match TensorCores::current() {
            _ if dims.time < ChunkPlan::LEAST_TOKENS => None,
            TensorCores::Used if dtype != DType::F32 => ChunkPlan::new(dims, properties, true),
            TensorCores::Imitated => ChunkPlan::new(dims, properties, false),
            _ => None,
        };
        chunk.map(Self::Chunk).or_else(|| Plan::new(dims, properties).map(Self::Recurrent))
    }
}

/// As [`recurrent`].
pub(crate) fn forward(
    dims: Dims,
    inputs: [CubeTensor; 5],
    initial_state: Option<CubeTensor>,
    scale: f64,
    keep_states: bool,
    plan: ForwardPlan,
) -> Outputs {
    match plan {
        ForwardPlan::Recurrent(plan) => recurrent(dims, inputs, initial_state, scale, keep_states, plan),
        ForwardPlan::Chunk(plan) => chunked(dims, inputs, initial_state, scale, keep_states, plan),
    }
}
