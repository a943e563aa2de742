//! Gives OpenSSL locked memory for what it derives from keys.
//!
//! A context of OpenSSL's has the round keys of a cipher, of which the first are the key itself, in memory that OpenSSL
//! allocates; it can be neither placed nor found by its users. So this module replaces OpenSSL's allocator, once, before
//! OpenSSL allocates for the first time: what a thread allocates inside of [`in_locked_memory`] comes from slots of a
//! locked region, everything else from `malloc` as before. It costs a comparison of two addresses for each `free`.
//!
//! # Invariants
//! - A slot is wiped before it is given out and after it was freed.
//! - What does not fit in a slot is refused inside of [`in_locked_memory`], not allocated elsewhere.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_void};
use std::sync::{Mutex, OnceLock, PoisonError};

use ebb_sandbox::threads;

use crate::error::LuksError;
use crate::secret::{SecretPages, lock_range};

/// Bytes of a slot: a context for AES-256-XTS takes less.
const SLOT: usize = 1024;
/// Slots of a page, which is locked when its first slot is used.
const PAGE_SLOTS: usize = 4096 / SLOT;
/// Slots of the region: four for each pair of contexts, of which a volume has one per worker.
const SLOTS: usize = 64 << 10;

type Allocate = extern "C" fn(usize, *const c_char, c_int) -> *mut c_void;
type Reallocate = extern "C" fn(*mut c_void, usize, *const c_char, c_int) -> *mut c_void;
type Free = extern "C" fn(*mut c_void, *const c_char, c_int);

unsafe extern "C" {
    /// In libcrypto since OpenSSL 1.1. Returns 0 if something was allocated before.
    fn CRYPTO_set_mem_functions(allocate: Allocate, reallocate: Reallocate, free: Free) -> c_int;
    /// Fills with zeroes, and is not optimised away.
    fn OPENSSL_cleanse(at: *mut c_void, bytes: usize);
}

/// The locked region.
#[derive(Debug)]
struct LockedRegion {
    pages: SecretPages,
    slots: Mutex<Slots>,
}

#[derive(Debug)]
struct Slots {
    /// A bit for each slot that is in use.
    used: Vec<u64>,
    /// Pages that are memory, and locked: all before this number.
    locked: usize,
}

static REGION: OnceLock<LockedRegion> = OnceLock::new();
static INSTALLED: OnceLock<bool> = OnceLock::new();

thread_local! {
    static LOCKED: Cell<bool> = const { Cell::new(false) };
}

/// Prepares OpenSSL's memory. A program that uses OpenSSL for other things, too, calls this at its start.
///
/// # Errors
/// [`LuksError::Late`]: OpenSSL has allocated already.
pub fn prepare() -> Result<(), LuksError> {
    let installed = INSTALLED.get_or_init(|| {
        let Ok(pages) = SecretPages::reserve(SLOTS * SLOT) else { return false };
        let slots = Mutex::new(Slots { used: vec![0; SLOTS / 64], locked: 0 });
        let _ = REGION.set(LockedRegion { pages, slots });
        // SAFETY: the three functions keep the contract of malloc, realloc and free among themselves, and never unwind.
        unsafe { CRYPTO_set_mem_functions(allocate, reallocate, free) == 1 }
    });
    if *installed { Ok(()) } else { Err(LuksError::Late) }
}

/// Calls `make`, during which this thread's allocations by OpenSSL are locked.
///
/// # Errors
/// [`LuksError::Late`].
pub(crate) fn in_locked_memory<T>(make: impl FnOnce() -> T) -> Result<T, LuksError> {
    prepare()?;
    /// Also if `make` panics.
    struct Reset;
    impl Drop for Reset {
        fn drop(&mut self) {
            LOCKED.set(false);
        }
    }
    LOCKED.set(true);
    let _reset = Reset;
    Ok(make())
}

/// Makes a page of the region memory, and locks it.
fn lock_page(number: usize) -> Option<()> {
    let start = REGION.get()?.pages.start().as_ptr().wrapping_add(number * 4096);
    lock_range(start, 4096).ok()
}

impl LockedRegion {
    fn take(&self) -> Option<*mut c_void> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let word = slots.used.iter().position(|word| *word != u64::MAX)?;
        let bit = usize::try_from(slots.used[word].trailing_ones()).unwrap_or(0);
        let number = word * 64 + bit;
        let page = number / PAGE_SLOTS;
        if page >= slots.locked {
            // A worker may not lock memory itself.
            threads::call(move || lock_page(page)).ok()??;
            slots.locked = page + 1;
        }
        slots.used[word] |= 1 << bit;
        Some(self.pages.start().as_ptr().wrapping_add(number * SLOT).cast())
    }

    /// The number of the slot at an address; `None` outside of the region.
    fn number(&self, at: *mut c_void) -> Option<usize> {
        let offset = at.addr().checked_sub(self.pages.start().as_ptr().addr())?;
        (offset < SLOTS * SLOT).then_some(offset / SLOT)
    }

    fn give_back(&self, number: usize) {
        let at = self.pages.start().as_ptr().wrapping_add(number * SLOT);
        // SAFETY: the slot is in the region, and its user has freed it; the call is not optimised away.
        unsafe { OPENSSL_cleanse(at.cast(), SLOT) };
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        slots.used[number / 64] &= !(1 << (number % 64));
    }
}

extern "C" fn allocate(bytes: usize, _: *const c_char, _: c_int) -> *mut c_void {
    if bytes == 0 {
        return std::ptr::null_mut();
    }
    if !LOCKED.get() {
        // SAFETY: any size is allowed.
        return unsafe { libc::malloc(bytes) };
    }
    let slot = REGION.get().filter(|_| bytes <= SLOT).and_then(LockedRegion::take);
    slot.unwrap_or(std::ptr::null_mut())
}

extern "C" fn reallocate(
    at: *mut c_void,
    bytes: usize,
    file: *const c_char,
    line: c_int,
) -> *mut c_void {
    if at.is_null() {
        return allocate(bytes, file, line);
    }
    match REGION.get().and_then(|region| region.number(at)) {
        // It stays where it is.
        Some(_) if bytes > 0 && bytes <= SLOT => at,
        Some(_) if bytes > 0 => std::ptr::null_mut(),
        _ if bytes == 0 => {
            free(at, file, line);
            std::ptr::null_mut()
        }
        // SAFETY: `at` is of `malloc` or `realloc`, as it is not in the region.
        _ => unsafe { libc::realloc(at, bytes) },
    }
}

extern "C" fn free(at: *mut c_void, _: *const c_char, _: c_int) {
    match REGION.get().and_then(|region| Some((region, region.number(at)?))) {
        Some((region, number)) => region.give_back(number),
        // SAFETY: `at` is null, or of `malloc` or `realloc`, as it is not in the region.
        None => unsafe { libc::free(at) },
    }
}

/// Slots in use.
#[cfg(test)]
pub(crate) fn used() -> u32 {
    let slots = REGION.get().unwrap().slots.lock().unwrap();
    slots.used.iter().map(|word| word.count_ones()).sum()
}
