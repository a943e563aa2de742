//! The signals of the daemon, which a worker is not to handle: a handler makes calls that it may not.

use std::io;

/// Those that stop the daemon or have it read its configuration.
const OF_THE_DAEMON: [libc::c_int; 3] = [libc::SIGHUP, libc::SIGINT, libc::SIGTERM];

/// Leaves them to other threads.
pub(crate) fn leave_to_others() -> io::Result<()> {
    // SAFETY: all zeroes is a valid set, which the next call initialises.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: a set of this function's.
    unsafe { libc::sigemptyset(&raw mut set) };
    for signal in OF_THE_DAEMON {
        // SAFETY: as above; the number is that of a signal.
        unsafe { libc::sigaddset(&raw mut set, signal) };
    }
    // SAFETY: changes the mask of the calling thread only; the set is initialised.
    match unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}
