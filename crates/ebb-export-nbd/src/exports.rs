//! The volumes of the registry as NBD exports: what the connections to one volume share, and the default name.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use ebb_access::ClientIdentity;
use ebb_io::BufPool;
use ebb_mem::{Memory, OwnerId, PoolParameters};
use ebb_volume::{Gate, LogLimit, ServedVolume, Stop, Volume, Volumes, Writer};

use crate::client_limit::{AdmissionRequest, ClientCount, ClientLimitError, ServerLimits};
use crate::handshake::{BlockSizes, ExportCapabilities, ExportInfo, Exports};

/// The minimum block size, bytes: a sector.
const MINIMUM: u32 = 512;
/// The preferred block size, bytes.
const PREFERRED: u32 = 4096;

/// Characters of an export name quoted in the log.
const LOGGED_NAME_MAX: usize = 256;

/// Logged connections to one volume per period.
const CONNECTED_LINES: u32 = 20;
const CONNECTED_PERIOD: Duration = Duration::from_secs(10);

/// An exported volume, with the state that its connections share.
#[derive(Debug)]
pub(crate) struct Export {
    pub(crate) volume: Arc<Volume>,
    pub(crate) stop: Arc<Stop>,
    pub(crate) connections: Gate,
    /// Its clients, which count towards `max_clients`.
    clients: ClientCount,
    /// Limits of the page pools of its connections.
    pub(crate) pool: Arc<PoolParameters>,
    /// The account of its memory, from the first connection on.
    owner: OnceLock<Option<OwnerId>>,
    /// Limits the log lines about connections: a client that connects again and again must not fill the log.
    pub(crate) log_limit: LogLimit,
}

impl Export {
    /// A page pool for one of its connections. If no account number is free for the volume, its memory is accounted to
    /// the worker.
    pub(crate) fn queue(&self, worker: &BufPool) -> BufPool {
        let owner = self.owner.get_or_init(|| worker.memory().owner(self.volume.name()).ok());
        worker.queue(owner.unwrap_or(worker.owner()), &self.pool)
    }

    /// The request to admit one more of its clients.
    pub(crate) fn admission(&self, alone: bool, most: usize) -> AdmissionRequest<'_> {
        AdmissionRequest { name: self.volume.name(), own: &self.clients, alone, most }
    }

    /// Releases its account; to be called when no request is in flight.
    pub(crate) fn release(&self, memory: &Memory) {
        if let Some(Some(owner)) = self.owner.get() {
            memory.release_owner(*owner);
        }
    }
}

/// The exported volumes: those of the registry, with the state that their NBD connections share, which is made when
/// the first client asks for a volume.
#[derive(Debug, Default)]
pub(crate) struct ExportTable {
    pub(crate) volumes: Volumes,
    exports: RwLock<BTreeMap<Arc<str>, Arc<Export>>>,
    default: RwLock<Option<Arc<str>>>,
}

impl ExportTable {
    pub(crate) fn new(volumes: Volumes) -> ExportTable {
        ExportTable { volumes, ..ExportTable::default() }
    }

    pub(crate) fn set_default(&self, name: Option<&str>) {
        *self.default.write().unwrap_or_else(PoisonError::into_inner) = name.map(Arc::from);
    }

    /// Calls `with` with a requested name; the empty one means the default export.
    fn named<T>(&self, name: &str, with: impl FnOnce(&str) -> Option<T>) -> Option<T> {
        if !name.is_empty() {
            return with(name);
        }
        let default = self.default.read().unwrap_or_else(PoisonError::into_inner).clone();
        with(default.as_deref()?)
    }

    /// The export of a requested name.
    pub(crate) fn get(&self, name: &str) -> Option<Arc<Export>> {
        self.named(name, |name| {
            let served = self.volumes.get(name)?;
            let known = self.known(name);
            known
                .filter(|export| Arc::ptr_eq(&export.volume, &served.volume))
                .or_else(|| self.make(name))
        })
    }

    /// The export of this name that clients have asked for, if any.
    pub(crate) fn known(&self, name: &str) -> Option<Arc<Export>> {
        self.exports.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    fn make(&self, name: &str) -> Option<Arc<Export>> {
        let mut exports = self.exports.write().unwrap_or_else(PoisonError::into_inner);
        // Looked up again under the lock: if the volume was removed meanwhile, `remove` may have been called already.
        let ServedVolume { volume, pool } = self.volumes.get(name)?;
        if let Some(export) =
            exports.get(name).filter(|export| Arc::ptr_eq(&export.volume, &volume))
        {
            return Some(export.clone());
        }
        let (stop, connections) = (Arc::default(), Gate::default());
        let log_limit = LogLimit::new(CONNECTED_LINES, CONNECTED_PERIOD);
        let (clients, owner) = (ClientCount::default(), OnceLock::new());
        let export =
            Arc::new(Export { volume, stop, connections, clients, pool, owner, log_limit });
        exports.insert(name.into(), export.clone());
        Some(export)
    }

    /// Removes the export of a volume that is no longer in the registry.
    pub(crate) fn remove(&self, name: &str) -> Option<Arc<Export>> {
        self.exports.write().unwrap_or_else(PoisonError::into_inner).remove(name)
    }

    /// Whether at most one volume is exported.
    pub(crate) fn is_alone(&self) -> bool {
        self.volumes.count() <= 1
    }
}

/// A requested name under which a client finds no export.
pub(crate) enum MissedExport {
    /// No export has it.
    Unknown(String),
    /// The volume of this name is not served now: it is being opened, or closed, or has failed.
    Unavailable(String),
    /// The client may not open the volume of this name; it is answered as if there were none.
    NotAllowed(Arc<str>),
}

/// The exports as one connection's handshake uses them: those that its client may open.
pub(crate) struct ExportsView<'a> {
    pub(crate) exports: &'a ExportTable,
    pub(crate) limits: ServerLimits,
    pub(crate) clients: &'a ClientCount,
    /// The client, as far as it is known by now.
    pub(crate) who: RefCell<ClientIdentity>,
    /// The last requested name that led to no export.
    pub(crate) missed: RefCell<Option<MissedExport>>,
    /// Why the last volume the client requested admits no more clients.
    pub(crate) limit_error: RefCell<Option<ClientLimitError>>,
}

impl ExportsView<'_> {
    /// The volume of a requested name that the client may not open, if that is so.
    fn not_allowed(&self, name: &str) -> Option<Arc<str>> {
        let volumes = &self.exports.volumes;
        let not_allowed = |name: &str| !volumes.admits(name, &self.who.borrow());
        self.exports.named(name, |name| not_allowed(name).then(|| name.into()))
    }

    /// The export of a requested name that the client may open.
    fn find(&self, name: &str) -> Option<Arc<Export>> {
        if self.not_allowed(name).is_some() { None } else { self.exports.get(name) }
    }

    /// What the log says of a requested name that leads to no export.
    fn miss(&self, name: &str) -> MissedExport {
        let volumes = &self.exports.volumes;
        let exists = |name: &str| volumes.get(name).is_some() || volumes.refusal(name).is_some();
        match self.not_allowed(name).filter(|name| exists(name)) {
            Some(name) => MissedExport::NotAllowed(name),
            None => {
                let logged = name.chars().take(LOGGED_NAME_MAX).collect();
                match self.exports.named(name, |name| volumes.refusal(name)) {
                    Some(_) => MissedExport::Unavailable(logged),
                    None => MissedExport::Unknown(logged),
                }
            }
        }
    }
}

impl Exports for ExportsView<'_> {
    fn list(&self, visit: &mut dyn FnMut(&str, &str)) {
        self.exports.volumes.visit_names_for(&self.who.borrow(), |name| visit(name, ""));
    }

    fn refusal(&self, name: &str) -> Option<String> {
        if self.not_allowed(name).is_some() {
            return None;
        }
        self.exports.named(name, |name| self.exports.volumes.refusal(name))
    }

    fn busy(&self, name: &str) -> Option<String> {
        let export = self.find(name)?;
        let request = export.admission(self.exports.is_alone(), self.limits.max_clients);
        if let Err(why) = self.clients.check(request) {
            let text = why.to_string();
            *self.limit_error.borrow_mut() = Some(why);
            return Some(text);
        }
        if export.volume.read_only() {
            return None;
        }
        export.volume.writer_conflict(&Writer::nbd()).map(|conflict| conflict.to_string())
    }

    fn lookup(&self, name: &str) -> Option<ExportInfo> {
        let Some(export) = self.find(name) else {
            *self.missed.borrow_mut() = Some(self.miss(name));
            return None;
        };
        let (volume, can) = (&export.volume, export.volume.capabilities());
        Some(ExportInfo {
            snapshots: volume.snapshots(),
            handle: 0,
            name: volume.name().to_string(),
            description: String::new(),
            size: volume.size(),
            capabilities: ExportCapabilities {
                read_only: volume.read_only(),
                flush: true,
                fua: true,
                trim: can.discard,
                write_zeroes: true,
                fast_zero: can.fast_zero,
                // All connections use the same store: a flush on any of them covers the writes of all.
                multi_conn: true,
                cache: true,
                rotational: false,
            },
            block: BlockSizes::new(MINIMUM, PREFERRED, self.limits.max_request).unwrap_or_default(),
        })
    }
}
