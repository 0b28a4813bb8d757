//! The tensors of one layer as they lie in the files.

use std::sync::Arc;

use burn::tensor::DType;
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
    /// `dtype`.
    ///
    /// # Errors
    ///
    /// If the layer is no KDA layer, or if `dtype` is none that checkpoints have (f32, bf16, f16).
    pub fn published(model: &ModelConfig, layer: usize, dtype: DType) -> Result<Self, CheckpointError> {
        check_layer(model, layer)?;
        if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
            return Err(CheckpointError::Dtype { name: format!("layer {layer}"), got: format!("{dtype:?}") });
        }
        let prefix = &names::prefixes(model.family, layer)[0];
        let entries = names::entries(model, prefix, names::usual_style(model.family));
        let stored = |entry: Entry| {
            let wide = entry.parts.iter().any(|(path, _)| matches!(*path, "a_log" | "dt_bias"));
            Stored { shape: entry.usual_shape(), dtype: if wide { DType::F32 } else { dtype }, entry }
        };
        Ok(Self { tensors: entries.into_iter().map(stored).collect() })
    }

    /// Name, shape and dtype of each tensor, sorted by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &[usize], DType)> {
        self.tensors.iter().map(|tensor| (tensor.entry.name.as_str(), &tensor.shape[..], tensor.dtype))
    }

    /// The place of a parameter: its tensor and the row it starts at.
    pub(super) fn find(&self, path: &str) -> Option<(&Stored, usize)> {
        self.tensors.iter().find_map(|tensor| {
            let mut row = 0;
            for (part, rows) in &tensor.entry.parts {
                if *part == path {
                    return Some((tensor, row));
                }
                row += rows;
            }
            None
        })
    }
}

pub(super) fn check_layer(model: &ModelConfig, layer: usize) -> Result<(), CheckpointError> {
    if model.kda_layers.contains(&layer) {
        return Ok(());
    }
    Err(CheckpointError::NotKda { layer, kda_layers: model.kda_layers.clone() })
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

    /// What lies in the file for the parameter `path`: dtype, and a reader of its bytes.
    pub(super) fn part(
        &self,
        path: &str,
    ) -> Option<(DType, impl Fn() -> Result<Vec<u8>, CheckpointError> + Send + Sync + 'static)> {
        let (stored, row) = self.layout.find(path)?;
        let at = self.layout.tensors.iter().position(|other| std::ptr::eq(other, stored))?;
        let (file, info) = self.places[at].clone();
        let (_, rows) = stored.entry.parts.iter().find(|(part, _)| *part == path)?;
        let bytes_per_row = stored.entry.columns() * stored.dtype.size();
        let range = row * bytes_per_row..(row + rows) * bytes_per_row;
        Some((stored.dtype, move || file.read(&info, range.clone())))
    }

    /// Rates past the last head must be zero: they would be dropped.
    fn check_tail(&self) -> Result<(), CheckpointError> {
        for (stored, (file, info)) in self.layout.tensors.iter().zip(&self.places) {
            let Layout::Rates { heads, .. } = stored.entry.layout else { continue };
            let (start, end) = (heads * stored.dtype.size(), info.data_offsets.1 - info.data_offsets.0);
            let tail = super::load::floats(file.read(info, start..end)?, stored.dtype);
            if let Some((i, &value)) = tail.iter().enumerate().find(|(_, value)| **value != 0.0) {
                let name = stored.entry.name.clone();
                return Err(CheckpointError::Tail { name, heads, index: heads + i, value });
            }
        }
        Ok(())
    }
}

/// The first naming of the family under which the layer has a query projection; else the published one, so that an error
/// names what is expected.
fn naming(source: &Source, model: &ModelConfig, layer: usize) -> (String, Style) {
    let prefixes = names::prefixes(model.family, layer);
    let used = prefixes.iter().find(|prefix| source.contains(&format!("{prefix}q_proj.weight")));
    let prefix = used.unwrap_or(&prefixes[0]).clone();
    let native = ["conv1d.weight", "forget_gate.A_log"].iter().any(|name| source.contains(&format!("{prefix}{name}")));
    let style = if native { Style::Native } else { names::usual_style(model.family) };
    (prefix, style)
}
