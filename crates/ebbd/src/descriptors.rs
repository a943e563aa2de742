//! Which part may take how many file descriptors of the process: volumes leave some to clients; clients and frontends of
//! vhost-user leave those that remote volumes need for connections that they may still make, or
//! make again, and those that administration needs: a reload and a change of a volume open files.

use std::os::fd::{AsFd, AsRawFd};

use ebb_config::{Config, StoreUri, VolumeConfig, plural};
use ebb_export_nbd::Server;
use ebb_export_vhost::FrontendDescriptors;
use ebb_store::RemoteConnections;
use rustix::process::{Resource, getrlimit};

/// Descriptors that volumes leave free, for sockets and clients; with a low limit a quarter of it.
const FREE: u64 = 64;
/// Descriptors that clients and frontends leave free in addition to those of remote volumes, with a
/// low limit an eighth of it: for files of changes and reloads, stores that are being opened,
/// requests to the control socket and the page, Xen guests.
const SPARE: usize = 32;

fn limit() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}

/// The least descriptors of a daemon without volumes, and of each worker.
const BASE: u64 = 28;
const PER_WORKER: u64 = 2;

/// The limit of a daemon that this user starts here: it raises its own to the most.
pub(crate) fn limit_of_daemon() -> Option<u64> {
    getrlimit(Resource::Nofile).maximum
}

/// The descriptors of the process without those that volumes leave free.
fn usable(limit: u64) -> u64 {
    limit - FREE.min(limit / 4)
}

/// A warning that a daemon with this limit cannot open the volumes of a configuration, if that is
/// certain.
pub(crate) fn too_few(limit: u64, config: &Config) -> Option<String> {
    let has_file =
        |volume: &&VolumeConfig| !matches!(volume.store, StoreUri::Memory(_) | StoreUri::Null(_));
    let files = config.volumes.values().filter(has_file).count();
    let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
    let needed = BASE
        .saturating_add(PER_WORKER.saturating_mul(count(config.workers)))
        .saturating_add(count(files));
    (needed >= usable(limit)).then(|| {
        format!(
            "at most {limit} open files, of which clients get {}, and the daemon needs at least {needed} for {}: raise \
             LimitNOFILE= of the service (or ulimit -Hn), such as to 1048576",
            limit - usable(limit),
            plural(count(config.volumes.len()), "volume")
        )
    })
}

/// Whether volumes leave enough descriptors, with those that remote volumes need and do not have yet. The kernel gives
/// out the lowest free one.
///
/// # Errors
/// The limit of open files, if they do not.
pub(crate) fn check_volumes(workers: usize) -> Result<(), u64> {
    let Some(limit) = limit() else { return Ok(()) };
    let lowest = std::io::stderr().as_fd().try_clone_to_owned().ok();
    let lowest = lowest.and_then(|fd| u64::try_from(fd.as_raw_fd()).ok());
    let remote = RemoteConnections::count(workers);
    let owed = u64::try_from(remote.most - remote.established).unwrap_or(u64::MAX);
    let enough = |lowest: u64| lowest.saturating_add(owed) < usable(limit);
    if lowest.is_some_and(enough) { Ok(()) } else { Err(limit) }
}

/// What the exports may take of the descriptors that the rest of the process leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DescriptorLimits {
    /// Connections of NBD clients.
    clients: usize,
    /// Descriptors of frontends.
    frontends: usize,
}

/// The descriptors of the process.
#[derive(Clone, Copy, Debug)]
struct DescriptorsInUse {
    limit: usize,
    /// All of them.
    open: usize,
    /// The connections that remote volumes may make: in all, and those that there are.
    remote: (usize, usize),
    clients: usize,
    /// Those that frontends hold, and those that count as theirs; absent without frontends.
    frontends: Option<(usize, usize)>,
}

impl DescriptorsInUse {
    /// The limits until they are adjusted again. Both exports take from what is free: with frontends each may take half.
    fn limits(self) -> DescriptorLimits {
        let (most, established) = self.remote;
        let (held, counted) = self.frontends.unwrap_or_default();
        let spare = SPARE.min(self.limit / 8);
        let owed = most.saturating_sub(established) + counted.saturating_sub(held) + spare;
        let taken = self.open.saturating_add(owed);
        let lacking = taken.saturating_sub(self.limit);
        let free = self.limit.saturating_sub(taken);
        let part = if self.frontends.is_some() { free / 2 } else { free };
        let clients = (self.clients + part).saturating_sub(lacking).max(1);
        DescriptorLimits { clients, frontends: counted + part }
    }
}

/// Limits the connections of clients and the descriptors of frontends, so that remote volumes can
/// connect, files of changes be opened, and neither export takes all descriptors from the other
/// one. Blocks for a moment.
pub(crate) fn limit_exports(
    server: &Server,
    frontends: Option<&FrontendDescriptors>,
    workers: usize,
) {
    let remote = RemoteConnections::count(workers);
    let limit = limit().and_then(|limit| usize::try_from(limit).ok());
    let Some(limit) = limit else { return server.limit_accepted_connections(usize::MAX) };
    // Without /proc the limits stay as they are.
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else { return };
    // Inherited descriptors may be above the limit.
    let numbers = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let limits = DescriptorsInUse {
        limit,
        open: numbers.filter(|number: &usize| *number < limit).count(),
        remote: (remote.most, remote.established),
        clients: server.accepted_connections(),
        frontends: frontends.map(|of| (of.open(), of.reserved())),
    }
    .limits();
    server.limit_accepted_connections(limits.clients);
    if let Some(frontends) = frontends {
        frontends.limit(limits.frontends);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_that_is_too_low_for_the_volumes_is_found() {
        let text = "listen = ['unix:/s']\nworkers = 2\n[volume.a]\nstore = 'file:/a'\n\
            [volume.b]\nstore = 'null:1M'\n";
        let args = ebb_config::ServeArgs::default();
        let config = Config::parse(text, "f".as_ref(), &args).unwrap();
        for low in [20, 40] {
            let said = too_few(low, &config).unwrap();
            assert!(said.contains("needs at least 33 for 2 volumes: raise LimitNOFILE="), "{said}");
        }
        assert_eq!(too_few(1024, &config), None);
    }

    const IN_USE: DescriptorsInUse =
        DescriptorsInUse { limit: 1024, open: 100, remote: (20, 5), clients: 30, frontends: None };

    #[test]
    fn clients_leave_what_remote_volumes_have_not_opened_yet() {
        let limits = IN_USE.limits();
        assert_eq!(limits.clients, 30 + 1024 - 100 - 15 - SPARE);
        let none = DescriptorsInUse { remote: (0, 0), ..IN_USE };
        assert_eq!(none.limits().clients, 30 + 1024 - 100 - SPARE, "for administration");
        let low = DescriptorsInUse { limit: 128, remote: (0, 0), ..IN_USE };
        assert_eq!(low.limits().clients, 30 + 128 - 100 - 16, "an eighth of a low limit");
        let short = DescriptorsInUse { open: 1010, ..IN_USE };
        assert_eq!(
            short.limits().clients,
            (30 + 1024_usize).saturating_sub(1010 + 15 + SPARE).max(1)
        );
        assert_eq!(DescriptorsInUse { limit: 50, ..IN_USE }.limits().clients, 1);
    }

    #[test]
    fn clients_and_frontends_together_leave_what_remote_volumes_need() {
        // Whatever each takes until the next adjustment, and however often.
        let mut now = DescriptorsInUse { frontends: Some((0, 0)), ..IN_USE };
        for round in 0..20 {
            let limits = now.limits();
            let (held, counted) = now.frontends.unwrap();
            assert!(limits.frontends >= counted && limits.clients >= now.clients);
            let clients = if round % 3 == 0 { now.clients } else { limits.clients };
            let frontends = if round % 3 == 1 { counted } else { limits.frontends };
            // Frontends open all that counts as theirs.
            now.open += clients - now.clients + frontends - held;
            (now.clients, now.frontends) = (clients, Some((frontends, frontends)));
            assert!(now.open + 15 + SPARE <= now.limit, "{now:?}");
        }
        assert!(now.limits().frontends > 200 && now.clients > 200, "{now:?}");
        // What is reserved for messages and not open yet is not given away.
        let reserving = DescriptorsInUse { frontends: Some((10, 110)), ..IN_USE };
        assert_eq!(reserving.limits().frontends, 110 + (1024 - 100 - 15 - 100 - SPARE) / 2);
    }
}
