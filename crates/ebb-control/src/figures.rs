//! Collects the figures of the daemon's parts as statistics ([`ebb_api::stat`]).
//!
//! The figures of memory, cache and pressure come from a [`StatSources`], a set of closures over the
//! daemon's parts ([`StatSources::new`]); in tests it may be empty.

mod cache;
pub(crate) mod cluster;
pub(crate) mod process;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use ebb_api::LimitStat;
use ebb_api::stat::{
    BdiStat, CacheStat, CertificateStat, DaemonPhase, DefinedIn, FailingGuests, FrontendState,
    LatencyStat, LayerStat, LossStat, MemoryStat, OperationStat, OutageStat, OwnerStat, PoolStat,
    PressureStat, ProblemStat, ReloadStat, RemoteCondition, RemoteStat, SandboxStat, VhostStat,
    VolumeCondition, VolumeStat, XenStat, ZoneStat,
};
use ebb_mem::pressure::{Cause, Level, Monitor, Pressure, Subscription};
use ebb_volume::Volume;

use self::cache::{cache_stat, volume_cache_stat};

type Read<T> = Box<dyn Fn() -> T + Send + Sync>;

/// The sources of statistics about memory, cache and pressure. Empty by default.
#[derive(Default)]
pub struct StatSources {
    /// Reads the memory.
    pub memory: Option<Read<MemoryStat>>,
    /// Reads the pressure.
    pub pressure: Option<Read<PressureStat>>,
    /// Reads the cache.
    pub cache: Option<Read<CacheStat>>,
    /// Reads the backing devices.
    pub bdis: Option<Read<Vec<BdiStat>>>,
    /// Reads when the certificates expire.
    pub certificates: Option<Read<Vec<CertificateStat>>>,
    /// Reads what is wrong and prevents no volume from being served.
    pub problems: Option<Read<Vec<ProblemStat>>>,
    /// Reads the paths of listening sockets at which no client can connect.
    pub lost_sockets: Option<Read<Vec<String>>>,
    /// Reads what of the sandbox is in force.
    pub sandbox: Option<Read<Vec<SandboxStat>>>,
    /// Reads how the last reload ended.
    pub reload: Option<Read<Option<ReloadStat>>>,
    /// Reads what the daemon does: a word of [`Stat::phase`](ebb_api::stat::Stat::phase).
    pub phase: Option<Read<DaemonPhase>>,
    /// Reads the level of pressure alone.
    pub level: Option<Read<u8>>,
    /// Reads the sizes of the arena alone, bytes: what is lent, and what is in use.
    pub arena: Option<Read<(u64, u64)>>,
    /// Publishes a level of pressure.
    pub inject: Option<Box<dyn Fn(Level) + Send + Sync>>,
}

impl std::fmt::Debug for StatSources {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StatSources")
            .field("memory", &self.memory.is_some())
            .field("pressure", &self.pressure.is_some())
            .field("cache", &self.cache.is_some())
            .field("inject", &self.inject.is_some())
            .finish()
    }
}

impl StatSources {
    /// Adds the figures of `cache`.
    #[must_use]
    pub fn with_cache(mut self, cache: Arc<ebb_cache::Cache>) -> Self {
        self.cache = Some(Box::new(move || cache_stat(&cache.stats())));
        self
    }

    /// Adds the figures of backing devices.
    #[must_use]
    pub fn with_bdis(mut self, read: impl Fn() -> Vec<BdiStat> + Send + Sync + 'static) -> Self {
        self.bdis = Some(Box::new(read));
        self
    }

    /// The figures of `memory` and of `monitor`, as far as they are given.
    pub fn new(memory: Option<Arc<ebb_mem::Memory>>, monitor: Option<&Monitor>) -> Self {
        let arena = memory.clone().map(|memory| -> Read<(u64, u64)> {
            Box::new(move || {
                let stats = memory.arena_stats();
                (wide(stats.unwired), wide(stats.wired))
            })
        });
        let level = monitor.map(|monitor| -> Read<u8> {
            let pressure = monitor.pressure();
            Box::new(move || pressure.state().level.number())
        });
        let memory = memory
            .map(|memory| -> Read<MemoryStat> { Box::new(move || memory_stat(&memory.stats())) });
        let pressure = monitor.map(|monitor| -> Read<PressureStat> {
            let watch = PressureWatch::new(monitor.pressure());
            let report = monitor.report();
            let lines = |sources: &[ebb_mem::pressure::ProbedSource]| {
                sources.iter().map(ToString::to_string).collect::<Vec<_>>()
            };
            let (listening, missing) = (lines(&report.listening), lines(&report.missing));
            let notes = report.notes.clone();
            Box::new(move || PressureStat {
                listening: listening.clone(),
                missing: missing.clone(),
                notes: notes.clone(),
                ..watch.stat(ebb_mem::clock::now())
            })
        });
        let inject = monitor.map(|monitor| -> Box<dyn Fn(Level) + Send + Sync> {
            let handle = monitor.handle();
            Box::new(move |level| handle.inject(level))
        });
        Self { memory, pressure, level, arena, inject, ..Self::default() }
    }
}

/// Counts events of pressure, and reads its present state.
struct PressureWatch {
    pressure: Pressure,
    events: Arc<[AtomicU64; 4]>,
    _subscription: Subscription,
}

impl PressureWatch {
    fn new(pressure: Pressure) -> Self {
        let events: Arc<[AtomicU64; 4]> = Arc::default();
        let counts = events.clone();
        let subscription = pressure.subscribe(move |state| {
            if let Some(count) = counts.get(usize::from(state.level.number()))
                && state.cause.is_event()
            {
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        Self { pressure, events, _subscription: subscription }
    }

    fn stat(&self, now: Instant) -> PressureStat {
        let state = self.pressure.state();
        let seconds = |since: Instant| now.saturating_duration_since(since).as_secs_f64();
        let cause = if state.sequence == 0 { Cause::Start } else { state.cause };
        PressureStat {
            level: state.level.number(),
            name: state.level.as_str().to_owned(),
            since_seconds: seconds(state.since),
            cause: cause.as_str().to_owned(),
            event_seconds: seconds(state.event),
            events: std::array::from_fn(|level| {
                self.events.get(level).map_or(0, |count| count.load(Ordering::Relaxed))
            }),
            ..PressureStat::default()
        }
    }
}

/// A count or size of this machine, as in JSON.
fn wide(value: usize) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}

fn memory_stat(stats: &ebb_mem::Stats) -> MemoryStat {
    let bytes = |bytes: i64| u64::try_from(bytes).unwrap_or(0);
    let zones = stats.zones.iter().map(|zone| ZoneStat {
        name: match wide(zone.item_bytes) {
            0 => "runs".to_owned(),
            size => ebb_config::Size::new(size).to_string(),
        },
        size: wide(zone.item_bytes),
        limit: zone.limit.map(wide),
        used: zone.used,
        free: zone.free,
        requests: zone.requests,
        fails: zone.fails,
        sleeps: zone.sleeps,
        misses: zone.misses,
        contended: zone.contended,
        bucket: wide(zone.bucket),
        wss: zone.wss,
        out_of_cache_seconds: u64::from(zone.timin),
    });
    let pools = stats.pools.iter().map(|pool| PoolStat {
        name: pool.owner.clone(),
        free_pages: wide(pool.free),
        lent_pages: wide(pool.lent),
        squeezes: wide(pool.squeezes),
        squeezed_pages: wide(pool.squeezed_pages),
    });
    let owners = stats.owners.iter().map(|owner| OwnerStat {
        name: owner.name.clone(),
        wired_bytes: bytes(owner.wired),
        lent_bytes: bytes(owner.unwired),
    });
    MemoryStat {
        reserved_bytes: wide(stats.arena.reserved),
        ceiling_bytes: wide(stats.arena.ceiling),
        wired_bytes: wide(stats.arena.wired),
        lent_bytes: wide(stats.arena.unwired),
        squeezes: stats.squeezes,
        purges: stats.purges,
        waiting: wide(stats.waiting),
        zones: zones.collect(),
        pools: pools.collect(),
        owners: owners.collect(),
    }
}

/// The operations a volume counts.
const OPERATIONS: [ebb_volume::Operation; 7] = {
    use ebb_volume::Operation::{Discard, Extents, Flush, Prefetch, Read, Write, WriteZeroes};
    [Read, Write, Flush, Discard, WriteZeroes, Extents, Prefetch]
};

/// A volume of the daemon, served or not, without its figures.
#[derive(Clone, Debug)]
pub struct VolumeBrief {
    /// Its name.
    pub name: String,
    /// As in [`VolumeStat::state`].
    pub state: VolumeCondition,
    /// The outage of its store, if it has one.
    pub outage: Option<OutageStat>,
    /// Its guests whose requests fail until they are reset.
    pub failing_guests: FailingGuests,
    /// The volume itself, if it is open.
    pub volume: Option<Arc<Volume>>,
}

/// Returns the figures of a volume that `clients` connections use, whose store has this `outage`.
pub fn volume_stat(
    volume: &Volume,
    clients: u64,
    outage: Option<OutageStat>,
    failing_guests: FailingGuests,
) -> VolumeStat {
    let remote = worst_remote(volume).map(remote_stat);
    let operation = |operation: ebb_volume::Operation| {
        let of = volume.stats().of(operation);
        let stat = OperationStat {
            requests: of.requests,
            bytes: of.bytes,
            errors: of.errors,
            service: latency_stat(&volume.stats().service_times(operation)),
            queued: latency_stat(&volume.stats().queued_times(operation)),
        };
        (operation.name().to_owned(), stat)
    };
    let now = ebb_mem::clock::now();
    let loss = volume.loss().map(|loss| LossStat {
        since_seconds: now.saturating_duration_since(loss.since).as_secs_f64(),
        error: loss.error,
        remedy: ebb_volume::Loss::REMEDY.to_owned(),
    });
    let shared = volume.layers().shared_reads();
    VolumeStat {
        name: volume.name().to_string(),
        size_bytes: volume.size(),
        read_only: volume.read_only(),
        direct: volume.capabilities().direct,
        closing: volume.is_closing(),
        state: match volume.is_closing() {
            true => VolumeCondition::Closing,
            false => {
                let (lost, outage) = (loss.is_some(), outage.as_ref());
                VolumeCondition::of_served(lost, remote.as_ref(), outage, failing_guests)
            }
        },
        failure: None,
        waits_for: None,
        origin: DefinedIn::Unset,
        loss,
        clients,
        failing_guests,
        cache: volume.cache().map(|cache| volume_cache_stat(volume.cache_mode(), &cache.stats())),
        layers: volume.layers().depth() as u64,
        own_bytes: volume.layers().own_bytes(),
        shared_cache_bytes: volume.layers().shared_cache_bytes(),
        shared_hit_bytes: shared.hit_bytes,
        shared_miss_bytes: shared.miss_bytes,
        below: volume.layers().below().into_iter().map(layer_stat).collect(),
        in_flight: volume.in_flight(),
        outage,
        remote,
        limits: volume.limit_figures().map(|figures| limit_stat(&figures)),
        operations: OPERATIONS.into_iter().map(operation).collect(),
    }
}

fn layer_stat(layer: ebb_cache::LayerFigures) -> LayerStat {
    let ebb_cache::LayerFigures { place, snapshot, cache_bytes } = layer;
    LayerStat { store: place, snapshot, cache_bytes }
}

/// The figures of limits.
pub fn limit_stat(figures: &ebb_volume::LimitFigures) -> LimitStat {
    let limits = &figures.limits;
    LimitStat {
        group: figures.group.as_deref().map(str::to_owned),
        iops: limits.iops,
        read_iops: limits.read_iops,
        write_iops: limits.write_iops,
        bandwidth: limits.bandwidth,
        read_bandwidth: limits.read_bandwidth,
        write_bandwidth: limits.write_bandwidth,
        burst_ms: limits.burst_ms,
        throttled_requests: figures.throttled,
        throttled_seconds: figures.throttled_time.as_secs_f64(),
    }
}

fn latency_stat(times: &ebb_volume::LatencySnapshot) -> Option<LatencyStat> {
    let quantile = |fraction| times.quantile(fraction).map(|time| time.as_secs_f64());
    Some(LatencyStat {
        count: times.count(),
        sum_seconds: times.sum().as_secs_f64(),
        p50_seconds: quantile(0.5)?,
        p99_seconds: quantile(0.99)?,
        p999_seconds: quantile(0.999)?,
        buckets: times.buckets().map(|(end, count)| (end.as_secs_f64(), count)).collect(),
    })
}

/// The state of the remote store of a volume, or of one below it: reads of an overlay need those
/// too. Of several the one that is worst off, the upper one of equals.
pub fn worst_remote(volume: &Volume) -> Option<ebb_store::StoreState> {
    let rank = |state: &ebb_store::StoreState| match remote_stat(state.clone()).condition() {
        RemoteCondition::Down => 2,
        RemoteCondition::Silent => 1,
        _ => 0,
    };
    let states = volume.layer_states().into_iter();
    states.reduce(|worst, lower| if rank(&lower) > rank(&worst) { lower } else { worst })
}

/// The figures of the connections to a remote store.
pub fn remote_stat(state: ebb_store::StoreState) -> RemoteStat {
    RemoteStat {
        address: state.address,
        connections: state.connections,
        reconnects: state.reconnects,
        in_flight: state.in_flight,
        replayed: state.replayed,
        unflushed: state.unflushed,
        last_error: state.last_error,
        is_reached: state.is_reached,
        since_seconds: state.since_seconds,
        silent_seconds: state.silent_seconds,
    }
}

/// The figures of a disk of a Xen guest.
pub(crate) fn xen_stat(disk: &ebb_export_xen::DeviceStats) -> XenStat {
    let stats = &disk.stats;
    let requests = [
        ("read", stats.rd_req),
        ("write", stats.wr_req),
        ("flush", stats.f_req),
        ("discard", stats.ds_req),
    ];
    XenStat {
        domain: disk.guest,
        device: disk.device,
        volume: disk.volume.to_string(),
        state: if disk.closing { "closing" } else { "connected" }.to_owned(),
        queues: disk.queues,
        persistent: disk.persistent,
        mapped_grants: stats.mapped,
        mapped_grants_most: stats.mapped_most,
        requests: requests.map(|(name, count)| (name.to_owned(), count)).into(),
        errors: stats.errors,
        resumed: stats.resumed,
        maps: stats.maps,
        copies: stats.copies,
        copy_calls: stats.copy_calls,
        evictions: stats.evictions,
        expiries: stats.expiries,
        events: stats.events,
        polls: stats.polls,
        notifications: stats.notifications,
    }
}

/// The figures of a frontend of vhost-user.
pub(crate) fn vhost_stat(disk: &ebb_export_vhost::VhostDisk) -> VhostStat {
    let stats = &disk.stats;
    let requests = [
        ("read", stats.reads),
        ("write", stats.writes),
        ("flush", stats.flushes),
        ("discard", stats.discards),
    ];
    let state = match disk {
        _ if disk.closing => FrontendState::Closing,
        _ if disk.waiting => FrontendState::Waiting,
        _ if disk.queues == 0 => FrontendState::Connected,
        _ => FrontendState::Serving,
    };
    VhostStat {
        volume: disk.volume.to_string(),
        socket: disk.socket.to_string(),
        connection: disk.number,
        pid: disk.pid,
        uid: disk.uid,
        state,
        queues: disk.queues,
        in_flight: stats.consumed.saturating_sub(stats.completed),
        requests: requests.map(|(name, count)| (name.to_owned(), count)).into(),
        read_bytes: stats.read_bytes,
        written_bytes: stats.written_bytes,
        errors: stats.errors,
        resumed: stats.resumed,
        inline: stats.inline,
        kicks: stats.kicks,
        polls: stats.polls,
        publications: stats.publications,
        calls: stats.calls,
        throttled: stats.throttled,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_statistics_show_the_blocks_in_use() {
        let now = Instant::now();
        let memory = ebb_mem::Memory::new(ebb_mem::MemoryOptions::new(64 << 20, now)).unwrap();
        let owner = memory.owner("disk").unwrap();
        let worker = memory.worker(|| {});
        let block = worker.alloc(8192, owner).unwrap();
        let read = StatSources::new(Some(memory), None).memory.unwrap();
        let stat = read();
        let zone = stat.zones.iter().find(|zone| zone.name == "8K").unwrap();
        assert_eq!((zone.size, zone.used, zone.requests), (8192, 1, 1));
        assert_eq!(stat.zones.last().unwrap().name, "runs");
        assert!(stat.wired_bytes >= 8192 && stat.ceiling_bytes == 64 << 20);
        let disk = stat.owners.iter().find(|owner| owner.name == "disk").unwrap();
        assert_eq!(disk.wired_bytes, 8192);
        worker.free(block);
        let zone = read().zones.into_iter().find(|zone| zone.name == "8K").unwrap();
        assert_eq!(zone.used, 0);
        assert!(zone.free >= 1);
    }

    #[test]
    fn events_of_pressure_are_counted_by_level() {
        let now = Instant::now();
        let (mut publisher, pressure) = Pressure::new(now);
        let watch = PressureWatch::new(pressure);
        assert_eq!((watch.stat(now).level, watch.stat(now).events), (0, [0; 4]));
        publisher.publish(Level::L2, Cause::FullStall, now);
        publisher.publish(Level::L1, Cause::Easing, now);
        publisher.publish(Level::L1, Cause::Stall, now);
        let stat = watch.stat(now + std::time::Duration::from_secs(2));
        assert_eq!((stat.level, stat.name.as_str(), stat.events), (1, "squeeze", [0, 1, 1, 0]));
        assert_eq!(stat.cause, "stalls on memory");
        assert!((stat.event_seconds - 2.0).abs() < 0.01);
    }

    #[test]
    fn a_volume_has_figures_of_every_operation() {
        let store = ebb_store::Store::Null(ebb_store::NullStore::new(1 << 20));
        let volume = Volume::new("a\"b\n", store, ebb_volume::VolumeOptions::default());
        let stat = volume_stat(&volume, 1, None, FailingGuests::default());
        assert_eq!((stat.name.as_str(), stat.size_bytes, stat.clients), ("a\"b\n", 1 << 20, 1));
        assert_eq!(stat.operations.len(), 7);
    }
}
