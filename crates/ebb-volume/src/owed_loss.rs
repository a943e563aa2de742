//! Losses of acknowledged writes that not all clients have learned of.
//!
//! A server that loses its cache is reported once (`lost-writes=report`), by the next flush. If
//! that is not a client's, but one of an operator, a resize, the close or a request with FUA, a
//! client's flush would succeed over the loss. So it would if the flush is another client's.
//!
//! # Invariants
//! - Until a client's flush has failed for a loss, no flush succeeds, and the volume is not closed
//!   without an error.
//! - A flush of each client that was connected at a loss fails after it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
struct Losses {
    noted: u64,
    /// The number of the last loss that a client has learned of.
    told: u64,
    /// The cause of the last one.
    why: String,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct OwedLoss(Mutex<Losses>);

/// The losses that one client has learned of.
#[derive(Debug)]
pub struct ToldLosses(AtomicU64);

impl ToldLosses {
    /// Makes it a client that has learned of no loss.
    pub fn forget(&self) {
        self.0.store(0, Ordering::SeqCst);
    }
}

impl OwedLoss {
    fn lock(&self) -> MutexGuard<'_, Losses> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A client that is owed the losses that no other one has learned of.
    pub(crate) fn client(&self) -> ToldLosses {
        ToldLosses(AtomicU64::new(self.lock().told))
    }

    /// Returns true if no client has learned of the last loss.
    pub(crate) fn is_owed(&self) -> bool {
        let losses = self.lock();
        losses.told < losses.noted
    }

    /// Returns true if a client has not learned of all losses.
    pub(crate) fn is_owed_to(&self, client: &ToldLosses) -> bool {
        client.0.load(Ordering::SeqCst) < self.lock().noted
    }

    /// Takes a report with `take`, and keeps its loss with the cause `why`, unless one is owed that no
    /// client has learned of. One step for others: a flush that finds no report finds the loss.
    /// Returns true if there was a report.
    pub(crate) fn note_taken(
        &self,
        take: impl FnOnce() -> bool,
        why: impl FnOnce() -> String,
    ) -> bool {
        let mut losses = self.lock();
        let is_taken = take();
        if is_taken && losses.told == losses.noted {
            losses.noted += 1;
            losses.why = why();
        }
        is_taken
    }

    /// Returns the cause of a loss that is reported to a client now.
    pub(crate) fn take(&self, client: &ToldLosses) -> Option<String> {
        let mut losses = self.lock();
        losses.told = losses.noted;
        let is_new = client.0.swap(losses.noted, Ordering::SeqCst) < losses.noted;
        is_new.then(|| losses.why.clone())
    }

    /// Returns the cause of a loss that no client has learned of.
    pub(crate) fn get(&self) -> Option<String> {
        let losses = self.lock();
        (losses.told < losses.noted).then(|| losses.why.clone())
    }
}
