//! The statistics of the daemon as plain data: what `GET /v1/stat` replies, and what tables and metrics are made from.
//!
//! Sizes are in bytes and times in seconds. Counters begin at 0 with the daemon (those of a volume
//! when it is opened) and only grow.

mod bdi;
mod cache;
mod cluster;
mod guests;
mod remote;
mod state;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub use self::bdi::BdiStat;
pub use self::cache::{CacheStat, VolumeCacheStat};
pub use self::cluster::ClusterStat;
pub use self::guests::FailingGuests;
pub use self::remote::RemoteStat;
pub use crate::words::{
    CertificateKind, ClusterCondition, DaemonPhase, DefinedIn, FrontendState, RemoteCondition,
    VolumeCondition,
};
use crate::{LimitGroupStat, LimitStat};

/// All statistics.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
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
    /// Frontends of vhost-user that are connected, each with the disk of a guest.
    #[serde(default)]
    pub vhost: Vec<VhostStat>,
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
    /// The Ceph clusters that volumes have their images in.
    #[serde(default)]
    pub clusters: Vec<ClusterStat>,
    /// The groups of limits.
    #[serde(default)]
    pub limit_groups: Vec<LimitGroupStat>,
    /// The files that expire by which the daemon and its clients authenticate.
    #[serde(default)]
    pub certificates: Vec<CertificateStat>,
    /// The last reload of the configuration; absent before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reload: Option<ReloadStat>,
    /// What is wrong in the state directory, of served files, or of sockets for guests, and
    /// prevents no volume from being served otherwise.
    #[serde(default)]
    pub problems: Vec<ProblemStat>,
    /// Paths of listening sockets whose file was removed or replaced: no client can connect there.
    #[serde(default)]
    pub lost_sockets: Vec<String>,
    /// The parts of the sandbox.
    #[serde(default)]
    pub sandbox: Vec<SandboxStat>,
    /// The process.
    #[serde(default)]
    pub process: ProcessStat,
    /// Whether the daemon is starting, serving or stopping.
    #[serde(default)]
    pub phase: DaemonPhase,
}

/// A file of the state directory that is not in force, or all of them, a socket that cannot be
/// opened, a served file that is no longer at its path, or a commit that has not ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProblemStat {
    /// The volume that it is about; absent if it is about the whole directory.
    pub volume: Option<String>,
    /// What is wrong.
    pub message: String,
    /// The kind of the [`HealthReason`](crate::HealthReason); empty if the remedy is a reload.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub kind: String,
    /// What to do about it; empty if the remedy is a reload.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub remedy: String,
}

impl ProblemStat {
    /// The kind of a commit that has begun and not ended.
    pub const COMMIT: &str = "commit_unfinished";
    /// The kind of a served file that is no longer at its path.
    pub const MOVED: &str = "file_moved";
    /// How the message begins if the socket of a volume cannot be opened, which is tried again.
    pub const SOCKET: &str = "not served over vhost-user";
}

/// A part of the sandbox of the daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SandboxStat {
    /// Its name: `other_processes`, `process_calls`, `broker`, `capabilities`, `ring`,
    /// `worker_calls` or `worker_paths`.
    pub mechanism: String,
    /// Whether it is in force.
    pub in_force: bool,
    /// What it does, or why it is not in force.
    pub detail: String,
    /// What to do about a part that has failed since the start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

/// A file that expires, by which the daemon or its clients authenticate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CertificateStat {
    /// What it is for: `nbd` or `web`.
    pub purpose: String,
    /// Its content.
    #[serde(default)]
    pub kind: CertificateKind,
    /// Its file.
    pub path: String,
    /// When it expires, seconds since 1970; of a revocation list, when the next one is due.
    pub expires: i64,
}

/// A reload of the configuration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ReloadStat {
    /// Whether the file was applied.
    pub success: bool,
    /// When it ended, seconds since 1970.
    pub time: f64,
    /// When the last successful one ended, seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_success: Option<f64>,
    /// Why it was not applied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The remedy, if there is one besides that in `error`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub remedy: String,
}

/// The process, as the kernel counts it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ProcessStat {
    /// Time of the processors, in user and kernel mode, seconds.
    pub cpu_seconds: f64,
    /// Address space, bytes.
    pub virtual_bytes: u64,
    /// Open descriptors.
    pub open_fds: u64,
    /// The limit of open descriptors; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_fds: Option<u64>,
    /// Threads.
    pub threads: u64,
    /// When it started, seconds since 1970.
    pub start_time: f64,
}

/// A volume.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
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
    /// Whether it is served, and how its store does.
    #[serde(default)]
    pub state: VolumeCondition,
    /// Where it is defined; empty if it is nowhere now.
    #[serde(default)]
    pub origin: DefinedIn,
    /// Why it is not served, if it cannot be opened.
    #[serde(default)]
    pub failure: Option<FailureStat>,
    /// What is waited for before it is served, if that is not its store; why its data cannot be
    /// written while it is closing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// The cause, if acknowledged writes may be lost; then all flushes fail.
    #[serde(default)]
    pub loss: Option<LossStat>,
    /// NBD connections and disks of guests that use it now.
    pub clients: u64,
    /// Guests whose requests fail until they are reset.
    #[serde(default)]
    pub failing_guests: FailingGuests,
    /// Its cache; absent without one. That of its own layer, if it is an overlay.
    pub cache: Option<VolumeCacheStat>,
    /// Its layers: 1 if it is no overlay.
    #[serde(default)]
    pub layers: u64,
    /// Bytes that the delta of an overlay holds on its store, as of the last flush; zeroes count, also where they take no space.
    /// Absent if it is no overlay, or for the moment after opening in which they are counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_bytes: Option<u64>,
    /// Cached bytes of the layers below, which it may share with other volumes.
    #[serde(default)]
    pub shared_cache_bytes: u64,
    /// Bytes of its reads that layers below hold and that were in memory, for whichever volume they were loaded.
    #[serde(default)]
    pub shared_hit_bytes: u64,
    /// Bytes of its reads that layers below hold and that were not in memory.
    #[serde(default)]
    pub shared_miss_bytes: u64,
    /// The layers below, from top to bottom; none if it is no overlay.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub below: Vec<LayerStat>,
    /// Requests in flight.
    #[serde(default)]
    pub in_flight: u64,
    /// What is wrong with its store, if anything is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outage: Option<OutageStat>,
    /// The connections to its server, if its store, or one below an overlay, is an NBD server. Of
    /// several servers, the worst off.
    pub remote: Option<RemoteStat>,
    /// Its limits; absent if it has had none since it was opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitStat>,
    /// Counters by operation: `read`, `write`, `flush`, `discard`, `write-zeroes`, `extents`,
    /// `prefetch`.
    pub operations: BTreeMap<String, OperationStat>,
}

impl VolumeStat {
    /// Itself if its store is open: otherwise its size and access are not known.
    pub fn opened(&self) -> Option<&Self> {
        let is_closed = matches!(self.state, VolumeCondition::Opening | VolumeCondition::Failed);
        (!is_closed).then_some(self)
    }
}

/// A layer below the own one of an overlay.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LayerStat {
    /// Its store.
    pub store: String,
    /// The name of the snapshot that it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// Its cached bytes, which other volumes may use, too.
    pub cache_bytes: u64,
}

/// Why a volume cannot be opened.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FailureStat {
    /// The cause, and a remedy.
    pub reason: String,
    /// The number of attempts.
    pub attempts: u64,
    /// Seconds since the first attempt.
    pub since_seconds: f64,
    /// Seconds until the next attempt; absent if it is not tried again by itself: its file in the state directory cannot be
    /// used, and is read again by a reload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_seconds: Option<f64>,
    /// Whether the volume was removed, and its file in the state directory was not.
    #[serde(default)]
    pub removed: bool,
}

impl OutageStat {
    /// Failed requests are shown until none has failed for this long, seconds.
    pub const SHOWN_SECONDS: u64 = 60;
}

/// An outage of a volume's store.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OutageStat {
    /// Seconds for which requests have waited for the store; 0 if it replies.
    pub silent_seconds: f64,
    /// Requests that have failed since its requests began to fail; 0 if none has failed for a minute.
    pub failed: u64,
    /// Seconds since the last of them.
    #[serde(default)]
    pub last_failed_seconds: f64,
    /// The remedy of the last of them; empty if only the log shows one.
    #[serde(default)]
    pub remedy: String,
    /// The file or server of the layer that has failed last, if the volume has several; empty if
    /// not.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub place: String,
}

/// A possible loss of acknowledged writes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LossStat {
    /// Seconds since the flush, or the write with FUA, failed.
    pub since_seconds: f64,
    /// The error of the flush.
    pub error: String,
    /// The remedy.
    pub remedy: String,
}

/// Counters of one kind of operation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OperationStat {
    /// Completed requests, successful or not.
    pub requests: u64,
    /// Bytes of successful requests.
    pub bytes: u64,
    /// Requests that failed in the store.
    pub errors: u64,
    /// How long requests took, from the loop iteration of the worker in which the volume got them until they
    /// completed. Absent before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<LatencyStat>,
    /// How long requests waited between their arrival and the volume: for memory, for a free task, for their data.
    /// Without the requests that did not wait; absent if none did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queued: Option<LatencyStat>,
}

/// A distribution of times.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LatencyStat {
    /// The number of requests.
    pub count: u64,
    /// The sum of their times, estimated from the buckets.
    pub sum_seconds: f64,
    /// The time that half of them did not exceed.
    pub p50_seconds: f64,
    /// The time that 99 of 100 did not exceed.
    pub p99_seconds: f64,
    /// The time that 999 of 1,000 did not exceed.
    pub p999_seconds: f64,
    /// The buckets that are not empty: the end of each, seconds, and the number of requests.
    pub buckets: Vec<(f64, u64)>,
}

/// A disk of a Xen guest. Its counters start at zero when it connects.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
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

/// A frontend of vhost-user with the disk of its guest. Its counters start at zero when it connects.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VhostStat {
    /// Its volume.
    pub volume: String,
    /// The path of the socket at which it has connected.
    pub socket: String,
    /// The number of its connection, as in `vhost-17` and in the log.
    pub connection: u64,
    /// The process number of the frontend, as far as the kernel tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The user of the frontend, as far as the kernel tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// `connected`: no queue is served; `waiting`: another writer has the volume; `serving`;
    /// `closing`: requests in flight complete, no new ones begin.
    pub state: FrontendState,
    /// The number of queues that are served.
    pub queues: u32,
    /// Requests that were taken from the guest's queues and have not completed.
    pub in_flight: u64,
    /// Counters by operation: `read`, `write`, `flush`, `discard` (with those that write zeroes).
    pub requests: BTreeMap<String, u64>,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Requests completed with an error.
    pub errors: u64,
    /// Requests that were in flight in an earlier daemon, and were resumed.
    pub resumed: u64,
    /// Requests that were carried out at once, without a task and a buffer.
    pub inline: u64,
    /// Notifications received from the guest.
    pub kicks: u64,
    /// Times that polling found requests without a notification.
    pub polls: u64,
    /// Times that completions were made visible to the guest, one or more at a time.
    pub publications: u64,
    /// Notifications sent to the guest.
    pub calls: u64,
    /// Times that the guest was delayed because most of its requests were refused.
    pub throttled: u64,
}

/// A worker thread.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WorkerStat {
    /// Its number, from 0.
    pub worker: usize,
    /// Whether it replied in time. If not, the counters are 0.
    pub answers: bool,
    /// Calls of `io_uring_enter`.
    pub enters: u64,
    /// Operations submitted to the io_uring.
    pub operations: u64,
    /// Times that it polled before it would have slept, and found work.
    #[serde(default)]
    pub polls: u64,
    /// Times that it polled and found nothing.
    #[serde(default)]
    pub unsuccessful_polls: u64,
}

/// I/O memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemoryStat {
    /// Address space, bytes.
    pub reserved_bytes: u64,
    /// The limit of wired memory, bytes.
    pub ceiling_bytes: u64,
    /// Memory in use, or free and kept, bytes.
    pub wired_bytes: u64,
    /// Memory lent to the kernel, which may have discarded any of it, bytes.
    pub lent_bytes: u64,
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
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
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
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
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
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OwnerStat {
    /// Its name.
    pub name: String,
    /// Memory in use, or free and kept, bytes.
    pub wired_bytes: u64,
    /// Memory lent to the kernel, bytes.
    pub lent_bytes: u64,
}

/// Memory pressure.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_survive_a_round_trip_through_json() {
        let operations = BTreeMap::from([("read".to_owned(), OperationStat::default())]);
        let volume = VolumeStat { name: "a\"b\n".to_owned(), operations, ..VolumeStat::default() };
        let stat = Stat {
            memory: Some(MemoryStat { zones: vec![ZoneStat::default()], ..MemoryStat::default() }),
            pressure: Some(PressureStat::default()),
            volumes: vec![volume],
            ..Stat::default()
        };
        let text = serde_json::to_string(&stat).unwrap();
        assert_eq!(serde_json::from_str::<Stat>(&text).unwrap(), stat);
    }
}
