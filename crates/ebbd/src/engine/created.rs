//! A file is created once: a volume whose store existed is never served as a blank one.
//!
//! # Invariants
//! - A volume that was added at run time is defined without `create` as soon as its store exists.
//! - For a volume of the configuration the state directory, if there is one, has a record of the
//!   store that was created
//!   ([`StateDir::signs_of_creation`](ebb_config::StateDir::signs_of_creation)). While that cannot
//!   be read, nothing is created.

use std::path::PathBuf;
use std::sync::Arc;

use ebb_block::BlockStore;
use ebb_config::{StateDir, StateError, StoreUri, VolumeConfig, VolumeOrigin};
use ebb_store::{EncryptedError, OpenError, Store};
use ebb_volume::Volume;

use super::open::on_a_thread;
use super::slot::VolumeSlot;
use super::{Engine, lock};
use crate::stores::{Expected, StoreError};

/// The creation of a store that a configuration asks for.
pub(super) struct Creation {
    /// The files that show that the store was created before.
    signs: Result<Vec<PathBuf>, StateError>,
}

impl Creation {
    /// Looks for the signs of a volume of the configuration. Blocks.
    fn look(state: &StateDir, name: &str, store: &StoreUri) -> Creation {
        Creation { signs: state.signs_of_creation(name, store) }
    }

    fn may_create(&self) -> bool {
        self.signs.as_ref().is_ok_and(Vec::is_empty)
    }

    /// The file that opening must find, if `expected` was expected.
    pub(super) fn expected(&self, expected: Expected) -> Expected {
        match expected {
            Expected::Any if !self.may_create() => Expected::Existing,
            other => other,
        }
    }

    /// The error of opening the store, which may have been created before, and is missing now.
    fn explain(self, config: &VolumeConfig, error: StoreError) -> StoreError {
        let is_missing = is_missing(config, &error);
        match self.signs {
            Err(unread) if is_missing => StoreError::State(unread),
            Ok(signs) if is_missing && !signs.is_empty() => {
                let signs: Vec<_> = signs.iter().map(|path| path.display().to_string()).collect();
                let (store, records) = (config.store.to_string(), signs.join(" and "));
                StoreError::Vanished { store, records }
            }
            _ => error,
        }
    }
}

/// Checks that a missing file of a volume of the configuration may be created: none was before.
/// Blocks.
///
/// # Errors
/// As for a start that finds the file missing.
pub(crate) fn must_be_creatable(
    state: &StateDir,
    name: &str,
    config: &VolumeConfig,
) -> Result<(), StoreError> {
    let StoreUri::File(path) = &config.store else { return Ok(()) };
    if !has_record(state, name) {
        return Ok(());
    }
    let creation = Creation::look(state, name, &config.store);
    match creation.may_create() {
        true => Ok(()),
        false => {
            let missing =
                OpenError::Missing { path: path.clone(), read_only: config.read_only, link: None };
            Err(creation.explain(config, missing.into()))
        }
    }
}

/// A name that is too long for a file has no record.
fn has_record(state: &StateDir, name: &str) -> bool {
    state.checked_path(name).is_ok()
}

impl Engine {
    /// The creation that the configuration asks for of a volume; `None` without a state directory,
    /// or for another volume.
    pub(super) async fn creation(
        &self,
        name: &str,
        config: &VolumeConfig,
    ) -> Result<Option<Creation>, StoreError> {
        let Some(state) = self.state.clone().filter(|_| config.create) else { return Ok(None) };
        let is_configured = lock(&self.definitions).origin(name).is_some_and(is_configuration);
        if !is_configured || !has_record(&state, name) {
            return Ok(None);
        }
        let (name, store) = (name.to_owned(), config.store.clone());
        let look = move || Ok(Creation::look(&state, &name, &store));
        on_a_thread(look).await.map(Some)
    }

    /// Records that the store of a volume exists, or says why it was not `opened`.
    pub(super) async fn end_creation<T>(
        &self,
        (name, config): (&str, &VolumeConfig),
        creation: Option<Creation>,
        opened: Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let Some((creation, state)) = creation.zip(self.state.clone()) else {
            return match opened {
                Err(error) if is_missing(config, &error) && self.is_kept(name).await? => {
                    let (store, name) = (config.store.to_string(), name.to_owned());
                    Err(StoreError::KeptVanished { store, name })
                }
                opened => opened,
            };
        };
        let opened = opened.map_err(|error| creation.explain(config, error))?;
        let (volume, store) = (name.to_owned(), config.store.clone());
        let noted = on_a_thread(move || Ok(state.note_created(&volume, &store)?)).await;
        if let Err(error) = noted {
            let error = error.full_text();
            tracing::warn!(volume = name, error, "cannot record that its store was created");
        }
        Ok(opened)
    }

    /// Returns true if the state directory has a file of a volume: one that is being added has
    /// none.
    async fn is_kept(&self, name: &str) -> Result<bool, StoreError> {
        let is_defined = lock(&self.definitions).origin(name) == Some(&VolumeOrigin::State);
        let Some(state) = self.state.clone().filter(|_| is_defined) else { return Ok(false) };
        let path = state.checked_path(name)?;
        on_a_thread(move || Ok(path.try_exists().unwrap_or(true))).await
    }

    /// Defines a volume that was added, and whose store exists now, without `create`.
    pub(super) fn note_made(&self, slot: &Arc<VolumeSlot>, config: &VolumeConfig) -> VolumeConfig {
        let made = config.made();
        let mut definitions = lock(&self.definitions);
        let is_added = definitions.origin(slot.name()).is_some_and(|it| !is_configuration(it));
        if is_added
            && let Some(known) = &mut definitions.config
            && let Some(volume) = known.volumes.get_mut(slot.name())
        {
            *volume = volume.made();
            slot.redefine(VolumeConfig::made);
        }
        made
    }
}

/// The file that was made when a volume was opened.
pub(super) fn made_file(volume: &Volume) -> Option<String> {
    let top = volume.layers().top();
    let was_made = match top.store() {
        Store::File(store) => store.was_made(),
        Store::Encrypted(store) => store.was_made(),
        _ => false,
    };
    was_made.then(|| top.place())
}

/// Returns true if the volume's own file is missing. A layer below it has another path.
fn is_missing(config: &VolumeConfig, error: &StoreError) -> bool {
    let (StoreError::File(OpenError::Missing { path, .. })
    | StoreError::Encrypted(EncryptedError::File(OpenError::Missing { path, .. }))) = error
    else {
        return false;
    };
    matches!(&config.store, StoreUri::File(own) if own == path)
}

fn is_configuration(origin: &VolumeOrigin) -> bool {
    matches!(origin, VolumeOrigin::Configuration(_))
}
