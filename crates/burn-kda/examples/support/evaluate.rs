//! Bits per byte on held-out text, read from end to end with carried state.

use burn::nn::loss::CrossEntropyLoss;
use burn::tensor::Device;

use super::corpus::windows;
use super::model::Model;

/// The text is cut into this many streams read side by side, each in calls of this many bytes.
const STREAMS: usize = 8;
const CALL: usize = 256;

/// `model` must be on a plain device. At most `limit` bytes are read.
pub fn bits_per_byte(model: &Model, text: &[u8], limit: usize, device: &Device) -> f64 {
    let text = &text[..text.len().min(limit)];
    let stream = (text.len() - 1) / STREAMS;
    let mut state = None;
    let mut nats = 0.0;
    for start in (0..stream).step_by(CALL) {
        let length = CALL.min(stream - start);
        let starts: Vec<_> = (0..STREAMS).map(|i| i * stream + start).collect();
        let (inputs, targets) = windows(text, &starts, length, device);
        let (logits, next) = model.forward_with_state(inputs, state);
        let [batch, length, vocab] = logits.dims();
        let loss = CrossEntropyLoss::new(None, device).forward(logits.reshape([batch * length, vocab]), targets);
        nats += loss.into_scalar::<f64>() * (batch * length) as f64;
        state = Some(next);
    }
    nats / (stream * STREAMS) as f64 / std::f64::consts::LN_2
}
