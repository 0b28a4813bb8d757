//! The same model with carried state: any number of tokens per call, one when decoding.

use burn::tensor::{Int, Tensor};
use burn_kda::KdaState;

use super::model::Model;

/// One state per block.
pub type ModelState = Vec<KdaState>;

impl Model {
    /// Continues from `state`, none being the start of a sequence. Tokens `[B, T]` to logits `[B, T, vocab]`.
    pub fn forward_with_state(&self, tokens: Tensor<2, Int>, state: Option<ModelState>) -> (Tensor<3>, ModelState) {
        let mut x = self.embedding.forward(tokens);
        let mut next = Vec::with_capacity(self.blocks.len());
        for (i, block) in self.blocks.iter().enumerate() {
            let state = state.as_ref().map(|states| states[i].clone());
            let (y, state) = block.kda.forward_with_state(block.kda_norm.forward(x.clone()), state);
            x = block.mlp(x + y);
            next.push(state);
        }
        (self.head.forward(self.norm.forward(x)), next)
    }
}
