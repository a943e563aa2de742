//! The end of a daemon: all volumes are closed, and what a successor can continue is kept for it.

use std::time::Duration;

use signal_hook::consts::SIGHUP;

use ebb_api::stat::Stat;

use super::handover::lock;
use super::{Daemon, Event};
use crate::handover::{HandedListener, HandedOver};
use crate::notify;

/// How long a stop may still take after a second signal.
const HURRY: Duration = Duration::from_secs(3);

impl Daemon {
    /// Closes all volumes. With `keep`, the result is what a successor can continue, and the daemon, which has nothing open
    /// any more: freeing its memory takes time, for which clients need not wait.
    ///
    /// # Errors
    /// If a volume could not be flushed.
    pub(super) fn stop(self, keep: bool) -> anyhow::Result<Option<(HandedOver, Daemon)>> {
        notify::stopping();
        let guests: u64 = self.engine.disks_of_guests().into_values().sum();
        tracing::info!(clients = self.server.clients(), guests, "stopping: completing requests");
        self.state.set_phase(Stat::STOPPING);
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
        if report.is_clean() {
            tracing::info!("stopped: all volumes flushed");
            let listeners = listeners.into_iter().map(HandedListener::of).collect();
            let connections = self.server.take_kept();
            if keep {
                // Closes connections to servers, of which some admit one client at a time.
                self.volumes.list().iter().for_each(|volume| volume.abort());
                ebb_store::wait_for_closed_images();
            }
            return Ok(keep.then(|| (HandedOver { listeners, connections }, self)));
        }
        // Workers may be blocked by a store that does not respond: they end with the process.
        std::mem::forget(self);
        if report.unflushed.is_empty() {
            tracing::info!("stopped: all volumes flushed, unacknowledged requests abandoned");
            return Ok(None);
        }
        let list = report.unflushed.iter().map(|volume| {
            let unstable = match volume.unstable {
                0 => String::new(),
                bytes => format!(", {bytes} bytes written and not flushed"),
            };
            format!(
                "{} ({} bytes unwritten{unstable}: {})",
                volume.volume, volume.bytes, volume.why
            )
        });
        let list: Vec<_> = list.collect();
        anyhow::bail!("{} volume(s) could not be flushed: {}", list.len(), list.join("; "))
    }
}
