//! The keys of encrypted volumes, derived by a successor while its predecessor still serves.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use ebb_config::VolumeConfig;

use crate::stores::inspect;

/// Derives the keys of encrypted volumes, on as many threads as there are processors, until `end`
/// is set. With [`RememberedKeys`](ebb_luks::RememberedKeys) they are opened without that
/// afterwards. Errors are found again then.
pub(crate) fn derive_keys<'a>(
    configs: impl Iterator<Item = &'a VolumeConfig> + Send,
    end: &AtomicBool,
) {
    let encrypted = Mutex::new(configs.filter(|config| config.encryption.is_some()));
    let next = || encrypted.lock().unwrap_or_else(PoisonError::into_inner).next();
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..processors {
            scope.spawn(|| {
                while !end.load(Ordering::SeqCst)
                    && let Some(config) = next()
                {
                    if let Err(error) = inspect(config) {
                        let error = error.full_text();
                        tracing::debug!(error, store = %config.store, "cannot derive its key yet");
                    }
                }
            });
        }
    });
}
