//! The kernel's hand, for tests and benches (feature `testing`): makes it take lent memory now, which
//! it otherwise does when it pleases.
//!
//! Each processor has lists of pages that are on their way into the kernel's books. A page that was
//! touched a moment ago is not taken, and advice about it that is given on another processor is
//! dropped without a word (`elastic-memory.md` 4.3, T7). The call that takes pages empties the lists
//! of its own processor alone, so whoever wants certainty makes it on each.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Where a memory's blocks are, but those on huge pages: (start, end).
#[must_use]
pub fn range(memory: &crate::Memory) -> (usize, usize) {
    let start = memory.core.reservation.address(0).addr().get();
    (start, start + memory.core.split)
}

/// Has pages written to when they come back from a loan, whatever this kernel needs.
pub fn touch_on_return(memory: &crate::Memory, on: bool) {
    memory.core.touches.store(on, crate::sync::Ordering::Relaxed);
}

/// Makes the kernel take what it may of a range of `len` bytes from the page at `start`: lent pages
/// go, others stay. Those in another processor's lists stay, too.
pub fn take(start: usize, len: usize) {
    crate::sys::page_out(start, len);
}

/// As [`take`], of whole ranges (start, length) and on every processor this thread may use.
pub fn take_everywhere(ranges: &[(usize, usize)]) {
    on_each_processor(|| ranges.iter().for_each(|&(start, len)| take(start, len)));
}

/// Enters pages that were touched so far into the kernel's books, so that advice about them holds.
pub fn enter_pages() {
    // Any page of our own: the call empties the lists before it looks at its range.
    let page = Box::new([0u8; 2 * crate::PAGE_BYTES]);
    let start = page.as_ptr().addr().next_multiple_of(crate::PAGE_BYTES);
    on_each_processor(|| take(start, crate::PAGE_BYTES));
}

fn on_each_processor(mut call: impl FnMut()) {
    let Ok(before) = sched_getaffinity(None) else { return call() };
    for processor in (0..CpuSet::MAX_CPU).filter(|processor| before.is_set(*processor)) {
        let mut one = CpuSet::new();
        one.set(processor);
        // Where it fails the call is made here again.
        let _ = sched_setaffinity(None, &one);
        call();
    }
    let _ = sched_setaffinity(None, &before);
}
