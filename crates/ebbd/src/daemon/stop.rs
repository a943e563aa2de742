//! The end of a daemon: all volumes are closed, and what a successor can continue is kept for it.

use std::time::Duration;

use signal_hook::consts::SIGHUP;

use ebb_api::stat::DaemonPhase;

use super::handover::lock;
use super::{Daemon, Event};
use crate::engine::StopReport;
use crate::handover::{HandedListener, HandedOver};
use crate::notify;

/// How long a stop may still take after a second signal.
const HURRY: Duration = Duration::from_secs(3);

impl Daemon {
    /// Closes all volumes. With `keep` the result has what a successor can continue, also if a volume could not be closed:
    /// then without that volume's connections.
    ///
    /// # Errors
    /// If a volume could not be flushed.
    pub(super) fn stop(mut self, keep: bool) -> anyhow::Result<Option<StoppedDaemon>> {
        notify::stopping();
        let guests: u64 = self.engine.disks_of_guests().into_values().sum();
        tracing::info!(clients = self.server.clients(), guests, "stopping: completing requests");
        self.state.set_phase(DaemonPhase::Stopping);
        let mut listeners = std::mem::take(&mut *lock(&self.listeners));
        if keep {
            self.server.keep_connections();
        } else {
            listeners.clear();
        }
        self.engine.close_sockets();
        self.drive(|engine, io| async move { Event::Stopped(engine.stop(&io).await) });
        let report = loop {
            match self.next_event()? {
                Event::Stopped(report) => break report,
                Event::Signal(signal) if signal != SIGHUP => {
                    tracing::warn!(
                        "second signal: data that is not written within 3 s is given up"
                    );
                    self.engine.hurry(HURRY);
                }
                Event::TakeoverRequested(successor) => successor.refuse("the daemon is stopping"),
                _ => {}
            }
        };
        self.engine.end_guests();
        let failure = failure(&report);
        if failure.is_none() {
            match report.failing.len() {
                0 => tracing::info!("stopped: all volumes flushed"),
                failing => {
                    tracing::warn!(failing, "stopped: the last flush of some volumes failed");
                }
            }
        }
        // The page ends with the daemon's other handle of it, so that a successor can have its address.
        drop(self.control.take());
        let rest = StoppedRest { daemon: self, failure };
        if !keep {
            drop(listeners);
            return rest.end().map(|()| None);
        }
        let open = |name: &str| {
            report.unflushed.iter().any(|volume| volume.volume == name)
                || report.abandoned.iter().any(|volume| volume == name)
        };
        let mut connections = rest.daemon.server.take_kept();
        connections.retain(|connection| !open(connection.export()));
        if rest.failure.is_none() {
            // Closes connections to servers, of which some admit one at a time.
            rest.daemon.volumes.list().iter().for_each(|volume| volume.abort());
            ebb_store::wait_for_closed_images();
        }
        let listeners = listeners.into_iter().map(HandedListener::of).collect();
        Ok(Some(StoppedDaemon { handed: HandedOver { listeners, connections }, rest }))
    }
}

/// A daemon that has stopped, and what a successor can continue.
pub(super) struct StoppedDaemon {
    pub(super) handed: HandedOver,
    pub(super) rest: StoppedRest,
}

/// A daemon that has stopped. Freeing its memory takes time, for which clients need not wait.
pub(super) struct StoppedRest {
    pub(super) daemon: Daemon,
    /// Volumes could not be closed.
    pub(super) failure: Option<Failure>,
}

/// What a stop could not do.
pub(super) enum Failure {
    /// Unacknowledged requests are abandoned.
    Abandoned,
    /// Data is missing on a store.
    Unflushed(anyhow::Error),
}

impl StoppedRest {
    /// Frees the daemon, if no store has requests of it.
    ///
    /// # Errors
    /// If a volume could not be flushed.
    pub(super) fn end(self) -> anyhow::Result<()> {
        let Some(failure) = self.failure else { return Ok(()) };
        // Workers may be blocked by a store that does not respond: they end with the process.
        std::mem::forget(self.daemon);
        match failure {
            Failure::Unflushed(error) => Err(error),
            Failure::Abandoned => {
                tracing::info!("stopped: unacknowledged requests abandoned");
                Ok(())
            }
        }
    }
}

fn failure(report: &StopReport) -> Option<Failure> {
    if report.is_clean() {
        return None;
    }
    if report.unflushed.is_empty() {
        return Some(Failure::Abandoned);
    }
    let list = report.unflushed.iter().map(|volume| {
        let unstable = match volume.unstable {
            0 => String::new(),
            bytes => format!(", {bytes} bytes written and not flushed"),
        };
        format!("{} ({} bytes unwritten{unstable}: {})", volume.volume, volume.bytes, volume.why)
    });
    let list: Vec<_> = list.collect();
    let text = format!("{} volume(s) could not be flushed: {}", list.len(), list.join("; "));
    Some(Failure::Unflushed(anyhow::Error::msg(text)))
}
