//! Gradients of one recurrence, from its last token to its first.
//!
//! Segments of [`KEEP_EVERY`] tokens, from the last to the first. In each, one block of columns after the other goes
//! forward again, leaving its state before every chunk, and back.

use ndarray::{ArrayView1, ArrayView2, ArrayView3, ArrayViewMut1, ArrayViewMut2, Axis};
use pulp::{Arch, Simd, WithSimd};

use super::adjoint::{Sums, Transposed, Within};
use super::chunk::{CHUNK, Chunk, Token};
use super::prefetch::prefetch;
use super::rows::{copy, paste};
use super::state::State;
use super::tile::{Pair, padded, update};
use super::{KEEP_EVERY, Real};

pub(super) struct Lane<'a, T> {
    /// `[T, K]`.
    pub q: ArrayView2<'a, T>,
    pub k: ArrayView2<'a, T>,
    /// `[T, V]`.
    pub v: ArrayView2<'a, T>,
    /// `[T, K]`.
    pub g: ArrayView2<'a, T>,
    /// `[T]`.
    pub beta: ArrayView1<'a, T>,
    /// `[K, V]`.
    pub state: Option<ArrayView2<'a, T>>,
    /// `[N, K, V]`.
    pub kept: Option<ArrayView3<'a, T>>,
    /// `[T, V]`.
    pub d_o: Option<ArrayView2<'a, T>>,
    /// `[K, V]`.
    pub d_final_state: Option<ArrayView2<'a, T>>,
    pub scale: T,
    /// As the inputs; none if it is not wanted.
    pub dq: Option<ArrayViewMut2<'a, T>>,
    pub dk: Option<ArrayViewMut2<'a, T>>,
    pub dv: Option<ArrayViewMut2<'a, T>>,
    pub dg: Option<ArrayViewMut2<'a, T>>,
    pub d_beta: Option<ArrayViewMut1<'a, T>>,
    pub d_state: Option<ArrayViewMut2<'a, T>>,
}

impl<T: Real> Lane<'_, T> {
    /// With the vectors that the machine has.
    pub fn run(self) {
        Arch::new().dispatch(self);
    }
}

impl<T: Real> WithSimd for Lane<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        if S::IS_SCALAR { self.go::<S, false>(simd) } else { self.go::<S, true>(simd) }
    }
}

impl<T: Real> Lane<'_, T> {
    #[inline(always)]
    fn go<S: Simd, const FMA: bool>(mut self, simd: S) {
        let (time, key_dim) = self.q.dim();
        let value_dim = self.v.ncols();
        let width = padded::<S, T>(key_dim);
        let lanes = T::lanes::<S>();
        let columns = value_dim.next_multiple_of(2 * lanes);
        let count = KEEP_EVERY.min(time).div_ceil(CHUNK);

        let mut chunks: Vec<_> = (0..count).map(|_| Chunk::new(width)).collect();
        let mut sums: Vec<_> = (0..count).map(|_| Sums::<T, S>::new(simd, width)).collect();
        let mut within = Within::new(width);
        let mut transposed = Transposed::new::<S>();
        let mut d_state = State::<T, S>::zeros(simd, width, value_dim);
        if let Some(d_final_state) = self.d_final_state {
            d_state.load(d_final_state);
        }
        let mut state = State::<T, S>::zeros(simd, width, value_dim);
        let zero = Pair([T::splat(simd, T::zero()); 2]);
        // Of one block, before each chunk, and what its tokens write.
        let mut before = vec![zero; count * width];
        let mut writes = vec![[[zero; CHUNK]; 2]; count];
        // `[tokens, V]`, padded.
        let buffer = || vec![T::zero(); count * CHUNK * columns];
        let (mut v, mut d_o, mut dv) = (buffer(), buffer(), buffer());

        for start in (0..time).step_by(KEEP_EVERY).rev() {
            let tokens = start..time.min(start + KEEP_EVERY);
            let used = tokens.len().div_ceil(CHUNK);
            let mut carry = vec![T::zero(); width];
            for ((c, chunk), sums) in (0..used).zip(&mut chunks).zip(&mut sums) {
                let tokens = start + c * CHUNK..tokens.end.min(start + (c + 1) * CHUNK);
                let inputs =
                    tokens.map(|t| Token { q: self.q.row(t), k: self.k.row(t), g: self.g.row(t), beta: self.beta[t] });
                chunk.prepare::<S, FMA>(simd, inputs, self.scale, &mut carry);
                sums.reset(simd);
            }
            for rows in [&mut v, &mut d_o] {
                rows[tokens.len() * columns..].fill(T::zero());
            }
            for (n, t) in tokens.clone().enumerate() {
                copy(self.v.row(t), &mut v[n * columns..][..value_dim]);
                if let Some(of_all) = &self.d_o {
                    copy(of_all.row(t), &mut d_o[n * columns..][..value_dim]);
                }
            }
            match (&self.kept, &self.state) {
                (Some(kept), _) if start > 0 => state.load(kept.index_axis(Axis(0), start / KEEP_EVERY - 1)),
                (_, Some(state_before)) => state.load(state_before.view()),
                _ => state.blocks.fill(zero),
            }

            let blocks = state.blocks.chunks_exact_mut(width).zip(d_state.blocks.chunks_exact_mut(width));
            let block_count = columns / (2 * lanes);
            for (b, (state, d_state)) in blocks.enumerate() {
                // Some of the segment that comes next each time.
                for n in b * KEEP_EVERY / block_count..(b + 1) * KEEP_EVERY / block_count {
                    let Some(t) = (start + n).checked_sub(KEEP_EVERY) else { continue };
                    for row in [self.q.row(t), self.k.row(t), self.v.row(t), self.g.row(t)] {
                        prefetch(row);
                    }
                    if let Some(d_o) = &self.d_o {
                        prefetch(d_o.row(t));
                    }
                }
                let at = |n: usize| n * columns / lanes + 2 * b;
                let values = |x: &[T], c: usize| {
                    let (x, mut values) = (T::vectors::<S>(x), [zero; CHUNK]);
                    for (i, value) in values.iter_mut().enumerate() {
                        value.0.copy_from_slice(&x[at(c * CHUNK + i)..][..2]);
                    }
                    values
                };
                for (c, chunk) in chunks[..used].iter().enumerate() {
                    before[c * width..][..width].copy_from_slice(state);
                    writes[c] = chunk.errors(simd, state, &values(&v, c));
                    if c + 1 < used {
                        update(simd, &chunk.decay, &chunk.writes, &writes[c][0], state);
                    }
                }
                for (c, (chunk, sums)) in chunks[..used].iter().zip(&mut sums).enumerate().rev() {
                    let before = &before[c * width..][..width];
                    let ([u, errors], d_o) = (&writes[c], values(&d_o, c));
                    let d_values = chunk.block_back(simd, before, d_state, [u, errors, &d_o], sums, &mut transposed);
                    let dv = T::vectors_mut::<S>(&mut dv);
                    for (i, d_value) in d_values.iter().enumerate() {
                        dv[at(c * CHUNK + i)..][..2].copy_from_slice(&d_value.0);
                    }
                }
            }

            for (c, (chunk, sums)) in chunks[..used].iter().zip(&sums).enumerate() {
                for rows in [&mut within.q, &mut within.k, &mut within.g] {
                    rows.fill(T::zero());
                }
                for i in 0..chunk.tokens {
                    let (t, row) = (start + c * CHUNK + i, i * width..i * width + key_dim);
                    copy(self.q.row(t), &mut within.q[row.clone()]);
                    copy(self.k.row(t), &mut within.k[row.clone()]);
                    copy(self.g.row(t), &mut within.g[row]);
                }
                within.back::<S, FMA>(simd, chunk, sums, self.scale);
                for i in 0..chunk.tokens {
                    let t = start + c * CHUNK + i;
                    let of_keys = [(&within.dq, &mut self.dq), (&within.dk, &mut self.dk), (&within.dg, &mut self.dg)];
                    for (rows, gradient) in of_keys {
                        if let Some(gradient) = gradient {
                            paste(&rows[i * width..][..key_dim], gradient.row_mut(t));
                        }
                    }
                    if let Some(gradient) = &mut self.d_beta {
                        gradient[t] = within.d_beta[i];
                    }
                }
            }
            if let Some(gradient) = &mut self.dv {
                for (n, t) in tokens.enumerate() {
                    paste(&dv[n * columns..][..value_dim], gradient.row_mut(t));
                }
            }
        }
        if let Some(gradient) = self.d_state {
            d_state.store(gradient);
        }
    }
}
