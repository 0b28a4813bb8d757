//! The chunked WY form on plain tensors, exact for every decay.
//!
//! Within a chunk the scores need `exp(G_i - G_j)` for `i >= j`, with `G` the cumulative log decay. Neither factor
//! `exp(G_i)` nor `exp(-G_j)` is usable on its own: the second overflows. On a binary tree of blocks the factor
//! splits at the border between two neighbours, `exp(sum of g from the border to i) * exp(sum of g after j up to
//! the border)`: both exponents are sums over one block, both are `<= 0`, nothing is subtracted. Each level is one
//! batched product, and the inverse of `I + A` merges on the same tree.

use std::ops::Range;

use burn::tensor::{Device, Tensor};

use super::problem::{self, Dims, KdaInput, KdaOptions, KdaOutput};

/// The operator in chunks: the form to train and prefill with (Kimi Linear, section 3; FLA's `chunk_kda`).
///
/// Takes any `T >= 0`. No decay is too strong for it: `g` may be `-inf`. Differentiable in all inputs.
///
/// # Shapes
///
/// As [`KdaInput`], [`KdaOptions`] and [`KdaOutput`] say. Arithmetic and states are f32, or f64 for f64 input.
///
/// # Panics
///
/// If a shape, a dtype or an option does not fit; the message names the argument.
pub fn chunk_kda(input: KdaInput, options: KdaOptions) -> KdaOutput {
    let max = options.chunk_size;
    let padded_len = move |len: usize| len.next_multiple_of(chunk_rows(len, max));
    problem::run("chunk_kda", input, options, padded_len, move |input, state, scale| forward(input, state, scale, max))
}

/// A sequence shorter than a chunk gets a smaller one.
fn chunk_rows(len: usize, max: usize) -> usize {
    max.min(len.next_power_of_two())
}

/// Runs tiles of some batch rows, some heads and whole chunks in turn, so that the working tensors stay in cache and
/// do not grow with `T`. Rows and heads never meet; chunks hand on the state.
fn forward(input: KdaInput, state: Option<Tensor<4>>, scale: f64, max_chunk: usize) -> KdaOutput {
    let Dims { batch, time, heads, value_heads, key_dim, value_dim } = input.dims();
    let chunk = chunk_rows(time, max_chunk);
    let per_head = value_heads / heads * chunk * key_dim.max(value_dim);
    let budget = tile_elements(&input.q.device());
    let tile = |elements: usize, most: usize| (budget / elements).clamp(1, most);
    let head_tile = tile(per_head, heads);
    let row_tile = tile(per_head * heads, batch);
    let segment = chunk * tile(per_head * head_tile * row_tile, time.div_ceil(chunk));

    let outputs = tiled(batch, row_tile, |rows| {
        let outputs = tiled(heads, head_tile, |heads| {
            let group = value_heads / input.dims().heads;
            let value_heads = heads.start * group..heads.end * group;
            let mut state = state.clone().map(|state| state.slice([rows.clone(), value_heads.clone()]));
            let input = input.slice_lanes(rows.clone(), heads, value_heads);
            let outputs = tiled(time, segment, |span| {
                let input = input.slice_time(span.start, span.end);
                let output = forward_segment(input, state.take(), scale, chunk);
                state = Some(output.final_state);
                output.o
            });
            KdaOutput { o: Tensor::cat(outputs, 1), final_state: state.take().expect("T >= 1") }
        });
        KdaOutput::cat(outputs, 2, 1)
    });
    KdaOutput::cat(outputs, 0, 0)
}

/// Working tensors that small are read back from the cache of one CPU core; an accelerator wants large launches.
fn tile_elements(device: &Device) -> usize {
    let name = format!("{device:?}");
    if name.contains("NdArray") || name.contains("Flex") { 1 << 15 } else { 1 << 22 }
}

/// Runs `f` over `0..len` in ranges of `tile`.
fn tiled<T>(len: usize, tile: usize, mut f: impl FnMut(Range<usize>) -> T) -> Vec<T> {
    (0..len).step_by(tile).map(|start| f(start..len.min(start + tile))).collect()
}

fn forward_segment(input: KdaInput, state: Option<Tensor<4>>, scale: f64, chunk: usize) -> KdaOutput {
    let Dims { batch, time, heads, value_heads, key_dim, value_dim } = input.dims();
    let input = input.pad_time(time.next_multiple_of(chunk));
    let chunks = time.div_ceil(chunk);
    let lanes = batch * value_heads;

    let group = value_heads / heads;
    let [q, k] = [input.q, input.k].map(|x| chunked(x, chunk, group));
    let [v, g, beta] = [input.v, input.g, input.beta.unsqueeze_dim(3)].map(|x| chunked(x, chunk, 1));
    let intra = Intra::new(Tensor::stack(vec![q, k], 0), g, beta);

    let mut state = state.map(|state| state.reshape([lanes, key_dim, value_dim]));
    let mut outputs = Vec::with_capacity(chunks);
    for n in 0..chunks {
        let of_chunk = n * lanes..(n + 1) * lanes;
        let at = |x: &Tensor<3>| x.clone().slice_dim(0, of_chunk.clone());
        let value = at(&v);
        // Without a state there is nothing to read or to erase, and the first decay has no effect at all.
        let (read, error) = match &state {
            Some(state) => {
                let from_start = intra.qk_from_start.clone().slice_dim(1, of_chunk.clone());
                let [read, predicted] = unstack(from_start.matmul(state.clone().unsqueeze_dim(0)));
                (Some(read), value - predicted)
            }
            None => (None, value),
        };
        let write = at(&intra.write).matmul(error);
        let o = at(&intra.scores).matmul(write.clone());
        outputs.push(match read {
            Some(read) => o + read,
            None => o,
        });
        let written = at(&intra.k_to_end).swap_dims(1, 2).matmul(write);
        state = Some(match state {
            Some(state) => state * at(&intra.decay) + written,
            None => written,
        });
    }
    let o = Tensor::cat(outputs, 0).reshape([chunks, batch, value_heads, chunk, value_dim]);
    let o = materialize(o.permute([1, 0, 3, 2, 4]), [batch, chunks * chunk, value_heads, value_dim]);
    KdaOutput {
        o: o.slice_dim(1, 0..time) * scale,
        final_state: state.expect("at least one chunk").reshape([batch, value_heads, key_dim, value_dim]),
    }
}

/// `[B, T, H, D]` to `[N * B * H * group, C, D]`: chunk-major, so that one chunk of all heads is one slice.
fn chunked(x: Tensor<4>, chunk: usize, group: usize) -> Tensor<3> {
    let [batch, time, heads, dim] = x.dims();
    let blocks = time / chunk * batch * heads;
    let x = x.reshape([batch, time / chunk, chunk, heads, dim]).permute([1, 0, 3, 2, 4]);
    let x = materialize(x, [blocks, chunk, dim]);
    match group {
        1 => x,
        _ => x.unsqueeze_dim::<4>(1).expand([blocks, group, chunk, dim]).reshape([blocks * group, chunk, dim]),
    }
}

/// Reshapes a permuted tensor. The sum lays it out row by row; `reshape` alone would copy element by element on
/// NdArray and Flex, five times slower.
fn materialize<const D: usize, const D2: usize>(x: Tensor<D>, shape: [usize; D2]) -> Tensor<D2> {
    let zero = Tensor::zeros([1; D], (&x.device(), x.dtype()));
    (x + zero).reshape(shape)
}

/// The two halves of a stacked pair.
fn unstack(x: Tensor<4>) -> [Tensor<3>; 2] {
    [x.clone().slice_dim(0, 0..1).squeeze_dim(0), x.slice_dim(0, 1..2).squeeze_dim(0)]
}

/// What a chunk knows before it sees a state. `G` is the inclusive cumulative sum of `g` within the chunk.
struct Intra {
    /// `A_qk[i, j] = sum_d q_i k_j exp(G_i - G_j)`, `i >= j`: `[M, C, C]`.
    scores: Tensor<3>,
    /// `(I + A_kk)^-1 diag(beta)`: from prediction errors to writes, `[M, C, C]`.
    write: Tensor<3>,
    /// `q exp(G)` and `k exp(G)`: `[2, M, C, K]`.
    qk_from_start: Tensor<4>,
    /// `k exp(G_C - G)`: `[M, C, K]`.
    k_to_end: Tensor<3>,
    /// `exp(G_C)`: `[M, K, 1]`.
    decay: Tensor<3>,
}

impl Intra {
    /// `qk`: `[2, M, C, K]`; `g`: `[M, C, K]`; `beta`: `[M, C, 1]`.
    fn new(qk: Tensor<4>, g: Tensor<3>, beta: Tensor<3>) -> Self {
        let [_, m, c, dim] = qk.dims();
        let options = (&qk.device(), qk.dtype());
        let even = Tensor::<1>::from_data([1.0, 0.0], options.clone()).reshape([1, 2, 1]);
        let odd = Tensor::<1>::from_data([0.0, 1.0], options.clone()).reshape([1, 2, 1]);

        let [q, k] = unstack(qk.clone());
        let mut scores = (q * k.clone()).sum_dim(2).reshape([m * c, 1, 1]);
        let mut inverse = Tensor::ones([m * c, 1, 1], options);
        let mut decay = g.clone().exp();
        let mut log_decay = g;
        let mut from_start = qk * decay.clone().unsqueeze_dim(0);
        let mut k_to_end = k;

        let mut size = 1;
        while size < c {
            let pairs = m * c / (2 * size);
            let right_rows = from_start.clone().reshape([2, pairs, 2 * size, dim]).slice_dim(2, size..2 * size);
            let left_keys = k_to_end.clone().reshape([1, pairs, 2 * size, dim]).slice_dim(2, 0..size);
            let [a_qk, a_kk] = unstack(scores_between(right_rows, left_keys));
            let right_beta = beta.clone().reshape([pairs, 2 * size, 1]).slice_dim(1, size..2 * size);
            scores = merge(scores, a_qk);
            inverse = merge_inverse(inverse, a_kk * right_beta);

            // Carry the right rows over the left block, and the left keys over the right one.
            let [over_left, over_right] = halves(decay, pairs);
            let rows = from_start.reshape([2, 2 * pairs, size, dim]);
            from_start = rows * (over_left * odd.clone() + even.clone()).reshape([1, 2 * pairs, 1, dim]);
            let keys = k_to_end.reshape([2 * pairs, size, dim]);
            k_to_end = keys * (over_right * even.clone() + odd.clone()).reshape([2 * pairs, 1, dim]);

            // The decay of a block is the exponential of a fresh sum, so its rounding does not grow with the block.
            let [left, right] = halves(log_decay, pairs);
            log_decay = left + right;
            decay = log_decay.clone().exp();
            size *= 2;
        }
        Self {
            scores,
            write: inverse * beta.swap_dims(1, 2),
            qk_from_start: from_start.reshape([2, m, c, dim]),
            k_to_end: k_to_end.reshape([m, c, dim]),
            decay: decay.reshape([m, dim, 1]),
        }
    }
}

/// `rows keys^T`: `[2, P, s, K]` and `[1, P, s, K]` to `[2, P, s, s]`.
fn scores_between(rows: Tensor<4>, keys: Tensor<4>) -> Tensor<4> {
    match rows.dims() {
        // A product of single rows: the call of a matrix product would cost more than the product.
        [.., 1, _] => (rows * keys).sum_dim(3),
        _ => rows.matmul(keys.swap_dims(2, 3)),
    }
}

/// Even and odd rows of `[.., K]`, each `[pairs, 1, K]`.
fn halves(x: Tensor<3>, pairs: usize) -> [Tensor<3>; 2] {
    let dim = x.dims()[2];
    let x = x.reshape([pairs, 2, dim]);
    [x.clone().slice_dim(1, 0..1), x.slice_dim(1, 1..2)]
}

/// `[[even, 0], [corner, odd]]` from the diagonal blocks `[2 * pairs, s, s]` and the corner `[pairs, s, s]`.
fn merge(diagonal: Tensor<3>, corner: Tensor<3>) -> Tensor<3> {
    let [even, odd] = diagonal_pairs(diagonal);
    let top = Tensor::cat(vec![even, corner.zeros_like()], 2);
    let bottom = Tensor::cat(vec![corner, odd], 2);
    Tensor::cat(vec![top, bottom], 1)
}

/// `[[X_L, 0], [-X_R A X_L, X_R]]`: block forward substitution. Powers of `A` would lose every digit for nearly
/// identical keys.
fn merge_inverse(inverse: Tensor<3>, a: Tensor<3>) -> Tensor<3> {
    let [even, odd] = diagonal_pairs(inverse.clone());
    let corner = match a.dims() {
        [_, 1, 1] => a.neg(),
        _ => odd.matmul(a).matmul(even).neg(),
    };
    merge(inverse, corner)
}

fn diagonal_pairs(diagonal: Tensor<3>) -> [Tensor<3>; 2] {
    let [blocks, size, _] = diagonal.dims();
    let x = diagonal.reshape([blocks / 2, 2, size, size]);
    [x.clone().slice_dim(1, 0..1).squeeze_dim(1), x.slice_dim(1, 1..2).squeeze_dim(1)]
}
