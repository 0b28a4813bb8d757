//! The scan: forward again through a segment, then back.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::super::decay::{decay, decay_parts};
use super::super::element::{beta_of, read, write};
use super::super::plan::ScanPlan;
use super::{BLOCK, CHUNKS, ROWS, SCORE_SUMS, SUMS};

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
    fn load<X: Float, G: Float>(
        q: &Tensor<X>,
        k: &Tensor<X>,
        g: &Tensor<G>,
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
                log_decays[t] = read(g, batch, start + t, head, d);
                sum += log_decays[t];
                let from_start = decay(sum);
                let key = read(k, batch, start + t, key_head, d);
                queries[t] = from_start * read(q, batch, start + t, key_head, d);
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
pub(in super::super) fn scan_kernel<X: Float, G: Float, B: Float>(
    q: &Tensor<X>,
    k: &Tensor<X>,
    v: &Tensor<X>,
    g: &Tensor<G>,
    beta: &Tensor<B>,
    scores: &Tensor<f32>,
    initial_state: ComptimeOption<&Tensor<f32>>,
    kept: ComptimeOption<&Tensor<f32>>,
    d_o: ComptimeOption<&Tensor<X>>,
    d_final_state: ComptimeOption<&Tensor<f32>>,
    scratch: &mut Tensor<f32>,
    sums: &mut Tensor<f32>,
    mut d_v: ComptimeOption<OwnedTensor<X>>,
    mut d_initial_state: ComptimeOption<OwnedTensor<f32>>,
    scale: f32,
    #[comptime] plan: ScanPlan,
    #[define(X, G, B)] _dtypes: [ElemType; 3],
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
                    d_state[j] = read(d_final_state, batch, head, d, e);
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
                            state[j] = read(initial, batch, head, d, e);
                        }
                        ComptimeOption::None => {}
                    }
                } else {
                    #[comptime]
                    match kept {
                        ComptimeOption::Some(kept) => {
                            state[j] = read(kept, segment - 1, lane, d, e);
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
                    errors[i] = read(v, batch, start + t, head, e) - product(&key_rows, &matrix, i, plan);
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
                            d_reads[i] = scale * read(d_o, batch, start + t, head, e);
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
                                write(d_v, batch, start + t, head, first + e, d_error);
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
                    write(d_initial, batch, head, d, e, d_state[j]);
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
fn load_scores<B: Float>(
    scores: &Tensor<f32>,
    scores_here: &mut Shared<[f32]>,
    beta: &Tensor<B>,
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
