//! Ctrl-C, SIGTERM and SIGHUP while a disk is copied.
//!
//! The first one ends the copy, which cleans up. The second one cleans up and ends the process at once, because a request
//! to a device or a server may hang.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ebb_block::BlockStore;
use ebb_cache::CachedStore;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};

use super::destination::Leftover;
use super::error::ImageError;

/// What a signal ends.
#[derive(Debug, Default)]
pub(super) struct Interrupt {
    is_set: AtomicBool,
    stores: Mutex<Vec<Arc<CachedStore>>>,
    leftover: Mutex<Option<Arc<Leftover>>>,
}

impl Interrupt {
    /// Watches for signals from now on, until the process ends.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn watch() -> Result<Arc<Interrupt>, ImageError> {
        let interrupt = Arc::<Interrupt>::default();
        let signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP]);
        let mut signals = signals.map_err(ImageError::Worker)?;
        // With a handler a write beyond the limit of file size fails, and does not end the process.
        let limit = signal_hook::flag::register(SIGXFSZ, Arc::default());
        limit.map_err(ImageError::Worker)?;
        let shared = interrupt.clone();
        let watch = move || {
            for _ in signals.forever() {
                if shared.is_set() {
                    shared.clean();
                    signal_hook::low_level::exit(1);
                }
                shared.set();
            }
        };
        let thread = std::thread::Builder::new().name("ebbd-signals".into());
        thread.stack_size(128 << 10).spawn(watch).map_err(ImageError::Worker)?;
        Ok(interrupt)
    }

    /// What is aborted by the first signal, and cleaned up by the second.
    pub(super) fn guard(&self, stores: Vec<Arc<CachedStore>>, leftover: Arc<Leftover>) {
        *self.stores.lock().unwrap_or_else(PoisonError::into_inner) = stores;
        *self.leftover.lock().unwrap_or_else(PoisonError::into_inner) = Some(leftover);
        if self.is_set() {
            self.abort();
        }
    }

    /// Nothing is to be aborted any more.
    pub(super) fn end(&self) {
        self.stores.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    pub(super) fn is_set(&self) -> bool {
        self.is_set.load(Ordering::SeqCst)
    }

    pub(super) fn set(&self) {
        self.is_set.store(true, Ordering::SeqCst);
        self.abort();
    }

    fn abort(&self) {
        let stores = self.stores.lock().unwrap_or_else(PoisonError::into_inner).clone();
        stores.iter().for_each(|store| store.abort());
    }

    fn clean(&self) {
        let leftover = self.leftover.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(leftover) = leftover {
            leftover.clean();
        }
    }
}
