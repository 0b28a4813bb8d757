//! Prints the KDA layers of a checkpoint: sizes, dtypes, gate, and how long each head remembers.
//!
//! ```sh
//! cargo run --release --example inspect                                 # on a fixture of this repository
//! cargo run --release --example inspect -- DIR --heads --plot half-lives.svg
//! ```
//!
//! `DIR` holds `config.json` and safetensors, one file or sharded, of Kimi Linear, Kimi K3, GLM-5.3-Flash, Ling-3.0 or
//! one of FLA's models. Of the tensors, only `A_log` and `dt_bias` are read.

mod half_life;
mod plot;

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use burn_kda::checkpoint::{Checkpoint, CheckpointError, LayerLayout, ModelConfig};
use burn_kda::{DecayFn, Projection};
use clap::Parser;

use half_life::HalfLife;

/// The KDA layers of a checkpoint, and the half-lives of their states.
#[derive(Parser)]
struct Args {
    /// Folder, safetensors file or index [default: a fixture of this repository]
    path: Option<PathBuf>,
    /// Print every head
    #[arg(long)]
    heads: bool,
    /// Draw the half-lives of all heads into an SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/oracle/fixtures/checkpoints/kimi_linear");
    let path = args.path.unwrap_or_else(|| fixture.into());
    let checkpoint = Checkpoint::open(&path)?;
    let model = checkpoint.config();
    print_model(model);

    println!(
        "{:>5}  {:>9}  {:<14}  half-life in tokens at rest, over the channels of a head",
        "layer", "numbers", "dtypes"
    );
    let (mut layers, mut failed) = (Vec::new(), 0);
    for &layer in &model.kda_layers {
        match read(&checkpoint, layer) {
            Ok((layout, heads)) => {
                print_layer(layer, &layout, &heads, args.heads);
                layers.push((layer, heads));
            }
            Err(error) => {
                println!("{layer:>5}  {error}");
                failed += 1;
            }
        }
    }
    if let Some(file) = args.plot {
        ensure!(!layers.is_empty(), "no layer to plot");
        plot::write_svg(&file, &format!("{}, {} KDA layers", model.family, layers.len()), &layers)?;
        println!("\nwrote {}", file.display());
    }
    ensure!(failed == 0, "{failed} of {} layers could not be read", model.kda_layers.len());
    Ok(())
}

fn read(checkpoint: &Checkpoint, layer: usize) -> Result<(LayerLayout, Vec<HalfLife>), CheckpointError> {
    let decay = checkpoint.decay(layer)?;
    Ok((checkpoint.layout(layer)?, half_life::of_heads(&checkpoint.config().layer, decay)))
}

fn print_model(model: &ModelConfig) {
    let layer = &model.layer;
    let (value_heads, value_dim) = (layer.value_heads(), layer.value_head_dim());
    let gate = match layer.decay {
        DecayFn::Softplus => "softplus, unbounded".into(),
        DecayFn::Sigmoid { lower_bound } => format!("sigmoid, at least {lower_bound} per token"),
    };
    let rank = |projection| match projection {
        Projection::HeadRank => format!("rank {value_dim}"),
        Projection::LowRank(rank) => format!("rank {rank}"),
        Projection::Full => "full rank".into(),
    };
    let convolution = layer.conv_size.map_or("none".into(), |width| format!("width {width}"));
    println!("{}: {} of {} layers are KDA", model.family, model.kda_layers.len(), model.num_layers);
    println!("  hidden size   {}", layer.hidden_size);
    println!("  heads         {} of K = {}, {value_heads} of V = {value_dim}", layer.num_heads, layer.head_dim);
    println!("  decay gate    {gate}, {}", rank(layer.decay_projection));
    println!("  output gate   {}", rank(layer.output_gate));
    println!("  convolutions  {convolution}");
    println!("  state         {} numbers per sequence and layer\n", value_heads * layer.head_dim * value_dim);
}

fn print_layer(layer: usize, layout: &LayerLayout, heads: &[HalfLife], all: bool) {
    let numbers: usize = layout.tensors().map(|(_, shape, _)| shape.iter().product::<usize>()).sum();
    let dtypes: BTreeSet<_> = layout.tensors().map(|(_, _, dtype)| format!("{dtype:?}")).collect();
    let dtypes = dtypes.into_iter().collect::<Vec<_>>().join(" + ");
    let by_median = |a: &&HalfLife, b: &&HalfLife| a.median.total_cmp(&b.median);
    let (fastest, slowest) = (heads.iter().min_by(by_median), heads.iter().max_by(by_median));
    match (fastest, slowest) {
        (Some(fastest), Some(slowest)) if !all && heads.len() > 1 => {
            let range = format!("{fastest} (head {}) to {slowest} (head {})", fastest.head, slowest.head);
            println!("{layer:>5}  {numbers:>9}  {dtypes:<14}  {range}");
        }
        _ => {
            println!("{layer:>5}  {numbers:>9}  {dtypes}");
            heads.iter().for_each(|half_life| println!("{:>37} {:<4} {half_life}", "head", half_life.head));
        }
    }
}
