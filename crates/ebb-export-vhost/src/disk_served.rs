//! The disks that are served: their figures, and their end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use ebb_export::{DrainingDisks, ServedDisk, ServedDisks};
use ebb_volume::{Volume, Writer};

use crate::commands::ConnectionId;
use crate::disk_shared::{DiskShared, VhostStats};

/// The disk of one frontend, from its connection until its end.
#[derive(Clone, Debug)]
pub struct VhostDisk {
    /// The connection's number.
    pub number: u64,
    /// The name of its volume.
    pub volume: Arc<str>,
    /// The path of the socket at which it has connected; `unix` of a connection that was passed to this process.
    pub socket: Arc<str>,
    /// It may only read.
    pub read_only: bool,
    /// The process at the other end.
    pub pid: Option<u32>,
    /// Its user.
    pub uid: Option<u32>,
    /// It is being drained: requests in flight complete, new ones are not consumed.
    pub closing: bool,
    /// Its queues wait until another writer of the volume has ended.
    pub waiting: bool,
    /// The name of the writer for which they wait.
    pub waits_for: Option<Arc<str>>,
    /// Its queues that are served.
    pub queues: u32,
    /// When the frontend connected.
    pub since: Instant,
    /// Counters.
    pub stats: VhostStats,
}

/// The disks that are served.
pub(crate) type ServedFrontends = ServedDisks<ConnectionId, DiskShared>;

impl ServedDisk for DiskShared {
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

impl DiskShared {
    /// The connection, as the log and `ebbd client` name it.
    pub(crate) fn connection(&self) -> ConnectionId {
        ConnectionId(self.number)
    }

    /// The name of the writer that the guest waits for.
    fn other_writer(&self) -> Option<Arc<str>> {
        let own = Writer { name: Arc::from(""), group: None };
        self.volume.writer_conflict(&own).map(|conflict| conflict.by)
    }
}

pub(crate) fn figures(_: &ConnectionId, disk: &DiskShared) -> VhostDisk {
    let waiting = disk.waiting.load(Ordering::Relaxed);
    VhostDisk {
        number: disk.number,
        volume: disk.volume.name().clone(),
        socket: disk.peer.socket.clone(),
        read_only: disk.volume.read_only(),
        pid: disk.peer.pid,
        uid: disk.peer.uid,
        closing: disk.closing.load(Ordering::Relaxed),
        waiting,
        waits_for: waiting.then(|| disk.other_writer()).flatten(),
        queues: disk.queues.load(Ordering::SeqCst),
        since: disk.since,
        stats: disk.counters.read(),
    }
}

/// Disks that are being drained: no new requests are consumed, and those in flight complete. Cheap to clone; dropping it
/// has no effect.
#[derive(Clone)]
pub struct DrainingFrontends(pub(crate) DrainingDisks<ConnectionId, DiskShared>);

impl DrainingFrontends {
    /// Those of one volume.
    #[must_use]
    pub fn of(&self, volume: &str) -> DrainingFrontends {
        DrainingFrontends(self.0.of(volume))
    }

    /// Waits until no request is in flight, on any executor. A store that hangs delays this without limit: race it against
    /// a deadline.
    pub async fn drained(&self) {
        self.0.drained().await;
    }

    /// Notes that their volumes were closed without loss: a successor finds all acknowledged
    /// writes, except where an earlier daemon has lost some.
    pub fn note_stable(&self) {
        let whole = self.0.disks().filter(|(_, disk)| !disk.is_broken());
        whole.for_each(|(_, disk)| match disk.volume.owes_loss_to(&disk.told) {
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

    /// The disks that have requests in flight.
    pub fn remaining(&self) -> Vec<VhostDisk> {
        self.0.running().map(|(key, disk)| figures(key, disk)).collect()
    }
}
