//! From what the scan leaves of a chunk to the gradients of its inputs: down the segment tree that the scores went up.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::back::SumsOf;
use super::channel::{Channel, decay, place, rows_of};
use super::operand::{ALIGNMENT, Layout, Operand, TILE, product};
use super::scores::level_rows;
use crate::kernel::element::{over_tiles, write, write_beta};
use crate::kernel::plan::ChunkPlan;

/// One cube per chunk of a query and key head.
#[cube(launch, address_type = "dynamic")]
pub(in crate::kernel) fn chunk_inputs_kernel<X: Float, G: Float, B: Float, E: Float>(
    q: &Tensor<X>,
    k: &Tensor<X>,
    g: &Tensor<G>,
    sums: &Tensor<f32>,
    mut d_q: ComptimeOption<OwnedTensor<X>>,
    mut d_k: ComptimeOption<OwnedTensor<X>>,
    mut d_g: ComptimeOption<OwnedTensor<G>>,
    mut d_beta: ComptimeOption<OwnedTensor<B>>,
    #[comptime] plan: ChunkPlan,
    #[define(X, G, B, E)] _dtypes: [ElemType; 4],
) {
    let (time, heads, value_heads) = (q.shape(1), q.shape(2), g.shape(2));
    let (parts, lanes, chunks) = (sums.shape(0), sums.shape(1), sums.shape(2));
    let rows = comptime!(plan.rows);
    let keys = comptime!(plan.keys());
    let half = comptime!(plan.half());
    let units = comptime!(plan.units());
    let (row_of_heads, chunk) = (CUBE_POS / chunks, CUBE_POS % chunks);
    if row_of_heads >= q.shape(0) * heads {
        terminate!();
    }
    let (batch, key_head) = (row_of_heads / heads, row_of_heads % heads);
    let group = value_heads / heads;
    let start = chunk * rows;
    let unit = UNIT_POS as usize;
    let of = comptime!(SumsOf::new(plan));
    let part_size = lanes * chunks * comptime!(of.len);

    let mut query_rows = Operand::<E>::new(rows, keys, plan);
    let mut key_rows = Operand::<E>::new(rows, keys, plan);
    let mut qk = Operand::<E>::new(rows, rows, plan);
    let mut kk = Operand::<E>::new(rows, rows, plan);
    let stride = comptime!(plan.sum_stride(keys));
    // Of a right row by its query; when a unit has taken that up, of any row by its decay.
    let mut of_query = Shared::<[f32]>::new_aligned_slice(comptime!(rows * stride), ALIGNMENT);
    let mut of_key = Shared::<[f32]>::new_aligned_slice(comptime!(rows * stride), ALIGNMENT);
    let mut d_qk = Shared::<[f32]>::new_slice(comptime!(rows * rows));
    let mut d_kk = Shared::<[f32]>::new_slice(comptime!(rows * rows));
    let mut halves = Shared::<[f32]>::new_slice(comptime!(2 * keys));
    let mut across = Shared::<[f32]>::new_slice(comptime!(2 * keys));

    let (d, first) = place(plan);
    let queries = rows_of(q, batch, key_head, start + first, d, plan);
    let keys_here = rows_of(k, batch, key_head, start + first, d, plan);
    let mut by_query = Array::<f32>::new(half);
    let mut by_key = Array::<f32>::new(half);
    // Each number of it is one unit's.
    let mut by_decay = Shared::<[f32]>::new_slice(comptime!(rows * keys));
    #[unroll(plan.tensor_cores)]
    for r in 0..half {
        by_query[r] = 0.0f32;
        by_key[r] = 0.0f32;
        query_rows.put(first + r, d, 0.0f32, plan);
    }

    for member in 0..group {
        let head = key_head * group + member;
        let lane = batch * value_heads + head;
        let from = (lane * chunks + chunk) * comptime!(of.len);
        let channel = Channel::load(g, batch, head, start, plan);
        sync_cube();
        for n in range_stepped(unit, comptime!(rows * rows), units) {
            d_qk[n] = over_tiles(sums, from + of.qk + n, parts, part_size);
            d_kk[n] = over_tiles(sums, from + of.kk + n, parts, part_size);
        }
        let mut total = 0.0f32;
        #[unroll(plan.tensor_cores)]
        for r in 0..half {
            total += channel.g[r];
        }
        halves[unit] = total;
        sync_cube();

        // By way of `q exp(G)` and `k exp(G)`: each has the decays up to its row.
        let mut sum = select(first == 0, 0.0f32, halves[d]);
        #[unroll(plan.tensor_cores)]
        for r in 0..half {
            let at = from + (first + r) * keys + d;
            sum += channel.g[r];
            let factor = decay(sum);
            let x = factor * over_tiles(sums, at + of.q, parts, part_size);
            let y = factor * over_tiles(sums, at + of.k, parts, part_size);
            by_query[r] += x;
            by_key[r] += y;
            of_query[(first + r) * stride + d] = x * queries[r] + y * keys_here[r];
        }
        let mut later = over_tiles(sums, from + of.decay + d, parts, part_size);
        let whole = later;
        #[unroll(plan.tensor_cores)]
        for n in 0..half {
            let r = half - 1 - n;
            later += of_query[(first + r) * stride + d];
            by_decay[(first + r) * keys + d] = later;
        }
        // By way of `k exp(G_C - G)`: the decays after its row.
        sum = select(first == 0, halves[keys + d], 0.0f32);
        #[unroll(plan.tensor_cores)]
        for n in 0..half {
            let r = half - 1 - n;
            let x = decay(sum) * over_tiles(sums, from + of.k_to_end + (first + r) * keys + d, parts, part_size);
            by_key[r] += x;
            of_query[(first + r) * stride + d] = x * keys_here[r];
            sum += channel.g[r];
        }
        let mut earlier = 0.0f32;
        #[unroll(plan.tensor_cores)]
        for r in 0..half {
            by_decay[(first + r) * keys + d] += earlier;
            earlier += of_query[(first + r) * stride + d];
        }
        across[unit] = select(first == 0, earlier, later - whole);
        sync_cube();
        let from_other_half = across[(unit + keys) % comptime!(2 * keys)];
        #[unroll(plan.tensor_cores)]
        for r in 0..half {
            let on_diagonal = d_qk[(first + r) * rows + first + r];
            by_decay[(first + r) * keys + d] += from_other_half;
            by_query[r] += on_diagonal * keys_here[r];
            by_key[r] += on_diagonal * queries[r];
        }

        for level in 0..comptime!(rows.ilog2() as usize) {
            level_rows(&queries, &keys_here, &channel, &mut query_rows, &mut key_rows, level, plan);
            for n in range_stepped(unit, comptime!(rows * rows), units) {
                let (i, j) = (n / rows, n % rows);
                let belongs = (j >> level) & 1 == 0 && i >> level == (j >> level) + 1;
                qk.put(i, j, select(belongs, d_qk[n], 0.0f32), plan);
                kk.put(i, j, select(belongs, d_kk[n], 0.0f32), plan);
            }
            sync_cube();
            let tiles = comptime!((rows / TILE, plan.key_tiles, rows / TILE));
            let lower = comptime!(Layout::PLAIN.lower());
            let transposed = comptime!(Layout::PLAIN.lower().left_transposed().added());
            product(&qk, &key_rows, &mut of_query, stride, tiles, lower, plan);
            product(&kk, &key_rows, &mut of_key, stride, tiles, lower, plan);
            sync_cube();
            product(&qk, &query_rows, &mut of_key, stride, tiles, transposed, plan);
            sync_cube();
            product(&kk, &key_rows, &mut of_key, stride, tiles, transposed, plan);
            sync_cube();

            let size = 1usize << level;
            let mut sum = 0.0f32;
            #[unroll(plan.tensor_cores)]
            for n in 0..half {
                let r = half - 1 - n;
                let row = first + r;
                sum = select((row + 1) & (size - 1) == 0, 0.0f32, sum);
                if (row >> level) & 1 == 0 {
                    let x = of_key[row * stride + d] * decay(sum);
                    by_key[r] += x;
                    of_query[(first + r) * stride + d] = x * keys_here[r];
                }
                sum += channel.g[r];
            }
            let mut earlier = 0.0f32;
            #[unroll(plan.tensor_cores)]
            for r in 0..half {
                let row = first + r;
                let begins = row & (size - 1) == 0;
                sum = select(begins, channel.g[r], sum + channel.g[r]);
                earlier = select(begins, 0.0f32, earlier);
                if (row >> level) & 1 == 0 {
                    by_decay[(first + r) * keys + d] += earlier;
                    earlier += of_query[(first + r) * stride + d];
                } else {
                    let factor = decay(sum);
                    let x = of_query[row * stride + d] * factor;
                    let y = of_key[row * stride + d] * factor;
                    by_query[r] += x;
                    by_key[r] += y;
                    of_query[(first + r) * stride + d] = x * queries[r] + y * keys_here[r];
                }
            }
            let mut later = 0.0f32;
            #[unroll(plan.tensor_cores)]
            for n in 0..half {
                let r = half - 1 - n;
                let row = first + r;
                later = select(
                    (row + 1) & (size - 1) == 0,
                    of_query[(first + r) * stride + d],
                    later + of_query[(first + r) * stride + d],
                );
                if (row >> level) & 1 == 1 {
                    by_decay[(first + r) * keys + d] += later;
                }
            }
            sync_cube();
        }

        #[comptime]
        match &mut d_g {
            ComptimeOption::Some(d_g) => {
                for r in first..first + half {
                    if start + r < time && d < d_g.shape(3) {
                        write(d_g, batch, start + r, head, d, by_decay[r * keys + d]);
                    }
                }
            }
            ComptimeOption::None => {}
        }
        #[comptime]
        match &mut d_beta {
            ComptimeOption::Some(d_beta) => {
                for t in range_stepped(unit, rows, units) {
                    if start + t < time {
                        let sum = over_tiles(sums, from + of.beta + t, parts, part_size);
                        write_beta(d_beta, batch, start + t, head, sum);
                    }
                }
            }
            ComptimeOption::None => {}
        }
    }
    #[comptime]
    match &mut d_q {
        ComptimeOption::Some(d_q) => write_rows(&by_query, d_q, batch, start + first, key_head, d, plan),
        ComptimeOption::None => {}
    }
    #[comptime]
    match &mut d_k {
        ComptimeOption::Some(d_k) => write_rows(&by_key, d_k, batch, start + first, key_head, d, plan),
        ComptimeOption::None => {}
    }
}

#[cube]
fn write_rows<X: Float>(
    rows: &Array<f32>,
    to: &mut Tensor<X>,
    batch: usize,
    start: usize,
    head: usize,
    d: usize,
    #[comptime] plan: ChunkPlan,
) {
    #[unroll(plan.tensor_cores)]
    for r in 0..comptime!(plan.half()) {
        if start + r < to.shape(1) && d < to.shape(3) {
            write(to, batch, start + r, head, d, rows[r]);
        }
    }
}
