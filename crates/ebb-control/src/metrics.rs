//! The figures of [`ebb_api::stat`] as OpenMetrics text, for Prometheus.
//!
//! Values are in base units, and counters end in `_total`. Every name begins with `ebbd_`, except
//! those of the process, which have the names that all exporters use. For an alert on
//! memory subtract `ebbd_memory_lent_bytes` from `process_resident_memory_bytes`: the kernel
//! reclaims lent memory without I/O when it needs it.

mod bdi;
mod cache;
mod cluster;
mod layers;
mod limits;
mod process;
mod remote;
#[cfg(test)]
mod tests;
mod vhost;
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

    fn counter(&mut self, (name, help): Name, unit: Option<&Unit>, value: u64) -> fmt::Result {
        let counter = ConstCounter::new(value);
        counter.encode(self.0.encode_descriptor(name, help, unit, counter.metric_type())?)
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

    /// A counter of time, seconds.
    fn time(&mut self, (name, help): Name, value: f64) -> fmt::Result {
        let counter = ConstCounter::new(value);
        let (unit, kind) = (Some(&Unit::Seconds), counter.metric_type());
        counter.encode(self.0.encode_descriptor(name, help, unit, kind)?)
    }

    /// Counters of time: sums of seconds.
    fn seconds<L: EncodeLabelSet>(
        &mut self,
        (name, help): Name,
        values: impl Iterator<Item = (L, f64)>,
    ) -> fmt::Result {
        let kind = ConstCounter::new(0f64).metric_type();
        let mut family = self.0.encode_descriptor(name, help, Some(&Unit::Seconds), kind)?;
        for (labels, value) in values {
            let counter = ConstCounter::new(value);
            counter.encode(family.encode_family(&labels)?)?;
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
        process::encode(stat, &mut out)?;
        out.gauge(("ebbd_clients", "NBD connections"), None, float(stat.clients))?;
        volumes(stat, &mut out)?;
        if stat.volumes.iter().any(|volume| volume.layers > 1) {
            layers::encode(stat, &mut out)?;
        }
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
        if !stat.clusters.is_empty() {
            cluster::encode(stat, &mut out)?;
        }
        if !stat.xen.is_empty() {
            xen::encode(stat, &mut out)?;
        }
        if !stat.vhost.is_empty() {
            vhost::encode(stat, &mut out)?;
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
    let up = ("ebbd_volume_up", "Whether the volume is served");
    out.gauges(up, None, gauge(|volume| u64::from(is_served(volume))))?;
    let state = ("ebbd_volume_state", "1 with the state of the volume as label");
    let states = volumes()
        .map(|volume| ([("volume", volume.name.as_str()), ("state", volume.state.as_str())], 1));
    out.gauges(state, None, states)?;
    let in_flight = ("ebbd_volume_in_flight", "Requests in flight");
    out.gauges(in_flight, None, gauge(|volume| volume.in_flight))?;
    let silent = ("ebbd_volume_store_silent", "Time for which requests have waited for the store");
    let outages = volumes().filter_map(|volume| Some((volume, volume.outage.as_ref()?)));
    let times =
        outages.map(|(volume, outage)| ([("volume", volume.name.as_str())], outage.silent_seconds));
    out.fractions(silent, Some(&Unit::Seconds), times)?;
    let lost =
        ("ebbd_volume_lost", "Whether acknowledged writes may be lost, so that all flushes fail");
    out.gauges(lost, None, gauge(|volume| u64::from(volume.loss.is_some())))?;
    let vhost = ("ebbd_vhost_failing", "Guests over vhost-user whose requests fail until a reset");
    out.gauges(vhost, None, gauge(|volume| volume.failing_guests.vhost))?;
    let xen = ("ebbd_xen_failing", "Xen guests whose requests fail until a reset");
    out.gauges(xen, None, gauge(|volume| volume.failing_guests.xen))?;
    let clients =
        ("ebbd_volume_clients", "NBD connections and disks of guests that use the volume");
    out.gauges(clients, None, gauge(|volume| volume.clients))?;
    let counter = |value: fn(&OperationStat) -> u64| {
        volumes().flat_map(move |volume| {
            // Operations that were never requested have no series: with thousands of volumes they would be most.
            let used = volume.operations.iter().filter(|(_, stat)| stat.requests > 0);
            used.map(move |(operation, stat)| {
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
        ("ebbd_request_duration", "Time from the volume's receipt of a request to its completion");
    out.histograms(service, times(|stat| stat.service.as_ref()))?;
    let queued = (
        "ebbd_request_wait",
        "Time that requests waited before the volume got them; only of those that waited",
    );
    out.histograms(queued, times(|stat| stat.queued.as_ref()))
}

fn is_served(volume: &ebb_api::stat::VolumeStat) -> bool {
    volume.state.is_served()
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
        ("ebbd_memory_lent", "I/O memory lent to the kernel", stat.lent_bytes),
    ] {
        out.gauge((name, help), Some(&Unit::Bytes), float(value))?;
    }
    let waiting = ("ebbd_memory_waiting", "Requests that wait for memory");
    out.gauge(waiting, None, float(stat.waiting))?;
    out.counter(
        ("ebbd_memory_squeezes", "Signs of pressure that emptied pools"),
        None,
        stat.squeezes,
    )?;
    out.counter(("ebbd_memory_purges", "Worker caches that were emptied"), None, stat.purges)?;
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
        sum[1] = sum[1].saturating_add(owner.lent_bytes);
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
