//! Which clients may open a volume (`allow`): set for the registry of all exports, and enforced for connected clients.

use std::sync::Arc;

use ebb_access::AccessList;
use ebb_config::{Config, VolumeConfig, VolumeOrigin};
use ebb_control::Refused;
use ebb_io::Io;
use ebb_volume::RESIZE_LIMIT;

use super::manage::configured;
use super::slot::VolumeSlot;
use super::{Engine, lock};
use crate::operations::LongOperation;

impl Engine {
    /// Sets the clients of all volumes of a configuration, and disconnects those that may no longer open theirs. Volumes that
    /// it does not have keep their lists until they are withdrawn.
    pub(super) fn allow_as_in(&self, config: &Config) {
        {
            let slots = lock(&self.slots);
            for (name, volume) in &config.volumes {
                self.allow_as_wanted(slots.get(name).map(|slot| &**slot), name, volume);
            }
        }
        self.end_disallowed();
    }

    /// Sets the clients of a volume that a reload defines. As long as it is served on another store than the new one, its data
    /// is for those that the old list admits, too.
    pub(super) fn allow_as_wanted(
        &self,
        slot: Option<&VolumeSlot>,
        name: &str,
        new: &VolumeConfig,
    ) {
        let other = |old: &VolumeConfig| old.store != new.store || old.base != new.base;
        match slot.and_then(VolumeSlot::served) {
            Some((_, old)) if other(&old) => {
                self.volumes.set_allowed_of_next(name, new.allow.clone());
            }
            _ => self.volumes.set_allowed(name, new.allow.clone()),
        }
    }

    /// Gives the snapshots that have the list of a volume which is to go a list of their own, so that they are not open to
    /// others.
    ///
    /// # Errors
    /// If one of them cannot be kept: then the volume has to stay.
    pub(super) async fn pin_followers(
        self: &Arc<Self>,
        io: &Io,
        name: &str,
    ) -> Result<(), Refused> {
        for (snapshot, list) in self.volumes.followers(name) {
            let kept = self.keep_allowed(io, (&snapshot, Some(list))).await;
            kept.map_err(|refused| {
                let message = format!(
                    "the clients that may open {snapshot}, which has the list of {name}, cannot be kept: {}",
                    refused.body.message
                );
                Refused::new(409, "not_kept", message, refused.body.remedy)
            })?;
        }
        Ok(())
    }

    /// Gives a snapshot that gets a name of its own, away from its volume, the list that it has had by its volume. To be called
    /// with its name reserved.
    ///
    /// # Errors
    /// If it cannot be kept.
    pub(super) async fn pin_list(
        self: &Arc<Self>,
        (from, to): (&str, &str),
        config: &mut VolumeConfig,
    ) -> Result<(), Refused> {
        let volume_of = |name: &str| name.rsplit_once('@').map(|(volume, _)| volume.to_owned());
        if config.allow.is_some() || volume_of(from) == volume_of(to) {
            return Ok(());
        }
        if let Some(list) = self.volumes.list_of(from) {
            self.set_kept_list(from, Some(list.clone())).await?;
            config.allow = Some(list);
        }
        Ok(())
    }

    /// Keeps the lists of snapshots that followed a volume which is gone: they must not be open to others after the next
    /// start because it is gone. To be called before the volume's state file is removed.
    pub(super) async fn keep_followers(
        self: &Arc<Self>,
        io: &Io,
        followers: Vec<(Arc<str>, AccessList)>,
    ) {
        for (snapshot, list) in followers {
            if let Err(refused) = self.keep_allowed(io, (&snapshot, Some(list))).await {
                let (volume, error) = (&*snapshot, refused.body.message);
                tracing::error!(
                    volume,
                    error,
                    "the clients that may open a snapshot are not kept: set them with `ebbd volume allow`"
                );
            }
        }
    }

    pub(super) fn end_disallowed(&self) {
        self.server.end_disallowed();
        self.guests.end_disallowed();
    }

    /// Sets the clients that may open a volume that was added at run time, and disconnects others.
    ///
    /// # Errors
    /// If the configuration defines it, or it cannot be kept.
    pub(crate) async fn allow(
        self: &Arc<Self>,
        io: &Io,
        (name, allowed): (&str, Option<AccessList>),
        operation: &LongOperation,
    ) -> Result<(), Refused> {
        operation.step("writing the state file");
        self.keep_allowed(io, (name, allowed)).await?;
        self.end_disallowed();
        let (operation, by) = (operation.id(), operation.by());
        tracing::info!(volume = name, operation, by, "the clients that may open it were changed");
        Ok(())
    }

    /// Sets the clients that may open a volume that was added at run time, in its state file first.
    async fn keep_allowed(
        self: &Arc<Self>,
        io: &Io,
        (name, allowed): (&str, Option<AccessList>),
    ) -> Result<(), Refused> {
        let _names = self.reserve_when_free(io, name, RESIZE_LIMIT).await?;
        self.set_kept_list(name, allowed).await
    }

    async fn set_kept_list(
        self: &Arc<Self>,
        name: &str,
        allowed: Option<AccessList>,
    ) -> Result<(), Refused> {
        let Some((mut config, origin)) = self.definition(name) else {
            return Err(self.unknown(name));
        };
        if let VolumeOrigin::Configuration(place) = &origin {
            return Err(configured(name, place, "change `allow` of"));
        }
        config.allow.clone_from(&allowed);
        if origin == VolumeOrigin::State {
            self.write_state(&self.state_dir()?, name, config.clone()).await?;
        }
        let mut definitions = lock(&self.definitions);
        // A reload may have defined it in the configuration meanwhile.
        if let Some(VolumeOrigin::Configuration(place)) = definitions.origin(name) {
            return Err(configured(name, place, "change `allow` of"));
        }
        if let Some(known) = &mut definitions.config
            && let Some(volume) = known.volumes.get_mut(name)
        {
            volume.allow.clone_from(&allowed);
        }
        if let Some(slot) = lock(&self.slots).get(name) {
            slot.follow_allow(allowed.as_ref());
        }
        self.volumes.set_allowed(name, allowed);
        Ok(())
    }
}
