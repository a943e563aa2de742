//! Whether keys of encrypted volumes are being read or derived.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Encrypted volumes whose keys are being read or derived.
static UNLOCKING: AtomicUsize = AtomicUsize::new(0);

/// Whether a key is being read or derived: that takes seconds, and is no store that does not
/// respond.
pub fn is_unlocking() -> bool {
    UNLOCKING.load(Ordering::SeqCst) > 0
}

/// Counts one while it exists.
pub(crate) struct Unlocking;

impl Unlocking {
    pub(crate) fn begin() -> Unlocking {
        UNLOCKING.fetch_add(1, Ordering::SeqCst);
        Unlocking
    }
}

impl Drop for Unlocking {
    fn drop(&mut self) {
        UNLOCKING.fetch_sub(1, Ordering::SeqCst);
    }
}
