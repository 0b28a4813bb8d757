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
//! All that sums over value channels is gathered block by block, then taken through the decays within the chunk, as
//! sums of products with them: nothing is divided or subtracted, so that the gradient of a strong decay is as exact as
//! that of a weak one.

use pulp::Simd;

use super::Real;
use super::by_token::{ByToken, Values};
use super::chunk::{CHUNK, Chunk};
use super::rows::Aligned;
use super::tile::{Pair, multiply, update};

/// Sums over the value channels of a chunk.
pub(super) struct Sums<T: Real, S: Simd> {
    /// `[K, CHUNK, group]`: `dW`.
    write: ByToken<T>,
    /// `[K, 2 CHUNK, group]`: `dR` and `dQ`.
    read: ByToken<T>,
    /// `[CHUNK, 2 CHUNK, group]`: for each `u_j`, its products with `-de_i` and with `do_i`.
    pairs: ByToken<T>,
    /// `[K]`: of `D` with the state, before lanes are added up.
    decay: Vec<T::Vector<S>>,
    /// `dbeta`, before lanes are added up.
    beta: [T::Vector<S>; CHUNK],
}

/// Values of a block with (groups of) its columns as rows, of `CHUNK` and `2 CHUNK` tokens.
pub(super) struct Transposed<T> {
    u: ByToken<T>,
    cotangents: ByToken<T>,
}

impl<T: Real> Transposed<T> {
    pub fn new<S: Simd>() -> Self {
        Self { u: ByToken::columns::<S>(CHUNK), cotangents: ByToken::columns::<S>(2 * CHUNK) }
    }
}

impl<T: Real, S: Simd> Sums<T, S> {
    pub fn new(simd: S, width: usize) -> Self {
        let zero = T::splat(simd, T::zero());
        Self {
            write: ByToken::sums::<S>(width, CHUNK),
            read: ByToken::sums::<S>(width, 2 * CHUNK),
            pairs: ByToken::sums::<S>(CHUNK, 2 * CHUNK),
            decay: vec![zero; width],
            beta: [zero; CHUNK],
        }
    }

    pub fn reset(&mut self, simd: S) {
        for sums in [&mut self.write, &mut self.read, &mut self.pairs] {
            sums.numbers.fill(T::zero());
        }
        for sums in [&mut self.decay[..], &mut self.beta] {
            sums.fill(T::splat(simd, T::zero()));
        }
    }
}

impl<T: Real> Chunk<T> {
    /// The writes `u` of a block and its errors.
    #[inline(always)]
    pub fn errors<S: Simd>(&self, simd: S, block: &[Pair<T::Vector<S>>], v: &Values<T, S>) -> [Values<T, S>; 2] {
        let predicted = eight::<S, T>(simd, &self.reads, block);
        let (mut u, mut errors) = (*v, *v);
        for m in 0..2 {
            let mut error = [T::splat(simd, T::zero()); CHUNK];
            for i in 0..CHUNK {
                error[i] = T::vector_sub(simd, v[i].0[m], predicted[i].0[m]);
            }
            for j in 0..CHUNK {
                let write = T::vector_mul(simd, T::splat(simd, self.beta[j]), error[j]);
                u[j].0[m] = write;
                for (error, meet) in error.iter_mut().zip(&self.meet).skip(j + 1) {
                    *error = T::vector_mul_add(simd, T::splat(simd, meet[j]), write, *error);
                }
            }
            for i in 0..CHUNK {
                errors[i].0[m] = error[i];
            }
        }
        [u, errors]
    }

    /// One block of columns: `before` is its state before the chunk, `d_state` the cotangent of the one after it, which
    /// becomes that of the one before. Returns `dv`.
    #[inline(always)]
    pub fn block_back<S: Simd>(
        &self,
        simd: S,
        before: &[Pair<T::Vector<S>>],
        d_state: &mut [Pair<T::Vector<S>>],
        [u, errors, d_o]: [&Values<T, S>; 3],
        sums: &mut Sums<T, S>,
        transposed: &mut Transposed<T>,
    ) -> Values<T, S> {
        let zero = Pair([T::splat(simd, T::zero()); 2]);
        let du = eight::<S, T>(simd, &self.writes, d_state);
        let mut dv = [zero; CHUNK];
        for m in 0..2 {
            let (mut sum, mut seen) = ([zero.0[0]; CHUNK], [zero.0[0]; CHUNK]);
            for j in 0..CHUNK {
                sum[j] = du[j].0[m];
                for i in (j..CHUNK).rev() {
                    seen[j] = T::vector_mul_add(simd, T::splat(simd, self.see[i][j]), d_o[i].0[m], seen[j]);
                }
            }
            for i in (0..CHUNK).rev() {
                sum[i] = T::vector_add(simd, sum[i], seen[i]);
                let error = T::vector_mul(simd, T::splat(simd, self.beta[i]), sum[i]);
                dv[i].0[m] = error;
                for (sum, &meet) in sum[..i].iter_mut().zip(&self.meet[i]) {
                    *sum = T::vector_mul_add(simd, T::splat(simd, meet), error, *sum);
                }
            }
            for j in 0..CHUNK {
                sums.beta[j] = T::vector_mul_add(simd, sum[j], errors[j].0[m], sums.beta[j]);
            }
        }
        // Of what the keys read.
        let mut d_read = [zero; CHUNK];
        for (d_read, dv) in d_read.iter_mut().zip(&dv) {
            *d_read = zero.sub::<S, T>(simd, *dv);
        }
        transposed.cotangents.transpose::<S>(0, &d_read);
        transposed.cotangents.transpose::<S>(1, d_o);
        transposed.u.transpose::<S>(0, u);
        sums.read.add(simd, before, &transposed.cotangents);
        sums.pairs.add(simd, u, &transposed.cotangents);
        sums.write.add(simd, d_state, &transposed.u);
        for ((sum, Pair(s)), Pair(d)) in sums.decay.iter_mut().zip(before).zip(&*d_state) {
            let half = T::vector_mul_add(simd, s[0], d[0], *sum);
            *sum = T::vector_mul_add(simd, s[1], d[1], half);
        }
        // Of the keys, then of the queries, as the chunk reads.
        let mut cotangents = [zero; 2 * CHUNK];
        cotangents[..CHUNK].copy_from_slice(&d_read);
        cotangents[CHUNK..].copy_from_slice(d_o);
        update(simd, &self.decay, &self.reads, &cotangents, d_state);
        dv
    }
}

/// Eight rows times a block; in parts of the sum, for less rounding.
#[inline(always)]
fn eight<S: Simd, T: Real>(simd: S, rows: &[T], block: &[Pair<T::Vector<S>>]) -> Values<T, S> {
    const PART: usize = 16;
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

/// Rows of `K` of each token of a chunk, `[CHUNK, K]`.
pub(super) struct Within<T> {
    /// Unscaled.
    pub q: Aligned<T>,
    pub k: Aligned<T>,
    pub dq: Aligned<T>,
    pub dk: Aligned<T>,
    pub dg: Aligned<T>,
    pub d_beta: [T; CHUNK],
    /// `dW`, `dR` and `dQ`.
    d_write: Aligned<T>,
    d_read: [Aligned<T>; 2],
    d_decay: Aligned<T>,
}

impl<T: Real> Within<T> {
    pub fn new(width: usize) -> Self {
        let rows = || Aligned::zeros(CHUNK * width);
        Self {
            q: rows(),
            k: rows(),
            dq: rows(),
            dk: rows(),
            dg: rows(),
            d_beta: [T::zero(); CHUNK],
            d_write: rows(),
            d_read: [rows(), rows()],
            d_decay: Aligned::zeros(width),
        }
    }

    /// From the sums over value channels, `q` and `k` to the gradients of `q`, `k`, `g` and `beta`.
    #[inline(always)]
    pub fn back<S: Simd>(&mut self, simd: S, chunk: &Chunk<T>, sums: &Sums<T, S>, scale: T) {
        for i in 0..CHUNK {
            self.d_beta[i] = T::total(simd, sums.beta[i]);
        }
        sums.write.rows::<S>(0, &mut self.d_write);
        for (chunk, rows) in self.d_read.iter_mut().enumerate() {
            sums.read.rows::<S>(chunk, rows);
        }
        for ((d_decay, &sum), &decay) in self.d_decay.iter_mut().zip(&sums.decay).zip(&*chunk.decay) {
            *d_decay = decay * T::total(simd, sum);
        }
        // `[i][j]`: of `k_i . A_{i,j} k_j`, and of `q_i . A_{i,j} k_j`.
        let mut d_pairs = [[[T::zero(); CHUNK]; CHUNK]; 2];
        for (chunk, d_pairs) in d_pairs.iter_mut().enumerate() {
            sums.pairs.rows::<S>(chunk, d_pairs.as_flattened_mut());
        }
        for d_pair in d_pairs[1].as_flattened_mut() {
            *d_pair = scale * *d_pair;
        }
        let [by_key, by_query] = d_pairs;

        let zero = T::splat(simd, T::zero());
        let (mul, fma) = (T::vector_mul::<S>, T::vector_mul_add::<S>);
        let scale = T::splat(simd, scale);
        let vectors = T::vectors::<S>;
        let (q, k, a) = (vectors(&self.q), vectors(&self.k), vectors(&chunk.decays));
        let (d_write, d_key, d_query) = (vectors(&self.d_write), vectors(&self.d_read[0]), vectors(&self.d_read[1]));
        let d_decay = vectors(&self.d_decay);
        let (dq_rows, dk_rows) = (T::vectors_mut::<S>(&mut self.dq), T::vectors_mut::<S>(&mut self.dk));
        let dg_rows = T::vectors_mut::<S>(&mut self.dg);
        let count = d_decay.len();
        for c in 0..count {
            let [mut dq, mut dk, mut dg] = [[zero; CHUNK]; 3];
            // Reads of the state before the chunk, and its decay.
            let mut up_to = [zero; CHUNK];
            let mut product = T::splat(simd, T::one());
            for i in 0..CHUNK {
                product = mul(simd, product, a[i * count + c]);
                up_to[i] = product;
            }
            let mut sum = d_decay[c];
            for i in (0..CHUNK).rev() {
                let at = i * count + c;
                dk[i] = mul(simd, up_to[i], d_key[at]);
                dq[i] = mul(simd, scale, mul(simd, up_to[i], d_query[at]));
                sum = fma(simd, k[at], dk[i], fma(simd, q[at], dq[i], sum));
                dg[i] = sum;
            }
            // A key on its way to the tokens after it, and to the state after the chunk.
            for j in 0..CHUNK {
                let mut key = [zero; CHUNK];
                key[j] = k[j * count + c];
                for i in j + 1..CHUNK {
                    key[i] = mul(simd, key[i - 1], a[i * count + c]);
                }
                let mut d_key = d_write[j * count + c];
                for i in (j..CHUNK).rev() {
                    let at = i * count + c;
                    let (by_key, by_query) = (T::splat(simd, by_key[i][j]), T::splat(simd, by_query[i][j]));
                    d_key = fma(simd, by_query, q[at], d_key);
                    dq[i] = fma(simd, by_query, key[i], dq[i]);
                    if i > j {
                        d_key = fma(simd, by_key, k[at], d_key);
                        dk[i] = fma(simd, by_key, key[i], dk[i]);
                        dg[i] = fma(simd, d_key, key[i], dg[i]);
                        d_key = mul(simd, d_key, a[at]);
                    }
                }
                dk[j] = T::vector_add(simd, dk[j], d_key);
            }
            for i in 0..CHUNK {
                let at = i * count + c;
                (dq_rows[at], dk_rows[at], dg_rows[at]) = (dq[i], dk[i], dg[i]);
            }
        }
    }
}
