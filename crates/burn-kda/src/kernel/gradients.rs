//! Gradients of the chunked form, in three launches for any number of tokens.
//!
//! 1. Scores and inverse of every chunk.
//! 2. The scan, one cube per lane and tile of value channels: segment by segment from the last one, forward again from
//!    the state before it, then back with the cotangent of the state. It leaves the cotangents of what queries and keys
//!    become in their chunk, summed over its value channels.
//! 3. The way from there to `q`, `k`, `g` and `beta`, chunk by chunk.
//!
//! A chunk has 8 rows, as in the plain backward pass, for its error; at that size a pair of tokens can have its own
//! decay, so no segment tree is needed. With `G` the inclusive sum of `g` in a chunk of `C` tokens:
//!
//! ```text
//! E = V - (k exp(G)) S            U = (I + diag(beta) A_kk)^-1 diag(beta) E
//! S' = diag(exp(G_C)) S + (k exp(G_C - G))^T U          O = scale ((q exp(G)) S + A_qk U)
//! ```

pub(super) mod inputs;
pub(super) mod scan;
pub(super) mod scores;

use burn::tensor::{DType, Shape};
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, empty_device_dtype};
use burn_cubecl::tensor::CubeTensor;

use inputs::inputs_kernel;
use scan::scan_kernel;
use scores::scores_kernel;

use super::element::{address, dtypes, grid, maybe};
use super::plan::ScanPlan;
use crate::functions::Dims;
use crate::ops::WantedGradients;
use crate::plain::SEGMENT_TOKENS;

/// Tokens of a chunk.
pub(super) const ROWS: usize = 8;

/// Chunks of a segment.
const CHUNKS: usize = SEGMENT_TOKENS / ROWS;

/// Numbers per key channel that the scan leaves of a chunk: cotangents of `q exp(G)`, `k exp(G)`, `k exp(G_C - G)` and
/// of `G_C` by way of the state's decay.
pub(super) const SUMS: usize = 3 * ROWS + 1;

/// Numbers that the scan leaves of a chunk besides: cotangents of `A_qk`, `A_kk` and `beta`.
const SCORE_SUMS: usize = 2 * ROWS * ROWS + ROWS;

/// Those that were asked for; shapes as the inputs.
pub(crate) struct Gradients {
    pub q: Option<CubeTensor>,
    pub k: Option<CubeTensor>,
    pub v: Option<CubeTensor>,
    pub g: Option<CubeTensor>,
    pub beta: Option<CubeTensor>,
    pub initial_state: Option<CubeTensor>,
}

impl Gradients {
    /// Not yet written.
    pub fn empty(dims: Dims, [q, g, beta]: [&CubeTensor; 3], wanted: WantedGradients) -> Self {
        let Dims { batch, time, heads, value_heads, key_dim, value_dim } = dims;
        let like = |wanted: bool, x: &CubeTensor, shape: &[usize]| {
            wanted.then(|| empty_device_dtype(x.client.clone(), x.device.clone(), Shape::from(shape), x.dtype))
        };
        let initial_state = Shape::from([batch, value_heads, key_dim, value_dim]);
        Self {
            q: like(wanted.q, q, &[batch, time, heads, key_dim]),
            k: like(wanted.k, q, &[batch, time, heads, key_dim]),
            v: like(wanted.v, q, &[batch, time, value_heads, value_dim]),
            g: like(wanted.g, g, &[batch, time, value_heads, key_dim]),
            beta: like(wanted.beta, beta, &[batch, time, value_heads]),
            initial_state: wanted
                .initial_state
                .then(|| empty_device_dtype(q.client.clone(), q.device.clone(), initial_state, DType::F32)),
        }
    }

    /// Those that the last kernel writes.
    pub fn of_inputs(&self) -> impl Iterator<Item = &CubeTensor> {
        let Self { q, k, g, beta, .. } = self;
        [q, k, g, beta].into_iter().flatten()
    }
}

/// From the inputs as [`recurrent`](super::recurrent::recurrent) has them, the states it kept if there are several segments, and the cotangents of output and final state.
#[allow(clippy::too_many_arguments)]
pub(crate) fn gradients(
    dims: Dims,
    [q, k, v, g, beta]: [CubeTensor; 5],
    initial_state: Option<CubeTensor>,
    kept: Option<CubeTensor>,
    [d_o, d_final_state]: [Option<CubeTensor>; 2],
    scale: f64,
    wanted: WantedGradients,
    plan: ScanPlan,
) -> Gradients {
    let client = q.client.clone();
    let device = q.device.clone();
    let dtypes = dtypes(q.dtype, g.dtype, beta.dtype);
    let gradients = Gradients::empty(dims, [&q, &g, &beta], wanted);
    let empty =
        |shape: &[usize]| empty_device_contiguous_dtype(client.clone(), device.clone(), Shape::from(shape), DType::F32);
    let (lanes, chunks, tiles) = (dims.lanes(), dims.time.div_ceil(ROWS), plan.tiles(dims));

    let scores = empty(&scores_shape(dims));
    let (count, dim) = grid(&client, lanes * chunks, ROWS * ROWS);
    scores_kernel::launch(
        &client,
        count,
        dim,
        address([&q, &k, &g, &beta, &scores]),
        q.clone().into_tensor_arg(),
        k.clone().into_tensor_arg(),
        g.clone().into_tensor_arg(),
        beta.clone().into_tensor_arg(),
        scores.clone().into_tensor_arg(),
        dims.key_dim,
        dtypes,
    );

    let [scratch, sums] = buffers(dims, &plan).map(|shape| empty(&shape));
    let Gradients { v: d_v, initial_state: d_initial, .. } = &gradients;
    let given = [&initial_state, &kept, &d_o, &d_final_state, d_v, d_initial].into_iter().flatten();
    let tensors = [&q, &k, &v, &g, &beta, &scores, &scratch, &sums].into_iter().chain(given);
    let (count, dim) = grid(&client, lanes * tiles, plan.units());
    scan_kernel::launch(
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
        let (count, dim) = grid(&client, dims.batch * dims.heads * chunks, dims.key_dim);
        inputs_kernel::launch(
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
            dims.key_dim,
            dtypes,
        );
    }
    gradients
}

/// What the scan keeps of one segment of each cube: the state before each chunk, its errors and its writes; and what it
/// leaves of every chunk.
fn buffers(dims: Dims, plan: &ScanPlan) -> [[usize; 4]; 2] {
    let (lanes, chunks, tiles) = (dims.lanes(), dims.time.div_ceil(ROWS), plan.tiles(dims));
    [
        [lanes * tiles, CHUNKS.min(chunks), plan.values(), plan.key_dim + 2 * ROWS],
        [tiles, lanes, chunks, SUMS * plan.key_dim + SCORE_SUMS],
    ]
}

/// Per lane and chunk `A_qk`, `A_kk` and what solves for the writes.
fn scores_shape(dims: Dims) -> [usize; 4] {
    [dims.lanes(), dims.time.div_ceil(ROWS), 3, ROWS * ROWS]
}

/// Numbers in the largest of them.
pub(super) fn largest_buffer(dims: Dims, plan: &ScanPlan) -> usize {
    let [scratch, sums] = buffers(dims, plan);
    [scratch, sums, scores_shape(dims)].into_iter().map(|shape| shape.iter().product()).max().unwrap_or(0)
}

/// Channels whose products are summed up before they join the others, for the rounding.
const BLOCK: usize = 16;
