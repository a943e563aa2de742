//! The definition of each parameter: the texts and numbers of the table.

use super::{CLASSES, Definition, Kind, ParameterScope};

const SWITCH: &[&str] = &["off", "on"];
pub(super) const LEVELS: &[&str] = &["error", "warn", "info", "debug"];

pub(super) const MAX_BUFFER_PAGES: Definition = Definition {
    name: "max_buffer_pages",
    members: &[],
    scope: ParameterScope::Volume,
    kind: Kind::Number,
    unit: "pages of 4096 bytes, for each queue",
    default: 1024,
    minimum: 0,
    maximum: 1 << 20,
    zero: None,
    config: Some("max_buffer_pages"),
    since: "0.1.0",
    effect: "The next time a queue has no request in flight, or after 100 ms at most. With a \
             smaller value the pool then frees pages; with a larger one it keeps more of the pages \
             that requests free.",
    doc: "How many free pages each queue keeps for later requests. The pool of a queue starts \
          empty and grows on demand while requests are carried out: the value does not limit how \
          much memory requests use, only how much the queue keeps when they have completed.\n\n\
          With 0 a queue keeps no free pages. Under memory pressure the limit is 0 for \
          buffer_squeeze_duration_ms, and as long as the pressure lasts, regardless of the value: \
          then all queues share the free memory.",
};

pub(super) const BUFFER_SQUEEZE_DURATION_MS: Definition = Definition {
    name: "buffer_squeeze_duration_ms",
    members: &[],
    scope: ParameterScope::Volume,
    kind: Kind::Number,
    unit: "milliseconds",
    default: 10,
    minimum: 0,
    maximum: 60_000,
    zero: None,
    config: Some("buffer_squeeze_duration_ms"),
    since: "0.1.0",
    effect: "At the next sign of memory pressure. A squeeze that has begun keeps its duration.",
    doc: "How long page pools keep no free pages after a sign of memory pressure. Each further \
          sign restarts the time, and while the pressure lasts (drain, last resort) it does not end. \
          Idle queues are woken to free their pages.\n\n\
          With a longer time more of the pages that requests free meanwhile are returned, which \
          costs more allocations. With 0 the pages that are free at the moment of the sign are \
          returned, and pools may grow again at once.",
};

pub(super) const ZONE_LIMIT_BYTES: Definition = Definition {
    name: "zone_limit_bytes",
    members: &CLASSES,
    scope: ParameterScope::Daemon,
    kind: Kind::Size,
    unit: "bytes",
    default: 0,
    minimum: 2 << 20,
    maximum: 1 << 40,
    zero: Some("no limit"),
    config: None,
    since: "0.1.0",
    effect: "At once for new allocations. Memory above a smaller limit stays until it is free.",
    doc: "The maximum memory of the blocks of one size, in use and free together. There is one \
          parameter for each block size: zone_limit_bytes.4K to zone_limit_bytes.1M.\n\n\
          A request whose zone is at the limit waits until a block is free; requests wait in order \
          of arrival. The smallest limit, 2M, is the unit in which zones allocate memory. With 0 \
          there is no limit, and only memory pressure shrinks the zone.",
};

pub(super) const CACHE_MAX: Definition = Definition {
    name: "cache_max",
    members: &[],
    scope: ParameterScope::Daemon,
    kind: Kind::Size,
    unit: "bytes",
    default: 0,
    minimum: 1 << 20,
    maximum: 1 << 40,
    zero: Some("follows the host"),
    config: Some("cache_max"),
    since: "0.1.0",
    effect: "At once. With a smaller value the excess is evicted within a second, the least \
             recently used data first.",
    doc: "The maximum size of the cache of all volumes together, wired and lent memory \
          (`bufspace`).\n\n\
          With 0 the cache grows while the host has free memory, up to four fifths of the memory \
          of the host or of the daemon's control group. Most of the cache is lent to the kernel \
          (`MADV_FREE`), which discards it without I/O when other processes need memory, so that a \
          limit is seldom needed.",
};

pub(super) const CACHE_MIN: Definition = Definition {
    name: "cache_min",
    members: &[],
    scope: ParameterScope::Daemon,
    kind: Kind::Size,
    unit: "bytes",
    default: 0,
    minimum: 0,
    maximum: 1 << 40,
    zero: None,
    config: Some("cache_min"),
    since: "0.1.0",
    effect: "At the next sign of memory pressure.",
    doc: "The size down to which the cache shrinks at the levels L1 and L2 of memory pressure; at \
          most cache_max. The last resort, L3, empties the cache.\n\n\
          The memory is not reserved: the daemon only stops shrinking the cache there. The kernel \
          may discard lent memory regardless of the value.",
};

pub(super) const MAX_PERSISTENT_GRANTS: Definition = Definition {
    name: "max_persistent_grants",
    members: &[],
    scope: ParameterScope::Daemon,
    kind: Kind::Number,
    unit: "grants, for each ring of a Xen guest",
    default: 1056,
    minimum: 0,
    maximum: 1 << 20,
    zero: None,
    config: None,
    since: "0.1.0",
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
};

pub(super) const PERSISTENT_GRANT_UNUSED_SECONDS: Definition = Definition {
    name: "persistent_grant_unused_seconds",
    members: &[],
    scope: ParameterScope::Daemon,
    kind: Kind::Number,
    unit: "seconds",
    default: 60,
    minimum: 0,
    maximum: 86_400,
    zero: None,
    config: None,
    since: "0.1.0",
    effect: "Within 100 ms, also for grants that are mapped already.",
    doc: "How long a page of a Xen guest stays mapped while no request uses it. Then it is \
          unmapped, and the guest can revoke the grant. With 0 there is no time limit. At level L2 \
          of memory pressure and above, pages that have not been used for 5 seconds are unmapped \
          regardless of the value.",
};

pub(super) const FEATURE_PERSISTENT: Definition = Definition {
    name: "feature_persistent",
    members: &[],
    scope: ParameterScope::Daemon,
    kind: Kind::Word(SWITCH),
    unit: "switch",
    default: 1,
    minimum: 0,
    maximum: 1,
    zero: None,
    config: None,
    since: "0.1.0",
    effect: "For disks that connect from then on. Connected disks keep what was negotiated, also \
             across a restart of the daemon.",
    doc: "Whether persistent grants are offered to Xen guests: the daemon keeps the pages of \
          requests mapped, and the guest uses them again. Both sides must support it; without \
          persistent grants the hypervisor copies the pages, for several requests in one \
          hypercall.",
};

pub(super) const POLL_US: Definition = Definition {
    name: "poll_us",
    members: &[],
    scope: ParameterScope::Daemon,
    kind: Kind::Number,
    unit: "microseconds, for each request",
    default: 100,
    minimum: 0,
    maximum: 1000,
    zero: None,
    config: None,
    since: "0.1.0",
    effect: "The next time a ring becomes empty.",
    doc: "How long the worker polls an empty ring of a Xen guest before it sleeps: this time for \
          each request of the last batch, and 1000 microseconds at most. Requests that arrive \
          meanwhile need no event and no wakeup, which saves more processor time than polling \
          uses. A ring is polled only if its last pause was shorter than that, and only while it \
          has no request in flight; after polling without success, a ring is not polled again \
          until requests arrive quickly again. With 0 rings are never polled, which uses the least \
          processor time in dom0 and gives the highest latency to a single request.\n\n\
          It applies to memory-backed volumes only: requests to other volumes wait for a device, \
          and their rings are not polled meanwhile.",
};

pub(super) const MAX_CLIENTS: Definition = Definition {
    name: "max_clients",
    members: &[],
    scope: ParameterScope::Daemon,
    kind: Kind::Number,
    unit: "connections",
    default: 256,
    minimum: 1,
    maximum: 65_536,
    zero: None,
    config: Some("nbd.max_clients"),
    since: "0.1.0",
    effect: "For the next client. Established connections stay.",
    doc: "The maximum number of NBD connections at a time. A further connection is closed before \
          its handshake, and the log says so. If several volumes are served, the connections to one \
          volume are at most four times the number of connections that remain free, so that clients \
          of another volume can connect; a further one is refused with the reason.",
};

pub(super) const MAX_REQUEST: Definition = Definition {
    name: "max_request",
    members: &[],
    scope: ParameterScope::Daemon,
    kind: Kind::Size,
    unit: "bytes",
    default: 32 << 20,
    minimum: 4 << 10,
    maximum: 64 << 20,
    zero: None,
    config: Some("nbd.max_request"),
    since: "0.1.0",
    effect: "For new connections: a client receives the value in the handshake.",
    doc: "The largest payload of one READ or WRITE request. It must fit into connection_memory.",
};

pub(super) const CONNECTION_MEMORY: Definition = Definition {
    name: "connection_memory",
    members: &[],
    scope: ParameterScope::Daemon,
    kind: Kind::Size,
    unit: "bytes",
    default: 64 << 20,
    minimum: 4 << 10,
    maximum: u64::MAX,
    zero: None,
    config: Some("nbd.connection_memory"),
    since: "0.1.0",
    effect: "For new connections.",
    doc: "The memory that the requests of one connection may hold, max_request or more. Requests \
          that would need more wait in the socket.",
};

pub(super) const LOG: Definition = Definition {
    name: "log",
    members: &[],
    scope: ParameterScope::Daemon,
    kind: Kind::Word(LEVELS),
    unit: "level",
    default: 2,
    minimum: 0,
    maximum: 3,
    zero: None,
    config: Some("log"),
    since: "0.1.0",
    effect: "At once.",
    doc: "The level of the log on stderr; each level includes the ones before it: error (what the \
          daemon could not do), warn (what an operator should check), info (start, stop, reload, \
          connections), debug (details).",
};

pub(super) const MIN_RATIO: Definition = Definition {
    name: "min_ratio",
    members: &[],
    scope: ParameterScope::Bdi,
    kind: Kind::Percent,
    unit: "per cent of the limit of all dirty data",
    default: 0,
    minimum: 0,
    maximum: 1_000_000,
    zero: None,
    config: Some("bdi.NAME.min_ratio"),
    since: "0.1.0",
    effect: "At once, as far as other devices leave room; dirty data that they hold above their \
             new thresholds is written first.",
    doc: "The part of the limit of all dirty data that is reserved for this backing device. At most \
          its max_ratio, and at most 100 for all devices together.\n\n\
          Without it a device with dirty data always gets a part in proportion to its measured \
          write rate, so that a reservation is seldom needed.",
};

pub(super) const MAX_RATIO: Definition = Definition {
    name: "max_ratio",
    members: &[],
    scope: ParameterScope::Bdi,
    kind: Kind::Percent,
    unit: "per cent of the limit of all dirty data",
    default: 1_000_000,
    minimum: 1,
    maximum: 1_000_000,
    zero: None,
    config: Some("bdi.NAME.max_ratio"),
    since: "0.1.0",
    effect: "At once for new writes. Dirty data above a smaller value is written as fast as the \
             device can; meanwhile its writers are throttled.",
    doc: "The largest part of the limit of all dirty data that this backing device may have, dirty \
          and under writeback together. The limit follows the available memory, and so does this \
          part of it.",
};

pub(super) const MAX_BYTES: Definition = Definition {
    name: "max_bytes",
    members: &[],
    scope: ParameterScope::Bdi,
    kind: Kind::Size,
    unit: "bytes",
    default: 0,
    minimum: 64 << 10,
    maximum: 1 << 40,
    zero: Some("no limit"),
    config: Some("bdi.NAME.max_bytes"),
    since: "0.1.0",
    effect: "At once for new writes. Dirty data above a smaller value is written as fast as the \
             device can; meanwhile its writers are throttled.",
    doc: "The maximum dirty data and data under writeback of this backing device, in bytes, \
          regardless of the available memory.\n\n\
          A device never has more dirty data than it writes in two seconds. An explicit limit is \
          for a device that must have less to lose: removable media, or a server behind an \
          unreliable network.",
};

pub(super) const STRICT_LIMIT: Definition = Definition {
    name: "strict_limit",
    members: &[],
    scope: ParameterScope::Bdi,
    kind: Kind::Word(SWITCH),
    unit: "switch",
    default: 0,
    minimum: 0,
    maximum: 1,
    zero: None,
    config: Some("bdi.NAME.strict_limit"),
    since: "0.1.0",
    effect: "At once.",
    doc: "Whether every write must fit below the threshold of the device.\n\n\
          In Linux, strict_limit makes the threshold of one device apply even while the total is \
          below its limit. ebbd always applies the threshold of each device; here the parameter \
          only decides about the last write. When it is off, a write is admitted whole if at most \
          half of the threshold is used, even if it exceeds the remaining part; when it is on, the \
          write waits until it fits. That makes a difference where the threshold is smaller than \
          two writes. A write larger than the whole threshold is admitted when the device has no \
          dirty data.",
};
