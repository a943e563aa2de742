//! Flushing volumes on request: all side by side, so that a slow one delays no other.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ebb_api::Refusal;
use ebb_control::Refused;
use ebb_control::figures::worst_remote;
use ebb_io::Io;
use futures_lite::future::or;

use super::manage::stopping;
use super::{Countdown, Engine};
use crate::operations::{LongOperation, cancelled};

/// The remedy where a client has to learn of a loss first.
const OWED: &str = "no client has learned of this loss: flush from a client of the volume, whose first flush \
                    fails, or remove the volume and add it again";

impl Engine {
    /// Flushes volumes concurrently.
    ///
    /// # Errors
    /// If one could not be flushed.
    pub(crate) async fn flush_volumes(
        &self,
        io: &Io,
        volumes: Vec<Arc<ebb_volume::Volume>>,
        operation: &LongOperation,
    ) -> Result<(), Refused> {
        operation.step("writing dirty data");
        operation.watch_writes(&volumes);
        // A flush that was begun cannot be cancelled: the operation then ends, and the flush goes on.
        operation.allow_cancel();
        let failed = side_by_side(io, volumes.clone()).await;
        let Some(first) = failed.first() else { return Ok(()) };
        let more = match failed.len() {
            1 => String::new(),
            all => format!(", and {} more volumes", all - 1),
        };
        let remedy = match volumes.iter().any(|volume| volume.owes_loss()) {
            true => OWED,
            false => "check the store, and the log; unflushed data is kept where that is possible",
        };
        Err(Refused::new(Refusal::Failed, "not_flushed", format!("{first}{more}"), remedy))
    }

    /// Writes all dirty data, before a stop that clients are to notice as little as possible: twice, since they write on
    /// meanwhile.
    ///
    /// # Errors
    /// Why a volume could not be flushed.
    pub async fn flush_everything(&self, io: &Io, limit: Duration) -> Result<(), String> {
        let until = ebb_mem::clock::now() + limit;
        for _ in 0..2 {
            let volumes = self.volumes.list();
            let failed = side_by_side(io, volumes.clone());
            let ended = async {
                self.stopped::<()>().await;
                Vec::new()
            };
            let late = async {
                io.sleep(until.saturating_duration_since(ebb_mem::clock::now())).await;
                vec![format!("not all dirty data could be written in {} s", limit.as_secs())]
            };
            if let Some(first) = or(failed, or(ended, late)).await.into_iter().next() {
                let is_owed = volumes.iter().any(|volume| volume.owes_loss());
                return Err(if is_owed { format!("{first} ({OWED})") } else { first });
            }
        }
        Ok(())
    }

    /// Flushes a volume before something that needs its data to be stable. It can be cancelled, since the store may hang: the
    /// flush goes on then.
    ///
    /// # Errors
    /// `not_flushed` makes one of why the volume could not be flushed; if the operation was cancelled, or the daemon stops.
    pub(super) async fn flush_before(
        &self,
        io: &Io,
        volume: &Arc<ebb_volume::Volume>,
        operation: &LongOperation,
        not_flushed: impl FnOnce(ebb_volume::BlockError) -> Refused,
    ) -> Result<(), Refused> {
        operation.step("writing dirty data");
        operation.watch_writes(std::slice::from_ref(volume));
        operation.allow_cancel();
        let (sender, flushed) = tokio::sync::oneshot::channel();
        let (volume, on) = (volume.clone(), io.clone());
        // In a task of its own: a flush that is dropped counts as failed.
        let flush = async move {
            let outcome = volume.flush_unasked(&on).await;
            drop(volume);
            let _ = sender.send(outcome);
        };
        io.spawn(flush).detach();
        let given_up = async {
            operation.cancelled().await;
            None
        };
        match or(async { flushed.await.ok() }, or(self.stopped(), given_up)).await {
            Some(outcome) => outcome.map_err(not_flushed),
            None if operation.is_cancelled() => Err(cancelled()),
            None => Err(stopping()),
        }
    }
}

/// Flushes volumes concurrently, and returns why some could not be flushed.
async fn side_by_side(io: &Io, volumes: Vec<Arc<ebb_volume::Volume>>) -> Vec<String> {
    let left = Rc::new(Countdown::new(volumes.len()));
    let failed = Rc::<RefCell<Vec<String>>>::default();
    for volume in volumes {
        let (on, left, failed) = (io.clone(), left.clone(), failed.clone());
        io.spawn(async move {
            let mut flushed = volume.flush_unasked(&on).await;
            // It may report an attempt from before its server came back.
            if flushed.is_err() && worst_remote(&volume).is_some_and(|it| it.connections > 0) {
                flushed = volume.flush_unasked(&on).await;
            }
            if let Err(error) = flushed {
                let text = error.full_text();
                failed.borrow_mut().push(match error.volume {
                    Some(_) => text,
                    None => format!("volume {}: {text}", volume.name()),
                });
            }
            drop(volume);
            left.count();
        })
        .detach();
    }
    left.over().await;
    failed.take()
}
