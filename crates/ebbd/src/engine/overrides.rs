//! Settings of a volume that the state directory has instead of the configuration: its size after a resize, and limits that
//! are kept; and the resize itself.
//!
//! # Invariants
//! - The size in the state directory is never larger than the store, whenever a crash comes: a smaller size is written
//!   before the resize, a larger one after it. So the next start can open the volume.
//! - Before a volume grows, the state directory is tried out: a full one fails the resize first.

use std::sync::Arc;

use ebb_api::{Refusal, ResizeView};
use ebb_config::{
    LimitsConfig, Size, StateDir, StoredVolume, VolumeConfig, VolumeOrigin, VolumeOverrides,
};
use ebb_control::{Refused, resize_refusal};
use ebb_io::Io;
use ebb_volume::{RESIZE_LIMIT, Resize, ResizeError, SECTOR};

use super::commit::must_have_ended_commit;
use super::manage::{OMIT, blocking, not_kept};
use super::overlay::count_own;
use super::slot::VolumeSlot;
use super::{Engine, lock};
use crate::operations::LongOperation;
use crate::stores::promised_size;

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
        let slot = lock(&self.slots).get(name).cloned();
        let slot = slot.ok_or_else(|| self.unknown(name))?;
        let Some((volume, _)) = slot.served() else {
            let message = format!("the volume is {}", slot.state().phase.condition());
            return Err(Refused::new(
                Refusal::Conflict,
                "not_served",
                message,
                "try again in a moment",
            ));
        };
        operation.step("resizing");
        let from = volume.size();
        self.must_keep_size(name, from)?;
        if order.to.is_none_or(|to| to > from) {
            // A commit needs a volume that is no larger than its base.
            let what = if order.to.is_some() { "grow" } else { "be resized without a size" };
            must_have_ended_commit(&volume, what)?;
        }
        let smaller = order
            .to
            .filter(|to| order.shrink && *to < from && *to > 0 && to.is_multiple_of(SECTOR));
        match smaller {
            Some(to) => {
                self.must_open_smaller(name, to)?;
                self.remember_size(&slot, to).await?;
                volume.plan_size(Some(to));
                self.guests.note_backing(&volume);
            }
            None => self.must_remember_sizes(name).await?,
        }
        let resized = Box::pin(volume.resize_within(io, order, RESIZE_LIMIT)).await;
        volume.plan_size(None);
        if smaller.is_some() {
            self.guests.note_backing(&volume);
        }
        match resized {
            Ok(ebb_volume::Resized { from, to: size }) => {
                if size != from {
                    tracing::info!(
                        volume = name,
                        from,
                        size,
                        operation = operation.id(),
                        by = operation.by(),
                        "resized"
                    );
                    self.guests.vhost.announce_sizes();
                    count_own(io, &volume);
                }
                let name = name.to_owned();
                operation.note_resized(ResizeView { name, from, size });
                self.remember_size(&slot, size).await.map_err(|refused| {
                    let message = format!(
                        "resized to {size} bytes, and the size cannot be remembered: {}",
                        refused.body.message
                    );
                    Refused::new(Refusal::Failed, "not_remembered", message, refused.body.remedy)
                })
            }
            Err(error) => {
                if smaller.is_some() {
                    self.remember_size(&slot, volume.size()).await?;
                }
                Err(refusal(order, &error))
            }
        }
    }

    /// Refuses a size that the next start, or a reload, would refuse: the configuration promises a
    /// larger file, and no state directory says otherwise.
    fn must_open_smaller(&self, name: &str, to: u64) -> Result<(), Refused> {
        let Some((config, VolumeOrigin::Configuration(place))) = self.definition(name) else {
            return Ok(());
        };
        let promised = promised_size(&config).filter(|size| *size > to);
        let Some(promised) = promised.filter(|_| self.state.is_none()) else { return Ok(()) };
        let message = format!(
            "the volume `{name}` has `create` and {promised} bytes as its size at {place}, and the next start would \
             refuse a smaller file"
        );
        let remedy = format!(
            "set `size` to {to} there, reload with `ebbd reload`, and resize it again; or start the daemon with `state`, \
             which keeps sizes"
        );
        Err(Refused::new(Refusal::Conflict, "configured", message, remedy))
    }

    /// Checks that a new size of a volume could be kept, if it is one that is.
    async fn must_remember_sizes(&self, name: &str) -> Result<(), Refused> {
        let Some((mut config, _)) = self.definition(name) else { return Ok(()) };
        // Whatever the size is.
        match config.set_size(Size::new(SECTOR)) {
            true => self.must_keep(name).await,
            false => Ok(()),
        }
    }

    /// Checks that the state directory could keep a change of a volume, unless the volume ends with
    /// the daemon.
    pub(super) async fn must_keep(&self, name: &str) -> Result<(), Refused> {
        let is_kept =
            self.definition(name).is_some_and(|(_, origin)| origin != VolumeOrigin::RunTime);
        match self.state.clone().filter(|_| is_kept) {
            Some(state) => {
                blocking(move || state.try_out().map_err(|error| not_kept(&error))).await
            }
            None => Ok(()),
        }
    }

    /// Keeps the size that a volume has now, if its configuration has a size.
    async fn remember_size(&self, slot: &Arc<VolumeSlot>, bytes: u64) -> Result<(), Refused> {
        let (name, size) = (slot.name(), Size::new(bytes));
        let Some((old, origin)) = self.definition(name) else { return Ok(()) };
        let mut new = old.clone();
        if !new.set_size(size) || new == old {
            return self.forget_other_size(name, (&origin, size)).await;
        }
        match (origin, &self.state) {
            (VolumeOrigin::RunTime, _) => {}
            (VolumeOrigin::State, Some(state)) => {
                self.write_state(state, name, new.clone()).await?;
            }
            (VolumeOrigin::Configuration(_), Some(state)) => {
                let replaces = self.as_configured(name).unwrap_or(old.clone()).store_and_size();
                let set = move |kept: &mut VolumeOverrides| {
                    kept.size = Some(size);
                    kept.size_replaces = Some(replaces);
                };
                self.change_overrides(state, name, set).await?;
            }
            (VolumeOrigin::State | VolumeOrigin::Configuration(_), None) => return Ok(()),
        }
        let mut definitions = lock(&self.definitions);
        if let Some(config) = &mut definitions.config
            && let Some(volume) = config.volumes.get_mut(name)
        {
            config.replaced.entry(name.to_owned()).or_insert_with(|| volume.clone());
            volume.set_size(size);
        }
        slot.follow_size(size);
        Ok(())
    }

    /// Removes a size of a configured volume from the state directory that is not in force: the
    /// configuration had another store or size when it was written, or the volume has `size` now.
    async fn forget_other_size(
        &self,
        name: &str,
        (origin, size): (&VolumeOrigin, Size),
    ) -> Result<(), Refused> {
        let own = {
            let definitions = lock(&self.definitions);
            let replaced = definitions.config.as_ref().and_then(|config| config.replaced.get(name));
            // Without a file of the state directory nothing is replaced.
            replaced.map(VolumeConfig::store_and_size)
        };
        let (VolumeOrigin::Configuration(_), Some(state), Some(own)) = (origin, &self.state, own)
        else {
            return Ok(());
        };
        let forget = move |kept: &mut VolumeOverrides| {
            if kept.size.is_some_and(|kept| kept != size) || kept.size_replaces != Some(own) {
                (kept.size, kept.size_replaces) = (None, None);
            }
        };
        self.change_overrides(state, name, forget).await
    }

    /// Checks that limits of a volume could be kept, and changes nothing.
    ///
    /// # Errors
    /// As for [`Engine::keep_limits`].
    pub(crate) async fn must_keep_limits(&self, name: &str) -> Result<(), Refused> {
        let (_, _, state) = self.kept_definition(name)?;
        blocking(move || state.try_out().map_err(|error| not_kept(&error))).await
    }

    /// The definition of a volume, and the state directory that keeps limits of it.
    fn kept_definition(
        &self,
        name: &str,
    ) -> Result<(VolumeConfig, VolumeOrigin, Arc<StateDir>), Refused> {
        let Some((config, origin)) = self.definition(name) else { return Err(self.unknown(name)) };
        // First: without one nothing can be kept.
        let state = self.state_dir_or(OMIT)?;
        if origin == VolumeOrigin::RunTime {
            let message =
                format!("volume `{name}` itself ends with the daemon, and its limits with it");
            let remedy = format!("keep it first: `ebbd volume persist {name}`");
            return Err(Refused::new(Refusal::Conflict, "not_kept", message, remedy));
        }
        Ok((config, origin, state))
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
        let (mut config, origin, state) = self.kept_definition(name)?;
        let (limits, group) = self.limits.set_at_run_time(name);
        operation.step("writing the state file");
        config.limits = limits.over(&config.limits);
        if group.is_some() {
            config.limit_group.clone_from(&group);
        }
        match origin {
            // Refused above.
            VolumeOrigin::RunTime => {}
            VolumeOrigin::State => {
                self.write_state(&state, name, config.clone()).await.map_err(in_force)?;
            }
            VolumeOrigin::Configuration(_) => {
                let set = move |kept: &mut VolumeOverrides| {
                    kept.limits = limits.over(&kept.limits);
                    kept.limit_group = group.or(kept.limit_group.take());
                };
                self.change_overrides(&state, name, set).await.map_err(in_force)?;
            }
        }
        self.adopt_limits(name, &config);
        tracing::info!(
            volume = name,
            operation = operation.id(),
            by = operation.by(),
            "limits kept"
        );
        Ok(())
    }

    /// Forgets the limits of a volume that were kept: those of its configuration are in force, unless others were set at run
    /// time.
    ///
    /// # Errors
    /// If the state directory cannot be written.
    pub(crate) async fn forget_limits(
        self: &Arc<Self>,
        io: &Io,
        name: &str,
        operation: &LongOperation,
    ) -> Result<(), Refused> {
        let _names = self.reserve_when_free(io, name, RESIZE_LIMIT).await?;
        let Some((mut config, origin)) = self.definition(name) else {
            return Err(self.unknown(name));
        };
        if origin == VolumeOrigin::RunTime {
            return Ok(());
        }
        let state = self.state_dir_or(OMIT)?;
        operation.step("writing the state file");
        (config.limits, config.limit_group) = (LimitsConfig::default(), None);
        if origin == VolumeOrigin::State {
            self.write_state(&state, name, config.clone()).await?;
        } else {
            let clear = |kept: &mut VolumeOverrides| {
                (kept.limits, kept.limit_group) = (LimitsConfig::default(), None);
            };
            self.change_overrides(&state, name, clear).await?;
            if let Some(own) = self.as_configured(name) {
                (config.limits, config.limit_group) = (own.limits, own.limit_group);
            }
        }
        self.adopt_limits(name, &config);
        let (operation, by) = (operation.id(), operation.by());
        tracing::info!(volume = name, operation, by, "kept limits forgotten");
        Ok(())
    }

    /// Writes the definition of a volume that only the state directory has.
    pub(super) async fn write_state(
        &self,
        state: &Arc<StateDir>,
        name: &str,
        config: VolumeConfig,
    ) -> Result<(), Refused> {
        let (state, file) = (state.clone(), name.to_owned());
        let stored = StoredVolume::Whole(Box::new(config));
        let write =
            move || state.write_atomically(&file, &stored).map_err(|error| not_kept(&error));
        blocking(write).await?;
        lock(&self.definitions).note_usable(name);
        Ok(())
    }

    /// Changes what a volume of the configuration has instead of its own settings.
    async fn change_overrides(
        &self,
        state: &Arc<StateDir>,
        name: &str,
        change: impl FnOnce(&mut VolumeOverrides) + Send + 'static,
    ) -> Result<(), Refused> {
        let (state, file) = (state.clone(), name.to_owned());
        let in_force = self.as_configured(name).zip(self.definition(name));
        let in_force = in_force.map(|(own, (now, _))| VolumeOverrides::between(&own, &now));
        let change = move || {
            let changed = state.change_overrides(&file, in_force.unwrap_or_default(), change);
            changed.map_err(|error| not_kept(&error))
        };
        blocking(change).await?;
        lock(&self.definitions).note_usable(name);
        Ok(())
    }

    /// The volume as the configuration has it, without what the state directory has instead.
    fn as_configured(&self, name: &str) -> Option<VolumeConfig> {
        let definitions = lock(&self.definitions);
        let config = definitions.config.as_ref()?;
        config.replaced.get(name).or_else(|| config.volumes.get(name)).cloned()
    }

    /// Notes that these limits are those of the configuration and the state directory now.
    fn adopt_limits(&self, name: &str, config: &VolumeConfig) {
        if let Some(known) = &mut lock(&self.definitions).config
            && let Some(volume) = known.volumes.get_mut(name)
        {
            known.replaced.entry(name.to_owned()).or_insert_with(|| volume.clone());
            *volume = config.clone();
        }
        self.parameters.configure_volume(name, config);
        if let Some(slot) = lock(&self.slots).get(name).cloned() {
            slot.follow(config);
        }
    }

    /// Removes the file of a volume that neither is served nor could be: the settings of one that the configuration does not
    /// have any more. Returns whether there was one.
    ///
    /// # Errors
    /// If it cannot be removed.
    pub(super) async fn remove_orphan(&self, name: &str) -> Result<bool, Refused> {
        let Some(state) = self.state.clone() else { return Ok(false) };
        let volume = name.to_owned();
        blocking(move || {
            let exists = state.checked_path(&volume).is_ok_and(|path| path.exists());
            Ok(exists && state.remove(&volume).map_err(|error| not_kept(&error))?)
        })
        .await
        .inspect(|_| lock(&self.definitions).note_removed(name))
        .inspect_err(|refused| drop(self.not_removed(name, &refused.body.message)))
    }

    /// Whether volumes are served that only the state directory defines.
    pub(crate) fn has_kept_volumes(&self) -> bool {
        let definitions = lock(&self.definitions);
        let origins = definitions.config.as_ref().map(|config| &config.origins);
        origins.is_some_and(|all| all.values().any(|origin| *origin == VolumeOrigin::State))
    }
}

/// The refusal of a resize. Without a size, a wrong one is the store's.
fn refusal(order: Resize, error: &ResizeError) -> Refused {
    let mut refused = resize_refusal(error);
    if let (None, ResizeError::Sectors { to, unit }) = (order.to, error) {
        refused.body.message = format!("its store has {to} bytes");
        refused.body.remedy = format!(
            "give the store a multiple of {unit} bytes and not 0, or resize the volume with a size"
        );
    }
    refused
}

/// The refusal to keep limits, which are in force nevertheless.
pub(super) fn in_force(mut refused: Refused) -> Refused {
    let why = &refused.body.message;
    refused.body.message =
        format!("the limits are in force until the daemon ends, and cannot be kept: {why}");
    refused
}
