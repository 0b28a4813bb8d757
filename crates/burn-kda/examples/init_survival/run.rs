//! One training run from one initialisation.

use anyhow::Result;
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::loss::CrossEntropyLoss;
use burn::tensor::{Device, Tensor};
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::corpus::Corpus;
use crate::evaluate::bits_per_byte;
use crate::initial::{HalfLives, Initial, half_lives};
use crate::model::{Model, ModelConfig};
use crate::progress::Progress;
use crate::train::Trainer;

/// Held-out bytes that are read for the bits per byte.
pub const HELD_OUT: usize = 1 << 13;

pub struct Setup {
    pub config: ModelConfig,
    pub steps: usize,
    pub batch: usize,
    pub length: usize,
    pub lr: f64,
}

pub struct Run {
    /// Bits per byte of every step's batch.
    pub loss: Vec<f64>,
    /// Bits per byte after training.
    pub held_out: f64,
    /// Losses that are not finite.
    pub bad_losses: usize,
    /// Parameter entries that are not finite after training; one bad gradient leaves one for good.
    pub bad_parameters: usize,
    pub half_lives: HalfLives,
}

/// Both initialisations see the same windows and start from the same other weights.
pub fn run(setup: &Setup, initial: Initial, corpus: &Corpus, seed: u64, device: &Device) -> Result<Run> {
    let plain = device.clone();
    let device = device.clone().autodiff();
    device.seed(seed);
    let mut rng = StdRng::seed_from_u64(seed);
    let model = setup.config.init(&device);
    count_non_finite(&model); // Draws the lazily initialised weights, in one order for both.
    let mut model = initial.apply(model);
    let (inputs, _) = corpus.batch(setup.batch, setup.length, &mut rng, &plain);
    let half_lives = half_lives(&model.valid(), inputs);

    let mut trainer = Trainer::new(setup.steps, setup.lr)?;
    let criterion = CrossEntropyLoss::new(None, &device);
    let progress = Progress::new(setup.steps)?;
    let mut losses = Vec::with_capacity(setup.steps);
    for step in 1..=setup.steps {
        let (inputs, targets) = corpus.batch(setup.batch, setup.length, &mut rng, &device);
        let loss = criterion.forward(model.forward(inputs).flatten(0, 1), targets);
        let bits = loss.clone().into_scalar::<f64>() / std::f64::consts::LN_2;
        model = trainer.step(model, loss);
        losses.push(bits);
        progress.show(step, format!("{}, seed {seed}: {bits:.3} bits per byte", initial.label()));
    }
    let model = model.valid();
    Ok(Run {
        bad_losses: losses.iter().filter(|loss| !loss.is_finite()).count(),
        bad_parameters: count_non_finite(&model),
        held_out: bits_per_byte(&model, &corpus.held_out, HELD_OUT, &plain),
        loss: losses,
        half_lives,
    })
}

fn count_non_finite(model: &Model) -> usize {
    struct Count(usize);
    impl ModuleVisitor for Count {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let data = param.val().into_data();
            self.0 += data.iter::<f32>().filter(|x| !x.is_finite()).count();
        }
    }
    let mut count = Count(0);
    model.visit(&mut count);
    count.0
}
