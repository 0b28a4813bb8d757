//! The operator and the small functions around it, on tensors in `[batch, time, head, dim]` layout.

mod chunk;
mod conv;
mod norm;
mod packed;
mod problem;
mod recurrent;
mod step;

pub use chunk::chunk_kda;
pub(crate) use conv::convolve;
pub use conv::{ConvOutput, short_convolution};
pub(crate) use norm::gated_rms_norm_to;
pub use norm::{gated_rms_norm, l2_normalize};
pub(crate) use packed::{check_cu_seqlens, pad_time};
pub(crate) use problem::Dims;
pub use problem::{KdaInput, KdaOptions, KdaOutput, fla_read_scale};
pub use recurrent::recurrent_kda;
pub use step::kda_step;
