//! What no form can exceed: the FMA peak of one core, and the speed of a copy.

use std::hint::black_box;
use std::time::Instant;

use pulp::{Arch, Simd, WithSimd};

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
    let start = Instant::now();
    let flops = Arch::new().dispatch(Chains);
    flops as f64 / start.elapsed().as_secs_f64() / 1e9
}

struct Chains;

impl WithSimd for Chains {
    /// Flops.
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> usize {
        let (x, one) = (simd.splat_f32s(black_box(0.999)), simd.splat_f32s(1.0));
        let mut sums = [one; CHAINS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = simd.mul_add_e_f32s(*sum, x, one);
            }
        }
        for sum in sums {
            black_box(simd.reduce_sum_f32s(sum));
        }
        2 * S::F32_LANES * CHAINS * ROUNDS
    }
}
