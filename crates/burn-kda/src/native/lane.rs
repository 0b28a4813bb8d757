//! Gradients of one recurrence, from its last token to its first.
//!
//! With `S'_t = diag(a_t) S_{t-1}`, `p_t = S'_t^T k_t`, `e_t = v_t - p_t`, `u_t = beta_t e_t` and `D_t` the cotangent of
//! `S_t`, the read by `q_t` included:
//!
//! ```text
//! D_t  += scale q_t do_t^T                        du_t = D_t^T k_t      de_t = beta_t du_t = dv_t
//! dq_t  = scale (S'_t + k_t u_t^T) do_t           dk_t = D_t u_t - S'_t de_t
//! D'_t  = D_t - k_t de_t^T                        dg_t = rowsum(S'_t * D'_t)
//! dbeta_t = du_t . e_t                            D_{t-1} = diag(a_t) D'_t
//! ```
//!
//! States and cotangents lie V-first here: a value channel is a row of `K` numbers and an independent recurrence, and
//! the sums over value channels are sums of rows. Some rows at a time go forward through a segment again, leaving their
//! states, and back, one pass over both per token.

use ndarray::{ArrayView1, ArrayView2, ArrayView3, ArrayViewMut1, ArrayViewMut2, Axis};
use pulp::{Arch, Simd, WithSimd};

use super::rows::{copy, paste};
use super::task::Segment;
use super::{KEEP_EVERY, Real};

/// Value channels that go through a segment together, sharing the loads of what they have in common.
const ROWS: usize = 4;

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
        let (width, rows) = (key_dim.next_multiple_of(T::lanes::<S>()), value_dim.next_multiple_of(ROWS));
        let capacity = KEEP_EVERY.min(time);
        let mut segment = Segment::new(width, capacity);
        let wanted = [&self.dq, &self.dk, &self.dg].map(Option::is_some);
        let mut pass = Pass::new(width, capacity, wanted);
        let mut d_state = vec![T::zero(); rows * width];
        if let Some(d_final_state) = self.d_final_state {
            transpose(d_final_state, &mut d_state, width);
        }
        // `[tokens, V]`, padded.
        let buffer = || vec![T::zero(); capacity * rows];
        let (mut v, mut d_o, mut dv) = (buffer(), buffer(), buffer());
        let mut before = vec![T::zero(); rows * width];

        for start in (0..time).step_by(KEEP_EVERY).rev() {
            let tokens = start..time.min(start + KEEP_EVERY);
            segment.prepare::<FMA>(tokens.clone().map(|t| [self.q.row(t), self.k.row(t), self.g.row(t)]));
            for (n, t) in tokens.clone().enumerate() {
                copy(self.v.row(t), &mut v[n * rows..][..value_dim]);
                if let Some(of_all) = &self.d_o {
                    let d_o = &mut d_o[n * rows..][..value_dim];
                    copy(of_all.row(t), d_o);
                    d_o.iter_mut().for_each(|x| *x = *x * self.scale);
                }
            }
            match (&self.kept, &self.state) {
                (Some(kept), _) if start > 0 => {
                    transpose(kept.index_axis(Axis(0), start / KEEP_EVERY - 1), &mut before, width);
                }
                (_, Some(state)) => transpose(state.view(), &mut before, width),
                _ => before.fill(T::zero()),
            }

            pass.reset();
            let beta = self.beta.slice(ndarray::s![tokens.clone()]);
            for (j, (before, d_state)) in
                (before.chunks_exact(ROWS * width).zip(d_state.chunks_exact_mut(ROWS * width))).enumerate()
            {
                let at = |x: &[T], n: usize| -> [T; ROWS] { std::array::from_fn(|r| x[n * rows + j * ROWS + r]) };
                pass.forward(simd, &segment, before, beta, |n| at(&v, n));
                let d_o = |n| at(&d_o, n);
                let dv = |n: usize, de: [T; ROWS]| dv[n * rows + j * ROWS..][..ROWS].copy_from_slice(&de);
                match wanted {
                    [true, true, true] => pass.backward::<S, true>(simd, &segment, d_state, beta, d_o, dv),
                    _ => pass.backward::<S, false>(simd, &segment, d_state, beta, d_o, dv),
                }
            }

            for (n, t) in tokens.enumerate() {
                let of_keys = [(&pass.dq, &mut self.dq), (&pass.dk, &mut self.dk), (&pass.dg, &mut self.dg)];
                for (sums, gradient) in of_keys {
                    if let Some(gradient) = gradient {
                        paste(&sums[n * width..][..key_dim], gradient.row_mut(t));
                    }
                }
                if let Some(gradient) = &mut self.dv {
                    paste(&dv[n * rows..][..value_dim], gradient.row_mut(t));
                }
                if let Some(gradient) = &mut self.d_beta {
                    gradient[t] = pass.d_beta[n];
                }
            }
        }
        if let Some(gradient) = &mut self.d_state {
            for (j, row) in d_state.chunks_exact(width).take(value_dim).enumerate() {
                paste(&row[..key_dim], gradient.column_mut(j));
            }
        }
    }
}

/// `[K, V]` to rows of `width >= K`, V-first.
fn transpose<T: Real>(from: ArrayView2<T>, to: &mut [T], width: usize) {
    for (column, row) in from.columns().into_iter().zip(to.chunks_exact_mut(width)) {
        copy(column, &mut row[..column.len()]);
    }
}

/// What the value channels of a lane leave behind in one segment.
struct Pass<T> {
    /// Whether `dq`, `dk` and `dg` are wanted.
    wanted: [bool; 3],
    /// `K`, padded to whole vectors.
    width: usize,
    /// States before and after each token, `[tokens + 1, ROWS, K]`, of some rows.
    states: Vec<T>,
    /// Writes `u` and errors `e` of those rows, `[tokens]`.
    writes: Vec<[T; ROWS]>,
    errors: Vec<[T; ROWS]>,
    /// Sums over all rows, `[tokens, K]`.
    dq: Vec<T>,
    dk: Vec<T>,
    dg: Vec<T>,
    /// `[tokens]`.
    d_beta: Vec<T>,
    /// A row.
    zero: Vec<T>,
}

impl<T: Real> Pass<T> {
    fn new(width: usize, tokens: usize, wanted: [bool; 3]) -> Self {
        let rows = |count: usize| vec![T::zero(); count * width];
        Self {
            wanted,
            width,
            states: rows((tokens + 1) * ROWS),
            writes: vec![[T::zero(); ROWS]; tokens],
            errors: vec![[T::zero(); ROWS]; tokens],
            dq: rows(tokens),
            dk: rows(tokens),
            dg: rows(tokens),
            d_beta: vec![T::zero(); tokens],
            zero: rows(1),
        }
    }

    fn reset(&mut self) {
        for sums in [&mut self.dq, &mut self.dk, &mut self.dg, &mut self.d_beta] {
            sums.fill(T::zero());
        }
    }

    /// The recurrence again, as [`Task`](super::task::Task), keeping all states of some rows.
    #[inline(always)]
    fn forward<S: Simd>(
        &mut self,
        simd: S,
        segment: &Segment<T>,
        before: &[T],
        beta: ArrayView1<T>,
        v: impl Fn(usize) -> [T; ROWS],
    ) {
        let width = self.width;
        self.states[..ROWS * width].copy_from_slice(before);
        let mut sums = [T::splat(simd, T::zero()); ROWS];
        let k = T::vectors::<S>(&segment.k_decayed[..width]);
        for (sum, state) in sums.iter_mut().zip(before.chunks_exact(width)) {
            for (&k, &x) in k.iter().zip(T::vectors::<S>(state)) {
                *sum = T::vector_mul_add(simd, k, x, *sum);
            }
        }
        for (n, &beta) in beta.iter().enumerate() {
            let (v, predicted) = (v(n), sums.map(|x| T::total(simd, x)));
            let error: [T; ROWS] = std::array::from_fn(|r| v[r] - predicted[r]);
            let write = error.map(|error| beta * error);
            (self.writes[n], self.errors[n]) = (write, error);

            let k = T::vectors::<S>(&segment.k[n * width..][..width]);
            let decay = T::vectors::<S>(&segment.decay[n * width..][..width]);
            let k_next = T::vectors::<S>(&segment.k_decayed[(n + 1) * width..][..width]);
            let (old, new) = self.states[n * ROWS * width..][..2 * ROWS * width].split_at_mut(ROWS * width);
            for (r, (old, new)) in old.chunks_exact(width).zip(new.chunks_exact_mut(width)).enumerate() {
                let (write, mut sum) = (T::splat(simd, write[r]), T::splat(simd, T::zero()));
                let states = T::vectors::<S>(old).iter().zip(T::vectors_mut::<S>(new));
                for ((((&old, new), &k), &decay), &k_next) in states.zip(k).zip(decay).zip(k_next) {
                    let x = T::vector_mul_add(simd, decay, old, T::vector_mul(simd, k, write));
                    *new = x;
                    sum = T::vector_mul_add(simd, k_next, x, sum);
                }
                sums[r] = sum;
            }
        }
    }

    /// Takes the cotangent of the state after the segment to the one before it; `dv` is given each token's. `ALL`: without
    /// asking what is wanted.
    #[inline(always)]
    fn backward<S: Simd, const ALL: bool>(
        &mut self,
        simd: S,
        segment: &Segment<T>,
        d_state: &mut [T],
        beta: ArrayView1<T>,
        d_o: impl Fn(usize) -> [T; ROWS],
        mut dv: impl FnMut(usize, [T; ROWS]),
    ) {
        let width = self.width;
        let zero = T::splat(simd, T::zero());
        let splat = |x: [T; ROWS]| x.map(|x| T::splat(simd, x));
        let last = beta.len() - 1;
        let [wants_q, wants_k, wants_g] = self.wanted.map(|wanted| ALL || wanted);

        // The read of the last token, and what its write receives.
        let mut du = [zero; ROWS];
        let mut read = d_o(last);
        let q = T::vectors::<S>(&segment.q[last * width..][..width]);
        let k = T::vectors::<S>(&segment.k[last * width..][..width]);
        for (r, row) in d_state.chunks_exact_mut(width).enumerate() {
            let read = T::splat(simd, read[r]);
            for ((x, &q), &k) in T::vectors_mut::<S>(row).iter_mut().zip(q).zip(k) {
                *x = T::vector_mul_add(simd, q, read, *x);
                du[r] = T::vector_mul_add(simd, k, *x, du[r]);
            }
        }
        for (n, &beta) in beta.iter().enumerate().rev() {
            let (d_write, write, error) = (du.map(|x| T::total(simd, x)), self.writes[n], self.errors[n]);
            let d_error = d_write.map(|x| beta * x);
            dv(n, d_error);
            let mut write_read = T::zero();
            for r in 0..ROWS {
                self.d_beta[n] = self.d_beta[n] + d_write[r] * error[r];
                write_read = write_read + write[r] * read[r];
            }
            // The token before, whose read joins the cotangent in the same pass.
            let (q_before, k_before, read_before) = match n {
                0 => (&self.zero[..], &self.zero[..], [T::zero(); ROWS]),
                _ => (&segment.q[(n - 1) * width..][..width], &segment.k[(n - 1) * width..][..width], d_o(n - 1)),
            };

            let this = n * width..(n + 1) * width;
            let [k, decay] = [&segment.k, &segment.decay].map(|x| T::vectors::<S>(&x[this.clone()]));
            let (q_before, k_before) = (T::vectors::<S>(q_before), T::vectors::<S>(k_before));
            let dq = T::vectors_mut::<S>(&mut self.dq[this.clone()]);
            let dk = T::vectors_mut::<S>(&mut self.dk[this.clone()]);
            let dg = T::vectors_mut::<S>(&mut self.dg[this]);
            let states = &self.states[n * ROWS * width..][..ROWS * width];
            let states: [_; ROWS] = std::array::from_fn(|r| T::vectors::<S>(&states[r * width..][..width]));
            let mut rows = d_state.chunks_exact_mut(width);
            let d_state: [_; ROWS] = std::array::from_fn(|_| T::vectors_mut::<S>(rows.next().expect("ROWS rows")));

            let write_read = T::splat(simd, write_read);
            let (erase, read_now, read_next) = (splat(d_error.map(|x| -x)), splat(read), splat(read_before));
            let written = splat(write);
            du = [zero; ROWS];
            for c in 0..k.len() {
                let (k, a, q_before, k_before) = (k[c], decay[c], q_before[c], k_before[c]);
                let [mut by_read, mut by_write, mut by_error, mut by_decay] = [zero; 4];
                for r in 0..ROWS {
                    let (s, d) = (states[r][c], d_state[r][c]);
                    let erased = T::vector_mul_add(simd, k, erase[r], d);
                    if wants_q {
                        by_read = T::vector_mul_add(simd, s, read_now[r], by_read);
                    }
                    if wants_k {
                        by_write = T::vector_mul_add(simd, d, written[r], by_write);
                        by_error = T::vector_mul_add(simd, s, erase[r], by_error);
                    }
                    if wants_g {
                        by_decay = T::vector_mul_add(simd, s, erased, by_decay);
                    }
                    let d = T::vector_mul_add(simd, a, erased, T::vector_mul(simd, q_before, read_next[r]));
                    d_state[r][c] = d;
                    du[r] = T::vector_mul_add(simd, k_before, d, du[r]);
                }
                if wants_q {
                    let sum = T::vector_mul_add(simd, a, by_read, T::vector_mul(simd, k, write_read));
                    dq[c] = T::vector_add(simd, dq[c], sum);
                }
                if wants_k {
                    dk[c] = T::vector_add(simd, dk[c], T::vector_mul_add(simd, a, by_error, by_write));
                }
                if wants_g {
                    dg[c] = T::vector_mul_add(simd, a, by_decay, dg[c]);
                }
            }
            read = read_before;
        }
    }
}
