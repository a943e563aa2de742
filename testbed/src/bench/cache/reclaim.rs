//! The kernel takes lent memory of another process, as it does when memory is short: `MADV_PAGEOUT`
//! through `process_madvise(2)`. Without swap nothing but lent pages can go this way, and no content
//! that anybody relies on is lost in any case.

use std::ffi::{c_int, c_long, c_uint, c_void};
use std::io;

use rustix::fd::AsRawFd;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::Error;
use crate::bench::io_context;

const SYS_PROCESS_MADVISE: c_long = 440;
const MADV_PAGEOUT: c_int = 21;

unsafe extern "C" {
    fn syscall(number: c_long, ...) -> c_long;
}

/// `struct iovec`.
#[repr(C)]
struct Range {
    base: *mut c_void,
    bytes: usize,
}

/// Lets the kernel reclaim what it may of `bytes` bytes from address `start` on. Returns whether it
/// is permitted: `CAP_SYS_NICE` is needed.
///
/// # Errors
/// [`Error`] when the process has ended or the range is not in its memory.
pub fn take(pid: u32, start: u64, bytes: u64) -> Result<bool, Error> {
    let taking = || io_context(format!("taking memory of process {pid}"));
    let gone = || io::Error::from(io::ErrorKind::NotFound);
    let id = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(gone).map_err(taking())?;
    let process = pidfd_open(id, PidfdFlags::empty()).map_err(|e| taking()(e.into()))?;
    let narrow = |value| usize::try_from(value).map_err(|_| taking()(gone()));
    let range =
        Range { base: std::ptr::without_provenance_mut(narrow(start)?), bytes: narrow(bytes)? };
    // SAFETY: the kernel reads one range from our memory and does not write to it; the addresses in
    // it are the other process's.
    let result = unsafe {
        let (fd, one, none) = (process.as_raw_fd(), 1 as c_long, 0 as c_uint);
        syscall(SYS_PROCESS_MADVISE, fd, &raw const range, one, MADV_PAGEOUT, none)
    };
    if result >= 0 {
        return Ok(true);
    }
    match io::Error::last_os_error() {
        error if error.kind() == io::ErrorKind::PermissionDenied => Ok(false),
        error => Err(taking()(error)),
    }
}
