//! Watches the files of listening sockets: without its file no client can connect, and the daemon
//! does not notice.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_api::stat::DaemonPhase;
use ebb_io::WorkerHandle;

use crate::control::DaemonState;
use crate::socket_file::SocketPlace;
use crate::ticks::until_tick;

/// How often the files are looked at.
const LOOK: Duration = Duration::from_secs(10);

/// Looks at the files of these sockets for as long as the worker runs, and notes those that are
/// lost in the state of the daemon.
pub(crate) fn watch(
    worker: &WorkerHandle,
    started: Instant,
    sockets: Vec<SocketPlace>,
    state: Arc<DaemonState>,
) {
    let sockets = Arc::new(sockets);
    worker.spawn(move |io| async move {
        loop {
            io.sleep(until_tick(ebb_mem::clock::now(), started, LOOK)).await;
            let sockets = sockets.clone();
            let lost = io.offload(move || lost(&sockets)).await;
            // A daemon that stops removes them.
            if state.phase() != DaemonPhase::Stopping {
                note(&state, &lost);
            }
        }
    });
}

/// The paths of sockets whose file was removed or replaced.
fn lost(sockets: &[SocketPlace]) -> Vec<PathBuf> {
    let lost = sockets.iter().filter(|socket| !socket.is_in_place());
    lost.map(|socket| socket.path().to_owned()).collect()
}

fn note(state: &DaemonState, lost: &[PathBuf]) {
    let lost: Vec<String> = lost.iter().map(|path| path.display().to_string()).collect();
    let before = state.lost_sockets();
    for path in lost.iter().filter(|path| !before.contains(path)) {
        tracing::error!(
            path,
            "the file of a listening socket was removed or replaced: \
            no client can connect there until the daemon is restarted"
        );
    }
    state.set_lost_sockets(lost);
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::listener;

    #[test]
    fn removed_or_replaced_socket_file_is_lost() {
        let folder = tempfile::tempdir().unwrap();
        let (path, state) = (folder.path().join("s"), DaemonState::default());
        let open = || listener::open_private(&path, &AtomicBool::new(false)).unwrap();
        let listener = open();
        let places: Vec<SocketPlace> = listener.place().into_iter().collect();
        let noted = || {
            note(&state, &lost(&places));
            state.lost_sockets().len()
        };
        assert_eq!((places.len(), noted()), (1, 0));
        let aside = folder.path().join("aside");
        std::fs::rename(&path, &aside).unwrap();
        assert_eq!(noted(), 1);
        let other = open();
        assert_eq!(noted(), 1, "it is another one");
        drop(other);
        std::fs::rename(&aside, &path).unwrap();
        assert_eq!(noted(), 0);
    }
}
