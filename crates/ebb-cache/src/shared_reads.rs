//! Counts what reads of a volume find in the layers that it shares.

use ebb_block::Io;
use ebb_io::{PerWorker, WorkerCount};

/// What reads of a volume found in the layers below its top one, since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SharedReads {
    /// Bytes that were in memory, for whichever volume they were loaded.
    pub hit_bytes: u64,
    /// Bytes that were not.
    pub miss_bytes: u64,
}

/// What one worker has counted.
#[derive(Debug, Default)]
struct ReadCounts {
    hits: WorkerCount,
    misses: WorkerCount,
}

/// The counters of a stack.
#[derive(Debug, Default)]
pub(crate) struct SharedReadCounters(PerWorker<ReadCounts>);

impl SharedReadCounters {
    /// Counts a read of `length` bytes, of which `hits` were in memory.
    #[inline]
    pub(crate) fn note(&self, io: &Io, hits: u64, length: u64) {
        let (slot, misses) = (io.slot(), length.saturating_sub(hits));
        let counts = &self.0[slot];
        counts.hits.add(slot, hits);
        if misses > 0 {
            counts.misses.add(slot, misses);
        }
    }

    pub(crate) fn sum(&self) -> SharedReads {
        let mut sum = SharedReads::default();
        for counts in self.0.iter() {
            sum.hit_bytes = sum.hit_bytes.wrapping_add(counts.hits.get());
            sum.miss_bytes = sum.miss_bytes.wrapping_add(counts.misses.get());
        }
        sum
    }
}
