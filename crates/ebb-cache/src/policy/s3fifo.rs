//! S3-FIFO with a correlation window: three queues, two bits of use count, and fingerprints of evicted keys.
//!
//! New data enters a small queue and leaves it soon unless it is used again; data that is used again moves to
//! the main queue, a clock of two-bit counters. A key that is read again soon after it left the small queue
//! enters the main queue at once (S3-FIFO: Yang et al., SOSP 2023). Block I/O often reads a page several
//! times within a moment and then never again, so the uses of a page in the newest half of the small queue do
//! not count (Clock2Q+: Zhai et al., VLDB 2026). One-pass data and read-ahead have a queue of their own that
//! is evicted first.
//!
//! Invariants, besides those of [`EvictionPolicy`]: a hit moves nothing; the uses of a page in the cold or small
//! queue count only after it has left the window; a call of `evict` examines at most 4 x [`EXAMINED_MOST`] slots.
//! State is 16 bytes per slot and 4 to 8 per remembered key.
//!
//! All shares and times are in pages, not in slots: a slot of 64 KiB counts as sixteen of 4 KiB; otherwise a
//! few large slots would displace many small ones.
//!
//! The policy has no fixed size: the caller of `evict` decides how much data there is, and the queues' shares
//! follow their current content. So the shares are right at once after the cache was halved.

use super::ghosts::{Fingerprint, Ghosts};
use super::queue::{QueueEntry, QueueKind, Queues, STAMPS, USES_MAX, WEIGHT_MAX};
use super::{EvictionPolicy, FULL_ROUND, NextVictim};

/// Slots that one call of `evict` examines, in each of its attempts.
const EXAMINED_MOST: u32 = 512;

/// Slots of the small queue that may be refused in one call before it tries the main queue.
const SMALL_REFUSED_MOST: u32 = 32;

/// The policy. The parameters exist for comparison; the defaults are in use: `SMALL`, the small queue's share
/// of all pages in percent; `WINDOW`, the correlation window in percent of the small queue; `GHOSTS`, how
/// many pages, in percent of all, may be evicted before a key is forgotten.
#[derive(Debug)]
pub struct S3Fifo<const SMALL: u32 = 10, const WINDOW: u32 = 50, const GHOSTS: u32 = 100> {
    queues: Queues,
    ghosts: Ghosts,
    /// Pages inserted so far, modulo [`STAMPS`]: the clock that windows are measured by.
    inserts: u32,
    /// Pages that the small queue may hold before it is evicted from.
    small: u64,
    /// Uses of a new slot do not count until this many pages were inserted after it.
    window: u32,
    /// The most pages there have been.
    most: u64,
    /// How far the clock of the main queue has advanced: [`FULL_ROUND`] for all of it.
    turned: u64,
}

/// A share of `of` in percent.
fn percent(of: u64, share: u32) -> u64 {
    of.saturating_mul(u64::from(share)) / 100
}

/// Number of keys to remember with this many slots.
fn remembered<const GHOSTS: u32>(slots: u32) -> u32 {
    u32::try_from(percent(u64::from(slots), GHOSTS)).unwrap_or(u32::MAX)
}

impl<const SMALL: u32, const WINDOW: u32, const GHOSTS: u32> S3Fifo<SMALL, WINDOW, GHOSTS> {
    /// Slots in the policy.
    #[must_use]
    pub fn len(&self) -> u32 {
        [QueueKind::Cold, QueueKind::Small, QueueKind::Main]
            .map(|place| self.queues.len(place))
            .iter()
            .sum()
    }

    /// Whether there is no slot in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Pages in the policy: the sum of its slots' weights.
    #[must_use]
    pub fn pages(&self) -> u64 {
        [QueueKind::Cold, QueueKind::Small, QueueKind::Main]
            .map(|place| self.queues.weight(place))
            .iter()
            .sum()
    }

    /// Size in memory, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.queues.bytes() + self.ghosts.bytes()
    }

    /// Adapts the shares to the current content.
    fn measure(&mut self) {
        let pages = self.pages();
        self.most = self.most.max(pages);
        self.small = percent(pages, SMALL).max(1);
        let window = u32::try_from(percent(self.small, WINDOW)).unwrap_or(u32::MAX);
        self.window = window.min(STAMPS / 2);
    }

    /// Removes an evicted slot and remembers its key.
    fn finish_eviction(&mut self, slot: u32) -> u32 {
        if let Some(entry) = self.queues.get(slot)
            && !entry.once()
            && entry.place() != QueueKind::Main
        {
            self.ghosts.add(entry.fingerprint, entry.weight());
        }
        self.queues.remove(slot);
        self.measure();
        slot
    }

    /// A slot of the main queue was examined.
    fn pass(&mut self, slot: u32) {
        let weight = self.queues.get(slot).map_or(0, |entry| u64::from(entry.weight()));
        let all = self.queues.weight(QueueKind::Main).max(1);
        self.turned = self.turned.saturating_add(weight * FULL_ROUND / all);
    }

    fn uses(&self, slot: u32) -> u32 {
        self.queues.get(slot).map_or(0, QueueEntry::uses)
    }

    fn set_uses(&mut self, slot: u32, uses: u32) {
        if let Some(entry) = self.queues.get_mut(slot) {
            entry.set_uses(uses);
        }
    }

    /// The oldest cold slot that may be evicted. One that was used after all stays: on probation if it was
    /// expected to be used once, otherwise in the main queue.
    fn evict_cold(&mut self, may: &mut impl FnMut(u32) -> bool) -> Option<u32> {
        for _ in 0..self.queues.len(QueueKind::Cold).min(EXAMINED_MOST) {
            let slot = self.queues.oldest(QueueKind::Cold)?;
            let entry = self.queues.get_mut(slot)?;
            let once = entry.once();
            if entry.is_worth_keeping() {
                entry.reset_uses();
                self.queues.shift(slot, if once { QueueKind::Small } else { QueueKind::Main });
            } else if may(slot) {
                return Some(slot);
            } else {
                self.queues.shift(slot, QueueKind::Cold);
            }
        }
        None
    }

    /// The policy proper: from the small queue if it exceeds its share, otherwise from the main queue.
    fn evict_warm(&mut self, may: &mut impl FnMut(u32) -> bool) -> Option<u32> {
        let mut refused = 0;
        for _ in 0..EXAMINED_MOST {
            let small =
                self.queues.weight(QueueKind::Small) > self.small && refused < SMALL_REFUSED_MOST;
            let oldest = if small { None } else { self.queues.oldest(QueueKind::Main) };
            let slot = oldest.or_else(|| self.queues.oldest(QueueKind::Small))?;
            let uses = self.uses(slot);
            if oldest.is_some() {
                self.pass(slot);
            }
            match self.queues.place(slot) {
                QueueKind::Small if uses > 0 => {
                    self.set_uses(slot, 0);
                    self.queues.shift(slot, QueueKind::Main);
                }
                QueueKind::Main if uses > 0 => {
                    self.set_uses(slot, uses - 1);
                    self.queues.shift(slot, QueueKind::Main);
                }
                _ if may(slot) => return Some(slot),
                place => {
                    refused += u32::from(place == QueueKind::Small);
                    self.queues.shift(slot, place);
                }
            }
        }
        None
    }

    /// The attempts are used up: the first slot that may be evicted.
    fn evict_any(&mut self, may: &mut impl FnMut(u32) -> bool) -> Option<u32> {
        let mut most = EXAMINED_MOST;
        for place in [QueueKind::Small, QueueKind::Main] {
            for _ in 0..self.queues.len(place).min(most) {
                let slot = self.queues.oldest(place)?;
                if may(slot) {
                    return Some(slot);
                }
                self.queues.shift(slot, place);
            }
            most = EXAMINED_MOST / 2;
        }
        None
    }

    /// Appends the slots of a queue that satisfy `which`, oldest first, until `out` has `full`.
    fn list(
        &self,
        place: QueueKind,
        which: impl Fn(&QueueEntry) -> bool,
        full: usize,
        out: &mut Vec<u32>,
    ) {
        let mut next = self.queues.oldest(place);
        while let Some(slot) = next.filter(|_| out.len() < full) {
            if self.queues.get(slot).is_some_and(&which) {
                out.push(slot);
            }
            next = self.queues.newer(slot);
        }
    }
}

impl<const SMALL: u32, const WINDOW: u32, const GHOSTS: u32> EvictionPolicy
    for S3Fifo<SMALL, WINDOW, GHOSTS>
{
    fn with_capacity(slots: u32) -> Self {
        let (queues, ghosts) =
            (Queues::with_capacity(slots), Ghosts::with_capacity(remembered::<GHOSTS>(slots)));
        S3Fifo { queues, ghosts, inserts: 0, small: 1, window: 0, most: 0, turned: 0 }
    }

    fn insert(&mut self, slot: u32, key: u64, pages: u32, cold: bool) {
        self.queues.grow_to(slot);
        self.queues.remove(slot);
        let fingerprint = Fingerprint::of(key);
        let place = if cold {
            QueueKind::Cold
        } else if self.ghosts.take(fingerprint, percent(self.most, GHOSTS)) {
            QueueKind::Main
        } else {
            QueueKind::Small
        };
        self.inserts = self.inserts.wrapping_add(pages.clamp(1, WEIGHT_MAX)) % STAMPS;
        self.queues.insert(slot, place, fingerprint, pages, self.inserts);
        self.measure();
        let remembered = remembered::<GHOSTS>(self.queues.capacity());
        if self.ghosts.capacity() < usize::try_from(remembered).unwrap_or(0) {
            // Rare, since the table doubles; losing the few keys evicted while the cache grows does not
            // matter.
            self.ghosts = Ghosts::with_capacity(remembered);
        }
    }

    fn hit(&mut self, slot: u32) {
        let (inserts, window) = (self.inserts, self.window);
        if let Some(entry) = self.queues.get_mut(slot) {
            let age = inserts.wrapping_sub(entry.stamp()) % STAMPS;
            if entry.once() && entry.uses() == 0 {
                entry.consume(inserts);
            } else if age >= window || entry.place() == QueueKind::Main {
                entry.set_uses(entry.uses() + 1);
            }
        }
    }

    fn remove(&mut self, slot: u32) {
        self.queues.remove(slot);
        self.measure();
    }

    fn lose(&mut self, slot: u32) {
        match (self.queues.place(slot), self.queues.get(slot)) {
            (place, Some(entry)) if place != QueueKind::Absent && !entry.once() => {
                self.ghosts.add(entry.fingerprint, entry.weight());
            }
            _ => {}
        }
        self.remove(slot);
    }

    fn evict(&mut self, mut may: impl FnMut(u32) -> bool) -> Option<u32> {
        let slot = self
            .evict_cold(&mut may)
            .or_else(|| self.evict_warm(&mut may))
            .or_else(|| self.evict_any(&mut may))?;
        Some(self.finish_eviction(slot))
    }

    fn age(&mut self, n: u32) {
        // Windows also pass with time, as if as many slots of the average size had been inserted.
        let pages = (self.pages() / u64::from(self.len().max(1))).max(1);
        let passed = u64::from(n).saturating_mul(pages) % u64::from(STAMPS);
        self.inserts =
            self.inserts.wrapping_add(u32::try_from(passed).unwrap_or_default()) % STAMPS;
        let mut left = n;
        while left > 0 && self.queues.weight(QueueKind::Small) > self.small {
            let Some(slot) = self.queues.oldest(QueueKind::Small) else { break };
            let used = self.uses(slot) > 0;
            self.set_uses(slot, 0);
            self.queues.shift(slot, if used { QueueKind::Main } else { QueueKind::Cold });
            left -= 1;
        }
        for _ in 0..self.queues.len(QueueKind::Main).min(left) {
            let Some(slot) = self.queues.oldest(QueueKind::Main) else { break };
            self.set_uses(slot, self.uses(slot).saturating_sub(1));
            self.queues.shift(slot, QueueKind::Main);
        }
    }

    fn next(&self) -> NextVictim {
        let weight = |place| self.queues.weight(place);
        if weight(QueueKind::Cold) > 0 {
            return NextVictim::Cold(weight(QueueKind::Cold));
        }
        match weight(QueueKind::Small).saturating_sub(self.small) {
            0 if weight(QueueKind::Main) > 0 => NextVictim::Used(self.turned),
            0 if weight(QueueKind::Small) > 0 => NextVictim::New(weight(QueueKind::Small)),
            0 => NextVictim::Nothing,
            above => NextVictim::New(above),
        }
    }

    fn catch_up(&mut self, turned: u64) {
        self.turned = self.turned.max(turned);
    }

    fn coldest(&mut self, n: usize, out: &mut Vec<u32>) {
        let full = out.len().saturating_add(n);
        self.list(QueueKind::Cold, |entry| !entry.is_worth_keeping(), full, out);
        self.list(QueueKind::Small, |entry| !entry.is_worth_keeping(), full, out);
        for uses in 0..=USES_MAX {
            self.list(QueueKind::Main, |entry| entry.uses() == uses, full, out);
        }
        self.list(QueueKind::Cold, QueueEntry::is_worth_keeping, full, out);
        self.list(QueueKind::Small, QueueEntry::is_worth_keeping, full, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_used_again_survives_pages_that_are_not() {
        let mut policy = <S3Fifo>::with_capacity(100);
        (0..100).for_each(|slot| policy.insert(slot, slot.into(), 1, false));
        // Once, and long after it was inserted.
        policy.hit(0);
        let evicted: Vec<u32> = (0..90).filter_map(|_| policy.evict(|_| true)).collect();
        assert_eq!((evicted.len(), evicted.contains(&0)), (90, false), "{evicted:?}");
    }
}
