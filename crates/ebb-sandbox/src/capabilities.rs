//! Capabilities: all threads give up those that the daemon does not need once the broker makes its
//! calls.
//!
//! The kernel has them for each thread, and a thread changes its own only: a signal has each one do
//! that.
//!
//! Source: capabilities(7), capget(2).

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::Mechanism;

/// `CAP_IPC_LOCK`, to lock memory with keys, and `CAP_SYS_RESOURCE`, for limits and
/// `PR_SET_IO_FLUSHER`.
const KEPT: u64 = 1 << 14 | 1 << 24;
/// How long all threads may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Version 3 of capset(2): two words for each set.
const VERSION: u32 = 0x2008_0522;

/// Threads that have handled the signal, and whether one of them has kept a capability.
static HANDLED: AtomicU32 = AtomicU32::new(0);
static FAILED: AtomicBool = AtomicBool::new(false);

#[repr(C)]
struct Header {
    version: u32,
    process: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Sets {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Gives up the capabilities of this thread. Makes two system calls and nothing else, as a signal's
/// handler may.
fn give_up_own() -> bool {
    let mut header = Header { version: VERSION, process: 0 };
    let mut sets = [Sets::default(); 2];
    // SAFETY: the kernel writes both words of each set.
    let got = unsafe { libc::syscall(libc::SYS_capget, &raw mut header, sets.as_mut_ptr()) };
    for (word, set) in sets.iter_mut().enumerate() {
        let kept = u32::try_from(KEPT >> (32 * word) & u64::from(u32::MAX)).unwrap_or(0);
        set.effective &= kept;
        set.permitted &= kept;
        set.inheritable = 0;
    }
    // SAFETY: the kernel reads both words of each set.
    let set = unsafe { libc::syscall(libc::SYS_capset, &raw mut header, sets.as_ptr()) };
    got == 0 && set == 0
}

extern "C" fn on_signal(_: libc::c_int) {
    // SAFETY: the place of this thread's error, which the interrupted code may be about to read.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let error = unsafe { *place };
    if !give_up_own() {
        FAILED.store(true, Ordering::Relaxed);
    }
    // SAFETY: as above.
    unsafe { *place = error };
    HANDLED.fetch_add(1, Ordering::Release);
}

/// The capabilities that a thread of this process may still get.
fn of_thread(thread: &str) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/self/task/{thread}/status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("CapPrm:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

/// Threads with capabilities that are to be given up.
fn holders() -> Vec<String> {
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let names = threads.filter_map(|thread| thread.file_name().into_string().ok());
    // One whose state cannot be read has ended.
    names.filter(|name| of_thread(name).is_some_and(|all| all & !KEPT != 0)).collect()
}

/// Has all threads give up their capabilities but a few, for good. To be called before
/// [`crate::restrict_process`].
pub fn give_up_capabilities() -> Mechanism {
    static GIVEN_UP: OnceLock<Mechanism> = OnceLock::new();
    GIVEN_UP.get_or_init(give_up_once).clone()
}

fn give_up_once() -> Mechanism {
    let name = Mechanism::CAPABILITIES;
    let signal = libc::SIGRTMAX() - 3;
    // SAFETY: zeroes are a valid `sigaction`: no flags, no signals blocked.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_signal as extern "C" fn(libc::c_int) as libc::sighandler_t;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: nothing else uses this signal; the handler makes system calls and uses atomics only.
    if unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) } != 0 {
        let error = std::io::Error::last_os_error();
        return Mechanism::missing(name, format!("cannot handle a signal: {error}"));
    }
    let own = std::process::id();
    let end = Instant::now() + PATIENCE;
    loop {
        // Again, as one may have made another thread meanwhile.
        let holders = holders();
        if holders.is_empty() {
            return Mechanism::in_force(
                name,
                "no thread has a capability but cap_ipc_lock and cap_sys_resource",
            );
        }
        if FAILED.load(Ordering::Relaxed) || Instant::now() >= end {
            let count = holders.len();
            return Mechanism::missing(name, format!("{count} threads have kept theirs"));
        }
        let before = HANDLED.load(Ordering::Acquire);
        let mut sent = 0;
        for thread in holders.iter().filter_map(|thread| thread.parse::<i32>().ok()) {
            // SAFETY: has no pointers; the thread is one of this process.
            let done = unsafe { libc::syscall(libc::SYS_tgkill, own, thread, signal) };
            sent += u32::from(done == 0);
        }
        while HANDLED.load(Ordering::Acquire).wrapping_sub(before) < sent && Instant::now() < end {
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_threads_give_up_their_capabilities() {
        // Where the tests run without privileges, there is nothing to give up.
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            let _ = wait.recv();
            // SAFETY: has no arguments and no effect.
            let number = unsafe { libc::syscall(libc::SYS_gettid) };
            of_thread(&number.to_string())
        });
        assert!(give_up_capabilities().in_force);
        drop(go);
        assert_eq!(thread.join().unwrap().unwrap() & !KEPT, 0);
        assert!(holders().is_empty());
    }
}
