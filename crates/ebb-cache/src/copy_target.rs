//! Where cached data is copied to: a buffer, or memory that is accessible by copies only, such as a guest's.

use std::ops::Range;

use ebb_mem::PAGE_BYTES;

/// The bytes of a request, or of a part of it.
pub(crate) trait CopyTarget {
    /// Copies `bytes` to `at`.
    fn put(&mut self, at: usize, bytes: &[u8]);

    /// Has `read` fill at most a page at `range`; false if it says that the data is of no use.
    fn put_checked(&mut self, range: Range<usize>, read: impl FnOnce(&mut [u8]) -> bool) -> bool;
}

impl CopyTarget for [u8] {
    #[inline]
    fn put(&mut self, at: usize, bytes: &[u8]) {
        self[at..at + bytes.len()].copy_from_slice(bytes);
    }

    #[inline]
    fn put_checked(&mut self, range: Range<usize>, read: impl FnOnce(&mut [u8]) -> bool) -> bool {
        read(&mut self[range])
    }
}

/// Passes pieces to a function, from an offset on. What may be discarded during the copy passes a page of the stack.
pub(crate) struct Pieces<'a, F> {
    pub(crate) offset: usize,
    pub(crate) put: &'a mut F,
}

impl<F: FnMut(usize, &[u8])> CopyTarget for Pieces<'_, F> {
    #[inline]
    fn put(&mut self, at: usize, bytes: &[u8]) {
        (self.put)(self.offset + at, bytes);
    }

    fn put_checked(&mut self, range: Range<usize>, read: impl FnOnce(&mut [u8]) -> bool) -> bool {
        let mut page = [0; PAGE_BYTES];
        let bytes = &mut page[..range.len()];
        let good = read(bytes);
        if good {
            (self.put)(self.offset + range.start, bytes);
        }
        good
    }
}
