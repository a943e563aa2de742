//! The volumes a server exports, by name; changed while it runs.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use ebb_io::BufPool;
use ebb_mem::{Memory, OwnerId, PoolParameters};
use ebb_volume::{Gate, LogLimit, Stop, Volume, Writer};

use crate::client_limit::{AdmissionRequest, ClientCount, ClientLimitError};
use crate::handshake::{BlockSizes, ExportCapabilities, ExportInfo, Exports};
use crate::server::ServerLimits;

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
        worker.queue(owner.unwrap_or(worker.owner()), self.pool.clone())
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

#[derive(Debug, Default)]
struct RegistryTable {
    by_name: BTreeMap<Arc<str>, Arc<Export>>,
    /// Volumes that are not exported now, each with the message its clients are refused with.
    refused: BTreeMap<Arc<str>, Arc<str>>,
    default: Option<Arc<str>>,
}

/// All exported volumes.
#[derive(Debug, Default)]
pub(crate) struct Registry(RwLock<RegistryTable>);

impl Registry {
    fn read(&self) -> std::sync::RwLockReadGuard<'_, RegistryTable> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, RegistryTable> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, volume: Arc<Volume>, pool: Arc<PoolParameters>) {
        let name = volume.name().clone();
        let (stop, connections) = (Arc::default(), Gate::default());
        let log_limit = LogLimit::new(CONNECTED_LINES, CONNECTED_PERIOD);
        let (clients, owner) = (ClientCount::default(), OnceLock::new());
        let export = Export { volume, stop, connections, clients, pool, owner, log_limit };
        let mut table = self.write();
        table.refused.remove(&name);
        table.by_name.insert(name, Arc::new(export));
    }

    pub(crate) fn remove(&self, name: &str) -> Option<Arc<Export>> {
        let mut table = self.write();
        table.refused.remove(name);
        table.by_name.remove(name)
    }

    /// Refuses clients that request this volume, which is not exported, with the message `why`.
    pub(crate) fn refuse(&self, name: &str, why: &str) {
        self.write().refused.insert(name.into(), why.into());
    }

    /// The message for clients that request a volume which is not exported now, if one was set.
    fn refusal(&self, name: &str) -> Option<String> {
        let table = self.read();
        let name = if name.is_empty() { table.default.as_deref()? } else { name };
        table.refused.get(name).map(|why| why.to_string())
    }

    pub(crate) fn set_default(&self, name: Option<&str>) {
        self.write().default = name.map(Arc::from);
    }

    pub(crate) fn get(&self, name: &str) -> Option<Arc<Export>> {
        let table = self.read();
        let name = if name.is_empty() { table.default.as_deref()? } else { name };
        table.by_name.get(name).cloned()
    }

    /// Whether at most one volume is exported.
    pub(crate) fn is_alone(&self) -> bool {
        self.read().by_name.len() <= 1
    }

    pub(crate) fn all(&self) -> Vec<Arc<Export>> {
        self.read().by_name.values().cloned().collect()
    }
}

/// The registry as one connection's handshake uses it.
pub(crate) struct ExportsView<'a> {
    pub(crate) registry: &'a Registry,
    pub(crate) limits: ServerLimits,
    pub(crate) clients: &'a ClientCount,
    /// The last requested name that no export has.
    pub(crate) missed: RefCell<Option<String>>,
    /// Why the last volume the client requested admits no more clients.
    pub(crate) limit_error: RefCell<Option<ClientLimitError>>,
}

impl Exports for ExportsView<'_> {
    fn list(&self, visit: &mut dyn FnMut(&str, &str)) {
        for name in self.registry.read().by_name.keys() {
            visit(name, "");
        }
    }

    fn refusal(&self, name: &str) -> Option<String> {
        self.registry.refusal(name)
    }

    fn busy(&self, name: &str) -> Option<String> {
        let export = self.registry.get(name)?;
        let request = export.admission(self.registry.is_alone(), self.limits.max_clients);
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
        let Some(export) = self.registry.get(name) else {
            *self.missed.borrow_mut() = Some(name.chars().take(LOGGED_NAME_MAX).collect());
            return None;
        };
        let (volume, can) = (&export.volume, export.volume.capabilities());
        Some(ExportInfo {
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
