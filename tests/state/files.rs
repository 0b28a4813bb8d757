//! States in files.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use burn::tensor::{Bytes, DType, Device, Shape, TensorData};
use burn_kda::{KdaState, StateError};
use burn_pack::Writer;

use super::{Returned, configs, devices, layer, platforms, tokens};

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
}

fn dtypes(state: &KdaState) -> Vec<DType> {
    let conv = state.conv.iter().flat_map(|conv| [conv.q.dtype(), conv.k.dtype(), conv.v.dtype()]);
    std::iter::once(state.recurrent.dtype()).chain(conv).collect()
}

#[test]
fn states_survive_files_and_bytes() {
    let path = path("survives.bpk");
    for (name, config) in configs() {
        for (platform, device, dtype) in platforms() {
            let what = format!("{platform} {name}");
            let x = tokens(&config, 2, 5, 1).tensor::<3>(&device, dtype);
            let (_, state) = layer(&config, 0, &device, dtype).forward_with_state(x, None);
            // Each file overwrites the one before it.
            state.save_file(&path).unwrap();
            for (_, device) in devices() {
                let from_file = KdaState::load_file(&path, &device).unwrap();
                let from_bytes = KdaState::from_bytes(state.to_bytes().unwrap(), &device).unwrap();
                for loaded in [from_file, from_bytes] {
                    assert_eq!(loaded.recurrent.device(), device, "{what}");
                    assert_eq!(dtypes(&loaded), dtypes(&state), "{what}");
                    Returned::state(&loaded).assert_same_bits(&Returned::state(&state), &what);
                }
            }
        }
    }
}

#[test]
fn a_state_in_half_precision_survives() {
    let device = Device::flex();
    let (_, config) = &configs()[0];
    let layer = layer(config, 0, &device, DType::F32).cast(DType::BF16);
    let (_, state) = layer.forward_with_state(tokens(config, 2, 5, 1).tensor(&device, DType::BF16), None);
    assert_eq!(dtypes(&state), [DType::F32, DType::BF16, DType::BF16, DType::BF16]);
    let loaded = KdaState::from_bytes(state.to_bytes().unwrap(), &device).unwrap();
    assert_eq!(dtypes(&loaded), dtypes(&state));
    Returned::state(&loaded).assert_same_bits(&Returned::state(&state), "bf16");
}

/// The bytes of a small state.
fn sample() -> Vec<u8> {
    let (_, config) = &configs()[0];
    let device = Device::flex();
    let x = tokens(config, 1, 5, 1).tensor::<3>(&device, DType::F32);
    let (_, state) = layer(config, 0, &device, DType::F32).forward_with_state(x, None);
    state.to_bytes().unwrap().to_vec()
}

/// Loads from memory and from a file, on every device; a panic fails the test.
fn load(file: &str, bytes: &[u8], what: &str) -> Vec<Result<KdaState, StateError>> {
    let path = path(file);
    std::fs::write(&path, bytes).unwrap();
    let load = |(_, device): (String, Device)| {
        [KdaState::from_bytes(Bytes::from_bytes_vec(bytes.to_vec()), &device), KdaState::load_file(&path, &device)]
    };
    let results = catch_unwind(AssertUnwindSafe(|| devices().into_iter().flat_map(load).collect()));
    results.unwrap_or_else(|_| panic!("{what}: a panic instead of an error"))
}

#[test]
fn corrupted_files_are_errors() {
    const CORRUPTED: &str = "corrupted.bpk";
    let bytes = sample();
    for len in 0..bytes.len() {
        for result in load(CORRUPTED, &bytes[..len], &format!("cut to {len} bytes")) {
            assert!(result.is_err(), "cut to {len} of {} bytes: no error", bytes.len());
        }
    }
    // Every bit of the header and of the table of tensors. A bit of a number cannot be told from another number,
    // and some bits of the table change nothing that matters.
    let payload = 16 * 4 * 8;
    for i in 0..bytes.len().saturating_sub(payload) {
        for bit in 0..8 {
            let mut bytes = bytes.clone();
            bytes[i] ^= 1 << bit;
            load(CORRUPTED, &bytes, &format!("bit {bit} of byte {i}"));
        }
    }
    for result in load(CORRUPTED, b"not a state at all, but long enough for a header of sixty-four bytes.", "text") {
        assert!(matches!(result, Err(StateError::Pack(_))));
    }
    for result in load(CORRUPTED, &Writer::new(vec![]).into_bytes().unwrap(), "no tensors") {
        assert!(result.is_err());
    }
    let missing = KdaState::load_file(path("no such file.bpk"), &Device::flex());
    assert!(matches!(missing, Err(StateError::Pack(_))));
}

#[test]
fn files_with_other_tensors_are_errors_that_name_them() {
    let float = |name: &'static str, shape: &[usize]| (name, shape.to_vec(), DType::F32);
    let state = float("recurrent", &[1, 2, 4, 4]);
    let conv = ["conv.q", "conv.k", "conv.v"].map(|name| float(name, &[1, 8, 3]));
    let with_conv =
        |extra: Vec<(&'static str, Vec<usize>, DType)>| [vec![state.clone()], conv.to_vec(), extra].concat();
    let cases = [
        (conv.to_vec(), "recurrent"),
        (vec![state.clone(), conv[0].clone(), conv[2].clone()], "conv.k"),
        (with_conv(vec![float("extra", &[2])]), "extra"),
        (vec![state.clone(), float("extra", &[2])], "conv.q"),
        (vec![float("recurrent", &[2, 4, 4])], "recurrent"),
        (vec![("recurrent", vec![1, 2, 4, 4], DType::I32)], "recurrent"),
        (vec![state.clone(), conv[0].clone(), float("conv.k", &[1, 1, 8, 3]), conv[2].clone()], "conv.k"),
    ];
    for (tensors, want) in cases {
        let what = format!("{tensors:?}");
        let pack = |(name, shape, dtype): (&str, Vec<usize>, DType)| {
            let data = TensorData::zeros::<f32, _>(Shape::from(shape)).convert_dtype(dtype);
            let (bytes, shape, dtype) = data.into_parts();
            burn_pack::Tensor::new(name.into(), dtype, shape, None, bytes)
        };
        let bytes = Writer::new(tensors.into_iter().map(pack).collect()).into_bytes().unwrap();
        for result in load("other tensors.bpk", &bytes, &what) {
            match result {
                Err(StateError::Tensor { name, .. }) => assert_eq!(name, want, "{what}"),
                other => panic!("{what}: {other:?}"),
            }
        }
    }
}
