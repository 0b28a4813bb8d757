//! The operator in CubeCL kernels, for every GPU that Burn runs on.

#[cfg(all(test, feature = "cuda-source"))]
mod cuda_source;
mod decay;
mod gradients;
mod plan;
mod recurrent;
mod segment;

pub(crate) use gradients::{Gradients, gradients};
pub(crate) use plan::{Plan, ScanPlan};
#[cfg(feature = "fusion")]
pub(crate) use recurrent::kept_states;
pub(crate) use recurrent::{Outputs, recurrent};
