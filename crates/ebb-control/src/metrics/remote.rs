//! Metrics of remote stores, for each volume that has one.

use std::fmt;

use ebb_api::stat::{RemoteCondition, RemoteStat, Stat};
use prometheus_client::registry::Unit;

use super::Out;

type Value = fn(&RemoteStat) -> u64;

/// Writes them.
pub(super) fn encode(stat: &Stat, out: &mut Out<'_>) -> fmt::Result {
    let of = |value: Value| {
        stat.volumes.iter().filter_map(move |volume| {
            let remote = volume.remote.as_ref()?;
            Some(([("volume", volume.name.as_str())], value(remote)))
        })
    };
    for (name, help, value) in [
        ("ebbd_remote_connections", "Established connections", (|own| own.connections) as Value),
        ("ebbd_remote_in_flight", "Requests in flight", |own| own.in_flight),
        ("ebbd_remote_unflushed", "Writes acknowledged and not flushed", |own| own.unflushed),
    ] {
        out.gauges((name, help), None, of(value))?;
    }
    let up = ("ebbd_remote_up", "Whether the server is connected, or no request has needed it yet");
    out.gauges(up, None, of(|own| u64::from(own.condition() != RemoteCondition::Down)))?;
    let silent = ("ebbd_remote_silent", "Time for which the server has not replied to requests");
    out.gauges(silent, Some(&Unit::Seconds), of(|own| own.silent_seconds))?;
    let again = ("ebbd_remote_reconnects", "Lost connections that were made again");
    out.counters(again, None, of(|own| own.reconnects))?;
    let replayed = ("ebbd_remote_replayed", "Requests sent again on a new connection");
    out.counters(replayed, None, of(|own| own.replayed))
}
