//! Renaming volumes at run time.
//!
//! The volume is flushed while it is served, then closed and opened for its new name. Then the
//! state file is renamed, and the volume is served. If a step fails, the volume has the name of its
//! state file.
//!
//! # What a crash in between leaves
//! - The next start serves the volume under one of the two names, with all its data.

use std::sync::Arc;
use std::time::Duration;

use ebb_access::AccessList;
use ebb_api::Refusal;
use ebb_config::{StateDir, StoreUri, VolumeConfig, VolumeOrigin};
use ebb_control::Refused;
use ebb_io::Io;
use ebb_volume::BlockError;
use futures_lite::future::or;

use super::access::{PinnedList, warn_unpinned};
use super::change::Stopped;
use super::manage::{blocking, in_use, lost, must_have_no_file, not_kept, remove_or_reload};
use super::slot::{Claimed, VolumeSlot};
use super::{Engine, lock};
use crate::operations::{LongOperation, cancelled};
use crate::stores::{Expected, StoreError};

/// The time for opening the store for the new name, while the volume is not served.
const OPEN_WITHIN: Duration = Duration::from_secs(30);

fn not_renamed(name: &str, error: &StoreError) -> Refused {
    let message = format!("volume `{name}` was not renamed: {}", error.full_text());
    Refused::new(Refusal::Failed, "not_renamed", message, "correct that, and rename it again")
}

fn not_flushed(name: &str, error: &BlockError) -> Refused {
    let message =
        format!("volume `{name}` was not renamed: cannot write its data: {}", error.full_text());
    let remedy = "check the store, and rename it again; the volume is served as before";
    Refused::new(Refusal::Failed, "not_flushed", message, remedy)
}

/// Returns the error of a store that was not opened for the new name within [`OPEN_WITHIN`].
fn too_late(name: &str) -> Refused {
    let seconds = OPEN_WITHIN.as_secs();
    let message =
        format!("volume `{name}` was not renamed: its store was not opened in {seconds} s");
    Refused::new(Refusal::Failed, "not_renamed", message, "check the store, and rename it again")
}

/// A volume, and the slot under its new name.
struct Renaming<'a> {
    slot: &'a Arc<VolumeSlot>,
    new: &'a Arc<VolumeSlot>,
    config: &'a VolumeConfig,
}

impl Engine {
    /// Renames a volume that no client and no guest uses.
    ///
    /// # Errors
    /// If it cannot be renamed: it is served as before, unless it cannot be opened again.
    pub(crate) async fn rename_volume(
        self: &Arc<Self>,
        io: &Io,
        (from, to): (&str, &str),
        operation: &LongOperation,
    ) -> Result<(), Refused> {
        if from == to {
            self.changeable(from, "rename")?;
            let message = format!("volume `{from}` has this name already");
            return Err(Refused::new(
                Refusal::Invalid,
                "invalid_value",
                message,
                "give another name",
            ));
        }
        let _names = self.reserve(&[from, to])?;
        let (mut config, origin) = self.changeable(from, "rename")?;
        self.must_be_undefined(to)?;
        self.must_be_renamable((from, to), &config)?;
        self.must_be_no_base(from, "renamed")?;
        let state = self.state.clone().filter(|_| origin == VolumeOrigin::State);
        if let Some(state) = &state {
            must_have_no_file(state, to, remove_or_reload(to)).await?;
            self.must_have_usable_file(from)?;
        }
        let Some(slot) = lock(&self.slots).get(from).cloned() else {
            return Err(self.unknown(from));
        };
        let _changing = self.unless_stopped(slot.changing.lock()).await?;
        let served = slot.served();
        if let Some((volume, _)) = &served {
            operation.step("looking at the store");
            let can_reopen = Box::pin(self.must_reopen(&slot, &config)).await?;
            can_reopen.map_err(|error| not_renamed(from, &error))?;
            // A volume that is closed is not served until all its data is written.
            let not_flushed = |error| not_flushed(from, &error);
            Box::pin(self.flush_before(io, volume, operation, not_flushed)).await?;
            if !operation.commit() {
                return Err(cancelled());
            }
        }
        let own = Box::pin(self.pin_list((from, to), &mut config)).await?;
        let followers = match Box::pin(self.pin_followers(io, from)).await {
            Ok(followers) => followers,
            Err(refused) => {
                Box::pin(self.unpin_renamed(io, own, Vec::new())).await;
                return Err(refused);
            }
        };
        let is_served = served.is_some();
        drop(served);
        let volume = (&slot, is_served);
        let renamed = self.rename_pinned(io, to, volume, (config, origin, state), operation);
        let renamed = Box::pin(renamed).await;
        if renamed.is_err() && self.definition(from).is_some() {
            Box::pin(self.unpin_renamed(io, own, followers)).await;
        }
        renamed
    }

    /// After a rename that failed: the volume and its snapshots follow the lists that they followed
    /// before, so that a later change of those reaches them.
    async fn unpin_renamed(
        self: &Arc<Self>,
        io: &Io,
        own: Option<PinnedList>,
        followers: Vec<PinnedList>,
    ) {
        if let Some(own) = own
            && let Err(refused) = self.unpin_reserved(&own).await
        {
            warn_unpinned(&own, refused);
        }
        self.unpin(io, followers).await;
    }

    /// Renames a volume whose snapshots have their own lists.
    async fn rename_pinned(
        self: &Arc<Self>,
        io: &Io,
        to: &str,
        (slot, is_served): (&Arc<VolumeSlot>, bool),
        (config, origin, state): (VolumeConfig, VolumeOrigin, Option<Arc<StateDir>>),
        operation: &LongOperation,
    ) -> Result<(), Refused> {
        let from = slot.name();
        if is_served {
            // Meanwhile clients may have connected, and overlays been added.
            self.must_be_renamable((from, to), &config)?;
            self.must_be_no_base(from, "renamed")?;
        }
        let new = Arc::new(VolumeSlot::new(to));
        let _opening = new.changing.lock().await;
        self.define(&new, config.clone(), origin.clone())?;
        {
            let mut definitions = lock(&self.definitions);
            if !matches!(definitions.origin(from), Some(VolumeOrigin::Configuration(_))) {
                definitions.remove(from);
                self.parameters.remove_volume(to);
                self.parameters.rename_volume(from, to);
            }
        }
        new.wait_for(Some(format!("it is being renamed, and volume {from} is still being closed")));
        // No other volume gets the files before this one has them again.
        let _held = slot.hold_files(to);
        let renaming = Renaming { slot, new: &new, config: &config };
        let (opened, unstable) =
            match Box::pin(self.open_as(io, &renaming, state, operation)).await? {
                Ok(opened) => opened,
                Err(refused) => {
                    slot.wait_for(None);
                    self.keep_name(slot, &new, (config, origin));
                    // It is opened again in the background if that fails now.
                    Box::pin(self.bring_up(io, slot)).await?;
                    return Err(self.or_not_served(slot, refused));
                }
            };
        let followers = self.forget_name(slot);
        Box::pin(self.keep_followers(io, followers)).await;
        new.wait_for(None);
        let current = new.begin_attempt();
        self.offer(&new, &current, opened, config);
        let (operation, by) = (operation.id(), operation.by());
        tracing::info!(volume = to, from, operation, by, "renamed");
        self.update_default_export_and_shares();
        self.sync_sockets().await;
        unstable.map_or(Ok(()), Err)
    }

    /// Closes a volume, opens it for its new name, and renames its state file. Returns the volume,
    /// and an error if the new name of the state file is not stable.
    async fn open_as(
        self: &Arc<Self>,
        io: &Io,
        renaming: &Renaming<'_>,
        state: Option<Arc<StateDir>>,
        operation: &LongOperation,
    ) -> Result<Result<(Claimed, Option<Refused>), Refused>, Stopped> {
        let Renaming { slot, new, config } = renaming;
        let (from, to) = (slot.name().to_owned(), new.name().to_owned());
        let had = Expected::file(slot.open_file()).as_it_was();
        if let Some((volume, _)) = slot.served() {
            self.follow_close(slot, operation);
            let withdrawn = Box::pin(self.withdraw(io, slot, &volume));
            if let Some(left) = or(withdrawn, self.follow_withdrawal(io, slot, operation)).await? {
                return Ok(Err(lost(&left, "the volume was not renamed")));
            }
        } else {
            slot.cancel_attempts();
        }
        operation.step("opening the store");
        new.wait_for(None);
        let opening = Box::pin(self.open(io, &to, config, had));
        let opening = async { Some(opening.await) };
        let late = async {
            io.sleep(OPEN_WITHIN).await;
            None
        };
        let opened = match self.unless_stopped(or(opening, late)).await? {
            Some(Ok(opened)) => opened,
            Some(Err(error)) => return Ok(Err(not_renamed(&from, &error))),
            None => return Ok(Err(too_late(&from))),
        };
        let Some(state) = state else { return Ok(Ok((opened, None))) };
        operation.step("renaming the state file");
        let waiting = format!("its file is being renamed: {}", state.path_of(&to).display());
        new.wait_for(Some(waiting.clone()));
        slot.wait_for(Some(waiting));
        let refused = match blocking(move || Ok(state.rename(&from, &to))).await {
            Ok(Ok(())) => return Ok(Ok((opened, None))),
            // The file has the new name: the volume must also have it.
            Ok(Err(error)) if error.is_applied() => {
                return Ok(Ok((opened, Some(not_kept(&error)))));
            }
            Ok(Err(error)) => not_kept(&error),
            Err(refused) => refused,
        };
        // Nothing was written to it.
        let _ = opened.volume.close(io).await;
        Ok(Err(refused))
    }

    /// Checks that a served volume could be opened again after a close: its files are where they
    /// were, and can be opened.
    pub(super) async fn must_reopen(
        &self,
        slot: &VolumeSlot,
        config: &VolumeConfig,
    ) -> Result<Result<(), StoreError>, Stopped> {
        let below = match config.base.is_some() {
            true => self.bases_of(slot.name(), config),
            false => Ok(Vec::new()),
        };
        let below = match below {
            Ok(below) => below.into_iter().map(|(_, base)| (base, None)),
            Err(error) => return Ok(Err(error)),
        };
        for (config, open) in std::iter::once((config.clone(), slot.open_file())).chain(below) {
            let look = self.opener.compare(&config, open, &config);
            if let Err(error) = self.unless_stopped(look).await? {
                return Ok(Err(error));
            }
        }
        Ok(Ok(()))
    }

    /// Adds to the error of a change that the volume is not served, if so.
    pub(super) fn or_not_served(&self, slot: &VolumeSlot, mut refused: Refused) -> Refused {
        if slot.served().is_none() && !self.is_stopping() {
            let name = slot.name();
            refused.body.message =
                format!("{}; volume `{name}` cannot be opened at present", refused.body.message);
            refused.body.remedy = format!("{}; ebbd tries to open it", refused.body.remedy);
        }
        refused
    }

    /// Forgets the former name of a volume. Returns the snapshots that followed it, with their
    /// list.
    fn forget_name(&self, slot: &VolumeSlot) -> Vec<(Arc<str>, AccessList)> {
        let (definitions, mut slots) = (lock(&self.definitions), lock(&self.slots));
        // A reload may have defined it in the configuration meanwhile: its change goes on with this
        // slot.
        if definitions.origin(slot.name()).is_some() {
            return Vec::new();
        }
        slot.want(None);
        slots.remove(slot.name());
        self.volumes.remove(slot.name());
        self.volumes.forget_allowed(slot.name())
    }

    /// Fails if the volume is in use, or would lose its data.
    fn must_be_renamable(
        &self,
        (name, to): (&str, &str),
        config: &VolumeConfig,
    ) -> Result<(), Refused> {
        if !config.has_own_socket() {
            self.must_have_free_socket(to, config)?;
        }
        if matches!(config.store, StoreUri::Memory(_)) {
            let message = format!("the data of volume `{name}` is in memory and would be lost");
            let remedy = "add another volume, and copy the data: nbdcopy(1)";
            return Err(Refused::new(Refusal::Conflict, "not_renamed", message, remedy));
        }
        let users = self.server.connections(name) + self.guests.disks_of(name);
        if users > 0 {
            return Err(in_use("volume", name, users));
        }
        Ok(())
    }

    /// Fails if the state file of the volume cannot be used, so that the volume is served from
    /// earlier settings.
    fn must_have_usable_file(&self, name: &str) -> Result<(), Refused> {
        let definitions = lock(&self.definitions);
        let broken = definitions.config.as_ref().and_then(|config| config.broken.get(name));
        let Some(reason) = broken else { return Ok(()) };
        let message = format!("its file in the state directory cannot be used: {reason}");
        Err(Refused::new(Refusal::Conflict, "state", message, "correct the file, and reload"))
    }

    /// Takes back the renaming of the volume of `slot` to the name of `new`.
    fn keep_name(
        &self,
        slot: &Arc<VolumeSlot>,
        new: &Arc<VolumeSlot>,
        (config, origin): (VolumeConfig, VolumeOrigin),
    ) {
        let (from, to) = (slot.name(), new.name());
        let mut definitions = lock(&self.definitions);
        if definitions.origin(from).is_none() {
            self.parameters.rename_volume(to, from);
            definitions.insert(from, config.clone(), origin);
            let mut slots = lock(&self.slots);
            slot.want(Some(config));
            slots.insert(from.to_owned(), slot.clone());
        }
        drop(definitions);
        self.undefine(new);
    }
}
