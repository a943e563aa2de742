//! Pages that write-zeroes requests zeroed on the store, bypassing memory, and that are not stable
//! there: recorded until a flush of the store succeeds, and zeroed again if it fails. Requests for
//! part of a page zero it in memory instead.
//!
//! # Invariants
//! - A listed page that is neither dirty, under writeback nor unstable reads as zeroes, whatever
//!   the store has there after a loss: reads do not ask it. A page in one of these states is newer,
//!   and kept whole; a page that leaves them before it is stable is no longer listed.
//! - So a listed page is in memory only in one of these states: reads of it are not cached.
//! - What cannot be listed makes the shard `loose`.

use std::ops::Range;

use ebb_mem::WorkerMemory;

use super::{Shard, shard_of};
use crate::pages::{FRAME_PAGES, FramePart, PAGE_BYTES, ZEROES, each, mask, runs, within};

/// Ranges that a shard lists, and pages per range (a TiB). Beyond that nothing is repeated.
const RANGES_MAX: usize = 256;
const PAGES_MAX: u64 = 1 << 28;

/// A range of pages that are zeroes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ZeroedRange {
    pub(crate) pages: Range<u64>,
    /// The store may leave a hole.
    pub(crate) may_unmap: bool,
}

/// A shard's list; it applies to the frames of this shard.
#[derive(Debug, Default)]
pub(crate) struct ZeroedRanges {
    /// Zeroed since the last flush of the store began, and before that.
    list: Vec<ZeroedRange>,
    flushing: Vec<ZeroedRange>,
}

/// Merges adjacent and overlapping ranges, in order.
pub(crate) fn join(list: &mut Vec<ZeroedRange>) {
    list.sort_unstable_by_key(|zero| (zero.pages.start, zero.pages.end));
    list.dedup_by(|next, last| {
        let meets = next.pages.start <= last.pages.end && next.may_unmap == last.may_unmap;
        if meets {
            last.pages.end = last.pages.end.max(next.pages.end);
        }
        meets
    });
}

impl ZeroedRanges {
    fn all(&self) -> impl Iterator<Item = &ZeroedRange> {
        self.list.iter().chain(&self.flushing)
    }

    /// Removes pages from one of the lists.
    fn cut(list: &mut Vec<ZeroedRange>, removed: &Range<u64>) {
        let mut remaining = Vec::new();
        list.retain_mut(|zero| {
            let (start, end) = (zero.pages.start, zero.pages.end);
            if removed.start >= end || start >= removed.end {
                return true;
            }
            if removed.end < end {
                remaining.push(ZeroedRange { pages: removed.end..end, may_unmap: zero.may_unmap });
            }
            zero.pages.end = removed.start.max(start);
            zero.pages.end > start
        });
        list.append(&mut remaining);
    }
}

impl Shard {
    /// Pages of a frame that were zeroed bypassing memory.
    pub(crate) fn zeroed(&self, frame: u64) -> u16 {
        self.zeroed.all().fold(0, |all, zero| all | within(frame, &zero.pages))
    }

    /// Pages among `pages` of a frame that are not in memory, and known to be zeroes.
    pub(crate) fn blank(&self, frame: u64, pages: u16) -> u16 {
        if pages == 0 || !self.has_zeroed() {
            return 0;
        }
        pages & self.zeroed(frame) & !self.valid(frame)
    }

    /// Makes pages of a frame that are blank valid as zeroes, where a buffer covers them.
    pub(crate) fn clear(&mut self, worker: &WorkerMemory, frame: u64, pages: u16) {
        for page in each(pages & self.covered(frame)) {
            let from = page * PAGE_BYTES;
            let part = FramePart { frame, from, to: from + PAGE_BYTES, at: 0 };
            self.update(worker, &part, mask(page, 1), mask(page, 1), &ZEROES);
        }
    }

    /// Fills those pages among `pages` of the part that are blank in `out`, the part's bytes.
    /// Returns them.
    pub(crate) fn fill_blank(&self, part: &FramePart, pages: u16, out: &mut [u8]) -> u16 {
        let blank = self.blank(part.frame, pages);
        for (start, count) in runs(blank) {
            let range = part.clip(start, count);
            if let Some(out) = out.get_mut(range.start - part.from..range.end - part.from) {
                out.fill(0);
            }
        }
        blank
    }

    /// Whether anything is listed.
    pub(crate) fn has_zeroed(&self) -> bool {
        self.zeroed.all().next().is_some()
    }

    /// What is listed.
    pub(crate) fn zeroed_ranges(&self, out: &mut Vec<ZeroedRange>) {
        out.extend(self.zeroed.all().cloned());
    }

    fn limit_zeroed(&mut self) {
        if self.zeroed.list.len() > RANGES_MAX {
            join(&mut self.zeroed.list);
        }
        let mut longest = self.zeroed.list.iter().map(|zero| zero.pages.end - zero.pages.start);
        if self.zeroed.list.len() > RANGES_MAX || longest.any(|pages| pages > PAGES_MAX) {
            self.zeroed.list = Vec::new();
            self.loose = true;
        }
    }

    /// `pages` of a frame have newer data on the store, which is not kept.
    pub(crate) fn forget_zeroed(&mut self, frame: u64, pages: u16) {
        if self.zeroed(frame) & pages == 0 {
            return;
        }
        for (start, count) in runs(pages) {
            let start = frame * FRAME_PAGES + start as u64;
            ZeroedRanges::cut(&mut self.zeroed.list, &(start..start + count as u64));
            ZeroedRanges::cut(&mut self.zeroed.flushing, &(start..start + count as u64));
        }
        self.limit_zeroed();
    }

    /// A write of `pages` that bypassed memory has failed: those of a frame that are listed are
    /// zeroed again before the next flush. Returns them.
    pub(crate) fn keep_zeroed(&mut self, frame: u64, pages: u16) -> u16 {
        let newer = self.unsaved(frame) | self.unstable(frame);
        let kept = pages & self.zeroed(frame) & !newer;
        for (start, count) in runs(kept) {
            let start = frame * FRAME_PAGES + start as u64;
            let pages = start..start + count as u64;
            self.zeroed.list.push(ZeroedRange { pages, may_unmap: false });
        }
        self.limit_zeroed();
        kept
    }

    /// Whole pages are zeroes on the store now; copies of them that were kept for a rewrite are obsolete.
    pub(crate) fn note_zeroed(&mut self, zero: ZeroedRange) {
        if zero.pages.is_empty() || self.loose {
            self.loose |= !zero.pages.is_empty();
            return;
        }
        self.forget_unstable(&zero.pages);
        self.zeroed.list.push(zero);
        self.limit_zeroed();
    }

    /// `pages` are not to be zeroed again: a write that bypassed memory is stable, or they lie beyond a new end of the
    /// volume. It covers those in `whole`; a listed page that it covers in part cannot be zeroed again at all.
    pub(crate) fn note_written_over(
        &mut self,
        number: usize,
        pages: &Range<u64>,
        whole: &Range<u64>,
    ) {
        if !self.has_zeroed() {
            return;
        }
        for edge in [pages.start, pages.end.saturating_sub(1)] {
            let frame = edge / FRAME_PAGES;
            let own = shard_of(frame) == number && !whole.contains(&edge);
            self.loose |= own && self.zeroed(frame) & within(frame, &(edge..edge + 1)) != 0;
        }
        ZeroedRanges::cut(&mut self.zeroed.list, pages);
        ZeroedRanges::cut(&mut self.zeroed.flushing, pages);
        self.limit_zeroed();
    }

    /// A flush of the store begins.
    pub(super) fn begin_flush_of_zeroed(&mut self) {
        let mut list = std::mem::take(&mut self.zeroed.list);
        self.zeroed.flushing.append(&mut list);
    }

    /// The flush has completed.
    pub(super) fn end_flush_of_zeroed(&mut self, good: bool) {
        let mut flushing = std::mem::take(&mut self.zeroed.flushing);
        if !good {
            self.zeroed.list.append(&mut flushing);
            self.limit_zeroed();
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    fn zero(pages: Range<u64>) -> ZeroedRange {
        ZeroedRange { pages, may_unmap: true }
    }

    #[test]
    fn ranges_are_merged_and_cut() {
        let mut list = vec![zero(10..20), zero(0..5), zero(5..10), zero(30..31)];
        join(&mut list);
        assert_eq!(list, [zero(0..20), zero(30..31)]);
        ZeroedRanges::cut(&mut list, &(3..4));
        ZeroedRanges::cut(&mut list, &(29..40));
        join(&mut list);
        assert_eq!(list, [zero(0..3), zero(4..20)]);
    }

    #[test]
    fn more_ranges_than_fit_make_the_shard_loose() {
        let mut shard = Shard::new();
        for number in 0..RANGES_MAX as u64 {
            shard.note_zeroed(zero(2 * number..2 * number + 1));
        }
        assert!(!shard.loose && shard.zeroed(0) == 0x5555);
        shard.note_zeroed(zero(1_000_000..1_000_001));
        assert!(shard.loose && !shard.has_zeroed());
        let mut shard = Shard::new();
        shard.note_zeroed(zero(0..PAGES_MAX + 1));
        assert!(shard.loose);
    }
}
