//! Causal depthwise convolution with silu and carried state, and the normalisation of heads.

use burn::backend::TensorMetadata;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::activation::sigmoid;
use super::{HeadPlan, empty, sum_over_cube};
use crate::kernel::element::{address, float, grid, maybe};
use crate::ops::ConvParams;
use crate::plain::L2_EPS;

/// As [`KdaOps::kda_convolution`](crate::KdaOps::kda_convolution); the plan is one for `heads` of `dim` channels.
pub(crate) fn convolution(
    x: CubeTensor,
    weight: CubeTensor,
    bias: Option<CubeTensor>,
    state: Option<CubeTensor>,
    params: ConvParams,
    [heads, dim]: [usize; 2],
    plan: HeadPlan,
) -> (CubeTensor, CubeTensor) {
    let [batch, time, channels] = x.shape().dims();
    let [_, _, width] = weight.shape().dims();
    let y = empty(&x, [batch, time, channels], params.dtype);
    let next = empty(&x, [batch, channels, width - 1], x.dtype);
    let client = x.client.clone();
    let bias_dtype = bias.as_ref().map_or(weight.dtype, |bias| bias.dtype);
    let dtypes = [x.dtype, weight.dtype, bias_dtype, y.dtype].map(float);
    let (count, units) = grid(&client, plan.cubes([batch, time, heads, dim]), plan.units);
    let tensors = [&x, &weight, &y, &next].into_iter().chain(&bias).chain(&state);
    convolution_kernel::launch(
        &client,
        count,
        units,
        address(tensors),
        x.into_tensor_arg(),
        weight.into_tensor_arg(),
        maybe(&bias),
        maybe(&state),
        y.clone().into_tensor_arg(),
        next.clone().into_tensor_arg(),
        dim,
        width,
        params.head_dim.is_some(),
        plan,
        dtypes,
    );
    (y, next)
}

#[cube(launch, address_type = "dynamic")]
pub(crate) fn convolution_kernel<X: Float, W: Float, B: Float, Y: Float>(
    x: &Tensor<X>,
    weight: &Tensor<W>,
    bias: ComptimeOption<&Tensor<B>>,
    state: ComptimeOption<&Tensor<X>>,
    y: &mut Tensor<Y>,
    next: &mut Tensor<X>,
    dim: usize,
    #[comptime] width: usize,
    #[comptime] normalized: bool,
    #[comptime] plan: HeadPlan,
    #[define(X, W, B, Y)] _dtypes: [ElemType; 4],
) {
    let (time, channels) = (x.shape(1), x.shape(2));
    let (heads, blocks) = (channels.div_ceil(dim), time.div_ceil(plan.tokens));
    let (head, block) = (CUBE_POS % heads, CUBE_POS / heads);
    let (batch, start) = (block / blocks, block % blocks * plan.tokens);
    if batch >= x.shape(0) {
        terminate!();
    }
    let unit = UNIT_POS as usize;
    let mut values = Array::<f32>::new(comptime!(plan.tokens * plan.channels));
    let mut sums = Array::<f32>::new(plan.tokens);
    #[unroll]
    for t in 0..plan.tokens {
        sums[t] = 0.0f32;
    }
    #[unroll]
    for c in 0..plan.channels {
        let d = head * dim + c * plan.units + unit;
        let present = c * plan.units + unit < dim && d < channels;
        // The inputs that the first token of the cube reads, and one more for each of the others.
        let mut inputs = Array::<f32>::new(comptime!(plan.tokens + width - 1));
        let mut taps = Array::<f32>::new(width);
        let mut constant = 0.0f32;
        #[unroll]
        for j in 0..comptime!(plan.tokens + width - 1) {
            inputs[j] = 0.0f32;
            if present && start + j < time + comptime!(width - 1) {
                inputs[j] = f32::cast_from(input(x, state, batch, start + j, d, width));
            }
        }
        #[unroll]
        for j in 0..width {
            taps[j] = 0.0f32;
            if present {
                taps[j] = f32::cast_from(weight[d * weight.stride(0) + j * weight.stride(2)]);
            }
        }
        #[comptime]
        match bias {
            ComptimeOption::Some(bias) => {
                if present {
                    constant = f32::cast_from(bias[d * bias.stride(0)]);
                }
            }
            ComptimeOption::None => {}
        }
        #[unroll]
        for t in 0..plan.tokens {
            let mut sum = 0.0f32;
            #[unroll]
            for j in 0..width {
                sum += taps[j] * inputs[t + j];
            }
            sum += constant;
            let value = sum * sigmoid(sum);
            values[t * plan.channels + c] = value;
            sums[t] += value * value;
        }
        if present && start + plan.tokens >= time {
            #[unroll]
            for j in 0..comptime!(width - 1) {
                let to = batch * next.stride(0) + d * next.stride(1) + j * next.stride(2);
                next[to] = input(x, state, batch, time + j, d, width);
            }
        }
    }
    if comptime!(normalized) {
        sum_over_cube(&mut sums, plan.tokens, plan);
    }
    #[unroll]
    for t in 0..plan.tokens {
        let mut norm = 1.0f32;
        if comptime!(normalized) {
            norm = (sums[t] + comptime!(L2_EPS as f32)).sqrt();
        }
        #[unroll]
        for c in 0..plan.channels {
            let d = head * dim + c * plan.units + unit;
            if start + t < time && c * plan.units + unit < dim && d < channels {
                let to = batch * y.stride(0) + (start + t) * y.stride(1) + d * y.stride(2);
                y[to] = Y::cast_from(values[t * plan.channels + c] / norm);
            }
        }
    }
}

/// Number `n` of the inputs that begin with the state.
#[cube]
pub(super) fn input<X: Float>(
    x: &Tensor<X>,
    state: ComptimeOption<&Tensor<X>>,
    batch: usize,
    n: usize,
    d: usize,
    #[comptime] width: usize,
) -> X {
    let past = comptime!(width - 1);
    let mut value = X::cast_from(0.0f32);
    if n >= past {
        value = x[batch * x.stride(0) + (n - past) * x.stride(1) + d * x.stride(2)];
    } else {
        #[comptime]
        match state {
            ComptimeOption::Some(state) => {
                value = state[batch * state.stride(0) + d * state.stride(1) + n * state.stride(2)];
            }
            ComptimeOption::None => {}
        }
    }
    value
}
