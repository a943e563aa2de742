//! The figures of [`ebb_api::stat`] as OpenMetrics text, for Prometheus.
//!
//! Values are in base units, and counters end in `_total`. Every name begins with `ebbd_`, except
//! that of the memory of the process, which has the name that all exporters use. For an alert on
//! memory subtract `ebbd_memory_unwired_bytes` from `process_resident_memory_bytes`: the kernel
//! reclaims lent memory without I/O when it needs it.

mod bdi;
mod cache;
mod limits;
mod remote;
mod xen;

use std::fmt;

use ebb_api::stat::{LatencyStat, MemoryStat, OperationStat, PressureStat, Stat, ZoneStat};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};

/// The type of the text, for HTTP.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The figures as OpenMetrics text.
///
/// # Errors
/// Only if the encoder fails, which with a string to write to it does not.
pub(crate) fn text(stat: Stat) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Snapshot(stat)));
    let mut out = String::new();
    prometheus_client::encoding::text::encode(&mut out, &registry)?;
    Ok(out)
}

#[derive(Debug)]
struct Snapshot(Stat);

/// The name and help of a metric.
type Name = (&'static str, &'static str);

/// Writes metrics to an encoder; a method for each type of metric.
struct Out<'a>(DescriptorEncoder<'a>);

impl Out<'_> {
    /// A gauge of one value; `unit` becomes the end of the name.
    fn gauge(&mut self, (name, help): Name, unit: Option<&Unit>, value: f64) -> fmt::Result {
        let gauge = ConstGauge::new(value);
        gauge.encode(self.0.encode_descriptor(name, help, unit, gauge.metric_type())?)
    }

    fn counter(&mut self, (name, help): Name, value: u64) -> fmt::Result {
        let counter = ConstCounter::new(value);
        counter.encode(self.0.encode_descriptor(name, help, None, counter.metric_type())?)
    }

    fn gauges<L: EncodeLabelSet>(
        &mut self,
        (name, help): Name,
        unit: Option<&Unit>,
        values: impl Iterator<Item = (L, u64)>,
    ) -> fmt::Result {
        let kind = ConstGauge::new(0u64).metric_type();
        let mut family = self.0.encode_descriptor(name, help, unit, kind)?;
        for (labels, value) in values {
            let gauge = ConstGauge::new(value);
            gauge.encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn fractions<L: EncodeLabelSet>(
        &mut self,
        (name, help): Name,
        unit: Option<&Unit>,
        values: impl Iterator<Item = (L, f64)>,
    ) -> fmt::Result {
        let kind = ConstGauge::new(0f64).metric_type();
        let mut family = self.0.encode_descriptor(name, help, unit, kind)?;
        for (labels, value) in values {
            let gauge = ConstGauge::new(value);
            gauge.encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn histograms<'a, L: EncodeLabelSet>(
        &mut self,
        (name, help): Name,
        values: impl Iterator<Item = (L, &'a LatencyStat)>,
    ) -> fmt::Result {
        let unit = Some(&Unit::Seconds);
        let mut family = self.0.encode_descriptor(name, help, unit, MetricType::Histogram)?;
        for (labels, latency) in values {
            let mut buckets: Vec<(f64, u64)> = ENDS.iter().map(|end| (*end, 0)).collect();
            buckets.push((f64::INFINITY, 0));
            for &(end, count) in &latency.buckets {
                // An end is read from text in tests: it may be off by a rounding error.
                if let Some((_, sum)) = buckets.iter_mut().find(|(most, _)| end <= most * 1.001) {
                    *sum = sum.saturating_add(count);
                }
            }
            let (sum, count) = (latency.sum_seconds, latency.count);
            family
                .encode_family(&labels)?
                .encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
        }
        Ok(())
    }

    fn counters<L: EncodeLabelSet>(
        &mut self,
        (name, help): Name,
        unit: Option<&Unit>,
        values: impl Iterator<Item = (L, u64)>,
    ) -> fmt::Result {
        let kind = ConstCounter::new(0u64).metric_type();
        let mut family = self.0.encode_descriptor(name, help, unit, kind)?;
        for (labels, value) in values {
            let counter = ConstCounter::new(value);
            counter.encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

impl Out<'_> {
    /// Counters of times.
    fn time_counters<L: EncodeLabelSet>(
        &mut self,
        (name, help): Name,
        unit: Option<&Unit>,
        values: impl Iterator<Item = (L, f64)>,
    ) -> fmt::Result {
        let kind = ConstCounter::new(0f64).metric_type();
        let mut family = self.0.encode_descriptor(name, help, unit, kind)?;
        for (labels, value) in values {
            let counter = ConstCounter::new(value);
            counter.encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

/// The ends of the buckets of histograms, seconds: powers of four of a nanosecond, from 4.1 us to 17 s, at which
/// buckets of the daemon end, too.
const ENDS: [f64; 12] = {
    let (mut ends, mut at) = ([0.0; 12], 0);
    while at < ends.len() {
        ends[at] = (1u64 << (12 + 2 * at)) as f64 / 1e9;
        at += 1;
    }
    ends
};

/// A number as the value of a gauge; it is rounded above 2^53.
#[allow(clippy::cast_precision_loss, reason = "metrics are floating point")]
fn float(value: u64) -> f64 {
    value as f64
}

impl Collector for Snapshot {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let (stat, mut out) = (&self.0, Out(encoder));
        let build = [[("version", stat.version.as_str())]];
        out.gauges(("ebbd_build_info", "The version"), None, build.into_iter().map(|l| (l, 1)))?;
        let uptime = ("ebbd_uptime", "Time since the daemon started");
        out.gauge(uptime, Some(&Unit::Seconds), stat.uptime_seconds)?;
        let resident = ("process_resident_memory", "Resident memory of the process");
        out.gauge(resident, Some(&Unit::Bytes), float(stat.resident_bytes))?;
        out.gauge(("ebbd_clients", "NBD connections"), None, float(stat.clients))?;
        volumes(stat, &mut out)?;
        limits::encode(stat, &mut out)?;
        workers(stat, &mut out)?;
        if let Some(stat) = &stat.memory {
            memory(stat, &mut out)?;
        }
        if let Some(stat) = &stat.pressure {
            pressure(stat, &mut out)?;
        }
        if let Some(of_all) = &stat.cache {
            cache::encode(of_all, stat, &mut out)?;
        }
        if !stat.bdis.is_empty() {
            bdi::encode(stat, &mut out)?;
        }
        if stat.volumes.iter().any(|volume| volume.remote.is_some()) {
            remote::encode(stat, &mut out)?;
        }
        if !stat.xen.is_empty() {
            xen::encode(stat, &mut out)?;
        }
        Ok(())
    }
}

fn volumes(stat: &Stat, out: &mut Out<'_>) -> fmt::Result {
    let volumes = || stat.volumes.iter();
    let gauge = |value: fn(&ebb_api::stat::VolumeStat) -> u64| {
        volumes().map(move |volume| ([("volume", volume.name.as_str())], value(volume)))
    };
    let size = ("ebbd_volume_size", "Size of the volume");
    out.gauges(size, Some(&Unit::Bytes), gauge(|volume| volume.size_bytes))?;
    let up = ("ebbd_volume_up", "Whether the volume is served; 0 if its store cannot be opened");
    out.gauges(up, None, gauge(|volume| u64::from(volume.failure.is_none())))?;
    let lost =
        ("ebbd_volume_lost", "Whether acknowledged writes may be lost, so that all flushes fail");
    out.gauges(lost, None, gauge(|volume| u64::from(volume.loss.is_some())))?;
    let clients = ("ebbd_volume_clients", "Connections that use the volume");
    out.gauges(clients, None, gauge(|volume| volume.clients))?;
    let counter = |value: fn(&OperationStat) -> u64| {
        volumes().flat_map(move |volume| {
            volume.operations.iter().map(move |(operation, stat)| {
                let labels = [("volume", volume.name.as_str()), ("operation", operation.as_str())];
                (labels, value(stat))
            })
        })
    };
    let requests = ("ebbd_volume_requests", "Completed requests, successful or not");
    out.counters(requests, None, counter(|stat| stat.requests))?;
    let bytes = ("ebbd_volume", "Bytes of successful requests");
    out.counters(bytes, Some(&Unit::Bytes), counter(|stat| stat.bytes))?;
    let errors = ("ebbd_volume_errors", "Requests that failed in the store");
    out.counters(errors, None, counter(|stat| stat.errors))?;
    let times = |of: fn(&OperationStat) -> Option<&LatencyStat>| {
        volumes().flat_map(move |volume| {
            volume.operations.iter().filter_map(move |(operation, stat)| {
                let labels = [("volume", volume.name.as_str()), ("operation", operation.as_str())];
                Some((labels, of(stat)?))
            })
        })
    };
    let service =
        ("ebbd_volume_service", "Time from the volume's receipt of a request to its completion");
    out.histograms(service, times(|stat| stat.service.as_ref()))?;
    let queued = (
        "ebbd_volume_queued",
        "Time that requests waited before the volume got them; only of those that waited",
    );
    out.histograms(queued, times(|stat| stat.queued.as_ref()))
}

fn workers(stat: &Stat, out: &mut Out<'_>) -> fmt::Result {
    let all = |value: fn(&ebb_api::stat::WorkerStat) -> u64| {
        // A worker that did not reply has no figures; a counter must not go back to 0.
        let answer = stat.workers.iter().filter(|worker| worker.answers);
        answer.map(move |worker| ([("worker", worker.worker.to_string())], value(worker)))
    };
    let up = stat.workers.iter();
    let up = up.map(|worker| ([("worker", worker.worker.to_string())], u64::from(worker.answers)));
    out.gauges(("ebbd_worker_up", "Whether the worker responds"), None, up)?;
    let enters = ("ebbd_worker_ring_enters", "Calls of io_uring_enter");
    out.counters(enters, None, all(|worker| worker.enters))?;
    let operations = ("ebbd_worker_ring_operations", "Operations submitted to the io_uring");
    out.counters(operations, None, all(|worker| worker.operations))?;
    let polls = ("ebbd_worker_polls", "Polls before sleep that found work");
    out.counters(polls, None, all(|worker| worker.polls))?;
    let unsuccessful = ("ebbd_worker_unsuccessful_polls", "Polls before sleep that found nothing");
    out.counters(unsuccessful, None, all(|worker| worker.unsuccessful_polls))
}

fn memory(stat: &MemoryStat, out: &mut Out<'_>) -> fmt::Result {
    for (name, help, value) in [
        ("ebbd_memory_reserved", "Address space reserved for I/O memory", stat.reserved_bytes),
        ("ebbd_memory_ceiling", "Limit of wired I/O memory", stat.ceiling_bytes),
        ("ebbd_memory_wired", "I/O memory in use, or free and kept", stat.wired_bytes),
        ("ebbd_memory_unwired", "I/O memory lent to the kernel", stat.unwired_bytes),
    ] {
        out.gauge((name, help), Some(&Unit::Bytes), float(value))?;
    }
    let waiting = ("ebbd_memory_waiting", "Requests that wait for memory");
    out.gauge(waiting, None, float(stat.waiting))?;
    out.counter(("ebbd_memory_squeezes", "Signs of pressure that emptied pools"), stat.squeezes)?;
    out.counter(("ebbd_memory_purges", "Worker caches that were emptied"), stat.purges)?;
    let zone = |value: fn(&ZoneStat) -> u64| {
        stat.zones.iter().map(move |zone| ([("zone", zone.name.as_str())], value(zone)))
    };
    for (name, help, value) in [
        ("ebbd_zone_used_blocks", "Blocks in use", (|z| z.used) as fn(&ZoneStat) -> u64),
        ("ebbd_zone_free_blocks", "Blocks in the zone's caches", |z| z.free),
        ("ebbd_zone_bucket_blocks", "Capacity of a bucket, in blocks", |z| z.bucket),
        ("ebbd_zone_working_set_blocks", "Working set of the shared cache", |z| z.wss),
    ] {
        out.gauges((name, help), None, zone(value))?;
    }
    for (name, help, value) in [
        ("ebbd_zone_requests", "Allocations", (|z| z.requests) as fn(&ZoneStat) -> u64),
        ("ebbd_zone_fails", "Allocations that failed", |z| z.fails),
        ("ebbd_zone_sleeps", "Allocations that waited", |z| z.sleeps),
        ("ebbd_zone_misses", "Allocations that found the zone's caches empty", |z| z.misses),
        ("ebbd_zone_contended", "Contended locks of the shared cache", |z| z.contended),
    ] {
        out.counters((name, help), None, zone(value))?;
    }
    owners(stat, out)
}

fn owners(stat: &MemoryStat, out: &mut Out<'_>) -> fmt::Result {
    // Several queues of one volume have the same name, and a series must not occur twice.
    let mut pools = std::collections::BTreeMap::<&str, [u64; 3]>::new();
    for pool in &stat.pools {
        let sum = pools.entry(&pool.name).or_default();
        for (sum, value) in
            sum.iter_mut().zip([pool.free_pages, pool.lent_pages, pool.squeezed_pages])
        {
            *sum = sum.saturating_add(value);
        }
    }
    let pool = |at: usize, unit: u64| {
        pools.iter().map(move |(name, sums)| {
            ([("owner", *name)], sums.get(at).map_or(0, |sum| sum.saturating_mul(unit)))
        })
    };
    let free = ("ebbd_pool_free", "Free memory in page pools");
    out.gauges(free, Some(&Unit::Bytes), pool(0, 4096))?;
    let lent = ("ebbd_pool_lent", "Free memory in page pools that is lent to the kernel");
    out.gauges(lent, Some(&Unit::Bytes), pool(1, 4096))?;
    let squeezed = ("ebbd_pool_squeezed_pages", "Pages freed by squeezes");
    out.counters(squeezed, None, pool(2, 1))?;
    let mut owners = std::collections::BTreeMap::<&str, [u64; 2]>::new();
    for owner in &stat.owners {
        let sum = owners.entry(&owner.name).or_default();
        sum[0] = sum[0].saturating_add(owner.wired_bytes);
        sum[1] = sum[1].saturating_add(owner.unwired_bytes);
    }
    let owner =
        |at: usize| owners.iter().map(move |(name, sums)| ([("owner", *name)], sums[at.min(1)]));
    let wired = ("ebbd_owner_wired", "I/O memory of the owner in use, or free and kept");
    out.gauges(wired, Some(&Unit::Bytes), owner(0))?;
    let unwired = ("ebbd_owner_unwired", "I/O memory of the owner lent to the kernel");
    out.gauges(unwired, Some(&Unit::Bytes), owner(1))
}

fn pressure(stat: &PressureStat, out: &mut Out<'_>) -> fmt::Result {
    let level = ("ebbd_pressure_level", "Level of memory pressure, 0 (calm) to 3 (last resort)");
    out.gauge(level, None, f64::from(stat.level))?;
    let since = ("ebbd_pressure_level_age", "Time since the level last changed");
    out.gauge(since, Some(&Unit::Seconds), stat.since_seconds)?;
    let events = ("ebbd_pressure_events", "Events of memory pressure");
    let counts = stat.events.iter().enumerate();
    out.counters(events, None, counts.map(|(level, n)| ([("level", level.to_string())], *n)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use ebb_api::stat::{
        BdiStat, CacheStat, OwnerStat, PoolStat, RemoteStat, VolumeCacheStat, VolumeStat,
        WorkerStat, XenStat,
    };

    use super::*;

    fn full() -> Stat {
        let service = LatencyStat {
            count: 7,
            sum_seconds: 0.02,
            buckets: vec![(1.28e-6, 4), (4.096e-6, 1), (5.12e-6, 1), (68.7, 1)],
            ..LatencyStat::default()
        };
        let operation = OperationStat {
            requests: 7,
            bytes: 4096,
            errors: 1,
            service: Some(service),
            queued: None,
        };
        let limits = ebb_api::LimitStat {
            iops: 5000,
            read_bandwidth: 4096,
            throttled_requests: 3,
            throttled_seconds: 1.5,
            ..Default::default()
        };
        let group = ebb_api::LimitGroupStat {
            name: "gold".into(),
            volumes: Vec::new(),
            limits: limits.clone(),
        };
        let pool = PoolStat { name: "disk".into(), free_pages: 2, ..PoolStat::default() };
        Stat {
            version: "1.2.3".into(),
            uptime_seconds: 1.5,
            clients: 3,
            volumes: vec![VolumeStat {
                name: "a \"b\"\\c\nd".into(),
                size_bytes: 1 << 20,
                loss: Some(ebb_api::stat::LossStat::default()),
                operations: [("read".to_owned(), operation)].into(),
                cache: Some(VolumeCacheStat { hit_bytes: 12, ..Default::default() }),
                remote: Some(RemoteStat { silent_seconds: 8, ..Default::default() }),
                limits: Some(limits.clone()),
                ..VolumeStat::default()
            }],
            workers: vec![
                WorkerStat {
                    worker: 0,
                    answers: true,
                    enters: 5,
                    operations: 6,
                    polls: 7,
                    unsuccessful_polls: 8,
                },
                WorkerStat { worker: 1, ..WorkerStat::default() },
            ],
            memory: Some(MemoryStat {
                zones: vec![ZoneStat { name: "4K".into(), used: 9, ..ZoneStat::default() }],
                pools: vec![pool.clone(), pool],
                owners: vec![OwnerStat { name: "disk".into(), ..OwnerStat::default() }],
                ..MemoryStat::default()
            }),
            pressure: Some(PressureStat { level: 2, events: [0, 4, 1, 0], ..Default::default() }),
            cache: Some(CacheStat { bufspace_bytes: 8192, ..CacheStat::default() }),
            xen: vec![XenStat {
                domain: 3,
                device: 51728,
                volume: "root".into(),
                requests: [("read".to_owned(), 11)].into(),
                mapped_grants: 1056,
                ..XenStat::default()
            }],
            bdis: vec![BdiStat {
                name: "8:0".into(),
                min_ratio: 0.05,
                max_ratio: 0.25,
                max_bytes: Some(7 << 20),
                strict_limit: true,
                pauses: 3,
                pause_seconds: 0.5,
                ..BdiStat::default()
            }],
            limit_groups: vec![group],
            ..Stat::default()
        }
    }

    #[test]
    fn every_metric_is_written() {
        let text = text(full()).unwrap();
        for line in [
            "ebbd_build_info{version=\"1.2.3\"} 1",
            "ebbd_uptime_seconds 1.5",
            "ebbd_clients 3.0",
            "ebbd_volume_size_bytes{volume=\"a \\\"b\\\"\\\\c\\nd\"} 1048576",
            "ebbd_volume_lost{volume=\"a \\\"b\\\"\\\\c\\nd\"} 1",
            "ebbd_volume_service_seconds_bucket{le=\"0.000004096\",volume=\"a \\\"b\\\"\\\\c\\nd\",operation=\"read\"} 5",
            "ebbd_volume_service_seconds_bucket{le=\"0.000016384\",volume=\"a \\\"b\\\"\\\\c\\nd\",operation=\"read\"} 6",
            "ebbd_volume_service_seconds_bucket{le=\"+Inf\",volume=\"a \\\"b\\\"\\\\c\\nd\",operation=\"read\"} 7",
            "ebbd_volume_service_seconds_count{volume=\"a \\\"b\\\"\\\\c\\nd\",operation=\"read\"} 7",
            "ebbd_volume_limit_requests_per_second{volume=\"a \\\"b\\\"\\\\c\\nd\",operation=\"all\"} 5000",
            "ebbd_volume_limit_throttled_requests_total{volume=\"a \\\"b\\\"\\\\c\\nd\"} 3",
            "ebbd_volume_limit_throttled_seconds_total{volume=\"a \\\"b\\\"\\\\c\\nd\"} 1.5",
            "ebbd_limit_group_bytes_per_second{group=\"gold\",operation=\"read\"} 4096",
            "ebbd_worker_ring_enters_total{worker=\"0\"} 5",
            "ebbd_worker_polls_total{worker=\"0\"} 7",
            "ebbd_worker_unsuccessful_polls_total{worker=\"0\"} 8",
            "ebbd_worker_up{worker=\"1\"} 0",
            "ebbd_zone_used_blocks{zone=\"4K\"} 9",
            "ebbd_pool_free_bytes{owner=\"disk\"} 16384",
            "ebbd_cache_bufspace_bytes 8192.0",
            "ebbd_volume_cache_hit_bytes_total{volume=\"a \\\"b\\\"\\\\c\\nd\"} 12",
            "ebbd_pressure_level 2.0",
            "ebbd_bdi_min_ratio{bdi=\"8:0\"} 0.05",
            "ebbd_bdi_max_ratio{bdi=\"8:0\"} 0.25",
            "ebbd_bdi_max_bytes{bdi=\"8:0\"} 7340032",
            "ebbd_bdi_strict_limit{bdi=\"8:0\"} 1",
            "ebbd_bdi_pauses_total{bdi=\"8:0\"} 3",
            "ebbd_bdi_paused_seconds{bdi=\"8:0\"} 0.5",
            "ebbd_pressure_events_total{level=\"1\"} 4",
            "ebbd_cache_receded_bytes_total 0",
            "ebbd_remote_silent_seconds{volume=\"a \\\"b\\\"\\\\c\\nd\"} 8",
            "ebbd_xen_mapped_grants{domain=\"3\",device=\"51728\",volume=\"root\"} 1056",
            "ebbd_xen_requests_total{domain=\"3\",device=\"51728\",volume=\"root\",operation=\"read\"} 11",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in:\n{text}");
        }
        assert!(text.contains("ebbd_volume_bytes_total{volume=\"a \\\"b\\\"\\\\c\\nd\",operation"));
        assert!(!text.contains("ring_enters_total{worker=\"1\"}"), "no figures, no counter");
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn every_series_occurs_once_and_has_a_type() {
        let text = text(full()).unwrap();
        let mut series = BTreeSet::new();
        let mut types = BTreeSet::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                assert!(types.insert(rest.split(' ').next().unwrap()), "{line}");
            } else if !line.starts_with('#') {
                let (name, value) = line.rsplit_once(' ').unwrap();
                assert!(series.insert(name.to_owned()), "{line} is there twice");
                assert!(value.parse::<f64>().is_ok(), "{line}");
                let base = name.split('{').next().unwrap();
                let ends = ["_total", "_bucket", "_sum", "_count"];
                let base = ends.iter().find_map(|end| base.strip_suffix(end)).unwrap_or(base);
                assert!(types.contains(base), "{line} has no type");
            }
        }
        assert!(series.len() > 30);
    }
}
