//! The two decay gates of the shipped models, by name.

use burn_kda::DecayFn;
use clap::ValueEnum;

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Gate {
    /// Kimi Linear.
    Softplus,
    /// Kimi K3, GLM-5.3-Flash, Ling-3.0: bounded at -5.
    Sigmoid,
}

impl From<Gate> for DecayFn {
    fn from(gate: Gate) -> Self {
        match gate {
            Gate::Softplus => DecayFn::Softplus,
            Gate::Sigmoid => DecayFn::SIGMOID,
        }
    }
}
