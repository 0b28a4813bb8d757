//! Gated RMS norm of the operator's output.

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::activation::sigmoid;
use super::{HeadPlan, empty, sum_over_cube};
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
pub(super) fn output_norm_kernel<X: Float, W: Float, G: Float, Y: Float>(
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
    sum_over_cube(&mut sums, plan);
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
