//! From what the scan leaves of a chunk to the gradients of its inputs.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::super::decay::decay;
use super::super::element::{over_tiles, read, write, write_beta};
use super::{ROWS, SCORE_SUMS, SUMS};

/// One cube per chunk of a query and key head, one unit per key channel.
#[cube(launch, address_type = "dynamic")]
pub(in super::super) fn inputs_kernel<X: Float, G: Float, B: Float>(
    q: &Tensor<X>,
    k: &Tensor<X>,
    g: &Tensor<G>,
    sums: &Tensor<f32>,
    mut d_q: ComptimeOption<OwnedTensor<X>>,
    mut d_k: ComptimeOption<OwnedTensor<X>>,
    mut d_g: ComptimeOption<OwnedTensor<G>>,
    mut d_beta: ComptimeOption<OwnedTensor<B>>,
    #[comptime] key_dim: usize,
    #[define(X, G, B)] _dtypes: [ElemType; 3],
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
            queries[t] = read(q, batch, start + t, key_head, d);
            keys[t] = read(k, batch, start + t, key_head, d);
        }
    }

    let mut d_scores = Shared::<[f32]>::new_slice(SCORE_SUMS);
    let mut log_decays = Array::<f32>::new(ROWS);
    let mut by_decay = Array::<f32>::new(ROWS);
    for member in 0..group {
        let head = key_head * group + member;
        let lane = batch * value_heads + head;
        let from = (lane * chunks + chunk) * sums_chunk;
        let tile_size = lanes * chunks * sums_chunk;
        sync_cube();
        for i in range_stepped(d, SCORE_SUMS, key_dim) {
            d_scores[i] = over_tiles(sums, from + comptime!(SUMS * key_dim) + i, tiles, tile_size);
        }
        let of_channel = from + d;
        let whole = over_tiles(sums, of_channel + comptime!(3 * ROWS * key_dim), tiles, tile_size);
        #[unroll]
        for t in 0..ROWS {
            log_decays[t] = 0.0f32;
            by_decay[t] = whole;
            if start + t < time {
                log_decays[t] = read(g, batch, start + t, head, d);
            }
        }
        sync_cube();

        // By way of `q exp(G)` and `k exp(G)`.
        let mut before = 0.0f32;
        #[unroll]
        for t in 0..ROWS {
            before += log_decays[t];
            let from_start = decay(before);
            let of_query = over_tiles(sums, of_channel + comptime!(t * key_dim), tiles, tile_size) * from_start;
            let of_key = over_tiles(sums, of_channel + comptime!((ROWS + t) * key_dim), tiles, tile_size) * from_start;
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
            let of_key =
                over_tiles(sums, of_channel + comptime!((2 * ROWS + t) * key_dim), tiles, tile_size) * decay(after);
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
                        write(d_g, batch, start + t, head, d, by_decay[t]);
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
                        write_beta(d_beta, batch, start + t, head, d_scores[comptime!(2 * ROWS * ROWS) + t]);
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
fn write_rows<X: Float>(rows: &Array<f32>, to: &mut Tensor<X>, batch: usize, start: usize, head: usize, d: usize) {
    #[unroll]
    for t in 0..ROWS {
        if start + t < to.shape(1) {
            write(to, batch, start + t, head, d, rows[t]);
        }
    }
}
