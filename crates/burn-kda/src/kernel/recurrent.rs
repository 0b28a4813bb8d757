//! The recurrence, all tokens in one launch.
//!
//! A cube has some value channels of one lane: a part of the state `[K, V]`, in registers, each unit some rows of some
//! columns. The units bring the inputs of a segment of tokens to shared memory together. Then, token by token, one pass
//! over the rows takes up the token, reads the state for its query, and reads it for the key of the next token:
//!
//! ```text
//! u_t = beta_t (v_t - p_t)
//! S_t = diag(a_t) S_{t-1} + k_t u_t^T      a_t = exp(g_t)
//! o_t = scale S_t^T q_t
//! p_{t+1} = S_t^T (a_{t+1} k_{t+1})
//! ```

use burn::tensor::{DType, Shape};
use burn_cubecl::ops::numeric::empty_device_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::element::{address, dtypes, grid, maybe, read, write};
use super::plan::Plan;
use super::segment::Segment;
use crate::functions::Dims;
use crate::plain::SEGMENT_TOKENS;

pub(crate) struct Outputs {
    /// `[B, T, HV, V]`.
    pub o: CubeTensor,
    /// `[B, HV, K, V]`.
    pub final_state: CubeTensor,
    /// The states before the tokens `n * SEGMENT_TOKENS`, `n >= 1`: `[N, B * HV, K, V]`.
    pub kept: Option<CubeTensor>,
}

impl Outputs {
    /// Not yet written; the output like `v`.
    pub fn empty(dims: Dims, v: &CubeTensor, keep_states: bool) -> Self {
        let Dims { batch, time, value_heads, key_dim, value_dim, .. } = dims;
        let empty = |shape: [usize; 4], dtype: DType| {
            empty_device_dtype(v.client.clone(), v.device.clone(), Shape::from(shape), dtype)
        };
        let kept = kept_states(time, keep_states);
        Self {
            o: empty([batch, time, value_heads, value_dim], v.dtype),
            final_state: empty([batch, value_heads, key_dim, value_dim], DType::F32),
            kept: (kept > 0).then(|| empty([kept, dims.lanes(), key_dim, value_dim], DType::F32)),
        }
    }
}

/// From `q`, `k`, `v`, `g`, `beta` and the initial state, as [`KdaInput`](crate::KdaInput) has them, of any strides.
pub(crate) fn recurrent(
    dims: Dims,
    [q, k, v, g, beta]: [CubeTensor; 5],
    initial_state: Option<CubeTensor>,
    scale: f64,
    keep_states: bool,
    plan: Plan,
) -> Outputs {
    let client = q.client.clone();
    let dtypes = dtypes(q.dtype, g.dtype, beta.dtype);
    let outputs = Outputs::empty(dims, &v, keep_states);

    let Outputs { o, final_state, kept } = &outputs;
    let tensors = [&q, &k, &v, &g, &beta, o, final_state].into_iter().chain(&initial_state).chain(kept);
    let (count, dim) = grid(&client, plan.cubes(dims), plan.units());
    recurrent_kernel::launch(
        &client,
        count,
        dim,
        address(tensors),
        q.into_tensor_arg(),
        k.into_tensor_arg(),
        v.into_tensor_arg(),
        g.into_tensor_arg(),
        beta.into_tensor_arg(),
        maybe(&initial_state),
        o.clone().into_tensor_arg(),
        final_state.clone().into_tensor_arg(),
        maybe(kept),
        scale as f32,
        plan,
        dtypes,
    );
    outputs
}

/// Rows whose products are summed up before they join the others, for the rounding.
const BLOCK: usize = 4;

/// How many.
pub(crate) fn kept_states(time: usize, keep_states: bool) -> usize {
    if keep_states { (time - 1) / SEGMENT_TOKENS } else { 0 }
}

#[cube(launch, address_type = "dynamic")]
pub(super) fn recurrent_kernel<X: Float, G: Float, B: Float>(
    q: &Tensor<X>,
    k: &Tensor<X>,
    v: &Tensor<X>,
    g: &Tensor<G>,
    beta: &Tensor<B>,
    initial_state: ComptimeOption<&Tensor<f32>>,
    o: &mut Tensor<X>,
    final_state: &mut Tensor<f32>,
    mut kept: ComptimeOption<OwnedTensor<f32>>,
    scale: f32,
    #[comptime] plan: Plan,
    #[define(X, G, B)] _dtypes: [ElemType; 3],
) {
    let (time, value_heads, value_dim) = (o.shape(1), o.shape(2), o.shape(3));
    let key_dim = final_state.shape(2);
    let values = comptime!(plan.values());
    let tiles = value_dim.div_ceil(values);
    let lane = CUBE_POS / tiles;
    if lane >= o.shape(0) * value_heads {
        terminate!();
    }
    let (batch, head) = (lane / value_heads, lane % value_heads);
    let first = CUBE_POS % tiles * values;
    let slice = UNIT_POS as usize % plan.slices;
    let column = UNIT_POS as usize / plan.slices;

    let mut state = Array::<f32>::new(comptime!(plan.rows * plan.width));
    #[unroll]
    for i in 0..plan.rows * plan.width {
        let (d, e) = (i / plan.width * plan.slices + slice, first + i % plan.width * plan.columns + column);
        state[i] = 0.0f32;
        #[comptime]
        match initial_state {
            ComptimeOption::Some(initial) => {
                if d < key_dim && e < value_dim {
                    state[i] = read(initial, batch, head, d, e);
                }
            }
            ComptimeOption::None => {}
        }
    }

    let mut segment = Segment::new(plan);
    let mut partial_sums = Shared::<[f32]>::new_slice(plan.partial_sums());
    let mut written = Array::<f32>::new(plan.width);
    // What the units of a column sum up: the read of each value channel, then the prediction.
    let mut sums = Array::<f32>::new(comptime!(2 * plan.width));
    let mut blocks = Array::<f32>::new(comptime!(2 * plan.width));
    #[unroll]
    for j in 0..comptime!(2 * plan.width) {
        blocks[j] = 0.0f32;
    }
    for n in 0..time.div_ceil(plan.tokens) {
        let start = n * plan.tokens;
        let tokens = select(time - start < plan.tokens, time - start, plan.tokens.runtime());
        #[comptime]
        match &mut kept {
            ComptimeOption::Some(kept) => {
                if start > 0 && start.is_multiple_of(SEGMENT_TOKENS) {
                    store(&state, kept, start / SEGMENT_TOKENS - 1, lane, first, plan);
                }
            }
            ComptimeOption::None => {}
        }
        sync_cube(); // The segment before has been read.
        segment.load(q, k, v, g, beta, batch, head, start, tokens, first, plan);
        sync_cube();

        #[unroll]
        for j in 0..plan.width {
            sums[j] = 0.0f32;
            sums[plan.width + j] = 0.0f32;
        }
        #[unroll]
        for row in 0..plan.rows {
            let k = segment.k_decayed[row * plan.slices + slice];
            #[unroll]
            for j in 0..plan.width {
                blocks[plan.width + j] = fma(k, state[row * plan.width + j], blocks[plan.width + j]);
            }
            if comptime!(row % BLOCK == BLOCK - 1 || row + 1 == plan.rows) {
                flush(&mut blocks, &mut sums, plan);
            }
        }
        sum_over_column(&mut sums, &mut partial_sums, 0, plan);

        for t in 0..tokens {
            #[unroll]
            for j in 0..plan.width {
                let v = segment.v[t * values + j * plan.columns + column];
                written[j] = segment.beta[t] * (v - sums[plan.width + j]);
                sums[j] = 0.0f32;
                sums[plan.width + j] = 0.0f32;
            }
            // The last token predicts nothing: the next segment starts with its own.
            let next = select(t + 1 < tokens, t + 1, t);
            #[unroll]
            for row in 0..plan.rows {
                let d = t * comptime!(plan.padded_keys()) + row * plan.slices + slice;
                let d_next = next * comptime!(plan.padded_keys()) + row * plan.slices + slice;
                let (power, change) = (segment.power[d], segment.change[d]);
                let (k, q, k_next) = (segment.k[d], segment.q[d], segment.k_decayed[d_next]);
                #[unroll]
                for j in 0..plan.width {
                    let i = comptime!(row * plan.width + j);
                    let decayed = power * state[i];
                    let x = decayed + fma(change, decayed, k * written[j]);
                    state[i] = x;
                    blocks[j] = fma(q, x, blocks[j]);
                    blocks[plan.width + j] = fma(k_next, x, blocks[plan.width + j]);
                }
                if comptime!(row % BLOCK == BLOCK - 1 || row + 1 == plan.rows) {
                    flush(&mut blocks, &mut sums, plan);
                }
            }
            sum_over_column(&mut sums, &mut partial_sums, (t + 1) % 2, plan);
            if slice == 0 {
                #[unroll]
                for j in 0..plan.width {
                    let e = first + j * plan.columns + column;
                    if e < value_dim {
                        write(o, batch, start + t, head, e, scale * sums[j]);
                    }
                }
            }
        }
    }

    store(&state, final_state, batch, head, first, plan);
}

/// The cube's part of the state, to the matrix `[a, b]` of a tensor `[.., .., K, V]`.
#[cube]
fn store(state: &Array<f32>, to: &mut Tensor<f32>, a: usize, b: usize, first: usize, #[comptime] plan: Plan) {
    let slice = UNIT_POS as usize % plan.slices;
    let column = UNIT_POS as usize / plan.slices;
    #[unroll]
    for i in 0..plan.rows * plan.width {
        let (d, e) = (i / plan.width * plan.slices + slice, first + i % plan.width * plan.columns + column);
        if d < to.shape(2) && e < to.shape(3) {
            write(to, a, b, d, e, state[i]);
        }
    }
}

/// Adds the sums of a block of rows to those of the blocks before.
#[cube]
fn flush(blocks: &mut Array<f32>, sums: &mut Array<f32>, #[comptime] plan: Plan) {
    #[unroll]
    for j in 0..comptime!(2 * plan.width) {
        sums[j] += blocks[j];
        blocks[j] = 0.0f32;
    }
}

/// Every unit gets the sums over all units of its column.
///
/// Without plane operations partial sums go by way of shared memory, in turn to its halves 0 and 1, so that one barrier
/// per sum is enough.
#[cube]
fn sum_over_column(sums: &mut Array<f32>, partial_sums: &mut Shared<[f32]>, half: usize, #[comptime] plan: Plan) {
    let count = comptime!(2 * plan.width);
    if comptime!(plan.planes) {
        #[unroll]
        for j in 0..count {
            #[unroll]
            for bit in 0..comptime!(plan.slices.ilog2()) {
                sums[j] += plane_shuffle_xor(sums[j], comptime!(1u32 << bit));
            }
        }
    } else if comptime!(plan.slices > 1) {
        let units = comptime!(plan.units());
        let unit = UNIT_POS as usize;
        let mine = half * count * units + unit;
        #[unroll]
        for j in 0..count {
            partial_sums[mine + j * units] = sums[j];
        }
        sync_cube();
        let column = half * count * units + unit / plan.slices * plan.slices;
        #[unroll]
        for j in 0..count {
            sums[j] = partial_sums[column + j * units];
            #[unroll]
            for slice in 1..plan.slices {
                sums[j] += partial_sums[column + j * units + slice];
            }
        }
    }
}
