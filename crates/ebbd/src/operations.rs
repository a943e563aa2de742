//! Operations: changes in progress that clients can follow and, where that is safe, cancel.
//!
//! # Invariants
//! - At most [`MOST_RUNNING`] operations are in progress, and at most [`MOST_ENDED`] are remembered after their end, for
//!   [`REMEMBERED`] at most.
//! - An operation ends once. One that was cancelled counts as in progress until its task has ended.
//! - An operation does not keep a volume open.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use ebb_api::{OperationView, ResizeView};
use ebb_control::Refused;
use ebb_volume::{Stop, Volume};

/// The most operations in progress.
const MOST_RUNNING: usize = 256;
/// The most operations that are remembered after their end.
const MOST_ENDED: usize = 256;
/// How long an operation is remembered after its end.
const REMEMBERED: Duration = Duration::from_secs(600);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How an operation has ended.
#[derive(Debug)]
enum End {
    Done,
    Failed(Refused),
    Cancelled,
}

#[derive(Debug)]
struct Progress {
    step: String,
    /// Volumes whose dirty data is being written, each with what it was at the beginning.
    written: Vec<(Weak<Volume>, u64)>,
    /// The most that was written.
    done: u64,
    cancellable: bool,
    resized: Option<ResizeView>,
    /// Volumes that are not served after a reload, and the number of further ones.
    not_served: (Vec<String>, u64),
    end: Option<(End, Instant)>,
}

/// An operation. See the module.
#[derive(Debug)]
pub(crate) struct LongOperation {
    id: u64,
    kind: &'static str,
    volume: Option<String>,
    by: String,
    began: Instant,
    progress: Mutex<Progress>,
    cancelled: Stop,
    ended: Arc<Stop>,
    /// Its task has ended.
    over: Stop,
}

impl LongOperation {
    /// Its number.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Who requested it; empty if that has no name.
    pub(crate) fn by(&self) -> &str {
        &self.by
    }

    /// Sent when it has ended.
    pub(crate) fn ended(&self) -> Arc<Stop> {
        self.ended.clone()
    }

    /// Notes what it is doing now.
    pub(crate) fn step(&self, step: &str) {
        step.clone_into(&mut lock(&self.progress).step);
    }

    /// Notes that it can be cancelled from now on.
    pub(crate) fn allow_cancel(&self) {
        lock(&self.progress).cancellable = true;
    }

    /// Notes that it cannot be cancelled any more; false if it was cancelled before.
    pub(crate) fn commit(&self) -> bool {
        lock(&self.progress).cancellable = false;
        !self.cancelled.is_stopped()
    }

    /// Waits until it is cancelled.
    pub(crate) async fn cancelled(&self) {
        self.cancelled.wait().await;
    }

    /// Reports the dirty data of these volumes as work to be done.
    pub(crate) fn watch_writes(&self, volumes: &[Arc<Volume>]) {
        let dirty = |volume: &Arc<Volume>| (Arc::downgrade(volume), unwritten(volume));
        lock(&self.progress).written = volumes.iter().map(dirty).collect();
    }

    /// Notes what a resize has changed.
    pub(crate) fn note_resized(&self, resized: ResizeView) {
        lock(&self.progress).resized = Some(resized);
    }

    /// Notes the volumes that are not served after a reload.
    pub(crate) fn note_not_served(&self, mut volumes: Vec<String>) {
        let more = volumes.len().saturating_sub(OperationView::MAX_NOT_SERVED);
        volumes.truncate(OperationView::MAX_NOT_SERVED);
        lock(&self.progress).not_served = (volumes, u64::try_from(more).unwrap_or(u64::MAX));
    }

    /// Ends it. To be called when its task ends.
    pub(crate) fn finish(&self, outcome: Result<(), Refused>) {
        let end = match outcome {
            Ok(()) => End::Done,
            Err(_) if self.cancelled.is_stopped() => End::Cancelled,
            Err(refused) => {
                // The reasons why a reload has failed are logged where they are found.
                if self.kind != "reload" {
                    let (volume, by) = (self.volume.as_deref(), self.by());
                    tracing::warn!(
                        volume,
                        operation = self.id,
                        by,
                        "{} failed: {refused}",
                        self.kind
                    );
                }
                End::Failed(refused)
            }
        };
        self.over.stop();
        self.end(end);
    }

    fn end(&self, end: End) {
        let mut progress = lock(&self.progress);
        if progress.end.is_none() {
            progress.update();
            progress.written.clear();
            progress.cancellable = false;
            if self.kind != "reload" {
                progress.step.clear();
            }
            progress.end = Some((end, ebb_mem::clock::now()));
        }
        drop(progress);
        self.ended.stop();
    }

    /// Cancels it. If that is not possible, returns the kind of error and the reason.
    fn cancel(&self) -> Result<(), (&'static str, &'static str)> {
        let progress = lock(&self.progress);
        match &progress.end {
            Some((End::Cancelled, _)) => return Ok(()),
            Some(_) => return Err(("already_ended", "has ended already")),
            None if !progress.cancellable => {
                return Err(("not_cancellable", "cannot be cancelled now"));
            }
            None => {}
        }
        // Under the lock, so that `commit` sees it.
        self.cancelled.stop();
        drop(progress);
        self.end(End::Cancelled);
        Ok(())
    }

    /// It as a reply, and the status if it has failed.
    fn view(&self) -> (OperationView, u16) {
        let mut progress = lock(&self.progress);
        progress.update();
        let (state, failure, ended) = match &progress.end {
            None => (OperationView::RUNNING, None, None),
            Some((End::Done, at)) => (OperationView::DONE, None, Some(at)),
            Some((End::Failed(why), at)) => (OperationView::FAILED, Some(why), Some(at)),
            Some((End::Cancelled, at)) => (OperationView::CANCELLED, None, Some(at)),
        };
        let now = ended.copied().unwrap_or_else(ebb_mem::clock::now);
        let since_seconds = now.saturating_duration_since(self.began).as_secs_f64();
        let total = progress.written.iter().map(|(_, dirty)| *dirty).sum::<u64>();
        let (done, total) = match ended {
            None => (progress.done, total.max(progress.done)),
            Some(_) => (progress.done, progress.done),
        };
        let eta = (ended.is_none() && done > 0)
            .then(|| since_seconds * (total.saturating_sub(done)) as f64 / done as f64);
        let view = OperationView {
            id: self.id,
            kind: self.kind.to_owned(),
            volume: self.volume.clone(),
            by: self.by.clone(),
            state: state.to_owned(),
            step: progress.step.clone(),
            done,
            total,
            unit: "bytes".to_owned(),
            since_seconds,
            eta_seconds: eta,
            cancellable: progress.cancellable,
            resized: progress.resized.clone(),
            not_served: progress.not_served.0.clone(),
            more_not_served: progress.not_served.1,
            failure: failure.map(|why| why.body.clone()),
        };
        (view, failure.map_or(200, |why| why.status))
    }
}

impl Progress {
    /// Measures what was written. Clients may write meanwhile, so that the figure may fall; it is not reported as falling.
    fn update(&mut self) {
        let written = self.written.iter().map(|(volume, dirty)| {
            let left = volume.upgrade().map_or(0, |volume| unwritten(&volume));
            dirty.saturating_sub(left)
        });
        self.done = self.done.max(written.sum());
    }
}

fn unwritten(volume: &Arc<Volume>) -> u64 {
    volume.cache().map_or(0, |cache| cache.dirty())
}

#[derive(Debug, Default)]
struct OperationTable {
    last: u64,
    all: BTreeMap<u64, Arc<LongOperation>>,
}

/// All operations. See the module.
#[derive(Debug, Default)]
pub(crate) struct Operations(Mutex<OperationTable>);

impl Operations {
    /// Begins an operation that `by` requests.
    ///
    /// # Errors
    /// If too many are in progress.
    pub(crate) fn begin(
        &self,
        kind: &'static str,
        volume: Option<&str>,
        by: &str,
    ) -> Result<Arc<LongOperation>, Refused> {
        let mut table = lock(&self.0);
        table.forget();
        let running = table.all.values().filter(|operation| !operation.over.is_stopped()).count();
        if running >= MOST_RUNNING {
            let message = format!("{running} operations are in progress");
            let remedy = "wait until some have ended: `ebbd operation list`";
            return Err(Refused::new(503, "too_many_operations", message, remedy));
        }
        table.last += 1;
        let operation = Arc::new(LongOperation {
            id: table.last,
            kind,
            volume: volume.map(str::to_owned),
            by: by.to_owned(),
            began: ebb_mem::clock::now(),
            progress: Mutex::new(Progress {
                step: "waiting".to_owned(),
                written: Vec::new(),
                done: 0,
                cancellable: false,
                resized: None,
                not_served: Default::default(),
                end: None,
            }),
            cancelled: Stop::default(),
            ended: Arc::default(),
            over: Stop::default(),
        });
        table.all.insert(operation.id, operation.clone());
        Ok(operation)
    }

    /// All, in order.
    pub(crate) fn list(&self) -> Vec<OperationView> {
        let mut table = lock(&self.0);
        table.forget();
        table.all.values().map(|operation| operation.view().0).collect()
    }

    /// One, and the status if it has failed.
    pub(crate) fn get(&self, id: u64) -> Option<(OperationView, u16)> {
        let operation = lock(&self.0).all.get(&id).cloned();
        operation.map(|operation| operation.view())
    }

    /// Cancels one.
    ///
    /// # Errors
    /// If there is none of this number, or it has ended, or it cannot be cancelled now. One that was cancelled before is no
    /// error.
    pub(crate) fn cancel(&self, id: u64) -> Result<OperationView, Refused> {
        let Some(operation) = lock(&self.0).all.get(&id).cloned() else {
            let remedy = "`ebbd operation list` shows those of the last ten minutes";
            let message = format!("there is no operation {id}");
            return Err(Refused::new(404, "unknown_operation", message, remedy));
        };
        let Err((kind, why)) = operation.cancel() else { return Ok(operation.view().0) };
        let remedy = match kind {
            "already_ended" => "nothing was cancelled: `ebbd operation show` says how it has ended",
            _ => "wait for it: what it has begun can only be completed",
        };
        Err(Refused::new(409, kind, format!("operation {id} {why}"), remedy))
    }
}

impl OperationTable {
    /// Forgets those that ended long ago, and the oldest if too many have ended.
    fn forget(&mut self) {
        let now = ebb_mem::clock::now();
        let over = |operation: &LongOperation| {
            let at = lock(&operation.progress).end.as_ref().map(|(_, at)| *at);
            at.filter(|_| operation.over.is_stopped())
        };
        self.all.retain(|_, operation| {
            over(operation).is_none_or(|at| now.saturating_duration_since(at) < REMEMBERED)
        });
        let ended: Vec<u64> =
            self.all.iter().filter(|(_, one)| over(one).is_some()).map(|(id, _)| *id).collect();
        let many = ended.len().saturating_sub(MOST_ENDED);
        for id in ended.into_iter().take(many) {
            self.all.remove(&id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_ends_once_and_is_cancelled_only_where_that_is_allowed() {
        let all = Operations::default();
        let first = all.begin("add", Some("a"), "").unwrap();
        assert_eq!(all.cancel(first.id()).unwrap_err().status, 409);
        first.allow_cancel();
        assert!(all.get(first.id()).unwrap().0.cancellable);
        assert_eq!(all.cancel(first.id()).unwrap().state, OperationView::CANCELLED);
        assert!(first.ended().is_stopped() && !first.commit());
        first.finish(Ok(()));
        assert_eq!(all.get(first.id()).unwrap().0.state, OperationView::CANCELLED);

        let second = all.begin("remove", Some("a"), "").unwrap();
        second.allow_cancel();
        assert!(second.commit());
        assert_eq!(all.cancel(second.id()).unwrap_err().status, 409);
        second.finish(Err(Refused::new(500, "io", "m", "r")));
        let (view, status) = all.get(second.id()).unwrap();
        assert_eq!((view.state.as_str(), status), (OperationView::FAILED, 500));
        assert_eq!(view.failure.unwrap().message, "m");
        assert_eq!(all.cancel(9).unwrap_err().status, 404);
        let ended = all.cancel(second.id()).unwrap_err();
        assert_eq!((ended.status, &*ended.body.error), (409, "already_ended"));
        assert_eq!(
            all.cancel(first.id()).unwrap().state,
            OperationView::CANCELLED,
            "it was before"
        );
    }

    #[test]
    fn an_operation_has_its_requester_and_no_step_after_its_end() {
        let all = Operations::default();
        let step = |kind| {
            let operation = all.begin(kind, None, "token:alice").unwrap();
            operation.step("at work");
            assert_eq!(all.get(operation.id()).unwrap().0.step, "at work");
            operation.finish(Ok(()));
            let view = all.get(operation.id()).unwrap().0;
            (view.step, view.by)
        };
        assert_eq!(step("flush"), (String::new(), "token:alice".to_owned()));
        assert_eq!(step("reload").0, "at work", "what it has done");
    }

    #[test]
    fn the_number_of_operations_is_limited() {
        let all = Operations::default();
        for _ in 0..3 * MOST_ENDED {
            all.begin("flush", None, "").unwrap().finish(Ok(()));
        }
        assert!(all.list().len() <= MOST_ENDED);
        assert_eq!(all.list().last().unwrap().id, 3 * MOST_ENDED as u64);
        let running: Vec<_> =
            (0..MOST_RUNNING).map(|_| all.begin("flush", None, "").unwrap()).collect();
        assert_eq!(all.begin("flush", None, "").unwrap_err().status, 503);
        // A cancelled one counts until its task has ended.
        running[0].allow_cancel();
        all.cancel(running[0].id()).unwrap();
        assert!(all.begin("flush", None, "").is_err());
        running[0].finish(Ok(()));
        assert!(all.begin("flush", None, "").is_ok());
    }
}
