//! Losses, and their reports where the store reports one once: see
//! [`OwedLoss`](crate::owed_loss::OwedLoss).

use std::error::Error;
use std::io;

use ebb_block::{BlockError, ErrorKind, Io, Operation};
use ebb_cache::{Mode, SnapshotError};
use ebb_store::Store;

use super::Volume;
use crate::owed_loss::ToldLosses;

impl Volume {
    /// As [`Volume::flush`], for the daemon or an operator: a client's flush reports the loss
    /// again.
    ///
    /// # Errors
    /// As [`Volume::flush`]; each time while a loss was not reported to a client.
    pub async fn flush_unasked(&self, io: &Io) -> Result<(), BlockError> {
        let flushed = self.flush_admitted(io).await;
        self.kept_for_a_client(flushed)
    }

    /// As [`Volume::with_layers`], for what flushes the volume on its own.
    ///
    /// # Errors
    /// That of `work`; [`ErrorKind::Closing`] if it is being closed.
    pub async fn exchange_layers<T>(
        &self,
        io: &Io,
        work: impl Future<Output = Result<T, SnapshotError>>,
    ) -> Result<T, SnapshotError> {
        let kept = async {
            let top = self.store.top();
            let result = work.await;
            match &result {
                Err(SnapshotError::Store(error)) => self.owe(error),
                // Its flush may have met the loss that a client's flush returns later.
                Ok(_) if self.cache_mode() != Mode::Writeback => {
                    let store = top.store();
                    self.owed.note_taken(|| store.take_reports(), || report_of(store));
                }
                _ => {}
            }
            result
        };
        self.with_layers(io, kept).await?
    }

    /// Returns true if no request that changes data has succeeded since the volume was opened, and
    /// no loss of earlier data is owed to a client. Meaningful without requests in flight.
    pub fn has_acknowledged_nothing(&self) -> bool {
        !self.owed.is_owed()
            && [Operation::Write, Operation::Discard, Operation::WriteZeroes].into_iter().all(
                |kind| {
                    let counts = self.stats.of(kind);
                    counts.requests == counts.errors
                },
            )
    }

    /// Returns true if a flush covers all requests that changed data and succeeded, and memory has
    /// no data that could still be written. Those that failed later may have changed the store.
    /// Meaningful without requests in flight.
    pub fn has_flushed_acknowledged(&self) -> bool {
        let holds_nothing = self.dirty() == 0 && self.unstable() == 0;
        holds_nothing && !self.owed.is_owed() && self.changes.acknowledged_are_flushed()
    }

    /// Returns true once a flush of this volume has succeeded. Until then there may be unflushed
    /// data of an earlier process that was killed.
    pub fn has_flushed(&self) -> bool {
        self.changes.has_flushed()
    }

    /// Returns true if no flush of a successor would report the loss of writes that were
    /// acknowledged and not flushed.
    #[inline]
    pub fn may_hide_loss(&self) -> bool {
        self.store.may_hide_loss()
    }

    /// After a failed flush: flushes the data again, without the names of files. Returns true if
    /// that succeeds, so that only names are not stable.
    pub async fn lacks_only_names(&self, io: &Io) -> bool {
        let suits = || !self.is_lost() && !self.store.has_stable_names();
        suits() && self.store.flush_content(io).await.is_ok() && suits()
    }

    /// Returns true if `error` of a client's flush may report a loss: then the flush must not be
    /// repeated in its place, since it could succeed.
    pub fn may_report_loss(&self, error: &BlockError) -> bool {
        error.kind != ErrorKind::Closing && !self.lost_nothing(error)
    }

    /// Returns true if a close failed with `error` and lost nothing: the store did not respond, and
    /// a flush of its next opening covers all acknowledged writes, or reports their loss.
    pub fn leaves_no_loss(&self, error: &BlockError) -> bool {
        self.lost_nothing(error) && !self.may_hide_loss()
    }

    /// Returns true if a failed flush says only that the store did not respond.
    fn lost_nothing(&self, error: &BlockError) -> bool {
        self.store.top().store().lost_nothing(error)
    }

    /// The losses that a new client has learned of, for [`Volume::flush_for`].
    pub fn told_losses(&self) -> ToldLosses {
        self.owed.client()
    }

    /// Returns true if no client has learned of a loss: until the flush of one fails for it, those
    /// of an operator fail.
    pub fn owes_loss(&self) -> bool {
        self.owed.is_owed()
    }

    /// Returns true if a client has not learned of all losses.
    pub fn owes_loss_to(&self, client: &ToldLosses) -> bool {
        self.owed.is_owed_to(client)
    }

    /// As [`Volume::flush`], for one of several clients: it fails once after each loss that another
    /// client's flush has met, too.
    ///
    /// # Errors
    /// As [`Volume::flush`].
    pub async fn flush_for(&self, io: &Io, client: &ToldLosses) -> Result<(), BlockError> {
        let flushed = self.flush_admitted(io).await;
        if let Err(error) = &flushed {
            // The other clients have not learned of it.
            self.owe(error);
            if !self.may_report_loss(error) {
                // The flush may be repeated: a loss stays owed.
                return flushed;
            }
        }
        let owed = self.owed.take(client);
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

    /// Keeps a loss for a client's flush if `error` is its only report, and no flush has met it
    /// since.
    pub(super) fn owe(&self, error: &BlockError) {
        let top = self.store.top();
        let store = top.store();
        if !store.is_only_report(error) {
            return;
        }
        let cause = || {
            let source = error.source.as_ref().map(ToString::to_string);
            source.unwrap_or_else(|| error.to_string())
        };
        match self.loses_by_error() {
            true => self.owed.note_taken(|| store.take_reports(), cause),
            false => store.take_reports(),
        };
    }

    /// Fails, after a flush of the store that succeeded, if another one is returning the only
    /// report of a loss.
    pub(super) fn meets_no_report(&self) -> Result<(), BlockError> {
        let top = self.store.top();
        let store = top.store();
        let is_taken = match self.loses_by_error() {
            true => self.owed.note_taken(|| store.take_reports(), || report_of(store)),
            false => {
                store.take_reports();
                false
            }
        };
        if is_taken { Err(self.reported(report_of(store))) } else { Ok(()) }
    }

    /// Returns true if an error of a flush is the only report of a loss, and no cache has the lost
    /// data.
    pub(super) fn is_only_report(&self, error: &BlockError) -> bool {
        self.loses_by_error() && self.store.top().store().is_only_report(error)
    }

    /// As [`Volume::owe`], if the store's error is `error` or a cause of it.
    pub(crate) fn owe_cause(&self, error: &(dyn Error + 'static)) {
        let mut next = Some(error);
        while let Some(error) = next {
            if let Some(error) = error.downcast_ref() {
                self.owe(error);
            }
            next = error.source();
        }
    }

    fn loses_by_error(&self) -> bool {
        self.cache_mode() != Mode::Writeback && !self.is_stable() && !self.store.is_lost()
    }

    fn reported(&self, why: String) -> BlockError {
        BlockError::from_io(io::Error::other(why), Operation::Flush, 0, self.size())
    }
}

/// The loss that a store has reported to another flush.
fn report_of(store: &Store) -> String {
    store.loss().map_or_else(|| "writes may be lost".to_owned(), |loss| loss.error)
}
