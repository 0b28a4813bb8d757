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

    // Shapes with how often each is timed.
    let shapes = match args.quick {
        true => [((1, 64, 2, 16, 16), 1), ((1, 128, 2, 16, 16), 1)],
        false => [((1, 1024, 8, 64, 64), 3), ((1, 4096, 16, 128, 128), 2)],
    };
    println!("| device | (B, T, H, K, V) | mode | ms | MiB | time / node | memory / node | (fwd + bwd) / fwd |");
    println!("|---|---|---|---:|---:|---:|---:|---:|");
    let mut all = Vec::new();
    for backend in Backend::ALL {
        for (shape, runs) in shapes {
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

/// A row for each way to run one shape.
fn compare(backend: Backend, shape: Shape, runs: usize, all: &mut Record) -> Result<()> {
    let mut run = |pass| record(Case { backend, pass, shape, runs }, all);
    let row = |mode: &str, measurement: &Measurement, [time, memory, backward]: [Option<f64>; 3]| {
        let [time, memory, backward] = [time, memory, backward].map(|x| x.map_or(String::new(), |x| format!("{x:.2}")));
        println!("| {backend:?} | {shape:?} | {mode} | {} | {time} | {memory} | {backward} |", cells(measurement));
    };
    let forward = run(Pass::Forward)?;
    row("node, forward", &forward, [None; 3]);
    let node = run(Pass::Node)?;
    row("node", &node, [None, None, ratio(node.seconds(), forward.seconds())]);
    let composition = run(Pass::Composition)?;
    let ratios = [ratio(composition.seconds(), node.seconds()), ratio(composition.mib(), node.mib()), None];
    row("composition", &composition, ratios);
    Ok(())
}

/// The node's time in seconds and memory in MiB at 1, 2, 4, 8 and 16 times `unit` tokens.
fn against_time(backend: Backend, unit: usize, all: &mut Record) -> Result<Vec<(usize, Measurement)>> {
    let measure = |times| {
        let time = times * unit;
        let measurement = record(Case { backend, pass: Pass::Node, shape: (1, time, 8, 64, 64), runs: 2 }, all)?;
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
