//! Decay gate and write strength.

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::activation::{sigmoid, sigmoid_slope, softplus};
use super::{HeadPlan, SPAN, empty, spans};
use crate::gate::DecayFn;
use crate::kernel::decay::decay;
use crate::kernel::element::{address, beta_of, float, grid, maybe, read, write, write_beta};
use crate::kernel::plan::most_units;
use crate::plain::A_LOG_RANGE;

/// Units of a cube, where the device allows as many.
const UNITS: usize = 128;

/// Cubes with a unit for each number, and some that have none.
fn unit_each(client: &Client, numbers: usize) -> (CubeCount, CubeDim) {
    let units = UNITS.min(most_units(&client.properties().hardware));
    grid(client, numbers.div_ceil(units), units)
}

/// As [`KdaOps::kda_decay_gate`](crate::KdaOps::kda_decay_gate).
pub(crate) fn decay_gate(
    raw: CubeTensor,
    a_log: Option<CubeTensor>,
    dt_bias: Option<CubeTensor>,
    decay: DecayFn,
) -> CubeTensor {
    let g = empty(&raw, raw.shape(), DType::F32);
    let client = raw.client.clone();
    let [rate_dtype, bias_dtype] = rate_and_bias_dtypes(&a_log, &dt_bias);
    let dtypes = [float(raw.dtype), rate_dtype, bias_dtype];
    let (count, dim) = unit_each(&client, raw.shape().num_elements());
    let (bound, is_bounded) = bound(decay);
    decay_gate_kernel::launch(
        &client,
        count,
        dim,
        address([&raw, &g].into_iter().chain(&a_log).chain(&dt_bias)),
        raw.into_tensor_arg(),
        maybe(&a_log),
        maybe(&dt_bias),
        g.clone().into_tensor_arg(),
        bound,
        is_bounded,
        dtypes,
    );
    g
}

/// What a gate multiplies its function by, and whether that is the sigmoid.
fn bound(decay: DecayFn) -> (f32, bool) {
    match decay {
        DecayFn::Softplus => (-1.0, false),
        DecayFn::Sigmoid { lower_bound } => (lower_bound as f32, true),
    }
}

fn rate_and_bias_dtypes(a_log: &Option<CubeTensor>, dt_bias: &Option<CubeTensor>) -> [ElemType; 2] {
    [a_log, dt_bias].map(|x| float(x.as_ref().map_or(DType::F32, |x| x.dtype)))
}

#[cube(launch, address_type = "dynamic")]
pub(crate) fn decay_gate_kernel<X: Float, A: Float, B: Float>(
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
    let z = read(raw, batch, t, head, d) + bias_of(dt_bias, head * dim + d);
    let rate = rate_of(a_log, head);
    let value = if comptime!(is_bounded) { sigmoid(z * rate) } else { softplus(z) * rate };
    write(g, batch, t, head, d, bound * value);
}

#[cube]
fn bias_of<B: Float>(dt_bias: ComptimeOption<&Tensor<B>>, channel: usize) -> f32 {
    #[comptime]
    match dt_bias {
        ComptimeOption::Some(bias) => f32::cast_from(bias[channel * bias.stride(0)]),
        ComptimeOption::None => 0.0f32,
    }
}

#[cube]
fn rate_of<A: Float>(a_log: ComptimeOption<&Tensor<A>>, head: usize) -> f32 {
    #[comptime]
    match a_log {
        ComptimeOption::Some(a_log) => {
            let (low, high) = comptime!((A_LOG_RANGE.0 as f32, A_LOG_RANGE.1 as f32));
            decay(clamp(f32::cast_from(a_log[head * a_log.stride(0)]), low, high))
        }
        ComptimeOption::None => 1.0f32,
    }
}

/// Of `raw`, and of the bias and of `A_log`, by spans and channels, `[2, N, HV, K]`; as
/// [`KdaOps::kda_decay_gate_backward`](crate::KdaOps::kda_decay_gate_backward).
pub(crate) fn decay_gate_gradients(
    raw: CubeTensor,
    a_log: Option<CubeTensor>,
    dt_bias: Option<CubeTensor>,
    d_g: CubeTensor,
    decay: DecayFn,
    plan: HeadPlan,
) -> [CubeTensor; 2] {
    let dims @ [batch, time, heads, dim] = raw.shape().dims();
    let d_raw = empty(&raw, dims, raw.dtype);
    let spans = spans(batch, time);
    let sums = empty(&raw, [2, spans, heads, dim], DType::F32);
    let client = raw.client.clone();
    let [rate_dtype, bias_dtype] = rate_and_bias_dtypes(&a_log, &dt_bias);
    let dtypes = [float(raw.dtype), rate_dtype, bias_dtype];
    let (bound, is_bounded) = bound(decay);
    let (count, units) = grid(&client, spans * heads, plan.units);
    decay_gate_gradients_kernel::launch(
        &client,
        count,
        units,
        address([&raw, &d_g, &d_raw, &sums].into_iter().chain(&a_log).chain(&dt_bias)),
        raw.into_tensor_arg(),
        maybe(&a_log),
        maybe(&dt_bias),
        d_g.into_tensor_arg(),
        d_raw.clone().into_tensor_arg(),
        sums.clone().into_tensor_arg(),
        bound,
        is_bounded,
        plan,
        dtypes,
    );
    [d_raw, sums]
}

#[cube(launch, address_type = "dynamic")]
pub(crate) fn decay_gate_gradients_kernel<X: Float, A: Float, B: Float>(
    raw: &Tensor<X>,
    a_log: ComptimeOption<&Tensor<A>>,
    dt_bias: ComptimeOption<&Tensor<B>>,
    d_g: &Tensor<f32>,
    d_raw: &mut Tensor<X>,
    sums: &mut Tensor<f32>,
    bound: f32,
    #[comptime] is_bounded: bool,
    #[comptime] plan: HeadPlan,
    #[define(X, A, B)] _dtypes: [ElemType; 3],
) {
    let (time, heads, dim) = (raw.shape(1), raw.shape(2), raw.shape(3));
    let (head, span) = (CUBE_POS % heads, CUBE_POS / heads);
    let spans = time.div_ceil(SPAN);
    let (batch, start) = (span / spans, span % spans * SPAN);
    if batch >= raw.shape(0) {
        terminate!();
    }
    let rate = rate_of(a_log, head);
    let is_clamped = is_clamped(a_log, head);
    #[unroll]
    for c in 0..plan.channels {
        let d = c * plan.units + UNIT_POS as usize;
        if d < dim {
            let bias = bias_of(dt_bias, head * dim + d);
            let mut d_bias = 0.0f32;
            let mut d_rate = 0.0f32;
            for n in 0..SPAN {
                let t = start + n;
                if t < time {
                    let z = read(raw, batch, t, head, d) + bias;
                    let d_value = bound * read(d_g, batch, t, head, d);
                    let mut d_z = d_value * sigmoid(z);
                    // A saturated gate has no gradient, whatever it is multiplied by.
                    let mut of_rate = select(d_value == 0.0f32, 0.0f32, d_value * softplus(z));
                    if comptime!(is_bounded) {
                        d_z = d_value * sigmoid_slope(z * rate);
                        of_rate = select(d_z == 0.0f32, 0.0f32, d_z * z);
                    }
                    d_z *= rate;
                    d_bias += d_z;
                    d_rate += of_rate;
                    write(d_raw, batch, t, head, d, d_z);
                }
            }
            write(sums, 0, span, head, d, d_bias);
            write(sums, 1, span, head, d, select(is_clamped, 0.0f32, d_rate * rate));
        }
    }
}

/// Whether the gradient of `A_log` is zero.
#[cube]
fn is_clamped<A: Float>(a_log: ComptimeOption<&Tensor<A>>, head: usize) -> bool {
    #[comptime]
    match a_log {
        ComptimeOption::Some(a_log) => {
            let (low, high) = comptime!((A_LOG_RANGE.0 as f32, A_LOG_RANGE.1 as f32));
            let a_log = f32::cast_from(a_log[head * a_log.stride(0)]);
            a_log < low || a_log > high
        }
        ComptimeOption::None => false.runtime(),
    }
}

/// As [`KdaOps::kda_write_strength`](crate::KdaOps::kda_write_strength).
pub(crate) fn write_strength(logit: CubeTensor, factor: f64) -> CubeTensor {
    let beta = empty(&logit, logit.shape(), DType::F32);
    let client = logit.client.clone();
    let dtype = float(logit.dtype);
    let (count, dim) = unit_each(&client, logit.shape().num_elements());
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
pub(crate) fn write_strength_kernel<X: Float>(
    logit: &Tensor<X>,
    beta: &mut Tensor<f32>,
    factor: f32,
    #[define(X)] _dtype: ElemType,
) {
    let (batch, t, head) = place_of_unit(logit);
    if batch >= logit.shape(0) {
        terminate!();
    }
    let x = beta_of(logit, batch, t, head);
    write_beta(beta, batch, t, head, factor * sigmoid(x));
}

/// As [`KdaOps::kda_write_strength_backward`](crate::KdaOps::kda_write_strength_backward).
pub(crate) fn write_strength_gradient(logit: CubeTensor, d_beta: CubeTensor, factor: f64) -> CubeTensor {
    let d_logit = empty(&logit, logit.shape(), logit.dtype);
    let client = logit.client.clone();
    let dtype = float(logit.dtype);
    let (count, dim) = unit_each(&client, logit.shape().num_elements());
    write_strength_gradient_kernel::launch(
        &client,
        count,
        dim,
        address([&logit, &d_beta, &d_logit]),
        logit.into_tensor_arg(),
        d_beta.into_tensor_arg(),
        d_logit.clone().into_tensor_arg(),
        factor as f32,
        dtype,
    );
    d_logit
}

#[cube(launch, address_type = "dynamic")]
pub(crate) fn write_strength_gradient_kernel<X: Float>(
    logit: &Tensor<X>,
    d_beta: &Tensor<f32>,
    d_logit: &mut Tensor<X>,
    factor: f32,
    #[define(X)] _dtype: ElemType,
) {
    let (batch, t, head) = place_of_unit(logit);
    if batch >= logit.shape(0) {
        terminate!();
    }
    let slope = factor * sigmoid_slope(beta_of(logit, batch, t, head));
    write_beta(d_logit, batch, t, head, slope * beta_of(d_beta, batch, t, head));
}

/// The number of a unit in a tensor `[B, T, HV]`; past its end for those that have none.
#[cube]
fn place_of_unit<X: Float>(x: &Tensor<X>) -> (usize, usize, usize) {
    let (time, heads) = (x.shape(1), x.shape(2));
    let row = ABSOLUTE_POS / heads;
    (row / time, row % time, ABSOLUTE_POS % heads)
}
