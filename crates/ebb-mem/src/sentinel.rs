//! The sentinel protocol: detects whether the kernel has discarded a lent page. The only module that
//! accesses lent memory.
//!
//! Before a page is offered, its first word is saved and replaced by [`MAGIC`]. The kernel discards whole
//! pages, and a discarded page reads as zeroes. When the page is taken back, the saved word is exchanged
//! for the sentinel: if the word was still `MAGIC`, the page was resident, and the write of the exchange
//! has made it dirty, which cancels `MADV_FREE` (see `madvise(2)`). A read would not be enough, since the
//! kernel could discard the page between the read and its use.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::class::PAGE_BYTES;
use crate::sys::Reservation;

/// The first word of a lent page. Not zero, since a discarded page reads as zeroes.
const MAGIC: u64 = 0x0ebb_5ea1_dafe_ea57;

fn word(reservation: &Reservation, page: usize) -> &AtomicU64 {
    let address = reservation.address(page).cast::<u64>();
    // SAFETY: aligned (a page's start), inside the mapping, initialised (anonymous memory), and
    // while the reference lives only accessed through this function: the caller holds the page's
    // buffer exclusively, and no slice over it exists.
    unsafe { AtomicU64::from_ptr(address.as_ptr()) }
}

fn saved(saved: &Reservation, page: usize) -> &AtomicU64 {
    let index = page * 8;
    let address = saved.address(index / PAGE_BYTES).as_ptr().wrapping_add(index % PAGE_BYTES);
    // SAFETY: eight aligned bytes inside the table of saved words (one word per page of the
    // arena), which is only ever used through atomics.
    unsafe { AtomicU64::from_ptr(address.cast()) }
}

/// Writes the sentinel to a page that is about to be offered. The caller owns the page exclusively.
pub(crate) fn arm(reservation: &Reservation, table: &Reservation, page: usize) {
    let content = word(reservation, page).swap(MAGIC, Ordering::AcqRel);
    saved(table, page).store(content, Ordering::Release);
}

/// Removes the sentinel from a page that the arena has wired again. False: the kernel had discarded the
/// page, and its content is lost.
#[must_use]
pub(crate) fn disarm(reservation: &Reservation, table: &Reservation, page: usize) -> bool {
    let content = saved(table, page).load(Ordering::Acquire);
    word(reservation, page).swap(content, Ordering::AcqRel) == MAGIC
}

/// Copies bytes `from..from + out.len()` of a lent page, and leaves it lent. False: the kernel had
/// discarded the page, and the content of `out` is undefined. The caller ensures that the page is not
/// wired meanwhile.
///
/// A read of the sentinel is enough here, since only the copy made before that read is used. A discarded
/// page reads as zeroes from then on and never contains the sentinel again; a page that contains it after
/// the copy was therefore resident during the whole copy.
#[must_use]
pub(crate) fn copy_lent(
    reservation: &Reservation,
    table: &Reservation,
    page: usize,
    from: usize,
    out: &mut [u8],
) -> bool {
    const WORD: usize = size_of::<u64>();
    assert!(from <= PAGE_BYTES && out.len() <= PAGE_BYTES - from, "within the page");
    let content = saved(table, page).load(Ordering::Acquire).to_ne_bytes();
    let head = out.len().min(WORD.saturating_sub(from));
    let (first, rest) = out.split_at_mut(head);
    let start = reservation.address(page).as_ptr().wrapping_add(from + head);
    // SAFETY: inside the page (checked), which is mapped and initialised; `rest` is memory of its
    // own. No thread writes to it: the caller ensures that the page is not wired. The kernel may
    // replace the page by one of zeroes at any time; then the caller discards the copy (false).
    unsafe { std::ptr::copy_nonoverlapping(start, rest.as_mut_ptr(), rest.len()) };
    // All loads of the copy come before the load of the sentinel.
    fence(Ordering::Acquire);
    let there = word(reservation, page).load(Ordering::Acquire) == MAGIC;
    if head > 0 {
        first.copy_from_slice(&content[from..from + head]);
    }
    there
}

/// Writes to a page without changing it: cancels `MADV_FREE` where the content does not matter. The
/// caller owns the page exclusively.
pub(crate) fn touch(reservation: &Reservation, page: usize) {
    let word = word(reservation, page).as_ptr();
    // Volatile: an atomic operation that changes nothing is compiled to a load and a fence.
    // SAFETY: from a reference to the word, which nothing else uses meanwhile.
    let value = unsafe { word.read_volatile() };
    // SAFETY: as above.
    unsafe { word.write_volatile(value) };
}
