//! Which kernels run a pass.

use std::sync::LazyLock;

use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::DeviceProperties;

use super::chunk::chunked;
use super::chunk::gradients::chunked_gradients;
use super::gradients::{Gradients, gradients};
use super::plan::{ChunkPlan, Plan, ScanPlan};
use super::recurrent::{Outputs, recurrent};
use crate::functions::Dims;
use crate::ops::WantedGradients;
use crate::plain::SEGMENT_TOKENS;

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

    /// Whether the chunk form has them, if it is to run at all; the call has `asked` for them.
    fn of(dims: Dims, asked: bool) -> Option<bool> {
        match Self::current() {
            _ if dims.time < ChunkPlan::LEAST_TOKENS => None,
            Self::Used if asked => Some(true),
            Self::Imitated => Some(false),
            _ => None,
        }
    }
}

/// The recurrence token by token, or the chunk form on tensor cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum ForwardPlan {
    Recurrent(Plan),
    Chunk(ChunkPlan),
}

impl ForwardPlan {
    /// None if the device cannot run the kernels on such a problem. Tensor cores have to be asked for: the recurrence
    /// keeps f32 accuracy.
    pub fn new(dims: Dims, tensor_cores: bool, properties: &DeviceProperties) -> Option<Self> {
        let chunk = TensorCores::of(dims, tensor_cores).and_then(|cores| ChunkPlan::forward(dims, properties, cores));
        chunk.map(Self::Chunk).or_else(|| Self::recurrent(dims, properties))
    }

    /// As [`new`](Self::new), for the recurrent form.
    pub fn recurrent(dims: Dims, properties: &DeviceProperties) -> Option<Self> {
        Plan::new(dims, properties).map(Self::Recurrent)
    }
}

/// The gradients with f32 accuracy, or on tensor cores; and the forward pass for the states between segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum BackwardPlan {
    Scan(ForwardPlan, ScanPlan),
    Chunk(ForwardPlan, ChunkPlan),
}

impl BackwardPlan {
    /// As [`ForwardPlan::new`].
    pub fn new(dims: Dims, tensor_cores: bool, properties: &DeviceProperties) -> Option<Self> {
        let forward = ForwardPlan::new(dims, tensor_cores, properties)?;
        let chunk = TensorCores::of(dims, tensor_cores).and_then(|cores| ChunkPlan::backward(dims, properties, cores));
        let chunk = chunk.map(|plan| Self::Chunk(forward, plan));
        chunk.or_else(|| ScanPlan::new(dims, properties).map(|plan| Self::Scan(forward, plan)))
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

/// As [`gradients`]; without `kept` states the forward pass runs again for them.
#[allow(clippy::too_many_arguments)]
pub(crate) fn backward(
    dims: Dims,
    inputs: [CubeTensor; 5],
    initial_state: Option<CubeTensor>,
    kept: Option<CubeTensor>,
    cotangents: [Option<CubeTensor>; 2],
    scale: f64,
    wanted: WantedGradients,
    plan: BackwardPlan,
) -> Gradients {
    let (BackwardPlan::Scan(again, _) | BackwardPlan::Chunk(again, _)) = plan;
    let kept = match kept {
        None if dims.time > SEGMENT_TOKENS => {
            forward(dims, inputs.clone(), initial_state.clone(), scale, true, again).kept
        }
        kept => kept,
    };
    match plan {
        BackwardPlan::Scan(_, plan) => gradients(dims, inputs, initial_state, kept, cotangents, scale, wanted, plan),
        BackwardPlan::Chunk(_, plan) => {
            chunked_gradients(dims, inputs, initial_state, kept, cotangents, scale, wanted, plan)
        }
    }
}
