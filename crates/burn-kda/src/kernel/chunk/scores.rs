//! Scores and inverse of every chunk.
//!
//! The segment tree of the plain algorithm: at level `s` a pair of rows in neighbouring blocks of `s` rows has the decay
//! from the left row to the border and from there to the right row, each a sum of `g` over one block. A level is one
//! product of whole operands, of which the pairs of that level are taken.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::channel::{Channel, decay, rows_of};
use super::operand::{ALIGNMENT, Layout, Operand, TILE, plane, tile_product};
use crate::kernel::element::beta_of;
use crate::kernel::plan::ChunkPlan;

#[cube(launch, address_type = "dynamic")]
pub(in crate::kernel) fn chunk_scores_kernel<X: Float, G: Float, B: Float, E: Float>(
    q: &Tensor<X>,
    k: &Tensor<X>,
    g: &Tensor<G>,
    beta: &Tensor<B>,
    scores: &mut Tensor<f32>,
    #[comptime] with_kk: bool,
    #[comptime] plan: ChunkPlan,
    #[define(X, G, B, E)] _dtypes: [ElemType; 4],
) {
    let (time, value_heads, chunks) = (g.shape(1), g.shape(2), scores.shape(1));
    let (lane, chunk) = (CUBE_POS / chunks, CUBE_POS % chunks);
    if lane >= scores.shape(0) {
        terminate!();
    }
    let (batch, head) = (lane / value_heads, lane % value_heads);
    let key_head = head / (value_heads / q.shape(2));
    let start = chunk * plan.rows;
    let unit = UNIT_POS as usize;
    let units = comptime!(plan.units());
    let rows = comptime!(plan.rows);

    let mut betas = Shared::<[f32]>::new_slice(rows);
    for i in range_stepped(unit, rows, units) {
        betas[i] = 0.0f32;
        if start + i < time {
            betas[i] = beta_of(beta, batch, start + i, head);
        }
    }

    let channel = Channel::load(g, batch, head, start, plan);
    let queries = rows_of(q, batch, key_head, start + channel.first, channel.d, plan);
    let keys = rows_of(k, batch, key_head, start + channel.first, channel.d, plan);
    let mut query_rows = Operand::<E>::new(rows, comptime!(plan.keys()), plan);
    let mut key_rows = Operand::<E>::new(rows, comptime!(plan.keys()), plan);
    let stride = comptime!(plan.sum_stride(rows));
    let mut a_qk = Shared::<[f32]>::new_aligned_slice(comptime!(rows * stride), ALIGNMENT);
    let mut a_kk = Shared::<[f32]>::new_aligned_slice(comptime!(rows * stride), ALIGNMENT);
    // Tiles on the diagonal, of which a level has some pairs only.
    let mut qk_tiles = Shared::<[f32]>::new_aligned_slice(comptime!(rows * TILE), ALIGNMENT);
    let mut kk_tiles = Shared::<[f32]>::new_aligned_slice(comptime!(rows * TILE), ALIGNMENT);

    // The diagonal of `A_qk`.
    #[unroll(plan.tensor_cores)]
    for r in 0..comptime!(plan.half()) {
        query_rows.put(channel.first + r, channel.d, queries[r], plan);
        key_rows.put(channel.first + r, channel.d, keys[r], plan);
    }
    sync_cube();
    for i in range_stepped(plane(plan), comptime!(rows / TILE), comptime!(plan.planes())) {
        pairs(&query_rows, &key_rows, (i, i), &mut qk_tiles, i * comptime!(TILE * TILE), TILE, plan);
    }
    sync_cube();
    for i in range_stepped(unit, rows, units) {
        a_qk[i * stride + i] = qk_tiles[i * TILE + i % TILE];
    }

    for level in 0..comptime!(rows.ilog2() as usize) {
        let size = 1usize << level;
        level_rows(&queries, &keys, &channel, &mut query_rows, &mut key_rows, level, plan);
        sync_cube();
        if size >= TILE {
            let tiles = size / TILE;
            for n in range_stepped(plane(plan), rows / (2 * size) * tiles * tiles, comptime!(plan.planes())) {
                let (pair, tile) = (n / (tiles * tiles), n % (tiles * tiles));
                let i = (2 * pair + 1) * tiles + tile / tiles;
                let j = 2 * pair * tiles + tile % tiles;
                let place = i * comptime!(TILE * stride) + j * TILE;
                pairs(&query_rows, &key_rows, (i, j), &mut a_qk, place, stride, plan);
                pairs(&key_rows, &key_rows, (i, j), &mut a_kk, place, stride, plan);
            }
        } else {
            for i in range_stepped(plane(plan), comptime!(rows / TILE), comptime!(plan.planes())) {
                let place = i * comptime!(TILE * TILE);
                pairs(&query_rows, &key_rows, (i, i), &mut qk_tiles, place, TILE, plan);
                pairs(&key_rows, &key_rows, (i, i), &mut kk_tiles, place, TILE, plan);
            }
            sync_cube();
            for n in range_stepped(unit, comptime!(rows * TILE), units) {
                let (i, j) = (n / TILE, n / comptime!(TILE * TILE) * TILE + n % TILE);
                if (j >> level) & 1 == 0 && i >> level == (j >> level) + 1 {
                    a_qk[i * stride + j] = qk_tiles[n];
                    a_kk[i * stride + j] = kk_tiles[n];
                }
            }
        }
        sync_cube();
    }

    let place = (lane * chunks + chunk) * comptime!(plan.matrices(with_kk) * rows * rows);
    for n in range_stepped(unit, comptime!(rows * rows), units) {
        let (i, j) = (n / rows, n % rows);
        scores[place + n] = select(j <= i, a_qk[i * stride + j], 0.0f32);
        if comptime!(with_kk) {
            scores[place + comptime!(2 * rows * rows) + n] = select(j < i, a_kk[i * stride + j], 0.0f32);
        }
    }
    invert(&mut a_kk, &betas, stride, plan);
    for n in range_stepped(unit, comptime!(rows * rows), units) {
        let (i, j) = (n / rows, n % rows);
        scores[place + comptime!(rows * rows) + n] = select(j <= i, a_kk[i * stride + j], 0.0f32);
    }
}

/// The scores of a tile, in whatever decays the rows have.
#[cube]
fn pairs<E: Float>(
    left: &Operand<E>,
    right: &Operand<E>,
    tile: (usize, usize),
    out: &mut [f32],
    place: usize,
    #[comptime] stride: usize,
    #[comptime] plan: ChunkPlan,
) {
    let inner = (0usize.runtime(), plan.key_tiles.runtime());
    tile_product(left, right, tile, inner, out, place, stride, comptime!(Layout::PLAIN.right_transposed()), plan);
}

/// The rows of one channel in the decays of a level: right rows as they read, left keys as they are read.
#[cube]
pub(super) fn level_rows<E: Float>(
    queries: &Array<f32>,
    keys: &Array<f32>,
    channel: &Channel,
    query_rows: &mut Operand<E>,
    key_rows: &mut Operand<E>,
    level: usize,
    #[comptime] plan: ChunkPlan,
) {
    let half = comptime!(plan.half());
    let size = 1usize << level;
    let mut sum = 0.0f32;
    #[unroll(plan.tensor_cores)]
    for r in 0..half {
        let row = channel.first + r;
        sum = select(row & (size - 1) == 0, channel.g[r], sum + channel.g[r]);
        if (row >> level) & 1 == 1 {
            let factor = decay(sum);
            query_rows.put(row, channel.d, queries[r] * factor, plan);
            key_rows.put(row, channel.d, keys[r] * factor, plan);
        }
    }
    sum = 0.0f32;
    #[unroll(plan.tensor_cores)]
    for n in 0..half {
        let r = half - 1 - n;
        let row = channel.first + r;
        sum = select((row + 1) & (size - 1) == 0, 0.0f32, sum);
        if (row >> level) & 1 == 0 {
            key_rows.put(row, channel.d, keys[r] * decay(sum), plan);
        }
        sum += channel.g[r];
    }
}

/// `A_kk` becomes `(I + diag(beta) A_kk)^-1`, in its lower triangle: forward substitution in f32, blocks of 16 rows.
#[cube]
fn invert(a: &mut Shared<[f32]>, betas: &Shared<[f32]>, #[comptime] stride: usize, #[comptime] plan: ChunkPlan) {
    let rows = comptime!(plan.rows);
    let unit = UNIT_POS as usize;
    let units = comptime!(plan.units());
    sync_cube();

    // The blocks on the diagonal, one unit per column.
    let (block, column) = (unit / TILE * TILE, unit % TILE);
    let mut x = Array::<f32>::new(TILE);
    if unit < rows {
        #[unroll(plan.tensor_cores)]
        for r in 0..TILE {
            let mut sum = 0.0f32;
            #[unroll(plan.tensor_cores)]
            for s in 0..r {
                sum += a[(block + r) * stride + block + s] * x[s];
            }
            x[r] = select(r == column, 1.0f32, 0.0f32) - betas[block + r] * sum;
        }
    }
    sync_cube();
    if unit < rows {
        #[unroll(plan.tensor_cores)]
        for r in 0..TILE {
            a[(block + r) * stride + block + column] = x[r];
        }
    }

    let mut work = Shared::<[f32]>::new_slice(comptime!(TILE * (rows - TILE) + 1));
    for block in 1..comptime!(rows / TILE) {
        let left = block * TILE;
        sync_cube();
        for n in range_stepped(unit, TILE * left, units) {
            let (r, c) = (n / left, n % left);
            let mut sum = 0.0f32;
            for s in c / TILE * TILE..left {
                sum += a[(left + r) * stride + s] * a[s * stride + c];
            }
            work[n] = betas[left + r] * sum;
        }
        sync_cube();
        for n in range_stepped(unit, TILE * left, units) {
            let (r, c) = (n / left, n % left);
            let mut sum = 0.0f32;
            for m in 0..r + 1 {
                sum -= a[(left + r) * stride + left + m] * work[m * left + c];
            }
            a[(left + r) * stride + c] = sum;
        }
    }
    sync_cube();
}
