//! What the state directory keeps of volumes that are served: their sizes after a resize, and their limits.
//!
//! # Invariants
//! - The size that is kept is never larger than the store: a shrink is written before the resize, a growth after it.

use std::sync::Arc;

use ebb_api::ResizeView;
use ebb_config::{Size, StateDir, StoredVolume, VolumeOrigin, VolumeOverrides};
use ebb_control::{Refused, resize_refusal};
use ebb_io::Io;
use ebb_volume::{RESIZE_LIMIT, Resize, SECTOR};

use super::manage::{blocking, not_kept, write_state};
use super::slot::VolumeSlot;
use super::{Engine, lock};
use crate::operations::LongOperation;

impl Engine {
    /// Resizes a volume, and remembers its size.
    ///
    /// # Errors
    /// If it cannot be resized, or was resized and its size cannot be remembered.
    pub(crate) async fn resize_volume(
        self: &Arc<Self>,
        io: &Io,
        (name, order): (&str, Resize),
        operation: &LongOperation,
    ) -> Result<(), Refused> {
        let _names = self.reserve_when_free(io, name, RESIZE_LIMIT).await?;
        let slot = lock(&self.slots).get(name).cloned().ok_or_else(|| self.unknown(name))?;
        let Some((volume, _)) = slot.served() else {
            let message = format!("the volume is {}", slot.state().phase.as_str());
            return Err(Refused::new(409, "not_served", message, "try again in a moment"));
        };
        operation.step("resizing");
        let from = volume.size();
        let smaller = order
            .to
            .filter(|to| order.shrink && *to < from && *to > 0 && to.is_multiple_of(SECTOR));
        if let Some(to) = smaller {
            self.remember_size(&slot, to).await?;
        }
        match Box::pin(volume.resize_within(io, order, RESIZE_LIMIT)).await {
            Ok(ebb_volume::Resized { from, to: size }) => {
                if size != from {
                    tracing::info!(
                        volume = name,
                        from,
                        size,
                        operation = operation.id(),
                        "resized"
                    );
                }
                let name = name.to_owned();
                operation.note_resized(ResizeView { name, from, size });
                self.remember_size(&slot, size).await.map_err(|refused| {
                    let message = format!(
                        "resized to {size} bytes, and the size cannot be remembered: {}",
                        refused.body.message
                    );
                    Refused::new(500, "not_remembered", message, refused.body.remedy)
                })
            }
            Err(error) => {
                if smaller.is_some() {
                    self.remember_size(&slot, volume.size()).await?;
                }
                Err(resize_refusal(&error))
            }
        }
    }

    /// Keeps the size that a volume has now, if its configuration has a size.
    async fn remember_size(&self, slot: &Arc<VolumeSlot>, bytes: u64) -> Result<(), Refused> {
        let (name, size) = (slot.name(), Size::new(bytes));
        let Some((old, origin)) = self.definition(name) else { return Ok(()) };
        let mut new = old.clone();
        if !new.set_size(size) || new == old {
            return Ok(());
        }
        match (origin, &self.state) {
            (VolumeOrigin::RunTime, _) => {}
            (VolumeOrigin::State, Some(state)) => {
                write_state(state, name, StoredVolume::Whole(Box::new(new.clone()))).await?;
            }
            (VolumeOrigin::Configuration(_), Some(state)) => {
                change_overrides(state, name, move |kept| kept.size = Some(size)).await?;
            }
            (VolumeOrigin::State | VolumeOrigin::Configuration(_), None) => return Ok(()),
        }
        let mut definitions = lock(&self.definitions);
        if let Some(config) = &mut definitions.config
            && let Some(volume) = config.volumes.get_mut(name)
        {
            volume.set_size(size);
        }
        slot.follow_size(size);
        Ok(())
    }

    /// Keeps the limits that were set of a volume, so that the next start has them, too.
    ///
    /// # Errors
    /// If the volume itself is not kept, or the state directory cannot be written.
    pub(crate) async fn keep_limits(
        self: &Arc<Self>,
        io: &Io,
        name: &str,
        operation: &LongOperation,
    ) -> Result<(), Refused> {
        let _names = self.reserve_when_free(io, name, RESIZE_LIMIT).await?;
        let Some((mut config, origin)) = self.definition(name) else {
            return Err(self.unknown(name));
        };
        let (limits, group) = self.limits.of_volume(name);
        let state = self.state_dir()?;
        operation.step("writing the state file");
        config.limits = limits;
        config.limit_group.clone_from(&group);
        match origin {
            VolumeOrigin::RunTime => {
                let message =
                    format!("volume `{name}` itself ends with the daemon, and its limits with it");
                let remedy = "add it again with --persist to keep it";
                return Err(Refused::new(409, "not_kept", message, remedy));
            }
            VolumeOrigin::State => {
                write_state(&state, name, StoredVolume::Whole(Box::new(config.clone()))).await?;
            }
            VolumeOrigin::Configuration(_) => {
                let set = move |kept: &mut VolumeOverrides| {
                    kept.limits = limits;
                    kept.limit_group = group;
                };
                change_overrides(&state, name, set).await?;
            }
        }
        if let Some(known) = &mut lock(&self.definitions).config
            && let Some(volume) = known.volumes.get_mut(name)
        {
            *volume = config.clone();
        }
        if let Some(slot) = lock(&self.slots).get(name).cloned() {
            slot.follow(&config);
        }
        Ok(())
    }
}

async fn change_overrides(
    state: &Arc<StateDir>,
    name: &str,
    change: impl FnOnce(&mut VolumeOverrides) + Send + 'static,
) -> Result<(), Refused> {
    let (state, name) = (state.clone(), name.to_owned());
    blocking(move || state.change_overrides(&name, change).map_err(|error| not_kept(&error))).await
}
