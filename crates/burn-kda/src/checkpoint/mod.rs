//! KDA layers of published models: Kimi Linear, Kimi K3, GLM-5.3-Flash, Ling-3.0, and FLA's own.
//!
//! | for | use |
//! |---|---|
//! | the configuration | [`KdaConfig::from_hf`](crate::KdaConfig::from_hf), [`ModelConfig`] |
//! | weights | [`load_layer`], [`load_all`], or [`Checkpoint`] to read the configuration once |
//! | writing them back | [`save_layer`], [`save_layers`] with a [`LayerLayout`] |
//! | a cache of FLA's layer | [`FlaCache`], from and into [`KdaState`](crate::KdaState) |
//!
//! The files are safetensors, one or sharded, named as the model is published, as transformers names them at run time
//! (`forget_gate`, one `conv1d`), or as FLA's layer does. Shards are opened anew for each layer, so that no more
//! files are open than a layer needs. A layer is loaded whole or not at all: every tensor below its prefix must be
//! expected, and have the shape and a dtype that is. Burn's own format needs none of this:
//! [`Module::save_file`](burn::module::Module::save_file) and `try_load_file`.

mod cache;
mod config;
mod error;
mod file;
mod layer;
mod load;
mod names;
mod save;
mod source;
mod unique;

pub use cache::FlaCache;
pub use config::{Family, ModelConfig};
pub use error::{CheckpointError, ConfigError};
pub use layer::LayerLayout;
pub use load::{Checkpoint, DecayParameters, load_all, load_layer};
pub use save::{save_layer, save_layers};
