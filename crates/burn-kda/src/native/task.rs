//! Some columns of one state through all tokens.

use ndarray::{ArrayView1, ArrayView2, ArrayViewMut1, ArrayViewMut2, ArrayViewMut3, Axis, s};
use pulp::{Arch, Simd, WithSimd};

use super::Real;

/// Tokens whose decays are computed at once, and for which a block of columns stays in the first cache.
pub(super) const SEGMENT: usize = 32;

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

impl<T: Real> Task<'_, T> {
    /// With the vectors that the machine has.
    pub fn run(self) {
        Arch::new().dispatch(self);
    }
}

impl<T: Real> WithSimd for Task<'_, T> {
    type Output = ();

    /// A block is four vectors wide: the predictions and the reads of a block are as many sums in registers, enough
    /// to hide the latency of a multiply-add.
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        match (S::F32_LANES, size_of::<T>()) {
            (1, _) => self.blocks_of::<8, false>(),
            (4, _) => self.blocks_of::<16, true>(),
            (16, 4) => self.blocks_of::<64, true>(),
            (8, 4) | (16, _) => self.blocks_of::<32, true>(),
            _ => self.blocks_of::<16, true>(),
        }
    }
}

impl<T: Real> Task<'_, T> {
    #[inline(always)]
    fn blocks_of<const W: usize, const FMA: bool>(self) {
        match self.q.nrows() {
            1 => self.step::<W, FMA>(),
            _ => self.sequence::<W, FMA>(),
        }
    }

    #[inline(always)]
    fn sequence<const W: usize, const FMA: bool>(mut self) {
        let (time, key_dim) = self.q.dim();
        let columns = self.v.ncols();
        let mut state = Blocks::<T, W>::zeros(key_dim, columns);
        if let Some(initial) = self.state {
            state.load(initial);
        }
        let mut segment = Segment::new(key_dim, time.min(SEGMENT));
        // Values and outputs of a segment: their rows lie far apart in memory, so each is passed at once.
        let width = columns.next_multiple_of(W);
        let (mut v, mut o) = (vec![T::zero(); SEGMENT * width], vec![T::zero(); SEGMENT * width]);
        for start in (0..time).step_by(SEGMENT) {
            if start > 0 && start % self.keep_every == 0 {
                state.store(self.kept.index_axis_mut(Axis(0), start / self.keep_every - 1));
            }
            let tokens = start..time.min(start + SEGMENT);
            segment.prepare::<FMA>(tokens.clone().map(|t| [self.q.row(t), self.k.row(t), self.g.row(t)]));
            for (t, v) in tokens.clone().zip(v.chunks_exact_mut(width)) {
                copy(self.v.row(t), &mut v[..columns]);
            }
            for (i, block) in state.blocks.chunks_exact_mut(key_dim).enumerate() {
                let [mut predicted, mut read] = segment.read::<W, FMA>(block);
                for (n, t) in tokens.clone().enumerate() {
                    let (beta, qk) = (self.beta[t], segment.qk[n]);
                    let (start, mut u) = (n * width + i * W, [T::zero(); W]);
                    let (v, o) = (&v[start..][..W], &mut o[start..][..W]);
                    for j in 0..W {
                        u[j] = beta * (v[j] - predicted[j]);
                        o[j] = self.scale * qk.fma::<FMA>(u[j], read[j]);
                    }
                    if t + 1 < time {
                        [predicted, read] = segment.update::<W, FMA>(n, block, &u);
                    } else {
                        segment.finish::<W, FMA>(n, block, &u);
                    }
                }
            }
            for (t, o) in tokens.zip(o.chunks_exact(width)) {
                paste(&o[..columns], self.o.row_mut(t));
            }
        }
        state.store(self.final_state);
    }
}

impl<T: Real> Task<'_, T> {
    /// One token: the state is read and written where it lies, its columns in blocks that stay in cache between the two
    /// passes.
    #[inline(always)]
    fn step<const W: usize, const FMA: bool>(mut self) {
        let (key_dim, columns) = self.final_state.dim();
        let mut segment = Segment::new(key_dim, 1);
        segment.prepare::<FMA>(std::iter::once([self.q.row(0), self.k.row(0), self.g.row(0)]));
        let (beta, qk) = (self.beta[0], segment.qk[0]);
        for start in (0..columns).step_by(W) {
            let span = start..columns.min(start + W);
            let block = self.state.as_ref().map(|state| state.slice(s![.., span.clone()]));
            // Zeros without a state, so that a NaN in `g` passes.
            let row = |d: usize| block.as_ref().map_or([T::zero(); W], |block| load::<T, W>(block.row(d)));
            let (mut predicted, mut read) = ([T::zero(); W], [T::zero(); W]);
            for (d, (&k, &q)) in segment.k_decayed.iter().zip(&segment.q_decayed).take(key_dim).enumerate() {
                let row = row(d);
                for j in 0..W {
                    predicted[j] = k.fma::<FMA>(row[j], predicted[j]);
                    read[j] = q.fma::<FMA>(row[j], read[j]);
                }
            }
            let v = load::<T, W>(self.v.slice(s![0, span.clone()]));
            let (mut u, mut o) = ([T::zero(); W], [T::zero(); W]);
            for j in 0..W {
                u[j] = beta * (v[j] - predicted[j]);
                o[j] = self.scale * qk.fma::<FMA>(u[j], read[j]);
            }
            paste(&o[..span.len()], self.o.slice_mut(s![0, span.clone()]));
            for (d, mut next) in self.final_state.slice_mut(s![.., span.clone()]).rows_mut().into_iter().enumerate() {
                let (decay, k) = (segment.decay[d], segment.k[d]);
                let left_out = segment.carry[d] * decay;
                let row = row(d);
                let mut x = [T::zero(); W];
                for j in 0..W {
                    x[j] = decay.fma::<FMA>(row[j], left_out.fma::<FMA>(row[j], k * u[j]));
                }
                store(&x, next.view_mut());
            }
        }
    }
}

/// Of a block; a vector that crosses a cache line would cost twice.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Row<T, const W: usize>([T; W]);

/// A state as blocks of `W` columns, each `K` rows one after the other; the last one padded with zeros.
struct Blocks<T, const W: usize> {
    key_dim: usize,
    blocks: Vec<Row<T, W>>,
}

impl<T: Real, const W: usize> Blocks<T, W> {
    fn zeros(key_dim: usize, columns: usize) -> Self {
        Self { key_dim, blocks: vec![Row([T::zero(); W]); key_dim * columns.div_ceil(W)] }
    }

    fn load(&mut self, state: ArrayView2<T>) {
        for (i, block) in self.blocks.chunks_exact_mut(self.key_dim).enumerate() {
            let span = i * W..state.ncols().min((i + 1) * W);
            for (Row(row), values) in block.iter_mut().zip(state.rows()) {
                copy(values.slice(s![span.clone()]), &mut row[..span.len()]);
            }
        }
    }

    fn store(&self, mut state: ArrayViewMut2<T>) {
        for (i, block) in self.blocks.chunks_exact(self.key_dim).enumerate() {
            let span = i * W..state.ncols().min((i + 1) * W);
            for (Row(row), mut values) in block.iter().zip(state.rows_mut()) {
                paste(&row[..span.len()], values.slice_mut(s![span.clone()]));
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
        let mut count = 0;
        for (n, [q, k, g]) in tokens.enumerate() {
            let row = n * self.key_dim..(n + 1) * self.key_dim;
            let given = q.len();
            copy(q, &mut self.q[row.clone()][..given]);
            copy(k, &mut self.k[row.clone()][..given]);
            copy(g, &mut g_row[..given]);
            let decay = &mut self.decay[row.clone()];
            T::decays::<FMA>(&g_row, &mut self.carry, decay);
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

    /// What the first token predicts and reads.
    #[inline(always)]
    fn read<const W: usize, const FMA: bool>(&self, block: &[Row<T, W>]) -> [[T; W]; 2] {
        let (mut predicted, mut read) = ([T::zero(); W], [T::zero(); W]);
        for ((Row(row), &k), &q) in block.iter().zip(&self.k_decayed).zip(&self.q_decayed) {
            for j in 0..W {
                predicted[j] = k.fma::<FMA>(row[j], predicted[j]);
                read[j] = q.fma::<FMA>(row[j], read[j]);
            }
        }
        [predicted, read]
    }

    /// Writes token `n` into the block; what token `n + 1` predicts and reads.
    #[inline(always)]
    fn update<const W: usize, const FMA: bool>(&self, n: usize, block: &mut [Row<T, W>], u: &[T; W]) -> [[T; W]; 2] {
        let dim = self.key_dim;
        let (this, next) = (n * dim..(n + 1) * dim, (n + 1) * dim..(n + 2) * dim);
        let coefficients = (self.decay[this.clone()].iter().zip(&self.k[this]))
            .zip(self.k_decayed[next.clone()].iter().zip(&self.q_decayed[next]));
        let (mut predicted, mut read) = ([T::zero(); W], [T::zero(); W]);
        for (Row(row), ((&decay, &k), (&k_next, &q_next))) in block.iter_mut().zip(coefficients) {
            for j in 0..W {
                let x = decay.fma::<FMA>(row[j], k * u[j]);
                row[j] = x;
                predicted[j] = k_next.fma::<FMA>(x, predicted[j]);
                read[j] = q_next.fma::<FMA>(x, read[j]);
            }
        }
        [predicted, read]
    }
}

impl<T: Real> Segment<T> {
    /// Writes the last token `n` of a call, with what the roundings of all decays have left out: the next call knows
    /// nothing of it.
    #[inline(always)]
    fn finish<const W: usize, const FMA: bool>(&self, n: usize, block: &mut [Row<T, W>], u: &[T; W]) {
        let this = n * self.key_dim..(n + 1) * self.key_dim;
        let coefficients = self.decay[this.clone()].iter().zip(&self.carry).zip(&self.k[this]);
        for (Row(row), ((&decay, &carry), &k)) in block.iter_mut().zip(coefficients) {
            let left_out = carry * decay;
            for j in 0..W {
                row[j] = decay.fma::<FMA>(row[j], left_out.fma::<FMA>(row[j], k * u[j]));
            }
        }
    }
}

#[inline(always)]
pub(super) fn copy<T: Real>(from: ArrayView1<T>, to: &mut [T]) {
    match from.to_slice() {
        Some(from) => to.copy_from_slice(from),
        None => to.iter_mut().zip(from).for_each(|(to, &from)| *to = from),
    }
}

/// A row, padded with zeros.
#[inline(always)]
fn load<T: Real, const W: usize>(from: ArrayView1<T>) -> [T; W] {
    if let Some(Ok(row)) = from.to_slice().map(TryInto::try_into) {
        return row;
    }
    let mut row = [T::zero(); W];
    copy(from, &mut row[..from.len()]);
    row
}

#[inline(always)]
fn store<T: Real, const W: usize>(row: &[T; W], mut to: ArrayViewMut1<T>) {
    match to.as_slice_mut().map(<&mut [T; W]>::try_from) {
        Some(Ok(to)) => *to = *row,
        _ => paste(&row[..to.len()], to),
    }
}

#[inline(always)]
pub(super) fn paste<T: Real>(from: &[T], mut to: ArrayViewMut1<T>) {
    match to.as_slice_mut() {
        Some(to) => to.copy_from_slice(from),
        None => to.iter_mut().zip(from).for_each(|(to, &from)| *to = from),
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
