//! Whether an image that is written still has its lock, asked of the cluster while a request waits for long.
//!
//! librbd reports a lost lock by an error of the next request, except where it waits for the lock to be taken again: a client
//! that was put on the blocklist at that moment waits for ever.
//!
//! # Invariants
//! - One check of a cluster handle runs at a time, on a thread of its own, which may hang as long as the cluster does not
//!   answer.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use crate::clusters::ClusterClient;
use crate::handles::ImageHandle;
use crate::wakeups;

/// The lock of one image. It keeps neither the image nor its cluster open: their last reference is none that a worker
/// drops.
pub(crate) struct LockCheck {
    image: Weak<ImageHandle>,
    client: Arc<ClusterClient>,
}

impl std::fmt::Debug for LockCheck {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LockCheck").field("address", &self.client.address).finish_non_exhaustive()
    }
}

impl LockCheck {
    pub(crate) fn new(image: &Arc<ImageHandle>, client: &Arc<ClusterClient>) -> LockCheck {
        LockCheck { image: Arc::downgrade(image), client: client.clone() }
    }

    /// Whether the cluster has fenced the client of this handle.
    pub(crate) fn is_fenced(&self) -> bool {
        self.client.fenced.load(Ordering::Acquire)
    }

    /// Starts a check, unless one of this handle runs already. It calls `lost` if the lock is lost.
    pub(crate) fn begin(&self, lost: impl FnOnce() + Send + 'static) {
        if self.client.checking.swap(true, Ordering::AcqRel) {
            return;
        }
        let (image, client) = (self.image.clone(), self.client.clone());
        let builder = std::thread::Builder::new().name("rbd-check".to_owned());
        let started = builder.spawn(move || {
            if let Some(image) = image.upgrade() {
                check(&image, &client, lost);
            }
            client.checking.store(false, Ordering::Release);
        });
        if started.is_err() {
            self.client.checking.store(false, Ordering::Release);
        }
    }
}

fn check(image: &ImageHandle, client: &ClusterClient, lost: impl FnOnce()) {
    match image.lock_owners() {
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
