//! Some columns of one state through all tokens.

use std::mem::MaybeUninit;

use ndarray::{ArrayView1, ArrayView2, ArrayViewMut2, ArrayViewMut3, Axis};
use pulp::Simd;

use super::blocks::Blocks;
use super::chunk::{CHUNK, Chunk, Token};
use super::prefetch::prefetch;
use super::rows::{Aligned, copy, paste};
use super::tile::{padded, update};
use super::work::Work;
use super::{KEEP_EVERY, Real};

pub(super) struct Task<'a, T> {
    /// `[T, K]`.
    pub q: ArrayView2<'a, T>,
    pub k: ArrayView2<'a, T>,
    /// `[T, V]`, like all `V` here the columns of the task.
    pub v: ArrayView2<'a, T>,
    /// `[T, K]`.
    pub g: ArrayView2<'a, T>,
    /// `[T]`.
    pub beta: ArrayView1<'a, T>,
    /// `[K, V]`.
    pub state: Option<ArrayView2<'a, T>>,
    pub scale: T,
    /// `[T, V]`.
    pub o: ArrayViewMut2<'a, MaybeUninit<T>>,
    /// `[K, V]`.
    pub final_state: ArrayViewMut2<'a, MaybeUninit<T>>,
    /// [`Outputs::kept`](super::Outputs::kept): `[N, K, V]` and `[T, V]`.
    pub kept: Option<Kept<'a, MaybeUninit<T>>>,
}

/// States and errors.
type Kept<'a, T> = (ArrayViewMut3<'a, T>, ArrayViewMut2<'a, T>);

/// Tasks of one thread. They take turns at [`KEEP_EVERY`] tokens: in memory the heads of a token lie side by side, and the
/// tokens of a head pages apart.
pub(super) struct Group<'a, T>(pub Vec<Task<'a, T>>);

impl<T: Real> Work for Group<'_, T> {
    #[inline(always)]
    fn run<S: Simd, const FMA: bool>(mut self, simd: S) {
        let (time, key_dim) = self.0[0].q.dim();
        let columns = self.0.iter().map(|task| task.v.ncols()).max().unwrap_or(0);
        let mut scratch = Scratch::new(padded::<S, T>(key_dim), columns.next_multiple_of(2 * T::lanes::<S>()));
        let states = self.0.iter().map(|task| {
            let width = padded::<S, T>(key_dim);
            let mut state =
                State::<T, S> { blocks: Blocks::zeros(simd, width, task.v.ncols()), carry: vec![T::zero(); width] };
            if let Some(initial) = task.state {
                state.blocks.load(initial);
            }
            state
        });
        let mut states: Vec<_> = states.collect();
        for start in (0..time).step_by(KEEP_EVERY) {
            for (i, state) in states.iter_mut().enumerate() {
                let (done, tasks) = self.0.split_at_mut(i);
                let (task, others) = tasks.split_first_mut().expect("as many states as tasks");
                // Whose turn is next, and where it starts.
                let next =
                    others.first().map(|next| (next, start)).or(done.first().map(|next| (next, start + KEEP_EVERY)));
                if let Some((kept, _)) = task.kept.as_mut().filter(|_| start > 0) {
                    state.blocks.store(kept.index_axis_mut(Axis(0), start / KEEP_EVERY - 1));
                }
                let end = time.min(start + KEEP_EVERY);
                for start in (start..end).step_by(CHUNK) {
                    let next = next.filter(|_| start + CHUNK >= end);
                    task.advance::<S, FMA>(simd, start, next, state, &mut scratch);
                }
            }
        }
        for (task, mut state) in self.0.into_iter().zip(states) {
            state.finish(simd);
            state.blocks.store(task.final_state);
        }
    }
}

struct State<T: Real, S: Simd> {
    blocks: Blocks<T, S>,
    /// What the roundings of all decays so far have left out.
    carry: Vec<T>,
}

impl<T: Real, S: Simd> State<T, S> {
    /// Takes in what the roundings of all decays have left out: the next call knows nothing of it.
    #[inline(always)]
    fn finish(&mut self, simd: S) {
        for block in self.blocks.pairs.chunks_exact_mut(self.blocks.height) {
            for (row, &carry) in block.iter_mut().zip(&self.carry) {
                *row = row.add::<S, T>(simd, carry, *row);
            }
        }
    }
}

/// Of a chunk.
struct Scratch<T> {
    chunk: Chunk<T>,
    /// `[CHUNK, V]`, padded: rows lie far apart in memory, so each is passed at once.
    v: Aligned<T>,
    o: Aligned<T>,
    errors: Aligned<T>,
}

impl<T: Real> Scratch<T> {
    fn new(width: usize, columns: usize) -> Self {
        let values = || Aligned::zeros(CHUNK * columns);
        Self { chunk: Chunk::new(width), v: values(), o: values(), errors: values() }
    }
}

impl<T: Real> Task<'_, T> {
    /// A chunk of tokens.
    #[inline(always)]
    fn advance<S: Simd, const FMA: bool>(
        &mut self,
        simd: S,
        start: usize,
        next: Option<(&Self, usize)>,
        state: &mut State<T, S>,
        scratch: &mut Scratch<T>,
    ) {
        let (time, columns) = self.v.dim();
        let Scratch { chunk, v, o, errors } = scratch;
        let padded = v.len() / CHUNK;
        let tokens = start..time.min(start + CHUNK);
        let inputs =
            tokens.clone().map(|t| Token { q: self.q.row(t), k: self.k.row(t), g: self.g.row(t), beta: self.beta[t] });
        chunk.prepare::<S, FMA>(simd, inputs, self.scale, &mut state.carry);
        for (t, v) in tokens.clone().zip(v.chunks_exact_mut(padded)) {
            copy(self.v.row(t), &mut v[..columns]);
        }
        let count = padded / (2 * T::lanes::<S>());
        for (i, block) in state.blocks.pairs.chunks_exact_mut(state.blocks.height).enumerate() {
            // Some of the next chunk each time.
            let (upcoming, first) = next.unwrap_or((self, tokens.end));
            for t in first + i * CHUNK / count..time.min(first + (i + 1) * CHUNK / count) {
                for row in [upcoming.q.row(t), upcoming.k.row(t), upcoming.v.row(t), upcoming.g.row(t)] {
                    prefetch(row);
                }
                prefetch(upcoming.o.row(t));
                if let Some((_, errors)) = &upcoming.kept {
                    prefetch(errors.row(t));
                }
            }
            let at = |n: usize| n * padded / T::lanes::<S>() + 2 * i;
            let (v, o, errors) = (T::vectors::<S>(v), T::vectors_mut::<S>(o), T::vectors_mut::<S>(errors));
            let v = |n| [v[at(n)], v[at(n) + 1]];
            let o = |n, out: [_; 2]| o[at(n)..][..2].copy_from_slice(&out);
            let error = |n, error: [_; 2]| errors[at(n)..][..2].copy_from_slice(&error);
            let u = chunk.solve(simd, block, v, o, self.kept.is_some().then_some(error));
            update(simd, &chunk.decay, &chunk.writes, &u[..chunk.tokens], block);
        }
        for (t, o) in tokens.clone().zip(o.chunks_exact(padded)) {
            paste(&o[..columns], self.o.row_mut(t));
        }
        if let Some((_, kept)) = &mut self.kept {
            for (t, errors) in tokens.zip(errors.chunks_exact(padded)) {
                paste(&errors[..columns], kept.row_mut(t));
            }
        }
    }
}
