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
    /// The creation that the configuration asks for of a volume; `None` without a state directory,
    /// or for another volume. Looks for its signs, and so blocks.
    fn asked_for(
        state: Option<&StateDir>,
        name: &str,
        (config, origin): (&VolumeConfig, Option<&VolumeOrigin>),
    ) -> Option<Creation> {
        let state = state.filter(|_| config.create)?;
        // A name that is too long for a file has no record.
        let has_record = state.checked_path(name).is_ok();
        let is_asked = has_record && origin.is_some_and(is_configuration);
        is_asked.then(|| Creation { signs: state.signs_of_creation(name, &config.store) })
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

/// Checks that the missing file of a volume may be created: none was before. Blocks.
///
/// # Errors
/// As for a start that finds the file missing.
pub(crate) fn must_be_creatable(
    state: Option<&StateDir>,
    name: &str,
    (config, origin): (&VolumeConfig, Option<&VolumeOrigin>),
) -> Result<(), StoreError> {
    let StoreUri::File(path) = &config.store else { return Ok(()) };
    match Creation::asked_for(state, name, (config, origin)) {
        Some(creation) if !creation.may_create() => {
            let missing =
                OpenError::Missing { path: path.clone(), read_only: config.read_only, link: None };
            Err(creation.explain(config, missing.into()))
        }
        _ => Ok(()),
    }
}

/// The error of opening a volume, whose file may have existed before, and be missing now. Blocks.
pub(crate) fn explain_missing(
    state: Option<&StateDir>,
    name: &str,
    (config, origin): (&VolumeConfig, Option<&VolumeOrigin>),
    error: StoreError,
) -> StoreError {
    match Creation::asked_for(state, name, (config, origin)) {
        Some(creation) => creation.explain(config, error),
        None => explain_kept(state, name, (config, origin), error),
    }
}

/// The error of opening a volume that the state directory may keep: one that is being added has no
/// file there yet. Blocks.
fn explain_kept(
    state: Option<&StateDir>,
    name: &str,
    (config, origin): (&VolumeConfig, Option<&VolumeOrigin>),
    error: StoreError,
) -> StoreError {
    let Some(state) = state.filter(|_| origin == Some(&VolumeOrigin::State)) else { return error };
    match state.checked_path(name) {
        _ if !is_missing(config, &error) => error,
        Err(unread) => StoreError::State(unread),
        Ok(path) if path.try_exists().unwrap_or(true) => {
            StoreError::KeptVanished { store: config.store.to_string(), name: name.to_owned() }
        }
        Ok(_) => error,
    }
}

impl Engine {
    /// The creation that the configuration asks for of a volume, if it does.
    pub(super) async fn creation(
        &self,
        name: &str,
        config: &VolumeConfig,
    ) -> Result<Option<Creation>, StoreError> {
        let origin = lock(&self.definitions).origin(name).cloned();
        let Some(state) = self.state.clone().filter(|_| config.create) else { return Ok(None) };
        let (name, config) = (name.to_owned(), config.clone());
        on_a_thread(move || {
            Ok(Creation::asked_for(Some(&state), &name, (&config, origin.as_ref())))
        })
        .await
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
                Err(error) => Err(self.explain_kept(name, config, error).await),
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

    async fn explain_kept(
        &self,
        name: &str,
        config: &VolumeConfig,
        error: StoreError,
    ) -> StoreError {
        if !is_missing(config, &error) {
            return error;
        }
        let (origin, state) = (lock(&self.definitions).origin(name).cloned(), self.state.clone());
        let (name, config) = (name.to_owned(), config.clone());
        let explained = on_a_thread(move || {
            Ok(explain_kept(state.as_deref(), &name, (&config, origin.as_ref()), error))
        });
        explained.await.unwrap_or_else(|unknown| unknown)
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
