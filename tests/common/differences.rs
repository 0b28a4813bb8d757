//! Gradients against finite differences, in f64 only, so that nothing depends on the f32 kernels of a device.

use burn::tensor::{DType, Device, Tensor};

use super::array::{Array, gradient};
use super::compare::Report;
use super::platform::devices;
use super::recipe::Random;

/// Relative RMS of a whole gradient against
/// `(45 (f(x + h) - f(x - h)) - 9 (f(x + 2h) - f(x - 2h)) + (f(x + 3h) - f(x - 3h))) / 60h`.
///
/// Truncation is `h^6 / 140` times the seventh derivative, so `(h / s)^6 / 140` of the gradient, where `s` is the
/// length over which it bends. Rounding is `1.8 u |f| / h` for each rounding error of `f`, a sum of some ten terms of
/// the gradient's size.
///
/// - [`SMOOTH`]: `s` is 1/4 at least (the logistic function, its argument stretched by 3): 3e-17, and rounding 2e-12.
/// - [`NORMED`]: `s` is the length of the shortest normed row, some 0.01: 1e-10, and rounding 4e-12.
///
/// Rounding grows by how much smaller a gradient is than the sum it changes, for which the bar leaves a factor of
/// 200. One rounding to f32 anywhere would be `6e-8 / h`, 6e-5 at least.
const BAR: f64 = 1e-9;

/// Step `h` where nothing bends sharply.
pub const SMOOTH: f64 = 1e-3;
/// Step `h` where rows are divided by their norm.
pub const NORMED: f64 = 5e-4;

/// Checks the gradient of random functionals of `outputs` in every coordinate of every input.
pub fn check(
    report: &mut Report,
    what: &str,
    step: f64,
    inputs: &[(&str, Array)],
    outputs: impl Fn(&[Tensor<1>]) -> Vec<Tensor<1>>,
) {
    for (platform, device) in devices() {
        let loss = |arrays: &[Array]| {
            let tensors: Vec<_> = arrays.iter().map(|x| flat(x, &device)).collect();
            let values = loss(outputs(&tensors)).into_data().iter::<f64>().next();
            values.expect("one number")
        };
        let leaves: Vec<_> = inputs.iter().map(|(_, x)| flat(x, &device.clone().autodiff()).require_grad()).collect();
        let gradients = self::loss(outputs(&leaves)).backward();

        let mut arrays: Vec<_> = inputs.iter().map(|(_, x)| x.clone()).collect();
        for (i, (name, x)) in inputs.iter().enumerate() {
            let mut at = |j: usize, steps: f64| {
                arrays[i].values[j] = x.values[j] + steps * step;
                let value = loss(&arrays);
                arrays[i].values[j] = x.values[j];
                value
            };
            let mut odd = |j: usize, steps: f64| at(j, steps) - at(j, -steps);
            let difference = |j: usize| (45.0 * odd(j, 1.0) - 9.0 * odd(j, 2.0) + odd(j, 3.0)) / (60.0 * step);
            let want = Array::new(vec![x.values.len()], (0..x.values.len()).map(difference).collect());
            let got = gradient(&leaves[i], &gradients);
            report.check(&platform, format!("{what} d {name}"), &got, &want, DType::F64, BAR);
        }
    }
}

fn flat(x: &Array, device: &Device) -> Tensor<1> {
    Array::new(vec![x.values.len()], x.values.clone()).tensor(device, DType::F64)
}

/// A sum with random weights, the same ones in every call.
fn loss(outputs: Vec<Tensor<1>>) -> Tensor<1> {
    let mut random = Random::new(17);
    let weighted = outputs.into_iter().map(|output| {
        let weights = random.normal(output.dims().to_vec()).tensor(&output.device(), DType::F64);
        (output * weights).sum()
    });
    weighted.reduce(|sum, term| sum + term).expect("an output")
}
