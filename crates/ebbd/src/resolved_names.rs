//! The addresses of hosts' names at which a daemon listens.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use ebb_access::socket_addresses;
use ebb_config::Listen;

/// Addresses by names. While a daemon stops and its successor has no volume yet, no name is
/// resolved: clients would wait for the name server.
#[derive(Debug, Default)]
pub(crate) struct ResolvedNames(BTreeMap<String, Vec<SocketAddr>>);

impl ResolvedNames {
    /// Resolves the names among these addresses, all together within `limit`. Those that have no
    /// address, or none yet, are left out.
    pub(crate) fn of(addresses: &[Listen], limit: Duration) -> ResolvedNames {
        let names: Vec<String> = addresses.iter().filter_map(name_in).map(str::to_owned).collect();
        let (sender, resolved) = channel();
        let mut known = ResolvedNames::default();
        let mut missing = names.len();
        // The receiver is dropped when the limit has passed.
        let resolve = move || {
            for name in names {
                let found = socket_addresses(&name).unwrap_or_default();
                if sender.send((name, found)).is_err() {
                    return;
                }
            }
        };
        if missing > 0
            && std::thread::Builder::new().name("ebbd-names".into()).spawn(resolve).is_ok()
        {
            let begun = Instant::now();
            while let Ok((name, found)) =
                resolved.recv_timeout(limit.saturating_sub(begun.elapsed()))
            {
                missing -= 1;
                known.0.insert(name, found);
            }
        }
        if missing > 0 {
            tracing::warn!(
                missing,
                "names to listen at have no addresses yet: sockets at further addresses of theirs are opened at the next \
                 start or takeover"
            );
        }
        known
    }

    /// The addresses of a name; none if they are not known.
    pub(crate) fn of_name(&self, name: &str) -> &[SocketAddr] {
        self.0.get(name).map_or(&[], Vec::as_slice)
    }
}

/// The name of a host and port at which a daemon is to listen; `None` for a path and an IP address.
fn name_in(address: &Listen) -> Option<&str> {
    let Listen::Tcp(address) = address else { return None };
    let host = address.rsplit_once(':')?.0;
    // IPv6 addresses are in brackets.
    (!host.starts_with('[') && host.parse::<Ipv4Addr>().is_err()).then_some(address)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::listener::{open_others, open_resolved};

    const MINUTE: Duration = Duration::from_mins(1);

    #[test]
    fn names_alone_are_resolved_and_only_when_that_is_asked_for() {
        let tcp = |address: &str| Listen::Tcp(address.to_owned());
        let name = tcp("localhost:0");
        let others = [tcp("127.0.0.1:1"), tcp("[::]:1"), tcp("[fe80::1%3]:1")];
        for address in others.iter().chain([&Listen::Unix("/a:1".into())]) {
            assert_eq!(name_in(address), None, "{address:?}");
        }
        let all: Vec<_> = others.into_iter().chain([name.clone()]).collect();
        let names = ResolvedNames::of(&all, MINUTE);
        assert_eq!(names.0.keys().collect::<Vec<_>>(), ["localhost:0"]);
        let ended = AtomicBool::default();
        assert!(!open_resolved(&name, &names, &ended).unwrap().is_empty());
        // Without having been resolved, none is opened: clients would wait.
        assert!(open_others(&name, &ResolvedNames::default(), &[]).is_empty());
        assert!(!open_others(&name, &names, &[]).is_empty());
        let none = ResolvedNames::of(&[tcp("name.invalid:1")], MINUTE);
        assert!(none.of_name("name.invalid:1").is_empty());
    }
}
