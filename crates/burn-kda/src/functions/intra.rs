//! What one chunk knows before it sees a state: scores, inverse and decayed keys, on a segment tree.
//!
//! The scores need `exp(G_i - G_j)` for `i >= j`, with `G` the cumulative log decay. Neither factor `exp(G_i)` nor
//! `exp(-G_j)` is usable on its own: the second overflows. On a binary tree of blocks the factor splits at the border
//! between two neighbours, `exp(sum of g from the border to i) * exp(sum of g after j up to the border)`: both
//! exponents are sums over one block, both are `<= 0`, nothing is subtracted. Each level is one batched product, and
//! the inverse of `I + A` merges on the same tree.

use burn::tensor::Tensor;

use super::decay::Decay;

/// The two halves of a stacked pair.
pub(super) fn unstack(x: Tensor<4>) -> [Tensor<3>; 2] {
    [x.clone().slice_dim(0, 0..1).squeeze_dim(0), x.slice_dim(0, 1..2).squeeze_dim(0)]
}

/// What a chunk knows before it sees a state. `G` is the inclusive cumulative sum of `g` within the chunk.
pub(super) struct Intra {
    /// `A_qk[i, j] = sum_d q_i k_j exp(G_i - G_j)`, `i >= j`: `[M, C, C]`.
    pub scores: Tensor<3>,
    /// `(I + A_kk)^-1`: from prediction errors times `beta` to writes, `[M, C, C]`.
    pub inverse: Tensor<3>,
    /// `[M, C, 1]`.
    pub beta: Tensor<3>,
    /// `q exp(G)` and `k exp(G)`: `[2, M, C, K]`.
    pub qk_from_start: Tensor<4>,
    /// `k exp(G_C - G)`: `[M, C, K]`.
    pub k_to_end: Tensor<3>,
    /// `exp(G_C)`: `[M, K, 1]`.
    pub decay: Decay<3>,
}

impl Intra {
    /// `qk`: `[2, M, C, K]`; `g`: `[M, C, K]`; `beta`: `[M, C, 1]`.
    pub fn new(qk: Tensor<4>, g: Tensor<3>, beta: Tensor<3>) -> Self {
        let [_, m, c, dim] = qk.dims();
        let options = (&qk.device(), qk.dtype());
        let even = Tensor::<1>::from_data([1.0, 0.0], options).reshape([1, 2, 1]);
        let odd = Tensor::<1>::from_data([0.0, 1.0], options).reshape([1, 2, 1]);

        let [q, k] = unstack(qk.clone());
        let mut scores = row_sums(q * k.clone()).reshape([m * c, 1, 1]);
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
            inverse,
            beta,
            qk_from_start: from_start.reshape([2, m, c, dim]),
            k_to_end: k_to_end.reshape([m, c, dim]),
            decay: Decay::new(log_decay.reshape([m, dim, 1]), decay.reshape([m, dim, 1])),
        }
    }
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
