//! The devices that are served, for all threads: to read their statistics, and to drain them.
//!
//! A stop, and the withdrawal of a volume, act here and not on xenstore's thread, which may be waiting for
//! xenstored. Devices drain independently: one whose store hangs delays only itself, and a caller can stop
//! waiting at a deadline.
//!
//! Invariants: after a volume was withdrawn, none of its devices is added; after the backend began to stop,
//! none is. So the devices found at that moment are all that have to be waited for.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use ebb_volume::Volume;
use event_listener::{Event, Listener};

use crate::device::DeviceKey;
use crate::device_shared::{DeviceShared, XenStats};
use crate::mailbox::{Mailbox, Message};

/// Statistics of one device.
#[derive(Clone, Debug)]
pub struct DeviceStats {
    /// The guest's number.
    pub guest: u16,
    /// The device's number.
    pub device: u32,
    /// The name of its volume.
    pub volume: Arc<str>,
    /// It is being drained: requests in flight complete, new ones are not consumed.
    pub closing: bool,
    /// Its rings that have not ended.
    pub queues: u32,
    /// Grants stay mapped: guest and backend agreed on it.
    pub persistent: bool,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// When it was connected.
    pub since: Instant,
    /// Counters.
    pub stats: XenStats,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Served {
    inner: Mutex<ServedState>,
    /// Notified when a ring or the xenstore thread has ended.
    ended: Event,
}

#[derive(Default)]
struct ServedState {
    disks: BTreeMap<DeviceKey, Arc<DeviceShared>>,
    /// Volumes that were withdrawn: a device may have found one in the registry before that.
    withdrawn: Vec<Weak<Volume>>,
    stopping: bool,
    /// The xenstore thread has ended.
    xenstore_ended: bool,
}

impl Served {
    fn lock(&self) -> MutexGuard<'_, ServedState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a device whose rings are about to start; false if it must not be served.
    pub(crate) fn add(&self, key: &DeviceKey, disk: &Arc<DeviceShared>) -> bool {
        let mut inner = self.lock();
        if inner.stopping || inner.is_withdrawn(&disk.volume) {
            return false;
        }
        inner.disks.insert(key.clone(), disk.clone());
        true
    }

    pub(crate) fn remove(&self, key: &DeviceKey) {
        self.lock().disks.remove(key);
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.lock().stopping
    }

    pub(crate) fn is_withdrawn(&self, volume: &Arc<Volume>) -> bool {
        self.lock().is_withdrawn(volume)
    }

    /// Drains all devices; none is added from now on.
    pub(crate) fn stop(self: &Arc<Self>) -> DrainingDevices {
        let mut inner = self.lock();
        inner.stopping = true;
        inner.disks.values().for_each(|disk| disk.stopping.store(true, Ordering::Relaxed));
        self.end(&inner, |_| true)
    }

    /// Drains the devices of a volume; none is added for it.
    pub(crate) fn withdraw(self: &Arc<Self>, volume: &Arc<Volume>) -> DrainingDevices {
        let mut inner = self.lock();
        inner.withdrawn.retain(|volume| volume.strong_count() > 0);
        inner.withdrawn.push(Arc::downgrade(volume));
        self.end(&inner, |disk| Arc::ptr_eq(&disk.volume, volume))
    }

    fn end(
        self: &Arc<Self>,
        inner: &ServedState,
        which: impl Fn(&DeviceShared) -> bool,
    ) -> DrainingDevices {
        let disks = inner.disks.iter().filter(|(_, disk)| which(disk));
        let disks: Vec<_> = disks.map(|(key, disk)| (key.clone(), disk.clone())).collect();
        disks.iter().for_each(|(_, disk)| disk.start_drain());
        DrainingDevices { served: self.clone(), disks }
    }

    /// Notes that a ring of `disk` has ended.
    pub(crate) fn ring_ended(&self, disk: &DeviceShared) {
        disk.queues.fetch_sub(1, Ordering::SeqCst);
        self.ended.notify(usize::MAX);
    }

    /// Notes that the xenstore thread has ended.
    pub(crate) fn note_end(&self) {
        self.lock().xenstore_ended = true;
        self.ended.notify(usize::MAX);
    }

    /// Blocks until the xenstore thread has ended, or until `deadline`; true if it has ended.
    pub(crate) fn wait_for_end(&self, deadline: Instant) -> bool {
        self.wait_until(deadline, || self.lock().xenstore_ended)
    }

    fn wait_until(&self, deadline: Instant, done: impl Fn() -> bool) -> bool {
        while !done() {
            let listener = self.ended.listen();
            // Checked again after the listener is registered: an end after that wakes it.
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

impl ServedState {
    fn is_withdrawn(&self, volume: &Arc<Volume>) -> bool {
        self.withdrawn.iter().any(|withdrawn| withdrawn.as_ptr() == Arc::as_ptr(volume))
    }
}

fn figures(key: &DeviceKey, disk: &DeviceShared) -> DeviceStats {
    DeviceStats {
        guest: key.guest,
        device: key.device,
        volume: disk.volume.name().clone(),
        closing: disk.closing.load(Ordering::Relaxed),
        queues: disk.queues.load(Ordering::SeqCst),
        persistent: disk.persistent.load(Ordering::Relaxed),
        read_only: disk.read_only,
        since: disk.since,
        stats: disk.counters.read(),
    }
}

/// Devices that are being drained: no new requests are consumed, and those in flight complete. Cheap to clone;
/// dropping it has no effect.
#[derive(Clone)]
pub struct DrainingDevices {
    served: Arc<Served>,
    disks: Vec<(DeviceKey, Arc<DeviceShared>)>,
}

impl DrainingDevices {
    /// The devices of one volume.
    #[must_use]
    pub fn of(&self, volume: &str) -> DrainingDevices {
        let own = self.disks.iter().filter(|(_, disk)| **disk.volume.name() == *volume);
        DrainingDevices { served: self.served.clone(), disks: own.cloned().collect() }
    }

    /// The devices that have rings with requests in flight.
    pub fn remaining(&self) -> Vec<DeviceStats> {
        self.running().map(|(key, disk)| figures(key, disk)).collect()
    }

    /// Notes that their volumes were closed without loss: a successor finds all acknowledged writes.
    pub fn note_stable(&self) {
        self.disks.iter().for_each(|(_, disk)| disk.unstable.settle());
    }

    /// Notes that their volumes lost acknowledged writes when they were closed: a successor fails the guests' writes,
    /// so that they notice it.
    pub fn note_lost(&self) {
        self.disks.iter().for_each(|(_, disk)| disk.unstable.note_lost());
    }

    /// True once no request is in flight.
    pub fn is_drained(&self) -> bool {
        self.running().next().is_none()
    }

    fn running(&self) -> impl Iterator<Item = &(DeviceKey, Arc<DeviceShared>)> {
        self.disks.iter().filter(|(_, disk)| disk.queues.load(Ordering::SeqCst) > 0)
    }

    /// Waits until no request is in flight, on any executor. A store that hangs delays this without limit: race
    /// it against a deadline.
    pub async fn drained(&self) {
        while !self.is_drained() {
            let listener = self.served.ended.listen();
            // Checked again after the listener is registered: a ring that ends after that wakes it.
            if self.is_drained() {
                return;
            }
            listener.await;
        }
    }

    /// Blocks until no request is in flight, or until `deadline`; true if none is.
    pub fn wait_until(&self, deadline: Instant) -> bool {
        self.served.wait_until(deadline, || self.is_drained())
    }
}

/// Reports the end of a ring when dropped, also if the worker dropped the ring's task.
pub(crate) struct EndOfRing {
    pub(crate) mailbox: Mailbox,
    pub(crate) served: Arc<Served>,
    pub(crate) key: DeviceKey,
    pub(crate) disk: Arc<DeviceShared>,
    pub(crate) generation: u64,
}

impl Drop for EndOfRing {
    fn drop(&mut self) {
        self.served.ring_ended(&self.disk);
        self.mailbox.send(Message::Ended(self.key.clone(), self.generation));
    }
}
