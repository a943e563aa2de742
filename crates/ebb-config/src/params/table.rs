//! The one table of run-time parameters: name, scope, unit, range, default and text of each.
//!
//! How to add one is described in `docs/guides/adding-a-parameter.md`.

use super::definition::{Definition, Kind, ParameterScope, ParameterTable, TypedKey};
use crate::LogLevel;

/// All parameters, in the order they are listed.
pub const TABLE: ParameterTable = ParameterTable(&[
    MAX_BUFFER_PAGES.definition(),
    BUFFER_SQUEEZE_DURATION_MS.definition(),
    ZONE_LIMIT_BYTES.definition(),
    CACHE_MAX.definition(),
    CACHE_MIN.definition(),
    MAX_PERSISTENT_GRANTS.definition(),
    PERSISTENT_GRANT_UNUSED_SECONDS.definition(),
    FEATURE_PERSISTENT.definition(),
    POLL_US.definition(),
    LIMIT_IOPS.definition(),
    LIMIT_READ_IOPS.definition(),
    LIMIT_WRITE_IOPS.definition(),
    LIMIT_BANDWIDTH.definition(),
    LIMIT_READ_BANDWIDTH.definition(),
    LIMIT_WRITE_BANDWIDTH.definition(),
    LIMIT_BURST_MS.definition(),
    LIMIT_GROUP.definition(),
    MIN_RATIO.definition(),
    MAX_RATIO.definition(),
    MAX_BYTES.definition(),
    STRICT_LIMIT.definition(),
    MAX_CLIENTS.definition(),
    MAX_REQUEST.definition(),
    CONNECTION_MEMORY.definition(),
    LOG.definition(),
]);

/// What most definitions have in common.
pub(super) const COMMON: Definition = Definition {
    name: "",
    members: &[],
    scope: ParameterScope::Daemon,
    kind: Kind::Number,
    unit: "",
    default: 0,
    minimum: 0,
    maximum: 0,
    zero: None,
    config: None,
    since: "0.1.0",
    effect: "",
    doc: "",
};

const SWITCH: &[&str] = &["off", "on"];
pub(super) const LEVELS: &[&str] = &["error", "warn", "info", "debug"];
/// The block sizes in which I/O memory is allocated.
pub(super) const BLOCK_SIZES: [&str; 9] =
    ["4K", "8K", "16K", "32K", "64K", "128K", "256K", "512K", "1M"];

/// Free pages that each queue keeps.
pub const MAX_BUFFER_PAGES: TypedKey<u32> = TypedKey::new(&Definition {
    name: "max_buffer_pages",
    scope: ParameterScope::Volume,
    kind: Kind::Number,
    unit: "pages of 4096 bytes, for each queue",
    default: 1024,
    minimum: 0,
    maximum: 1 << 20,
    config: Some("max_buffer_pages"),
    effect: "The next time a queue has no request in flight, or after 100 ms at most. With a \
             smaller value the pool then frees pages; with a larger one it keeps more of the pages \
             that requests free.",
    doc: "How many free pages each queue keeps for later requests. The pool of a queue starts \
          empty and grows on demand while requests are carried out: the value does not limit how \
          much memory requests use, only how much the queue keeps when they have completed.\n\n\
          With 0 a queue keeps no free pages. Under memory pressure the limit is 0 for \
          buffer_squeeze_duration_ms, and as long as the pressure lasts, regardless of the value: \
          then all queues share the free memory.",
    ..COMMON
});

/// How long page pools keep nothing after a sign of memory pressure.
pub const BUFFER_SQUEEZE_DURATION_MS: TypedKey<u32> = TypedKey::new(&Definition {
    name: "buffer_squeeze_duration_ms",
    scope: ParameterScope::Volume,
    kind: Kind::Number,
    unit: "milliseconds",
    default: 10,
    minimum: 0,
    maximum: 60_000,
    config: Some("buffer_squeeze_duration_ms"),
    effect: "At the next sign of memory pressure. A squeeze that has begun keeps its duration.",
    doc: "How long page pools keep no free pages after a sign of memory pressure. Each further \
          sign restarts the time, and while the pressure lasts (drain, last resort) it does not end. \
          Idle queues are woken to free their pages.\n\n\
          With a longer time more of the pages that requests free meanwhile are returned, which \
          costs more allocations. With 0 the pages that are free at the moment of the sign are \
          returned, and pools may grow again at once.",
    ..COMMON
});

/// The memory that the blocks of one size may occupy; 0 is without limit.
pub const ZONE_LIMIT_BYTES: TypedKey<u64> = TypedKey::new(&Definition {
    name: "zone_limit_bytes",
    members: &BLOCK_SIZES,
    scope: ParameterScope::Daemon,
    kind: Kind::Size,
    unit: "bytes",
    default: 0,
    minimum: 2 << 20,
    maximum: 1 << 40,
    zero: Some("no limit"),
    effect: "At once for new allocations. Memory above a smaller limit stays until it is free.",
    doc: "The maximum memory of the blocks of one size, in use and free together. There is one \
          parameter for each block size: zone_limit_bytes.4K to zone_limit_bytes.1M.\n\n\
          A request whose zone is at the limit waits until a block is free; requests wait in order \
          of arrival. The smallest limit, 2M, is the unit in which zones allocate memory. With 0 \
          there is no limit, and only memory pressure shrinks the zone.",
    ..COMMON
});

/// The maximum size of the cache; 0 follows the host.
pub const CACHE_MAX: TypedKey<u64> = TypedKey::new(&Definition {
    name: "cache_max",
    scope: ParameterScope::Daemon,
    kind: Kind::Size,
    unit: "bytes",
    default: 0,
    minimum: 1 << 20,
    maximum: 1 << 40,
    zero: Some("follows the host"),
    config: Some("cache_max"),
    effect: "At once. With a smaller value the excess is evicted within a second, the least \
             recently used data first.",
    doc: "The maximum size of the cache of all volumes together, wired and lent memory \
          (`bufspace`).\n\n\
          With 0 the cache grows while the host has free memory, up to four fifths of the memory \
          of the host or of the daemon's control group. Most of the cache is lent to the kernel \
          (`MADV_FREE`), which discards it without I/O when other processes need memory, so that a \
          limit is seldom needed.",
    ..COMMON
});

/// The size down to which the cache shrinks under memory pressure.
pub const CACHE_MIN: TypedKey<u64> = TypedKey::new(&Definition {
    name: "cache_min",
    scope: ParameterScope::Daemon,
    kind: Kind::Size,
    unit: "bytes",
    default: 0,
    minimum: 0,
    maximum: 1 << 40,
    config: Some("cache_min"),
    effect: "At the next sign of memory pressure.",
    doc: "The size down to which the cache shrinks at the levels L1 and L2 of memory pressure; at \
          most cache_max. The last resort, L3, empties the cache.\n\n\
          The memory is not reserved: the daemon only stops shrinking the cache there. The kernel \
          may discard lent memory regardless of the value.",
    ..COMMON
});

/// Pages of a guest that each of its rings keeps mapped.
pub const MAX_PERSISTENT_GRANTS: TypedKey<u32> = TypedKey::new(&Definition {
    name: "max_persistent_grants",
    scope: ParameterScope::Daemon,
    kind: Kind::Number,
    unit: "grants, for each ring of a Xen guest",
    default: 1056,
    minimum: 0,
    maximum: 1 << 20,
    effect: "At once for new mappings. A ring with more mapped grants unmaps the excess and 5 % of \
             the value, the least recently used first, within 100 ms.",
    doc: "How many pages of a Xen guest each of its rings keeps mapped, so that requests that use \
          them again need no hypercall. It applies to guests that negotiated persistent grants \
          (feature_persistent); 1056 is the number of pages that one ring page of requests with 32 \
          segments each, and their descriptors, can refer to. The parameter has the meaning of that \
          of xen-blkback.\n\n\
          A guest that uses more pages is served, too: the hypervisor copies pages that are not \
          mapped, and every 100 ms the least recently used 5 % of the value are unmapped to make \
          room. The last sixteenth of the mappings is reserved for pages that are used a second \
          time within a short time. With 0 nothing stays mapped.",
    ..COMMON
});

/// How long an unused page of a guest stays mapped; 0 is without limit.
pub const PERSISTENT_GRANT_UNUSED_SECONDS: TypedKey<u32> = TypedKey::new(&Definition {
    name: "persistent_grant_unused_seconds",
    scope: ParameterScope::Daemon,
    kind: Kind::Number,
    unit: "seconds",
    default: 60,
    minimum: 0,
    maximum: 86_400,
    effect: "Within 100 ms, also for grants that are mapped already.",
    doc: "How long a page of a Xen guest stays mapped while no request uses it. Then it is \
          unmapped, and the guest can revoke the grant. With 0 there is no time limit. At level L2 \
          of memory pressure and above, pages that have not been used for 5 seconds are unmapped \
          regardless of the value.",
    ..COMMON
});

/// Whether persistent grants are offered to guests.
pub const FEATURE_PERSISTENT: TypedKey<bool> = TypedKey::new(&Definition {
    name: "feature_persistent",
    scope: ParameterScope::Daemon,
    kind: Kind::Word(SWITCH),
    unit: "switch",
    default: 1,
    minimum: 0,
    maximum: 1,
    effect: "For disks that connect from then on. Connected disks keep what was negotiated, also \
             across a restart of the daemon.",
    doc: "Whether persistent grants are offered to Xen guests: the daemon keeps the pages of \
          requests mapped, and the guest uses them again. Both sides must support it; without \
          persistent grants the hypervisor copies the pages, for several requests in one \
          hypercall.",
    ..COMMON
});

/// How long a worker polls before it sleeps.
pub const POLL_US: TypedKey<u32> = TypedKey::new(&Definition {
    name: "poll_us",
    scope: ParameterScope::Daemon,
    kind: Kind::Number,
    unit: "microseconds, for each request",
    default: 100,
    minimum: 0,
    maximum: 1000,
    effect: "The next time a worker has nothing to do.",
    doc: "How long a worker polls for the next request before it sleeps, because a wake-up costs \
          more than many requests: this time for each request since its client, guest or remote \
          store last had none, and 1000 microseconds at most. Sockets of NBD clients and of remote \
          stores, and rings of Xen and KVM guests, are polled alike.\n\n\
          Only what sends requests faster than one per poll_us is polled, and a poll without \
          success is followed by sleep: idle clients cost nothing. Polls without success take at \
          most a sixteenth of a worker's time; at most half of the processors poll at once, so \
          of a machine with a single one only rings of guests are polled: guests have processors of \
          their own. Where no processor is idle polling gives way to other programs, for 1 second \
          at first and 32 seconds at most, and then tries again for a tenth of a second.\n\n\
          With 0 nothing is polled, which uses the least processor time and gives the highest \
          latency to a single request. `ebbd stat --json` shows how often each worker polled with \
          and without success.",
    ..COMMON
});

/// Limit of requests per second, reads and writes.
pub const LIMIT_IOPS: TypedKey<u64> = TypedKey::new(&Definition {
    name: "limit_iops",
    scope: ParameterScope::VolumeAndGroup,
    kind: Kind::Number,
    unit: "requests per second",
    default: 0,
    minimum: 1,
    maximum: 1_000_000_000,
    zero: Some("no limit"),
    config: Some("volume.NAME.limit_iops"),
    effect: "At once, also for requests that wait.",
    doc: "Limit of the requests per second of a volume, or of all volumes of a group: reads and writes together. Discards and requests to write zeroes count as writes; flushes do not count.\n\n\
          A request above the limit stays in the client's socket or the guest's ring, and holds no \
          memory. The daemon's value is for volumes without one of their own: \
          for each, not for all together. A group does not follow it.",
    ..COMMON
});

/// Limit of reads per second.
pub const LIMIT_READ_IOPS: TypedKey<u64> = TypedKey::new(&Definition {
    name: "limit_read_iops",
    scope: ParameterScope::VolumeAndGroup,
    kind: Kind::Number,
    unit: "requests per second",
    default: 0,
    minimum: 1,
    maximum: 1_000_000_000,
    zero: Some("no limit"),
    config: Some("volume.NAME.limit_read_iops"),
    effect: "At once, also for requests that wait.",
    doc: "Limit of the requests per second of a volume, or of all volumes of a group: reads.\n\n\
          A request above the limit stays in the client's socket or the guest's ring, and holds no \
          memory. The daemon's value is for volumes without one of their own: \
          for each, not for all together. A group does not follow it.",
    ..COMMON
});

/// Limit of writes per second.
pub const LIMIT_WRITE_IOPS: TypedKey<u64> = TypedKey::new(&Definition {
    name: "limit_write_iops",
    scope: ParameterScope::VolumeAndGroup,
    kind: Kind::Number,
    unit: "requests per second",
    default: 0,
    minimum: 1,
    maximum: 1_000_000_000,
    zero: Some("no limit"),
    config: Some("volume.NAME.limit_write_iops"),
    effect: "At once, also for requests that wait.",
    doc: "Limit of the requests per second of a volume, or of all volumes of a group: writes. Discards and requests to write zeroes count as writes; flushes do not count.\n\n\
          A request above the limit stays in the client's socket or the guest's ring, and holds no \
          memory. The daemon's value is for volumes without one of their own: \
          for each, not for all together. A group does not follow it.",
    ..COMMON
});

/// Limit of bytes per second, read and written.
pub const LIMIT_BANDWIDTH: TypedKey<u64> = TypedKey::new(&Definition {
    name: "limit_bandwidth",
    scope: ParameterScope::VolumeAndGroup,
    kind: Kind::Size,
    unit: "bytes per second",
    default: 0,
    minimum: 512,
    maximum: 1 << 40,
    zero: Some("no limit"),
    config: Some("volume.NAME.limit_bandwidth"),
    effect: "At once, also for requests that wait.",
    doc: "Limit of the bytes per second of a volume, or of all volumes of a group: reads and writes together. \
          Discards and requests to write zeroes have no bytes.\n\n\
          A request larger than what is left passes, and later ones wait the longer. The daemon's \
          value is for volumes without one of their own: for each, not for all together. A group does \
          not follow it.",
    ..COMMON
});

/// Limit of bytes read per second.
pub const LIMIT_READ_BANDWIDTH: TypedKey<u64> = TypedKey::new(&Definition {
    name: "limit_read_bandwidth",
    scope: ParameterScope::VolumeAndGroup,
    kind: Kind::Size,
    unit: "bytes per second",
    default: 0,
    minimum: 512,
    maximum: 1 << 40,
    zero: Some("no limit"),
    config: Some("volume.NAME.limit_read_bandwidth"),
    effect: "At once, also for requests that wait.",
    doc: "Limit of the bytes per second of a volume, or of all volumes of a group: reads. \
          Discards and requests to write zeroes have no bytes.\n\n\
          A request larger than what is left passes, and later ones wait the longer. The daemon's \
          value is for volumes without one of their own: for each, not for all together. A group does \
          not follow it.",
    ..COMMON
});

/// Limit of bytes written per second.
pub const LIMIT_WRITE_BANDWIDTH: TypedKey<u64> = TypedKey::new(&Definition {
    name: "limit_write_bandwidth",
    scope: ParameterScope::VolumeAndGroup,
    kind: Kind::Size,
    unit: "bytes per second",
    default: 0,
    minimum: 512,
    maximum: 1 << 40,
    zero: Some("no limit"),
    config: Some("volume.NAME.limit_write_bandwidth"),
    effect: "At once, also for requests that wait.",
    doc: "Limit of the bytes per second of a volume, or of all volumes of a group: writes. \
          Discards and requests to write zeroes have no bytes.\n\n\
          A request larger than what is left passes, and later ones wait the longer. The daemon's \
          value is for volumes without one of their own: for each, not for all together. A group does \
          not follow it.",
    ..COMMON
});

/// The burst of a volume or a group that was idle, milliseconds.
pub const LIMIT_BURST_MS: TypedKey<u64> = TypedKey::new(&Definition {
    name: "limit_burst_ms",
    scope: ParameterScope::VolumeAndGroup,
    kind: Kind::Number,
    unit: "milliseconds",
    default: 100,
    minimum: 0,
    maximum: 600_000,
    zero: None,
    config: Some("volume.NAME.limit_burst_ms"),
    effect: "At once, also for requests that wait.",
    doc: "The burst of a volume or a group that was idle: the requests and bytes of this time pass at \
          once, beyond the limits.\n\nAt least 10 ms count, so that late timers cost no rate.",
    ..COMMON
});

/// The group whose limits a volume shares.
pub const LIMIT_GROUP: TypedKey<u64> = TypedKey::new(&Definition {
    name: "limit_group",
    scope: ParameterScope::Volume,
    kind: Kind::Name,
    unit: "name of a group",
    default: 0,
    minimum: 0,
    maximum: 0,
    config: Some("volume.NAME.limit_group"),
    effect: "At once. Requests that wait for the limits of the former group pass.",
    doc: "The group whose limits the volume shares with other volumes, besides its own limits. Members \
          that want more than the group's limits allow have equal parts; what others leave goes to \
          them. A group that is named for the first time has no limits; set them with --limit-group.",
    ..COMMON
});

/// Part of the limit of dirty data that is reserved for a backing device, in parts per million.
pub const MIN_RATIO: TypedKey<u32> = TypedKey::new(&Definition {
    name: "min_ratio",
    scope: ParameterScope::Bdi,
    kind: Kind::Percent,
    unit: "per cent of the limit of all dirty data",
    default: 0,
    minimum: 0,
    maximum: 1_000_000,
    config: Some("bdi.NAME.min_ratio"),
    effect: "At once, as far as other devices leave room; dirty data that they hold above their \
             new thresholds is written first.",
    doc: "The part of the limit of all dirty data that is reserved for this backing device. At most \
          its max_ratio, and at most 100 for all devices together.\n\n\
          Without it a device with dirty data always gets a part in proportion to its measured \
          write rate, so that a reservation is seldom needed.",
    ..COMMON
});

/// Largest part of it that a backing device may have, in parts per million.
pub const MAX_RATIO: TypedKey<u32> = TypedKey::new(&Definition {
    name: "max_ratio",
    scope: ParameterScope::Bdi,
    kind: Kind::Percent,
    unit: "per cent of the limit of all dirty data",
    default: 1_000_000,
    minimum: 1,
    maximum: 1_000_000,
    config: Some("bdi.NAME.max_ratio"),
    effect: "At once for new writes. Dirty data above a smaller value is written as fast as the \
             device can; meanwhile its writers are throttled.",
    doc: "The largest part of the limit of all dirty data that this backing device may have, dirty \
          and under writeback together. The limit follows the available memory, and so does this \
          part of it.",
    ..COMMON
});

/// Limit of the dirty data of a backing device; 0 is without limit.
pub const MAX_BYTES: TypedKey<u64> = TypedKey::new(&Definition {
    name: "max_bytes",
    scope: ParameterScope::Bdi,
    kind: Kind::Size,
    unit: "bytes",
    default: 0,
    minimum: 64 << 10,
    maximum: 1 << 40,
    zero: Some("no limit"),
    config: Some("bdi.NAME.max_bytes"),
    effect: "At once for new writes. Dirty data above a smaller value is written as fast as the \
             device can; meanwhile its writers are throttled.",
    doc: "The maximum dirty data and data under writeback of this backing device, in bytes, \
          regardless of the available memory.\n\n\
          A device never has more dirty data than it writes in two seconds. An explicit limit is \
          for a device that must have less to lose: removable media, or a server behind an \
          unreliable network.",
    ..COMMON
});

/// Whether no write may exceed a backing device's threshold.
pub const STRICT_LIMIT: TypedKey<bool> = TypedKey::new(&Definition {
    name: "strict_limit",
    scope: ParameterScope::Bdi,
    kind: Kind::Word(SWITCH),
    unit: "switch",
    default: 0,
    minimum: 0,
    maximum: 1,
    config: Some("bdi.NAME.strict_limit"),
    effect: "At once.",
    doc: "Whether every write must fit below the threshold of the device.\n\n\
          In Linux, strict_limit makes the threshold of one device apply even while the total is \
          below its limit. ebbd always applies the threshold of each device; here the parameter \
          only decides about the last write. When it is off, a write is admitted whole if at most \
          half of the threshold is used, even if it exceeds the remaining part; when it is on, the \
          write waits until it fits. That makes a difference where the threshold is smaller than \
          two writes. A write larger than the whole threshold is admitted when the device has no \
          dirty data.",
    ..COMMON
});

/// The maximum number of connections at a time.
pub const MAX_CLIENTS: TypedKey<usize> = TypedKey::new(&Definition {
    name: "max_clients",
    scope: ParameterScope::Daemon,
    kind: Kind::Number,
    unit: "connections",
    default: 256,
    minimum: 1,
    maximum: 65_536,
    config: Some("nbd.max_clients"),
    effect: "For the next client. Established connections stay.",
    doc: "The maximum number of NBD connections at a time. A further connection is closed before \
          its handshake, and the log says so. If several volumes are served, the connections to one \
          volume are at most four times the number of connections that remain free, so that clients \
          of another volume can connect; a further one is refused with the reason.",
    ..COMMON
});

/// The largest READ or WRITE.
pub const MAX_REQUEST: TypedKey<u32> = TypedKey::new(&Definition {
    name: "max_request",
    scope: ParameterScope::Daemon,
    kind: Kind::Size,
    unit: "bytes",
    default: 32 << 20,
    minimum: 4 << 10,
    maximum: 64 << 20,
    config: Some("nbd.max_request"),
    effect: "For new connections: a client receives the value in the handshake.",
    doc: "The largest payload of one READ or WRITE request that ebbd advertises. It must fit into \
          connection_memory. Clients that do not ask for it, as Linux, send up to 32M: such a \
          request is executed in pieces that fit into connection_memory.",
    ..COMMON
});

/// The memory the requests of one connection may hold.
pub const CONNECTION_MEMORY: TypedKey<usize> = TypedKey::new(&Definition {
    name: "connection_memory",
    scope: ParameterScope::Daemon,
    kind: Kind::Size,
    unit: "bytes",
    default: 64 << 20,
    minimum: 4 << 10,
    maximum: u64::MAX,
    config: Some("nbd.connection_memory"),
    effect: "For new connections.",
    doc: "The memory that the requests of one connection may hold, max_request or more. Requests \
          that would need more wait in the socket.",
    ..COMMON
});

/// The log level.
pub const LOG: TypedKey<LogLevel> = TypedKey::new(&Definition {
    name: "log",
    scope: ParameterScope::Daemon,
    kind: Kind::Word(LEVELS),
    unit: "level",
    default: 2,
    minimum: 0,
    maximum: 3,
    config: Some("log"),
    effect: "At once.",
    doc: "The level of the log on stderr; each level includes the ones before it: error (what the \
          daemon could not do), warn (what an operator should check), info (start, stop, reload, \
          connections), debug (details).",
    ..COMMON
});
