//! The end of all volumes: each closes as soon as its own requests are over, within one limit of time.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ebb_io::{Io, Signal};
use ebb_volume::{BlockError, Mode, Volume};
use event_listener::Event;
use futures_lite::future::or;

use super::{Engine, lock};

/// How often the log tells of progress, and how soon a failure is tried again.
const TELL: Duration = Duration::from_secs(3);
const RETRY: Duration = Duration::from_millis(500);
/// How long clients may take to receive their last replies before their volume is closed all the same.
const FAREWELL: Duration = Duration::from_secs(15);

/// How long clients of volumes that were given up may take to hear of it.
const GOODBYE: Duration = Duration::from_secs(1);

/// A volume that is not on its store as clients were told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unflushed {
    /// Its name.
    pub volume: String,
    /// Bytes that were acknowledged and are in memory only.
    pub bytes: u64,
    /// Why, and what to do.
    pub why: String,
}

/// How a stop ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Volumes that could not be flushed, by name.
    pub unflushed: Vec<Unflushed>,
    /// Volumes of which nothing is missing, whose stores still have requests that nobody will hear of.
    pub abandoned: Vec<String>,
}

impl Report {
    /// Everything is stable, and nothing is under way.
    pub fn is_clean(&self) -> bool {
        self.unflushed.is_empty() && self.abandoned.is_empty()
    }
}

/// When a stop gives up; it may be brought forward while the stop lasts.
#[derive(Default)]
pub(super) struct Deadline {
    at: Mutex<Option<Instant>>,
    hurried: Mutex<bool>,
    changed: Event,
}

impl Deadline {
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

    /// Waits until it is over.
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
struct Job {
    volume: Arc<Volume>,
    outcome: RefCell<Option<Result<(), BlockError>>>,
    failed: Cell<bool>,
}

impl Engine {
    /// Ends everything: an opening, a reload, and all volumes, side by side, within the time that was set for it
    /// (see [`Engine::hurry`]). No request begins any more.
    pub async fn stop(self: &Arc<Self>, io: &Io) -> Report {
        self.deadline.bring_forward(ebb_mem::clock::now() + self.drain);
        self.stopping.stop();
        self.server.begin_stop();
        self.guests.begin_stop();
        let slots: Vec<_> = lock(&self.slots).values().cloned().collect();
        let volumes = slots.iter().filter_map(|slot| slot.open_volume());
        let jobs: Vec<_> = volumes
            .map(|volume| {
                let (outcome, failed) = (RefCell::default(), Cell::default());
                Rc::new(Job { volume, outcome, failed })
            })
            .collect();
        let done = Rc::<Signal>::default();
        // Dropped with this function's end: what hangs then is not waited for.
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
        let telling = async {
            loop {
                io.sleep(TELL).await;
                jobs.iter().filter(|job| job.outcome.borrow().is_none()).for_each(|job| job.tell());
            }
        };
        or(all, or(self.deadline.over(io), telling)).await;
        let mut report = Report::default();
        jobs.iter().for_each(|job| job.report(&mut report));
        report.abandoned.iter().for_each(|volume| self.guests.note_stable(volume));
        for left in lock(&self.lost).values() {
            if !report.unflushed.iter().any(|listed| listed.volume == left.volume) {
                report.unflushed.push(left.clone());
            }
        }
        // What still waits for a server is told to its clients; what the kernel has is not waited for.
        let left: Vec<_> = jobs.iter().filter(|job| job.outcome.borrow().is_none()).collect();
        if !left.is_empty() {
            left.iter().for_each(|job| job.volume.abort());
            io.timeout(GOODBYE, self.server.wait_until_empty()).await;
        }
        let connections = self.server.disconnect_all();
        if connections > 0 {
            tracing::info!(connections, "clients that wait for dead stores are hung up on");
        }
        report
    }

    /// Has a stop that is under way, or is to come, give up after `limit` at the latest; clients are not waited for
    /// any more.
    pub fn hurry(&self, limit: Duration) {
        *self.deadline.hurried.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.deadline.bring_forward(ebb_mem::clock::now() + limit);
    }

    /// Sees the clients of one volume off, and closes it.
    async fn end(&self, io: &Io, job: &Job) {
        let name = job.volume.name();
        let clients = async {
            self.server.wait_for_volume(name).await;
            self.guests.seen_off(name).await;
        };
        // A client that does not receive must not keep its volume from being written.
        let patience = async {
            io.sleep(FAREWELL.min(self.drain / 2)).await;
        };
        or(clients, or(patience, self.deadline.hurried())).await;
        let outcome = loop {
            match job.volume.close(io).await {
                Err(error) if self.may_try_again(&job.volume) => {
                    if !job.failed.replace(true) {
                        tell_retry(&job.volume, &error);
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
        let may_help = volume.cache_mode() == Mode::Writeback && !volume.is_lost();
        may_help && ebb_mem::clock::now() + RETRY < deadline
    }
}

impl Job {
    fn tell(&self) {
        let (volume, unwritten_bytes) = (self.volume.name().to_string(), unwritten(&self.volume));
        let under_way = self.volume.in_flight();
        tracing::info!(volume, unwritten_bytes, under_way, "still draining");
    }

    fn report(&self, report: &mut Report) {
        let (volume, bytes) = (self.volume.name().to_string(), unwritten(&self.volume));
        let why = match &*self.outcome.borrow() {
            Some(Ok(())) => return,
            Some(Err(error)) => full_text(error),
            None if self.volume.is_stable() => {
                let under_way = self.volume.in_flight();
                tracing::warn!(
                    volume,
                    under_way,
                    "its store does not answer: requests are abandoned"
                );
                report.abandoned.push(volume);
                return;
            }
            None => format!(
                "its store did not answer in time, {} requests are under way: see --drain",
                self.volume.in_flight()
            ),
        };
        tracing::error!(
            volume,
            unwritten_bytes = bytes,
            error = why,
            "not everything could be made stable"
        );
        report.unflushed.push(Unflushed { volume, bytes, why });
    }
}

/// Tells the log that writing a volume back failed.
pub(super) fn tell_retry(volume: &Volume, error: &BlockError) {
    let (volume, error) = (volume.name().to_string(), full_text(error));
    tracing::warn!(volume, error, "writing back failed, and is tried again");
}

pub(super) fn full_text(error: &BlockError) -> String {
    error.full_text()
}

pub(super) fn unwritten(volume: &Volume) -> u64 {
    volume.cache().map_or(0, |cache| cache.dirty().saturating_add(cache.unstable()))
}
