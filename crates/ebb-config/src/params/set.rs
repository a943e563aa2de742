//! The values in force. They are set at run time, reloaded from the configuration, and read through atomics.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ebb_mem::PoolParameters;
use serde_json::Value;

mod bdi;

pub use self::bdi::BdiLive;
use self::bdi::{BdiCells, needs_bdi};
use super::error::{ParameterError, ParameterErrorKind as ErrorKind};
use super::table::{Key, ParameterScope};
use crate::{Choice, Config, LogLevel, shorten, suggest};

/// A handle to the value in force of one parameter. Cheap to clone and to read.
#[derive(Clone, Debug)]
pub struct Live(Arc<AtomicU64>);

impl Live {
    fn new(value: u64) -> Self {
        Self(Arc::new(AtomicU64::new(value)))
    }

    /// The value in force, in the unit of its [`super::Definition`].
    pub fn get(&self) -> u64 {
        // Relaxed: values are independent of each other and of other memory.
        self.0.load(Ordering::Relaxed)
    }

    fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// The atomic behind it, for crates that do not depend on this one. They must only read it.
    pub fn atomic(&self) -> Arc<AtomicU64> {
        self.0.clone()
    }
}

/// The values of the configuration: those of the daemon (absent: the default), and those of volumes
/// and backing devices. All values are within their ranges.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Configured {
    /// The daemon's values.
    pub daemon: BTreeMap<Key, u64>,
    /// The volumes, each with its own values.
    pub volumes: BTreeMap<String, BTreeMap<Key, u64>>,
    /// The configured backing devices, each with its values.
    pub bdis: BTreeMap<String, BTreeMap<Key, u64>>,
}

impl From<&Config> for Configured {
    fn from(config: &Config) -> Self {
        let clients = u64::try_from(config.nbd.max_clients).unwrap_or(u64::MAX);
        let level = LogLevel::ALL.iter().position(|(_, level)| *level == config.log);
        let daemon = BTreeMap::from([
            (Key::MaxBufferPages, config.max_buffer_pages),
            (Key::BufferSqueezeDurationMs, config.buffer_squeeze_duration_ms),
            (Key::CacheMax, config.cache_max.bytes()),
            (Key::CacheMin, config.cache_min.bytes()),
            (Key::MaxClients, clients),
            (Key::MaxRequest, config.nbd.max_request.bytes()),
            (Key::ConnectionMemory, config.nbd.connection_memory.bytes()),
            (Key::Log, level.and_then(|at| u64::try_from(at).ok()).unwrap_or_default()),
        ]);
        let own = |volume: &crate::VolumeConfig| {
            [
                (Key::MaxBufferPages, volume.max_buffer_pages),
                (Key::BufferSqueezeDurationMs, volume.buffer_squeeze_duration_ms),
            ]
            .into_iter()
            .filter_map(|(key, value)| Some((key, value?)))
            .collect()
        };
        let volumes = &config.volumes;
        Self {
            daemon,
            volumes: volumes.iter().map(|(name, v)| (name.clone(), own(v))).collect(),
            bdis: bdi::configured(config),
        }
    }
}

/// The origin of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The configuration, or the default if the configuration has no value.
    Configuration,
    /// It was set while the daemon runs.
    RunTime,
    /// The daemon's value, which a volume without a value of its own uses.
    Daemon,
}

impl Origin {
    /// The origin as a stable word for programs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Configuration => "configuration",
            Self::RunTime => "run-time",
            Self::Daemon => "daemon",
        }
    }
}

/// A parameter's value, and its origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// The parameter.
    pub key: Key,
    /// The value in force.
    pub value: u64,
    /// Its origin.
    pub origin: Origin,
}

/// A change of a value in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterChange {
    /// The parameter.
    pub key: Key,
    /// The volume whose own value it is; `None` for the daemon's.
    pub volume: Option<String>,
    /// The backing device whose value it is; `None` for all other parameters.
    pub bdi: Option<String>,
    /// The value before.
    pub from: u64,
    /// The value now.
    pub to: u64,
}

/// A value of the daemon.
#[derive(Debug)]
struct DaemonCell {
    configured: u64,
    live: Live,
}

/// A value of a volume: its own, or the daemon's.
#[derive(Debug)]
struct VolumeCell {
    configured: Option<u64>,
    own: Option<u64>,
    live: Live,
}

type Watcher = Box<dyn Fn(&ParameterChange) + Send + Sync>;

/// The values of a volume, and their copy for its page pools.
#[derive(Debug, Default)]
struct VolumeCells {
    cells: BTreeMap<Key, VolumeCell>,
    pool: Arc<PoolParameters>,
}

#[derive(Default)]
struct State {
    daemon: BTreeMap<Key, DaemonCell>,
    /// The daemon's values for page pools that belong to no volume.
    pool: Arc<PoolParameters>,
    volumes: BTreeMap<String, VolumeCells>,
    bdis: BTreeMap<String, BdiCells>,
    watchers: Vec<Watcher>,
}

/// All parameters with their values. Cheap to clone; clones share the values.
#[derive(Clone)]
pub struct Parameters(Arc<Mutex<State>>);

impl fmt::Debug for Parameters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        f.debug_struct("Parameters")
            .field("daemon", &state.daemon)
            .field("volumes", &state.volumes)
            .finish_non_exhaustive()
    }
}

impl Parameters {
    /// The parameters as configured.
    pub fn new(configured: &Configured) -> Self {
        let mut state = State::default();
        for key in Key::of_daemon() {
            let value = configured_value(configured, key);
            state.daemon.insert(key, DaemonCell { configured: value, live: Live::new(value) });
        }
        let parameters = Self(Arc::new(Mutex::new(state)));
        parameters.reload(configured);
        parameters
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `watcher` for each later change, one at a time and in order. It must not call methods of
    /// this type; it can read other values through [`Live`].
    pub fn watch(&self, watcher: impl Fn(&ParameterChange) + Send + Sync + 'static) {
        self.lock().watchers.push(Box::new(watcher));
    }

    /// The daemon's value of a parameter.
    pub fn live(&self, key: Key) -> Live {
        self.lock().daemon_live(key)
    }

    /// The value in force for a volume: its own, or else the daemon's. For a parameter of the daemon
    /// only, or an unknown volume, it is the daemon's.
    #[cfg(test)]
    pub(crate) fn volume_live(&self, volume: &str, key: Key) -> Live {
        let state = self.lock();
        let cell = state.volume_cell(volume, key);
        cell.map_or_else(|| state.daemon_live(key), |cell| cell.live.clone())
    }

    /// The values in force for the page pools of a volume. With `None` or an unknown volume they are
    /// those of page pools that belong to no volume.
    pub fn pool(&self, volume: Option<&str>) -> Arc<PoolParameters> {
        let state = self.lock();
        let volume = volume.and_then(|volume| state.volumes.get(volume));
        volume.map_or(&state.pool, |volume| &volume.pool).clone()
    }

    /// Applies the zone limits to `memory`, now and after changes.
    pub fn govern(&self, memory: &Arc<ebb_mem::Memory>) {
        let apply = |memory: &ebb_mem::Memory, key, value: u64| {
            if let Key::ZoneLimitBytes(class) = key {
                let bytes = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
                memory.set_zone_limit(bytes(class.bytes()), (value != 0).then(|| bytes(value)));
            }
        };
        for key in Key::all() {
            apply(memory, key, self.live(key).get());
        }
        let memory = memory.clone();
        self.watch(move |change| apply(&memory, change.key, change.to));
    }

    /// The parameters of the daemon, or those of a volume, in order.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownVolume`].
    pub fn list(&self, volume: Option<&str>) -> Result<Vec<Reading>, ParameterError> {
        let state = self.lock();
        let keys: Vec<Key> = match volume {
            None => Key::of_daemon().collect(),
            Some(_) => Key::per_volume().collect(),
        };
        keys.into_iter().map(|key| state.reading(key, volume)).collect()
    }

    /// The value of the parameter called `name`.
    ///
    /// # Errors
    /// An unknown name, an unknown volume, or a parameter that volumes do not have.
    pub fn get(&self, name: &str, volume: Option<&str>) -> Result<Reading, ParameterError> {
        let key = Key::parse(name)?;
        self.lock().reading(key, volume)
    }

    /// Sets a parameter at run time; the change is in force when this returns.
    ///
    /// # Errors
    /// As for [`Self::get`], or a value that is refused.
    pub fn set(
        &self,
        name: &str,
        volume: Option<&str>,
        value: &Value,
    ) -> Result<ParameterChange, ParameterError> {
        let key = Key::parse(name)?;
        let mut state = self.lock();
        let before = state.reading(key, volume)?.value;
        let value = key.definition().parse(value)?;
        state.put(key, volume, Some(value), before)
    }

    /// Goes back to the value of the configuration; for a volume without one, to the daemon's value.
    ///
    /// # Errors
    /// As for [`Self::get`], or [`ErrorKind::Conflict`] with a value set meanwhile.
    pub fn unset(
        &self,
        name: &str,
        volume: Option<&str>,
    ) -> Result<ParameterChange, ParameterError> {
        let key = Key::parse(name)?;
        let mut state = self.lock();
        let before = state.reading(key, volume)?.value;
        let configured = match volume {
            None => state.daemon.get(&key).map(|cell| cell.configured),
            Some(volume) => state.volume_cell(volume, key).and_then(|cell| cell.configured),
        };
        state.put(key, volume, configured, before)
    }

    /// Applies a reloaded configuration, by the rule of the module. Values set for volumes that were
    /// removed are discarded. Returns the changes, in order.
    pub fn reload(&self, configured: &Configured) -> Vec<ParameterChange> {
        let mut state = self.lock();
        let mut changes = state.reload_daemon(configured);
        changes.extend(state.reload_volumes(configured));
        changes.extend(state.reload_bdis(configured));
        state.follow_daemon();
        for change in &changes {
            state.notify(change);
        }
        changes
    }
}

fn set_pool(pool: &PoolParameters, value: impl Fn(Key) -> u64) {
    // The maximum values are far below 2^32.
    let value = |key| u32::try_from(value(key)).unwrap_or(u32::MAX);
    pool.set_max_buffer_pages(value(Key::MaxBufferPages));
    pool.set_buffer_squeeze_duration_ms(value(Key::BufferSqueezeDurationMs));
}

fn configured_value(configured: &Configured, key: Key) -> u64 {
    configured.daemon.get(&key).copied().unwrap_or(key.definition().default)
}

impl State {
    fn daemon_live(&self, key: Key) -> Live {
        // Every key has a cell from the beginning.
        let default = || Live::new(key.definition().default);
        self.daemon.get(&key).map_or_else(default, |cell| cell.live.clone())
    }

    fn daemon_value(&self, key: Key) -> u64 {
        self.daemon.get(&key).map_or(key.definition().default, |cell| cell.live.get())
    }

    fn volume_cell(&self, volume: &str, key: Key) -> Option<&VolumeCell> {
        self.volumes.get(volume)?.cells.get(&key)
    }

    fn reading(&self, key: Key, volume: Option<&str>) -> Result<Reading, ParameterError> {
        let Some(volume) = volume else {
            if key.definition().scope == ParameterScope::Bdi {
                return Err(needs_bdi(key));
            }
            let value = self.daemon_value(key);
            let configured = self.daemon.get(&key).is_none_or(|cell| cell.configured == value);
            let origin = if configured { Origin::Configuration } else { Origin::RunTime };
            return Ok(Reading { key, value, origin });
        };
        let Some(volume) = self.volumes.get(volume) else {
            return Err(unknown_volume(volume, self.volumes.keys().map(String::as_str)));
        };
        let cell = volume.cells.get(&key).ok_or_else(|| {
            let names: Vec<String> = Key::per_volume().map(Key::name).collect();
            ParameterError::new(
                ErrorKind::NotPerVolume,
                format!("{key} is a parameter of the daemon only"),
                format!("omit the volume; the parameters of volumes are {}", names.join(", ")),
            )
        })?;
        let origin = match cell.own {
            None => Origin::Daemon,
            own if own == cell.configured => Origin::Configuration,
            Some(_) => Origin::RunTime,
        };
        Ok(Reading { key, value: cell.live.get(), origin })
    }

    /// Puts a value in force. With `None` a volume uses the daemon's value.
    fn put(
        &mut self,
        key: Key,
        volume: Option<&str>,
        value: Option<u64>,
        from: u64,
    ) -> Result<ParameterChange, ParameterError> {
        let to = value.unwrap_or_else(|| self.daemon_value(key));
        if let Some(volume) = volume {
            let cell = self.volumes.get_mut(volume).and_then(|v| v.cells.get_mut(&key));
            if let Some(cell) = cell {
                cell.own = value;
                cell.live.set(to);
            }
        } else {
            self.fits_together(key, to)?;
            if let Some(cell) = self.daemon.get(&key) {
                cell.live.set(to);
            }
        }
        self.follow_daemon();
        let change =
            ParameterChange { key, volume: volume.map(str::to_owned), bdi: None, from, to };
        if from != to {
            self.notify(&change);
        }
        Ok(change)
    }

    /// Checks the daemon's `value` for `key` against the values of other parameters.
    fn fits_together(&self, key: Key, value: u64) -> Result<(), ParameterError> {
        let conflict = |message: String, remedy: String| {
            Err(ParameterError::new(ErrorKind::Conflict, message, remedy))
        };
        let text = |value| key.definition().text(value);
        match key {
            Key::MaxRequest if value > self.daemon_value(Key::ConnectionMemory) => {
                let memory = text(self.daemon_value(Key::ConnectionMemory));
                conflict(
                    format!("a request of {} does not fit into connection_memory", text(value)),
                    format!("choose {memory} or less, or a larger connection_memory first"),
                )
            }
            Key::ConnectionMemory if value < self.daemon_value(Key::MaxRequest) => {
                let request = text(self.daemon_value(Key::MaxRequest));
                conflict(
                    format!("{} cannot hold one request of max_request, {request}", text(value)),
                    format!("choose {request} or more, or a smaller max_request first"),
                )
            }
            Key::CacheMax if value != 0 && value < self.daemon_value(Key::CacheMin) => {
                let least = text(self.daemon_value(Key::CacheMin));
                conflict(
                    format!("{} is less than cache_min, {least}", text(value)),
                    format!("choose {least} or more, or a smaller cache_min first"),
                )
            }
            Key::CacheMin if (1..value).contains(&self.daemon_value(Key::CacheMax)) => {
                let most = text(self.daemon_value(Key::CacheMax));
                conflict(
                    format!("{} is more than cache_max, {most}", text(value)),
                    format!("choose {most} or less, or a larger cache_max first"),
                )
            }
            _ => Ok(()),
        }
    }

    fn reload_daemon(&mut self, configured: &Configured) -> Vec<ParameterChange> {
        let before: Vec<(Key, u64)> =
            self.daemon.iter().map(|(key, cell)| (*key, cell.live.get())).collect();
        for (key, cell) in &mut self.daemon {
            let value = configured_value(configured, *key);
            if value != cell.configured {
                cell.configured = value;
                cell.live.set(value);
            }
        }
        if self.daemon_value(Key::MaxRequest) > self.daemon_value(Key::ConnectionMemory) {
            // One is from the file and one was set at run time: only the two of the file are checked to fit.
            for key in [Key::MaxRequest, Key::ConnectionMemory] {
                if let Some(cell) = self.daemon.get(&key) {
                    cell.live.set(cell.configured);
                }
            }
        }
        let (most, least) = (self.daemon_value(Key::CacheMax), self.daemon_value(Key::CacheMin));
        if most != 0 && least > most {
            for key in [Key::CacheMax, Key::CacheMin] {
                if let Some(cell) = self.daemon.get(&key) {
                    cell.live.set(cell.configured);
                }
            }
        }
        let change = |(key, from)| {
            let to = self.daemon_value(key);
            (from != to).then_some(ParameterChange { key, volume: None, bdi: None, from, to })
        };
        before.into_iter().filter_map(change).collect()
    }

    fn reload_volumes(&mut self, configured: &Configured) -> Vec<ParameterChange> {
        self.volumes.retain(|name, _| configured.volumes.contains_key(name));
        let mut changes = Vec::new();
        for (name, own) in &configured.volumes {
            for key in Key::per_volume() {
                let daemon = self.daemon_value(key);
                let configured = own.get(&key).copied();
                let cells = &mut self.volumes.entry(name.clone()).or_default().cells;
                let Some(cell) = cells.get_mut(&key) else {
                    let live = Live::new(configured.unwrap_or(daemon));
                    cells.insert(key, VolumeCell { configured, own: configured, live });
                    continue;
                };
                if cell.configured == configured {
                    continue;
                }
                (cell.configured, cell.own) = (configured, configured);
                let (from, to) = (cell.live.get(), configured.unwrap_or(daemon));
                cell.live.set(to);
                if from != to {
                    changes.push(ParameterChange {
                        key,
                        volume: Some(name.clone()),
                        bdi: None,
                        from,
                        to,
                    });
                }
            }
        }
        changes
    }

    /// Updates volumes without a value of their own to the daemon's, and page pools to the values in force.
    fn follow_daemon(&self) {
        for volume in self.volumes.values() {
            for (key, cell) in &volume.cells {
                if cell.own.is_none() {
                    cell.live.set(self.daemon_value(*key));
                }
            }
            let value = |key| volume.cells.get(&key).map_or(0, |cell| cell.live.get());
            set_pool(&volume.pool, value);
        }
        set_pool(&self.pool, |key| self.daemon_value(key));
    }

    fn notify(&self, change: &ParameterChange) {
        for watcher in &self.watchers {
            watcher(change);
        }
    }
}

/// The error for an unknown volume.
pub fn unknown_volume<'a>(given: &str, known: impl Iterator<Item = &'a str>) -> ParameterError {
    /// A limit of the names to compare with.
    const MOST: usize = 1000;
    let known: BTreeSet<&str> = known.take(MOST).collect();
    let remedy = match known.len() {
        0 => "the daemon serves no volumes at present".to_owned(),
        1..=10 => suggest(given, known.iter().copied(), "the volumes are"),
        _ => match crate::closest(given, known.iter().copied()) {
            Some(name) => format!("did you mean `{name}`?"),
            None => "`ebbd stat` lists the volumes".to_owned(),
        },
    };
    let message = format!("there is no volume `{}`", shorten(given));
    ParameterError::new(ErrorKind::UnknownVolume, message, remedy)
}

#[cfg(test)]
mod tests;
