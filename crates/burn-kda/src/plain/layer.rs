//! What surrounds the operator in a layer.

use burn::tensor::{DType, Tensor};

use crate::activation::{sigmoid, silu, softplus};
use crate::gate::DecayFn;
use crate::ops::ConvParams;
use crate::precision;

/// `A_log` outside this range is clamped before `exp`, with zero gradient.
pub(crate) const A_LOG_RANGE: (f64, f64) = (-10.0, 20.0);

/// FLA's epsilon under the root of the query/key norm.
pub(crate) const L2_EPS: f64 = 1e-6;

/// Inputs of a convolution in the dtype of the arithmetic, after the state: `[B, W - 1 + T, D]`.
fn with_past(x: Tensor<3>, state: Option<Tensor<3>>, width: usize) -> Tensor<3> {
    let [batch, _, channels] = x.dims();
    if width == 1 {
        return x;
    }
    let zeros = || Tensor::zeros([batch, channels, width - 1], (&x.device(), x.dtype()));
    Tensor::cat(vec![state.unwrap_or_else(zeros).swap_dims(1, 2), x.clone()], 1)
}

/// Tap `j` of a convolution for all channels, `[1, 1, D]`.
fn tap(weight: &Tensor<3>, j: usize, dtype: DType) -> Tensor<3> {
    let [channels, _, _] = weight.dims();
    weight.clone().slice_dim(2, j..j + 1).cast(dtype).reshape([1, 1, channels])
}

/// What silu is taken of, from the inputs after the state.
fn convolved(inputs: &Tensor<3>, weight: &Tensor<3>, bias: Option<Tensor<1>>, time: usize) -> Tensor<3> {
    let [channels, _, width] = weight.dims();
    let dtype = inputs.dtype();
    let term = |j: usize| inputs.clone().slice_dim(1, j..j + time) * tap(weight, j, dtype);
    let sum = (1..width).fold(term(0), |sum, j| sum + term(j));
    match bias {
        Some(bias) => sum + bias.cast(dtype).reshape([1, 1, channels]),
        None => sum,
    }
}

/// [`KdaOps::kda_convolution`](crate::KdaOps::kda_convolution).
pub(crate) fn convolution(
    x: Tensor<3>,
    weight: Tensor<3>,
    bias: Option<Tensor<1>>,
    state: Option<Tensor<3>>,
    ConvParams { head_dim, dtype }: ConvParams,
) -> [Tensor<3>; 2] {
    let dims @ [batch, time, channels] = x.dims();
    let [_, _, width] = weight.dims();
    let wide = precision::accumulation(x.dtype());
    let inputs = with_past(x, state, width);
    let y = silu(convolved(&inputs.clone().cast(wide), &weight, bias, time));
    let y = match head_dim {
        Some(dim) => l2_normalize(y.reshape([batch, time, channels / dim, dim])).reshape(dims),
        None => y,
    };
    [y.cast(dtype), inputs.slice_dim(1, time..time + width - 1).swap_dims(1, 2)]
}

/// [`KdaOps::kda_convolution_backward`](crate::KdaOps::kda_convolution_backward).
#[allow(clippy::type_complexity)]
pub(crate) fn convolution_backward(
    x: Tensor<3>,
    weight: Tensor<3>,
    bias: Option<Tensor<1>>,
    state: Option<Tensor<3>>,
    [d_y, d_next]: [Option<Tensor<3>>; 2],
    ConvParams { head_dim, .. }: ConvParams,
) -> (Tensor<3>, Tensor<3>, Option<Tensor<1>>, Option<Tensor<3>>) {
    let dims @ [batch, time, channels] = x.dims();
    let [_, _, width] = weight.dims();
    let past = width - 1;
    let (device, dtype) = (x.device(), x.dtype());
    let wide = precision::accumulation(dtype);
    let zeros = |time| Tensor::<3>::zeros([batch, time, channels], (&device, wide));
    let inputs = with_past(x, state.clone(), width).cast(wide);
    let z = convolved(&inputs, &weight, bias.clone(), time);
    let slope = sigmoid(z.clone()) * (z.clone() * sigmoid(z.clone().neg()) + 1.0);

    let d_y = d_y.map_or_else(|| zeros(time), |d_y| d_y.cast(wide));
    let d_silu = match head_dim {
        Some(dim) => {
            let heads = |x: Tensor<3>| x.reshape([batch, time, channels / dim, dim]);
            let (s, d_y) = (heads(silu(z)), heads(d_y));
            let norm = (s.clone().square().sum_dim(3) + L2_EPS).sqrt();
            let y = s / norm.clone();
            let along = (y.clone() * d_y.clone()).sum_dim(3);
            ((d_y - y * along) / norm).reshape(dims)
        }
        None => d_y,
    };
    let d_z = d_silu * slope;

    // Every input from the first of the state on: what the taps read of it, and what the next state keeps.
    let around = match past {
        // Not with zeros of no size: beside them, burn-fusion 0.22 computes other tensors wrong.
        0 => d_z.clone(),
        _ => Tensor::cat(vec![zeros(past), d_z.clone(), zeros(past)], 1),
    };
    let term = |j: usize| around.clone().slice_dim(1, past - j..past - j + past + time) * tap(&weight, j, wide);
    let mut d_inputs = (1..width).fold(term(0), |sum, j| sum + term(j));
    if let Some(d_next) = d_next.filter(|_| past > 0) {
        d_inputs = d_inputs + Tensor::cat(vec![zeros(time), d_next.cast(wide).swap_dims(1, 2)], 1);
    }
    let of_tap =
        |j: usize| (inputs.clone().slice_dim(1, j..j + time) * d_z.clone()).sum_dims(&[0, 1]).reshape([channels, 1, 1]);
    let d_weight = Tensor::cat((0..width).map(of_tap).collect(), 2).cast(weight.dtype());
    let d_bias = bias.map(|bias| d_z.sum_dims(&[0, 1]).reshape([channels]).cast(bias.dtype()));
    let d_state = state.map(|state| d_inputs.clone().slice_dim(1, 0..past).swap_dims(1, 2).cast(state.dtype()));
    (d_inputs.slice_dim(1, past..past + time).cast(dtype), d_weight, d_bias, d_state)
}

/// [`l2_normalize`](crate::l2_normalize).
pub(crate) fn l2_normalize<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let dtype = x.dtype();
    let x = x.cast(precision::accumulation(dtype));
    let norm = (x.clone().square().sum_dim(D - 1) + L2_EPS).sqrt();
    (x / norm).cast(dtype)
}

/// `exp(A_log)` and `raw + dt_bias` of a gate, `[1, 1, HV, 1]` and `[B, T, HV, K]`, in the dtype of the arithmetic.
fn rate_and_argument(
    raw: Tensor<4>,
    a_log: Option<Tensor<1>>,
    dt_bias: Option<Tensor<1>>,
) -> (Option<Tensor<4>>, Tensor<4>) {
    let [_, _, heads, dim] = raw.dims();
    let dtype = precision::accumulation(raw.dtype());
    let (low, high) = A_LOG_RANGE;
    let rate = a_log.map(|a_log| a_log.cast(dtype).clamp(low, high).exp().reshape([1, 1, heads, 1]));
    let z = match dt_bias {
        Some(bias) => raw.cast(dtype) + bias.cast(dtype).reshape([1, 1, heads, dim]),
        None => raw.cast(dtype),
    };
    (rate, z)
}

fn times(x: Tensor<4>, rate: Option<Tensor<4>>) -> Tensor<4> {
    match rate {
        Some(rate) => x * rate,
        None => x,
    }
}

/// [`KdaOps::kda_decay_gate`](crate::KdaOps::kda_decay_gate).
pub(crate) fn decay_gate(
    raw: Tensor<4>,
    a_log: Option<Tensor<1>>,
    dt_bias: Option<Tensor<1>>,
    decay: DecayFn,
) -> Tensor<4> {
    let (rate, z) = rate_and_argument(raw, a_log, dt_bias);
    match decay {
        DecayFn::Softplus => times(softplus(z), rate).neg(),
        DecayFn::Sigmoid { lower_bound } => sigmoid(times(z, rate)) * lower_bound,
    }
}

/// [`KdaOps::kda_decay_gate_backward`](crate::KdaOps::kda_decay_gate_backward).
pub(crate) fn decay_gate_backward(
    raw: Tensor<4>,
    a_log: Option<Tensor<1>>,
    dt_bias: Option<Tensor<1>>,
    d_g: Tensor<4>,
    decay: DecayFn,
) -> (Tensor<4>, Option<Tensor<1>>, Option<Tensor<1>>) {
    let [_, _, heads, dim] = raw.dims();
    let dtype = raw.dtype();
    let (rate, z) = rate_and_argument(raw, a_log.clone(), dt_bias.clone());
    // Of `z`, and of the rate at each number; a saturated gate has no gradient, whatever it is multiplied by.
    let (d_z, d_rate) = match decay {
        DecayFn::Softplus => {
            let d_g = d_g.neg();
            let d_rate = (d_g.clone() * softplus(z.clone())).mask_fill(d_g.clone().equal_elem(0.0), 0.0);
            (times(d_g * sigmoid(z), rate.clone()), d_rate)
        }
        DecayFn::Sigmoid { lower_bound } => {
            let x = times(z.clone(), rate.clone());
            let d_x = d_g * sigmoid(x.clone()) * sigmoid(x.neg()) * lower_bound;
            let d_rate = (d_x.clone() * z).mask_fill(d_x.clone().equal_elem(0.0), 0.0);
            (times(d_x, rate.clone()), d_rate)
        }
    };
    let d_a_log = a_log.zip(rate).map(|(a_log, rate)| {
        let (low, high) = A_LOG_RANGE;
        let clamped = a_log.clone().lower_elem(low).bool_or(a_log.clone().greater_elem(high));
        let sum = d_rate.sum_dims(&[0, 1, 3]) * rate;
        sum.reshape([heads]).mask_fill(clamped, 0.0).cast(a_log.dtype())
    });
    let d_bias = dt_bias.map(|bias| d_z.clone().sum_dims(&[0, 1]).reshape([heads * dim]).cast(bias.dtype()));
    (d_z.cast(dtype), d_a_log, d_bias)
}

/// [`KdaOps::kda_write_strength`](crate::KdaOps::kda_write_strength).
pub(crate) fn write_strength(logit: Tensor<3>, factor: f64) -> Tensor<3> {
    let dtype = precision::accumulation(logit.dtype());
    let beta = sigmoid(logit.cast(dtype));
    if factor == 1.0 { beta } else { beta * factor }
}

/// [`KdaOps::kda_output_norm`](crate::KdaOps::kda_output_norm).
pub(crate) fn output_norm(o: Tensor<4>, weight: Tensor<1>, gate: Tensor<4>, eps: f64, dtype: DType) -> Tensor<4> {
    let [_, _, _, width] = o.dims();
    let wide = precision::accumulation(o.dtype());
    let o = o.cast(wide);
    // Not `/ width`: going backward, burn-autodiff 0.22 divides by a scalar in f32.
    let rms = (o.clone().square().sum_dim(3) * (1.0 / width as f64) + eps).sqrt();
    let weight = weight.cast(wide).reshape([1, 1, 1, width]);
    (o / rms * weight * sigmoid(gate.cast(wide))).cast(dtype)
}

/// [`KdaOps::kda_write_strength_backward`](crate::KdaOps::kda_write_strength_backward).
pub(crate) fn write_strength_backward(logit: Tensor<3>, d_beta: Tensor<3>, factor: f64) -> Tensor<3> {
    let dtype = logit.dtype();
    let logit = logit.cast(precision::accumulation(dtype));
    (d_beta * sigmoid(logit.clone()) * sigmoid(logit.neg()) * factor).cast(dtype)
}

/// [`KdaOps::kda_output_norm_backward`](crate::KdaOps::kda_output_norm_backward).
pub(crate) fn output_norm_backward(
    o: Tensor<4>,
    weight: Tensor<1>,
    gate: Tensor<4>,
    d_y: Tensor<4>,
    eps: f64,
) -> (Tensor<4>, Tensor<1>, Tensor<4>) {
    let [_, _, _, width] = o.dims();
    let (o_dtype, gate_dtype, weight_dtype) = (o.dtype(), gate.dtype(), weight.dtype());
    let wide = precision::accumulation(o_dtype);
    let [o, gate, d_y] = [o, gate, d_y].map(|x| x.cast(wide));
    let weight = weight.cast(wide).reshape([1, 1, 1, width]);
    let rms = (o.clone().square().mean_dim(3) + eps).sqrt();
    let normed = o / rms.clone();
    let open = sigmoid(gate.clone());

    let d_open = d_y * open;
    let along = d_open.clone() * normed.clone();
    let d_weight = along.clone().sum_dims(&[0, 1, 2]).reshape([width]);
    let along = along * weight.clone();
    let d_gate = along.clone() * sigmoid(gate.neg());
    let d_o = (d_open * weight - normed * along.mean_dim(3)) / rms;
    (d_o.cast(o_dtype), d_weight.cast(weight_dtype), d_gate.cast(gate_dtype))
}
