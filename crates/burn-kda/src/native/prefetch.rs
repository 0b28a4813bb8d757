//! Memory on its way before it is needed.

use ndarray::ArrayView1;

/// Asks for a row that is needed soon: rows of one head lie too far apart for the machine to see what comes next.
#[inline(always)]
pub(super) fn prefetch<T>(row: ArrayView1<T>) {
    if let Some(row) = row.to_slice() {
        prefetch_slice(row);
    }
}

/// Asks for these numbers in the second cache: rows whole pages apart would drive each other, and all else, out of the first.
#[inline(always)]
#[allow(unsafe_code)]
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub(super) fn prefetch_slice<T>(numbers: &[T]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: every x86-64 has the instruction; it is a hint that changes no value and never faults, and `number` is
        // borrowed memory.
        let ask = |number: &T| unsafe { _mm_prefetch::<_MM_HINT_T1>(std::ptr::from_ref(number).cast()) };
        for line in numbers.chunks(64 / size_of::<T>()) {
            ask(&line[0]);
        }
        if let Some(last) = numbers.last() {
            ask(last); // in one more line, if the first is not at the start of one
        }
    }
}
