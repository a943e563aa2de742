//! The backend as the daemon sees it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;

use ebb_io::WorkerHandle;

use crate::control::{Control, Lookup, Mailbox, Message, Served};
use crate::device::Settings;
use crate::disk::{Transient, XenStats};
use crate::params::XenParameters;
use crate::platform::{Platform, StoreError, XenStore};

/// What a backend is made of.
pub struct Options {
    /// Where grants, event channels and xenstore come from.
    pub platform: Arc<dyn Platform>,
    /// The workers rings run on, in turn; at least one.
    pub workers: Vec<WorkerHandle>,
    /// The volumes.
    pub volumes: Lookup,
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

/// A running backend. Dropping it is [`Backend::stop`].
pub struct Backend {
    mailbox: Mailbox,
    served: Served,
    thread: Option<JoinHandle<()>>,
}

impl Backend {
    /// Starts to serve the guests that are and will be.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start(options: Options) -> Result<Backend, StartError> {
        let mut store = options.platform.xenstore().map_err(StartError::Xen)?;
        let own = own_domain(&mut *store);
        if let Some(path) = &options.journals {
            std::fs::create_dir_all(path)
                .map_err(|source| StartError::Journals { path: path.clone(), source })?;
        }
        let (mailbox, inbox) = Mailbox::new().map_err(StartError::Thread)?;
        let served = Served::default();
        let control = Control {
            platform: options.platform,
            store,
            own,
            kinds: options.kinds.iter().map(|kind| Arc::from(kind.as_str())).collect(),
            workers: options.workers,
            parameters: options.parameters,
            volumes: options.volumes,
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
            generation: 0,
            leaving: false,
        };
        let thread = std::thread::Builder::new()
            .name("ebbd-xenstore".to_owned())
            .spawn(move || control.run())
            .map_err(StartError::Thread)?;
        Ok(Backend { mailbox, served, thread: Some(thread) })
    }

    /// Serves a volume no more: its rings are wound up, the guests told. Does not wait.
    pub fn withdraw(&self, volume: &str) {
        self.mailbox.send(Message::Withdraw(volume.to_owned()));
    }

    /// Stops: requests under way end and are answered. Guests stay connected and wait for a
    /// successor.
    pub fn stop(mut self) {
        self.wind_up();
    }

    fn wind_up(&mut self) {
        self.mailbox.send(Message::Leave);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }

    /// Figures of the devices that are served.
    pub fn stats(&self) -> Vec<DeviceStats> {
        self.figures().read()
    }

    /// Where the figures come from, for whoever outlives the backend.
    pub fn figures(&self) -> Figures {
        Figures(self.served.clone())
    }
}

/// Figures of the devices of a backend; none once it has ended. Cheap to clone.
#[derive(Clone)]
pub struct Figures(Served);

impl Figures {
    /// The figures now.
    pub fn read(&self) -> Vec<DeviceStats> {
        let served = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let figures = served.iter().map(|(key, disk)| DeviceStats {
            guest: key.guest,
            device: key.device,
            volume: disk.volume.name().clone(),
            closing: disk.closing.load(Ordering::Relaxed),
            queues: disk.queues.load(Ordering::Relaxed),
            persistent: disk.persistent.load(Ordering::Relaxed),
            stats: disk.counters.read(),
        });
        figures.collect()
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.wind_up();
    }
}

/// Our own domain: connections of guests may ask, that of dom0's socket may not.
fn own_domain(store: &mut dyn XenStore) -> u16 {
    let number: Result<Vec<u8>, StoreError> = store.read(0, "domid");
    let text = number.ok().and_then(|value| String::from_utf8(value).ok());
    text.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}
