//! Memory for optional work: larger writebacks, read-ahead, filling the cache.
//!
//! Such work allocates without waiting, and uses less memory or none when there is none available. A store
//! that hangs keeps its buffers, so the sum is bounded: without a bound, the writeback of one dead disk
//! could hold all of the ceiling that [`crate::Shares`] reserves for the requests of other volumes.
//!
//! # Invariants
//! - All [`Spare`]s of a memory together hold at most one part in [`PART`] of its ceiling, from the quarter
//!   that is in no share.
//! - One [`Spare`] holds at most [`FREE_MULTIPLE`] times what it leaves free for the other volumes.

use std::sync::Arc;

use crate::sync::{AtomicUsize, Ordering};

/// Spare memory is one part in `PART` of the ceiling.
const PART: usize = 16;
/// A volume may hold this many times as much as it leaves free.
const FREE_MULTIPLE: usize = 4;

/// The spare memory of all volumes. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Spares(Arc<SpareTotals>);

#[derive(Debug)]
struct SpareTotals {
    total: AtomicUsize,
    used: AtomicUsize,
}

/// The spare memory of one volume.
#[derive(Debug)]
pub struct Spare {
    common: Arc<SpareTotals>,
    used: AtomicUsize,
}

/// Spare memory in use; dropping it releases the memory.
#[derive(Debug)]
pub struct SpareHeld {
    spare: Arc<Spare>,
    bytes: usize,
}

impl Spares {
    pub(crate) fn new(ceiling: usize) -> Spares {
        let total = AtomicUsize::new(ceiling / PART);
        Spares(Arc::new(SpareTotals { total, used: AtomicUsize::new(0) }))
    }

    /// Changes the ceiling. Existing grants stay, even beyond it.
    pub(crate) fn set_ceiling(&self, ceiling: usize) {
        self.0.total.store(ceiling / PART, Ordering::Relaxed);
    }

    /// The spare memory of one more volume.
    #[must_use]
    pub fn join(&self) -> Arc<Spare> {
        Arc::new(Spare { common: self.0.clone(), used: AtomicUsize::new(0) })
    }
}

impl Spare {
    /// `bytes`, if they are available now.
    pub fn try_take(self: &Arc<Self>, bytes: usize) -> Option<SpareHeld> {
        let total = self.common.total.load(Ordering::Relaxed);
        let fits = |used: usize| used.checked_add(bytes).filter(|&used| used <= total);
        let before =
            self.common.used.try_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        let own = self.used.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        let held = SpareHeld { spare: self.clone(), bytes };
        let free = total.saturating_sub(before.saturating_add(bytes));
        (own <= free.saturating_mul(FREE_MULTIPLE)).then_some(held)
    }

    /// `most` bytes, halved until they are available, but not less than `least`.
    pub fn try_take_some(self: &Arc<Self>, most: usize, least: usize) -> Option<SpareHeld> {
        let halves = std::iter::successors(Some(most), |bytes| Some(bytes / 2));
        halves.take_while(|&bytes| bytes >= least.max(1)).find_map(|bytes| self.try_take(bytes))
    }
}

impl SpareHeld {
    /// Bytes granted.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for SpareHeld {
    fn drop(&mut self) {
        self.spare.used.fetch_sub(self.bytes, Ordering::Relaxed);
        self.spare.common.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn spare_memory_is_bounded_and_a_second_volume_finds_some() {
        let spares = Spares::new(PART * 10 * MIB);
        let (first, second) = (spares.join(), spares.join());
        let held: Vec<_> = std::iter::from_fn(|| first.try_take(MIB)).collect();
        assert_eq!(held.len(), 8, "four fifths of it");
        assert!(first.try_take_some(MIB, MIB).is_none());
        assert_eq!(second.try_take_some(4 * MIB, 64 << 10).unwrap().bytes(), MIB);
        assert!(second.try_take_some(4 * MIB, 4 * MIB).is_none());
        drop(held);
        assert!(first.try_take(8 * MIB).is_some(), "all of it was released");
        spares.set_ceiling(0);
        assert!(first.try_take(1).is_none() && first.try_take(usize::MAX).is_none());
    }
}
