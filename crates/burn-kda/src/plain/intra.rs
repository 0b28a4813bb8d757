//! What one chunk knows before it sees a state: scores, inverse and decayed keys, on a segment tree.
//!
//! The scores need `exp(G_i - G_j)` for `i >= j`, with `G` the cumulative log decay. Neither factor `exp(G_i)` nor
//! `exp(-G_j)` is usable on its own: the second overflows. On a binary tree of blocks the factor splits at the border
//! between two neighbours, `exp(sum of g from the border to i) * exp(sum of g after j up to the border)`: both
//! exponents are sums over one block, both are `<= 0`, nothing is subtracted. Each level is one batched product, and
//! the inverse of `I + A` merges on the same tree.

use burn::tensor::Tensor;

use super::decay::Decay;
use super::forward::nth;

/// The two halves of a stacked pair.
pub(super) fn unstack<const D: usize, const D2: usize>(x: Tensor<D>) -> [Tensor<D2>; 2] {
    [x.clone().slice_dim(0, 0..1).squeeze_dim(0), x.slice_dim(0, 1..2).squeeze_dim(0)]
}

/// What the chunks of a tile know before they see a state; `M` chunks times lanes, chunk-major. `G` is the inclusive
/// cumulative sum of `g` within a chunk.
pub(super) struct Intra {
    /// `A_qk[i, j] = sum_d q_i k_j exp(G_i - G_j)`, `i >= j`, and the same of `k` for `i > j`, without `beta`:
    /// `[2, M, C, C]`.
    scores: Tensor<4>,
    /// `(I + A_kk)^-1`: from prediction errors times `beta` to writes, `[M, C, C]`.
    inverse: Tensor<3>,
    /// `[M, C, 1]`.
    beta: Tensor<3>,
    /// `q exp(G)` and `k exp(G)`: `[2, M, C, K]`.
    from_start: Tensor<4>,
    /// `k exp(G_C - G)`: `[M, C, K]`.
    k_to_end: Tensor<3>,
    /// `exp(G_C)`: `[M, K, 1]`.
    decay: Decay<3>,
}

/// One chunk of [`Intra`], `M` lanes.
pub(super) struct Chunk {
    pub scores_qk: Tensor<3>,
    pub inverse: Tensor<3>,
    pub beta: Tensor<3>,
    pub from_start: Tensor<4>,
    pub k_to_end: Tensor<3>,
    pub decay: Decay<3>,
}

impl Chunk {
    /// What queries and keys read from the state before the chunk, `[lanes, C, V]` each.
    pub fn read(&self, state: &Tensor<3>) -> [Tensor<3>; 2] {
        unstack(self.from_start.clone().matmul(state.clone().unsqueeze_dim(0)))
    }
}

/// What the backward pass of [`Intra`] needs of its forward pass.
pub(super) struct Trace {
    qk: Tensor<4>,
    decay: Tensor<3>,
    levels: Vec<Level>,
}

/// Pairs of neighbouring blocks of `size` rows, before they merge.
struct Level {
    size: usize,
    /// Queries and keys decayed from the start of their block, `[2, pairs, 2 * size, K]`.
    from_start: Tensor<4>,
    /// Keys decayed to the end of their block, `[pairs, 2 * size, K]`.
    k_to_end: Tensor<3>,
    /// The decay of the left and of the right block, `[pairs, 1, K]`.
    over: [Tensor<3>; 2],
}

/// Cotangents of what [`Intra`] computes.
pub(super) struct IntraCotangents {
    /// Of both scores; only the entries that [`Intra`] fills are read. `[2, M, C, C]`.
    pub scores: Tensor<4>,
    /// Of `q exp(G)` and `k exp(G)`, `[2, M, C, K]`.
    pub from_start: Tensor<4>,
    /// Of `k exp(G_C - G)`, `[M, C, K]`.
    pub k_to_end: Tensor<3>,
    /// Of `G_C` by way of the state's decay, `[M, 1, K]`.
    pub log_decay: Tensor<3>,
}

impl Intra {
    /// `qk`: `[2, M, C, K]`; `g`: `[M, C, K]`; `beta`: `[M, C, 1]`.
    pub fn new(qk: Tensor<4>, g: Tensor<3>, beta: Tensor<3>) -> Self {
        Self::build(qk, g, beta, |_| ())
    }

    /// With what [`Trace::backward`] needs.
    pub fn traced(qk: Tensor<4>, g: Tensor<3>, beta: Tensor<3>) -> (Self, Trace) {
        let mut levels = Vec::new();
        let intra = Self::build(qk.clone(), g.clone(), beta, |level| levels.push(level));
        (intra, Trace { qk, decay: g.exp(), levels })
    }

    fn build(qk: Tensor<4>, g: Tensor<3>, beta: Tensor<3>, mut trace: impl FnMut(Level)) -> Self {
        let [_, m, c, dim] = qk.dims();
        let options = (&qk.device(), qk.dtype());
        let even = Tensor::<1>::from_data([1.0, 0.0], options).reshape([1, 2, 1]);
        let odd = Tensor::<1>::from_data([0.0, 1.0], options).reshape([1, 2, 1]);

        let [q, k] = unstack(qk.clone());
        let diagonal = row_sums(q * k.clone()).reshape([1, m * c, 1, 1]);
        let mut scores = Tensor::cat(vec![diagonal.clone(), diagonal.zeros_like()], 0);
        let mut inverse = Tensor::ones([1, m * c, 1, 1], options);
        let mut decay = g.clone().exp();
        let mut log_decay = g;
        let mut from_start = qk * decay.clone().unsqueeze_dim(0);
        let mut k_to_end = k;

        let mut size = 1;
        while size < c {
            let pairs = m * c / (2 * size);
            let over = halves(decay, pairs);
            trace(Level {
                size,
                from_start: from_start.clone().reshape([2, pairs, 2 * size, dim]),
                k_to_end: k_to_end.clone().reshape([pairs, 2 * size, dim]),
                over: over.clone(),
            });
            let [over_left, over_right] = over;
            let right_rows = from_start.clone().reshape([2, pairs, 2 * size, dim]).slice_dim(2, size..2 * size);
            let left_keys = k_to_end.clone().reshape([1, pairs, 2 * size, dim]).slice_dim(2, 0..size);
            let between = scores_between(right_rows, left_keys);
            let right_beta = beta.clone().reshape([1, pairs, 2 * size, 1]).slice_dim(2, size..2 * size);
            inverse = merge_inverse(inverse, between.clone().slice_dim(0, 1..2) * right_beta);
            scores = merge(scores, between);

            // Carry the right rows over the left block, and the left keys over the right one.
            let product = over_left.clone() * over_right.clone();
            let rows = from_start.reshape([2, 2 * pairs, size, dim]);
            from_start = rows * (over_left * odd.clone() + even.clone()).reshape([1, 2 * pairs, 1, dim]);
            let keys = k_to_end.reshape([2 * pairs, size, dim]);
            k_to_end = keys * (over_right * even.clone() + odd.clone()).reshape([2 * pairs, 1, dim]);

            // The decay of a block is the exponential of a fresh sum, so its rounding does not grow with the block.
            // A sum past 1 has lost digits after the point, which the product of the halves has not.
            let [left, right] = halves(log_decay, pairs);
            log_decay = left + right;
            decay = log_decay.clone().exp().mask_where(log_decay.clone().lower_elem(-1.0), product);
            size *= 2;
        }
        Self {
            scores,
            inverse: inverse.squeeze_dim(0),
            beta,
            from_start: from_start.reshape([2, m, c, dim]),
            k_to_end: k_to_end.reshape([m, c, dim]),
            decay: Decay::new(log_decay.reshape([m, dim, 1]), decay.reshape([m, dim, 1])),
        }
    }

    /// Chunk `i` of `chunks`.
    pub fn chunk(&self, i: usize, chunks: usize) -> Chunk {
        let lanes = self.beta.dims()[0] / chunks;
        let rows = i * lanes..(i + 1) * lanes;
        Chunk {
            scores_qk: self.scores.clone().slice([0..1, rows.clone()]).squeeze_dim(0),
            inverse: nth(&self.inverse, i, chunks),
            beta: nth(&self.beta, i, chunks),
            from_start: self.from_start.clone().slice_dim(1, rows.clone()),
            k_to_end: nth(&self.k_to_end, i, chunks),
            decay: self.decay.slice(rows),
        }
    }

    /// `sum_j a_kk[i, j] write_j`, without `beta`: what the writes of a chunk take from its later errors.
    pub fn taken_by(&self, write: Tensor<3>) -> Tensor<3> {
        self.scores.clone().slice_dim(0, 1..2).squeeze_dim::<3>(0).matmul(write)
    }
}

impl Trace {
    /// Down the same tree: cotangents of `[q, k, g]`, `[M, C, K]` each.
    ///
    /// A decay is `exp` of a sum of `g` over one block, so the cotangent of `g` is a sum over blocks as well: nothing is
    /// subtracted, and no decay is divided by.
    pub fn backward(self, cotangents: IntraCotangents) -> [Tensor<3>; 3] {
        let [_, m, c, dim] = self.qk.dims();
        let IntraCotangents { mut scores, mut from_start, mut k_to_end, mut log_decay } = cotangents;
        for Level { size, from_start: rows, k_to_end: keys, over: [over_left, over_right] } in
            self.levels.into_iter().rev()
        {
            let pairs = m * c / (2 * size);
            let (left, right) = (0..size, size..2 * size);
            let rows = rows.slice_dim(2, right.clone());
            let keys = keys.slice_dim(1, left.clone());

            // Undo the carry of right rows and left keys.
            let d_from_start = from_start.reshape([2, pairs, 2 * size, dim]);
            let d_rows = d_from_start.clone().slice_dim(2, right.clone()) * over_left.unsqueeze_dim(0);
            let d_k_to_end = k_to_end.reshape([pairs, 2 * size, dim]);
            let d_keys = d_k_to_end.clone().slice_dim(1, left.clone()) * over_right;
            let [of_q, of_k] = unstack(rows.clone() * d_rows.clone());
            let d_left = (of_q + of_k).sum_dim(1);
            let d_right = (keys.clone() * d_keys.clone()).sum_dim(1);
            let parent = log_decay.reshape([pairs, 1, dim]);
            log_decay = Tensor::cat(vec![parent.clone() + d_left, parent + d_right], 1);

            // The scores between the two blocks.
            let blocks = scores.reshape([2, pairs, 2 * size, 2 * size]);
            let between = blocks.clone().slice([0..2, 0..pairs, right.clone(), left.clone()]);
            let (for_rows, for_keys) = pass_scores(between, rows, keys);
            from_start = Tensor::cat(vec![d_from_start.slice_dim(2, left.clone()), d_rows + for_rows], 2);
            k_to_end = Tensor::cat(vec![d_keys + for_keys, d_k_to_end.slice_dim(1, right.clone())], 1);

            let diagonal = [left, right].map(|rows| blocks.clone().slice([0..2, 0..pairs, rows.clone(), rows]));
            scores = Tensor::stack::<5>(diagonal.into(), 2).reshape([2, 2 * pairs, size, size]);
        }

        let [q, k] = unstack(self.qk.clone());
        let decayed = from_start.reshape([2, m, c, dim]) * self.decay.unsqueeze_dim(0);
        let [by_q, by_k] = unstack(decayed.clone() * self.qk);
        let dg = log_decay.reshape([m, c, dim]) + (by_q + by_k);
        let diagonal = scores.slice_dim(0, 0..1).reshape([m, c, 1]);
        let [dq, dk] = unstack(decayed);
        let dq = dq + k * diagonal.clone();
        let dk = dk + k_to_end.reshape([m, c, dim]) + q * diagonal;
        [dq, dk, dg]
    }
}

/// Cotangents `[2, P, s, s]` of the scores between `rows` `[2, P, s, K]` and `keys` `[P, s, K]`, passed to both.
fn pass_scores(d_scores: Tensor<4>, rows: Tensor<4>, keys: Tensor<3>) -> (Tensor<4>, Tensor<3>) {
    let keys = keys.unsqueeze_dim(0);
    let (d_rows, d_keys) = match d_scores.dims() {
        [_, _, 1, 1] => (keys * d_scores.clone(), rows * d_scores),
        _ => (d_scores.clone().matmul(keys), d_scores.swap_dims(2, 3).matmul(rows)),
    };
    let [by_q, by_k] = unstack(d_keys);
    (d_rows, by_q + by_k)
}

/// `rows keys^T`: `[2, P, s, K]` and `[1, P, s, K]` to `[2, P, s, s]`.
fn scores_between(rows: Tensor<4>, keys: Tensor<4>) -> Tensor<4> {
    match rows.dims() {
        // A product of single rows: the call of a matrix product would cost more than the product.
        [_, pairs, 1, _] => row_sums(rows * keys).reshape([2, pairs, 1, 1]),
        _ => rows.matmul(keys.swap_dims(2, 3)),
    }
}

/// Sums over the last axis, `[rows, 1]`. On two axes: NdArray sums another way round, so to another last bit, where a
/// slice has left an axis of one with a stride of 0.
fn row_sums<const D: usize>(x: Tensor<D>) -> Tensor<2> {
    let width = x.dims()[D - 1];
    x.reshape([-1, width as i64]).sum_dim(1)
}

/// Even and odd rows of `[.., K]`, each `[pairs, 1, K]`.
fn halves(x: Tensor<3>, pairs: usize) -> [Tensor<3>; 2] {
    let dim = x.dims()[2];
    let x = x.reshape([pairs, 2, dim]);
    [x.clone().slice_dim(1, 0..1), x.slice_dim(1, 1..2)]
}

/// `[[even, 0], [corner, odd]]` from the diagonal blocks `[.., 2 * pairs, s, s]` and the corner `[.., pairs, s, s]`.
fn merge(diagonal: Tensor<4>, corner: Tensor<4>) -> Tensor<4> {
    let [even, odd] = diagonal_pairs(diagonal);
    let top = Tensor::cat(vec![even, corner.zeros_like()], 3);
    let bottom = Tensor::cat(vec![corner, odd], 3);
    Tensor::cat(vec![top, bottom], 2)
}

/// `[[X_L, 0], [-X_R A X_L, X_R]]`: block forward substitution. Powers of `A` would lose every digit for nearly
/// identical keys.
fn merge_inverse(inverse: Tensor<4>, a: Tensor<4>) -> Tensor<4> {
    let [even, odd] = diagonal_pairs(inverse.clone());
    let corner = match a.dims() {
        [.., 1, 1] => a.neg(),
        _ => odd.matmul(a).matmul(even).neg(),
    };
    merge(inverse, corner)
}

fn diagonal_pairs(diagonal: Tensor<4>) -> [Tensor<4>; 2] {
    let [of, blocks, size, _] = diagonal.dims();
    let x = diagonal.reshape([of, blocks / 2, 2, size, size]);
    [x.clone().slice_dim(2, 0..1).squeeze_dim(2), x.slice_dim(2, 1..2).squeeze_dim(2)]
}
