//! Times the operator on the CPU backends, on one thread and on all, and prints Markdown tables, which
//! `docs/performance.md` quotes.
//!
//! ```sh
//! cargo bench -p burn-kda --bench operator
//! cargo bench -p burn-kda --bench operator -- --json operator.json --plot operator.svg
//! ```
//!
//! Speed is given by the 7KV count: 7 K V flops per token and value head, what the recurrence costs, whatever the form
//! spends. The share is of the FMA peak of one core, that of a step is of the speed of a copy of the state; both are
//! measured in the same run.

#[path = "../common/mod.rs"]
mod common;
mod measure;
mod peak;
#[path = "../common/plot.rs"]
mod plot;

use std::path::PathBuf;
use std::process::Command;
use std::{env, fs};

use anyhow::{Result, ensure};
use burn::tensor::Device;
use clap::Parser;
use rayon::ThreadPoolBuilder;
use serde::{Deserialize, Serialize};

use common::Shape;
use measure::Form;
use plot::{Curve, Panel};

const SMALL: Shape = (1, 1024, 8, 64, 64);
const LARGE: Shape = (1, 4096, 16, 128, 128);
const STEPS: [Shape; 5] =
    [(1, 1, 1, 16, 16), (1, 1, 32, 128, 128), (2, 1, 32, 128, 128), (4, 1, 32, 128, 128), (8, 1, 32, 128, 128)];

/// Time of the operator on the CPU backends.
#[derive(Parser)]
struct Args {
    /// Tiny shapes, to see that the benchmark works
    #[arg(long)]
    quick: bool,
    /// Record all measurements
    #[arg(long)]
    json: Option<PathBuf>,
    /// Draw time against T, throughput against heads, and shares of the machine's limits, as SVG
    #[arg(long)]
    plot: Option<PathBuf>,
    /// Measures one way to run the operator in this process and prints it as JSON
    #[arg(long, hide = true)]
    case: Option<Case>,
    /// Passed by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

/// The operator in native kernels, or in tensor operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
enum Case {
    Native,
    Plain,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Row {
    device: String,
    case: Case,
    form: Form,
    shape: Shape,
    /// On one thread, and on all.
    seconds: [f64; 2],
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Layer {
    device: String,
    case: Case,
    shape: Shape,
    /// As [`measure::layer`] has them.
    seconds: [f64; 5],
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Measured {
    rows: Vec<Row>,
    layers: Vec<Layer>,
}

#[derive(Serialize)]
struct Record {
    threads: usize,
    peak_gflops: f64,
    /// Seconds to copy the states of the steps.
    copies: Vec<(Shape, f64)>,
    #[serde(flatten)]
    measured: Measured,
}

#[allow(deprecated)]
fn devices() -> [(&'static str, Device); 2] {
    [("NdArray", Device::ndarray()), ("Flex", Device::flex())]
}

fn main() -> Result<()> {
    let args = Args::parse();
    if let Some(case) = args.case {
        println!("{}", serde_json::to_string(&measure(case, args.quick)?)?);
        return Ok(());
    }
    let limits = || (peak::fma_gflops(), STEPS.map(|shape| peak::copy_seconds(state_len(shape))));
    let before = limits();
    let mut measured = Measured::default();
    for case in [Case::Native, Case::Plain] {
        let Measured { rows, layers } = spawn(case, args.quick)?;
        measured.rows.extend(rows);
        measured.layers.extend(layers);
    }
    // The fastest of several minutes: a shared machine is slow at times.
    let after = limits();
    let fastest = before.1.iter().zip(after.1).map(|(before, after)| before.min(after));
    let record = Record {
        threads: rayon::current_num_threads(),
        peak_gflops: before.0.max(after.0),
        copies: STEPS.into_iter().zip(fastest).collect(),
        measured,
    };
    print(&record);
    if let Some(path) = args.plot {
        plot::write_svg(&path, &panels(&record))?;
    }
    if let Some(path) = args.json {
        fs::write(path, serde_json::to_string_pretty(&record)?)?;
    }
    Ok(())
}

/// In a new process: which way is taken is decided once.
fn spawn(case: Case, quick: bool) -> Result<Measured> {
    let mut command = Command::new(env::current_exe()?);
    command.args(["--case", if case == Case::Native { "native" } else { "plain" }]).env_remove("BURN_KDA_PLAIN");
    if case == Case::Plain {
        command.env("BURN_KDA_PLAIN", "1");
    }
    if quick {
        command.arg("--quick");
    }
    let output = command.output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn measure(case: Case, quick: bool) -> Result<Measured> {
    let alone = ThreadPoolBuilder::new().num_threads(1).build()?;
    let mut forms: Vec<(Form, Shape)> = [SMALL, LARGE].map(|shape| (Form::Chunk, shape)).into();
    forms.extend(STEPS.map(|shape| (Form::Step, shape)));
    forms.push((Form::Chunk, (1, 1, 1, 16, 16)));
    if case == Case::Native {
        // By the definition in tensor operations, in either case.
        forms.push((Form::Recurrent, SMALL));
        forms.extend([2, 4, 8, 16, 32, 64].map(|k| (Form::Chunk, (1, k * 1024, 8, 64, 64))));
        forms.extend([1, 2, 4, 16, 32].map(|heads| (Form::Chunk, (1, 1024, heads, 64, 64))));
    } else {
        forms.extend([2, 4, 8, 16].map(|k| (Form::Chunk, (1, k * 1024, 8, 64, 64))));
    }
    let small = |(batch, time, heads, ..): Shape| (batch, time.div_ceil(64), heads, 16, 16);
    let mut measured = Measured::default();
    for (device, tensors) in devices() {
        for &(form, shape) in &forms {
            let shape = if quick { small(shape) } else { shape };
            let run = || form.seconds(shape, &tensors);
            let seconds = [alone.install(run), run()];
            measured.rows.push(Row { device: device.into(), case, form, shape, seconds });
        }
        for shape in [SMALL, (1, 1024, 16, 128, 128)] {
            let shape = if quick { small(shape) } else { shape };
            let seconds = measure::layer(shape, &tensors);
            measured.layers.push(Layer { device: device.into(), case, shape, seconds });
        }
    }
    Ok(measured)
}

fn gflop((batch, time, heads, key_dim, value_dim): Shape) -> f64 {
    7.0 * (batch * time * heads * key_dim * value_dim) as f64 / 1e9
}

fn state_len((batch, _, heads, key_dim, value_dim): Shape) -> usize {
    batch * heads * key_dim * value_dim
}

impl Record {
    /// Percent of the FMA peak, on one thread.
    fn share_of_peak(&self, row: &Row) -> f64 {
        100.0 * gflop(row.shape) / row.seconds[0] / self.peak_gflops
    }

    /// Percent of the speed at which the state is copied, on one thread; none if it is not a step.
    fn share_of_copy(&self, row: &Row) -> Option<f64> {
        // A smaller one is no matter of bandwidth.
        let is_large = row.form == Form::Step && state_len(row.shape) > 1 << 16;
        let (_, seconds) = self.copies.iter().find(|(shape, _)| *shape == row.shape && is_large)?;
        Some(100.0 * seconds / row.seconds[0])
    }
}

fn print(record: &Record) {
    let Record { threads, peak_gflops, measured, .. } = record;
    println!("FMA peak of one core: {peak_gflops:.0} GFLOP/s (f32); all threads: {threads}\n");
    println!(
        "| device | kernels | form | (B, T, H, K, V) | ms | GFLOP/s (7KV) | share | ms, all threads | faster by |"
    );
    println!("|---|---|---|---|---:|---:|---:|---:|---:|");
    for row in &measured.rows {
        let Row { device, case, form, shape, seconds: [alone, together] } = row;
        let share = match record.share_of_copy(row) {
            Some(share) => format!("{share:.0} % of a copy"),
            None => format!("{:.1} % of the peak", record.share_of_peak(row)),
        };
        let (speed, faster) = (gflop(*shape) / alone, alone / together);
        let [ms, all] = [alone, together].map(|seconds| match seconds * 1e3 {
            ms if ms < 1.0 => format!("{ms:.4}"),
            ms => format!("{ms:.2}"),
        });
        println!("| {device} | {case:?} | {form:?} | {shape:?} | {ms} | {speed:.2} | {share} | {all} | {faster:.2} |");
    }
    println!(
        "\nForward pass of a layer of hidden size H K, all threads; percent of its time, the rest are its projections:\n"
    );
    println!("| device | kernels | (B, T, H, K, V) | ms | operator | convolutions | gates | output norm |");
    println!("|---|---|---|---:|---:|---:|---:|---:|");
    for Layer { device, case, shape, seconds: [layer, parts @ ..] } in &measured.layers {
        let parts = parts.map(|part| format!("{:.0}", 100.0 * part / layer)).join(" | ");
        println!("| {device} | {case:?} | {shape:?} | {:.1} | {parts} |", layer * 1e3);
    }
}

fn panels(record: &Record) -> [Panel; 4] {
    let against_time = |row: &Row| matches!(row.shape, (1, 1024.., 8, 64, 64)) && row.form == Form::Chunk;
    let against_heads = |row: &Row| matches!(row.shape, (1, 1024, _, 64, 64)) && row.form == Form::Chunk;
    let against_batch = |row: &Row| matches!(row.shape, (_, 1, 32, 128, 128)) && row.form == Form::Step;
    let curves = |chosen: &dyn Fn(&Row) -> bool, point: &dyn Fn(&Row) -> (f64, f64)| {
        let mut curves = Vec::new();
        for case in [Case::Native, Case::Plain] {
            for (device, _) in devices() {
                let rows = record.measured.rows.iter().filter(|row| row.device == device && row.case == case);
                let mut points: Vec<_> = rows.filter(|row| chosen(row)).map(point).collect();
                points.sort_by(|a, b| a.0.total_cmp(&b.0));
                if points.len() > 1 {
                    curves.push(Curve { label: format!("{device}, {case:?}").to_lowercase(), points });
                }
            }
        }
        curves
    };
    let tokens = |row: &Row| row.shape.1 as f64;
    let heads = |row: &Row| row.shape.2 as f64;
    let rows = |row: &Row| row.shape.0 as f64;
    let share = |row: &Row| record.share_of_copy(row).unwrap_or(0.0);
    [
        Panel {
            x: "T, at (1, T, 8, 64, 64)",
            y: "ms",
            curves: curves(&against_time, &|row| (tokens(row), row.seconds[0] * 1e3)),
        },
        Panel {
            x: "T, at (1, T, 8, 64, 64)",
            y: "% of the FMA peak",
            curves: curves(&against_time, &|row| (tokens(row), record.share_of_peak(row))),
        },
        Panel {
            x: "H, at (1, 1024, H, 64, 64)",
            y: "GFLOP/s, all threads",
            curves: curves(&against_heads, &|row| (heads(row), gflop(row.shape) / row.seconds[1])),
        },
        Panel {
            x: "B of a step, at (B, 1, 32, 128, 128)",
            y: "% of the speed of a copy",
            curves: curves(&against_batch, &|row| (rows(row), share(row))),
        },
    ]
}
