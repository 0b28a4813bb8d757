//! Memory for results.

use std::mem::MaybeUninit;

use ndarray::{Array, Dimension, ShapeBuilder};

use super::Real;

/// Zeros, in large pages if there are enough of them: a small one costs about as much as what is computed to fill it.
pub(super) fn zeros<T: Real, Sh: ShapeBuilder>(shape: Sh) -> Array<T, Sh::Dim> {
    in_large_pages(Array::zeros(shape))
}

/// Memory as it is found, likewise, for tasks that write to all of it: zeros would be written first wherever the pages have
/// been used before.
pub(super) fn unwritten<T: Real, Sh: ShapeBuilder>(shape: Sh) -> Array<MaybeUninit<T>, Sh::Dim> {
    let mut memory = in_large_pages(Array::uninit(shape));
    if cfg!(debug_assertions) {
        // So that tests see what was left out.
        memory.fill(MaybeUninit::new(T::nan()));
    }
    memory
}

fn in_large_pages<T, D: Dimension>(array: Array<T, D>) -> Array<T, D> {
    if let Some(memory) = array.as_slice_memory_order() {
        ask_for_large_pages(memory);
    }
    array
}

/// Before the memory is first written to.
#[allow(unsafe_code)]
#[cfg_attr(not(target_os = "linux"), allow(unused_variables))]
fn ask_for_large_pages<T>(memory: &[T]) {
    #[cfg(target_os = "linux")]
    {
        const LARGE: usize = 2 << 20;
        let start = memory.as_ptr().addr();
        let (first, end) = (start.next_multiple_of(LARGE), (start + size_of_val(memory)) / LARGE * LARGE);
        if first < end {
            // SAFETY: the pages lie within borrowed memory, and the advice changes no value; if it is refused, nothing
            // happens.
            unsafe {
                libc::madvise(
                    memory.as_ptr().wrapping_byte_add(first - start).cast_mut().cast(),
                    end - first,
                    libc::MADV_HUGEPAGE,
                )
            };
        }
    }
}
