//! Backward pass of the convolution, with silu and the normalisation of heads.

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::activation::sigmoid;
use super::convolution::input;
use super::{HeadPlan, SPAN, empty, spans, sum_over_cube};
use crate::kernel::element::{address, float, grid, maybe};
use crate::ops::ConvParams;
use crate::plain::L2_EPS;

/// Of `x`; of the weights and the bias by spans, `[N, W + 1, D]`; and of the state. As
/// [`KdaOps::kda_convolution_backward`](crate::KdaOps::kda_convolution_backward); the plan is one for `heads` of `dim`
/// channels.
#[allow(clippy::too_many_arguments)]
pub(crate) fn convolution_gradients(
    x: CubeTensor,
    weight: CubeTensor,
    bias: Option<CubeTensor>,
    state: Option<CubeTensor>,
    [d_y, d_next]: [Option<CubeTensor>; 2],
    params: ConvParams,
    [heads, dim]: [usize; 2],
    plan: HeadPlan,
) -> (CubeTensor, CubeTensor, Option<CubeTensor>) {
    let [batch, time, channels] = x.shape().dims();
    let [_, _, width] = weight.shape().dims();
    let d_x = empty(&x, [batch, time, channels], x.dtype);
    let spans = spans(batch, time);
    let sums = empty(&x, [spans, width + 1, channels], DType::F32);
    let d_state = state.as_ref().map(|_| empty(&x, [batch, channels, width - 1], x.dtype));
    let client = x.client.clone();
    let bias_dtype = bias.as_ref().map_or(weight.dtype, |bias| bias.dtype);
    let dtypes = [x.dtype, weight.dtype, bias_dtype, params.dtype].map(float);
    let given = [&bias, &state, &d_y, &d_next, &d_state].into_iter().flatten();
    let tensors = [&x, &weight, &d_x, &sums].into_iter().chain(given);
    let (count, units) = grid(&client, spans * heads, plan.units);
    convolution_gradients_kernel::launch(
        &client,
        count,
        units,
        address(tensors),
        x.into_tensor_arg(),
        weight.into_tensor_arg(),
        maybe(&bias),
        maybe(&state),
        maybe(&d_y),
        maybe(&d_next),
        d_x.clone().into_tensor_arg(),
        sums.clone().into_tensor_arg(),
        maybe(&d_state),
        dim,
        width,
        params.head_dim.is_some(),
        plan,
        dtypes,
    );
    (d_x, sums, d_state)
}

/// A unit goes through its span some tokens at a time, and computes what silu is taken of for these and for those after
/// them that read the same inputs.
#[cube(launch, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn convolution_gradients_kernel<X: Float, W: Float, B: Float, Y: Float>(
    x: &Tensor<X>,
    weight: &Tensor<W>,
    bias: ComptimeOption<&Tensor<B>>,
    state: ComptimeOption<&Tensor<X>>,
    d_y: ComptimeOption<&Tensor<Y>>,
    d_next: ComptimeOption<&Tensor<X>>,
    d_x: &mut Tensor<X>,
    sums: &mut Tensor<f32>,
    mut d_state: ComptimeOption<OwnedTensor<X>>,
    dim: usize,
    #[comptime] width: usize,
    #[comptime] normalized: bool,
    #[comptime] plan: HeadPlan,
    #[define(X, W, B, Y)] _dtypes: [ElemType; 4],
) {
    let (time, channels) = (x.shape(1), x.shape(2));
    let heads = channels.div_ceil(dim);
    let spans = time.div_ceil(SPAN);
    let (head, span) = (CUBE_POS % heads, CUBE_POS / heads);
    let (batch, start) = (span / spans, span % spans * SPAN);
    if batch >= x.shape(0) {
        terminate!();
    }
    let unit = UNIT_POS as usize;
    let past = comptime!(width - 1);
    let rows = comptime!(plan.tokens + past);
    let per_channel = comptime!(rows + past);

    let mut taps = Array::<f32>::new(comptime!(plan.channels * width));
    let mut constants = Array::<f32>::new(plan.channels);
    // Of the taps, and of the bias.
    let mut d_taps = Array::<f32>::new(comptime!(plan.channels * (width + 1)));
    #[unroll]
    for c in 0..plan.channels {
        let d = head * dim + c * plan.units + unit;
        let present = c * plan.units + unit < dim && d < channels;
        constants[c] = 0.0f32;
        d_taps[c * (width + 1) + width] = 0.0f32;
        #[unroll]
        for j in 0..width {
            d_taps[c * (width + 1) + j] = 0.0f32;
            taps[c * width + j] = 0.0f32;
            if present {
                taps[c * width + j] = f32::cast_from(weight[d * weight.stride(0) + j * weight.stride(2)]);
            }
        }
        #[comptime]
        match bias {
            ComptimeOption::Some(bias) => {
                if present {
                    constants[c] = f32::cast_from(bias[d * bias.stride(0)]);
                }
            }
            ComptimeOption::None => {}
        }
    }

    let mut inputs = Array::<f32>::new(comptime!(plan.channels * per_channel));
    // What silu is taken of, then its cotangent; and the cotangent of its value.
    let mut before = Array::<f32>::new(comptime!(plan.channels * rows));
    let mut d_value = Array::<f32>::new(comptime!(plan.channels * rows));
    // Of each row, the square of the value, then its product with the cotangent.
    let mut products = Array::<f32>::new(comptime!(2 * rows));
    for n in 0..comptime!(SPAN / plan.tokens) {
        let first = start + n * plan.tokens;
        if first < time {
            #[unroll]
            for r in 0..rows {
                products[r] = 0.0f32;
                products[rows + r] = 0.0f32;
            }
            #[unroll]
            for c in 0..plan.channels {
                let d = head * dim + c * plan.units + unit;
                let present = c * plan.units + unit < dim && d < channels;
                #[unroll]
                for j in 0..per_channel {
                    inputs[c * per_channel + j] = 0.0f32;
                    if present && first + j < time + past {
                        inputs[c * per_channel + j] = f32::cast_from(input(x, state, batch, first + j, d, width));
                    }
                }
                #[unroll]
                for r in 0..rows {
                    let mut z = 0.0f32;
                    #[unroll]
                    for j in 0..width {
                        z += taps[c * width + j] * inputs[c * per_channel + r + j];
                    }
                    z += constants[c];
                    let value = z * sigmoid(z);
                    let mut cotangent = 0.0f32;
                    #[comptime]
                    match d_y {
                        ComptimeOption::Some(d_y) => {
                            if present && first + r < time {
                                let from = batch * d_y.stride(0) + (first + r) * d_y.stride(1) + d * d_y.stride(2);
                                cotangent = f32::cast_from(d_y[from]);
                            }
                        }
                        ComptimeOption::None => {}
                    }
                    before[c * rows + r] = z;
                    d_value[c * rows + r] = cotangent;
                    products[r] += value * value;
                    products[rows + r] += value * cotangent;
                }
            }
            if comptime!(normalized) {
                sum_over_cube(&mut products, comptime!(2 * rows), plan);
            }

            #[unroll]
            for c in 0..plan.channels {
                let d = head * dim + c * plan.units + unit;
                let present = c * plan.units + unit < dim && d < channels;
                #[unroll]
                for r in 0..rows {
                    let z = before[c * rows + r];
                    let open = sigmoid(z);
                    let mut cotangent = d_value[c * rows + r];
                    if comptime!(normalized) {
                        let square = products[r] + comptime!(L2_EPS as f32);
                        let along = products[rows + r] / square;
                        cotangent = (cotangent - z * open * along) / square.sqrt();
                    }
                    let slope = open * (1.0f32 + z * sigmoid(-z));
                    before[c * rows + r] = select(first + r < time, cotangent * slope, 0.0f32);
                }
                #[unroll]
                for t in 0..plan.tokens {
                    d_taps[c * (width + 1) + width] += before[c * rows + t];
                    let mut sum = 0.0f32;
                    #[unroll]
                    for j in 0..width {
                        d_taps[c * (width + 1) + j] += before[c * rows + t] * inputs[c * per_channel + t + j];
                        sum += taps[c * width + j] * before[c * rows + t + past - j];
                    }
                    if present && first + t < time {
                        sum += kept(d_next, batch, first + t + past, time, d);
                        let to = batch * d_x.stride(0) + (first + t) * d_x.stride(1) + d * d_x.stride(2);
                        d_x[to] = X::cast_from(sum);
                    }
                }
                #[comptime]
                match &mut d_state {
                    ComptimeOption::Some(d_state) => {
                        if present && first == 0 {
                            #[unroll]
                            for i in 0..past {
                                let mut sum = kept(d_next, batch, i, time, d);
                                #[unroll]
                                for j in 0..comptime!(i + 1) {
                                    sum += taps[c * width + j] * before[c * rows + i - j];
                                }
                                let to = batch * d_state.stride(0) + d * d_state.stride(1) + i * d_state.stride(2);
                                d_state[to] = X::cast_from(sum);
                            }
                        }
                    }
                    ComptimeOption::None => {}
                }
            }
        }
    }

    #[unroll]
    for c in 0..plan.channels {
        let d = head * dim + c * plan.units + unit;
        if c * plan.units + unit < dim && d < channels {
            #[unroll]
            for j in 0..comptime!(width + 1) {
                let to = span * sums.stride(0) + j * sums.stride(1) + d * sums.stride(2);
                sums[to] = d_taps[c * (width + 1) + j];
            }
        }
    }
}

/// The cotangent of input `n`, counted from the first of the state, as a part of the next state.
#[cube]
fn kept<X: Float>(d_next: ComptimeOption<&Tensor<X>>, batch: usize, n: usize, time: usize, d: usize) -> f32 {
    let mut value = 0.0f32;
    #[comptime]
    match d_next {
        ComptimeOption::Some(d_next) => {
            if n >= time {
                let from = batch * d_next.stride(0) + d * d_next.stride(1) + (n - time) * d_next.stride(2);
                value = f32::cast_from(d_next[from]);
            }
        }
        ComptimeOption::None => {}
    }
    value
}
