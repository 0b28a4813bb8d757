//! The operator on the device that `BURN_DEVICE` names: first its results against the definition in f64 on the CPU, then
//! its times, as a table and as CSV. `docs/performance.md` explains the predictions; `fla.py` times FLA at the same
//! shapes.
//!
//! ```sh
//! cargo bench -p burn-kda --bench gpu --features cuda                  # --quick for tiny shapes, --model for no device
//! ```

mod check;
#[path = "../common/mod.rs"]
mod common;
mod model;

use std::fs;
use std::hint::black_box;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, ensure};
use burn::tensor::{Device, Tensor};
use burn_kda::{KdaInput, KdaOptions, KdaOutput, chunk_kda, fla_read_scale, kda_step};
use clap::Parser;

use common::{Shape, input};
use model::Pass;

/// Correctness, then time, of the operator on one device.
#[derive(Parser)]
struct Args {
    /// Tiny shapes, to see that the benchmark works
    #[arg(long)]
    quick: bool,
    /// Print the predictions alone
    #[arg(long)]
    model: bool,
    /// Write the times as CSV
    #[arg(long)]
    csv: Option<PathBuf>,
    /// Passed by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

/// Largest relative RMS error: the bar of the tests.
const BAR: f64 = 1e-6;

fn main() -> Result<()> {
    let args = Args::parse();
    if args.model {
        model::print();
        return Ok(());
    }
    let device = Device::default();
    println!("{device:?}, f32\n\n| (B, T, H, K, V) | tensor | relative RMS error |\n|---|---|---:|");
    for (shape, tensor, error) in check::errors(&device) {
        println!("| {shape:?} | {tensor} | {error:.1e} |");
        ensure!(error < BAR, "{tensor} of {shape:?} is wrong");
    }

    let shapes = match args.quick {
        true => vec![(1, 64, 2, 16, 16), (1, 1, 2, 16, 16)],
        false => model::SHAPES.to_vec(),
    };
    println!("\n| (B, T, H, K, V) | pass | ms, median | at best on an H200 |\n|---|---|---:|---:|");
    let mut csv = String::from("batch,time,heads,key_dim,value_dim,pass,ms\n");
    for shape in shapes {
        let passes: &[Pass] = if shape.1 == 1 { &[Pass::Step] } else { &[Pass::Forward, Pass::ForwardBackward] };
        for &pass in passes {
            let ms = 1e3 * measure(shape, pass, &device, if args.quick { 3 } else { 20 });
            println!("| {shape:?} | {pass} | {ms:.3} | {:.3} |", 1e3 * pass.seconds(shape));
            let (batch, time, heads, key_dim, value_dim) = shape;
            csv += &format!("{batch},{time},{heads},{key_dim},{value_dim},{pass},{ms}\n");
        }
    }
    if let Some(path) = args.csv {
        fs::write(path, csv)?;
    }
    Ok(())
}

/// The median of `runs`, in seconds, after a warm-up.
fn measure(shape: Shape, pass: Pass, device: &Device, runs: usize) -> f64 {
    let sync = || device.sync().expect("the device");
    let run: Box<dyn Fn()> = match pass {
        Pass::Step => {
            let step = decode(shape, device);
            Box::new(move || step())
        }
        Pass::Forward => {
            let input = input(shape, device);
            Box::new(move || drop(black_box(chunk_kda(input.clone(), KdaOptions::default()))))
        }
        Pass::ForwardBackward => {
            let KdaInput { q, k, v, g, beta } = input(shape, &device.clone().autodiff());
            let leaf = |x: Tensor<4>| x.detach().require_grad();
            let input = KdaInput { q: leaf(q), k: leaf(k), v: leaf(v), g: leaf(g), beta: beta.detach().require_grad() };
            Box::new(move || {
                let KdaOutput { o, .. } = chunk_kda(input.clone(), KdaOptions::default());
                black_box(o.sum().backward());
            })
        }
    };
    // One step is shorter than a synchronisation.
    let calls = if pass == Pass::Step { 100 } else { 1 };
    run();
    sync();
    let mut seconds: Vec<_> = (0..runs)
        .map(|_| {
            let start = Instant::now();
            (0..calls).for_each(|_| run());
            sync();
            start.elapsed().as_secs_f64() / f64::from(calls)
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    seconds[runs / 2]
}

/// One token for all rows and heads.
fn decode(shape: Shape, device: &Device) -> impl Fn() + use<> {
    let (batch, _, heads, key_dim, value_dim) = shape;
    let KdaInput { q, k, v, g, beta } = input(shape, device);
    let [q, k, v, g] = [q, k, v, g].map(|x| x.squeeze_dim::<3>(1));
    let beta = beta.squeeze_dim::<2>(1);
    let state = Tensor::<4>::zeros([batch, heads, key_dim, value_dim], device);
    move || {
        let [q, k, v, g] = [&q, &k, &v, &g].map(Tensor::clone);
        black_box(kda_step(state.clone(), q, k, v, g, beta.clone(), fla_read_scale(key_dim)));
    }
}
