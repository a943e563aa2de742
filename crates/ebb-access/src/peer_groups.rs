//! The supplementary groups of a peer.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// `SO_PEERGROUPS` of Linux's include/uapi/asm-generic/socket.h, which the crate libc does not have.
const SO_PEERGROUPS: libc::c_int = 59;
/// Groups that most processes do not exceed.
const USUAL: usize = 32;
/// The most that a process can have (`NGROUPS_MAX`).
const MOST: usize = 65_536;

/// The supplementary groups that the peer of a unix socket had when it connected (`SO_PEERGROUPS`).
///
/// # Errors
/// The kernel's; it has this since Linux 4.13.
pub fn peer_groups(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    match read(socket, USUAL) {
        Err(error) if error.raw_os_error() == Some(libc::ERANGE) => read(socket, MOST),
        groups => groups,
    }
}

fn read(socket: BorrowedFd<'_>, most: usize) -> io::Result<Vec<u32>> {
    let mut groups = vec![0_u32; most];
    let mut length = libc::socklen_t::try_from(groups.len() * size_of::<u32>()).unwrap_or(0);
    // SAFETY: the kernel writes at most `length` bytes, which is the size of `groups`, and sets `length`; both outlive
    // the call, and any bytes are valid numbers.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERGROUPS,
            groups.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    groups.truncate(usize::try_from(length).unwrap_or(0) / size_of::<u32>());
    Ok(groups)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_peer_has_the_groups_of_its_process() {
        let (one, _other) = UnixStream::pair().unwrap();
        let mut found = super::peer_groups(one.as_fd()).unwrap();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("Groups:")).unwrap();
        let mut own: Vec<u32> =
            line.split_whitespace().map(|number| number.parse().unwrap()).collect();
        found.sort_unstable();
        own.sort_unstable();
        assert_eq!(found, own);
    }
}
