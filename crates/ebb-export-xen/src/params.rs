//! Parameters that can be changed while guests are served.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use ebb_param::Parameter;
use event_listener::{Event, EventListener};

/// Parameters of the Xen export, shared by all rings and changeable at any time; they are those of Linux's
/// xen-blkback. `max_buffer_pages` and `buffer_squeeze_duration_ms` are parameters of the page pools
/// ([`ebb_mem::PoolParameters`]).
#[derive(Debug)]
pub struct XenParameters {
    /// Most grants that a ring keeps mapped. Beyond them the hypervisor copies data. A ring with more unmaps the
    /// excess and 5 % every 100 ms; at 0 everything at once.
    pub max_persistent_grants: Parameter<u32>,
    /// How long a mapping may be idle, seconds; 0 is without limit.
    pub persistent_grant_unused_seconds: Parameter<u32>,
    /// Whether persistent grants are offered to frontends that connect.
    pub feature_persistent: Parameter<bool>,
    /// Most grants that all rings together keep mapped, the number of rings, and the number of mapped grants.
    budget: AtomicU32,
    rings: AtomicU32,
    mapped: AtomicU32,
    /// Counts calls of [`XenParameters::shrink`].
    shrinks: AtomicU64,
    changed: Event,
}

impl Default for XenParameters {
    /// `max_persistent_grants` 1056, `persistent_grant_unused_seconds` 60, `feature_persistent`
    /// true.
    fn default() -> XenParameters {
        XenParameters {
            max_persistent_grants: Parameter::new(1056),
            persistent_grant_unused_seconds: Parameter::new(60),
            feature_persistent: Parameter::new(true),
            budget: AtomicU32::new(budget_of_process()),
            rings: AtomicU32::new(0),
            mapped: AtomicU32::new(0),
            shrinks: AtomicU64::new(0),
            changed: Event::new(),
        }
    }
}

impl XenParameters {
    /// Wakes the rings after each change of a parameter that limits what is mapped.
    pub(crate) fn watch(self: &Arc<Self>) {
        for parameter in [&self.max_persistent_grants, &self.persistent_grant_unused_seconds] {
            parameter.watch_for(self, |parameters, _| parameters.wake_rings());
        }
    }

    fn wake_rings(&self) {
        self.changed.notify(usize::MAX);
    }

    /// Most grants that all rings together keep mapped: each is a mapping of its own, of which the kernel allows
    /// a process `vm.max_map_count`. The default is half of that.
    pub fn map_budget(&self) -> u32 {
        self.budget.load(Ordering::Relaxed)
    }

    /// Sets [`XenParameters::map_budget`]. Rings with more than their share unmap the excess.
    #[cfg(feature = "shm")]
    pub fn set_map_budget(&self, grants: u32) {
        self.budget.store(grants, Ordering::Relaxed);
        self.wake_rings();
    }

    /// Most grants one ring keeps mapped: at most its equal share of the budget.
    pub(crate) fn ring_cap(&self) -> u32 {
        let share = self.map_budget() / self.rings.load(Ordering::Relaxed).max(1);
        self.max_persistent_grants.get().min(share)
    }

    /// Counts one more ring, until the guard is dropped; the shares of the other rings become smaller.
    pub(crate) fn add_ring(self: &Arc<Self>) -> RingShare {
        self.rings.fetch_add(1, Ordering::Relaxed);
        self.wake_rings();
        RingShare(self.clone())
    }

    /// Acquires one mapping from the budget; false if it is used up.
    pub(crate) fn acquire_mapping(&self) -> bool {
        let budget = self.map_budget();
        let more = |mapped: u32| (mapped < budget).then_some(mapped.saturating_add(1));
        self.mapped.try_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    pub(crate) fn release_mappings(&self, count: u32) {
        self.mapped.fetch_sub(count, Ordering::Relaxed);
    }

    /// Makes every ring unmap its idle mappings, because of memory pressure.
    pub fn shrink(&self) {
        self.shrinks.fetch_add(1, Ordering::Relaxed);
        self.wake_rings();
    }

    pub(crate) fn shrinks(&self) -> u64 {
        self.shrinks.load(Ordering::Relaxed)
    }

    pub(crate) fn unused(&self) -> Option<Duration> {
        match self.persistent_grant_unused_seconds.get() {
            0 => None,
            seconds => Some(Duration::from_secs(seconds.into())),
        }
    }

    pub(crate) fn listen(&self) -> EventListener {
        self.changed.listen()
    }
}

/// A ring's share of the budget; see [`XenParameters::map_budget`].
pub(crate) struct RingShare(Arc<XenParameters>);

impl Drop for RingShare {
    fn drop(&mut self) {
        self.0.rings.fetch_sub(1, Ordering::Relaxed);
        self.0.wake_rings();
    }
}

/// Half of the mappings that the kernel allows a process: the rest of the process needs mappings too, and
/// without any left every `mmap` fails.
fn budget_of_process() -> u32 {
    /// The kernel's default.
    const USUAL: u32 = 65_530;
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
    text.trim().parse::<u32>().unwrap_or(USUAL) / 2
}
