//! The values in force. They are set at run time, reloaded from the configuration, and read through handles.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ebb_param::{Parameter, ParameterValue};
use serde_json::Value;

mod batch;
mod bdi;
mod limit_group;
mod restore;

use self::bdi::BdiValues;
use super::configured::{Configured, of_volume};
use super::definition::{Key, ParameterScope, ParameterTable, TypedKey};
use super::error::{ParameterError, ParameterErrorKind as ErrorKind};
use super::table::{
    CACHE_MAX, CACHE_MIN, CONNECTION_MEMORY, MAX_RATIO, MAX_REQUEST, MIN_RATIO, TABLE,
};
use crate::{VolumeConfig, shorten, suggest};

/// What has values of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterOwner<'a> {
    /// The daemon.
    Daemon,
    /// The volume of this name.
    Volume(&'a str),
    /// The backing device of this name.
    Bdi(&'a str),
    /// The group of volumes with limits in common of this name.
    LimitGroup(&'a str),
}

impl ParameterOwner<'_> {
    fn scope(self) -> ParameterScope {
        match self {
            Self::Daemon => ParameterScope::Daemon,
            Self::Volume(_) => ParameterScope::Volume,
            Self::Bdi(_) => ParameterScope::Bdi,
            Self::LimitGroup(_) => ParameterScope::LimitGroup,
        }
    }
}

/// The origin of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The built-in default: the configuration has no other value.
    Default,
    /// The configuration.
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
            Self::Default => "default",
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
    /// The group of limits whose value it is; `None` for all other parameters.
    pub limit_group: Option<String>,
    /// The value before.
    pub from: u64,
    /// The value now.
    pub to: u64,
}

impl ParameterChange {
    fn new(key: Key, owner: ParameterOwner, from: u64, to: u64) -> Self {
        let mut change = Self { key, volume: None, bdi: None, limit_group: None, from, to };
        match owner {
            ParameterOwner::Daemon => {}
            ParameterOwner::Volume(name) => change.volume = Some(name.to_owned()),
            ParameterOwner::Bdi(name) => change.bdi = Some(name.to_owned()),
            ParameterOwner::LimitGroup(name) => change.limit_group = Some(name.to_owned()),
        }
        change
    }

    fn owner(&self) -> ParameterOwner<'_> {
        match (&self.volume, &self.bdi, &self.limit_group) {
            (Some(volume), ..) => ParameterOwner::Volume(volume),
            (None, Some(bdi), _) => ParameterOwner::Bdi(bdi),
            (None, None, Some(group)) => ParameterOwner::LimitGroup(group),
            (None, None, None) => ParameterOwner::Daemon,
        }
    }
}

/// A value: the one of the configuration, the one that was set or else configured, and the one in force. Only a volume
/// can be without a value of its own.
#[derive(Debug)]
struct ValueCell {
    key: Key,
    configured: Option<u64>,
    own: Option<u64>,
    live: Parameter<u64>,
}

impl Drop for ValueCell {
    fn drop(&mut self) {
        self.live.forget_watchers();
    }
}

/// The values of one owner, in the order of the table.
#[derive(Debug, Default)]
struct Values(Vec<ValueCell>);

impl Values {
    /// The values for `keys`, as `configured`; where that is `None`, the value in force is `otherwise`.
    fn new(
        keys: impl Iterator<Item = Key>,
        configured: impl Fn(Key) -> Option<u64>,
        otherwise: impl Fn(Key) -> u64,
    ) -> Self {
        let cell = |key| {
            let own = configured(key);
            let live = Parameter::new(own.unwrap_or_else(|| otherwise(key)));
            ValueCell { key, configured: own, own, live }
        };
        Self(keys.map(cell).collect())
    }

    fn cell(&self, key: Key) -> Option<&ValueCell> {
        self.0.iter().find(|cell| cell.key == key)
    }

    /// The value in force.
    fn get(&self, key: Key) -> u64 {
        self.cell(key).map_or(key.definition().default, |cell| cell.live.get())
    }

    /// Adopts the values of a new configuration where it has changed.
    fn reload(&mut self, configured: impl Fn(Key) -> Option<u64>, otherwise: impl Fn(Key) -> u64) {
        for cell in &mut self.0 {
            let new = configured(cell.key);
            if cell.configured != new {
                (cell.configured, cell.own) = (new, new);
                cell.live.store(new.unwrap_or_else(|| otherwise(cell.key)));
            }
        }
    }

    /// Adopts configured values; a value that was set at run time stays in force.
    fn configure(
        &mut self,
        configured: impl Fn(Key) -> Option<u64>,
        otherwise: impl Fn(Key) -> u64,
    ) {
        for cell in &mut self.0 {
            let new = configured(cell.key);
            if cell.own == cell.configured && cell.configured != new {
                cell.own = new;
                cell.live.store(new.unwrap_or_else(|| otherwise(cell.key)));
            }
            cell.configured = new;
        }
    }

    /// Updates those of a volume that has no own value to the daemon's; returns what has changed.
    fn follow(&self, daemon: &Values) -> Vec<Parameter<u64>> {
        let mut changed = Vec::new();
        for cell in self.0.iter().filter(|cell| cell.own.is_none()) {
            let value = daemon.get(cell.key);
            if cell.live.get() != value {
                cell.live.store(value);
                changed.push(cell.live.clone());
            }
        }
        changed
    }

    /// Goes back to the configured values of some parameters.
    fn reset(&mut self, keys: &[Key]) {
        for cell in self.0.iter_mut().filter(|cell| keys.contains(&cell.key)) {
            cell.own = cell.configured;
            cell.own.iter().for_each(|own| cell.live.store(*own));
        }
    }

    fn in_force(&self) -> Vec<(Key, u64)> {
        self.0.iter().map(|cell| (cell.key, cell.live.get())).collect()
    }

    /// The differences to the values `before`.
    fn changes(&self, owner: ParameterOwner, before: &[(Key, u64)]) -> Vec<ParameterChange> {
        let change =
            |(key, from): &(Key, u64)| ParameterChange::new(*key, owner, *from, self.get(*key));
        before.iter().map(change).filter(|change| change.from != change.to).collect()
    }
}

/// Pairs of parameters of one owner: the first must not exceed the second, where the second has a limit.
const ORDERED: [(Key, Key); 3] = [
    (MAX_REQUEST.key(), CONNECTION_MEMORY.key()),
    (CACHE_MIN.key(), CACHE_MAX.key()),
    (MIN_RATIO.key(), MAX_RATIO.key()),
];

fn is_crossed(smaller: u64, (larger, key): (u64, Key)) -> bool {
    smaller > larger && !(larger == 0 && key.definition().zero.is_some())
}

/// Checks `value` for `key` against the owner's value of the other parameter of a pair, which `value_of` reads.
fn fits_pair(key: Key, value: u64, value_of: impl Fn(Key) -> u64) -> Result<(), ParameterError> {
    let text = key.definition().text(value);
    for (smaller, larger) in ORDERED {
        let (other, message, remedy) = if key == smaller {
            let most = value_of(larger);
            if !is_crossed(value, (most, larger)) {
                continue;
            }
            let most = larger.definition().text(most);
            let message = match key == MAX_REQUEST.key() {
                true => format!("a request of {text} does not fit into {larger}"),
                false => format!("{text} is more than {larger}, {most}"),
            };
            (larger, message, format!("choose {most} or less, or a larger"))
        } else if key == larger {
            let least = value_of(smaller);
            if !is_crossed(least, (value, larger)) {
                continue;
            }
            let least = smaller.definition().text(least);
            let message = match key == CONNECTION_MEMORY.key() {
                true => format!("{text} cannot hold one request of {smaller}, {least}"),
                false => format!("{text} is less than {smaller}, {least}"),
            };
            (smaller, message, format!("choose {least} or more, or a smaller"))
        } else {
            continue;
        };
        let remedy = format!("{remedy} {other} first");
        return Err(ParameterError::new(ErrorKind::Conflict, message, remedy));
    }
    Ok(())
}

struct State {
    table: ParameterTable,
    daemon: Values,
    volumes: BTreeMap<String, Values>,
    bdis: BTreeMap<String, BdiValues>,
    limit_groups: BTreeMap<String, Values>,
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
        Self::of_table(TABLE, configured)
    }

    /// As [`Parameters::new`], of another table.
    pub(super) fn of_table(table: ParameterTable, configured: &Configured) -> Self {
        let keys = table.keys_of(ParameterScope::Daemon);
        let daemon = Values::new(keys, |key| Some(value_of(&configured.daemon, key)), |_| 0);
        let (volumes, bdis, limit_groups) = Default::default();
        let state = State { table, daemon, volumes, bdis, limit_groups };
        let parameters = Self(Arc::new(Mutex::new(state)));
        parameters.reload(configured);
        parameters
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A handle to the value in force of a parameter. A volume without a value of its own has the daemon's. If there is
    /// no such owner, or it has no value of this parameter, the handle is that of the daemon.
    ///
    /// Watchers of a handle must not call methods of this type; they can read other values through handles.
    pub fn handle<T: ParameterValue>(
        &self,
        key: TypedKey<T>,
        owner: ParameterOwner,
    ) -> Parameter<T> {
        let (state, key) = (self.lock(), key.key());
        let of = |owner| Some(state.values(owner).ok()?.cell(key)?.live.read_as());
        let default = || Parameter::new(key.definition().default).read_as();
        of(owner).or_else(|| of(ParameterOwner::Daemon)).unwrap_or_else(default)
    }

    /// A handle to the daemon's value in force of a parameter.
    pub fn daemon<T: ParameterValue>(&self, key: TypedKey<T>) -> Parameter<T> {
        self.handle(key, ParameterOwner::Daemon)
    }

    /// The parameters of an owner, in order.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownVolume`] or [`ErrorKind::UnknownBdi`].
    pub fn list(&self, owner: ParameterOwner) -> Result<Vec<Reading>, ParameterError> {
        let state = self.lock();
        state.values(owner)?;
        state.table.keys_of(owner.scope()).map(|key| state.reading(key, owner)).collect()
    }

    /// The value of the parameter called `name`.
    ///
    /// # Errors
    /// An unknown name, an unknown owner, or a parameter that owners of its kind do not have.
    pub fn get(&self, name: &str, owner: ParameterOwner) -> Result<Reading, ParameterError> {
        let state = self.lock();
        state.reading(state.table.parse(name)?, owner)
    }

    /// Sets a parameter at run time; the change is in force when this returns.
    ///
    /// # Errors
    /// As for [`Self::get`], or a value that is refused.
    pub fn set(
        &self,
        name: &str,
        owner: ParameterOwner,
        value: &Value,
    ) -> Result<ParameterChange, ParameterError> {
        let mut state = self.lock();
        let key = state.table.parse(name)?;
        if let ParameterOwner::LimitGroup(group) = owner {
            // Checked first, so that a mistake makes no group.
            key.definition().parse(value)?;
            state.add_limit_group(group)?;
        }
        state.reading(key, owner)?;
        let value = key.definition().parse(value)?;
        state.put(key, owner, Some(value))
    }

    /// Goes back to the value of the configuration; for a volume without one, to the daemon's value.
    ///
    /// # Errors
    /// As for [`Self::get`], or [`ErrorKind::Conflict`] with a value set meanwhile.
    pub fn unset(
        &self,
        name: &str,
        owner: ParameterOwner,
    ) -> Result<ParameterChange, ParameterError> {
        let mut state = self.lock();
        let key = state.table.parse(name)?;
        let configured = state.cell(key, owner)?.configured;
        state.put(key, owner, configured)
    }

    /// Adds a volume that the configuration did not have, unless it is there already.
    pub fn add_volume(&self, name: &str, volume: &VolumeConfig) {
        let mut state = self.lock();
        if !state.volumes.contains_key(name) {
            let own = of_volume(volume);
            let keys = state.table.keys_of(ParameterScope::Volume);
            let values =
                Values::new(keys, |key| own.get(&key).copied(), |key| state.daemon.get(key));
            state.volumes.insert(name.to_owned(), values);
        }
    }

    /// Changes the configured values of a volume. Values that were set at run time stay in force.
    pub fn configure_volume(&self, name: &str, volume: &VolumeConfig) {
        let mut state = self.lock();
        let State { daemon, volumes, .. } = &mut *state;
        let Some(values) = volumes.get_mut(name) else { return };
        let (own, before) = (of_volume(volume), values.in_force());
        values.configure(|key| own.get(&key).copied(), |key| daemon.get(key));
        let changes = values.changes(ParameterOwner::Volume(name), &before);
        state.follow_and_notify(&changes);
    }

    /// Removes a volume; the values set for it are discarded.
    pub fn remove_volume(&self, name: &str) {
        self.lock().volumes.remove(name);
    }

    /// Gives the values of the volume `from` to the volume `to`.
    pub fn rename_volume(&self, from: &str, to: &str) {
        let mut state = self.lock();
        if let Some(values) = state.volumes.remove(from) {
            state.volumes.insert(to.to_owned(), values);
        }
    }

    /// Applies a reloaded configuration, by the rule of the module. Values set for volumes that were
    /// removed are discarded. Returns the changes, in order.
    pub fn reload(&self, configured: &Configured) -> Vec<ParameterChange> {
        let mut state = self.lock();
        let mut changes = state.reload_daemon(configured);
        changes.extend(state.reload_volumes(configured));
        changes.extend(state.reload_bdis(configured));
        changes.extend(state.reload_limit_groups(configured));
        state.follow_and_notify(&changes);
        changes
    }
}

fn value_of(configured: &BTreeMap<Key, u64>, key: Key) -> u64 {
    configured.get(&key).copied().unwrap_or(key.definition().default)
}

impl State {
    fn values(&self, owner: ParameterOwner) -> Result<&Values, ParameterError> {
        match owner {
            ParameterOwner::Daemon => Ok(&self.daemon),
            ParameterOwner::Volume(name) => self
                .volumes
                .get(name)
                .ok_or_else(|| unknown_volume(name, self.volumes.keys().map(String::as_str))),
            ParameterOwner::Bdi(name) => {
                self.bdis.get(name).map(|bdi| &bdi.values).ok_or_else(|| self.unknown_bdi(name))
            }
            ParameterOwner::LimitGroup(name) => {
                self.limit_groups.get(name).ok_or_else(|| self.unknown_limit_group(name))
            }
        }
    }

    fn cell(&self, key: Key, owner: ParameterOwner) -> Result<&ValueCell, ParameterError> {
        self.values(owner)?.cell(key).ok_or_else(|| self.not_of(key, owner))
    }

    fn cell_mut(&mut self, key: Key, owner: ParameterOwner) -> Option<&mut ValueCell> {
        let values = match owner {
            ParameterOwner::Daemon => &mut self.daemon,
            ParameterOwner::Volume(name) => self.volumes.get_mut(name)?,
            ParameterOwner::Bdi(name) => &mut self.bdis.get_mut(name)?.values,
            ParameterOwner::LimitGroup(name) => self.limit_groups.get_mut(name)?,
        };
        values.0.iter_mut().find(|cell| cell.key == key)
    }

    /// The error for a parameter that owners of this kind do not have.
    fn not_of(&self, key: Key, owner: ParameterOwner) -> ParameterError {
        let names: Vec<String> = self.table.keys_of(owner.scope()).map(Key::name).collect();
        let names = names.join(", ");
        let (kind, message, remedy) = match owner {
            ParameterOwner::Daemon => (
                ErrorKind::NotPerBdi,
                format!("{key} belongs to a backing device"),
                "name one with --bdi NAME; `ebbd stat bdi` lists them".to_owned(),
            ),
            ParameterOwner::Volume(_) => (
                ErrorKind::NotPerVolume,
                format!("{key} is a parameter of the daemon only"),
                format!("omit the volume; the parameters of volumes are {names}"),
            ),
            ParameterOwner::Bdi(_) => (
                ErrorKind::NotPerBdi,
                format!("{key} is not a parameter of backing devices"),
                format!("omit the device; the parameters of devices are {names}"),
            ),
            ParameterOwner::LimitGroup(_) => (
                ErrorKind::NotPerLimitGroup,
                format!("{key} is not a parameter of groups of limits"),
                format!("omit the group; the parameters of groups are {names}"),
            ),
        };
        ParameterError::new(kind, message, remedy)
    }

    fn reading(&self, key: Key, owner: ParameterOwner) -> Result<Reading, ParameterError> {
        let cell = self.cell(key, owner)?;
        let origin = match cell.own {
            None => Origin::Daemon,
            // A volume has no defaults of its own: what it has was given.
            own if own == cell.configured => match owner {
                ParameterOwner::Volume(_) => Origin::Configuration,
                _ if own == Some(key.definition().default) => Origin::Default,
                _ => Origin::Configuration,
            },
            Some(_) => Origin::RunTime,
        };
        Ok(Reading { key, value: cell.live.get(), origin })
    }

    /// Puts a value in force. With `None` a volume uses the daemon's value.
    fn put(
        &mut self,
        key: Key,
        owner: ParameterOwner,
        value: Option<u64>,
    ) -> Result<ParameterChange, ParameterError> {
        let mut changes = self.put_all(owner, &BTreeMap::from([(key, value)]))?;
        // There is one for each value.
        changes.pop().ok_or_else(|| self.not_of(key, owner))
    }

    fn reload_daemon(&mut self, configured: &Configured) -> Vec<ParameterChange> {
        let before = self.daemon.in_force();
        self.daemon.reload(|key| Some(value_of(&configured.daemon, key)), |_| 0);
        for (smaller, larger) in ORDERED {
            // One is from the file and one was set at run time: only the two of the file are checked to fit.
            if is_crossed(self.daemon.get(smaller), (self.daemon.get(larger), larger)) {
                self.daemon.reset(&[smaller, larger]);
            }
        }
        self.daemon.changes(ParameterOwner::Daemon, &before)
    }

    fn reload_volumes(&mut self, configured: &Configured) -> Vec<ParameterChange> {
        self.volumes.retain(|name, _| configured.volumes.contains_key(name));
        let mut changes = Vec::new();
        for (name, own) in &configured.volumes {
            let own = |key: Key| own.get(&key).copied();
            let daemon = |key| self.daemon.get(key);
            let Some(values) = self.volumes.get_mut(name) else {
                let keys = self.table.keys_of(ParameterScope::Volume);
                self.volumes.insert(name.clone(), Values::new(keys, own, daemon));
                continue;
            };
            let before = values.in_force();
            values.reload(own, daemon);
            changes.extend(values.changes(ParameterOwner::Volume(name), &before));
        }
        changes
    }

    /// Updates volumes without a value of their own to the daemon's. Then calls the watchers of all changed values.
    fn follow_and_notify(&self, changes: &[ParameterChange]) {
        let followers = self.volumes.values().flat_map(|values| values.follow(&self.daemon));
        let followers: Vec<_> = followers.collect();
        for change in changes.iter().filter(|change| change.from != change.to) {
            if let Ok(cell) = self.cell(change.key, change.owner()) {
                cell.live.notify();
            }
        }
        followers.iter().for_each(|live| live.notify());
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
