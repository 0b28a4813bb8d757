//! Kimi Delta Attention.

mod activation;
mod functions;
mod gate;
mod module;
mod precision;

pub use functions::{
    ConvOutput, KdaInput, KdaOptions, KdaOutput, chunk_kda, fla_read_scale, gated_rms_norm, kda_step, l2_normalize,
    recurrent_kda, short_convolution,
};
pub use gate::{DecayFn, decay_gate, write_strength};
pub use module::{
    ConvState, GatedRmsNorm, GatedRmsNormConfig, KdaConfig, KdaModule, KdaState, Projection, ShortConvolution,
    ShortConvolutionConfig, StateError,
};
