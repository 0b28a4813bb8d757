//! Decaying a state without losing the slow channels.
//!
//! A decay near 1 is rounded to `1 - n 2^-24` in f32; over many steps that error adds up in one direction, while the
//! rounding of `S + S (exp(g) - 1)` does not. The second form would lose the fast channels, whose result is small
//! beside `S`, so each channel takes the one that suits it.

use burn::tensor::Tensor;

/// Channels that keep more than `exp(-0.5)` of the state count as slow.
const SLOW: f64 = -0.5;

/// `diag(exp(g))` as `kept + change`: `1 + (exp(g) - 1)` for slow channels, `0 + exp(g)` for fast ones.
#[derive(Clone)]
pub(super) struct Decay<const D: usize> {
    kept: Tensor<D>,
    change: Tensor<D>,
}

impl<const D: usize> Decay<D> {
    /// `exp_g` is `exp(g)`.
    pub fn new(g: Tensor<D>, exp_g: Tensor<D>) -> Self {
        let dtype = g.dtype();
        let slow = g.clone().greater_equal_elem(SLOW);
        let half = (g * 0.5).tanh();
        // exp(g) - 1 without cancellation, and -1 with zero gradient at -inf.
        let exp_g_minus_1 = half.clone() * 2.0 / (half.neg() + 1.0);
        Self { change: exp_g.mask_where(slow.clone(), exp_g_minus_1), kept: slow.float().cast(dtype) }
    }

    pub fn apply(self, state: Tensor<D>) -> Tensor<D> {
        state.clone() * self.kept + state * self.change
    }

    /// `exp(g)`.
    pub fn exp_g(self) -> Tensor<D> {
        self.kept + self.change
    }

    /// The rows `rows` of the leading axis.
    pub fn slice(&self, rows: std::ops::Range<usize>) -> Self {
        Self { kept: self.kept.clone().slice_dim(0, rows.clone()), change: self.change.clone().slice_dim(0, rows) }
    }
}
