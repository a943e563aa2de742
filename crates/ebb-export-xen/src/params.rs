//! What may be changed while guests are served.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use event_listener::{Event, EventListener};

/// Parameters of the Xen export, shared by all rings and changed at any time (seeds `000` and
/// `003`). `max_buffer_pages` and `buffer_squeeze_duration_ms` are those of the page pools
/// ([`ebb_mem::PoolParameters`]).
#[derive(Debug)]
pub struct XenParameters {
    max_persistent_grants: AtomicU32,
    unused_seconds: AtomicU32,
    feature_persistent: AtomicBool,
    poll_us: AtomicU32,
    /// Counts orders to give idle mappings back.
    shrinks: AtomicU64,
    changed: Event,
}

impl Default for XenParameters {
    /// `max_persistent_grants` 1056, `persistent_grant_unused_seconds` 60, `feature_persistent`
    /// true, `poll_us` 100.
    fn default() -> XenParameters {
        XenParameters {
            max_persistent_grants: AtomicU32::new(1056),
            unused_seconds: AtomicU32::new(60),
            feature_persistent: AtomicBool::new(true),
            poll_us: AtomicU32::new(100),
            shrinks: AtomicU64::new(0),
            changed: Event::new(),
        }
    }
}

impl XenParameters {
    /// Most grants a ring keeps mapped. Past them data is copied by the hypervisor.
    pub fn max_persistent_grants(&self) -> u32 {
        self.max_persistent_grants.load(Ordering::Relaxed)
    }

    /// Sets [`XenParameters::max_persistent_grants`]. A ring that holds more gives back the excess
    /// and 5 % each 100 ms; at 0 all at once.
    pub fn set_max_persistent_grants(&self, grants: u32) {
        self.max_persistent_grants.store(grants, Ordering::Relaxed);
        self.changed.notify(usize::MAX);
    }

    /// How long a mapping may lie idle, seconds; 0 is for ever.
    pub fn persistent_grant_unused_seconds(&self) -> u32 {
        self.unused_seconds.load(Ordering::Relaxed)
    }

    /// Sets [`XenParameters::persistent_grant_unused_seconds`].
    pub fn set_persistent_grant_unused_seconds(&self, seconds: u32) {
        self.unused_seconds.store(seconds, Ordering::Relaxed);
        self.changed.notify(usize::MAX);
    }

    /// Whether persistent grants are offered to frontends that connect.
    pub fn feature_persistent(&self) -> bool {
        self.feature_persistent.load(Ordering::Relaxed)
    }

    /// Sets [`XenParameters::feature_persistent`]; connections of now keep what was agreed on.
    pub fn set_feature_persistent(&self, offered: bool) {
        self.feature_persistent.store(offered, Ordering::Relaxed);
    }

    /// How long a ring that ran empty is looked at before its worker sleeps, microseconds for each
    /// request it brought before; 0 is not at all.
    pub fn poll_us(&self) -> u32 {
        self.poll_us.load(Ordering::Relaxed)
    }

    /// Sets [`XenParameters::poll_us`], for the next time a ring runs empty.
    pub fn set_poll_us(&self, microseconds: u32) {
        self.poll_us.store(microseconds, Ordering::Relaxed);
    }

    /// Has every ring give its idle mappings back: the answer to memory pressure.
    pub fn shrink(&self) {
        self.shrinks.fetch_add(1, Ordering::Relaxed);
        self.changed.notify(usize::MAX);
    }

    pub(crate) fn shrinks(&self) -> u64 {
        self.shrinks.load(Ordering::Relaxed)
    }

    pub(crate) fn unused(&self) -> Option<Duration> {
        match self.persistent_grant_unused_seconds() {
            0 => None,
            seconds => Some(Duration::from_secs(seconds.into())),
        }
    }

    pub(crate) fn listen(&self) -> EventListener {
        self.changed.listen()
    }
}
