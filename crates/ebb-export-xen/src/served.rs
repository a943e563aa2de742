//! The devices that are served: their figures, and their end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use ebb_export::{DrainingDisks, ServedDisk, ServedDisks};
use ebb_volume::Volume;

use crate::device::DeviceKey;
use crate::device_shared::{DeviceShared, XenStats};
use crate::mailbox::{Message, XenstoreMailbox};

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

/// The devices that are served.
pub(crate) type ServedDevices = ServedDisks<DeviceKey, DeviceShared>;

impl ServedDisk for DeviceShared {
    fn volume(&self) -> &Arc<Volume> {
        &self.volume
    }

    fn running_rings(&self) -> u32 {
        self.queues.load(Ordering::SeqCst)
    }

    fn start_drain(&self, stopping: bool) {
        if stopping {
            self.stopping.store(true, Ordering::Relaxed);
        }
        self.drain();
    }

    fn fails_requests(&self) -> bool {
        self.is_broken()
    }

    fn note_backing(&self) {
        self.unstable.note_backing(&self.volume);
    }
}

pub(crate) fn figures(key: &DeviceKey, disk: &DeviceShared) -> DeviceStats {
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
pub struct DrainingDevices(pub(crate) DrainingDisks<DeviceKey, DeviceShared>);

impl DrainingDevices {
    /// The devices of one volume.
    #[must_use]
    pub fn of(&self, volume: &str) -> DrainingDevices {
        DrainingDevices(self.0.of(volume))
    }

    /// The devices that have rings with requests in flight.
    pub fn remaining(&self) -> Vec<DeviceStats> {
        self.0.running().map(|(key, disk)| figures(key, disk)).collect()
    }

    /// Notes that their volumes were closed without loss: a successor finds all acknowledged writes.
    pub fn note_stable(&self) {
        self.0.disks().for_each(|(_, disk)| match disk.volume.owes_loss_to(&disk.told) {
            true => disk.unstable.note_lost(),
            false => disk.unstable.settle(disk.volume.has_flushed()),
        });
    }

    /// Notes that their volumes lost acknowledged writes when they were closed: a successor fails the guests' writes,
    /// so that they notice it.
    pub fn note_lost(&self) {
        self.0.disks().for_each(|(_, disk)| disk.unstable.note_lost());
    }

    /// Notes that writes which earlier daemons left to the kernel may be lost: a successor fails
    /// the writes of guests that may have sent such writes.
    pub fn note_inherited_lost(&self) {
        self.0.disks().for_each(|(_, disk)| disk.unstable.note_inherited_lost());
    }

    /// True once no request is in flight.
    pub fn is_drained(&self) -> bool {
        self.0.is_drained()
    }

    /// Waits until no request is in flight, on any executor. A store that hangs delays this without limit: race
    /// it against a deadline.
    pub async fn drained(&self) {
        self.0.drained().await;
    }

    /// Blocks until no request is in flight, or until `deadline`; true if none is.
    pub fn wait_until(&self, deadline: Instant) -> bool {
        self.0.wait_until(deadline)
    }
}

/// Reports the end of a ring when dropped, also if the worker dropped the ring's task.
pub(crate) struct EndOfRing {
    pub(crate) mailbox: XenstoreMailbox,
    pub(crate) served: Arc<ServedDevices>,
    pub(crate) key: DeviceKey,
    pub(crate) disk: Arc<DeviceShared>,
    pub(crate) generation: u64,
}

impl Drop for EndOfRing {
    fn drop(&mut self) {
        self.disk.queues.fetch_sub(1, Ordering::SeqCst);
        self.served.note_ring_end();
        self.mailbox.send(Message::Ended(self.key.clone(), self.generation));
    }
}
