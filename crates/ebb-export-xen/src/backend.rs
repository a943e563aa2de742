//! The public interface of the backend: starting it, stopping it, withdrawing volumes, statistics.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ebb_io::WorkerHandle;
use ebb_volume::{Volume, Volumes};

use crate::counting_store::CountingStore;
use crate::device::DeviceSettings;
use crate::mailbox::{Message, XenstoreMailbox};
use crate::params::XenParameters;
use crate::platform::{Platform, XenStore, XenstoreError};
use crate::served::{DeviceStats, DrainingDevices, ServedDevices, figures};
use crate::xenstore::{Awaited, XenstoreControl};

/// What a backend is started with.
pub struct BackendOptions {
    /// Where grants, event channels and xenstore come from.
    pub platform: Arc<dyn Platform>,
    /// The workers to which rings are assigned round robin; at least one.
    pub workers: Vec<WorkerHandle>,
    /// The volumes.
    pub volumes: Volumes,
    /// Which volumes that are not found will be added later; see [`Backend::recheck_devices`].
    pub awaited: Awaited,
    /// What can be changed at run time.
    pub parameters: Arc<XenParameters>,
    /// Backend kinds to serve: directories below `backend` in xenstore. `ebbd` is the daemon's own.
    /// Of `vbd`, the toolstack's, only disks with the script `block-ebbd` are served.
    pub kinds: Vec<String>,
    /// A directory in memory (tmpfs) for the journals, from which a successor resumes after a kill. `None`:
    /// no successor can resume.
    pub journals: Option<PathBuf>,
    /// Most rings a guest may have for one disk, 1 or more.
    pub max_queues: u32,
    /// Bytes of memory that the requests of one ring may hold.
    pub queue_memory: usize,
}

impl BackendOptions {
    /// The options of a daemon that serves the kind `ebbd` only.
    pub fn new(
        platform: Arc<dyn Platform>,
        workers: Vec<WorkerHandle>,
        volumes: Volumes,
    ) -> BackendOptions {
        BackendOptions {
            platform,
            workers,
            volumes,
            awaited: Arc::new(|_| false),
            parameters: Arc::default(),
            kinds: vec!["ebbd".to_owned()],
            journals: None,
            max_queues: 8,
            queue_memory: 64 << 20,
        }
    }
}

/// Why a backend cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackendStartError {
    /// xenstore cannot be reached, or a device of Xen's is missing; the source says what to do.
    #[error("cannot serve Xen guests: {0}")]
    Xen(#[source] std::io::Error),
    /// The directory for journals cannot be created.
    #[error("cannot create {path}: give the daemon's user access to it")]
    Journals {
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// Another daemon serves the guests of this host.
    #[error(
        "another ebbd serves the Xen guests of this host (it has locked {path}): stop it first, or start this one \
             without --xen"
    )]
    Running {
        /// The file it has locked: the directory of journals, or a device of Xen's.
        path: PathBuf,
    },
    /// The thread cannot be started.
    #[error("cannot start the thread for xenstore")]
    Thread(#[source] std::io::Error),
}

/// How often to try to lock a file, and the time in between.
const LOCK_TRIES: u32 = 20;
const LOCK_PAUSE: Duration = Duration::from_millis(100);
/// How long dropping a backend waits for its requests.
const DROP_TIMEOUT: Duration = Duration::from_secs(10);

/// A running backend. Dropping it is [`Backend::stop`] with a deadline some seconds away.
pub struct Backend {
    mailbox: XenstoreMailbox,
    served: Arc<ServedDevices>,
    /// The thread that uses xenstore.
    thread: Option<JoinHandle<()>>,
}

impl Backend {
    /// Starts to serve the guests that exist and those that are created later.
    ///
    /// # Errors
    /// See [`BackendStartError`].
    pub fn start(options: BackendOptions) -> Result<Backend, BackendStartError> {
        let (mut backend, control) = Backend::prepare(options)?;
        let thread = std::thread::Builder::new()
            .name("ebbd-xenstore".to_owned())
            .spawn(move || control.run())
            .map_err(BackendStartError::Thread)?;
        backend.thread = Some(thread);
        Ok(backend)
    }

    /// As [`Backend::start`], without a thread: xenstore is served while the caller calls
    /// [`XenstoreControl::run_once`].
    ///
    /// # Errors
    /// See [`BackendStartError`].
    pub fn prepare(
        options: BackendOptions,
    ) -> Result<(Backend, XenstoreControl), BackendStartError> {
        let mut store = options.platform.xenstore().map_err(BackendStartError::Xen)?;
        let own = own_domain(&mut *store);
        if let Some(path) = &options.journals {
            std::fs::create_dir_all(path)
                .map_err(|source| BackendStartError::Journals { path: path.clone(), source })?;
        }
        // Both locks: two daemons may have different directories, and tests have a platform without a lock file.
        let mut locks = Vec::new();
        if let Some(path) = &options.journals {
            let fail = |source| BackendStartError::Journals { path: path.clone(), source };
            locks.push(lock(File::open(path).map_err(fail)?, path)?);
        }
        if let Some((file, path)) = options.platform.lock_file().map_err(BackendStartError::Xen)? {
            locks.push(lock(file, &path)?);
        }
        let (mailbox, inbox) = XenstoreMailbox::new().map_err(BackendStartError::Thread)?;
        let served = Arc::<ServedDevices>::default();
        options.parameters.watch();
        let control = XenstoreControl {
            platform: options.platform,
            store: CountingStore::new(store),
            own,
            kinds: options.kinds.iter().map(|kind| Arc::from(kind.as_str())).collect(),
            workers: options.workers,
            parameters: options.parameters,
            volumes: options.volumes,
            awaited: options.awaited,
            settings: DeviceSettings {
                max_queues: options.max_queues.max(1),
                queue_memory: options.queue_memory,
                journals: options.journals,
            },
            mailbox: mailbox.clone(),
            inbox,
            served: served.clone(),
            devices: BTreeMap::new(),
            dirty: BTreeSet::new(),
            allowances: BTreeMap::new(),
            log_limits: BTreeMap::new(),
            events_remaining: false,
            generation: 0,
            broken: true,
            retry: None,
            sizes: None,
            abandoned: false,
            _locks: locks,
        };
        Ok((Backend { mailbox, served, thread: None }, control))
    }

    /// Stops serving a volume that was removed from the registry: drains its rings now, even if xenstored hangs,
    /// and notifies the guests when the rings have ended. Does not wait: the requests in flight have completed
    /// when [`DrainingDevices::drained`] returns.
    pub fn withdraw(&self, volume: &Arc<Volume>) -> DrainingDevices {
        // Sent first, so that the message precedes those about the ends of rings.
        self.mailbox.send(Message::Withdraw(Arc::downgrade(volume)));
        DrainingDevices(self.served.withdraw(volume))
    }

    /// Records the store of a volume whose layers have changed, for a successor: its guests go on.
    pub fn note_backing(&self, volume: &Arc<Volume>) {
        self.served.note_backing(volume);
    }

    /// Disconnects the devices of guests that may not open their volumes any more, when their requests in flight have
    /// completed. Does not wait.
    pub fn end_disallowed(&self) {
        self.mailbox.send(Message::AllowChanged);
    }

    /// Checks all devices again, because an awaited volume was added.
    pub fn recheck_devices(&self) {
        self.mailbox.send(Message::VolumeAdded);
    }

    /// Begins to stop: drains all rings. Guests stay connected and wait for a successor. Does not wait;
    /// each volume's devices drain independently, see [`DrainingDevices::of`].
    pub fn begin_stop(&self) -> DrainingDevices {
        let ending = DrainingDevices(self.served.stop());
        self.mailbox.send(Message::Stop);
        ending
    }

    /// Stops, and waits for requests in flight until `deadline`. Returns the devices that still have
    /// requests in flight then: their journals stay, so that a successor repeats the requests without a
    /// response, and their workers continue with them as long as the process lives.
    pub fn stop(mut self, deadline: Instant) -> Vec<DeviceStats> {
        self.drain_until(deadline)
    }

    fn drain_until(&mut self, deadline: Instant) -> Vec<DeviceStats> {
        let ending = self.begin_stop();
        let Some(thread) = self.thread.take() else { return ending.remaining() };
        ending.wait_until(deadline);
        let left = ending.remaining();
        if !left.is_empty() {
            self.mailbox.send(Message::Abandon);
        }
        // After the deadline the thread is not joined: it may be waiting for xenstored.
        if self.served.wait_for_control(deadline) {
            let _ = thread.join();
        }
        left
    }

    /// Statistics of the devices that are served.
    pub fn stats(&self) -> Vec<DeviceStats> {
        self.served.figures(figures)
    }

    /// A handle for reading the statistics, which can outlive the backend.
    pub fn figures(&self) -> Figures {
        Figures(self.served.clone())
    }
}

/// Reads the statistics of a backend's devices; none once it has ended. Cheap to clone.
#[derive(Clone)]
pub struct Figures(Arc<ServedDevices>);

impl Figures {
    /// The current statistics.
    pub fn read(&self) -> Vec<DeviceStats> {
        self.0.figures(figures)
    }

    /// The number of guests of each volume whose writes fail until they are reset, or that were
    /// refused since their disk is another one than before.
    pub fn failing(&self) -> BTreeMap<Arc<str>, u64> {
        self.0.failing(ebb_mem::clock::now())
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.drain_until(Instant::now() + DROP_TIMEOUT);
        }
    }
}

/// Locks a file, so that no two backends serve the same rings. Waits a moment for a backend that is
/// stopping; the kernel releases the lock of one that was killed.
fn lock(file: File, path: &Path) -> Result<File, BackendStartError> {
    use rustix::fs::{FlockOperation, flock};
    for _ in 0..LOCK_TRIES {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) => std::thread::park_timeout(LOCK_PAUSE),
            Err(error) => return Err(BackendStartError::Xen(error.into())),
        }
    }
    Err(BackendStartError::Running { path: path.to_owned() })
}

/// The number of the domain this runs in. Only guests can read it; dom0's socket refuses, which means 0.
fn own_domain(store: &mut dyn XenStore) -> u16 {
    let number: Result<Vec<u8>, XenstoreError> = store.read(0, "domid");
    let text = number.ok().and_then(|value| String::from_utf8(value).ok());
    text.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}
