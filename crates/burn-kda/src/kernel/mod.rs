//! The operator in CubeCL kernels, for every GPU that Burn runs on.

mod decay;
mod plan;
mod recurrent;
mod segment;

pub(crate) use plan::Plan;
#[cfg(feature = "fusion")]
pub(crate) use recurrent::kept_states;
pub(crate) use recurrent::{Outputs, recurrent};
