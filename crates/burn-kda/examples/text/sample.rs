//! Sampling with carried state: one token in, one token out, whatever has been read before.

use burn::tensor::activation::softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::RngExt;
use rand::rngs::StdRng;

use crate::model::Model;

/// Continues `prompt` by `count` bytes.
pub fn sample(
    model: &Model,
    prompt: &[u8],
    count: usize,
    temperature: f64,
    rng: &mut StdRng,
    device: &Device,
) -> Vec<u8> {
    let tokens = |bytes: &[u8]| -> Tensor<2, Int> {
        let bytes: Vec<_> = bytes.iter().map(|&byte| i64::from(byte)).collect();
        let shape = [1, bytes.len()];
        Tensor::from_data(TensorData::new(bytes, shape), device)
    };
    let (mut logits, mut state) = model.forward_with_state(tokens(prompt), None);
    let mut text = Vec::with_capacity(count);
    while text.len() < count {
        let last = logits.dims()[1] - 1;
        let last = logits.slice_dim(1, last..last + 1).flatten::<1>(0, 2);
        let byte = draw(softmax(last / temperature, 0), rng);
        text.push(byte);
        (logits, state) = model.forward_with_state(tokens(&[byte]), Some(state));
    }
    text
}

/// An index with the given probabilities.
fn draw(probabilities: Tensor<1>, rng: &mut StdRng) -> u8 {
    let mut rest: f32 = rng.random();
    let probabilities: Vec<f32> = probabilities.into_data().iter::<f32>().collect();
    let at = probabilities.iter().position(|p| {
        rest -= p;
        rest < 0.0
    });
    // Rounding may leave a rest; the last byte value is as good as any.
    at.unwrap_or(probabilities.len() - 1) as u8
}
