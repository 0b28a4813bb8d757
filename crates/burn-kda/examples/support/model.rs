//! The model of the examples: embedding, pre-norm residual blocks of KDA and SwiGLU, norm, head.

use burn::config::Config;
use burn::module::{Initializer, Module};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig, SwiGlu, SwiGluConfig};
use burn::tensor::{Device, Int, Tensor};
use burn_kda::{KdaConfig, KdaModule};

/// Configuration of a [`Model`]; the width is the hidden size of `kda`.
#[derive(Config, Debug)]
pub struct ModelConfig {
    /// Tokens.
    pub vocab: usize,
    /// Blocks.
    pub layers: usize,
    /// The attention of every block.
    pub kda: KdaConfig,
}

impl ModelConfig {
    pub fn init(&self, device: &Device) -> Model {
        let width = self.kda.hidden_size;
        // Small next to what the blocks add, so that they are heard from the first step.
        let embedding = Initializer::Normal { mean: 0.0, std: 0.1 };
        Model {
            embedding: EmbeddingConfig::new(self.vocab, width).with_initializer(embedding).init(device),
            blocks: (0..self.layers).map(|_| Block::new(&self.kda, device)).collect(),
            norm: RmsNormConfig::new(width).init(device),
            head: LinearConfig::new(width, self.vocab).with_bias(false).init(device),
        }
    }
}

/// A small language model.
#[derive(Module, Debug)]
pub struct Model {
    pub embedding: Embedding,
    pub blocks: Vec<Block>,
    pub norm: RmsNorm,
    pub head: Linear,
}

impl Model {
    /// Tokens `[B, T]` to logits `[B, T, vocab]`, all at once: the form to train with.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let x = self.embedding.forward(tokens);
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        self.head.forward(self.norm.forward(x))
    }
}

/// `x + KDA(norm(x))`, then `x + MLP(norm(x))`.
#[derive(Module, Debug)]
pub struct Block {
    pub kda_norm: RmsNorm,
    pub kda: KdaModule,
    pub mlp_norm: RmsNorm,
    pub up: SwiGlu,
    pub down: Linear,
}

impl Block {
    fn new(kda: &KdaConfig, device: &Device) -> Self {
        let width = kda.hidden_size;
        Self {
            kda_norm: RmsNormConfig::new(width).init(device),
            kda: kda.init(device),
            mlp_norm: RmsNormConfig::new(width).init(device),
            up: SwiGluConfig::new(width, 2 * width).init(device),
            down: LinearConfig::new(2 * width, width).with_bias(false).init(device),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let y = self.kda.forward(self.kda_norm.forward(x.clone()));
        self.mlp(x + y)
    }

    pub fn mlp(&self, x: Tensor<3>) -> Tensor<3> {
        let y = self.down.forward(self.up.forward(self.mlp_norm.forward(x.clone())));
        x + y
    }
}
