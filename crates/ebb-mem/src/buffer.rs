//! Content-keeping loans, and registration: the two things a block can be besides plain memory.
//!
//! A [`Buffer`] holds data that could be read again from somewhere (clean cached data). Idle parts
//! are *unwired*: lent to the kernel with their content. *Rewiring* tells page by page whether the
//! content is still there. Bytes of unwired pages cannot be reached.
//!
//! A [`Registered`] block is known to the kernel or a device by address. It cannot be lent, unwired
//! or freed before it is unregistered: advising registered memory loses data silently
//! (`elastic-memory.md` 4.3, T1 and T2), so here the types are disjoint.

use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

use crate::arena::{Give, Retake};
use crate::bits::Pages;
use crate::block::Block;
use crate::class::{EXTENT_PAGES, PAGE_BYTES};
use crate::memory::Memory;
use crate::sentinel;
use crate::sync::Ordering;
use crate::sys::Span;
use crate::worker::Worker;

/// A set of pages of one buffer.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct PageSet(Pages);

impl PageSet {
    /// Whether no page is in it.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many pages are in it.
    pub fn len(&self) -> usize {
        self.0.count()
    }

    /// Whether `page` (counted in the buffer) is in it.
    pub fn contains(&self, page: usize) -> bool {
        page < EXTENT_PAGES && self.0.contains(page)
    }

    /// The pages, ascending.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        std::iter::successors(self.0.first_from(0), |&page| self.0.first_from(page + 1))
    }
}

impl std::fmt::Debug for PageSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

/// Why pages cannot be rewired now. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RewireError {
    /// They are being lent at this moment (for microseconds): treat it as lost into another
    /// buffer, or try again.
    #[error("the pages are being lent to the kernel right now")]
    Busy,
    /// The ceiling over wired memory is reached.
    #[error("no memory to wire the pages: the ceiling is reached")]
    Exhausted,
}

/// A block (up to 2 MiB) whose idle pages can be lent with their content.
#[must_use = "a dropped buffer is lost: free it"]
#[derive(Debug)]
pub struct Buffer {
    block: Block,
    memory: Arc<Memory>,
    first: usize,
    unwired: PageSet,
}

impl Buffer {
    /// Makes a buffer of a block from `worker`'s memory.
    ///
    /// # Errors
    /// The block itself, if it is larger than 2 MiB or from another memory.
    pub fn new(worker: &Worker, block: Block) -> Result<Buffer, Block> {
        let memory = worker.memory();
        match memory.core.reservation.page_of(block.start()) {
            Some(first) if block.pages() as usize <= EXTENT_PAGES => {
                Ok(Buffer { block, memory: memory.clone(), first, unwired: PageSet::default() })
            }
            _ => Err(block),
        }
    }

    /// Pages of 4 KiB.
    pub fn pages(&self) -> usize {
        self.block.pages() as usize
    }

    /// The pages that are unwired.
    pub fn unwired(&self) -> PageSet {
        self.unwired
    }

    fn set(&self, pages: &Range<usize>) -> Pages {
        let end = pages.end.min(self.pages());
        Pages::range(pages.start.min(end), end - pages.start.min(end))
    }

    fn slice(&self, pages: &Range<usize>) -> Option<Range<usize>> {
        let wired = !self.set(pages).meets(&self.unwired.0);
        let inside = pages.start <= pages.end && pages.end <= self.pages();
        (wired && inside).then(|| pages.start * PAGE_BYTES..pages.end * PAGE_BYTES)
    }

    /// The bytes of `pages`; `None` if one of them is unwired or outside.
    pub fn bytes(&self, pages: Range<usize>) -> Option<&[u8]> {
        let slice = self.slice(&pages)?;
        Some(self.block.bytes_in(slice))
    }

    /// The bytes of `pages`, to write; `None` if one of them is unwired or outside.
    pub fn bytes_mut(&mut self, pages: Range<usize>) -> Option<&mut [u8]> {
        let slice = self.slice(&pages)?;
        Some(self.block.bytes_in_mut(slice))
    }

    /// Unwires `pages` (those of them that are wired): the kernel may take them at any moment from
    /// now on. The data must be clean: somewhere else it exists, too. False, and nothing is done,
    /// where memory cannot be lent.
    pub fn unwire(&mut self, worker: &Worker, pages: Range<usize>) -> bool {
        let wanted = self.set(&pages).without(&self.unwired.0);
        let core = &self.memory.core;
        if !core.books.lock().lending() {
            return false;
        }
        for page in (PageSet(wanted)).iter() {
            sentinel::arm(&core.reservation, &core.saved, self.first + page);
        }
        {
            let mut arena = core.books.lock();
            let mut from = 0;
            while let Some((start, count)) = wanted.first_run(from) {
                arena.offer_held(Span { page: self.first + start, pages: count });
                from = start + count;
            }
        }
        self.unwired.0 = self.unwired.0.or(&wanted);
        self.account(worker, &wanted, -1);
        true
    }

    /// Wires `pages` (those of them that are unwired) again, and says which of them are lost: their
    /// content is gone and they must be filled anew, each wholly.
    ///
    /// # Errors
    /// [`RewireError`]; then nothing has changed.
    pub fn rewire(&mut self, worker: &Worker, pages: Range<usize>) -> Result<PageSet, RewireError> {
        let wanted = self.set(&pages).and(&self.unwired.0);
        let core = &self.memory.core;
        if let (Some(low), Some(high)) = (wanted.first_from(0), PageSet(wanted).iter().last()) {
            // One question for the whole stretch: pages between that are wired do not mind.
            let span = Span { page: self.first + low, pages: high + 1 - low };
            let partial = high + 1 - low != wanted.count();
            let mut arena = core.books.lock();
            if partial {
                self.retake_runs(&mut arena, &wanted)?;
            } else {
                to_error(arena.retake(span))?;
            }
        }
        let mut lost = Pages::EMPTY;
        for page in PageSet(wanted).iter() {
            if !sentinel::disarm(&core.reservation, &core.saved, self.first + page) {
                lost.insert(page);
            }
        }
        self.unwired.0 = self.unwired.0.without(&wanted);
        self.account(worker, &wanted, 1);
        let (gone, all) = (lost.count() as u64, wanted.count() as u64);
        self.memory.lost.fetch_add(gone, Ordering::Relaxed);
        self.memory.kept.fetch_add(all - gone, Ordering::Relaxed);
        Ok(PageSet(lost))
    }

    /// Copies the bytes from `from` on (within `page`) out of an unwired page, without wiring it: the
    /// kernel sees that it is in use, and may still take it. False if the kernel has taken it: then
    /// `out` holds garbage, and the page must be rewired and filled anew.
    ///
    /// # Panics
    /// If the range is not within the page, or the page is not unwired.
    #[must_use]
    pub fn read_lent(&self, page: usize, from: usize, out: &mut [u8]) -> bool {
        assert!(self.unwired.contains(page), "only of an unwired page");
        let (memory, page) = (&self.memory, self.first + page);
        let there =
            sentinel::copy_lent(&memory.core.reservation, &memory.core.saved, page, from, out);
        if !there {
            memory.lost.fetch_add(1, Ordering::Relaxed);
        }
        there
    }

    /// Retakes several stretches, or none of them.
    fn retake_runs(
        &self,
        arena: &mut crate::arena::Arena,
        wanted: &Pages,
    ) -> Result<(), RewireError> {
        let runs = || {
            let mut from = 0;
            std::iter::from_fn(move || {
                let (start, count) = wanted.first_run(from)?;
                from = start + count;
                Some(Span { page: self.first + start, pages: count })
            })
        };
        let mut new = 0;
        for span in runs() {
            new += span.pages;
            if arena.is_busy(span) {
                return Err(RewireError::Busy);
            }
        }
        if !arena.has_room(new) {
            return Err(RewireError::Exhausted);
        }
        for span in runs() {
            to_error(arena.retake(span))?;
        }
        Ok(())
    }

    fn account(&self, worker: &Worker, pages: &Pages, sign: i64) {
        let bytes = sign * i64::try_from(pages.count() * PAGE_BYTES).unwrap_or(i64::MAX);
        worker.0.account(self.block.owner(), bytes, -bytes);
    }

    /// The block, if all of it is wired.
    ///
    /// # Errors
    /// The buffer itself, if a page is unwired.
    pub fn into_block(self) -> Result<Block, Buffer> {
        if self.unwired.is_empty() { Ok(self.block) } else { Err(self) }
    }

    /// Gives the buffer back, wired or not.
    pub fn free(self, worker: &Worker) {
        if self.unwired.is_empty() {
            return worker.free(self.block);
        }
        let unwired = i64::try_from(self.unwired.len() * PAGE_BYTES).unwrap_or(i64::MAX);
        let wired = i64::try_from(self.block.capacity()).unwrap_or(i64::MAX) - unwired;
        worker.0.account(self.block.owner(), -wired, -unwired);
        let give = if worker.0.prefers_return() { Give::Return } else { Give::Lend };
        worker.0.release(std::iter::once(self.block), give);
        worker.0.after_give();
    }
}

fn to_error(retake: Retake) -> Result<(), RewireError> {
    match retake {
        Retake::Taken => Ok(()),
        Retake::Busy => Err(RewireError::Busy),
        Retake::Short => Err(RewireError::Exhausted),
    }
}

/// A block that the kernel or a device knows by address. Dereferences to its bytes.
#[must_use = "a dropped registration keeps its memory for ever: unregister it"]
#[derive(Debug)]
pub struct Registered {
    block: Block,
    memory: Arc<Memory>,
}

impl Registered {
    /// Marks a block as registered; do this before telling the kernel. Every page is written to,
    /// since one that is still on loan would be taken after unregistering, with fresh data in it.
    ///
    /// # Errors
    /// The block itself, if it is from another memory.
    pub fn new(worker: &Worker, block: Block) -> Result<Registered, Block> {
        let memory = worker.memory().clone();
        let Some(first) = memory.core.reservation.page_of(block.start()) else {
            return Err(block);
        };
        let pages = block.pages() as usize;
        memory.core.books.lock().pin(Span { page: first, pages }, true);
        (first..first + pages).for_each(|page| sentinel::touch(&memory.core.reservation, page));
        Ok(Registered { block, memory })
    }

    /// The plain block again; do this only after the kernel has let go of the memory.
    pub fn unregister(self) -> Block {
        if let Some(first) = self.memory.core.reservation.page_of(self.block.start()) {
            let pages = self.block.pages() as usize;
            self.memory.core.books.lock().pin(Span { page: first, pages }, false);
        }
        self.block
    }

    /// Its address, stable until it is unregistered and freed.
    pub fn as_ptr(&self) -> *mut u8 {
        self.block.as_ptr()
    }
}

impl Deref for Registered {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.block
    }
}

impl DerefMut for Registered {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.block
    }
}
