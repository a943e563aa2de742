//! Memory of another process that the kernel reads or writes directly for an operation: guest memory that is shared with
//! this process.
//!
//! # Invariants
//! - There are no references into the memory, and nothing here reads or writes it: only the kernel does.
//! - The memory stays mapped as long as the list has its owner, and the list belongs to the operation until its completion
//!   has arrived.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// The most pieces of a list: what the kernel takes at once (`UIO_MAXIOV`).
pub const FOREIGN_PIECES_MAX: usize = 1024;

/// A list of pieces of foreign memory, in order. It is used again for later operations, so that it does not grow.
#[derive(Default)]
pub struct ForeignVectors {
    vectors: Vec<libc::iovec>,
    /// Pieces that were transferred whole.
    done: usize,
    /// Bytes that were not transferred yet.
    remaining: usize,
    owner: Option<Arc<dyn Any + Send + Sync>>,
}

impl fmt::Debug for ForeignVectors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pieces = self.vectors.len();
        f.debug_struct("ForeignVectors")
            .field("pieces", &pieces)
            .field("remaining", &self.remaining)
            .finish()
    }
}

impl ForeignVectors {
    /// Begins a list of memory that is mapped as long as `owner` exists.
    pub fn begin(&mut self, owner: Arc<dyn Any + Send + Sync>) {
        self.clear();
        self.owner = Some(owner);
    }

    /// Forgets the memory and its owner.
    pub fn clear(&mut self) {
        self.vectors.clear();
        (self.done, self.remaining, self.owner) = (0, 0, None);
    }

    /// Appends a piece; false, without effect, if there are [`FOREIGN_PIECES_MAX`].
    ///
    /// # Safety
    /// The `length` bytes at `address` must be mapped readable and writable as long as the owner that was passed to
    /// [`ForeignVectors::begin`] exists, and no Rust reference may point to them.
    #[must_use]
    pub unsafe fn push(&mut self, address: *mut u8, length: usize) -> bool {
        if self.vectors.len() >= FOREIGN_PIECES_MAX {
            return false;
        }
        let Some(remaining) = self.remaining.checked_add(length) else { return false };
        self.remaining = remaining;
        // Pieces are often adjacent: a guest's pages are.
        if let Some(last) = self.vectors.last_mut()
            && last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == address
        {
            last.iov_len += length;
            return true;
        }
        self.vectors.push(libc::iovec { iov_base: address.cast(), iov_len: length });
        true
    }

    /// Bytes that are not transferred yet.
    #[inline]
    pub fn remaining(&self) -> usize {
        self.remaining
    }

    /// Whether each piece begins and ends at a multiple of `alignment` bytes, as direct I/O needs it.
    pub fn is_aligned(&self, alignment: usize) -> bool {
        let aligned = |vector: &libc::iovec| {
            (vector.iov_base.addr() | vector.iov_len).is_multiple_of(alignment)
        };
        self.vectors.iter().all(aligned)
    }

    /// Notes that `bytes` more were transferred, at most what remains.
    pub fn advance(&mut self, bytes: usize) {
        let mut left = bytes.min(self.remaining);
        self.remaining -= left;
        while let Some(vector) = self.vectors.get_mut(self.done)
            && left > 0
        {
            let here = left.min(vector.iov_len);
            vector.iov_base = vector.iov_base.cast::<u8>().wrapping_add(here).cast();
            vector.iov_len -= here;
            left -= here;
            self.done += usize::from(vector.iov_len == 0);
        }
    }

    /// The pieces that remain.
    pub(crate) fn vectors(&self) -> &[libc::iovec] {
        self.vectors.get(self.done..).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(list: &ForeignVectors) -> Vec<(usize, usize)> {
        list.vectors().iter().map(|v| (v.iov_base.addr(), v.iov_len)).collect()
    }

    fn push(list: &mut ForeignVectors, address: usize, length: usize) -> bool {
        // SAFETY: nothing accesses the memory.
        unsafe { list.push(std::ptr::without_provenance_mut(address), length) }
    }

    #[test]
    fn adjacent_pieces_are_one_and_short_transfers_go_on_where_they_ended() {
        let mut list = ForeignVectors::default();
        list.begin(Arc::new(()));
        assert!(push(&mut list, 0x1000, 0x1000) && push(&mut list, 0x2000, 0x1000));
        assert!(push(&mut list, 0x8000, 0x200));
        assert_eq!(pieces(&list), [(0x1000, 0x2000), (0x8000, 0x200)]);
        assert!(list.is_aligned(512) && !list.is_aligned(4096));
        list.advance(0x1200);
        assert_eq!((pieces(&list)[0], list.remaining()), ((0x2200, 0xe00), 0x1000));
        list.advance(0xe00);
        assert_eq!(pieces(&list), [(0x8000, 0x200)]);
        list.advance(usize::MAX);
        assert!(pieces(&list).is_empty() && list.remaining() == 0);
    }

    #[test]
    fn the_owner_lives_as_long_as_the_list_is_in_use_and_the_list_is_bounded() {
        let owner = Arc::new(());
        let mut list = ForeignVectors::default();
        list.begin(owner.clone());
        let added = (0..2 * FOREIGN_PIECES_MAX).filter(|n| push(&mut list, n * 8192, 4096)).count();
        assert_eq!((added, Arc::strong_count(&owner)), (FOREIGN_PIECES_MAX, 2));
        list.clear();
        assert_eq!((Arc::strong_count(&owner), list.remaining()), (1, 0));
    }
}
