//! The layer in other precisions than f32.

use burn::tensor::{DType, Tensor};
use burn_kda::{KdaConfig, KdaModule};

use super::{Array, Report, Returned, configs, devices, layer, reference, tokens};

/// Against the f32 layer on the same, rounded, parameters and inputs.
const HALF_BAR: f64 = 5e-3;

/// The layer with parameters that `dtype` holds, in f32: what the arithmetic alone adds is then left to compare.
fn rounded(layer: &KdaModule, dtype: DType) -> KdaModule {
    layer.clone().cast(dtype).cast(DType::F32)
}

#[test]
fn half_precision_is_close_to_f32() {
    let large = KdaConfig::new(96, 3, 32).with_chunk_size(16);
    let mut report = Report::new("half precision");
    for (name, config) in configs().into_iter().chain([("large", large)]) {
        for (platform, device) in devices() {
            for dtype in [DType::BF16, DType::F16] {
                if !device.supports_dtype(dtype) {
                    continue;
                }
                let full = layer(&config, 0, &device, DType::F32);
                let half = full.clone().cast(dtype);
                assert_eq!(half.a_log.val().dtype(), DType::F32);
                assert_eq!(half.dt_bias.val().dtype(), DType::F32);
                assert_eq!(half.q_proj.weight.val().dtype(), dtype);
                assert_eq!(half.o_norm.weight.val().dtype(), dtype);

                let x = tokens(&config, 2, 40, 1).tensor::<3>(&device, dtype);
                let exact = rounded(&full, dtype).forward_recurrent(x.clone().cast(DType::F32), None);
                let want = Returned::of(exact);
                for form in [KdaModule::forward_with_state, KdaModule::forward_recurrent] {
                    let (y, state) = form(&half, x.clone(), None);
                    assert_eq!(y.dtype(), dtype);
                    assert_eq!(state.recurrent.dtype(), DType::F32);
                    assert!(state.conv.iter().all(|conv| conv.q.dtype() == dtype));
                    // The next token goes through the same layer from the state it returned.
                    let (next, _) = form(&half, x.clone().slice_dim(1, 0..1), Some(state.clone()));
                    assert_eq!(next.dtype(), dtype);
                    for ((part, got), (_, want)) in Returned::of((y, state)).0.iter().zip(&want.0) {
                        let group = format!("{platform} {dtype:?} {part}");
                        report.check(group, name, got, want, dtype, HALF_BAR);
                    }
                }
            }
        }
    }
    report.finish();
}

/// Rounding to f32 anywhere would be 1e-8 at least. That both forms share no such fault is what the finite
/// differences of `gradients.rs` see.
#[test]
fn f64_is_f64_throughout() {
    let mut report = Report::new("f64 layer");
    for (name, config) in configs() {
        let x = tokens(&config, 2, 21, 1);
        let (exact, device) = reference(&config, 0);
        let want = Returned::of(exact.forward_recurrent(x.tensor(&device, DType::F64), None));
        for (platform, device) in devices().into_iter().filter(|(_, device)| device.supports_dtype(DType::F64)) {
            let layer = layer(&config, 0, &device, DType::F64);
            let x: Tensor<3> = x.tensor(&device, DType::F64);
            for form in [KdaModule::forward_with_state, KdaModule::forward_recurrent] {
                let got = form(&layer, x.clone(), None);
                assert_eq!(got.0.dtype(), DType::F64);
                assert_eq!(got.1.recurrent.dtype(), DType::F64);
                Returned::of(got).check(&want, &mut report, &platform, name, DType::F64);
            }
            let whole = Array::of(layer.forward(x));
            report.check(&platform, name, &whole, &want.0[0].1, DType::F64, 1e-13);
        }
    }
    report.finish();
}
