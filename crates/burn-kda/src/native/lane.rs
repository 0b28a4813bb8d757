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

use super::task::{Segment, copy, paste};
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
    /// As the inputs.
    pub dq: ArrayViewMut2<'a, T>,
    pub dk: ArrayViewMut2<'a, T>,
    pub dv: ArrayViewMut2<'a, T>,
    pub dg: ArrayViewMut2<'a, T>,
    pub d_beta: ArrayViewMut1<'a, T>,
    pub d_state: ArrayViewMut2<'a, T>,
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
    fn with_simd<S: Simd>(self, _: S) {
        match (S::F32_LANES, size_of::<T>()) {
            (1, _) => self.vectors_of::<8, false>(),
            (16, 4) => self.vectors_of::<16, true>(),
            _ => self.vectors_of::<8, true>(),
        }
    }
}

impl<T: Real> Lane<'_, T> {
    #[inline(always)]
    fn vectors_of<const L: usize, const FMA: bool>(mut self) {
        let (time, key_dim) = self.q.dim();
        let value_dim = self.v.ncols();
        let (width, rows) = (key_dim.next_multiple_of(L), value_dim.next_multiple_of(ROWS));
        let capacity = KEEP_EVERY.min(time);
        let mut segment = Segment::new(width, capacity);
        let mut pass = Pass::<T, L>::new(width, capacity);
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
                pass.forward::<FMA>(&segment, before, beta, |n| at(&v, n));
                pass.backward::<FMA>(
                    &segment,
                    d_state,
                    beta,
                    |n| at(&d_o, n),
                    |n, de| {
                        dv[n * rows + j * ROWS..][..ROWS].copy_from_slice(&de);
                    },
                );
            }

            for (n, t) in tokens.enumerate() {
                paste(&pass.dq.as_flattened()[n * width..][..key_dim], self.dq.row_mut(t));
                paste(&pass.dk.as_flattened()[n * width..][..key_dim], self.dk.row_mut(t));
                paste(&pass.dg.as_flattened()[n * width..][..key_dim], self.dg.row_mut(t));
                paste(&dv[n * rows..][..value_dim], self.dv.row_mut(t));
                self.d_beta[t] = pass.d_beta[n];
            }
        }
        for (j, row) in d_state.chunks_exact(width).take(value_dim).enumerate() {
            paste(&row[..key_dim], self.d_state.column_mut(j));
        }
    }
}

/// `[K, V]` to rows of `width >= K`, V-first.
fn transpose<T: Real>(from: ArrayView2<T>, to: &mut [T], width: usize) {
    for (column, row) in from.columns().into_iter().zip(to.chunks_exact_mut(width)) {
        copy(column, &mut row[..column.len()]);
    }
}

/// What the value channels of a lane leave behind in one segment; `L` is a vector.
struct Pass<T, const L: usize> {
    /// Vectors of a row.
    len: usize,
    /// States before and after each token, `[tokens + 1, ROWS, len]`, of some rows.
    states: Vec<[T; L]>,
    /// Writes `u` and errors `e` of those rows, `[tokens]`.
    writes: Vec<[T; ROWS]>,
    errors: Vec<[T; ROWS]>,
    /// Sums over all rows, `[tokens, len]`.
    dq: Vec<[T; L]>,
    dk: Vec<[T; L]>,
    dg: Vec<[T; L]>,
    /// `[tokens]`.
    d_beta: Vec<T>,
}

impl<T: Real, const L: usize> Pass<T, L> {
    fn new(width: usize, tokens: usize) -> Self {
        let len = width / L;
        let vectors = |count: usize| vec![[T::zero(); L]; count * len];
        Self {
            len,
            states: vectors((tokens + 1) * ROWS),
            writes: vec![[T::zero(); ROWS]; tokens],
            errors: vec![[T::zero(); ROWS]; tokens],
            dq: vectors(tokens),
            dk: vectors(tokens),
            dg: vectors(tokens),
            d_beta: vec![T::zero(); tokens],
        }
    }

    fn reset(&mut self) {
        for sums in [&mut self.dq, &mut self.dk, &mut self.dg] {
            sums.fill([T::zero(); L]);
        }
        self.d_beta.fill(T::zero());
    }

    /// The recurrence again, as [`Task`](super::task::Task), keeping all states of some rows.
    #[inline(always)]
    fn forward<const FMA: bool>(
        &mut self,
        segment: &Segment<T>,
        before: &[T],
        beta: ArrayView1<T>,
        v: impl Fn(usize) -> [T; ROWS],
    ) {
        let len = self.len;
        let [k_decayed, k, decay] = [&segment.k_decayed, &segment.k, &segment.decay].map(|x| x.as_chunks::<L>().0);
        self.states[..ROWS * len].copy_from_slice(before.as_chunks::<L>().0);
        let mut sums = [[T::zero(); L]; ROWS];
        for (sum, row) in sums.iter_mut().zip(self.states.chunks_exact(len)) {
            for (k, x) in k_decayed[..len].iter().zip(row) {
                for l in 0..L {
                    sum[l] = k[l].fma::<FMA>(x[l], sum[l]);
                }
            }
        }
        for (n, &beta) in beta.iter().enumerate() {
            let (v, predicted) = (v(n), sums.map(total));
            let error: [T; ROWS] = std::array::from_fn(|r| v[r] - predicted[r]);
            let write = error.map(|error| beta * error);
            (self.writes[n], self.errors[n]) = (write, error);

            let (this, next) = (n * len..(n + 1) * len, (n + 1) * len..(n + 2) * len);
            let (k, decay, k_next) = (&k[this.clone()], &decay[this], &k_decayed[next]);
            let (old, new) = self.states[n * ROWS * len..(n + 2) * ROWS * len].split_at_mut(ROWS * len);
            sums = [[T::zero(); L]; ROWS];
            for (r, (old, new)) in old.chunks_exact(len).zip(new.chunks_exact_mut(len)).enumerate() {
                for ((((old, new), k), decay), k_next) in old.iter().zip(new).zip(k).zip(decay).zip(k_next) {
                    for l in 0..L {
                        let x = decay[l].fma::<FMA>(old[l], k[l] * write[r]);
                        new[l] = x;
                        sums[r][l] = k_next[l].fma::<FMA>(x, sums[r][l]);
                    }
                }
            }
        }
    }

    /// Takes the cotangent of the state after the segment to the one before it; `dv` is given each token's.
    #[inline(always)]
    fn backward<const FMA: bool>(
        &mut self,
        segment: &Segment<T>,
        d_state: &mut [T],
        beta: ArrayView1<T>,
        d_o: impl Fn(usize) -> [T; ROWS],
        mut dv: impl FnMut(usize, [T; ROWS]),
    ) {
        let len = self.len;
        let [q, k, decay] = [&segment.q, &segment.k, &segment.decay].map(|x| x.as_chunks::<L>().0);
        let of_token = |x: &[[T; L]], n: usize| -> std::ops::Range<usize> {
            debug_assert!((n + 1) * len <= x.len());
            n * len..(n + 1) * len
        };
        let d_state = d_state.as_chunks_mut::<L>().0;
        let last = beta.len() - 1;

        // The read of the last token, and what its write receives.
        let mut du = [[T::zero(); L]; ROWS];
        let mut read = d_o(last);
        for (r, row) in d_state.chunks_exact_mut(len).enumerate() {
            for ((x, q), k) in row.iter_mut().zip(&q[of_token(q, last)]).zip(&k[of_token(k, last)]) {
                for l in 0..L {
                    x[l] = q[l].fma::<FMA>(read[r], x[l]);
                    du[r][l] = k[l].fma::<FMA>(x[l], du[r][l]);
                }
            }
        }
        let none = vec![[T::zero(); L]; len];
        for (n, &beta) in beta.iter().enumerate().rev() {
            let (d_write, write, error) = (du.map(total), self.writes[n], self.errors[n]);
            let d_error = d_write.map(|x| beta * x);
            dv(n, d_error);
            let mut write_read = T::zero();
            for r in 0..ROWS {
                self.d_beta[n] = d_write[r].fma::<FMA>(error[r], self.d_beta[n]);
                write_read = write[r].fma::<FMA>(read[r], write_read);
            }

            let this = of_token(k, n);
            let (k_this, decay) = (&k[this.clone()], &decay[this.clone()]);
            let (q_before, k_before) = match n {
                0 => (&none[..], &none[..]),
                _ => (&q[of_token(q, n - 1)], &k[of_token(k, n - 1)]),
            };
            let read_before = if n == 0 { [T::zero(); ROWS] } else { d_o(n - 1) };
            let states = &self.states[n * ROWS * len..(n + 1) * ROWS * len];
            let states: [&[[T; L]]; ROWS] = std::array::from_fn(|r| &states[r * len..][..len]);
            let (dq, dk, dg) = (&mut self.dq[this.clone()], &mut self.dk[this.clone()], &mut self.dg[this]);
            du = [[T::zero(); L]; ROWS];
            for c in 0..len {
                let (k, a, q_before, k_before) = (&k_this[c], &decay[c], &q_before[c], &k_before[c]);
                let [mut by_read, mut by_write, mut by_error, mut by_decay] = [[T::zero(); L]; 4];
                for r in 0..ROWS {
                    let (s, d) = (&states[r][c], &mut d_state[r * len + c]);
                    for l in 0..L {
                        by_read[l] = s[l].fma::<FMA>(read[r], by_read[l]);
                        by_write[l] = d[l].fma::<FMA>(write[r], by_write[l]);
                        by_error[l] = s[l].fma::<FMA>(d_error[r], by_error[l]);
                        let erased = k[l].fma::<FMA>(-d_error[r], d[l]);
                        by_decay[l] = s[l].fma::<FMA>(erased, by_decay[l]);
                        d[l] = a[l].fma::<FMA>(erased, q_before[l] * read_before[r]);
                        du[r][l] = k_before[l].fma::<FMA>(d[l], du[r][l]);
                    }
                }
                for l in 0..L {
                    dq[c][l] = dq[c][l] + a[l].fma::<FMA>(by_read[l], k[l] * write_read);
                    dk[c][l] = dk[c][l] + (by_write[l] - a[l] * by_error[l]);
                    dg[c][l] = a[l].fma::<FMA>(by_decay[l], dg[c][l]);
                }
            }
            read = read_before;
        }
    }
}

#[inline(always)]
fn total<T: Real, const L: usize>(x: [T; L]) -> T {
    x.into_iter().fold(T::zero(), |sum, x| sum + x)
}
