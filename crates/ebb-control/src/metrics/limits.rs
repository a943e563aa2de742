//! Metrics of the limits of volumes and groups.

use std::fmt;

use ebb_api::LimitStat;
use ebb_api::stat::Stat;
use prometheus_client::registry::Unit;

use super::Out;

type Pick = fn(&LimitStat) -> u64;

/// The limits by operation; 0, no limit, is left out.
const REQUESTS: [(&str, Pick); 3] =
    [("all", |l| l.iops), ("read", |l| l.read_iops), ("write", |l| l.write_iops)];
const BYTES: [(&str, Pick); 3] =
    [("all", |l| l.bandwidth), ("read", |l| l.read_bandwidth), ("write", |l| l.write_bandwidth)];

pub(super) fn encode(stat: &Stat, out: &mut Out<'_>) -> fmt::Result {
    let volumes = stat
        .volumes
        .iter()
        .filter_map(|volume| volume.limits.as_ref().map(|limits| (volume.name.as_str(), limits)));
    let volumes: Vec<_> = volumes.collect();
    if !volumes.is_empty() {
        let names = [
            "ebbd_volume_limit_requests_per_second",
            "ebbd_volume_limit_bytes_per_second",
            "ebbd_volume_limit_throttled_requests",
            "ebbd_volume_limit_throttled",
        ];
        of(names, "volume", &volumes, out)?;
    }
    let groups = stat.limit_groups.iter().map(|group| (group.name.as_str(), &group.limits));
    let groups: Vec<_> = groups.collect();
    if groups.is_empty() {
        return Ok(());
    }
    let names = [
        "ebbd_limit_group_requests_per_second",
        "ebbd_limit_group_bytes_per_second",
        "ebbd_limit_group_throttled_requests",
        "ebbd_limit_group_throttled",
    ];
    of(names, "group", &groups, out)
}

fn of(
    [requests, bytes, throttled, time]: [&'static str; 4],
    label: &'static str,
    owners: &[(&str, &LimitStat)],
    out: &mut Out<'_>,
) -> fmt::Result {
    let limits = |picks: [(&'static str, Pick); 3]| {
        owners.iter().flat_map(move |(owner, limits)| {
            picks.into_iter().filter_map(move |(operation, pick)| {
                let value = pick(limits);
                (value > 0).then_some(([(label, *owner), ("operation", operation)], value))
            })
        })
    };
    out.gauges((requests, "Limit of requests per second"), None, limits(REQUESTS))?;
    out.gauges((bytes, "Limit of bytes per second"), None, limits(BYTES))?;
    let counts = owners.iter().map(|(owner, l)| ([(label, *owner)], l.throttled_requests));
    out.counters((throttled, "Requests that waited for the limits"), None, counts)?;
    let times = owners.iter().map(|(owner, l)| ([(label, *owner)], l.throttled_seconds));
    let help = "Time in which at least one request waited for the limits";
    out.time_counters((time, help), Some(&Unit::Seconds), times)
}
