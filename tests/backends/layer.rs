//! What surrounds the operator, and the layer.

use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_kda::{DecayFn, KdaConfig, KdaModule, decay_gate, gated_rms_norm, short_convolution, write_strength};

use crate::common::array::{Array, gradient};
use crate::common::compare::Report;
use crate::common::fixture::{Case, Fixture};
use crate::common::platform::{bar, devices, platforms};
use crate::common::recipe::Random;
use crate::common::{layer, pieces, small};

fn all(file: &str, check: fn(&Case, &mut Report)) {
    let fixture = Fixture::open(file);
    let mut report = Report::new(file);
    for case in fixture.row("") {
        check(&case, &mut report);
    }
    report.finish();
}

#[test]
fn convolutions() {
    all("conv", pieces::convolution);
}

#[test]
fn decay_gates() {
    all("gates", pieces::gate);
}

#[test]
fn output_norms() {
    all("norm", pieces::gated_norm);
}

#[test]
fn gates_of_single_numbers() {
    let mut report = Report::new("units");
    for (platform, device, dtype) in platforms() {
        small::check_units(&platform, &device, dtype, &mut report);
    }
    report.finish();
}

#[test]
fn layers_at_once_and_token_by_token() {
    all("layer", layer::check_outputs);
    all("layer", layer::check_decode);
}

#[test]
fn gradients_of_layers() {
    all("layer", layer::check_gradients);
}

/// A function of some tensors with two outputs at most.
type Function = dyn Fn(Vec<Tensor<4>>) -> Vec<Tensor<4>>;

/// Outputs of a function and gradients of its inputs, which lie in memory with the last two axes swapped.
fn run(function: &Function, inputs: &[Array], device: &Device, dtype: DType) -> Vec<Array> {
    let swapped = |x: Tensor<4>| Tensor::cat(vec![x.swap_dims(2, 3)], 0).swap_dims(2, 3);
    let untracked = function(inputs.iter().map(|x| swapped(x.tensor(device, dtype))).collect());
    let leaves: Vec<_> = inputs.iter().map(|x| x.leaf::<4>(device, dtype)).collect();
    let outputs = function(leaves.iter().cloned().map(swapped).collect());
    // Another cotangent for every number.
    let loss = |y: Tensor<4>| (y.clone() * (y.detach() * 3.0 + 1.0)).sum();
    let gradients = outputs.iter().cloned().map(loss).reduce(|sum, x| sum + x).expect("an output").backward();
    let all = untracked.into_iter().chain(outputs).map(Array::of);
    all.chain(leaves.iter().map(|x| gradient(x, &gradients))).collect()
}

/// Heads of any size and inputs of any strides, against f64 on a CPU.
#[test]
fn sizes_and_strides() {
    let mut report = Report::new("around the operator");
    let mut random = Random::new(7);
    for (time, dim) in [(1, 2), (2, 3), (9, 100), (130, 5), (3, 300)] {
        let channels = 3 * dim;
        let mut array = |shape: [usize; 4]| random.normal(shape.to_vec());
        let mut cases: Vec<(String, Box<Function>, Vec<Array>)> = Vec::new();
        for width in [1, 2, 4, 16, 17] {
            let convolution = move |x: Vec<Tensor<4>>| {
                let [x, weight, state, bias] = x.try_into().expect("four");
                let state = (width > 1).then(|| state.reshape([2, channels, width - 1]));
                let weight = weight.reshape([channels, 1, width]);
                let bias = bias.reshape([channels]);
                let output = short_convolution(x.reshape([2, time, channels]), weight, Some(bias), state);
                let state = (width > 1).then(|| output.state.unsqueeze::<4>());
                [output.y.unsqueeze::<4>()].into_iter().chain(state).collect()
            };
            let past = (width - 1).max(1);
            let inputs = [[2, time, 3, dim], [1, 1, channels, width], [2, 1, channels, past], [1, 1, 1, channels]];
            let name = format!("convolution of {time} x {dim}, width {width}");
            cases.push((name, Box::new(convolution), inputs.map(&mut array).to_vec()));
        }
        let norm = move |x: Vec<Tensor<4>>| {
            let [o, gate, weight] = x.try_into().expect("three");
            vec![gated_rms_norm(o, weight.reshape([dim]), gate, 1e-5)]
        };
        let inputs = [[2, time, 3, dim], [2, time, 3, dim], [1, 1, 1, dim]];
        cases.push((format!("norm of {time} x {dim}"), Box::new(norm), inputs.map(&mut array).to_vec()));
        for decay in [DecayFn::Softplus, DecayFn::SIGMOID] {
            let gate = move |x: Vec<Tensor<4>>| {
                let [raw, a_log, bias] = x.try_into().expect("three");
                vec![decay_gate(raw, Some(a_log.reshape([3])), Some(bias.reshape([channels])), decay)]
            };
            let inputs = [[2, time, 3, dim], [1, 1, 1, 3], [1, 1, 1, channels]];
            cases.push((format!("{decay:?} of {time} x {dim}"), Box::new(gate), inputs.map(&mut array).to_vec()));
        }
        let strength = move |x: Vec<Tensor<4>>| {
            let [logit] = x.try_into().expect("one");
            vec![write_strength(logit.reshape([2, time, channels]), true).unsqueeze::<4>()]
        };
        cases.push((format!("beta of {time} x {dim}"), Box::new(strength), vec![array([2, time, 3, dim])]));

        for (platform, device, dtype) in platforms() {
            for (name, function, inputs) in &cases {
                let want = run(function, inputs, &Device::flex(), DType::F64);
                let got = run(function, inputs, &device, dtype);
                for (n, (got, want)) in got.into_iter().zip(want).enumerate() {
                    report.check(&platform, format!("{name}, tensor {n}"), &got, &want, dtype, bar(dtype));
                }
            }
        }
    }
    report.finish();
}

/// In half precision a layer is as far from the same numbers in f32 as its projections round.
#[test]
fn layers_in_half_precision() {
    let mut report = Report::new("layers in half precision");
    for (name, device) in devices() {
        if !device.supports_dtype(DType::F16) {
            continue;
        }
        for decay in [DecayFn::Softplus, DecayFn::SIGMOID] {
            let layer = KdaConfig::new(48, 3, 16).with_decay(decay).init(&device).cast(DType::F16);
            let x = Tensor::<3>::random([2, 41, 48], Distribution::Normal(0.0, 1.0), &device).cast(DType::F16);
            let run = |layer: &KdaModule, x: Tensor<3>| {
                let (first, state) = layer.forward_with_state(x.clone().slice_dim(1, 0..40), None);
                let (last, state) = layer.forward_with_state(x.slice_dim(1, 40..41), Some(state));
                let conv = state.conv.expect("convolutions");
                [first, last, conv.q, conv.v].map(|x| (x.dtype(), Array::of(x)))
            };
            let got = run(&layer, x.clone());
            let want = run(&layer.cast(DType::F32), x.cast(DType::F32));
            for (what, (got, want)) in ["prefill", "decode", "q state", "v state"].iter().zip(got.into_iter().zip(want))
            {
                assert_eq!(got.0, DType::F16);
                report.check(&name, format!("{what} {decay:?}"), &got.1, &want.1, DType::F16, 4.0 * 2_f64.powi(-11));
            }
        }
    }
    report.finish();
}
