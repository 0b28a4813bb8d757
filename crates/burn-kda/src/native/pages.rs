//! Memory for results.

use ndarray::{Array, ShapeBuilder};

use super::Real;

/// Zeros, in large pages if there are enough of them: a small one costs about as much as what is computed to fill it.
pub(super) fn zeros<T: Real, Sh: ShapeBuilder>(shape: Sh) -> Array<T, Sh::Dim> {
    let zeros = Array::zeros(shape);
    if let Some(memory) = zeros.as_slice_memory_order() {
        ask_for_large_pages(memory);
    }
    zeros
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
