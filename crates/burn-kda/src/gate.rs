//! The decay gate and the write strength: the two numbers that say, per token, how much of the state is kept
//! and how much of the new value is written.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::ops;

/// How raw gate values become log decays.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum DecayFn {
    /// `g = -exp(A_log) * softplus(z + dt_bias)`, unbounded below: Kimi Linear, eq. 10 and FLA's
    /// `naive_kda_gate`. The exponential stands outside the softplus.
    Softplus,
    /// `g = lower_bound * sigmoid(exp(A_log) * (z + dt_bias))`: Kimi K3, GLM-5.3-Flash and Ling-3.0, FLA's
    /// `naive_kda_lowerbound_gate`.
    Sigmoid {
        /// The most negative log decay of one step, in nats; `-5` in every shipped model.
        lower_bound: f64,
    },
}

impl DecayFn {
    /// The bounded gate of Kimi K3, GLM-5.3-Flash and Ling-3.0: `lower_bound = -5`.
    pub const SIGMOID: Self = Self::Sigmoid { lower_bound: -5.0 };

    pub(crate) fn check(&self, function: &str) {
        if let Err(problem) = self.validate() {
            panic!("{function}: {problem}");
        }
    }

    pub(crate) fn validate(&self) -> Result<(), String> {
        match self {
            Self::Sigmoid { lower_bound } if !(lower_bound.is_finite() && *lower_bound < 0.0) => {
                Err(format!("`lower_bound` of the sigmoid gate must be finite and negative, got {lower_bound}"))
            }
            _ => Ok(()),
        }
    }
}

/// Natural log of the per-step decay of each key channel, `<= 0`.
///
/// Saturated inputs give the limit of the formula with zero gradient, never NaN.
///
/// # Shapes
///
/// - `raw`: `[B, T, HV, K]`, the output of the decay projection
/// - `a_log`: `[HV]`; required by the softplus gate, a factor of 1 in the sigmoid gate when absent
/// - `dt_bias`: `[HV * K]`, none is zero
/// - returns: `[B, T, HV, K]` in f32, or f64 for f64 input
///
/// # Panics
///
/// If a shape does not fit, if the softplus gate has no `a_log`, or if `lower_bound` is not negative.
pub fn decay_gate(raw: Tensor<4>, a_log: Option<Tensor<1>>, dt_bias: Option<Tensor<1>>, decay: DecayFn) -> Tensor<4> {
    let [_, _, heads, dim] = raw.dims();
    decay.check("decay_gate");
    if let Some(a_log) = &a_log {
        let [got] = a_log.dims();
        assert!(got == heads, "decay_gate: `a_log` must be [HV = {heads}], got [{got}]");
    }
    assert!(a_log.is_some() || decay != DecayFn::Softplus, "decay_gate: the softplus gate needs `a_log`, got None");
    if let Some(bias) = &dt_bias {
        let [got] = bias.dims();
        let want = heads * dim;
        assert!(got == want, "decay_gate: `dt_bias` must be [HV * K = {heads} * {dim} = {want}], got [{got}]");
    }

    ops::decay_gate(raw, a_log, dt_bias, decay)
}

/// Write strength `beta = sigmoid(logit)`, or twice that with `allow_neg_eigval` (eigenvalues of the transition
/// down to -1; "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues").
///
/// # Shapes
///
/// - `logit`: `[B, T, HV]`
/// - returns: `[B, T, HV]` in f32, or f64 for f64 input
pub fn write_strength(logit: Tensor<3>, allow_neg_eigval: bool) -> Tensor<3> {
    ops::write_strength(logit, if allow_neg_eigval { 2.0 } else { 1.0 })
}
