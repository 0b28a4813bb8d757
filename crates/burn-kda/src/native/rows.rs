//! Rows from and to wherever they lie.

use ndarray::{ArrayView1, ArrayViewMut1};

use super::Real;

#[inline(always)]
pub(super) fn copy<T: Real>(from: ArrayView1<T>, to: &mut [T]) {
    match from.to_slice() {
        Some(from) => to.copy_from_slice(from),
        None => to.iter_mut().zip(from).for_each(|(to, &from)| *to = from),
    }
}

#[inline(always)]
pub(super) fn paste<T: Real>(from: &[T], mut to: ArrayViewMut1<T>) {
    match to.as_slice_mut() {
        Some(to) => to.copy_from_slice(from),
        None => to.iter_mut().zip(from).for_each(|(to, &from)| *to = from),
    }
}
