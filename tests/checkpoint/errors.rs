//! What is wrong with a checkpoint is named, and nothing of it is loaded.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn::tensor::{Device, FloatDType};
use burn_kda::checkpoint::{Checkpoint, CheckpointError, ConfigError, LayerLayout, load_all, load_layer};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors, serialize_to_file};

use super::common::platform::devices;
use super::{folder, scratch};

/// Tensors that can be changed and written again.
#[derive(Clone)]
pub struct Tensors(pub BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>);

impl Tensors {
    pub fn of(folder: &Path) -> Self {
        let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let owned = |(name, view): (&str, TensorView)| {
            (name.to_string(), (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
        };
        Self(tensors.iter().map(owned).collect())
    }

    /// Writes a folder of its own, beside the `config.json` of `from`.
    pub fn write(&self, from: &Path, name: &str) -> PathBuf {
        let path = scratch(name);
        std::fs::copy(from.join("config.json"), path.join("config.json")).unwrap();
        self.save(&path.join("model.safetensors"));
        path
    }

    pub fn save(&self, file: &Path) {
        let views = self
            .0
            .iter()
            .map(|(name, (dtype, shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
        serialize_to_file(views, None, file).unwrap();
    }
}

/// The error of loading layer 0 after `change`.
fn error_after(family: &str, name: &str, change: impl Fn(&mut Tensors)) -> CheckpointError {
    let mut tensors = Tensors::of(&folder(family));
    change(&mut tensors);
    let path = tensors.write(&folder(family), name);
    let errors = devices().into_iter().map(|(platform, device)| {
        let error = load_layer(&path, 0, &device, FloatDType::F32).err();
        error.unwrap_or_else(|| panic!("{family} on {platform}: loaded"))
    });
    let error = errors.last().unwrap();
    assert!(load_all(&path, &Device::flex(), FloatDType::F32).is_err());
    error
}

const GLM: &str = "model.language_model.layers.0.self_attn.";
const K3: &str = "language_model.model.layers.0.self_attn.";

#[test]
fn every_missing_tensor_is_named_with_its_shape() {
    for (family, prefix) in [("glm5_next", GLM), ("kimi_k3", K3), ("kda", "model.layers.0.attn.")] {
        let all = Tensors::of(&folder(family));
        let names: Vec<_> = all.0.keys().filter(|name| name.starts_with(prefix)).cloned().collect();
        assert!(names.len() >= 14, "{names:?}");
        for name in names {
            let error = error_after(family, "missing", |tensors| drop(tensors.0.remove(&name)));
            assert!(
                matches!(&error, CheckpointError::Missing { name: named, .. } if *named == name),
                "{name}: {error}"
            );
            // Kimi K3 has more rates than heads.
            let rows = if name.ends_with("A_log") { "]".into() } else { format!("[{}", all.0[&name].1[0]) };
            assert!(error.to_string().contains(&rows), "{error}");
        }
    }
}

/// transformers' run-time names, where a convolution or the gate may be the one that is missing.
#[test]
fn every_missing_tensor_of_transformers_names_is_named() {
    for family in ["kimi_linear_native", "glm5_next_native", "bailing_hybrid_native"] {
        let all = Tensors::of(&folder(family));
        for name in all.0.keys() {
            let mut tensors = all.clone();
            tensors.0.remove(name);
            let path = tensors.write(&folder(family), "missing_native");
            let error = load_layer(path, 1, &Device::flex(), FloatDType::F32).unwrap_err();
            assert!(matches!(&error, CheckpointError::Missing { name: named, .. } if named == name), "{name}: {error}");
        }
    }
}

#[test]
fn a_tensor_too_many_is_named() {
    for name in ["q_proj.bias", "q_proj.weight_scale", "g_proj.weight", "conv1d.weight", "rotary_emb.inv_freq"] {
        let name = format!("{GLM}{name}");
        let error = error_after("glm5_next", "extra", |tensors| {
            tensors.0.insert(name.clone(), (Dtype::F32, vec![1], vec![0; 4]));
        });
        let CheckpointError::Unexpected { name: named, expected } = &error else { panic!("{name}: {error}") };
        assert_eq!(*named, name, "{error}");
        assert!(expected.iter().any(|name| name.ends_with("o_proj.weight")), "{error}");
    }
    // Beside the layer, anything may be.
    let mut tensors = Tensors::of(&folder("glm5_next"));
    tensors.0.insert(GLM.replace(".0.", ".00.") + "q_proj.bias", (Dtype::U8, vec![1], vec![0]));
    let path = tensors.write(&folder("glm5_next"), "beside");
    load_layer(path, 0, &Device::flex(), FloatDType::F32).unwrap();
}

#[test]
fn every_misshapen_tensor_is_named_with_both_shapes() {
    for (family, prefix) in [("glm5_next", GLM), ("kimi_k3", K3)] {
        let all = Tensors::of(&folder(family));
        for (name, (_, shape, _)) in all.0.iter().filter(|(name, _)| name.starts_with(prefix)) {
            if name.ends_with("A_log") {
                continue; // any shape of one long axis will do; its length has a test of its own
            }
            let axis_more = [&shape[..], &[1]].concat();
            let transposed = shape.iter().rev().copied().collect();
            let flat = vec![shape.iter().product()];
            let row_less = [&[shape[0] - 1][..], &shape[1..]].concat();
            for wrong in [axis_more, transposed, flat, row_less].into_iter().filter(|wrong| wrong != shape) {
                let error = error_after(family, "misshapen", |tensors| {
                    let tensor = tensors.0.get_mut(name).unwrap();
                    let size = tensor.2.len() / tensor.1.iter().product::<usize>();
                    tensor.2.truncate(size * wrong.iter().product::<usize>());
                    tensor.1 = wrong.clone();
                });
                let CheckpointError::Shape { name: named, got, .. } = &error else { panic!("{name}: {error}") };
                assert!(named == name && *got == wrong, "{error}");
            }
        }
    }
}

#[test]
fn a_dtype_without_weights_is_named() {
    for (dtype, size) in [(Dtype::F8_E4M3, 1), (Dtype::I8, 1), (Dtype::U16, 2), (Dtype::I32, 4), (Dtype::F64, 8)] {
        for name in ["q_proj.weight", "A_log", "k_conv1d.weight"] {
            let name = format!("{GLM}{name}");
            let error = error_after("glm5_next", "dtype", |tensors| {
                let tensor = tensors.0.get_mut(&name).unwrap();
                tensor.0 = dtype;
                tensor.2 = vec![0; size * tensor.1.iter().product::<usize>()];
            });
            let named = matches!(&error, CheckpointError::Dtype { name: named, .. } if *named == name);
            assert!(named && error.to_string().contains(&dtype.to_string()), "{error}");
        }
    }
}

/// Kimi K3 has more rates than heads. What is past the last head must be zero, and no other family has anything there.
#[test]
fn rates_past_the_last_head_must_be_zero() {
    let rates = |family: &str, name: String, values: &[f32]| {
        let mut tensors = Tensors::of(&folder(family));
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        tensors.0.insert(name, (Dtype::F32, vec![values.len()], bytes));
        let path = tensors.write(&folder(family), "tail");
        let layer = load_layer(&path, 0, &Device::flex(), FloatDType::F32);
        layer.map(|layer| layer.a_log.val().into_data().iter::<f32>().collect::<Vec<_>>())
    };
    let k3 = |values: &[f32]| rates("kimi_k3", format!("{K3}A_log"), values);
    assert_eq!(k3(&[0.5, -0.25, 1.0, 0.0]).unwrap(), [0.5, -0.25, 1.0]);
    let padded = |len: usize| [&[0.5, -0.25, 1.0][..], &vec![0.0; len - 3]].concat();
    assert_eq!(k3(&padded(128)).unwrap(), [0.5, -0.25, 1.0]);
    assert!(matches!(k3(&padded(129)), Err(CheckpointError::Shape { .. })));
    assert_eq!(k3(&[0.5, -0.25, 1.0]).unwrap(), [0.5, -0.25, 1.0]);
    // -0 would be written back as +0.
    let tails = [[1e-30, 0.0], [0.0, f32::NAN], [-0.0, 0.0], [0.0, -0.0]];
    for ([first, second], index) in tails.into_iter().zip([3, 4, 3, 4]) {
        let values = [0.5, 0.0, 1.0, first, second];
        let error = k3(&values).unwrap_err();
        let CheckpointError::Tail { name, heads: 3, index: at, .. } = &error else { panic!("{error}") };
        assert!(name.ends_with("A_log") && *at == index, "{error}");
    }
    assert!(matches!(k3(&[0.5, 0.0]), Err(CheckpointError::Shape { .. })));
    let glm = rates("glm5_next", format!("{GLM}A_log"), &[0.5, 1.0, 0.0]);
    assert!(matches!(glm, Err(CheckpointError::Shape { .. })));
}

#[test]
fn other_layers_are_refused() {
    for (family, layer) in [("kimi_linear", 3), ("kimi_linear", 5), ("kda", 1), ("bailing_hybrid", 2), ("glm5_next", 3)]
    {
        let error = load_layer(folder(family), layer, &Device::flex(), FloatDType::F32).unwrap_err();
        let CheckpointError::NotKda { layer: named, kda_layers } = &error else { panic!("{error}") };
        assert!(*named == layer && !kda_layers.contains(&layer));
        assert!(error.to_string().contains("counted from 0"), "{error}");
    }
    // A long list is cut.
    let mut model = Checkpoint::open(folder("kda")).unwrap().config().clone();
    model.kda_layers = (1..5000).collect();
    let error = LayerLayout::published(&model, 0, FloatDType::F32).unwrap_err().to_string();
    assert!(error.len() < 600 && error.ends_with("99, 100, .. (4999 in all)"), "{error}");
    // A KDA layer that the files lack: where it would be.
    let error = load_layer(folder("glm5_next"), 2, &Device::flex(), FloatDType::F32).unwrap_err();
    let want = "model.language_model.layers.2.self_attn.A_log";
    assert!(matches!(&error, CheckpointError::Missing { name, .. } if name == want), "{error}");
}

#[test]
fn a_precision_the_device_lacks_is_an_error() {
    for (_, device) in devices() {
        for precision in [FloatDType::F64, FloatDType::F32, FloatDType::Flex32, FloatDType::F16, FloatDType::BF16] {
            let result = load_layer(folder("glm5_next"), 0, &device, precision);
            if precision != FloatDType::Flex32 && device.supports_dtype(precision) {
                assert_eq!(result.unwrap().q_proj.weight.val().dtype(), precision.into());
            } else {
                assert!(matches!(result, Err(CheckpointError::Precision { .. })), "{precision:?}");
            }
        }
    }
}

#[test]
fn files_that_are_missing_are_named() {
    let open = |path: &Path| Checkpoint::open(path).err().unwrap();
    let path = scratch("empty");
    assert!(matches!(open(&path), CheckpointError::Io { path, .. } if path.ends_with("config.json")));
    std::fs::copy(folder("glm5_next").join("config.json"), path.join("config.json")).unwrap();
    let error = open(&path).to_string();
    assert!(error.contains("model.safetensors.index.json") && error.contains("empty"), "{error}");
    assert!(matches!(open(&path.join("other.safetensors")), CheckpointError::Io { .. }));
    std::fs::write(path.join("config.json"), "{").unwrap();
    assert!(matches!(open(&path), CheckpointError::File { path, .. } if path.ends_with("config.json")));
    std::fs::write(path.join("config.json"), "{}").unwrap();
    assert!(matches!(open(&path), CheckpointError::Config(ConfigError::Missing { key }) if key == "model_type"));
}

/// Either could be a leftover.
#[test]
fn a_folder_with_a_model_and_an_index_is_refused() {
    let path = scratch("both");
    for entry in std::fs::read_dir(folder("kimi_linear")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), path.join(entry.file_name())).unwrap();
    }
    let index = path.join("model.safetensors.index.json");
    std::fs::copy(path.join("model-00001-of-00002.safetensors"), path.join("model.safetensors")).unwrap();
    let error = Checkpoint::open(&path).unwrap_err();
    let CheckpointError::File { path: named, problem } = &error else { panic!("{error}") };
    assert!(*named == path && problem.contains("both model.safetensors.index.json and model.safetensors "), "{error}");
    assert_eq!(load_all(index, &Device::flex(), FloatDType::F32).unwrap().len(), 4);
}

/// A file that is cut after its header was read is named, as one that was short from the start.
#[test]
fn a_file_cut_while_open_is_named() {
    for (_, device) in devices() {
        let path = Tensors::of(&folder("glm5_next")).write(&folder("glm5_next"), "cut_while_open");
        let file = path.join("model.safetensors");
        let checkpoint = Checkpoint::open(&path).unwrap();
        let header = u64::from_le_bytes(std::fs::read(&file).unwrap()[..8].try_into().unwrap());
        std::fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(8 + header).unwrap();
        let error = checkpoint.load(0, &device, FloatDType::F32).unwrap_err();
        let CheckpointError::Io { path: named, source } = &error else { panic!("{error}") };
        assert!(*named == file && source.kind() == std::io::ErrorKind::UnexpectedEof, "{error}");
    }
}

/// A file or an index of any name, beside `config.json`.
#[test]
fn files_may_be_named() {
    let device = Device::flex();
    let single = folder("glm5_next").join("model.safetensors");
    load_layer(single, 4, &device, FloatDType::F32).unwrap();
    let index = folder("kimi_linear").join("model.safetensors.index.json");
    assert_eq!(load_all(index, &device, FloatDType::F32).unwrap().len(), 4);
    // One shard alone lacks half of layer 1.
    let shard = folder("kimi_linear").join("model-00001-of-00002.safetensors");
    load_layer(&shard, 0, &device, FloatDType::F32).unwrap();
    let error = load_layer(&shard, 1, &device, FloatDType::F32).unwrap_err();
    assert!(matches!(error, CheckpointError::Missing { .. }), "{error}");
}

#[test]
fn an_index_that_lies_is_an_error() {
    let original = folder("kimi_linear");
    let shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let row = |what: &str, change: &dyn Fn(&mut serde_json::Map<String, serde_json::Value>), says: &str| {
        let path = scratch("index");
        for file in ["config.json", shards[0], shards[1]] {
            std::fs::copy(original.join(file), path.join(file)).unwrap();
        }
        let index = std::fs::read_to_string(original.join("model.safetensors.index.json")).unwrap();
        let mut index: serde_json::Value = serde_json::from_str(&index).unwrap();
        change(index["weight_map"].as_object_mut().unwrap());
        std::fs::write(path.join("model.safetensors.index.json"), index.to_string()).unwrap();
        let error = load_layer(&path, 1, &Device::flex(), FloatDType::F32).expect_err(what).to_string();
        assert!(error.contains(says), "{what}: {error}");
    };
    let name = "model.layers.1.self_attn.q_proj.weight";
    let there = |map: &serde_json::Map<String, serde_json::Value>| map[name].as_str().unwrap().to_string();
    row("not listed", &|map| drop(map.remove(name)), name);
    row(
        "in the other shard",
        &|map| {
            let other = shards[usize::from(there(map) == shards[0])];
            map.insert(name.into(), other.into());
        },
        name,
    );
    let third = || "model-3.safetensors".into();
    row("elsewhere than it is", &|map| drop(map.insert(name.into(), third())), name);
    let bias = "model.layers.1.self_attn.bias";
    row("in a file that is not there", &|map| drop(map.insert(bias.into(), third())), "model-3");
    row("too many", &|map| drop(map.insert(bias.into(), shards[0].into())), bias);
    for outside in ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""] {
        row("outside the folder", &|map| drop(map.insert(name.into(), outside.into())), "no file name");
    }
}

/// The text model alone, as it is named without the model around it.
#[test]
fn a_text_model_alone_is_found() {
    for (family, around) in [("kimi_k3", "language_model.model."), ("glm5_next", "model.language_model.")] {
        let tensors = Tensors::of(&folder(family)).0;
        let alone = |(name, tensor): (String, _)| (name.replace(around, "model."), tensor);
        let path = Tensors(tensors.into_iter().map(alone).collect()).write(&folder(family), "alone");
        let layout = Checkpoint::open(&path).unwrap().layout(0).unwrap();
        assert!(layout.tensors().all(|(name, _, _)| name.starts_with("model.layers.0.self_attn.")));
    }
}

/// Convolutions without their middle axis.
#[test]
fn convolutions_may_be_matrices() {
    let device = Device::flex();
    let mut tensors = Tensors::of(&folder("glm5_next"));
    let conv = tensors.0.iter_mut().filter(|(name, _)| name.contains("conv1d"));
    conv.for_each(|(_, (_, shape, _))| {
        shape.remove(1);
    });
    let path = tensors.write(&folder("glm5_next"), "matrices");
    let [flat, original] = [path.clone(), folder("glm5_next")].map(|path| {
        let layer = load_layer(path, 0, &device, FloatDType::F32).unwrap();
        layer.k_conv1d.unwrap().weight.val().into_data()
    });
    flat.assert_eq(&original, true);
    // And are written back as such.
    let checkpoint = Checkpoint::open(&path).unwrap();
    let layout = checkpoint.layout(0).unwrap();
    assert!(layout.tensors().any(|(name, shape, _)| name.ends_with("k_conv1d.weight") && shape == [32, 4]));
}

/// The reason for a reader of our own: shards hold experts in dtypes that Burn does not have.
#[test]
fn a_shard_with_other_dtypes_is_read() {
    use burn_store::{ModuleStore, SafetensorsStore};

    let shard = folder("kimi_linear").join("model-00001-of-00002.safetensors");
    let store = SafetensorsStore::from_file(&shard).get_all_tensors().map(|tensors| tensors.len());
    assert!(store.unwrap_err().to_string().contains("F8_E4M3"));
    load_layer(shard, 0, &Device::flex(), FloatDType::F32).unwrap();
}
