//! Checks the locks of images that are written also while they are idle: reads need no lock, and a cache would go on with data
//! that another client has replaced.
//!
//! A fence takes all images of a cluster handle offline, so that one image of each handle is checked at a time, in turn.
//!
//! # Invariants
//! - A handle has one thread for this, which ends with its last image. It waits for no check: one that hangs delays that of
//!   no other image.
//! - The thread keeps neither an image nor its handle open.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use ebb_sandbox::threads;

/// How often one image of a handle is checked.
const PERIOD: Duration = Duration::from_millis(500);

/// An image whose lock can be checked.
pub(crate) trait WatchedImage: std::fmt::Debug + Send + Sync {
    /// Begins a check of the lock, unless one of this image runs.
    fn begin_check(self: Arc<Self>);
}

/// The images of a handle that are written.
#[derive(Debug, Default)]
pub(crate) struct WatchedImages(Mutex<Watched>);

#[derive(Debug, Default)]
struct Watched {
    images: Vec<Weak<dyn WatchedImage>>,
    /// There is a thread.
    runs: bool,
}

impl WatchedImages {
    /// Has an image watched from now on.
    pub(crate) fn add(self: &Arc<Self>, image: Weak<dyn WatchedImage>) -> std::io::Result<()> {
        let mut watched = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        watched.images.retain(|known| known.strong_count() > 0);
        watched.images.push(image);
        if watched.runs {
            return Ok(());
        }
        let this = Arc::downgrade(self);
        let builder = std::thread::Builder::new().name("rbd-watch".to_owned());
        threads::spawn(builder, move || watch(&this))?;
        watched.runs = true;
        Ok(())
    }

    /// The next image; `None` if there is none any more, and then the thread ends.
    fn next(&self, turn: usize) -> Option<Arc<dyn WatchedImage>> {
        let mut watched = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut images: Vec<_> = watched.images.iter().filter_map(Weak::upgrade).collect();
        watched.runs = !images.is_empty();
        let at = turn.checked_rem(images.len())?;
        Some(images.swap_remove(at))
    }
}

fn watch(images: &Weak<WatchedImages>) {
    for turn in 0.. {
        std::thread::sleep(PERIOD);
        let Some(image) = images.upgrade().and_then(|images| images.next(turn)) else { return };
        image.begin_check();
    }
}
