//! Trains a two-layer KDA model on multi-query associative recall, the standard probe of what a linear attention
//! can remember, then saves it, loads it and answers token by token from carried state.
//!
//! ```sh
//! cargo run --release --example recall
//! cargo run --release --example recall -- --gate sigmoid --pairs 32 --length 128
//! ```
//!
//! Fails unless held-out accuracy is at least 99 % and every decoded answer equals the chunked one.

mod answer;
mod data;
#[path = "../support/decode.rs"]
mod decode;
#[path = "../support/device.rs"]
mod device;
#[path = "../support/gate.rs"]
mod gate;
mod learn;
#[path = "../support/model.rs"]
mod model;
#[path = "../support/plot.rs"]
mod plot;
#[path = "../support/progress.rs"]
mod progress;
#[path = "../support/train.rs"]
mod train;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use burn::module::Module;
use burn_kda::KdaConfig;
use clap::Parser;
use rand::SeedableRng;
use rand::rngs::StdRng;

use data::Task;
use model::ModelConfig;
use plot::{Panel, Series};

/// Held-out accuracy to reach.
const GOAL: f64 = 0.99;

/// Train a small KDA model on multi-query associative recall, and decode from carried state.
#[derive(Parser)]
struct Args {
    /// Key-value pairs per sequence; each key is asked for once
    #[arg(long, default_value_t = 16)]
    pairs: usize,
    /// Tokens per sequence, at least 3 per pair
    #[arg(long, default_value_t = 64)]
    length: usize,
    /// Training steps
    #[arg(long, default_value_t = 480)]
    steps: usize,
    /// Full-length sequences per step
    #[arg(long, default_value_t = 24)]
    batch: usize,
    /// Peak learning rate
    #[arg(long, default_value_t = 1e-2)]
    lr: f64,
    /// Decay gate
    #[arg(long, value_enum, default_value = "softplus")]
    gate: gate::Gate,
    /// Width of the model
    #[arg(long, default_value_t = 64)]
    width: usize,
    /// Heads, of width / heads channels
    #[arg(long, default_value_t = 2)]
    heads: usize,
    /// Seed of the weights and the sequences
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Backend [default: BURN_DEVICE, else flex]
    #[arg(long, value_enum)]
    device: Option<device::Backend>,
    /// Held-out sequences
    #[arg(long, default_value_t = 256)]
    held_out: usize,
    /// Where the model and the learning curve go
    #[arg(long, default_value = "target/recall")]
    out: PathBuf,
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let task = Task::new(args.pairs, args.length)?;
    ensure!(
        args.heads > 0 && args.width.is_multiple_of(args.heads),
        "--width must be a multiple of --heads, got {} and {}",
        args.width,
        args.heads
    );
    ensure!(args.steps > 0 && args.batch > 0 && args.held_out > 0, "--steps, --batch and --held-out must be positive");
    fs::create_dir_all(&args.out).with_context(|| format!("creating {}", args.out.display()))?;

    let device = device::select(args.device);
    let kda = KdaConfig::new(args.width, args.heads, args.width / args.heads).with_decay(args.gate.into());
    let config = ModelConfig::new(task.vocab(), 2, kda);
    // A seed no training run uses.
    let held_out = task.batch(args.held_out, &mut StdRng::seed_from_u64(!args.seed));
    println!(
        "recall of {} pairs in {} tokens, {:?} gate, {} parameters, on {device:?}",
        args.pairs,
        args.length,
        args.gate,
        config.init(&device).num_params()
    );

    let options = learn::Options { steps: args.steps, batch: args.batch, lr: args.lr, seed: args.seed };
    let start = Instant::now();
    let trained = learn::train(&config, task, &held_out, &options, &device)?;
    let seconds = start.elapsed().as_secs_f64();
    println!("trained {} steps in {seconds:.1} s, {:.1} steps/s", args.steps, args.steps as f64 / seconds);

    let curve = args.out.join("learning-curve.svg");
    let series = |label: &str, points| Series { label: label.into(), points };
    let accuracy =
        vec![series("training, growing task", trained.train_accuracy), series("held out", trained.held_out_accuracy)];
    plot::write_svg(
        &curve,
        &[
            Panel {
                title: "Recall: loss".into(),
                y_label: "nats".into(),
                series: vec![series("training", trained.loss)],
            },
            Panel { title: "Recall: accuracy".into(), y_label: "%".into(), series: accuracy },
        ],
    )?;
    println!("learning curve: {}", curve.display());

    let file = args.out.join("model.bpk");
    trained.model.save_file(&file).with_context(|| format!("saving {}", file.display()))?;
    let model = config.init(&device).try_load_file(&file).with_context(|| format!("loading {}", file.display()))?;
    println!("saved and loaded: {}", file.display());

    let accuracy = learn::evaluate(&model, &held_out);
    let answers = answer::compare(&model, &held_out);
    println!(
        "held-out accuracy of the loaded model: {:.2} % of {} queries (guessing among the values shown: {:.2} %)",
        100.0 * accuracy,
        answers.compared,
        100.0 * task.chance()
    );
    println!(
        "token by token: {} of {} answers right; {} of {} equal the chunked ones, logits differ by at most {:.1e}",
        answers.right, answers.compared, answers.equal, answers.compared, answers.max_logit_difference
    );

    let asked = held_out.queries.iter().map(|&place| held_out.tokens[place as usize]);
    for ((key, value), answer) in asked.zip(&held_out.answers).zip(&answers.decoded).take(3) {
        println!("  {} came with {}; asked for it: {}", task.name(key), task.name(*value), task.name(*answer));
    }

    let mut failures = Vec::new();
    if accuracy < GOAL {
        failures.push(format!("accuracy {:.2} % is below {:.0} %", 100.0 * accuracy, 100.0 * GOAL));
    }
    if answers.equal != answers.compared {
        failures.push(format!("{} decoded answers differ", answers.compared - answers.equal));
    }
    if !failures.is_empty() {
        println!("FAIL: {}", failures.join("; "));
        return Ok(ExitCode::FAILURE);
    }
    println!("PASS");
    Ok(ExitCode::SUCCESS)
}
