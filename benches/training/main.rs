//! What training costs on the CPU backends: time and peak memory of `chunk_kda` forward and backward, as one autodiff
//! node with its own backward pass and as a composition of tensor operations that Burn differentiates one by one.
//! Prints Markdown tables; with `--plot`, also draws the node's cost against T.
//!
//! ```sh
//! RAYON_NUM_THREADS=1 cargo bench -p burn-kda --bench training
//! RAYON_NUM_THREADS=1 cargo bench -p burn-kda --bench training -- --plot training.svg
//! ```

mod case;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/plot.rs"]
mod plot;

use std::fs;
use std::path::PathBuf;

use anyhow::Result;
use clap::Parser;

use case::{Backend, Case, LIMIT_GIB, Measurement, Pass};
use common::Shape;
use plot::{Curve, Panel};

/// Time and memory of a forward and backward pass on the CPU backends.
#[derive(Parser)]
struct Args {
    /// Tiny shapes, to see that the benchmark works
    #[arg(long)]
    quick: bool,
    /// Draw the node's time and memory against T, as SVG
    #[arg(long)]
    plot: Option<PathBuf>,
    /// Record all measurements
    #[arg(long)]
    json: Option<PathBuf>,
    /// One measurement, in the process that makes it
    #[arg(long, hide = true)]
    case: Option<String>,
    /// Passed by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<()> {
    let args = Args::parse();
    if let Some(case) = args.case {
        let case: Case = serde_json::from_str(&case)?;
        println!("{}", serde_json::to_string(&case.measure())?);
        return Ok(());
    }
    let threads = std::env::var("RAYON_NUM_THREADS").unwrap_or_else(|_| "all".into());
    println!("threads: {threads}; f32; memory is the peak above the inputs, of at most {LIMIT_GIB} GiB\n");

    // How often the composition is timed, and everything else.
    let (shapes, runs) = match args.quick {
        true => ([(1, 64, 2, 16, 16), (1, 128, 2, 16, 16)], [1, 1]),
        false => ([(1, 1024, 8, 64, 64), (1, 4096, 16, 128, 128)], [2, 10]),
    };
    println!(
        "| device | (B, T, H, K, V) | mode | ms | MiB | time / node | memory / node | (fwd + bwd) / fwd | without the loss |"
    );
    println!("|---|---|---|---:|---:|---:|---:|---:|---:|");
    let mut all = Vec::new();
    for backend in Backend::ALL {
        for shape in shapes {
            compare(backend, shape, runs, &mut all)?;
        }
    }

    let unit = if args.quick { 16 } else { 1024 };
    println!("\nThe node, forward and backward, at (1, T, 8, 64, 64):\n");
    println!("| device | T | ms | MiB | us per token | KiB per token |\n|---|---:|---:|---:|---:|---:|");
    let mut series = Vec::new();
    for backend in Backend::ALL {
        series.push((backend, against_time(backend, unit, &mut all)?));
    }
    if let Some(path) = args.plot {
        let panel = |y: &'static str, of: fn(&Measurement) -> Option<f64>| {
            let points = |measured: &[(usize, Measurement)]| {
                measured.iter().filter_map(|(time, measured)| Some((*time as f64, of(measured)?))).collect()
            };
            let curve = |(backend, measured): &(Backend, Vec<_>)| Curve {
                label: format!("{backend:?}"),
                points: points(measured),
            };
            Panel { x: "T", y, curves: series.iter().map(curve).collect() }
        };
        let panels = [panel("seconds", Measurement::seconds), panel("peak memory, MiB", Measurement::mib)];
        plot::write_svg(&path, &panels)?;
    }
    if let Some(path) = args.json {
        fs::write(path, serde_json::to_string_pretty(&all)?)?;
    }
    Ok(())
}

/// What `--json` records.
type Record = Vec<(Case, Measurement)>;

/// A row for each way to run one shape; runs of the composition and of everything else.
fn compare(backend: Backend, shape: Shape, [of_composition, runs]: [usize; 2], all: &mut Record) -> Result<()> {
    let mut run = |pass| {
        let runs = if pass == Pass::Composition { of_composition } else { runs };
        record(Case { backend, pass, shape, runs }, all)
    };
    let row = |mode: &str, measurement: &Measurement, ratios: [Option<f64>; 4]| {
        let ratios = ratios.map(|x| x.map_or(String::new(), |x| format!("{x:.2}"))).join(" | ");
        println!("| {backend:?} | {shape:?} | {mode} | {} | {ratios} |", cells(measurement));
    };
    let (forward, loss, node) = (run(Pass::Forward)?, run(Pass::Loss)?, run(Pass::Node)?);
    row("node, forward", &forward, [None; 4]);
    row("loss alone", &loss, [None; 4]);
    let without = node.seconds().zip(loss.seconds()).map(|(node, loss)| node - loss);
    let backward = [node.seconds(), without].map(|seconds| ratio(seconds, forward.seconds()));
    row("node", &node, [None, None, backward[0], backward[1]]);
    let composition = run(Pass::Composition)?;
    let [time, memory] = [Measurement::seconds, Measurement::mib].map(|of| ratio(of(&composition), of(&node)));
    row("composition", &composition, [time, memory, None, None]);
    Ok(())
}

/// The node's time in seconds and memory in MiB at 1, 2, 4, 8 and 16 times `unit` tokens.
fn against_time(backend: Backend, unit: usize, all: &mut Record) -> Result<Vec<(usize, Measurement)>> {
    let measure = |times| {
        let time = times * unit;
        let measurement = record(Case { backend, pass: Pass::Node, shape: (1, time, 8, 64, 64), runs: 5 }, all)?;
        let per_token = |total: Option<f64>| total.map_or("n/a".into(), |x| format!("{:.2}", x / time as f64));
        let us = per_token(measurement.seconds().map(|s| s * 1e6));
        let kib = per_token(measurement.mib().map(|mib| mib * 1024.0));
        println!("| {backend:?} | {time} | {} | {us} | {kib} |", cells(&measurement));
        Ok((time, measurement))
    };
    [1, 2, 4, 8, 16].into_iter().map(measure).collect()
}

fn record(case: Case, all: &mut Record) -> Result<Measurement> {
    let measurement = case.spawn()?;
    all.push((case, measurement.clone()));
    Ok(measurement)
}

fn ratio(a: Option<f64>, b: Option<f64>) -> Option<f64> {
    Some(a? / b?)
}

/// Milliseconds and MiB, or why there are none.
fn cells(measurement: &Measurement) -> String {
    let mib = measurement.mib().map_or("n/a".into(), |mib| format!("{mib:.1}"));
    match measurement {
        Measurement::Done { seconds, .. } => format!("{:.1} | {mib}", seconds * 1e3),
        Measurement::Died(why) => format!("{why} | {mib}"),
    }
}
