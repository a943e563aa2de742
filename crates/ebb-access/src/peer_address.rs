//! The address of a peer, by a call that workers of the daemon may make.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsRawFd, BorrowedFd};

/// Bytes of `sockaddr_in6` and of `sockaddr_in`.
const LENGTHS: [usize; 2] = [28, 16];

/// The address of the peer of a TCP socket that is or was connected; `None` of another socket (`SO_PEERNAME`, which is
/// getpeername(2) as an option).
pub fn peer_address(socket: BorrowedFd<'_>) -> Option<SocketAddr> {
    let mut bytes = [0_u8; LENGTHS[0]];
    // The kernel refuses a length beyond that of the address.
    LENGTHS.into_iter().find_map(|length| address(read(socket, bytes.get_mut(..length)?)?))
}

fn read<'a>(socket: BorrowedFd<'_>, bytes: &'a mut [u8]) -> Option<&'a [u8]> {
    let mut length = libc::socklen_t::try_from(bytes.len()).ok()?;
    // SAFETY: the kernel writes at most `length` bytes, which is the size of `bytes`, and sets `length`; both outlive the
    // call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERNAME,
            bytes.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if result == 0 { Some(bytes) } else { None }
}

/// The address that the kernel wrote (`sockaddr_in`, `sockaddr_in6`).
fn address(bytes: &[u8]) -> Option<SocketAddr> {
    let (family, rest) = bytes.split_first_chunk()?;
    let (port, rest) = rest.split_first_chunk()?;
    let port = u16::from_be_bytes(*port);
    match libc::c_int::from(u16::from_ne_bytes(*family)) {
        libc::AF_INET => {
            let ip: [u8; 4] = *rest.first_chunk()?;
            Some(SocketAddr::new(Ipv4Addr::from(ip).into(), port))
        }
        libc::AF_INET6 => {
            let (flow, rest) = rest.split_first_chunk()?;
            let (ip, rest) = rest.split_first_chunk::<16>()?;
            let scope = u32::from_ne_bytes(*rest.first_chunk()?);
            let ip = Ipv6Addr::from(*ip);
            Some(SocketAddrV6::new(ip, port, u32::from_be_bytes(*flow), scope).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_peer_has_the_address_that_it_connected_from() {
        for listen in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(listen) else {
                assert_eq!(listen, "[::1]:0", "a host may have no IPv6");
                continue;
            };
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (accepted, from) = listener.accept().unwrap();
            assert_eq!(peer_address(accepted.as_fd()), Some(from));
            assert_eq!(peer_address(client.as_fd()), Some(listener.local_addr().unwrap()));
            assert_eq!(peer_address(listener.as_fd()), None);
        }
        let (one, _other) = UnixStream::pair().unwrap();
        assert_eq!(peer_address(one.as_fd()), None);
        assert_eq!(peer_address(std::fs::File::open("/dev/null").unwrap().as_fd()), None);
    }
}
