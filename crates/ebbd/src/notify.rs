//! Messages to the service manager, as sd_notify(3) describes them: READY=1 when the daemon serves, RELOADING=1 with the
//! time of a reload and READY=1 after it (`Type=notify-reload` of systemd 253 waits for both), STOPPING=1, and a status
//! line with the number of volumes that are served.
//!
//! Without a service manager nothing is sent, and a message that cannot be sent is dropped: the daemon serves as well
//! without a reader.

use std::sync::Arc;
use std::time::Duration;

use ebb_io::WorkerHandle;
use sd_notify::NotifyState;

use crate::engine::{Engine, VolumePhase};

/// How often the status line is brought up to date.
const PERIOD: Duration = Duration::from_secs(5);

/// The daemon serves, or has completed its reloads.
pub(crate) fn ready(status: &str) {
    send(&[NotifyState::Ready, NotifyState::Status(status)]);
}

/// A reload begins. systemd takes this for the reload that it has requested if the time is later than its request.
pub(crate) fn reloading() {
    let Ok(now) = NotifyState::monotonic_usec_now() else { return };
    send(&[NotifyState::Reloading, now, NotifyState::Status("reloading the configuration")]);
}

/// The daemon stops.
pub(crate) fn stopping() {
    let status = "stopping: completing requests and flushing volumes";
    send(&[NotifyState::Stopping, NotifyState::Status(status)]);
}

/// The status line: how many volumes are served.
pub(crate) fn status(engine: &Engine) -> String {
    let states = engine.states();
    let served = states.iter().filter(|state| state.phase == VolumePhase::Serving).count();
    match states.len() {
        1 => format!("{served} of 1 volume served"),
        all => format!("{served} of {all} volumes served"),
    }
}

/// Keeps the status line up to date until the engine stops, if there is a service manager.
pub(crate) fn keep_status(worker: &WorkerHandle, engine: Arc<Engine>) {
    if std::env::var_os("NOTIFY_SOCKET").is_none() {
        return;
    }
    worker.spawn(move |io| async move {
        let mut sent = String::new();
        while !engine.is_stopping() {
            let status = status(&engine);
            if sent != status {
                let text = status.clone();
                io.offload(move || send(&[NotifyState::Status(&text)])).await;
                sent = status;
            }
            io.sleep(PERIOD).await;
        }
    });
}

fn send(states: &[NotifyState]) {
    let _ = sd_notify::notify(states);
}
