//! Answers token by token, compared with those of the chunked form.

use burn::tensor::Tensor;

use crate::data::Batch;
use crate::learn::best;
use crate::model::Model;

pub struct Comparison {
    pub compared: usize,
    /// The answer to every query.
    pub decoded: Vec<i64>,
    pub equal: usize,
    /// Answers that are right, too.
    pub right: usize,
    pub max_logit_difference: f64,
}

/// Reads the sequences of `batch` once at a stroke and once token by token from carried state.
pub fn compare(model: &Model, batch: &Batch) -> Comparison {
    let device = &model.head.weight.device();
    let tokens = batch.tokens(device);
    let chunked = batch.at_queries(model.forward(tokens.clone()));

    let mut state = None;
    let mut logits = Vec::new();
    for t in 0..tokens.dims()[1] {
        let (next_logits, next) = model.forward_with_state(tokens.clone().slice_dim(1, t..t + 1), state);
        logits.push(next_logits);
        state = Some(next);
    }
    let decoded = batch.at_queries(Tensor::cat(logits, 1));

    let max_logit_difference = (decoded.clone() - chunked.clone()).abs().max().into_scalar::<f64>();
    let (decoded, chunked) = (best(decoded), best(chunked));
    let count = |other: &[i64]| decoded.iter().zip(other).filter(|(a, b)| a == b).count();
    let (equal, right) = (count(&chunked), count(&batch.answers));
    Comparison { compared: decoded.len(), equal, right, max_logit_difference, decoded }
}
