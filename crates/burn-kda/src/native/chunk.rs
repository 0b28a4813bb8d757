//! What all columns of a state share for some tokens.
//!
//! With `a_t = exp(g_t)`, `A_{i,j} = a_{j+1} .. a_i` a product over channels' decays, `S` the state before the chunk:
//!
//! ```text
//! u_i = beta_i (v_i - S^T (A_{i,-1} k_i) - sum_{j < i} (k_i . A_{i,j} k_j) u_j)
//! o_i = scale  (      S^T (A_{i,-1} q_i) + sum_{j <= i} (q_i . A_{i,j} k_j) u_j)
//! S  <- diag(A_{last,-1}) S + sum_j (A_{last,j} k_j) u_j^T
//! ```
//!
//! No exponent is positive and nothing is divided, so that no decay is too strong.

use ndarray::ArrayView1;
use pulp::Simd;

use super::Real;
use super::rows::{Aligned, copy};
use super::tile::{Pair, multiply};

/// Tokens of a chunk.
pub(super) const CHUNK: usize = 8;

pub(super) struct Chunk<T> {
    /// `K`, padded with channels of zeros.
    width: usize,
    /// Of each token, `[CHUNK, K]`.
    pub decays: Aligned<T>,
    /// Over the chunk.
    pub decay: Aligned<T>,
    /// Keys, then scaled queries, times the decays up to their token, `[2 CHUNK, K]`.
    pub reads: Aligned<T>,
    /// Keys times the decays after their token, `[CHUNK, K]`.
    pub writes: Aligned<T>,
    /// `-k_i . A_{i,j} k_j` for `j < i`.
    pub meet: [[T; CHUNK]; CHUNK],
    /// The same times `beta_i`.
    erase: [[T; CHUNK]; CHUNK],
    /// `scale q_i . A_{i,j} k_j` for `j <= i`.
    pub see: [[T; CHUNK]; CHUNK],
    pub beta: [T; CHUNK],
    pub tokens: usize,
    /// Of `q`, `k` and `g` of each token, `[CHUNK, 3, K]`.
    rows: Aligned<T>,
}

/// One token of the inputs of one head.
pub(super) struct Token<'a, T> {
    pub q: ArrayView1<'a, T>,
    pub k: ArrayView1<'a, T>,
    pub g: ArrayView1<'a, T>,
    pub beta: T,
}

impl<T: Real> Chunk<T> {
    /// `width` is as [`padded`](super::tile::padded) has it.
    pub fn new(width: usize) -> Self {
        let rows = |rows: usize| Aligned::zeros(rows * width);
        Self {
            width,
            decays: rows(CHUNK),
            decay: rows(1),
            reads: rows(2 * CHUNK),
            writes: rows(CHUNK),
            meet: [[T::zero(); CHUNK]; CHUNK],
            erase: [[T::zero(); CHUNK]; CHUNK],
            see: [[T::zero(); CHUNK]; CHUNK],
            beta: [T::zero(); CHUNK],
            tokens: 0,
            rows: rows(3 * CHUNK),
        }
    }

    /// Of at most [`CHUNK`] tokens.
    #[inline(always)]
    pub fn prepare<'a, S: Simd, const FMA: bool>(
        &mut self,
        simd: S,
        mut tokens: impl Iterator<Item = Token<'a, T>>,
        scale: T,
        carry: &mut [T],
    ) where
        T: 'a,
    {
        let (width, count) = (self.width, self.width / T::lanes::<S>());
        self.beta = [T::zero(); CHUNK];
        self.tokens = 0;
        let mut rows: [[&[T::Vector<S>]; 3]; CHUNK] = [[&[]; 3]; CHUNK];
        for (n, buffers) in self.rows.chunks_exact_mut(3 * width).enumerate() {
            let (q, others) = buffers.split_at_mut(width);
            let (k, g) = others.split_at_mut(width);
            let [q, k, g] = match tokens.next() {
                Some(token) => {
                    self.beta[n] = token.beta;
                    self.tokens = n + 1;
                    [row(&token.q, q), row(&token.k, k), row(&token.g, g)]
                }
                // What tokens are missing of a chunk decay, read and write nothing.
                None => {
                    [&mut *q, &mut *k, &mut *g].into_iter().for_each(|row| row.fill(T::zero()));
                    [&*q, &*k, &*g]
                }
            };
            rows[n] = [T::vectors::<S>(q), T::vectors::<S>(k), T::vectors::<S>(g)];
        }

        // All tokens of a vector of channels, whose exponentials do not wait for each other.
        let (zero, scale_all) = (T::splat(simd, T::zero()), T::splat(simd, scale));
        let mut seen = [zero; CHUNK];
        let (by_key, by_query) = self.reads.split_at_mut(CHUNK * width);
        let (by_key, by_query) = (T::vectors_mut::<S>(by_key), T::vectors_mut::<S>(by_query));
        let (decays, writes) = (T::vectors_mut::<S>(&mut self.decays), T::vectors_mut::<S>(&mut self.writes));
        for (c, (carry, over_chunk)) in
            T::vectors_mut::<S>(carry).iter_mut().zip(T::vectors_mut::<S>(&mut self.decay)).enumerate()
        {
            let [mut total, mut rest, mut carry_within] = [zero; 3];
            let mut decay = T::splat(simd, T::one());
            for n in 0..CHUNK {
                let [q, k, g] = rows[n];
                let (q, k, g) = (q[c], k[c], g[c]);
                let a;
                [a, carry_within] = T::decay::<S, FMA>(simd, g, carry_within);
                let (sum, error) = two_sum::<S, T>(simd, total, g);
                (total, rest) = (sum, T::vector_add(simd, rest, error));
                decay = T::vector_mul(simd, decay, a);
                let at = n * count + c;
                decays[at] = a;
                writes[at] = k;
                by_key[at] = T::vector_mul(simd, decay, k);
                by_query[at] = T::vector_mul(simd, decay, T::vector_mul(simd, q, scale_all));
                seen[n] = T::vector_mul_add(simd, q, k, seen[n]);
            }
            let left_out = T::vector_add(simd, *carry, T::rest(simd, total, rest));
            [*over_chunk, *carry] = T::decay::<S, FMA>(simd, total, left_out);
        }

        for n in 0..self.tokens {
            let ([q, k, _], beta) = (rows[n], self.beta[n]);
            self.see[n][n] = scale * T::total(simd, seen[n]);
            let a = &decays[n * count..][..count];
            let mut pairs = writes[..n * count].chunks_exact_mut(2 * count);
            let mut j = 0;
            for pair in &mut pairs {
                let (first, second) = pair.split_at_mut(count);
                for [by_key, by_query] in decayed::<S, T, 2>(simd, [first, second], a, [k, q]) {
                    (self.meet[n][j], self.erase[n][j]) = (-by_key, -beta * by_key);
                    self.see[n][j] = scale * by_query;
                    j += 1;
                }
            }
            let last = pairs.into_remainder();
            if !last.is_empty() {
                let [[by_key, by_query]] = decayed::<S, T, 1>(simd, [last], a, [k, q]);
                (self.meet[n][j], self.erase[n][j]) = (-by_key, -beta * by_key);
                self.see[n][j] = scale * by_query;
            }
        }
        for of_pairs in [&mut self.meet, &mut self.erase, &mut self.see] {
            of_pairs[self.tokens..].fill([T::zero(); CHUNK]);
        }
    }

    /// The writes of a block of columns from its state before the chunk and its values, its outputs and, if wanted, the errors
    /// of what the state predicts.
    #[inline(always)]
    pub fn solve<S: Simd>(
        &self,
        simd: S,
        block: &[Pair<T::Vector<S>>],
        v: impl Fn(usize) -> [T::Vector<S>; 2],
        mut o: impl FnMut(usize, [T::Vector<S>; 2]),
        errors: Option<impl FnMut(usize, [T::Vector<S>; 2])>,
    ) -> [Pair<T::Vector<S>>; CHUNK] {
        let zero = T::splat(simd, T::zero());
        let read = self.read(simd, block);
        let mut u = [Pair([zero; 2]); CHUNK];
        for m in 0..2 {
            let mut write = [zero; CHUNK];
            for i in 0..CHUNK {
                let error = T::vector_sub(simd, v(i)[m], read[i].0[m]);
                write[i] = T::vector_mul(simd, T::splat(simd, self.beta[i]), error);
            }
            for j in 0..CHUNK {
                for i in j + 1..CHUNK {
                    write[i] = T::vector_mul_add(simd, T::splat(simd, self.erase[i][j]), write[j], write[i]);
                }
            }
            for i in 0..CHUNK {
                u[i].0[m] = write[i];
            }
        }
        for i in 0..self.tokens {
            let mut out = read[CHUNK + i];
            // No others, whatever they are: a NaN passes on to later tokens only.
            for (&u, &see) in u.iter().zip(&self.see[i][..=i]) {
                out = out.add::<S, T>(simd, see, u);
            }
            o(i, out.0);
        }
        if let Some(mut errors) = errors {
            for (i, &read) in read[..self.tokens].iter().enumerate() {
                let mut error = Pair(v(i)).sub::<S, T>(simd, read);
                for (&u, &meet) in u.iter().zip(&self.meet[i][..i]) {
                    error = error.add::<S, T>(simd, meet, u);
                }
                errors(i, error.0);
            }
        }
        u
    }

    /// What the tokens predict and read from the state before the chunk, in tiles as large as the registers take.
    #[inline(always)]
    fn read<S: Simd>(&self, simd: S, block: &[Pair<T::Vector<S>>]) -> [Pair<T::Vector<S>>; 2 * CHUNK] {
        let mut read = [Pair([T::splat(simd, T::zero()); 2]); 2 * CHUNK];
        let rows = |start: usize| &self.reads[start * self.width..];
        if S::REGISTER_COUNT >= 32 {
            // A loop: unrolled, the first half would take the registers of the second.
            for (read, rows) in read.chunks_exact_mut(CHUNK).zip(self.reads.chunks_exact(CHUNK * self.width)) {
                read.copy_from_slice(&multiply::<S, T, CHUNK>(simd, rows, self.width, block));
            }
        } else {
            read[..6].copy_from_slice(&multiply::<S, T, 6>(simd, rows(0), self.width, block));
            read[6..11].copy_from_slice(&multiply::<S, T, 5>(simd, rows(6), self.width, block));
            read[11..].copy_from_slice(&multiply::<S, T, 5>(simd, rows(11), self.width, block));
        }
        read
    }
}

/// `a + b` as it is rounded, and what the rounding leaves out (Knuth).
#[inline(always)]
fn two_sum<S: Simd, T: Real>(simd: S, a: T::Vector<S>, b: T::Vector<S>) -> (T::Vector<S>, T::Vector<S>) {
    let (add, sub) = (T::vector_add::<S>, T::vector_sub::<S>);
    let sum = add(simd, a, b);
    let b_rounded = sub(simd, sum, a);
    let a_rounded = sub(simd, sum, b_rounded);
    (sum, add(simd, sub(simd, a, a_rounded), sub(simd, b, b_rounded)))
}

/// Lets `N` rows decay by `a`; the products of each with `other`.
#[inline(always)]
fn decayed<S: Simd, T: Real, const N: usize>(
    simd: S,
    mut rows: [&mut [T::Vector<S>]; N],
    a: &[T::Vector<S>],
    other: [&[T::Vector<S>]; 2],
) -> [[T; 2]; N] {
    let mut sums = [[T::splat(simd, T::zero()); 2]; N];
    let [keys, queries] = other;
    for row in &mut rows {
        *row = &mut std::mem::take(row)[..a.len()];
    }
    for (c, ((&a, &k), &q)) in a.iter().zip(keys).zip(queries).enumerate() {
        for n in 0..N {
            let x = T::vector_mul(simd, rows[n][c], a);
            rows[n][c] = x;
            sums[n] = [T::vector_mul_add(simd, x, k, sums[n][0]), T::vector_mul_add(simd, x, q, sums[n][1])];
        }
    }
    let mut totals = [[T::zero(); 2]; N];
    for n in 0..N {
        for i in 0..2 {
            totals[n][i] = T::total(simd, sums[n][i]);
        }
    }
    totals
}

/// A row as it lies in memory, or padded with zeros in `buffer`.
#[inline(always)]
fn row<'a, T: Real>(from: &ArrayView1<'a, T>, buffer: &'a mut [T]) -> &'a [T] {
    match from.to_slice() {
        Some(row) if row.len() == buffer.len() => row,
        _ => {
            copy(*from, &mut buffer[..from.len()]);
            buffer
        }
    }
}

#[cfg(test)]
mod tests {
    use ndarray::Array1;
    use pulp::Scalar;

    use super::*;

    #[test]
    fn the_decay_over_equal_tokens_is_rounded_as_often_as_it_is_multiplied() {
        const CHANNELS: usize = 4096;
        let g = Array1::from_shape_fn(CHANNELS, |d| -(10.0_f32.powf(5.5 * d as f32 / CHANNELS as f32 - 5.0)));
        let ones = Array1::ones(CHANNELS);
        let tokens = (0..CHUNK).map(|_| Token { q: ones.view(), k: ones.view(), g: g.view(), beta: 1.0 });
        let mut chunk = Chunk::new(CHANNELS);
        chunk.prepare::<Scalar, false>(Scalar, tokens, 1.0, &mut [0.0; CHANNELS]);
        let last = &chunk.reads[(CHUNK - 1) * CHANNELS..CHUNK * CHANNELS];
        let squares = last.iter().zip(&g).map(|(&decay, &g)| {
            let want = (CHUNK as f64 * f64::from(g)).exp();
            ((f64::from(decay) - want) / want).powi(2)
        });
        let error = (squares.sum::<f64>() / CHANNELS as f64).sqrt() * f64::from(1 << 24);
        // If each token's decay were rounded by itself, 2.9: all of them the same way.
        assert!(error < 1.5, "{error} units of 2^-24");
    }
}
