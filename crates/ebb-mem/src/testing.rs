//! The kernel's hand, for tests and benches (feature `testing`): makes it take lent memory now, which
//! it otherwise does when it pleases.
//!
//! Each processor has lists of pages that are on their way into the kernel's books. A page that was
//! touched a moment ago is not taken, and advice about it that is given on another processor is
//! dropped without a word (`elastic-memory.md` 4.3, T7). The call that takes pages empties the lists
//! of its own processor alone, so whoever wants certainty makes it on each.

/// Makes the kernel take what it may of a range of `len` bytes from the page at `start`: lent pages
/// go, others stay. Those in another processor's lists stay, too.
pub fn take(start: usize, len: usize) {
    // SAFETY: MADV_PAGEOUT loses no data of its own accord: it only makes the kernel reclaim now what
    // it may reclaim at any time. A range that is not mapped is refused.
    unsafe { libc::madvise(std::ptr::without_provenance_mut(start), len, libc::MADV_PAGEOUT) };
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
    // SAFETY: a set of processors is plain data, and so all of its zeroes are one.
    let mut before: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    let size = size_of::<libc::cpu_set_t>();
    // SAFETY: the set is writable and of this size.
    unsafe { libc::sched_getaffinity(0, size, &raw mut before) };
    for processor in 0..8 * size {
        // SAFETY: the number is below the set's bits.
        if !unsafe { libc::CPU_ISSET(processor, &before) } {
            continue;
        }
        // SAFETY: as above.
        let mut one: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        // SAFETY: as for CPU_ISSET.
        unsafe { libc::CPU_SET(processor, &mut one) };
        // SAFETY: the set is readable and of this size; where it fails the call is made here again.
        unsafe { libc::sched_setaffinity(0, size, &raw const one) };
        call();
    }
    // SAFETY: the set is the one the thread had.
    unsafe { libc::sched_setaffinity(0, size, &raw const before) };
}
