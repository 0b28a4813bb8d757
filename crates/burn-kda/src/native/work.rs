//! Work cut into tasks, and run on the vectors and threads that the machine has.

use std::sync::Mutex;

use ndarray::{ArrayViewMut, Axis, Dimension};
use pulp::{Arch, Simd, WithSimd};

/// Multiply-adds below which threads cost more than they bring.
pub(super) const SMALL: usize = 1 << 17;

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
        if S::IS_SCALAR { self.0.run::<S, false>(simd) } else { self.0.run::<S, true>(simd) }
    }
}

/// Runs tasks of so many multiply-adds together.
pub(super) fn run_all(tasks: Vec<impl Work>, multiply_adds: usize) {
    // Each thread has to be woken.
    let worth = if multiply_adds < SMALL { 1 } else { multiply_adds / SMALL + 1 };
    let threads = rayon::current_num_threads().min(tasks.len()).min(worth);
    let tasks = Mutex::new(tasks.into_iter());
    let next = || tasks.lock().expect("no panic while a task is taken").next();
    let run = || std::iter::from_fn(next).for_each(|task| Arch::new().dispatch(Dispatched(task)));
    if threads <= 1 {
        return run();
    }
    // The calling thread takes part: handing all over to the pool would cost more than one token does.
    rayon::in_place_scope(|scope| {
        (1..threads).for_each(|_| scope.spawn(|_| run()));
        run();
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
