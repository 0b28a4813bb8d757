//! The operator in CubeCL kernels, for every GPU that Burn runs on.

mod chunk;
#[cfg(all(test, feature = "cuda-source"))]
mod cuda_source;
mod decay;
mod element;
mod forward;
mod gradients;
mod plan;
mod recurrent;
mod segment;

pub(crate) use forward::{ForwardPlan, forward};
pub(crate) use gradients::{Gradients, gradients};
pub(crate) use plan::{Plan, ScanPlan};
pub(crate) use recurrent::Outputs;
#[cfg(feature = "fusion")]
pub(crate) use recurrent::kept_states;
