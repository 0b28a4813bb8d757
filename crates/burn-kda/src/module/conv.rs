use burn::config::Config;
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Device, Tensor};

use crate::functions::{ConvOutput, convolve};
use crate::ops::ConvParams;

/// Configuration of a [`ShortConvolution`].
#[derive(Config, Debug)]
pub struct ShortConvolutionConfig {
    /// Channels `D`.
    pub channels: usize,
    /// Width `W`.
    pub width: usize,
    /// Adds a bias.
    #[config(default = false)]
    pub bias: bool,
}

impl ShortConvolutionConfig {
    /// Initialises weight and bias uniformly in `+-W^-0.5`, as PyTorch's `Conv1d` does for a depthwise convolution.
    pub fn init(&self, device: &Device) -> ShortConvolution {
        let bound = (self.width as f64).powf(-0.5);
        let uniform = Initializer::Uniform { min: -bound, max: bound };
        ShortConvolution {
            weight: uniform.init([self.channels, 1, self.width], device),
            bias: self.bias.then(|| uniform.init([self.channels], device)),
        }
    }
}

/// Causal depthwise convolution followed by silu; see [`short_convolution`](crate::short_convolution).
#[derive(Module, Debug)]
pub struct ShortConvolution {
    /// `[D, 1, W]`, the last tap on the current token.
    pub weight: Param<Tensor<3>>,
    /// `[D]`.
    pub bias: Option<Param<Tensor<1>>>,
}

impl ShortConvolution {
    /// `x`: `[B, T, D]`; `state`: the last `W - 1` raw inputs `[B, D, W - 1]`, none is zeros.
    ///
    /// # Panics
    ///
    /// As [`short_convolution`](crate::short_convolution).
    pub fn forward(&self, x: Tensor<3>, state: Option<Tensor<3>>) -> ConvOutput {
        let params = ConvParams { head_dim: None, dtype: x.dtype() };
        self.run(x, state, params)
    }

    pub(super) fn run(&self, x: Tensor<3>, state: Option<Tensor<3>>, params: ConvParams) -> ConvOutput {
        convolve(x, self.weight.val(), self.bias.as_ref().map(|bias| bias.val()), state, params)
    }
}
