//! Opening and closing of address space: which parts of the arena are accessible.
//!
//! The reservation is mapped without access, so that the kernel does not charge for it
//! (`vm.overcommit_memory=2` and `RLIMIT_DATA` count writable memory, touched or not). A **chunk**, some
//! consecutive extents, is *opened* before its first extent is allocated. Where the kernel charges, it is
//! *closed* when it has no page in any state. Each is one system call, made with the arena unlocked; during
//! the call the chunk is neither open nor closed, and its extents cannot be allocated.
//!
//! Invariants: only extents of open chunks are in [`Arena::free`] or in use; a chunk that is being closed
//! has no page in any state. There are at most [`CHUNKS`] chunks, which bounds the number of mappings:
//! `vm.max_map_count` is 65,530 by default.

use super::{Arena, ExtentUse};
use crate::bits::Extents;
use crate::class::EXTENT_PAGES;
use crate::sys::{Closed, Span};

/// Largest number of chunks of an arena. Each has at most one mapping here and one of the saved words.
const CHUNKS: usize = 4096;

/// The chunks by state: see the module.
pub(super) struct ArenaChunks {
    /// Extents in a chunk.
    pub(super) extents: usize,
    /// Closed chunks: opened when the open ones have no room.
    pub(super) closed: Extents,
    /// Being opened or closed, or lost.
    changing: Extents,
    /// Open chunks whose last page may have been returned.
    empty: Extents,
    /// Number of chunks being closed.
    closing: usize,
    /// Whether chunks are closed at all.
    closes: bool,
}

/// Chunks that are being opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpeningChunks {
    first: usize,
    /// Bit per chunk from the first on; the largest run has 32 extents.
    which: u64,
    extents: usize,
}

impl OpeningChunks {
    fn chunks(self) -> impl Iterator<Item = usize> {
        (0..64).filter(move |bit| self.which >> bit & 1 == 1).map(move |bit| self.first + bit)
    }

    /// The spans to open.
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

impl ArenaChunks {
    /// No chunks: everything is open and stays so.
    pub(super) fn none() -> ArenaChunks {
        let none = || Extents::new(0);
        let (closed, changing, empty) = (none(), none(), none());
        ArenaChunks { extents: 1, closed, changing, empty, closing: 0, closes: false }
    }
}

impl Arena {
    /// Extents in a chunk of an arena with `total` extents.
    pub(crate) fn chunk_extents(total: usize) -> usize {
        total.div_ceil(CHUNKS).next_power_of_two()
    }

    /// Marks everything as closed, before the first allocation: chunks of `extents` extents, which divides
    /// all of them. With `closes`, chunks that become empty are closed again.
    pub(crate) fn close_all(&mut self, extents: usize, closes: bool) {
        debug_assert!(self.extents.len().is_multiple_of(extents));
        let count = self.extents.len() / extents;
        let mut closed = Extents::new(count);
        (0..count).for_each(|chunk| closed.insert(chunk));
        let (changing, empty) = (Extents::new(count), Extents::new(count));
        self.free.clear();
        self.chunks = ArenaChunks { extents, closed, changing, empty, closing: 0, closes };
    }

    /// Pages in open chunks.
    pub(crate) fn open_pages(&self) -> usize {
        let shut = (self.chunks.closed.len() + self.chunks.changing.len()) * self.chunks.extents;
        (self.extents.len() - shut) * EXTENT_PAGES
    }

    fn is_closed(&self, extent: usize) -> bool {
        let chunk = extent / self.chunks.extents;
        !self.chunks.closed.is_empty() && self.chunks.closed.contains(chunk)
    }

    /// Whether opening chunks can provide `need` consecutive extents.
    pub(super) fn can_open(&mut self, need: usize) -> bool {
        self.openable(need).is_some()
    }

    /// The first of `need` consecutive extents that are free or in a closed chunk, at least one of them
    /// in a closed chunk.
    fn openable(&mut self, need: usize) -> Option<usize> {
        let (mut from, end) = (0, self.extents.len());
        loop {
            let size = self.chunks.extents;
            let closed = self.chunks.closed.first_from(from / size)?;
            if closed * size >= end {
                return None;
            }
            // Free extents directly before it count, too.
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

    /// Begins to open the chunks for `need` consecutive extents; `None`: no address space remains.
    pub(crate) fn open_begin(&mut self, need: usize) -> Option<OpeningChunks> {
        let start = self.openable(need)?;
        let size = self.chunks.extents;
        let (first, last) = (start / size, (start + need - 1) / size);
        let mut which = 0;
        for chunk in first..=last {
            if self.chunks.closed.contains(chunk) {
                self.chunks.closed.remove(chunk);
                self.chunks.changing.insert(chunk);
                which |= 1 << (chunk - first);
            }
        }
        Some(OpeningChunks { first, which, extents: size })
    }

    /// Records the result of the call for one span of an [`OpeningChunks`].
    pub(crate) fn open_end(&mut self, span: Span, done: bool) {
        let size = self.chunks.extents;
        let chunk = span.page / (size * EXTENT_PAGES);
        self.chunks.changing.remove(chunk);
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
        let blank = self.extents[extent].as_ref().is_none_or(|x| {
            x.kind == ExtentUse::Free && x.warm().is_empty() && x.advising.is_empty()
        });
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

    /// Begins to close a chunk that waits for it; `None`: no chunk is empty.
    pub(crate) fn close_begin(&mut self) -> Option<Closing> {
        let size = self.chunks.extents;
        while let Some(chunk) = self.chunks.empty.first_from(0) {
            self.chunks.empty.remove(chunk);
            let extents = chunk * size..(chunk + 1) * size;
            if extents.clone().all(|extent| self.is_blank(extent)) {
                extents.for_each(|extent| self.free.remove(extent));
                self.chunks.changing.insert(chunk);
                self.chunks.closing += 1;
                let pages = size * EXTENT_PAGES;
                return Some(Closing { chunk, span: Span { page: chunk * pages, pages } });
            }
        }
        None
    }

    /// Records the result of the call that closes a chunk.
    pub(crate) fn close_end(&mut self, closing: Closing, closed: Closed) {
        self.chunks.closing -= 1;
        match closed {
            Closed::Yes => {
                self.chunks.changing.remove(closing.chunk);
                self.chunks.closed.insert(closing.chunk);
            }
            Closed::No => self.open_end(closing.span, true),
            Closed::Lost => {}
        }
    }

    /// Whether an extent is unavailable because its chunk is not open.
    #[cfg(test)]
    pub(super) fn is_unavailable(&self, extent: usize) -> bool {
        let chunk = extent / self.chunks.extents;
        self.is_closed(extent)
            || (!self.chunks.changing.is_empty() && self.chunks.changing.contains(chunk))
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;
    use crate::arena::{Give, Shortage};
    use crate::sys::{BATCH, PageAdvice};

    const CLASS: usize = 8;

    fn arena(extents: usize) -> Arena {
        let mut arena = Arena::new(extents, usize::MAX / 2, true);
        arena.close_all(4, true);
        arena
    }

    fn open(arena: &mut Arena, need: usize) -> Vec<usize> {
        let spans: Vec<_> = arena.open_begin(need).unwrap().spans().collect();
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
    fn nothing_is_allocated_before_it_is_open_and_empty_chunks_are_closed_again() {
        let mut arena = arena(8);
        assert_eq!(arena.open_pages(), 0);
        assert_eq!(arena.take(CLASS), Err(Shortage::Closed));
        assert_eq!(open(&mut arena, 1), [0]);
        assert_eq!(arena.open_pages(), 4 * EXTENT_PAGES);
        let pages: Vec<_> = (0..8).map(|_| arena.take(CLASS).unwrap()).collect();
        assert!(pages.iter().all(|&page| page < 4 * EXTENT_PAGES));
        assert_eq!(arena.take(CLASS), Err(Shortage::Closed));
        // The kernel refuses: opening may be tried again.
        let refused = arena.open_begin(1).unwrap();
        refused.spans().for_each(|span| arena.open_end(span, false));
        assert_eq!(arena.take(CLASS), Err(Shortage::Closed));
        assert_eq!(open(&mut arena, 1), [1]);
        // No chunk remains to be opened, and all open ones are in use.
        let more: Vec<_> = (0..8).map(|_| arena.take(CLASS).unwrap()).collect();
        assert_eq!(arena.take(CLASS), Err(Shortage::Budget), "no small pages remain");

        // All of the first chunk is freed, but only lent at first.
        pages.iter().for_each(|&page| arena.give(page, CLASS, Give::Lend));
        advise(&mut arena);
        assert!(!arena.may_close(), "lent memory may still be resident");
        arena.offer_free(PageAdvice::Return);
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
    fn a_chunk_that_is_used_again_or_cannot_be_closed_stays_open() {
        let mut arena = arena(4);
        open(&mut arena, 1);
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
        assert!(arena.open_begin(1).is_none());
        arena.check();
    }

    #[test]
    fn runs_open_what_they_lack_and_no_more() {
        let mut arena = arena(16);
        assert_eq!(arena.take_run(6 * EXTENT_PAGES), Err(Shortage::Closed));
        assert_eq!(open(&mut arena, 6), [0, 1]);
        let first = arena.take_run(6 * EXTENT_PAGES).unwrap();
        assert_eq!(first, 0);
        // Two are free in chunk 1.
        assert_eq!(open(&mut arena, 5), [2]);
        let second = arena.take_run(5 * EXTENT_PAGES).unwrap();
        assert_eq!(second, 6 * EXTENT_PAGES);
        assert_eq!(arena.take_run(6 * EXTENT_PAGES), Err(Shortage::Budget));
        // Runs in use divide the free space.
        arena.give_run(first, Give::Return);
        assert_eq!(arena.take_run(7 * EXTENT_PAGES), Err(Shortage::Budget));
        assert_eq!(arena.take_run(5 * EXTENT_PAGES).map(|_| ()), Err(Shortage::Closed).or(Ok(())));
        arena.check();
    }

    #[test]
    fn chunks_are_bounded_in_number() {
        for (total, extents) in [(1, 1), (4096, 1), (4097, 2), (30_000, 8), (4 << 20, 1024)] {
            assert_eq!(Arena::chunk_extents(total), extents);
        }
    }
}
