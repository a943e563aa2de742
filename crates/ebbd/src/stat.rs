//! The statistics of the daemon as plain data, for JSON, tables and metrics.
//!
//! The figures of memory, cache and pressure come from a [`StatSources`], a set of closures over the
//! daemon's parts ([`StatSources::new`]); in tests it may be empty.
//!
//! Sizes are in bytes and times in seconds. Counters begin at 0 with the daemon (those of a volume
//! when it is opened) and only grow.

mod bdi;
mod cache;
mod remote;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use ebb_mem::pressure::{Cause, Level, Monitor, Pressure, Subscription};
use ebb_volume::Volume;
use serde::{Deserialize, Serialize};

pub use self::bdi::BdiStat;
pub use self::cache::{CacheStat, VolumeCacheStat};
pub use self::remote::RemoteStat;
use crate::engine::{VolumePhase, VolumeState};

/// All statistics.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stat {
    /// The version of ebbd.
    pub version: String,
    /// Seconds since the daemon started.
    pub uptime_seconds: f64,
    /// Resident memory of the whole process (`VmRSS`), bytes. It includes lent memory until the kernel
    /// discards it.
    pub resident_bytes: u64,
    /// NBD connections now, those in their handshake included.
    pub clients: u64,
    /// The volumes by name.
    pub volumes: Vec<VolumeStat>,
    /// Disks of Xen guests that are connected.
    #[serde(default)]
    pub xen: Vec<XenStat>,
    /// The worker threads in order.
    pub workers: Vec<WorkerStat>,
    /// I/O memory; absent in tests.
    pub memory: Option<MemoryStat>,
    /// Memory pressure; absent if it is not monitored.
    pub pressure: Option<PressureStat>,
    /// The cache of all volumes together; absent if there is none.
    pub cache: Option<CacheStat>,
    /// The backing devices of volumes with a writeback cache.
    #[serde(default)]
    pub bdis: Vec<BdiStat>,
}

/// A volume.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VolumeStat {
    /// The name it is exported under.
    pub name: String,
    /// Its size, bytes.
    pub size_bytes: u64,
    /// Whether clients may only read.
    pub read_only: bool,
    /// Whether its file is opened with `O_DIRECT`.
    pub direct: bool,
    /// Whether it is being withdrawn.
    pub closing: bool,
    /// `serving`; `opening`, before its store was first opened; `failed`, if that cannot be opened; `lost`, if it is
    /// served and acknowledged writes may be lost; `closing`.
    #[serde(default)]
    pub state: String,
    /// Why it is not served, if it cannot be opened.
    #[serde(default)]
    pub failure: Option<FailureStat>,
    /// The cause, if acknowledged writes may be lost; then all flushes fail.
    #[serde(default)]
    pub loss: Option<LossStat>,
    /// Connections that use it now.
    pub clients: u64,
    /// Its cache; absent without one.
    pub cache: Option<VolumeCacheStat>,
    /// The connections to its server, if its store is an NBD server.
    pub remote: Option<RemoteStat>,
    /// Counters by operation: `read`, `write`, `flush`, `discard`, `write-zeroes`, `extents`,
    /// `prefetch`.
    pub operations: BTreeMap<String, OperationStat>,
}

/// Why a volume cannot be opened.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FailureStat {
    /// The cause, and a remedy.
    pub reason: String,
    /// The number of attempts.
    pub attempts: u64,
    /// Seconds since the first attempt.
    pub since_seconds: f64,
    /// Seconds until the next attempt.
    pub next_seconds: f64,
}

/// A possible loss of acknowledged writes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LossStat {
    /// Seconds since the flush, or the write with FUA, failed.
    pub since_seconds: f64,
    /// The error of the flush.
    pub error: String,
    /// The remedy.
    pub remedy: String,
}

/// Counters of one kind of operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperationStat {
    /// Completed requests, successful or not.
    pub requests: u64,
    /// Bytes of successful requests.
    pub bytes: u64,
    /// Requests that failed in the store.
    pub errors: u64,
}

/// A disk of a Xen guest. Its counters start at zero when it connects.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct XenStat {
    /// The guest's number.
    pub domain: u16,
    /// The disk's number in the guest, as in xenstore.
    pub device: u32,
    /// Its volume.
    pub volume: String,
    /// `connected`, or `closing`: requests in flight complete, no new ones begin.
    pub state: String,
    /// The number of rings.
    pub queues: u32,
    /// Whether persistent grants were negotiated.
    pub persistent: bool,
    /// Pages of the guest that are mapped now.
    pub mapped_grants: u64,
    /// The maximum of mapped pages so far.
    pub mapped_grants_most: u64,
    /// Counters by operation: `read`, `write`, `flush`, `discard`.
    pub requests: BTreeMap<String, u64>,
    /// Requests completed with an error.
    pub errors: u64,
    /// Requests that were in flight in an earlier daemon, and were resumed.
    pub resumed: u64,
    /// Grants mapped.
    pub maps: u64,
    /// Segments copied by the hypervisor.
    pub copies: u64,
    /// Hypercalls that copied segments.
    pub copy_calls: u64,
    /// Grants unmapped to make room: the ring had more than its limit.
    #[serde(default)]
    pub evictions: u64,
    /// Grants unmapped because they were idle.
    #[serde(default)]
    pub expiries: u64,
    /// Events received from the guest.
    pub events: u64,
    /// Times that polling found requests without an event.
    #[serde(default)]
    pub polls: u64,
    /// Events sent to the guest.
    pub notifications: u64,
}

/// A worker thread.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerStat {
    /// Its number, from 0.
    pub worker: usize,
    /// Whether it replied in time. If not, the counters are 0.
    pub answers: bool,
    /// Calls of `io_uring_enter`.
    pub enters: u64,
    /// Operations submitted to the io_uring.
    pub operations: u64,
}

/// I/O memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryStat {
    /// Address space, bytes.
    pub reserved_bytes: u64,
    /// The limit of wired memory, bytes.
    pub ceiling_bytes: u64,
    /// Memory in use, or free and kept, bytes.
    pub wired_bytes: u64,
    /// Memory lent to the kernel, which may have discarded any of it, bytes.
    pub unwired_bytes: u64,
    /// Of the wired, what is registered with the kernel or a device, bytes.
    pub pinned_bytes: u64,
    /// Signs of pressure that emptied the pools.
    pub squeezes: u64,
    /// Worker caches that were emptied in the last resort.
    pub purges: u64,
    /// Requests that wait for memory now.
    pub waiting: u64,
    /// Zones by the size of their blocks.
    pub zones: Vec<ZoneStat>,
    /// Page pools, one for each queue.
    pub pools: Vec<PoolStat>,
    /// Owners of memory.
    pub owners: Vec<OwnerStat>,
}

/// A zone: blocks of one size.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ZoneStat {
    /// Its name: the size of its blocks, or `runs`.
    pub name: String,
    /// Size of a block, bytes; 0 for runs, which have any size.
    pub size: u64,
    /// The limit of its blocks; absent without a limit.
    pub limit: Option<u64>,
    /// Blocks in use.
    pub used: u64,
    /// Blocks in its caches.
    pub free: u64,
    /// Allocations.
    pub requests: u64,
    /// Allocations that failed.
    pub fails: u64,
    /// Allocations that waited.
    pub sleeps: u64,
    /// Allocations that found its caches empty.
    pub misses: u64,
    /// Contended locks of the shared cache.
    pub contended: u64,
    /// Capacity of a bucket now, blocks.
    pub bucket: u64,
    /// Estimated working set of the shared cache, blocks.
    pub wss: u64,
    /// Seconds since its caches were last empty.
    pub out_of_cache_seconds: u64,
}

/// A page pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolStat {
    /// Its owner.
    pub name: String,
    /// Free pages kept, of 4096 bytes.
    pub free_pages: u64,
    /// Free pages lent to the kernel.
    pub lent_pages: u64,
    /// Squeezes that emptied it.
    pub squeezes: u64,
    /// Pages freed by squeezes.
    pub squeezed_pages: u64,
}

/// An owner of memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerStat {
    /// Its name.
    pub name: String,
    /// Memory in use, or free and kept, bytes.
    pub wired_bytes: u64,
    /// Memory lent to the kernel, bytes.
    pub unwired_bytes: u64,
}

/// Memory pressure.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PressureStat {
    /// The level, 0 (calm) to 3 (last resort).
    pub level: u8,
    /// The level as a word.
    pub name: String,
    /// Seconds since the level last changed.
    pub since_seconds: f64,
    /// The cause of its last publication.
    pub cause: String,
    /// Seconds since the last event.
    pub event_seconds: f64,
    /// The number of events by level; the slow decay while calm counts at level 0.
    pub events: [u64; 4],
    /// The sources that are monitored.
    pub listening: Vec<String>,
    /// The sources that are not, and why.
    pub missing: Vec<String>,
    /// Notes for the operator.
    pub notes: Vec<String>,
}

type Read<T> = Box<dyn Fn() -> T + Send + Sync>;

/// The sources of statistics about memory, cache and pressure. Empty by default.
#[derive(Default)]
pub struct StatSources {
    /// Reads the memory.
    pub read: Option<Read<MemoryStat>>,
    /// Reads the pressure.
    pub pressure: Option<Read<PressureStat>>,
    /// Reads the cache.
    pub cache: Option<Read<CacheStat>>,
    /// Reads the backing devices.
    pub bdis: Option<Read<Vec<BdiStat>>>,
    /// Publishes a level of pressure.
    pub inject: Option<Box<dyn Fn(Level) + Send + Sync>>,
}

impl std::fmt::Debug for StatSources {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StatSources")
            .field("read", &self.read.is_some())
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
        self.cache = Some(Box::new(move || CacheStat::from(&cache.stats())));
        self
    }

    /// Adds the figures of backing devices.
    #[must_use]
    pub(crate) fn with_bdis(mut self, bdis: Arc<crate::bdi::Bdis>) -> Self {
        self.bdis = Some(Box::new(move || bdis.stats()));
        self
    }

    /// The figures of `memory` and of `monitor`, as far as they are given.
    pub fn new(memory: Option<Arc<ebb_mem::Memory>>, monitor: Option<&Monitor>) -> Self {
        let read = memory
            .map(|memory| -> Read<MemoryStat> { Box::new(move || memory_stat(&memory.stats())) });
        let pressure = monitor.map(|monitor| -> Read<PressureStat> {
            let watch = PressureWatch::new(monitor.pressure());
            let report = monitor.report();
            let lines = |findings: &[ebb_mem::pressure::Finding]| {
                findings.iter().map(ToString::to_string).collect::<Vec<_>>()
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
        Self { read, pressure, cache: None, bdis: None, inject }
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
            size => crate::size::Size::new(size).to_string(),
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
        unwired_bytes: bytes(owner.unwired),
    });
    MemoryStat {
        reserved_bytes: wide(stats.arena.reserved),
        ceiling_bytes: wide(stats.arena.ceiling),
        wired_bytes: wide(stats.arena.wired),
        unwired_bytes: wide(stats.arena.unwired),
        pinned_bytes: wide(stats.arena.pinned),
        squeezes: stats.squeezes,
        purges: stats.purges,
        waiting: wide(stats.waiting),
        zones: zones.collect(),
        pools: pools.collect(),
        owners: owners.collect(),
    }
}

/// The state of a volume that is served, and whose changes may be lost.
const LOST: &str = "lost";

/// The operations a volume counts.
const OPERATIONS: [ebb_store::Operation; 7] = {
    use ebb_store::Operation::{Discard, Extents, Flush, Prefetch, Read, Write, WriteZeroes};
    [Read, Write, Flush, Discard, WriteZeroes, Extents, Prefetch]
};

/// The figures of a volume that `clients` connections use.
pub fn volume_stat(volume: &Volume, clients: u64) -> VolumeStat {
    let operation = |operation: ebb_store::Operation| {
        let of = volume.stats().of(operation);
        let stat = OperationStat { requests: of.requests, bytes: of.bytes, errors: of.errors };
        (operation.name().to_owned(), stat)
    };
    let now = ebb_mem::clock::now();
    let loss = volume.loss().map(|loss| LossStat {
        since_seconds: now.saturating_duration_since(loss.since).as_secs_f64(),
        error: loss.error,
        remedy: ebb_store::Loss::REMEDY.to_owned(),
    });
    VolumeStat {
        name: volume.name().to_string(),
        size_bytes: volume.size(),
        read_only: volume.read_only(),
        direct: volume.capabilities().direct,
        closing: volume.is_closing(),
        state: match (volume.is_closing(), &loss) {
            (true, _) => VolumePhase::Closing.as_str(),
            (false, Some(_)) => LOST,
            (false, None) => VolumePhase::Serving.as_str(),
        }
        .to_owned(),
        failure: None,
        loss,
        clients,
        cache: volume
            .cache()
            .map(|cache| VolumeCacheStat::new(volume.cache_mode(), &cache.stats())),
        remote: volume.store_state().map(RemoteStat::from),
        operations: OPERATIONS.into_iter().map(operation).collect(),
    }
}

/// The figures of a volume of the engine that `clients` connections use.
pub fn engine_stat(state: &VolumeState, clients: u64, now: Instant) -> VolumeStat {
    let of_volume = state.volume.as_ref().map(|volume| volume_stat(volume, clients));
    let failure = state.failure.as_ref().map(|failure| FailureStat {
        reason: failure.reason.clone(),
        attempts: failure.attempts,
        since_seconds: now.saturating_duration_since(failure.since).as_secs_f64(),
        next_seconds: failure.next.saturating_duration_since(now).as_secs_f64(),
    });
    let of_volume = of_volume.unwrap_or_default();
    let lost = state.phase == VolumePhase::Serving && of_volume.loss.is_some();
    VolumeStat {
        name: state.name.clone(),
        closing: state.phase == VolumePhase::Closing,
        state: if lost { LOST } else { state.phase.as_str() }.to_owned(),
        failure,
        ..of_volume
    }
}

/// The figures of a disk of a Xen guest.
pub fn xen_stat(disk: &ebb_export_xen::DeviceStats) -> XenStat {
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

/// Resident memory of this process, bytes; 0 if `/proc/self/statm` cannot be read.
pub fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = text.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages.saturating_mul(wide(rustix::param::page_size()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_statistics_show_the_blocks_in_use() {
        let now = Instant::now();
        let memory = ebb_mem::Memory::new(ebb_mem::Options::new(64 << 20, now)).unwrap();
        let owner = memory.owner("disk").unwrap();
        let worker = memory.worker(|| {});
        let block = worker.alloc(8192, owner).unwrap();
        let read = StatSources::new(Some(memory), None).read.unwrap();
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
    fn the_resident_memory_of_the_process_is_read() {
        assert!(resident_bytes() > 1 << 20);
    }

    #[test]
    fn statistics_survive_a_round_trip_through_json() {
        let stat = Stat {
            memory: Some(MemoryStat { zones: vec![ZoneStat::default()], ..MemoryStat::default() }),
            pressure: Some(PressureStat::default()),
            volumes: vec![volume_stat(
                &Volume::new(
                    "a\"b\n",
                    ebb_store::Store::Null(ebb_store::NullStore::new(1 << 20)),
                    ebb_volume::VolumeOptions::default(),
                ),
                1,
            )],
            ..Stat::default()
        };
        let text = serde_json::to_string(&stat).unwrap();
        assert_eq!(serde_json::from_str::<Stat>(&text).unwrap(), stat);
        assert_eq!(stat.volumes[0].operations.len(), 7);
    }
}
