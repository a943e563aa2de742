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
//! All shares and times are in pages, not in slots: a slot of 64 KiB weighs as much as sixteen of 4 KiB, or
//! else a few of the one would crowd out many of the other.
//!
//! No size is given to it: who calls `evict` decides how much there is, and the queues' shares follow
//! what is in them at the moment. So a cache that is halved at once goes on with the right shares.

use super::ghosts::{Ghosts, Print};
use super::queue::{Entry, Place, Queues, STAMPS, USES_MAX, WEIGHT_MAX};
use super::{Next, Policy, TURN};

/// Slots that one call of `evict` looks at, in each of its attempts.
const PATIENCE: u32 = 512;

/// Slots of the small queue that may be refused in one call before it looks into the main queue.
const SMALL_PATIENCE: u32 = 32;

/// The policy. The parameters are there for comparison; the defaults are what is in use:
/// `SMALL`, the small queue's share of all pages in percent; `WINDOW`, the correlation window in percent of
/// the small queue; `GHOSTS`, for how long keys are remembered: while so many pages go, in percent of all.
#[derive(Debug)]
pub struct S3Fifo<const SMALL: u32 = 10, const WINDOW: u32 = 50, const GHOSTS: u32 = 100> {
    queues: Queues,
    ghosts: Ghosts,
    /// Pages inserted so far, modulo [`STAMPS`]: the time that windows are measured in.
    inserts: u32,
    /// Pages that the small queue may hold before it is evicted from.
    small: u64,
    /// Pages inserted for which uses of a new slot do not count.
    window: u32,
    /// The most pages there have been.
    most: u64,
    /// How far the main queue was gone round: [`TURN`] for all of it.
    turned: u64,
}

/// A share of `of` in percent.
fn percent(of: u64, share: u32) -> u64 {
    of.saturating_mul(u64::from(share)) / 100
}

/// Keys to have room for with so many slots.
fn remembered<const GHOSTS: u32>(slots: u32) -> u32 {
    u32::try_from(percent(u64::from(slots), GHOSTS)).unwrap_or(u32::MAX)
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

    /// Pages in the policy: what its slots are worth.
    #[must_use]
    pub fn pages(&self) -> u64 {
        [Place::Cold, Place::Small, Place::Main].map(|place| self.queues.weight(place)).iter().sum()
    }

    /// Bytes of memory it has.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.queues.bytes() + self.ghosts.bytes()
    }

    /// Adapts the shares to what there is now.
    fn measure(&mut self) {
        let pages = self.pages();
        self.most = self.most.max(pages);
        self.small = percent(pages, SMALL).max(1);
        let window = u32::try_from(percent(self.small, WINDOW)).unwrap_or(u32::MAX);
        self.window = window.min(STAMPS / 2);
    }

    /// Takes out a slot that went for want of space, and remembers it.
    fn depart(&mut self, slot: u32) -> u32 {
        if let Some(entry) = self.queues.get(slot)
            && !entry.once()
            && entry.place() != Place::Main
        {
            self.ghosts.add(entry.print, entry.weight());
        }
        self.queues.remove(slot);
        self.measure();
        slot
    }

    /// A slot of the main queue was looked at.
    fn pass(&mut self, slot: u32) {
        let weight = self.queues.get(slot).map_or(0, |entry| u64::from(entry.weight()));
        let all = self.queues.weight(Place::Main).max(1);
        self.turned = self.turned.saturating_add(weight * TURN / all);
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
            let small = self.queues.weight(Place::Small) > self.small && refused < SMALL_PATIENCE;
            let oldest = if small { None } else { self.queues.oldest(Place::Main) };
            let slot = oldest.or_else(|| self.queues.oldest(Place::Small))?;
            let uses = self.uses(slot);
            if oldest.is_some() {
                self.pass(slot);
            }
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
            (Queues::with_capacity(slots), Ghosts::with_capacity(remembered::<GHOSTS>(slots)));
        S3Fifo { queues, ghosts, inserts: 0, small: 1, window: 0, most: 0, turned: 0 }
    }

    fn insert(&mut self, slot: u32, key: u64, pages: u32, cold: bool) {
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
        self.inserts = self.inserts.wrapping_add(pages.clamp(1, WEIGHT_MAX)) % STAMPS;
        self.queues.insert(slot, place, print, pages, self.inserts);
        self.measure();
        let remembered = remembered::<GHOSTS>(self.queues.capacity());
        if self.ghosts.capacity() < usize::try_from(remembered).unwrap_or(0) {
            // Seldom, since it doubles; the few that went from a cache that grows are not missed.
            self.ghosts = Ghosts::with_capacity(remembered);
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
                self.ghosts.add(entry.print, entry.weight());
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
        // Windows pass with time, too: as if as many were inserted, of the size there is.
        let pages = (self.pages() / u64::from(self.len().max(1))).max(1);
        let passed = u64::from(n).saturating_mul(pages) % u64::from(STAMPS);
        self.inserts =
            self.inserts.wrapping_add(u32::try_from(passed).unwrap_or_default()) % STAMPS;
        let mut left = n;
        while left > 0 && self.queues.weight(Place::Small) > self.small {
            let Some(slot) = self.queues.oldest(Place::Small) else { break };
            let used = self.uses(slot) > 0;
            self.set_uses(slot, 0);
            self.queues.shift(slot, if used { Place::Main } else { Place::Cold });
            left -= 1;
        }
        for _ in 0..self.queues.len(Place::Main).min(left) {
            let Some(slot) = self.queues.oldest(Place::Main) else { break };
            self.set_uses(slot, self.uses(slot).saturating_sub(1));
            self.queues.shift(slot, Place::Main);
        }
    }

    fn next(&self) -> Next {
        let weight = |place| self.queues.weight(place);
        if weight(Place::Cold) > 0 {
            return Next::Cold(weight(Place::Cold));
        }
        match weight(Place::Small).saturating_sub(self.small) {
            0 if weight(Place::Main) > 0 => Next::Used(self.turned),
            0 if weight(Place::Small) > 0 => Next::New(weight(Place::Small)),
            0 => Next::Nothing,
            above => Next::New(above),
        }
    }

    fn catch_up(&mut self, turned: u64) {
        self.turned = self.turned.max(turned);
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
