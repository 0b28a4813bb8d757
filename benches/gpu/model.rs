//! What the kernels cost at best on an H200: memory traffic and issued instructions, counted from their source.

use std::fmt;

use super::common::Shape;

/// Those that published times are known for.
pub const SHAPES: [Shape; 5] = [
    (1, 8192, 64, 128, 128),
    (1, 8192, 16, 128, 128),
    (1, 1024, 64, 128, 128),
    (1, 1, 64, 128, 128),
    (64, 1, 64, 128, 128),
];

/// Bytes per second, measured as a copy.
const BANDWIDTH: f64 = 4.3e12;

/// f32 instructions per second and lane of a vector: 132 multiprocessors of 128 lanes at 1.98 GHz.
const ISSUE: f64 = 132.0 * 128.0 * 1.98e9;

/// From the call to the first instruction, seconds.
const LAUNCH: f64 = 2.5e-6;

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pass {
    Step,
    Forward,
    ForwardBackward,
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Step => "step",
            Self::Forward => "forward",
            Self::ForwardBackward => "forward and backward",
        })
    }
}

/// One launch.
struct Kernel {
    name: &'static str,
    bytes: f64,
    /// f32 and shared-memory instructions, counted per lane.
    instructions: f64,
}

impl Kernel {
    /// If memory or the instruction units are busy all the time, whichever takes longer.
    fn seconds(&self) -> f64 {
        LAUNCH + (self.bytes / BANDWIDTH).max(self.instructions / ISSUE)
    }
}

impl Pass {
    /// At best.
    pub fn seconds(self, shape: Shape) -> f64 {
        self.kernels(shape).iter().map(Kernel::seconds).sum()
    }

    fn kernels(self, shape: Shape) -> Vec<Kernel> {
        match self {
            Self::Step | Self::Forward => vec![recurrent(shape, false)],
            Self::ForwardBackward => {
                let mut kernels = vec![recurrent(shape, true)];
                kernels.extend(backward(shape));
                kernels
            }
        }
    }
}

/// Six instructions per element of the state and token, and five loads of what a row shares, for two value channels.
fn recurrent((batch, time, heads, key_dim, value_dim): Shape, keeps: bool) -> Kernel {
    let (tokens, state) = ((batch * time * heads) as f64, (key_dim * value_dim) as f64);
    let states = 2.0 + if keeps { (time / 128) as f64 } else { 0.0 };
    let elements = (3 * key_dim + 2 * value_dim + 1) as f64 * tokens + states * (batch * heads) as f64 * state;
    Kernel { name: "recurrent", bytes: 4.0 * elements, instructions: tokens * state * (6.0 + 5.0 / 2.0) }
}

/// Chunks of 8 tokens; two tiles of 64 value channels at V = 128.
fn backward((batch, time, heads, key_dim, value_dim): Shape) -> [Kernel; 3] {
    let tokens = (batch * time * heads) as f64;
    let (key, value) = (key_dim as f64, value_dim as f64);
    let state = key * value;
    let tiles = (value / 64.0).ceil();
    // Per token what a chunk has 192 (scores) or 136 + K (sums) of.
    let (scores, sums) = (24.0, tiles * (3.0 * key + (key + 136.0) / 8.0));
    [
        Kernel {
            name: "scores",
            bytes: 4.0 * tokens * (3.0 * key + scores),
            // Four and a half pairs per token: decay, two products and their loads.
            instructions: tokens * key * 4.5 * 28.0,
        },
        Kernel {
            name: "scan",
            // The state before each chunk goes to scratch memory and back.
            bytes: 4.0 * tokens * (2.0 * (tiles * 3.0 * key + value) + 2.0 * value + sums + 2.0 * state / 8.0),
            // Per element: two products with three instructions each, and 1 + 5 multiply-adds with 1 + 3 loads.
            instructions: tokens * state * (2.0 * 3.0 + 6.0 + 4.0),
        },
        Kernel {
            name: "inputs",
            bytes: 4.0 * tokens * (6.0 * key + sums),
            instructions: tokens * key * (3.5 * 30.0 + 2.0 * 20.0),
        },
    ]
}

/// Bytes and instructions per token and head, and the time at best, of every kernel.
pub fn print() {
    println!(
        "| (B, T, H, K, V) | kernel | KiB per token | k instructions per token | ms at best |\n|---|---|---:|---:|---:|"
    );
    for shape in SHAPES {
        let pass = if shape.1 == 1 { Pass::Step } else { Pass::ForwardBackward };
        let tokens = (shape.0 * shape.1 * shape.2) as f64;
        for kernel in pass.kernels(shape) {
            let (bytes, instructions) = (kernel.bytes / tokens / 1024.0, kernel.instructions / tokens / 1e3);
            let ms = 1e3 * kernel.seconds();
            println!("| {shape:?} | {} | {bytes:.1} | {instructions:.0} | {ms:.3} |", kernel.name);
        }
    }
}
