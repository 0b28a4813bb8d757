//! Gradients of one recurrence, from its last token to its first.
//!
//! Segments of [`KEEP_EVERY`] tokens, from the last to the first. In each, the state goes forward again, from the one that was
//! kept and with the errors that were kept, and leaves itself before every chunk; then its cotangent comes back.

use std::mem::MaybeUninit;
use std::ops::Range;

use ndarray::{ArrayView1, ArrayView2, ArrayView3, ArrayViewMut1, ArrayViewMut2, Axis, Ix2};
use pulp::Simd;

use super::adjoint::{Adjoint, block};
use super::blocks::{Blocks, load_columns};
use super::chunk::{CHUNK, Chunk, Token};
use super::prefetch::prefetch;
use super::rows::{Aligned, Place, copy, paste};
use super::tile::{Pair, padded, update_columns_to};
use super::work::Work;
use super::{KEEP_EVERY, OfOutput, Real};

pub(super) struct Lane<'a, T> {
    /// `[T, K]`.
    pub q: ArrayView2<'a, T>,
    pub k: ArrayView2<'a, T>,
    /// `[T, K]`.
    pub g: ArrayView2<'a, T>,
    /// `[T]`.
    pub beta: ArrayView1<'a, T>,
    /// `[K, V]`.
    pub state: Option<ArrayView2<'a, T>>,
    /// As the forward pass kept them, `[N, K, V]` and `[T, V]`.
    pub kept: ArrayView3<'a, T>,
    pub errors: ArrayView2<'a, T>,
    pub d_o: OfOutput<'a, T, Ix2>,
    /// `[K, V]`.
    pub d_final_state: Option<ArrayView2<'a, T>>,
    pub scale: T,
    /// As the inputs; none if it is not wanted, or in place of `d_o`.
    pub dq: Option<ArrayViewMut2<'a, MaybeUninit<T>>>,
    pub dk: Option<ArrayViewMut2<'a, MaybeUninit<T>>>,
    pub dv: Option<ArrayViewMut2<'a, MaybeUninit<T>>>,
    pub dg: Option<ArrayViewMut2<'a, MaybeUninit<T>>>,
    pub d_beta: Option<ArrayViewMut1<'a, MaybeUninit<T>>>,
    pub d_state: Option<ArrayViewMut2<'a, MaybeUninit<T>>>,
}

/// Lanes of one thread, which take turns at a segment, as those of the forward pass do.
pub(super) struct Group<'a, T>(pub Vec<Lane<'a, T>>);

impl<T: Real> Work for Group<'_, T> {
    #[inline(always)]
    fn run<S: Simd, const FMA: bool>(mut self, simd: S) {
        let (time, key_dim) = self.0[0].q.dim();
        let value_dim = self.0[0].errors.ncols();
        // Whole blocks of key channels.
        let width = padded::<S, T>(key_dim).next_multiple_of(2 * T::lanes::<S>());
        let height = padded::<S, T>(value_dim);
        let mut scratch =
            Scratch::<T, S>::new(simd, KEEP_EVERY.min(time).div_ceil(CHUNK), width, height, self.0[0].scale);
        let d_states = self.0.iter().map(|lane| {
            let mut d_state = Blocks::zeros(simd, height, key_dim);
            if let Some(d_final_state) = lane.d_final_state {
                d_state.load_columns(d_final_state);
            }
            d_state
        });
        let mut d_states: Vec<_> = d_states.collect();
        for start in (0..time).step_by(KEEP_EVERY).rev() {
            for (i, d_state) in d_states.iter_mut().enumerate() {
                let (done, lanes) = self.0.split_at_mut(i);
                let (lane, others) = lanes.split_first_mut().expect("as many states as lanes");
                // Whose turn is next, and where it starts.
                let next = others.first().map(|next| (next, start)).or(done.first().zip(start.checked_sub(KEEP_EVERY)));
                lane.segment::<S, FMA>(simd, start..time.min(start + KEEP_EVERY), d_state, next, &mut scratch);
            }
        }
        for (lane, d_state) in self.0.into_iter().zip(d_states) {
            if let Some(gradient) = lane.d_state {
                d_state.store_columns(gradient);
            }
        }
    }
}

/// Of a segment.
struct Scratch<T: Real, S: Simd> {
    chunks: Vec<Chunk<T>>,
    adjoint: Adjoint<T>,
    /// `V`, padded.
    height: usize,
    /// What the tokens write and its errors, `[chunks, CHUNK, V]`.
    u: Aligned<T>,
    errors: Aligned<T>,
    /// The state before each chunk, `[blocks, chunks, V]`.
    before: Vec<Pair<T::Vector<S>>>,
    carry: Vec<T>,
}

impl<T: Real, S: Simd> Scratch<T, S> {
    /// Of so many chunks.
    fn new(simd: S, count: usize, width: usize, height: usize, scale: T) -> Self {
        let blocks = width / (2 * T::lanes::<S>());
        Self {
            chunks: (0..count).map(|_| Chunk::new(width)).collect(),
            adjoint: Adjoint::new::<S>(width, height, scale),
            height,
            u: Aligned::zeros(count * CHUNK * height),
            errors: Aligned::zeros(count * CHUNK * height),
            before: vec![Pair([T::splat(simd, T::zero()); 2]); blocks * count * height],
            carry: vec![T::zero(); width],
        }
    }
}

impl<'a, T: Real> Lane<'a, T> {
    /// `[T, V]`.
    #[inline(always)]
    fn of_output(&self) -> Option<ArrayView2<'_, T>> {
        match &self.d_o {
            OfOutput::Zero => None,
            OfOutput::Given(d_o) => Some(d_o.view()),
            OfOutput::ForValues(d_o) => Some(d_o.view()),
        }
    }

    /// The state before token `start`, if the forward pass kept it: `[K, V]`.
    #[inline(always)]
    fn kept_before(&self, start: usize) -> Option<ArrayView2<'a, T>> {
        (start > 0).then(|| self.kept.index_axis_move(Axis(0), start / KEEP_EVERY - 1))
    }

    /// What [`prepare`](Self::prepare) reads.
    #[inline(always)]
    fn prefetch_inputs(&self, tokens: Range<usize>) {
        for t in tokens {
            for row in [self.q.row(t), self.k.row(t), self.g.row(t), self.errors.row(t)] {
                prefetch(row);
            }
        }
    }

    /// What [`take`](Self::take) reads and [`give`](Self::give) writes.
    #[inline(always)]
    fn prefetch_gradients(&self, tokens: Range<usize>) {
        for t in tokens {
            for row in [self.q.row(t), self.k.row(t)] {
                prefetch(row);
            }
            if let Some(of_output) = self.of_output() {
                prefetch(of_output.row(t));
            }
            for gradient in [&self.dq, &self.dk, &self.dv, &self.dg].into_iter().flatten() {
                prefetch(gradient.row(t));
            }
        }
    }

    /// Takes the cotangent of the state after some tokens to that of the state before. Each chunk brings what is needed next
    /// closer, the last what the `next` lane needs from there on.
    #[inline(always)]
    fn segment<S: Simd, const FMA: bool>(
        &mut self,
        simd: S,
        tokens: Range<usize>,
        d_state: &mut Blocks<T, S>,
        next: Option<(&Self, usize)>,
        scratch: &mut Scratch<T, S>,
    ) {
        let used = tokens.len().div_ceil(CHUNK);
        let of_chunk = |c: usize| tokens.start + c * CHUNK..tokens.end.min(tokens.start + (c + 1) * CHUNK);
        for c in 0..used {
            if c + 1 < used {
                self.prefetch_inputs(of_chunk(c + 1));
            } else {
                self.prefetch_gradients(of_chunk(c));
            }
            self.prepare::<S, FMA>(simd, c, of_chunk(c), scratch);
        }
        self.forward(simd, tokens.start, used, scratch);

        let Scratch { chunks, adjoint, height, u, errors, before, .. } = scratch;
        let (height, size, most) = (*height, CHUNK * *height, chunks.len());
        for (b, d_state) in d_state.pairs.chunks_exact(height).enumerate() {
            adjoint.of_state(simd, &chunks[used - 1], b, d_state);
        }
        for (c, chunk) in chunks[..used].iter().enumerate().rev() {
            if c > 0 {
                self.prefetch_gradients(of_chunk(c - 1));
            } else if let Some((lane, start)) = next {
                lane.prefetch_inputs(start..lane.q.nrows().min(start + CHUNK));
            }
            let (u, errors) = (&u[c * size..][..size], &errors[c * size..][..size]);
            self.take(of_chunk(c), adjoint);
            adjoint.solve(simd, chunk, u, errors);
            adjoint.reset();
            for (b, d_state) in d_state.pairs.chunks_exact_mut(height).enumerate() {
                adjoint.of_keys(simd, chunk, b, u, &before[(b * most + c) * height..][..height], d_state);
                // While the block is in the first cache.
                if c > 0 {
                    adjoint.of_state(simd, &chunks[c - 1], b, d_state);
                }
            }
            self.give(of_chunk(c), adjoint);
        }
    }

    /// Chunk `c`, what it writes and its errors.
    #[inline(always)]
    fn prepare<S: Simd, const FMA: bool>(&self, simd: S, c: usize, tokens: Range<usize>, scratch: &mut Scratch<T, S>) {
        let Scratch { chunks, height, u, errors, carry, .. } = scratch;
        let (chunk, height) = (&mut chunks[c], *height);
        if c == 0 {
            carry.fill(T::zero());
        }
        let inputs =
            tokens.clone().map(|t| Token { q: self.q.row(t), k: self.k.row(t), g: self.g.row(t), beta: self.beta[t] });
        chunk.prepare::<S, FMA>(simd, inputs, self.scale, carry);
        let of_chunk = c * CHUNK * height..(c + 1) * CHUNK * height;
        let (u, errors) = (&mut u[of_chunk.clone()], &mut errors[of_chunk]);
        take(self.errors, tokens, errors);
        for ((u, errors), &beta) in u.chunks_exact_mut(height).zip(errors.chunks_exact(height)).zip(&chunk.beta) {
            let beta = T::splat(simd, beta);
            for (u, &error) in T::vectors_mut::<S>(u).iter_mut().zip(T::vectors::<S>(errors)) {
                *u = T::vector_mul(simd, beta, error);
            }
        }
    }

    /// The state before each of the chunks from token `start` on, so many of which are used.
    #[inline(always)]
    fn forward<S: Simd>(&self, simd: S, start: usize, used: usize, scratch: &mut Scratch<T, S>) {
        let Scratch { chunks, height, u, before, .. } = scratch;
        let (height, most) = (*height, chunks.len());
        let first = before.chunks_exact_mut(most * height).map(|states| &mut states[..height]);
        match self.kept_before(start).or(self.state) {
            Some(state) => load_columns::<T, S>(state, first),
            None => first.for_each(|state| state.fill(Pair([T::splat(simd, T::zero()); 2]))),
        }
        for (b, states) in before.chunks_exact_mut(most * height).enumerate() {
            for ((c, chunk), u) in chunks[..used - 1].iter().enumerate().zip(u.chunks_exact(CHUNK * height)) {
                let (state, next) = states[c * height..].split_at_mut(height);
                let ([decay], writes) = (block(simd, &chunk.decay, b), block::<_, _, CHUNK>(simd, &chunk.writes, b));
                update_columns_to(simd, decay, u, &writes, state, &mut next[..height]);
            }
        }
    }

    /// What the gradients of a chunk start from.
    #[inline(always)]
    fn take(&self, tokens: Range<usize>, adjoint: &mut Adjoint<T>) {
        take(self.q, tokens.clone(), &mut adjoint.q);
        take(self.k, tokens.clone(), &mut adjoint.k);
        let (_, d_o) = adjoint.cotangents.split_at_mut(adjoint.dv.len());
        match self.of_output() {
            Some(of_output) => take(of_output, tokens, d_o),
            None => d_o.fill(T::zero()),
        }
    }

    /// The gradients of a chunk.
    #[inline(always)]
    fn give(&mut self, tokens: Range<usize>, adjoint: &Adjoint<T>) {
        let Adjoint { dq, dk, dv, dg, .. } = adjoint;
        for (rows, gradient) in [(dq, &mut self.dq), (dk, &mut self.dk), (dv, &mut self.dv), (dg, &mut self.dg)] {
            if let Some(gradient) = gradient {
                give(rows, tokens.clone(), gradient.view_mut());
            }
        }
        if let OfOutput::ForValues(gradient) = &mut self.d_o {
            give(dv, tokens.clone(), gradient.view_mut());
        }
        if let Some(gradient) = &mut self.d_beta {
            for (t, &d_beta) in tokens.zip(&adjoint.d_beta) {
                gradient[t].write(d_beta);
            }
        }
    }
}

/// Rows of a chunk as some of a matrix.
#[inline(always)]
fn give<T: Real>(rows: &[T], tokens: Range<usize>, mut matrix: ArrayViewMut2<impl Place<T>>) {
    for (t, row) in tokens.zip(rows.chunks_exact(rows.len() / CHUNK)) {
        paste(&row[..matrix.ncols()], matrix.row_mut(t));
    }
}

/// Some rows of a matrix as those of a chunk, then zeros; what pads them stays as it is.
#[inline(always)]
fn take<T: Real>(matrix: ArrayView2<T>, tokens: Range<usize>, rows: &mut [T]) {
    let width = rows.len() / CHUNK;
    let (of_tokens, missing) = rows.split_at_mut(tokens.len() * width);
    for (t, row) in tokens.zip(of_tokens.chunks_exact_mut(width)) {
        copy(matrix.row(t), &mut row[..matrix.ncols()]);
    }
    missing.fill(T::zero());
}
