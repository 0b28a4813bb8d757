//! One measurement, in a process of its own: the peak memory of a process never falls.

#![allow(deprecated)] // Burn's NdArray, in favour of Flex; this crate supports both.

use std::hint::black_box;
use std::process::Command;
use std::time::Instant;
use std::{env, fs};

use anyhow::Result;
use burn::tensor::{Device, Distribution, Tensor};
use burn_kda::{KdaInput, KdaOptions, chunk_kda};
use serde::{Deserialize, Serialize};

use super::common::{Shape, input};

/// Address space of a measuring process on Linux: an allocation that fails is better than a machine that swaps.
pub const LIMIT_GIB: usize = 20;

/// Has the operator run as composed tensor operations.
const PLAIN: &str = "BURN_KDA_PLAIN";

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub enum Backend {
    NdArray,
    Flex,
}

impl Backend {
    pub const ALL: [Self; 2] = [Self::NdArray, Self::Flex];

    fn device(self) -> Device {
        match self {
            Self::NdArray => Device::ndarray(),
            Self::Flex => Device::flex(),
        }
    }
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum Pass {
    /// The node's forward pass alone, without autodiff.
    Forward,
    /// Forward and backward, with the hand-written backward pass.
    Node,
    /// Forward and backward, differentiated operation by operation.
    Composition,
    /// The loss that the passes backward start from, and its gradient, without the operator.
    Loss,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Case {
    pub backend: Backend,
    pub pass: Pass,
    pub shape: Shape,
    /// Timed runs, after one that is not.
    pub runs: usize,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Measurement {
    /// The fastest run, and the peak of all where the system tells.
    Done { seconds: f64, mib: Option<f64> },
    /// Why the process ended before.
    Died(String),
}

impl Measurement {
    pub fn seconds(&self) -> Option<f64> {
        match self {
            Self::Done { seconds, .. } => Some(*seconds),
            Self::Died(_) => None,
        }
    }

    pub fn mib(&self) -> Option<f64> {
        match self {
            Self::Done { mib, .. } => *mib,
            Self::Died(_) => None,
        }
    }
}

impl Case {
    /// Measures in a new process.
    pub fn spawn(&self) -> Result<Measurement> {
        let bench = env::current_exe()?;
        let mut command = if cfg!(target_os = "linux") {
            let mut shell = Command::new("sh");
            shell.arg("-c").arg(format!("ulimit -v {} 2>/dev/null; exec \"$0\" \"$@\"", LIMIT_GIB << 20)).arg(bench);
            shell
        } else {
            Command::new(bench)
        };
        // A backtrace takes memory, which may be what there is no more of.
        command.env_remove(PLAIN).env("RUST_BACKTRACE", "0").arg("--case").arg(serde_json::to_string(self)?);
        if self.pass == Pass::Composition {
            command.env(PLAIN, "composed");
        }
        let output = command.output()?;
        if output.status.success() {
            return Ok(serde_json::from_slice(&output.stdout)?);
        }
        let stderr = String::from_utf8_lossy(&output.stderr);
        eprint!("{stderr}");
        let out_of_memory = stderr.contains("memory allocation of");
        Ok(Measurement::Died(if out_of_memory { "out of memory".into() } else { output.status.to_string() }))
    }

    /// Measures in this process, which must have done nothing before.
    pub fn measure(&self) -> Measurement {
        let device = match self.pass {
            Pass::Forward => self.backend.device(),
            Pass::Node | Pass::Composition | Pass::Loss => self.backend.device().autodiff(),
        };
        let input = input(self.shape, &device);
        let cotangent = normal(input.v.dims(), &device);
        // Making the inputs had a peak of its own. If it cannot be reset, it counts.
        let _ = fs::write("/proc/self/clear_refs", "5");
        let before = status_mib("VmRSS:");
        let run = || {
            let backward = |o: Tensor<4>| black_box((o * cotangent.clone()).sum().backward());
            let start = Instant::now();
            match self.pass {
                Pass::Forward => drop(black_box(chunk_kda(input.clone(), KdaOptions::default()))),
                Pass::Loss => drop(backward(input.v.clone().require_grad())),
                Pass::Node | Pass::Composition => {
                    drop(backward(chunk_kda(tracked(input.clone()), KdaOptions::default()).o));
                }
            }
            start.elapsed().as_secs_f64()
        };
        run();
        let seconds = (0..self.runs).map(|_| run()).fold(f64::INFINITY, f64::min);
        let mib = status_mib("VmHWM:").zip(before).map(|(peak, before)| peak - before);
        Measurement::Done { seconds, mib }
    }
}

fn normal(dims: [usize; 4], device: &Device) -> Tensor<4> {
    Tensor::random(dims, Distribution::Normal(0.0, 1.0), device)
}

fn tracked(KdaInput { q, k, v, g, beta }: KdaInput) -> KdaInput {
    let [q, k, v, g] = [q, k, v, g].map(Tensor::require_grad);
    KdaInput { q, k, v, g, beta: beta.require_grad() }
}

/// A size of this process; none where there is no such file.
fn status_mib(field: &str) -> Option<f64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let size = status.lines().find_map(|line| line.strip_prefix(field))?;
    let kib: f64 = size.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib / 1024.0)
}
