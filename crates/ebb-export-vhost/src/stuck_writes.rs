//! Ends writes to eventfds that do not return.
//!
//! An eventfd is the frontend's, too: it can fill the counter, and make the descriptor blocking between the check of that and the
//! write. The write would then hold the thread of all disks on the worker. The control thread looks at the workers' writes
//! each second, and interrupts one that has not returned since it looked last.
//!
//! # Invariants
//! - A write that is interrupted has not been carried out, and its frontend is not notified again: its connection ends.
//! - A thread that looks interrupts no thread of another process. One that has ended meanwhile, whose number another thread of
//!   this process has by now, does no harm: the signal has a handler that does nothing.

use std::cell::OnceCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

/// How often the control thread looks.
pub(crate) const LOOK: Duration = Duration::from_secs(1);
/// The signal that interrupts: ignored by default, and used for nothing else here.
const SIGNAL: libc::c_int = libc::SIGURG;

/// The writes of one thread.
struct WatchedThread {
    number: libc::c_long,
    /// Odd while the thread writes.
    writes: AtomicU64,
}

static THREADS: Mutex<Vec<Weak<WatchedThread>>> = Mutex::new(Vec::new());

thread_local! {
    static OWN: OnceCell<Arc<WatchedThread>> = const { OnceCell::new() };
}

fn watch_this_thread() -> Arc<WatchedThread> {
    // SAFETY: without arguments, and it cannot fail.
    let number = unsafe { libc::syscall(libc::SYS_gettid) };
    let thread = Arc::new(WatchedThread { number, writes: AtomicU64::new(0) });
    let mut threads = THREADS.lock().unwrap_or_else(PoisonError::into_inner);
    threads.retain(|thread| thread.strong_count() > 0);
    threads.push(Arc::downgrade(&thread));
    thread
}

/// Makes a system call that may not return.
#[inline]
pub(crate) fn watched<T>(call: impl FnOnce() -> T) -> T {
    OWN.with(|own| {
        let own = own.get_or_init(watch_this_thread);
        // No other thread stores it.
        let writes = own.writes.load(Ordering::Relaxed);
        own.writes.store(writes + 1, Ordering::Relaxed);
        let result = call();
        own.writes.store(writes + 2, Ordering::Relaxed);
        result
    })
}

extern "C" fn do_nothing(_: libc::c_int) {}

/// What a control thread has seen of the workers' writes.
pub(crate) struct WriteWatch {
    seen: Vec<(Weak<WatchedThread>, u64)>,
}

impl WriteWatch {
    /// Prepares the signal.
    ///
    /// # Errors
    /// Those of `sigaction`.
    pub(crate) fn new() -> std::io::Result<WriteWatch> {
        // SAFETY: all zeroes is a valid action, without flags: calls are interrupted and not restarted.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = do_nothing as extern "C" fn(libc::c_int) as usize;
        // SAFETY: the action is valid, and its handler does nothing, so that it may run at any time.
        let result = unsafe { libc::sigaction(SIGNAL, &raw const action, std::ptr::null_mut()) };
        if result != 0 {
            return Err(std::io::Error::last_os_error());
        }
        Ok(WriteWatch { seen: Vec::new() })
    }

    /// Interrupts the writes that were seen by the last call, too. Each thread writes for at most two calls' time.
    pub(crate) fn look(&mut self) {
        let before = std::mem::take(&mut self.seen);
        let threads = THREADS.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for thread in threads {
            let Some(watched) = thread.upgrade() else { continue };
            let writes = watched.writes.load(Ordering::Relaxed);
            if writes.is_multiple_of(2) {
                continue;
            }
            if before.iter().any(|(other, seen)| *seen == writes && other.ptr_eq(&thread)) {
                let process = rustix::process::getpid().as_raw_nonzero().get();
                // SAFETY: sends a signal to a thread of this process, see the invariants.
                let _ = unsafe { libc::syscall(libc::SYS_tgkill, process, watched.number, SIGNAL) };
            }
            self.seen.push((thread, writes));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_write_that_does_not_return_is_interrupted_and_others_are_not() {
        let (read, write) = std::io::pipe().unwrap();
        let mut watch = WriteWatch::new().unwrap();
        let stuck = std::thread::spawn(move || {
            // More than a pipe holds.
            let bytes = vec![0; 4 << 20];
            let mut done = 0;
            loop {
                match watched(|| rustix::io::write(write.as_fd(), &bytes)) {
                    Ok(count) => done += count,
                    Err(error) => return (done, error),
                }
            }
        });
        let mut looks = 0;
        while !stuck.is_finished() {
            watch.look();
            looks += 1;
            std::thread::park_timeout(Duration::from_millis(5));
            assert!(looks < 12_000, "it was not interrupted");
        }
        let (done, error) = stuck.join().unwrap();
        assert_eq!(error, rustix::io::Errno::INTR);
        let mut rest = Vec::new();
        { read }.read_to_end(&mut rest).unwrap();
        assert_eq!(rest.len(), done);
        assert_eq!(watched(|| 7), 7);
        watch.look();
    }
}
