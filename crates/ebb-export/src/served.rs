//! The disks of guests that an export serves, for all threads: to read their figures, and to drain them.
//!
//! A stop, and the withdrawal of a volume, act here and not on the export's control thread, which may be waiting for
//! another program. Disks drain independently: one whose store hangs delays only itself, and a caller can stop waiting at
//! a deadline.
//!
//! Invariants: after a volume was withdrawn, none of its disks is added; after the export began to stop, none is. So the
//! disks found at that moment are all that have to be waited for.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use ebb_volume::Volume;
use event_listener::{Event, Listener};

/// A disk of a guest: a volume, and rings that are served on workers.
pub trait ServedDisk: Send + Sync + 'static {
    /// Its volume.
    fn volume(&self) -> &Arc<Volume>;

    /// Its rings that have not ended.
    fn running_rings(&self) -> u32;

    /// Lets requests in flight complete and consumes no new ones. Does not wait. `stopping`: the daemon stops.
    fn start_drain(&self, stopping: bool);

    /// Returns true if its writes and flushes fail until the guest resets the disk.
    fn fails_requests(&self) -> bool;

    /// Records, where a successor finds it, which store the volume is on now, and which one it is
    /// about to be on.
    fn note_backing(&self);
}

/// See the module.
pub struct ServedDisks<K, D> {
    inner: Mutex<ServedState<K, D>>,
    /// Notified when a ring or the control thread has ended.
    ended: Event,
}

struct ServedState<K, D> {
    disks: BTreeMap<K, Arc<D>>,
    refused: BTreeMap<K, RefusedGuest>,
    /// Volumes that were withdrawn: a disk may have found one in the registry before that.
    withdrawn: Vec<Weak<Volume>>,
    stopping: bool,
    /// The control thread has ended.
    control_ended: bool,
}

/// A guest that is not served since its disk is another one than before.
struct RefusedGuest {
    volume: Arc<str>,
    until: Option<Instant>,
}

impl<K, D> Default for ServedDisks<K, D> {
    fn default() -> ServedDisks<K, D> {
        let state = ServedState {
            disks: BTreeMap::new(),
            refused: BTreeMap::new(),
            withdrawn: Vec::new(),
            stopping: false,
            control_ended: false,
        };
        ServedDisks { inner: Mutex::new(state), ended: Event::new() }
    }
}

impl<K: Ord + Clone, D: ServedDisk> ServedDisks<K, D> {
    fn lock(&self) -> MutexGuard<'_, ServedState<K, D>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a disk whose rings are about to start; false if it must not be served.
    #[must_use]
    pub fn add(&self, key: &K, disk: &Arc<D>) -> bool {
        let mut inner = self.lock();
        if inner.stopping || inner.is_withdrawn(disk.volume()) {
            return false;
        }
        inner.disks.insert(key.clone(), disk.clone());
        true
    }

    /// Removes a disk whose rings have ended.
    pub fn remove(&self, key: &K) {
        self.lock().disks.remove(key);
    }

    /// Notes that a guest of this volume was refused since its disk is another one than before. It
    /// counts among [`ServedDisks::failing`] until this time, or until it is forgotten.
    pub fn note_refused(&self, key: &K, volume: &Arc<str>, until: Option<Instant>) {
        let volume = volume.clone();
        self.lock().refused.insert(key.clone(), RefusedGuest { volume, until });
    }

    /// Forgets refused guests, by their key and volume.
    pub fn forget_refused(&self, which: impl Fn(&K, &str) -> bool) {
        self.lock().refused.retain(|key, guest| !which(key, &guest.volume));
    }

    /// The number of guests of each volume whose writes and flushes fail until they are reset, or
    /// that were refused. Volumes without such guests are absent.
    pub fn failing(&self, now: Instant) -> BTreeMap<Arc<str>, u64> {
        let inner = self.lock();
        let lasts = |guest: &&RefusedGuest| guest.until.is_none_or(|until| now < until);
        let refused = inner.refused.values().filter(lasts).map(|guest| &guest.volume);
        let broken = inner.disks.values().filter(|disk| disk.fails_requests());
        let mut failing = BTreeMap::new();
        for volume in refused.chain(broken.map(|disk| disk.volume().name())) {
            *failing.entry(volume.clone()).or_default() += 1;
        }
        failing
    }

    /// Has the disks of a volume record which store it is on, after that has changed.
    pub fn note_backing(&self, volume: &Arc<Volume>) {
        let inner = self.lock();
        let own = inner.disks.values().filter(|disk| Arc::ptr_eq(disk.volume(), volume));
        own.for_each(|disk| disk.note_backing());
    }

    /// Whether the export stops.
    pub fn is_stopping(&self) -> bool {
        self.lock().stopping
    }

    /// Whether a volume was withdrawn.
    pub fn is_withdrawn(&self, volume: &Arc<Volume>) -> bool {
        self.lock().is_withdrawn(volume)
    }

    /// Drains all disks; none is added from now on.
    pub fn stop(self: &Arc<Self>) -> DrainingDisks<K, D> {
        let mut inner = self.lock();
        inner.stopping = true;
        self.drain(&inner, true, |_| true)
    }

    /// Drains the disks of a volume; none is added for it.
    pub fn withdraw(self: &Arc<Self>, volume: &Arc<Volume>) -> DrainingDisks<K, D> {
        let mut inner = self.lock();
        inner.withdrawn.retain(|volume| volume.strong_count() > 0);
        inner.withdrawn.push(Arc::downgrade(volume));
        self.drain(&inner, false, |disk| Arc::ptr_eq(disk.volume(), volume))
    }

    fn drain(
        self: &Arc<Self>,
        inner: &ServedState<K, D>,
        stopping: bool,
        which: impl Fn(&D) -> bool,
    ) -> DrainingDisks<K, D> {
        let disks = inner.disks.iter().filter(|(_, disk)| which(disk));
        let disks: Vec<_> = disks.map(|(key, disk)| (key.clone(), disk.clone())).collect();
        disks.iter().for_each(|(_, disk)| disk.start_drain(stopping));
        DrainingDisks { served: self.clone(), disks }
    }

    /// Notes that a ring has ended: its disk counts it as ended already.
    pub fn note_ring_end(&self) {
        self.ended.notify(usize::MAX);
    }

    /// Notes that the control thread has ended.
    pub fn note_control_end(&self) {
        self.lock().control_ended = true;
        self.ended.notify(usize::MAX);
    }

    /// Blocks until the control thread has ended, or until `deadline`; true if it has ended.
    pub fn wait_for_control(&self, deadline: Instant) -> bool {
        self.wait_until(deadline, || self.lock().control_ended)
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

    /// What `read` says of each disk.
    pub fn figures<F>(&self, read: impl Fn(&K, &D) -> F) -> Vec<F> {
        self.lock().disks.iter().map(|(key, disk)| read(key, disk)).collect()
    }
}

impl<K, D> ServedState<K, D> {
    fn is_withdrawn(&self, volume: &Arc<Volume>) -> bool {
        self.withdrawn.iter().any(|withdrawn| withdrawn.as_ptr() == Arc::as_ptr(volume))
    }
}

/// Disks that are being drained: no new requests are consumed, and those in flight complete. Cheap to clone;
/// dropping it has no effect.
pub struct DrainingDisks<K, D> {
    served: Arc<ServedDisks<K, D>>,
    disks: Vec<(K, Arc<D>)>,
}

impl<K: Clone, D> Clone for DrainingDisks<K, D> {
    fn clone(&self) -> DrainingDisks<K, D> {
        DrainingDisks { served: self.served.clone(), disks: self.disks.clone() }
    }
}

impl<K: Ord + Clone, D: ServedDisk> DrainingDisks<K, D> {
    /// The disks of one volume.
    #[must_use]
    pub fn of(&self, volume: &str) -> DrainingDisks<K, D> {
        let own = self.disks.iter().filter(|(_, disk)| **disk.volume().name() == *volume);
        DrainingDisks { served: self.served.clone(), disks: own.cloned().collect() }
    }

    /// All of them.
    pub fn disks(&self) -> impl Iterator<Item = (&K, &Arc<D>)> {
        self.disks.iter().map(|(key, disk)| (key, disk))
    }

    /// Those that have rings with requests in flight.
    pub fn running(&self) -> impl Iterator<Item = (&K, &Arc<D>)> {
        self.disks().filter(|(_, disk)| disk.running_rings() > 0)
    }

    /// True once no request is in flight.
    pub fn is_drained(&self) -> bool {
        self.running().next().is_none()
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
