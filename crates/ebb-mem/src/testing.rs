//! For tests and benches (feature `testing`): makes the kernel reclaim lent memory now instead of under
//! memory pressure.
//!
//! Each processor batches recently touched pages before they enter the LRU lists (Linux `mm/swap.c`,
//! `lru_add_drain`). A page in such a batch is not reclaimed, and advice about it that is given on
//! another processor is silently ignored. `MADV_PAGEOUT` drains the batches of its own processor only, so
//! a test that needs certainty calls it on each processor.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The address range of a memory's blocks: (start, end).
#[must_use]
pub fn range(memory: &crate::Memory) -> (usize, usize) {
    let start = memory.core.reservation.address(0).addr().get();
    (start, start + memory.core.reservation.bytes())
}

/// Sets whether pages are written to when they are taken back, whatever this kernel needs.
pub fn touch_on_return(memory: &crate::Memory, on: bool) {
    memory.core.touches.store(on, crate::sync::Ordering::Relaxed);
}

/// Makes the kernel reclaim the lent pages of the `len` bytes from the page at `start`. Other pages stay,
/// and so do those in another processor's batches.
pub fn take(start: usize, len: usize) {
    crate::sys::page_out(start, len);
}

/// As [`take`], for ranges (start, length), on every processor that this thread may use.
pub fn take_everywhere(ranges: &[(usize, usize)]) {
    // A lent page may wait in the batch of the processor that gave the advice. If it is taken from the
    // LRU list meanwhile, the kernel drops the mark.
    enter_pages();
    on_each_processor(|| ranges.iter().for_each(|&(start, len)| take(start, len)));
}

/// Drains the batches of all processors, so that advice about pages touched so far takes effect.
pub fn enter_pages() {
    // Any page of this process: the call drains the batches before it walks its range.
    let page = Box::new([0u8; 2 * crate::PAGE_BYTES]);
    let start = page.as_ptr().addr().next_multiple_of(crate::PAGE_BYTES);
    on_each_processor(|| take(start, crate::PAGE_BYTES));
}

fn on_each_processor(mut call: impl FnMut()) {
    let Ok(before) = sched_getaffinity(None) else { return call() };
    for processor in (0..CpuSet::MAX_CPU).filter(|processor| before.is_set(*processor)) {
        let mut one = CpuSet::new();
        one.set(processor);
        // If it fails, the call is made on the current processor again.
        let _ = sched_setaffinity(None, &one);
        call();
    }
    let _ = sched_setaffinity(None, &before);
}
