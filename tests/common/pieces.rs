//! The pieces around the operator: outputs and states, with gradients and where none are tracked, and every gradient.

use burn::tensor::Tensor;
use burn_kda::{DecayFn, decay_gate, gated_rms_norm, l2_normalize, short_convolution};

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
        let untracked = gated_rms_norm(x.clone().inner(), weight.clone().inner(), gate.clone().inner(), eps);
        report.check(&platform, "y untracked", &Array::of(untracked), &case.get("y"), dtype, bar);
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
        let untracked = short_convolution(
            x.clone().inner(),
            weight.clone().inner(),
            bias.clone().map(Tensor::inner),
            cache.clone().map(Tensor::inner),
        );
        let mut got = vec![("y", Array::of(output.y.clone())), ("state", Array::of(output.state.clone()))];
        got.extend([("y", Array::of(untracked.y)), ("state", Array::of(untracked.state))]);
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

/// Every head on its own: heads of one gate differ by many powers of ten.
pub fn gate(case: &Case, report: &mut Report) {
    let decay = match case.text("decay") {
        "softplus" => DecayFn::Softplus,
        _ => DecayFn::Sigmoid { lower_bound: case.option("lower_bound").as_f64().unwrap() },
    };
    let heads = case.get("raw").shape[2];
    for (platform, device, dtype) in platform::platforms() {
        let raw = case.get("raw").leaf::<4>(&device, dtype);
        let a_log = case.find("a_log").map(|x| x.leaf::<1>(&device, dtype));
        let dt_bias = case.find("dt_bias").map(|x| x.leaf::<1>(&device, dtype));
        let g = decay_gate(raw.clone(), a_log.clone(), dt_bias.clone(), decay);
        let inner = |x: &Option<Tensor<1>>| x.clone().map(Tensor::inner);
        let untracked = decay_gate(raw.clone().inner(), inner(&a_log), inner(&dt_bias), decay);
        let mut got = vec![("g", Array::of(g.clone())), ("g", Array::of(untracked))];
        let cotangent = case.get("dg").tensor::<4>(&device.clone().autodiff(), dtype);
        let gradients = (g * cotangent).sum().backward();
        got.push(("draw", gradient(&raw, &gradients)));
        got.extend(a_log.map(|x| ("da_log", gradient(&x, &gradients))));
        got.extend(dt_bias.map(|x| ("ddt_bias", gradient(&x, &gradients))));
        for (name, got) in got {
            let want = case.get(name);
            for head in 0..heads {
                let what = format!("{} {name} of head {head}", case.name);
                report.check(
                    &platform,
                    what,
                    &got.head(head, heads),
                    &want.head(head, heads),
                    dtype,
                    platform::bar(dtype),
                );
            }
        }
    }
}
