//! The kernels around the operator in a layer.

use super::{Kernel, Precision, SHAPES, Shape};

/// Instructions of an exponential, of a division or a root, of both in a sigmoid, and of a quotient and a remainder of
/// indices.
const EXP: f64 = 18.0;
const DIVISION: f64 = 8.0;
const SIGMOID: f64 = EXP + DIVISION + 4.0;
const INDEX: f64 = 20.0;

/// Of one number from memory or to it, with its address and bounds.
const ACCESS: f64 = 6.0;

/// Taps of a convolution.
const TAPS: f64 = 4.0;

/// Tokens at a time.
const TOKENS: f64 = 4.0;

/// Of `numbers` numbers, each with its bytes and instructions.
fn kernel(name: &'static str, numbers: usize, bytes: f64, instructions: f64) -> Kernel {
    let numbers = numbers as f64;
    Kernel { name, bytes: numbers * bytes, instructions: numbers * instructions, products: 0.0 }
}

/// `width` bytes outside of the operator, which has f32 here: the layer's own precision.
fn forward((batch, time, heads, key_dim, value_dim): Shape, width: f64) -> [Kernel; 6] {
    let tokens = batch * time * heads;
    let (keys, values) = (tokens * key_dim, tokens * value_dim);
    // Some inputs are read again by the tokens after them, from cache.
    let reads = (TOKENS + TAPS - 1.0) / TOKENS;
    let silu = (reads + 1.0) * ACCESS + TAPS + SIGMOID;
    let convolution = |name, numbers, norm| kernel(name, numbers, width + 4.0, silu + norm);
    [
        convolution("convolution of q", keys, 12.0 + DIVISION),
        convolution("convolution of k", keys, 12.0 + DIVISION),
        convolution("convolution of v", values, 0.0),
        kernel("decay gate", keys, width + 4.0, 3.0 * INDEX + 2.0 * ACCESS + EXP + DIVISION + 12.0),
        kernel("write strength", tokens, width + 4.0, 3.0 * INDEX + 2.0 * ACCESS + SIGMOID),
        kernel("output norm", values, 4.0 + 2.0 * width, 4.0 * ACCESS + 12.0 + SIGMOID + 2.0 * DIVISION),
    ]
}

/// As [`forward`].
fn backward((batch, time, heads, key_dim, value_dim): Shape, width: f64) -> [Kernel; 6] {
    let tokens = batch * time * heads;
    let (keys, values) = (tokens * key_dim, tokens * value_dim);
    // What silu is taken of, its slope and the norm, again for the tokens after those at a time.
    let rows = (TOKENS + TAPS - 1.0) / TOKENS;
    let row = 2.0 * ACCESS + TAPS + 3.0 * SIGMOID + 10.0;
    let convolution =
        |name, numbers, norm| kernel(name, numbers, 2.0 * width + 4.0, rows * (row + norm) + ACCESS + 2.0 * TAPS);
    [
        convolution("convolution of q, backward", keys, 20.0 + 2.0 * DIVISION),
        convolution("convolution of k, backward", keys, 20.0 + 2.0 * DIVISION),
        convolution("convolution of v, backward", values, 0.0),
        kernel("decay gate, backward", keys, 2.0 * width + 4.0, 3.0 * ACCESS + EXP + DIVISION + SIGMOID + 20.0),
        kernel("write strength, backward", tokens, 2.0 * width + 4.0, 3.0 * INDEX + 3.0 * ACCESS + SIGMOID),
        kernel(
            "output norm, backward",
            values,
            8.0 + 3.0 * width,
            7.0 * ACCESS + 2.0 * SIGMOID + 4.0 * DIVISION + 24.0,
        ),
    ]
}

/// What each costs per token and head, and its milliseconds at best for every shape.
pub fn print() {
    let shapes = SHAPES.map(|shape| format!("{shape:?}")).join(" | ");
    println!("\n| around the operator | layer | KiB | k instructions | {shapes} |");
    println!("|---|---|---:|---:|{}", "---:|".repeat(SHAPES.len()));
    for (precision, name) in [(Precision::F32, "f32"), (Precision::Half, "bf16")] {
        let width = if precision == Precision::Half { 2.0 } else { 4.0 };
        let all = SHAPES.map(|shape| [forward(shape, width), backward(shape, width)]);
        let [shape, ..] = SHAPES;
        let tokens = (shape.0 * shape.1 * shape.2) as f64;
        let row = |label: &str, costs: [f64; 2], ms: [f64; SHAPES.len()]| {
            let [kib, instructions] = costs.map(|cost| if cost > 0.0 { format!("{cost:.2}") } else { String::new() });
            let ms = ms.map(|ms| format!("{ms:.3}")).join(" | ");
            println!("| {label} | {name} | {kib} | {instructions} | {ms} |");
        };
        for (pass, label) in ["forward", "backward"].into_iter().enumerate() {
            for (n, kernel) in all[0][pass].iter().enumerate() {
                let costs = [kernel.bytes / 1024.0, kernel.instructions / 1e3].map(|cost| cost / tokens);
                row(kernel.name, costs, all.each_ref().map(|passes| 1e3 * passes[pass][n].seconds()));
            }
            let total = |passes: &[[Kernel; 6]; 2]| passes[pass].iter().map(|kernel| 1e3 * kernel.seconds()).sum();
            row(label, [0.0; 2], all.each_ref().map(total));
        }
    }
}
