//! Gradients of one recurrence, from its last token to its first.
//!
//! Segments of [`KEEP_EVERY`] tokens, from the last to the first. In each, one block of columns after the other goes
//! forward again, leaving its state before every chunk, and back.

use std::ops::Range;

use ndarray::{ArrayView1, ArrayView2, ArrayView3, ArrayViewMut1, ArrayViewMut2, Axis, s};
use pulp::Simd;

use super::adjoint::{Sums, Transposed, Within};
use super::blocks::Blocks;
use super::by_token::Values;
use super::chunk::{CHUNK, Chunk, Token};
use super::prefetch::prefetch;
use super::rows::{copy, paste};
use super::tile::{Pair, padded, update_to};
use super::work::Work;
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
    /// Whether what is in `dv` so far is `d_o`.
    pub in_place: bool,
    /// As the inputs; none if it is not wanted.
    pub dq: Option<ArrayViewMut2<'a, T>>,
    pub dk: Option<ArrayViewMut2<'a, T>>,
    pub dv: Option<ArrayViewMut2<'a, T>>,
    pub dg: Option<ArrayViewMut2<'a, T>>,
    pub d_beta: Option<ArrayViewMut1<'a, T>>,
    pub d_state: Option<ArrayViewMut2<'a, T>>,
}

/// Lanes of one thread, which take turns at a segment, as those of the forward pass do.
pub(super) struct Group<'a, T>(pub Vec<Lane<'a, T>>);

impl<T: Real> Work for Group<'_, T> {
    #[inline(always)]
    fn run<S: Simd, const FMA: bool>(mut self, simd: S) {
        let (time, key_dim) = self.0[0].q.dim();
        let value_dim = self.0[0].v.ncols();
        let width = padded::<S, T>(key_dim);
        let mut scratch = Scratch::<T, S>::new(simd, KEEP_EVERY.min(time).div_ceil(CHUNK), width, value_dim);
        let d_states = self.0.iter().map(|lane| {
            let mut d_state = Blocks::zeros(simd, width, value_dim);
            if let Some(d_final_state) = lane.d_final_state {
                d_state.load(d_final_state);
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
        for (lane, mut d_state) in self.0.into_iter().zip(d_states) {
            if let Some(gradient) = lane.d_state {
                d_state.store(gradient);
            }
        }
    }
}

/// Of a segment.
struct Scratch<T: Real, S: Simd> {
    chunks: Vec<Chunk<T>>,
    sums: Vec<Sums<T, S>>,
    within: Within<T>,
    transposed: Transposed<T>,
    /// Before the segment.
    state: Blocks<T, S>,
    /// Of one block, before each chunk, and what its tokens write.
    before: Vec<Pair<T::Vector<S>>>,
    writes: Vec<[Values<T, S>; 2]>,
    /// `[tokens, V]`.
    v: Blocks<T, S>,
    d_o: Blocks<T, S>,
    dv: Blocks<T, S>,
    carry: Vec<T>,
}

impl<T: Real, S: Simd> Scratch<T, S> {
    /// Of so many chunks.
    fn new(simd: S, count: usize, width: usize, value_dim: usize) -> Self {
        let values = || Blocks::zeros(simd, count * CHUNK, value_dim);
        let zero = Pair([T::splat(simd, T::zero()); 2]);
        Self {
            chunks: (0..count).map(|_| Chunk::new(width)).collect(),
            sums: (0..count).map(|_| Sums::new(simd, width)).collect(),
            within: Within::new(width),
            transposed: Transposed::new::<S>(),
            state: Blocks::zeros(simd, width, value_dim),
            before: vec![zero; count * width],
            writes: vec![[[zero; CHUNK]; 2]; count],
            v: values(),
            d_o: values(),
            dv: values(),
            carry: vec![T::zero(); width],
        }
    }
}

impl<T: Real> Lane<'_, T> {
    /// `[T, V]`.
    #[inline(always)]
    fn of_output(&self) -> Option<ArrayView2<'_, T>> {
        if self.in_place { self.dv.as_ref().map(|dv| dv.view()) } else { self.d_o }
    }

    #[inline(always)]
    fn prefetch(&self, t: usize) {
        for row in [self.q.row(t), self.k.row(t), self.g.row(t), self.v.row(t)] {
            prefetch(row);
        }
        if let Some(of_output) = self.of_output() {
            prefetch(of_output.row(t));
        }
    }

    /// Takes the cotangent of the state after some tokens to that of the state before. Meanwhile brings what the `next` lane
    /// needs from there on, or this one if it is alone, closer.
    #[inline(always)]
    fn segment<S: Simd, const FMA: bool>(
        &mut self,
        simd: S,
        tokens: Range<usize>,
        d_state: &mut Blocks<T, S>,
        next: Option<(&Self, usize)>,
        scratch: &mut Scratch<T, S>,
    ) {
        let Scratch { chunks, sums, within, transposed, state, before, writes, v, d_o, dv, carry } = scratch;
        let (key_dim, width, start) = (self.q.ncols(), state.height, tokens.start);
        let used = tokens.len().div_ceil(CHUNK);
        let of_chunk = |c: usize| start + c * CHUNK..tokens.end.min(start + (c + 1) * CHUNK);

        carry.fill(T::zero());
        for ((c, chunk), sums) in (0..used).zip(&mut *chunks).zip(&mut *sums) {
            let inputs =
                of_chunk(c).map(|t| Token { q: self.q.row(t), k: self.k.row(t), g: self.g.row(t), beta: self.beta[t] });
            chunk.prepare::<S, FMA>(simd, inputs, self.scale, carry);
            sums.reset(simd);
        }
        // A segment with fewer tokens than others is the last one, and the first here: what follows them is still zero.
        v.load(self.v.slice(s![tokens.clone(), ..]));
        if let Some(of_output) = self.of_output() {
            d_o.load(of_output.slice(s![tokens.clone(), ..]));
        }
        match (&self.kept, &self.state) {
            (Some(kept), _) if start > 0 => state.load(kept.index_axis(Axis(0), start / KEEP_EVERY - 1)),
            (_, Some(state_before)) => state.load(state_before.view()),
            _ => state.pairs.fill(Pair([T::splat(simd, T::zero()); 2])),
        }

        let (upcoming, mut ahead) = match next {
            Some((lane, first)) => (lane, first..lane.q.nrows().min(first + KEEP_EVERY)),
            None => (&*self, start.saturating_sub(KEEP_EVERY)..start),
        };
        let at_once = ahead.len().div_ceil(used * (d_state.pairs.len() / width));
        let rows = v.height;
        let values = v.pairs.chunks_exact(rows).zip(d_o.pairs.chunks_exact(rows)).zip(dv.pairs.chunks_exact_mut(rows));
        let states = state.pairs.chunks_exact(width).zip(d_state.pairs.chunks_exact_mut(width));
        for ((state, d_state), ((v, d_o), dv)) in states.zip(values) {
            let [v, d_o] = [v, d_o].map(|x| x.as_chunks::<CHUNK>().0);
            before[..width].copy_from_slice(state);
            for (c, chunk) in chunks[..used].iter().enumerate() {
                let (state, after) = before[c * width..].split_at_mut(width);
                writes[c] = chunk.errors(simd, state, &v[c]);
                if c + 1 < used {
                    update_to(simd, &chunk.decay, &chunk.writes, &writes[c][0], state, &mut after[..width]);
                }
            }
            let chunks = chunks[..used].iter().zip(&mut *sums).zip(dv.as_chunks_mut::<CHUNK>().0);
            for (c, ((chunk, sums), dv)) in chunks.enumerate().rev() {
                ahead.by_ref().take(at_once).for_each(|t| upcoming.prefetch(t));
                let before = &before[c * width..][..width];
                let [u, errors] = &writes[c];
                *dv = chunk.block_back(simd, before, d_state, [u, errors, &d_o[c]], sums, transposed);
            }
        }

        for (c, (chunk, sums)) in chunks[..used].iter().zip(&*sums).enumerate() {
            for rows in [&mut within.q, &mut within.k] {
                rows.fill(T::zero());
            }
            for (i, t) in of_chunk(c).enumerate() {
                let row = i * width..i * width + key_dim;
                copy(self.q.row(t), &mut within.q[row.clone()]);
                copy(self.k.row(t), &mut within.k[row]);
            }
            within.back(simd, chunk, sums, self.scale);
            for (i, t) in of_chunk(c).enumerate() {
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
            dv.store(gradient.slice_mut(s![tokens, ..]));
        }
    }
}
