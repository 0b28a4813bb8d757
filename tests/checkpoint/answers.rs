//! Loaded layers against the float64 answers of the published Python layers.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_kda::checkpoint::{Checkpoint, FlaCache, load_all, load_layer};
use burn_kda::{KdaConfig, KdaModule, KdaState};

use super::common::array::Array;
use super::common::compare::Report;
use super::common::fixture::{Case, Fixture};
use super::common::platform::{bar, devices, platforms};
use super::{FOLDERS, folder};

/// Of the operator in bf16 and f16. A whole layer rounds between its projections as well, where the published layer
/// does: one that loses more than this itself (5.5e-3 to 8.6e-3 here) is the bar then.
const HALF_BAR: f64 = 5e-3;

fn every_layer(mut test: impl FnMut(&str, usize, &Case)) {
    let fixture = Fixture::open("checkpoints/answers");
    let mut tested = 0;
    for (name, layers) in FOLDERS {
        for &layer in layers {
            test(name, layer, &fixture.case(&format!("{name}/{layer}")));
            tested += 1;
        }
    }
    assert_eq!(tested, fixture.names().count(), "a layer with answers is not tested");
}

/// Prefill, then token by token.
fn decode(layer: &KdaModule, x: Tensor<3>, prefill: usize) -> (Tensor<3>, KdaState, KdaState) {
    let (y, after_prefill) = layer.forward_with_state(x.clone().slice_dim(1, 0..prefill), None);
    let (mut pieces, mut state) = (vec![y], after_prefill.clone());
    for t in prefill..x.dims()[1] {
        let (y, next) = layer.forward_with_state(x.clone().slice_dim(1, t..t + 1), Some(state));
        pieces.push(y);
        state = next;
    }
    (Tensor::cat(pieces, 1), after_prefill, state)
}

/// The cache of the Python run: FLA's as it is, transformers' with the convolutions already split.
fn cache(case: &Case, stage: &str, device: &Device, dtype: DType) -> KdaState {
    let get = |name: &str| case.find(&format!("{stage}.{name}"));
    let tensor = |name: &str| get(name).unwrap().tensor::<3>(device, dtype);
    let wide = if dtype == DType::F64 { dtype } else { DType::F32 };
    match get("cache_recurrent") {
        Some(recurrent) => FlaCache {
            recurrent_state: recurrent.tensor(device, wide),
            conv_state: Some(["cache_q", "cache_k", "cache_v"].map(tensor)),
        }
        .into_state(),
        None => KdaState {
            recurrent: get("recurrent").unwrap().tensor(device, wide),
            conv: Some(burn_kda::ConvState { q: tensor("conv_q"), k: tensor("conv_k"), v: tensor("conv_v") }),
        },
    }
}

fn parts(state: KdaState) -> [(&'static str, Array); 4] {
    let conv = state.conv.expect("these layers have convolutions");
    let [q, k, v] = [conv.q, conv.k, conv.v].map(Array::of);
    [("recurrent", Array::of(state.recurrent)), ("conv_q", q), ("conv_k", k), ("conv_v", v)]
}

/// The bar of each result.
type Bars<'a> = &'a dyn Fn(&str) -> f64;

fn check_layer(
    case: &Case,
    layer: &KdaModule,
    report: &mut Report,
    group: &str,
    (device, dtype): (&Device, DType),
    bars: Bars,
) {
    let prefill = case.option("prefill").as_u64().unwrap() as usize;
    let x = case.get("x").tensor::<3>(device, dtype);
    let y = case.get("y");
    let mut check = |what: String, got: &Array, want: &Array| {
        // `y` in its several forms, or a part of a state.
        let result = what.split_once(": ").map_or(what.as_str(), |(result, _)| result);
        report.check(group, format!("{} {what}", case.name), got, want, dtype, bars(result))
    };
    check("y".into(), &Array::of(layer.forward(x.clone())), &y);
    check("y: recurrent".into(), &Array::of(layer.forward_recurrent(x.clone(), None).0), &y);
    let (decoded, after_prefill, after) = decode(layer, x.clone(), prefill);
    check("y: decoded".into(), &Array::of(decoded), &y);
    for (stage, state) in [("prefill", after_prefill), ("decode", after)] {
        let want = parts(cache(case, stage, &Device::flex(), DType::F64));
        for ((name, got), (_, want)) in parts(state).iter().zip(&want) {
            check(format!("{stage}.{name}"), got, want);
        }
    }
    // From the Python run's own cache, to the end.
    let mut state = cache(case, "prefill", device, dtype);
    let mut pieces = Vec::new();
    for t in prefill..x.dims()[1] {
        let (y, next) = layer.forward_with_state(x.clone().slice_dim(1, t..t + 1), Some(state));
        pieces.push(y);
        state = next;
    }
    let rest = y.tensor::<3>(&Device::flex(), DType::F64).slice_dim(1, prefill..x.dims()[1]);
    check("y: from Python's cache".into(), &Array::of(Tensor::cat(pieces, 1)), &Array::of(rest));
}

#[test]
fn loaded_layers_give_the_published_layers_answers() {
    let mut report = Report::new("checkpoints");
    every_layer(|name, index, case| {
        for (platform, device, dtype) in platforms() {
            let layer = load_layer(folder(name), index, &device, FloatDType::from(dtype)).unwrap();
            check_layer(case, &layer, &mut report, &platform, (&device, dtype), &|_| bar(dtype));
        }
    });
    report.finish();
}

#[test]
fn loaded_layers_in_half_precision_are_within_its_rounding() {
    let mut report = Report::new("checkpoints");
    every_layer(|name, index, case| {
        for (platform, device) in devices() {
            for dtype in [DType::BF16, DType::F16] {
                // FLA's weights are f16, which bf16 would round.
                if device.supports_dtype(dtype) && (name == "kda") == (dtype == DType::F16) {
                    let layer = load_layer(folder(name), index, &device, FloatDType::from(dtype)).unwrap();
                    assert_eq!(layer.q_proj.weight.val().dtype(), dtype);
                    assert_eq!([layer.a_log.val().dtype(), layer.dt_bias.val().dtype()], [DType::F32; 2]);
                    let group = format!("{platform} {dtype:?}");
                    let published = |result: &str| case.half_error(result).unwrap_or(0.0);
                    let bars = |result: &str| published(result).max(HALF_BAR);
                    check_layer(case, &layer, &mut report, &group, (&device, dtype), &bars);
                }
            }
        }
    });
    report.finish();
}

#[test]
fn every_kda_layer_is_loaded() {
    let device = Device::flex();
    for (name, with_answers) in FOLDERS {
        let checkpoint = Checkpoint::open(folder(name)).unwrap();
        // The folders without all of their layers are those that transformers would name at run time, GLM's and FLA's.
        let present = |layer: &usize| checkpoint.layout(*layer).is_ok();
        let config = checkpoint.config();
        if !config.kda_layers.iter().all(present) {
            assert!(config.kda_layers.iter().filter(|layer| present(layer)).eq(with_answers), "{name}");
            assert!(load_all(folder(name), &device, FloatDType::F32).is_err(), "{name}: loaded partially");
            continue;
        }
        let layers = load_all(folder(name), &device, FloatDType::F32).unwrap();
        assert!(layers.iter().map(|(layer, _)| layer).eq(&config.kda_layers), "{name}");
        for (layer, module) in &layers {
            let alone = checkpoint.load(*layer, &device, FloatDType::F32).unwrap();
            for (a, b) in [(&module.q_proj, &alone.q_proj), (&module.o_proj, &alone.o_proj)] {
                a.weight.val().into_data().assert_eq(&b.weight.val().into_data(), true);
            }
        }
    }
}

/// FLA's cache to a state and back: all but the column that FLA does not read.
#[test]
fn an_fla_cache_survives_both_ways() {
    let fixture = Fixture::open("checkpoints/answers");
    let case = fixture.case("kda/0");
    for (_, device) in devices() {
        for stage in ["prefill", "decode"] {
            let cache = FlaCache::from(cache(&case, stage, &device, DType::F32));
            let want = case.get(&format!("{stage}.cache_recurrent"));
            let f32_of = |x: &Array| Array::of(x.tensor::<4>(&device, DType::F32));
            assert_eq!(cache.recurrent_state.dims().to_vec(), want.shape);
            assert_eq!(Array::of(cache.recurrent_state).values, f32_of(&want).values);
            for (got, name) in cache.conv_state.unwrap().into_iter().zip(["cache_q", "cache_k", "cache_v"]) {
                let want = case.get(&format!("{stage}.{name}")).tensor::<3>(&device, DType::F32);
                assert_eq!(got.dims(), want.dims());
                let newer = |x: Tensor<3>| Array::of(x.slice_dim(2, 1..4)).values;
                assert_eq!(newer(got.clone()), newer(want));
                assert!(Array::of(got.slice_dim(2, 0..1)).values.iter().all(|&x| x == 0.0));
            }
        }
    }
}

/// A convolution of one tap has no past; FLA keeps the column that it does not read.
#[test]
fn an_fla_cache_of_one_tap_survives_both_ways() {
    for (platform, device) in devices() {
        let layer = KdaConfig::new(12, 2, 4).with_conv_size(Some(1)).init(&device);
        let x = Tensor::<3>::random([2, 5, 12], burn::tensor::Distribution::Default, &device);
        let (_, state) = layer.forward_with_state(x.clone(), None);
        let cache = FlaCache::from(state.clone());
        for conv in cache.conv_state.as_ref().unwrap() {
            assert_eq!(conv.dims(), [2, 8, 1], "{platform}");
        }
        let again = cache.into_state();
        assert_eq!(again.conv.as_ref().unwrap().q.dims(), [2, 8, 0], "{platform}");
        let [(want, _), (got, _)] = [state, again].map(|state| layer.forward_with_state(x.clone(), Some(state)));
        assert_eq!(Array::of(got).values, Array::of(want).values, "{platform}");
    }
}

/// Loaded parameters are leaves of the graph like those of a new layer.
#[test]
fn a_loaded_layer_can_be_trained() {
    for (_, device) in devices() {
        let device = device.autodiff();
        let layer = load_layer(folder("bailing_hybrid"), 0, &device, FloatDType::F32).unwrap();
        let x = Tensor::<3>::random([1, 5, 40], burn::tensor::Distribution::Default, &device);
        let gradients = layer.forward(x).sum().backward();
        for weight in [&layer.q_proj.weight, &layer.o_proj.weight] {
            let gradient = weight.val().grad(&gradients).expect("a gradient");
            assert!(gradient.abs().sum().into_scalar::<f32>() > 0.0);
        }
        assert!(layer.a_log.val().grad(&gradients).is_some() && layer.dt_bias.val().grad(&gradients).is_some());
    }
}
