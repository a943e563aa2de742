//! Reports of losses that the store reports once: see [`OwedLoss`](crate::owed_loss::OwedLoss).

use std::io;

use ebb_block::{BlockError, Io, Operation};
use ebb_cache::Mode;

use super::Volume;

impl Volume {
    /// As [`Volume::flush`], for the daemon or an operator: a client's flush reports the loss again.
    ///
    /// # Errors
    /// As [`Volume::flush`]; each time while a loss was not reported to a client.
    pub async fn flush_unasked(&self, io: &Io) -> Result<(), BlockError> {
        let flushed = self.flush_admitted(io).await;
        self.kept_for_a_client(flushed)
    }

    /// The outcome of a client's flush.
    pub(super) fn told(&self, flushed: Result<(), BlockError>) -> Result<(), BlockError> {
        let owed = self.owed.take();
        flushed?;
        owed.map_or(Ok(()), |why| Err(self.reported(why)))
    }

    /// The outcome of a flush that is no client's: a loss is kept for one.
    pub(super) fn kept_for_a_client(
        &self,
        flushed: Result<(), BlockError>,
    ) -> Result<(), BlockError> {
        flushed.inspect_err(|error| self.owe(error))?;
        self.owed.get().map_or(Ok(()), |why| Err(self.reported(why)))
    }

    /// Keeps a loss for a client's flush if `error`, which is not the outcome of one, is its only
    /// report.
    pub(super) fn owe(&self, error: &BlockError) {
        if self.is_only_report(error) {
            self.owed.note(error.full_text());
        }
    }

    /// Returns true if an error of a flush is the only report of a loss, and no cache has the lost data.
    pub(super) fn is_only_report(&self, error: &BlockError) -> bool {
        self.loses_by_error() && self.store.top().store().is_only_report(error)
    }

    /// Keeps a loss that was reported since [`Volume::losses`] was `seen`.
    pub(crate) fn owe_since(&self, seen: u64, error: &dyn std::error::Error) {
        if self.losses() != seen && self.loses_by_error() {
            self.owed.note(error.to_string());
        }
    }

    /// The number of losses that its store has had.
    pub(crate) fn losses(&self) -> u64 {
        self.store.top().store().losses()
    }

    fn loses_by_error(&self) -> bool {
        self.cache_mode() != Mode::Writeback && !self.is_stable() && !self.store.is_lost()
    }

    fn reported(&self, why: String) -> BlockError {
        BlockError::from_io(io::Error::other(why), Operation::Flush, 0, self.size())
    }
}
