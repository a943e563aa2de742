//! The addresses of a host and port.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};

/// All addresses of `HOST:PORT`, each once, in the order of the resolver. The host is a name, an
/// IPv4 address, or an IPv6 address in brackets, which may have a zone: `[fe80::1%eth0]:10809`. May
/// block for as long as the name service does.
///
/// # Errors
/// The text has no port, the host has no address, or this host has no such zone.
pub fn socket_addresses(address: &str) -> io::Result<Vec<SocketAddr>> {
    let no_port = || io::Error::new(io::ErrorKind::InvalidInput, "the address has no port");
    let (host, port) = address.rsplit_once(':').ok_or_else(no_port)?;
    let port = port.parse::<u16>().map_err(|_| no_port())?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let mut addresses: Vec<SocketAddr> = Vec::new();
    for address in (bare.unwrap_or(host), port).to_socket_addrs()? {
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    Ok(addresses)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_may_have_zones() {
        let one = |text: &str| match socket_addresses(text).unwrap()[..] {
            [address] => address.to_string(),
            ref other => panic!("{text}: {other:?}"),
        };
        assert_eq!(one("192.0.2.1:7"), "192.0.2.1:7");
        assert_eq!(one("[2001:db8::1]:7"), "[2001:db8::1]:7");
        assert_eq!(one("[fe80::1%3]:7"), "[fe80::1%3]:7");
        // The loopback interface is the first of every network namespace.
        assert_eq!(one("[fe80::1%lo]:7"), "[fe80::1%1]:7");
        for bad in ["", "x", "192.0.2.1", "192.0.2.1:", "192.0.2.1:70000", "[fe80::1%none]:7"] {
            assert!(socket_addresses(bad).is_err(), "{bad}");
        }
    }
}
