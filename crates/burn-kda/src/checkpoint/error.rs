use std::path::{Path, PathBuf};

use burn::tensor::FloatDType;

/// A `config.json` that describes no KDA model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A model that this crate does not know.
    #[error(
        "config: `{key}` must be one of kimi_linear, kimi_k3, glm5_next, glm5_next_text, bailing_hybrid, bailing_moe_v3, \
         kda, got `{got}`"
    )]
    ModelType {
        /// Where it stands.
        key: String,
        /// The model type found.
        got: String,
    },
    /// A key that the model type needs.
    #[error("config: `{key}` is missing")]
    Missing {
        /// The key, with those of the objects around it.
        key: String,
    },
    /// A value that cannot be.
    #[error("config: `{key}` must be {expected}, got {got}")]
    Invalid {
        /// The key, with those of the objects around it.
        key: String,
        /// What it may be.
        expected: String,
        /// What it is.
        got: String,
    },
    /// Values that are fine one by one, but not together.
    #[error("config: {0}")]
    Layer(String),
}

/// A checkpoint that could not be read or written. Nothing of it has been loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// `config.json` describes no KDA model.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A file is not what its name says.
    #[error("{}: {problem}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The layer has other attention than KDA, or is not in the model.
    #[error("layer {layer}, counted from 0, is no KDA layer; those are {}", list(kda_layers))]
    NotKda {
        /// The layer asked for, from 0.
        layer: usize,
        /// The KDA layers of the model.
        kda_layers: Vec<usize>,
    },
    /// The layer lacks a tensor.
    #[error("`{name}` is missing; expected {expected}")]
    Missing {
        /// The tensor.
        name: String,
        /// Its shape.
        expected: String,
    },
    /// The layer has a tensor that belongs to no KDA layer of this configuration.
    #[error("`{name}` is not expected; the layer's tensors are {}", expected.join(", "))]
    Unexpected {
        /// The tensor.
        name: String,
        /// The tensors of the layer.
        expected: Vec<String>,
    },
    /// A tensor has another shape.
    #[error("`{name}` has shape {got:?}; expected {expected}")]
    Shape {
        /// The tensor.
        name: String,
        /// What it may be.
        expected: String,
        /// What it is.
        got: Vec<usize>,
    },
    /// A tensor has a dtype that holds no weights.
    #[error("`{name}` has dtype {got}; expected BF16, F16 or F32")]
    Dtype {
        /// The tensor.
        name: String,
        /// What it is.
        got: String,
    },
    /// A layout was asked for in a dtype that checkpoints do not have.
    #[error("a layout's dtype must be F32, BF16 or F16, got {got:?}")]
    LayoutDtype {
        /// The dtype asked for.
        got: FloatDType,
    },
    /// A decay rate beyond the last head.
    #[error("`{name}` has {value} at {index}, past its {heads} heads; expected +0")]
    Tail {
        /// The tensor.
        name: String,
        /// Value heads of the layer.
        heads: usize,
        /// Where the number stands.
        index: usize,
        /// The number.
        value: f32,
    },
    /// The device cannot hold the precision asked for.
    #[error("the device {device} does not support {precision:?}")]
    Precision {
        /// The precision asked for.
        precision: FloatDType,
        /// The device.
        device: String,
    },
    /// A tensor could not be put into a module or taken out of it.
    #[error("`{name}`: {problem}")]
    Module {
        /// The tensor or the parameter.
        name: String,
        /// What is wrong.
        problem: String,
    },
}

impl CheckpointError {
    pub(super) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { path: path.to_path_buf(), source }
    }

    pub(super) fn file(path: &Path, problem: impl Into<String>) -> Self {
        Self::File { path: path.to_path_buf(), problem: problem.into() }
    }
}

/// Long lists are cut: an error message should fit on a screen.
fn list(layers: &[usize]) -> String {
    const MOST: usize = 100;
    let mut listed: Vec<_> = layers.iter().take(MOST).map(usize::to_string).collect();
    if layers.len() > MOST {
        listed.push(format!(".. ({} in all)", layers.len()));
    }
    if listed.is_empty() { "none".into() } else { listed.join(", ") }
}
