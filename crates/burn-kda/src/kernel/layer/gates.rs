//! Decay gate and write strength.

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::activation::{sigmoid, softplus};
use super::empty;
use crate::gate::DecayFn;
use crate::kernel::decay::decay;
use crate::kernel::element::{address, beta_of, float, grid, maybe, read, write, write_beta};
use crate::plain::A_LOG_RANGE;

/// Units of a cube; every device has as many.
const UNITS: usize = 128;

/// As [`KdaOps::kda_decay_gate`](crate::KdaOps::kda_decay_gate).
pub(crate) fn decay_gate(
    raw: CubeTensor,
    a_log: Option<CubeTensor>,
    dt_bias: Option<CubeTensor>,
    decay: DecayFn,
) -> CubeTensor {
    let g = empty(&raw, raw.shape(), DType::F32);
    let client = raw.client.clone();
    let of = |x: &Option<CubeTensor>| x.as_ref().map_or(float(DType::F32), |x| float(x.dtype));
    let dtypes = [float(raw.dtype), of(&a_log), of(&dt_bias)];
    let numbers = raw.shape().num_elements();
    let (count, dim) = grid(&client, numbers.div_ceil(UNITS), UNITS);
    let (bound, is_bounded) = match decay {
        DecayFn::Softplus => (-1.0, false),
        DecayFn::Sigmoid { lower_bound } => (lower_bound, true),
    };
    decay_gate_kernel::launch(
        &client,
        count,
        dim,
        address([&raw, &g]),
        raw.into_tensor_arg(),
        maybe(&a_log),
        maybe(&dt_bias),
        g.clone().into_tensor_arg(),
        bound as f32,
        is_bounded,
        dtypes,
    );
    g
}

#[cube(launch, address_type = "dynamic")]
pub(super) fn decay_gate_kernel<X: Float, A: Float, B: Float>(
    raw: &Tensor<X>,
    a_log: ComptimeOption<&Tensor<A>>,
    dt_bias: ComptimeOption<&Tensor<B>>,
    g: &mut Tensor<f32>,
    bound: f32,
    #[comptime] is_bounded: bool,
    #[define(X, A, B)] _dtypes: [ElemType; 3],
) {
    let (time, heads, dim) = (raw.shape(1), raw.shape(2), raw.shape(3));
    let position = ABSOLUTE_POS;
    let row = position / dim;
    let (d, head, t, batch) = (position % dim, row % heads, row / heads % time, row / heads / time);
    if batch >= raw.shape(0) {
        terminate!();
    }
    let mut z = read(raw, batch, t, head, d);
    #[comptime]
    match dt_bias {
        ComptimeOption::Some(bias) => z += f32::cast_from(bias[(head * dim + d) * bias.stride(0)]),
        ComptimeOption::None => {}
    }
    let mut rate = 1.0f32;
    #[comptime]
    match a_log {
        ComptimeOption::Some(a_log) => {
            let (low, high) = comptime!((A_LOG_RANGE.0 as f32, A_LOG_RANGE.1 as f32));
            rate = decay(clamp(f32::cast_from(a_log[head * a_log.stride(0)]), low, high));
        }
        ComptimeOption::None => {}
    }
    let value = if comptime!(is_bounded) { sigmoid(z * rate) } else { softplus(z) * rate };
    write(g, batch, t, head, d, bound * value);
}

/// As [`KdaOps::kda_write_strength`](crate::KdaOps::kda_write_strength).
pub(crate) fn write_strength(logit: CubeTensor, factor: f64) -> CubeTensor {
    let beta = empty(&logit, logit.shape(), DType::F32);
    let client = logit.client.clone();
    let dtype = float(logit.dtype);
    let (count, dim) = grid(&client, logit.shape().num_elements().div_ceil(UNITS), UNITS);
    write_strength_kernel::launch(
        &client,
        count,
        dim,
        address([&logit, &beta]),
        logit.into_tensor_arg(),
        beta.clone().into_tensor_arg(),
        factor as f32,
        dtype,
    );
    beta
}

#[cube(launch, address_type = "dynamic")]
pub(super) fn write_strength_kernel<X: Float>(
    logit: &Tensor<X>,
    beta: &mut Tensor<f32>,
    factor: f32,
    #[define(X)] _dtype: ElemType,
) {
    let (time, heads) = (logit.shape(1), logit.shape(2));
    let position = ABSOLUTE_POS;
    let (head, t, batch) = (position % heads, position / heads % time, position / heads / time);
    if batch >= logit.shape(0) {
        terminate!();
    }
    let x = beta_of(logit, batch, t, head);
    write_beta(beta, batch, t, head, factor * sigmoid(x));
}
