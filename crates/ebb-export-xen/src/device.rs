//! A device: its nodes, and its rings put together.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ebb_mem::PoolParameters;
use ebb_volume::{Lease, LogLimit, Stop, Volume, WriterConflict};

use crate::abi::SECTOR_BYTES;
use crate::device_shared::{Counters, DeviceShared, MAX_SEGMENTS};
use crate::journal::{Identity, Journal, ResumeError};
use crate::nodes::{Frontend, MAX_RING_ORDER, NodeError, Nodes, QueueNodes, number};
use crate::platform::{Domain, Platform, StoreError};
use crate::queue::Parts;
use crate::ring::Ring;
use crate::unstable::Unstable;
use crate::xenbus_state::{Phase, Seen};

/// The least time between two looks at a device.
const PAUSE: Duration = Duration::from_millis(5);

/// The first and the longest pause between two looks at the nodes of a device's rings.
const RINGS_PAUSE: Duration = Duration::from_millis(100);
const RINGS_PAUSE_MAX: Duration = Duration::from_secs(60);

/// How often a device that waits for another writer to end tries again.
const TRY_AGAIN: Duration = Duration::from_millis(100);

/// Which device: of which kind, of which guest, under which number.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) kind: Arc<str>,
    pub(crate) guest: Domain,
    pub(crate) device: u32,
}

impl Key {
    /// The backend's directory, within domain `own`.
    pub(crate) fn base(&self, own: Domain) -> String {
        let Key { kind, guest, device } = self;
        format!("/local/domain/{own}/backend/{kind}/{guest}/{device}")
    }

    /// Its name in the log and in file names, and the token of its watch.
    pub(crate) fn name(&self) -> String {
        format!("{}-{}-{}", self.kind, self.guest, self.device)
    }

    /// The device of a [`Key::name`], of one of `kinds`.
    pub(crate) fn parse(name: &str, kinds: &[Arc<str>]) -> Option<Key> {
        let mut parts = name.rsplitn(3, '-');
        let device = parts.next().and_then(number)?;
        let guest = parts.next().and_then(number).and_then(|guest| Domain::try_from(guest).ok())?;
        let kind = parts.next()?;
        let kind = kinds.iter().find(|one| ***one == *kind)?.clone();
        Some(Key { kind, guest, device })
    }
}

/// Why a device cannot be served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeviceError {
    #[error("no volume is called `{0}`: name one of the daemon's volumes when attaching the disk")]
    NoVolume(String),
    #[error(transparent)]
    Writer(#[from] WriterConflict),
    #[error("volume `{0}` is not served any more: detach the disk, or attach another volume")]
    Withdrawn(String),
    #[error("the frontend's nodes: {0}")]
    Nodes(#[from] NodeError),
    #[error("cannot {what}")]
    Io { what: &'static str, source: std::io::Error },
    #[error("ring {queue}: {source}")]
    Resume { queue: usize, source: ResumeError },
    #[error("ring {queue}: the frontend shares too few pages")]
    NoRing { queue: usize },
    #[error("the frontend went into a state that has no meaning for disks")]
    BadState,
}

impl From<StoreError> for DeviceError {
    fn from(error: StoreError) -> DeviceError {
        DeviceError::Nodes(error.into())
    }
}

/// What is known of a device.
pub(crate) struct Device {
    pub(crate) base: String,
    /// The frontend's directory.
    pub(crate) frontend: String,
    pub(crate) phase: Phase,
    pub(crate) looked: Option<Instant>,
    pub(crate) serving: Option<Serving>,
    /// The right to write to the volume, from the offer until its last request is over.
    pub(crate) lease: Option<Lease>,
    /// Since when another writer keeps it waiting.
    pub(crate) waiting: Option<Instant>,
    /// Its volume, if that was withdrawn: the guest is to be told once the rings have ended.
    pub(crate) withdrawn: Option<String>,
    /// Failures that went to the log.
    pub(crate) logged: u32,
    /// What was seen when there was nothing to do. As long as only the guest may have changed something, and its state is
    /// the same, there is nothing to do still.
    pub(crate) rested: Option<Seen>,
    /// Something changed since it was looked at.
    pub(crate) touched: bool,
    /// The guest wrote its state since it was looked at.
    pub(crate) written: bool,
    /// The next event is the one that comes with a new watch.
    pub(crate) watch_begins: bool,
    /// Whether it may have other rings.
    pub(crate) rings: Doubt,
}

impl Device {
    pub(crate) fn new(base: String, frontend: String) -> Device {
        Device {
            base,
            frontend,
            phase: Phase::New,
            looked: None,
            serving: None,
            lease: None,
            waiting: None,
            withdrawn: None,
            logged: 0,
            rested: None,
            touched: true,
            written: false,
            watch_begins: true,
            rings: Doubt::default(),
        }
    }

    /// When it may be looked at next; `None` is at any time.
    pub(crate) fn next_look(&self) -> Option<Instant> {
        let pause = if self.waiting.is_some() { TRY_AGAIN } else { PAUSE };
        let next = self.looked.map(|at| at + pause);
        if self.touched { next } else { next.max(self.rings.next) }
    }
}

/// Whether a frontend may have begun anew with other rings, while all that is seen of it is the state it had before. To
/// find out takes a request to xenstored for each node of its rings: that is done at once the first time, and then
/// after pauses that grow.
#[derive(Debug, Default)]
pub(crate) struct Doubt {
    /// Its state was written since the rings' nodes were read.
    pub(crate) open: bool,
    /// When they may be read again.
    next: Option<Instant>,
    pause: Duration,
}

impl Doubt {
    /// Whether the nodes are to be read now; then the doubt is over.
    pub(crate) fn settle(&mut self, now: Instant) -> bool {
        let due = self.open && self.next.is_none_or(|at| now >= at);
        if due {
            self.open = false;
            self.next = Some(now + self.pause);
            self.pause = (self.pause * 2).clamp(RINGS_PAUSE, RINGS_PAUSE_MAX);
        }
        due
    }
}

/// A device being served.
pub(crate) struct Serving {
    pub(crate) generation: u64,
    pub(crate) disk: Arc<DeviceShared>,
    pub(crate) frontend: Frontend,
    /// Rings that have not ended.
    pub(crate) running: u32,
    /// Bytes, as the guest knows.
    pub(crate) size: u64,
    pub(crate) journals: Vec<PathBuf>,
}

/// How devices are served.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) max_queues: u32,
    pub(crate) queue_memory: usize,
    pub(crate) transient: crate::device_shared::Transient,
    pub(crate) journals: Option<PathBuf>,
}

/// A volume to be served, and what was found in the backend's directory.
pub(crate) struct Offer {
    pub(crate) volume: Arc<Volume>,
    pub(crate) pool: Arc<PoolParameters>,
    pub(crate) read_only: bool,
    /// The toolstack takes it upon itself that there is another writer (mode `w!`).
    pub(crate) share: bool,
    pub(crate) discard: bool,
    /// Flushes are offered; without them frontends use barriers.
    pub(crate) flush: bool,
    pub(crate) info: u32,
    pub(crate) persistent: bool,
}

impl Offer {
    /// The nodes that tell a frontend what it can have.
    pub(crate) fn nodes(&self, settings: &Settings) -> Nodes {
        let flag = |on: bool| if on { "1" } else { "0" }.to_owned();
        let can = self.volume.capabilities();
        let physical = u64::from(can.alignment).max(SECTOR_BYTES).max(4096);
        let changes = !self.read_only;
        let mut nodes = Nodes::new();
        nodes.insert("feature-max-indirect-segments", MAX_SEGMENTS.to_string());
        nodes.insert("multi-queue-max-queues", settings.max_queues.to_string());
        nodes.insert("max-ring-page-order", MAX_RING_ORDER.to_string());
        nodes.insert("feature-flush-cache", flag(changes && self.flush));
        nodes.insert("feature-barrier", flag(changes));
        nodes.insert("feature-persistent", flag(self.persistent));
        if self.discard {
            nodes.insert("discard-granularity", u64::from(can.alignment).max(4096).to_string());
            nodes.insert("discard-alignment", "0".to_owned());
            nodes.insert("discard-secure", "0".to_owned());
            nodes.insert("feature-discard", "1".to_owned());
        }
        nodes.insert("sectors", (self.volume.size() / SECTOR_BYTES).to_string());
        nodes.insert("info", self.info.to_string());
        nodes.insert("sector-size", SECTOR_BYTES.to_string());
        nodes.insert("physical-sector-size", physical.to_string());
        nodes
    }

    pub(crate) fn disk(
        &self,
        parameters: &Arc<crate::params::XenParameters>,
        settings: &Settings,
        lines: Arc<LogLimit>,
    ) -> Arc<DeviceShared> {
        Arc::new(DeviceShared {
            volume: self.volume.clone(),
            pool: self.pool.clone(),
            parameters: parameters.clone(),
            read_only: self.read_only,
            discard: self.discard,
            transient: settings.transient,
            queue_memory: settings.queue_memory,
            broken: AtomicBool::new(false),
            queues: AtomicU32::new(0),
            persistent: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            stop: Stop::default(),
            counters: Counters::default(),
            unstable: Unstable::default(),
            lines,
        })
    }
}

/// Everything one ring needs, mapped and bound. With `resume` the guest is connected to it already.
pub(crate) fn open_queue(
    platform: &dyn Platform,
    key: &Key,
    frontend: &Frontend,
    number: usize,
    resume: bool,
    settings: &Settings,
    disk: &Arc<DeviceShared>,
) -> Result<Parts, DeviceError> {
    let nodes = &frontend.queues[number];
    let io = |what| move |source| DeviceError::Io { what, source };
    let grants = platform.grants(key.guest).map_err(io("reach the guest's grants"))?;
    let memory = grants.map(&nodes.ring, true).map_err(io("map the ring"))?;
    let mut ring = Ring::new(memory, frontend.abi);
    if ring.slots() == 0 {
        return Err(DeviceError::NoRing { queue: number });
    }
    let identity = identity(key, number, nodes, &ring);
    let path = settings.journals.as_deref().map(|folder| journal_path(folder, key, number));
    let backing = disk.backing();
    let fail = |source| DeviceError::Resume { queue: number, source };
    let (sent, published) = ring.shared_numbers();
    let found = match (resume, &path) {
        (true, Some(path)) => Some(Journal::open(path, &identity, &backing)),
        _ => None,
    };
    let (journal, left_over) = match found {
        Some(Ok(journal)) => {
            let (req_cons, left_over) = journal.resume(published).map_err(fail)?;
            ring.resume(req_cons, published);
            journal.note_size(backing.size);
            if journal.is_unstable() {
                journal.note_broken();
                tracing::error!(
                    device = key.name(),
                    "writes were acknowledged, and in the memory of a daemon that has ended only: the guest's \
                     writes fail from now on, so that it notices; have it check its file systems, then \
                     detach the disk and attach it again"
                );
            }
            if journal.is_broken() {
                disk.broken.store(true, Ordering::Relaxed);
            }
            (journal, left_over)
        }
        // Idle or not: the guest has data of another store in its memory.
        Some(Err(error @ (ResumeError::OtherStore { .. } | ResumeError::Smaller { .. }))) => {
            return Err(fail(error));
        }
        // Whoever served it may have answered out of order: only an idle ring can be taken over.
        Some(Err(error)) if sent != published => return Err(fail(error)),
        None if resume && sent != published => return Err(fail(ResumeError::Foreign)),
        _ => {
            let journal = Journal::create(path.as_deref(), &identity, &backing)
                .map_err(io("make the ring's journal"))?;
            journal.reset(published);
            ring.resume(published, published);
            (journal, Vec::new())
        }
    };
    let journal = Arc::new(journal);
    disk.unstable.add(&journal);
    let channel =
        platform.bind(key.guest, nodes.port).map_err(io("bind the frontend's event channel"))?;
    Ok(Parts {
        disk: disk.clone(),
        name: format!("{}/{number}", key.name()),
        guest: key.guest,
        grants,
        channel,
        ring,
        journal,
        left_over,
        // What a guest never learns of it cannot use.
        persistent: frontend.persistent,
    })
}

fn identity(key: &Key, number: usize, nodes: &QueueNodes, ring: &Ring) -> Identity {
    Identity {
        guest: key.guest.into(),
        device: key.device,
        queue: u32::try_from(number).unwrap_or(u32::MAX),
        port: nodes.port,
        ring: nodes.ring.first().copied().unwrap_or_default(),
        slots: ring.slots(),
        slot_bytes: u32::try_from(ring.abi().slot_bytes()).unwrap_or_default(),
    }
}

pub(crate) fn journal_path(folder: &Path, key: &Key, number: usize) -> PathBuf {
    folder.join(format!("{}-{number}", key.name()))
}
