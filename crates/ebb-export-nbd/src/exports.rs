//! The volumes a server offers, by name; changed while it runs.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use ebb_io::BufPool;
use ebb_mem::{Memory, OwnerId, PoolParameters};
use ebb_volume::{Gate, LogLimit, Stop, Volume, Writer};

use crate::handshake::{BlockSizes, Capabilities, ExportInfo, Exports};
use crate::seats::{NoSeat, Seats, Wanted};
use crate::server::Limits;

/// The smallest request, bytes: a sector.
const MINIMUM: u32 = 512;
/// What requests are best aligned to, bytes.
const PREFERRED: u32 = 4096;

/// Characters of a name the log quotes.
const LOGGED_NAME_MAX: usize = 256;

/// Connections to a volume that the log tells of, in so much time.
const CONNECTED_LINES: u32 = 20;
const CONNECTED_PERIOD: Duration = Duration::from_secs(10);

/// A volume on offer, with what its connections wait for and are counted by.
#[derive(Debug)]
pub(crate) struct Export {
    pub(crate) volume: Arc<Volume>,
    pub(crate) stop: Arc<Stop>,
    pub(crate) connections: Gate,
    /// Those of `max_clients` that its clients have.
    seats: Seats,
    /// Limits of the page pools of its queues.
    pub(crate) pool: Arc<PoolParameters>,
    /// Whom its memory is accounted to, from the first connection on.
    owner: OnceLock<Option<OwnerId>>,
    /// Rations the lines about connections: a client that logs in without end must not fill the log.
    pub(crate) lines: LogLimit,
}

impl Export {
    /// A page pool for one of its queues. Volumes are told apart in the accounts as long as there
    /// are numbers for them; then they count as their worker's.
    pub(crate) fn queue(&self, worker: &BufPool) -> BufPool {
        let owner = self.owner.get_or_init(|| worker.memory().owner(self.volume.name()).ok());
        worker.queue(owner.unwrap_or(worker.owner()), self.pool.clone())
    }

    /// A place for one more of its clients.
    pub(crate) fn seat(&self, alone: bool, most: usize) -> Wanted<'_> {
        Wanted { name: self.volume.name(), own: &self.seats, alone, most }
    }

    /// Gives its number back once nothing is under way any more.
    pub(crate) fn release(&self, memory: &Memory) {
        if let Some(Some(owner)) = self.owner.get() {
            memory.release_owner(*owner);
        }
    }
}

#[derive(Debug, Default)]
struct Table {
    by_name: BTreeMap<Arc<str>, Arc<Export>>,
    /// Volumes that are not served now, each with the text its clients are refused with.
    refused: BTreeMap<Arc<str>, Arc<str>>,
    default: Option<Arc<str>>,
}

/// All volumes on offer.
#[derive(Debug, Default)]
pub(crate) struct Registry(RwLock<Table>);

impl Registry {
    fn read(&self) -> std::sync::RwLockReadGuard<'_, Table> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, Table> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, volume: Arc<Volume>, pool: Arc<PoolParameters>) {
        let name = volume.name().clone();
        let (stop, connections) = (Arc::default(), Gate::default());
        let lines = LogLimit::new(CONNECTED_LINES, CONNECTED_PERIOD);
        let (seats, owner) = (Seats::default(), OnceLock::new());
        let export = Export { volume, stop, connections, seats, pool, owner, lines };
        let mut table = self.write();
        table.refused.remove(&name);
        table.by_name.insert(name, Arc::new(export));
    }

    pub(crate) fn remove(&self, name: &str) -> Option<Arc<Export>> {
        let mut table = self.write();
        table.refused.remove(name);
        table.by_name.remove(name)
    }

    /// Clients that ask for this volume are told `why` they cannot have it; for one that is not offered.
    pub(crate) fn refuse(&self, name: &str, why: &str) {
        self.write().refused.insert(name.into(), why.into());
    }

    /// Why a volume cannot be had now.
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

    /// Whether no more than one volume is served.
    pub(crate) fn is_alone(&self) -> bool {
        self.read().by_name.len() <= 1
    }

    pub(crate) fn all(&self) -> Vec<Arc<Export>> {
        self.read().by_name.values().cloned().collect()
    }
}

/// What the handshake of one connection sees of the registry.
pub(crate) struct View<'a> {
    pub(crate) registry: &'a Registry,
    pub(crate) limits: Limits,
    pub(crate) seats: &'a Seats,
    /// The last name asked for under which nothing is offered.
    pub(crate) missed: RefCell<Option<String>>,
    /// Why there was no place for the client, where the last volume it asked for has none.
    pub(crate) no_seat: RefCell<Option<NoSeat>>,
}

impl Exports for View<'_> {
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
        let wanted = export.seat(self.registry.is_alone(), self.limits.max_clients);
        if let Err(why) = self.seats.look(wanted) {
            let text = why.to_string();
            *self.no_seat.borrow_mut() = Some(why);
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
            capabilities: Capabilities {
                read_only: volume.read_only(),
                flush: true,
                fua: true,
                trim: can.discard,
                write_zeroes: true,
                fast_zero: can.fast_zero,
                // One store behind all connections: a flush on any covers the writes of all.
                multi_conn: true,
                cache: true,
                rotational: false,
            },
            block: BlockSizes::new(MINIMUM, PREFERRED, self.limits.max_request).unwrap_or_default(),
        })
    }
}
