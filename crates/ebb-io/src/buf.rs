//! Owned, aligned I/O buffers and the per-worker pool they return to.
//!
//! Invariants: a [`Buf`] has a stable address for its whole life; its memory is always initialised;
//! dropping it returns it to its pool; the pool keeps at most [`KEEP_BYTES`] idle and gives all of
//! them back when the worker has been quiet (see `BufPool::trim`).

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::cell::{Cell, RefCell};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::rc::Rc;

/// Alignment of every buffer in bytes: enough for O_DIRECT on any device in use.
const ALIGN: usize = 4096;
/// Smallest size class in bytes, as a power of two.
const MIN_SHIFT: u32 = 12;
/// Largest size class in bytes, as a power of two.
const MAX_SHIFT: u32 = 26;
const CLASSES: usize = (MAX_SHIFT - MIN_SHIFT + 1) as usize;
/// Idle bytes a pool keeps for reuse; more is freed at once.
const KEEP_BYTES: usize = 32 << 20;

/// The largest buffer that can be asked for, in bytes.
pub const MAX_BUF: usize = 1 << MAX_SHIFT;

/// The buffers of one worker. Cheap to clone; not shared between threads.
#[derive(Clone, Default)]
pub struct BufPool(Rc<Inner>);

#[derive(Default)]
struct Inner {
    free: RefCell<[Vec<NonNull<u8>>; CLASSES]>,
    idle_bytes: Cell<usize>,
    used_bytes: Cell<usize>,
    /// Buffers handed out since the last trim: tells a quiet pool from a busy one.
    gets: Cell<u64>,
}

fn class_of(len: usize) -> usize {
    let shift = len.max(1).next_power_of_two().trailing_zeros().max(MIN_SHIFT);
    (shift - MIN_SHIFT) as usize
}

fn layout_of(class: usize) -> Layout {
    // Size and alignment are powers of two far below isize::MAX, so this cannot fail.
    Layout::from_size_align(class_bytes(class), ALIGN).unwrap_or(Layout::new::<u8>())
}

fn class_bytes(class: usize) -> usize {
    1 << (class + MIN_SHIFT as usize)
}

impl BufPool {
    /// A buffer of `len` bytes (1 to [`MAX_BUF`]). Its content is whatever was there before.
    ///
    /// # Panics
    /// If `len` is larger than [`MAX_BUF`]: callers check lengths that come from outside first.
    pub fn get(&self, len: usize) -> Buf {
        assert!(len <= MAX_BUF, "buffer of {len} bytes asked for; callers check limits first");
        let class = class_of(len);
        let inner = &self.0;
        let bytes = class_bytes(class);
        let reused = inner.free.borrow_mut()[class].pop();
        let ptr = match reused {
            Some(ptr) => {
                inner.idle_bytes.set(inner.idle_bytes.get() - bytes);
                ptr
            }
            None => allocate(class),
        };
        inner.used_bytes.set(inner.used_bytes.get() + bytes);
        inner.gets.set(inner.gets.get() + 1);
        Buf { ptr, class, len, pool: self.clone() }
    }

    /// Bytes of memory a buffer of `len` bytes takes: its size class, and what the heap adds to keep
    /// it aligned. For whoever accounts for memory before asking for it.
    pub fn footprint(len: usize) -> usize {
        class_bytes(class_of(len.min(MAX_BUF))) + ALIGN
    }

    /// Bytes in idle buffers kept for reuse.
    pub fn idle_bytes(&self) -> usize {
        self.0.idle_bytes.get()
    }

    /// Bytes in buffers that are in use.
    pub fn used_bytes(&self) -> usize {
        self.0.used_bytes.get()
    }

    /// Frees all idle buffers if none was asked for since the last call. Returns true when there
    /// is nothing left to trim.
    pub(crate) fn trim(&self) -> bool {
        let inner = &self.0;
        if inner.gets.replace(0) > 0 {
            return false;
        }
        if inner.idle_bytes.get() == 0 {
            return true;
        }
        self.free_idle();
        // SAFETY: malloc_trim has no preconditions; it returns free heap pages to the kernel.
        unsafe { libc::malloc_trim(0) };
        true
    }

    fn free_idle(&self) {
        let mut free = self.0.free.borrow_mut();
        for (class, list) in free.iter_mut().enumerate() {
            for ptr in list.drain(..) {
                // SAFETY: the pointer came from `allocate(class)` and is in no Buf.
                unsafe { dealloc(ptr.as_ptr(), layout_of(class)) };
            }
            list.shrink_to_fit();
        }
        self.0.idle_bytes.set(0);
    }

    fn put(&self, ptr: NonNull<u8>, class: usize) {
        let inner = &self.0;
        let bytes = class_bytes(class);
        inner.used_bytes.set(inner.used_bytes.get() - bytes);
        let idle = inner.idle_bytes.get() + bytes;
        if idle > KEEP_BYTES {
            // SAFETY: the pointer came from `allocate(class)` and its Buf is being dropped.
            unsafe { dealloc(ptr.as_ptr(), layout_of(class)) };
            return;
        }
        inner.free.borrow_mut()[class].push(ptr);
        inner.idle_bytes.set(idle);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        for (class, list) in self.free.get_mut().iter_mut().enumerate() {
            for ptr in list.drain(..) {
                // SAFETY: as in `free_idle`; no Buf can exist, since each holds an Rc to us.
                unsafe { dealloc(ptr.as_ptr(), layout_of(class)) };
            }
        }
    }
}

fn allocate(class: usize) -> NonNull<u8> {
    let layout = layout_of(class);
    // SAFETY: the layout has a non-zero size.
    let ptr = unsafe { alloc_zeroed(layout) };
    NonNull::new(ptr).unwrap_or_else(|| handle_alloc_error(layout))
}

/// An owned buffer of a worker. Dereferences to its bytes.
pub struct Buf {
    ptr: NonNull<u8>,
    class: usize,
    len: usize,
    pool: BufPool,
}

impl Buf {
    /// Bytes the buffer can hold: `len` may be set up to this.
    pub fn capacity(&self) -> usize {
        class_bytes(self.class)
    }

    /// Sets the length, at most [`Buf::capacity`].
    ///
    /// # Panics
    /// If `len` is larger than the capacity.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity(), "length {len} beyond capacity {}", self.capacity());
        self.len = len;
    }

    pub(crate) fn addr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }
}

impl Deref for Buf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes are owned by self, and the kernel does not hold them:
        // an operation takes the Buf by value for as long as it runs.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for Buf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        self.pool.put(self.ptr, self.class);
    }
}

impl std::fmt::Debug for Buf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buf").field("len", &self.len).field("capacity", &self.capacity()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_round_up_to_powers_of_two() {
        let pool = BufPool::default();
        for (len, capacity) in [(1, 4096), (4096, 4096), (4097, 8192), (MAX_BUF, MAX_BUF)] {
            let buf = pool.get(len);
            assert_eq!((buf.len(), buf.capacity()), (len, capacity));
            assert_eq!(buf.as_ptr() as usize % ALIGN, 0);
        }
    }

    #[test]
    fn a_dropped_buffer_is_reused_and_a_quiet_pool_is_emptied() {
        let pool = BufPool::default();
        let first = pool.get(5000);
        let address = first.as_ptr();
        drop(first);
        assert_eq!((pool.idle_bytes(), pool.used_bytes()), (8192, 0));
        let second = pool.get(8000);
        assert_eq!(second.as_ptr(), address);
        assert_eq!((pool.idle_bytes(), pool.used_bytes()), (0, 8192));
        drop(second);
        assert!(!pool.trim(), "buffers were used since the last trim");
        assert_eq!(pool.idle_bytes(), 8192);
        assert!(pool.trim());
        assert_eq!(pool.idle_bytes(), 0);
    }

    #[test]
    fn idle_buffers_are_bounded() {
        let pool = BufPool::default();
        let held: Vec<_> = (0..40).map(|_| pool.get(1 << 20)).collect();
        drop(held);
        assert!(pool.idle_bytes() <= KEEP_BYTES);
    }
}
