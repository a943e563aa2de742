//! Xen guests as the engine sees them: if any are served, they are seen off as NBD clients are.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ebb_export_xen::{Backend, DrainingDevices};

/// How long the thread for xenstore may take to end once nothing is under way: xenstored may not answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// The backend of the guests, if there is one.
#[derive(Default)]
pub(crate) struct Guests {
    backend: Mutex<Option<Backend>>,
    ending: Mutex<Option<DrainingDevices>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Guests {
    /// Serves guests through this backend.
    pub(crate) fn set(&self, backend: Backend) {
        *lock(&self.backend) = Some(backend);
        // A volume may have come before.
        self.look_again();
    }

    /// A volume is there that was awaited.
    pub(crate) fn look_again(&self) {
        if let Some(backend) = &*lock(&self.backend) {
            backend.recheck_devices();
        }
    }

    /// Serves a volume no more: the requests that are under way, to be waited for. To be called while the volume is
    /// still offered.
    pub(crate) fn withdraw(&self, volume: &str) -> impl Future<Output = ()> + use<> {
        let ending = lock(&self.backend).as_ref().map(|backend| backend.withdraw(volume));
        async move {
            if let Some(ending) = ending {
                ending.drained().await;
            }
        }
    }

    /// Begins to stop: requests under way are answered, none begins; guests stay connected and wait for a
    /// successor.
    pub(crate) fn begin_stop(&self) {
        *lock(&self.ending) = lock(&self.backend).as_ref().map(Backend::begin_stop);
    }

    /// After [`Guests::begin_stop`]: waits until the guests' requests to this volume are over.
    pub(crate) async fn seen_off(&self, volume: &str) {
        let ending = lock(&self.ending).as_ref().map(|ending| ending.of(volume));
        if let Some(ending) = ending {
            ending.drained().await;
        }
    }

    /// After [`Guests::begin_stop`]: nothing of this volume is missing on its store.
    pub(crate) fn note_stable(&self, volume: &str) {
        if let Some(ending) = &*lock(&self.ending) {
            ending.of(volume).note_stable();
        }
    }

    /// Ends the backend, at the end of a stop. Blocks, but not for long.
    pub(crate) fn end(&self) {
        let backend = lock(&self.backend).take();
        if let Some(backend) = backend {
            let left = backend.stop(ebb_mem::clock::now() + PATIENCE);
            for disk in left {
                let (domain, device, volume) = (disk.guest, disk.device, disk.volume);
                tracing::warn!(
                    domain,
                    device,
                    volume = &*volume,
                    "its requests are left to a successor"
                );
            }
        }
    }
}
