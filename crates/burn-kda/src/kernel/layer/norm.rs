//! Gated RMS norm of the operator's output.

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::activation::{sigmoid, sigmoid_slope};
use super::{HeadPlan, SPAN, empty, spans, sum_over_cube};
use crate::kernel::element::{address, float, grid, read, write};

/// As [`KdaOps::kda_output_norm`](crate::KdaOps::kda_output_norm).
pub(crate) fn output_norm(
    o: CubeTensor,
    weight: CubeTensor,
    gate: CubeTensor,
    eps: f64,
    dtype: DType,
    plan: HeadPlan,
) -> CubeTensor {
    let dims = o.shape().dims();
    let y = empty(&o, dims, dtype);
    let client = o.client.clone();
    let dtypes = [&o, &weight, &gate, &y].map(|x| float(x.dtype));
    let (count, dim) = grid(&client, plan.cubes(dims), plan.units);
    output_norm_kernel::launch(
        &client,
        count,
        dim,
        address([&o, &weight, &gate, &y]),
        o.into_tensor_arg(),
        weight.into_tensor_arg(),
        gate.into_tensor_arg(),
        y.clone().into_tensor_arg(),
        eps as f32,
        plan,
        dtypes,
    );
    y
}

#[cube(launch, address_type = "dynamic")]
pub(crate) fn output_norm_kernel<X: Float, W: Float, G: Float, Y: Float>(
    o: &Tensor<X>,
    weight: &Tensor<W>,
    gate: &Tensor<G>,
    y: &mut Tensor<Y>,
    eps: f32,
    #[comptime] plan: HeadPlan,
    #[define(X, W, G, Y)] _dtypes: [ElemType; 4],
) {
    let (time, heads, dim) = (o.shape(1), o.shape(2), o.shape(3));
    let (head, block) = (CUBE_POS % heads, CUBE_POS / heads);
    let blocks = time.div_ceil(plan.tokens);
    let (batch, start) = (block / blocks, block % blocks * plan.tokens);
    if batch >= o.shape(0) {
        terminate!();
    }
    let unit = UNIT_POS as usize;
    let mut values = Array::<f32>::new(comptime!(plan.tokens * plan.channels));
    let mut sums = Array::<f32>::new(plan.tokens);
    #[unroll]
    for t in 0..plan.tokens {
        sums[t] = 0.0f32;
        #[unroll]
        for c in 0..plan.channels {
            let d = c * plan.units + unit;
            let mut x = 0.0f32;
            if start + t < time && d < dim {
                x = read(o, batch, start + t, head, d);
            }
            values[t * plan.channels + c] = x;
            sums[t] += x * x;
        }
    }
    sum_over_cube(&mut sums, plan.tokens, plan);
    let mean = 1.0f32 / f32::cast_from(dim);
    #[unroll]
    for t in 0..plan.tokens {
        let rms = (sums[t] * mean + eps).sqrt();
        #[unroll]
        for c in 0..plan.channels {
            let d = c * plan.units + unit;
            if start + t < time && d < dim {
                let weight = f32::cast_from(weight[d * weight.stride(0)]);
                let gate = sigmoid(read(gate, batch, start + t, head, d));
                write(y, batch, start + t, head, d, values[t * plan.channels + c] / rms * weight * gate);
            }
        }
    }
}

/// Of `o`, `gate`, and of the weight by spans and heads, `[N, V]`; as
/// [`KdaOps::kda_output_norm_backward`](crate::KdaOps::kda_output_norm_backward).
pub(crate) fn output_norm_gradients(
    o: CubeTensor,
    weight: CubeTensor,
    gate: CubeTensor,
    d_y: CubeTensor,
    eps: f64,
    plan: HeadPlan,
) -> [CubeTensor; 3] {
    let dims @ [batch, time, heads, dim] = o.shape().dims();
    let (d_o, d_gate) = (empty(&o, dims, o.dtype), empty(&o, dims, gate.dtype));
    let spans = spans(batch, time);
    let sums = empty(&o, [spans * heads, dim], DType::F32);
    let client = o.client.clone();
    let dtypes = [&o, &weight, &gate, &d_y].map(|x| float(x.dtype));
    let (count, units) = grid(&client, spans * heads, plan.units);
    output_norm_gradients_kernel::launch(
        &client,
        count,
        units,
        address([&o, &weight, &gate, &d_y, &d_o, &d_gate, &sums]),
        o.into_tensor_arg(),
        weight.into_tensor_arg(),
        gate.into_tensor_arg(),
        d_y.into_tensor_arg(),
        d_o.clone().into_tensor_arg(),
        d_gate.clone().into_tensor_arg(),
        sums.clone().into_tensor_arg(),
        eps as f32,
        plan,
        dtypes,
    );
    [d_o, d_gate, sums]
}

/// With `n` the normalised output and `e = dy sigmoid(gate)`:
///
/// ```text
/// dw = sum e n      dgate = dy w n sigmoid'(gate)      do = (e w - n mean(e w n)) / rms
/// ```
#[cube(launch, address_type = "dynamic")]
pub(crate) fn output_norm_gradients_kernel<X: Float, W: Float, G: Float, Y: Float>(
    o: &Tensor<X>,
    weight: &Tensor<W>,
    gate: &Tensor<G>,
    d_y: &Tensor<Y>,
    d_o: &mut Tensor<X>,
    d_gate: &mut Tensor<G>,
    weight_sums: &mut Tensor<f32>,
    eps: f32,
    #[comptime] plan: HeadPlan,
    #[define(X, W, G, Y)] _dtypes: [ElemType; 4],
) {
    let (time, heads, dim) = (o.shape(1), o.shape(2), o.shape(3));
    let (head, span) = (CUBE_POS % heads, CUBE_POS / heads);
    let spans = time.div_ceil(SPAN);
    let (batch, start) = (span / spans, span % spans * SPAN);
    if batch >= o.shape(0) {
        terminate!();
    }
    let unit = UNIT_POS as usize;
    let mean = 1.0f32 / f32::cast_from(dim);
    let mut weights = Array::<f32>::new(plan.channels);
    let mut d_weight = Array::<f32>::new(plan.channels);
    #[unroll]
    for c in 0..plan.channels {
        let d = c * plan.units + unit;
        weights[c] = 0.0f32;
        d_weight[c] = 0.0f32;
        if d < dim {
            weights[c] = f32::cast_from(weight[d * weight.stride(0)]);
        }
    }
    let mut values = Array::<f32>::new(comptime!(plan.tokens * plan.channels));
    let mut opened = Array::<f32>::new(comptime!(plan.tokens * plan.channels));
    // Of each token, the square of the output, then its product with the cotangent.
    let mut sums = Array::<f32>::new(comptime!(2 * plan.tokens));
    for n in 0..comptime!(SPAN / plan.tokens) {
        let first = start + n * plan.tokens;
        if first < time {
            #[unroll]
            for t in 0..plan.tokens {
                sums[t] = 0.0f32;
                sums[plan.tokens + t] = 0.0f32;
                #[unroll]
                for c in 0..plan.channels {
                    let d = c * plan.units + unit;
                    let mut x = 0.0f32;
                    let mut e = 0.0f32;
                    if first + t < time && d < dim {
                        x = read(o, batch, first + t, head, d);
                        let open = sigmoid(read(gate, batch, first + t, head, d));
                        e = read(d_y, batch, first + t, head, d) * open;
                    }
                    values[t * plan.channels + c] = x;
                    opened[t * plan.channels + c] = e;
                    sums[t] += x * x;
                    sums[plan.tokens + t] += e * weights[c] * x;
                }
            }
            sum_over_cube(&mut sums, comptime!(2 * plan.tokens), plan);
            #[unroll]
            for t in 0..plan.tokens {
                let rms = (sums[t] * mean + eps).sqrt();
                let along = sums[plan.tokens + t] / rms * mean;
                #[unroll]
                for c in 0..plan.channels {
                    let d = c * plan.units + unit;
                    if first + t < time && d < dim {
                        let normed = values[t * plan.channels + c] / rms;
                        let e = opened[t * plan.channels + c];
                        let slope = sigmoid_slope(read(gate, batch, first + t, head, d));
                        let d_y = read(d_y, batch, first + t, head, d);
                        d_weight[c] += e * normed;
                        write(d_gate, batch, first + t, head, d, d_y * weights[c] * normed * slope);
                        write(d_o, batch, first + t, head, d, (e * weights[c] - normed * along) / rms);
                    }
                }
            }
        }
    }
    #[unroll]
    for c in 0..plan.channels {
        let d = c * plan.units + unit;
        if d < dim {
            let to = CUBE_POS * weight_sums.stride(0) + d * weight_sums.stride(1);
            weight_sums[to] = d_weight[c];
        }
    }
}
