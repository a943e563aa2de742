//! What the advisor's threads share with the memory, and the address space of both.

use crate::advise::{Books, Orders};
use crate::arena::Closed;
use crate::class::PAGE_BYTES;
use crate::memory::Memory;
use crate::overcommit::Overcommit;
use crate::sentinel;
use crate::sync::{AtomicBool, Ordering};
use crate::sys::{Reservation, Span};

/// Bytes of a page's saved word.
pub(crate) const WORD: usize = 8;

/// What the advisor's threads share with the memory.
pub(crate) struct Core {
    pub(crate) reservation: Reservation,
    /// One word per page of it, for the sentinels' saved words.
    pub(crate) saved: Reservation,
    /// Bytes of the reservation that are on small pages; behind them it is on large ones.
    pub(crate) split: usize,
    pub(crate) charge: Overcommit,
    /// Pages are written to when they come back from a loan (`kernel.rs`).
    pub(crate) touches: AtomicBool,
    pub(crate) books: Books,
    pub(crate) orders: Orders,
}

impl Core {
    /// The saved words of these pages, in bytes: where they begin, and how many.
    fn words(span: Span) -> (usize, usize) {
        (span.page * WORD, span.pages * WORD)
    }

    /// Takes these pages off loan where the kernel might throw away what is read into them. The caller
    /// has wired them.
    #[inline]
    pub(crate) fn take_back(&self, span: Span) {
        if self.touches.load(Ordering::Relaxed) {
            let pages = span.page..span.page + span.pages;
            pages.for_each(|page| sentinel::touch(&self.reservation, page));
        }
    }

    /// Gives access to a chunk, which is charged for if the kernel charges.
    fn open(&self, span: Span) -> std::io::Result<()> {
        let (at, bytes) = Core::words(span);
        if self.charge.is_any() && !self.charge.allows(span.pages * PAGE_BYTES + bytes) {
            return Err(std::io::ErrorKind::OutOfMemory.into());
        }
        self.saved.open(at, bytes)?;
        self.reservation.open(span.page * PAGE_BYTES, span.pages * PAGE_BYTES)
    }

    /// Takes the access away, and with it what the kernel charges.
    pub(crate) fn close(&self, span: Span) -> Closed {
        let (at, bytes) = (span.page * PAGE_BYTES, span.pages * PAGE_BYTES);
        let closed = self.reservation.close(at, bytes, at >= self.split);
        if closed != Closed::Yes {
            return closed;
        }
        let (at, bytes) = Core::words(span);
        match self.saved.close(at, bytes, false) {
            // The words are still there, and the pages will be when it is opened again.
            Closed::No => Closed::Yes,
            closed => closed,
        }
    }
}

impl Memory {
    /// Opens address space for `extents` extents in a row. False if there is none, or the kernel
    /// refuses: that is a ceiling as any other, and what is given back, here or by others, ends it.
    #[cold]
    pub(crate) fn open(&self, extents: usize, huge: bool) -> bool {
        let opening = self.core.books.lock().open_begin(extents, huge);
        let Some(opening) = opening else { return false };
        let mut all = true;
        for span in opening.spans() {
            let done = self.core.open(span).is_ok();
            self.core.books.lock().open_end(span, done);
            all &= done;
        }
        if !all {
            self.refusals.fetch_add(1, Ordering::Relaxed);
        }
        all
    }

    /// Times the kernel had no address space for this memory, or none that it should take: then it
    /// helps nobody to lend, and only what is freed can be used again.
    pub fn refusals(&self) -> u64 {
        self.refusals.load(Ordering::Relaxed)
    }
}
