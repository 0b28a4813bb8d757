//! How long a head remembers.

use std::fmt;

use burn::tensor::{Device, Tensor, TensorData};
use burn_kda::checkpoint::DecayParameters;
use burn_kda::{KdaConfig, decay_gate};

/// Tokens after which half of a channel is left, over the channels of a head, when the projection of the gate is zero:
/// `ln 2 / -g`, `g` of `A_log` and `dt_bias` alone.
pub struct HalfLife {
    pub head: usize,
    pub shortest: f64,
    pub median: f64,
    pub longest: f64,
}

impl fmt::Display for HalfLife {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = |x: f64| if x < 10.0 { 2 } else { 0 };
        let (shortest, longest) = (self.shortest, self.longest);
        write!(f, "{shortest:.*}..{longest:.*}", digits(shortest), digits(longest))
    }
}

pub fn of_heads(layer: &KdaConfig, decay: DecayParameters) -> Vec<HalfLife> {
    let device = Device::default();
    let (heads, channels) = (layer.value_heads(), layer.head_dim);
    let vector = |values: Vec<f32>| {
        let len = values.len();
        Tensor::<1>::from_data(TensorData::new(values, [len]), &device)
    };
    let rest = Tensor::zeros([1, 1, heads, channels], &device);
    let g = decay_gate(rest, Some(vector(decay.a_log)), Some(vector(decay.dt_bias)), layer.decay);
    let half_lives: Vec<f64> = g.into_data().iter::<f64>().map(|g| std::f64::consts::LN_2 / -g).collect();
    let of_head = |(head, channels): (usize, &[f64])| {
        let mut sorted = channels.to_vec();
        sorted.sort_by(f64::total_cmp);
        let len = sorted.len();
        HalfLife { head, shortest: sorted[0], median: sorted[len / 2], longest: sorted[len - 1] }
    };
    half_lives.chunks(channels).enumerate().map(of_head).collect()
}
