//! The memory system calls of this crate: reserving address space and advising the kernel about it.
//!
//! All calls concern the memory of a [`Reservation`]; they reject a span outside it.
//! [`PageAdvice::Lend`] and [`PageAdvice::Return`] may discard content: the arena ensures that such
//! a span contains no byte in use (`arena.rs`).

use std::io;
use std::ptr::NonNull;

use crate::class::{EXTENT_BYTES, EXTENT_PAGES, PAGE_BYTES};

/// `process_madvise(2)`: not in the C library's older versions.
const SYS_PROCESS_MADVISE: libc::c_long = 440;
/// Pseudo-descriptor of the calling process (Linux 6.14).
const PIDFD_SELF: i32 = -10_000;
/// Linux 5.18: MADV_DONTNEED that also works on locked memory.
const MADV_DONTNEED_LOCKED: i32 = 24;

/// Returns the free memory of glibc's allocator to the kernel. By itself glibc only returns what is free at
/// the end of a thread's heap, so that a peak of connections would stay resident. Each heap is locked
/// meanwhile, some microseconds per MiB of free memory. Does nothing with another C library.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: a call without preconditions, from any thread; it only touches memory that is free.
    let _ = unsafe { libc::malloc_trim(0) };
}

/// The result of closing a part of the address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closed {
    Yes,
    /// The kernel refused; the part is unchanged.
    No,
    /// Another mapping may have these addresses now: they are not used again.
    Lost,
}

/// How address space is reserved.
const RESERVED: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

/// Advice to the kernel about idle memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageAdvice {
    /// `MADV_FREE`: the kernel may discard the pages at any time, without I/O.
    Lend,
    /// `MADV_DONTNEED`: the kernel frees the pages at once.
    Return,
}

impl PageAdvice {
    fn code(self) -> i32 {
        match self {
            PageAdvice::Lend => libc::MADV_FREE,
            PageAdvice::Return => libc::MADV_DONTNEED,
        }
    }
}

/// Consecutive pages of a reservation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Span {
    /// First page, counted from the start of the reservation.
    pub(crate) page: usize,
    pub(crate) pages: usize,
}

/// Address space with no memory behind it until it is touched.
#[derive(Debug)]
pub(crate) struct Reservation {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: an address range; this type neither reads nor writes what is in it.
unsafe impl Send for Reservation {}
// SAFETY: as above; the system calls below may be made from any thread at once.
unsafe impl Sync for Reservation {}

impl Reservation {
    /// Reserves `bytes` (a multiple of the extent), aligned to the extent and without access (see
    /// [`Reservation::open`]). Children do not inherit it: a page shared copy-on-write with a child would
    /// not be freed.
    pub(crate) fn new(bytes: usize) -> io::Result<Reservation> {
        let (prot, flags) = (libc::PROT_NONE, RESERVED);
        let padded = bytes.checked_add(EXTENT_BYTES).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), padded, prot, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let skip = start.cast::<u8>().align_offset(EXTENT_BYTES);
        let base = start.cast::<u8>().wrapping_add(skip);
        let tail = padded - skip - bytes;
        if skip > 0 {
            // SAFETY: the head of the mapping just made, which nothing refers to.
            unsafe { libc::munmap(start, skip) };
        }
        if tail > 0 {
            // SAFETY: the tail of the mapping just made, which nothing refers to.
            unsafe { libc::munmap(base.wrapping_add(bytes).cast(), tail) };
        }
        let base = NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?;
        let reservation = Reservation { base, bytes };
        reservation.advise_raw(0, bytes, libc::MADV_DONTFORK)?;
        Ok(reservation)
    }

    /// Selects small pages for a part of the range that is not used yet. A kernel without huge pages
    /// refuses, which is harmless.
    pub(crate) fn use_small_pages(&self, offset: usize, bytes: usize) {
        let _ = self.advise_raw(offset, bytes, libc::MADV_NOHUGEPAGE);
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    fn is_inside(&self, offset: usize, bytes: usize) -> bool {
        offset.checked_add(bytes).is_some_and(|end| end <= self.bytes)
    }

    /// Makes a part of the range accessible. Fails at the limits of the kernel: `vm.overcommit_memory=2`,
    /// `RLIMIT_DATA`, `vm.max_map_count`.
    pub(crate) fn open(&self, offset: usize, bytes: usize) -> io::Result<()> {
        if !self.is_inside(offset, bytes) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let start = self.base.as_ptr().wrapping_add(offset);
        // SAFETY: a range inside the mapping this type owns (checked); more access breaks nothing.
        let result =
            unsafe { libc::mprotect(start.cast(), bytes, libc::PROT_READ | libc::PROT_WRITE) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Removes access to and content of a part of the range: maps it anew, since no other call reverses
    /// the kernel's charge. Nothing may refer to the part.
    pub(crate) fn close(&self, offset: usize, bytes: usize) -> Closed {
        if !self.is_inside(offset, bytes) {
            return Closed::No;
        }
        let start = self.base.as_ptr().wrapping_add(offset);
        let flags = RESERVED | libc::MAP_FIXED;
        // SAFETY: replaces a part of the mapping this type owns (checked) in which, as the caller
        // knows, nothing is.
        let mapped = unsafe { libc::mmap(start.cast(), bytes, libc::PROT_NONE, flags, -1, 0) };
        if mapped == libc::MAP_FAILED {
            // Kernels before 6.13 may have removed the old mapping before they failed.
            return if self.is_mapped(offset, bytes) { Closed::No } else { Closed::Lost };
        }
        // As in `new`. If it fails, the mapping is not merged with its neighbours.
        let _ = self.advise_raw(offset, bytes, libc::MADV_DONTFORK);
        self.use_small_pages(offset, bytes);
        Closed::Yes
    }

    fn is_mapped(&self, offset: usize, bytes: usize) -> bool {
        let mut states = [0; EXTENT_PAGES];
        (offset..offset + bytes).step_by(EXTENT_BYTES).all(|at| {
            let pages = (offset + bytes - at).min(EXTENT_BYTES) / PAGE_BYTES;
            self.resident(at / PAGE_BYTES, &mut states[..pages])
        })
    }

    #[inline]
    pub(crate) fn address(&self, page: usize) -> NonNull<u8> {
        debug_assert!(page * PAGE_BYTES < self.bytes);
        // SAFETY: callers pass pages of this reservation (checked above in test builds), so the
        // result is inside the mapping.
        unsafe { self.base.add(page * PAGE_BYTES) }
    }

    /// The page that contains an address, if it is in this reservation.
    #[inline]
    pub(crate) fn page_of(&self, address: NonNull<u8>) -> Option<usize> {
        let offset = address.addr().get().wrapping_sub(self.base.addr().get());
        (offset < self.bytes).then_some(offset / PAGE_BYTES)
    }

    fn advise_raw(&self, offset: usize, bytes: usize, code: i32) -> io::Result<()> {
        let start = self.base.as_ptr().wrapping_add(offset);
        // SAFETY: a range inside the mapping this type owns. Whether content may be lost is the
        // caller's promise (module documentation).
        if unsafe { libc::madvise(start.cast(), bytes, code) } == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Writes to `out`, one byte per page from page `first` on, whether the page is resident (lowest bit).
    /// False if the call fails.
    pub(crate) fn resident(&self, first: usize, out: &mut [u8]) -> bool {
        let bytes = out.len() * PAGE_BYTES;
        if first.checked_mul(PAGE_BYTES).and_then(|at| at.checked_add(bytes)) > Some(self.bytes) {
            return false;
        }
        let start = self.base.as_ptr().wrapping_add(first * PAGE_BYTES);
        // SAFETY: a range inside the mapping this type owns (checked), and one byte to write for
        // each of its pages.
        unsafe { libc::mincore(start.cast(), bytes, out.as_mut_ptr()) == 0 }
    }

    fn advise_one(&self, span: Span, advice: PageAdvice) -> io::Result<()> {
        let (offset, bytes) = (span.page * PAGE_BYTES, span.pages * PAGE_BYTES);
        match self.advise_raw(offset, bytes, advice.code()) {
            Err(error)
                if advice == PageAdvice::Return && error.raw_os_error() == Some(libc::EINVAL) =>
            {
                self.advise_raw(offset, bytes, MADV_DONTNEED_LOCKED)
            }
            result => result,
        }
    }

    /// Advises all `spans` with as few calls as the kernel allows. Calls `failed` for each span that the
    /// kernel refused.
    pub(crate) fn advise(
        &self,
        spans: &[Span],
        advice: PageAdvice,
        vectored: &mut bool,
        mut failed: impl FnMut(Span),
    ) {
        let mut done = 0;
        if *vectored && spans.len() > 1 {
            done = self.advise_vectored(spans, advice, vectored);
        }
        for &span in &spans[done..] {
            if self.advise_one(span, advice).is_err() {
                failed(span);
            }
        }
    }

    /// One vectored call; returns how many spans it has advised completely.
    fn advise_vectored(&self, spans: &[Span], advice: PageAdvice, vectored: &mut bool) -> usize {
        let mut vectors = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; BATCH];
        let count = spans.len().min(BATCH);
        for (vector, span) in vectors.iter_mut().zip(spans) {
            vector.iov_base = self.address(span.page).as_ptr().cast();
            vector.iov_len = span.pages * PAGE_BYTES;
        }
        // SAFETY: the vectors describe ranges inside the mapping this type owns; as `advise_raw`.
        let result = unsafe {
            libc::syscall(
                SYS_PROCESS_MADVISE,
                PIDFD_SELF,
                vectors.as_ptr(),
                count,
                advice.code(),
                0u32,
            )
        };
        let Ok(mut bytes) = usize::try_from(result) else {
            // Kernels before 6.13 refuse this call for the own process: do not try again.
            *vectored = false;
            return 0;
        };
        let mut done = 0;
        for span in &spans[..count] {
            let Some(rest) = bytes.checked_sub(span.pages * PAGE_BYTES) else { break };
            bytes = rest;
            done += 1;
        }
        done
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`; the owner (Memory) leaks it instead of dropping it
        // while a block is allocated.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// Largest number of spans in one call.
pub(crate) const BATCH: usize = 64;

/// Whether `MADV_FREE` works as this crate needs it: the kernel must accept it (it refuses when all memory
/// is locked), and must not discard the page at once (as Linux before 4.12 does without swap).
pub(crate) fn lending_works() -> bool {
    let Ok(probe) = Reservation::new(EXTENT_BYTES) else { return false };
    if probe.open(0, EXTENT_BYTES).is_err() {
        return false;
    }
    probe.use_small_pages(0, EXTENT_BYTES);
    let word = probe.address(0);
    // SAFETY: the first byte of a mapping that only this function refers to.
    unsafe { word.write_volatile(0x5a) };
    if probe.advise_one(Span { page: 0, pages: 1 }, PageAdvice::Lend).is_err() {
        return false;
    }
    // SAFETY: as above.
    unsafe { word.read_volatile() == 0x5a }
}

/// The limit on this process's private writable memory (`RLIMIT_DATA`), if there is one.
pub(crate) fn data_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: a structure of this call's kind to write to.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_DATA, &raw mut limit) } == 0;
    (known && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Unmaps the pages of a mapping of a file, which are mapped again when they are used; false if the kernel refuses.
pub(crate) fn forget_file_pages(range: &std::ops::Range<usize>) -> bool {
    let start = std::ptr::without_provenance_mut(range.start);
    // SAFETY: the caller passes a mapping of a file that cannot be written to and has no pages of its own, so that each
    // page reads the same from the file again. A range that is not mapped any more is refused.
    unsafe { libc::madvise(start, range.len(), libc::MADV_DONTNEED) == 0 }
}

/// Makes the kernel reclaim a range now (`MADV_PAGEOUT`).
#[cfg(feature = "testing")]
pub(crate) fn page_out(start: usize, len: usize) {
    // SAFETY: MADV_PAGEOUT discards no data but that of lent pages; a range that is not mapped is refused.
    unsafe { libc::madvise(std::ptr::without_provenance_mut(start), len, libc::MADV_PAGEOUT) };
}
