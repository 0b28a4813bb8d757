//! Memory on its way before it is needed.

use ndarray::ArrayView1;

/// Asks for a row that is needed soon, in the first cache: rows of one head lie too far apart for the machine to see what
/// comes next.
#[inline(always)]
pub(super) fn prefetch<T>(row: ArrayView1<T>) {
    if let Some(row) = row.to_slice() {
        ask::<true, T>(row);
    }
}

/// Asks for part of a state, in the second cache: the first one is full of the state before it.
#[inline(always)]
pub(super) fn prefetch_state<T>(part: &[T]) {
    ask::<false, T>(part);
}

/// For these numbers in the first cache, or in the second.
#[inline(always)]
#[allow(unsafe_code)]
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
fn ask<const FIRST: bool, T>(numbers: &[T]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        for line in numbers.chunks(64 / size_of::<T>()) {
            let line = line.as_ptr().cast();
            // SAFETY: every x86-64 has the instruction; it is a hint that changes no value and never faults, and `line` is
            // borrowed memory.
            unsafe { if FIRST { _mm_prefetch::<_MM_HINT_T0>(line) } else { _mm_prefetch::<_MM_HINT_T1>(line) } };
        }
    }
}
