//! Blocks whose pages are lent with their content, and registered blocks.
//!
//! A [`Buffer`] contains data that can be read again from the store (clean cached data). Its idle pages
//! are *unwired*: lent to the kernel with their content. *Rewiring* reports for each page whether the
//! content is still there. Bytes of unwired pages are not accessible.
//!
//! A [`Registered`] block is registered with the kernel or a device by address. It cannot be lent,
//! unwired or freed before it is unregistered: `madvise` on registered memory detaches the address from
//! the pinned pages, and what the device writes to those is lost. Distinct types rule that out.

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
    /// The advisor's call for these pages is in flight (for microseconds): use another buffer and treat
    /// the data as lost, or try again.
    #[error("the pages are being lent to the kernel: try again")]
    Busy,
    /// The ceiling over wired memory is reached.
    #[error("no memory to wire the pages: the ceiling is reached")]
    Exhausted,
}

/// A block (up to 2 MiB) whose idle pages can be lent with their content.
#[must_use = "a dropped buffer leaks its memory: free it"]
#[derive(Debug)]
pub struct Buffer {
    block: Block,
    memory: Arc<Memory>,
    first: usize,
    unwired: PageSet,
}

impl Buffer {
    /// Makes a block from `worker`'s memory into a buffer.
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

    /// Unwires the wired pages among `pages`: the kernel may discard them at any time from now on. The
    /// data must be clean: a copy must exist in the store. False, and nothing is done, where memory cannot
    /// be lent.
    pub fn unwire(&mut self, worker: &Worker, pages: Range<usize>) -> bool {
        let wanted = self.set(&pages).without(&self.unwired.0);
        let core = &self.memory.core;
        if !core.arena.lock().lending() {
            return false;
        }
        for page in (PageSet(wanted)).iter() {
            sentinel::arm(&core.reservation, &core.saved, self.first + page);
        }
        {
            let mut arena = core.arena.lock();
            let mut from = 0;
            while let Some((start, count)) = wanted.first_run(from) {
                arena.offer_allocated(Span { page: self.first + start, pages: count });
                from = start + count;
            }
        }
        self.unwired.0 = self.unwired.0.or(&wanted);
        self.account(worker, &wanted, -1);
        true
    }

    /// Wires the unwired pages among `pages` again. Returns those whose content is lost: each must be
    /// filled again completely.
    ///
    /// # Errors
    /// [`RewireError`]; then nothing has changed.
    pub fn rewire(&mut self, worker: &Worker, pages: Range<usize>) -> Result<PageSet, RewireError> {
        let wanted = self.set(&pages).and(&self.unwired.0);
        let core = &self.memory.core;
        if let (Some(low), Some(high)) = (wanted.first_from(0), PageSet(wanted).iter().last()) {
            // One call for the whole range, if all its pages are unwired.
            let span = Span { page: self.first + low, pages: high + 1 - low };
            let partial = high + 1 - low != wanted.count();
            let mut arena = core.arena.lock();
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
        let (discarded, all) = (lost.count() as u64, wanted.count() as u64);
        self.memory.lost.fetch_add(discarded, Ordering::Relaxed);
        self.memory.kept.fetch_add(all - discarded, Ordering::Relaxed);
        Ok(PageSet(lost))
    }

    /// Copies the bytes from `from` on (within `page`) from an unwired page, without wiring it: the access
    /// marks the page as referenced, and the kernel may still discard it. False if the kernel has
    /// discarded it: then the content of `out` is undefined, and the page must be rewired and filled again.
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

    /// Wires several runs of pages, or none of them.
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

    /// Frees the buffer, wired or not.
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
        Retake::Wired => Ok(()),
        Retake::Busy => Err(RewireError::Busy),
        Retake::Exhausted => Err(RewireError::Exhausted),
    }
}

/// A block that is registered with the kernel or a device by address. Dereferences to its bytes.
#[must_use = "a dropped registration leaks its memory: unregister it"]
#[derive(Debug)]
pub struct Registered {
    block: Block,
    memory: Arc<Memory>,
}

impl Registered {
    /// Marks a block as registered; do this before registering it with the kernel. Every page is written
    /// to: the kernel could discard a page that is still marked `MADV_FREE` after it is unregistered,
    /// together with the new data in it.
    ///
    /// # Errors
    /// The block itself, if it is from another memory.
    pub fn new(worker: &Worker, block: Block) -> Result<Registered, Block> {
        let memory = worker.memory().clone();
        let Some(first) = memory.core.reservation.page_of(block.start()) else {
            return Err(block);
        };
        let pages = block.pages() as usize;
        memory.core.arena.lock().pin(Span { page: first, pages }, true);
        (first..first + pages).for_each(|page| sentinel::touch(&memory.core.reservation, page));
        Ok(Registered { block, memory })
    }

    /// The plain block again; do this only after the kernel has unregistered the memory.
    pub fn unregister(self) -> Block {
        if let Some(first) = self.memory.core.reservation.page_of(self.block.start()) {
            let pages = self.block.pages() as usize;
            self.memory.core.arena.lock().pin(Span { page: first, pages }, false);
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
