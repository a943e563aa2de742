//! Cache buffers of at most 16 pages. The handle has 16 bytes, since a cache has millions of them.
//!
//! A [`SmallBuffer`] is a block of up to 64 KiB that contains data that can be read again from the store
//! (clean cached data). Its idle pages can be *unwired*: the advisor lends them to the kernel with their content.
//! *Rewiring* reports for each page whether the content is still there.
//! - Unwired data can be *read in place* ([`SmallBuffer::read_unwired`]): a cache hit need not wire pages.
//! - Unwiring has two steps, so that thousands of buffers cost one lock: [`SmallBuffer::unwire`] writes the
//!   sentinels (`sentinel.rs`), then [`Offers`] offers all unwired pages. The buffer does not know whether the advisor
//!   has lent an offered page yet, and need not: the sentinel is there in any case. A page that is unwired and never
//!   offered stays resident; one that is rewired in between is not offered.
//!
//! # Invariants
//! - Bytes of unwired pages are accessible through [`SmallBuffer::read_unwired`] only.
//! - A page that is not unwired is never offered.

use std::ops::Range;

use crate::advise::LockedArena;
use crate::arena::{Give, Retake};
use crate::block::Block;
use crate::class::{EXTENT_PAGES, PAGE_BYTES};
use crate::memory::Memory;
use crate::sentinel;
use crate::sys::Span;
use crate::worker::WorkerMemory;

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

/// Largest number of pages of a [`SmallBuffer`].
pub const SMALL_PAGES: usize = 16;

/// A block of at most [`SMALL_PAGES`] pages whose idle pages can be unwired with their content. Sets of
/// its pages are bit masks: bit 0 is the first page.
#[must_use = "a dropped buffer leaks its memory: free it"]
#[derive(Debug)]
pub struct SmallBuffer(Block);

/// The pages of a mask, ascending.
fn each(mut mask: u16) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let page = usize::try_from(mask.trailing_zeros()).ok().filter(|_| mask != 0)?;
        mask &= mask - 1;
        Some(page)
    })
}

/// The runs of a mask, ascending: first page and number of pages.
fn runs(mut mask: u16) -> impl Iterator<Item = (usize, usize)> {
    std::iter::from_fn(move || {
        let start = usize::try_from(mask.trailing_zeros()).ok().filter(|_| mask != 0)?;
        let count = usize::try_from((mask >> start).trailing_ones()).ok()?;
        mask &= !run(start, count);
        Some((start, count))
    })
}

fn run(start: usize, count: usize) -> u16 {
    let all = (1u32 << count) - 1;
    u16::try_from((all << start) & 0xffff).unwrap_or(u16::MAX)
}

impl SmallBuffer {
    /// Makes a block into a buffer.
    ///
    /// # Errors
    /// The block itself, if it has more than [`SMALL_PAGES`] pages.
    pub fn new(block: Block) -> Result<SmallBuffer, Block> {
        if block.capacity() <= SMALL_PAGES * PAGE_BYTES && !block.is_run() {
            Ok(SmallBuffer(block))
        } else {
            Err(block)
        }
    }

    /// Pages of 4 KiB: 1, 2, 4, 8 or 16.
    #[inline]
    pub fn pages(&self) -> usize {
        self.0.capacity() / PAGE_BYTES
    }

    /// All its pages.
    #[inline]
    pub fn all(&self) -> u16 {
        run(0, self.pages())
    }

    /// The pages that are unwired: marked with their sentinels, and offered or lent.
    #[inline]
    pub fn unwired(&self) -> u16 {
        self.0.unwired()
    }

    fn slice(&self, pages: &Range<usize>) -> Option<Range<usize>> {
        let inside = pages.start <= pages.end && pages.end <= self.pages();
        (inside && self.unwired() & run(pages.start, pages.len()) == 0)
            .then(|| pages.start * PAGE_BYTES..pages.end * PAGE_BYTES)
    }

    /// The bytes of `pages`; `None` if one of them is unwired or outside.
    #[inline]
    pub fn bytes(&self, pages: Range<usize>) -> Option<&[u8]> {
        let slice = self.slice(&pages)?;
        Some(self.0.bytes_in(slice))
    }

    /// The bytes of `pages`, to write; `None` if one of them is unwired or outside.
    #[inline]
    pub fn bytes_mut(&mut self, pages: Range<usize>) -> Option<&mut [u8]> {
        let slice = self.slice(&pages)?;
        Some(self.0.bytes_in_mut(slice))
    }

    fn first(&self, memory: &Memory) -> Option<usize> {
        memory.core.reservation.page_of(self.0.start())
    }

    /// Copies the bytes from `from` on (within `page`) from an unwired page, without wiring it: the access
    /// marks the page as referenced, and the kernel may still discard it. False if the kernel has
    /// discarded it: then the content of `out` is undefined, and the page must be
    /// [rewired](SmallBuffer::rewire) and filled again.
    ///
    /// # Panics
    /// If the range is not within the page, or the page is not unwired.
    #[must_use]
    pub fn read_unwired(&self, memory: &Memory, page: usize, from: usize, out: &mut [u8]) -> bool {
        assert!(page < self.pages() && self.unwired() >> page & 1 == 1, "only of an unwired page");
        let Some(first) = self.first(memory) else { return false };
        let (reservation, saved) = (&memory.core.reservation, &memory.core.saved);
        sentinel::copy_lent(reservation, saved, first + page, from, out)
    }

    /// Unwires the wired pages among `pages`: writes their sentinels. The data must be clean: a copy must exist
    /// in the store. The pages are offered when the buffer is passed to [`Offers::add`]. Returns the pages that it
    /// has unwired.
    pub fn unwire(&mut self, worker: &WorkerMemory, pages: u16) -> u16 {
        let memory = worker.memory();
        let wanted = pages & self.all() & !self.unwired();
        let Some(first) = self.first(memory).filter(|_| wanted != 0) else { return 0 };
        for page in each(wanted) {
            sentinel::arm(&memory.core.reservation, &memory.core.saved, first + page);
        }
        self.0.set_unwired(self.unwired() | wanted);
        self.account(worker, wanted, -1);
        wanted
    }

    /// Wires the unwired pages among `pages`. Returns those whose content is lost: each must be filled again
    /// completely.
    ///
    /// # Errors
    /// [`RewireError`]; then nothing has changed.
    pub fn rewire(&mut self, worker: &WorkerMemory, pages: u16) -> Result<u16, RewireError> {
        let memory = worker.memory();
        let wanted = pages & self.unwired();
        let Some(first) = self.first(memory).filter(|_| wanted != 0) else { return Ok(0) };
        {
            let mut arena = memory.core.arena.lock();
            let spans = || runs(wanted).map(|(start, pages)| Span { page: first + start, pages });
            if spans().any(|span| arena.is_busy(span)) {
                return Err(RewireError::Busy);
            }
            if !arena.has_room(spans().map(|span| span.pages).sum()) {
                return Err(RewireError::Exhausted);
            }
            for span in spans() {
                if arena.retake(span) != Retake::Wired {
                    return Err(RewireError::Busy);
                }
            }
        }
        let mut lost = 0;
        for page in each(wanted) {
            if !sentinel::disarm(&memory.core.reservation, &memory.core.saved, first + page) {
                lost |= run(page, 1);
            }
        }
        self.0.set_unwired(self.unwired() & !wanted);
        self.account(worker, wanted, 1);
        Ok(lost)
    }

    fn account(&self, worker: &WorkerMemory, pages: u16, sign: i64) {
        let bytes = sign * i64::from(pages.count_ones()) * PAGE_BYTES_SIGNED;
        worker.0.account(self.0.owner(), bytes, -bytes);
    }

    /// The pages that are resident now (`mincore(2)`). For accounting only: the kernel may discard a page
    /// directly after, so only [`SmallBuffer::read_unwired`] and [`SmallBuffer::rewire`] decide whether data
    /// is lost. All pages, if the call fails.
    pub fn resident(&self, memory: &Memory) -> u16 {
        let mut there = [1; SMALL_PAGES];
        let there = &mut there[..self.pages()];
        match self.first(memory) {
            Some(first) if memory.core.reservation.resident(first, there) => {
                let bit = |(page, state): (usize, &u8)| run(page, usize::from(state & 1));
                there.iter().enumerate().map(bit).fold(0, |mask, bit| mask | bit)
            }
            _ => self.all(),
        }
    }

    /// Frees the buffer, unwired or not. The worker caches its block if all of it is wired.
    pub fn free(self, worker: &WorkerMemory) {
        if self.unwired() == 0 {
            return worker.free(self.0);
        }
        SmallBuffer::free_all(worker, std::iter::once(self), false);
    }

    /// Frees many buffers to the slabs under one lock, past all caches: their memory is lent, or, if
    /// `now`, returned to the kernel.
    pub fn free_all(worker: &WorkerMemory, buffers: impl Iterator<Item = SmallBuffer>, now: bool) {
        let give = if now || worker.0.prefers_return() { Give::Return } else { Give::Lend };
        let blocks = buffers.map(|mut buffer| {
            let unwired = i64::from(buffer.unwired().count_ones()) * PAGE_BYTES_SIGNED;
            let all = i64::from(buffer.all().count_ones()) * PAGE_BYTES_SIGNED;
            worker.0.account(buffer.0.owner(), unwired - all, -unwired);
            buffer.0.set_unwired(0);
            buffer.0
        });
        worker.0.release(blocks, give);
        worker.0.after_give();
    }
}

/// A scan of resident pages, one extent at a time, so that thousands of buffers cost one system call per
/// 2 MiB and not one each.
#[derive(Debug, Default)]
pub struct Residency {
    /// By extent: the number of the scan, and a bit per resident page.
    extents: Vec<(u32, [u64; EXTENT_PAGES / 64])>,
    scan: u32,
}

impl Residency {
    /// Begins a new scan: results of the previous one are no longer used.
    pub fn begin(&mut self) {
        self.scan = self.scan.wrapping_add(1);
    }

    /// Pages of `buffer` that were not resident when its extent was scanned. Check these with
    /// [`SmallBuffer::resident`], since the scan may be older than the loan.
    pub fn maybe_gone(&mut self, memory: &Memory, buffer: &SmallBuffer) -> u16 {
        let Some(first) = buffer.first(memory) else { return 0 };
        let (extent, page) = (first / EXTENT_PAGES, first % EXTENT_PAGES);
        if extent >= self.extents.len() {
            let never = (self.scan.wrapping_sub(1), [0; EXTENT_PAGES / 64]);
            self.extents.resize(extent + 1, never);
        }
        let scan = self.scan;
        let Some((seen, words)) = self.extents.get_mut(extent) else { return 0 };
        if *seen != scan {
            let mut there = [0; EXTENT_PAGES];
            if !memory.core.reservation.resident(extent * EXTENT_PAGES, &mut there) {
                return 0;
            }
            for (word, pages) in words.iter_mut().zip(there.chunks(64)) {
                let bits = pages.iter().rev();
                *word = bits.fold(0, |word, state| word << 1 | u64::from(state & 1));
            }
            *seen = scan;
        }
        // A block of up to 16 pages is aligned to its size: it lies in one word.
        let bits = words[page / 64] >> (page % 64) & 0xffff;
        buffer.all() & !u16::try_from(bits).unwrap_or(u16::MAX)
    }
}

/// A page's bytes for sums that may be negative.
const PAGE_BYTES_SIGNED: i64 = 4096;
const _: () = assert!(PAGE_BYTES == 4096);

/// Offers unwired pages to the advisor. Holds the arena's lock from `new` to drop: use it for a bounded
/// number of buffers, and make no other call into this memory meanwhile.
pub struct Offers<'a> {
    arena: LockedArena<'a>,
    memory: &'a Memory,
}

impl<'a> Offers<'a> {
    /// Locks the arena.
    pub fn new(memory: &'a Memory) -> Offers<'a> {
        Offers { arena: memory.core.arena.lock(), memory }
    }

    /// Offers all pages of `buffer` that are unwired.
    pub fn add(&mut self, buffer: &SmallBuffer) {
        let Some(first) = buffer.first(self.memory) else { return };
        for (start, pages) in runs(buffer.unwired()) {
            self.arena.offer_allocated(Span { page: first + start, pages });
        }
    }
}

impl std::fmt::Debug for Offers<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Offers").finish_non_exhaustive()
    }
}
