//! What reading a checkpoint allocates: a layer at a time, and nothing for what a file only claims.
//!
//! One test, in a binary of its own: the allocator counts for all threads.

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use burn::module::Module;
use burn::tensor::{Device, FloatDType};
use burn_kda::KdaConfig;
use burn_kda::checkpoint::{Checkpoint, CheckpointError, LayerLayout, load_all, load_layer, save_layers};
use serde_json::{Value, json};

struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator as it came.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), SeqCst) + layout.size();
        PEAK.fetch_max(held, SeqCst);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), SeqCst);
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The result of `call` and the most bytes it held beyond those before it.
fn peak<T>(call: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.load(SeqCst);
    PEAK.store(before, SeqCst);
    let result = call();
    (result, PEAK.load(SeqCst) - before)
}

fn scratch() -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("checkpoint_memory");
    drop(std::fs::remove_dir_all(&path));
    std::fs::create_dir_all(&path).unwrap();
    path
}

const LAYERS: usize = 8;

/// A model of eight layers, in one file of bf16.
fn write_model(path: &Path) -> usize {
    let config = json!({
        "model_type": "bailing_hybrid", "hidden_size": 512, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "head_dim": 128, "rms_norm_eps": 1e-6, "layer_group_size": 100, "short_conv_kernel_size": 4,
        "kda_safe_gate": true, "kda_lower_bound": -5.0,
    });
    std::fs::write(path.join("config.json"), config.to_string()).unwrap();
    let model = KdaConfig::from_hf(&config).unwrap();
    let module = model.layer.init(&Device::flex());
    let layouts: Vec<_> = (0..LAYERS).map(|i| LayerLayout::published(&model, i, FloatDType::BF16).unwrap()).collect();
    let layers: Vec<_> = layouts.iter().map(|layout| (layout, &module)).collect();
    save_layers(path.join("model.safetensors"), &layers).unwrap();
    module.num_params()
}

/// The file with another header of `len` claimed bytes.
fn write_header(path: &Path, claimed: u64, header: &str) {
    let data = vec![0; 1000];
    let bytes = [&claimed.to_le_bytes(), header.as_bytes(), &data].concat();
    std::fs::write(path.join("model.safetensors"), bytes).unwrap();
}

/// A Kimi K3 of one layer and only zeros, most of which are rates past its last head, without a block on disk.
fn write_sparse_rates(path: &Path, rates: usize) -> PathBuf {
    let folder = path.join("sparse");
    std::fs::create_dir_all(&folder).unwrap();
    let config = json!({
        "model_type": "kimi_k3",
        "text_config": {
            "model_type": "kimi_linear", "hidden_size": 8, "num_hidden_layers": 1, "rms_norm_eps": 1e-5,
            "linear_attn_config": {
                "kda_layers": [1], "full_attn_layers": [], "num_heads": 4, "head_dim": 4, "short_conv_kernel_size": 4,
            },
        },
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let layout = LayerLayout::published(&KdaConfig::from_hf(&config).unwrap(), 0, FloatDType::F32).unwrap();
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, shape, _) in layout.tensors() {
        let shape = if name.ends_with("A_log") { vec![rates] } else { shape.to_vec() };
        let start = end;
        end += 4 * shape.iter().product::<usize>();
        header.insert(name.into(), json!({"dtype": "F32", "shape": shape, "data_offsets": [start, end]}));
    }
    let header = Value::from(header).to_string();
    let file = folder.join("model.safetensors");
    std::fs::write(&file, [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat()).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(file).unwrap();
    file.set_len((8 + header.len() + end) as u64).unwrap();
    folder
}

#[test]
fn memory_of_a_checkpoint() {
    let path = scratch();
    let parameters = write_model(&path);
    let device = Device::flex();
    // What a first use of the device sets up.
    drop(load_layer(&path, 0, &device, FloatDType::F32).unwrap());

    let file = std::fs::metadata(path.join("model.safetensors")).unwrap().len() as usize;
    let layer = 4 * parameters;
    assert!(file > LAYERS * 2 * parameters);
    let largest = 4 * 512 * 512;
    let (loaded, most) = peak(|| load_layer(&path, LAYERS - 1, &device, FloatDType::F32).unwrap());
    println!("a layer of {layer} bytes in a file of {file}: peak {most}");
    // The layer, and its largest tensor as it was read, converted and transposed.
    assert!(most >= layer && most < layer + 3 * largest, "{most} for a layer of {layer}");
    drop(loaded);
    let (all, most) = peak(|| load_all(&path, &device, FloatDType::F32).unwrap());
    assert!(most < LAYERS * layer + 3 * largest, "{most} for {LAYERS} layers of {layer}");
    drop(all);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let (_, most) = peak(|| checkpoint.decay(0).unwrap());
    assert!(most < 1 << 20, "{most} for the decay parameters");

    // A few thousand bytes for a small file, whatever it claims.
    let huge = json!({"a": {"dtype": "F32", "shape": [1_u64 << 40], "data_offsets": [0, 1_u64 << 42]}}).to_string();
    let empty = json!({"a": {"dtype": "F32", "shape": [0, 1_u64 << 60], "data_offsets": [0, 0]}}).to_string();
    for (claimed, header) in [
        (u64::MAX, "{}"),
        (1 << 40, "{}"),
        (99_999_999, "{}"),
        (huge.len() as u64, huge.as_str()),
        (empty.len() as u64, empty.as_str()),
    ] {
        write_header(&path, claimed, header);
        let (result, most) = peak(|| load_all(&path, &device, FloatDType::F32));
        assert!(result.is_err() && most < 1 << 16, "{claimed} {header}: {most}");
    }
    // Nor for a file that has what it claims, and costs its writer nothing.
    let sparse = write_sparse_rates(&path, 1 << 26);
    let (result, most) = peak(|| load_layer(&sparse, 0, &device, FloatDType::F32));
    let Err(CheckpointError::Shape { name, .. }) = result else { panic!("2^26 rates for 4 heads are a layer") };
    assert!(name.ends_with("A_log") && most < 1 << 20, "{name}: {most}");

    let config = std::fs::read_to_string(path.join("config.json")).unwrap();
    for key in ["hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "short_conv_kernel_size"] {
        for size in [1_u64 << 20, 1 << 30, u64::MAX] {
            let mut config: Value = serde_json::from_str(&config).unwrap();
            config[key] = size.into();
            std::fs::write(path.join("config.json"), config.to_string()).unwrap();
            write_header(&path, 2, "{}");
            let (result, most) = peak(|| load_all(&path, &device, FloatDType::F32));
            // A list of 2^20 layers is the most that is believed.
            assert!(result.is_err() && most < 1 << 25, "{key} {size}: {most}");
        }
    }
}
