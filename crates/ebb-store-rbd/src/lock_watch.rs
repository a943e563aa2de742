//! Checks the locks of images that are written also while they are idle: reads need no lock, and a cache would go on with data
//! that another client has replaced.
//!
//! A fence takes all images of a cluster handle offline, so that one image of each handle is checked at a time, in turn.
//!
//! # Invariants
//! - A handle has one thread for this, which ends with the handle. It may hang as long as the cluster does not answer.
//! - The thread keeps neither an image nor its handle open, but during a check.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

/// How often one image of a handle is checked.
const PERIOD: Duration = Duration::from_millis(500);

/// An image whose lock can be checked.
pub(crate) trait WatchedImage: std::fmt::Debug + Send + Sync {
    /// Checks the lock, and waits for the cluster.
    fn check_lock_now(&self);
}

/// The images of a handle that are written.
#[derive(Debug, Default)]
pub(crate) struct WatchedImages(Mutex<Vec<Weak<dyn WatchedImage>>>);

impl WatchedImages {
    /// Has an image watched from now on.
    pub(crate) fn add(self: &Arc<Self>, image: Weak<dyn WatchedImage>) -> std::io::Result<()> {
        let mut images = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        images.retain(|known| known.strong_count() > 0);
        images.push(image);
        if images.len() > 1 {
            return Ok(());
        }
        let this = Arc::downgrade(self);
        let builder = std::thread::Builder::new().name("rbd-watch".to_owned());
        builder.spawn(move || watch(&this)).map(drop)
    }

    /// The next image; `None` if there is none any more.
    fn next(&self, turn: usize) -> Option<Arc<dyn WatchedImage>> {
        let mut images = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        images.retain(|known| known.strong_count() > 0);
        let at = turn.checked_rem(images.len())?;
        images.get(at)?.upgrade()
    }
}

fn watch(images: &Weak<WatchedImages>) {
    for turn in 0.. {
        std::thread::sleep(PERIOD);
        let Some(image) = images.upgrade().and_then(|images| images.next(turn)) else { return };
        image.check_lock_now();
    }
}
