//! The measured program with counters: of calls of the allocator, and of the bytes that `memcpy`
//! and `memmove` copy. Both would change the instructions that callgrind counts. See
//! [`counts::served`].

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

use counting_allocator::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

static COPIED: AtomicU64 = AtomicU64::new(0);

/// The C library's function, with a counter: the program's own definition comes first.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memcpy(to: *mut c_void, from: *const c_void, bytes: usize) -> *mut c_void {
    COPIED.fetch_add(bytes as u64, Ordering::Relaxed);
    // SAFETY: the caller says that both ranges are valid.
    unsafe { forward(to, from, bytes) };
    to
}

/// As [`memcpy`], for ranges that may overlap.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memmove(
    to: *mut c_void,
    from: *const c_void,
    bytes: usize,
) -> *mut c_void {
    COPIED.fetch_add(bytes as u64, Ordering::Relaxed);
    if to.addr().wrapping_sub(from.addr()) >= bytes {
        // SAFETY: the caller says that both ranges are valid; a copy from the front is right, since
        // `to` does not begin within `from`.
        unsafe { forward(to, from, bytes) };
    } else {
        // SAFETY: as above, from the back.
        unsafe { backward(to, from, bytes) };
    }
    to
}

/// Not by a plain loop, of which the compiler would make a call of `memcpy`.
///
/// # Safety
/// Both ranges are valid.
unsafe fn forward(to: *mut c_void, from: *const c_void, bytes: usize) {
    for at in 0..bytes {
        // SAFETY: within both.
        unsafe { move_byte(to, from, at) };
    }
}

/// From the last byte on.
///
/// # Safety
/// Both ranges are valid.
unsafe fn backward(to: *mut c_void, from: *const c_void, bytes: usize) {
    for at in (0..bytes).rev() {
        // SAFETY: within both.
        unsafe { move_byte(to, from, at) };
    }
}

/// # Safety
/// Both are valid at `at`.
unsafe fn move_byte(to: *mut c_void, from: *const c_void, at: usize) {
    // SAFETY: the caller says so.
    let byte = unsafe { from.cast::<u8>().wrapping_add(at).read_volatile() };
    // SAFETY: as above.
    unsafe { to.cast::<u8>().wrapping_add(at).write_volatile(byte) };
}

fn copied() -> u64 {
    COPIED.load(Ordering::Relaxed) + ebb_guest_ring::copied_bytes() as u64
}

fn main() -> std::process::ExitCode {
    counts::served::main(copied)
}
