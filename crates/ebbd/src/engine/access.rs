//! Which clients may open a volume (`allow`): set for the registry of all exports, and enforced for connected clients.

use std::collections::BTreeMap;
use std::sync::Arc;

use ebb_access::AccessList;
use ebb_api::Refusal;
use ebb_config::{Config, NO_BASE, VolumeConfig, VolumeOrigin};
use ebb_control::Refused;
use ebb_io::Io;
use ebb_volume::RESIZE_LIMIT;

use super::flatten::is_flattened;
use super::manage::configured;
use super::slot::VolumeSlot;
use super::{Engine, lock};
use crate::operations::LongOperation;

/// A volume that a reload leaves as it is, with its configuration and the reason.
pub(super) struct HeldBack {
    name: String,
    volume: VolumeConfig,
    reason: String,
    /// The new configuration does not have it.
    left_out: bool,
}

/// The volumes that a configuration leaves out and that stay, each with the reason.
pub(super) fn left_out(held: &[HeldBack]) -> BTreeMap<String, String> {
    let gone = held.iter().filter(|one| one.left_out);
    gone.map(|one| (one.name.clone(), one.reason.clone())).collect()
}

/// Returns true if `name` is a volume of `old` that a reload to `new` keeps.
fn stays(name: &str, old: &Config, new: &Config) -> bool {
    new.volumes.contains_key(name)
        || new.broken.contains_key(name)
        || old.origins.get(name) == Some(&VolumeOrigin::RunTime)
}

impl HeldBack {
    /// Leaves a volume in `new` as it is in `old`.
    fn hold(name: &str, (old, new): (&Config, &mut Config), reason: String) -> Option<HeldBack> {
        let volume = old.volumes.get(name)?.clone();
        tracing::error!(
            volume = name,
            "not changed, and served as before, until the next reload: {reason}"
        );
        let left_out = new.volumes.insert(name.to_owned(), volume.clone()).is_none();
        if let Some(origin) = old.origins.get(name) {
            new.origins.entry(name.to_owned()).or_insert_with(|| origin.clone());
        }
        Some(HeldBack { name: name.to_owned(), volume, reason, left_out })
    }
}

/// What lets a base go that the configuration leaves out: of the overlay `name` above it, which is
/// flattened or not.
fn remedy_of_base(name: &str, (config, is_flattened): (&Config, bool)) -> String {
    match (config.volumes.get(name), config.origins.get(name)) {
        (Some(volume), Some(VolumeOrigin::Configuration(place))) if is_flattened => {
            let made = if volume.create { ", without `create` and `size`" } else { "" };
            format!("that one was flattened: set `base = \"{NO_BASE}\"` for it at {place}{made}")
        }
        (Some(volume), _) if volume.read_only => "remove that one first".to_owned(),
        _ => "remove or flatten that one first".to_owned(),
    }
}

/// Leaves the bases in `new` that only `old` has: their overlays could not be opened again.
fn hold_bases(
    (old, new): (&Config, &mut Config),
    is_flattened: impl Fn(&str) -> bool,
) -> Vec<HeldBack> {
    let mut held = Vec::new();
    let mut above: Vec<String> = new.volumes.keys().cloned().collect();
    while let Some(name) = above.pop() {
        let base = new.volumes.get(&name).and_then(|volume| volume.base.clone());
        let Some(base) = base.filter(|base| !new.volumes.contains_key(base)) else { continue };
        let remedy = remedy_of_base(&name, (new, is_flattened(&name)));
        let reason = format!("it is the base of volume {name}: {remedy}");
        held.extend(HeldBack::hold(&base, (old, new), reason));
        // It may have a base itself.
        above.push(base);
    }
    held
}

/// A list that a snapshot had by its volume and was given as its own.
#[derive(Debug)]
pub(super) struct PinnedList {
    snapshot: Arc<str>,
    list: AccessList,
}

/// Reports that a snapshot keeps a list that it was given.
pub(super) fn warn_unpinned(pinned: &PinnedList, refused: Refused) {
    let (volume, error) = (&*pinned.snapshot, refused.body.message);
    tracing::error!(
        volume,
        error,
        "a snapshot does not follow the list of its volume: set its clients with `ebbd volume allow`"
    );
}

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
    /// If one of them cannot be kept: then the volume has to stay, and all follow it as before.
    pub(super) async fn pin_followers(
        self: &Arc<Self>,
        io: &Io,
        name: &str,
    ) -> Result<Vec<PinnedList>, Refused> {
        let mut pinned = Vec::new();
        for (snapshot, list) in self.volumes.followers(name) {
            if let Err(refused) = self.pin(io, name, (&snapshot, list.clone())).await {
                self.unpin(io, pinned).await;
                return Err(refused);
            }
            pinned.push(PinnedList { snapshot, list });
        }
        Ok(pinned)
    }

    /// Lets snapshots follow the list of their volume again, which keeps its name. One that was
    /// given another list meanwhile keeps that.
    pub(super) async fn unpin(self: &Arc<Self>, io: &Io, pinned: Vec<PinnedList>) {
        for pinned in pinned {
            let unpinned = match self.reserve_when_free(io, &pinned.snapshot, RESIZE_LIMIT).await {
                Ok(_names) => self.unpin_reserved(&pinned).await,
                Err(refused) => Err(refused),
            };
            if let Err(refused) = unpinned {
                warn_unpinned(&pinned, refused);
            }
        }
    }

    /// As [`Engine::unpin`], with the snapshot's name reserved.
    pub(super) async fn unpin_reserved(
        self: &Arc<Self>,
        pinned: &PinnedList,
    ) -> Result<(), Refused> {
        let own = self.definition(&pinned.snapshot).and_then(|(config, _)| config.allow);
        if own.as_ref() != Some(&pinned.list) {
            return Ok(());
        }
        self.set_kept_list(&pinned.snapshot, None).await
    }

    async fn pin(
        self: &Arc<Self>,
        io: &Io,
        name: &str,
        (snapshot, list): (&str, AccessList),
    ) -> Result<(), Refused> {
        let kept = self.keep_allowed(io, (snapshot, Some(list))).await;
        kept.map_err(|refused| {
            let message = format!(
                "the clients that may open {snapshot}, which has the list of {name}, cannot be kept: {}",
                refused.body.message
            );
            Refused::new(Refusal::Conflict, "not_kept", message, refused.body.remedy)
        })
    }

    /// As [`Engine::pin_followers`], of the volumes whose names mean another store by `new`, or
    /// none. Returns why that has failed for some.
    pub(super) async fn pin_for_reload(
        self: &Arc<Self>,
        io: &Io,
        new: &mut Config,
    ) -> BTreeMap<String, String> {
        let mut failed = BTreeMap::new();
        let Some(old) = lock(&self.definitions).config.clone() else { return failed };
        for name in self.leaving(&old, new) {
            for (snapshot, list) in self.unpinned(&name, &old, new) {
                let pinned = Box::pin(self.pin(io, &name, (&snapshot, list.clone()))).await;
                if let Err(refused) = pinned {
                    failed.insert(name, refused.to_string());
                    break;
                }
                // It was read before.
                if let Some(volume) = new.volumes.get_mut(&*snapshot) {
                    volume.allow.get_or_insert(list);
                }
            }
        }
        failed
    }

    /// Leaves the volumes as they are in `old` whose snapshots would be open to others by `new`,
    /// and the bases of overlays that it keeps; `failed` says why lists of snapshots are not kept.
    pub(super) fn hold_back(
        &self,
        old: &Config,
        new: &mut Config,
        failed: &BTreeMap<String, String>,
    ) -> Vec<HeldBack> {
        let mut held = Vec::new();
        for name in self.leaving(old, new) {
            let unpinned = self.unpinned(&name, old, new);
            let Some((snapshot, _)) = unpinned.first() else { continue };
            let late =
                || format!("{snapshot}, which has its list, was made meanwhile: reload again");
            let reason = failed.get(&name).cloned().unwrap_or_else(late);
            held.extend(HeldBack::hold(&name, (old, new), reason));
        }
        let slots: BTreeMap<_, _> = lock(&self.slots).clone();
        held.extend(hold_bases((old, new), |name| {
            let served = slots.get(name).and_then(|slot| slot.served());
            served.is_some_and(|(volume, _)| is_flattened(&volume))
        }));
        held
    }

    /// Notes why volumes were left as they are.
    pub(super) fn note_held_back(&self, held: Vec<HeldBack>) {
        let slots = lock(&self.slots);
        for HeldBack { name, volume, reason, left_out: _ } in held {
            if let Some(slot) = slots.get(&name) {
                slot.want_instead(&volume, volume.clone(), &reason);
            }
        }
    }

    /// The volumes whose names mean another store by `new`, or none.
    fn leaving(&self, old: &Config, new: &Config) -> Vec<String> {
        let slots = lock(&self.slots);
        let leaves = |name: &str, slot: &VolumeSlot| {
            slot.wanted().is_some_and(|wanted| match new.volumes.get(name) {
                Some(volume) => volume.store != wanted.store,
                None => !stays(name, old, new),
            })
        };
        let leaving = slots.iter().filter(|(name, slot)| leaves(name, slot));
        leaving.map(|(name, _)| name.clone()).collect()
    }

    /// The snapshots that have the list of a volume, and that a reload to `new` keeps. Of those
    /// that the configuration file defines it says who may open them.
    fn unpinned(&self, name: &str, old: &Config, new: &Config) -> Vec<(Arc<str>, AccessList)> {
        let mut followers = self.volumes.followers(name);
        followers.retain(|(snapshot, _)| {
            let in_file =
                matches!(new.origins.get(&**snapshot), Some(VolumeOrigin::Configuration(_)));
            !in_file && stays(snapshot, old, new)
        });
        followers
    }

    /// The list of its own of a new snapshot of a volume that is served as `config`: none, so that
    /// it follows the volume, unless another store is about to have the name.
    pub(super) fn list_of_snapshot(
        &self,
        slot: &VolumeSlot,
        config: &VolumeConfig,
    ) -> Option<AccessList> {
        let wanted = slot.wanted();
        let goes = wanted.is_none_or(|wanted| wanted.store != config.store);
        goes.then(|| self.volumes.list_of_served(slot.name())).flatten()
    }

    /// Gives a snapshot that gets a name of its own, away from its volume, the list that it has had
    /// by its volume; returns that. To be called with its name reserved.
    ///
    /// # Errors
    /// If it cannot be kept.
    pub(super) async fn pin_list(
        self: &Arc<Self>,
        (from, to): (&str, &str),
        config: &mut VolumeConfig,
    ) -> Result<Option<PinnedList>, Refused> {
        let volume_of = |name: &str| name.rsplit_once('@').map(|(volume, _)| volume.to_owned());
        if config.allow.is_some() || volume_of(from) == volume_of(to) {
            return Ok(None);
        }
        let Some(list) = self.volumes.list_of(from) else { return Ok(None) };
        self.set_kept_list(from, Some(list.clone())).await?;
        config.allow = Some(list.clone());
        Ok(Some(PinnedList { snapshot: from.into(), list }))
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

    /// The clients that may open a volume, and the volume whose list that is, if it is another one.
    pub(crate) fn allowed(&self, name: &str) -> (Option<AccessList>, Option<String>) {
        let Some((list, holder)) = self.volumes.list_and_holder(name) else { return (None, None) };
        (Some(list), Some(holder).filter(|holder| holder != name))
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

    fn unreadable(&self, name: &str) -> Option<Refused> {
        let definitions = lock(&self.definitions);
        let reason = definitions.broken(name)?;
        let message = format!("its file in the state directory cannot be used: {reason}");
        let remedy = definitions.remedy_of_broken(name);
        Some(Refused::new(Refusal::Conflict, "state", message, remedy))
    }

    async fn set_kept_list(
        self: &Arc<Self>,
        name: &str,
        allowed: Option<AccessList>,
    ) -> Result<(), Refused> {
        let Some((mut config, origin)) = self.definition(name) else {
            return Err(self.unreadable(name).unwrap_or_else(|| self.unknown(name)));
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
