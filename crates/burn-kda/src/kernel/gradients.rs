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

use burn::tensor::{DType, Shape};
use burn_cubecl::ops::numeric::empty_device_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

use super::decay::{decay, decay_parts};
use super::plan::{Plan, ScanPlan};
use super::recurrent::{at, recurrent};
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

/// From the inputs as [`recurrent`] has them, what it kept, and the cotangents of output and final state.
pub(crate) fn gradients(
    dims: Dims,
    [q, k, v, g, beta]: [CubeTensor; 5],
    initial_state: Option<CubeTensor>,
    kept: Option<CubeTensor>,
    [d_o, d_final_state]: [Option<CubeTensor>; 2],
    scale: f64,
    wanted: WantedGradients,
    (forward, plan): (Plan, ScanPlan),
) -> Gradients {
    let Dims { batch, time, heads, value_heads, key_dim, value_dim } = dims;
    let client = q.client.clone();
    let device = q.device.clone();
    let empty = |shape: &[usize]| empty_device_dtype(client.clone(), device.clone(), Shape::from(shape), DType::F32);
    let kept = match kept {
        None if time > SEGMENT_TOKENS => {
            let inputs = [&q, &k, &v, &g, &beta].map(CubeTensor::clone);
            recurrent(dims, inputs, initial_state.clone(), scale, true, forward).kept
        }
        kept => kept,
    };
    let (lanes, chunks, tiles) = (dims.lanes(), dims.time.div_ceil(ROWS), plan.tiles(dims));
    let launch = |cubes: usize, units: usize| {
        let dim = CubeDim::new_1d(units as u32);
        (calculate_cube_count_elemwise(&client, cubes * units, dim), dim)
    };
    let address = |tensors: &[&CubeTensor]| tensors.iter().map(|x| x.required_address_type()).max().expect("a tensor");

    let scores = empty(&[lanes, chunks, 3, ROWS * ROWS]);
    let (count, dim) = launch(lanes * chunks, ROWS * ROWS);
    scores_kernel::launch(
        &client,
        count,
        dim,
        address(&[&q, &k, &g, &beta, &scores]),
        q.clone().into_tensor_arg(),
        k.clone().into_tensor_arg(),
        g.clone().into_tensor_arg(),
        beta.clone().into_tensor_arg(),
        scores.clone().into_tensor_arg(),
        key_dim,
    );

    let [scratch, sums] = buffers(dims, &plan).map(|shape| empty(&shape));
    let d_v = wanted.v.then(|| empty(&[batch, time, value_heads, value_dim]));
    let d_initial_state = wanted.initial_state.then(|| empty(&[batch, value_heads, key_dim, value_dim]));
    let some: Vec<_> = [&q, &k, &v, &g, &beta, &scores, &scratch, &sums]
        .into_iter()
        .chain(&initial_state)
        .chain(&kept)
        .chain(&d_o)
        .chain(&d_final_state)
        .collect();
    let (count, dim) = launch(lanes * tiles, plan.units());
    scan_kernel::launch(
        &client,
        count,
        dim,
        address(&some),
        q.clone().into_tensor_arg(),
        k.clone().into_tensor_arg(),
        v.into_tensor_arg(),
        g.clone().into_tensor_arg(),
        beta.into_tensor_arg(),
        scores.into_tensor_arg(),
        initial_state.map(CubeTensor::into_tensor_arg).into(),
        kept.map(CubeTensor::into_tensor_arg).into(),
        d_o.map(CubeTensor::into_tensor_arg).into(),
        d_final_state.map(CubeTensor::into_tensor_arg).into(),
        scratch.into_tensor_arg(),
        sums.clone().into_tensor_arg(),
        d_v.clone().map(CubeTensor::into_tensor_arg).into(),
        d_initial_state.clone().map(CubeTensor::into_tensor_arg).into(),
        scale as f32,
        plan,
    );

    let d_q = wanted.q.then(|| empty(&[batch, time, heads, key_dim]));
    let d_k = wanted.k.then(|| empty(&[batch, time, heads, key_dim]));
    let d_g = wanted.g.then(|| empty(&[batch, time, value_heads, key_dim]));
    let d_beta = wanted.beta.then(|| empty(&[batch, time, value_heads]));
    if wanted.q || wanted.k || wanted.g || wanted.beta {
        let (count, dim) = launch(batch * heads * chunks, key_dim);
        inputs_kernel::launch(
            &client,
            count,
            dim,
            address(&[&q, &k, &g, &sums]),
            q.into_tensor_arg(),
            k.into_tensor_arg(),
            g.into_tensor_arg(),
            sums.into_tensor_arg(),
            d_q.clone().map(CubeTensor::into_tensor_arg).into(),
            d_k.clone().map(CubeTensor::into_tensor_arg).into(),
            d_g.clone().map(CubeTensor::into_tensor_arg).into(),
            d_beta.clone().map(CubeTensor::into_tensor_arg).into(),
            key_dim,
        );
    }
    Gradients { q: d_q, k: d_k, v: d_v, g: d_g, beta: d_beta, initial_state: d_initial_state }
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

/// Numbers in the larger of them.
pub(super) fn largest_buffer(dims: Dims, plan: &ScanPlan) -> usize {
    buffers(dims, plan).map(|shape| shape.iter().product()).into_iter().max().unwrap_or(0)
}

/// Channels whose products are summed up before they join the others, for the rounding.
const BLOCK: usize = 16;

/// `A_qk`, `A_kk` and `(I + diag(beta) A_kk)^-1` of every chunk, `[lanes, chunks, 3, C * C]`: one unit per pair.
#[cube(launch, address_type = "dynamic")]
pub(super) fn scores_kernel(
    q: &Tensor<f32>,
    k: &Tensor<f32>,
    g: &Tensor<f32>,
    beta: &Tensor<f32>,
    scores: &mut Tensor<f32>,
    #[comptime] key_dim: usize,
) {
    let (time, value_heads, chunks) = (g.shape(1), g.shape(2), scores.shape(1));
    let (lane, chunk) = (CUBE_POS / chunks, CUBE_POS % chunks);
    if lane >= scores.shape(0) {
        terminate!();
    }
    let (batch, head) = (lane / value_heads, lane % value_heads);
    let key_head = head / (value_heads / q.shape(2));
    let unit = UNIT_POS as usize;

    // Rows of a length that spreads them over the banks of the memory.
    let width = comptime!(key_dim + 1);
    let mut q_rows = Shared::<[f32]>::new_slice(comptime!(ROWS * width));
    let mut k_rows = Shared::<[f32]>::new_slice(comptime!(ROWS * width));
    let mut g_rows = Shared::<[f32]>::new_slice(comptime!(ROWS * width));
    for i in range_stepped(unit, comptime!(ROWS * key_dim), comptime!(ROWS * ROWS)) {
        let (row, d) = (i / key_dim, i % key_dim);
        let t = chunk * ROWS + row;
        let place = row * width + d;
        q_rows[place] = 0.0f32;
        k_rows[place] = 0.0f32;
        g_rows[place] = 0.0f32;
        if t < time {
            q_rows[place] = q[at(q, batch, t, key_head, d)];
            k_rows[place] = k[at(k, batch, t, key_head, d)];
            g_rows[place] = g[at(g, batch, t, head, d)];
        }
    }
    sync_cube();

    let (i, j) = (unit / ROWS, unit % ROWS);
    let mut a_qk = 0.0f32;
    let mut a_kk = 0.0f32;
    if j <= i {
        for block in 0..comptime!(key_dim.div_ceil(BLOCK)) {
            let mut of_q = 0.0f32;
            let mut of_k = 0.0f32;
            for n in 0..BLOCK {
                let d = block * BLOCK + n;
                if d < key_dim {
                    let mut log_decay = 0.0f32;
                    for s in j..i {
                        log_decay += g_rows[(s + 1) * width + d];
                    }
                    let key = k_rows[j * width + d] * decay(log_decay);
                    of_q = fma(q_rows[i * width + d], key, of_q);
                    of_k = fma(k_rows[i * width + d], key, of_k);
                }
            }
            a_qk += of_q;
            a_kk += of_k;
        }
    }
    if i == j {
        a_kk = 0.0f32;
    }
    let place = (lane * chunks + chunk) * comptime!(3 * ROWS * ROWS);
    scores[place + unit] = a_qk;
    scores[place + comptime!(ROWS * ROWS) + unit] = a_kk;

    let mut a = Shared::<[f32]>::new_slice(comptime!(ROWS * ROWS));
    let t = chunk * ROWS + i;
    a[unit] = 0.0f32;
    if t < time {
        a[unit] = beta_of(beta, batch, t, head) * a_kk;
    }
    sync_cube();
    // Forward substitution, one unit per column.
    if i == 0 {
        let mut x = Array::<f32>::new(ROWS);
        #[unroll]
        for row in 0..ROWS {
            let mut value = select(j == row, 1.0f32, 0.0f32);
            #[unroll]
            for s in 0..row {
                value -= a[comptime!(row * ROWS + s)] * x[s];
            }
            x[row] = value;
            scores[place + comptime!(2 * ROWS * ROWS + row * ROWS) + j] = value;
        }
    }
}

#[cube]
fn beta_of(beta: &Tensor<f32>, batch: usize, t: usize, head: usize) -> f32 {
    beta[batch * beta.stride(0) + t * beta.stride(1) + head * beta.stride(2)]
}

/// One key channel in one chunk.
#[derive(CubeType)]
struct Channel {
    /// `q exp(G)` and `k exp(G)`.
    q: Array<f32>,
    k: Array<f32>,
    /// `k exp(G_C - G)`.
    k_to_end: Array<f32>,
    /// `exp(G_C)`: see [`decay_parts`].
    power: f32,
    change: f32,
}

#[cube]
impl Channel {
    fn load(
        q: &Tensor<f32>,
        k: &Tensor<f32>,
        g: &Tensor<f32>,
        batch: usize,
        head: usize,
        start: usize,
        d: usize,
    ) -> Channel {
        let time = g.shape(1);
        let key_head = head / (g.shape(2) / q.shape(2));
        let mut queries = Array::<f32>::new(ROWS);
        let mut keys = Array::<f32>::new(ROWS);
        let mut k_to_end = Array::<f32>::new(ROWS);
        let mut log_decays = Array::<f32>::new(ROWS);
        let mut sum = 0.0f32;
        #[unroll]
        for t in 0..ROWS {
            queries[t] = 0.0f32;
            keys[t] = 0.0f32;
            k_to_end[t] = 0.0f32;
            log_decays[t] = 0.0f32;
            if start + t < time {
                log_decays[t] = g[at(g, batch, start + t, head, d)];
                sum += log_decays[t];
                let from_start = decay(sum);
                let key = k[at(k, batch, start + t, key_head, d)];
                queries[t] = from_start * q[at(q, batch, start + t, key_head, d)];
                keys[t] = from_start * key;
                k_to_end[t] = key;
            }
        }
        let mut after = 0.0f32;
        #[unroll]
        for n in 0..ROWS {
            let t = comptime!(ROWS - 1 - n);
            k_to_end[t] *= decay(after);
            after += log_decays[t];
        }
        let (power, change) = decay_parts(sum);
        Channel { q: queries, k: keys, k_to_end, power, change }
    }
}

/// A unit has one key channel and `plan.columns` value channels of the state and of its cotangent.
#[cube(launch, address_type = "dynamic")]
pub(super) fn scan_kernel(
    q: &Tensor<f32>,
    k: &Tensor<f32>,
    v: &Tensor<f32>,
    g: &Tensor<f32>,
    beta: &Tensor<f32>,
    scores: &Tensor<f32>,
    initial_state: ComptimeOption<&Tensor<f32>>,
    kept: ComptimeOption<&Tensor<f32>>,
    d_o: ComptimeOption<&Tensor<f32>>,
    d_final_state: ComptimeOption<&Tensor<f32>>,
    scratch: &mut Tensor<f32>,
    sums: &mut Tensor<f32>,
    mut d_v: ComptimeOption<OwnedTensor<f32>>,
    mut d_initial_state: ComptimeOption<OwnedTensor<f32>>,
    scale: f32,
    #[comptime] plan: ScanPlan,
) {
    let (time, value_heads, value_dim) = (v.shape(1), v.shape(2), v.shape(3));
    let (lanes, chunks) = (scores.shape(0), scores.shape(1));
    let tiles = sums.shape(0);
    let key_dim = comptime!(plan.key_dim);
    let values = comptime!(plan.values());
    let units = comptime!(plan.units());
    let columns = comptime!(plan.columns);
    let area = comptime!(ROWS * values);
    if CUBE_POS >= lanes * tiles {
        terminate!();
    }
    let (lane, tile) = (CUBE_POS / tiles, CUBE_POS % tiles);
    let (batch, head) = (lane / value_heads, lane % value_heads);
    let unit = UNIT_POS as usize;
    let (d, group) = (unit % key_dim, unit / key_dim);
    // Of the cube and of the unit.
    let first = tile * values;
    let mine = group * columns;
    let scratch_chunk = comptime!(values * (key_dim + 2 * ROWS));
    let my_scratch = CUBE_POS * scratch.shape(1) * scratch_chunk;
    let sums_chunk = comptime!(SUMS * key_dim + SCORE_SUMS);
    let my_sums = (tile * lanes + lane) * chunks * sums_chunk;

    let mut matrix = Shared::<[f32]>::new_slice(comptime!(plan.matrix()));
    let mut key_rows = Shared::<[f32]>::new_slice(comptime!(ROWS * key_dim));
    let mut scores_here = Shared::<[f32]>::new_slice(comptime!(3 * ROWS * ROWS));
    let mut betas = Shared::<[f32]>::new_slice(ROWS);
    // `[C, values]`.
    let mut errors = Shared::<[f32]>::new_slice(area);
    let mut writes = Shared::<[f32]>::new_slice(area);
    let mut d_reads = Shared::<[f32]>::new_slice(area);
    let mut d_errors = Shared::<[f32]>::new_slice(area);
    let mut work = Shared::<[f32]>::new_slice(area);

    let mut state = Array::<f32>::new(columns);
    let mut d_state = Array::<f32>::new(columns);
    #[unroll]
    for j in 0..columns {
        d_state[j] = 0.0f32;
        #[comptime]
        match d_final_state {
            ComptimeOption::Some(d_final_state) => {
                let e = first + mine + j;
                if e < value_dim {
                    d_state[j] = d_final_state[at(d_final_state, batch, head, d, e)];
                }
            }
            ComptimeOption::None => {}
        }
    }

    let segments = chunks.div_ceil(CHUNKS);
    for n in 0..segments {
        let segment = segments - 1 - n;
        let left = chunks - segment * CHUNKS;
        let count = select(left < CHUNKS, left, CHUNKS.runtime());

        #[unroll]
        for j in 0..columns {
            let e = first + mine + j;
            state[j] = 0.0f32;
            if e < value_dim {
                if segment == 0 {
                    #[comptime]
                    match initial_state {
                        ComptimeOption::Some(initial) => {
                            state[j] = initial[at(initial, batch, head, d, e)];
                        }
                        ComptimeOption::None => {}
                    }
                } else {
                    #[comptime]
                    match kept {
                        ComptimeOption::Some(kept) => {
                            state[j] = kept[at(kept, segment - 1, lane, d, e)];
                        }
                        ComptimeOption::None => {}
                    }
                }
            }
        }

        // Forward: leaves the state before each chunk, its errors and its writes.
        for c in 0..count {
            let chunk = segment * CHUNKS + c;
            let start = chunk * ROWS;
            let channel = Channel::load(q, k, g, batch, head, start, d);
            let place = my_scratch + c * scratch_chunk;
            sync_cube();
            share_matrix(&state, &mut matrix, &channel.k, &mut key_rows, d, mine, plan);
            load_scores(scores, &mut scores_here, beta, &mut betas, lane, chunk, batch, head, time, plan);
            #[unroll]
            for j in 0..columns {
                scratch[place + (mine + j) * key_dim + d] = state[j];
            }
            sync_cube();
            for i in range_stepped(unit, area, units) {
                let (t, e) = (i / values, first + i % values);
                errors[i] = 0.0f32;
                if start + t < time && e < value_dim {
                    errors[i] = v[at(v, batch, start + t, head, e)] - product(&key_rows, &matrix, i, plan);
                }
            }
            sync_cube();
            for i in range_stepped(unit, area, units) {
                let (t, e) = (i / values, i % values);
                let mut sum = 0.0f32;
                for s in 0..t + 1 {
                    sum += scores_here[comptime!(2 * ROWS * ROWS) + t * ROWS + s] * (betas[s] * errors[s * values + e]);
                }
                writes[i] = sum;
                scratch[place + comptime!(values * key_dim) + i] = errors[i];
                scratch[place + comptime!(values * key_dim + area) + i] = sum;
            }
            sync_cube();
            #[unroll]
            for j in 0..columns {
                let decayed = channel.power * state[j];
                let mut x = channel.change * decayed;
                #[unroll]
                for t in 0..ROWS {
                    x = fma(channel.k_to_end[t], writes[comptime!(t * values) + mine + j], x);
                }
                state[j] = decayed + x;
            }
        }

        // And back.
        for m in 0..count {
            let c = count - 1 - m;
            let chunk = segment * CHUNKS + c;
            let start = chunk * ROWS;
            let channel = Channel::load(q, k, g, batch, head, start, d);
            let place = my_scratch + c * scratch_chunk;
            sync_cube();
            share_matrix(&d_state, &mut matrix, &channel.k_to_end, &mut key_rows, d, mine, plan);
            load_scores(scores, &mut scores_here, beta, &mut betas, lane, chunk, batch, head, time, plan);
            #[unroll]
            for j in 0..columns {
                state[j] = scratch[place + (mine + j) * key_dim + d];
            }
            for i in range_stepped(unit, area, units) {
                errors[i] = scratch[place + comptime!(values * key_dim) + i];
                writes[i] = scratch[place + comptime!(values * key_dim + area) + i];
                d_reads[i] = 0.0f32;
                #[comptime]
                match d_o {
                    ComptimeOption::Some(d_o) => {
                        let (t, e) = (i / values, first + i % values);
                        if start + t < time && e < value_dim {
                            d_reads[i] = scale * d_o[at(d_o, batch, start + t, head, e)];
                        }
                    }
                    ComptimeOption::None => {}
                }
            }
            sync_cube();
            // The cotangent of the writes.
            for i in range_stepped(unit, area, units) {
                let (t, e) = (i / values, i % values);
                let mut sum = product(&key_rows, &matrix, i, plan);
                for s in t..ROWS {
                    sum += scores_here[s * ROWS + t] * d_reads[s * values + e];
                }
                work[i] = sum;
            }
            sync_cube();
            // Of what the inverse is applied to; `work` is read by rows below, so each column is one unit's.
            for e in range_stepped(unit, values, units) {
                #[unroll]
                for t in 0..ROWS {
                    let mut d_solve = 0.0f32;
                    // The error that beta scales: without what the writes before it have taken from it already.
                    let mut left = errors[comptime!(t * values) + e];
                    #[unroll]
                    for s in t..ROWS {
                        d_solve +=
                            scores_here[comptime!(2 * ROWS * ROWS + s * ROWS + t)] * work[comptime!(s * values) + e];
                    }
                    #[unroll]
                    for s in 0..t {
                        left -= scores_here[comptime!(ROWS * ROWS + t * ROWS + s)] * writes[comptime!(s * values) + e];
                    }
                    let d_error = betas[t] * d_solve;
                    d_errors[comptime!(t * values) + e] = d_error;
                    work[comptime!(t * values) + e] = d_solve * left;
                    #[comptime]
                    match &mut d_v {
                        ComptimeOption::Some(d_v) => {
                            if start + t < time && first + e < value_dim {
                                let to = at(&*d_v, batch, start + t, head, first + e);
                                d_v[to] = d_error;
                            }
                        }
                        ComptimeOption::None => {}
                    }
                }
            }
            sync_cube();

            let to = my_sums + chunk * sums_chunk;
            for i in range_stepped(unit, SCORE_SUMS, units) {
                let mut sum = 0.0f32;
                if i < comptime!(ROWS * ROWS) {
                    let (t, s) = (i / ROWS, i % ROWS);
                    for e in 0..values {
                        sum += d_reads[t * values + e] * writes[s * values + e];
                    }
                } else if i < comptime!(2 * ROWS * ROWS) {
                    let (t, s) = (i / ROWS - ROWS, i % ROWS);
                    for e in 0..values {
                        sum -= d_errors[t * values + e] * writes[s * values + e];
                    }
                } else {
                    let t = i - comptime!(2 * ROWS * ROWS);
                    for e in 0..values {
                        sum += work[t * values + e];
                    }
                }
                sums[to + comptime!(SUMS * key_dim) + i] = sum;
            }

            let mut of_channel = Array::<f32>::new(SUMS);
            #[unroll]
            for i in 0..SUMS {
                of_channel[i] = 0.0f32;
            }
            #[unroll]
            for j in 0..columns {
                let decayed = channel.power * d_state[j];
                let mut x = channel.change * decayed;
                of_channel[comptime!(3 * ROWS)] += state[j] * (decayed + x);
                #[unroll]
                for t in 0..ROWS {
                    let d_read = d_reads[comptime!(t * values) + mine + j];
                    let d_error = d_errors[comptime!(t * values) + mine + j];
                    let write = writes[comptime!(t * values) + mine + j];
                    of_channel[t] = fma(d_read, state[j], of_channel[t]);
                    of_channel[comptime!(ROWS + t)] = fma(-d_error, state[j], of_channel[comptime!(ROWS + t)]);
                    of_channel[comptime!(2 * ROWS + t)] = fma(write, d_state[j], of_channel[comptime!(2 * ROWS + t)]);
                    x = fma(channel.q[t], d_read, fma(-channel.k[t], d_error, x));
                }
                d_state[j] = decayed + x;
            }
            if comptime!(plan.groups > 1) {
                #[unroll]
                for turn in 0..plan.groups {
                    if group == turn {
                        #[unroll]
                        for i in 0..SUMS {
                            let place = comptime!(i * key_dim) + d;
                            if comptime!(turn == 0) {
                                matrix[place] = of_channel[i];
                            } else {
                                matrix[place] += of_channel[i];
                            }
                        }
                    }
                    sync_cube();
                }
                for i in range_stepped(unit, comptime!(SUMS * key_dim), units) {
                    sums[to + i] = matrix[i];
                }
            } else {
                #[unroll]
                for i in 0..SUMS {
                    sums[to + comptime!(i * key_dim) + d] = of_channel[i];
                }
            }
        }
    }

    #[comptime]
    match &mut d_initial_state {
        ComptimeOption::Some(d_initial) =>
        {
            #[unroll]
            for j in 0..columns {
                let e = first + mine + j;
                if e < value_dim {
                    let to = at(&*d_initial, batch, head, d, e);
                    d_initial[to] = d_state[j];
                }
            }
        }
        ComptimeOption::None => {}
    }
}

/// A matrix `[K, values]` and rows `[C, K]` to shared memory, for [`product`].
#[cube]
fn share_matrix(
    columns: &Array<f32>,
    matrix: &mut Shared<[f32]>,
    row: &Array<f32>,
    rows: &mut Shared<[f32]>,
    d: usize,
    mine: usize,
    #[comptime] plan: ScanPlan,
) {
    #[unroll]
    for j in 0..plan.columns {
        matrix[d * comptime!(plan.stride()) + mine + j] = columns[j];
    }
    if mine == 0 {
        #[unroll]
        for t in 0..ROWS {
            rows[comptime!(t * plan.key_dim) + d] = row[t];
        }
    }
}

/// Element `i` of `rows matrix`, `[C, values]`.
#[cube]
fn product(rows: &Shared<[f32]>, matrix: &Shared<[f32]>, i: usize, #[comptime] plan: ScanPlan) -> f32 {
    let (t, e) = (i / comptime!(plan.values()), i % comptime!(plan.values()));
    let mut sum = 0.0f32;
    for block in 0..comptime!(plan.key_dim.div_ceil(BLOCK)) {
        let mut part = 0.0f32;
        for n in 0..BLOCK {
            let d = block * BLOCK + n;
            if d < plan.key_dim {
                part = fma(rows[t * plan.key_dim + d], matrix[d * comptime!(plan.stride()) + e], part);
            }
        }
        sum += part;
    }
    sum
}

#[cube]
fn load_scores(
    scores: &Tensor<f32>,
    scores_here: &mut Shared<[f32]>,
    beta: &Tensor<f32>,
    betas: &mut Shared<[f32]>,
    lane: usize,
    chunk: usize,
    batch: usize,
    head: usize,
    time: usize,
    #[comptime] plan: ScanPlan,
) {
    let unit = UNIT_POS as usize;
    let units = comptime!(plan.units());
    let from = (lane * scores.shape(1) + chunk) * comptime!(3 * ROWS * ROWS);
    for i in range_stepped(unit, comptime!(3 * ROWS * ROWS), units) {
        scores_here[i] = scores[from + i];
    }
    for i in range_stepped(unit, ROWS, units) {
        betas[i] = 0.0f32;
        if chunk * ROWS + i < time {
            betas[i] = beta_of(beta, batch, chunk * ROWS + i, head);
        }
    }
}

/// One cube per chunk of a query and key head, one unit per key channel.
#[cube(launch, address_type = "dynamic")]
pub(super) fn inputs_kernel(
    q: &Tensor<f32>,
    k: &Tensor<f32>,
    g: &Tensor<f32>,
    sums: &Tensor<f32>,
    mut d_q: ComptimeOption<OwnedTensor<f32>>,
    mut d_k: ComptimeOption<OwnedTensor<f32>>,
    mut d_g: ComptimeOption<OwnedTensor<f32>>,
    mut d_beta: ComptimeOption<OwnedTensor<f32>>,
    #[comptime] key_dim: usize,
) {
    let (time, heads, value_heads) = (q.shape(1), q.shape(2), g.shape(2));
    let (tiles, lanes, chunks) = (sums.shape(0), sums.shape(1), sums.shape(2));
    let (row, chunk) = (CUBE_POS / chunks, CUBE_POS % chunks);
    if row >= q.shape(0) * heads {
        terminate!();
    }
    let (batch, key_head) = (row / heads, row % heads);
    let group = value_heads / heads;
    let d = UNIT_POS as usize;
    let start = chunk * ROWS;
    let sums_chunk = comptime!(SUMS * key_dim + SCORE_SUMS);

    let mut queries = Array::<f32>::new(ROWS);
    let mut keys = Array::<f32>::new(ROWS);
    let mut by_query = Array::<f32>::new(ROWS);
    let mut by_key = Array::<f32>::new(ROWS);
    #[unroll]
    for t in 0..ROWS {
        queries[t] = 0.0f32;
        keys[t] = 0.0f32;
        by_query[t] = 0.0f32;
        by_key[t] = 0.0f32;
        if start + t < time {
            queries[t] = q[at(q, batch, start + t, key_head, d)];
            keys[t] = k[at(k, batch, start + t, key_head, d)];
        }
    }

    let mut d_scores = Shared::<[f32]>::new_slice(SCORE_SUMS);
    let mut log_decays = Array::<f32>::new(ROWS);
    let mut by_decay = Array::<f32>::new(ROWS);
    let mut of_channel = Array::<f32>::new(SUMS);
    for member in 0..group {
        let head = key_head * group + member;
        let lane = batch * value_heads + head;
        let from = (lane * chunks + chunk) * sums_chunk;
        let tile_size = lanes * chunks * sums_chunk;
        sync_cube();
        for i in range_stepped(d, SCORE_SUMS, key_dim) {
            let mut sum = 0.0f32;
            for tile in 0..tiles {
                sum += sums[tile * tile_size + from + comptime!(SUMS * key_dim) + i];
            }
            d_scores[i] = sum;
        }
        #[unroll]
        for i in 0..SUMS {
            let mut sum = 0.0f32;
            for tile in 0..tiles {
                sum += sums[tile * tile_size + from + comptime!(i * key_dim) + d];
            }
            of_channel[i] = sum;
        }
        #[unroll]
        for t in 0..ROWS {
            log_decays[t] = 0.0f32;
            by_decay[t] = of_channel[comptime!(3 * ROWS)];
            if start + t < time {
                log_decays[t] = g[at(g, batch, start + t, head, d)];
            }
        }
        sync_cube();

        // By way of `q exp(G)` and `k exp(G)`.
        let mut before = 0.0f32;
        #[unroll]
        for t in 0..ROWS {
            before += log_decays[t];
            let from_start = decay(before);
            let of_query = of_channel[t] * from_start;
            let of_key = of_channel[comptime!(ROWS + t)] * from_start;
            by_query[t] += of_query;
            by_key[t] += of_key;
            let of_decay = of_query * queries[t] + of_key * keys[t];
            #[unroll]
            for s in 0..comptime!(t + 1) {
                by_decay[s] += of_decay;
            }
        }
        // By way of `k exp(G_C - G)`.
        let mut after = 0.0f32;
        #[unroll]
        for n in 0..ROWS {
            let t = comptime!(ROWS - 1 - n);
            let of_key = of_channel[comptime!(2 * ROWS + t)] * decay(after);
            by_key[t] += of_key;
            let of_decay = of_key * keys[t];
            #[unroll]
            for s in comptime!(t + 1)..ROWS {
                by_decay[s] += of_decay;
            }
            after += log_decays[t];
        }
        // By way of the scores.
        #[unroll]
        for j in 0..ROWS {
            let on_diagonal = d_scores[comptime!(j * ROWS + j)];
            by_query[j] += on_diagonal * keys[j];
            by_key[j] += on_diagonal * queries[j];
            let mut between = 0.0f32;
            #[unroll]
            for i in comptime!(j + 1)..ROWS {
                between += log_decays[i];
                let factor = decay(between);
                let (d_qk, d_kk) = (d_scores[comptime!(i * ROWS + j)], d_scores[comptime!(ROWS * ROWS + i * ROWS + j)]);
                let key = factor * keys[j];
                by_query[i] += d_qk * key;
                by_key[i] += d_kk * key;
                let of_key = (d_qk * queries[i] + d_kk * keys[i]) * factor;
                by_key[j] += of_key;
                let of_decay = of_key * keys[j];
                #[unroll]
                for s in comptime!(j + 1)..comptime!(i + 1) {
                    by_decay[s] += of_decay;
                }
            }
        }

        #[comptime]
        match &mut d_g {
            ComptimeOption::Some(d_g) =>
            {
                #[unroll]
                for t in 0..ROWS {
                    if start + t < time {
                        let to = at(&*d_g, batch, start + t, head, d);
                        d_g[to] = by_decay[t];
                    }
                }
            }
            ComptimeOption::None => {}
        }
        #[comptime]
        match &mut d_beta {
            ComptimeOption::Some(d_beta) => {
                for t in range_stepped(d, ROWS, key_dim) {
                    if start + t < time {
                        d_beta[(batch * time + start + t) * value_heads + head] =
                            d_scores[comptime!(2 * ROWS * ROWS) + t];
                    }
                }
            }
            ComptimeOption::None => {}
        }
    }
    #[comptime]
    match &mut d_q {
        ComptimeOption::Some(d_q) => write_rows(&by_query, d_q, batch, start, key_head, d),
        ComptimeOption::None => {}
    }
    #[comptime]
    match &mut d_k {
        ComptimeOption::Some(d_k) => write_rows(&by_key, d_k, batch, start, key_head, d),
        ComptimeOption::None => {}
    }
}

#[cube]
fn write_rows(rows: &Array<f32>, to: &mut Tensor<f32>, batch: usize, start: usize, head: usize, d: usize) {
    #[unroll]
    for t in 0..ROWS {
        if start + t < to.shape(1) {
            let place = at(&*to, batch, start + t, head, d);
            to[place] = rows[t];
        }
    }
}
