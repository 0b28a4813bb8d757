//! Layers from files.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::{DType, Device, FloatDType};
use burn_store::{ApplyError, ModuleSnapshot, PyTorchToBurnAdapter, bridge};

use super::layer::{LayerLayout, Located};
use super::source::{Source, read_json};
use super::{CheckpointError, ModelConfig};
use crate::{KdaConfig, KdaModule, precision};

/// A published model on disk: its configuration, and its KDA layers on demand.
///
/// # Example
///
/// ```no_run
/// use burn::tensor::{Device, FloatDType};
/// use burn_kda::checkpoint::Checkpoint;
///
/// let checkpoint = Checkpoint::open("Kimi-Linear-48B-A3B-Instruct")?;
/// for &layer in &checkpoint.config().kda_layers {
///     let layer = checkpoint.load(layer, &Device::default(), FloatDType::F32)?;
///     println!("{layer}");
/// }
/// # Ok::<_, burn_kda::checkpoint::CheckpointError>(())
/// ```
#[derive(Debug)]
pub struct Checkpoint {
    config: ModelConfig,
    source: Source,
}

/// The decay parameters of a layer, in f32.
#[derive(Debug, Clone, PartialEq)]
pub struct DecayParameters {
    /// `[HV]`.
    pub a_log: Vec<f32>,
    /// `[HV * K]`.
    pub dt_bias: Vec<f32>,
}

impl Checkpoint {
    /// Opens a folder with `config.json` and `model.safetensors` or `model.safetensors.index.json`; or one of the latter
    /// two, by any name, beside a `config.json`, in which the last of two equal keys counts. Reads no tensor.
    ///
    /// # Errors
    ///
    /// If a file is missing or malformed, if a folder has both a model and an index, or if the configuration is of no
    /// KDA model.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let path = path.as_ref();
        let folder: PathBuf = if path.is_dir() { path.into() } else { path.parent().unwrap_or(Path::new("")).into() };
        let config = KdaConfig::from_hf(&read_json(&folder.join("config.json"))?)?;
        Ok(Self { config, source: Source::open(path)? })
    }

    /// What `config.json` says.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Names, shapes and dtypes of a layer's tensors, having checked them as [`load`](Self::load) does.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    pub fn layout(&self, layer: usize) -> Result<LayerLayout, CheckpointError> {
        Ok(Located::find(&self.source, &self.config, layer)?.layout)
    }

    /// The decay parameters of a layer; reads no other tensor.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    pub fn decay(&self, layer: usize) -> Result<DecayParameters, CheckpointError> {
        let located = Located::find(&self.source, &self.config, layer)?;
        let read = |path: &str| {
            let part = located.parts().find(|part| part.path == path).expect("every layer has decay parameters");
            Ok::<_, CheckpointError>(part.read()?.iter::<f32>().collect())
        };
        Ok(DecayParameters { a_log: read("a_log")?, dt_bias: read("dt_bias")? })
    }

    /// Loads layer `layer`, counted from 0 over all layers of the model.
    ///
    /// Weights become `precision`, `A_log` and `dt_bias` f32 (f64 in f64). Each tensor is read, converted and handed to
    /// the device before the next one: beside the layer, one tensor at a time is held, as read, converted and
    /// transposed.
    ///
    /// # Errors
    ///
    /// If the layer is no KDA layer, if a tensor below its prefix is missing, unknown, misshapen or in a dtype other than
    /// bf16, f16 and f32, if `A_log` has a number other than +0 past the last head, if a file cannot be read, or if the
    /// device does not support `precision`.
    pub fn load(&self, layer: usize, device: &Device, precision: FloatDType) -> Result<KdaModule, CheckpointError> {
        let dtype = DType::from(precision);
        let wide = precision::accumulation(dtype);
        // Flex32 is f32 with a licence to be less, which these parameters are not for.
        if dtype == DType::Flex32 || [dtype, wide].iter().any(|dtype| !device.supports_dtype(*dtype)) {
            return Err(CheckpointError::Precision { precision, device: format!("{device:?}") });
        }
        let located = Located::find(&self.source, &self.config, layer)?;
        // burn-store would hand on the text of an error alone.
        let unread = Arc::new(Mutex::new(None));
        let tensors = located.parts().map(|part| {
            let unread = Arc::clone(&unread);
            let dtype = if part.is_decay() { wide } else { dtype };
            let (path, shape) = (part.path.into(), part.shape.clone());
            bridge::deferred(path, dtype, shape, None, move || {
                let data = part.read().map_err(|error| {
                    let text = error.to_string();
                    unread.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    burn_pack::Error::IoError(text)
                })?;
                data.try_cast(dtype).map_err(|e| burn_pack::Error::ValidationError(e.to_string()))
            })
        });
        let tensors = tensors.collect();

        let mut module = self.config.layer.init(device);
        let result = module.apply(tensors, None, Some(Box::new(PyTorchToBurnAdapter)), false);
        if let Some(error) = unread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return Err(error);
        }
        let failed = result.errors.first().map(|error| (path_of(error).to_string(), error.to_string()));
        let missing =
            result.missing.into_iter().next().map(|(path, _)| (path, "no tensor of the file is for it".into()));
        let unused = result.unused.into_iter().next().map(|path| (path, "the module has no such parameter".into()));
        match failed.or(missing).or(unused) {
            Some((name, problem)) => Err(CheckpointError::Module { name, problem }),
            None => Ok(module),
        }
    }
}

fn path_of(error: &ApplyError) -> &str {
    match error {
        ApplyError::ShapeMismatch { path, .. }
        | ApplyError::DTypeMismatch { path, .. }
        | ApplyError::AdapterError { path, .. }
        | ApplyError::LoadError { path, .. } => path,
    }
}

/// Loads one KDA layer of a published model, `layer` counted from 0 over all layers; see [`Checkpoint::open`] for `path`
/// and [`Checkpoint::load`] for the rest.
///
/// # Errors
///
/// As those two.
pub fn load_layer(
    path: impl AsRef<Path>,
    layer: usize,
    device: &Device,
    precision: FloatDType,
) -> Result<KdaModule, CheckpointError> {
    Checkpoint::open(path)?.load(layer, device, precision)
}

/// Loads every KDA layer of a published model, with its number in the model, from 0. All of them are in memory at the
/// end; [`Checkpoint::load`] gives one at a time.
///
/// # Errors
///
/// As [`load_layer`]; with an error no layer is returned.
pub fn load_all(
    path: impl AsRef<Path>,
    device: &Device,
    precision: FloatDType,
) -> Result<Vec<(usize, KdaModule)>, CheckpointError> {
    let checkpoint = Checkpoint::open(path)?;
    let layers = checkpoint.config.kda_layers.iter();
    layers.map(|&layer| Ok((layer, checkpoint.load(layer, device, precision)?))).collect()
}
