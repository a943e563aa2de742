//! Pages that write-zeroes requests zeroed on the store, bypassing memory, and that are not stable there:
//! recorded until a flush of the store succeeds, and zeroed again if it fails.
//!
//! # Invariants
//! - A listed page that is neither dirty, under writeback nor unstable reads as zeroes, whatever a failed
//!   flush left on the store. A page in one of these states is newer, and kept whole.
//! - So a listed page is in memory only in one of these states: reads of it are not cached.
//! - What cannot be listed makes the shard `loose`.

use std::ops::Range;

use super::{Shard, shard_of};
use crate::pages::{FRAME_PAGES, within};

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
