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

/// [`KdaOps::kda_convolution`](crate::KdaOps::kda_convolution).
pub(crate) fn convolution(
    x: Tensor<3>,
    weight: Tensor<3>,
    bias: Option<Tensor<1>>,
    state: Option<Tensor<3>>,
    ConvParams { head_dim, dtype }: ConvParams,
) -> [Tensor<3>; 2] {
    let [batch, time, channels] = x.dims();
    let [_, _, width] = weight.dims();
    let inputs = match width {
        1 => x.clone(),
        _ => {
            let zeros = || Tensor::zeros([batch, channels, width - 1], (&x.device(), x.dtype()));
            Tensor::cat(vec![state.unwrap_or_else(zeros).swap_dims(1, 2), x.clone()], 1)
        }
    };
    let wide = precision::accumulation(x.dtype());
    let taps = weight.cast(wide).reshape([channels, width]).swap_dims(0, 1);
    let padded = inputs.clone().cast(wide);
    let tap = |j: usize| {
        let weight = taps.clone().slice_dim(0, j..j + 1).reshape([1, 1, channels]);
        padded.clone().slice_dim(1, j..j + time) * weight
    };
    let mut sum = (1..width).fold(tap(0), |sum, j| sum + tap(j));
    if let Some(bias) = bias {
        sum = sum + bias.cast(wide).reshape([1, 1, channels]);
    }
    let y = match head_dim {
        Some(dim) => {
            let heads = silu(sum).reshape([batch, time, channels / dim, dim]);
            l2_normalize(heads).reshape([batch, time, channels])
        }
        None => silu(sum),
    };
    [y.cast(dtype), inputs.slice_dim(1, time..time + width - 1).swap_dims(1, 2)]
}

/// [`l2_normalize`](crate::l2_normalize).
pub(crate) fn l2_normalize<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let dtype = x.dtype();
    let x = x.cast(precision::accumulation(dtype));
    let norm = (x.clone().square().sum_dim(D - 1) + L2_EPS).sqrt();
    (x / norm).cast(dtype)
}

/// [`KdaOps::kda_decay_gate`](crate::KdaOps::kda_decay_gate).
pub(crate) fn decay_gate(
    raw: Tensor<4>,
    a_log: Option<Tensor<1>>,
    dt_bias: Option<Tensor<1>>,
    decay: DecayFn,
) -> Tensor<4> {
    let [_, _, heads, dim] = raw.dims();
    let dtype = precision::accumulation(raw.dtype());
    let rate = a_log.map(|a_log| {
        let (low, high) = A_LOG_RANGE;
        a_log.cast(dtype).clamp(low, high).exp().reshape([1, 1, heads, 1])
    });
    let z = match dt_bias {
        Some(bias) => raw.cast(dtype) + bias.cast(dtype).reshape([1, 1, heads, dim]),
        None => raw.cast(dtype),
    };
    let times = |x: Tensor<4>| match rate {
        Some(rate) => x * rate,
        None => x,
    };
    match decay {
        DecayFn::Softplus => times(softplus(z)).neg(),
        DecayFn::Sigmoid { lower_bound } => sigmoid(times(z)) * lower_bound,
    }
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
