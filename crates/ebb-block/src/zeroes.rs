//! Writing zeroes as data: what is written at a time. `store.rs` does it.
//!
//! # Invariants
//! - Zeroes that are written as data take no memory in a store with a
//!   [`zero_blocks`](crate::BlockStore::zero_blocks) of its own, however long the range: whole blocks are sent from a
//!   shared zero page. Only a part of a block, which is read, modified and written, takes a buffer for a moment.
//! - A limited number of ranges of a store are written at a time; requests that wait for their
//!   permit hold no memory.
//! - Between two pieces it is checked whether the zeroes are still wanted: the request ends early
//!   if its client has disconnected or its volume is being closed, however long the range.

use std::ops::Range;

use async_lock::{Semaphore, SemaphoreGuard};

/// The most bytes written at a time.
pub const PIECE_BYTES: usize = 1 << 20;
pub(crate) const PIECE: u64 = PIECE_BYTES as u64;
/// Ranges of a store that are written at a time.
const AT_ONCE: usize = 4;

/// Permits for writing zeroes as data.
#[derive(Debug)]
pub(crate) struct ZeroPermits(Semaphore);

impl Default for ZeroPermits {
    fn default() -> Self {
        ZeroPermits(Semaphore::new(AT_ONCE))
    }
}

impl ZeroPermits {
    pub(crate) async fn acquire(&self) -> SemaphoreGuard<'_> {
        self.0.acquire().await
    }
}

/// What remains to be written as data: two ends of a range, both of which may be empty.
pub type Remaining = [Range<u64>; 2];

/// Nothing remains.
pub const NONE_REMAINING: Remaining = [0..0, 0..0];

/// The unit of writing zeroes as data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ZeroPiece {
    /// Bytes of whole blocks.
    Whole(u64),
    /// Bytes within one block.
    Part(u64),
}

impl ZeroPiece {
    /// The first piece of a range that is not empty, for a store with blocks of `block` bytes that
    /// accepts `most` bytes per write.
    pub(crate) fn first_of(range: &Range<u64>, block: u64, most: u64) -> ZeroPiece {
        let length = range.end - range.start;
        let into = range.start % block;
        if into > 0 || length < block {
            return ZeroPiece::Part((block - into).min(length));
        }
        let most = PIECE.min(most).min(length);
        ZeroPiece::Whole((most - most % block).max(block))
    }

    pub(crate) fn bytes(self) -> u64 {
        match self {
            ZeroPiece::Whole(bytes) | ZeroPiece::Part(bytes) => bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(mut range: Range<u64>, block: u64, most: u64) -> Vec<ZeroPiece> {
        let mut all = Vec::new();
        while !range.is_empty() {
            let piece = ZeroPiece::first_of(&range, block, most);
            range.start += piece.bytes();
            all.push(piece);
        }
        all
    }

    #[test]
    fn whole_blocks_are_whole_and_ends_are_parts() {
        use ZeroPiece::{Part, Whole};
        let mib = 1 << 20;
        assert_eq!(pieces(512..512 + mib, 1, PIECE), [Whole(mib)]);
        assert_eq!(pieces(0..2 * mib + 512, 512, PIECE), [Whole(mib), Whole(mib), Whole(512)]);
        assert_eq!(pieces(512..1024, 4096, PIECE), [Part(512)]);
        assert_eq!(pieces(3584..8704, 4096, PIECE), [Part(512), Whole(4096), Part(512)]);
        assert_eq!(pieces(0..12288, 4096, 9000), [Whole(8192), Whole(4096)]);
        assert_eq!(pieces(0..131_072, 65536, 65536), [Whole(65536), Whole(65536)]);
    }
}
