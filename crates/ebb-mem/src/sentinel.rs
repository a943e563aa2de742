//! The sentinel protocol on single words: the only place that touches lent memory.
//!
//! `elastic-memory.md` 4.2. Before a page is offered its first word is saved and replaced by
//! [`MAGIC`]. The kernel takes whole pages, and a taken page reads as zero; so when the word is
//! exchanged back and was still `MAGIC`, the page was there, and the write of the exchange itself
//! has made it dirty and cancelled the loan. Only a write does that: a plain look would leave a page
//! that may go between the look and the use.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::class::PAGE_BYTES;
use crate::sys::Reservation;

/// Stands in the first word of a lent page. Never zero, which is what a taken page shows.
const MAGIC: u64 = 0x0ebb_5ea1_dafe_ea57;

fn word(reservation: &Reservation, page: usize) -> &AtomicU64 {
    let address = reservation.address(page).cast::<u64>();
    // SAFETY: aligned (a page's start), inside the mapping, initialised (anonymous memory), and
    // while it lives only reached through this function: the caller holds the page's buffer
    // exclusively and lends out no slice over it meanwhile.
    unsafe { AtomicU64::from_ptr(address.as_ptr()) }
}

fn saved(saved: &Reservation, page: usize) -> &AtomicU64 {
    let index = page * 8;
    let address = saved.address(index / PAGE_BYTES).as_ptr().wrapping_add(index % PAGE_BYTES);
    // SAFETY: eight aligned bytes inside the table of saved words (one word per page of the
    // arena), which is only ever used through atomics.
    unsafe { AtomicU64::from_ptr(address.cast()) }
}

/// Puts the sentinel into a page that is about to be offered. The caller owns the page alone.
pub(crate) fn arm(reservation: &Reservation, table: &Reservation, page: usize) {
    let content = word(reservation, page).swap(MAGIC, Ordering::AcqRel);
    saved(table, page).store(content, Ordering::Release);
}

/// Takes the sentinel out of a page that is wired again in the books. False: the kernel had taken
/// the page, and its content is gone.
#[must_use]
pub(crate) fn disarm(reservation: &Reservation, table: &Reservation, page: usize) -> bool {
    let content = saved(table, page).load(Ordering::Acquire);
    word(reservation, page).swap(content, Ordering::AcqRel) == MAGIC
}

/// Copies bytes `from..from + out.len()` of a lent page, and leaves it lent. False: the kernel had
/// taken the page, and `out` holds garbage. The caller keeps the page from being wired meanwhile.
///
/// Why a look is enough here: nothing is used of the page after the look but what was copied before
/// it. A taken page never shows the sentinel again (it reads as zero from then on), so one that
/// shows it after the copy was there during the whole copy.
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
    // own. No thread writes to it: whoever would wire the page is kept away by the caller. The
    // kernel may exchange the page for one of zeroes at any moment; then what was copied is
    // thrown away below.
    unsafe { std::ptr::copy_nonoverlapping(start, rest.as_mut_ptr(), rest.len()) };
    // All loads of the copy come before the load of the sentinel.
    fence(Ordering::Acquire);
    let there = word(reservation, page).load(Ordering::Acquire) == MAGIC;
    if head > 0 {
        first.copy_from_slice(&content[from..from + head]);
    }
    there
}

/// Writes to a page without changing it: cancels a loan whose content does not matter. The caller owns
/// the page alone.
pub(crate) fn touch(reservation: &Reservation, page: usize) {
    let word = word(reservation, page).as_ptr();
    // Volatile: an atomic operation that changes nothing is compiled to a load and a fence.
    // SAFETY: from a reference to the word, which nobody else uses meanwhile.
    let value = unsafe { word.read_volatile() };
    // SAFETY: as above.
    unsafe { word.write_volatile(value) };
}
