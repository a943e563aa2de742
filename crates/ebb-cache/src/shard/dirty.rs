//! Dirty pages of a shard: marking them, taking them for writeback, and recording the result.

use std::ops::Range;

use super::{QUEUED, Shard, shard_of};
use crate::inflight::Wakers;
use crate::pages::{FRAME_PAGES, PAGE_BYTES, runs, within};

/// Clean entries that one write removes from the list of dirty frames, at most.
const CLEAN_AT_ONCE: usize = 32;

/// A frame that became dirty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DirtyFrame {
    pub(crate) frame: u64,
    /// Milliseconds since the cache was started.
    pub(crate) since: u64,
}

/// The frames of a range of pages, if they are few enough to check each.
pub(crate) fn few_frames(pages: &Range<u64>) -> Option<Range<u64>> {
    let frames = pages.start / FRAME_PAGES..pages.end.div_ceil(FRAME_PAGES);
    (frames.end.saturating_sub(frames.start) <= 256).then_some(frames)
}

impl Shard {
    /// Pages of `frame` that may be taken for writeback: dirty, and no older copy under writeback.
    pub(crate) fn ready(&self, frame: u64) -> u16 {
        self.fold(frame, |slot| slot.dirty) & !self.inflight.cleaning(frame, u16::MAX).0
    }

    /// Pages of `frame` that the store does not have yet.
    pub(crate) fn unsaved(&self, frame: u64) -> u16 {
        self.fold(frame, super::BufferSlot::unsaved) | self.inflight.cleaning(frame, u16::MAX).0
    }

    /// How many of `pages` of `frame` the [`WritebackControl`](crate::WritebackControl) counts as dirty.
    pub(crate) fn dirty_of(&self, frame: u64, pages: u16) -> u64 {
        u64::from((self.fold(frame, |slot| slot.dirty) & pages).count_ones())
    }

    /// Marks the pages of `frame` that are valid and wired as dirty. Returns the pages marked, and those of
    /// them that were clean before.
    pub(crate) fn mark_dirty(&mut self, frame: u64, pages: u16, now: u64) -> (u16, u16) {
        let was = self.fold(frame, |slot| slot.dirty);
        let (mut marked, mut at) = (0, self.first(frame));
        while let Some(slot) = self.slots.get_mut(at) {
            let here = pages & slot.valid & !slot.unwired();
            self.tally.dirty += u64::from((here & !slot.unsaved()).count_ones());
            slot.dirty |= here;
            marked |= here;
            at = slot.next;
        }
        if was == 0 && marked != 0 {
            self.aging.push_back(DirtyFrame { frame, since: now });
            self.prune_aging();
        }
        (marked, marked & !was)
    }

    /// Keeps the list of dirty frames in proportion to the dirty pages.
    fn prune_aging(&mut self) {
        let most = usize::try_from(self.tally.dirty).unwrap_or(usize::MAX).saturating_mul(4);
        // A few at a time from the front: after a flush all of a long list is clean.
        if self.aging.len() <= most.saturating_add(64) || self.drop_clean(CLEAN_AT_ONCE) > 0 {
            return;
        }
        let mut list = std::mem::take(&mut self.aging);
        list.retain(|aged| self.fold(aged.frame, |slot| slot.dirty) != 0);
        list.make_contiguous().sort_unstable();
        let mut last = None;
        list.retain(|aged| last.replace(aged.frame) != Some(aged.frame));
        list.make_contiguous().sort_unstable_by_key(|aged| aged.since);
        self.aging = list;
    }

    /// Removes clean frames from the front of the list, at most `most`. Returns how many.
    pub(crate) fn drop_clean(&mut self, most: usize) -> usize {
        for dropped in 0..most {
            let front = self.aging.front();
            if front.is_none_or(|aged| self.fold(aged.frame, |slot| slot.dirty) != 0) {
                return dropped;
            }
            self.aging.pop_front();
        }
        most
    }

    /// The frame that has been dirty for longest.
    pub(crate) fn oldest(&mut self) -> Option<DirtyFrame> {
        while let Some(&aged) = self.aging.front() {
            if self.fold(aged.frame, |slot| slot.dirty) != 0 {
                return Some(aged);
            }
            self.aging.pop_front();
        }
        None
    }

    /// Adds the frames with pages of a range that the store may lack, in no order; some may be clean. Returns
    /// how many were visited.
    pub(crate) fn unsaved_frames(&self, pages: &Range<u64>, out: &mut Vec<u64>) -> usize {
        let aged = self.aging.iter().map(|aged| aged.frame);
        let all = aged.chain(self.inflight.cleaned_frames());
        out.extend(all.filter(|&frame| within(frame, pages) != 0));
        self.listed()
    }

    /// Length of the list of dirty frames.
    pub(crate) fn listed(&self) -> usize {
        self.aging.len()
    }

    /// Whether the store lacks any page of a range; `number` is this shard's.
    pub(crate) fn has_unsaved(&self, pages: &Range<u64>, number: usize) -> bool {
        let meets = |frame: u64| {
            let pages = within(frame, pages);
            pages != 0 && self.unsaved(frame) & pages != 0
        };
        match few_frames(pages) {
            Some(mut frames) => frames.any(|frame| shard_of(frame) == number && meets(frame)),
            None => {
                let mut cleaned = self.inflight.cleaned_frames();
                self.aging.iter().any(|aged| meets(aged.frame)) || cleaned.any(meets)
            }
        }
    }

    /// Copies `pages` of `frame`, one run of [`Shard::ready`] pages, to `out`, and marks them as under
    /// writeback. Returns the number for ending that.
    pub(crate) fn take_dirty(&mut self, frame: u64, pages: u16, out: &mut [u8]) -> u64 {
        let from = usize::try_from(pages.trailing_zeros()).unwrap_or(0);
        let mut at = self.first(frame);
        while let Some(slot) = self.slots.get_mut(at) {
            let here = slot.dirty & pages;
            let base = usize::from(slot.base);
            for (start, count) in runs(here) {
                let bytes =
                    slot.buffer.as_ref().and_then(|b| b.bytes(start - base..start - base + count));
                debug_assert!(bytes.is_some(), "dirty pages are wired");
                let Some(bytes) = bytes else { continue };
                // The last page of a volume may be short.
                let place = (start - from) * PAGE_BYTES;
                let length = bytes.len().min(out.len().saturating_sub(place));
                out[place..place + length].copy_from_slice(&bytes[..length]);
            }
            slot.dirty &= !here;
            slot.cleaning |= here;
            at = slot.next;
        }
        self.inflight.begin_clean(frame, pages)
    }

    /// The writeback of `pages` has completed: the store has them if `saved`, otherwise they are dirty again.
    /// Pages that are not dirty become unstable with `keep`. Returns how many had been made dirty again
    /// before.
    pub(crate) fn end_clean(
        &mut self,
        frame: u64,
        (id, pages): (u64, u16),
        (saved, keep): (bool, bool),
        now: u64,
        wakers: &mut Wakers,
    ) -> u64 {
        let was = self.fold(frame, |slot| slot.dirty);
        let (mut dirty, mut twice, mut at) = (0, 0, self.first(frame));
        while let Some(slot) = self.slots.get_mut(at) {
            let here = slot.cleaning & pages;
            slot.cleaning &= !here;
            twice += u64::from((here & slot.dirty).count_ones());
            if saved {
                self.tally.dirty -= u64::from((here & !slot.dirty).count_ones());
            } else {
                slot.dirty |= here;
            }
            dirty |= slot.dirty;
            // Clean pages may be lent.
            if here != 0 && slot.flags & QUEUED == 0 {
                slot.flags |= QUEUED;
                self.wired.push_back(at);
            }
            at = slot.next;
        }
        if was == 0 && dirty != 0 {
            self.aging.push_front(DirtyFrame { frame, since: now });
        }
        if saved {
            self.note_saved(frame, pages, keep);
        }
        self.inflight.end_clean(id, wakers);
        twice
    }
}
