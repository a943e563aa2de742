//! One device: what is known of it, the nodes it is offered with, and the opening of its rings.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ebb_export::{Backing, UnstableWrites};
use ebb_mem::PoolParameters;
use ebb_volume::{Lease, LogLimit, Stop, Volume, WriterConflict};

use crate::abi::SECTOR_BYTES;
use crate::device_shared::{Counters, DeviceShared, MAX_SEGMENTS};
use crate::journal::{Journal, ResumeError, RingIdentity};
use crate::nodes::{FrontendNodes, MAX_RING_ORDER, NodeError, Nodes, QueueNodes, number};
use crate::platform::{Domain, Platform, XenstoreError};
use crate::queue::QueueParts;
use crate::ring::BlkifRing;
use crate::xenbus_state::{DevicePhase, ObservedStates};

/// The least time between two checks of a device.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// The first and the longest interval between two reads of the nodes of a device's rings.
const RINGS_INTERVAL: Duration = Duration::from_millis(100);
const RINGS_INTERVAL_MAX: Duration = Duration::from_secs(60);

/// How often a device that waits for another writer tries again.
const WRITER_RETRY: Duration = Duration::from_millis(100);

/// Identifies a device: its backend kind, its guest and its number.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DeviceKey {
    pub(crate) kind: Arc<str>,
    pub(crate) guest: Domain,
    pub(crate) device: u32,
}

impl DeviceKey {
    /// The backend's directory, within domain `own`.
    pub(crate) fn base(&self, own: Domain) -> String {
        let DeviceKey { kind, guest, device } = self;
        format!("/local/domain/{own}/backend/{kind}/{guest}/{device}")
    }

    /// Its name in the log and in file names, and the token of its watch.
    pub(crate) fn name(&self) -> String {
        format!("{}-{}-{}", self.kind, self.guest, self.device)
    }

    /// Parses a [`DeviceKey::name`] of one of `kinds`.
    pub(crate) fn parse(name: &str, kinds: &[Arc<str>]) -> Option<DeviceKey> {
        let mut parts = name.rsplitn(3, '-');
        let device = parts.next().and_then(number)?;
        let guest = parts.next().and_then(number).and_then(|guest| Domain::try_from(guest).ok())?;
        let kind = parts.next()?;
        let kind = kinds.iter().find(|one| ***one == *kind)?.clone();
        Some(DeviceKey { kind, guest, device })
    }
}

/// Why a device cannot be served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeviceError {
    #[error(
        "there is no volume `{0}`: attach the disk with the name of one of the daemon's volumes"
    )]
    NoVolume(String),
    #[error(
        "guest {guest} may not open volume `{volume}`: add `xen:` and its name or UUID to the volume's `allow`"
    )]
    NotAllowed { volume: String, guest: Domain },
    #[error(transparent)]
    Writer(#[from] WriterConflict),
    #[error("volume `{0}` is not served any more: detach the disk, or attach another volume")]
    Withdrawn(String),
    #[error("the frontend's nodes are invalid: {0}")]
    Nodes(#[from] NodeError),
    #[error("cannot {what}")]
    Io { what: &'static str, source: std::io::Error },
    #[error("ring {queue}: {source}")]
    Resume { queue: usize, source: ResumeError },
    #[error("ring {queue}: the frontend shares too few pages for a ring")]
    NoRing { queue: usize },
    #[error("the frontend changed to a state that is not used for disks")]
    BadState,
}

impl From<XenstoreError> for DeviceError {
    fn from(error: XenstoreError) -> DeviceError {
        DeviceError::Nodes(error.into())
    }
}

/// The state of a device.
pub(crate) struct Device {
    pub(crate) base: String,
    /// The frontend's directory.
    pub(crate) frontend: String,
    pub(crate) phase: DevicePhase,
    pub(crate) checked_at: Option<Instant>,
    pub(crate) serving: Option<Serving>,
    /// The right to write to the volume, from the offer until the last request has completed.
    pub(crate) lease: Option<Lease>,
    /// Since when it waits for another writer.
    pub(crate) waiting: Option<Instant>,
    /// The name of its volume if that was withdrawn: the guest is notified once the rings have ended.
    pub(crate) withdrawn: Option<String>,
    /// The name of its volume if the guest may not open that any more: it is notified once the rings have ended.
    pub(crate) disallowed: Option<String>,
    /// Whether the guest may open its volume is to be checked again.
    pub(crate) recheck_access: bool,
    /// How many failures were logged.
    pub(crate) logged: u32,
    /// The states that were read when nothing was to be done. While only the guest may have changed something, and
    /// the guest's state is the same, nothing is to be done still.
    pub(crate) idle_seen: Option<ObservedStates>,
    /// Something changed since the last check.
    pub(crate) changed: bool,
    /// The guest wrote its state since the last check.
    pub(crate) written: bool,
    /// The next event is the one that a new watch fires at once.
    pub(crate) watch_begins: bool,
    /// Whether its frontend may have set up new rings.
    pub(crate) rings: RingRecheck,
}

impl Device {
    pub(crate) fn new(base: String, frontend: String) -> Device {
        Device {
            base,
            frontend,
            phase: DevicePhase::New,
            checked_at: None,
            serving: None,
            lease: None,
            waiting: None,
            withdrawn: None,
            disallowed: None,
            recheck_access: false,
            logged: 0,
            idle_seen: None,
            changed: true,
            written: false,
            watch_begins: true,
            rings: RingRecheck::default(),
        }
    }

    /// When it may be checked next; `None` is at any time.
    pub(crate) fn next_check(&self) -> Option<Instant> {
        let pause = if self.waiting.is_some() { WRITER_RETRY } else { CHECK_INTERVAL };
        let next = self.checked_at.map(|at| at + pause);
        if self.changed { next } else { next.max(self.rings.next) }
    }
}

/// Whether a frontend may have restarted with other rings although its state is the one it had before.
/// Finding out takes one xenstore request for each node of its rings: the nodes are read at once the first
/// time, then at growing intervals.
#[derive(Debug, Default)]
pub(crate) struct RingRecheck {
    /// The frontend's state was written since the rings' nodes were read.
    pub(crate) needed: bool,
    /// When the nodes may be read again.
    next: Option<Instant>,
    pause: Duration,
}

impl RingRecheck {
    /// Whether the nodes are to be read now; if so, notes that they were.
    pub(crate) fn take_due(&mut self, now: Instant) -> bool {
        let due = self.needed && self.next.is_none_or(|at| now >= at);
        if due {
            self.needed = false;
            self.next = Some(now + self.pause);
            self.pause = (self.pause * 2).clamp(RINGS_INTERVAL, RINGS_INTERVAL_MAX);
        }
        due
    }
}

/// A device being served.
pub(crate) struct Serving {
    pub(crate) generation: u64,
    pub(crate) disk: Arc<DeviceShared>,
    pub(crate) frontend: FrontendNodes,
    /// Rings that have not ended.
    pub(crate) running: u32,
    /// The size in bytes that the guest was given.
    pub(crate) size: u64,
    pub(crate) journals: Vec<PathBuf>,
}

/// Settings that all devices share.
#[derive(Clone, Debug)]
pub(crate) struct DeviceSettings {
    pub(crate) max_queues: u32,
    pub(crate) queue_memory: usize,
    pub(crate) journals: Option<PathBuf>,
}

/// The volume of a device, and the settings from the backend's directory.
pub(crate) struct Offer {
    pub(crate) volume: Arc<Volume>,
    pub(crate) pool: Arc<PoolParameters>,
    pub(crate) read_only: bool,
    /// The toolstack allows another writer (mode `w!`).
    pub(crate) share: bool,
    pub(crate) discard: bool,
    /// Flushes are offered; without them frontends use barriers.
    pub(crate) flush: bool,
    pub(crate) info: u32,
    pub(crate) persistent: bool,
}

impl Offer {
    /// The nodes with the features and the geometry that are offered to the frontend.
    pub(crate) fn nodes(&self, settings: &DeviceSettings) -> Nodes {
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
        settings: &DeviceSettings,
        log_limit: Arc<LogLimit>,
    ) -> Arc<DeviceShared> {
        Arc::new(DeviceShared {
            since: ebb_mem::clock::now(),
            volume: self.volume.clone(),
            pool: self.pool.clone(),
            parameters: parameters.clone(),
            read_only: self.read_only,
            discard: self.discard,
            queue_memory: settings.queue_memory,
            broken: AtomicBool::new(false),
            queues: AtomicU32::new(0),
            persistent: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            stop: Stop::default(),
            stopping: AtomicBool::new(false),
            counters: Counters::default(),
            unstable: UnstableWrites::default(),
            told: self.volume.told_losses(),
            log_limit,
        })
    }
}

/// Maps and binds everything that one ring needs. With `resume` the guest is already connected to it.
pub(crate) fn open_queue(
    platform: &dyn Platform,
    key: &DeviceKey,
    frontend: &FrontendNodes,
    number: usize,
    resume: bool,
    settings: &DeviceSettings,
    disk: &Arc<DeviceShared>,
) -> Result<QueueParts, DeviceError> {
    let nodes = &frontend.queues[number];
    let io = |what| move |source| DeviceError::Io { what, source };
    let grants = platform.grants(key.guest).map_err(io("reach the guest's grants"))?;
    let memory = grants.map(&nodes.ring, true).map_err(io("map the ring"))?;
    let mut ring = BlkifRing::new(memory, frontend.abi);
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
    let (journal, resumed_entries) = match found {
        Some(Ok(journal)) => {
            let (req_cons, resumed_entries) = journal.resume(published).map_err(fail)?;
            ring.resume(req_cons, published);
            journal.note_size(disk.volume.least_size());
            if journal.is_unstable() {
                journal.note_broken();
                tracing::error!(
                    device = key.name(),
                    "writes that were acknowledged were only in the memory of a daemon that has ended: the \
                                         guest's writes fail from now on, so that it notices the loss; check the guest's file \
                                         systems, then detach the disk and attach it again"
                );
            }
            if !journal.take_settled() {
                disk.unstable.note_inherited();
            }
            if journal.is_broken() {
                disk.broken.store(true, Ordering::Relaxed);
            }
            (journal, resumed_entries)
        }
        // Refused even for an idle ring: the guest caches data of the other store.
        Some(Err(error @ ResumeError::Backing { .. })) => {
            return Err(fail(error));
        }
        // The predecessor may have responded out of order: without its journal only an idle ring can be
        // taken over.
        Some(Err(error)) if sent != published => return Err(fail(error)),
        None if resume && sent != published => return Err(fail(ResumeError::Foreign)),
        _ => {
            if resume {
                disk.unstable.note_inherited();
            }
            let journal =
                Journal::create(path.as_deref(), &identity, &Backing::to_record(&disk.volume))
                    .map_err(io("make the ring's journal"))?;
            journal.reset(published);
            ring.resume(published, published);
            (journal, Vec::new())
        }
    };
    let journal = Arc::new(journal);
    disk.unstable.add(number, &journal);
    disk.unstable.note_layers(&disk.volume);
    let channel =
        platform.bind(key.guest, nodes.port).map_err(io("bind the frontend's event channel"))?;
    Ok(QueueParts {
        disk: disk.clone(),
        name: format!("{}/{number}", key.name()),
        guest: key.guest,
        grants,
        channel,
        ring,
        journal,
        resumed_entries,
        // A feature that the guest was not offered is not used.
        persistent: frontend.persistent,
    })
}

fn identity(key: &DeviceKey, number: usize, nodes: &QueueNodes, ring: &BlkifRing) -> RingIdentity {
    RingIdentity {
        guest: key.guest.into(),
        device: key.device,
        queue: u32::try_from(number).unwrap_or(u32::MAX),
        port: nodes.port,
        ring: nodes.ring.first().copied().unwrap_or_default(),
        slots: ring.slots(),
        slot_bytes: u32::try_from(ring.abi().slot_bytes()).unwrap_or_default(),
    }
}

pub(crate) fn journal_path(folder: &Path, key: &DeviceKey, number: usize) -> PathBuf {
    folder.join(format!("{}-{number}", key.name()))
}
