use burn::config::Config;
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Device, Tensor};

use crate::functions::gated_rms_norm;

/// Configuration of a [`GatedRmsNorm`].
#[derive(Config, Debug)]
pub struct GatedRmsNormConfig {
    /// Normalised width `V`.
    pub width: usize,
    /// Added to the mean square.
    #[config(default = 1e-5)]
    pub epsilon: f64,
}

impl GatedRmsNormConfig {
    /// Initialises the weight to ones.
    pub fn init(&self, device: &Device) -> GatedRmsNorm {
        GatedRmsNorm { weight: Initializer::Ones.init([self.width], device), epsilon: self.epsilon }
    }
}

/// RMS norm of each value head, gated by a sigmoid; see [`gated_rms_norm`].
#[derive(Module, Debug)]
pub struct GatedRmsNorm {
    /// `[V]`.
    pub weight: Param<Tensor<1>>,
    /// Added to the mean square.
    pub epsilon: f64,
}

impl GatedRmsNorm {
    /// `o`, `gate`: `[B, T, HV, V]`.
    ///
    /// # Panics
    ///
    /// As [`gated_rms_norm`].
    pub fn forward(&self, o: Tensor<4>, gate: Tensor<4>) -> Tensor<4> {
        gated_rms_norm(o, self.weight.val(), gate, self.epsilon)
    }
}
