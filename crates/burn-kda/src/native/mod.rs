//! The operator on slices of memory, for the backends of the CPU: chunks of a few tokens as small matrix products, in
//! SIMD, on all cores.
//!
//! The columns of a state are independent recurrences, so a block of them, two vectors wide, goes through a chunk of
//! tokens at a time, and what all columns share is computed once ([`chunk`], with the equations). Three multiply-adds per
//! element of the state and token, of the 7 flops that the recurrence counts, with an eighth of the loads and stores of
//! the recurrence token by token. One token alone is that recurrence, in place ([`mod@step`]).
//!
//! Every column is computed in one order, whatever the number of threads.

mod adjoint;
mod backward;
mod blocks;
mod by_token;
mod chunk;
mod forward;
mod lane;
pub(crate) mod layer;
mod pages;
mod prefetch;
mod real;
mod rows;
mod step;
mod task;
mod tile;
mod work;

pub(crate) use backward::backward;
pub(crate) use forward::forward;
pub(crate) use real::Real;
pub(crate) use step::step;

use ndarray::{
    Array2, Array3, Array4, ArrayBase, ArrayView, ArrayView3, ArrayView4, ArrayViewD, ArrayViewMut, Ix3, Ix4, IxDyn,
    RawData,
};

/// The forward pass keeps the state before every so many tokens, where the backward pass starts again.
const KEEP_EVERY: usize = 128;

/// The inputs of the operator in place, with whatever strides they have; shapes as [`KdaInput`](crate::KdaInput).
pub(crate) struct Views<'a, T> {
    q: ArrayView4<'a, T>,
    k: ArrayView4<'a, T>,
    v: ArrayView4<'a, T>,
    g: ArrayView4<'a, T>,
    beta: ArrayView3<'a, T>,
    /// `[B, HV, K, V]`.
    initial_state: Option<ArrayView4<'a, T>>,
}

/// Row-major results.
pub(crate) struct Outputs<T> {
    /// `[B, T, HV, V]`.
    pub o: Array4<T>,
    /// `[B, HV, K, V]`.
    pub final_state: Array4<T>,
    /// For the backward pass, if it was asked for: of each of the `B HV` recurrences the states before the tokens
    /// `n * KEEP_EVERY`, `n >= 1`, `[N, K, V]`, then of every token the error of what the state predicts, `[T, V]`.
    pub kept: Option<Array2<T>>,
}

/// The cotangent of the output, `[B, T, HV, V]`, or of one recurrence, `[T, V]`.
pub(crate) enum OfOutput<'a, T, D = Ix4> {
    Zero,
    Given(ArrayView<'a, T, D>),
    /// To be replaced by the gradient of the values.
    ForValues(ArrayViewMut<'a, T, D>),
}

/// Row-major gradients in the shapes of [`Views`]: those that were asked for, and have no memory yet.
pub(crate) struct Gradients<T> {
    pub q: Option<Array4<T>>,
    pub k: Option<Array4<T>>,
    pub v: Option<Array4<T>>,
    pub g: Option<Array4<T>>,
    pub beta: Option<Array3<T>>,
    pub initial_state: Option<Array4<T>>,
}

impl<'a, T> Views<'a, T> {
    /// Of `q`, `k`, `v`, `g`, `beta` and the initial state, in shapes that belong together: results are as large as one of them
    /// says, and written as far as the others go.
    pub fn new([q, k, v, g, beta]: [ArrayViewD<'a, T>; 5], initial_state: Option<ArrayViewD<'a, T>>) -> Self {
        let beta = beta.into_dimensionality::<Ix3>().expect("a checked shape");
        let views =
            Self { q: four(q), k: four(k), v: four(v), g: four(g), beta, initial_state: initial_state.map(four) };
        let (batch, time, heads, key_dim) = views.q.dim();
        let (_, _, value_heads, value_dim) = views.v.dim();
        assert!(
            views.k.dim() == views.q.dim()
                && views.v.dim() == (batch, time, value_heads, value_dim)
                && views.g.dim() == (batch, time, value_heads, key_dim)
                && views.beta.dim() == (batch, time, value_heads)
                && views.initial_state.as_ref().is_none_or(|state| state.shape() == views.state_shape())
                && value_heads.is_multiple_of(heads),
            "shapes that belong together"
        );
        views
    }

    /// The shapes of states and errors in a part of [`Outputs::kept`].
    fn kept_shapes(&self) -> ((usize, usize, usize), (usize, usize)) {
        let (_, time, _, key_dim) = self.q.dim();
        let value_dim = self.v.dim().3;
        ((time.saturating_sub(1) / KEEP_EVERY, key_dim, value_dim), (time, value_dim))
    }

    /// `[B, HV, K, V]`.
    pub fn state_shape(&self) -> [usize; 4] {
        let (batch, _, value_heads, value_dim) = self.v.dim();
        [batch, value_heads, self.q.dim().3, value_dim]
    }
}

/// The view of a tensor with four axes.
pub(crate) fn four<S: RawData>(view: ArrayBase<S, IxDyn>) -> ArrayBase<S, Ix4> {
    view.into_dimensionality::<Ix4>().expect("a checked shape")
}

#[cfg(test)]
mod tests {
    use ndarray::ArrayD;

    use super::*;

    #[test]
    #[should_panic(expected = "shapes that belong together")]
    fn fewer_values_than_keys() {
        let zeros = |shape: &[usize]| ArrayD::<f32>::zeros(shape);
        let (keys, values, beta) = (zeros(&[1, 16, 2, 4]), zeros(&[1, 8, 2, 4]), zeros(&[1, 16, 2]));
        let _ = Views::new([keys.view(), keys.view(), values.view(), keys.view(), beta.view()], None);
    }
}
