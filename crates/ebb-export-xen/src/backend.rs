//! The backend as the daemon sees it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ebb_io::WorkerHandle;

use crate::counted::Counted;
use crate::device::Settings;
use crate::device_shared::{Transient, XenStats};
use crate::mailbox::{Mailbox, Message};
use crate::params::XenParameters;
use crate::platform::{Platform, StoreError, XenStore};
use crate::served::{Ending, Served};
use crate::xenstore::{Awaited, Lookup, XenstoreControl};

/// What a backend is made of.
pub struct Options {
    /// Where grants, event channels and xenstore come from.
    pub platform: Arc<dyn Platform>,
    /// The workers rings run on, in turn; at least one.
    pub workers: Vec<WorkerHandle>,
    /// The volumes.
    pub volumes: Lookup,
    /// Which volumes that are not found will come; see [`Backend::look_again`].
    pub awaited: Awaited,
    /// What can be changed at run time.
    pub parameters: Arc<XenParameters>,
    /// Backend kinds to serve: directories below `backend` in xenstore. `ebbd` is the daemon's own.
    /// Of `vbd`, the toolstack's, only disks with the script `block-ebbd` are served.
    pub kinds: Vec<String>,
    /// A directory in memory (tmpfs) for what a successor needs after a kill. `None`: nobody can
    /// succeed.
    pub journals: Option<PathBuf>,
    /// Rings a guest may have for one disk, 1 or more.
    pub max_queues: u32,
    /// Bytes the requests of one ring may hold.
    pub queue_memory: usize,
    /// How pages reach us that are not kept mapped.
    pub transient: Transient,
}

impl Options {
    /// Options as a daemon wants them, with the kind `ebbd` only.
    pub fn new(
        platform: Arc<dyn Platform>,
        workers: Vec<WorkerHandle>,
        volumes: Lookup,
    ) -> Options {
        Options {
            platform,
            workers,
            volumes,
            awaited: Arc::new(|_| false),
            parameters: Arc::default(),
            kinds: vec!["ebbd".to_owned()],
            journals: None,
            max_queues: 8,
            queue_memory: 64 << 20,
            transient: Transient::Copy,
        }
    }
}

/// Why a backend cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// xenstore cannot be reached, or a device of Xen's is missing; the source says what to do.
    #[error("cannot serve Xen guests: {0}")]
    Xen(#[source] std::io::Error),
    /// The directory for journals cannot be made.
    #[error("{path}: cannot make the directory: give the daemon's user access to it")]
    Journals {
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// Another daemon serves the guests of this host.
    #[error(
        "another ebbd serves the Xen guests of this host (it holds {path}): stop it first, or start this one \
             without --xen"
    )]
    Running {
        /// What it holds: the directory of journals, or a device of Xen's.
        path: PathBuf,
    },
    /// A thread cannot be made.
    #[error("cannot start the thread for xenstore")]
    Thread(#[source] std::io::Error),
}

/// Figures of one device.
#[derive(Clone, Debug)]
pub struct DeviceStats {
    /// The guest's number.
    pub guest: u16,
    /// The device's number.
    pub device: u32,
    /// The volume it is.
    pub volume: Arc<str>,
    /// It is being wound up: what is under way ends, nothing begins.
    pub closing: bool,
    /// Its rings that are served.
    pub queues: u32,
    /// Grants stay mapped: guest and backend agreed on it.
    pub persistent: bool,
    /// Counters.
    pub stats: XenStats,
}

/// Tries to take a lock, and the time between them.
const LOCK_TRIES: u32 = 20;
const LOCK_PAUSE: Duration = Duration::from_millis(100);
/// How long a backend that is dropped waits for its requests.
const PATIENCE: Duration = Duration::from_secs(10);

/// A running backend. Dropping it is [`Backend::stop`] with a deadline some seconds away.
pub struct Backend {
    mailbox: Mailbox,
    served: Arc<Served>,
    volumes: Lookup,
    /// The one that speaks to xenstore.
    thread: Option<JoinHandle<()>>,
}

impl Backend {
    /// Starts to serve the guests that are and will be.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start(options: Options) -> Result<Backend, StartError> {
        let (mut backend, control) = Backend::prepare(options)?;
        let thread = std::thread::Builder::new()
            .name("ebbd-xenstore".to_owned())
            .spawn(move || control.run())
            .map_err(StartError::Thread)?;
        backend.thread = Some(thread);
        Ok(backend)
    }

    /// As [`Backend::start`], without a thread: guests are attached and told while the caller calls
    /// [`XenstoreControl::turn`]. For tests that have one thread and a clock of their own.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn prepare(options: Options) -> Result<(Backend, XenstoreControl), StartError> {
        let mut store = options.platform.xenstore().map_err(StartError::Xen)?;
        let own = own_domain(&mut *store);
        if let Some(path) = &options.journals {
            std::fs::create_dir_all(path)
                .map_err(|source| StartError::Journals { path: path.clone(), source })?;
        }
        // Both: daemons may differ in their directories, and in a platform of tests in the other one.
        let mut locks = Vec::new();
        if let Some(path) = &options.journals {
            let fail = |source| StartError::Journals { path: path.clone(), source };
            locks.push(lock(File::open(path).map_err(fail)?, path)?);
        }
        if let Some((file, path)) = options.platform.lock_file().map_err(StartError::Xen)? {
            locks.push(lock(file, &path)?);
        }
        let (mailbox, inbox) = Mailbox::new().map_err(StartError::Thread)?;
        let served = Arc::<Served>::default();
        let control = XenstoreControl {
            platform: options.platform,
            store: Counted::new(store),
            own,
            kinds: options.kinds.iter().map(|kind| Arc::from(kind.as_str())).collect(),
            workers: options.workers,
            parameters: options.parameters,
            volumes: options.volumes.clone(),
            awaited: options.awaited,
            settings: Settings {
                max_queues: options.max_queues.max(1),
                queue_memory: options.queue_memory,
                transient: options.transient,
                journals: options.journals,
            },
            mailbox: mailbox.clone(),
            inbox,
            served: served.clone(),
            devices: BTreeMap::new(),
            dirty: BTreeSet::new(),
            allowances: BTreeMap::new(),
            lines: BTreeMap::new(),
            more: false,
            generation: 0,
            broken: true,
            retry: None,
            sizes: None,
            given_up: false,
            _locks: locks,
        };
        Ok((Backend { mailbox, served, volumes: options.volumes, thread: None }, control))
    }

    /// Serves a volume no more: its rings are wound up from now on, whatever xenstore does, and when they have ended the
    /// guests are told. Until the lookup finds another volume of that name none is attached to it. Does not wait:
    /// the requests under way are over when [`Ending::over`] is.
    pub fn withdraw(&self, volume: &str) -> Ending {
        let found = (self.volumes)(volume);
        // First: a ring's end must not be heard before.
        self.mailbox.send(Message::Withdraw(volume.to_owned()));
        self.served.withdraw(volume, found.as_ref().map(|(volume, _)| volume))
    }

    /// Looks at all devices again: a volume is there that was awaited.
    pub fn look_again(&self) {
        self.mailbox.send(Message::Arrived);
    }

    /// Begins to stop: all rings are wound up from now on. Guests stay connected and wait for a successor. Does not
    /// wait; the devices of each volume end by themselves, see [`Ending::of`].
    pub fn begin_stop(&self) -> Ending {
        let ending = self.served.leave();
        self.mailbox.send(Message::Leave);
        ending
    }

    /// Stops: requests under way end and are answered, until `deadline`. The devices that have some left are returned:
    /// their rings' journals stay, so that a successor does again what was not answered, and their workers go on with
    /// them as long as the process lives.
    pub fn stop(mut self, deadline: Instant) -> Vec<DeviceStats> {
        self.wind_up(deadline)
    }

    fn wind_up(&mut self, deadline: Instant) -> Vec<DeviceStats> {
        let ending = self.begin_stop();
        let Some(thread) = self.thread.take() else { return ending.left() };
        ending.wait_until(deadline);
        let left = ending.left();
        if !left.is_empty() {
            self.mailbox.send(Message::GiveUp);
        }
        // Past the deadline it is left behind: it may be waiting for xenstored.
        if self.served.wait_for_end(deadline) {
            let _ = thread.join();
        }
        left
    }

    /// Figures of the devices that are served.
    pub fn stats(&self) -> Vec<DeviceStats> {
        self.served.figures()
    }

    /// Where the figures come from, for whoever outlives the backend.
    pub fn figures(&self) -> Figures {
        Figures(self.served.clone())
    }
}

/// Figures of the devices of a backend; none once it has ended. Cheap to clone.
#[derive(Clone)]
pub struct Figures(Arc<Served>);

impl Figures {
    /// The figures now.
    pub fn read(&self) -> Vec<DeviceStats> {
        self.0.figures()
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.wind_up(Instant::now() + PATIENCE);
        }
    }
}

/// Locks a file: two backends would answer the same rings. One that is about to end is waited for, and the kernel gives the
/// lock of one that was killed back.
fn lock(file: File, path: &Path) -> Result<File, StartError> {
    use rustix::fs::{FlockOperation, flock};
    for _ in 0..LOCK_TRIES {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) => std::thread::park_timeout(LOCK_PAUSE),
            Err(error) => return Err(StartError::Xen(error.into())),
        }
    }
    Err(StartError::Running { path: path.to_owned() })
}

/// Our own domain: connections of guests may ask, that of dom0's socket may not.
fn own_domain(store: &mut dyn XenStore) -> u16 {
    let number: Result<Vec<u8>, StoreError> = store.read(0, "domid");
    let text = number.ok().and_then(|value| String::from_utf8(value).ok());
    text.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}
