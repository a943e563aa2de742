//! Metrics of the frontends of vhost-user. The counters of a frontend start at zero when it connects; a connection has a
//! number of its own, so that its series end with it.

use std::fmt;

use ebb_api::stat::{FrontendState, Stat, VhostStat};
use prometheus_client::registry::Unit;

use super::Out;

type Value = fn(&VhostStat) -> u64;

fn labels(disk: &VhostStat) -> [(&'static str, String); 2] {
    [("volume", disk.volume.clone()), ("connection", disk.connection.to_string())]
}

/// Writes them.
pub(super) fn encode(stat: &Stat, out: &mut Out<'_>) -> fmt::Result {
    let of = |value: Value| stat.vhost.iter().map(move |disk| (labels(disk), value(disk)));
    for (name, help, value) in [
        ("ebbd_vhost_queues", "Queues that are served", (|disk| disk.queues.into()) as Value),
        ("ebbd_vhost_in_flight", "Requests in flight", |disk| disk.in_flight),
        ("ebbd_vhost_waiting", "Whether the guest waits until another writer ends", |disk| {
            (disk.state == FrontendState::Waiting).into()
        }),
    ] {
        out.gauges((name, help), None, of(value))?;
    }
    let requests = stat.vhost.iter().flat_map(|disk| {
        disk.requests.iter().map(|(operation, count)| {
            let [volume, connection] = labels(disk);
            ([volume, connection, ("operation", operation.clone())], *count)
        })
    });
    out.counters(("ebbd_vhost_requests", "Requests of the guest"), None, requests)?;
    for (name, help, value) in [
        ("ebbd_vhost_read", "Bytes read", (|disk| disk.read_bytes) as Value),
        ("ebbd_vhost_written", "Bytes written", |disk| disk.written_bytes),
    ] {
        out.counters((name, help), Some(&Unit::Bytes), of(value))?;
    }
    for (name, help, value) in [
        ("ebbd_vhost_errors", "Requests completed with an error", (|disk| disk.errors) as Value),
        ("ebbd_vhost_resumed", "Requests resumed from an earlier daemon", |disk| disk.resumed),
        ("ebbd_vhost_inline", "Requests carried out without a task", |disk| disk.inline),
        ("ebbd_vhost_kicks", "Notifications received from the guest", |disk| disk.kicks),
        ("ebbd_vhost_polls", "Times that polling found requests", |disk| disk.polls),
        ("ebbd_vhost_publications", "Times that completions were published", |disk| {
            disk.publications
        }),
        ("ebbd_vhost_calls", "Notifications sent to the guest", |disk| disk.calls),
        ("ebbd_vhost_throttled", "Times that a guest with invalid requests was delayed", |disk| {
            disk.throttled
        }),
    ] {
        out.counters((name, help), None, of(value))?;
    }
    Ok(())
}
