//! The chunk form on tensor cores, for inputs in half precision: two launches for any number of tokens.
//!
//! 1. Scores and inverse of every chunk, all chunks at once.
//! 2. The scan, one cube per lane and tile of value channels.
//!
//! With `G` the inclusive sum of `g` in a chunk of `C` tokens and `S` the state before it:
//!
//! ```text
//! E = V - (k exp(G)) S            U = (I + diag(beta) A_kk)^-1 diag(beta) E
//! S' = diag(exp(G_C)) S + (k exp(G_C - G))^T U          O = scale ((q exp(G)) S + A_qk U)
//! ```
//!
//! Tensor cores multiply bf16, so each operand is the sum of two bf16 numbers and a product is three of theirs: 16
//! significant bits where one bf16 number has 8. Sums, inverse and state are f32.

pub(super) mod back;
pub(super) mod channel;
pub(super) mod gradients;
pub(super) mod inputs;
mod matrices;
pub(super) mod operand;
pub(super) mod scan;
pub(super) mod scores;

use burn::tensor::{DType, Shape};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;

use scan::chunk_scan_kernel;
use scores::chunk_scores_kernel;

use super::element::{address, dtypes, grid, maybe};
use super::plan::ChunkPlan;
use super::recurrent::Outputs;
use crate::functions::Dims;

/// As [`recurrent`](super::recurrent::recurrent).
pub(super) fn chunked(
    dims: Dims,
    [q, k, v, g, beta]: [CubeTensor; 5],
    initial_state: Option<CubeTensor>,
    scale: f64,
    keep_states: bool,
    plan: ChunkPlan,
) -> Outputs {
    let client = q.client.clone();
    let outputs = Outputs::empty(dims, &v, keep_states);
    let scores = scores(dims, [&q, &k, &g, &beta], false, plan);
    let [x, g_dtype, beta_dtype] = dtypes(q.dtype, g.dtype, beta.dtype);
    let Outputs { o, final_state, kept } = &outputs;
    let tensors = [&q, &k, &v, &g, &beta, o, &scores, final_state].into_iter().chain(&initial_state).chain(kept);
    let (count, dim) = grid(&client, plan.cubes(dims), plan.units());
    chunk_scan_kernel::launch(
        &client,
        count,
        dim,
        address(tensors),
        q.into_tensor_arg(),
        k.into_tensor_arg(),
        v.into_tensor_arg(),
        g.into_tensor_arg(),
        beta.into_tensor_arg(),
        scores.into_tensor_arg(),
        maybe(&initial_state),
        o.clone().into_tensor_arg(),
        final_state.clone().into_tensor_arg(),
        maybe(kept),
        scale as f32,
        plan,
        [x, g_dtype, beta_dtype, plan.number()],
    );
    outputs
}

/// `A_qk`, `(I + diag(beta) A_kk)^-1` and, `with_kk`, `A_kk` of every chunk: `[lanes, chunks, 2 or 3, C * C]`.
pub(super) fn scores(dims: Dims, [q, k, g, beta]: [&CubeTensor; 4], with_kk: bool, plan: ChunkPlan) -> CubeTensor {
    let client = q.client.clone();
    let chunks = dims.time.div_ceil(plan.rows);
    let shape = Shape::from([dims.lanes(), chunks, plan.matrices(with_kk), plan.rows * plan.rows]);
    let scores = empty_device_contiguous_dtype(client.clone(), q.device.clone(), shape, DType::F32);
    let [x, g_dtype, beta_dtype] = dtypes(q.dtype, g.dtype, beta.dtype);
    let (count, dim) = grid(&client, dims.lanes() * chunks, plan.units());
    chunk_scores_kernel::launch(
        &client,
        count,
        dim,
        address([q, k, g, beta, &scores]),
        q.clone().into_tensor_arg(),
        k.clone().into_tensor_arg(),
        g.clone().into_tensor_arg(),
        beta.clone().into_tensor_arg(),
        scores.clone().into_tensor_arg(),
        with_kk,
        plan,
        [x, g_dtype, beta_dtype, plan.number()],
    );
    scores
}
