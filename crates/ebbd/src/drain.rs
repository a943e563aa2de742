//! Closing volumes: what is in memory only goes to the stores, with progress in the log and a limit
//! of time (design, section 4: nothing is forgotten silently).
//!
//! Invariants: volumes are closed side by side, so that a store that is slow or dead holds up no
//! other; a writeback that fails is tried again until the time is over; what is not stable then is
//! listed.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use ebb_io::{Io, WorkerHandle};
use ebb_volume::{BlockError, Mode, Volume};

/// How often the log tells of progress, and how soon a failure is tried again.
const TELL: Duration = Duration::from_secs(3);
const RETRY: Duration = Duration::from_millis(500);

/// The worker ended before the volumes were closed.
#[derive(Debug, thiserror::Error)]
#[error("a worker ended before the volumes were closed")]
pub(crate) struct WorkerEnded;

type Outcome = (usize, Result<(), BlockError>);

/// Waits for `seen_off`, then closes `volumes`; all of that within `limit`. Returns the names of those
/// that are not stable, each of which the log tells about.
///
/// # Errors
/// [`WorkerEnded`].
pub(crate) fn drain<F, Fut>(
    worker: &WorkerHandle,
    volumes: &[Arc<Volume>],
    seen_off: F,
    limit: Duration,
) -> Result<Vec<String>, WorkerEnded>
where
    F: FnOnce(Io) -> Fut + Send + 'static,
    Fut: Future<Output = ()> + 'static,
{
    let deadline = ebb_mem::clock::now() + limit;
    let (sender, outcomes) = channel::<Outcome>();
    let all = volumes.to_vec();
    worker.spawn(move |io| async move {
        seen_off(io.clone()).await;
        for (number, volume) in all.into_iter().enumerate() {
            let (on, sender) = (io.clone(), sender.clone());
            io.spawn(async move { close(on, number, volume, deadline, sender).await }).detach();
        }
    });
    let mut open: Vec<bool> = volumes.iter().map(|_| true).collect();
    let mut failed = Vec::new();
    let mut told = ebb_mem::clock::now();
    loop {
        let now = ebb_mem::clock::now();
        if now >= deadline && open.contains(&true) {
            break;
        }
        let wait = (told + TELL).min(deadline).saturating_duration_since(now);
        match outcomes.recv_timeout(wait) {
            Ok((number, result)) => {
                open[number] = false;
                if let Err(error) = result {
                    let volume = &volumes[number];
                    not_stable(volume, &error.to_string(), error.source.as_ref());
                    failed.push(volume.name().to_string());
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                told = ebb_mem::clock::now();
                tell(volumes, &open);
            }
            // All have told, or nobody is there to do so.
            Err(RecvTimeoutError::Disconnected) if open.contains(&true) => return Err(WorkerEnded),
            Err(RecvTimeoutError::Disconnected) => return Ok(failed),
        }
    }
    for (volume, _) in volumes.iter().zip(&open).filter(|(_, open)| **open) {
        not_stable(volume, "the time to drain is over (see --drain)", None);
        failed.push(volume.name().to_string());
    }
    Ok(failed)
}

async fn close(
    io: Io,
    number: usize,
    volume: Arc<Volume>,
    deadline: Instant,
    sender: Sender<Outcome>,
) {
    let mut first = true;
    let result = loop {
        let result = volume.close(&io).await;
        let again =
            volume.cache_mode() == Mode::Writeback && ebb_mem::clock::now() + RETRY < deadline;
        match result {
            Err(error) if again => {
                if first {
                    tracing::warn!(%error, "writing back failed, and is tried again");
                    first = false;
                }
                io.sleep(RETRY).await;
            }
            result => break result,
        }
    };
    // Nobody listens any more once the time is over.
    let _ = sender.send((number, result));
}

fn unwritten(volume: &Volume) -> u64 {
    volume.cache().map_or(0, |cache| cache.dirty())
}

fn tell(volumes: &[Arc<Volume>], open: &[bool]) {
    for (volume, _) in volumes.iter().zip(open).filter(|(_, open)| **open) {
        let name = volume.name().to_string();
        tracing::info!(volume = name, unwritten_bytes = unwritten(volume), "still draining");
    }
}

fn not_stable(volume: &Volume, error: &str, cause: Option<&std::io::Error>) {
    let (name, cause) = (volume.name().to_string(), cause.map(ToString::to_string));
    tracing::error!(
        volume = name,
        unwritten_bytes = unwritten(volume),
        error,
        cause = cause.unwrap_or_default(),
        "not everything could be made stable"
    );
}
