//! The daemon's vhost-user-blk export: its backend, and the sockets of its volumes, which are opened and closed as volumes
//! come and go.
//!
//! # Invariants
//! - The sockets follow the definitions of the volumes: each [`VhostExport::sync`] makes the open sockets those that are
//!   wanted at that time. A socket that cannot be opened is reported, and tried again. Another server is waited for only
//!   when its path is tried first.
//! - Nothing is opened before [`VhostExport::begin`] and after [`VhostExport::close_sockets`].
//! - The file of a socket is removed before the socket is closed.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ebb_advice::full_text;
use ebb_export_vhost::{
    DrainingFrontends, FrontendDescriptors, VhostBackend, VhostDisk, VhostFigures, VhostOptions,
    VolumeSocket,
};
use ebb_volume::Volume;

use crate::descriptors::check_volumes;
use crate::listener::{self, ListenError, SocketFile, directory_of};

/// How long all sockets together wait for other servers to close theirs.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// The most sockets that cannot be opened of which each has a line in the log.
const LINES: usize = 8;

/// Why a volume is not served over vhost-user-blk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FailedSocket {
    pub(crate) volume: String,
    pub(crate) reason: String,
    /// The path that was tried; none if something else of the daemon has it.
    path: Option<PathBuf>,
}

/// The sockets that the definitions of the volumes ask for.
#[derive(Default)]
pub(crate) struct WantedSockets {
    /// The volume to be served at each path.
    pub(crate) served: BTreeMap<PathBuf, String>,
    /// Why volumes cannot have the paths that they ask for.
    pub(crate) refused: BTreeMap<String, String>,
}

#[derive(Default)]
struct Sockets {
    open: BTreeMap<PathBuf, OpenSocket>,
    failed: BTreeMap<String, FailedSocket>,
    begun: bool,
}

struct OpenSocket {
    volume: String,
    file: Option<SocketFile>,
}

impl OpenSocket {
    /// Returns true if no frontend can connect: the file was removed or replaced.
    fn is_lost(&self) -> bool {
        let place = self.file.as_ref().and_then(SocketFile::place);
        place.is_some_and(|place| !place.is_in_place())
    }
}

/// The file of a socket that was opened, and whether a socket of a daemon that has ended was there.
struct OpenedSocket {
    file: Option<SocketFile>,
    replaces_stale: bool,
}

/// See the module.
#[derive(Default)]
pub(crate) struct VhostExport {
    backend: Mutex<Option<VhostBackend>>,
    draining: Mutex<Option<DrainingFrontends>>,
    figures: Arc<OnceLock<VhostFigures>>,
    descriptors: Arc<FrontendDescriptors>,
    /// Held while sockets are opened, which may take some seconds.
    sockets: Mutex<Sockets>,
    /// As the sockets' own, for readers that must not wait.
    failed: Mutex<Vec<FailedSocket>>,
    ended: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl VhostExport {
    /// The figures of the disks, as soon as guests are served.
    pub(crate) fn figures(&self) -> Arc<OnceLock<VhostFigures>> {
        self.figures.clone()
    }

    /// The descriptors that frontends may hold, and do; before guests are served, too.
    pub(crate) fn descriptors(&self) -> &Arc<FrontendDescriptors> {
        &self.descriptors
    }

    /// Begins to disconnect a frontend; false if there is none of this number.
    pub(crate) fn disconnect(&self, number: u64) -> bool {
        lock(&self.backend).as_ref().is_some_and(|backend| backend.disconnect(number))
    }

    /// The sockets that cannot be opened.
    pub(crate) fn failed(&self) -> Vec<FailedSocket> {
        lock(&self.failed).clone()
    }

    /// Whether sockets are open, or are to be tried again.
    pub(crate) fn has_sockets(&self) -> bool {
        lock(&self.backend).is_some() || !lock(&self.failed).is_empty()
    }

    /// From now on sockets are opened.
    pub(crate) fn begin(&self) {
        lock(&self.sockets).begun = true;
    }

    /// Opens and closes sockets, so that the open ones are those that are `wanted`. Starts the backend for the first one.
    /// Blocks, for [`CLOSE_TIMEOUT`] if another server has a socket that was not tried before. Sockets leave the descriptors that remote volumes on
    /// `workers` workers need.
    pub(crate) fn sync(
        &self,
        wanted: impl FnOnce() -> WantedSockets,
        options: impl FnOnce() -> VhostOptions,
        workers: usize,
    ) {
        let mut sockets = lock(&self.sockets);
        if !sockets.begun || self.ended.load(Ordering::SeqCst) {
            return;
        }
        let WantedSockets { served: wanted, refused } = wanted();
        let is_wanted = |path: &Path, socket: &OpenSocket| {
            let wanted = wanted.get(path) == Some(&socket.volume);
            if wanted && socket.is_lost() {
                tracing::warn!(volume = socket.volume, socket = %path.display(),
                    "the file of a socket of vhost-user was removed or replaced: it is opened again");
                return false;
            }
            wanted
        };
        let gone = sockets.open.iter().filter(|(path, socket)| !is_wanted(path, socket));
        let gone: Vec<PathBuf> = gone.map(|(path, _)| path.clone()).collect();
        let old = gone.iter().filter_map(|path| Some((path, &*sockets.open.get(path)?.volume)));
        self.warn_of_moves(&moved_sockets(old, &wanted));
        for path in gone {
            sockets.open.remove(&path);
            lock(&self.backend).iter().for_each(|backend| backend.unlisten(&path));
        }
        let before = std::mem::take(&mut sockets.failed);
        let fail = |(volume, reason): (String, String)| {
            (volume.clone(), FailedSocket { volume, reason, path: None })
        };
        sockets.failed = refused.into_iter().map(fail).collect();
        let missing: Vec<_> =
            wanted.into_iter().filter(|(path, _)| !sockets.open.contains_key(path)).collect();
        if !missing.is_empty()
            && let Err(error) = self.start(options)
        {
            let reason = format!("cannot start the export: {error}");
            sockets
                .failed
                .extend(missing.into_iter().map(|(_, volume)| fail((volume, reason.clone()))));
        } else {
            self.open_all(&mut sockets, missing, &before, workers);
        }
        log_failures(&sockets.failed, &before);
        *lock(&self.failed) = sockets.failed.values().cloned().collect();
    }

    /// Returns true if the file of a socket was removed or replaced: [`VhostExport::sync`] opens it
    /// again. Blocks.
    pub(crate) fn has_lost(&self) -> bool {
        lock(&self.sockets).open.values().any(OpenSocket::is_lost)
    }

    /// Warns of each frontend that cannot connect again where it has connected.
    fn warn_of_moves(&self, moved: &BTreeMap<PathBuf, PathBuf>) {
        if moved.is_empty() {
            return;
        }
        for disk in self.disks() {
            let Some(new) = moved.get(Path::new(&*disk.socket)) else { continue };
            tracing::warn!(
                volume = &*disk.volume,
                connection = format!("vhost-{}", disk.number),
                pid = disk.pid,
                "its socket is at {} now: give its VMM the new path, or it cannot come back",
                new.display()
            );
        }
    }

    /// Opens sockets, and notes those that cannot be opened.
    fn open_all(
        &self,
        sockets: &mut Sockets,
        missing: Vec<(PathBuf, String)>,
        before: &BTreeMap<String, FailedSocket>,
        workers: usize,
    ) {
        let now = Instant::now();
        let tried: BTreeSet<&Path> =
            before.values().filter_map(|failed| failed.path.as_deref()).collect();
        let mut stale = 0_usize;
        for (path, volume) in missing {
            let deadline = if tried.contains(&*path) { now } else { now + CLOSE_TIMEOUT };
            let enough = check_volumes(workers)
                .map_err(|limit| ListenError::Descriptors { path: path.clone(), limit });
            match enough.and_then(|()| self.open(&path, &volume, deadline)) {
                Ok(OpenedSocket { file, replaces_stale }) => {
                    if before.contains_key(&volume) {
                        tracing::info!(volume, socket = %path.display(), "served over vhost-user");
                    }
                    stale += usize::from(replaces_stale);
                    if replaces_stale && stale <= LINES {
                        tracing::info!(socket = %path.display(), "replaced a stale socket");
                    }
                    sockets.open.insert(path, OpenSocket { volume, file });
                }
                Err(ListenError::Interrupted) => break,
                Err(error) => {
                    let reason = full_text(&error);
                    let failed = FailedSocket { volume: volume.clone(), reason, path: Some(path) };
                    sockets.failed.insert(volume, failed);
                }
            }
        }
        if stale > LINES {
            tracing::info!(more = stale - LINES, "replaced further stale sockets");
        }
    }

    /// Serves a volume at a socket that was passed to this process: one that listens, or one that is connected.
    ///
    /// # Errors
    /// Those of starting the backend.
    pub(crate) fn adopt(
        &self,
        socket: OwnedFd,
        volume: &str,
        options: impl FnOnce() -> VhostOptions,
    ) -> std::io::Result<()> {
        self.start(options)?;
        let listens = rustix::net::sockopt::socket_acceptconn(&socket)?;
        let backend = lock(&self.backend);
        let Some(backend) = &*backend else { return Ok(()) };
        if listens {
            backend.listen(VolumeSocket::new(socket, Path::new(""), volume)?);
            return Ok(());
        }
        backend.connect(socket, volume)
    }

    fn start(&self, options: impl FnOnce() -> VhostOptions) -> std::io::Result<()> {
        let mut backend = lock(&self.backend);
        if backend.is_none() {
            let started = VhostBackend::start(options())?;
            tracing::info!("the backend of vhost-user-blk has started");
            self.set_first(&mut backend, started);
        }
        Ok(())
    }

    /// Uses a backend that the caller has started.
    pub(crate) fn set(&self, backend: VhostBackend) {
        self.set_first(&mut lock(&self.backend), backend);
    }

    fn set_first(&self, place: &mut Option<VhostBackend>, backend: VhostBackend) {
        self.figures.get_or_init(|| backend.figures());
        *place = Some(backend);
    }

    fn open(
        &self,
        path: &Path,
        volume: &str,
        deadline: Instant,
    ) -> Result<OpenedSocket, ListenError> {
        make_directory(path)?;
        let opened = listener::open_private_until(path, &self.ended, deadline)?;
        let replaces_stale = opened.replaces_stale;
        let (fd, file) = opened.into_parts();
        let socket = VolumeSocket::new(fd, path, volume).map_err(|source| ListenError::Bind {
            address: path.display().to_string(),
            remedy: "",
            source,
        })?;
        if let Some(backend) = &*lock(&self.backend) {
            backend.listen(socket);
        }
        Ok(OpenedSocket { file, replaces_stale })
    }

    /// The disks of guests.
    pub(crate) fn disks(&self) -> Vec<VhostDisk> {
        self.figures.get().into_iter().flat_map(VhostFigures::read).collect()
    }

    /// The number of disks of guests on a volume.
    pub(crate) fn disks_of(&self, volume: &str) -> u64 {
        self.disks().iter().map(|disk| u64::from(*disk.volume == *volume)).sum()
    }

    /// The number of guests of each volume whose requests fail until they are reset.
    pub(crate) fn failing(&self) -> BTreeMap<Arc<str>, u64> {
        self.figures.get().map(VhostFigures::failing).unwrap_or_default()
    }

    /// Records the store of a volume whose layers have changed.
    pub(crate) fn note_backing(&self, volume: &Arc<Volume>) {
        lock(&self.backend).iter().for_each(|backend| backend.note_backing(volume));
    }

    /// Tells guests the sizes of volumes that were resized.
    pub(crate) fn announce_sizes(&self) {
        lock(&self.backend).iter().for_each(VhostBackend::announce_sizes);
    }

    /// Ends the connections of frontends that may not open their volumes any more. Does not wait.
    pub(crate) fn end_disallowed(&self) {
        if let Some(backend) = &*lock(&self.backend) {
            backend.end_disallowed();
        }
    }

    /// Stops serving a volume that was removed from the registry.
    pub(crate) fn withdraw(&self, volume: &Arc<Volume>) -> Option<DrainingFrontends> {
        lock(&self.backend).as_ref().map(|backend| backend.withdraw(volume))
    }

    /// Removes the files of all sockets, and opens none from now on; to be called before [`VhostExport::begin_stop`]. Blocks
    /// while a socket is being opened, which ends soon.
    pub(crate) fn close_sockets(&self) {
        self.ended.store(true, Ordering::SeqCst);
        lock(&self.sockets).open.clear();
    }

    /// Begins to stop: requests in flight complete, no new ones begin, and connections end.
    pub(crate) fn begin_stop(&self) {
        *lock(&self.draining) = lock(&self.backend).as_ref().map(VhostBackend::begin_stop);
    }

    /// After [`VhostExport::begin_stop`]: the disks of this volume.
    pub(crate) fn draining(&self, volume: &str) -> Option<DrainingFrontends> {
        lock(&self.draining).as_ref().map(|draining| draining.of(volume))
    }

    /// Ends the backend. Blocks until `deadline` at most.
    pub(crate) fn end(&self, deadline: Instant) {
        let backend = lock(&self.backend).take();
        for disk in backend.into_iter().flat_map(|backend| backend.stop(deadline)) {
            tracing::warn!(
                volume = &*disk.volume,
                connection = format!("vhost-{}", disk.number),
                pid = disk.pid,
                "requests of this guest are in flight: the next daemon completes them"
            );
        }
    }
}

/// The new paths of sockets that are closed, and whose volumes are served at another path.
fn moved_sockets<'a>(
    old: impl Iterator<Item = (&'a PathBuf, &'a str)>,
    wanted: &BTreeMap<PathBuf, String>,
) -> BTreeMap<PathBuf, PathBuf> {
    let old: BTreeMap<&str, &PathBuf> = old.map(|(path, volume)| (volume, path)).collect();
    let moved = wanted.iter().filter_map(|(path, volume)| Some((*old.get(&**volume)?, path)));
    let moved = moved.filter(|(from, to)| from != to);
    moved.map(|(from, to)| (from.clone(), to.clone())).collect()
}

/// Makes the directory of a socket. The one above it must exist; that one, such as /run/ebbd, may be new after each boot.
fn make_directory(path: &Path) -> Result<(), ListenError> {
    let Some(directory) = directory_of(path) else { return Ok(()) };
    match std::fs::DirBuilder::new().mode(0o750).create(directory) {
        Err(source) if !directory.is_dir() => {
            let remedy = match source.kind() {
                std::io::ErrorKind::NotFound => "the directory above it does not exist: create it",
                std::io::ErrorKind::PermissionDenied => {
                    "give the daemon's user write access to the directory above it"
                }
                _ => "",
            };
            Err(ListenError::Directory { path: directory.into(), remedy, source })
        }
        // What is wrong with one that exists, opening the socket tells.
        _ => Ok(()),
    }
}

/// Logs the sockets that cannot be opened, less those that were logged `before`.
fn log_failures(failed: &BTreeMap<String, FailedSocket>, before: &BTreeMap<String, FailedSocket>) {
    let new = || failed.iter().filter(|(volume, failure)| before.get(*volume) != Some(failure));
    for (_, FailedSocket { volume, reason, .. }) in new().take(LINES) {
        tracing::error!(volume, "not served over vhost-user: {reason}");
    }
    let more = new().count().saturating_sub(LINES);
    if more > 0 {
        tracing::error!(more, "further volumes are not served over vhost-user: see `ebbd status`");
    }
}

#[cfg(test)]
mod tests;
