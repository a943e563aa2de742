//! Metrics of Ceph clusters.

use std::fmt;

use ebb_api::stat::{ClusterStat, Stat};
use prometheus_client::registry::Unit;

use super::Out;

type Value = fn(&ClusterStat) -> u64;

/// Writes them.
pub(super) fn encode(stat: &Stat, out: &mut Out<'_>) -> fmt::Result {
    let labels =
        |cluster: &ClusterStat| [("conf", cluster.conf.clone()), ("user", cluster.user.clone())];
    let of =
        |value: Value| stat.clusters.iter().map(move |cluster| (labels(cluster), value(cluster)));
    let up = ("ebbd_cluster_up", "Whether the cluster can be reached and has not fenced ebbd");
    out.gauges(up, None, of(|own| u64::from(own.is_up())))?;
    let state = ("ebbd_cluster_state", "1 with the state of the cluster as label");
    let states = stat.clusters.iter().map(|cluster| {
        let [conf, user] = labels(cluster);
        ([conf, user, ("state", cluster.state.to_string())], 1)
    });
    out.gauges(state, None, states)?;
    for (name, help, value) in [
        ("ebbd_cluster_connections", "Cluster handles", (|own| own.connections) as Value),
        ("ebbd_cluster_images", "Open images", |own| own.images),
        ("ebbd_cluster_images_offline", "Images that are offline", |own| own.offline),
        ("ebbd_cluster_in_flight", "Requests in flight", |own| own.in_flight),
        (
            "ebbd_cluster_slow",
            "Requests in flight that have waited for more than a second",
            |own| own.slow,
        ),
    ] {
        out.gauges((name, help), None, of(value))?;
    }
    let silent = ("ebbd_cluster_silent", "Longest time for which an image has had no answer");
    out.gauges(silent, Some(&Unit::Seconds), of(|own| own.silent_seconds))?;
    let slow = ("ebbd_cluster_slow_requests", "Requests that took more than a second");
    out.counters(slow, None, of(|own| own.slow_requests))?;
    let errors = ("ebbd_cluster_errors", "Requests that failed, or were not answered in time");
    out.counters(errors, None, of(|own| own.errors))?;
    let times = stat.clusters.iter().flat_map(|cluster| {
        cluster.times.iter().map(move |(operation, times)| {
            let [conf, user] = labels(cluster);
            ([conf, user, ("operation", operation.clone())], times)
        })
    });
    let duration =
        ("ebbd_cluster_request_duration", "Time that the cluster took to answer a request");
    out.histograms(duration, times)
}
