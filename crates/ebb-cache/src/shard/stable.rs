//! Pages that were written to the store and are not stable there: kept in memory until a flush of the store
//! succeeds, and written again if it fails.
//!
//! # Invariants
//! - An unstable page is valid and wired, and its slot is not evicted. It may be dirty, too.
//! - `unstable` marks pages written since the last flush of the store began, `flushing` pages written before
//!   that.
//! - Data that is on the store, not stable and not kept makes the shard `loose`: a failed flush may have lost
//!   it, and it cannot be written again. After a loss that cannot be repaired every shard is, and nothing is marked.

use super::{BufferSlot, QUEUED, Shard, ZeroedRanges, few_frames};
use crate::pages::{PAGE_BYTES, runs, within};

impl BufferSlot {
    /// Pages that are written again if a flush fails.
    pub(super) fn unstable(&self) -> u16 {
        self.unstable | self.flushing
    }

    /// Pages that must stay in memory.
    pub(super) fn must_stay(&self) -> u16 {
        self.unsaved() | self.unstable()
    }
}

impl Shard {
    /// Changes the marks of a frame's slots and updates the counters.
    fn mark(&mut self, frame: u64, change: impl Fn(&mut BufferSlot)) {
        let mut at = self.first(frame);
        while let Some(slot) = self.slots.get_mut(at) {
            let before = slot.unstable().count_ones();
            change(slot);
            let after = slot.unstable().count_ones();
            self.tally.unstable =
                (self.tally.unstable + u64::from(after)).saturating_sub(u64::from(before));
            // Pages that need not be kept may be lent.
            if after < before && slot.flags & QUEUED == 0 {
                slot.flags |= QUEUED;
                self.wired.push_back(at);
            }
            at = slot.next;
        }
    }

    /// Pages of `frame` that are on the store and not stable.
    pub(crate) fn unstable(&self, frame: u64) -> u16 {
        self.fold(frame, BufferSlot::unstable)
    }

    /// Pages of a frame have been written to the store. With `keep` they are kept until it is flushed.
    pub(super) fn note_saved(&mut self, frame: u64, pages: u16, keep: bool) {
        // Pages dropped meanwhile cannot be written again.
        let kept = if keep { pages & self.valid(frame) } else { 0 };
        if pages & !kept != 0 {
            self.loose = true;
            self.forget_zeroed(frame, pages & !kept);
        }
        self.mark_unstable(frame, kept);
    }

    fn mark_unstable(&mut self, frame: u64, pages: u16) {
        if pages == 0 {
            return;
        }
        let was = self.fold(frame, |slot| slot.unstable);
        self.mark(frame, |slot| slot.unstable |= slot.valid & slot.covers() & pages);
        if was == 0 {
            self.kept.push(frame);
            self.prune_kept();
        }
    }

    /// A request that bypassed memory has failed: the store may have anything in `pages` of a
    /// frame. Those that are not stable keep their content, and are written again before the next
    /// flush. Returns them.
    pub(crate) fn keep_unstable(&mut self, frame: u64, pages: u16) -> u16 {
        let kept = pages & self.unstable(frame);
        self.mark_unstable(frame, kept);
        kept
    }

    /// Keeps the list of frames in proportion to the unstable pages.
    fn prune_kept(&mut self) {
        let most = usize::try_from(self.tally.unstable).unwrap_or(usize::MAX).saturating_mul(2);
        if self.kept.len() <= most.saturating_add(64) {
            return;
        }
        let mut list = std::mem::take(&mut self.kept);
        list.sort_unstable();
        list.dedup();
        list.retain(|&frame| self.fold(frame, |slot| slot.unstable) != 0);
        self.kept = list;
    }

    /// Frames with pages that became unstable since the last flush of the store began.
    pub(crate) fn kept_frames(&self) -> usize {
        self.kept.len()
    }

    /// A flush of the store begins: what is unstable now will be stable if it succeeds. At most `most` frames
    /// per call.
    pub(crate) fn begin_flush(&mut self, most: usize) {
        for _ in 0..most {
            let Some(frame) = self.kept.pop() else {
                self.loose_flushing |= std::mem::take(&mut self.loose);
                self.begin_flush_of_zeroed();
                return;
            };
            self.mark(frame, |slot| {
                slot.flushing |= slot.unstable;
                slot.unstable = 0;
            });
            self.kept_flushing.push(frame);
        }
    }

    /// The flush has completed. If it failed, data that bypassed memory may be lost. [`Shard::settle_flush`]
    /// does the remainder.
    pub(crate) fn end_flush(&mut self, good: bool) {
        self.loose |= std::mem::take(&mut self.loose_flushing) && !good;
        self.end_flush_of_zeroed(good);
    }

    /// After a flush has completed: its pages are stable, or unstable as before if it was not `good`. At most
    /// `most` frames per call. Returns how many: fewer than `most` when all are done.
    pub(crate) fn settle_flush(&mut self, good: bool, most: usize) -> usize {
        for settled in 0..most {
            let Some(frame) = self.kept_flushing.pop() else {
                self.kept_flushing = Vec::new();
                self.prune_kept();
                return settled;
            };
            self.mark(frame, |slot| {
                slot.unstable |= if good { 0 } else { slot.flushing };
                slot.flushing = 0;
            });
            if !good {
                self.kept.push(frame);
            }
        }
        most
    }

    /// No loss is repaired any more: pages that the store has need not be kept, and zeroes are not repeated. At most
    /// `most` frames per call. Returns how many: fewer than `most` when all are done.
    pub(crate) fn give_up_repair(&mut self, most: usize) -> usize {
        self.loose = true;
        self.zeroed = ZeroedRanges::default();
        for done in 0..most {
            let Some(frame) = self.kept.pop().or_else(|| self.kept_flushing.pop()) else {
                (self.kept, self.kept_flushing) = (Vec::new(), Vec::new());
                return done;
            };
            self.mark(frame, |slot| (slot.unstable, slot.flushing) = (0, 0));
        }
        most
    }

    /// Frames with pages that are not stable.
    pub(crate) fn unstable_frames(&self, out: &mut Vec<u64>) {
        out.extend(self.kept.iter().chain(&self.kept_flushing));
    }

    /// Pages whose content no longer matters need not be kept.
    pub(crate) fn forget_unstable(&mut self, pages: &std::ops::Range<u64>) {
        let mut frames = Vec::new();
        match few_frames(pages) {
            Some(few) => frames.extend(few),
            None => {
                self.unstable_frames(&mut frames);
                frames.retain(|&frame| within(frame, pages) != 0);
            }
        }
        for frame in frames {
            let obsolete = within(frame, pages);
            if obsolete != 0 {
                self.mark(frame, |slot| {
                    slot.unstable &= !obsolete;
                    slot.flushing &= !obsolete;
                });
            }
        }
    }

    /// Copies `pages` of `frame`, one run of unstable pages that are neither dirty nor under writeback, to
    /// `out`, and marks them as under writeback. Returns the number for ending that.
    pub(crate) fn take_unstable(&mut self, frame: u64, pages: u16, out: &mut [u8]) -> u64 {
        let from = usize::try_from(pages.trailing_zeros()).unwrap_or(0);
        let mut at = self.first(frame);
        while let Some(slot) = self.slots.get_mut(at) {
            let here = slot.unstable() & pages;
            let base = usize::from(slot.base);
            for (start, count) in runs(here) {
                let bytes =
                    slot.buffer.as_ref().and_then(|b| b.bytes(start - base..start - base + count));
                debug_assert!(bytes.is_some(), "unstable pages are wired");
                let Some(bytes) = bytes else { continue };
                // The last page of a volume may be short.
                let place = (start - from) * PAGE_BYTES;
                let length = bytes.len().min(out.len().saturating_sub(place));
                out[place..place + length].copy_from_slice(&bytes[..length]);
            }
            slot.cleaning |= here;
            self.tally.dirty += u64::from(here.count_ones());
            at = slot.next;
        }
        self.inflight.begin_clean(frame, pages)
    }

    /// The pages were rewritten, or that failed: they are unstable as before and no longer under writeback.
    pub(crate) fn end_rewrite(
        &mut self,
        frame: u64,
        (id, pages): (u64, u16),
        wakers: &mut crate::inflight::Wakers,
    ) {
        let mut at = self.first(frame);
        while let Some(slot) = self.slots.get_mut(at) {
            let here = slot.cleaning & pages;
            slot.cleaning &= !here;
            self.tally.dirty -= u64::from((here & !slot.dirty).count_ones());
            at = slot.next;
        }
        self.inflight.end_clean(id, wakers);
    }
}
