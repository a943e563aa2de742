//! Adding and removing volumes at run time, one change of a volume at a time. Renaming is in
//! `rename.rs`, resizing in `overrides.rs`.
//!
//! # What a crash in between leaves
//! - Adding: the store is opened, then the state file is written, then the volume is served and acknowledged. Before the
//!   file is written nothing is left but perhaps a new, empty image.
//! - Removing: the volume is closed, which makes its data stable, then the state file is removed, then that is acknowledged.
//!   Until the file is removed the next start serves the volume as it was; if it cannot be removed, the volume is known as
//!   one whose file cannot be used, also after a reload, so that it can be removed again. A volume whose acknowledged data is lost is
//!   removed, too, since keeping it would save nothing, and the operation fails with the reason.

use std::sync::Arc;
use std::time::Duration;

use ebb_advice::Advice;
use ebb_api::Refusal;
use ebb_config::{StateDir, StateError, StoredVolume, VolumeConfig, VolumeOrigin, plural};
use ebb_control::Refused;
use ebb_io::Io;
use ebb_sandbox::threads;
use ebb_volume::Volume;
use futures_lite::future::or;

use super::change::{Stopped, give_up};
use super::commit::may_be_removed;
use super::created::made_file;
use super::slot::VolumeSlot;
use super::stop::{Unflushed, UnstablePart};
use super::{Engine, lock};
use crate::broker_fault::broker_refusal;
use crate::operations::{LongOperation, cancelled};
use crate::stores::{Expected, HeldAs, StoreError};

/// How often an operation looks whether the data of a volume that is closed can be written.
const TOLD_EACH: Duration = Duration::from_millis(500);
/// The step in which an operation opens a store.
const OPENING: &str = "opening the store";

/// Why a volume is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Removal {
    /// An operator asked for it.
    Asked,
    /// Its snapshot is being deleted.
    SnapshotDeleted,
}

/// The other way of a command with `--persist` if there is no state directory.
pub(super) const OMIT: &str = ", or omit --persist";

/// The daemon stops.
pub(super) fn stopping() -> Refused {
    Refused::new(Refusal::Busy, "stopping", "the daemon is stopping", "try again when it runs")
}

impl From<Stopped> for Refused {
    fn from(_: Stopped) -> Refused {
        stopping()
    }
}

fn exists(name: &str, origin: &VolumeOrigin) -> Refused {
    let place = match origin {
        VolumeOrigin::Configuration(place) => format!(", defined at {place}"),
        VolumeOrigin::State | VolumeOrigin::RunTime => String::new(),
    };
    let message = format!("there is a volume `{name}` already{place}");
    Refused::new(
        Refusal::Conflict,
        "exists",
        message,
        "choose another name: `ebbd volume list` shows those in use",
    )
}

/// The refusal of a change of a volume or snapshot that clients use.
pub(super) fn in_use(what: &str, name: &str, users: u64) -> Refused {
    let message = format!("{what} `{name}` is in use by {}", plural(users, "client"));
    let them = if users == 1 { "it" } else { "them" };
    let remedy = format!("disconnect {them} first: `ebbd client list`, `ebbd client disconnect`");
    Refused::new(Refusal::Conflict, "in_use", message, remedy)
}

pub(super) fn configured(name: &str, place: &str, what: &str) -> Refused {
    let message = format!("the volume `{name}` is defined at {place}");
    let remedy = format!("{what} it there, and reload with `ebbd reload`");
    Refused::new(Refusal::Conflict, "configured", message, remedy)
}

/// The refusal of a change of a volume that the configuration file has no longer.
fn stays(name: &str, why: &str) -> Refused {
    let message = format!("the configuration no longer has volume `{name}`, which stays: {why}");
    let remedy = "reload after that, and it goes: `ebbd reload`";
    Refused::new(Refusal::Conflict, "configured", message, remedy)
}

pub(super) fn not_opened(error: &StoreError) -> Refused {
    if let Some(refused) = broker_refusal(error) {
        return refused;
    }
    match error {
        StoreError::SameFile { held: HeldAs::UnstableSnapshot, .. } => {
            let remedy = error.remedy().unwrap_or_default();
            Refused::new(Refusal::Conflict, "not_flushed", error.to_string(), remedy)
        }
        StoreError::SameFile { held: HeldAs::Layer, other, .. } => {
            let remedy = format!(
                "add it with --read-only; to write to it, first flatten or remove `{other}`"
            );
            Refused::new(Refusal::Conflict, "same_file", error.to_string(), remedy)
        }
        StoreError::SameFile { held: HeldAs::Store, .. } => {
            let remedy = "give each one of its own, or add both as read-only";
            Refused::new(Refusal::Conflict, "same_file", error.to_string(), remedy)
        }
        StoreError::NotReleased { other, kind, .. } => {
            let message = format!(
                "not added: volume `{other}` is still being removed or changed, and has the same {kind}"
            );
            let remedy =
                "see its reason in `ebbd status`, and add the volume again when that has ended";
            Refused::new(Refusal::Conflict, "same_file", message, remedy)
        }
        _ => {
            let remedy = "correct that, and add the volume again";
            Refused::new(Refusal::Invalid, "not_opened", error.full_text(), remedy)
        }
    }
}

/// The refusal of a volume that is not added, which names the file that was made for it.
fn and_made(volume: &Volume, mut refused: Refused) -> Refused {
    if let Some(place) = made_file(volume) {
        let body = &mut refused.body;
        body.message = format!("{}; the new file {place} was made, and stays", body.message);
        body.remedy = format!("{}; remove that file, or add it without --create", body.remedy);
    }
    refused
}

pub(super) fn not_kept(error: &StateError) -> Refused {
    if let Some(refused) = broker_refusal(error) {
        return refused;
    }
    let (refusal, kind) = match error {
        StateError::LongName { .. } => (Refusal::Invalid, "invalid_value"),
        StateError::DefinedTwice { .. } => (Refusal::Conflict, "exists"),
        _ => (Refusal::Failed, "state"),
    };
    let remedy = error.remedy().unwrap_or("check the state directory".into());
    Refused::new(refusal, kind, error.to_string(), remedy)
}

/// The error of a change whose volume was closed, but whose last flush failed.
pub(super) fn lost(left: &Unflushed, what: &str) -> Refused {
    let why = &left.why;
    let (kind, message, remedy) = match left.part {
        UnstablePart::FileName => (
            "not_flushed",
            format!(
                "{what}; its data is flushed, but a power cut may take the name of its file: {why}"
            ),
            "check the file system of the folder, and flush the folder: `sync FOLDER`",
        ),
        UnstablePart::EarlierData => (
            "not_flushed",
            format!(
                "{what}; this daemon loses no data, but no flush has succeeded since the volume was \
                 opened: if an earlier daemon was killed before it flushed, its last writes may be \
                 lost: {why}"
            ),
            "check its store and, after such a kill, the data on it",
        ),
        UnstablePart::Data => (
            "data_lost",
            match left.bytes {
                0 => format!("{what}; acknowledged data that was not flushed may be lost: {why}"),
                _ => format!("{what}, and acknowledged data is lost: {why}"),
            },
            "check its store and the data on it",
        ),
    };
    Refused::new(Refusal::Failed, kind, message, remedy)
}

/// Runs what may block on a helper thread, to its end.
pub(super) async fn blocking<T: Send + 'static>(
    call: impl FnOnce() -> Result<T, Refused> + Send + 'static,
) -> Result<T, Refused> {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    // The receiver is dropped only when the daemon ends.
    let started = threads::run(move || drop(sender.send(call())));
    let failed = |why: String| {
        Refused::new(Refusal::Failed, "thread", why, "raise TasksMax, or the limit of processes")
    };
    started.map_err(|error| failed(format!("cannot start a thread: {error}")))?;
    receiver.await.unwrap_or_else(|_| Err(failed("a thread has ended".to_owned())))
}

impl Engine {
    /// The state directory.
    ///
    /// # Errors
    /// If there is none.
    pub(crate) fn state_dir(&self) -> Result<Arc<StateDir>, Refused> {
        self.state_dir_or("")
    }

    /// As [`Engine::state_dir`], for a command with another way `otherwise`, which ends the remedy.
    pub(super) fn state_dir_or(&self, otherwise: &str) -> Result<Arc<StateDir>, Refused> {
        self.state.clone().ok_or_else(|| {
            let message = "the daemon has no state directory to keep this in";
            let remedy = format!(
                "start it with `state = \"/var/lib/ebbd\"` in its configuration{otherwise}"
            );
            Refused::new(Refusal::Conflict, "no_state", message, remedy)
        })
    }

    /// The state directory, which can keep a new volume of this name: to be called before anything
    /// is made for it.
    ///
    /// # Errors
    /// If there is none, or it cannot be written, or has a file of the name.
    pub(super) async fn state_for(&self, name: &str) -> Result<Arc<StateDir>, Refused> {
        let state = self.state_dir_or(OMIT)?;
        must_have_no_file(&state, name, remove_or_reload(name)).await?;
        let tried = state.clone();
        blocking(move || tried.try_out().map_err(|error| not_kept(&error))).await?;
        Ok(state)
    }

    /// Adds a volume and serves it; with `keep` the next start does, too.
    ///
    /// # Errors
    /// If it cannot be served, or not be kept, or the operation was cancelled. Then it is not added.
    pub(crate) async fn add_volume(
        self: &Arc<Self>,
        io: &Io,
        name: &str,
        (config, keep): (VolumeConfig, bool),
        operation: &LongOperation,
    ) -> Result<(), Refused> {
        let _names = self.reserve(&[name])?;
        self.must_have_memory()?;
        Box::pin(self.add_reserved(io, name, (config, keep), operation)).await
    }

    /// Adds a volume under a name that the operation has reserved, without a check of the memory.
    pub(super) async fn add_reserved(
        self: &Arc<Self>,
        io: &Io,
        name: &str,
        (config, keep): (VolumeConfig, bool),
        operation: &LongOperation,
    ) -> Result<(), Refused> {
        self.must_be_undefined(name)?;
        self.must_have_free_socket(name, &config)?;
        self.must_have_unprotected_socket(&config).await?;
        let state = if keep { Some(self.state_for(name).await?) } else { None };
        let origin = if keep { VolumeOrigin::State } else { VolumeOrigin::RunTime };
        let slot = Arc::new(VolumeSlot::new(name));
        let changing = slot.changing.lock().await;
        self.define(&slot, config.clone(), origin)?;
        let added = Box::pin(self.open_added(io, &slot, (&config, state), operation)).await;
        match &added {
            Ok(()) => {
                self.update_default_export_and_shares();
                self.sync_sockets().await;
                tracing::info!(
                    volume = name,
                    operation = operation.id(),
                    by = operation.by(),
                    "added"
                );
            }
            Err(_) => self.undefine(&slot),
        }
        drop(changing);
        added
    }

    async fn open_added(
        self: &Arc<Self>,
        io: &Io,
        slot: &Arc<VolumeSlot>,
        (config, state): (&VolumeConfig, Option<Arc<StateDir>>),
        operation: &LongOperation,
    ) -> Result<(), Refused> {
        let name = slot.name();
        operation.step(OPENING);
        operation.allow_cancel();
        let current = slot.begin_attempt();
        let opening = Box::pin(self.open(io, name, config, Expected::Any));
        let opening = async { Some(opening.await) };
        let given_up = async {
            operation.cancelled().await;
            None
        };
        let told = async {
            loop {
                io.sleep(TOLD_EACH).await;
                operation.step(slot.waits_for().as_deref().unwrap_or(OPENING));
            }
        };
        let opening = or(opening, told);
        let opened = match or(opening, or(self.stopped(), given_up)).await {
            Some(opened) => opened.map_err(|error| not_opened(&error))?,
            None if self.is_stopping() => return Err(stopping()),
            None => return Err(cancelled()),
        };
        if !operation.commit() {
            return Err(cancelled());
        }
        // From now on a missing file is a failure, and no reason for a new one.
        let config = &self.note_made(slot, config);
        if let Some(state) = &state {
            operation.step("writing the state file");
            let path = state.path_of(name);
            slot.wait_for(Some(format!("its file is being written: {}", path.display())));
            let (state, file) = (state.clone(), name.to_owned());
            let stored = StoredVolume::Whole(Box::new(config.clone()));
            let written = blocking(move || Ok(state.write_atomically(&file, &stored))).await?;
            if let Err(error) = written {
                return Err(and_made(&opened.volume, self.not_added(name, &error)));
            }
        }
        self.offer(slot, &current, opened, config.clone());
        if slot.served().is_some() {
            return Ok(());
        }
        Err(stopping())
    }

    /// The refusal of a volume that cannot be kept. Its file may be there nevertheless.
    fn not_added(&self, name: &str, error: &StateError) -> Refused {
        let mut refused = not_kept(error);
        if error.is_applied() {
            let why = &refused.body.message;
            let reason = format!("it was not added, and its file could not be removed: {why}");
            lock(&self.definitions).note_unremoved(name, &reason);
            refused.body.message = reason;
            refused.body.remedy =
                format!("remove it with `ebbd volume remove {name}`, or the next start serves it");
        }
        refused
    }

    /// Refuses a name that a volume has.
    pub(super) fn must_be_undefined(&self, name: &str) -> Result<(), Refused> {
        match lock(&self.definitions).origin(name) {
            Some(origin) => Err(exists(name, origin)),
            None => Ok(()),
        }
    }

    /// Defines a volume that is being added or renamed, with a slot of its own.
    pub(super) fn define(
        &self,
        slot: &Arc<VolumeSlot>,
        config: VolumeConfig,
        origin: VolumeOrigin,
    ) -> Result<(), Refused> {
        let name = slot.name();
        let mut definitions = lock(&self.definitions);
        if let Some(origin) = definitions.origin(name) {
            return Err(exists(name, origin));
        }
        if let Some(reason) = definitions.broken(name) {
            let message =
                format!("there is a volume `{name}` whose file cannot be used ({reason})");
            let remedy = definitions.remedy_of_broken(name);
            return Err(Refused::new(Refusal::Conflict, "exists", message, remedy));
        }
        let mut slots = lock(&self.slots);
        if slots.contains_key(name) {
            let message = format!("a volume `{name}` is still being withdrawn");
            return Err(Refused::new(
                Refusal::Conflict,
                "closing",
                message,
                "try again in a moment",
            ));
        }
        slot.want(Some(config.clone()));
        slots.insert(name.to_owned(), slot.clone());
        self.parameters.add_volume(name, &config);
        self.volumes.set_allowed(name, config.allow.clone());
        self.volumes.refuse(name, "the volume is being opened: try again in a moment");
        definitions.insert(name, config, origin);
        drop((slots, definitions));
        // Clients of snapshots that follow it from now on.
        self.end_disallowed();
        Ok(())
    }

    /// Takes back [`Engine::define`], unless a reload has defined the volume meanwhile.
    pub(super) fn undefine(&self, slot: &Arc<VolumeSlot>) {
        let name = slot.name();
        let mut definitions = lock(&self.definitions);
        if matches!(definitions.origin(name), Some(VolumeOrigin::Configuration(_))) {
            // The change that the reload has begun waits for this one.
            return;
        }
        definitions.remove(name);
        self.parameters.remove_volume(name);
        slot.cancel_attempts();
        slot.want(None);
        lock(&self.slots).remove(name);
        self.volumes.remove(name);
        // Snapshots of this name have followed it only since it was added.
        self.volumes.set_allowed(name, None);
    }

    /// Adopts what follows from the set of volumes: the default export, and the division of memory.
    pub(super) fn update_default_export_and_shares(&self) {
        if let Some(config) = &lock(&self.definitions).config {
            self.server.set_default(config.default_volume());
            crate::ceiling::apportion(config, self.cache.memory());
        }
    }

    /// The definition of a volume that can be removed or renamed; `what` the operator would do to it in the
    /// configuration.
    pub(super) fn changeable(
        &self,
        name: &str,
        what: &str,
    ) -> Result<(VolumeConfig, VolumeOrigin), Refused> {
        match self.definition(name) {
            Some((_, VolumeOrigin::Configuration(place))) => {
                let left_out = lock(&self.definitions).left_out.get(name).cloned();
                Err(left_out
                    .map_or_else(|| configured(name, &place, what), |why| stays(name, &why)))
            }
            Some(definition) => Ok(definition),
            None => Err(self.unknown(name)),
        }
    }

    /// The refusal of a name that no volume has. The caller has no lock of the slots.
    pub(crate) fn unknown(&self, name: &str) -> Refused {
        let definitions = lock(&self.definitions);
        if let Some(reason) = definitions.broken(name) {
            let message = format!("volume `{name}` is not served: {reason}");
            let remedy = definitions.remedy_of_broken(name);
            return Refused::new(Refusal::Conflict, "not_served", message, remedy);
        }
        if definitions.origin(name).is_none() && lock(&self.slots).contains_key(name) {
            let message = format!("volume `{name}` is being removed or renamed");
            let remedy = "wait until that has ended: `ebbd operation list`";
            return Refused::new(Refusal::Conflict, "closing", message, remedy);
        }
        let volumes = definitions.config.as_ref().map(|config| &config.volumes);
        let names = volumes.into_iter().flatten().map(|(name, _)| name.as_str());
        let unknown = ebb_config::params::unknown_volume(name, names);
        Refused::new(Refusal::Unknown, unknown.kind.as_str(), unknown.message, unknown.remedy)
    }

    /// Removes a volume when its data is stable.
    ///
    /// # Errors
    /// If it cannot be removed, an overlay rests on its file, or it was removed and acknowledged
    /// data is lost.
    pub(crate) async fn remove_volume(
        self: &Arc<Self>,
        io: &Io,
        name: &str,
        operation: &LongOperation,
    ) -> Result<(), Refused> {
        Box::pin(self.remove_for(io, name, Removal::Asked, operation)).await
    }

    /// As [`Engine::remove_volume`]. The volume of a snapshot that is deleted has a file that is
    /// still a layer.
    pub(super) async fn remove_for(
        self: &Arc<Self>,
        io: &Io,
        name: &str,
        removal: Removal,
        operation: &LongOperation,
    ) -> Result<(), Refused> {
        let _names = self.reserve(&[name])?;
        let broken = lock(&self.definitions).broken(name).is_some();
        if !broken && self.definition(name).is_none() && self.remove_orphan(name).await? {
            tracing::info!(
                volume = name,
                operation = operation.id(),
                by = operation.by(),
                "its settings were removed"
            );
            return Ok(());
        }
        if !lock(&self.definitions).left_out.contains_key(name) {
            // First: a reload without this volume would need the ones above it.
            self.must_be_no_base(name, "removed")?;
        }
        let origin = if broken { VolumeOrigin::State } else { self.changeable(name, "remove")?.1 };
        let slot = lock(&self.slots).get(name).cloned();
        if let Some(slot) = slot {
            Box::pin(may_be_removed(&slot)).await?;
            if removal == Removal::Asked {
                Box::pin(self.must_be_no_layer(&slot)).await?;
            }
        }
        Box::pin(self.pin_followers(io, name)).await?;
        let slot = {
            let mut definitions = lock(&self.definitions);
            definitions.remove(name);
            let slots = lock(&self.slots);
            let slot = slots.get(name).cloned();
            slot.iter().for_each(|slot| slot.want(None));
            slot
        };
        let (mut left, mut absent) = (None, false);
        if let Some(slot) = &slot {
            self.follow_close(slot, operation);
            // Boxed, as others here: these futures are large, and the stacks of workers small.
            let change = Box::pin(self.change(io, slot));
            left = or(change, self.follow_withdrawal(io, slot, operation)).await?;
        }
        {
            let definitions = lock(&self.definitions);
            if definitions.origin(name).is_none() {
                self.parameters.remove_volume(name);
                if broken {
                    self.volumes.remove(name);
                }
            }
        }
        self.update_default_export_and_shares();
        self.sync_sockets().await;
        self.bdis.forget_unused();
        if let (VolumeOrigin::State, Some(state)) = (origin, self.state.clone()) {
            operation.step("removing the state file");
            let file = name.to_owned();
            let removed =
                blocking(move || state.remove(&file).map_err(|error| not_kept(&error))).await;
            let existed = removed.map_err(|refused| self.and_unremoved(name, refused))?;
            lock(&self.definitions).note_removed(name);
            absent = !existed && !broken;
        }
        tracing::info!(volume = name, operation = operation.id(), by = operation.by(), "removed");
        match left {
            Some(left) => Err(lost(&left, "the volume was removed")),
            None if absent => {
                let message = "the volume was removed, and it had no file in the state directory";
                let remedy =
                    "see whether the next start finds it there: the directory may not be mounted";
                Err(Refused::new(Refusal::Failed, "state", message, remedy))
            }
            None => Ok(()),
        }
    }

    /// Notes that the file of a removed volume may be there still. Returns why the volume is not
    /// served.
    pub(super) fn not_removed(&self, name: &str, why: &str) -> Option<String> {
        let mut definitions = lock(&self.definitions);
        if definitions.origin(name).is_some() {
            return None;
        }
        let reason = format!("it was removed, and its file was not: {why}");
        self.volumes.admit_none_unless_known(name);
        self.volumes.refuse(name, &reason);
        definitions.note_unremoved(name, &reason);
        Some(reason)
    }

    /// As [`Engine::not_removed`]; returns the refusal that says so.
    fn and_unremoved(&self, name: &str, mut refused: Refused) -> Refused {
        if let Some(reason) = self.not_removed(name, &refused.body.message) {
            refused.body.message = format!("volume `{name}` is not served: {reason}");
            let again = format!("and run `ebbd volume remove {name}` again");
            refused.body.remedy = format!("{}, {again}", refused.body.remedy);
        }
        refused
    }

    pub(super) fn follow_close(&self, slot: &VolumeSlot, operation: &LongOperation) {
        operation.step("completing requests and writing dirty data");
        operation.watch_writes(&slot.open_volume().into_iter().collect::<Vec<_>>());
    }

    /// As [`Engine::give_up_late`], and says in the steps of `operation` meanwhile why the data of
    /// the volume cannot be written.
    pub(super) async fn follow_withdrawal<T>(
        &self,
        io: &Io,
        slot: &VolumeSlot,
        operation: &LongOperation,
    ) -> T {
        let told = async {
            let mut is_told = false;
            loop {
                let trouble = slot.trouble();
                // Each attempt may fail at another place.
                if let Some(why) = trouble.as_ref().filter(|_| !is_told) {
                    operation.step(&format!(
                        "cannot write the dirty data, which is tried again until it succeeds: {why}"
                    ));
                }
                is_told = trouble.is_some();
                io.sleep(TOLD_EACH).await;
            }
        };
        or(self.give_up_late(io, slot), told).await
    }

    /// Gives up the requests of a volume that takes too long to be withdrawn, and never completes.
    pub(super) async fn give_up_late<T>(&self, io: &Io, slot: &VolumeSlot) -> T {
        io.sleep(self.drain).await;
        if let Some(volume) = slot.open_volume().filter(|_| slot.is_leaving()) {
            give_up(slot, &volume);
        }
        std::future::pending().await
    }
}

/// The remedy for a state file whose name no volume has.
pub(super) fn remove_or_reload(name: &str) -> String {
    format!("remove it with `ebbd volume remove {name}`, or reload if it is new")
}

/// Rejects keeping a volume while the state directory has a file of its name. `remedy` says what to
/// do with the file.
pub(super) async fn must_have_no_file(
    state: &Arc<StateDir>,
    name: &str,
    remedy: String,
) -> Result<(), Refused> {
    let path = state.checked_path(name).map_err(|error| not_kept(&error))?;
    blocking(move || match path.try_exists() {
        Ok(true) => {
            let message = format!("{} exists already", path.display());
            Err(Refused::new(Refusal::Conflict, "exists", message, remedy))
        }
        Ok(false) => Ok(()),
        Err(error) => {
            let message = format!("cannot look at {}: {error}", path.display());
            Err(Refused::new(Refusal::Failed, "state", message, "check the state directory"))
        }
    })
    .await
}
