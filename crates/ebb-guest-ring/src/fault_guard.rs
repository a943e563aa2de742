//! Keeps this process alive when a peer truncates a file that is mapped here.
//!
//! A load or store beyond the end of a mapped file raises SIGBUS, whose default action ends the process, and with it the
//! disks of all guests. The handler here puts zeroed private memory in the place of the whole mapping and sets the flag
//! of its owner; the access is then repeated and succeeds. System calls and `io_uring` fail with EFAULT before that, and
//! succeed after it.
//!
//! Invariants:
//! - The handler only reads and writes atomics and makes system calls: it takes no lock, allocates nothing, does not wait
//!   for another thread, and leaves `errno` as it was.
//! - A range is in the table from before its first access until after its last: who accesses a mapping borrows the
//!   [`GuardedRange`]'s owner. So the entry of the faulting address does not change while the handler runs, and an entry
//!   that changes while the handler reads it is another one's: the handler passes over it and never has to retry.
//! - A range leaves the table before it is unmapped, so that no entry stands for addresses that are used again.
//!
//! Sources: signal-safety(7), sigaction(2) on `si_code`, mmap(2) on hugetlb mappings and `MAP_FIXED`.

use std::ffi::{c_int, c_void};
use std::io;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Most mappings at a time: half of `vm.max_map_count`, which is 65,530 by default and counts all mappings of a process.
pub(crate) const RANGES_MAX: usize = 32_768;

/// The mappings of this process.
static TABLE: Table<RANGES_MAX> = Table::new();

/// The disposition of SIGBUS before ours, for faults that are not of these mappings.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// One mapping, guarded until [`GuardedRange::withdraw`].
#[derive(Debug)]
pub(crate) struct GuardedRange {
    index: usize,
    /// The table has its address.
    _lost: Arc<AtomicBool>,
}

impl GuardedRange {
    /// Guards the addresses of one whole mapping of a file, multiples of its pages; a fault in them sets `lost`.
    ///
    /// # Errors
    /// The table is full.
    pub(crate) fn new(range: Range<usize>, lost: Arc<AtomicBool>) -> io::Result<GuardedRange> {
        install()?;
        let full = || {
            let text = format!("{RANGES_MAX} regions of shared memory are mapped: remove guests");
            io::Error::new(io::ErrorKind::QuotaExceeded, text)
        };
        let index = TABLE.insert(range, Arc::as_ptr(&lost).cast_mut()).ok_or_else(full)?;
        Ok(GuardedRange { index, _lost: lost })
    }

    /// Ends the guard. To be called once, after the last access and before the range is unmapped.
    pub(crate) fn withdraw(&self) {
        TABLE.remove(self.index);
    }
}

/// A range of addresses in the table. Its fields are valid together only while `version` stays the same even number.
struct Entry {
    /// Odd while the entry is being changed.
    version: AtomicUsize,
    start: AtomicUsize,
    /// 0 in an entry that is not in use.
    end: AtomicUsize,
    lost: AtomicPtr<AtomicBool>,
}

impl Entry {
    const fn new() -> Entry {
        Entry {
            version: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            lost: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Changes the entry. Callers hold the table's lock.
    fn set(&self, range: Range<usize>, lost: *mut AtomicBool) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(range.start, Ordering::Relaxed);
        self.end.store(range.end, Ordering::Relaxed);
        self.lost.store(lost, Ordering::Relaxed);
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }

    /// The entry, if it has this address and is not being changed.
    fn with(&self, address: usize) -> Option<(Range<usize>, *mut AtomicBool)> {
        let version = self.version.load(Ordering::Acquire);
        let range = self.start.load(Ordering::Relaxed)..self.end.load(Ordering::Relaxed);
        let lost = self.lost.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let stable = version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version;
        (stable && range.contains(&address)).then_some((range, lost))
    }
}

/// Ranges of addresses, searched without a lock.
struct Table<const N: usize> {
    entries: [Entry; N],
    /// How many entries were ever in use: the others are not searched.
    used: AtomicUsize,
    /// Entries below `used` that are not in use.
    free: Mutex<Vec<usize>>,
}

impl<const N: usize> Table<N> {
    const fn new() -> Table<N> {
        Table {
            entries: [const { Entry::new() }; N],
            used: AtomicUsize::new(0),
            free: Mutex::new(Vec::new()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The index of a new entry, if there is room for it.
    fn insert(&self, range: Range<usize>, lost: *mut AtomicBool) -> Option<usize> {
        let mut free = self.lock();
        let used = self.used.load(Ordering::Relaxed);
        let index = free.pop().unwrap_or(used);
        self.entries.get(index)?.set(range, lost);
        if index == used {
            self.used.store(used + 1, Ordering::Release);
        }
        Some(index)
    }

    fn remove(&self, index: usize) {
        let mut free = self.lock();
        if let Some(entry) = self.entries.get(index) {
            entry.set(0..0, ptr::null_mut());
            free.push(index);
        }
    }

    /// The range that has an address, and its flag. Safe in a signal handler.
    fn find(&self, address: usize) -> Option<(Range<usize>, *mut AtomicBool)> {
        let used = self.used.load(Ordering::Acquire);
        self.entries.iter().take(used).find_map(|entry| entry.with(address))
    }
}

/// Installs the handler, once.
fn install() -> io::Result<()> {
    static INSTALLED: Mutex<bool> = Mutex::new(false);
    let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    if *installed {
        return Ok(());
    }
    // SAFETY: all zeroes is a valid value: no flags, an empty mask, the default action.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let mut previous = action;
    // SAFETY: `previous` is valid for a write; the disposition is not changed.
    if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut previous) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // Before the handler is installed: it may run at once on another thread.
    PREVIOUS.get_or_init(|| previous);
    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_bus_error;
    action.sa_sigaction = handler as libc::sighandler_t;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: `action` is valid, and its handler is async-signal-safe (see the module).
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    *installed = true;
    Ok(())
}

/// The handler of SIGBUS.
extern "C" fn on_bus_error(signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t` to a handler with `SA_SIGINFO`, on this thread's stack.
    let info = unsafe { &*info };
    // SAFETY: only compared; it is an address where `si_code` says so.
    let address = unsafe { info.si_addr() }.addr();
    // SAFETY: the address of this thread's `errno`; valid in a handler.
    let errno_at = unsafe { libc::__errno_location() };
    // SAFETY: valid, and only this thread uses it.
    let errno = unsafe { *errno_at };
    match info.si_code {
        // An access of this thread: beyond the end of the file, or (where the address is ours) to memory that failed.
        libc::BUS_ADRERR | libc::BUS_MCEERR_AR => {
            if !TABLE.find(address).is_some_and(|(range, lost)| replace(range, lost)) {
                // The fault repeats when this handler has returned.
                let default = || {
                    // SAFETY: all zeroes is the default action.
                    unsafe { std::mem::zeroed() }
                };
                set_disposition(signal, &PREVIOUS.get().copied().unwrap_or_else(default));
            }
        }
        // Memory failed that is not being accessed: should it ever be, that is the case above.
        libc::BUS_MCEERR_AO if TABLE.find(address).is_some() => {}
        // Sent by a process, or misaligned: not of our mappings.
        _ => {
            // SAFETY: all zeroes is the default action.
            set_disposition(signal, &unsafe { std::mem::zeroed() });
            // SAFETY: async-signal-safe by POSIX. Delivered when this handler has returned, to the default action.
            unsafe { libc::raise(signal) };
        }
    }
    // SAFETY: as above.
    unsafe { *errno_at = errno };
}

/// Replaces a mapping by zeroed private memory, in the handler. False if the kernel refuses.
fn replace(range: Range<usize>, lost: *mut AtomicBool) -> bool {
    // The flag is set first: who reads zeroes of the new memory, and the flag after them, sees it set.
    // SAFETY: the flag lives as long as its entry, and the entry until the faulting access has ended (see the module).
    unsafe { (*lost).store(true, Ordering::SeqCst) };
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let (start, bytes) = (ptr::with_exposed_provenance_mut(range.start), range.end - range.start);
    // SAFETY: exactly the addresses of one mapping of ours, which cannot be unmapped before the faulting access has ended;
    // all of it, because a mapping of huge pages cannot be split within a page. It stays readable and writable, and
    // nothing refers to its content. Two threads may both do this: the content is lost in any case. mmap(2) is a plain
    // system call.
    let at = unsafe { libc::mmap(start, bytes, protection, flags, -1, 0) };
    at != libc::MAP_FAILED
}

/// Sets what SIGBUS does from now on, in the handler.
fn set_disposition(signal: c_int, action: &libc::sigaction) {
    // SAFETY: a valid action: the default one, or the one that was in force before ours. Async-signal-safe by POSIX.
    unsafe { libc::sigaction(signal, ptr::from_ref(action), ptr::null_mut()) };
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::thread;

    use super::*;

    #[test]
    fn a_table_finds_what_is_in_it_and_nothing_else() {
        let table = Table::<3>::new();
        let flag = ptr::null_mut();
        let first = table.insert(0x1000..0x3000, flag).unwrap();
        let second = table.insert(0x3000..0x4000, flag).unwrap();
        table.insert(0x9000..0xa000, flag).unwrap();
        assert_eq!(table.insert(0x10000..0x11000, flag), None, "full");
        let found = |address| table.find(address).map(|(range, _)| range.start);
        let expected = HashMap::from([
            (0xfff, None),
            (0x1000, Some(0x1000)),
            (0x2fff, Some(0x1000)),
            (0x3000, Some(0x3000)),
            (0x4000, None),
            (0x9fff, Some(0x9000)),
            (0xa000, None),
            (0, None),
        ]);
        for (address, start) in expected {
            assert_eq!(found(address), start, "{address:#x}");
        }
        table.remove(first);
        assert_eq!((found(0x1000), found(0x3000)), (None, Some(0x3000)));
        table.insert(0x20000..0x21000, flag).unwrap();
        table.remove(second);
        assert_eq!((found(0x3000), found(0x20000)), (None, Some(0x20000)));
        table.insert(0x1000..0x2000, flag).unwrap();
        assert_eq!(table.insert(0x30000..0x31000, flag), None, "full again");
        assert_eq!((found(0x1fff), found(0x2000)), (Some(0x1000), None));
    }

    /// Ranges that are put in and taken out begin at the same addresses and have lengths that tell them apart by their
    /// flags; one range stays.
    #[test]
    fn a_reader_never_sees_half_of_a_change() {
        let table = Table::<8>::new();
        let flag = |number: usize| ptr::without_provenance_mut::<AtomicBool>(number);
        table.insert(0x100..0x101, flag(1)).unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            for writer in 1..=2 {
                let (table, stop) = (&table, &stop);
                scope.spawn(move || {
                    let mut pages = 1;
                    while !stop.load(Ordering::Relaxed) {
                        pages = pages % 7 + 1;
                        let start = writer * 0x1000;
                        let range = start..start + pages * 16;
                        let index = table.insert(range, flag(pages * 16)).unwrap();
                        table.remove(index);
                    }
                });
            }
            let (mut met, mut torn, mut round) = (0, 0, 0usize);
            // The writers may begin late, and wait for a processor.
            while round < 400_000 || (met < 1000 && round < 100_000_000) {
                round += 1;
                if round.is_multiple_of(1000) {
                    thread::yield_now();
                }
                let start = (round % 2 + 1) * 0x1000;
                if let Some((range, flag)) = table.find(start) {
                    met += 1;
                    torn += u32::from((range.start, range.len()) != (start, flag.addr()));
                }
                let kept = table.find(0x100).map(|(range, flag)| (range, flag.addr()));
                torn += u32::from(kept != Some((0x100..0x101, 1)));
            }
            stop.store(true, Ordering::Relaxed);
            assert!(met > 0 && torn == 0, "{torn} of {met}");
        });
    }
}
