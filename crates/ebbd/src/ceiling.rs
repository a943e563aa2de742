//! Divides the ceiling of I/O memory, and reports limits that do not fit into it.
//!
//! Requests may hold a part of the ceiling, in which each volume has a reserve that other volumes
//! cannot use (`ebb_mem::Shares`, `docs/adr/0009-shares.md`). Dirty data of writeback volumes may
//! occupy half of the ceiling, so that with such volumes the part for requests is smaller.

use ebb_config::{CacheMode, Config, NbdConfig};
use ebb_mem::Memory;

/// Sets the part of the ceiling that requests may hold.
pub(crate) fn apportion(config: &Config, memory: &Memory) {
    let writeback = config.volumes.values().any(|v| v.cache == CacheMode::Writeback);
    memory.set_share_eighths(if writeback { 3 } else { 6 });
}

/// Logs limits of clients that exceed the memory for requests, once the volumes have their shares; `logged` has the
/// findings of the last call, which are not logged again.
pub(crate) fn report(config: &Config, memory: &Memory, logged: &mut Vec<Finding>) {
    let shares = memory.shares();
    let found = findings(&config.nbd, shares.total(), shares.reserve());
    let before = std::mem::replace(logged, found);
    for finding in logged.iter().filter(|finding| !before.contains(finding)) {
        match finding {
            Finding::Note(text) => tracing::debug!("{text}"),
            Finding::Warning(text) => tracing::warn!("{text}"),
        }
    }
}

/// A line for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Finding {
    /// At debug level: it follows from defaults.
    Note(String),
    Warning(String),
}

/// Requests may hold `total` bytes together, and each volume has a reserve of `reserve` bytes.
fn findings(nbd: &NbdConfig, total: usize, reserve: usize) -> Vec<Finding> {
    let mut findings = Vec::new();
    let (total, reserve) = (total as u64, reserve as u64);
    let mib = |bytes: u64| bytes >> 20;
    let defaults = NbdConfig::default();
    let connection = nbd.connection_memory.bytes();
    let sum = connection.saturating_mul(nbd.max_clients.try_into().unwrap_or(u64::MAX));
    if sum > total {
        let text = format!(
            "connection_memory ({} MiB) times max_clients ({}) is more than the I/O memory for \
             requests ({} MiB): clients that use all of it wait; lower one of them, or give the \
             host more memory",
            mib(connection),
            nbd.max_clients,
            mib(total),
        );
        // Defaults are for hosts of every size, and the operator has chosen nothing: clients rarely use all of their
        // memory, and the requests of one volume do not wait for those of another.
        let default = (nbd.connection_memory, nbd.max_clients)
            == (defaults.connection_memory, defaults.max_clients);
        findings.push(if default { Finding::Note(text) } else { Finding::Warning(text) });
    }
    let request = nbd.max_request.bytes();
    if request.saturating_add(4096) > reserve {
        findings.push(Finding::Warning(format!(
            "max_request ({} MiB) is more than the I/O memory reserved for each volume ({} KiB): \
             while memory is short, larger requests are carried out in pieces; serve fewer volumes, \
             or give the host more memory",
            mib(request),
            reserve >> 10,
        )));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_that_exceed_the_memory_for_requests_are_reported() {
        let mut nbd = NbdConfig::default();
        assert!(findings(&nbd, 1 << 40, 65 << 20).is_empty());
        assert!(matches!(findings(&nbd, 1 << 30, 65 << 20)[..], [Finding::Note(_)]));
        nbd.max_clients += 1;
        let [Finding::Warning(text)] = &findings(&nbd, 1 << 30, 65 << 20)[..] else { panic!() };
        assert!(text.contains("max_clients (257)") && text.contains("1024 MiB"), "{text}");
        let [_, Finding::Warning(text)] = &findings(&nbd, 48 << 20, 12 << 20)[..] else { panic!() };
        assert!(text.contains("max_request (32 MiB)") && text.contains("12288 KiB"), "{text}");
    }
}
