//! What is said of each parameter: the texts and numbers of the table.

use super::{CLASSES, Definition, Kind, Scope};

const SWITCH: &[&str] = &["off", "on"];
pub(super) const LEVELS: &[&str] = &["error", "warn", "info", "debug"];

pub(super) const MAX_BUFFER_PAGES: Definition = Definition {
    name: "max_buffer_pages",
    members: &[],
    scope: Scope::Volume,
    kind: Kind::Number,
    unit: "pages of 4096 bytes, for each queue",
    default: 1024,
    minimum: 0,
    maximum: 1 << 20,
    zero: None,
    config: Some("max_buffer_pages"),
    since: "0.1.0",
    effect: "The next time a queue has no request under way, 100 ms later at most. A smaller \
             value gives pages back then, a larger one lets the pool keep more of what requests \
             bring.",
    doc: "How many free pages each queue keeps for the requests to come. A queue's pool starts \
          with none and grows on demand while requests are carried out: the value does not limit \
          how much memory requests take, only how much stays behind them.\n\n\
          0 keeps nothing. Under memory pressure the limit is 0 for buffer_squeeze_duration_ms, and \
          as long as the pressure goes on, whatever the value: then all queues share what is free.",
};

pub(super) const BUFFER_SQUEEZE_DURATION_MS: Definition = Definition {
    name: "buffer_squeeze_duration_ms",
    members: &[],
    scope: Scope::Volume,
    kind: Kind::Number,
    unit: "milliseconds",
    default: 10,
    minimum: 0,
    maximum: 60_000,
    zero: None,
    config: Some("buffer_squeeze_duration_ms"),
    since: "0.1.0",
    effect: "At the next sign of memory pressure. A squeeze that is under way keeps its end.",
    doc: "How long pools of free pages keep nothing after a sign of memory pressure. Each further \
          sign starts the time again, and while pressure goes on (drain, last resort) it does not end. \
          Idle queues are woken to give back theirs.\n\n\
          A longer time gives back more of what requests bring meanwhile and costs more \
          allocations. 0 gives back what is free at the moment of the sign and lets pools grow at \
          once again.",
};

pub(super) const ZONE_LIMIT_BYTES: Definition = Definition {
    name: "zone_limit_bytes",
    members: &CLASSES,
    scope: Scope::Daemon,
    kind: Kind::Size,
    unit: "bytes",
    default: 0,
    minimum: 2 << 20,
    maximum: 1 << 40,
    zero: Some("no limit"),
    config: None,
    since: "0.1.0",
    effect: "At once for memory to be taken. Memory above a smaller limit stays until it is free.",
    doc: "The most memory that blocks of one size may take, in use and free together. There is \
          one parameter for each size of blocks: zone_limit_bytes.4K to zone_limit_bytes.1M.\n\n\
          A request that finds its zone at the limit waits until a block is free; requests wait in \
          their order. The smallest limit, 2M, is the unit in which zones take memory. 0 is no \
          limit: memory pressure alone decides.",
};

pub(super) const CACHE_MAX: Definition = Definition {
    name: "cache_max",
    members: &[],
    scope: Scope::Daemon,
    kind: Kind::Size,
    unit: "bytes",
    default: 0,
    minimum: 1 << 20,
    maximum: 1 << 40,
    zero: Some("as the host allows"),
    config: Some("cache_max"),
    since: "0.1.0",
    effect: "At once. What the cache holds above a smaller value goes within a second, the coldest \
             first.",
    doc: "The most memory the cache of all volumes together may hold, wired or lent \
          (`bufspace`).\n\n\
          0 leaves it to the host: the cache grows while memory is free, up to four fifths of \
          what the host, or the daemon's control group, has. Most of it is lent to the kernel, \
          which takes it back by itself when others need it, so that there is seldom a reason to \
          set a limit.",
};

pub(super) const CACHE_MIN: Definition = Definition {
    name: "cache_min",
    members: &[],
    scope: Scope::Daemon,
    kind: Kind::Size,
    unit: "bytes",
    default: 0,
    minimum: 0,
    maximum: 1 << 40,
    zero: None,
    config: Some("cache_min"),
    since: "0.1.0",
    effect: "At the next sign of memory pressure.",
    doc: "What the cache keeps at levels L1 and L2 of memory pressure; it must not be more than \
          cache_max. The last resort, L3, gives back all of it.\n\n\
          The memory is not reserved: the cache only stops shrinking there. What the kernel takes \
          of the lent part by itself it takes whatever the value.",
};

pub(super) const MAX_PERSISTENT_GRANTS: Definition = Definition {
    name: "max_persistent_grants",
    members: &[],
    scope: Scope::Daemon,
    kind: Kind::Number,
    unit: "grants, for each ring of a Xen guest",
    default: 1056,
    minimum: 0,
    maximum: 1 << 20,
    zero: None,
    config: None,
    since: "0.1.0",
    effect: "At once for grants to be mapped. A ring that holds more gives back the excess and 5 % \
             of the value, the least recently used first, within 100 ms.",
    doc: "How many pages of a Xen guest each of its rings keeps mapped, so that requests that use \
          them again need no call of the hypervisor. It applies to guests that agreed on \
          persistent grants (feature_persistent); 1056 is what one ring page of requests with 32 \
          segments each, and their descriptors, can name.\n\n\
          A guest that uses more pages than that is served as well: what finds no place is copied \
          by the hypervisor, and each 100 ms the least recently used 5 % of the value make room. \
          The last sixteenth of the places is for pages that come a second time within a while. 0 \
          keeps nothing mapped.",
};

pub(super) const PERSISTENT_GRANT_UNUSED_SECONDS: Definition = Definition {
    name: "persistent_grant_unused_seconds",
    members: &[],
    scope: Scope::Daemon,
    kind: Kind::Number,
    unit: "seconds",
    default: 60,
    minimum: 0,
    maximum: 86_400,
    zero: None,
    config: None,
    since: "0.1.0",
    effect: "Within 100 ms, also for grants that are mapped already.",
    doc: "How long a page of a Xen guest stays mapped that no request uses. Then it is unmapped, \
          and the guest can have it back. 0 is for ever, but memory pressure of the second level \
          unmaps what has not been used for 5 seconds, whatever the value.",
};

pub(super) const FEATURE_PERSISTENT: Definition = Definition {
    name: "feature_persistent",
    members: &[],
    scope: Scope::Daemon,
    kind: Kind::Word(SWITCH),
    unit: "switch",
    default: 1,
    minimum: 0,
    maximum: 1,
    zero: None,
    config: None,
    since: "0.1.0",
    effect: "For disks that connect from then on. Those connected keep what they agreed on, also \
             across a restart of the daemon.",
    doc: "Whether Xen guests are offered persistent grants: that pages they use for requests stay \
          mapped by the daemon and are used again. Both sides have to want it; a guest without \
          them has its pages copied by the hypervisor, several requests at a time.",
};

pub(super) const POLL_US: Definition = Definition {
    name: "poll_us",
    members: &[],
    scope: Scope::Daemon,
    kind: Kind::Number,
    unit: "microseconds, for each request",
    default: 100,
    minimum: 0,
    maximum: 1000,
    zero: None,
    config: None,
    since: "0.1.0",
    effect: "The next time a ring runs empty.",
    doc: "How long a Xen guest's ring that has run empty is looked at before its worker sleeps: so \
          long for each request it brought before, and 1000 microseconds at most. Requests that come \
          meanwhile need no event and wake nobody, which saves more than the looking takes. A ring is \
          looked at only if its last pause was shorter than that, and only while nothing of its is \
          under way; a look in vain is not repeated before requests come quickly again. 0 never \
          looks: the least processor time in dom0, and the longest way for a lone request.\n\n\
          It is for volumes whose bytes lie in memory: requests of others wait for a device, and \
          their rings are not looked at meanwhile.",
};

pub(super) const MAX_CLIENTS: Definition = Definition {
    name: "max_clients",
    members: &[],
    scope: Scope::Daemon,
    kind: Kind::Number,
    unit: "connections",
    default: 256,
    minimum: 1,
    maximum: 65_536,
    zero: None,
    config: Some("nbd.max_clients"),
    since: "0.1.0",
    effect: "For the next client. Nobody who is connected is sent away.",
    doc: "The number of NBD connections the daemon holds at a time. One more is closed before its \
          handshake, and the log says so. Where several volumes are served, the clients of one are \
          at most four times as many as the places they leave free, so that those of another one \
          find some; one more is refused with the reason.",
};

pub(super) const MAX_REQUEST: Definition = Definition {
    name: "max_request",
    members: &[],
    scope: Scope::Daemon,
    kind: Kind::Size,
    unit: "bytes",
    default: 32 << 20,
    minimum: 4 << 10,
    maximum: 64 << 20,
    zero: None,
    config: Some("nbd.max_request"),
    since: "0.1.0",
    effect: "For connections to come: a client is told the value in its handshake.",
    doc: "The largest payload of one READ or WRITE request. It must fit into connection_memory.",
};

pub(super) const CONNECTION_MEMORY: Definition = Definition {
    name: "connection_memory",
    members: &[],
    scope: Scope::Daemon,
    kind: Kind::Size,
    unit: "bytes",
    default: 64 << 20,
    minimum: 4 << 10,
    maximum: u64::MAX,
    zero: None,
    config: Some("nbd.connection_memory"),
    since: "0.1.0",
    effect: "For connections to come.",
    doc: "The memory the requests of one connection may hold, max_request or more. Requests that \
          would need more wait in the socket.",
};

pub(super) const LOG: Definition = Definition {
    name: "log",
    members: &[],
    scope: Scope::Daemon,
    kind: Kind::Word(LEVELS),
    unit: "level",
    default: 2,
    minimum: 0,
    maximum: 3,
    zero: None,
    config: Some("log"),
    since: "0.1.0",
    effect: "At once.",
    doc: "What goes to the log on stderr, each level with all before it: error (what the daemon \
          could not do), warn (what an operator should look at), info (start, stop, reload, \
          connections), debug (why).",
};

pub(super) const MIN_RATIO: Definition = Definition {
    name: "min_ratio",
    members: &[],
    scope: Scope::Bdi,
    kind: Kind::Percent,
    unit: "per cent of the limit of all dirty data",
    default: 0,
    minimum: 0,
    maximum: 1_000_000,
    zero: None,
    config: Some("bdi.NAME.min_ratio"),
    since: "0.1.0",
    effect: "At once, as far as others have left room; what they hold above is written first.",
    doc: "The part of the limit of all dirty data that is kept for this backing device whatever \
          the others do. At most its max_ratio, and of all devices together at most 100.\n\n\
          Without it a device that has something to write always gets the part its measured rate is \
          worth, so that there is seldom a reason to keep more.",
};

pub(super) const MAX_RATIO: Definition = Definition {
    name: "max_ratio",
    members: &[],
    scope: Scope::Bdi,
    kind: Kind::Percent,
    unit: "per cent of the limit of all dirty data",
    default: 1_000_000,
    minimum: 1,
    maximum: 1_000_000,
    zero: None,
    config: Some("bdi.NAME.max_ratio"),
    since: "0.1.0",
    effect: "At once for writes to come. What the device holds above a smaller value is written \
             as fast as it can; meanwhile its writers are slowed.",
    doc: "The largest part of the limit of all dirty data that this backing device may have, dirty \
          and on its way together. The limit follows memory, and so does this part of it.",
};

pub(super) const MAX_BYTES: Definition = Definition {
    name: "max_bytes",
    members: &[],
    scope: Scope::Bdi,
    kind: Kind::Size,
    unit: "bytes",
    default: 0,
    minimum: 64 << 10,
    maximum: 1 << 40,
    zero: Some("no limit"),
    config: Some("bdi.NAME.max_bytes"),
    since: "0.1.0",
    effect: "At once for writes to come. What the device holds above a smaller value is written \
             as fast as it can; meanwhile its writers are slowed.",
    doc: "The most that may be dirty and on its way for this backing device, in bytes, whatever \
          memory there is.\n\n\
          A device never holds more than it writes in two seconds, so that a limit of one's own is \
          for a device that must be able to stop sooner: one that is unplugged, or lost with its \
          network.",
};

pub(super) const STRICT_LIMIT: Definition = Definition {
    name: "strict_limit",
    members: &[],
    scope: Scope::Bdi,
    kind: Kind::Word(SWITCH),
    unit: "switch",
    default: 0,
    minimum: 0,
    maximum: 1,
    zero: None,
    config: Some("bdi.NAME.strict_limit"),
    since: "0.1.0",
    effect: "At once.",
    doc: "Whether not a single write may take the device above its threshold.\n\n\
          The threshold of a device counts from the first byte here in any case, also while others \
          leave room, for which Linux has to be told. What is left to tell: without it a write that \
          finds at most half of the threshold used is taken whole, even if that is more than \
          the rest; with it the write waits until it fits. That makes a difference where the \
          threshold is smaller than two writes. A write larger than the whole threshold is taken \
          when nothing else is held.",
};
