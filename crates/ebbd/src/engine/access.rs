//! Which clients may open a volume (`allow`): set for the registry of all exports, and enforced for connected clients.

use std::sync::Arc;

use ebb_access::AccessList;
use ebb_config::{Config, VolumeOrigin};
use ebb_control::Refused;
use ebb_io::Io;
use ebb_volume::RESIZE_LIMIT;

use super::manage::configured;
use super::{Engine, lock};
use crate::operations::LongOperation;

impl Engine {
    /// Sets the clients of all volumes of a configuration, and disconnects those that may no longer open theirs. Volumes that
    /// it does not have keep their lists until they are withdrawn.
    pub(super) fn allow_as_in(&self, config: &Config) {
        for (name, volume) in &config.volumes {
            self.volumes.set_allowed(name, volume.allow.clone());
        }
        self.end_disallowed();
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

    fn end_disallowed(&self) {
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
