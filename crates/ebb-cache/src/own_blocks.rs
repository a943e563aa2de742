//! [`OwnBlocks`]: how many blocks a delta holds, for statistics.
//!
//! A new delta holds none. Of one that was opened the map pages are counted one after the other, in the background; what a
//! save adds later is added here.
//!
//! # Invariants
//! - A bit counts once: counting pages and saving exclude each other, and what a save adds to a page that is not counted yet is
//!   counted with the page.
//! - Reading the number waits for nothing.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// All pages are counted.
const ALL: u32 = u32::MAX;

/// See the module.
#[derive(Debug)]
pub(crate) struct OwnBlocks {
    /// The pages below are counted.
    next: AtomicU32,
    blocks: AtomicU64,
}

impl OwnBlocks {
    /// Of a new delta.
    pub(crate) fn none() -> OwnBlocks {
        OwnBlocks { next: AtomicU32::new(ALL), blocks: AtomicU64::new(0) }
    }

    /// Of a delta that holds what is not known yet.
    pub(crate) fn uncounted() -> OwnBlocks {
        OwnBlocks { next: AtomicU32::new(0), blocks: AtomicU64::new(0) }
    }

    /// The blocks whose bits are stable; `None` until all are counted.
    pub(crate) fn get(&self) -> Option<u64> {
        (self.next.load(Ordering::Acquire) == ALL).then(|| self.blocks.load(Ordering::Relaxed))
    }

    /// The next page to count; `None` if all are counted.
    pub(crate) fn next(&self) -> Option<u32> {
        let next = self.next.load(Ordering::Acquire);
        (next != ALL).then_some(next)
    }

    /// The pages from the next one up to `end` hold so many blocks; `is_last`: there are no more.
    pub(crate) fn note_counted(&self, end: u32, blocks: u64, is_last: bool) {
        self.blocks.fetch_add(blocks, Ordering::Relaxed);
        self.next.store(if is_last { ALL } else { end }, Ordering::Release);
    }

    /// A save has added blocks to a page.
    pub(crate) fn note_saved(&self, page: u32, more: u64) {
        if page < self.next.load(Ordering::Acquire) {
            self.blocks.fetch_add(more, Ordering::Relaxed);
        }
    }

    /// Blocks were taken away: all are to be counted again.
    pub(crate) fn begin_again(&self) {
        self.next.store(0, Ordering::Release);
        self.blocks.store(0, Ordering::Relaxed);
    }
}
