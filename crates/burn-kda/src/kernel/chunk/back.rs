//! The scan of the backward pass: forward again through a segment, then back.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::channel::{decay, from_start, half_of, place, to_end};
use super::matrices::{decay_state, put_inverse, put_scores, put_sums, save_sums};
use super::operand::{ALIGNMENT, Layout, Operand, TILE, product};
use crate::kernel::element::{beta_of, read, write};
use crate::kernel::plan::ChunkPlan;
use crate::plain::SEGMENT_TOKENS;

/// One cube per lane and tile of value channels. What it leaves in `sums` are the cotangents of `q exp(G)`, `k exp(G)`,
/// `k exp(G_C - G)`, `G_C` by way of the state's decay, `A_qk`, `A_kk` and `beta`: see [`SumsOf`].
#[cube(launch, address_type = "dynamic")]
pub(in crate::kernel) fn chunk_back_kernel<X: Float, G: Float, B: Float, E: Float>(
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
    #[comptime] plan: ChunkPlan,
    #[define(X, G, B, E)] _dtypes: [ElemType; 4],
) {
    let (time, value_heads, value_dim) = (v.shape(1), v.shape(2), v.shape(3));
    let (lanes, chunks, parts) = (scores.shape(0), scores.shape(1), sums.shape(0));
    let rows = comptime!(plan.rows);
    let keys = comptime!(plan.keys());
    let values = comptime!(plan.values());
    let units = comptime!(plan.units());
    let (lane, part) = (CUBE_POS / parts, CUBE_POS % parts);
    if lane >= lanes {
        terminate!();
    }
    let (batch, head) = (lane / value_heads, lane % value_heads);
    let key_head = head / (value_heads / q.shape(2));
    let first = part * values;
    let unit = UNIT_POS as usize;
    let (d, row) = place(plan);

    let stride = comptime!(plan.sum_stride(values));
    // The state, and on the way back its cotangent.
    let mut state = Shared::<[f32]>::new_aligned_slice(comptime!(keys * stride), ALIGNMENT);
    let mut work = Shared::<[f32]>::new_aligned_slice(comptime!(rows * stride), ALIGNMENT);
    let mut d_solves = Shared::<[f32]>::new_aligned_slice(comptime!(rows * stride), ALIGNMENT);
    let mut state_rows = Operand::<E>::new(keys, values, plan);
    let mut key_rows = Operand::<E>::new(rows, keys, plan);
    let mut query_rows = Operand::<E>::new(rows, keys, plan);
    let mut pairs = Operand::<E>::new(rows, rows, plan);
    let mut read_rows = Operand::<E>::new(rows, values, plan);
    let mut write_rows = Operand::<E>::new(rows, values, plan);
    let mut error_rows = Operand::<E>::new(rows, values, plan);
    // Sums over the halves of a chunk, and over the halves of the value channels.
    let mut halves = Shared::<[f32]>::new_slice(comptime!(2 * keys));
    let mut by_decay = Shared::<[f32]>::new_slice(comptime!(2 * keys));

    let of = comptime!(SumsOf::new(plan));
    let most = comptime!(SEGMENT_TOKENS / rows);
    let matrix = comptime!(keys * values);
    let area = comptime!(rows * values);
    // Per chunk of a segment the state before it, its errors and its writes; at last the cotangent of the state.
    let scratch_chunk = comptime!(matrix + 2 * area);
    let scratch_here = CUBE_POS * scratch.shape(1);
    let parked = scratch_here + comptime!(most * scratch_chunk);
    let sums_here = (part * lanes + lane) * chunks * comptime!(of.len);

    for n in range_stepped(unit, matrix, units) {
        let (c, e) = (n / values, n % values);
        let mut x = 0.0f32;
        #[comptime]
        match d_final_state {
            ComptimeOption::Some(d_final_state) => {
                if c < d_final_state.shape(2) && first + e < value_dim {
                    x = read(d_final_state, batch, head, c, first + e);
                }
            }
            ComptimeOption::None => {}
        }
        state[c * stride + e] = x;
    }

    let segments = chunks.div_ceil(most);
    for n in 0..segments {
        let segment = segments - 1 - n;
        let left = chunks - segment * most;
        let count = select(left < most, left, most.runtime());

        for n in range_stepped(unit, matrix, units) {
            let (c, e) = (n / values, n % values);
            scratch[parked + n] = state[c * stride + e];
            let mut x = 0.0f32;
            if c < q.shape(3) && first + e < value_dim {
                if segment == 0 {
                    #[comptime]
                    match initial_state {
                        ComptimeOption::Some(initial) => {
                            x = read(initial, batch, head, c, first + e);
                        }
                        ComptimeOption::None => {}
                    }
                } else {
                    #[comptime]
                    match kept {
                        ComptimeOption::Some(kept) => {
                            x = read(kept, segment - 1, lane, c, first + e);
                        }
                        ComptimeOption::None => {}
                    }
                }
            }
            state[c * stride + e] = x;
        }

        // Forward: leaves the state before each chunk, its errors and its writes.
        for c in 0..count {
            let chunk = segment * most + c;
            let start = chunk * rows;
            let matrices = (lane * chunks + chunk) * comptime!(plan.matrices(true) * rows * rows);
            let here = scratch_here + c * scratch_chunk;
            save_sums(scratch, here, &state, keys, values, plan);
            put_sums(&mut state_rows, &state, keys, values, plan);
            halves[unit] = half_of(g, batch, head, start + row, d, plan);
            let inverse = matrices + comptime!(rows * rows);
            put_inverse(&mut pairs, scores, inverse, beta, (batch, head), start, plan);
            sync_cube();
            from_start(k, g, &halves, &mut key_rows, (batch, head, key_head), start, (row, d), plan);
            sync_cube();
            let tiles = comptime!((rows / TILE, plan.value_tiles, plan.key_tiles));
            product(&key_rows, &state_rows, &mut work, stride, tiles, Layout::PLAIN, plan);
            sync_cube();
            for n in range_stepped(unit, area, units) {
                let (t, e) = (n / values, n % values);
                let mut x = 0.0f32;
                if start + t < time && first + e < value_dim {
                    x = read(v, batch, start + t, head, first + e) - work[t * stride + e];
                }
                scratch[here + matrix + n] = x;
                write_rows.put(t, e, x, plan);
            }
            to_end(k, g, &halves, &mut key_rows, (batch, head, key_head), start, (row, d), plan);
            sync_cube();
            let tiles = comptime!((rows / TILE, plan.value_tiles, rows / TILE));
            product(&pairs, &write_rows, &mut work, stride, tiles, comptime!(Layout::PLAIN.lower()), plan);
            sync_cube();
            save_sums(scratch, here + comptime!(matrix + area), &work, rows, values, plan);
            put_sums(&mut write_rows, &work, rows, values, plan);
            decay_state(&mut state, &halves, plan);
            sync_cube();
            let tiles = comptime!((plan.key_tiles, plan.value_tiles, rows / TILE));
            let layout = comptime!(Layout::PLAIN.left_transposed().added());
            product(&key_rows, &write_rows, &mut state, stride, tiles, layout, plan);
            sync_cube();
        }

        sync_storage(); // Units read of the scratch what others have written.
        for n in range_stepped(unit, matrix, units) {
            state[n / values * stride + n % values] = scratch[parked + n];
        }

        // And back.
        for m in 0..count {
            let c = count - 1 - m;
            let chunk = segment * most + c;
            let start = chunk * rows;
            let matrices = (lane * chunks + chunk) * comptime!(plan.matrices(true) * rows * rows);
            let here = scratch_here + c * scratch_chunk;
            let to = sums_here + chunk * comptime!(of.len);
            let end = to + comptime!(of.len);
            put_sums(&mut state_rows, &state, keys, values, plan);
            for n in range_stepped(unit, area, units) {
                let (t, e) = (n / values, n % values);
                let mut x = 0.0f32;
                #[comptime]
                match d_o {
                    ComptimeOption::Some(d_o) => {
                        if start + t < time && first + e < value_dim {
                            x = scale * read(d_o, batch, start + t, head, first + e);
                        }
                    }
                    ComptimeOption::None => {}
                }
                read_rows.put(t, e, x, plan);
                write_rows.put(t, e, scratch[here + comptime!(matrix + area) + n], plan);
            }
            put_scores(&mut pairs, scores, matrices, plan);
            halves[unit] = half_of(g, batch, head, start + row, d, plan);
            sync_cube();
            to_end(k, g, &halves, &mut key_rows, (batch, head, key_head), start, (row, d), plan);
            sync_cube();

            // The cotangent of the writes; with them those of `A_qk` and `k exp(G_C - G)`.
            let tiles = comptime!((rows / TILE, plan.value_tiles, rows / TILE));
            let layout = comptime!(Layout::PLAIN.left_transposed().lower());
            product(&pairs, &read_rows, &mut work, stride, tiles, layout, plan);
            let transposed = comptime!(Layout::PLAIN.right_transposed());
            let tiles = comptime!((rows / TILE, rows / TILE, plan.value_tiles));
            product(&read_rows, &write_rows, &mut sums[to + of.qk..end], rows, tiles, transposed, plan);
            let tiles = comptime!((rows / TILE, plan.key_tiles, plan.value_tiles));
            product(&write_rows, &state_rows, &mut sums[to + of.k_to_end..end], keys, tiles, transposed, plan);
            sync_cube();
            let tiles = comptime!((rows / TILE, plan.value_tiles, plan.key_tiles));
            product(&key_rows, &state_rows, &mut work, stride, tiles, comptime!(Layout::PLAIN.added()), plan);
            sync_cube();

            put_sums(&mut error_rows, &work, rows, values, plan);
            put_scores(&mut pairs, scores, matrices + comptime!(rows * rows), plan);
            let mut of_decay = 0.0f32;
            for n in 0..comptime!(values / 2) {
                let e = unit / keys * comptime!(values / 2) + n;
                of_decay += scratch[here + d * values + e] * state[d * stride + e];
            }
            by_decay[unit] = of_decay;
            for n in range_stepped(unit, matrix, units) {
                state_rows.put(n / values, n % values, scratch[here + n], plan);
            }
            from_start(q, g, &halves, &mut query_rows, (batch, head, key_head), start, (row, d), plan);
            from_start(k, g, &halves, &mut key_rows, (batch, head, key_head), start, (row, d), plan);
            sync_cube();

            // Of what the inverse is applied to, and of `q exp(G)`.
            let tiles = comptime!((rows / TILE, plan.value_tiles, rows / TILE));
            product(&pairs, &error_rows, &mut d_solves, stride, tiles, layout, plan);
            let tiles = comptime!((rows / TILE, plan.key_tiles, plan.value_tiles));
            product(&read_rows, &state_rows, &mut sums[to + of.q..end], keys, tiles, transposed, plan);
            sync_cube();

            for n in range_stepped(unit, area, units) {
                let (t, e) = (n / values, n % values);
                let mut d_error = 0.0f32;
                if start + t < time {
                    d_error = beta_of(beta, batch, start + t, head) * d_solves[t * stride + e];
                    #[comptime]
                    match &mut d_v {
                        ComptimeOption::Some(d_v) => {
                            if first + e < value_dim {
                                write(d_v, batch, start + t, head, first + e, d_error);
                            }
                        }
                        ComptimeOption::None => {}
                    }
                }
                error_rows.put(t, e, -d_error, plan);
            }
            put_scores(&mut pairs, scores, matrices + comptime!(2 * rows * rows), plan);
            for c in range_stepped(unit, keys, units) {
                let factor = decay(halves[c] + halves[keys + c]);
                sums[to + of.decay + c] = factor * (by_decay[c] + by_decay[keys + c]);
            }
            decay_state(&mut state, &halves, plan);
            sync_cube();

            let tiles = comptime!((rows / TILE, plan.value_tiles, rows / TILE));
            product(&pairs, &write_rows, &mut work, stride, tiles, comptime!(Layout::PLAIN.lower()), plan);
            let tiles = comptime!((rows / TILE, plan.key_tiles, plan.value_tiles));
            product(&error_rows, &state_rows, &mut sums[to + of.k..end], keys, tiles, transposed, plan);
            let tiles = comptime!((rows / TILE, rows / TILE, plan.value_tiles));
            product(&error_rows, &write_rows, &mut sums[to + of.kk..end], rows, tiles, transposed, plan);
            let tiles = comptime!((plan.key_tiles, plan.value_tiles, rows / TILE));
            let layout = comptime!(Layout::PLAIN.left_transposed().added());
            product(&query_rows, &read_rows, &mut state, stride, tiles, layout, plan);
            sync_cube();
            product(&key_rows, &error_rows, &mut state, stride, tiles, layout, plan);
            // The error that `beta` scales is what the writes before it in the chunk have left.
            for t in range_stepped(unit, rows, units) {
                let mut sum = 0.0f32;
                for e in 0..values {
                    let left = scratch[here + matrix + t * values + e] - work[t * stride + e];
                    sum += d_solves[t * stride + e] * left;
                }
                sums[to + of.beta + t] = sum;
            }
            sync_cube();
        }
    }

    #[comptime]
    match &mut d_initial_state {
        ComptimeOption::Some(d_initial) => {
            for n in range_stepped(unit, matrix, units) {
                let (c, e) = (n / values, n % values);
                if c < d_initial.shape(2) && first + e < value_dim {
                    write(d_initial, batch, head, c, first + e, state[c * stride + e]);
                }
            }
        }
        ComptimeOption::None => {}
    }
}

/// Where `sums` has what, of one chunk: `[C, K]` three times, `[K]`, `[C, C]` twice and `[C]`, with whole tiles of `K`.
#[derive(Debug, Clone, Copy)]
pub(in crate::kernel) struct SumsOf {
    pub q: usize,
    pub k: usize,
    pub k_to_end: usize,
    pub decay: usize,
    pub qk: usize,
    pub kk: usize,
    pub beta: usize,
    pub len: usize,
}

impl SumsOf {
    pub fn new(plan: ChunkPlan) -> Self {
        let (matrix, pairs) = (plan.rows * plan.keys(), plan.rows * plan.rows);
        let decay = 3 * matrix;
        let qk = decay + plan.keys();
        let beta = qk + 2 * pairs;
        Self { q: 0, k: matrix, k_to_end: 2 * matrix, decay, qk, kk: qk + pairs, beta, len: beta + plan.rows }
    }
}
