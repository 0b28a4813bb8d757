//! Layers to files, named and stored as they were.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use burn::tensor::DType;
use burn_pack::{AtomicFile, Tensor};
use burn_store::{BurnToPyTorchAdapter, ModuleSnapshot, bridge};
use safetensors::{Dtype, View, serialize_to_file};

use super::CheckpointError;
use super::layer::{LayerLayout, Stored};
use crate::KdaModule;

/// Writes layers to one safetensors file, each as its layout says. A layer that was loaded in a precision that holds
/// every dtype of its layout, as f32 does, and not changed has the same numbers again, bit for bit.
///
/// The layout is that of the checkpoint ([`Checkpoint::layout`](super::Checkpoint::layout)), or that of the family
/// ([`LayerLayout::published`]). The file appears when it is complete and replaces another of its name.
///
/// # Errors
///
/// If a layer has other parameters than its layout, if one of them is in a dtype that does not hold that of the layout,
/// if two layouts share a name, or if the file cannot be written.
pub fn save_layers(path: impl AsRef<Path>, layers: &[(&LayerLayout, &KdaModule)]) -> Result<(), CheckpointError> {
    let path = path.as_ref();
    let failure = Mutex::new(None);
    let mut views = Vec::new();
    for (layout, module) in layers {
        views.extend(layer_views(layout, module, &failure)?);
    }
    let mut names: Vec<_> = views.iter().map(|(name, _)| name).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(module_error(pair[0], "in two layers"));
    }

    let io = |e: &dyn std::fmt::Display| CheckpointError::file(path, e.to_string());
    let (scratch, reserved) = AtomicFile::create(path).map_err(|e| io(&e))?;
    drop(reserved); // the file is written by name
    // What transformers asks of a file that it is to load.
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    serialize_to_file(views, Some(metadata), scratch.path()).map_err(|e| io(&e))?;
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => scratch.commit().map_err(|e| io(&e)),
    }
}

/// [`save_layers`] of one layer.
///
/// # Errors
///
/// As [`save_layers`].
pub fn save_layer(path: impl AsRef<Path>, layout: &LayerLayout, module: &KdaModule) -> Result<(), CheckpointError> {
    save_layers(path, &[(layout, module)])
}

type Failure = Mutex<Option<CheckpointError>>;

fn layer_views<'a>(
    layout: &'a LayerLayout,
    module: &KdaModule,
    failure: &'a Failure,
) -> Result<Vec<(&'a str, StoredView<'a>)>, CheckpointError> {
    let tensors = module.collect(None, Some(Box::new(BurnToPyTorchAdapter)), false);
    let mut tensors: HashMap<_, _> = tensors.into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
    let mut views = Vec::new();
    for stored in &layout.tensors {
        let mut parts = Vec::new();
        for (path, rows) in &stored.entry.parts {
            let tensor = tensors.remove(*path).ok_or_else(|| module_error(path, "the module has no such parameter"))?;
            let (want, got) = (stored.entry.layout.of_rows(*rows), &tensor.shape);
            if *got != want {
                return Err(module_error(path, &format!("{got:?} in the module, {want:?} in the layout")));
            }
            if !holds(tensor.dtype, stored.dtype) {
                let problem =
                    format!("{:?} in the module, which does not hold the layout's {:?}", tensor.dtype, stored.dtype);
                return Err(module_error(path, &problem));
            }
            parts.push(tensor);
        }
        views.push((stored.entry.name.as_str(), StoredView { stored, parts, failure }));
    }
    match tensors.into_keys().min() {
        Some(path) => Err(module_error(&path, "not in the layout")),
        None => Ok(views),
    }
}

/// Whether a number of the dtype `stored` survives in `module`: what is written must not claim digits that were lost.
fn holds(module: DType, stored: DType) -> bool {
    module == stored || matches!(module, DType::F32 | DType::F64)
}

fn module_error(name: &str, problem: &str) -> CheckpointError {
    CheckpointError::Module { name: name.into(), problem: problem.into() }
}

/// A tensor of the file, read from its device when it is written.
struct StoredView<'a> {
    stored: &'a Stored,
    parts: Vec<Tensor>,
    failure: &'a Failure,
}

impl StoredView<'_> {
    fn bytes(&self) -> Result<Vec<u8>, burn_pack::Error> {
        let mut bytes = Vec::with_capacity(self.data_len());
        for part in &self.parts {
            let data = bridge::to_data(part)?.try_cast(self.stored.dtype);
            let data = data.map_err(|e| burn_pack::Error::ValidationError(e.to_string()))?;
            bytes.extend_from_slice(data.as_bytes());
        }
        Ok(bytes)
    }
}

impl View for StoredView<'_> {
    fn dtype(&self) -> Dtype {
        match self.stored.dtype {
            DType::BF16 => Dtype::BF16,
            DType::F16 => Dtype::F16,
            _ => Dtype::F32, // a layout has no other dtype
        }
    }

    fn shape(&self) -> &[usize] {
        &self.stored.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut bytes = self.bytes().unwrap_or_else(|error| {
            let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
            failure.get_or_insert(module_error(&self.stored.entry.name, &error.to_string()));
            Vec::new()
        });
        // Zeros past the last head, and in place of what could not be read: the file will not be kept.
        bytes.resize(self.data_len(), 0);
        bytes.into()
    }

    fn data_len(&self) -> usize {
        self.stored.shape.iter().product::<usize>() * self.stored.dtype.size()
    }
}
