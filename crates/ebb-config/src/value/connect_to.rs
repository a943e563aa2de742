//! An entry of `connect_to`: a host, an address or a network.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

use super::web_name;
use crate::error::{BadValue, ConfigErrorKind};
use crate::shorten::shorten;

/// A server that may be connected to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectTo {
    /// A network: an address and the number of its leading bits that count, and the port if it is not any.
    Network(IpAddr, u8, Option<u16>),
    /// A host by its name, and the port if it is not any.
    Host(String, Option<u16>),
}

impl FromStr for ConnectTo {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let bad = || {
            BadValue::new(
                ConfigErrorKind::InvalidValue,
                format!("`{}` is no server", shorten(text)),
                "write a host, an address or a network: store.example:10809, 10.0.0.1, [fd00::1]:10809, 10.0.0.0/8",
            )
        };
        let port = |port: &str| match port.parse() {
            Ok(port @ 1..) if !port_has_sign(text) => Ok(Some(port)),
            _ => Err(bad()),
        };
        let all = |address: IpAddr| if address.is_ipv4() { 32 } else { 128 };
        if let Some((address, bits)) = text.split_once('/') {
            let address: IpAddr = address.parse().map_err(|_| bad())?;
            let bits = bits.parse().ok().filter(|bits| *bits <= all(address));
            return Ok(ConnectTo::Network(address, bits.ok_or_else(bad)?, None));
        }
        if let Some(rest) = text.strip_prefix('[') {
            let (address, rest) = rest.split_once(']').ok_or_else(bad)?;
            let address: Ipv6Addr = address.parse().map_err(|_| bad())?;
            let port = match rest.strip_prefix(':') {
                Some(text) => port(text)?,
                None if rest.is_empty() => None,
                None => return Err(bad()),
            };
            return Ok(ConnectTo::Network(address.into(), 128, port));
        }
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(ConnectTo::Network(address, all(address), None));
        }
        let (host, port) = match text.split_once(':') {
            Some((host, text)) => (host, port(text)?),
            None => (text, None),
        };
        if let Ok(address) = host.parse::<IpAddr>() {
            return Ok(ConnectTo::Network(address, all(address), port));
        }
        web_name(host).map(|host| ConnectTo::Host(host, port)).map_err(|_| bad())
    }
}

/// Whether a number is written with a sign, which Rust's parser accepts.
fn port_has_sign(text: &str) -> bool {
    text.contains('+')
}

impl fmt::Display for ConnectTo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, port) = match self {
            ConnectTo::Host(host, port) => (host.clone(), port),
            ConnectTo::Network(address @ IpAddr::V4(_), 32, port) => (address.to_string(), port),
            ConnectTo::Network(address @ IpAddr::V6(_), 128, port @ Some(_)) => {
                (format!("[{address}]"), port)
            }
            ConnectTo::Network(address @ IpAddr::V6(_), 128, port) => (address.to_string(), port),
            ConnectTo::Network(address, bits, port) => (format!("{address}/{bits}"), port),
        };
        match port {
            Some(port) => write!(f, "{whole}:{port}"),
            None => f.write_str(&whole),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_shown_as_they_are_written() {
        for text in [
            "10.0.0.0/8",
            "10.0.0.1",
            "10.0.0.1:10809",
            "fd00::/8",
            "fd00::1",
            "[fd00::1]:10809",
            "store.example",
            "store.example:10809",
        ] {
            assert_eq!(text.parse::<ConnectTo>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_is_no_server_is_refused() {
        for text in [
            "",
            ":1",
            "a:",
            "a:0",
            "a:65536",
            "a:+1",
            "10.0.0.0/33",
            "10.0.0.0/",
            "a/8",
            "[::1",
            "[::1]1",
            "[a]:1",
            "10.0.0.0/8:1",
            "a b",
            "/run/s",
        ] {
            assert!(text.parse::<ConnectTo>().is_err(), "{text}");
        }
    }
}
