//! Kimi Delta Attention (KDA) for [Burn](burn): the linear-attention layer of Kimi Linear, Kimi K3, GLM-5.3-Flash and
//! Ling-3.0, exact against flash-linear-attention (FLA) for every decay.
//!
//! KDA keeps, per value head, a state `S` of key dim times value dim instead of a growing cache. Each token decays the
//! state with one rate per key channel, writes its value where the key points by the delta rule, and reads it with the
//! query:
//!
//! ```text
//! S   <- diag(exp(g_t)) S
//! S   <- S + beta_t k_t (v_t - S^T k_t)^T
//! o_t  = scale * S^T q_t
//! ```
//!
//! [`KdaModule`] takes the place of an attention layer, on whatever backend the [`Device`](burn::tensor::Device) names:
//!
//! ```
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_kda::KdaConfig;
//!
//! let device = Device::default();
//! let layer = KdaConfig::new(256, 4, 64).init(&device);
//! let x = Tensor::<3>::random([1, 100, 256], Distribution::Default, &device);
//! // Training: all tokens at once, in chunks.
//! let y = layer.forward(x.clone());
//! // Serving: a prompt of any length, then token by token with a state of constant size.
//! let (_, state) = layer.forward_with_state(x.clone().slice_dim(1, 0..99), None);
//! let (last, _) = layer.forward_with_state(x.slice_dim(1, 99..100), Some(state));
//! assert!(last.all_close(y.slice_dim(1, 99..100), Some(1e-4), Some(1e-5)));
//! ```
//!
//! | for | use |
//! |---|---|
//! | a layer in a model | [`KdaConfig`], [`KdaModule`], [`KdaState`] |
//! | the operator alone | [`chunk_kda`] (train, prefill), [`recurrent_kda`], [`kda_step`] (decode) |
//! | its inputs | [`decay_gate`], [`write_strength`], [`l2_normalize`], [`short_convolution`], [`gated_rms_norm`] |
//! | weights of published models | [`checkpoint`] (feature `checkpoint`, on by default) |
//!
//! Activations may be f64, f32, bf16 or f16; gates, norms and states are computed in f32 at least. Bad shapes, dtypes
//! and options panic before any work and name the argument.

mod activation;
mod backends;
#[cfg(feature = "checkpoint")]
pub mod checkpoint;
mod functions;
mod gate;
#[cfg(feature = "cubecl")]
mod kernel;
mod module;
#[cfg(any(feature = "ndarray", feature = "flex"))]
mod native;
mod ops;
mod plain;
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
pub use ops::{ConvParams, KdaGradients, KdaOps, KdaParams, KdaTensors, MaybeTensor, TensorBridge, WantedGradients};
