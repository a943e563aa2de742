//! Whether an image that is written still has its lock, asked of the cluster while a request waits for long.
//!
//! librbd reports a lost lock by an error of the next request, except where it waits for the lock to be taken again: a client
//! that was put on the blocklist at that moment waits for ever.
//!
//! # Invariants
//! - One check of an image runs at a time, on a thread of its own, which may hang as long as the cluster does not answer: a
//!   check of one image does not wait for that of another.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use ebb_sandbox::threads;

use crate::clusters::ClusterClient;
use crate::handles::ImageHandle;
use crate::wakeups;

/// The lock of one image. It keeps neither the image nor its cluster open: their last reference is none that a worker
/// drops.
pub(crate) struct LockCheck {
    image: Weak<ImageHandle>,
    client: Arc<ClusterClient>,
    running: Arc<AtomicBool>,
}

/// The pause before a lock that was not found is looked for once more: librbd may just be taking it again after a lost watch.
const AGAIN: Duration = Duration::from_millis(200);

impl std::fmt::Debug for LockCheck {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LockCheck").field("address", &self.client.address).finish_non_exhaustive()
    }
}

impl LockCheck {
    pub(crate) fn new(image: &Arc<ImageHandle>, client: &Arc<ClusterClient>) -> LockCheck {
        let running = Arc::new(AtomicBool::new(false));
        LockCheck { image: Arc::downgrade(image), client: client.clone(), running }
    }

    /// Whether the cluster has fenced the client of this handle.
    pub(crate) fn is_fenced(&self) -> bool {
        self.client.connection.is_fenced()
    }

    /// Starts a check, unless one of this image runs already. It calls `lost` if the lock is lost.
    pub(crate) fn begin(&self, lost: impl FnOnce() + Send + 'static) {
        if self.running.swap(true, Ordering::AcqRel) {
            return;
        }
        let this = LockCheck {
            image: self.image.clone(),
            client: self.client.clone(),
            running: self.running.clone(),
        };
        let builder = std::thread::Builder::new().name("rbd-check".to_owned());
        let started = threads::spawn(builder, move || {
            if let Some(image) = this.image.upgrade() {
                check(&image, &this.client, lost);
            }
            this.running.store(false, Ordering::Release);
        });
        // Without a thread it is tried again by the next request that waits for long.
        if started.is_err() {
            self.running.store(false, Ordering::Release);
        }
    }
}

fn check(image: &ImageHandle, client: &ClusterClient, lost: impl FnOnce()) {
    let mut owners = image.lock_owners();
    if owners.as_ref().is_ok_and(|owners| !owners.contains(&client.address)) {
        std::thread::sleep(AGAIN);
        owners = image.lock_owners();
    }
    match owners {
        Ok(owners) if owners.contains(&client.address) => return,
        Ok(_) => {
            client.retire();
            lost();
        }
        Err(error) if error.code() == libc::ESHUTDOWN => client.fence(),
        // Whatever it is, requests have it, too.
        Err(_) => return,
    }
    wakeups::end_requests();
}
