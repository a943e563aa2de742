//! Who may take the file descriptors of the process: volumes leave some to clients, and clients leave those that remote
//! volumes need for connections that they may still make, or make again.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use ebb_export_nbd::Server;
use ebb_io::WorkerHandle;
use ebb_store::RemoteConnections;
use rustix::process::{Resource, getrlimit};

use crate::ticks::until_tick;

/// Descriptors that volumes leave free, for sockets and clients; with a low limit a quarter of it.
const FREE: u64 = 64;
/// Descriptors that clients leave free beside those of remote volumes: for stores that are being opened, requests to
/// the control socket and the page, and Xen guests.
const SPARE: usize = 8;
/// How often the limit of clients is adjusted, since volumes are opened and closed, and guests come and go.
const PERIOD: Duration = Duration::from_secs(2);

fn limit() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}

/// Whether volumes leave enough descriptors, with those that remote volumes need and do not have yet. The kernel gives
/// out the lowest free one.
///
/// # Errors
/// The limit of open files, if they do not.
pub(crate) fn check_volumes(workers: usize) -> Result<(), u64> {
    let Some(limit) = limit() else { return Ok(()) };
    let lowest = File::open("/dev/null").ok().and_then(|file| u64::try_from(file.as_raw_fd()).ok());
    let remote = RemoteConnections::count(workers);
    let owed = u64::try_from(remote.most - remote.established).unwrap_or(u64::MAX);
    let enough =
        |lowest: u64| lowest.saturating_add(FREE.min(limit / 4)).saturating_add(owed) < limit;
    if lowest.is_some_and(enough) { Ok(()) } else { Err(limit) }
}

/// Limits the connections of clients so that remote volumes can connect. Without remote volumes there is no limit:
/// without a free descriptor clients wait until they are accepted.
pub(crate) fn limit_clients(server: &Server, workers: usize) {
    let remote = RemoteConnections::count(workers);
    let limit = limit().and_then(|limit| usize::try_from(limit).ok());
    let (Some(limit), true) = (limit, remote.most > 0) else {
        return server.limit_accepted_connections(usize::MAX);
    };
    // Without /proc the limit stays as it is.
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else { return };
    // Inherited descriptors may be above the limit.
    let numbers = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let open = numbers.filter(|number: &usize| *number < limit).count();
    let others = open.saturating_sub(server.accepted_connections() + remote.established);
    server.limit_accepted_connections(room(limit, others, remote.most));
}

/// How many clients may be connected, beside `remote` connections of volumes and `others` descriptors.
fn room(limit: usize, others: usize, remote: usize) -> usize {
    limit.saturating_sub(others).saturating_sub(remote).saturating_sub(SPARE).max(1)
}

/// Adjusts the limit of clients for as long as the worker runs.
pub(crate) fn keep(worker: &WorkerHandle, started: Instant, server: Server, workers: usize) {
    worker.spawn(move |io| async move {
        loop {
            io.sleep(until_tick(ebb_mem::clock::now(), started, PERIOD)).await;
            if RemoteConnections::count(workers).most > 0 {
                let server = server.clone();
                io.offload(move || limit_clients(&server, workers)).await;
            }
        }
    });
}
