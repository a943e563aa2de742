//! A loss of acknowledged writes that was not reported to a client yet.
//!
//! A server that loses its cache is reported once (`lost-writes=report`), by the next flush. If that
//! is not a client's, but one of an operator, a resize, the close or a request with FUA, a client's
//! flush would succeed over the loss.
//!
//! # Invariants
//! - Until a client's flush has failed for it, no flush succeeds, and the volume is not closed
//!   without an error.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct OwedLoss(Mutex<Option<String>>);

impl OwedLoss {
    fn lock(&self) -> MutexGuard<'_, Option<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_owed(&self) -> bool {
        self.lock().is_some()
    }

    /// Keeps why, unless another loss is kept.
    pub(crate) fn note(&self, why: String) {
        self.lock().get_or_insert(why);
    }

    /// Returns why, to be reported to a client now.
    pub(crate) fn take(&self) -> Option<String> {
        self.lock().take()
    }

    pub(crate) fn get(&self) -> Option<String> {
        self.lock().clone()
    }
}
