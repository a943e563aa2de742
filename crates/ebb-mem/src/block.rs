//! A block: owned, page-aligned, initialised memory at a stable address.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::class::{CLASSES, PAGE_BYTES};

/// Who a block is accounted to (a volume, a queue, a cache). From
/// [`Memory::owner`](crate::Memory::owner).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OwnerId(pub(crate) u16);

/// Owned memory: 4 KiB aligned, of stable address, always initialised. What is in it is left over
/// from an earlier use (or zero).
///
/// A block goes back by [`Worker::free`](crate::Worker::free) or into a
/// [`PagePool`](crate::PagePool). One that is merely dropped stays accounted as in use for ever: wrap
/// it in a type of your own that frees it. That keeps the block at 16 bytes and the hit path short.
#[must_use = "a dropped block is lost: free it to its worker"]
pub struct Block {
    ptr: NonNull<u8>,
    /// At most 16,384: [`MAX_BLOCK_BYTES`](crate::MAX_BLOCK_BYTES).
    pages: u16,
    owner: OwnerId,
    /// Room for the [`SmallBuffer`](crate::SmallBuffer) a block may become: which of its pages are
    /// lent with their content. Zero in a plain block.
    lent: u16,
    class: u8,
}

const _: () = assert!(size_of::<Block>() == 16, "a cache holds millions of them");

// SAFETY: a block owns its pages alone, as a Box<[u8]> would.
unsafe impl Send for Block {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for Block {}

impl Block {
    /// # Safety
    /// `ptr` leads to `pages` wired pages of an arena that nobody else refers to while the block
    /// lives, and that stay mapped for as long.
    pub(crate) unsafe fn new(ptr: NonNull<u8>, pages: u32, class: usize, owner: OwnerId) -> Block {
        debug_assert!(pages <= 1 << 14, "the largest block");
        let pages = u16::try_from(pages).unwrap_or(u16::MAX);
        Block { ptr, pages, owner, lent: 0, class: u8::try_from(class).unwrap_or(u8::MAX) }
    }

    /// Bytes it holds: the length asked for, rounded up to its size class (above 1 MiB: to pages).
    #[inline]
    pub fn capacity(&self) -> usize {
        usize::from(self.pages) * PAGE_BYTES
    }

    /// Pages of 4 KiB it holds.
    #[inline]
    pub fn pages(&self) -> u32 {
        u32::from(self.pages)
    }

    /// Who it is accounted to.
    pub fn owner(&self) -> OwnerId {
        self.owner
    }

    /// Its address. Valid for [`Block::capacity`] bytes until the block is freed, wherever the
    /// block itself is moved.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// Pages lent with their content: see the field.
    #[inline]
    pub(crate) fn lent(&self) -> u16 {
        self.lent
    }

    pub(crate) fn set_lent(&mut self, pages: u16) {
        self.lent = pages;
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Its size class, or [`CLASSES`] if it is a run.
    pub(crate) fn class(&self) -> usize {
        usize::from(self.class)
    }

    /// Some of its bytes: for one whose other pages are lent, over which no slice may be made.
    pub(crate) fn bytes_in(&self, range: std::ops::Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.capacity(), "inside the block");
        let start = self.ptr.as_ptr().wrapping_add(range.start);
        // SAFETY: inside the block (checked), which owns initialised bytes; see `deref`.
        unsafe { std::slice::from_raw_parts(start, range.len()) }
    }

    /// As [`Block::bytes_in`], to write.
    pub(crate) fn bytes_in_mut(&mut self, range: std::ops::Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.capacity(), "inside the block");
        let start = self.ptr.as_ptr().wrapping_add(range.start);
        // SAFETY: as `bytes_in`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(start, range.len()) }
    }

    pub(crate) fn is_run(&self) -> bool {
        self.class() >= CLASSES
    }
}

impl Deref for Block {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the block owns these bytes (`new`), anonymous memory is always initialised, and
        // the borrow of the block keeps it from being freed.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.capacity()) }
    }
}

impl DerefMut for Block {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.capacity()) }
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block")
            .field("capacity", &self.capacity())
            .field("owner", &self.owner.0)
            .finish()
    }
}
