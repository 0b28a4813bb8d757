//! Files that are cut, changed or made to deceive give an error: no panic, whatever they claim.
//!
//! That they cost no memory either is in `tests/checkpoint_memory.rs`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use burn::tensor::{Device, FloatDType};
use burn_kda::KdaConfig;
use burn_kda::checkpoint::{Checkpoint, CheckpointError, load_all};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::{FOLDERS, folder, scratch};

/// A folder with `bytes` for `file`, and the rest as in the fixture.
fn with_file(fixture: &str, name: &str, file: &str, bytes: &[u8]) -> PathBuf {
    let path = scratch(name);
    for entry in std::fs::read_dir(folder(fixture)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), path.join(entry.file_name())).unwrap();
    }
    std::fs::write(path.join(file), bytes).unwrap();
    path
}

/// Everything that reads a checkpoint; a panic fails the test.
fn read(path: &Path, what: &str) -> Result<(), CheckpointError> {
    let everything = || {
        let checkpoint = Checkpoint::open(path)?;
        for &layer in &checkpoint.config().kda_layers {
            checkpoint.layout(layer)?;
            checkpoint.decay(layer)?;
        }
        load_all(path, &Device::flex(), FloatDType::F32).map(drop)
    };
    catch_unwind(AssertUnwindSafe(everything)).unwrap_or_else(|_| panic!("{what}: a panic instead of an error"))
}

const FILE: &str = "model.safetensors";

/// The header's length, and the header, of a file.
fn header(bytes: &[u8]) -> (usize, Value) {
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (len, serde_json::from_slice(&bytes[8..8 + len]).unwrap())
}

fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

fn sample() -> Vec<u8> {
    std::fs::read(folder("kimi_k3").join(FILE)).unwrap()
}

#[test]
fn truncated_files_are_errors() {
    let bytes = sample();
    let (len, _) = header(&bytes);
    read(&with_file("kimi_k3", "whole", FILE, &bytes), "whole").unwrap();
    let lengths = (0..len + 16).step_by(7).chain((len + 16..bytes.len()).step_by(997)).chain([bytes.len() - 1]);
    for cut in lengths {
        let path = with_file("kimi_k3", "cut", FILE, &bytes[..cut]);
        assert!(read(&path, &format!("{cut} bytes")).is_err(), "{cut} bytes are a checkpoint");
    }
    let longer = [&bytes[..], &[0]].concat();
    assert!(read(&with_file("kimi_k3", "cut", FILE, &longer), "longer").is_err());
}

#[test]
fn headers_that_deceive_are_errors() {
    let bytes = sample();
    let (len, original) = header(&bytes);
    let data = &bytes[8 + len..];
    let name = "language_model.model.layers.0.self_attn.q_proj.weight";
    let row = |what: &str, file: Vec<u8>| {
        let error = read(&with_file("kimi_k3", "header", FILE, &file), what).expect_err(what);
        assert!(matches!(error, CheckpointError::File { .. }), "{what}: {error}");
    };
    for claimed in [0, 1, len as u64 - 1, len as u64 + 8, bytes.len() as u64, 100_000_001, 1 << 40, u64::MAX] {
        let mut file = bytes.clone();
        file[..8].copy_from_slice(&claimed.to_le_bytes());
        row(&format!("a header of {claimed} bytes"), file);
    }
    let changed = |key: &str, value: Value| {
        let mut header = original.clone();
        header[name][key] = value;
        with_header(&header.to_string(), data)
    };
    let [start, end] = [0, 1].map(|i| original[name]["data_offsets"][i].as_u64().unwrap());
    for shape in [
        json!([1_u64 << 63, 2]),
        json!([u64::MAX]),
        json!([1_u64 << 40, 1_u64 << 40, 0]),
        json!([1_u64 << 40]),
        json!([48, 41]),
        json!([0, 40]),
        json!([-48, 40]),
        json!([48.5, 40]),
        json!("[48, 40]"),
        json!(null),
    ] {
        row(&format!("shape {shape}"), changed("shape", shape));
    }
    let other_shape = with_file("kimi_k3", "header", FILE, &changed("shape", json!([48, 41])));
    let error = read(&other_shape, "another shape").unwrap_err().to_string();
    assert!(error.contains(name) && error.contains("[48, 41]"), "{error}");
    for offsets in [
        json!([start, end + 2]),
        json!([start + 2, end + 2]),
        json!([end, start]),
        json!([start, u64::MAX]),
        json!([u64::MAX - 3840, u64::MAX]),
        json!([0, 0]),
        json!([start]),
        json!([]),
    ] {
        row(&format!("offsets {offsets}"), changed("data_offsets", offsets));
    }
    for dtype in [json!("F32"), json!("BF17"), json!(""), json!(16)] {
        row(&format!("dtype {dtype}"), changed("dtype", dtype));
    }
    row("no header", with_header("", data));
    row("a list", with_header("[]", data));
    row("no tensors", with_header("{}", data));
    row("not UTF-8", [&4_u64.to_le_bytes()[..], &[0xff; 4], data].concat());
    row("nested", with_header(&"{\"a\":".repeat(10_000), data));
    row("nested lists", with_header(&format!("{{\"a\":{}", "[".repeat(10_000)), data));
    let text = original.to_string();
    for twice in [
        // The same place twice, which a reader that keeps one of them would not notice.
        text.replacen('{', &format!("{{\"{name}\":{},", original[name]), 1),
        text.replacen('{', &format!("{{\"{name}\":{{\"dtype\":\"BF16\",\"shape\":[0],\"data_offsets\":[0,0]}},"), 1),
    ] {
        row("a name twice", with_header(&twice, data));
    }
}

/// A tensor of no numbers in the place of another.
#[test]
fn empty_tensors_are_errors() {
    let (_, original) = header(&sample());
    let empty: serde_json::Map<_, _> = (original.as_object().unwrap().keys())
        .map(|name| (name.clone(), json!({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})))
        .collect();
    let path = with_file("kimi_k3", "empty_tensors", FILE, &with_header(&Value::from(empty).to_string(), &[]));
    let error = read(&path, "empty tensors").unwrap_err();
    assert!(matches!(error, CheckpointError::Shape { .. }), "{error}");
}

fn json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (0_i64..70).prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop_oneof![Just("kimi_linear"), Just("kimi_k3"), Just("linear_attention"), Just("..")].prop_map(Value::from),
    ];
    leaf.prop_recursive(2, 12, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::vec((prop_oneof![Just("layers"), Just("num_heads")], inner), 0..3)
                .prop_map(|pairs| Value::Object(pairs.into_iter().map(|(k, v)| (k.to_string(), v)).collect())),
        ]
    })
}

/// Sets the value that `steps` leads to, at each step the child of that number.
fn replace(value: &mut Value, steps: &[usize], new: Value) {
    let children: Vec<&mut Value> = match value {
        Value::Object(map) => map.values_mut().collect(),
        Value::Array(list) => list.iter_mut().collect(),
        _ => Vec::new(),
    };
    let count = children.len();
    match steps.split_first() {
        Some((step, rest)) if count > 0 => {
            replace(children.into_iter().nth(step % count).expect("one of them"), rest, new)
        }
        _ => *value = new,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Bytes of the header changed at random; a change in a layer's data is another layer.
    #[test]
    fn changed_bytes_never_panic(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)) {
        let mut bytes = sample();
        let (len, _) = header(&bytes);
        for (at, byte) in changes {
            bytes[at.index(8 + len)] = byte;
        }
        drop(read(&with_file("kimi_k3", "changed", FILE, &bytes), "changed bytes"));
    }

    #[test]
    fn changed_headers_never_panic(steps in prop::collection::vec(any::<usize>(), 1..5), new in json()) {
        let bytes = sample();
        let (len, mut header) = header(&bytes);
        replace(&mut header, &steps, new);
        let file = with_header(&header.to_string(), &bytes[8 + len..]);
        drop(read(&with_file("kimi_k3", "changed_header", FILE, &file), "changed header"));
    }

    #[test]
    fn changed_configs_never_panic(
        fixture in 0..FOLDERS.len(),
        changes in prop::collection::vec((prop::collection::vec(any::<usize>(), 1..4), json()), 1..3),
    ) {
        let (name, _) = FOLDERS[fixture];
        let text = std::fs::read_to_string(folder(name).join("config.json")).unwrap();
        let mut config: Value = serde_json::from_str(&text).unwrap();
        for (steps, new) in changes {
            replace(&mut config, &steps, new);
        }
        drop(KdaConfig::from_hf(&config));
        drop(read(&with_file(name, "changed_config", "config.json", config.to_string().as_bytes()), "changed config"));
    }

    #[test]
    fn changed_indices_never_panic(steps in prop::collection::vec(any::<usize>(), 1..3), new in json()) {
        const INDEX: &str = "model.safetensors.index.json";
        let text = std::fs::read_to_string(folder("kimi_linear").join(INDEX)).unwrap();
        let mut index: Value = serde_json::from_str(&text).unwrap();
        replace(&mut index, &steps, new);
        let path = with_file("kimi_linear", "changed_index", INDEX, index.to_string().as_bytes());
        drop(read(&path, "changed index"));
    }
}

/// A name twice in an index, of which JSON readers keep one.
#[test]
fn an_index_with_a_name_twice_is_an_error() {
    const INDEX: &str = "model.safetensors.index.json";
    let text = std::fs::read_to_string(folder("kimi_linear").join(INDEX)).unwrap();
    let name = "model.layers.1.self_attn.q_proj.weight";
    let twice = text.replacen("\"weight_map\": {", &format!("\"weight_map\": {{\"{name}\": \"other.safetensors\","), 1);
    assert_ne!(twice, text);
    let error = read(&with_file("kimi_linear", "index_twice", INDEX, twice.as_bytes()), "twice").unwrap_err();
    assert!(matches!(&error, CheckpointError::File { problem, .. } if problem.contains(name)), "{error}");
}
