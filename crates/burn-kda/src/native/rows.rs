//! Rows from and to wherever they lie.

use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut, Range};

use ndarray::{ArrayView1, ArrayViewMut1};

use super::Real;

#[inline(always)]
pub(super) fn copy<T: Real>(from: ArrayView1<T>, to: &mut [T]) {
    match from.to_slice() {
        Some(from) => to.copy_from_slice(from),
        None => to.iter_mut().zip(from).for_each(|(to, &from)| *to = from),
    }
}

/// As many numbers as there are places.
#[inline(always)]
pub(super) fn paste<T: Real, P: Place<T>>(from: &[T], mut to: ArrayViewMut1<P>) {
    assert_eq!(to.len(), from.len(), "a place for each number, and a number for each place");
    match to.as_slice_mut() {
        Some(to) => to.iter_mut().zip(from).for_each(|(to, &from)| to.put(from)),
        None => to.iter_mut().zip(from).for_each(|(to, &from)| to.put(from)),
    }
}

/// A place for a number, written to before or not.
pub(super) trait Place<T> {
    fn put(&mut self, number: T);
}

impl<T: Real> Place<T> for T {
    #[inline(always)]
    fn put(&mut self, number: T) {
        *self = number;
    }
}

impl<T: Real> Place<T> for MaybeUninit<T> {
    #[inline(always)]
    fn put(&mut self, number: T) {
        self.write(number);
    }
}

/// Numbers from the start of a cache line on: a vector that crosses one costs twice.
pub(super) struct Aligned<T> {
    numbers: Vec<T>,
    range: Range<usize>,
}

impl<T: Real> Aligned<T> {
    pub fn zeros(len: usize) -> Self {
        const LINE: usize = 64;
        let numbers = vec![T::zero(); len + LINE / size_of::<T>()];
        let start = numbers.as_ptr().align_offset(LINE).min(numbers.len() - len);
        Self { numbers, range: start..start + len }
    }
}

impl<T> Deref for Aligned<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        &self.numbers[self.range.clone()]
    }
}

impl<T> DerefMut for Aligned<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.numbers[self.range.clone()]
    }
}
