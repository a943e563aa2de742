//! Lending: which buffers of a shard go to the kernel, and finding out what it took.

use ebb_mem::{Memory, Offers, Residency, Worker};

use super::{Batch, COLD, QUEUED, Shard};
use crate::policy::Policy;

/// Most buffers that are lent, and most that are looked at, in one hold of the lock.
const LEND_AT_ONCE: usize = 64;
const LOOK_AT_ONCE: usize = 256;
/// Slots a scan looks at in one hold of the lock.
const SCAN_AT_ONCE: u32 = 256;

/// What [`Shard::lend`] came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lent {
    /// Entries of the queue that were looked at.
    pub(crate) looked: usize,
    /// Pages lent.
    pub(crate) pages: u64,
}

/// What [`Shard::scan`] came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scanned {
    /// Pages found taken.
    pub(crate) taken: u64,
    /// The end of the table was reached.
    pub(crate) ended: bool,
}

impl Shard {
    /// Buffers that may be wired.
    pub(crate) fn wired_buffers(&self) -> usize {
        self.wired.len()
    }

    /// Pages lent that are not known to be taken.
    pub(crate) fn lent_pages(&self) -> u64 {
        self.tally.lent - self.tally.lost
    }

    /// Lends clean buffers that were not used for `idle` ticks (one-pass data at once; with `all` every
    /// one). Looks at no more than `most` entries of the queue.
    pub(crate) fn lend(
        &mut self,
        worker: &Worker,
        tick: u8,
        idle: u8,
        all: bool,
        most: usize,
    ) -> Lent {
        let mut result = Lent::default();
        let mut lent = [0u32; LEND_AT_ONCE];
        let mut count = 0;
        let most = most.min(self.wired.len()).min(LOOK_AT_ONCE);
        while result.looked < most && count < LEND_AT_ONCE {
            let Some(at) = self.wired.pop_front() else { break };
            result.looked += 1;
            let Some(slot) = self.slots.get_mut(at) else { continue };
            slot.flags &= !QUEUED;
            let free = slot.covers() & !slot.kept() & !slot.lent();
            let Some(buffer) = slot.buffer.as_mut().filter(|_| free != 0) else { continue };
            let rested = slot.flags & COLD != 0 || tick.wrapping_sub(slot.tick) >= idle;
            if !all && !rested {
                slot.flags |= QUEUED;
                self.wired.push_back(at);
                continue;
            }
            let pages = u64::from(buffer.arm(worker, free >> slot.base).count_ones());
            if pages > 0 {
                self.tally.lent += pages;
                result.pages += pages;
                lent[count] = at;
                count += 1;
            }
        }
        if count > 0 {
            let mut offers = Offers::new(worker.memory());
            for &at in &lent[..count] {
                if let Some(buffer) = self.slots.get(at).and_then(|slot| slot.buffer.as_ref()) {
                    offers.add(buffer);
                }
            }
        }
        result
    }

    /// Looks for lent pages that the kernel took, from where the last call ended. Buffers of which
    /// nothing is left go to `batch`.
    pub(crate) fn scan(
        &mut self,
        memory: &Memory,
        residency: &mut Residency,
        batch: &mut Batch,
    ) -> Scanned {
        let numbers = self.slots.numbers();
        if self.hand >= numbers {
            self.hand = 0;
        }
        let end = self.hand.saturating_add(SCAN_AT_ONCE).min(numbers);
        let mut taken = 0;
        while self.hand < end && !batch.is_full() {
            let at = self.hand;
            self.hand += 1;
            let Some(slot) = self.slots.get(at) else { break };
            let lent = slot.lent() & !slot.lost;
            let Some(buffer) = slot.buffer.as_ref().filter(|_| lent != 0) else { continue };
            let mut gone = lent & (residency.maybe_gone(memory, buffer) << slot.base);
            if gone != 0 {
                gone &= !(buffer.resident(memory) << slot.base);
            }
            if gone != 0 {
                taken += u64::from(gone.count_ones());
                self.lose(at, gone);
            }
            if self.slots.get(at).is_some_and(|slot| slot.lost == slot.covers()) {
                self.policy.lose(at);
                self.detach(at, batch);
            }
        }
        self.tally.reclaimed += taken;
        let ended = self.hand >= numbers;
        if ended {
            self.hand = 0;
        }
        Scanned { taken, ended }
    }
}
