//! What the tidy test knows of this tree: which crates may depend on which, where `unsafe` is, and
//! the exceptions with their reasons.

/// Code that requests of guests and clients pass through.
pub(crate) const DATA_PATH: &[&str] = &[
    "crates/ebb-param/",
    "crates/ebb-mem/",
    "crates/ebb-io/",
    "crates/ebb-block/",
    "crates/ebb-store/",
    "crates/ebb-volume/",
    "crates/ebb-export/",
    "crates/ebb-guest-ring/",
    "crates/ebb-export-nbd/",
    "crates/ebb-nbd-proto/",
    "crates/ebb-vhost-proto/",
    "crates/ebb-tls/",
    "crates/ebb-cache/",
    "crates/ebb-export-xen/",
    "crates/ebb-vhost-proto/",
    "crates/ebb-export-vhost/",
];

/// Permitted dependencies; tests of a crate may also use all crates above it here. A crate that is
/// not listed is not part of the architecture yet.
pub(crate) const MAY_KNOW: &[(&str, &[&str])] = &[
    ("ebb-param", &[]),
    ("ebb-mem", &["ebb-param"]),
    ("ebb-api", &[]),
    ("ebb-writeback", &[]),
    ("ebb-io", &["ebb-param", "ebb-mem"]),
    ("ebb-nbd-proto", &[]),
    ("ebb-vhost-proto", &[]),
    ("ebb-tls", &["ebb-io"]),
    ("ebb-block", &["ebb-io"]),
    ("ebb-store", &["ebb-io", "ebb-block", "ebb-nbd-proto", "ebb-tls"]),
    ("ebb-config", &["ebb-param"]),
    ("ebb-cache", &["ebb-mem", "ebb-io", "ebb-block", "ebb-store"]),
    ("ebb-volume", &["ebb-mem", "ebb-io", "ebb-block", "ebb-store", "ebb-cache"]),
    ("ebb-export", &["ebb-io", "ebb-volume"]),
    ("ebb-guest-ring", &["ebb-io"]),
    (
        "ebb-export-nbd",
        &["ebb-param", "ebb-mem", "ebb-io", "ebb-nbd-proto", "ebb-tls", "ebb-volume", "ebb-export"],
    ),
    (
        "ebb-export-xen",
        &["ebb-param", "ebb-mem", "ebb-io", "ebb-volume", "ebb-export", "ebb-guest-ring"],
    ),
    (
        "ebb-export-vhost",
        &["ebb-mem", "ebb-io", "ebb-volume", "ebb-export", "ebb-guest-ring", "ebb-vhost-proto"],
    ),
    (
        "ebb-control",
        &[
            "ebb-mem",
            "ebb-io",
            "ebb-store",
            "ebb-tls",
            "ebb-config",
            "ebb-api",
            "ebb-cache",
            "ebb-volume",
            "ebb-export-nbd",
            "ebb-export-xen",
            "ebb-export-vhost",
        ],
    ),
    (
        "ebbd",
        &[
            "ebb-param",
            "ebb-mem",
            "ebb-io",
            "ebb-block",
            "ebb-store",
            "ebb-config",
            "ebb-api",
            "ebb-cache",
            "ebb-writeback",
            "ebb-volume",
            "ebb-export-nbd",
            "ebb-export-xen",
            "ebb-export-vhost",
            "ebb-control",
        ],
    ),
];

/// Modules that may hold `unsafe` outside tests: each wraps system calls, or memory that the kernel
/// or another thread uses.
pub(crate) const UNSAFE: &[&str] = &[
    "crates/ebb-export-vhost/src/foreign.rs",
    "crates/ebb-export-vhost/src/stuck_writes.rs",
    "crates/ebb-export-xen/src/copier.rs",
    "crates/ebb-export-xen/src/inline_io.rs",
    "crates/ebb-export-xen/src/journal.rs",
    "crates/ebb-export-xen/src/platform.rs",
    "crates/ebb-export-xen/src/platform/evtchn.rs",
    "crates/ebb-export-xen/src/platform/gntdev.rs",
    "crates/ebb-export-xen/src/shm.rs",
    "crates/ebb-guest-ring/src/fault_guard.rs",
    "crates/ebb-guest-ring/src/memory.rs",
    "crates/ebb-guest-ring/src/memory/copy.rs",
    "crates/ebb-guest-ring/src/shared_memory.rs",
    "crates/ebb-io/src/buf.rs",
    "crates/ebb-io/src/foreign.rs",
    "crates/ebb-io/src/gather.rs",
    "crates/ebb-io/src/op.rs",
    "crates/ebb-io/src/remote.rs",
    "crates/ebb-io/src/ring.rs",
    "crates/ebb-io/src/worker.rs",
    "crates/ebb-mem/src/block.rs",
    "crates/ebb-mem/src/sentinel.rs",
    "crates/ebb-mem/src/sys.rs",
    "crates/ebb-mem/src/wait.rs",
    "crates/ebb-mem/src/worker.rs",
    "crates/ebb-store/src/file.rs",
    "crates/ebbd/src/listener.rs",
    "testbed/counting-allocator/src/lib.rs",
    "testbed/src/bench/cache/reclaim.rs",
    "testbed/src/bin/guest-load.rs",
];

/// Names that several types of the product may share, and why.
pub(crate) const SHARED_NAMES: &[(&str, &str)] =
    &[("Mutex", "that of `std::sync`, which models replace; each crate has its own")];

/// An exception: the rule, the file, how many places at most, and why.
pub(crate) type Allowed = (&'static str, &'static str, usize, &'static str);

pub(crate) const ALLOWED: &[Allowed] = &[
    ("flush", "crates/ebb-store/src/nbd/connect.rs", 1, "`Write` for a negotiation's bytes"),
    ("flush", "crates/ebb-tls/src/session.rs", 1, "`Write` for memory OpenSSL fills"),
    ("panic", "crates/ebb-export-nbd/src/request_task.rs", 1, "the reader adds the payload itself"),
    ("panic", "crates/ebb-io/src/offload.rs", 1, "a future of ours polled after its end"),
    ("panic", "crates/ebb-io/src/op.rs", 4, "states of our own slots, not of a request"),
    ("panic", "crates/ebb-io/src/ring.rs", 2, "states of our own slots, not of a request"),
    ("panic", "crates/ebb-io/src/buf.rs", 2, "lengths and ceiling are checked; `get` is for tests"),
    ("panic", "crates/ebb-mem/src/advise.rs", 2, "a lock's guard is there until it is dropped"),
    ("panic", "crates/ebb-mem/src/arena.rs", 1, "a block is freed once: its type sees to it"),
    ("panic", "crates/ebb-mem/src/worker.rs", 1, "a block of another memory: a mistake of ours"),
    ("cast", "crates/ebb-control/src/history/ring.rs", 1, "clamped to 16 bits in the line itself"),
    ("cast", "crates/ebb-control/src/history/heat.rs", 1, "at most 15, by the line itself"),
    (
        "sleep",
        "crates/ebbd/src/client/volume.rs",
        1,
        "asks for progress; the client does nothing else",
    ),
    ("sleep", "crates/ebb-export-xen/examples/outage-shm.rs", 1, "how long the bench runs"),
    ("sleep", "crates/ebb-mem/examples/mem-bench.rs", 1, "paces a reclaimer beside the bench"),
    ("sleep", "crates/ebb-mem/tests/rewire.rs", 1, "paces a reclaimer beside the test"),
    (
        "sleep",
        "crates/ebb-tls/src/handshake_threads.rs",
        1,
        "a handshake thread rests; no worker waits for it",
    ),
    ("sleep", "crates/ebbd/src/client.rs", 1, "a table each second; the client does nothing else"),
    (
        "sleep",
        "crates/ebbd/src/client/events.rs",
        1,
        "asks twice a second; the client does nothing else",
    ),
    (
        "sleep",
        "crates/ebbd/src/client/persistent.rs",
        1,
        "the pause before a daemon is asked again; the client does nothing else",
    ),
    (
        "sleep",
        "crates/ebbd/src/client/top.rs",
        1,
        "a sample each second, on a thread of the client",
    ),
    ("sleep", "crates/ebb-io/tests/threads.rs", 1, "stands for a call that blocks a helper"),
    (
        "sleep",
        "crates/ebb-tls/src/handshake_threads.rs",
        1,
        "a thread of its own rests between handshakes",
    ),
    (
        "ignore",
        "crates/ebb-export-vhost/tests/sigkill.rs",
        1,
        "another test runs it, in a process that it kills",
    ),
    ("ignore", "crates/ebb-store/tests/short.rs", 1, "another test runs it, on a small disk"),
    ("print", "testbed/src/harness/server.rs", 2, "the harness shows it for failed tests only"),
    ("cast", "crates/ebb-nbd-proto/src/lib.rs", 1, "the number of an enum's variant"),
    ("cast", "crates/ebb-mem/src/bits.rs", 3, "a number of bits: at most 64"),
    ("cast", "crates/ebb-mem/src/class.rs", 1, "a number of bits: at most 64"),
    ("cast", "crates/ebb-mem/src/memory.rs", 2, "a page's number, of 32 bits"),
    ("cast", "crates/ebb-mem/src/pool.rs", 1, "a parameter of 32 bits"),
    ("cast", "crates/ebb-mem/src/worker.rs", 3, "a page's number, of 32 bits"),
    ("cast", "crates/ebb-mem/src/zone.rs", 2, "a bucket's size, of 32 bits"),
    ("cast", "crates/ebb-io/src/ring.rs", 5, "a slot's index of 32 bits"),
    ("cast", "crates/ebb-io/src/iteration.rs", 2, "numbers of completions: at most 512"),
];
