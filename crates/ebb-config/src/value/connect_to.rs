//! An entry of `connect_to`: a host, an address or a network.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

use ebb_access::Network;

use super::web_name;
use crate::error::{BadValue, ConfigErrorKind};
use crate::shorten::shorten;

/// A server that may be connected to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectTo {
    /// A network or an address, and the port if it is not any: that of an address alone.
    Network(Network, Option<u16>),
    /// A host by its name, and the port if it is not any.
    Host(String, Option<u16>),
}

impl FromStr for ConnectTo {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        server(text).ok_or_else(|| {
            BadValue::new(
                ConfigErrorKind::InvalidValue,
                format!("`{}` is no server", shorten(text)),
                "write a host, an address or a network with its first address: store.example:10809, 10.0.0.1, \
                 [fd00::1]:10809, 10.0.0.0/8",
            )
        })
    }
}

fn server(text: &str) -> Option<ConnectTo> {
    if let Ok(network) = Network::parse(text) {
        return Some(ConnectTo::Network(network, None));
    }
    if let Some((address, rest)) = text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        let address: Ipv6Addr = address.parse().ok()?;
        let network = Network::from(IpAddr::from(address));
        let port = if rest.is_empty() { None } else { Some(port(rest.strip_prefix(':')?)?) };
        return Some(ConnectTo::Network(network, port));
    }
    let (host, port) = match text.split_once(':') {
        Some((host, text)) => (host, Some(port(text)?)),
        None => (text, None),
    };
    match host.parse::<IpAddr>() {
        Ok(address) => Some(ConnectTo::Network(address.into(), port)),
        Err(_) => web_name(host).ok().map(|host| ConnectTo::Host(host, port)),
    }
}

/// A port, without the sign that Rust's parser accepts.
fn port(text: &str) -> Option<u16> {
    text.parse().ok().filter(|port| *port > 0 && !text.starts_with('+'))
}

impl fmt::Display for ConnectTo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, port) = match self {
            ConnectTo::Host(host, port) => (host.clone(), port),
            ConnectTo::Network(network, port) => (network.to_string(), port),
        };
        match port {
            Some(port) if whole.contains(':') => write!(f, "[{whole}]:{port}"),
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
            "10.1.0.0/8",
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
