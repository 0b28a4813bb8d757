//! Scores and inverse of every chunk.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::super::decay::decay;
use super::super::element::{beta_of, read};
use super::{BLOCK, ROWS};

/// `A_qk`, `A_kk` and `(I + diag(beta) A_kk)^-1` of every chunk, `[lanes, chunks, 3, C * C]`: one unit per pair.
#[cube(launch, address_type = "dynamic")]
pub(in super::super) fn scores_kernel<X: Float, G: Float, B: Float>(
    q: &Tensor<X>,
    k: &Tensor<X>,
    g: &Tensor<G>,
    beta: &Tensor<B>,
    scores: &mut Tensor<f32>,
    #[comptime] key_dim: usize,
    #[define(X, G, B)] _dtypes: [ElemType; 3],
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
            q_rows[place] = read(q, batch, t, key_head, d);
            k_rows[place] = read(k, batch, t, key_head, d);
            g_rows[place] = read(g, batch, t, head, d);
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
