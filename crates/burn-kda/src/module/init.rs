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
        let log_step = Tensor::<1>::random(shape, range, (device, DType::F32));
        let step = log_step.clone().exp();
        let square = step.clone().square();
        log_step + step * 0.5 + square.clone() / 24.0 - square.square() / 2880.0
    })
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
