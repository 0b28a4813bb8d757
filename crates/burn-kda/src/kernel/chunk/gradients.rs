//! The backward pass on tensor cores: three launches, as [`gradients`](crate::kernel::gradients) has them.

use burn::tensor::{DType, Shape};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;

use super::back::{SumsOf, chunk_back_kernel};
use super::inputs::chunk_inputs_kernel;
use super::scores;
use crate::functions::Dims;
use crate::kernel::element::{address, dtypes, grid, maybe};
use crate::kernel::gradients::Gradients;
use crate::kernel::plan::ChunkPlan;
use crate::ops::WantedGradients;
use crate::plain::SEGMENT_TOKENS;

/// As [`gradients`](crate::kernel::gradients::gradients).
#[allow(clippy::too_many_arguments)]
pub(in crate::kernel) fn chunked_gradients(
    dims: Dims,
    [q, k, v, g, beta]: [CubeTensor; 5],
    initial_state: Option<CubeTensor>,
    kept: Option<CubeTensor>,
    [d_o, d_final_state]: [Option<CubeTensor>; 2],
    scale: f64,
    wanted: WantedGradients,
    plan: ChunkPlan,
) -> Gradients {
    let client = q.client.clone();
    let device = q.device.clone();
    let [x, g_dtype, beta_dtype] = dtypes(q.dtype, g.dtype, beta.dtype);
    let dtypes = [x, g_dtype, beta_dtype, plan.number()];
    let gradients = Gradients::empty(dims, [&q, &g, &beta], wanted);
    let empty = |shape: [usize; 4]| {
        empty_device_contiguous_dtype(client.clone(), device.clone(), Shape::from(shape), DType::F32)
    };

    let scores = scores(dims, [&q, &k, &g, &beta], true, plan);
    let [scratch, sums] = buffers(dims, &plan).map(empty);
    let Gradients { v: d_v, initial_state: d_initial, .. } = &gradients;
    let given = [&initial_state, &kept, &d_o, &d_final_state, d_v, d_initial].into_iter().flatten();
    let tensors = [&q, &k, &v, &g, &beta, &scores, &scratch, &sums].into_iter().chain(given);
    let (count, dim) = grid(&client, plan.cubes(dims), plan.units());
    chunk_back_kernel::launch(
        &client,
        count,
        dim,
        address(tensors),
        q.clone().into_tensor_arg(),
        k.clone().into_tensor_arg(),
        v.into_tensor_arg(),
        g.clone().into_tensor_arg(),
        beta.into_tensor_arg(),
        scores.into_tensor_arg(),
        maybe(&initial_state),
        maybe(&kept),
        maybe(&d_o),
        maybe(&d_final_state),
        scratch.into_tensor_arg(),
        sums.clone().into_tensor_arg(),
        maybe(&gradients.v),
        maybe(&gradients.initial_state),
        scale as f32,
        plan,
        dtypes,
    );

    if wanted.q || wanted.k || wanted.g || wanted.beta {
        let (count, dim) = grid(&client, dims.batch * dims.heads * dims.time.div_ceil(plan.rows), plan.units());
        chunk_inputs_kernel::launch(
            &client,
            count,
            dim,
            address([&q, &k, &g, &sums].into_iter().chain(gradients.of_inputs())),
            q.into_tensor_arg(),
            k.into_tensor_arg(),
            g.into_tensor_arg(),
            sums.into_tensor_arg(),
            maybe(&gradients.q),
            maybe(&gradients.k),
            maybe(&gradients.g),
            maybe(&gradients.beta),
            plan,
            dtypes,
        );
    }
    gradients
}

/// What the scan keeps of one segment of each cube and the cotangent of its state; and what it leaves of every chunk.
fn buffers(dims: Dims, plan: &ChunkPlan) -> [[usize; 4]; 2] {
    let (keys, values) = (plan.keys(), plan.values());
    let segment = SEGMENT_TOKENS / plan.rows * (keys + 2 * plan.rows) * values;
    let (cubes, chunks) = (plan.cubes(dims), dims.time.div_ceil(plan.rows));
    [[cubes, segment + keys * values, 1, 1], [cubes / dims.lanes(), dims.lanes(), chunks, SumsOf::new(*plan).len]]
}

/// Numbers in the larger of them.
pub(in crate::kernel) fn largest_chunk_buffer(dims: Dims, plan: &ChunkPlan) -> usize {
    buffers(dims, plan).map(|shape| shape.iter().product()).into_iter().max().unwrap_or(0)
}
