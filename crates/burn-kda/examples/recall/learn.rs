//! Training and held-out accuracy.

use anyhow::Result;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLoss;
use burn::tensor::{Device, Tensor};
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::data::{Batch, Task};
use crate::model::{Model, ModelConfig};
use crate::progress::Progress;
use crate::train::Trainer;

pub struct Options {
    pub steps: usize,
    pub batch: usize,
    pub lr: f64,
    pub seed: u64,
}

/// Step and value.
type Curve = Vec<(f64, f64)>;

pub struct Trained {
    /// On a device without autodiff.
    pub model: Model,
    pub loss: Curve,
    pub train_accuracy: Curve,
    pub held_out_accuracy: Curve,
}

/// Trains on fresh sequences only; `held_out` is watched, never learnt from.
pub fn train(
    config: &ModelConfig,
    task: Task,
    held_out: &Batch,
    options: &Options,
    device: &Device,
) -> Result<Trained> {
    let device = device.clone().autodiff();
    device.seed(options.seed);
    let mut rng = StdRng::seed_from_u64(options.seed);
    let mut model = config.init(&device);
    let mut trainer = Trainer::new(options.steps, options.lr)?;
    let criterion = CrossEntropyLoss::new(None, &device);
    let (mut losses, mut train_accuracy, mut held_out_accuracy) = (Vec::new(), Vec::new(), Vec::new());
    let progress = Progress::new(options.steps)?;
    let watch_every = (options.steps / 20).max(1);

    for step in 1..=options.steps {
        let shrink = shrink(step, options.steps);
        let batch = task.shrunk(shrink).batch(shrink * options.batch, &mut rng);
        let logits = batch.at_queries(model.forward(batch.tokens(&device)));
        let accuracy = accuracy(logits.clone(), &batch);
        let loss = criterion.forward(logits, batch.answers(&device));
        let loss_value = loss.clone().into_scalar::<f64>();
        model = trainer.step(model, loss);

        losses.push((step as f64, loss_value));
        train_accuracy.push((step as f64, 100.0 * accuracy));
        if step % watch_every == 0 || step == options.steps {
            held_out_accuracy.push((step as f64, 100.0 * evaluate(&model.valid(), held_out)));
        }
        let held_out = held_out_accuracy.last().map_or(0.0, |&(_, accuracy)| accuracy);
        let message = format!("loss {loss_value:.3}  accuracy {:5.1} %  held out {held_out:5.1} %", 100.0 * accuracy);
        progress.show(step, message);
    }
    Ok(Trained { model: model.valid(), loss: losses, train_accuracy, held_out_accuracy })
}

/// Zoology trains on a mixture of sizes. Here they grow, a quarter of the pairs, half of them, all, in batches of the
/// same tokens: which token is which is learnt faster where there is less to remember.
fn shrink(step: usize, steps: usize) -> usize {
    match 10 * step / steps {
        0..3 => 4,
        3..5 => 2,
        _ => 1,
    }
}

/// Share of right answers, all tokens at once.
pub fn evaluate(model: &Model, batch: &Batch) -> f64 {
    let device = &model.head.weight.device();
    accuracy(batch.at_queries(model.forward(batch.tokens(device))), batch)
}

/// The likeliest token of each row.
pub fn best(logits: Tensor<2>) -> Vec<i64> {
    logits.argmax(1).into_data().iter::<i64>().collect()
}

fn accuracy(logits: Tensor<2>, batch: &Batch) -> f64 {
    let right = best(logits).iter().zip(&batch.answers).filter(|(got, want)| got == want).count();
    right as f64 / batch.answers.len() as f64
}
