//! What decides about the writeback of a volume, and the state it has there.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::throttle::{FifoLock, InterruptibleSleep};

/// Size of the largest write to the store.
pub(crate) const CLUSTER_MAX: usize = 1 << 20;
/// How long a write waits for a full store, see [`WritebackControl::patience`].
const FULL_PATIENCE: Duration = Duration::from_secs(30);

/// In effect until a control is set; nothing is dirty until then.
pub(crate) static BEFORE: FixedLimit =
    FixedLimit { dirty_max: 64 << 20, age_max: Duration::from_secs(5), cluster: CLUSTER_MAX };

/// What a flusher does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WritebackOrder {
    /// Write back the oldest data and its neighbours: at most this many bytes (up to 1 MiB).
    Write(usize),
    /// Do nothing for this long.
    Wait(Duration),
}

/// Decides how much is written back when, and how long writers are throttled. All calls return quickly;
/// several workers call concurrently. Sizes are in bytes of whole pages: a page counts once while it is
/// dirty, and once while a copy of it is under writeback.
pub trait WritebackControl: Send + Sync {
    /// Requests to make `bytes` dirty, pending since `requested`, while the store lacks `dirty` bytes. Zero:
    /// granted, and the bytes count as dirty. Otherwise the time to wait before the next call, which
    /// [`crate::VolumeCache::retry_reservation`] cuts short. Only the first of a volume's waiting writers calls this.
    fn reserve(&self, requested: Instant, now: Instant, bytes: u64, dirty: u64) -> Duration;

    /// This many bytes were counted as dirty and are not: they were dirty before.
    fn unused(&self, bytes: u64) {
        let _ = bytes;
    }

    /// This many dirty bytes were sent to the store.
    fn sent(&self, now: Instant, bytes: u64) {
        let _ = (now, bytes);
    }

    /// The write that was sent at `sent` has completed; `saved`: the store has it, otherwise it is dirty
    /// again.
    fn written(&self, now: Instant, bytes: u64, sent: Instant, saved: bool) {
        let _ = (now, bytes, sent, saved);
    }

    /// A write to the volume's store has completed; `full`: it failed because the store is full.
    /// Also called, with false, when the volume has no dirty data left for which it could be full.
    fn note_full(&self, full: bool) {
        let _ = full;
    }

    /// Returns true if the last write of a volume that shares the limit found its store full: a
    /// reservation may wait for room that only that volume could make.
    fn is_full(&self) -> bool {
        false
    }

    /// How long a write waits for a reservation while the store, or one that shares the limit, is
    /// full. Then it fails with [`ErrorKind::NoSpace`](ebb_block::ErrorKind::NoSpace) if the
    /// volume's own store is full, and otherwise goes to that store, past memory.
    fn patience(&self) -> Duration {
        FULL_PATIENCE
    }

    /// What the flusher does next, while the store lacks `dirty` bytes, the oldest of them for `age`. Also
    /// called after each completed write to the store.
    fn next(&self, now: Instant, dirty: u64, age: Duration) -> WritebackOrder;
}

/// The simplest control: a limit on dirty bytes and on their age.
#[derive(Clone, Copy, Debug)]
pub struct FixedLimit {
    /// The most dirty bytes before writers are throttled.
    pub dirty_max: u64,
    /// The longest time that data stays in memory only.
    pub age_max: Duration,
    /// Bytes of one write to the store.
    pub cluster: usize,
}

impl Default for FixedLimit {
    fn default() -> FixedLimit {
        BEFORE
    }
}

impl WritebackControl for FixedLimit {
    fn reserve(&self, _: Instant, _: Instant, bytes: u64, dirty: u64) -> Duration {
        if dirty + bytes > self.dirty_max { Duration::from_millis(2) } else { Duration::ZERO }
    }

    fn next(&self, _: Instant, dirty: u64, age: Duration) -> WritebackOrder {
        if dirty > self.dirty_max / 4 || age >= self.age_max {
            WritebackOrder::Write(self.cluster)
        } else {
            WritebackOrder::Wait((self.age_max - age).min(Duration::from_millis(20)))
        }
    }
}

/// Writeback state of a volume.
#[derive(Default)]
pub(crate) struct WritebackState {
    pub(crate) control: OnceLock<Arc<dyn WritebackControl>>,
    pub(crate) writer_queue: FifoLock,
    /// Serialises the building of long lists of dirty frames.
    pub(crate) listing: FifoLock,
    /// What the flusher sleeps on; whether it waits for data to become dirty; whether it is to end.
    pub(crate) flusher_sleep: InterruptibleSleep,
    pub(crate) idle: AtomicBool,
    pub(crate) ended: AtomicBool,
    /// The last write to the store failed because the store is full.
    pub(crate) full: AtomicBool,
    /// Serialises flushes of the store.
    pub(crate) syncing: FifoLock,
    /// The number of the last flush of the store that began.
    pub(crate) begun: AtomicU64,
    /// The number of the last flush of the store that succeeded.
    pub(crate) done: AtomicU64,
    /// When the last flush of the store ended, in milliseconds of the cache's clock; after a failure, when to try again.
    pub(crate) synced: AtomicU64,
    /// The store's losses that have been repaired by writing the data again; without writeback,
    /// those after which the cache was emptied.
    pub(crate) losses: AtomicU64,
    /// How often a failed request left data in doubt that is not stable; how many of these the last
    /// flush of the store that succeeded has settled by writing the data again.
    pub(crate) doubts: AtomicU64,
    pub(crate) settled: AtomicU64,
    /// A loss cannot be repaired, so that no flush succeeds any more: nothing is kept for that.
    pub(crate) beyond_repair: AtomicBool,
}
