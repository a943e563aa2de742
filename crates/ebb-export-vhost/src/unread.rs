//! How much of what was sent on a unix socket its other end has not read.
//!
//! Source: unix(7) on `SIOCOUTQ` (`TIOCOUTQ`).

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Bytes of memory that hold unread data of ours, and 0 if all was read.
///
/// # Errors
/// Of ioctl(2).
pub(crate) fn unread_bytes(socket: &impl AsFd) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    let socket = socket.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open; the kernel writes one `int`, which outlives the call.
    let result = unsafe { libc::ioctl(socket, libc::TIOCOUTQ, &raw mut bytes) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(u64::try_from(bytes).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn what_the_other_end_has_not_read_is_counted() {
        let (mut one, mut other) = UnixStream::pair().unwrap();
        assert_eq!(unread_bytes(&one).unwrap(), 0);
        one.write_all(b"text").unwrap();
        assert!(unread_bytes(&one).unwrap() > 0);
        other.read_exact(&mut [0; 4]).unwrap();
        assert_eq!(unread_bytes(&one).unwrap(), 0);
    }
}
