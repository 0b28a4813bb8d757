//! Multi-query associative recall (MQAR; Zoology, Arora et al. 2023; Kimi Linear, section 5.1).
//!
//! A sequence shows pairs of a key and a value, then asks for the value of every key once, in random order and at
//! random places among noise tokens. Pairs are drawn anew for every sequence, so nothing but reading it helps: the
//! answer to a query is the value that followed its key.

use anyhow::{Result, ensure};
use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::{SliceRandom, index};

/// Noise tokens, between the queries.
const NOISE: usize = 16;

/// Shape of the task. Tokens are keys, then values, then noise.
#[derive(Debug, Clone, Copy)]
pub struct Task {
    pairs: usize,
    length: usize,
    /// Distinct keys, and distinct values.
    symbols: usize,
}

/// Sequences with their queries.
pub struct Batch {
    /// All sequences one after the other.
    pub tokens: Vec<i64>,
    /// Places of the queries in the flat tokens.
    pub queries: Vec<i64>,
    /// The value each query asks for.
    pub answers: Vec<i64>,
    length: usize,
}

impl Task {
    pub fn new(pairs: usize, length: usize) -> Result<Self> {
        ensure!(pairs > 0, "--pairs must be at least 1");
        ensure!(length >= 3 * pairs, "--length must be at least {} for {pairs} pairs and their queries", 3 * pairs);
        Ok(Self { pairs, length, symbols: 64.max(2 * pairs) })
    }

    /// The task with `1 / by` of the pairs and the tokens.
    pub fn shrunk(&self, by: usize) -> Self {
        let pairs = (self.pairs / by).max(1);
        Self { pairs, length: (self.length / by).max(3 * pairs), ..*self }
    }

    pub fn vocab(&self) -> usize {
        2 * self.symbols + NOISE
    }

    /// A token for the reader.
    pub fn name(&self, token: i64) -> String {
        let symbols = self.symbols as i64;
        match token / symbols {
            0 => format!("key {token}"),
            1 => format!("value {}", token - symbols),
            _ => format!("noise {}", token - 2 * symbols),
        }
    }

    /// Accuracy of answering with any of the values seen in the sequence.
    pub fn chance(&self) -> f64 {
        1.0 / self.pairs as f64
    }

    /// Fresh sequences; the same generator state gives the same ones.
    pub fn batch(&self, size: usize, rng: &mut StdRng) -> Batch {
        let mut batch = Batch { tokens: Vec::new(), queries: Vec::new(), answers: Vec::new(), length: self.length };
        for _ in 0..size {
            self.push_sequence(&mut batch, rng);
        }
        batch
    }

    fn push_sequence(&self, batch: &mut Batch, rng: &mut StdRng) {
        let keys = index::sample(rng, self.symbols, self.pairs);
        let values = index::sample(rng, self.symbols, self.pairs);
        let mut pairs: Vec<_> =
            keys.iter().zip(values.iter()).map(|(key, value)| (key as i64, (self.symbols + value) as i64)).collect();
        batch.tokens.extend(pairs.iter().flat_map(|&(key, value)| [key, value]));

        let tail = batch.tokens.len();
        let noise = 2 * self.symbols..self.vocab();
        batch.tokens.extend((2 * self.pairs..self.length).map(|_| rng.random_range(noise.clone()) as i64));
        pairs.shuffle(rng);
        let mut places = index::sample(rng, self.length - 2 * self.pairs, self.pairs).into_vec();
        places.sort_unstable();
        for (place, (key, value)) in places.into_iter().zip(pairs) {
            batch.tokens[tail + place] = key;
            batch.queries.push((tail + place) as i64);
            batch.answers.push(value);
        }
    }
}

impl Batch {
    /// `[B, T]`
    pub fn tokens(&self, device: &Device) -> Tensor<2, Int> {
        let shape = [self.tokens.len() / self.length, self.length];
        Tensor::from_data(TensorData::new(self.tokens.clone(), shape), device)
    }

    /// `[queries]`
    pub fn answers(&self, device: &Device) -> Tensor<1, Int> {
        Tensor::from_data(TensorData::new(self.answers.clone(), [self.answers.len()]), device)
    }

    /// Logits `[B, T, vocab]` to those of the queries, `[queries, vocab]`.
    pub fn at_queries(&self, logits: Tensor<3>) -> Tensor<2> {
        let places = TensorData::new(self.queries.clone(), [self.queries.len()]);
        let places = Tensor::<1, Int>::from_data(places, &logits.device());
        logits.flatten::<2>(0, 1).select(0, places)
    }
}
