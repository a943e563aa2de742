//! How the ceiling of I/O memory is shared out, and what the operator should know of it.
//!
//! What requests may hold is a part of the ceiling, and each volume has a reserve in it that other
//! volumes cannot use (`ebb_mem::Shares`). Dirty data of writeback volumes may take half of the
//! ceiling: where there are such volumes, requests have the less.

use ebb_mem::Memory;

use crate::config::{CacheMode, Config, Nbd};

/// Sets the part of the ceiling that requests may hold.
pub(crate) fn apportion(config: &Config, memory: &Memory) {
    let ceiling = memory.arena_stats().ceiling;
    let writeback = config.volumes.values().any(|v| v.cache == CacheMode::Writeback);
    memory.shares().set_total(if writeback { ceiling / 8 * 3 } else { ceiling / 4 * 3 });
}

/// Says if the limits of clients promise more than there is, once the volumes have their shares; `told` has what was
/// said last, which is not said again.
pub(crate) fn tell(config: &Config, memory: &Memory, told: &mut Vec<Finding>) {
    let shares = memory.shares();
    let found = findings(&config.nbd, shares.total(), shares.reserve());
    let before = std::mem::replace(told, found);
    for finding in told.iter().filter(|finding| !before.contains(finding)) {
        match finding {
            Finding::Note(text) => tracing::info!("{text}"),
            Finding::Warning(text) => tracing::warn!("{text}"),
        }
    }
}

/// What the operator should know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Finding {
    Note(String),
    Warning(String),
}

/// What requests may hold is `total`, and each volume's reserve `reserve` bytes.
fn findings(nbd: &Nbd, total: usize, reserve: usize) -> Vec<Finding> {
    let mut findings = Vec::new();
    let (total, reserve) = (total as u64, reserve as u64);
    let mib = |bytes: u64| bytes >> 20;
    let defaults = Nbd::default();
    let connection = nbd.connection_memory.bytes();
    let sum = connection.saturating_mul(nbd.max_clients.try_into().unwrap_or(u64::MAX));
    if sum > total {
        let text = format!(
            "connection_memory ({} MiB) times max_clients ({}) is more than I/O memory has for \
             requests ({} MiB): clients that use all of it wait; lower either, or give the host \
             more memory",
            mib(connection),
            nbd.max_clients,
            mib(total),
        );
        // Defaults are for hosts of every size: clients rarely use all of it, and no volume's
        // requests wait for those of another volume.
        let default = (nbd.connection_memory, nbd.max_clients)
            == (defaults.connection_memory, defaults.max_clients);
        findings.push(if default { Finding::Note(text) } else { Finding::Warning(text) });
    }
    let request = nbd.max_request.bytes();
    if request.saturating_add(4096) > reserve {
        findings.push(Finding::Warning(format!(
            "max_request ({} MiB) is more than each volume has of I/O memory for itself ({} KiB): \
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
    fn limits_that_add_up_to_more_than_there_is_are_told() {
        let mut nbd = Nbd::default();
        assert!(findings(&nbd, 1 << 40, 65 << 20).is_empty());
        assert!(matches!(findings(&nbd, 1 << 30, 65 << 20)[..], [Finding::Note(_)]));
        nbd.max_clients += 1;
        let [Finding::Warning(text)] = &findings(&nbd, 1 << 30, 65 << 20)[..] else { panic!() };
        assert!(text.contains("max_clients (257)") && text.contains("1024 MiB"), "{text}");
        let [_, Finding::Warning(text)] = &findings(&nbd, 48 << 20, 12 << 20)[..] else { panic!() };
        assert!(text.contains("max_request (32 MiB)") && text.contains("12288 KiB"), "{text}");
    }
}
