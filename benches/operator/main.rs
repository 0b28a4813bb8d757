//! Times the operator on the CPU backends and prints Markdown tables; `docs/performance.md` quotes them.
//!
//! ```sh
//! RAYON_NUM_THREADS=1 cargo bench -p burn-kda --bench operator
//! ```
//!
//! Speed is given by the 7KV count: 7 K V flops per token and value head, what the recurrence costs, whatever the form
//! spends. The share is of the FMA peak of one core, measured in the same run.

#[path = "../common/mod.rs"]
mod common;
#[allow(unsafe_code)]
mod peak;

use std::hint::black_box;
use std::time::Instant;

use burn::tensor::{Device, Tensor};
use burn_kda::{KdaInput, KdaOptions, KdaOutput, chunk_kda, fla_read_scale, kda_step, recurrent_kda};

use common::{Shape, input};

const SMALL: Shape = (1, 1024, 8, 64, 64);
const LARGE: Shape = (1, 4096, 16, 128, 128);

#[allow(deprecated)]
fn devices() -> [(&'static str, Device); 2] {
    [("NdArray", Device::ndarray()), ("Flex", Device::flex())]
}

fn main() {
    let threads = std::env::var("RAYON_NUM_THREADS").unwrap_or_else(|_| "all".into());
    let peak = peak::fma_gflops();
    println!("threads: {threads}; FMA peak of one core: {peak:.0} GFLOP/s (f32)\n");

    println!("| device | form | (B, T, H, K, V) | ms | GFLOP/s (7KV) | share of the peak |");
    println!("|---|---|---|---:|---:|---:|");
    let row = |name, form, shape, seconds| {
        let speed = gflop(shape) / seconds;
        let (ms, share) = (seconds * 1e3, 100.0 * speed / peak);
        println!("| {name} | {form} | {shape:?} | {ms:.1} | {speed:.2} | {share:.1} % |");
    };
    for (name, device) in devices() {
        for shape in [SMALL, LARGE] {
            let chunk = best(5, || run(chunk_kda, shape, &device));
            row(name, "chunk".to_string(), shape, chunk);
            let recurrent = best(1, || run(recurrent_kda, shape, &device));
            row(name, format!("recurrent, {:.1}x the chunk form's time", recurrent / chunk), shape, recurrent);
        }
        for batch in [1, 8] {
            let shape = (batch, 1, 32, 128, 128);
            row(name, "step".to_string(), shape, decode(shape, &device));
        }
    }

    println!("\nTime against T at (1, T, 8, 64, 64), microseconds per token:\n");
    println!("| device | 1k | 2k | 4k | 8k | 16k |\n|---|---:|---:|---:|---:|---:|");
    for (name, device) in devices() {
        let per_token = [1, 2, 4, 8, 16].map(|k| {
            let time = k * 1024;
            let seconds = best(3, || run(chunk_kda, (1, time, 8, 64, 64), &device));
            format!("{:.2}", seconds * 1e6 / time as f64)
        });
        println!("| {name} | {} |", per_token.join(" | "));
    }
}

fn gflop((batch, time, heads, key_dim, value_dim): Shape) -> f64 {
    7.0 * (batch * time * heads * key_dim * value_dim) as f64 / 1e9
}

/// The fastest of `runs` calls after a warm-up, in seconds: `f` returns the time of its own timed part.
fn best(runs: usize, f: impl Fn() -> f64) -> f64 {
    f();
    (0..runs).map(|_| f()).fold(f64::INFINITY, f64::min)
}

fn run(form: fn(KdaInput, KdaOptions) -> KdaOutput, shape: Shape, device: &Device) -> f64 {
    let input = input(shape, device);
    let start = Instant::now();
    black_box(form(input, KdaOptions::default()));
    start.elapsed().as_secs_f64()
}

/// Seconds of one decoding step, over a run of steps that carry their state.
fn decode(shape: Shape, device: &Device) -> f64 {
    const STEPS: u32 = 30;
    let (batch, _, heads, key_dim, value_dim) = shape;
    let KdaInput { q, k, v, g, beta } = input(shape, device);
    let [q, k, v, g] = [q, k, v, g].map(|x| x.squeeze_dim::<3>(1));
    let beta = beta.squeeze_dim::<2>(1);
    let step = |state| {
        let [q, k, v, g] = [&q, &k, &v, &g].map(Tensor::clone);
        kda_step(state, q, k, v, g, beta.clone(), fla_read_scale(key_dim)).1
    };
    let mut state = step(Tensor::zeros([batch, heads, key_dim, value_dim], device));
    let start = Instant::now();
    for _ in 0..STEPS {
        state = step(state);
    }
    black_box(state);
    start.elapsed().as_secs_f64() / f64::from(STEPS)
}
