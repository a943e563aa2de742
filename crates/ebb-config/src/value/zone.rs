//! Literal IPv6 addresses, which may name an interface.

use std::net::Ipv6Addr;

/// The longest name of a network interface, bytes.
const ZONE_BYTES_MAX: usize = 15;

/// An IPv6 address in its usual form; a link-local one may have a zone, as in `fe80::1%eth0`.
pub(super) fn ipv6(text: &str) -> Option<String> {
    let (address, zone) = match text.split_once('%') {
        Some((address, zone)) => (address, Some(zone)),
        None => (text, None),
    };
    let address: Ipv6Addr = address.parse().ok()?;
    let Some(zone) = zone else { return Some(address.to_string()) };
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    let is_zone = (1..=ZONE_BYTES_MAX).contains(&zone.len()) && zone.bytes().all(fits);
    (is_zone && address.is_unicast_link_local()).then(|| format!("{address}%{zone}"))
}
