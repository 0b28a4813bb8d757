//! Trains a byte-level KDA language model on a text file and lets it write.
//!
//! ```sh
//! cargo run --release --example text                  # on this repository's Markdown and Rust
//! cargo run --release --example text -- FILE --steps 1000 --width 256 --heads 4
//! ```
//!
//! Prints tokens per second of training and of decoding, samples, and bits per byte on the part held out.

#[path = "../support/corpus.rs"]
mod corpus;
#[path = "../support/decode.rs"]
mod decode;
#[path = "../support/device.rs"]
mod device;
#[path = "../support/evaluate.rs"]
mod evaluate;
#[path = "../support/gate.rs"]
mod gate;
#[path = "../support/model.rs"]
mod model;
#[path = "../support/progress.rs"]
mod progress;
mod sample;
#[path = "../support/train.rs"]
mod train;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, ensure};
use burn::module::Module;
use burn::nn::loss::CrossEntropyLoss;
use burn_kda::KdaConfig;
use clap::Parser;
use rand::SeedableRng;
use rand::rngs::StdRng;

use corpus::Corpus;
use evaluate::bits_per_byte;
use model::ModelConfig;

/// Held-out bytes that are read for the bits per byte.
const HELD_OUT: usize = 1 << 16;

/// Train a byte-level KDA language model, and sample from it.
#[derive(Parser)]
struct Args {
    /// Text to learn [default: this repository's Markdown and Rust]
    file: Option<PathBuf>,
    /// Training steps
    #[arg(long, default_value_t = 300)]
    steps: usize,
    /// Windows per step
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Bytes per window
    #[arg(long, default_value_t = 256)]
    length: usize,
    /// Peak learning rate
    #[arg(long, default_value_t = 4e-3)]
    lr: f64,
    /// Width of the model
    #[arg(long, default_value_t = 128)]
    width: usize,
    /// Heads, of width / heads channels
    #[arg(long, default_value_t = 2)]
    heads: usize,
    /// Blocks
    #[arg(long, default_value_t = 2)]
    layers: usize,
    /// Decay gate
    #[arg(long, value_enum, default_value = "softplus")]
    gate: gate::Gate,
    /// Start of the samples
    #[arg(long, default_value = "/// The ")]
    prompt: String,
    /// Samples to print
    #[arg(long, default_value_t = 2)]
    samples: usize,
    /// Bytes per sample
    #[arg(long, default_value_t = 300)]
    bytes: usize,
    /// Sharpness of the samples: below 1 is safer
    #[arg(long, default_value_t = 0.7)]
    temperature: f64,
    /// Seed of the weights, the windows and the samples
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Backend [default: BURN_DEVICE, else flex]
    #[arg(long, value_enum)]
    device: Option<device::Backend>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(
        args.heads > 0 && args.width.is_multiple_of(args.heads),
        "--width must be a multiple of --heads, got {} and {}",
        args.width,
        args.heads
    );
    ensure!(args.temperature > 0.0, "--temperature must be positive, got {}", args.temperature);
    ensure!(!args.prompt.is_empty(), "--prompt must not be empty");
    let corpus = Corpus::load(args.file.as_deref())?;
    ensure!(args.length < corpus.train.len(), "--length must be below {}", corpus.train.len());

    let plain = device::select(args.device);
    let device = plain.clone().autodiff();
    device.seed(args.seed);
    let mut rng = StdRng::seed_from_u64(args.seed);
    let kda = KdaConfig::new(args.width, args.heads, args.width / args.heads).with_decay(args.gate.into());
    let mut model = ModelConfig::new(corpus::VOCAB, args.layers, kda).init(&device);
    println!(
        "{} bytes to learn, {} held out; {} parameters, {:?} gate, on {plain:?}",
        corpus.train.len(),
        corpus.held_out.len(),
        model.num_params(),
        args.gate
    );

    let mut trainer = train::Trainer::new(args.steps, args.lr)?;
    let criterion = CrossEntropyLoss::new(None, &device);
    let progress = progress::Progress::new(args.steps)?;
    let start = Instant::now();
    for step in 1..=args.steps {
        let (inputs, targets) = corpus.batch(args.batch, args.length, &mut rng, &device);
        let loss = criterion.forward(model.forward(inputs).flatten(0, 1), targets);
        let bits = loss.clone().into_scalar::<f64>() / std::f64::consts::LN_2;
        model = trainer.step(model, loss);
        progress.show(step, format!("{bits:.3} bits per byte"));
    }
    let seconds = start.elapsed().as_secs_f64();
    let tokens = (args.steps * args.batch * args.length) as f64;
    println!("training: {seconds:.1} s, {:.0} tokens/s", tokens / seconds);

    let model = model.valid();
    println!("held out: {:.3} bits per byte", bits_per_byte(&model, &corpus.held_out, HELD_OUT, &plain));

    for n in 1..=args.samples {
        let start = Instant::now();
        let text = sample::sample(&model, args.prompt.as_bytes(), args.bytes, args.temperature, &mut rng, &plain);
        let rate = args.bytes as f64 / start.elapsed().as_secs_f64();
        println!("\nsample {n}, {rate:.0} tokens/s:\n{}{}", args.prompt, String::from_utf8_lossy(&text));
    }
    Ok(())
}
