//! FLA's initial values of the decay parameters (`fla.layers.KimiDeltaAttention.__init__`).

use burn::module::{Param, ParamId};
use burn::tensor::{DType, Device, Distribution, Shape, Tensor};

use crate::DecayFn;

/// `log U(1, 16)`, or 0 with the sigmoid gate: `[HV]`.
pub(super) fn a_log(heads: usize, decay: DecayFn, device: &Device) -> Param<Tensor<1>> {
    parameter(heads, device, move |shape, device| match decay {
        DecayFn::Softplus => Tensor::random(shape, Distribution::Uniform(1.0, 16.0), (device, DType::F32)).log(),
        DecayFn::Sigmoid { .. } => Tensor::zeros(shape, (device, DType::F32)),
    })
}

/// The inverse softplus of a time step log-uniform in `[0.001, 0.1]`: `[HV * K]`.
///
/// FLA floors the step at 1e-4, which this range never reaches. `log(exp(y) - 1)` is taken as
/// `log y + y/2 + y^2/24 - y^4/2880`, exact to 6e-12 here, where the direct form would cancel in f32.
pub(super) fn dt_bias(channels: usize, device: &Device) -> Param<Tensor<1>> {
    parameter(channels, device, |shape, device| {
        let range = Distribution::Uniform(0.001_f64.ln(), 0.1_f64.ln());
        inverse_softplus_of_exp(Tensor::random(shape, range, (device, DType::F32)))
    })
}

/// `log(exp(y) - 1)` from `log y`, `y <= 0.1`.
fn inverse_softplus_of_exp(log_step: Tensor<1>) -> Tensor<1> {
    let step = log_step.clone().exp();
    let square = step.clone().square();
    log_step + step * 0.5 + square.clone() / 24.0 - square.square() / 2880.0
}

fn parameter(
    size: usize,
    device: &Device,
    value: impl Fn(Shape, &Device) -> Tensor<1> + Send + Sync + 'static,
) -> Param<Tensor<1>> {
    let shape = Shape::new([size]);
    let init = {
        let shape = shape.clone();
        move |device: &Device, require_grad| value(shape.clone(), device).set_require_grad(require_grad)
    };
    Param::uninitialized(ParamId::new(), init, device.clone(), true, shape)
}

#[cfg(test)]
mod tests {
    use approx::{assert_abs_diff_eq, assert_relative_eq};

    use super::*;
    use crate::KdaConfig;

    #[test]
    fn inverse_softplus_is_exact_on_its_range() {
        for step in [0.001_f64, 0.01, 0.05, 0.1] {
            let log_step = Tensor::<1>::from_data([step.ln()], (&Device::flex(), DType::F64));
            let got = inverse_softplus_of_exp(log_step).into_scalar::<f64>();
            assert_abs_diff_eq!(got, step.exp_m1().ln(), epsilon = 1e-11);
        }
    }

    #[test]
    fn decay_starts_as_in_fla() {
        let device = Device::default();
        let values = |param: Param<Tensor<1>>| param.val().into_data().iter::<f64>().collect::<Vec<_>>();
        let softplus = KdaConfig::new(8, 64, 16).init(&device);
        let a_log = values(softplus.a_log);
        assert!(a_log.iter().all(|a| (0.0..=16_f64.ln() + 1e-6).contains(a)), "{a_log:?}");
        // Uniform in (1, 16) before the log: 64 draws have their mean within 5 standard errors.
        let mean = a_log.iter().map(|a| a.exp()).sum::<f64>() / 64.0;
        assert_relative_eq!(mean, 8.5, epsilon = 5.0 * 15.0 / 768_f64.sqrt());
        for bias in values(softplus.dt_bias) {
            let step = bias.exp().ln_1p();
            assert!((0.001 * 0.9999..=0.1 * 1.0001).contains(&step), "step {step}");
        }
        let sigmoid = KdaConfig::new(8, 2, 4).with_decay(DecayFn::SIGMOID).init(&device);
        assert_eq!(values(sigmoid.a_log), [0.0, 0.0]);
    }
}
