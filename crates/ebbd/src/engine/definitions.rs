//! Which volumes are defined, and where: in the configuration, in the state directory, or only until the daemon ends.
//!
//! # Invariants
//! - While the daemon runs, the state directory follows this record: a change of a volume reserves its name first, and
//!   a configuration that was read meanwhile does not change volumes of reserved names.
//! - Lock order: this record, then the slots, then one slot.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use ebb_api::Refusal;
use ebb_api::stat::ProblemStat;
use ebb_config::{Config, VolumeConfig, VolumeOrigin};
use ebb_control::Refused;
use ebb_io::Io;
use event_listener::Event;

use super::{Engine, lock};

/// What the reserved names of groups begin with; no volume has such a name, since it has a control character.
const GROUP: &str = "\u{1}";

/// The name to reserve for a change of a group of limits.
pub(super) fn group_name(group: &str) -> String {
    format!("{GROUP}{group}")
}

/// The most problems that are reported.
const MAX_PROBLEMS: usize = 100;

/// The file of a removed volume that may be there still.
struct UnremovedFile {
    reason: String,
    since: Instant,
}

/// See the module.
#[derive(Default)]
pub(super) struct Definitions {
    /// The configuration in force, with the volumes of the state directory and those added at run time.
    pub(super) config: Option<Config>,
    /// When it, and the files of the state directory, were read.
    read_at: Option<Instant>,
    /// Names that are being changed.
    reserved: BTreeSet<String>,
    /// Names that were changed while the configuration is being read.
    changed: BTreeSet<String>,
    reading: bool,
    /// Volumes that were removed, and whose files may be there still: no reload serves them.
    unremoved: BTreeMap<String, UnremovedFile>,
    /// Volumes that the configuration does not have, and why they stay until another reload.
    pub(super) left_out: BTreeMap<String, String>,
    freed: Arc<Event>,
}

/// Names that only its owner may change, until it is dropped.
pub(super) struct ReservedNames {
    engine: Arc<Engine>,
    names: Vec<String>,
}

impl Drop for ReservedNames {
    fn drop(&mut self) {
        let mut definitions = lock(&self.engine.definitions);
        for name in self.names.drain(..) {
            definitions.reserved.remove(&name);
            if definitions.reading {
                definitions.changed.insert(name);
            }
        }
        definitions.freed.notify(usize::MAX);
    }
}

impl Engine {
    /// The configuration in force.
    pub(crate) fn config(&self) -> Option<Config> {
        let mut config = lock(&self.definitions).config.clone()?;
        config.volumes = self.volumes_wanted();
        Some(config)
    }

    /// `new` with the volumes that were added at run time and that a reload keeps.
    pub(crate) fn with_run_time_volumes(&self, mut new: Config) -> Config {
        let Some(config) = self.config() else { return new };
        for (name, volume) in config.volumes {
            if config.origins.get(&name) == Some(&VolumeOrigin::RunTime)
                && !new.volumes.contains_key(&name)
            {
                new.volumes.insert(name, volume);
            }
        }
        new
    }
}

impl Definitions {
    /// Puts a configuration that was read in force.
    pub(super) fn put_in_force(&mut self, config: Config) {
        self.config = Some(config);
        self.read_at = Some(ebb_mem::clock::now());
    }

    /// When the files of the state directory were read.
    pub(super) fn read_at(&self) -> Instant {
        self.read_at.unwrap_or_else(ebb_mem::clock::now)
    }

    /// Whether an operation changes a volume.
    pub(super) fn is_reserved(&self, name: &str) -> bool {
        self.reserved.contains(name)
    }

    /// Where a volume is defined.
    pub(super) fn origin(&self, name: &str) -> Option<&VolumeOrigin> {
        self.config.as_ref()?.origins.get(name)
    }

    /// Why the file of a volume in the state directory cannot be used, if the volume is not served for that reason.
    pub(super) fn broken(&self, name: &str) -> Option<&str> {
        let config = self.config.as_ref()?;
        let unknown = !config.volumes.contains_key(name);
        config.broken.get(name).filter(|_| unknown).map(String::as_str)
    }

    /// What helps with a volume whose file cannot be used, or may be there after its removal.
    pub(super) fn remedy_of_broken(&self, name: &str) -> String {
        match self.unremoved.contains_key(name) {
            true => format!("remove it again: `ebbd volume remove {name}`"),
            false => {
                format!("correct its file and reload, or remove it: `ebbd volume remove {name}`")
            }
        }
    }

    /// Defines a volume.
    pub(super) fn insert(&mut self, name: &str, volume: VolumeConfig, origin: VolumeOrigin) {
        if let Some(config) = &mut self.config {
            config.volumes.insert(name.to_owned(), volume);
            config.origins.insert(name.to_owned(), origin);
        }
    }

    /// Notes where a volume is defined.
    pub(super) fn set_origin(&mut self, name: &str, origin: VolumeOrigin) {
        if let Some(config) = &mut self.config
            && let Some(known) = config.origins.get_mut(name)
        {
            *known = origin;
        }
    }

    /// Removes the definition of a volume.
    pub(super) fn remove(&mut self, name: &str) -> Option<(VolumeConfig, VolumeOrigin)> {
        let config = self.config.as_mut()?;
        config.broken.remove(name);
        if let Some(file) = self.unremoved.get(name) {
            config.broken.insert(name.to_owned(), file.reason.clone());
        }
        config.volumes.remove(name).zip(config.origins.remove(name))
    }

    /// Notes that the file of a volume that was removed, or not added, may be there still.
    pub(super) fn note_unremoved(&mut self, name: &str, reason: &str) {
        let since = self.unremoved_since(name).unwrap_or_else(ebb_mem::clock::now);
        let file = UnremovedFile { reason: reason.to_owned(), since };
        self.unremoved.insert(name.to_owned(), file);
        if let Some(config) = &mut self.config {
            config.broken.insert(name.to_owned(), reason.to_owned());
        }
    }

    /// Volumes that are served although their files in the state directory cannot be used, each with the reason.
    pub(super) fn served_as_before(&self) -> Vec<(String, String)> {
        let Some(config) = &self.config else { return Vec::new() };
        let served = config.broken.iter().filter(|(name, _)| config.volumes.contains_key(*name));
        let unusable = |reason| format!("its file in the state directory cannot be used: {reason}");
        served.map(|(name, reason)| (name.clone(), unusable(reason))).collect()
    }

    /// Notes that the file of a served volume can be used.
    pub(super) fn note_usable(&mut self, name: &str) {
        if let Some(config) = &mut self.config {
            config.broken.remove(name);
        }
    }

    /// Since when a volume is removed, or was not added, whose file may be there still.
    pub(super) fn unremoved_since(&self, name: &str) -> Option<Instant> {
        self.unremoved.get(name).map(|file| file.since)
    }

    /// Notes that the state directory has no file of this volume.
    pub(super) fn note_removed(&mut self, name: &str) {
        self.unremoved.remove(name);
        if let Some(config) = &mut self.config {
            config.broken.remove(name);
            config.orphans.remove(name);
        }
    }

    /// Ends reading a configuration, and adds to it the volumes that were added at run time. What was changed while it was
    /// read stays as it is.
    pub(super) fn adopt(&mut self, mut new: Config) -> Config {
        self.reading = false;
        let Some(old) = &self.config else { return new };
        let mut kept: BTreeSet<_> = std::mem::take(&mut self.changed);
        kept.extend(self.reserved.iter().cloned());
        for name in &kept {
            // It was removed, or is being removed.
            if matches!(new.origins.get(name), Some(VolumeOrigin::State)) {
                new.origins.remove(name);
                new.volumes.remove(name);
            }
            new.broken.remove(name);
            new.orphans.remove(name);
            if let Some(group) = name.strip_prefix(GROUP) {
                new.broken_groups.remove(group);
                adopt_group(&mut new, old, group);
            }
        }
        for group in new.broken_groups.keys().cloned().collect::<Vec<_>>() {
            if let Some(limits) = old.kept_group_limits(&group) {
                let own = new.limit_groups.get(&group).copied();
                let now = limits.over(&own.unwrap_or_default());
                new.limit_groups.insert(group.clone(), now);
                new.replaced_groups.insert(group, own);
            }
        }
        for (name, origin) in &old.origins {
            // The first lines may be all that is left of the file of a whole volume.
            if *origin == VolumeOrigin::State
                && let Some(reason) = new.orphans.remove(name)
            {
                new.broken.insert(name.clone(), reason);
            }
        }
        for (name, file) in &self.unremoved {
            if matches!(new.origins.get(name), Some(VolumeOrigin::State) | None) {
                new.origins.remove(name);
                new.volumes.remove(name);
                new.orphans.remove(name);
                new.broken.insert(name.clone(), file.reason.clone());
            }
        }
        for (name, volume) in &old.volumes {
            let Some(origin) = old.origins.get(name) else { continue };
            let unusable = new.broken.contains_key(name);
            match (new.origins.get(name), origin) {
                (Some(VolumeOrigin::Configuration(_)), VolumeOrigin::Configuration(_)) => {
                    // They may have been changed meanwhile.
                    if unusable || kept.contains(name) {
                        new.keep_overrides(name, old);
                    }
                }
                (Some(VolumeOrigin::Configuration(place)), VolumeOrigin::RunTime) => {
                    tracing::warn!(
                        volume = name,
                        "it was added at run time, and is defined at {place} now: that definition is served"
                    );
                }
                (Some(_), _) | (None, VolumeOrigin::Configuration(_)) => {}
                (None, VolumeOrigin::State) if !kept.contains(name) && !unusable => {
                    tracing::warn!(
                        volume = name,
                        "its file in the state directory is gone: the volume is withdrawn"
                    );
                }
                (None, VolumeOrigin::State | VolumeOrigin::RunTime) => {
                    new.volumes.insert(name.clone(), volume.clone());
                    new.origins.insert(name.clone(), origin.clone());
                }
            }
        }
        new
    }
}

/// Takes over the limits of a group that were changed while `new` was read.
fn adopt_group(new: &mut Config, old: &Config, group: &str) {
    match old.limit_groups.get(group) {
        Some(limits) => new.limit_groups.insert(group.to_owned(), *limits),
        None => new.limit_groups.remove(group),
    };
    match old.replaced_groups.get(group) {
        Some(own) => new.replaced_groups.insert(group.to_owned(), *own),
        None => new.replaced_groups.remove(group),
    };
}

impl Engine {
    /// To be called before the configuration is read for a reload.
    pub fn begin_reading(&self) {
        let mut definitions = lock(&self.definitions);
        definitions.reading = true;
        definitions.changed.clear();
    }

    /// To be called when a configuration was read and is not to be put in force.
    pub fn end_reading(&self) {
        let mut definitions = lock(&self.definitions);
        definitions.reading = false;
        definitions.changed.clear();
    }

    /// What is wrong in the state directory, of files, of sockets, or of commits, and prevents no
    /// volume from being served otherwise.
    pub(crate) fn problems(&self) -> Vec<ProblemStat> {
        let moved = self.moved_files();
        let commits = self.unfinished_commits();
        let definitions = lock(&self.definitions);
        let Some(config) = &definitions.config else { return Vec::new() };
        let files = definitions.served_as_before().into_iter().chain(config.orphans.clone());
        let problem = |volume, message| ProblemStat { volume, message, ..ProblemStat::default() };
        let files = files.map(|(name, message)| problem(Some(name), message));
        let whole = config.unmounted.iter().chain(config.broken_groups.values());
        let whole = whole.map(|why| problem(None, why.clone()));
        let sockets = self.failed_sockets().into_iter().map(|socket| ProblemStat {
            remedy: "correct it: it is tried again within 10 s".to_owned(),
            ..problem(Some(socket.volume), format!("{}: {}", ProblemStat::SOCKET, socket.reason))
        });
        moved
            .into_iter()
            .chain(commits)
            .chain(whole)
            .chain(files)
            .chain(sockets)
            .take(MAX_PROBLEMS)
            .collect()
    }

    /// Reserves names for a change of their volumes.
    pub(super) fn reserve(self: &Arc<Self>, names: &[&str]) -> Result<ReservedNames, Refused> {
        if self.is_stopping() {
            return Err(super::manage::stopping());
        }
        let mut definitions = lock(&self.definitions);
        if let Some(taken) = names.iter().find(|name| definitions.reserved.contains(**name)) {
            let message = match taken.strip_prefix(GROUP) {
                Some(group) => format!("another operation changes the limits of group {group}"),
                None => format!("another operation changes volume {taken}"),
            };
            let remedy = "wait until it has ended: `ebbd operation list`";
            return Err(Refused::new(Refusal::Conflict, "busy", message, remedy));
        }
        let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
        definitions.reserved.extend(names.iter().cloned());
        Ok(ReservedNames { engine: self.clone(), names })
    }

    /// As [`Engine::reserve`], and waits for another change of that volume.
    pub(super) async fn reserve_when_free(
        self: &Arc<Self>,
        io: &Io,
        name: &str,
        limit: std::time::Duration,
    ) -> Result<ReservedNames, Refused> {
        let end = ebb_mem::clock::now() + limit;
        loop {
            let freed = lock(&self.definitions).freed.listen();
            let left = end.saturating_duration_since(ebb_mem::clock::now());
            match self.reserve(&[name]) {
                Err(refused) if refused.body.error == "busy" && !left.is_zero() => {
                    io.timeout(left, freed).await;
                }
                outcome => return outcome,
            }
        }
    }

    /// The configuration of a volume, and where it is defined.
    pub fn definition(&self, name: &str) -> Option<(VolumeConfig, VolumeOrigin)> {
        let definitions = lock(&self.definitions);
        let config = definitions.config.as_ref()?;
        Some((config.volumes.get(name)?.clone(), config.origins.get(name)?.clone()))
    }
}
