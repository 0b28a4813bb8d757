//! Work cut into tasks, and run on the vectors and threads that the machine has.

use std::sync::{LazyLock, Mutex};

use ndarray::{ArrayViewMut, Axis, Dimension};
use pulp::{Arch, Scalar256b, Simd, WithSimd};
use rayon::prelude::*;

/// Multiply-adds below which threads cost more than they bring.
pub(super) const SMALL: usize = 1 << 17;

/// Multiply-adds from which on the calling thread hands all over to the pool and waits, about a millisecond. Below, as for
/// one token, that would cost too much, and the caller takes part; but a thread that it wakes may get its core, and has to
/// wait for it.
const LARGE: usize = 1 << 23;

/// What one thread does.
pub(super) trait Work: Send {
    /// With fused multiply-adds if the vectors have them.
    fn run<S: Simd, const FMA: bool>(self, simd: S);
}

struct Dispatched<W>(W);

impl<W: Work> WithSimd for Dispatched<W> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // Where pulp knows no vectors, or none with fused multiply-adds, arrays, which the compiler takes apart: sums have as
        // many parts as elsewhere.
        if S::IS_SCALAR || cfg!(target_family = "wasm") {
            self.0.run::<Scalar256b, false>(Scalar256b)
        } else {
            self.0.run::<S, true>(simd)
        }
    }
}

/// The best vectors of this machine; by the environment variable `BURN_KDA_SIMD`, read once, those of older ones, for tests:
/// `avx2` on x86-64, and `none`.
fn arch() -> Arch {
    static ARCH: LazyLock<Arch> = LazyLock::new(|| match std::env::var("BURN_KDA_SIMD").as_deref() {
        Err(_) => Arch::new(),
        Ok("none") => Arch::Scalar,
        #[cfg(target_arch = "x86_64")]
        Ok("avx2") => pulp::x86::V3::try_new().map_or(Arch::Scalar, Arch::V3),
        Ok(other) => panic!("`BURN_KDA_SIMD` is `{other}`, which is not known on this machine"),
    });
    *ARCH
}

/// Runs tasks of so many multiply-adds together.
pub(super) fn run_all(tasks: Vec<impl Work>, multiply_adds: usize) {
    let arch = arch();
    let run = |task| arch.dispatch(Dispatched(task));
    let threads = rayon::current_num_threads().min(tasks.len());
    if multiply_adds < SMALL || threads <= 1 {
        return tasks.into_iter().for_each(run);
    }
    if multiply_adds >= LARGE {
        return tasks.into_par_iter().for_each(run);
    }
    let tasks = Mutex::new(tasks.into_iter());
    let next = || tasks.lock().expect("no panic while a task is taken").next();
    rayon::in_place_scope(|scope| {
        // Each has to be woken.
        let woken = (multiply_adds / SMALL).min(threads - 1);
        (0..woken).for_each(|_| scope.spawn(|_| std::iter::from_fn(next).for_each(run)));
        std::iter::from_fn(next).for_each(run);
    });
}

/// Disjoint parts of `size` along `axis`.
pub(super) fn cut<'a, T, D: Dimension>(
    view: ArrayViewMut<'a, T, D>,
    axis: Axis,
    size: usize,
) -> impl Iterator<Item = ArrayViewMut<'a, T, D>> {
    let mut rest = Some(view);
    std::iter::from_fn(move || {
        let view = rest.take()?;
        if view.len_of(axis) <= size {
            return Some(view);
        }
        let (part, others) = view.split_at(axis, size);
        rest = Some(others);
        Some(part)
    })
}
