//! The eventfds by which guest and backend notify each other, received from the frontend.
//!
//! Invariants: only eventfds are accepted, since reading or writing another file could wait for its file system; no read
//! waits. A write waits only if the frontend has filled the counter and makes the descriptor blocking between two system
//! calls of [`notify`]; then it is interrupted (`stuck_writes`).

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use ebb_io::{Fd, fd_from};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::ReadWriteFlags;

use crate::stuck_writes;

/// The name of an eventfd in `/proc/self/fd`.
const EVENTFD: &[u8] = b"anon_inode:[eventfd]";

/// Checks a descriptor that a frontend sent, and makes it non-blocking.
///
/// # Errors
/// If it is not an eventfd.
pub(crate) fn accept_event(fd: OwnedFd) -> io::Result<Fd> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let target = rustix::fs::readlink(path, Vec::new())?;
    if target.as_bytes() != EVENTFD {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the descriptor is not an eventfd",
        ));
    }
    let flags = fcntl_getfl(&fd)?;
    if !flags.contains(OFlags::NONBLOCK) {
        fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
    }
    Ok(fd_from(fd))
}

/// Notifies the peer. It has the file, too, and may have made it blocking: then it is made non-blocking again first. False if
/// the write had to be interrupted: the peer must not be notified again.
#[inline]
#[must_use]
pub(crate) fn notify(fd: &Fd) -> bool {
    if rustix::io::ioctl_fionbio(&**fd, true).is_err() {
        return true;
    }
    // Else it fails only if the counter is full: then the peer has been notified and has not looked.
    let written = stuck_writes::watched(|| rustix::io::write(fd.as_fd(), &1u64.to_ne_bytes()));
    written != Err(rustix::io::Errno::INTR)
}

/// Takes the notifications that have arrived, without waiting.
#[inline]
pub(crate) fn take_event(fd: &Fd) {
    let mut counter = [0; 8];
    // At the current position, which is that of all files without one.
    let _ = rustix::io::preadv2(
        fd.as_fd(),
        &mut [IoSliceMut::new(&mut counter)],
        u64::MAX,
        ReadWriteFlags::NOWAIT,
    );
}
