//! The scan over chunks, with the outputs.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::channel::{from_start, half_of, place, to_end};
use super::matrices::{decay_state, put_inverse, put_scores, put_sums};
use super::operand::{ALIGNMENT, Layout, Operand, TILE, product};
use crate::kernel::element::{read, write};
use crate::kernel::plan::ChunkPlan;
use crate::plain::SEGMENT_TOKENS;

#[cube(launch, address_type = "dynamic")]
pub(in crate::kernel) fn chunk_scan_kernel<X: Float, G: Float, B: Float, E: Float>(
    q: &Tensor<X>,
    k: &Tensor<X>,
    v: &Tensor<X>,
    g: &Tensor<G>,
    beta: &Tensor<B>,
    scores: &Tensor<f32>,
    initial_state: ComptimeOption<&Tensor<f32>>,
    o: &mut Tensor<X>,
    final_state: &mut Tensor<f32>,
    mut kept: ComptimeOption<OwnedTensor<f32>>,
    scale: f32,
    #[comptime] plan: ChunkPlan,
    #[define(X, G, B, E)] _dtypes: [ElemType; 4],
) {
    let (time, value_heads, value_dim) = (v.shape(1), v.shape(2), v.shape(3));
    let chunks = scores.shape(1);
    let rows = comptime!(plan.rows);
    let keys = comptime!(plan.keys());
    let values = comptime!(plan.values());
    let units = comptime!(plan.units());
    let parts = value_dim.div_ceil(values);
    let lane = CUBE_POS / parts;
    if lane >= scores.shape(0) {
        terminate!();
    }
    let (batch, head) = (lane / value_heads, lane % value_heads);
    let key_head = head / (value_heads / q.shape(2));
    let first = CUBE_POS % parts * values;
    let unit = UNIT_POS as usize;
    let (d, row) = place(plan);

    let stride = comptime!(plan.sum_stride(values));
    let mut state = Shared::<[f32]>::new_aligned_slice(comptime!(keys * stride), ALIGNMENT);
    let mut work = Shared::<[f32]>::new_aligned_slice(comptime!(rows * stride), ALIGNMENT);
    let mut out = Shared::<[f32]>::new_aligned_slice(comptime!(rows * stride), ALIGNMENT);
    let mut state_rows = Operand::<E>::new(keys, values, plan);
    let mut key_rows = Operand::<E>::new(rows, keys, plan);
    let mut query_rows = Operand::<E>::new(rows, keys, plan);
    let mut pairs = Operand::<E>::new(rows, rows, plan);
    let mut write_rows = Operand::<E>::new(rows, values, plan);
    // Sums of `g` over the halves of a chunk.
    let mut halves = Shared::<[f32]>::new_slice(comptime!(2 * keys));

    for n in range_stepped(unit, comptime!(keys * values), units) {
        let (c, e) = (n / values, n % values);
        let mut x = 0.0f32;
        #[comptime]
        match initial_state {
            ComptimeOption::Some(initial) => {
                if c < initial.shape(2) && first + e < value_dim {
                    x = read(initial, batch, head, c, first + e);
                }
            }
            ComptimeOption::None => {}
        }
        state[c * stride + e] = x;
        state_rows.put(c, e, x, plan);
    }

    for chunk in 0..chunks {
        let start = chunk * rows;
        let matrices = (lane * chunks + chunk) * comptime!(plan.matrices(false) * rows * rows);
        #[comptime]
        match &mut kept {
            ComptimeOption::Some(kept) => {
                if start > 0 && start.is_multiple_of(SEGMENT_TOKENS) {
                    store(&state, kept, start / SEGMENT_TOKENS - 1, lane, first, plan);
                }
            }
            ComptimeOption::None => {}
        }
        halves[unit] = half_of(g, batch, head, start + row, d, plan);
        let inverse = matrices + comptime!(rows * rows);
        put_inverse(&mut pairs, scores, inverse, beta, (batch, head), start, plan);
        sync_cube();

        from_start(q, g, &halves, &mut query_rows, (batch, head, key_head), start, (row, d), plan);
        from_start(k, g, &halves, &mut key_rows, (batch, head, key_head), start, (row, d), plan);
        sync_cube();

        let tiles = comptime!((rows / TILE, plan.value_tiles, plan.key_tiles));
        product(&key_rows, &state_rows, &mut work, stride, tiles, Layout::PLAIN, plan);
        product(&query_rows, &state_rows, &mut out, stride, tiles, Layout::PLAIN, plan);
        sync_cube();

        // The errors.
        for n in range_stepped(unit, comptime!(rows * values), units) {
            let (t, e) = (n / values, n % values);
            let mut x = 0.0f32;
            if start + t < time && first + e < value_dim {
                x = read(v, batch, start + t, head, first + e) - work[t * stride + e];
            }
            write_rows.put(t, e, x, plan);
        }
        to_end(k, g, &halves, &mut key_rows, (batch, head, key_head), start, (row, d), plan);
        sync_cube();

        let tiles = comptime!((rows / TILE, plan.value_tiles, rows / TILE));
        product(&pairs, &write_rows, &mut work, stride, tiles, comptime!(Layout::PLAIN.lower()), plan);
        sync_cube();

        put_sums(&mut write_rows, &work, rows, values, plan);
        put_scores(&mut pairs, scores, matrices, plan);
        decay_state(&mut state, &halves, plan);
        sync_cube();

        product(&pairs, &write_rows, &mut out, stride, tiles, comptime!(Layout::PLAIN.lower().added()), plan);
        let tiles = comptime!((plan.key_tiles, plan.value_tiles, rows / TILE));
        let layout = comptime!(Layout::PLAIN.left_transposed().added());
        product(&key_rows, &write_rows, &mut state, stride, tiles, layout, plan);
        sync_cube();

        for n in range_stepped(unit, comptime!(rows * values), units) {
            let (t, e) = (n / values, n % values);
            if start + t < time && first + e < value_dim {
                write(o, batch, start + t, head, first + e, scale * out[t * stride + e]);
            }
        }
        put_sums(&mut state_rows, &state, keys, values, plan);
    }
    store(&state, final_state, batch, head, first, plan);
}

/// The cube's part of the state, to the matrix `[a, b]` of a tensor `[.., .., K, V]`.
#[cube]
fn store(state: &Shared<[f32]>, to: &mut Tensor<f32>, a: usize, b: usize, first: usize, #[comptime] plan: ChunkPlan) {
    let values = comptime!(plan.values());
    for n in range_stepped(UNIT_POS as usize, comptime!(plan.keys() * values), comptime!(plan.units())) {
        let (c, e) = (n / values, n % values);
        if c < to.shape(2) && first + e < to.shape(3) {
            write(to, a, b, c, first + e, state[c * comptime!(plan.sum_stride(values)) + e]);
        }
    }
}
