//! Deleting a snapshot of an overlay while the overlay is in use.
//!
//! The blocks of the snapshot at PATH@NAME are copied into the layer above it, and the file is
//! removed.
//! - If the layer above is the volume's own delta, the blocks are copied into that delta, and its
//!   header then names the layer below the snapshot.
//! - If the layer above is another snapshot, which is read-only, a new file (`new_file`) gets the
//!   blocks of both, with the identity of the upper one, and takes its name.
//!
//! The volume that serves the snapshot is removed first, also if it still has the former name of an
//! overlay that was renamed. A file is not removed if a further volume is on it; if another delta
//! has it as its parent (`delta_users`); or if it is no layer of the volume and not of its lineage.
//!
//! # What a crash in between leaves
//! - Before the header is written, or the new file has its name: the volume and all snapshots as
//!   they were, and the new file, which the next attempt removes. Blocks that were copied into the
//!   volume's delta stay.
//! - After that: the volume without the snapshot, whose file may still be there. Deleting the
//!   snapshot again removes it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ebb_advice::Advised;
use ebb_api::Refusal;
use ebb_block::{BlockError, BlockStore, Identity};
use ebb_cache::{Delta, DeltaLayer, FillFrom, Layers, MergedPair, NextLayers, SnapshotError};
use ebb_config::{CacheMode, Size, StoreUri, VolumeConfig, VolumeOrigin};
use ebb_control::Refused;
use ebb_image::DeltaHeader;
use ebb_io::Io;
use ebb_store::sync_folder;
use ebb_volume::Volume;

use super::claims::StoreClaim;
use super::delta_users::{NAME_NOT_STABLE, RemovedDelta};
use super::flatten::{AT_ONCE, failed, fill_piece, not_served};
use super::manage::{Removal, blocking, configured, in_use};
use super::new_file::{header_of, new_file, open_regular, remove_file};
use super::open::Opened;
use super::slot::VolumeSlot;
use super::snapshot::{SnapshotFiles, WRITES_WITHIN, check_name};
use super::{Engine, lock};
use crate::operations::{LongOperation, cancelled};
use crate::stores::{Expected, StoreError, StoreTarget, with_cache};

fn not_deleted(title: &str) -> impl Fn(BlockError) -> Refused {
    let what = format!("snapshot `{title}` was not deleted");
    move |error| failed(&what, &error.full_text())
}

/// The names of the snapshots below a volume.
#[derive(Debug, Default)]
struct SnapshotsBelow {
    own: Vec<String>,
    /// With the names of their volumes.
    others: Vec<String>,
}

fn no_snapshot(title: &str, below: &SnapshotsBelow) -> Refused {
    let own = match &below.own[..] {
        [] => "the volume has none".to_owned(),
        names => format!("there are: {}", names.join(", ")),
    };
    let others = match &below.others[..] {
        [] => String::new(),
        names => format!("; below it are snapshots of other volumes: {}", names.join(", ")),
    };
    let message = format!("there is no snapshot `{title}`; {own}{others}");
    Refused::new(Refusal::Unknown, "unknown_snapshot", message, "`ebbd volume show` lists them")
}

/// Returns the error of a deletion that has changed nothing.
fn not_begun(title: &str) -> impl Fn(SnapshotError) -> Refused {
    let what = format!("snapshot `{title}` was not deleted");
    move |error| match error {
        SnapshotError::Store(error) => failed(&what, &error.full_text()),
        error => failed(&what, &Advised(error).to_string()),
    }
}

/// Returns the error of a deletion that has exchanged the header or the file, while the volume
/// still uses the old layers.
fn not_exchanged(title: &str, error: &str) -> Refused {
    let message =
        format!("snapshot `{title}` was merged, and its layers are still in use: {error}");
    let remedy =
        "restart the daemon, or remove the volume and add it again; then delete the snapshot again";
    Refused::new(Refusal::Failed, "not_exchanged", message, remedy)
}

/// Returns the error of a deletion that could not remove the file, which the volume no longer
/// needs.
fn not_removed(title: &str, mut refused: Refused) -> Refused {
    let is_there = match refused.body.error == NAME_NOT_STABLE {
        true => "",
        false => "and its file is still there: ",
    };
    refused.body.message = format!(
        "the volume no longer needs snapshot `{title}`, {is_there}{}",
        refused.body.message
    );
    refused
}

/// The files at some paths.
async fn files_at(paths: Vec<PathBuf>) -> Result<Vec<StoreTarget>, Refused> {
    blocking(move || {
        let of = |path| StoreTarget::of(&StoreUri::File(path)).transpose();
        let files = paths.into_iter().filter_map(of).collect::<Result<Vec<_>, _>>();
        files.map_err(|error| failed("cannot look at the files", &error.full_text()))
    })
    .await
}

/// A volume while it is changed.
struct VolumeInUse<'a> {
    slot: &'a Arc<VolumeSlot>,
    volume: &'a Arc<Volume>,
    config: &'a VolumeConfig,
}

/// A snapshot that is to be deleted.
struct SnapshotToDelete {
    /// The volume that serves it.
    title: String,
    /// The number of its layer, from the top. `None`: only its file is left.
    number: Option<usize>,
    deltas: Vec<DeltaLayer>,
    files: SnapshotFiles,
    /// The identity in the header of its file.
    delta: [u8; 16],
    below: SnapshotsBelow,
}

impl SnapshotToDelete {
    /// The snapshots of the chain, from the newest on.
    fn names(&self) -> Vec<String> {
        let parents = self.deltas.iter().filter_map(|delta| delta.header.parent.snapshot());
        parents.map(str::to_owned).collect()
    }

    /// The snapshots above it.
    fn newer(&self) -> Vec<String> {
        let mut names = self.names();
        names.truncate(self.number.unwrap_or(1) - 1);
        names
    }

    /// The file of the snapshot above it, and the layer that the file should be, if there is one.
    fn above(&self, config: &VolumeConfig) -> Option<(PathBuf, &DeltaLayer)> {
        let name = self.newer().pop()?;
        let path = SnapshotFiles::of(config, &name)?.frozen;
        Some((path, self.deltas.get(self.number?.checked_sub(1)?)?))
    }

    /// The two layers that the file with the key `merged` replaces: the snapshot, and the one above
    /// it.
    fn pair(&self, merged: String) -> Option<MergedPair> {
        let number = self.number?;
        let key_of = |number: usize| Some(self.deltas.get(number)?.identity.key.clone());
        Some(MergedPair { upper: key_of(number.checked_sub(1)?)?, lower: key_of(number)?, merged })
    }

    fn merge_path(&self) -> PathBuf {
        new_file(&self.files.own, "merge").unwrap_or_default()
    }
}

/// The identity in the header of a file that is not below the volume: an interrupted attempt has
/// left it, or the volume was flattened. Blocks.
///
/// # Errors
/// If the file is not known to be a snapshot of this volume: a volume that had the same path may
/// need it, wherever its files are now.
fn leftover_delta(volume: &str, lineage: [u8; 16], path: &Path) -> Result<[u8; 16], Refused> {
    let header = header_of(path)?;
    if lineage != [0; 16] && header.lineage == lineage {
        return Ok(header.delta);
    }
    let message = format!("{} is not known to be a snapshot of volume `{volume}`", path.display());
    let remedy =
        "its volume may have been moved away: if nothing needs the file, remove it yourself";
    Err(Refused::new(Refusal::Conflict, "foreign", message, remedy))
}

/// The identity of the file at a path, if there is one.
async fn identity_at(path: PathBuf) -> Result<Option<Identity>, Refused> {
    blocking(move || {
        let file = match open_regular(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                return Err(failed(&format!("cannot open {}", path.display()), &error.to_string()));
            }
        };
        let found = ebb_store::try_identity_of_file(&file);
        let found = found.map_err(|error| {
            failed(&format!("cannot look at {}", path.display()), &error.to_string())
        })?;
        Ok(Some(found))
    })
    .await
}

fn moved(path: &Path) -> Refused {
    let message = format!("{} is not the file that the volume reads", path.display());
    let remedy = "the file was moved or replaced: put it back";
    Refused::new(Refusal::Conflict, "moved", message, remedy)
}

/// Looks for a snapshot among the layers of a volume, and for its file.
async fn find_snapshot(
    volume: &Arc<Volume>,
    config: &VolumeConfig,
    (name, title): (&str, &str),
    below: SnapshotsBelow,
) -> Result<SnapshotToDelete, Refused> {
    let files = SnapshotFiles::of(config, name).filter(|_| !config.read_only);
    let deltas = volume.layers().deltas();
    let mut snapshot = match files {
        Some(files) => SnapshotToDelete {
            title: title.to_owned(),
            number: None,
            deltas,
            files,
            delta: [0; 16],
            below,
        },
        None => return Err(no_snapshot(title, &below)),
    };
    let path = snapshot.files.frozen.clone();
    let identity = identity_at(path).await?;
    let Some(identity) = identity else { return Err(no_snapshot(title, &snapshot.below)) };
    let is_it = |delta: &DeltaLayer| delta.identity.key == identity.key;
    snapshot.number = snapshot.deltas.iter().position(is_it);
    if snapshot.number.is_none() && snapshot.names().iter().any(|found| found == name) {
        return Err(moved(&snapshot.files.frozen));
    }
    if snapshot.number == Some(0) {
        // A snapshot that was interrupted: it is the volume's own file.
        return Err(no_snapshot(title, &snapshot.below));
    }
    snapshot.delta = match snapshot.number.and_then(|number| snapshot.deltas.get(number)) {
        Some(layer) => layer.header.delta,
        None => {
            let name = volume.name().to_string();
            let lineage = snapshot.deltas.first().map_or([0; 16], |own| own.header.lineage);
            let path = snapshot.files.frozen.clone();
            blocking(move || leftover_delta(&name, lineage, &path)).await?
        }
    };
    Ok(snapshot)
}

impl Engine {
    /// Deletes the snapshot `name` of a volume, and its file.
    ///
    /// # Errors
    /// If there is none, it is in use, a store fails, or the operation was cancelled.
    pub(crate) async fn delete_snapshot(
        self: &Arc<Self>,
        io: &Io,
        (volume_name, name): (&str, &str),
        operation: &LongOperation,
    ) -> Result<(), Refused> {
        check_name(name)?;
        let _names = self.reserve(&[volume_name])?;
        let slot = lock(&self.slots).get(volume_name).cloned();
        let slot = slot.ok_or_else(|| self.unknown(volume_name))?;
        let _changing = self.unless_stopped(slot.changing.lock()).await?;
        let (volume, config) = slot.served().ok_or_else(|| not_served(volume_name))?;
        let title = self.title_of((volume_name, name), &config);
        self.must_be_unused(&title)?;
        let below = self.snapshots_below(&volume, &config);
        let snapshot = find_snapshot(&volume, &config, (name, &title), below).await?;
        self.must_be_on_no_other(volume_name, &snapshot).await?;
        let removed = self.removed_delta(&snapshot);
        blocking(move || removed.must_be_unneeded()).await?;
        if let Some(number) = snapshot.number {
            let (files, open) = (snapshot.files.clone(), slot.open_file());
            blocking(move || files.must_be_at_path(open.as_ref(), "delete the snapshot")).await?;
            // Boxed, as elsewhere here: these futures are large, and the stacks of workers small.
            Box::pin(self.flush_before(io, &volume, operation, not_deleted(&title))).await?;
            operation.step("copying what the snapshot holds");
            operation.allow_cancel();
            let on = VolumeInUse { slot: &slot, volume: &volume, config: &config };
            match number {
                1 => Box::pin(self.merge_into_own(io, &on, &snapshot, operation)).await?,
                _ => Box::pin(self.merge_into_above(io, &on, &snapshot, operation)).await?,
            }
        } else if self.has_definition(&title) {
            let removal = Removal::SnapshotDeleted;
            Box::pin(self.remove_for(io, &title, removal, operation)).await?;
        }
        let removed = self.removed_delta(&snapshot);
        blocking(move || removed.remove()).await.map_err(|refused| not_removed(&title, refused))?;
        let (id, by) = (operation.id(), operation.by());
        tracing::info!(volume = volume_name, snapshot = name, operation = id, by, "deleted");
        for newer in snapshot.newer() {
            let title = self.title_of((volume_name, &newer), &config);
            Box::pin(self.reopen_unused(io, &title)).await?;
        }
        Ok(())
    }

    fn removed_delta(&self, snapshot: &SnapshotToDelete) -> RemovedDelta {
        let layers = snapshot.deltas.iter().map(|layer| layer.identity.key.clone());
        let leftover = |what| new_file(&snapshot.files.own, what);
        RemovedDelta {
            path: snapshot.files.frozen.clone(),
            delta: snapshot.delta,
            layers: layers.collect(),
            leftovers: ["merge", "next"].into_iter().filter_map(leftover).collect(),
            volumes: self.overlay_paths(),
        }
    }

    /// Fails if the snapshot is in use.
    fn must_be_unused(&self, title: &str) -> Result<(), Refused> {
        self.must_be_no_base(title, "deleted")?;
        if let Some((_, VolumeOrigin::Configuration(place))) = self.definition(title) {
            return Err(configured(title, &place, "remove"));
        }
        match self.server.connections(title) + self.guests.disks_of(title) {
            0 => Ok(()),
            users => Err(in_use("snapshot", title, users)),
        }
    }

    /// Fails if a volume of another name is on the file of the snapshot.
    async fn must_be_on_no_other(
        &self,
        volume: &str,
        snapshot: &SnapshotToDelete,
    ) -> Result<(), Refused> {
        let names = [volume, snapshot.title.as_str()];
        let remedy = "remove that volume first, and those above it: `ebbd volume show` says the base of each";
        self.must_be_no_volume(&names, &snapshot.files.frozen, remedy).await
    }

    /// The names of the snapshots below a volume: its own have their files next to its own file.
    fn snapshots_below(&self, volume: &Volume, config: &VolumeConfig) -> SnapshotsBelow {
        let deltas = volume.layers().deltas();
        let slots: Vec<_> = lock(&self.slots).values().cloned().collect();
        let has = |config: &VolumeConfig, name: &str, place: &str| {
            let files = SnapshotFiles::of(config, name);
            files.is_some_and(|files| files.frozen == Path::new(place))
        };
        let mut below = SnapshotsBelow::default();
        for (above, layer) in deltas.iter().zip(deltas.iter().skip(1)) {
            let (Some(name), place) = (above.header.parent.snapshot(), &layer.place) else {
                continue;
            };
            if has(config, name, place) {
                below.own.push(name.to_owned());
                continue;
            }
            let owner = slots.iter().find(|slot| {
                slot.wanted().is_some_and(|config| !config.read_only && has(&config, name, place))
            });
            below.others.push(match owner {
                Some(owner) => format!("`{}@{name}`", owner.name()),
                None => place.clone(),
            });
        }
        below
    }

    /// Returns the path of the snapshot above, if the file there is the one that the volume reads:
    /// the merged file has the same blocks.
    async fn file_above(
        &self,
        on: &VolumeInUse<'_>,
        snapshot: &SnapshotToDelete,
    ) -> Result<PathBuf, Refused> {
        let above = snapshot.above(on.config);
        let (path, layer) = above.ok_or_else(|| no_snapshot(&snapshot.title, &snapshot.below))?;
        let found = identity_at(path.clone()).await?;
        if found.is_none_or(|found| found.key != layer.identity.key) {
            return Err(moved(&path));
        }
        Ok(path)
    }

    /// Ends the time in which the operation can be cancelled, and removes the volume that serves
    /// the snapshot.
    async fn withdraw_snapshot(
        self: &Arc<Self>,
        io: &Io,
        (volume, snapshot): (&str, &SnapshotToDelete),
        operation: &LongOperation,
    ) -> Result<(), Refused> {
        let title = snapshot.title.as_str();
        if !operation.commit() {
            return Err(cancelled());
        }
        self.must_be_on_no_other(volume, snapshot).await?;
        self.must_be_unused(title)?;
        let removed = self.removed_delta(snapshot);
        blocking(move || removed.must_be_unneeded()).await?;
        if self.has_definition(title) {
            let removal = Removal::SnapshotDeleted;
            Box::pin(self.remove_for(io, title, removal, operation)).await?;
        }
        operation.step("taking the snapshot away");
        Ok(())
    }

    /// Returns true if a volume is defined, or was removed and its state file was not.
    pub(super) fn has_definition(&self, title: &str) -> bool {
        self.definition(title).is_some() || lock(&self.definitions).broken(title).is_some()
    }

    /// Serves a snapshot again that was withdrawn and was not deleted.
    async fn restore_snapshot(
        self: &Arc<Self>,
        io: &Io,
        title: &str,
        served: Option<(VolumeConfig, VolumeOrigin)>,
        operation: &LongOperation,
    ) {
        let Some((config, origin)) = served.filter(|_| self.definition(title).is_none()) else {
            return;
        };
        // A state file that could not be removed has the same content.
        let has_file = lock(&self.definitions).unremoved_since(title).is_some();
        let has_file = has_file && self.has_state_file(title).await;
        if has_file {
            lock(&self.definitions).note_removed(title);
        }
        let keep = origin == VolumeOrigin::State && !has_file;
        let added = async {
            let _names = self.reserve(&[title])?;
            Box::pin(self.add_reserved(io, title, (config, keep), operation)).await
        };
        match added.await {
            Ok(()) if has_file => lock(&self.definitions).set_origin(title, origin),
            Ok(()) => {}
            Err(refused) => {
                let error = refused.body.message;
                tracing::warn!(volume = title, error, "cannot serve the snapshot again");
                if has_file {
                    self.not_removed(title, &error);
                }
            }
        }
    }

    /// Returns true if the state directory has a file of this volume.
    async fn has_state_file(&self, title: &str) -> bool {
        let Some(state) = self.state.clone() else { return false };
        let title = title.to_owned();
        let look = move || Ok(state.checked_path(&title).is_ok_and(|path| path.exists()));
        blocking(look).await.unwrap_or(false)
    }

    /// Copies the snapshot below the volume's own delta into that delta.
    async fn merge_into_own(
        self: &Arc<Self>,
        io: &Io,
        on: &VolumeInUse<'_>,
        snapshot: &SnapshotToDelete,
        operation: &LongOperation,
    ) -> Result<(), Refused> {
        let (volume, title) = (on.volume, snapshot.title.as_str());
        let fill = async |at| fill_piece(io, volume, at, FillFrom::Next).await;
        let copied = Box::pin(self.copy_all(io, volume.size(), operation, fill)).await?;
        copied.map_err(not_deleted(title))?;
        // A full store fails here, before the snapshot is withdrawn.
        Box::pin(self.flush_before(io, volume, operation, not_deleted(title))).await?;
        let prepare = Box::pin(volume.layers().prepare_removal(io));
        let prepared = volume.exchange_layers(io, prepare).await;
        prepared.map_err(not_begun(title))?;
        let served = self.definition(title);
        let files = files_at(vec![snapshot.files.frozen.clone()]).await?;
        let withdraw = self.withdraw_snapshot(io, (on.slot.name(), snapshot), operation);
        if let Err(refused) = Box::pin(withdraw).await {
            self.restore_snapshot(io, title, served, operation).await;
            return Err(refused);
        }
        self.note_next_layers(volume, NextLayers::NextRemoved);
        let remove = Box::pin(volume.layers().remove_next(io, on.slot.name(), WRITES_WITHIN));
        let removed = volume.exchange_layers(io, remove).await;
        match removed {
            Ok(()) => {}
            // The header is unchanged.
            Err(
                error @ (SnapshotError::Store(_)
                | SnapshotError::NoOverlay
                | SnapshotError::NoLayer),
            ) => {
                self.restore_snapshot(io, title, served, operation).await;
                return Err(not_begun(title)(error));
            }
            Err(error) => return Err(not_exchanged(title, &Advised(error).to_string())),
        }
        self.guests.note_backing(volume);
        on.slot.release_bases(|file| files.contains(file));
        Ok(())
    }

    /// Copies the snapshot and the one above it into a new file, which takes the place of both.
    async fn merge_into_above(
        self: &Arc<Self>,
        io: &Io,
        on: &VolumeInUse<'_>,
        snapshot: &SnapshotToDelete,
        operation: &LongOperation,
    ) -> Result<(), Refused> {
        let title = snapshot.title.as_str();
        self.file_above(on, snapshot).await?;
        let served = self.definition(title);
        let exchanged = Box::pin(self.merge_beside(io, on, snapshot, operation)).await;
        let ((merged, claim), files) = match exchanged {
            Ok(exchanged) => exchanged,
            Err(refused) => {
                let path = snapshot.merge_path();
                self.restore_snapshot(io, title, served, operation).await;
                // The next attempt removes a file that stays.
                if let Err(left) = blocking(move || remove_file(&path)).await {
                    let error = left.body.message;
                    tracing::warn!(snapshot = title, error, "cannot remove the merged file");
                }
                return Err(refused);
            }
        };
        let folder = snapshot.files.frozen.clone();
        blocking(move || Ok(sync_folder(&folder)))
            .await?
            .map_err(|error| not_exchanged(title, &format!("cannot sync the folder: {error}")))?;
        let (volume, number) = (on.volume, snapshot.number.unwrap_or(1) - 1);
        let names = (on.slot.name(), &*self.bases);
        let replace =
            Box::pin(volume.layers().replace_pair(io, names, number, &merged, WRITES_WITHIN));
        let replaced = volume.exchange_layers(io, replace).await;
        replaced.map_err(|error| not_exchanged(title, &Advised(error).to_string()))?;
        self.guests.note_backing(volume);
        on.slot.release_bases(|file| files.contains(file));
        if let Some(claim) = claim {
            claim.freeze();
            on.slot.add_base(claim);
        }
        // No other process could open it otherwise.
        let shared = merged.top().store().share_lock();
        shared.map_err(|error| failed("cannot share the lock", &error.to_string()))
    }

    /// Makes the merged file and gives it the name of the snapshot above. Returns the merged layers
    /// with their claim, and the files that they replace.
    async fn merge_beside(
        self: &Arc<Self>,
        io: &Io,
        on: &VolumeInUse<'_>,
        snapshot: &SnapshotToDelete,
        operation: &LongOperation,
    ) -> Result<((Layers, Option<StoreClaim>), Vec<StoreTarget>), Refused> {
        let merged = Box::pin(self.merge(io, on, snapshot, operation)).await?;
        let above = self.file_above(on, snapshot).await?;
        let files = files_at(vec![snapshot.files.frozen.clone(), above]).await?;
        let withdraw = self.withdraw_snapshot(io, (on.slot.name(), snapshot), operation);
        Box::pin(withdraw).await?;
        let above = self.file_above(on, snapshot).await?;
        let merge_path = snapshot.merge_path();
        let number = snapshot.number.unwrap_or(1) - 1;
        let top = merged.0.top();
        let shared = snapshot.pair(top.identity().key);
        let shared = shared.map(|pair| self.note_next_merge(on.volume, pair)).transpose()?;
        self.note_next_layers(on.volume, NextLayers::PairReplaced { number, merged: &top });
        let path = above.clone();
        blocking(move || {
            let renamed = std::fs::rename(&merge_path, &path);
            renamed.map_err(|error| failed("cannot rename the merged file", &error.to_string()))
        })
        .await?;
        top.store().note_renamed(&above);
        shared.iter().for_each(|shared| self.note_merged(shared));
        Ok((merged, files))
    }

    /// Makes the new file, and copies both snapshots into it.
    async fn merge(
        self: &Arc<Self>,
        io: &Io,
        on: &VolumeInUse<'_>,
        snapshot: &SnapshotToDelete,
        operation: &LongOperation,
    ) -> Result<(Layers, Option<StoreClaim>), Refused> {
        let (title, number) = (snapshot.title.as_str(), snapshot.number.unwrap_or_default());
        let names = || no_snapshot(title, &snapshot.below);
        let above = number.checked_sub(1).and_then(|above| snapshot.deltas.get(above));
        let (above, own) = above.zip(snapshot.deltas.get(number)).ok_or_else(names)?;
        let path = snapshot.merge_path();
        self.remove_leftover(&path).await?;
        let next = VolumeConfig {
            store: StoreUri::File(path),
            create: true,
            size: Some(Size::new(above.header.layout.store_size())),
            cache: CacheMode::Writethrough,
            ..on.config.clone()
        };
        let error_of =
            |error: StoreError| failed("cannot make the merged file", &error.full_text());
        let name = on.slot.name();
        let opened = Box::pin(self.open_store(io, name, &next, Expected::None)).await;
        let Opened { store, claim, .. } = opened.map_err(error_of)?;
        let top = with_cache(name, &next, store, &self.cache).map_err(error_of)?;
        let (parent, shown) = (own.header.parent.clone(), own.header.shown);
        let shown = shown.min(above.header.shown);
        let header = DeltaHeader { parent, shown, ..above.header.clone() };
        let delta = Box::pin(Delta::create_as(io, &top, header)).await;
        let delta = Arc::new(delta.map_err(|error| error_of(error.into()))?);
        let merged = Layers::overlay(name, top, Vec::new(), vec![delta], false);
        let merged = merged.map_err(|error| error_of(error.into()))?;
        let pair = on.volume.layers().pair(number - 1);
        let pair = pair.map_err(not_begun(title))?;
        let volume = on.volume;
        let copy = async |at| {
            let copied = Box::pin(pair.copy_held(io, (at, AT_ONCE), (&merged, false)));
            volume.with_layers(io, copied).await.flatten()
        };
        // The volume itself may have another size by now.
        let copied = Box::pin(self.copy_all(io, pair.size(), operation, copy)).await?;
        copied.map_err(not_deleted(title))?;
        merged.flush(io).await.map_err(not_deleted(title))?;
        Ok((merged, claim))
    }

    /// Closes and opens a snapshot that no client uses, so that it does not hold a file that was
    /// replaced.
    async fn reopen_unused(self: &Arc<Self>, io: &Io, title: &str) -> Result<(), Refused> {
        let Ok(_name) = self.reserve(&[title]) else { return Ok(()) };
        let Some(slot) = lock(&self.slots).get(title).cloned() else { return Ok(()) };
        let _changing = self.unless_stopped(slot.changing.lock()).await?;
        let users = self.server.connections(title) + self.guests.disks_of(title);
        if let Some((volume, _)) = slot.served().filter(|_| users == 0) {
            self.withdraw(io, &slot, &volume).await?;
            drop(volume);
            slot.forget_file();
            self.bring_up(io, &slot).await?;
        }
        Ok(())
    }
}
