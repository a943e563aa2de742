//! Address space in use: which parts of the arena may be touched at all.
//!
//! The reservation is made without access, so that no kernel charges for it (`vm.overcommit_memory=2` and
//! `RLIMIT_DATA` count what could be written, not what is). A **chunk**, some consecutive extents, is
//! *opened* before the first of them is taken and, where the kernel charges, *closed* when nothing is left
//! in any. Each is one system call, made with the books unlocked; meanwhile the chunk is neither open nor
//! closed, and nobody takes from it.
//!
//! Invariants: only extents of open chunks are in [`Arena::free`] or in use; a chunk that is being closed
//! has no page in any state. There are at most [`CHUNKS`] of them, which bounds the mappings that the
//! process has because of them, however they are scattered: `vm.max_map_count` is 65,530 by default.

use super::{Arena, Kind};
use crate::bits::Extents;
use crate::class::EXTENT_PAGES;
use crate::sys::Span;

/// Most chunks of an arena. Each has one mapping here and one of the saved words at most.
const CHUNKS: usize = 4096;

/// See the module.
pub(super) struct Chunks {
    /// Extents in a chunk.
    pub(super) extents: usize,
    /// To be opened when there is no room in the others.
    pub(super) closed: Extents,
    /// Being opened or closed, or lost.
    away: Extents,
    /// Open ones in which the last page may have been returned.
    empty: Extents,
    /// How many are being closed.
    closing: usize,
    /// Whether closing has a use here.
    closes: bool,
}

/// Chunks that are being opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Opening {
    first: usize,
    /// Bit per chunk from the first on; the largest run has 32 extents.
    which: u64,
    extents: usize,
}

impl Opening {
    fn chunks(self) -> impl Iterator<Item = usize> {
        (0..64).filter(move |bit| self.which >> bit & 1 == 1).map(move |bit| self.first + bit)
    }

    /// What to open.
    pub(crate) fn spans(self) -> impl Iterator<Item = Span> {
        let pages = self.extents * EXTENT_PAGES;
        self.chunks().map(move |chunk| Span { page: chunk * pages, pages })
    }
}

/// A chunk that is being closed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Closing {
    chunk: usize,
    pub(crate) span: Span,
}

/// What the attempt to close a chunk came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closed {
    Yes,
    /// The kernel refused; it is as it was.
    No,
    /// Something else may be at these addresses now: they are not used again.
    Lost,
}

impl Chunks {
    /// Everything is open and stays so.
    pub(super) fn none() -> Chunks {
        let none = || Extents::new(0);
        let (closed, away, empty) = (none(), none(), none());
        Chunks { extents: 1, closed, away, empty, closing: 0, closes: false }
    }
}

impl Arena {
    /// Extents in a chunk of an arena of so many.
    pub(crate) fn chunk_extents(total: usize) -> usize {
        total.div_ceil(CHUNKS).next_power_of_two()
    }

    /// Closes everything, before anything is taken: chunks of `extents` extents, which divides both
    /// regions. With `closes` those that are empty are closed again.
    pub(crate) fn close_all(&mut self, extents: usize, closes: bool) {
        debug_assert!(self.small.is_multiple_of(extents));
        let count = self.extents.len() / extents;
        let mut closed = Extents::new(count);
        (0..count).for_each(|chunk| closed.insert(chunk));
        let (away, empty) = (Extents::new(count), Extents::new(count));
        self.free.clear();
        self.chunks = Chunks { extents, closed, away, empty, closing: 0, closes };
    }

    /// Pages in open chunks.
    pub(crate) fn open_pages(&self) -> usize {
        let shut = (self.chunks.closed.len() + self.chunks.away.len()) * self.chunks.extents;
        (self.extents.len() - shut) * EXTENT_PAGES
    }

    fn is_closed(&self, extent: usize) -> bool {
        let chunk = extent / self.chunks.extents;
        !self.chunks.closed.is_empty() && self.chunks.closed.contains(chunk)
    }

    /// Whether `need` extents in a row can be had in a region by opening some.
    pub(super) fn can_open(&mut self, need: usize, huge: bool) -> bool {
        self.openable(need, huge).is_some()
    }

    /// The first of `need` extents in a row, each free or in a closed chunk, one of which is closed.
    fn openable(&mut self, need: usize, huge: bool) -> Option<usize> {
        let (mut from, end) = if huge { (self.small, self.extents.len()) } else { (0, self.small) };
        loop {
            let size = self.chunks.extents;
            let closed = self.chunks.closed.first_from(from / size)?;
            if closed * size >= end {
                return None;
            }
            // Free extents right before it count, too.
            let mut first = (closed * size).max(from);
            while first > from && first + need > closed * size + 1 && self.is_idle(first - 1) {
                first -= 1;
            }
            if first + need > end {
                return None;
            }
            let blocked = (first..first + need)
                .rev()
                .find(|&extent| !self.is_closed(extent) && !self.is_idle(extent));
            match blocked {
                Some(extent) => from = extent + 1,
                None => return Some(first),
            }
        }
    }

    fn is_idle(&mut self, extent: usize) -> bool {
        self.free.contains(extent) && self.extent(extent).advising.is_empty()
    }

    /// Begins to open what `need` extents in a row take; `None`: there is no address space left.
    pub(crate) fn open_begin(&mut self, need: usize, huge: bool) -> Option<Opening> {
        let start = self.openable(need, huge)?;
        let size = self.chunks.extents;
        let (first, last) = (start / size, (start + need - 1) / size);
        let mut which = 0;
        for chunk in first..=last {
            if self.chunks.closed.contains(chunk) {
                self.chunks.closed.remove(chunk);
                self.chunks.away.insert(chunk);
                which |= 1 << (chunk - first);
            }
        }
        Some(Opening { first, which, extents: size })
    }

    /// The call for one of the spans of an [`Opening`] is back.
    pub(crate) fn open_end(&mut self, span: Span, done: bool) {
        let size = self.chunks.extents;
        let chunk = span.page / (size * EXTENT_PAGES);
        self.chunks.away.remove(chunk);
        if done {
            (chunk * size..(chunk + 1) * size).for_each(|extent| self.free.insert(extent));
        } else {
            self.chunks.closed.insert(chunk);
        }
    }

    /// The last pages of an extent may have been returned.
    pub(super) fn emptied(&mut self, extent: usize) {
        if self.chunks.closes && self.is_blank(extent) {
            self.chunks.empty.insert(extent / self.chunks.extents);
        }
    }

    /// Free, and no page in any state.
    fn is_blank(&self, extent: usize) -> bool {
        let blank = self.extents[extent]
            .as_ref()
            .is_none_or(|x| x.kind == Kind::Free && x.warm().is_empty() && x.advising.is_empty());
        blank && self.free.contains(extent)
    }

    /// Whether a chunk waits to be closed.
    pub(crate) fn may_close(&self) -> bool {
        !self.chunks.empty.is_empty()
    }

    /// Whether a chunk is being closed.
    pub(super) fn closing(&self) -> bool {
        self.chunks.closing > 0
    }

    /// Begins to close a chunk that waits for it. `None`: none is empty after all.
    pub(crate) fn close_begin(&mut self) -> Option<Closing> {
        let size = self.chunks.extents;
        while let Some(chunk) = self.chunks.empty.first_from(0) {
            self.chunks.empty.remove(chunk);
            let extents = chunk * size..(chunk + 1) * size;
            if extents.clone().all(|extent| self.is_blank(extent)) {
                extents.for_each(|extent| self.free.remove(extent));
                self.chunks.away.insert(chunk);
                self.chunks.closing += 1;
                let pages = size * EXTENT_PAGES;
                return Some(Closing { chunk, span: Span { page: chunk * pages, pages } });
            }
        }
        None
    }

    /// The call that closes it is back.
    pub(crate) fn close_end(&mut self, closing: Closing, closed: Closed) {
        self.chunks.closing -= 1;
        match closed {
            Closed::Yes => {
                self.chunks.away.remove(closing.chunk);
                self.chunks.closed.insert(closing.chunk);
            }
            Closed::No => self.open_end(closing.span, true),
            Closed::Lost => {}
        }
    }

    /// Whether an extent that is nobody's is not free because its chunk is not open.
    #[cfg(test)]
    pub(super) fn is_shut(&self, extent: usize) -> bool {
        let chunk = extent / self.chunks.extents;
        self.is_closed(extent) || (!self.chunks.away.is_empty() && self.chunks.away.contains(chunk))
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;
    use crate::arena::{Give, Shortage};
    use crate::sys::{Advice, BATCH};

    const CLASS: usize = 8;

    fn arena(small: usize, huge: usize) -> Arena {
        let mut arena = Arena::new(small, huge, usize::MAX / 2, true);
        arena.close_all(4, true);
        arena
    }

    fn open(arena: &mut Arena, need: usize, huge: bool) -> Vec<usize> {
        let spans: Vec<_> = arena.open_begin(need, huge).unwrap().spans().collect();
        spans.iter().for_each(|&span| arena.open_end(span, true));
        arena.check();
        spans.into_iter().map(|span| span.page / (4 * EXTENT_PAGES)).collect()
    }

    fn advise(arena: &mut Arena) {
        let mut spans = [Span::default(); BATCH];
        loop {
            let (count, advice) = arena.claim(&mut spans);
            if count == 0 {
                return;
            }
            spans[..count].iter().for_each(|&span| arena.complete(span, advice, true));
        }
    }

    #[test]
    fn nothing_is_taken_before_it_is_open_and_empty_chunks_are_closed_again() {
        let mut arena = arena(8, 4);
        assert_eq!(arena.open_pages(), 0);
        assert_eq!(arena.take(CLASS), Err(Shortage::Shut));
        assert_eq!(open(&mut arena, 1, false), [0]);
        assert_eq!(arena.open_pages(), 4 * EXTENT_PAGES);
        let pages: Vec<_> = (0..8).map(|_| arena.take(CLASS).unwrap()).collect();
        assert!(pages.iter().all(|&page| page < 4 * EXTENT_PAGES));
        assert_eq!(arena.take(CLASS), Err(Shortage::Shut));
        // Opened by one, and the kernel refuses: it may be tried again.
        let refused = arena.open_begin(1, false).unwrap();
        refused.spans().for_each(|span| arena.open_end(span, false));
        assert_eq!(arena.take(CLASS), Err(Shortage::Shut));
        assert_eq!(open(&mut arena, 1, false), [1]);
        // While the last one is being opened there is nothing left to open, and nothing to take.
        let more: Vec<_> = (0..8).map(|_| arena.take(CLASS).unwrap()).collect();
        assert_eq!(arena.take(CLASS), Err(Shortage::Budget), "of small pages there is no more");

        // All of the first chunk goes back, but is only lent at first.
        pages.iter().for_each(|&page| arena.give(page, CLASS, Give::Lend));
        advise(&mut arena);
        assert!(!arena.may_close(), "lent memory may still be there");
        arena.offer_free(Advice::Return);
        advise(&mut arena);
        assert!(arena.may_close() && !arena.settled());
        let closing = arena.close_begin().unwrap();
        assert_eq!((closing.chunk, arena.take(CLASS)), (0, Err(Shortage::Budget)));
        arena.check();
        arena.close_end(closing, Closed::Yes);
        assert!(arena.settled());
        assert_eq!(arena.open_pages(), 4 * EXTENT_PAGES);
        more.iter().for_each(|&page| arena.give(page, CLASS, Give::Return));
        assert_eq!(arena.take(CLASS).unwrap() / EXTENT_PAGES, 4, "what is open is used first");
        arena.check();
    }

    #[test]
    fn a_chunk_that_is_used_again_or_cannot_be_closed_stays() {
        let mut arena = arena(4, 0);
        open(&mut arena, 1, false);
        let page = arena.take(CLASS).unwrap();
        arena.give(page, CLASS, Give::Return);
        advise(&mut arena);
        let again = arena.take(CLASS).unwrap();
        assert!(arena.close_begin().is_none(), "it is used again");
        arena.give(again, CLASS, Give::Return);
        advise(&mut arena);
        let closing = arena.close_begin().unwrap();
        arena.close_end(closing, Closed::No);
        arena.check();
        let third = arena.take(CLASS).unwrap();
        arena.give(third, CLASS, Give::Return);
        advise(&mut arena);
        let closing = arena.close_begin().unwrap();
        arena.close_end(closing, Closed::Lost);
        assert_eq!(arena.take(CLASS), Err(Shortage::Budget), "never used again");
        assert!(arena.open_begin(1, false).is_none());
        arena.check();
    }

    #[test]
    fn runs_open_what_they_lack_and_no_more() {
        let mut arena = arena(16, 8);
        assert_eq!(arena.take_run(6 * EXTENT_PAGES, false), Err(Shortage::Shut));
        assert_eq!(open(&mut arena, 6, false), [0, 1]);
        let first = arena.take_run(6 * EXTENT_PAGES, false).unwrap();
        assert_eq!(first, 0);
        // Two are free in chunk 1.
        assert_eq!(open(&mut arena, 5, false), [2]);
        let second = arena.take_run(5 * EXTENT_PAGES, false).unwrap();
        assert_eq!(second, 6 * EXTENT_PAGES);
        assert_eq!(arena.take_run(EXTENT_PAGES, true), Err(Shortage::Shut));
        assert_eq!(open(&mut arena, 1, true), [4]);
        assert_eq!(arena.take_run(EXTENT_PAGES, true), Ok(16 * EXTENT_PAGES));
        assert_eq!(arena.take_run(6 * EXTENT_PAGES, false), Err(Shortage::Budget));
        // What is in use parts the space.
        arena.give_run(first, Give::Return);
        assert_eq!(arena.take_run(7 * EXTENT_PAGES, false), Err(Shortage::Budget));
        assert_eq!(
            arena.take_run(5 * EXTENT_PAGES, false).map(|_| ()),
            Err(Shortage::Shut).or(Ok(()))
        );
        arena.check();
    }

    #[test]
    fn chunks_are_bounded_in_number() {
        for (total, extents) in [(1, 1), (4096, 1), (4097, 2), (30_000, 8), (4 << 20, 1024)] {
            assert_eq!(Arena::chunk_extents(total), extents);
        }
    }
}
