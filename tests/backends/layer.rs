//! What surrounds the operator, and the layer.

use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_kda::{DecayFn, KdaConfig, KdaModule, decay_gate, gated_rms_norm, short_convolution, write_strength};

use crate::common::array::Array;
use crate::common::compare::Report;
use crate::common::fixture::{Case, Fixture};
use crate::common::platform::{bar, devices, platforms};
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

/// Numbers without order in memory, `[.., b, a]` seen as `[.., a, b]`.
fn strided<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    let mut stored = shape;
    stored.swap(D - 2, D - 1);
    Tensor::random(stored, Distribution::Normal(0.0, 1.0), device).swap_dims(D - 2, D - 1)
}

/// Heads of any size and inputs of any strides: as the tensor operations that autodiff records.
#[test]
fn sizes_and_strides() {
    let mut report = Report::new("around the operator");
    let (name, device) = devices().remove(0);
    let mut compare = |what: String, got: Vec<Array>, want: Vec<Array>| {
        for (got, want) in got.into_iter().zip(want) {
            report.check(&name, &what, &got, &want, DType::F32, bar(DType::F32));
        }
    };
    for (time, dim) in [(1, 1), (2, 3), (5, 64), (9, 100), (17, 256), (3, 300)] {
        let x = strided([2, time, 3 * dim], &device);
        for width in [1, 2, 4, 16, 17] {
            let weight = strided([3 * dim, 1, width], &device);
            let state = strided([2, 3 * dim, width - 1], &device);
            let run = |[x, weight, state]: [Tensor<3>; 3]| {
                let output = short_convolution(x, weight, None, (width > 1).then_some(state));
                vec![Array::of(output.y), Array::of(output.state)]
            };
            let tensors = [x.clone(), weight, state];
            let got = run(tensors.clone());
            compare(format!("convolution of {time} x {dim}, width {width}"), got, run(tensors.map(Tensor::from_inner)));
        }
        let (o, gate) = (strided([2, time, 3, dim], &device), strided([2, time, 3, dim], &device));
        let weight = Tensor::<1>::random([dim], Distribution::Default, &device);
        let run = |[o, gate]: [Tensor<4>; 2], weight| vec![Array::of(gated_rms_norm(o, weight, gate, 1e-5))];
        let got = run([o.clone(), gate.clone()], weight.clone());
        let want = run([o, gate.clone()].map(Tensor::from_inner), Tensor::from_inner(weight));
        compare(format!("norm of {time} x {dim}"), got, want);
        let run = |x: Tensor<4>, a_log: Tensor<1>| vec![Array::of(decay_gate(x, Some(a_log), None, DecayFn::Softplus))];
        let a_log = Tensor::<1>::from_floats([-3.0, 0.5, 25.0], &device);
        let got = run(gate.clone(), a_log.clone());
        compare(format!("gate of {time} x {dim}"), got, run(Tensor::from_inner(gate), Tensor::from_inner(a_log)));
        let got = vec![Array::of(write_strength(x.clone(), true))];
        compare(format!("beta of {time} x {dim}"), got, vec![Array::of(write_strength(Tensor::from_inner(x), true))]);
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
