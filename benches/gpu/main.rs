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
use burn::tensor::{DType, Device, Tensor};
use burn_kda::{KdaInput, KdaOptions, KdaOutput, chunk_kda, fla_read_scale, kda_step};
use clap::Parser;

use common::{Shape, input};
use model::{Pass, Precision};

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

/// Dtypes of `q`, `k` and `v`, with the largest relative RMS error: the bars of the tests.
const DTYPES: [(DType, f64, Precision); 3] =
    [(DType::F32, 1e-6, Precision::F32), (DType::BF16, 5e-3, Precision::Half), (DType::F16, 5e-3, Precision::Half)];

fn main() -> Result<()> {
    let args = Args::parse();
    if args.model {
        model::print();
        return Ok(());
    }
    let device = Device::default();
    let dtypes: Vec<_> = DTYPES.into_iter().filter(|(dtype, ..)| device.supports_dtype(*dtype)).collect();
    println!("{device:?}\n\n| (B, T, H, K, V) | inputs | tensor | relative RMS error |\n|---|---|---|---:|");
    for &(dtype, bar, _) in &dtypes {
        for (shape, tensor, error) in check::errors(&device, dtype) {
            println!("| {shape:?} | {dtype:?} | {tensor} | {error:.1e} |");
            ensure!(error < bar, "{tensor} of {shape:?} in {dtype:?} is wrong");
        }
    }

    let shapes = match args.quick {
        true => vec![(1, 64, 2, 16, 16), (1, 1, 2, 16, 16)],
        false => model::SHAPES.to_vec(),
    };
    println!("\n| (B, T, H, K, V) | inputs | pass | ms, median | at best on an H200 |\n|---|---|---|---:|---:|");
    let mut csv = String::from("batch,time,heads,key_dim,value_dim,dtype,pass,ms\n");
    for shape in shapes {
        let passes: &[Pass] = if shape.1 == 1 { &[Pass::Step] } else { &[Pass::Forward, Pass::ForwardBackward] };
        for (&pass, &(dtype, _, precision)) in passes.iter().flat_map(|pass| dtypes.iter().map(move |x| (pass, x))) {
            let ms = 1e3 * measure(shape, dtype, pass, &device, if args.quick { 3 } else { 20 });
            println!("| {shape:?} | {dtype:?} | {pass} | {ms:.3} | {:.3} |", 1e3 * pass.seconds(shape, precision));
            let (batch, time, heads, key_dim, value_dim) = shape;
            csv += &format!("{batch},{time},{heads},{key_dim},{value_dim},{dtype:?},{pass},{ms}\n");
        }
    }
    if let Some(path) = args.csv {
        fs::write(path, csv)?;
    }
    Ok(())
}

/// The median of `runs`, in seconds, after a warm-up.
fn measure(shape: Shape, dtype: DType, pass: Pass, device: &Device, runs: usize) -> f64 {
    let sync = || device.sync().expect("the device");
    let run: Box<dyn Fn()> = match pass {
        Pass::Step => {
            let step = decode(shape, dtype, device);
            Box::new(move || step())
        }
        Pass::Forward => {
            let input = in_dtype(input(shape, device), dtype);
            Box::new(move || drop(black_box(chunk_kda(input.clone(), KdaOptions::default()))))
        }
        Pass::ForwardBackward => {
            let KdaInput { q, k, v, g, beta } = in_dtype(input(shape, &device.clone().autodiff()), dtype);
            let leaf = |x: Tensor<4>| x.detach().require_grad();
            let input = KdaInput { q: leaf(q), k: leaf(k), v: leaf(v), g: leaf(g), beta: beta.detach().require_grad() };
            Box::new(move || {
                let KdaOutput { o, .. } = chunk_kda(input.clone(), KdaOptions::default());
                black_box(o.cast(DType::F32).sum().backward());
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

/// `q`, `k` and `v` in `dtype`.
fn in_dtype(input: KdaInput, dtype: DType) -> KdaInput {
    let KdaInput { q, k, v, g, beta } = input;
    let [q, k, v] = [q, k, v].map(|x| x.cast(dtype));
    KdaInput { q, k, v, g, beta }
}

/// One token for all rows and heads.
fn decode(shape: Shape, dtype: DType, device: &Device) -> impl Fn() + use<> {
    let (batch, _, heads, key_dim, value_dim) = shape;
    let KdaInput { q, k, v, g, beta } = in_dtype(input(shape, device), dtype);
    let [q, k, v, g] = [q, k, v, g].map(|x| x.squeeze_dim::<3>(1));
    let beta = beta.squeeze_dim::<2>(1);
    let state = Tensor::<4>::zeros([batch, heads, key_dim, value_dim], device);
    move || {
        let [q, k, v, g] = [&q, &k, &v, &g].map(Tensor::clone);
        black_box(kda_step(state.clone(), q, k, v, g, beta.clone(), fla_read_scale(key_dim)));
    }
}
