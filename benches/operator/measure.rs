//! What is timed, on one device.

use std::hint::black_box;
use std::time::Instant;

use burn::tensor::{Device, Distribution, Tensor};
use burn_kda::{
    DecayFn, KdaConfig, KdaInput, KdaOptions, KdaOutput, chunk_kda, decay_gate, fla_read_scale, gated_rms_norm,
    kda_step, recurrent_kda, short_convolution, write_strength,
};
use serde::{Deserialize, Serialize};

use crate::common::{Shape, input};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Form {
    Chunk,
    /// Many tokens by the recurrent form.
    Recurrent,
    /// One token with its state carried on.
    Step,
}

impl Form {
    /// Seconds of the fastest of some calls, after one that warms up.
    pub fn seconds(self, shape: Shape, device: &Device) -> f64 {
        match self {
            Self::Chunk => operator(chunk_kda, shape, device),
            Self::Recurrent => operator(recurrent_kda, shape, device),
            Self::Step => step(shape, device),
        }
    }
}

fn operator(form: fn(KdaInput, KdaOptions) -> KdaOutput, shape: Shape, device: &Device) -> f64 {
    let input = input(shape, device);
    best(|| form(input.clone(), KdaOptions::default()))
}

fn step(shape: Shape, device: &Device) -> f64 {
    let (batch, _, heads, key_dim, value_dim) = shape;
    let KdaInput { q, k, v, g, beta } = input(shape, device);
    let [q, k, v, g] = [q, k, v, g].map(|x| x.squeeze_dim::<3>(1));
    let beta = beta.squeeze_dim::<2>(1);
    let mut state = Some(Tensor::zeros([batch, heads, key_dim, value_dim], device));
    best(|| {
        let [q, k, v, g] = [&q, &k, &v, &g].map(Tensor::clone);
        let last = state.take().expect("a state");
        let (o, next) = kda_step(last, q, k, v, g, beta.clone(), fla_read_scale(key_dim));
        state = Some(next);
        o
    })
}

/// A layer whose hidden size is that of all its heads, and what surrounds the operator in it, in seconds: the layer, the
/// operator, the convolutions with silu (in the layer they also normalise the heads of `q` and `k`), the gates, the output
/// norm.
pub fn layer(shape: Shape, device: &Device) -> [f64; 5] {
    let (batch, time, heads, key_dim, value_dim) = shape;
    let channels = heads * key_dim;
    let layer = KdaConfig::new(channels, heads, key_dim).init(device);
    let normal = |shape: [usize; 4]| Tensor::<4>::random(shape, Distribution::Normal(0.0, 1.0), device);
    let x = normal([1, batch, time, channels]).squeeze_dim::<3>(0);
    let weight = normal([1, channels, 1, 4]).squeeze_dim::<3>(0);
    let [raw, gate] = [(); 2].map(|()| normal([batch, time, heads, value_dim]));
    let logit = normal([1, batch, time, heads]).squeeze_dim::<3>(0);
    let ones = |count: usize| Tensor::<1>::ones([count], device);
    [
        best(|| layer.forward(x.clone())),
        Form::Chunk.seconds(shape, device),
        best(|| [(); 3].map(|()| short_convolution(x.clone(), weight.clone(), None, None).y)),
        best(|| {
            let g = decay_gate(raw.clone(), Some(ones(heads)), Some(ones(channels)), DecayFn::Softplus);
            (g, write_strength(logit.clone(), false))
        }),
        best(|| gated_rms_norm(raw.clone(), ones(value_dim), gate.clone(), 1e-5)),
    ]
}

/// The fastest call of at least five, and of as many as there is time for in half a second.
fn best<T>(mut f: impl FnMut() -> T) -> f64 {
    black_box(f());
    let (start, mut fastest, mut runs) = (Instant::now(), f64::INFINITY, 0);
    while runs < 5 || (start.elapsed().as_secs_f64() < 0.5 && runs < 100_000) {
        let start = Instant::now();
        let result = black_box(f());
        fastest = fastest.min(start.elapsed().as_secs_f64());
        drop(result);
        runs += 1;
    }
    fastest
}
