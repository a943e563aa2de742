//! A position in the spans of a chain, from which data is copied piece by piece.
//!
//! Invariant: no byte outside the spans is accessed; a copy that does not fit is noted, and reported at the end.

use ebb_vhost_proto::BlkStatus;

use crate::memory::{GuestMemory, GuestSpan};

/// See the module.
pub(crate) struct GuestCursor<'a> {
    memory: &'a GuestMemory,
    spans: &'a [GuestSpan],
    /// Bytes of the first span that were passed.
    done: usize,
    failed: bool,
}

impl<'a> GuestCursor<'a> {
    /// A cursor behind the first `skip` bytes of `spans`.
    #[inline]
    pub(crate) fn new(
        memory: &'a GuestMemory,
        spans: &'a [GuestSpan],
        skip: u64,
    ) -> GuestCursor<'a> {
        let mut cursor = GuestCursor { memory, spans, done: 0, failed: false };
        cursor.skip(skip);
        cursor
    }

    #[inline]
    fn skip(&mut self, mut bytes: u64) {
        while bytes > 0 {
            let Some((_, _, here)) = self.next(usize::try_from(bytes).unwrap_or(usize::MAX)) else {
                self.failed = true;
                return;
            };
            bytes -= here as u64;
        }
    }

    /// The next bytes within one span, at most `most`: the span, the offset in its region, the length.
    #[inline]
    fn next(&mut self, most: usize) -> Option<(GuestSpan, usize, usize)> {
        loop {
            let (span, rest) = self.spans.split_first()?;
            let left = usize::try_from(span.len).unwrap_or(usize::MAX) - self.done;
            if left == 0 {
                self.spans = rest;
                self.done = 0;
                continue;
            }
            let here = most.min(left);
            let offset = span.offset + self.done;
            self.done += here;
            return Some((*span, offset, here));
        }
    }

    /// Copies a piece of data to the guest.
    #[inline]
    pub(crate) fn put(&mut self, mut piece: &[u8]) {
        while !piece.is_empty() {
            let Some((span, offset, here)) = self.next(piece.len()) else { return self.fail() };
            let (part, rest) = piece.split_at(here);
            let region = self.memory.region(span.region);
            self.failed |= !region.is_some_and(|region| region.memory.write(offset, part));
            // No longer than the span.
            let len = u32::try_from(here).unwrap_or(span.len);
            self.memory.mark_dirty(GuestSpan { offset, len, ..span });
            piece = rest;
        }
    }

    /// Copies a piece of data from the guest.
    #[inline]
    pub(crate) fn get(&mut self, mut piece: &mut [u8]) {
        while !piece.is_empty() {
            let Some((span, offset, here)) = self.next(piece.len()) else { return self.fail() };
            let (part, rest) = piece.split_at_mut(here);
            let region = self.memory.region(span.region);
            self.failed |= !region.is_some_and(|region| region.memory.read(offset, part));
            piece = rest;
        }
    }

    #[cold]
    fn fail(&mut self) {
        self.failed = true;
    }

    /// Whether all was copied.
    ///
    /// # Errors
    /// If not.
    #[inline]
    pub(crate) fn end(self) -> Result<(), BlkStatus> {
        if self.failed || self.memory.is_lost() { Err(BlkStatus::IoError) } else { Ok(()) }
    }
}
