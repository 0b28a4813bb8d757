//! What the benchmarks time the operator on.

use burn::tensor::{Device, Distribution, Tensor};
use burn_kda::{KdaInput, l2_normalize};

/// `(B, T, H, K, V)`
pub type Shape = (usize, usize, usize, usize, usize);

pub fn input((batch, time, heads, key_dim, value_dim): Shape, device: &Device) -> KdaInput {
    let normal = |width| Tensor::random([batch, time, heads, width], Distribution::Normal(0.0, 1.0), device);
    KdaInput {
        q: l2_normalize(normal(key_dim)),
        k: l2_normalize(normal(key_dim)),
        v: normal(value_dim),
        g: normal(key_dim).abs().neg(),
        beta: Tensor::random([batch, time, heads], Distribution::Uniform(0.0, 1.0), device),
    }
}
