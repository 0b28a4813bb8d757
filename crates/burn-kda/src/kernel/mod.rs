//! The operator in CubeCL kernels, for every GPU that Burn runs on.

mod chunk;
#[cfg(all(test, feature = "cuda-source"))]
mod cuda_source;
mod decay;
mod dispatch;
mod element;
mod gradients;
pub(crate) mod layer;
mod plan;
mod recurrent;
mod segment;

pub(crate) use dispatch::{BackwardPlan, ForwardPlan, backward, forward};
pub(crate) use element::has_kernels;
pub(crate) use gradients::Gradients;
#[cfg(all(test, feature = "fusion"))]
pub(crate) use plan::{ChunkPlan, Plan, ScanPlan};
pub(crate) use recurrent::Outputs;
#[cfg(feature = "fusion")]
pub(crate) use recurrent::kept_states;
