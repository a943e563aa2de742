//! Bytes that this thread has copied out of and into guest memory (feature `count-copies`). Single
//! words of rings, such as indices, are not counted.

use std::cell::Cell;

thread_local! {
    static BYTES: Cell<usize> = const { Cell::new(0) };
}

pub(super) fn note(bytes: usize) {
    BYTES.set(BYTES.get().wrapping_add(bytes));
}

/// Bytes copied so far.
pub fn bytes() -> usize {
    BYTES.get()
}
