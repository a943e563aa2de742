//! A volume that was added at run time is kept for the next start.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use ebb_api::{Refusal, SuccessorState};
use ebb_config::{
    LimitsConfig, StateDir, StateError, StoreUri, StoredVolume, VolumeConfig, VolumeOrigin,
    VolumeOverrides,
};
use ebb_control::Refused;

use super::manage::{blocking, must_have_no_file, not_kept, not_opened};
use super::open::on_a_thread;
use super::{Engine, lock};
use crate::operations::LongOperation;
use crate::stores::{StoreError, same_target};

impl Engine {
    /// Keeps a volume, and the volumes below it, that would end with the daemon. One that is kept
    /// already stays as it is, and is stable when this returns; a file that is missing, or cannot
    /// be used, is written again.
    ///
    /// # Errors
    /// There is no such volume, or no state directory, or it cannot be written. Volumes below it
    /// may be kept then.
    pub(crate) async fn persist_volume(
        self: &Arc<Self>,
        name: &str,
        operation: &LongOperation,
    ) -> Result<(), Refused> {
        let chain = self.chain_to_keep(name)?;
        let again = ", and add the volume again with --persist: one that was added at run time ends \
                     with the daemon";
        let state = self.state_dir_or(again)?;
        let chain = self.not_in_files(&state, chain).await?;
        let names: Vec<&str> = chain.iter().map(String::as_str).collect();
        let _names = self.reserve(&names)?;
        operation.step("writing the state file");
        let mut is_stable = false;
        // Bases first: a volume without its base could not be opened.
        for name in names.into_iter().rev() {
            let Some((config, origin)) = self.definition(name) else { continue };
            self.must_be_at_its_path(name, &config).await?;
            if origin == VolumeOrigin::RunTime {
                // Removing the volume would end it, and leave the file.
                let remedy = "move that file out of the directory, and try again";
                must_have_no_file(&state, name, remedy.to_owned()).await?;
            }
            let (folder, file) = (state.clone(), name.to_owned());
            let stored = StoredVolume::Whole(Box::new(config));
            let written = blocking(move || Ok(folder.write_atomically(&file, &stored))).await?;
            // A file that is there nevertheless is removed and renamed with its volume.
            if written.as_ref().err().is_none_or(StateError::is_applied) {
                let mut definitions = lock(&self.definitions);
                if let Some(known) = &mut definitions.config
                    && known.origins.get(name) == Some(&VolumeOrigin::RunTime)
                {
                    known.origins.insert(name.to_owned(), VolumeOrigin::State);
                }
                definitions.note_usable(name);
            }
            written.map_err(|error| not_kept(&error))?;
            is_stable = true;
            let (operation, by) = (operation.id(), operation.by());
            tracing::info!(volume = name, operation, by, "kept for the next start");
        }
        if is_stable {
            return Ok(());
        }
        // An earlier attempt may have written them all, and not have made that stable.
        let name = name.to_owned();
        blocking(move || Ok(state.make_stable(&name))).await?.map_err(|error| not_kept(&error))
    }

    /// Refuses to keep a volume whose path does not lead to the file that it has open: the next
    /// start would not find it.
    async fn must_be_at_its_path(&self, name: &str, config: &VolumeConfig) -> Result<(), Refused> {
        let open = lock(&self.slots).get(name).and_then(|slot| slot.open_file());
        let store = config.store.clone();
        let found = on_a_thread(move || same_target(&store, open.as_ref(), &store).map(drop)).await;
        found.map_err(|error| match error {
            StoreError::Moved { store, .. } => {
                let message = format!("{store} is not the file that volume `{name}` has open");
                let remedy = "move that file back, and try again; if it was removed, copy the disk from a client before the \
                              volume ends";
                Refused::new(Refusal::Conflict, "moved", message, remedy)
            }
            error => not_opened(&error),
        })
    }

    /// Selects the volumes that end with the daemon, or whose files do not define them.
    async fn not_in_files(
        &self,
        state: &Arc<StateDir>,
        chain: Vec<String>,
    ) -> Result<Vec<String>, Refused> {
        let is_new = |name: &String| {
            self.definition(name).is_some_and(|(_, origin)| origin == VolumeOrigin::RunTime)
        };
        let (mut left, kept): (Vec<_>, Vec<_>) = chain.into_iter().partition(is_new);
        for name in kept {
            let (folder, file) = (state.clone(), name.clone());
            let defines = blocking(move || Ok(folder.defines(&file))).await?;
            if !defines.map_err(|error| not_kept(&error))? {
                left.push(name);
            }
        }
        Ok(left)
    }

    /// The volumes from `name` down that the configuration does not define.
    fn chain_to_keep(&self, name: &str) -> Result<Vec<String>, Refused> {
        let (mut chain, mut seen) = (Vec::new(), BTreeSet::new());
        let mut next = Some(name.to_owned());
        while let Some(name) = next.filter(|name| seen.insert(name.clone())) {
            let Some((config, origin)) = self.definition(&name) else { break };
            next = config.base;
            if !matches!(origin, VolumeOrigin::Configuration(_)) {
                chain.push(name);
            }
        }
        match self.definition(name) {
            Some(_) => Ok(chain),
            None => Err(self.unknown(name)),
        }
    }

    /// Refuses a takeover that would end volumes: their clients would keep their connections, and
    /// lose their volume.
    ///
    /// # Errors
    /// Volumes were added at run time, and are not kept.
    pub(crate) fn must_keep_all(&self) -> Result<(), Refused> {
        let ending = self.run_time_volumes();
        let Some(first) = ending.first() else { return Ok(()) };
        if let Some(name) = ending.iter().find(|name| self.is_in_memory(name)) {
            let message = format!(
                "the data of volume `{name}` is in memory, and the successor would not have it"
            );
            let remedy =
                "copy needed data to another volume (nbdcopy(1)), remove this one, and try again";
            return Err(Refused::new(Refusal::Conflict, "not_kept", message, remedy));
        }
        let (names, were) =
            (names_of(&ending), if ending.len() == 1 { "it was" } else { "they were" });
        let message =
            format!("the successor would not have {names}: {were} added without --persist");
        let remedy = format!(
            "keep each (`ebbd volume persist {first}`, or in the configuration file) or remove it, and try again"
        );
        Err(Refused::new(Refusal::Conflict, "not_kept", message, remedy))
    }

    /// Refuses a takeover by a successor that has another state directory, or none: it would not
    /// have the volumes and settings that are only there.
    ///
    /// # Errors
    /// There are such volumes or settings.
    pub fn must_share_state(&self, other: &SuccessorState) -> Result<(), Refused> {
        let (Some(state), kept) = (&self.state, self.kept_in_state()) else { return Ok(()) };
        let place = place_of(state.root());
        // The same path may lead to another folder since a mount is missing.
        let is_same = match self.state_folder {
            Some(folder) => other.folder == Some(folder),
            None => other.path.as_deref() == Some(&*place),
        };
        if kept.is_empty() || is_same {
            return Ok(());
        }
        let with_own = format!("start it with `state = \"{place}\"`");
        let (has, remedy) = match &other.path {
            Some(path) if *path == *place => (
                "it finds another folder at that path, or none".to_owned(),
                "mount the file system of the state directory, and try again".to_owned(),
            ),
            Some(path) => (format!("its state directory is {path}"), with_own),
            None => ("it has no state directory".to_owned(), with_own),
        };
        let kept = kept.join(" and ");
        let message = format!("the successor would not have {kept}, which {place} keeps: {has}");
        Err(Refused::new(Refusal::Conflict, "other_state", message, remedy))
    }

    /// The volumes, and the settings of others and of groups, that only the state directory has.
    fn kept_in_state(&self) -> Vec<String> {
        let definitions = lock(&self.definitions);
        let Some(config) = &definitions.config else { return Vec::new() };
        let of_state = config.origins.iter().filter(|(_, it)| **it == VolumeOrigin::State);
        let volumes: Vec<_> = of_state.map(|(name, _)| name.clone()).collect();
        let is_changed = |(name, own): &(&String, &VolumeConfig)| {
            let now = config.volumes.get(*name);
            let is_configured =
                matches!(config.origins.get(*name), Some(VolumeOrigin::Configuration(_)));
            is_configured
                && now.is_some_and(|it| {
                    VolumeOverrides::between(own, it) != VolumeOverrides::default()
                })
        };
        let changed = config.replaced.iter().filter(is_changed);
        let changed: Vec<_> = changed.map(|(name, _)| name.clone()).collect();
        let limited = |group: &&String| {
            config.kept_group_limits(group).is_some_and(|it| it != LimitsConfig::default())
        };
        let groups = config.replaced_groups.keys().filter(limited);
        let volumes = Some(volumes).filter(|all| !all.is_empty()).map(|all| names_of(&all));
        let settings = Some(changed).filter(|all| !all.is_empty());
        let settings = settings.map(|all| format!("the settings of {}", names_of(&all)));
        let groups = groups.map(|group| format!("the limits of group `{group}`"));
        volumes.into_iter().chain(settings).chain(groups).collect()
    }

    fn is_in_memory(&self, name: &str) -> bool {
        let found = self.definition(name);
        found.is_some_and(|(config, _)| matches!(config.store, StoreUri::Memory(_)))
    }

    /// The volumes whose data ends with the daemon, although the next one has them.
    pub(crate) fn volumes_in_memory(&self) -> Vec<String> {
        let definitions = lock(&self.definitions);
        let volumes = definitions.config.iter().flat_map(|config| &config.volumes);
        let in_memory = volumes.filter(|(_, it)| matches!(it.store, StoreUri::Memory(_)));
        in_memory.map(|(name, _)| name.clone()).collect()
    }

    /// The volumes that end with the daemon.
    pub(super) fn run_time_volumes(&self) -> Vec<String> {
        let definitions = lock(&self.definitions);
        let origins = definitions.config.iter().flat_map(|config| &config.origins);
        let ending = origins.filter(|(_, origin)| **origin == VolumeOrigin::RunTime);
        ending.map(|(name, _)| name.clone()).collect()
    }
}

/// The path of a state directory from the root, for a successor and for messages.
pub(crate) fn place_of(state: &Path) -> String {
    ebb_config::from_root(state).display().to_string()
}

/// Names of volumes for a message, the first few of many.
fn names_of(names: &[String]) -> String {
    const SHOWN: usize = 5;
    let shown: Vec<_> = names.iter().take(SHOWN).map(|name| format!("`{name}`")).collect();
    let what = if names.len() == 1 { "volume" } else { "volumes" };
    match names.len().saturating_sub(SHOWN) {
        0 => format!("{what} {}", shown.join(", ")),
        more => format!("{what} {} and {more} more", shown.join(", ")),
    }
}
