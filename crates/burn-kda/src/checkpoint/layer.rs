//! The tensors of one layer as they lie in the files.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Bytes, DType, FloatDType, Shape, TensorData};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;

use super::file::TensorFile;
use super::names::{self, Entry, Layout, Style};
use super::source::Source;
use super::{CheckpointError, ModelConfig};

/// How the tensors of a layer are named, shaped and stored: what [`save_layers`](super::save_layers) needs to write them
/// as they were.
#[derive(Debug, Clone)]
pub struct LayerLayout {
    pub(super) tensors: Vec<Stored>,
}

#[derive(Debug, Clone)]
pub(super) struct Stored {
    pub entry: Entry,
    pub shape: Vec<usize>,
    pub dtype: DType,
}

impl LayerLayout {
    /// The layout of layer `layer`, from 0, as the model's family publishes it: `A_log` and `dt_bias` in f32, the rest in
    /// `dtype`. Kimi K3's rates are written without the zeros after the last head.
    ///
    /// # Errors
    ///
    /// If the layer is no KDA layer, or if `dtype` is none that checkpoints have (f32, bf16, f16).
    pub fn published(model: &ModelConfig, layer: usize, dtype: FloatDType) -> Result<Self, CheckpointError> {
        check_layer(model, layer)?;
        if !matches!(dtype, FloatDType::F32 | FloatDType::BF16 | FloatDType::F16) {
            return Err(CheckpointError::LayoutDtype { got: dtype });
        }
        let dtype = DType::from(dtype);
        let prefix = &names::prefixes(model.family, layer)[0];
        let entries = names::entries(model, prefix, names::usual_style(model.family));
        let stored = |entry: Entry| {
            let wide = entry.parts.iter().any(|(path, _)| is_decay(path));
            Stored { shape: entry.layout.usual(), dtype: if wide { DType::F32 } else { dtype }, entry }
        };
        Ok(Self { tensors: entries.into_iter().map(stored).collect() })
    }

    /// Name, shape and dtype of each tensor, sorted by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &[usize], DType)> {
        self.tensors.iter().map(|tensor| (tensor.entry.name.as_str(), &tensor.shape[..], tensor.dtype))
    }
}

pub(super) fn check_layer(model: &ModelConfig, layer: usize) -> Result<(), CheckpointError> {
    if model.kda_layers.contains(&layer) {
        return Ok(());
    }
    Err(CheckpointError::NotKda { layer, kda_layers: model.kda_layers.clone() })
}

/// A parameter in a file.
pub(super) struct Part {
    pub path: &'static str,
    /// As PyTorch has it: a matrix is `[out, in]`.
    pub shape: Shape,
    pub dtype: DType,
    file: Arc<TensorFile>,
    info: TensorInfo,
    bytes: Range<usize>,
}

impl Part {
    pub(super) fn read(&self) -> Result<TensorData, CheckpointError> {
        let bytes = Bytes::from_bytes_vec(self.file.read(&self.info, self.bytes.clone())?);
        let data = TensorData::try_from_bytes(bytes, self.shape.clone(), self.dtype);
        data.map_err(|e| CheckpointError::file(self.file.path(), e.to_string()))
    }

    /// Whether it is a decay parameter, which stays wide: a decay rounded to 8 bits forgets at another rate.
    pub(super) fn is_decay(&self) -> bool {
        is_decay(self.path)
    }
}

fn is_decay(path: &str) -> bool {
    matches!(path, "a_log" | "dt_bias")
}

/// A layer's layout with the places of its tensors.
pub(super) struct Located {
    pub layout: LayerLayout,
    places: Vec<(Arc<TensorFile>, TensorInfo)>,
}

impl Located {
    /// Finds every tensor of the layer and checks it, before anything but headers is read.
    pub(super) fn find(source: &Source, model: &ModelConfig, layer: usize) -> Result<Self, CheckpointError> {
        check_layer(model, layer)?;
        let (prefix, style) = naming(source, model, layer);
        let entries = names::entries(model, &prefix, style);
        let held = source.below(&prefix)?;
        if let Some(name) = held.keys().find(|name| entries.iter().all(|entry| entry.name != **name)) {
            let expected = entries.into_iter().map(|entry| entry.name).collect();
            return Err(CheckpointError::Unexpected { name: name.clone(), expected });
        }
        let (mut tensors, mut places) = (Vec::new(), Vec::new());
        for entry in entries {
            let (name, expected) = (entry.name.clone(), entry.layout.expected());
            let place = held.get(&name).and_then(|file| Some((file, file.info(&name)?)));
            let Some((file, info)) = place else { return Err(CheckpointError::Missing { name, expected }) };
            if !entry.layout.accepts(&info.shape) {
                return Err(CheckpointError::Shape { name, expected, got: info.shape.clone() });
            }
            let dtype = match info.dtype {
                Dtype::F32 => DType::F32,
                Dtype::BF16 => DType::BF16,
                Dtype::F16 => DType::F16,
                other => return Err(CheckpointError::Dtype { name, got: other.to_string() }),
            };
            places.push((file.clone(), info.clone()));
            tensors.push(Stored { entry, shape: info.shape.clone(), dtype });
        }
        let located = Self { layout: LayerLayout { tensors }, places };
        located.check_tail()?;
        Ok(located)
    }

    /// The parameters of the layer, each of one tensor or of some of its rows.
    pub(super) fn parts(&self) -> impl Iterator<Item = Part> {
        self.layout.tensors.iter().zip(&self.places).flat_map(|(stored, (file, info))| {
            let row = stored.entry.columns() * stored.dtype.size();
            let mut end = 0;
            stored.entry.parts.iter().map(move |&(path, rows)| {
                let start = end;
                end += rows * row;
                let shape = stored.entry.layout.of_rows(rows);
                Part { path, shape, dtype: stored.dtype, file: file.clone(), info: info.clone(), bytes: start..end }
            })
        })
    }

    /// Rates past the last head must be zero: they would be dropped.
    fn check_tail(&self) -> Result<(), CheckpointError> {
        for (stored, (file, info)) in self.layout.tensors.iter().zip(&self.places) {
            let Layout::Rates { heads, .. } = stored.entry.layout else { continue };
            let all = info.data_offsets.1 - info.data_offsets.0;
            let tail = file.read(info, heads * stored.dtype.size()..all)?;
            let len = tail.len() / stored.dtype.size();
            let tail = TensorData::from_bytes_vec(tail, [len], stored.dtype);
            // By their bits: -0 would not be written back.
            if let Some((i, value)) = tail.iter::<f32>().enumerate().find(|(_, value)| value.to_bits() != 0) {
                let name = stored.entry.name.clone();
                return Err(CheckpointError::Tail { name, heads, index: heads + i, value });
            }
        }
        Ok(())
    }
}

/// The first naming of the family under which the layer has a tensor; else the published one, so that an error names
/// what is expected. No single tensor decides: it may be the one that is missing, or one too many.
fn naming(source: &Source, model: &ModelConfig, layer: usize) -> (String, Style) {
    let prefixes = names::prefixes(model.family, layer);
    let used = prefixes.iter().find(|prefix| source.any_below(prefix));
    let prefix = used.unwrap_or(&prefixes[0]).clone();
    let has = |name: &str| source.contains(&format!("{prefix}{name}"));
    let gate = source.any_below(&format!("{prefix}forget_gate."));
    let native = gate || has("conv1d.weight") && !has("q_conv1d.weight");
    let style = if native { Style::Native } else { names::usual_style(model.family) };
    (prefix, style)
}
