//! Volumes that are added, renamed, kept and removed while the daemon runs, with a state directory.
//!
//! The world knows for each volume the names that the next start may find ([`RunTime`]). An
//! acknowledged operation leaves one name. An operation that failed, or was in progress at the end
//! of its daemon, leaves the former or the new name. The data belongs to the disk, so that a volume
//! under another volume's name is detected.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use ebb_api::{AddVolumeBody, OperationState};
use ebb_config::{CacheMode, Config, StateLock, VolumeOrigin};
use ebb_control::VolumeChange;
use ebb_volume::Mode;

use super::World;
use super::site::{Site, disk_site};
use crate::daemon::{self, Daemon, Wanted};
use crate::oracle::{Oracle, SECTOR};
use crate::random::Random;

/// The names that volumes get: there are few, so that names are used again, and by others.
const NAMES: [&str; 5] = ["r0", "r1", "r2", "r3", "r4"];
/// The time without clients of a volume that is about to be renamed.
const WHILE_RENAMED: Duration = Duration::from_millis(400);
/// The pause between the end of a volume's clients and the request to rename the volume.
const BEFORE_RENAMED: Duration = Duration::from_millis(2);

/// How often another volume is tried to be added on the disk of one that is renamed.
const SECOND_TRIES: u32 = 30;

/// The names that a start may find a volume under; `None`: it finds no such volume.
type Names = BTreeSet<Option<String>>;

/// A volume that is added and removed at run time, as far as the world knows it.
#[derive(Clone, Debug)]
pub(super) struct RunTime {
    /// The present name, if the volume is defined.
    name: Option<String>,
    /// The volume is kept for the next start.
    kept: bool,
    after_kill: Names,
    after_power_cut: Names,
    /// A failed operation may have left a file with this name.
    left: Option<String>,
}

impl RunTime {
    fn new() -> RunTime {
        let none = Names::from([None]);
        RunTime {
            name: None,
            kept: false,
            after_kill: none.clone(),
            after_power_cut: none,
            left: None,
        }
    }

    fn set(&mut self, name: Option<&str>) {
        self.after_kill = Names::from([name.map(str::to_owned)]);
        self.after_power_cut = self.after_kill.clone();
        self.left = None;
    }

    /// The name, if the volume is kept for the next start.
    pub(super) fn kept_name(&self) -> Option<&str> {
        self.name.as_deref().filter(|_| self.kept)
    }

    fn add(&mut self, name: Option<&str>) {
        self.after_kill.insert(name.map(str::to_owned));
        self.after_power_cut.insert(name.map(str::to_owned));
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Task {
    Add {
        name: String,
        keep: bool,
    },
    Remove {
        name: String,
    },
    Rename {
        from: String,
        to: String,
    },
    Persist {
        name: String,
    },
    /// Adds another volume on the same disk, which must fail.
    AddSecond {
        name: String,
        tries: u32,
    },
}

/// An operation in progress.
#[derive(Debug)]
pub(super) struct Changing {
    id: u64,
    pub(super) site: usize,
    task: Task,
    /// The operation has begun without a broker, and its volume was served.
    must_stay: bool,
}

/// See the module.
#[derive(Default)]
pub(super) struct Changes {
    pub(super) changing: Vec<Changing>,
    /// Volumes that are renamed when their clients have gone.
    renames: Vec<PlannedRename>,
}

struct PlannedRename {
    at: Instant,
    site: usize,
    to: String,
}

/// A volume of the configuration, and some that are added.
pub(super) fn sites(random: &mut Random) -> Vec<Site> {
    let configured = disk_site("v0", random);
    let count = random.between(2, 4);
    let added = (1..=count).map(|number| {
        let name = unnamed(&format!("d{number}"));
        let mut site = disk_site(&name, random);
        site.config.disk = format!("d{number}");
        site.oracle = Oracle::new(&site.config.disk, site.oracle.sectors()).numbered(number << 32);
        site.run_time = Some(RunTime::new());
        site
    });
    std::iter::once(configured).chain(added.collect::<Vec<_>>()).collect()
}

/// The placeholder for the name of a volume on this disk that is not defined.
fn unnamed(disk: &str) -> String {
    format!("-{disk}")
}

impl World {
    /// Begins an operation on a volume that none is in progress on.
    pub(super) fn change_names(&mut self) -> Result<(), String> {
        let free = |at: &usize| {
            self.sites[*at].run_time.is_some()
                && !self.changes.changing.iter().any(|change| change.site == *at)
                && !self.changes.renames.iter().any(|rename| rename.site == *at)
        };
        let free: Vec<usize> = (0..self.sites.len()).filter(free).collect();
        if free.is_empty() {
            return Ok(());
        }
        let site = self.random.pick(&free);
        self.learn_names(site);
        let own = self.sites[site].run_time.clone().expect("it is one of those");
        let other = self.random.pick(&NAMES).to_owned();
        let left = own.left.filter(|name| !self.is_taken(name));
        let task = match (own.name, left) {
            // As the failure of the operation has said.
            (None, Some(name)) => Task::Remove { name },
            (None, None) => Task::Add { name: other, keep: self.random.chance(70) },
            (Some(name), _) => match self.random.below(10) {
                0..4 => Task::Remove { name },
                4..6 if !own.kept => Task::Persist { name },
                _ if self.random.chance(80) => {
                    self.plan_renames(site, &free, &other);
                    return Ok(());
                }
                _ => Task::Rename { from: name, to: other },
            },
        };
        self.begin_change(site, task)
    }

    /// Returns true if a volume has this name, or is about to get it.
    fn is_taken(&self, name: &str) -> bool {
        let mut own = self.sites.iter().filter_map(|site| site.run_time.as_ref());
        own.any(|own| own.name.as_deref() == Some(name))
            || self.changes.changing.iter().any(|change| {
                matches!(&change.task, Task::Add { name: new, .. } | Task::AddSecond { name: new, .. }
                    | Task::Rename { to: new, .. } if new == name)
            })
    }

    /// Ends the clients of a volume that is renamed soon. Sometimes another volume is to get the
    /// same name.
    fn plan_renames(&mut self, site: usize, free: &[usize], to: &str) {
        let named = |at: &usize| {
            let own = self.sites[*at].run_time.as_ref();
            *at != site && own.is_some_and(|own| own.name.is_some())
        };
        let rival = free.iter().copied().find(named).filter(|_| self.random.chance(30));
        let at = self.now + BEFORE_RENAMED;
        for site in std::iter::once(site).chain(rival) {
            for number in 0..self.client_slots.len() {
                if self.client_slots[number].site == site {
                    self.leave(number);
                    self.client_slots[number].again = self.now + WHILE_RENAMED;
                }
            }
            self.changes.renames.push(PlannedRename { at, site, to: to.to_owned() });
        }
    }

    fn begin_change(&mut self, at: usize, task: Task) -> Result<(), String> {
        let modes = [Mode::None, Mode::Writethrough, Mode::Writeback, Mode::Writeback];
        let mode = self.random.pick(&modes);
        self.kept_volumes.forget(at);
        let site = &mut self.sites[at];
        let own = site.run_time.as_mut().expect("it has names");
        let change = match &task {
            Task::Add { name, keep } => {
                site.config.mode = mode;
                if *keep {
                    own.add(Some(name));
                }
                VolumeChange::Add(AddVolumeBody {
                    name: name.clone(),
                    store: format!("file:/world/{}", site.config.disk),
                    size: Some((site.oracle.sectors() * SECTOR).to_string()),
                    create: Some(true),
                    cache: Some(mode.to_string()),
                    persist: *keep,
                    ..AddVolumeBody::default()
                })
            }
            Task::Remove { name } => {
                own.add(None);
                VolumeChange::Remove(name.clone())
            }
            Task::Rename { from, to } => {
                if own.kept {
                    own.add(Some(to));
                }
                VolumeChange::Rename(from.clone(), to.clone())
            }
            Task::Persist { name } => {
                own.add(Some(name));
                VolumeChange::Persist(name.clone())
            }
            Task::AddSecond { name, .. } => VolumeChange::Add(AddVolumeBody {
                name: name.clone(),
                store: format!("file:/world/{}", site.config.disk),
                ..AddVolumeBody::default()
            }),
        };
        site.reloaded = site.oracle.now();
        site.changed.get_or_insert(self.now);
        let begun = self.daemon().manager.begin(change, "");
        let refused = begun.as_ref().err().map(|refused| refused.body.message.clone());
        self.note(format_args!("disk {at}: {task:?} {refused:?}"));
        let adds = matches!(task, Task::Add { .. } | Task::AddSecond { .. });
        if self.broker.is_known && refused.is_none() && !adds {
            return Err(format!("{task:?} has begun, although the broker has ended"));
        }
        let Ok(begun) = begun else {
            self.learn_names(at);
            return Ok(());
        };
        let is_served = |daemon: &Daemon| match &task {
            Task::Rename { from, .. } => daemon.volume(from).is_some(),
            _ => false,
        };
        let works = self.disks.broker().works();
        let must_stay = !works && self.daemon.as_ref().is_some_and(is_served);
        self.changes.changing.push(Changing { id: begun.id, site: at, task, must_stay });
        Ok(())
    }

    /// Ends operations that are over, and begins renames that are due.
    pub(super) fn serve_changes(&mut self) -> Result<bool, String> {
        let Some(daemon) = &self.daemon else { return Ok(false) };
        let (mut ended, mut closed) = (Vec::new(), None);
        self.changes.changing.retain(|change| {
            let Some((view, _)) = daemon.manager.operation(change.id) else { return true };
            let failure = match view.state {
                OperationState::Running => return true,
                OperationState::Done => None,
                _ => Some(view.failure.map(|body| (body.error, body.message)).unwrap_or_default()),
            };
            if let Task::Rename { from, .. } = &change.task
                && let Some((kind, _)) = failure.as_ref().filter(|_| change.must_stay)
                && kind != "stopping"
                && daemon.volume(from).is_none()
            {
                closed = Some(from.clone());
            }
            ended.push((change.site, change.task.clone(), failure));
            false
        });
        let busy = !ended.is_empty();
        for (at, task, failure) in ended {
            self.note(format_args!("disk {at}: {task:?} has ended: {failure:?}"));
            self.trace.mix(u64::from(failure.is_none()));
            let kind = failure.as_ref().map(|(kind, _)| kind.as_str());
            self.end_change(at, &task, kind).map_err(|error| {
                format!("disk {at}: {task:?} has ended with {failure:?}, and {error}")
            })?;
        }
        if let Some(name) = closed {
            return Err(format!("volume {name} was closed, although nothing can be opened"));
        }
        if busy && self.daemon.as_ref().is_some_and(|daemon| !daemon.engine.is_stopping()) {
            self.check_names()?;
        }
        let now = self.now;
        let due = |rename: &&PlannedRename| rename.at <= now;
        while let Some(index) = self.changes.renames.iter().position(|rename| due(&rename)) {
            let PlannedRename { site, to, .. } = self.changes.renames.swap_remove(index);
            let own = self.sites[site].run_time.as_ref();
            if let Some(from) = own.and_then(|own| own.name.clone()) {
                self.begin_change(site, Task::Rename { from: from.clone(), to })?;
                let is_served = self.daemon().volume(&from).is_some();
                if is_served && self.random.chance(40) {
                    let name = self.random.pick(&NAMES).to_owned();
                    self.begin_change(site, Task::AddSecond { name, tries: SECOND_TRIES })?;
                }
            }
        }
        Ok(busy)
    }

    /// Another volume was not added on the disk of one that is being renamed: it is tried again.
    fn end_second(
        &mut self,
        at: usize,
        (name, tries): (&str, u32),
        failure: Option<&str>,
    ) -> Result<(), String> {
        let is_renamed = self.changes.changing.iter().any(|change| change.site == at);
        match failure {
            None => Err(format!("two volumes are on one disk: {name} was added")),
            Some(_) if tries > 0 && is_renamed => {
                let name = self.random.pick(&NAMES).to_owned();
                self.begin_change(at, Task::AddSecond { name, tries: tries - 1 })
            }
            Some(_) => Ok(()),
        }
    }

    fn end_change(&mut self, at: usize, task: &Task, failure: Option<&str>) -> Result<(), String> {
        if failure == Some("stopping") {
            // As after a kill, either outcome is possible.
            return Ok(());
        }
        if let Task::AddSecond { name, tries } = task {
            return self.end_second(at, (name, *tries), failure);
        }
        let daemon = self.daemon.as_ref().expect("it has replied");
        let site = &mut self.sites[at];
        let disk = format!("file:/world/{}", site.config.disk);
        let defined = |name: &str| {
            let found = daemon.engine.definition(name);
            found.is_some_and(|(config, _)| config.store.to_string() == disk)
        };
        let mut own = site.run_time.take().expect("it has names");
        let mut removed = false;
        match (task, failure) {
            (Task::Add { name, keep }, None) => {
                (own.name, own.kept) = (Some(name.clone()), *keep);
                if *keep {
                    own.set(Some(name));
                }
                self.disks.take_lost(&site.config.disk);
            }
            (Task::Add { name, keep }, Some(_)) => {
                if defined(name) {
                    return Err(format!("{name} is defined"));
                }
                own.left = keep.then(|| name.clone());
            }
            (Task::Remove { name }, None) => {
                if defined(name) {
                    return Err(format!("{name} is defined"));
                }
                if std::mem::take(&mut own.kept) {
                    own.set(None);
                }
                own.name = None;
                removed = true;
                if site.serving.as_ptr() != std::sync::Weak::new().as_ptr() {
                    site.notice();
                    site.end_orphans();
                    site.oracle.closed(site.reloaded);
                }
            }
            (Task::Remove { name }, Some(_)) if defined(name) => {}
            (Task::Remove { name }, Some(kind)) => {
                own.left = Some(name.clone());
                if kind == "data_lost" && own.kept {
                    own.set(None);
                }
                (own.name, own.kept, removed) = (None, false, true);
                site.notice();
                site.end_orphans();
                site.oracle.crashed();
            }
            (Task::Rename { to, .. }, None) => {
                own.name = Some(to.clone());
                if own.kept {
                    own.set(Some(to));
                }
            }
            (Task::Rename { from, to }, Some(_)) if from == to => {}
            (Task::Rename { from, to }, Some(_)) => {
                // By the attempt to add another volume on the disk.
                let is_second = |change: &Changing| matches!(&change.task, Task::AddSecond { name, .. } if name == to);
                let second = self.changes.changing.iter().any(is_second);
                let name = match (defined(from), defined(to) && !second) {
                    (true, false) => from,
                    (false, true) => to,
                    both => return Err(format!("the old and the new name are defined: {both:?}")),
                };
                let state = self.state.as_ref().expect("there is a state directory");
                if own.kept && !state.has(name, &disk) {
                    return Err(format!("the volume is {name}, and its file is not"));
                }
                own.name = Some(name.clone());
            }
            (Task::Persist { name }, None) => {
                own.kept = true;
                own.set(Some(name));
            }
            // A volume whose file is there nevertheless is kept.
            (Task::Persist { name }, Some(_)) => {
                own.kept = self.state.as_ref().is_some_and(|state| state.has(name, &disk));
            }
            (Task::AddSecond { .. }, _) => {}
        }
        let name = own.name.clone().unwrap_or_else(|| unnamed(&site.config.disk));
        if removed {
            (site.serving, site.lost) = (std::sync::Weak::new(), false);
        }
        site.config.name = name;
        site.run_time = Some(own);
        self.learn_names(at);
        Ok(())
    }

    /// Learns the names that the next start finds, once a power cut would leave the directory as it
    /// is.
    fn learn_names(&mut self, at: usize) {
        let Some(state) = self.state.clone() else { return };
        let disk = format!("file:/world/{}", self.sites[at].config.disk);
        let Some(own) = &mut self.sites[at].run_time else { return };
        if own.after_power_cut.len() == 1 && own.after_kill.len() == 1 {
            return;
        }
        let names = own.after_power_cut.union(&own.after_kill).flatten();
        let mut found: Names =
            names.filter(|name| state.has(name, &disk)).cloned().map(Some).collect();
        if found.is_empty() {
            found.insert(None);
        }
        own.left = own.left.take().filter(|left| found.contains(&Some(left.clone())));
        own.after_kill = found;
        if state.is_stable() {
            own.after_power_cut = own.after_kill.clone();
        }
    }

    /// Checks that the daemon has the names that were acknowledged.
    fn check_names(&self) -> Result<(), String> {
        let Some(daemon) = &self.daemon else { return Ok(()) };
        let busy = |at: usize| self.changes.changing.iter().any(|change| change.site == at);
        let mut known: BTreeSet<&str> = BTreeSet::new();
        for change in &self.changes.changing {
            match &change.task {
                Task::Add { name, .. }
                | Task::Remove { name }
                | Task::Persist { name }
                | Task::AddSecond { name, .. } => {
                    known.insert(name);
                }
                Task::Rename { from, to } => known.extend([from.as_str(), to.as_str()]),
            }
        }
        for (at, site) in self.sites.iter().enumerate() {
            let Some(name) = site.run_time.as_ref().and_then(|own| own.name.as_deref()) else {
                continue;
            };
            known.insert(name);
            if busy(at) {
                continue;
            }
            let found = daemon.engine.definition(name).map(|(config, _)| config.store.to_string());
            if found != Some(format!("file:/world/{}", site.config.disk)) {
                return Err(format!("disk {at} is volume {name}; the daemon has it on {found:?}"));
            }
        }
        match NAMES
            .into_iter()
            .find(|name| !known.contains(name) && daemon.engine.definition(name).is_some())
        {
            Some(name) => Err(format!("there is a volume {name}, which was not added")),
            None => Ok(()),
        }
    }

    /// Ends all operations with their daemon.
    pub(super) fn end_changes(&mut self, power: bool) {
        self.reloading = None;
        self.kept_volumes.clear();
        let Some(state) = self.state.clone() else { return };
        state.set_mounted(!self.state_absent).expect("no daemon has made files beneath");
        if power && self.random.chance(70) {
            state.cut_power();
        }
        self.changes = Changes::default();
        for site in &mut self.sites {
            let Some(own) = &mut site.run_time else { continue };
            let names = if power { &own.after_power_cut } else { &own.after_kill };
            // A kill in the middle of a call also leaves either.
            own.after_kill = names.union(&own.after_kill).cloned().collect();
            site.config.name = unnamed(&site.config.disk);
        }
    }

    /// Checks that a start has found the volumes that were acknowledged.
    fn check_found(&mut self, config: &Config) -> Result<(), String> {
        if let Some((name, why)) = config.broken.iter().next() {
            return Err(format!("the file of volume {name} cannot be used: {why}"));
        }
        for (at, site) in self.sites.iter_mut().enumerate() {
            let Some(own) = &mut site.run_time else { continue };
            let disk = format!("file:/world/{}", site.config.disk);
            let on_it =
                config.volumes.iter().filter(|(_, volume)| volume.store.to_string() == disk);
            let found: Vec<&String> = on_it.map(|(name, _)| name).collect();
            let name = match found[..] {
                [] => None,
                [name] => Some(name.clone()),
                _ => return Err(format!("disk {at} belongs to {found:?}")),
            };
            if !own.after_kill.contains(&name) {
                return Err(format!(
                    "the volume on disk {at} is {name:?} at the start; allowed: {:?}",
                    own.after_kill
                ));
            }
            (own.name, own.kept) = (name.clone(), name.is_some());
            own.set(name.as_deref());
            if let Some(volume) = name.as_ref().and_then(|name| config.volumes.get(name)) {
                site.config.mode = match volume.cache {
                    CacheMode::Writethrough => Mode::Writethrough,
                    CacheMode::Writeback => Mode::Writeback,
                    _ => Mode::None,
                };
                if config.origins.get(name.as_deref().unwrap_or_default())
                    != Some(&VolumeOrigin::State)
                {
                    return Err(format!("{name:?} is not from the state directory"));
                }
            }
            site.config.name = name.unwrap_or_else(|| unnamed(&site.config.disk));
        }
        Ok(())
    }

    /// Ends all operations, and adds the volumes that are missing.
    pub(super) fn define_all(&mut self) -> Result<(), String> {
        let Some(state) = self.state.clone() else { return Ok(()) };
        state.heal();
        for round in 0.. {
            self.wait_for_changes()?;
            let lacks = |site: &Site| {
                site.run_time.as_ref().is_some_and(|own| own.name.is_none() || !own.kept)
            };
            let Some(at) = self.sites.iter().position(lacks) else { break };
            if round > 200 {
                return Err(format!("the volume of disk {at} cannot be added"));
            }
            self.learn_names(at);
            let own = self.sites[at].run_time.clone().expect("it has names");
            let task = match (own.name, own.left) {
                (None, Some(name)) => Task::Remove { name },
                (None, None) => Task::Add { name: self.random.pick(&NAMES).to_owned(), keep: true },
                (Some(name), _) => Task::Persist { name },
            };
            self.begin_change(at, task)?;
        }
        self.check_names()
    }

    pub(super) fn wait_for_changes(&mut self) -> Result<(), String> {
        let end = self.now + super::PATIENCE;
        while !self.changes.changing.is_empty() || !self.changes.renames.is_empty() {
            if self.now > end {
                let tasks: Vec<_> = self.changes.changing.iter().map(|one| &one.task).collect();
                return Err(format!("changes of volumes do not end: {tasks:?}"));
            }
            self.step()?;
        }
        Ok(())
    }

    /// Makes steps of changes of the state directory fail from now on, or succeed again.
    pub(super) fn fail_state(&mut self) {
        let Some(state) = self.state.clone().filter(|_| self.disks.broker().works()) else {
            return;
        };
        let what = state.fail(&mut self.random);
        self.note(format_args!("state directory: {what}"));
    }

    /// Makes some calls of helper threads, the last perhaps in part, before the daemon is killed.
    pub(super) fn make_last_calls(&mut self) {
        let Some(state) = self.state.clone() else { return };
        if !self.state_absent && self.random.chance(50) {
            state.interrupt_after(self.random.below(9) as u32);
            for _ in 0..self.random.between(1, 3) {
                ebb_sandbox::threads::sim::make_call();
            }
        }
    }

    /// The configuration as a start finds it, and the lock of the state directory.
    pub(super) fn find_configuration(
        &mut self,
        text: &str,
    ) -> Result<(Config, Option<StateLock>), String> {
        let Some(state) = self.state.clone() else { return Ok((daemon::parsed(text), None)) };
        state.write_configuration(text);
        let lock = match state.directory().prepare() {
            Ok(lock) => Some(lock),
            Err(_) if self.state_absent => None,
            Err(error) => return Err(error.to_string()),
        };
        self.unread = false;
        let foreign = state.foreign();
        if !foreign.is_empty() && lock.is_some() {
            return Err(format!("the state directory has {foreign:?}"));
        }
        let config = state.load().map_err(|error| error.to_string())?;
        self.check_found(&config)?;
        Ok((config, lock))
    }

    /// The volumes of the configuration.
    pub(super) fn listed(&self) -> Vec<Wanted> {
        let listed = self
            .sites
            .iter()
            .filter(|site| site.listed && site.run_time.is_none() && !site.at_run_time);
        listed.map(|site| site.config.clone()).collect()
    }
}
