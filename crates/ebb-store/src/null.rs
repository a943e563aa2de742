//! A store that keeps nothing: for measuring what is above it.

use crate::{Buf, BufResult};

/// Reads zeroes, forgets writes.
#[derive(Debug)]
pub struct NullStore {
    size: u64,
}

impl NullStore {
    /// A store of `size` bytes.
    pub fn new(size: u64) -> NullStore {
        NullStore { size }
    }

    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    pub(crate) fn read(&self, mut buf: Buf) -> BufResult {
        buf.fill(0);
        (Ok(()), buf)
    }
}
