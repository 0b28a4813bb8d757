//! Gradients of a chunk, from the cotangent `D` of the state after it to that of the state before it.
//!
//! With the names of [`Chunk`], its errors `e_i = u_i / beta_i`, `R_i` and `Q_i` the decayed keys and scaled queries that
//! read the state before the chunk, and `W_j` the decayed keys that write:
//!
//! ```text
//! du_j = D^T W_j + sum_{i >= j} scale (q_i . A_{i,j} k_j) do_i - sum_{i > j} (k_i . A_{i,j} k_j) de_i
//! de_i = beta_i du_i = dv_i                       dbeta_i = du_i . e_i
//! dR_i = -S de_i      dQ_i = S do_i      dW_j = D u_j      d(k_i . A_{i,j} k_j) = -de_i . u_j
//! D  <- diag(A_{last,-1}) D + sum_i (Q_i do_i^T - R_i de_i^T)
//! ```
//!
//! Most of these sums are over value channels, so that states and their cotangents lie here with those as rows and blocks of
//! key channels as columns: a block gives all that its channels need, and takes it through the decays within the chunk, as
//! sums of products with them. Nothing is divided or subtracted, so that the gradient of a strong decay is as exact as
//! that of a weak one.

use pulp::Simd;

use super::Real;
use super::by_token::ByToken;
use super::chunk::{CHUNK, Chunk};
use super::rows::Aligned;
use super::tile::{Pair, multiply, update_columns};

/// Two vectors of each token.
type Tokens<V, const N: usize = CHUNK> = [Pair<V>; N];

/// Of one chunk; rows of `K` and `V` padded with channels of zeros.
pub(super) struct Adjoint<T> {
    height: usize,
    /// Of reads.
    scale: T,
    /// `[CHUNK, K]`, `q` unscaled.
    pub q: Aligned<T>,
    pub k: Aligned<T>,
    /// `[2 CHUNK, V]`: `-de`, then `do`.
    pub cotangents: Aligned<T>,
    /// `[CHUNK, K]`.
    pub dq: Aligned<T>,
    pub dk: Aligned<T>,
    pub dg: Aligned<T>,
    /// `[CHUNK, V]`.
    pub dv: Aligned<T>,
    pub d_beta: [T; CHUNK],
    /// `[j][i]`: of `k_i . A_{i,j} k_j`, then of `q_i . A_{i,j} k_j`.
    of_pairs: [[T; 2 * CHUNK]; CHUNK],
    /// What of `du` is the state's, `[V, CHUNK, group]`, and as rows of tokens.
    by_state: ByToken<T>,
    du: Aligned<T>,
    /// The products of `-de_i` and of `do_i` with each `u_j`, `[2 CHUNK, CHUNK, group]`.
    pairs: ByToken<T>,
    /// Of a block.
    columns: ByToken<T>,
}

impl<T: Real> Adjoint<T> {
    /// `width` channels of keys and `height` of values, as [`padded`](super::tile::padded) has them, the keys' in whole blocks.
    pub fn new<S: Simd>(width: usize, height: usize, scale: T) -> Self {
        let (of_keys, of_values) = (|| Aligned::zeros(CHUNK * width), |rows| Aligned::zeros(rows * height));
        Self {
            height,
            scale,
            q: of_keys(),
            k: of_keys(),
            cotangents: of_values(2 * CHUNK),
            dq: of_keys(),
            dk: of_keys(),
            dg: of_keys(),
            dv: of_values(CHUNK),
            d_beta: [T::zero(); CHUNK],
            of_pairs: [[T::zero(); 2 * CHUNK]; CHUNK],
            by_state: ByToken::sums(height),
            du: of_values(CHUNK),
            pairs: ByToken::sums(2 * CHUNK),
            columns: ByToken::columns::<S>(),
        }
    }

    /// After [`solve`](Self::solve), before [`of_state`](Self::of_state) is passed the blocks of the next chunk.
    pub fn reset(&mut self) {
        self.by_state.numbers.fill(T::zero());
    }

    /// Takes in a block of the cotangent of the state after `chunk`.
    #[inline(always)]
    pub fn of_state<S: Simd>(&mut self, simd: S, chunk: &Chunk<T>, b: usize, d_state: &[Pair<T::Vector<S>>]) {
        self.columns.transpose::<S>(&block(simd, &chunk.writes, b));
        self.by_state.add(simd, d_state, &self.columns);
    }

    /// The cotangents of what the tokens write and read, once [`of_state`](Self::of_state) has all blocks; `u` and `errors`
    /// are `[CHUNK, V]`.
    #[inline(always)]
    pub fn solve<S: Simd>(&mut self, simd: S, chunk: &Chunk<T>, u: &[T], errors: &[T]) {
        self.by_state.rows(&mut self.du);
        let zero = T::splat(simd, T::zero());
        let (du, errors) = (T::vectors::<S>(&self.du), T::vectors::<S>(errors));
        let (read, d_o) = self.cotangents.split_at_mut(CHUNK * self.height);
        let (read, d_o) = (T::vectors_mut::<S>(read), T::vectors::<S>(d_o));
        let dv = T::vectors_mut::<S>(&mut self.dv);
        let count = self.height / T::lanes::<S>();
        let mut d_beta = [zero; CHUNK];
        for m in 0..count {
            let (mut sum, mut seen) = ([zero; CHUNK], [zero; CHUNK]);
            for j in 0..CHUNK {
                sum[j] = du[j * count + m];
                for i in (j..CHUNK).rev() {
                    seen[j] = T::vector_mul_add(simd, T::splat(simd, chunk.see[i][j]), d_o[i * count + m], seen[j]);
                }
            }
            for i in (0..CHUNK).rev() {
                sum[i] = T::vector_add(simd, sum[i], seen[i]);
                let error = T::vector_mul(simd, T::splat(simd, chunk.beta[i]), sum[i]);
                dv[i * count + m] = error;
                read[i * count + m] = T::vector_sub(simd, zero, error);
                for (sum, &meet) in sum[..i].iter_mut().zip(&chunk.meet[i]) {
                    *sum = T::vector_mul_add(simd, T::splat(simd, meet), error, *sum);
                }
            }
            for j in 0..CHUNK {
                d_beta[j] = T::vector_mul_add(simd, sum[j], errors[j * count + m], d_beta[j]);
            }
        }
        for (total, sum) in self.d_beta.iter_mut().zip(d_beta) {
            *total = T::total(simd, sum);
        }

        self.pairs.numbers.fill(T::zero());
        for b in 0..count.div_ceil(2) {
            self.columns.transpose::<S>(&block(simd, u, b));
            self.pairs.add(simd, &block::<S, T, { 2 * CHUNK }>(simd, &self.cotangents, b), &self.columns);
        }
        self.pairs.rows(self.of_pairs.as_flattened_mut());
        for of_pairs in &mut self.of_pairs {
            of_pairs[CHUNK..].iter_mut().for_each(|of_pair| *of_pair = self.scale * *of_pair);
        }
    }

    /// The gradients of a block of key channels, from its state `before` the chunk; takes the cotangent `d_state` of the one
    /// after it to that of the one before.
    #[inline(always)]
    pub fn of_keys<S: Simd>(
        &mut self,
        simd: S,
        chunk: &Chunk<T>,
        b: usize,
        u: &[T],
        before: &[Pair<T::Vector<S>>],
        d_state: &mut [Pair<T::Vector<S>>],
    ) {
        let zero = T::splat(simd, T::zero());
        let d_key = eight(simd, &self.cotangents, before);
        let d_query = eight(simd, &self.cotangents[CHUNK * self.height..], before);
        let d_write = eight(simd, u, d_state);
        let mut d_decay = [zero; 2];
        for (before, d_state) in before.chunks(PART).zip(d_state.chunks(PART)) {
            let mut part = [zero; 2];
            for (Pair(s), Pair(d)) in before.iter().zip(d_state) {
                for m in 0..2 {
                    part[m] = T::vector_mul_add(simd, s[m], d[m], part[m]);
                }
            }
            for m in 0..2 {
                d_decay[m] = T::vector_add(simd, d_decay[m], part[m]);
            }
        }
        let [Pair(decay)] = block(simd, &chunk.decay, b);
        let reads: Tokens<_, { 2 * CHUNK }> = block(simd, &chunk.reads, b);
        update_columns(simd, Pair(decay), &self.cotangents, &reads, d_state);
        for m in 0..2 {
            let d_decay = T::vector_mul(simd, decay[m], d_decay[m]);
            self.within(simd, chunk, [b, m], d_decay, [&d_key, &d_query, &d_write]);
        }
    }

    /// The gradients of vector `m` of the key channels of block `b`, from those of `R`, `Q`, `W` and of the logarithm of the
    /// chunk's decay.
    #[inline(always)]
    fn within<S: Simd>(
        &mut self,
        simd: S,
        chunk: &Chunk<T>,
        [b, m]: [usize; 2],
        d_decay: T::Vector<S>,
        [d_key, d_query, d_write]: [&Tokens<T::Vector<S>>; 3],
    ) {
        let (mul, fma) = (T::vector_mul::<S>, T::vector_mul_add::<S>);
        let all = |x: T| T::splat(simd, x);
        let vectors = T::vectors::<S>;
        let (count, c) = (vectors(&chunk.decay).len(), 2 * b + m);
        let zero = all(T::zero());
        let [mut q, mut k, mut a, mut d_keys] = [[zero; CHUNK]; 4];
        for i in 0..CHUNK {
            let at = i * count + c;
            (q[i], k[i], a[i]) = (vectors(&self.q)[at], vectors(&self.k)[at], vectors(&chunk.decays)[at]);
            d_keys[i] = d_write[i].0[m];
        }
        let [mut dq, mut dk, mut dg] = [[zero; CHUNK]; 3];

        // Reads of the state before the chunk.
        let (mut product, scale) = (all(T::one()), all(self.scale));
        for i in 0..CHUNK {
            product = mul(simd, product, a[i]);
            dk[i] = mul(simd, product, d_key[i].0[m]);
            dq[i] = mul(simd, scale, mul(simd, product, d_query[i].0[m]));
        }
        let mut sum = d_decay;
        for i in (0..CHUNK).rev() {
            sum = fma(simd, k[i], dk[i], fma(simd, q[i], dq[i], sum));
            dg[i] = sum;
        }
        // The keys on their way to the tokens after them, all together: one after the other would wait for itself.
        let mut keys = [[zero; CHUNK]; CHUNK];
        let mut key = [zero; CHUNK];
        for i in 0..CHUNK {
            for (j, key) in key[..i].iter_mut().enumerate() {
                *key = mul(simd, *key, a[i]);
                dk[i] = fma(simd, all(self.of_pairs[j][i]), *key, dk[i]);
                dq[i] = fma(simd, all(self.of_pairs[j][CHUNK + i]), *key, dq[i]);
            }
            key[i] = k[i];
            dq[i] = fma(simd, all(self.of_pairs[i][CHUNK + i]), k[i], dq[i]);
            keys[i] = key;
        }
        // And their cotangents on the way back, from the state after the chunk.
        for i in (0..CHUNK).rev() {
            for j in 0..i {
                let seen = fma(simd, all(self.of_pairs[j][CHUNK + i]), q[i], d_keys[j]);
                let d_key = fma(simd, all(self.of_pairs[j][i]), k[i], seen);
                dg[i] = fma(simd, d_key, keys[i][j], dg[i]);
                d_keys[j] = mul(simd, d_key, a[i]);
            }
            let d_key = fma(simd, all(self.of_pairs[i][CHUNK + i]), q[i], d_keys[i]);
            dk[i] = T::vector_add(simd, dk[i], d_key);
        }
        for (rows, x) in [(&mut self.dq, dq), (&mut self.dk, dk), (&mut self.dg, dg)] {
            let rows = T::vectors_mut::<S>(rows);
            for i in 0..CHUNK {
                rows[i * count + c] = x[i];
            }
        }
    }
}

/// The `b`th two vectors of each of `N` rows; zeros for a vector that is missing.
#[inline(always)]
pub(super) fn block<S: Simd, T: Real, const N: usize>(simd: S, rows: &[T], b: usize) -> Tokens<T::Vector<S>, N> {
    let vectors = T::vectors::<S>(rows);
    let count = vectors.len() / N;
    let zero = T::splat(simd, T::zero());
    let mut block = [Pair([zero; 2]); N];
    for (pair, row) in block.iter_mut().zip(vectors.chunks_exact(count)) {
        *pair = Pair([row[2 * b], if 2 * b + 1 < count { row[2 * b + 1] } else { zero }]);
    }
    block
}

/// Terms of a sum that are added up by themselves, for less rounding.
const PART: usize = 16;

/// Eight rows times a block; in parts of the sum.
#[inline(always)]
fn eight<S: Simd, T: Real>(simd: S, rows: &[T], block: &[Pair<T::Vector<S>>]) -> Tokens<T::Vector<S>> {
    let mut product = [Pair([T::splat(simd, T::zero()); 2]); CHUNK];
    for (p, part) in block.chunks(PART).enumerate() {
        for first in [0, CHUNK / 2] {
            let rows = &rows[first * block.len() + p * PART..];
            let part = multiply::<S, T, { CHUNK / 2 }>(simd, rows, block.len(), part);
            for (sum, part) in product[first..].iter_mut().zip(part) {
                *sum = sum.add::<S, T>(simd, T::one(), part);
            }
        }
    }
    product
}
