//! How much of this process's address space, and of the guard's table of ranges, the peers of each volume may take.
//!
//! The peers of one volume may map no more than what is left to those of other volumes below a common limit, so that one
//! volume takes half of it at most, and each further one finds some. Beyond the common limit, a volume that has little gets
//! it as long as there is any. Source: Choudhury and Hahne, Dynamic Queue Length Thresholds for Shared-Memory Packet
//! Switches, 1998.
//!
//! Invariants: what is mapped counts from before the mapping is made until it is removed. The sums cannot overflow: what is
//! reserved is at most the address space.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::fault_guard::RANGES_MAX;

/// Limits of a resource: what all volumes share, what one volume may have in any case, and what there is.
#[derive(Clone, Copy, Debug)]
struct Limits {
    shared: usize,
    least: usize,
    most: usize,
}

/// Of the 128 TiB of a process's address space. What is beyond `most` is for everything else of this process.
const BYTES: Limits = Limits { shared: 64 << 40, least: 1 << 40, most: 112 << 40 };
/// Of the guard's table: half, and 64 ranges for each of 240 volumes.
const RANGES: Limits = Limits { shared: RANGES_MAX / 2, least: 64, most: RANGES_MAX - 1024 };

#[derive(Debug, Default)]
struct Mapped {
    bytes: AtomicUsize,
    ranges: AtomicUsize,
}

/// What all peers of this process have mapped.
#[derive(Debug, Default)]
pub struct MappingBudget {
    all: Arc<Mapped>,
}

impl MappingBudget {
    /// The budget of a volume, which has nothing mapped. Its connections share one.
    pub fn volume(&self) -> Arc<VolumeMappings> {
        Arc::new(VolumeMappings { all: self.all.clone(), own: Mapped::default() })
    }
}

/// What the peers of one volume have mapped.
#[derive(Debug)]
pub struct VolumeMappings {
    all: Arc<Mapped>,
    own: Mapped,
}

impl VolumeMappings {
    /// Counts a mapping, until the share is dropped.
    ///
    /// # Errors
    /// There is no room.
    pub(crate) fn reserve(self: &Arc<Self>, bytes: usize) -> io::Result<MappingShare> {
        let refused = |text: &'static str| io::Error::new(io::ErrorKind::QuotaExceeded, text);
        if bytes > BYTES.most {
            return Err(refused("a mapping is larger than the address space"));
        }
        // Counted before it is checked: two at once may both be refused, and never both be too many.
        let count = |own: &AtomicUsize, all: &AtomicUsize, more: usize| {
            let before = own.fetch_add(more, Ordering::Relaxed);
            (before, all.fetch_add(more, Ordering::Relaxed))
        };
        let used = count(&self.own.bytes, &self.all.bytes, bytes);
        let ranges = count(&self.own.ranges, &self.all.ranges, 1);
        let share = MappingShare { volume: self.clone(), bytes };
        if !BYTES.admit(used, bytes) {
            return Err(refused(
                "the guests of this volume have mapped their share of the address space",
            ));
        }
        if !RANGES.admit(ranges, 1) {
            return Err(refused(
                "the guests of this volume have mapped their share of regions of shared memory",
            ));
        }
        Ok(share)
    }
}

impl Limits {
    /// Whether a volume that has `own` of `all` may have `more`.
    fn admit(self, (own, all): (usize, usize), more: usize) -> bool {
        let then = own.saturating_add(more);
        let left = self.shared.saturating_sub(all).saturating_sub(more);
        let little = then <= self.least && all.saturating_add(more) <= self.most;
        little || then <= left
    }
}

/// One mapping's part of a budget.
#[derive(Debug)]
pub(crate) struct MappingShare {
    volume: Arc<VolumeMappings>,
    bytes: usize,
}

impl Drop for MappingShare {
    fn drop(&mut self) {
        for mapped in [&self.volume.own, &*self.volume.all] {
            mapped.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
            mapped.ranges.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take_all(volume: &Arc<VolumeMappings>, bytes: usize) -> Vec<MappingShare> {
        std::iter::from_fn(|| volume.reserve(bytes).ok()).collect()
    }

    #[test]
    fn a_volume_gets_a_quarter_of_the_address_space_at_most_and_each_one_gets_some() {
        let budget = MappingBudget::default();
        let greedy = budget.volume();
        let taken = take_all(&greedy, 1 << 40);
        assert_eq!(taken.len(), 32);
        let mut kept: Vec<_> = (0..40).flat_map(|_| take_all(&budget.volume(), 1 << 30)).collect();
        assert!(budget.volume().reserve(1 << 39).is_ok(), "nothing is left for a further volume");
        kept.extend(taken);
        drop(kept);
        assert_eq!(take_all(&greedy, 1 << 40).len(), 32, "what was dropped is counted");
        assert!(greedy.reserve(usize::MAX).is_err());
    }

    #[test]
    fn a_volume_gets_64_ranges_when_greedy_ones_have_their_share() {
        let budget = MappingBudget::default();
        let greedy: Vec<_> = (0..100).map(|_| take_all(&budget.volume(), 4096)).collect();
        assert_eq!(greedy[0].len(), RANGES_MAX / 4);
        assert!(greedy.iter().all(|taken| taken.len() >= 64));
        assert!(greedy.iter().map(Vec::len).sum::<usize>() < RANGES_MAX);
        assert!(take_all(&budget.volume(), 4096).len() >= 64);
    }
}
