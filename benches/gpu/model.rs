//! What the kernels cost at best on an H200: memory traffic, issued instructions and work of the tensor cores, counted
//! from their source.

mod layer;

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

/// bf16 operations per second of the tensor cores.
const TENSOR: f64 = 790e12;

/// Bytes of shared memory per second.
const SHARED: f64 = 132.0 * 128.0 * 1.98e9;

/// From the call to the first instruction, seconds.
const LAUNCH: f64 = 2.5e-6;

/// What the inputs are in.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Precision {
    F32,
    /// On tensor cores.
    Half,
}

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
    /// Products of two tiles of 16 by 16 numbers, each number two bf16: three products for a tensor core, four tiles of
    /// 512 bytes from shared memory.
    products: f64,
}

impl Kernel {
    /// If one of memory, instruction units, tensor cores and shared memory is busy all the time: whichever takes longest.
    fn seconds(&self) -> f64 {
        let tensor = self.products * 3.0 * 2.0 * 16.0_f64.powi(3) / TENSOR;
        let shared = self.products * 4.0 * 512.0 / SHARED;
        LAUNCH + (self.bytes / BANDWIDTH).max(self.instructions / ISSUE).max(tensor).max(shared)
    }
}

impl Pass {
    /// At best.
    pub fn seconds(self, shape: Shape, precision: Precision) -> f64 {
        self.kernels(shape, precision).iter().map(Kernel::seconds).sum()
    }

    fn kernels(self, shape: Shape, precision: Precision) -> Vec<Kernel> {
        match (self, precision) {
            (Self::Step, _) | (Self::Forward, Precision::F32) => vec![recurrent(shape, precision, false)],
            (Self::ForwardBackward, Precision::F32) => {
                let mut kernels = vec![recurrent(shape, precision, true)];
                kernels.extend(backward(shape));
                kernels
            }
            (Self::Forward, Precision::Half) => chunk_forward(shape, false).into(),
            (Self::ForwardBackward, Precision::Half) => {
                let mut kernels = Vec::from(chunk_forward(shape, true));
                kernels.extend(chunk_backward(shape));
                kernels
            }
        }
    }
}

/// Six instructions per element of the state and token, and five loads of what a row shares, for two value channels.
fn recurrent(shape: Shape, precision: Precision, keeps: bool) -> Kernel {
    let (tokens, state) = ((shape.0 * shape.1 * shape.2) as f64, (shape.3 * shape.4) as f64);
    Kernel {
        name: "recurrent",
        bytes: inputs_and_output(shape, precision) + states(shape, keeps),
        instructions: tokens * state * (6.0 + 5.0 / 2.0),
        products: 0.0,
    }
}

/// `g` and `beta` are f32.
fn inputs_and_output((batch, time, heads, key_dim, value_dim): Shape, precision: Precision) -> f64 {
    let width = if precision == Precision::Half { 2 } else { 4 };
    (batch * time * heads * (width * 2 * (key_dim + value_dim) + 4 * (key_dim + 1))) as f64
}

/// The first and the last, and those between segments.
fn states((batch, time, heads, key_dim, value_dim): Shape, keeps: bool) -> f64 {
    let count = 2 + if keeps { time / 128 } else { 0 };
    (4 * count * batch * heads * key_dim * value_dim) as f64
}

/// Chunks of 64 tokens, cubes of 64 value channels. Elementwise work per number, as instructions: decay, product, two
/// roundings and stores of a row of the tree or of a decayed operand 25, of other operands 12.
fn chunk_forward(shape: Shape, keeps: bool) -> [Kernel; 2] {
    let tokens = (shape.0 * shape.1 * shape.2) as f64;
    let (key, value) = (shape.3 as f64, shape.4 as f64);
    let (key_tiles, value_tiles, cubes) = (key / 16.0, value / 16.0, value / 64.0);
    let scores = 4.0 * 2.0 * 64.0;
    [
        Kernel {
            name: "chunk scores",
            bytes: tokens * (8.0 * key + scores),
            // Six levels; the inverse is n^3 / 6 multiply-adds with two loads each, for a chunk.
            instructions: tokens * (6.0 * 25.0 * key + 64.0 * 64.0 / 2.0 + 6.0 * 100.0),
            // 48 tiles: of five levels and the diagonal those on the diagonal, of two levels whole blocks.
            products: tokens / 64.0 * 48.0 * key_tiles,
        },
        Kernel {
            name: "chunk scan",
            bytes: inputs_and_output(shape, Precision::Half) + tokens * cubes * scores + states(shape, keeps),
            instructions: tokens * (cubes * (3.0 * 25.0 * key + 2.0 * 12.0 * 64.0) + 36.0 * value)
                + tokens / 64.0 * 22.0 * key * value,
            products: tokens / 64.0 * value_tiles * (4.0 * 2.0 * key_tiles + 2.0 * 10.0 + 4.0 * key_tiles),
        },
    ]
}

/// Chunks of 32 tokens, cubes of 32 value channels; as [`chunk_forward`].
fn chunk_backward(shape: Shape) -> [Kernel; 3] {
    let tokens = (shape.0 * shape.1 * shape.2) as f64;
    let (key, value) = (shape.3 as f64, shape.4 as f64);
    let (key_tiles, value_tiles, cubes) = (key / 16.0, value / 16.0, value / 32.0);
    let scores = 4.0 * 3.0 * 32.0;
    let sums = 4.0 * cubes * (3.0 * key + key / 32.0 + 65.0);
    [
        Kernel {
            name: "chunk scores",
            bytes: tokens * (8.0 * key + scores),
            instructions: tokens * (5.0 * 25.0 * key + 32.0 * 32.0 / 2.0 + 5.0 * 100.0),
            products: tokens / 32.0 * 20.0 * key_tiles,
        },
        Kernel {
            name: "chunk back",
            // The state before each chunk goes to scratch memory and comes back twice.
            bytes: 2.0 * inputs_and_output(shape, Precision::Half)
                + tokens * (2.0 * cubes * scores + sums + 3.0 * 4.0 * key * value / 32.0),
            instructions: tokens * (cubes * (5.0 * 25.0 * key + 4.0 * 12.0 * 32.0) + 130.0 * value)
                + tokens / 32.0 * 58.0 * key * value,
            products: tokens / 32.0 * (value_tiles * (2.0 * key_tiles * 8.0 + 4.0 * 3.0) + 2.0 * 4.0 * value_tiles),
        },
        Kernel {
            name: "chunk inputs",
            bytes: tokens * (14.0 * key + sums),
            instructions: tokens * (5.0 * 55.0 * key + 5.0 * 28.0 * 32.0 + 60.0 * key),
            products: tokens / 32.0 * 5.0 * 4.0 * 3.0 * key_tiles,
        },
    ]
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
            products: 0.0,
        },
        Kernel {
            name: "scan",
            // The state before each chunk goes to scratch memory and back.
            bytes: 4.0 * tokens * (2.0 * (tiles * 3.0 * key + value) + 2.0 * value + sums + 2.0 * state / 8.0),
            // Per element: two products with three instructions each, and 1 + 5 multiply-adds with 1 + 3 loads.
            instructions: tokens * state * (2.0 * 3.0 + 6.0 + 4.0),
            products: 0.0,
        },
        Kernel {
            name: "inputs",
            bytes: 4.0 * tokens * (6.0 * key + sums),
            instructions: tokens * key * (3.5 * 30.0 + 2.0 * 20.0),
            products: 0.0,
        },
    ]
}

/// What every kernel costs per token and head, and the time at best.
pub fn print() {
    println!("| (B, T, H, K, V) | inputs | kernel | KiB | k instructions | tile products | ms at best |");
    println!("|---|---|---|---:|---:|---:|---:|");
    for shape in SHAPES {
        let pass = if shape.1 == 1 { Pass::Step } else { Pass::ForwardBackward };
        let tokens = (shape.0 * shape.1 * shape.2) as f64;
        for (precision, inputs) in [(Precision::F32, "f32"), (Precision::Half, "bf16")] {
            for kernel in pass.kernels(shape, precision) {
                let [bytes, instructions, products] =
                    [kernel.bytes / 1024.0, kernel.instructions / 1e3, kernel.products].map(|count| count / tokens);
                let (name, ms) = (kernel.name, 1e3 * kernel.seconds());
                println!(
                    "| {shape:?} | {inputs} | {name} | {bytes:.1} | {instructions:.0} | {products:.0} | {ms:.3} |"
                );
            }
            let ms = 1e3 * pass.seconds(shape, precision);
            println!("| {shape:?} | {inputs} | {pass} | | | | {ms:.3} |");
        }
    }
    layer::print();
}
