//! The two initialisations of the decay, and how fast each forgets before any training.

use burn::module::Param;
use burn::tensor::{Int, Tensor};
use burn_kda::{DecayFn, decay_gate};

use crate::model::Model;

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Initial {
    /// `A_log = log U(1, 16)`, `dt_bias` the inverse softplus of a log-uniform step in [0.001, 0.1].
    Fla,
    /// `A_log = -3`, `dt_bias = 1` everywhere.
    Constant,
}

impl Initial {
    pub const BOTH: [Self; 2] = [Self::Fla, Self::Constant];

    pub fn label(self) -> &'static str {
        match self {
            Self::Fla => "FLA's",
            Self::Constant => "A_log = -3, dt_bias = 1",
        }
    }

    /// `KdaConfig::init` has already done what FLA does.
    pub fn apply(self, mut model: Model) -> Model {
        if self == Self::Constant {
            for block in &mut model.blocks {
                let [a_log, dt_bias] = [&block.kda.a_log, &block.kda.dt_bias].map(|param| param.val());
                block.kda.a_log = Param::from_tensor(a_log.detach().zeros_like() - 3.0);
                block.kda.dt_bias = Param::from_tensor(dt_bias.detach().ones_like());
            }
        }
        model
    }
}

/// Quantiles, in tokens, of the half-life of a key channel over a batch.
pub struct HalfLives {
    pub shortest: f64,
    pub p05: f64,
    pub median: f64,
    pub p95: f64,
    pub longest: f64,
    /// Share of half-lives longer than a window.
    pub beyond_window: f64,
}

/// A channel with log decay `g` per token halves in `ln 2 / -g` tokens. Measured in the first block.
pub fn half_lives(model: &Model, tokens: Tensor<2, Int>) -> HalfLives {
    let block = &model.blocks[0];
    let x = block.kda_norm.forward(model.embedding.forward(tokens));
    let [batch, time, _] = x.dims();
    let parts = [&block.kda.f_a_proj, &block.kda.f_b_proj, &block.kda.f_proj];
    let raw = parts.into_iter().flatten().fold(x, |x, linear| linear.forward(x));
    let [heads] = block.kda.a_log.shape().dims();
    let channels = raw.dims()[2] / heads;
    let raw = raw.reshape([batch, time, heads, channels]);
    let (a_log, dt_bias) = (block.kda.a_log.val(), block.kda.dt_bias.val());
    let g = decay_gate(raw, Some(a_log), Some(dt_bias), DecayFn::Softplus);

    let mut lives: Vec<f64> = g.into_data().iter::<f64>().map(|g| std::f64::consts::LN_2 / -g).collect();
    lives.sort_unstable_by(f64::total_cmp);
    let at = |share: f64| lives[((lives.len() - 1) as f64 * share).round() as usize];
    let beyond = lives.iter().filter(|&&life| life > time as f64).count();
    HalfLives {
        shortest: at(0.0),
        p05: at(0.05),
        median: at(0.5),
        p95: at(0.95),
        longest: at(1.0),
        beyond_window: beyond as f64 / lives.len() as f64,
    }
}
