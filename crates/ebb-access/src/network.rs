//! IP networks.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::error::AccessError;

/// Bits of an IPv4 address that is mapped into IPv6.
const MAPPED_PREFIX: u8 = 96;

/// A network of IPv4 or IPv6. An IPv4 address that is mapped into IPv6 is one of IPv4.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Network {
    /// Its first address.
    first: IpAddr,
    prefix: u8,
}

impl Network {
    /// Parses `ADDRESS/PREFIX`, or one address.
    ///
    /// # Errors
    /// [`AccessError::BadNetwork`]; [`AccessError::BitsBeyondPrefix`] if the address is not the first one.
    pub fn parse(text: &str) -> Result<Network, AccessError> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| AccessError::BadNetwork)?;
        let most = bits(address);
        let prefix = match prefix {
            None => most,
            Some(text) if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) => {
                let prefix = text.parse().ok().filter(|prefix| *prefix <= most);
                prefix.ok_or(AccessError::BadNetwork)?
            }
            Some(_) => return Err(AccessError::BadNetwork),
        };
        let (first, prefix) = match address.to_canonical() {
            mapped @ IpAddr::V4(_) if address.is_ipv6() => {
                let prefix = prefix.checked_sub(MAPPED_PREFIX);
                (mapped, prefix.ok_or(AccessError::BadNetwork)?)
            }
            address => (address, prefix),
        };
        let network = Network { first: masked(first, prefix), prefix };
        if network.first != first {
            let network = format!("{}/{prefix}", network.first);
            return Err(AccessError::BitsBeyondPrefix { network });
        }
        Ok(network)
    }

    /// Whether the address is one of the network's.
    pub fn contains(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        address.is_ipv4() == self.first.is_ipv4() && masked(address, self.prefix) == self.first
    }
}

/// The network of one address.
impl From<IpAddr> for Network {
    fn from(address: IpAddr) -> Network {
        let first = address.to_canonical();
        Network { first, prefix: bits(first) }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.prefix == bits(self.first) {
            true => self.first.fmt(f),
            false => write!(f, "{}/{}", self.first, self.prefix),
        }
    }
}

fn bits(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

/// The address with only its first bits; `prefix` is at most their number.
fn masked(address: IpAddr, prefix: u8) -> IpAddr {
    let left = u32::from(bits(address).saturating_sub(prefix));
    match address {
        IpAddr::V4(address) => {
            let mask = u32::MAX.checked_shl(left).unwrap_or(0);
            Ipv4Addr::from_bits(address.to_bits() & mask).into()
        }
        IpAddr::V6(address) => {
            let mask = u128::MAX.checked_shl(left).unwrap_or(0);
            Ipv6Addr::from_bits(address.to_bits() & mask).into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_has_the_addresses_with_its_prefix() {
        for (network, address, expected) in [
            ("10.0.0.0/8", "10.255.0.1", true),
            ("10.0.0.0/8", "11.0.0.0", false),
            ("10.0.0.0/8", "::ffff:10.1.2.3", true),
            ("10.0.0.0/8", "::10.1.2.3", false),
            ("::ffff:10.0.0.0/104", "10.1.2.3", true),
            ("::ffff:10.0.0.0/104", "11.1.2.3", false),
            ("0.0.0.0/0", "203.0.113.9", true),
            ("0.0.0.0/0", "::1", false),
            ("::/0", "2001:db8::1", true),
            ("::/0", "10.1.2.3", false),
            ("192.0.2.7", "192.0.2.7", true),
            ("192.0.2.7", "192.0.2.6", false),
            ("192.0.2.6/31", "192.0.2.7", true),
            ("2001:db8::/33", "2001:db8:7fff::1", true),
            ("2001:db8::/33", "2001:db8:8000::1", false),
            ("::1/128", "::1", true),
        ] {
            let contains = Network::parse(network).unwrap().contains(address.parse().unwrap());
            assert_eq!(contains, expected, "{network} {address}");
        }
    }

    #[test]
    fn a_network_is_shown_as_it_is_written() {
        for text in ["10.0.0.0/8", "0.0.0.0/0", "192.0.2.7", "2001:db8::/33", "::1"] {
            assert_eq!(Network::parse(text).unwrap().to_string(), text);
        }
        let mapped: IpAddr = "::ffff:10.1.2.3".parse().unwrap();
        assert_eq!(Network::from(mapped), Network::parse("10.1.2.3").unwrap());
    }

    #[test]
    fn what_is_no_network_is_refused() {
        for bad in [
            "",
            "/",
            "10.0.0.0/",
            "10.0.0.0/33",
            "10.0.0.0/-1",
            "10.0.0.0/+8",
            "10.0.0/8",
            "::/129",
            "fe80::1%eth0",
            "10.0.0.0/8/8",
            "host.example",
            "::ffff:0.0.0.0/95",
            " 10.0.0.0/8",
            "10.0.0.0/256",
            "010.0.0.0/8",
        ] {
            assert_eq!(Network::parse(bad), Err(AccessError::BadNetwork), "{bad}");
        }
        let network = "10.0.0.0/8".to_owned();
        assert_eq!(Network::parse("10.1.0.0/8"), Err(AccessError::BitsBeyondPrefix { network }));
    }
}
