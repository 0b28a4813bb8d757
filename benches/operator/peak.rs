//! What no form can exceed: the FMA peak of one core, and the speed of a copy.

use std::hint::black_box;
use std::time::Instant;

/// Independent accumulators: enough to hide the latency of a fused multiply-add.
const CHAINS: usize = 12;
const ROUNDS: usize = 2_000_000;

/// GFLOP/s of fused multiply-adds in f32, two flops each, with the widest vectors the machine has.
pub fn fma_gflops() -> f64 {
    (0..3).map(|_| measure()).fold(0.0, f64::max)
}

/// Seconds to read `numbers` of f32 and to write as many elsewhere, on one core.
pub fn copy_seconds(numbers: usize) -> f64 {
    let from = vec![1.0_f32; numbers];
    let mut to = vec![0.0_f32; numbers];
    let runs = (1 << 26) / numbers + 10;
    let once = || {
        let start = Instant::now();
        black_box(&mut to[..]).copy_from_slice(black_box(&from));
        start.elapsed().as_secs_f64()
    };
    std::iter::repeat_with(once).take(runs).fold(f64::INFINITY, f64::min)
}

fn measure() -> f64 {
    #[cfg(target_arch = "x86_64")]
    {
        if std::arch::is_x86_feature_detected!("avx512f") {
            // SAFETY: the feature was just detected.
            return rate::<16>(|x| unsafe { chains_avx512(x) });
        }
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
            // SAFETY: both features were just detected.
            return rate::<8>(|x| unsafe { chains_avx2(x) });
        }
    }
    rate::<4>(chains)
}

fn rate<const LANES: usize>(run: impl Fn(f32) -> f32) -> f64 {
    let start = Instant::now();
    black_box(run(black_box(0.999)));
    (2 * LANES * CHAINS * ROUNDS) as f64 / start.elapsed().as_secs_f64() / 1e9
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn chains_avx512(x: f32) -> f32 {
    accumulate::<16>(x)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn chains_avx2(x: f32) -> f32 {
    accumulate::<8>(x)
}

fn chains(x: f32) -> f32 {
    accumulate::<4>(x)
}

#[inline(always)]
fn accumulate<const LANES: usize>(x: f32) -> f32 {
    let mut sums = [[0.0_f32; LANES]; CHAINS];
    for _ in 0..ROUNDS {
        for sum in &mut sums {
            for lane in sum {
                *lane = lane.mul_add(x, 1.0);
            }
        }
    }
    sums.iter().flatten().sum()
}
