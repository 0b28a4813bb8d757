//! The operator, and what surrounds it, in plain tensor operations: what a backend runs that accelerates nothing, and what every faster
//! implementation is compared with. All of it works on f32 or f64, on checked inputs with `B >= 1` and `T >= 1`.

mod backward;
mod decay;
mod forward;
mod intra;
mod layer;
mod recurrence;
mod tiles;

pub(crate) use backward::{Cotangents, Gradients, chunk_backward};
pub(crate) use forward::chunk_forward;
#[cfg(any(feature = "cubecl", feature = "native"))]
pub(crate) use layer::{A_LOG_RANGE, L2_EPS};
pub(crate) use layer::{
    convolution, convolution_backward, decay_gate, decay_gate_backward, l2_normalize, output_norm,
    output_norm_backward, write_strength, write_strength_backward,
};
pub(crate) use recurrence::recurrence;
#[cfg(feature = "cubecl")]
pub(crate) use tiles::SEGMENT_TOKENS;
