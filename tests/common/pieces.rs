//! The pieces around the operator: outputs, states and every gradient.

use burn::tensor::Tensor;
use burn_kda::{gated_rms_norm, l2_normalize, short_convolution};

use super::array::{Array, gradient};
use super::compare::Report;
use super::fixture::Case;
use super::platform;

pub fn l2_norm(case: &Case, report: &mut Report) {
    for (platform, device, dtype) in platform::platforms() {
        let x = case.get("x").leaf::<4>(&device, dtype);
        let y = l2_normalize(x.clone());
        report.check(&platform, "y", &Array::of(y.clone()), &case.get("y"), dtype, platform::bar(dtype));
        let gradients = (y * case.get("dy").tensor(&device.autodiff(), dtype)).sum().backward();
        report.check(&platform, "dx", &gradient(&x, &gradients), &case.get("dx"), dtype, platform::bar(dtype));
    }
}

pub fn gated_norm(case: &Case, report: &mut Report) {
    let eps = case.option("eps").as_f64().unwrap();
    for (platform, device, dtype) in platform::platforms() {
        let bar = platform::bar(dtype);
        let x = case.get("x").leaf::<4>(&device, dtype);
        let gate = case.get("gate").leaf::<4>(&device, dtype);
        let weight = case.get("weight").leaf::<1>(&device, dtype);
        let y = gated_rms_norm(x.clone(), weight.clone(), gate.clone(), eps);
        report.check(&platform, "y", &Array::of(y.clone()), &case.get("y"), dtype, bar);
        let gradients = (y * case.get("dy").tensor(&device.autodiff(), dtype)).sum().backward();
        report.check(&platform, "dx", &gradient(&x, &gradients), &case.get("dx"), dtype, bar);
        report.check(&platform, "dgate", &gradient(&gate, &gradients), &case.get("dgate"), dtype, bar);
        report.check(&platform, "dweight", &gradient(&weight, &gradients), &case.get("dweight"), dtype, bar);
    }
}

pub fn convolution(case: &Case, report: &mut Report) {
    for (platform, device, dtype) in platform::platforms() {
        let x = case.get("x").leaf::<3>(&device, dtype);
        let weight = case.get("weight").leaf::<3>(&device, dtype);
        let bias = case.find("bias").map(|bias| bias.leaf::<1>(&device, dtype));
        let cache = case.find("cache").map(|cache| cache.leaf::<3>(&device, dtype));
        let output = short_convolution(x.clone(), weight.clone(), bias.clone(), cache.clone());
        let mut got = vec![("y", Array::of(output.y.clone())), ("state", Array::of(output.state.clone()))];
        let device = device.autodiff();
        let loss: Tensor<1> = (output.y * case.get("dy").tensor(&device, dtype)).sum()
            + (output.state * case.get("dstate").tensor(&device, dtype)).sum();
        let gradients = loss.backward();
        got.extend([("dx", gradient(&x, &gradients)), ("dweight", gradient(&weight, &gradients))]);
        got.extend(bias.map(|bias| ("dbias", gradient(&bias, &gradients))));
        got.extend(cache.map(|cache| ("dcache", gradient(&cache, &gradients))));
        for (name, got) in got {
            report.check(&platform, name, &got, &case.get(name), dtype, platform::bar(dtype));
        }
    }
}
