//! One token: the state is changed where it lies, read once from memory and once more from cache.

use ndarray::{Array4, ArrayView1, ArrayViewMut1, ArrayViewMut2, ArrayViewMut4, Axis, s};
use pulp::Simd;

use super::prefetch::prefetch;
use super::rows::{Aligned, copy, paste};
use super::work::{SMALL, Work, cut, run_all};
use super::{Real, Views};

/// Rows of a state that are passed together, sharing the loads of what all rows have in common.
const ROWS: usize = 4;

/// Output `[B, 1, HV, V]`; takes the state to the next one. Views of a single token.
pub(crate) fn step<T: Real>(inputs: &Views<T>, mut state: ArrayViewMut4<T>, scale: f64) -> Array4<T> {
    let (batch, _, heads, key_dim) = inputs.q.dim();
    let (_, _, value_heads, value_dim) = inputs.v.dim();
    let (lanes, group) = (batch * value_heads, value_heads / heads);
    let mut o = Array4::zeros([batch, 1, value_heads, value_dim]);
    let states = cut(state.view_mut(), Axis(0), 1).flat_map(|x| cut(x, Axis(1), 1));
    let mut steps = (0..lanes).zip(o.rows_mut()).zip(states).map(|((lane, o), state)| {
        let (b, hv) = (lane / value_heads, lane % value_heads);
        Step {
            q: inputs.q.slice(s![b, 0, hv / group, ..]),
            k: inputs.k.slice(s![b, 0, hv / group, ..]),
            v: inputs.v.slice(s![b, 0, hv, ..]),
            g: inputs.g.slice(s![b, 0, hv, ..]),
            beta: inputs.beta[[b, 0, hv]],
            scale: T::from(scale).expect("a float"),
            o,
            state: state.slice_move(s![0, 0, .., ..]),
        }
    });
    let work = lanes * key_dim * value_dim;
    let parts = if work < SMALL { 1 } else { 4 * rayon::current_num_threads() };
    let size = lanes.div_ceil(parts);
    let groups: Vec<_> = (0..lanes.div_ceil(size)).map(|_| Steps(steps.by_ref().take(size).collect())).collect();
    drop(steps);
    run_all(groups, work);
    o
}

/// Of one head.
struct Step<'a, T> {
    /// `[K]`.
    q: ArrayView1<'a, T>,
    k: ArrayView1<'a, T>,
    /// `[V]`.
    v: ArrayView1<'a, T>,
    /// `[K]`.
    g: ArrayView1<'a, T>,
    beta: T,
    scale: T,
    /// `[V]`.
    o: ArrayViewMut1<'a, T>,
    /// `[K, V]`.
    state: ArrayViewMut2<'a, T>,
}

/// Of one thread.
struct Steps<'a, T>(Vec<Step<'a, T>>);

impl<T: Real> Work for Steps<'_, T> {
    #[inline(always)]
    fn run<S: Simd, const FMA: bool>(mut self, simd: S) {
        let (key_dim, value_dim) = self.0[0].state.dim();
        let (width, columns) = (key_dim.next_multiple_of(ROWS), value_dim.next_multiple_of(T::lanes::<S>()));
        let whole = (width, columns) == (key_dim, value_dim);
        let mut token = Token::new(width, columns);
        let mut padded = Vec::new();
        let mut steps = &mut self.0[..];
        while let Some((step, others)) = steps.split_first_mut() {
            token.prepare::<FMA>(step);
            let next = others.first().map(|next| next.state.view());
            let ahead = |d: usize| {
                if let Some(state) = next.filter(|_| d < key_dim) {
                    prefetch(state.row(d));
                }
            };
            match step.state.as_slice_mut().filter(|_| whole) {
                Some(state) => token.take::<S>(simd, state, ahead),
                None => {
                    padded.clear();
                    padded.resize(width * columns, T::zero());
                    for (row, padded) in step.state.rows().into_iter().zip(padded.chunks_exact_mut(columns)) {
                        copy(row, &mut padded[..value_dim]);
                    }
                    token.take::<S>(simd, &mut padded, ahead);
                    for (row, padded) in step.state.rows_mut().into_iter().zip(padded.chunks_exact(columns)) {
                        paste(&padded[..value_dim], row);
                    }
                }
            }
            paste(&token.values[2 * columns..][..value_dim], step.o.view_mut());
            steps = others;
        }
    }
}

/// What the rows of a state share, padded with zeros.
struct Token<T> {
    beta: T,
    /// `scale q . k`.
    see: T,
    /// `[7, K]`: the decay; what its rounding leaves out, times the decay, since the next call knows nothing of it; `k`; `k`
    /// and scaled `q` times the decay; `g`; zeros.
    keys: Aligned<T>,
    /// `[3, V]`: values, then writes; predictions; output.
    values: Aligned<T>,
}

impl<T: Real> Token<T> {
    fn new(key_dim: usize, value_dim: usize) -> Self {
        let (keys, values) = (Aligned::zeros(7 * key_dim), Aligned::zeros(3 * value_dim));
        Self { beta: T::zero(), see: T::zero(), keys, values }
    }

    #[inline(always)]
    fn prepare<const FMA: bool>(&mut self, step: &Step<T>) {
        let [decay, rest, k, k_decayed, q_decayed, g, zero] = split(&mut self.keys);
        let [u, predicted, o] = split(&mut self.values);
        copy(step.k, &mut k[..step.k.len()]);
        copy(step.q, &mut q_decayed[..step.q.len()]);
        copy(step.g, &mut g[..step.g.len()]);
        copy(step.v, &mut u[..step.v.len()]);
        rest.fill(T::zero());
        T::decays::<FMA>(g, zero, rest, decay);
        self.beta = step.beta;
        self.see = T::zero();
        for (d, &decay) in decay.iter().enumerate() {
            let q = q_decayed[d] * step.scale;
            rest[d] = rest[d] * decay;
            k_decayed[d] = decay * k[d];
            q_decayed[d] = decay * q;
            self.see = self.see + q * k[d];
        }
        predicted.fill(T::zero());
        o.fill(T::zero());
    }

    /// Takes the state `[K, V]` to the next one; `ahead` is told each row that is read.
    #[inline(always)]
    fn take<S: Simd>(&mut self, simd: S, state: &mut [T], ahead: impl Fn(usize)) {
        let [decay, rest, k, k_decayed, q_decayed, _, _] = split(&mut self.keys);
        let values = split::<T, 3>(&mut self.values);
        let value_dim = values[0].len();
        let [u, predicted, o] = values.map(T::vectors_mut::<S>);

        let coefficients = k_decayed.as_chunks::<ROWS>().0.iter().zip(q_decayed.as_chunks::<ROWS>().0);
        for (i, (rows, (k, q))) in state.chunks_exact(ROWS * value_dim).zip(coefficients).enumerate() {
            (i * ROWS..(i + 1) * ROWS).for_each(&ahead);
            let mut split = [T::vectors::<S>(rows); ROWS];
            for (r, row) in split.iter_mut().enumerate() {
                *row = &row[r * u.len()..][..u.len()];
            }
            let (k, q) = (splat(simd, k), splat(simd, q));
            for (c, (predicted, o)) in predicted.iter_mut().zip(o.iter_mut()).enumerate() {
                let mut sums = [*predicted, *o];
                for r in 0..ROWS {
                    let x = split[r][c];
                    sums = [T::vector_mul_add(simd, k[r], x, sums[0]), T::vector_mul_add(simd, q[r], x, sums[1])];
                }
                [*predicted, *o] = sums;
            }
        }
        let (beta, see) = (T::splat(simd, self.beta), T::splat(simd, self.see));
        for ((u, &predicted), o) in u.iter_mut().zip(&*predicted).zip(&mut *o) {
            *u = T::vector_mul(simd, beta, T::vector_sub(simd, *u, predicted));
            *o = T::vector_mul_add(simd, see, *u, *o);
        }
        let coefficients = decay.iter().zip(&*rest).zip(&*k);
        // From the end, which is still in the first cache.
        for (row, ((&decay, &rest), &k)) in state.chunks_exact_mut(value_dim).zip(coefficients).rev() {
            let (decay, rest, k) = (T::splat(simd, decay), T::splat(simd, rest), T::splat(simd, k));
            for (x, &u) in T::vectors_mut::<S>(row).iter_mut().zip(&*u) {
                let write = T::vector_mul_add(simd, rest, *x, T::vector_mul(simd, k, u));
                *x = T::vector_mul_add(simd, decay, *x, write);
            }
        }
    }
}

#[inline(always)]
fn splat<S: Simd, T: Real>(simd: S, x: &[T; ROWS]) -> [T::Vector<S>; ROWS] {
    let mut vectors = [T::splat(simd, T::zero()); ROWS];
    for (vector, &x) in vectors.iter_mut().zip(x) {
        *vector = T::splat(simd, x);
    }
    vectors
}

/// `N` rows.
#[inline(always)]
fn split<T, const N: usize>(rows: &mut [T]) -> [&mut [T]; N] {
    let mut rows = rows.chunks_exact_mut(rows.len() / N);
    std::array::from_fn(|_| rows.next().expect("so many rows"))
}
