//! Memory for results.

use std::mem::MaybeUninit;

use ndarray::{Array, Dimension, IntoDimension};

use super::Real;

/// Bytes of a large page.
const LARGE: usize = 2 << 20;

/// Zeros, in large pages if there are enough of them: small ones cost as much as what is computed to fill them, a large one a
/// twelfth of as many.
pub(super) fn zeros<T: Real, Sh: IntoDimension>(shape: Sh) -> Array<T, Sh::Dim> {
    let shape = shape.into_dimension();
    let mut memory = vec![T::zero(); with_room::<T>(shape.size())];
    memory.truncate(shape.size());
    in_large_pages(&memory);
    Array::from_shape_vec(shape, memory).expect("as many numbers")
}

/// Memory as it is found, likewise, for tasks that write to all of it: zeros would be written first wherever the pages have
/// been used before.
pub(super) fn unwritten<T: Real, Sh: IntoDimension>(shape: Sh) -> Array<MaybeUninit<T>, Sh::Dim> {
    let shape = shape.into_dimension();
    let mut memory = Vec::with_capacity(with_room::<T>(shape.size()));
    // NaN so that tests see what was left out.
    let number = if cfg!(debug_assertions) { MaybeUninit::new(T::nan()) } else { MaybeUninit::uninit() };
    in_large_pages(&memory);
    memory.resize(shape.size(), number);
    Array::from_shape_vec(shape, memory).expect("as many numbers")
}

/// So many numbers, and as many more as make the last large page whole.
fn with_room<T>(len: usize) -> usize {
    let page = LARGE / size_of::<T>();
    if cfg!(target_os = "linux") && len >= page / 2 { len + page / 2 } else { len }
}

/// Asks for the large pages of memory that was not written to yet: whole ones only, of which the last may be half empty.
#[allow(unsafe_code)]
#[cfg_attr(not(target_os = "linux"), allow(unused_variables))]
fn in_large_pages<T>(memory: &Vec<T>) {
    #[cfg(target_os = "linux")]
    {
        const SMALL: usize = 4096;
        let start = memory.as_ptr().addr();
        let end = (start + memory.capacity() * size_of::<T>()) / LARGE * LARGE;
        // The allocator's own notes may come before the numbers, in the same small page.
        let first = (start / SMALL * SMALL).next_multiple_of(LARGE);
        if first < end {
            // SAFETY: from the small page in which the memory starts to its end all is mapped, and the advice changes no value;
            // if it is refused, nothing happens.
            unsafe {
                let first = memory.as_ptr().with_addr(first).cast_mut();
                libc::madvise(first.cast(), end - first.addr(), libc::MADV_HUGEPAGE)
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_of_any_size() {
        let page = LARGE / size_of::<f32>();
        for len in [0, 1, page / 2 - 1, page / 2, page, 5 * page / 2 + 3] {
            let memory = zeros::<f32, _>([1, len]);
            assert_eq!(memory.dim(), (1, len));
            assert!(memory.iter().all(|&x| x == 0.0));
        }
    }
}
