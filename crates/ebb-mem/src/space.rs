//! The part of a memory that the advisor's threads share, and the opening and closing of address space.

use crate::advise::{AdvisorControl, SharedArena};
use crate::class::PAGE_BYTES;
use crate::memory::Memory;
use crate::overcommit::Overcommit;
use crate::sentinel;
use crate::sync::{AtomicBool, Ordering};
use crate::sys::{Closed, Reservation, Span};

/// Bytes of a page's saved word.
pub(crate) const WORD: usize = 8;

/// The part of a memory that the advisor's threads share.
pub(crate) struct Core {
    pub(crate) reservation: Reservation,
    /// One word per page of it, for the sentinels' saved words.
    pub(crate) saved: Reservation,
    pub(crate) charge: Overcommit,
    /// Pages are written to when they are taken back (`kernel.rs`).
    pub(crate) touches: AtomicBool,
    pub(crate) arena: SharedArena,
    pub(crate) control: AdvisorControl,
}

impl Core {
    /// Offset and length of the saved words of these pages, in bytes.
    fn words(span: Span) -> (usize, usize) {
        (span.page * WORD, span.pages * WORD)
    }

    /// Cancels `MADV_FREE` for these pages where the kernel might discard what is read into them. The
    /// caller has wired them.
    #[inline]
    pub(crate) fn cancel_loan(&self, span: Span) {
        if self.touches.load(Ordering::Relaxed) {
            let pages = span.page..span.page + span.pages;
            pages.for_each(|page| sentinel::touch(&self.reservation, page));
        }
    }

    /// Makes a chunk accessible. The kernel charges for it where it accounts commits.
    fn open(&self, span: Span) -> std::io::Result<()> {
        let (at, bytes) = Core::words(span);
        if self.charge.is_any() && !self.charge.allows(span.pages * PAGE_BYTES + bytes) {
            return Err(std::io::ErrorKind::OutOfMemory.into());
        }
        self.saved.open(at, bytes)?;
        self.reservation.open(span.page * PAGE_BYTES, span.pages * PAGE_BYTES)
    }

    /// Removes the access, and with it the charge.
    pub(crate) fn close(&self, span: Span) -> Closed {
        let (at, bytes) = (span.page * PAGE_BYTES, span.pages * PAGE_BYTES);
        let closed = self.reservation.close(at, bytes);
        if closed != Closed::Yes {
            return closed;
        }
        let (at, bytes) = Core::words(span);
        match self.saved.close(at, bytes) {
            // The saved words stay accessible, which is harmless.
            Closed::No => Closed::Yes,
            closed => closed,
        }
    }
}

impl Memory {
    /// Opens address space for `extents` consecutive extents. False if none remains or the kernel
    /// refuses: the caller treats that as the ceiling, and it ends when memory is freed here or by other
    /// processes.
    #[cold]
    pub(crate) fn open(&self, extents: usize) -> bool {
        let opening = self.core.arena.lock().open_begin(extents);
        let Some(opening) = opening else { return false };
        let mut all = true;
        for span in opening.spans() {
            let done = self.core.open(span).is_ok();
            self.core.arena.lock().open_end(span, done);
            all &= done;
        }
        if !all {
            self.refusals.fetch_add(1, Ordering::Relaxed);
        }
        all
    }

    /// How often address space could not be opened: the kernel refused, or the reserves of
    /// `overcommit.rs` would have been used. Lending does not help then; only freed memory can be reused.
    pub fn refusals(&self) -> u64 {
        self.refusals.load(Ordering::Relaxed)
    }
}
