//! S3-FIFO with a correlation window: three queues, two bits of use, and fingerprints of what went.
//!
//! New data goes into a small queue and leaves it soon unless it is used again; what is used again goes
//! into the main one, a clock of two-bit counters. Who comes back soon after leaving the small queue goes to
//! the main one at once (S3-FIFO: Yang and others, SOSP 2023). Block I/O reads the same page several times
//! within a moment and then never again: while a page is among the newest half of the small queue, its
//! uses do not count (Clock2Q+: Zhai and others, VLDB 2026). One-pass data and read-ahead have a queue of their own that goes first.
//!
//! Invariants, beside those of [`Policy`]: a hit moves nothing; the uses of a page in the cold or small
//! queue count only when it has left the window; a call of `evict` looks at most at 4 x [`PATIENCE`] slots.
//! State is 16 bytes per slot and 4 to 8 per remembered key.
//!
//! No size is given to it: who calls `evict` decides how much there is, and the queues' shares follow
//! what is in them at the moment. So a cache that is halved at once goes on with the right shares.

use super::Policy;
use super::ghosts::{Ghosts, Print};
use super::queue::{Entry, Place, Queues, STAMPS, USES_MAX};

/// Slots that one call of `evict` looks at, in each of its attempts.
const PATIENCE: u32 = 512;

/// Slots of the small queue that may be refused in one call before it looks into the main queue.
const SMALL_PATIENCE: u32 = 32;

/// The policy. The parameters are there for comparison; the defaults are what is in use:
/// `SMALL`, the small queue's share of all slots in percent; `WINDOW`, the correlation window in percent of
/// the small queue; `GHOSTS`, keys remembered in percent of slots.
#[derive(Debug)]
pub struct S3Fifo<const SMALL: u32 = 10, const WINDOW: u32 = 50, const GHOSTS: u32 = 100> {
    queues: Queues,
    ghosts: Ghosts,
    /// Insertions so far, modulo [`STAMPS`]: the time that windows are measured in.
    inserts: u32,
    /// Slots that the small queue may hold before it is evicted from.
    small: u32,
    /// Insertions for which uses of a new page do not count.
    window: u32,
    /// The most slots there have been.
    most: u32,
}

/// A share of `of` in percent.
fn percent(of: u32, share: u32) -> u32 {
    u32::try_from(u64::from(of) * u64::from(share) / 100).unwrap_or(u32::MAX)
}

impl<const SMALL: u32, const WINDOW: u32, const GHOSTS: u32> S3Fifo<SMALL, WINDOW, GHOSTS> {
    /// Slots in the policy.
    #[must_use]
    pub fn len(&self) -> u32 {
        [Place::Cold, Place::Small, Place::Main].map(|place| self.queues.len(place)).iter().sum()
    }

    /// Whether there is no slot in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of memory it has.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.queues.bytes() + self.ghosts.bytes()
    }

    /// Adapts the shares to what there is now.
    fn measure(&mut self) {
        let len = self.len();
        self.most = self.most.max(len);
        self.small = percent(len, SMALL).max(1);
        self.window = percent(self.small, WINDOW);
    }

    /// Takes out a slot that went for want of space, and remembers it.
    fn depart(&mut self, slot: u32) -> u32 {
        if let Some(entry) = self.queues.get(slot)
            && !entry.once()
            && entry.place() != Place::Main
        {
            self.ghosts.add(entry.print);
        }
        self.queues.remove(slot);
        self.measure();
        slot
    }

    fn uses(&self, slot: u32) -> u32 {
        self.queues.get(slot).map_or(0, Entry::uses)
    }

    fn set_uses(&mut self, slot: u32, uses: u32) {
        if let Some(entry) = self.queues.get_mut(slot) {
            entry.set_uses(uses);
        }
    }

    /// The oldest cold slot that may go. One that was used after all stays: expected to be used once, on
    /// probation; else for good.
    fn evict_cold(&mut self, may: &mut impl FnMut(u32) -> bool) -> Option<u32> {
        for _ in 0..self.queues.len(Place::Cold).min(PATIENCE) {
            let slot = self.queues.oldest(Place::Cold)?;
            let entry = self.queues.get_mut(slot)?;
            let once = entry.once();
            if entry.kept() {
                entry.forgive();
                self.queues.shift(slot, if once { Place::Small } else { Place::Main });
            } else if may(slot) {
                return Some(slot);
            } else {
                self.queues.shift(slot, Place::Cold);
            }
        }
        None
    }

    /// The policy proper: from the small queue if that has more than its share, else from the main one.
    fn evict_warm(&mut self, may: &mut impl FnMut(u32) -> bool) -> Option<u32> {
        let mut refused = 0;
        for _ in 0..PATIENCE {
            let small = self.queues.len(Place::Small) > self.small && refused < SMALL_PATIENCE;
            let oldest = if small { None } else { self.queues.oldest(Place::Main) };
            let slot = oldest.or_else(|| self.queues.oldest(Place::Small))?;
            let uses = self.uses(slot);
            match self.queues.place(slot) {
                Place::Small if uses > 0 => {
                    self.set_uses(slot, 0);
                    self.queues.shift(slot, Place::Main);
                }
                Place::Main if uses > 0 => {
                    self.set_uses(slot, uses - 1);
                    self.queues.shift(slot, Place::Main);
                }
                _ if may(slot) => return Some(slot),
                place => {
                    refused += u32::from(place == Place::Small);
                    self.queues.shift(slot, place);
                }
            }
        }
        None
    }

    /// Patience is at an end: the first that may go.
    fn evict_any(&mut self, may: &mut impl FnMut(u32) -> bool) -> Option<u32> {
        let mut patience = PATIENCE;
        for place in [Place::Small, Place::Main] {
            for _ in 0..self.queues.len(place).min(patience) {
                let slot = self.queues.oldest(place)?;
                if may(slot) {
                    return Some(slot);
                }
                self.queues.shift(slot, place);
            }
            patience = PATIENCE / 2;
        }
        None
    }

    /// Appends the slots of a queue for which `which` holds, oldest first, until `out` has `full`.
    fn list(&self, place: Place, which: impl Fn(&Entry) -> bool, full: usize, out: &mut Vec<u32>) {
        let mut next = self.queues.oldest(place);
        while let Some(slot) = next.filter(|_| out.len() < full) {
            if self.queues.get(slot).is_some_and(&which) {
                out.push(slot);
            }
            next = self.queues.newer(slot);
        }
    }
}

impl<const SMALL: u32, const WINDOW: u32, const GHOSTS: u32> Policy
    for S3Fifo<SMALL, WINDOW, GHOSTS>
{
    fn with_capacity(slots: u32) -> Self {
        let (queues, ghosts) =
            (Queues::with_capacity(slots), Ghosts::with_capacity(percent(slots, GHOSTS)));
        S3Fifo { queues, ghosts, inserts: 0, small: 1, window: 0, most: 0 }
    }

    fn insert(&mut self, slot: u32, key: u64, cold: bool) {
        self.queues.reach(slot);
        self.queues.remove(slot);
        let print = Print::of(key);
        let place = if cold {
            Place::Cold
        } else if self.ghosts.take(print, percent(self.most, GHOSTS)) {
            Place::Main
        } else {
            Place::Small
        };
        self.inserts = (self.inserts + 1) % STAMPS;
        self.queues.insert(slot, place, print, self.inserts);
        self.measure();
        if self.ghosts.capacity()
            < usize::try_from(percent(self.queues.capacity(), GHOSTS)).unwrap_or(0)
        {
            // Seldom, since it doubles; the few that went from a cache that grows are not missed.
            self.ghosts = Ghosts::with_capacity(percent(self.queues.capacity(), GHOSTS));
        }
    }

    fn hit(&mut self, slot: u32) {
        let (inserts, window) = (self.inserts, self.window);
        if let Some(entry) = self.queues.get_mut(slot) {
            let age = inserts.wrapping_sub(entry.stamp()) % STAMPS;
            if entry.once() && entry.uses() == 0 {
                entry.consume(inserts);
            } else if age >= window || entry.place() == Place::Main {
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
            (place, Some(entry)) if place != Place::Absent && !entry.once() => {
                self.ghosts.add(entry.print);
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
        Some(self.depart(slot))
    }

    fn age(&mut self, n: u32) {
        // Windows pass with time, too.
        self.inserts = self.inserts.wrapping_add(n) % STAMPS;
        let new = self.queues.len(Place::Small).saturating_sub(self.small).min(n);
        for _ in 0..new {
            let Some(slot) = self.queues.oldest(Place::Small) else { break };
            let used = self.uses(slot) > 0;
            self.set_uses(slot, 0);
            self.queues.shift(slot, if used { Place::Main } else { Place::Cold });
        }
        for _ in 0..self.queues.len(Place::Main).min(n - new) {
            let Some(slot) = self.queues.oldest(Place::Main) else { break };
            self.set_uses(slot, self.uses(slot).saturating_sub(1));
            self.queues.shift(slot, Place::Main);
        }
    }

    fn coldest(&mut self, n: usize, out: &mut Vec<u32>) {
        let full = out.len().saturating_add(n);
        self.list(Place::Cold, |entry| !entry.kept(), full, out);
        self.list(Place::Small, |entry| !entry.kept(), full, out);
        for uses in 0..=USES_MAX {
            self.list(Place::Main, |entry| entry.uses() == uses, full, out);
        }
        self.list(Place::Cold, Entry::kept, full, out);
        self.list(Place::Small, Entry::kept, full, out);
    }
}
