//! Some columns of one state through all tokens.

use ndarray::{ArrayView1, ArrayView2, ArrayViewMut1, ArrayViewMut2, ArrayViewMut3, Axis, s};
use pulp::{Arch, Simd, WithSimd};

use super::Real;
use super::chunk::{CHUNK, Chunk, Token};
use super::prefetch::prefetch;
use super::rows::{copy, paste};
use super::tile::{Pair, padded, update};

/// Tokens between turns of the heads of a [`Group`].
pub(super) const SEGMENT: usize = 64;

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
    /// A multiple of [`SEGMENT`].
    pub keep_every: usize,
    /// `[T, V]`.
    pub o: ArrayViewMut2<'a, T>,
    /// `[K, V]`.
    pub final_state: ArrayViewMut2<'a, T>,
    /// `[N, K, V]`.
    pub kept: ArrayViewMut3<'a, T>,
}

/// Tasks of one thread. They take turns at a segment of tokens: in memory the heads of a token lie side by side, and the
/// tokens of a head pages apart.
pub(super) struct Group<'a, T>(pub Vec<Task<'a, T>>);

impl<T: Real> Group<'_, T> {
    /// With the vectors that the machine has.
    pub fn run(self) {
        Arch::new().dispatch(self);
    }
}

impl<T: Real> WithSimd for Group<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        if S::IS_SCALAR { self.sequences::<S, false>(simd) } else { self.sequences::<S, true>(simd) }
    }
}

impl<T: Real> Group<'_, T> {
    #[inline(always)]
    fn sequences<S: Simd, const FMA: bool>(mut self, simd: S) {
        let (time, key_dim) = self.0[0].q.dim();
        let columns = self.0.iter().map(|task| task.v.ncols()).max().unwrap_or(0);
        let mut scratch = Scratch::new(padded::<S, T>(key_dim), columns.next_multiple_of(2 * T::lanes::<S>()));
        let states = self.0.iter().map(|task| {
            let mut state = State::<T, S>::zeros(simd, padded::<S, T>(key_dim), task.v.ncols());
            if let Some(initial) = task.state {
                state.load(initial);
            }
            state
        });
        let mut states: Vec<_> = states.collect();
        for start in (0..time).step_by(SEGMENT) {
            for (task, state) in self.0.iter_mut().zip(&mut states) {
                if start > 0 && start % task.keep_every == 0 {
                    state.store(task.kept.index_axis_mut(Axis(0), start / task.keep_every - 1));
                }
                for start in (start..time.min(start + SEGMENT)).step_by(CHUNK) {
                    task.advance::<S, FMA>(simd, start, state, &mut scratch);
                }
            }
        }
        for (task, mut state) in self.0.into_iter().zip(states) {
            state.finish(simd);
            state.store(task.final_state);
        }
    }
}

/// Of a chunk.
struct Scratch<T> {
    chunk: Chunk<T>,
    /// `[CHUNK, V]`, padded: rows lie far apart in memory, so each is passed at once.
    v: Vec<T>,
    o: Vec<T>,
}

impl<T: Real> Scratch<T> {
    fn new(width: usize, columns: usize) -> Self {
        let values = || vec![T::zero(); CHUNK * columns];
        Self { chunk: Chunk::new(width), v: values(), o: values() }
    }
}

impl<T: Real> Task<'_, T> {
    /// A chunk of tokens.
    #[inline(always)]
    fn advance<S: Simd, const FMA: bool>(
        &mut self,
        simd: S,
        start: usize,
        state: &mut State<T, S>,
        scratch: &mut Scratch<T>,
    ) {
        let (time, columns) = self.v.dim();
        let Scratch { chunk, v, o } = scratch;
        let padded = v.len() / CHUNK;
        let tokens = start..time.min(start + CHUNK);
        let inputs =
            tokens.clone().map(|t| Token { q: self.q.row(t), k: self.k.row(t), g: self.g.row(t), beta: self.beta[t] });
        chunk.prepare::<S, FMA>(simd, inputs, self.scale, &mut state.carry);
        for (t, v) in tokens.clone().zip(v.chunks_exact_mut(padded)) {
            copy(self.v.row(t), &mut v[..columns]);
        }
        let count = state.blocks.len() / state.width;
        for (i, block) in state.blocks.chunks_exact_mut(state.width).enumerate() {
            // Some of the next chunk each time.
            for t in tokens.end + i * CHUNK / count..time.min(tokens.end + (i + 1) * CHUNK / count) {
                for row in [self.q.row(t), self.k.row(t), self.v.row(t), self.g.row(t), self.o.row(t)] {
                    prefetch(row);
                }
            }
            let at = |n: usize| n * padded / T::lanes::<S>() + 2 * i;
            let (v, o) = (T::vectors::<S>(v), T::vectors_mut::<S>(o));
            let v = |n| [v[at(n)], v[at(n) + 1]];
            let o = |n, out: [_; 2]| o[at(n)..][..2].copy_from_slice(&out);
            let u = chunk.solve(simd, block, v, o);
            update(simd, &chunk.decay, &chunk.writes, &u[..chunk.tokens], block);
        }
        for (t, o) in tokens.zip(o.chunks_exact(padded)) {
            paste(&o[..columns], self.o.row_mut(t));
        }
    }
}

/// A state as blocks of two vectors of columns, each `K` rows one after the other; the last one padded with zeros.
struct State<T: Real, S: Simd> {
    width: usize,
    /// What the roundings of all decays so far have left out.
    carry: Vec<T>,
    blocks: Vec<Pair<T::Vector<S>>>,
    /// A row of a matrix.
    row: Vec<T>,
}

impl<T: Real, S: Simd> State<T, S> {
    fn zeros(simd: S, width: usize, columns: usize) -> Self {
        let count = columns.div_ceil(2 * T::lanes::<S>());
        Self {
            width,
            carry: vec![T::zero(); width],
            blocks: vec![Pair([T::splat(simd, T::zero()); 2]); width * count],
            row: vec![T::zero(); count * 2 * T::lanes::<S>()],
        }
    }

    #[inline(always)]
    fn load(&mut self, state: ArrayView2<T>) {
        for (d, values) in state.rows().into_iter().enumerate() {
            copy(values, &mut self.row[..values.len()]);
            let (pairs, _) = T::vectors::<S>(&self.row).as_chunks();
            for (block, &pair) in self.blocks.chunks_exact_mut(self.width).zip(pairs) {
                block[d].0 = pair;
            }
        }
    }

    #[inline(always)]
    fn store(&mut self, mut state: ArrayViewMut2<T>) {
        for (d, values) in state.rows_mut().into_iter().enumerate() {
            let (pairs, _) = T::vectors_mut::<S>(&mut self.row).as_chunks_mut();
            for (block, pair) in self.blocks.chunks_exact(self.width).zip(pairs) {
                *pair = block[d].0;
            }
            paste(&self.row[..values.len()], values);
        }
    }

    /// Takes in what the roundings of all decays have left out: the next call knows nothing of it.
    #[inline(always)]
    fn finish(&mut self, simd: S) {
        for block in self.blocks.chunks_exact_mut(self.width) {
            for (Pair(row), &carry) in block.iter_mut().zip(&self.carry) {
                *row = row.map(|x| T::vector_mul_add(simd, T::splat(simd, carry), x, x));
            }
        }
    }
}

/// What all columns share for some tokens, `[SEGMENT, K]` each.
pub(super) struct Segment<T> {
    /// `K`, or more: what is beyond is zero and does not decay.
    key_dim: usize,
    carry: Vec<T>,
    pub decay: Vec<T>,
    pub q: Vec<T>,
    pub k: Vec<T>,
    /// Keys and queries times their own decay; the row after the last token is zero.
    pub k_decayed: Vec<T>,
    q_decayed: Vec<T>,
    /// `q . k`, `[SEGMENT]`.
    qk: Vec<T>,
}

impl<T: Real> Segment<T> {
    pub fn new(key_dim: usize, tokens: usize) -> Self {
        let rows = |rows: usize| vec![T::zero(); rows * key_dim];
        Self {
            key_dim,
            carry: rows(1),
            decay: rows(tokens),
            q: rows(tokens),
            k: rows(tokens),
            k_decayed: rows(tokens + 1),
            q_decayed: rows(tokens + 1),
            qk: vec![T::zero(); tokens],
        }
    }

    #[inline(always)]
    /// Of `q`, `k` and `g` of each token.
    pub fn prepare<'a, const FMA: bool>(&mut self, tokens: impl Iterator<Item = [ArrayView1<'a, T>; 3]>)
    where
        T: 'a,
    {
        let mut g_row = vec![T::zero(); self.key_dim];
        let no_rest = g_row.clone();
        let mut count = 0;
        for (n, [q, k, g]) in tokens.enumerate() {
            let row = n * self.key_dim..(n + 1) * self.key_dim;
            let given = q.len();
            copy(q, &mut self.q[row.clone()][..given]);
            copy(k, &mut self.k[row.clone()][..given]);
            copy(g, &mut g_row[..given]);
            let decay = &mut self.decay[row.clone()];
            T::decays::<FMA>(&g_row, &no_rest, &mut self.carry, decay);
            let (q, k) = (&self.q[row.clone()], &self.k[row.clone()]);
            let k_decayed = &mut self.k_decayed[row.clone()];
            for ((x, &k), &decay) in k_decayed.iter_mut().zip(k).zip(&*decay) {
                *x = decay * k;
            }
            for ((x, &q), &decay) in self.q_decayed[row].iter_mut().zip(q).zip(&*decay) {
                *x = decay * q;
            }
            self.qk[n] = dot::<T, FMA>(q, k);
            count = n + 1;
        }
        let after = count * self.key_dim..(count + 1) * self.key_dim;
        self.k_decayed[after.clone()].fill(T::zero());
        self.q_decayed[after].fill(T::zero());
    }
}

/// In eight sums, so that it becomes vector code.
#[inline(always)]
fn dot<T: Real, const FMA: bool>(a: &[T], b: &[T]) -> T {
    let mut sums = [T::zero(); 8];
    for (a, b) in a.chunks(8).zip(b.chunks(8)) {
        for ((sum, &a), &b) in sums.iter_mut().zip(a).zip(b) {
            *sum = a.fma::<FMA>(b, *sum);
        }
    }
    sums.into_iter().fold(T::zero(), |sum, x| sum + x)
}
