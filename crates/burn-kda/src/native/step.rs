//! One token: the state is changed where it lies, read once from memory and once more from cache.

use ndarray::{Array4, ArrayView1, ArrayViewMut1, ArrayViewMut2, ArrayViewMut4, Axis, s};
use pulp::Simd;

use super::prefetch::prefetch_slice;
use super::rows::{Aligned, copy, paste};
use super::work::{SMALL, Work, cut, run_all};
use super::{Real, Views};

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

/// Of one thread, one after the other.
struct Steps<'a, T>(Vec<Step<'a, T>>);

impl<T: Real> Work for Steps<'_, T> {
    #[inline(always)]
    fn run<S: Simd, const FMA: bool>(mut self, simd: S) {
        let (key_dim, value_dim) = self.0[0].state.dim();
        let lanes = T::lanes::<S>();
        let columns = value_dim.next_multiple_of(lanes);
        let mut token = Token::new(key_dim.next_multiple_of(lanes), columns);
        let mut copied = Vec::new();
        let mut steps = &mut self.0[..];
        while let Some((step, others)) = steps.split_first_mut() {
            token.prepare::<S, FMA>(simd, step);
            match step.state.as_slice_mut().filter(|_| columns == value_dim) {
                Some(state) => {
                    let next = others.first().and_then(|next| next.state.as_slice());
                    token.take::<S>(simd, state, next.unwrap_or(&[]));
                }
                None => {
                    copied.clear();
                    copied.resize(key_dim * columns, T::zero());
                    for (row, copied) in step.state.rows().into_iter().zip(copied.chunks_exact_mut(columns)) {
                        copy(row, &mut copied[..value_dim]);
                    }
                    token.take::<S>(simd, &mut copied, &[]);
                    for (row, copied) in step.state.rows_mut().into_iter().zip(copied.chunks_exact(columns)) {
                        paste(&copied[..value_dim], row);
                    }
                }
            }
            paste(&token.values[columns..][..value_dim], step.o.view_mut());
            steps = others;
        }
    }
}

/// Rows of [`Token::keys`].
const KEYS: usize = 6;

/// What the rows of a state share, padded with zeros.
struct Token<T> {
    beta: T,
    /// `scale q . k`.
    see: T,
    /// `[KEYS, K]`: the decay; what its rounding leaves out, times the decay, since the next call knows nothing of it; `k`; `k`
    /// and scaled `q` times the decay; `g`.
    keys: Aligned<T>,
    /// `[2, V]`: values, then writes; output.
    values: Aligned<T>,
}

impl<T: Real> Token<T> {
    fn new(key_dim: usize, value_dim: usize) -> Self {
        let (keys, values) = (Aligned::zeros(KEYS * key_dim), Aligned::zeros(2 * value_dim));
        Self { beta: T::zero(), see: T::zero(), keys, values }
    }

    #[inline(always)]
    fn prepare<S: Simd, const FMA: bool>(&mut self, simd: S, step: &Step<T>) {
        let [decay, rest, k, k_decayed, q_decayed, g] = split::<T, KEYS>(&mut self.keys);
        let [u, _] = split::<T, 2>(&mut self.values);
        copy(step.k, &mut k[..step.k.len()]);
        copy(step.q, &mut q_decayed[..step.q.len()]);
        copy(step.g, &mut g[..step.g.len()]);
        copy(step.v, &mut u[..step.v.len()]);
        self.beta = step.beta;
        let mul = T::vector_mul::<S>;
        let (scale, mut see) = (T::splat(simd, step.scale), T::splat(simd, T::zero()));
        let zero = T::splat(simd, T::zero());
        let [decay, rest, k, k_decayed, q_decayed, g] =
            [decay, rest, k, k_decayed, q_decayed, g].map(T::vectors_mut::<S>);
        for (d, &g) in g.iter().enumerate() {
            let q = mul(simd, q_decayed[d], scale);
            let [a, left_out] = T::decay::<S, FMA>(simd, g, zero);
            decay[d] = a;
            rest[d] = mul(simd, left_out, a);
            k_decayed[d] = mul(simd, a, k[d]);
            q_decayed[d] = mul(simd, a, q);
            see = T::vector_mul_add(simd, q, k[d], see);
        }
        self.see = T::total(simd, see);
    }

    /// Takes the state `[K, V]` to the next one, and fetches that of the `next` head.
    #[inline(always)]
    fn take<S: Simd>(&mut self, simd: S, state: &mut [T], next: &[T]) {
        let mut columns = 0..self.values.len() / 2 / T::lanes::<S>();
        while !columns.is_empty() {
            let first = columns.start;
            columns.start += match columns.len() {
                8.. => self.columns::<S, 8>(simd, state, next, first),
                4.. => self.columns::<S, 4>(simd, state, next, first),
                2.. => self.columns::<S, 2>(simd, state, next, first),
                _ => self.columns::<S, 1>(simd, state, next, first),
            };
        }
    }

    /// `M` vectors of columns, whose sums stay in registers, but for a few of eight where there are 16: passing half a row
    /// at a time is slower still. Returns `M`.
    #[inline(always)]
    fn columns<S: Simd, const M: usize>(&mut self, simd: S, state: &mut [T], next: &[T], first: usize) -> usize {
        let [decay, rest, k, k_decayed, q_decayed, _] = split::<T, KEYS>(&mut self.keys);
        let values = split::<T, 2>(&mut self.values);
        let width = values[0].len();
        let [u, o] = values.map(|values| &mut T::vectors_mut::<S>(values)[first..][..M]);
        let zero = T::splat(simd, T::zero());
        let [mut predicted, mut read] = [[zero; M]; 2];
        let rows = state.chunks_exact(width).zip(&*k_decayed).zip(&*q_decayed);
        for (d, ((row, &k), &q)) in rows.enumerate() {
            let at = d * width + first * T::lanes::<S>();
            if let Some(next) = next.get(at..at + M * T::lanes::<S>()) {
                prefetch_slice(next);
            }
            let row = &T::vectors::<S>(row)[first..][..M];
            let (k, q) = (T::splat(simd, k), T::splat(simd, q));
            for m in 0..M {
                predicted[m] = T::vector_mul_add(simd, k, row[m], predicted[m]);
                read[m] = T::vector_mul_add(simd, q, row[m], read[m]);
            }
        }
        let (beta, see) = (T::splat(simd, self.beta), T::splat(simd, self.see));
        for m in 0..M {
            u[m] = T::vector_mul(simd, beta, T::vector_sub(simd, u[m], predicted[m]));
            o[m] = T::vector_mul_add(simd, see, u[m], read[m]);
        }
        let rows = state.chunks_exact_mut(width).zip(&*decay).zip(&*rest).zip(&*k);
        // From the end, which is still in the first cache.
        for (((row, &decay), &rest), &k) in rows.rev() {
            let (decay, rest, k) = (T::splat(simd, decay), T::splat(simd, rest), T::splat(simd, k));
            let row = &mut T::vectors_mut::<S>(row)[first..][..M];
            for m in 0..M {
                let write = T::vector_mul_add(simd, rest, row[m], T::vector_mul(simd, k, u[m]));
                row[m] = T::vector_mul_add(simd, decay, row[m], write);
            }
        }
        M
    }
}

/// `N` rows.
#[inline(always)]
fn split<T, const N: usize>(rows: &mut [T]) -> [&mut [T]; N] {
    let mut rows = rows.chunks_exact_mut(rows.len() / N);
    std::array::from_fn(|_| rows.next().expect("so many rows"))
}
