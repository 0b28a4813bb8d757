//! The operator in plain tensor operations: what a backend runs that accelerates nothing, and what every faster
//! implementation is compared with. All of it works on f32 or f64, on checked inputs with `B >= 1` and `T >= 1`.

mod backward;
mod decay;
mod forward;
mod intra;
mod recurrence;
mod tiles;

pub(crate) use backward::{Cotangents, Gradients, chunk_backward};
pub(crate) use forward::chunk_forward;
pub(crate) use recurrence::recurrence;
#[cfg(feature = "cubecl")]
pub(crate) use tiles::SEGMENT_TOKENS;
