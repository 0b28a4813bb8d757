//! Layers written back, as they were and in Burn's own format.

use burn::module::Module;
use burn::tensor::{DType, Device, FloatDType};
use burn_kda::checkpoint::{Checkpoint, CheckpointError, LayerLayout, load_layer, save_layer, save_layers};
use burn_kda::{KdaConfig, KdaModule};
use safetensors::SafeTensors;

use super::common::array::Array;
use super::common::platform::devices;
use super::{FOLDERS, folder, scratch};

/// The layers of a checkpoint that its files hold.
fn present(checkpoint: &Checkpoint) -> Vec<usize> {
    let layers = checkpoint.config().kda_layers.iter().copied();
    layers.filter(|&layer| checkpoint.layout(layer).is_ok()).collect()
}

/// Every tensor of a folder's files as (name, dtype, shape, bytes).
fn tensors(folder: &std::path::Path) -> Vec<(String, String, Vec<usize>, Vec<u8>)> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let bytes = std::fs::read(path).unwrap();
            for (name, view) in SafeTensors::deserialize(&bytes).unwrap().iter() {
                all.push((name.into(), view.dtype().to_string(), view.shape().to_vec(), view.data().to_vec()));
            }
        }
    }
    all.sort();
    all
}

#[test]
fn layers_written_back_have_the_same_bytes() {
    for (name, _) in FOLDERS {
        let checkpoint = Checkpoint::open(folder(name)).unwrap();
        let layers = present(&checkpoint);
        assert!(!layers.is_empty(), "{name}");
        let layouts: Vec<_> = layers.iter().map(|&layer| checkpoint.layout(layer).unwrap()).collect();
        let names: Vec<_> = layouts.iter().flat_map(|layout| layout.tensors().map(|(name, _, _)| name)).collect();
        let want: Vec<_> = tensors(&folder(name)).into_iter().filter(|t| names.contains(&t.0.as_str())).collect();
        assert_eq!(want.len(), names.len());
        for (platform, device) in devices() {
            let load = |&layer: &usize| checkpoint.load(layer, &device, FloatDType::F32).unwrap();
            let modules: Vec<KdaModule> = layers.iter().map(load).collect();
            let path = scratch(&format!("round_trip_{name}_{platform}"));
            let file = path.join("model.safetensors");
            save_layers(&file, &layouts.iter().zip(&modules).collect::<Vec<_>>()).unwrap();
            assert!(tensors(&path) == want, "{platform} {name}");
            // A file of nothing but these layers is the same file.
            if tensors(&folder(name)).len() == want.len() && folder(name).join("model.safetensors").is_file() {
                let original = std::fs::read(folder(name).join("model.safetensors")).unwrap();
                assert!(std::fs::read(&file).unwrap() == original, "{platform} {name}");
            }
            assert_eq!(std::fs::read_dir(&path).unwrap().count(), 1, "a scratch file is left");
        }
    }
}

/// In bf16, a checkpoint in bf16 survives; in f32, so does one of any dtype.
#[test]
fn a_bf16_layer_in_bf16_survives() {
    let device = Device::flex();
    let checkpoint = Checkpoint::open(folder("glm5_next")).unwrap();
    let layout = checkpoint.layout(0).unwrap();
    let path = scratch("bf16");
    save_layer(path.join("a.safetensors"), &layout, &checkpoint.load(0, &device, FloatDType::BF16).unwrap()).unwrap();
    let got = tensors(&path);
    let want: Vec<_> = tensors(&folder("glm5_next")).into_iter().filter(|t| t.0.contains("layers.0.")).collect();
    assert!(!want.is_empty() && got == want);
}

/// What the module's dtype does not hold is lost, and not written as if it were there.
#[test]
fn a_layer_that_lost_digits_is_not_written() {
    let device = Device::flex();
    // Convolutions and the norm in f32 beside matrices in bf16; a precision that is neither.
    for (name, precision, named) in [
        ("kimi_k3", FloatDType::BF16, "k_conv1d.weight"),
        ("kimi_k3", FloatDType::F16, "b_proj.weight"),
        ("glm5_next", FloatDType::F16, "b_proj.weight"),
    ] {
        let checkpoint = Checkpoint::open(folder(name)).unwrap();
        let path = scratch("lost_digits").join("model.safetensors");
        let module = checkpoint.load(0, &device, precision).unwrap();
        let error = save_layer(&path, &checkpoint.layout(0).unwrap(), &module).unwrap_err();
        let CheckpointError::Module { name: found, problem } = &error else { panic!("{error}") };
        assert!(found == named && problem.contains(&format!("{precision:?} in the module")), "{error}");
        assert!(!path.exists());
    }
}

/// A layer of one's own under each family's names.
#[test]
fn a_new_layer_is_written_as_its_family_publishes() {
    let device = Device::flex();
    for (name, _) in FOLDERS {
        let checkpoint = Checkpoint::open(folder(name)).unwrap();
        let config = checkpoint.config();
        let layer = config.kda_layers[0];
        let layout = LayerLayout::published(config, layer, FloatDType::F32).unwrap();
        let module = config.layer.init(&device);
        let path = scratch(&format!("new_{name}"));
        std::fs::copy(folder(name).join("config.json"), path.join("config.json")).unwrap();
        save_layer(path.join("model.safetensors"), &layout, &module).unwrap();
        let loaded = load_layer(&path, layer, &device, FloatDType::F32).unwrap();
        let x = burn::tensor::Tensor::<3>::random([1, 5, 40], burn::tensor::Distribution::Default, &device);
        assert_eq!(Array::of(loaded.forward(x.clone())).values, Array::of(module.forward(x)).values, "{name}");

        let dtypes = LayerLayout::published(config, layer, FloatDType::BF16).unwrap();
        for (tensor, _, dtype) in dtypes.tensors() {
            let wide = tensor.ends_with("A_log") || tensor.ends_with("dt_bias");
            assert_eq!(dtype, if wide { DType::F32 } else { DType::BF16 }, "{tensor}");
        }
        assert!(matches!(LayerLayout::published(config, 99, FloatDType::F32), Err(CheckpointError::NotKda { .. })));
        assert!(matches!(
            LayerLayout::published(config, layer, FloatDType::F64),
            Err(CheckpointError::LayoutDtype { got: FloatDType::F64 })
        ));
    }
}

#[test]
fn a_published_layout_has_the_names_and_shapes_of_the_fixture() {
    for name in ["kimi_linear", "kimi_k3", "glm5_next", "bailing_hybrid", "kda"] {
        let checkpoint = Checkpoint::open(folder(name)).unwrap();
        let layer = present(&checkpoint)[0];
        let layout = checkpoint.layout(layer).unwrap();
        let new = LayerLayout::published(checkpoint.config(), layer, FloatDType::F32).unwrap();
        let heads = checkpoint.config().layer.value_heads();
        let want = layout.tensors().map(|(tensor, shape, _)| match name == "kimi_k3" && tensor.ends_with("A_log") {
            true => (tensor, vec![heads]), // without the zeros after the last head
            false => (tensor, shape.to_vec()),
        });
        let got = new.tensors().map(|(tensor, shape, _)| (tensor, shape.to_vec()));
        assert_eq!(got.collect::<Vec<_>>(), want.collect::<Vec<_>>(), "{name}");
    }
}

#[test]
fn a_module_that_is_not_of_the_layout_is_not_written() {
    let device = Device::flex();
    let checkpoint = Checkpoint::open(folder("glm5_next")).unwrap();
    let layout = checkpoint.layout(0).unwrap();
    let config = &checkpoint.config().layer;
    let path = scratch("other_module").join("model.safetensors");
    let row = |module: &KdaConfig, named: &str| {
        let error = save_layer(&path, &layout, &module.init(&device)).unwrap_err();
        assert!(matches!(&error, CheckpointError::Module { name, .. } if name == named), "{named}: {error}");
        assert!(!path.exists());
    };
    row(&config.clone().with_num_v_heads(Some(4)), "a_log");
    row(&config.clone().with_conv_size(None), "k_conv1d.weight");
    row(&config.clone().with_output_gate_bias(true), "g_b_proj.bias");

    let module = config.init(&device);
    let twice = save_layers(&path, &[(&layout, &module), (&layout, &module)]);
    assert!(matches!(twice, Err(CheckpointError::Module { .. })) && !path.exists());
    let nowhere = save_layer(path.join("no/such/folder"), &layout, &module);
    assert!(matches!(nowhere, Err(CheckpointError::File { .. })));
}

/// Burn's own records hold a loaded layer, bit by bit.
#[test]
fn a_record_of_burn_is_the_loaded_layer() {
    for (name, layers) in FOLDERS {
        for (platform, device) in devices() {
            let checkpoint = Checkpoint::open(folder(name)).unwrap();
            let loaded = checkpoint.load(layers[0], &device, FloatDType::F32).unwrap();
            let file = scratch(&format!("record_{name}_{platform}")).join("layer.bpk");
            loaded.clone().save_file(&file).unwrap();
            let read = checkpoint.config().layer.init(&device).try_load_file(&file).unwrap();
            let x = burn::tensor::Tensor::<3>::random([2, 9, 40], burn::tensor::Distribution::Default, &device);
            assert_eq!(Array::of(read.forward(x.clone())).values, Array::of(loaded.forward(x)).values);
            for (a, b) in [(&read.a_log, &loaded.a_log), (&read.dt_bias, &loaded.dt_bias)] {
                a.val().into_data().assert_eq(&b.val().into_data(), true);
            }
        }
    }
}
