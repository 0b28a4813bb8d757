//! Gradients against finite differences, in f64 only, so that nothing depends on the f32 kernels of a device.

use burn::tensor::{DType, Device, Tensor};

use super::array::{Array, gradient};
use super::compare::Report;
use super::platform::devices;
use super::recipe::Random;

/// Step `h` of `(8 (f(x + h) - f(x - h)) - (f(x + 2h) - f(x - 2h))) / 12h`.
const STEP: f64 = 1e-3;

/// Relative RMS of a whole gradient.
///
/// Truncation is `h^4 f'''''(x) / 30`: 3e-14 where the fifth derivative is of the gradient's size, 1e-11 where the
/// argument is stretched by 3 (`3^5 = 243`, and the fifth derivative of a sigmoid is up to 1). Rounding is
/// `1.5 u |f| / h = 2e-13 |f|` for each rounding error of `f`, a sum of some 10 to 100 terms of the gradient's size:
/// 2e-11 at most. The bar leaves a factor of 30, and is 100 times below what one rounding to f32 anywhere would do.
const BAR: f64 = 1e-9;

/// Checks the gradient of random functionals of `outputs` in every coordinate of every input.
pub fn check(
    report: &mut Report,
    what: &str,
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
                arrays[i].values[j] = x.values[j] + steps * STEP;
                let value = loss(&arrays);
                arrays[i].values[j] = x.values[j];
                value
            };
            let difference = |j: usize| (8.0 * (at(j, 1.0) - at(j, -1.0)) - (at(j, 2.0) - at(j, -2.0))) / (12.0 * STEP);
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
