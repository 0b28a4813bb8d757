//! FLA's whole layer: its parameters into a `KdaModule`, and outputs, caches and gradients compared.

use std::collections::BTreeMap;

use burn::module::Param;
use burn::nn::Linear;
use burn::tensor::{DType, Device, Tensor};
use burn_kda::{DecayFn, KdaConfig, KdaModule, KdaState, ShortConvolution, fla_read_scale};

use super::array::{Array, gradient};
use super::compare::Report;
use super::fixture::Case;
use super::platform;

/// FLA's own f32 output against its f64 twin is held to this when the fixture is made.
const FLA_AGREES: f64 = 3e-5;

pub fn config(case: &Case) -> KdaConfig {
    let options = case.option("config").as_object().expect("a map");
    let size = |key: &str| options.get(key).map(|x| x.as_u64().unwrap() as usize);
    let number = |key: &str| options.get(key).and_then(|x| x.as_f64());
    let flag = |key: &str, default| options.get(key).map_or(default, |x| x.as_bool().unwrap());
    let decay = match number("lower_bound") {
        Some(lower_bound) => DecayFn::Sigmoid { lower_bound },
        None => DecayFn::Softplus,
    };
    KdaConfig::new(size("hidden_size").unwrap(), size("num_heads").unwrap(), size("head_dim").unwrap())
        .with_num_v_heads(size("num_v_heads"))
        .with_expand_v(number("expand_v").unwrap_or(1.0))
        .with_decay(decay)
        .with_output_gate_bias(true)
        .with_conv_size(flag("use_short_conv", true).then(|| size("conv_size").unwrap_or(4)))
        .with_conv_bias(flag("conv_bias", false))
        .with_allow_neg_eigval(flag("allow_neg_eigval", false))
        .with_norm_eps(number("norm_eps").unwrap_or(1e-5))
}

fn linears(layer: &mut KdaModule) -> Vec<(&'static str, &mut Linear)> {
    let low_rank = "FLA's projections are of low rank";
    vec![
        ("q_proj", &mut layer.q_proj),
        ("k_proj", &mut layer.k_proj),
        ("v_proj", &mut layer.v_proj),
        ("f_proj.0", layer.f_a_proj.as_mut().expect(low_rank)),
        ("f_proj.1", layer.f_b_proj.as_mut().expect(low_rank)),
        ("b_proj", &mut layer.b_proj),
        ("g_proj.0", layer.g_a_proj.as_mut().expect(low_rank)),
        ("g_proj.1", layer.g_b_proj.as_mut().expect(low_rank)),
        ("o_proj", &mut layer.o_proj),
    ]
}

fn convolutions(layer: &mut KdaModule) -> Vec<(&'static str, &mut ShortConvolution)> {
    let all = [("q_conv1d", &mut layer.q_conv1d), ("k_conv1d", &mut layer.k_conv1d), ("v_conv1d", &mut layer.v_conv1d)];
    all.into_iter().filter_map(|(name, conv)| Some((name, conv.as_mut()?))).collect()
}

/// A tensor of the case with the channels of `x` rotated; what has no such channels as it is.
///
/// So the projections of `x` add up in another order. That sum is Burn's, rounded by each machine in its own way, and
/// where a key or a query is close to zero the gradients have its rounding several times as large: in one order 3e-7, in
/// another 2e-6, whatever this crate does.
fn rotated(case: &Case, name: &str, by: usize) -> Array {
    const READ_X: [&str; 6] = ["q_proj", "k_proj", "v_proj", "f_proj.0", "b_proj", "g_proj.0"];
    let tensor = case.get(name);
    let weight = name.strip_suffix(".weight").and_then(|name| name.split_once('.'));
    match name == "x" || name == "dx" || weight.is_some_and(|(_, module)| READ_X.contains(&module)) {
        true => tensor.rotated(by),
        false => tensor,
    }
}

/// A layer with FLA's parameters, every one of the fixture used.
pub fn load(case: &Case, device: &Device, dtype: DType) -> KdaModule {
    load_rotated(case, device, dtype, 0)
}

/// [`load`], for an `x` that is [`rotated`].
fn load_rotated(case: &Case, device: &Device, dtype: DType, by: usize) -> KdaModule {
    let mut layer = config(case).init(device);
    let mut left: Vec<_> = case.tensors().into_iter().filter(|name| name.starts_with("p.")).collect();
    let mut take = |name: &str| {
        left.retain(|other| other != &format!("p.{name}"));
        rotated(case, &format!("p.{name}"), by)
    };
    for (name, linear) in linears(&mut layer) {
        linear.weight = Param::from_tensor(take(&format!("{name}.weight")).transposed().tensor(device, dtype));
        if linear.bias.is_some() {
            linear.bias = Some(Param::from_tensor(take(&format!("{name}.bias")).tensor(device, dtype)));
        }
    }
    for (name, conv) in convolutions(&mut layer) {
        conv.weight = Param::from_tensor(take(&format!("{name}.weight")).tensor(device, dtype));
        if conv.bias.is_some() {
            conv.bias = Some(Param::from_tensor(take(&format!("{name}.bias")).tensor(device, dtype)));
        }
    }
    layer.a_log = Param::from_tensor(take("A_log").tensor(device, dtype));
    layer.dt_bias = Param::from_tensor(take("dt_bias").tensor(device, dtype));
    layer.o_norm.weight = Param::from_tensor(take("o_norm.weight").tensor(device, dtype));
    assert!(left.is_empty(), "{}: parameters without a place: {left:?}", case.name);
    layer
}

/// Gradients of the parameters under FLA's names and in FLA's layout.
fn parameter_gradients(layer: &mut KdaModule, gradients: &burn::tensor::Gradients) -> Vec<(String, Array)> {
    let mut all = vec![
        ("A_log".to_string(), gradient(&layer.a_log.val(), gradients)),
        ("dt_bias".to_string(), gradient(&layer.dt_bias.val(), gradients)),
        ("o_norm.weight".to_string(), gradient(&layer.o_norm.weight.val(), gradients)),
    ];
    for (name, linear) in linears(layer) {
        all.push((format!("{name}.weight"), gradient(&linear.weight.val(), gradients).transposed()));
        all.extend(linear.bias.as_ref().map(|bias| (format!("{name}.bias"), gradient(&bias.val(), gradients))));
    }
    for (name, conv) in convolutions(layer) {
        all.push((format!("{name}.weight"), gradient(&conv.weight.val(), gradients)));
        all.extend(conv.bias.as_ref().map(|bias| (format!("{name}.bias"), gradient(&bias.val(), gradients))));
    }
    all
}

pub fn check_outputs(case: &Case, report: &mut Report) {
    let want = case.get("y");
    for (platform, device, dtype) in platform::platforms() {
        let bar = platform::bar(dtype);
        let layer = load(case, &device, dtype);
        let x = case.get("x").tensor::<3>(&device, dtype);
        assert_eq!(layer.k_scale(), fla_read_scale(config(case).head_dim));
        let y = Array::of(layer.forward(x.clone()));
        report.check(&platform, "y", &y, &want, dtype, bar);
        report.check(format!("{platform} against FLA's f32"), "y", &y, &case.get("y_fla"), dtype, FLA_AGREES);
        let (y, state) = layer.forward_recurrent(x, None);
        report.check(&platform, "recurrent y", &Array::of(y), &want, dtype, bar);
        check_state(case, "decode", &state, report, &platform, dtype);
    }
}

/// Prefill, then token by token from the state, as FLA's layer does with its cache.
pub fn check_decode(case: &Case, report: &mut Report) {
    let want = case.get("y");
    let prefill = case.option("prefill").as_u64().unwrap() as usize;
    for (platform, device, dtype) in platform::platforms() {
        let layer = load(case, &device, dtype);
        let x = case.get("x").tensor::<3>(&device, dtype);
        let (y, mut state) = layer.forward_with_state(x.clone().slice_dim(1, 0..prefill), None);
        check_state(case, "prefill", &state, report, &platform, dtype);
        let mut pieces = vec![y];
        for t in prefill..x.dims()[1] {
            let (y, next) = layer.forward_with_state(x.clone().slice_dim(1, t..t + 1), Some(state));
            pieces.push(y);
            state = next;
        }
        report.check(&platform, "y", &Array::of(Tensor::cat(pieces, 1)), &want, dtype, platform::bar(dtype));
        check_state(case, "decode", &state, report, &platform, dtype);
    }
}

fn check_state(case: &Case, stage: &str, state: &KdaState, report: &mut Report, platform: &str, dtype: DType) {
    let bar = platform::bar(dtype);
    let mut check = |name: &str, got: Array, want: Array| {
        report.check(platform, format!("{stage} {name}"), &got, &want, dtype, bar)
    };
    check("recurrent", Array::of(state.recurrent.clone()), case.get(&format!("{stage}.recurrent")).transposed());
    assert_eq!(state.conv.is_some(), case.find(&format!("{stage}.conv_q")).is_some());
    if let Some(conv) = &state.conv {
        for (name, got) in [("conv_q", &conv.q), ("conv_k", &conv.k), ("conv_v", &conv.v)] {
            check(name, Array::of(got.clone()), case.get(&format!("{stage}.{name}")));
        }
    }
}

/// The gradient of the input and of every parameter; in f32 with the channels of `x` in every rotation ([`rotated`]).
pub fn check_gradients(case: &Case, report: &mut Report) {
    let channels = config(case).hidden_size;
    for (platform, device, dtype) in platform::platforms() {
        let mut all = BTreeMap::<String, [Vec<Array>; 2]>::new();
        let rotations = if dtype == DType::F32 { channels } else { 1 };
        for by in 0..rotations {
            let mut layer = load_rotated(case, &device.clone().autodiff(), dtype, by);
            let x = rotated(case, "x", by).leaf::<3>(&device, dtype);
            let dy = case.get("dy").tensor::<3>(&device.clone().autodiff(), dtype);
            let gradients = (layer.forward(x.clone()) * dy).sum().backward();
            let of_parameters = parameter_gradients(&mut layer, &gradients).into_iter();
            let named = of_parameters.map(|(name, got)| (format!("d.{name}"), got));
            for (name, got) in named.chain([("dx".into(), gradient(&x, &gradients))]) {
                let want = rotated(case, &name, by);
                let [gots, wants] = all.entry(name).or_default();
                gots.push(got);
                wants.push(want);
            }
        }
        for (name, [got, want]) in all {
            report.check(&platform, name, &Array::stack(got), &Array::stack(want), dtype, platform::bar(dtype));
        }
    }
}
