//! A block: owned, page-aligned, initialised memory at a stable address.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::class::{CLASSES, PAGE_BYTES};

/// The volume, queue or cache that a block is accounted to. From
/// [`Memory::owner`](crate::Memory::owner).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OwnerId(pub(crate) u16);

/// Owned memory with a stable address, aligned to 4 KiB, always initialised. It contains zeroes or the
/// data of an earlier use.
///
/// Return a block with [`WorkerMemory::free`](crate::WorkerMemory::free) or to a [`PagePool`](crate::PagePool). A
/// block that is dropped stays accounted as in use for ever: wrap it in a type that frees it. Without a
/// destructor a block has 16 bytes and the hit path is short.
#[must_use = "a dropped block leaks its memory: free it to its worker"]
pub struct Block {
    ptr: NonNull<u8>,
    /// At most 16,384: [`MAX_BLOCK_BYTES`](crate::MAX_BLOCK_BYTES).
    pages: u16,
    owner: OwnerId,
    /// Used by [`SmallBuffer`](crate::SmallBuffer): which of its pages are unwired with their content.
    /// Zero in a plain block.
    unwired: u16,
    class: u8,
}

const _: () = assert!(size_of::<Block>() == 16, "a cache holds millions of them");

// SAFETY: a block owns its pages alone, as a Box<[u8]> would.
unsafe impl Send for Block {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for Block {}

impl Block {
    /// # Safety
    /// `ptr` points to `pages` wired pages of an arena that nothing else refers to while the block
    /// lives, and that stay mapped for as long.
    pub(crate) unsafe fn new(ptr: NonNull<u8>, pages: u32, class: usize, owner: OwnerId) -> Block {
        debug_assert!(pages <= 1 << 14, "the largest block");
        let pages = u16::try_from(pages).unwrap_or(u16::MAX);
        Block { ptr, pages, owner, unwired: 0, class: u8::try_from(class).unwrap_or(u8::MAX) }
    }

    /// Its size in bytes: the requested length, rounded up to its size class (above 1 MiB: to pages).
    #[inline]
    pub fn capacity(&self) -> usize {
        usize::from(self.pages) * PAGE_BYTES
    }

    /// Its size in pages of 4 KiB.
    #[inline]
    pub fn pages(&self) -> u32 {
        u32::from(self.pages)
    }

    /// The owner it is accounted to.
    pub fn owner(&self) -> OwnerId {
        self.owner
    }

    /// Its address. Valid for [`Block::capacity`] bytes until the block is freed, even if the `Block`
    /// value is moved.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// The pages unwired with their content: see the field.
    #[inline]
    pub(crate) fn unwired(&self) -> u16 {
        self.unwired
    }

    pub(crate) fn set_unwired(&mut self, pages: u16) {
        self.unwired = pages;
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Its size class, or [`CLASSES`] if it is a run.
    pub(crate) fn class(&self) -> usize {
        usize::from(self.class)
    }

    /// Some of its bytes, for a block whose other pages are unwired: no slice may cover those.
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
