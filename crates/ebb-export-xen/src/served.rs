//! The devices that are served, as every thread sees them: for figures, and to end them.
//!
//! A stop, and a volume that is withdrawn, act here and not on xenstore's thread, which may be waiting for
//! xenstored. Each device ends by itself: one whose store answers nothing keeps only itself from ending, and who
//! waits may give up at a deadline.
//!
//! Invariants: once a volume was withdrawn none of its devices is added; once the backend leaves none is at all. So the
//! devices found at that moment are all that must be waited for.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use ebb_volume::Volume;
use event_listener::{Event, Listener};

use crate::backend::DeviceStats;
use crate::device::Key;
use crate::device_shared::DeviceShared;

/// See the module.
#[derive(Default)]
pub(crate) struct Served {
    inner: Mutex<Inner>,
    /// A ring has ended, or the xenstore side has.
    ended: Event,
}

#[derive(Default)]
struct Inner {
    disks: BTreeMap<Key, Arc<DeviceShared>>,
    /// Volumes that were withdrawn: a lookup may still find them.
    withdrawn: Vec<Weak<Volume>>,
    leaving: bool,
    /// There are no more turns of the xenstore side.
    over: bool,
}

impl Served {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a device whose rings are about to start; false if it must not be served any more.
    pub(crate) fn add(&self, key: &Key, disk: &Arc<DeviceShared>) -> bool {
        let mut inner = self.lock();
        if inner.leaving || inner.is_withdrawn(&disk.volume) {
            return false;
        }
        inner.disks.insert(key.clone(), disk.clone());
        true
    }

    pub(crate) fn remove(&self, key: &Key) {
        self.lock().disks.remove(key);
    }

    pub(crate) fn is_leaving(&self) -> bool {
        self.lock().leaving
    }

    pub(crate) fn is_withdrawn(&self, volume: &Arc<Volume>) -> bool {
        self.lock().is_withdrawn(volume)
    }

    /// Ends all devices, and lets none be added.
    pub(crate) fn leave(self: &Arc<Self>) -> Ending {
        let mut inner = self.lock();
        inner.leaving = true;
        self.end(&inner, |_| true)
    }

    /// Ends the devices of a volume, and lets none of `found`, the volume of that name, be added.
    pub(crate) fn withdraw(self: &Arc<Self>, name: &str, found: Option<&Arc<Volume>>) -> Ending {
        let mut inner = self.lock();
        inner.withdrawn.retain(|volume| volume.strong_count() > 0);
        inner.withdrawn.extend(found.map(Arc::downgrade));
        self.end(&inner, |disk| **disk.volume.name() == *name)
    }

    fn end(self: &Arc<Self>, inner: &Inner, which: impl Fn(&DeviceShared) -> bool) -> Ending {
        let disks = inner.disks.iter().filter(|(_, disk)| which(disk));
        let disks: Vec<_> = disks.map(|(key, disk)| (key.clone(), disk.clone())).collect();
        disks.iter().for_each(|(_, disk)| disk.wind_up());
        Ending { served: self.clone(), disks }
    }

    /// A ring of `disk` has ended.
    pub(crate) fn ring_ended(&self, disk: &DeviceShared) {
        disk.queues.fetch_sub(1, Ordering::SeqCst);
        self.ended.notify(usize::MAX);
    }

    /// The xenstore side has ended.
    pub(crate) fn note_end(&self) {
        self.lock().over = true;
        self.ended.notify(usize::MAX);
    }

    /// Blocks until the xenstore side has ended or it is `deadline`; true if it has.
    pub(crate) fn wait_for_end(&self, deadline: Instant) -> bool {
        self.wait_until(deadline, || self.lock().over)
    }

    fn wait_until(&self, deadline: Instant, done: impl Fn() -> bool) -> bool {
        while !done() {
            let listener = self.ended.listen();
            // Looked at again after the listener is in place: what ends from now on wakes it.
            if !done() && listener.wait_deadline(deadline).is_none() {
                return done();
            }
        }
        true
    }

    pub(crate) fn figures(&self) -> Vec<DeviceStats> {
        self.lock().disks.iter().map(|(key, disk)| figures(key, disk)).collect()
    }
}

impl Inner {
    fn is_withdrawn(&self, volume: &Arc<Volume>) -> bool {
        self.withdrawn.iter().any(|gone| gone.as_ptr() == Arc::as_ptr(volume))
    }
}

fn figures(key: &Key, disk: &DeviceShared) -> DeviceStats {
    DeviceStats {
        guest: key.guest,
        device: key.device,
        volume: disk.volume.name().clone(),
        closing: disk.closing.load(Ordering::Relaxed),
        queues: disk.queues.load(Ordering::SeqCst),
        persistent: disk.persistent.load(Ordering::Relaxed),
        stats: disk.counters.read(),
    }
}

/// Devices that are being wound up: no request of theirs begins any more, and those under way end. Cheap to clone; dropping
/// it changes nothing.
#[derive(Clone)]
pub struct Ending {
    served: Arc<Served>,
    disks: Vec<(Key, Arc<DeviceShared>)>,
}

impl Ending {
    /// Those of one volume.
    #[must_use]
    pub fn of(&self, volume: &str) -> Ending {
        let own = self.disks.iter().filter(|(_, disk)| **disk.volume.name() == *volume);
        Ending { served: self.served.clone(), disks: own.cloned().collect() }
    }

    /// The devices that have requests under way.
    pub fn left(&self) -> Vec<DeviceStats> {
        self.running().map(|(key, disk)| figures(key, disk)).collect()
    }

    /// Their volumes are closed in good order: a successor finds all that was acknowledged.
    pub fn note_stable(&self) {
        self.disks.iter().for_each(|(_, disk)| disk.unstable.settle());
    }

    /// True once no request is under way.
    pub fn is_over(&self) -> bool {
        self.running().next().is_none()
    }

    fn running(&self) -> impl Iterator<Item = &(Key, Arc<DeviceShared>)> {
        self.disks.iter().filter(|(_, disk)| disk.queues.load(Ordering::SeqCst) > 0)
    }

    /// Waits until no request is under way, on any executor. This takes as long as the stores take: have it race with
    /// a deadline.
    pub async fn over(&self) {
        while !self.is_over() {
            let listener = self.served.ended.listen();
            // Looked at again after the listener is in place: a ring that ends from now on wakes it.
            if self.is_over() {
                return;
            }
            listener.await;
        }
    }

    /// Blocks until no request is under way or it is `deadline`; true if none is.
    pub fn wait_until(&self, deadline: Instant) -> bool {
        self.served.wait_until(deadline, || self.is_over())
    }
}
