//! The chunked WY form on plain tensors, exact for every decay.
//!
//! Within a chunk the scores need `exp(G_i - G_j)` for `i >= j`, with `G` the cumulative log decay. Neither factor
//! `exp(G_i)` nor `exp(-G_j)` is usable on its own: the second overflows. On a binary tree of blocks the factor
//! splits at the border between two neighbours, `exp(sum of g from the border to i) * exp(sum of g after j up to
//! the border)`: both exponents are sums over one block, both are `<= 0`, nothing is subtracted. Each level is one
//! batched product, and the inverse of `I + A` merges on the same tree.

use burn::tensor::Tensor;

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
    problem::run("chunk_kda", input, options, padded_len, move |input, state, scale| {
        forward(input, state, scale, max)
    })
}

/// A sequence shorter than a chunk gets a smaller one.
fn chunk_rows(len: usize, max: usize) -> usize {
    max.min(len.next_power_of_two())
}

/// Elements of one working tensor that keep the tree's passes in cache.
const SEGMENT_ELEMENTS: usize = 1 << 18;

/// Runs segments of whole chunks in turn, so that the working set does not grow with `T`.
fn forward(input: KdaInput, mut state: Option<Tensor<4>>, scale: f64, max_chunk: usize) -> KdaOutput {
    let Dims { batch, time, value_heads, key_dim, value_dim, .. } = input.dims();
    let rows = chunk_rows(time, max_chunk);
    let chunk_elements = batch * value_heads * rows * key_dim.max(value_dim);
    let segment = rows * (SEGMENT_ELEMENTS / chunk_elements).max(1);

    let mut outputs = Vec::with_capacity(time.div_ceil(segment));
    for start in (0..time).step_by(segment) {
        let end = time.min(start + segment);
        let output = forward_segment(input.slice_time(start, end), state, scale, rows);
        outputs.push(output.o);
        state = Some(output.final_state);
    }
    KdaOutput { o: Tensor::cat(outputs, 1), final_state: state.expect("T >= 1") }
}

fn forward_segment(input: KdaInput, state: Option<Tensor<4>>, scale: f64, rows: usize) -> KdaOutput {
    let Dims { batch, time, heads, value_heads, key_dim, value_dim } = input.dims();
    let input = input.pad_time(time.next_multiple_of(rows));
    let group = value_heads / heads;
    let chunks = time.div_ceil(rows);
    let lanes = batch * value_heads;

    let v = chunked(input.v, rows, 1);
    let beta = chunked(input.beta.unsqueeze_dim(3), rows, 1);
    let intra = Intra::new(chunked(input.q, rows, group), chunked(input.k, rows, group), chunked(input.g, rows, 1), beta);

    let mut state = state.map(|state| state.reshape([lanes, key_dim, value_dim]));
    let mut outputs = Vec::with_capacity(chunks);
    for n in 0..chunks {
        let at = |x: &Tensor<3>| x.clone().slice_dim(0, n * lanes..(n + 1) * lanes);
        let value = at(&v);
        // Without a state there is nothing to read or to erase, and the first decay has no effect at all.
        let (read, error) = match &state {
            Some(state) => (
                Some(at(&intra.q_from_start).matmul(state.clone())),
                value - at(&intra.k_from_start).matmul(state.clone()),
            ),
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
    let o = Tensor::cat(outputs, 0)
        .reshape([chunks, batch, value_heads, rows, value_dim])
        .permute([1, 0, 3, 2, 4])
        .reshape([batch, chunks * rows, value_heads, value_dim])
        .slice_dim(1, 0..time);
    KdaOutput {
        o: o * scale,
        final_state: state.expect("at least one chunk").reshape([batch, value_heads, key_dim, value_dim]),
    }
}

/// `[B, T, H, D]` to `[N * B * H * group, C, D]`: chunk-major, so that one chunk of all heads is one slice.
fn chunked(x: Tensor<4>, rows: usize, group: usize) -> Tensor<3> {
    let [batch, time, heads, dim] = x.dims();
    let blocks = time / rows * batch * heads;
    let x = x
        .reshape([batch, time / rows, rows, heads, dim])
        .permute([1, 0, 3, 2, 4])
        .reshape([blocks, rows, dim]);
    match group {
        1 => x,
        _ => x
            .unsqueeze_dim::<4>(1)
            .expand([blocks, group, rows, dim])
            .reshape([blocks * group, rows, dim]),
    }
}

/// What a chunk knows before it sees a state. `G` is the inclusive cumulative sum of `g` within the chunk.
struct Intra {
    /// `A_qk[i, j] = sum_d q_i k_j exp(G_i - G_j)`, `i >= j`: `[M, C, C]`.
    scores: Tensor<3>,
    /// `(I + A_kk)^-1 diag(beta)`: from prediction errors to writes, `[M, C, C]`.
    write: Tensor<3>,
    /// `q exp(G)`: `[M, C, K]`.
    q_from_start: Tensor<3>,
    /// `k exp(G)`: `[M, C, K]`.
    k_from_start: Tensor<3>,
    /// `k exp(G_C - G)`: `[M, C, K]`.
    k_to_end: Tensor<3>,
    /// `exp(G_C)`: `[M, K, 1]`.
    decay: Tensor<3>,
}

impl Intra {
    /// `q`, `k`, `g`: `[M, C, K]`; `beta`: `[M, C, 1]`.
    fn new(q: Tensor<3>, k: Tensor<3>, g: Tensor<3>, beta: Tensor<3>) -> Self {
        let [m, c, dim] = q.dims();
        let mut scores = (q.clone() * k.clone()).sum_dim(2).reshape([m * c, 1, 1]);
        let mut inverse = Tensor::ones([m * c, 1, 1], (&q.device(), q.dtype()));
        let mut decay = g.clone().exp();
        let mut log_decay = g;
        let mut q_from_start = q * decay.clone();
        let mut k_from_start = k.clone() * decay.clone();
        let mut k_to_end = k;

        let mut size = 1;
        while size < c {
            let pairs = m * c / (2 * size);
            let left = |x: Tensor<3>, width| x.reshape([pairs, 2 * size, width]).slice_dim(1, 0..size);
            let right = |x: Tensor<3>, width| x.reshape([pairs, 2 * size, width]).slice_dim(1, size..2 * size);

            let k_left = left(k_to_end.clone(), dim).swap_dims(1, 2);
            let a_qk = right(q_from_start.clone(), dim).matmul(k_left.clone());
            let a_kk = right(k_from_start.clone(), dim).matmul(k_left) * right(beta.clone(), 1);
            scores = merge(scores, a_qk);
            inverse = merge_inverse(inverse, a_kk);

            // Carry every row to the borders of the doubled block.
            let [decay_left, decay_right] = halves(decay, pairs);
            let one = decay_left.ones_like();
            let interleave = |even: Tensor<3>, odd: Tensor<3>| Tensor::cat(vec![even, odd], 1).reshape([2 * pairs, 1, dim]);
            let from_left = interleave(one.clone(), decay_left);
            let to_right = interleave(decay_right, one);
            let scale_blocks = |x: Tensor<3>, by: Tensor<3>| x.reshape([2 * pairs, size, dim]) * by;
            q_from_start = scale_blocks(q_from_start, from_left.clone());
            k_from_start = scale_blocks(k_from_start, from_left);
            k_to_end = scale_blocks(k_to_end, to_right);

            // The decay of a block is the exponential of a fresh sum, so its rounding does not grow with the block.
            let [g_left, g_right] = halves(log_decay, pairs);
            log_decay = g_left + g_right;
            decay = log_decay.clone().exp();
            size *= 2;
        }
        let whole = |x: Tensor<3>| x.reshape([m, c, dim]);
        Self {
            scores,
            write: inverse * beta.swap_dims(1, 2),
            q_from_start: whole(q_from_start),
            k_from_start: whole(k_from_start),
            k_to_end: whole(k_to_end),
            decay: decay.reshape([m, dim, 1]),
        }
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
