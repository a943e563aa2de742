//! The engine's interface to the exports for guests, Xen and vhost-user: guests' requests are completed before a volume
//! closes, as those of NBD clients are.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ebb_api::stat::FailingGuests;
use ebb_export_vhost::DrainingFrontends;
use ebb_export_xen::{Backend, DrainingDevices, Figures};
use ebb_volume::Volume;

use crate::vhost::VhostExport;

/// How long the threads for xenstore and for frontends may take to end after the last request: xenstored may not respond.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// The exports for guests, as far as there are any.
#[derive(Default)]
pub(crate) struct Guests {
    backend: Mutex<Option<Backend>>,
    ending: Mutex<Option<DrainingDevices>>,
    pub(crate) vhost: VhostExport,
    /// What a test does after each [`Guests::note_backing`]: a kill may follow.
    #[cfg(test)]
    pub(crate) after_note: Mutex<Option<Box<dyn FnMut() + Send>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The disks of guests on a volume that was withdrawn.
pub(crate) struct WithdrawnDisks {
    xen: Option<DrainingDevices>,
    vhost: Option<DrainingFrontends>,
}

impl WithdrawnDisks {
    /// Waits until their requests in flight have completed.
    pub(crate) async fn drained(&self) {
        if let Some(disks) = &self.xen {
            disks.drained().await;
        }
        if let Some(disks) = &self.vhost {
            disks.drained().await;
        }
    }

    /// The volume was closed without loss: all acknowledged data is stable.
    pub(crate) fn note_stable(&self) {
        self.xen.iter().for_each(DrainingDevices::note_stable);
        self.vhost.iter().for_each(DrainingFrontends::note_stable);
    }

    /// Acknowledged data is lost: the flushes of the volume that takes its place would succeed.
    pub(crate) fn note_lost(&self) {
        self.xen.iter().for_each(DrainingDevices::note_lost);
        self.vhost.iter().for_each(DrainingFrontends::note_lost);
    }

    /// Notes that only unflushed writes of earlier daemons may be lost.
    pub(crate) fn note_inherited_lost(&self) {
        self.xen.iter().for_each(DrainingDevices::note_inherited_lost);
        self.vhost.iter().for_each(DrainingFrontends::note_inherited_lost);
    }
}

impl Guests {
    /// Serves Xen guests with this backend.
    pub(crate) fn set(&self, backend: Backend) {
        *lock(&self.backend) = Some(backend);
        // A volume may have been opened before.
        self.look_again();
    }

    /// Notifies the Xen backend that a volume was opened that guests may wait for. Frontends of vhost-user connect again.
    pub(crate) fn look_again(&self) {
        if let Some(backend) = &*lock(&self.backend) {
            backend.recheck_devices();
        }
    }

    /// Ends the disks of guests that may not open their volumes any more, when their requests in flight have completed. Does
    /// not wait.
    pub(crate) fn end_disallowed(&self) {
        if let Some(backend) = &*lock(&self.backend) {
            backend.end_disallowed();
        }
        self.vhost.end_disallowed();
    }

    /// Records the store of a volume whose layers have changed, or are about to: the guests go on
    /// after a kill.
    pub(crate) fn note_backing(&self, volume: &Arc<Volume>) {
        if let Some(backend) = &*lock(&self.backend) {
            backend.note_backing(volume);
        }
        self.vhost.note_backing(volume);
        #[cfg(test)]
        lock(&self.after_note).iter_mut().for_each(|after| after());
    }

    /// The number of disks of guests on a volume.
    pub(crate) fn disks_of(&self, volume: &str) -> u64 {
        let figures = lock(&self.backend).as_ref().map(Backend::figures);
        let disks = figures.iter().flat_map(Figures::read);
        let xen: u64 = disks.map(|disk| u64::from(*disk.volume == *volume)).sum();
        xen + self.vhost.disks_of(volume)
    }

    /// The number of disks of guests on each volume that has any.
    pub(crate) fn disks(&self) -> BTreeMap<String, u64> {
        let mut disks = BTreeMap::new();
        let mut count = |volume: &str| *disks.entry(volume.to_owned()).or_default() += 1;
        let xen = lock(&self.backend).as_ref().map(Backend::figures);
        xen.iter().flat_map(Figures::read).for_each(|disk| count(&disk.volume));
        self.vhost.disks().iter().for_each(|disk| count(&disk.volume));
        disks
    }

    /// The guests of each volume whose requests fail until they are reset.
    pub(crate) fn failing(&self) -> BTreeMap<String, FailingGuests> {
        let mut failing = BTreeMap::<String, FailingGuests>::new();
        let xen = lock(&self.backend).as_ref().map(Backend::figures);
        for (volume, count) in xen.iter().flat_map(Figures::failing) {
            failing.entry(volume.to_string()).or_default().xen = count;
        }
        for (volume, count) in self.vhost.failing() {
            failing.entry(volume.to_string()).or_default().vhost = count;
        }
        failing
    }

    /// Stops serving a volume that was removed from the registry. Does not wait.
    pub(crate) fn withdraw(&self, volume: &Arc<Volume>) -> WithdrawnDisks {
        WithdrawnDisks {
            xen: lock(&self.backend).as_ref().map(|backend| backend.withdraw(volume)),
            vhost: self.vhost.withdraw(volume),
        }
    }

    /// Begins to stop: requests in flight complete, no new ones begin; guests wait for the next daemon.
    pub(crate) fn begin_stop(&self) {
        *lock(&self.ending) = lock(&self.backend).as_ref().map(Backend::begin_stop);
        self.vhost.begin_stop();
    }

    /// After [`Guests::begin_stop`]: waits until the guests' requests to this volume have completed.
    pub(crate) async fn wait_for_volume(&self, volume: &str) {
        let xen = lock(&self.ending).as_ref().map(|ending| ending.of(volume));
        if let Some(disks) = xen {
            disks.drained().await;
        }
        if let Some(disks) = self.vhost.draining(volume) {
            disks.drained().await;
        }
    }

    /// After [`Guests::begin_stop`]: all acknowledged data of this volume is stable.
    pub(crate) fn note_stable(&self, volume: &str) {
        if let Some(ending) = &*lock(&self.ending) {
            ending.of(volume).note_stable();
        }
        if let Some(disks) = self.vhost.draining(volume) {
            disks.note_stable();
        }
    }

    /// After [`Guests::begin_stop`]: acknowledged data of this volume is lost.
    pub(crate) fn note_lost(&self, volume: &str) {
        if let Some(ending) = &*lock(&self.ending) {
            ending.of(volume).note_lost();
        }
        if let Some(disks) = self.vhost.draining(volume) {
            disks.note_lost();
        }
    }

    /// After [`Guests::begin_stop`]: unflushed writes of earlier daemons may be lost.
    pub(crate) fn note_inherited_lost(&self, volume: &str) {
        if let Some(ending) = &*lock(&self.ending) {
            ending.of(volume).note_inherited_lost();
        }
        if let Some(disks) = self.vhost.draining(volume) {
            disks.note_inherited_lost();
        }
    }

    /// Ends the exports, at the end of a stop. Blocks for [`END_TIMEOUT`] at most.
    pub(crate) fn end(&self) {
        let deadline = ebb_mem::clock::now() + END_TIMEOUT;
        let backend = lock(&self.backend).take();
        if let Some(backend) = backend {
            for disk in backend.stop(deadline) {
                let (domain, device, volume) = (disk.guest, disk.device, disk.volume);
                tracing::warn!(
                    domain,
                    device,
                    volume = &*volume,
                    "requests of this disk are in flight: the next daemon completes them"
                );
            }
        }
        self.vhost.end(deadline);
    }
}
