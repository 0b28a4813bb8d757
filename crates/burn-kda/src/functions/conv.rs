//! Causal depthwise convolution with silu and carried state.

use burn::tensor::Tensor;

use crate::ops::{self, ConvParams};

/// Result of [`short_convolution`].
#[derive(Debug, Clone)]
pub struct ConvOutput {
    /// `[B, T, D]` in the dtype of `x`.
    pub y: Tensor<3>,
    /// The last `W - 1` raw inputs, oldest first, `[B, D, W - 1]` in the dtype of `x`.
    pub state: Tensor<3>,
}

/// `y_t = silu(bias + sum_j w[j] x[t - W + 1 + j])`: depthwise and causal, the last tap on the current token
/// (FLA's `ShortConvolution`). Any `T`, also shorter than `W - 1` or 0; computed in f32 at least.
///
/// # Shapes
///
/// - `x`: `[B, T, D]`; `weight`: `[D, 1, W]`; `bias`: `[D]`
/// - `state`: `[B, D, W - 1]`, none is zeros
///
/// # Panics
///
/// If the shapes do not fit, or if `state` has another dtype than `x`.
pub fn short_convolution(
    x: Tensor<3>,
    weight: Tensor<3>,
    bias: Option<Tensor<1>>,
    state: Option<Tensor<3>>,
) -> ConvOutput {
    let params = ConvParams { head_dim: None, dtype: x.dtype() };
    convolve(x, weight, bias, state, params)
}

/// As [`short_convolution`], with what `params` ask for.
pub(crate) fn convolve(
    x: Tensor<3>,
    weight: Tensor<3>,
    bias: Option<Tensor<1>>,
    state: Option<Tensor<3>>,
    params: ConvParams,
) -> ConvOutput {
    let [batch, _, channels] = x.dims();
    let [rows, inner, width] = weight.dims();
    assert!(
        rows == channels && inner == 1 && width > 0,
        "short_convolution: `weight` must be [D, 1, W] with D = {channels}, got {:?}",
        weight.dims(),
    );
    if let Some(bias) = &bias {
        let [got] = bias.dims();
        assert!(got == channels, "short_convolution: `bias` must be [D = {channels}], got [{got}]");
    }
    if let Some(state) = &state {
        let (want, dtype, got) = ([batch, channels, width - 1], x.dtype(), state.dtype());
        assert!(state.dims() == want, "short_convolution: `state` must be {want:?}, got {:?}", state.dims());
        assert!(got == dtype, "short_convolution: `state` must have the dtype of `x`, {dtype:?}, got {got:?}");
    }
    let [y, state] = ops::convolution(x, weight, bias, state, params);
    ConvOutput { y, state }
}
