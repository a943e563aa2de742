//! Lending: which buffers of a shard are unwired and offered to the advisor, which marks them `MADV_FREE`, and detecting
//! what the kernel discarded.

use ebb_mem::{Memory, Offers, Residency, WorkerMemory};

use super::{COLD, FreeBatch, QUEUED, Shard};
use crate::policy::EvictionPolicy;

/// Buffers that are lent, and that are checked, under one acquisition of the lock.
const LEND_AT_ONCE: usize = 64;
const LOOK_AT_ONCE: usize = 256;
/// Slots that a scan checks under one acquisition of the lock.
const SCAN_AT_ONCE: u32 = 256;

/// Result of [`Shard::lend`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LendOutcome {
    /// Queue entries checked.
    pub(crate) checked: usize,
    /// Pages offered.
    pub(crate) pages: u64,
}

/// Result of [`Shard::scan`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScanOutcome {
    /// Pages found discarded.
    pub(crate) taken: u64,
    /// The end of the table was reached.
    pub(crate) ended: bool,
}

impl Shard {
    /// Buffers that may be wired.
    pub(crate) fn wired_buffers(&self) -> usize {
        self.wired.len()
    }

    /// Pages that are offered or lent, and not known to be discarded.
    pub(crate) fn lent_pages(&self) -> u64 {
        self.tally.lent - self.tally.lost
    }

    /// Unwires and offers clean buffers that were not used for `idle` ticks (one-pass data at once; with `all` every one).
    /// Checks at most `most` entries of the queue.
    pub(crate) fn lend(
        &mut self,
        worker: &WorkerMemory,
        tick: u8,
        idle: u8,
        all: bool,
        most: usize,
    ) -> LendOutcome {
        let mut result = LendOutcome::default();
        let mut lent = [0u32; LEND_AT_ONCE];
        let mut count = 0;
        let most = most.min(self.wired.len()).min(LOOK_AT_ONCE);
        while result.checked < most && count < LEND_AT_ONCE {
            let Some(at) = self.wired.pop_front() else { break };
            result.checked += 1;
            let Some(slot) = self.slots.get_mut(at) else { continue };
            slot.flags &= !QUEUED;
            let free = slot.covers() & !slot.must_stay() & !slot.unwired();
            let Some(buffer) = slot.buffer.as_mut().filter(|_| free != 0) else { continue };
            let rested = slot.flags & COLD != 0 || tick.wrapping_sub(slot.tick) >= idle;
            if !all && !rested {
                slot.flags |= QUEUED;
                self.wired.push_back(at);
                continue;
            }
            let pages = u64::from(buffer.unwire(worker, free >> slot.base).count_ones());
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

    /// Checks lent pages for those that the kernel discarded, from where the last call ended. Buffers without
    /// any remaining page go to `batch`.
    pub(crate) fn scan(
        &mut self,
        memory: &Memory,
        residency: &mut Residency,
        batch: &mut FreeBatch,
    ) -> ScanOutcome {
        let numbers = self.slots.numbers();
        if self.scan_position >= numbers {
            self.scan_position = 0;
        }
        let end = self.scan_position.saturating_add(SCAN_AT_ONCE).min(numbers);
        let mut taken = 0;
        while self.scan_position < end && !batch.is_full() {
            let at = self.scan_position;
            self.scan_position += 1;
            let Some(slot) = self.slots.get(at) else { break };
            let unwired = slot.unwired() & !slot.lost;
            let Some(buffer) = slot.buffer.as_ref().filter(|_| unwired != 0) else { continue };
            let mut discarded = unwired & (residency.maybe_gone(memory, buffer) << slot.base);
            if discarded != 0 {
                discarded &= !(buffer.resident(memory) << slot.base);
            }
            if discarded != 0 {
                taken += u64::from(discarded.count_ones());
                self.lose(at, discarded);
            }
            if self.slots.get(at).is_some_and(|slot| slot.lost == slot.covers()) {
                self.policy.lose(at);
                self.detach(at, batch);
            }
        }
        self.tally.reclaimed += taken;
        let ended = self.scan_position >= numbers;
        if ended {
            self.scan_position = 0;
        }
        ScanOutcome { taken, ended }
    }
}
