//! The system's allocator, which counts allocations: for tests of paths that must not use the heap. A test makes it its
//! allocator:
//!
//! ```
//! #[global_allocator]
//! static ALLOCATOR: counting_allocator::CountingAllocator = counting_allocator::CountingAllocator;
//! ```
//!
//! There are two counts: those of the calling thread ([`calls`], [`bytes`]), and that of all threads that were marked
//! with [`mark_thread`] ([`marked_calls`]). With `EBB_SHOW_ALLOCATIONS` in the environment each call of a marked thread is
//! printed with its stack.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};

static MARKED_CALLS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static CALLS: Cell<u64> = const { Cell::new(0) };
    static BYTES: Cell<u64> = const { Cell::new(0) };
    static MARKED: Cell<bool> = const { Cell::new(false) };
}

/// Allocations of this thread so far, enlargements included.
pub fn calls() -> u64 {
    CALLS.get()
}

/// The bytes of these allocations.
pub fn bytes() -> u64 {
    BYTES.get()
}

/// Whether allocations of this thread count as [`marked_calls`] from now on.
pub fn mark_thread(marked: bool) {
    MARKED.set(marked);
}

/// Allocations of all threads while they were marked.
pub fn marked_calls() -> u64 {
    MARKED_CALLS.load(Ordering::SeqCst)
}

fn count(bytes: usize) {
    // A thread that ends has no counters any more.
    let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
    let _ = BYTES.try_with(|sum| sum.set(sum.get() + u64::try_from(bytes).unwrap_or(0)));
    if MARKED.try_with(Cell::get) != Ok(true) {
        return;
    }
    MARKED_CALLS.fetch_add(1, Ordering::SeqCst);
    if std::env::var_os("EBB_SHOW_ALLOCATIONS").is_some() {
        MARKED.set(false);
        let stack = std::backtrace::Backtrace::force_capture();
        // There is nowhere to report an error of stderr.
        let _ = writeln!(std::io::stderr().lock(), "{bytes} bytes\n{stack}");
        MARKED.set(true);
    }
}

/// See the module.
#[derive(Debug)]
pub struct CountingAllocator;

// SAFETY: passes every call to the system's allocator unchanged, and only counts in addition.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller keeps the contract of `alloc`, which is the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count(bytes);
        // SAFETY: as above.
        unsafe { System.realloc(memory, layout, bytes) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}
