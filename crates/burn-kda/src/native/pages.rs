//! Memory for results.

use std::mem::MaybeUninit;

use ndarray::{Array, Array1, Dimension, IntoDimension, s};

use super::Real;

/// Bytes of a large page.
const LARGE: usize = 2 << 20;

/// Zeros, in large pages if there are enough of them.
pub(super) fn zeros<T: Real, Sh: IntoDimension>(shape: Sh) -> Array<T, Sh::Dim> {
    in_large_pages(shape, Array1::zeros)
}

/// Memory as it is found, likewise, for tasks that write to all of it: zeros would be written first wherever the pages have
/// been used before.
pub(super) fn unwritten<T: Real, Sh: IntoDimension>(shape: Sh) -> Array<MaybeUninit<T>, Sh::Dim> {
    let mut memory = in_large_pages(shape, Array1::uninit);
    if cfg!(debug_assertions) {
        // So that tests see what was left out.
        memory.fill(MaybeUninit::new(T::nan()));
    }
    memory
}

/// Small pages cost as much as what is computed to fill them, a large one a twelfth of as many. Only whole and aligned memory
/// can become one, so there is room for it to start at one, and the last one may be half empty.
fn in_large_pages<T, Sh: IntoDimension>(shape: Sh, allocate: impl Fn(usize) -> Array1<T>) -> Array<T, Sh::Dim> {
    let shape = shape.into_dimension();
    let (len, page) = (shape.size(), LARGE / size_of::<T>());
    let pages = if cfg!(target_os = "linux") { (len + page / 2) / page } else { 0 };
    let memory = match pages {
        0 => allocate(len),
        _ => {
            let memory = allocate(len.max(pages * page) + page);
            let start = memory.as_ptr().align_offset(LARGE).min(page);
            ask_for_large_pages(&memory.as_slice().expect("in one piece")[start..][..pages * page]);
            memory.slice_move(s![start..start + len])
        }
    };
    memory.into_shape_with_order(shape).expect("as many numbers")
}

/// Before the memory is first written to.
#[allow(unsafe_code)]
#[cfg_attr(not(target_os = "linux"), allow(unused_variables))]
fn ask_for_large_pages<T>(memory: &[T]) {
    #[cfg(target_os = "linux")]
    // SAFETY: the memory is borrowed, and the advice changes no value; if it is refused, nothing happens.
    unsafe {
        libc::madvise(memory.as_ptr().cast_mut().cast(), size_of_val(memory), libc::MADV_HUGEPAGE)
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_results_start_at_a_large_page() {
        let page = LARGE / size_of::<f32>();
        for len in [0, 1, page / 2 - 1, page / 2, page, 5 * page / 2 + 3] {
            let memory = zeros::<f32, _>([1, len]);
            assert_eq!(memory.dim(), (1, len));
            assert!(memory.iter().all(|&x| x == 0.0) && memory.is_standard_layout());
            if cfg!(target_os = "linux") && len >= page / 2 {
                assert_eq!(memory.as_ptr().addr() % LARGE, 0, "{len} numbers");
            }
        }
    }
}
