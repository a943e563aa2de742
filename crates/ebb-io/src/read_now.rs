//! A read without the ring, of a file of the kernel's that is always there: `/proc`.

use std::io;
use std::os::fd::AsRawFd;

/// Reads from the start of a file, by a call that workers may make.
pub(crate) fn read_now(file: &impl AsRawFd, bytes: &mut [u8]) -> io::Result<usize> {
    let vector = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: the one vector points into `bytes`, which is borrowed for the whole call.
    let count = unsafe { libc::preadv2(file.as_raw_fd(), &raw const vector, 1, 0, 0) };
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}
