//! Trains a nano byte-level model from two initialisations of the softplus gate, FLA's and an older constant one, and
//! writes `docs/reviews/init-survival.md` with its plot.
//!
//! ```sh
//! cargo run --release --example init_survival
//! ```

#[path = "../support/corpus.rs"]
mod corpus;
#[path = "../support/decode.rs"]
mod decode;
#[path = "../support/device.rs"]
mod device;
#[path = "../support/evaluate.rs"]
mod evaluate;
mod initial;
#[path = "../support/model.rs"]
mod model;
#[path = "../support/plot.rs"]
mod plot;
#[path = "../support/progress.rs"]
mod progress;
mod report;
mod run;
#[path = "../support/train.rs"]
mod train;

use std::path::PathBuf;

use anyhow::{Result, ensure};
use burn_kda::KdaConfig;
use clap::Parser;

use corpus::Corpus;
use initial::Initial;
use model::ModelConfig;
use report::Trial;
use run::Setup;

/// Compare FLA's initialisation of the softplus gate with a constant one.
#[derive(Parser)]
struct Args {
    /// Training steps
    #[arg(long, default_value_t = 100)]
    steps: usize,
    /// Windows per step
    #[arg(long, default_value_t = 4)]
    batch: usize,
    /// Bytes per window
    #[arg(long, default_value_t = 128)]
    length: usize,
    /// Blocks
    #[arg(long, default_value_t = 1)]
    layers: usize,
    /// Peak learning rate
    #[arg(long, default_value_t = 1e-3)]
    lr: f64,
    /// Runs per initialisation
    #[arg(long, default_value_t = 3)]
    seeds: u64,
    /// Backend [default: BURN_DEVICE, else flex]
    #[arg(long, value_enum)]
    device: Option<device::Backend>,
    /// Where the report goes [default: docs/reviews of the repository]
    #[arg(long)]
    out: Option<PathBuf>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(args.steps > 0 && args.batch > 0, "--steps and --batch must be positive");
    ensure!(args.seeds > 1, "--seeds must be at least 2, or there is no spread to compare with");
    let corpus = Corpus::load(None)?;
    let device = device::select(args.device);
    let setup = Setup {
        config: ModelConfig::new(corpus::VOCAB, args.layers, KdaConfig::new(512, 8, 64)),
        steps: args.steps,
        batch: args.batch,
        length: args.length,
        lr: args.lr,
    };

    let mut trials = Initial::BOTH.map(|initial| Trial { initial, runs: Vec::new() });
    for trial in &mut trials {
        for seed in 0..args.seeds {
            trial.runs.push(run::run(&setup, trial.initial, &corpus, seed, &device)?);
        }
    }
    let out = match args.out {
        Some(out) => out,
        None => corpus::repository_root()?.join("docs/reviews"),
    };
    report::write(&out, &setup, &corpus, &trials, &format!("{device:?}"))?;
    println!("written: {}", out.join("init-survival.md").display());
    Ok(())
}
