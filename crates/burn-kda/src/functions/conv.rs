//! Causal depthwise convolution with silu and carried state.

use burn::tensor::Tensor;

use crate::{activation::silu, precision};

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
    let [batch, time, channels] = x.dims();
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
    let past = [batch, channels, width - 1];
    let dtype = x.dtype();
    let state = match state {
        Some(state) => {
            assert!(state.dims() == past, "short_convolution: `state` must be {past:?}, got {:?}", state.dims());
            let got = state.dtype();
            assert!(got == dtype, "short_convolution: `state` must have the dtype of `x`, {dtype:?}, got {got:?}");
            state
        }
        None => Tensor::zeros(past, (&x.device(), dtype)),
    };

    let inputs = match width {
        1 => x,
        _ => Tensor::cat(vec![state.swap_dims(1, 2), x], 1),
    };
    let wide = precision::accumulation(dtype);
    let taps = weight.cast(wide).reshape([channels, width]).swap_dims(0, 1);
    let padded = inputs.clone().cast(wide);
    let tap = |j: usize| {
        let weight = taps.clone().slice_dim(0, j..j + 1).reshape([1, 1, channels]);
        padded.clone().slice_dim(1, j..j + time) * weight
    };
    let mut sum = (1..width).fold(tap(0), |sum, j| sum + tap(j));
    if let Some(bias) = bias {
        sum = sum + bias.cast(wide).reshape([1, 1, channels]);
    }
    ConvOutput { y: silu(sum).cast(dtype), state: inputs.slice_dim(1, time..time + width - 1).swap_dims(1, 2) }
}
