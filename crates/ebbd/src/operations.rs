//! Operations: changes in progress that clients can follow and, where that is safe, cancel.
//!
//! # Invariants
//! - At most [`MOST_RUNNING`] operations of volumes are in progress, [`MOST_ALIKE`] of one volume, and fewer where fewer
//!   places are free: operations of volumes whose stores hang leave places for other volumes. Reloads, and flushes of all
//!   volumes, have [`MOST_ALIKE`] places each apart from those.
//! - At most [`MOST_ENDED`] are remembered after their end, for [`REMEMBERED`] at most.
//! - Of one volume one flush is under way and one waits for its turn, which later requests join: it begins after them, and
//!   so it covers what was written before them.
//! - An operation ends once. One that was cancelled counts as in progress until its task has ended.
//! - An operation does not keep a volume open.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use ebb_api::{KeyChangeView, OperationState, OperationView, Refusal, ResizeView};
use ebb_control::Refused;
use ebb_volume::{Stop, Volume};

/// The most operations of volumes in progress.
const MOST_RUNNING: usize = 256;
/// The most operations in progress of one volume, and of one kind that concerns all volumes.
const MOST_ALIKE: usize = 8;
/// A volume may have one operation for so many free places, rounded up.
const FREE_PER_PLACE: usize = 8;
/// The kind of flushes.
const FLUSH: &str = "flush";
/// The most operations that are remembered after their end.
const MOST_ENDED: usize = 256;
/// How long an operation is remembered after its end.
const REMEMBERED: Duration = Duration::from_secs(600);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The refusal of an operation that was cancelled.
pub(crate) fn cancelled() -> Refused {
    Refused::new(
        Refusal::Conflict,
        "cancelled",
        "the operation was cancelled",
        "begin it again if you want it",
    )
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
    /// It has begun what later requests for the same cannot join any more.
    under_way: bool,
    resized: Option<ResizeView>,
    key_added: Option<KeyChangeView>,
    /// Bytes that were copied, and bytes in all, if it copies.
    copied: Option<(u64, u64)>,
    /// Volumes that are not served after a reload, and the number of further ones.
    not_served: (Vec<String>, u64),
    /// Volumes whose vhost-user sockets cannot be opened, after a reload.
    without_socket: Vec<String>,
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

    /// Waits until its task has ended.
    pub(crate) async fn over(&self) {
        self.over.wait().await;
    }

    /// Notes that later requests cannot join it any more.
    ///
    /// # Errors
    /// It was cancelled before.
    pub(crate) fn set_under_way(&self) -> Result<(), Refused> {
        let mut progress = lock(&self.progress);
        if self.cancelled.is_stopped() {
            return Err(cancelled());
        }
        progress.under_way = true;
        Ok(())
    }

    fn can_be_joined(&self) -> bool {
        let progress = lock(&self.progress);
        !progress.under_way && progress.end.is_none()
    }

    fn is_under_way(&self) -> bool {
        lock(&self.progress).under_way
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

    /// Notes how far it has copied.
    pub(crate) fn note_copied(&self, done: u64, total: u64) {
        lock(&self.progress).copied = Some((done, total));
    }

    /// Whether it was cancelled.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.is_stopped()
    }

    /// Notes what a resize has changed.
    pub(crate) fn note_resized(&self, resized: ResizeView) {
        lock(&self.progress).resized = Some(resized);
    }

    /// Notes the key slot that was added.
    pub(crate) fn note_key_added(&self, added: KeyChangeView) {
        lock(&self.progress).key_added = Some(added);
    }

    /// Notes the volumes that are not served after a reload.
    pub(crate) fn note_not_served(&self, mut volumes: Vec<String>) {
        let more = volumes.len().saturating_sub(OperationView::MAX_NOT_SERVED);
        volumes.truncate(OperationView::MAX_NOT_SERVED);
        lock(&self.progress).not_served = (volumes, u64::try_from(more).unwrap_or(u64::MAX));
    }

    /// Notes the volumes whose vhost-user sockets cannot be opened after a reload.
    pub(crate) fn note_without_socket(&self, mut volumes: Vec<String>) {
        volumes.truncate(OperationView::MAX_NOT_SERVED);
        lock(&self.progress).without_socket = volumes;
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
            None => (OperationState::Running, None, None),
            Some((End::Done, at)) => (OperationState::Done, None, Some(at)),
            Some((End::Failed(why), at)) => (OperationState::Failed, Some(why), Some(at)),
            Some((End::Cancelled, at)) => (OperationState::Cancelled, None, Some(at)),
        };
        let now = ended.copied().unwrap_or_else(ebb_mem::clock::now);
        let since_seconds = now.saturating_duration_since(self.began).as_secs_f64();
        let total = progress.written.iter().map(|(_, dirty)| *dirty).sum::<u64>();
        let (done, total) = match ended {
            None => (progress.done, total.max(progress.done)),
            Some(_) => (progress.done, progress.done),
        };
        let (done, total) = progress.copied.unwrap_or((done, total));
        let eta = (ended.is_none() && done > 0)
            .then(|| since_seconds * (total.saturating_sub(done)) as f64 / done as f64);
        let view = OperationView {
            id: self.id,
            kind: self.kind.to_owned(),
            volume: self.volume.clone(),
            by: self.by.clone(),
            state,
            step: progress.step.clone(),
            done,
            total,
            unit: "bytes".to_owned(),
            since_seconds,
            eta_seconds: eta,
            cancellable: progress.cancellable,
            resized: progress.resized.clone(),
            key_added: progress.key_added.clone(),
            not_served: progress.not_served.0.clone(),
            more_not_served: progress.not_served.1,
            without_socket: progress.without_socket.clone(),
            failure: failure.map(|why| why.body.clone()),
            failure_status: failure.map(|why| why.status()),
        };
        (view, failure.map_or(200, |why| why.status()))
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
    volume.dirty()
}

/// A flush of a volume that was requested.
#[derive(Debug)]
pub(crate) enum FlushTurn {
    /// One that waits for its turn covers it, too.
    Joined(Arc<LongOperation>),
    /// A new one. Its turn comes when `after` is over.
    Begun { operation: Arc<LongOperation>, after: Option<Arc<LongOperation>> },
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
        lock(&self.0).begin(kind, volume, by)
    }

    /// Begins a flush of a volume, or joins one that waits for its turn.
    ///
    /// # Errors
    /// If too many operations are in progress.
    pub(crate) fn begin_flush(&self, volume: &str, by: &str) -> Result<FlushTurn, Refused> {
        let mut table = lock(&self.0);
        let of_it = |one: &&Arc<LongOperation>| {
            one.kind == FLUSH && one.volume.as_deref() == Some(volume) && !one.over.is_stopped()
        };
        if let Some(waiting) = table.all.values().filter(of_it).find(|one| one.can_be_joined()) {
            return Ok(FlushTurn::Joined(waiting.clone()));
        }
        let after = table.all.values().filter(of_it).find(|one| one.is_under_way()).cloned();
        let operation = table.begin(FLUSH, Some(volume), by)?;
        Ok(FlushTurn::Begun { operation, after })
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
            return Err(Refused::new(Refusal::Unknown, "unknown_operation", message, remedy));
        };
        let Err((kind, why)) = operation.cancel() else { return Ok(operation.view().0) };
        let remedy = match kind {
            "already_ended" => "nothing was cancelled: `ebbd operation show` says how it has ended",
            _ => "wait for it: what it has begun can only be completed",
        };
        Err(Refused::new(Refusal::Conflict, kind, format!("operation {id} {why}"), remedy))
    }
}

impl OperationTable {
    fn begin(
        &mut self,
        kind: &'static str,
        volume: Option<&str>,
        by: &str,
    ) -> Result<Arc<LongOperation>, Refused> {
        self.forget();
        self.check_room(kind, volume)?;
        self.last += 1;
        let operation = Arc::new(LongOperation {
            id: self.last,
            kind,
            volume: volume.map(str::to_owned),
            by: by.to_owned(),
            began: ebb_mem::clock::now(),
            progress: Mutex::new(Progress {
                step: "waiting".to_owned(),
                written: Vec::new(),
                done: 0,
                cancellable: false,
                under_way: false,
                resized: None,
                key_added: None,
                copied: None,
                not_served: Default::default(),
                without_socket: Vec::new(),
                end: None,
            }),
            cancelled: Stop::default(),
            ended: Arc::default(),
            over: Stop::default(),
        });
        self.all.insert(operation.id, operation.clone());
        Ok(operation)
    }

    /// Checks that one more operation leaves places for other volumes, and for reloads.
    fn check_room(&self, kind: &str, volume: Option<&str>) -> Result<(), Refused> {
        let (mut of_volumes, mut alike) = (0, 0);
        for one in self.all.values().filter(|one| !one.over.is_stopped()) {
            of_volumes += usize::from(one.volume.is_some());
            let same = one.volume.as_deref() == volume && (volume.is_some() || one.kind == kind);
            alike += usize::from(same);
        }
        let free = match volume {
            Some(_) => MOST_RUNNING.saturating_sub(of_volumes),
            None => MOST_RUNNING,
        };
        if alike < MOST_ALIKE.min(free.div_ceil(FREE_PER_PLACE)) {
            return Ok(());
        }
        let message = match volume {
            Some(volume) if alike > 0 => {
                format!("{alike} operations on volume `{volume}` are in progress")
            }
            Some(_) => format!("{of_volumes} operations on volumes are in progress"),
            None => format!("{alike} operations `{kind}` on all volumes are in progress"),
        };
        let remedy = "wait until some have ended: `ebbd operation list` shows them, and `ebbd status` stores that do not respond";
        Err(Refused::new(Refusal::Busy, "too_many_operations", message, remedy))
    }

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
        assert_eq!(all.cancel(first.id()).unwrap_err().refusal, Refusal::Conflict);
        first.allow_cancel();
        assert!(all.get(first.id()).unwrap().0.cancellable);
        assert_eq!(all.cancel(first.id()).unwrap().state, OperationState::Cancelled);
        assert!(first.ended().is_stopped() && !first.commit());
        first.finish(Ok(()));
        assert_eq!(all.get(first.id()).unwrap().0.state, OperationState::Cancelled);

        let second = all.begin("remove", Some("a"), "").unwrap();
        second.allow_cancel();
        assert!(second.commit());
        assert_eq!(all.cancel(second.id()).unwrap_err().refusal, Refusal::Conflict);
        second.finish(Err(Refused::new(Refusal::Failed, "io", "m", "r")));
        let (view, status) = all.get(second.id()).unwrap();
        assert_eq!((view.state, status), (OperationState::Failed, 500));
        assert_eq!(view.failure.unwrap().message, "m");
        assert_eq!(all.cancel(9).unwrap_err().refusal, Refusal::Unknown);
        let ended = all.cancel(second.id()).unwrap_err();
        assert_eq!((ended.refusal, &*ended.body.error), (Refusal::Conflict, "already_ended"));
        assert_eq!(
            all.cancel(first.id()).unwrap().state,
            OperationState::Cancelled,
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
        // Each volume has a few.
        let names: Vec<_> = (0..MOST_RUNNING).map(|number| number.to_string()).collect();
        let running: Vec<_> =
            names.iter().map(|name| all.begin("flush", Some(name), "").unwrap()).collect();
        assert_eq!(all.begin("flush", Some("one more"), "").unwrap_err().refusal, Refusal::Busy);
        // A cancelled one counts until its task has ended.
        running[0].allow_cancel();
        all.cancel(running[0].id()).unwrap();
        assert!(all.begin("flush", Some("one more"), "").is_err());
        running[0].finish(Ok(()));
        assert!(all.begin("flush", Some("one more"), "").is_ok());
    }

    /// However many operations wait for stores that hang, there are places for other volumes and for a reload.
    #[test]
    fn operations_of_one_volume_leave_places_for_other_volumes_and_for_a_reload() {
        let all = Operations::default();
        let begin_many =
            |name: &str| (0..300).filter(|_| all.begin("resize", Some(name), "").is_ok()).count();
        assert_eq!(begin_many("hangs"), MOST_ALIKE);
        let refused = all.begin("remove", Some("hangs"), "").unwrap_err();
        assert_eq!((refused.refusal, &*refused.body.error), (Refusal::Busy, "too_many_operations"));
        assert!(refused.body.message.contains("`hangs`"), "{refused}");
        // The more of them hang, the fewer places each has, so that one is left for further volumes.
        let taken: Vec<_> = (0..40).map(|number| begin_many(&format!("hangs{number}"))).collect();
        assert!(taken.is_sorted_by(|one, next| one >= next), "{taken:?}");
        assert_eq!(taken.last(), Some(&1), "{taken:?}");
        assert!(all.begin("resize", Some("good"), "").is_ok());
        let for_all = |kind| (0..300).filter(|_| all.begin(kind, None, "").is_ok()).count();
        assert_eq!([for_all("flush"), for_all("reload")], [MOST_ALIKE, MOST_ALIKE]);
    }

    #[test]
    fn a_flush_joins_one_that_waits_for_its_turn_and_none_that_is_under_way() {
        let all = Operations::default();
        let begun = || match all.begin_flush("a", "").unwrap() {
            FlushTurn::Begun { operation, after } => (operation, after.map(|after| after.id())),
            FlushTurn::Joined(operation) => panic!("{} was joined", operation.id()),
        };
        let joined = || match all.begin_flush("a", "").unwrap() {
            FlushTurn::Joined(operation) => operation.id(),
            FlushTurn::Begun { operation, .. } => panic!("{} was begun", operation.id()),
        };
        let (first, after) = begun();
        assert_eq!((after, joined()), (None, first.id()));
        first.set_under_way().unwrap();
        // What was written since then is not covered by it, even if it was cancelled: its task goes on.
        let (second, after) = begun();
        assert_eq!((after, joined()), (Some(first.id()), second.id()));
        first.allow_cancel();
        all.cancel(first.id()).unwrap();
        assert_eq!(joined(), second.id());
        // One that was cancelled while it waited does not begin.
        second.allow_cancel();
        all.cancel(second.id()).unwrap();
        assert_eq!(second.set_under_way().unwrap_err().body.error, "cancelled");
        let (third, after) = begun();
        assert_eq!(after, Some(first.id()));
        first.finish(Ok(()));
        third.set_under_way().unwrap();
        assert_eq!(begun().1, Some(third.id()));
        assert!(matches!(all.begin_flush("b", "").unwrap(), FlushTurn::Begun { after: None, .. }));
    }
}
