//! The layer: configuration, parameters and carried state.

mod config;
mod conv;
mod init;
mod kda;
mod norm;
mod padding;
mod state;

pub use config::{KdaConfig, Projection};
pub use conv::{ShortConvolution, ShortConvolutionConfig};
pub use kda::KdaModule;
pub use norm::{GatedRmsNorm, GatedRmsNormConfig};
pub use state::{ConvState, KdaState, StateError};
