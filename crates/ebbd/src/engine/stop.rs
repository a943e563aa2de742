//! Stopping: each volume closes as soon as its own requests have completed, within one limit of time for all.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ebb_io::{Io, Signal};
use ebb_volume::{BlockError, ErrorKind, Volume};
use event_listener::Event;
use futures_lite::future::or;

use super::{Engine, lock};

/// How often progress is logged, and the pause before writing back is tried again.
const PROGRESS: Duration = Duration::from_secs(3);
const RETRY: Duration = Duration::from_millis(500);
/// How long clients may take to receive their last replies before their volume is closed nevertheless.
const LAST_REPLIES: Duration = Duration::from_secs(15);

/// How long clients of volumes that were given up may take to receive their errors.
const LAST_ERRORS: Duration = Duration::from_secs(1);

/// A volume with acknowledged data that is not on its store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unflushed {
    /// Its name.
    pub volume: String,
    /// Acknowledged data that is only in memory, bytes.
    pub bytes: u64,
    /// Data that was written to the store and not flushed, bytes, as far as a writeback cache can still write it again. After
    /// a failed flush the store may not have it. What is lost is not counted.
    pub unstable: u64,
    /// The part of the volume that is not stable.
    pub part: UnstablePart,
    /// The cause, and a remedy.
    pub why: String,
}

/// The part of a volume that may not be stable on its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnstablePart {
    /// Data that this daemon acknowledged.
    Data,
    /// Only the name of a file in its folder.
    FileName,
    /// Only data of earlier daemons: no flush has succeeded since the volume was opened.
    EarlierData,
}

/// A volume whose last flush failed, and which loses no data that this daemon acknowledged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StableFailure {
    /// Its name.
    pub volume: String,
    /// A flush has succeeded since the volume was opened, and covers the data of earlier daemons.
    /// Without one, they may have left data that is not stable.
    pub knows_earlier: bool,
}

/// The result of a stop.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopReport {
    /// Volumes that could not be flushed, by name.
    pub unflushed: Vec<Unflushed>,
    /// Volumes without data loss whose stores still have requests in flight; these are not waited for.
    pub abandoned: Vec<String>,
    /// Volumes whose last flush failed, and that lose no data that this daemon acknowledged.
    pub failing: Vec<StableFailure>,
}

impl StopReport {
    /// Returns true if all data that this daemon acknowledged is stable, with no request in flight.
    pub fn is_clean(&self) -> bool {
        self.unflushed.is_empty() && self.abandoned.is_empty()
    }
}

/// The time at which a stop gives up; it may be brought forward during the stop.
#[derive(Default)]
pub(super) struct StopDeadline {
    at: Mutex<Option<Instant>>,
    hurried: Mutex<bool>,
    changed: Event,
}

impl StopDeadline {
    /// Brings it forward to `at`.
    fn bring_forward(&self, at: Instant) -> Instant {
        let mut now = self.at.lock().unwrap_or_else(PoisonError::into_inner);
        let at = now.map_or(at, |before| before.min(at));
        *now = Some(at);
        drop(now);
        self.changed.notify(usize::MAX);
        at
    }

    fn get(&self) -> Option<Instant> {
        *self.at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the deadline has passed.
    async fn over(&self, io: &Io) {
        loop {
            let changed = self.changed.listen();
            let left = self.get().map(|at| at.saturating_duration_since(ebb_mem::clock::now()));
            match left {
                Some(Duration::ZERO) => return,
                Some(left) => or(io.sleep(left), changed).await,
                None => changed.await,
            }
        }
    }

    async fn hurried(&self) {
        loop {
            let changed = self.changed.listen();
            if *self.hurried.lock().unwrap_or_else(PoisonError::into_inner) {
                return;
            }
            changed.await;
        }
    }
}

/// A volume that is being closed.
struct ClosingVolume {
    volume: Arc<Volume>,
    outcome: RefCell<Option<Result<(), BlockError>>>,
    failed: Cell<bool>,
}

impl Engine {
    /// Cancels openings and a reload, and closes all volumes concurrently, within the configured time (see
    /// [`Engine::hurry`]). No new requests are accepted.
    pub async fn stop(self: &Arc<Self>, io: &Io) -> StopReport {
        self.deadline.bring_forward(ebb_mem::clock::now() + self.drain);
        self.stopping.stop();
        self.server.begin_stop();
        self.guests.begin_stop();
        let slots: Vec<_> = lock(&self.slots).values().cloned().collect();
        let volumes = slots.iter().filter_map(|slot| slot.open_volume());
        let jobs: Vec<_> = volumes
            .map(|volume| {
                let (outcome, failed) = (RefCell::default(), Cell::default());
                Rc::new(ClosingVolume { volume, outcome, failed })
            })
            .collect();
        let done = Rc::<Signal>::default();
        // Dropped when this function returns, which cancels tasks that hang.
        let _tasks: Vec<_> = jobs
            .iter()
            .map(|job| {
                let (engine, io, job, done) = (self.clone(), io.clone(), job.clone(), done.clone());
                io.clone().spawn(async move {
                    engine.end(&io, &job).await;
                    done.set();
                })
            })
            .collect();
        let all = async {
            while jobs.iter().any(|job| job.outcome.borrow().is_none()) {
                done.wait().await;
            }
            self.server.wait_until_empty().await;
        };
        let progress = async {
            loop {
                io.sleep(PROGRESS).await;
                let open = jobs.iter().filter(|job| job.outcome.borrow().is_none());
                open.for_each(|job| job.log_progress());
            }
        };
        or(all, or(self.deadline.over(io), progress)).await;
        let mut report = StopReport::default();
        jobs.iter().for_each(|job| job.report(&mut report));
        report.abandoned.iter().for_each(|volume| self.guests.note_stable(volume));
        // A successor's flushes would succeed: its guests would not notice what the last flush of this daemon lost.
        for volume in jobs.iter().map(|job| &job.volume).filter(|volume| volume.is_lost()) {
            if !StableFailure::is_it(volume) {
                self.guests.note_lost(volume.name());
            } else if !volume.has_flushed() {
                self.guests.note_inherited_lost(volume.name());
            }
        }
        for left in lock(&self.lost).values() {
            if !report.unflushed.iter().any(|listed| listed.volume == left.volume) {
                report.unflushed.push(left.clone());
            }
        }
        // Requests that wait for a server fail, and clients receive the errors; those in the kernel are not waited for.
        let left: Vec<_> = jobs.iter().filter(|job| job.outcome.borrow().is_none()).collect();
        if !left.is_empty() {
            left.iter().for_each(|job| job.volume.abort());
            io.timeout(LAST_ERRORS, self.server.wait_until_empty()).await;
            // Without requests to another layer that hangs, an overlay can be closed.
            for job in left.iter().filter(|job| job.is_closed()) {
                let volume = job.volume.name().to_string();
                tracing::info!(volume, "closed after all: its data is stable");
                report.unflushed.retain(|left| left.volume != volume);
                report.abandoned.retain(|left| *left != volume);
            }
        }
        let connections = self.server.disconnect_all();
        if connections > 0 {
            tracing::info!(
                connections,
                "closed the connections of clients whose stores do not respond"
            );
        }
        report
    }

    /// Waits for the stop.
    pub(crate) async fn wait_for_stop(&self) {
        self.stopping.wait().await;
    }

    /// Makes the current or next stop give up after `limit` at the latest, and no longer wait for clients.
    pub fn hurry(&self, limit: Duration) {
        *self.deadline.hurried.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.deadline.bring_forward(ebb_mem::clock::now() + limit);
    }

    /// Waits until the requests of a volume's clients have completed, and closes it.
    async fn end(&self, io: &Io, job: &ClosingVolume) {
        let name = job.volume.name();
        let clients = async {
            self.server.wait_for_volume(name).await;
            self.guests.wait_for_volume(name).await;
        };
        // A client that does not read its replies must not prevent its volume from being written back.
        let patience = async {
            io.sleep(LAST_REPLIES.min(self.drain / 2)).await;
        };
        or(clients, or(patience, self.deadline.hurried())).await;
        let outcome = loop {
            match job.volume.close(io).await {
                Err(error) if self.may_try_again(&job.volume) => {
                    if !job.failed.replace(true) {
                        log_retry(&job.volume, &error);
                    }
                    io.sleep(RETRY).await;
                }
                outcome => break outcome,
            }
        };
        if outcome.is_ok() {
            self.guests.note_stable(name);
            tracing::debug!(volume = name.to_string(), "volume closed");
        }
        *job.outcome.borrow_mut() = Some(outcome);
    }

    fn may_try_again(&self, volume: &Volume) -> bool {
        let deadline = self.deadline.get().unwrap_or_else(ebb_mem::clock::now);
        // Without a loss, a folder could not be flushed, or the block map of an overlay.
        let may_help = !volume.is_lost() && !volume.is_offline() && !volume.is_stable();
        may_help && ebb_mem::clock::now() + RETRY < deadline
    }
}

impl ClosingVolume {
    fn is_closed(&self) -> bool {
        matches!(&*self.outcome.borrow(), Some(Ok(())))
    }

    fn log_progress(&self) {
        let (volume, unwritten_bytes) = (self.volume.name().to_string(), unwritten(&self.volume));
        let (unstable_bytes, in_flight) = (unstable(&self.volume), self.volume.in_flight());
        tracing::info!(volume, unwritten_bytes, unstable_bytes, in_flight, "still stopping");
    }

    fn report(&self, report: &mut StopReport) {
        let (volume, bytes) = (self.volume.name().to_string(), unwritten(&self.volume));
        let unstable = unstable(&self.volume);
        let why = match &*self.outcome.borrow() {
            Some(Ok(())) => return,
            // Nothing is missing: the store has all that was acknowledged.
            Some(Err(error)) if StableFailure::is_it(&self.volume) => {
                let failure = StableFailure::of(&self.volume);
                failure.log(error);
                report.failing.push(failure);
                return;
            }
            Some(Err(error)) => why_unstable(&self.volume, error),
            None if self.volume.abandon() => {
                let in_flight = self.volume.in_flight();
                tracing::warn!(
                    volume,
                    in_flight,
                    "its store does not respond: unacknowledged requests are abandoned"
                );
                report.abandoned.push(volume);
                return;
            }
            None => format!(
                "its store did not respond in time, {} requests are in flight: see --drain",
                self.volume.in_flight()
            ),
        };
        tracing::error!(
            volume,
            unwritten_bytes = bytes,
            unstable_bytes = unstable,
            error = why,
            "not everything could be made stable"
        );
        report.unflushed.push(Unflushed::of(&self.volume, UnstablePart::Data, why));
    }
}

impl Unflushed {
    /// A volume of which a part is not stable.
    pub(super) fn of(volume: &Volume, part: UnstablePart, why: String) -> Unflushed {
        let (bytes, unstable) = (unwritten(volume), unstable(volume));
        Unflushed { volume: volume.name().to_string(), bytes, unstable, part, why }
    }
}

impl StableFailure {
    /// Returns true if a volume that could not be closed loses no acknowledged data: a flush covers
    /// all of it, or each write has failed.
    pub(crate) fn is_it(volume: &Volume) -> bool {
        volume.is_stable() || volume.has_acknowledged_nothing() || volume.has_flushed_acknowledged()
    }

    /// The failure of a stable volume that could not be closed.
    pub(super) fn of(volume: &Volume) -> StableFailure {
        let knows_earlier = volume.has_flushed();
        StableFailure { volume: volume.name().to_string(), knows_earlier }
    }

    /// Logs the error of the last flush; says nothing of a volume that was given up before.
    pub(super) fn log(&self, error: &BlockError) {
        if error.kind == ErrorKind::Closing {
            return;
        }
        let (volume, error) = (&self.volume, full_text(error));
        if self.knows_earlier {
            tracing::warn!(
                volume,
                error,
                "its store fails; all acknowledged data was stable before"
            );
        } else {
            tracing::warn!(
                volume,
                error,
                "its store fails; no change was acknowledged since it was opened, and earlier data may not be stable"
            );
        }
    }
}

/// Logs that writing back a volume failed.
pub(super) fn log_retry(volume: &Volume, error: &BlockError) {
    let (volume, error) = (volume.name().to_string(), full_text(error));
    tracing::warn!(volume, error, "writeback failed and is tried again");
}

pub(super) fn full_text(error: &BlockError) -> String {
    error.full_text()
}

/// Returns why the data of a volume that is being closed is not stable. The texts of these errors
/// say how to reopen the volume, which ends now: only the cause is told.
pub(super) fn why_unstable(volume: &Volume, error: &BlockError) -> String {
    match (error.kind, volume.loss()) {
        (ErrorKind::Lost, Some(loss)) => format!("an earlier flush failed: {}", loss.error),
        (ErrorKind::Lost, None) => "an earlier flush failed".to_owned(),
        (ErrorKind::Offline, _) => {
            let (operation, length, at) = (error.operation.name(), error.length, error.offset);
            let source = error.source.as_ref().map(|source| format!(": {source}"));
            format!(
                "{operation} of {length} bytes at {at}: the store is offline, because another \
                 client may have its lock{}",
                source.unwrap_or_default()
            )
        }
        _ => full_text(error),
    }
}

/// Bytes of acknowledged data that the volume's store does not have.
pub(super) fn unwritten(volume: &Volume) -> u64 {
    volume.dirty()
}

/// See [`Unflushed::unstable`].
pub(super) fn unstable(volume: &Volume) -> u64 {
    volume.unstable()
}
