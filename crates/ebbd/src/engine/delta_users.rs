//! The deltas that need a delta which an operation removes, or a base which it changes. The header
//! of a delta names its parent; the name of its file says nothing.
//!
//! # Invariants
//! - A delta is not removed while another one has it as its parent, in the same folder or at the
//!   path of a volume.
//! - A base is not changed while another delta in the folder of the overlay or of the base is above
//!   it. The delta knows it by its content: it may have been moved since. An overlay above an
//!   identical copy counts, unless the copy is still where the overlay was made above it. So does
//!   one whose commit into a base of this size has not ended.
//! - A file that may be a delta but cannot be read counts as a user.
//! - A volume that serves a frozen delta is not removed while another delta rests on it, so that
//!   the operator keeps its file. A file that cannot be read does not prevent the removal, which
//!   leaves the volume's file.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ebb_advice::Advised;
use ebb_api::Refusal;
use ebb_config::{StoreUri, VolumeConfig};
use ebb_control::Refused;
use ebb_image::{DeltaHeader, HEADER_BYTES, HeaderError, Parent};
use ebb_store::sync_folder;

use super::manage::blocking;
use super::new_file::{header_of, new_file, remove_file};
use super::slot::VolumeSlot;
use super::snapshot::SnapshotFiles;
use super::{Engine, lock};
use crate::delta_file;

/// The kind of error for a file that was removed and that a power cut may bring back.
pub(super) const NAME_NOT_STABLE: &str = "name_not_stable";

/// A delta that an operation removes.
#[derive(Clone)]
pub(super) struct RemovedDelta {
    pub(super) path: PathBuf,
    /// The identity in its header.
    pub(super) delta: [u8; 16],
    /// The identities of files that may still have it as their parent: layers of its volume.
    pub(super) layers: Vec<String>,
    /// Files that interrupted operations on the volume may have left: nothing reads them.
    pub(super) leftovers: Vec<PathBuf>,
    /// The paths of the overlays that are defined.
    pub(super) volumes: Vec<PathBuf>,
}

/// A base that an operation changes, so that only the overlay which is committed fits above it.
pub(super) struct ChangedBase {
    /// The name of its volume.
    pub(super) name: String,
    /// The parent in the header of a delta above it, with samples.
    pub(super) parent: Parent,
    /// Whether an earlier commit of the overlay has begun to change it.
    pub(super) is_mixed: bool,
    /// The file of the overlay, and that which takes its place.
    pub(super) own: Vec<PathBuf>,
    /// Its file or device.
    pub(super) file: PathBuf,
}

/// The folder of a file.
fn folder_of(path: &Path) -> &Path {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new("."))
}

fn cannot_look(path: &Path, error: &dyn std::fmt::Display, remedy: &str) -> Refused {
    cannot_see(path, "the snapshot", error, remedy)
}

fn cannot_see(path: &Path, what: &str, error: &dyn std::fmt::Display, remedy: &str) -> Refused {
    let message = format!("cannot see whether {} needs {what}: {error}", path.display());
    Refused::new(Refusal::Conflict, "unknown_users", message, remedy)
}

impl ChangedBase {
    /// Fails if another delta needs the base as it is. Blocks.
    pub(super) fn must_have_no_other(&self) -> Result<(), Refused> {
        let what = format!("the base `{}`", self.name);
        let remedy = "let the daemon read the folder, and try again";
        // A device has no deltas next to it.
        let base = Some(&self.file).filter(|file| file.is_file());
        let folders: BTreeSet<_> =
            self.own.iter().chain(base).map(|path| folder_of(path)).collect();
        for folder in folders {
            let unreadable = |error| cannot_see(folder, &what, &error, remedy);
            for entry in std::fs::read_dir(folder).map_err(unreadable)? {
                let path = folder.join(entry.map_err(unreadable)?.file_name());
                let is_own =
                    |own: &PathBuf| folder_of(own) == folder && own.file_name() == path.file_name();
                if !self.own.iter().any(is_own) {
                    self.must_not_be_below(&path, &what)?;
                }
            }
        }
        Ok(())
    }

    fn must_not_be_below(&self, path: &Path, what: &str) -> Result<(), Refused> {
        let header = || -> io::Result<Option<DeltaHeader>> {
            let Some(file) = open_candidate(path)? else { return Ok(None) };
            read_header(&file)
        };
        let remedy =
            "repair the file or let the daemon read it, or move it away if it is not needed";
        match header().map_err(|error| cannot_see(path, what, &error, remedy))? {
            // Its place does not count: the base may have been moved since.
            Some(header) if header.parent.is(&self.parent) && !self.has_copy(&header.parent) => {
                Err(self.is_below(path, what, &header))
            }
            _ => Ok(()),
        }
    }

    /// Returns true if a copy of this base is where `parent` was, so that the delta can be read
    /// above that.
    fn has_copy(&self, parent: &Parent) -> bool {
        let path = Path::new(&parent.place);
        // A guest may have written the header: it leads to no other folder.
        let mut near = self.own.iter().chain([&self.file]);
        if parent.is_mixed() || !near.any(|near| folder_of(near) == folder_of(path)) {
            return false;
        }
        let found = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file);
        let own = std::fs::metadata(&self.file).ok();
        let number = |found: &std::fs::Metadata| (found.dev(), found.ino());
        found.zip(own).is_some_and(|(found, own)| number(&found) != number(&own))
            && delta_file::plain_parent(path, String::new()).is_ok_and(|found| parent.is(&found))
    }

    /// Returns the refusal because of the overlay at `path` with `header`.
    fn is_below(&self, path: &Path, what: &str, header: &DeltaHeader) -> Refused {
        let parent = &header.parent;
        let above = RemovedDelta::at(path.to_owned(), header.delta).known_user();
        let (path, place) = (path.display(), parent.shown_place());
        let is_named =
            parent.place == self.parent.place || Path::new(&parent.place) == self.file.as_path();
        let (message, remedy) = if parent.is_mixed() {
            let message = format!(
                "{path} may be above {what}, and would be lost: it is an overlay whose commit into \
                 {place} has not ended"
            );
            let remedy = "repeat that commit with `ebbd volume commit`, after adding the file as a volume if it is none; \
                 if it is not needed, remove its volume if it has one, and then the file";
            (message, remedy.to_owned())
        } else {
            let message = match is_named {
                true => format!("{path} is an overlay above {what}, and would be lost"),
                false => format!(
                    "{path} would be lost if it is an overlay above {what}, and not above a copy: \
                     its base was {place}"
                ),
            };
            let remedy = match (self.is_mixed, above) {
                (false, None) => {
                    "flatten it with `ebbd volume flatten`, after adding it as a volume if it is none; if it is a \
                     snapshot, delete it with `ebbd volume delete-snapshot`; if it is not needed, remove its volume \
                     if it has one, and then the file"
                        .to_owned()
                }
                (false, Some(above)) => format!(
                    "{} is above it: flatten that one with `ebbd volume flatten`, after adding it as a volume if it \
                     is none; if neither is needed, remove their volumes, and then both files",
                    above.display()
                ),
                (true, _) => {
                    "move it to another folder, to read it above a backup of the base, or remove it: the commit has \
                     begun, and the base may be a mix of old and new data"
                        .to_owned()
                }
            };
            (message, remedy)
        };
        Refused::new(Refusal::Conflict, "in_use", message, remedy)
    }
}

/// Opens a file that may be a delta. Returns `None` if it cannot be one. Blocks, but not on a FIFO.
fn open_candidate(path: &Path) -> io::Result<Option<File>> {
    let found = match std::fs::metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        // A link to itself is no file.
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => return Ok(None),
        Err(error) => return Err(error),
    };
    let is_small = found.is_file() && found.len() < 2 * HEADER_BYTES as u64;
    if is_small || !(found.is_file() || found.file_type().is_block_device()) {
        return Ok(None);
    }
    match OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some),
    }
}

/// Reads the header of an open file. Returns `None` if it is not a delta.
fn read_header(file: &File) -> io::Result<Option<DeltaHeader>> {
    let mut slots = vec![0; 2 * HEADER_BYTES];
    match file.read_exact_at(&mut slots, 0) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    match DeltaHeader::decode([&slots[..HEADER_BYTES], &slots[HEADER_BYTES..]]) {
        Ok(header) => Ok(Some(header)),
        Err(HeaderError::NotADelta) => Ok(None),
        Err(error) => Err(io::Error::other(Advised(error))),
    }
}

impl RemovedDelta {
    /// A delta of which only its file is known.
    fn at(path: PathBuf, delta: [u8; 16]) -> RemovedDelta {
        let (layers, leftovers, volumes) = (Vec::new(), Vec::new(), Vec::new());
        RemovedDelta { path, delta, layers, leftovers, volumes }
    }

    /// Returns a delta that has this one as its parent, among the files that can be read. Blocks.
    fn known_user(&self) -> Option<PathBuf> {
        let entries = std::fs::read_dir(folder_of(&self.path)).into_iter().flatten().flatten();
        let beside = entries.map(|entry| self.path.with_file_name(entry.file_name()));
        let beside = beside.filter(|path| !self.is_own(path));
        let mut all = beside.chain(self.volumes.iter().cloned());
        all.find(|path| self.is_below(path).unwrap_or(false))
    }

    /// Returns true if a file is the delta itself or a leftover.
    fn is_own(&self, path: &Path) -> bool {
        let is = |other: &PathBuf| other == path;
        is(&self.path) || (self.leftovers.iter().any(is) && !self.volumes.iter().any(is))
    }

    /// Fails if another delta needs this one. Blocks.
    pub(super) fn must_be_unneeded(&self) -> Result<(), Refused> {
        let folder = folder_of(&self.path);
        let remedy = "let the daemon read the folder, and try again";
        let list = std::fs::read_dir(folder);
        for entry in list.map_err(|error| cannot_look(folder, &error, remedy))? {
            let entry = entry.map_err(|error| cannot_look(folder, &error, remedy))?;
            let path = self.path.with_file_name(entry.file_name());
            if !self.is_own(&path) {
                self.must_not_be_above(&path)?;
            }
        }
        self.volumes.iter().try_for_each(|path| self.must_not_be_above(path))
    }

    /// Returns true if the file is a delta that has this one as its parent.
    fn is_below(&self, path: &Path) -> io::Result<bool> {
        let Some(file) = open_candidate(path)? else { return Ok(false) };
        let Some(header) = read_header(&file)? else { return Ok(false) };
        let is_above = header.parent.delta == self.delta && header.delta != self.delta;
        Ok(is_above && !self.layers.contains(&ebb_store::try_identity_of_file(&file)?.key))
    }

    fn must_not_be_above(&self, path: &Path) -> Result<(), Refused> {
        let remedy =
            "repair the file or let the daemon read it, or move it away if it is not needed";
        if !self.is_below(path).map_err(|error| cannot_look(path, &error, remedy))? {
            return Ok(());
        }
        let above = path.display();
        let message = format!("{above} needs {}: it is a delta above it", self.path.display());
        let remedy = format!(
            "if {above} is a snapshot, delete it with `ebbd volume delete-snapshot`; if it is an overlay, flatten it; if it \
             is no longer needed, remove its volume if it has one, and then the file"
        );
        Err(Refused::new(Refusal::Conflict, "in_use", message, remedy))
    }

    /// Removes the file if it is this delta and no other delta needs it. Blocks.
    pub(super) fn remove(mut self) -> Result<(), Refused> {
        // The layers of the volume no longer need it.
        self.layers.clear();
        self.must_be_unneeded()?;
        if header_of(&self.path)?.delta != self.delta {
            let message = format!("{} is no longer the snapshot", self.path.display());
            return Err(Refused::new(
                Refusal::Conflict,
                "moved",
                message,
                "the file was replaced: put it back",
            ));
        }
        remove_file(&self.path)?;
        sync_folder(&self.path).map_err(|error| {
            let path = self.path.display();
            let message = format!("{path} is removed, and its folder cannot be flushed: {error}");
            let remedy = "a power cut may bring the file back: remove it then";
            Refused::new(Refusal::Failed, NAME_NOT_STABLE, message, remedy)
        })
    }
}

/// Returns true if a volume is a further one on the file of a snapshot, without its name.
fn is_alias(volume: &str, path: &Path) -> bool {
    let file = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let snapshot = file.rsplit_once('@').map(|(_, snapshot)| snapshot);
    snapshot.is_some_and(|snapshot| volume.rsplit_once('@').is_none_or(|(_, own)| own != snapshot))
}

/// Returns the overlay and the snapshot that the frozen delta at a path is of: both by their names.
pub(super) fn snapshot_of<'a>(
    slots: &'a [Arc<VolumeSlot>],
    path: &Path,
) -> Option<(&'a str, String)> {
    let (own, snapshot) = path.file_name()?.to_str()?.rsplit_once('@')?;
    let own = StoreUri::File(path.with_file_name(own));
    let is_owner = |slot: &&Arc<VolumeSlot>| {
        slot.wanted().is_some_and(|wanted| !wanted.read_only && wanted.store == own)
    };
    Some((slots.iter().find(is_owner)?.name(), snapshot.to_owned()))
}

/// Returns the refusal to remove the volume of a frozen delta that something rests on.
fn needed(volume: &str, by: &str, path: &Path, remedy: &str) -> Refused {
    let message = format!(
        "volume `{volume}` cannot be removed: {by} needs its file {}, which is a layer below it",
        path.display()
    );
    Refused::new(Refusal::Conflict, "in_use", message, remedy)
}

impl Engine {
    /// Fails if an overlay rests on the frozen delta of a volume that is to be removed: an operator
    /// who then removes the file destroys that overlay.
    pub(super) async fn must_be_no_layer(&self, slot: &VolumeSlot) -> Result<(), Refused> {
        let frozen = slot.wanted().filter(|wanted| wanted.read_only && wanted.base.is_some());
        let Some(config) = frozen else { return Ok(()) };
        let StoreUri::File(path) = &config.store else { return Ok(()) };
        let name = slot.name();
        let other = self.other_volume_on(&[name], &config.store, slot.open_file().as_ref());
        if is_alias(name, path) || other.is_some() {
            return Ok(());
        }
        let own = slot.served();
        let own = own.and_then(|(volume, _)| volume.layers().deltas().into_iter().next());
        let slots: Vec<_> = lock(&self.slots).values().cloned().collect();
        let rests = |other: &&Arc<VolumeSlot>| {
            let (Some(own), Some((volume, _))) = (&own, other.served()) else { return false };
            let deltas = volume.layers().deltas();
            other.name() != name
                && deltas.iter().skip(1).any(|layer| layer.identity.key == own.identity.key)
        };
        let snapshot = snapshot_of(&slots, path);
        let owner = snapshot.as_ref().map(|(overlay, _)| *overlay);
        // Its own overlay first, then those that are written to.
        let rank = |slot: &&Arc<VolumeSlot>| {
            let is_read_only = slot.wanted().is_none_or(|wanted| wanted.read_only);
            (Some(slot.name()) != owner, is_read_only)
        };
        if let Some(above) = slots.iter().filter(rests).min_by_key(rank) {
            let title = above.name();
            let remedy = match (snapshot, rank(&above)) {
                (Some((overlay, snapshot)), _) => {
                    format!(
                        "delete the snapshot: `ebbd volume delete-snapshot {overlay} {snapshot}`"
                    )
                }
                (None, (_, true)) => format!("remove that one first: `ebbd volume remove {title}`"),
                (None, (_, false)) => format!("flatten it first: `ebbd volume flatten {title}`"),
            };
            return Err(needed(name, &format!("`{title}`"), path, &remedy));
        }
        let (file, volumes) = (path.clone(), self.overlay_paths());
        let delta = own.map(|own| own.header.delta);
        let found = blocking(move || {
            let delta = delta.or_else(|| header_of(&file).ok().map(|header| header.delta));
            let Some(delta) = delta else { return Ok(None) };
            let own = file.file_name().and_then(|name| name.to_str()?.rsplit_once('@'));
            let own = own.map_or(file.clone(), |(own, _)| file.with_file_name(own));
            let left = ["merge", "next"].into_iter().filter_map(|what| new_file(&own, what));
            let leftovers = left.collect();
            Ok(RemovedDelta { leftovers, volumes, ..RemovedDelta::at(file, delta) }.known_user())
        });
        let Some(above) = found.await? else { return Ok(()) };
        let is_on_it = |slot: &&Arc<VolumeSlot>| {
            slot.wanted().is_some_and(|wanted| wanted.store == StoreUri::File(above.clone()))
        };
        if let Some(above) = slots.iter().find(is_on_it) {
            let remedy = "see why it is not served: `ebbd status`; then flatten it, or remove it \
                          and its file if it is not needed";
            return Err(needed(name, &format!("`{}`", above.name()), path, remedy));
        }
        let remedy = "add that file as a volume, and flatten it; if it is not needed, remove it; to \
                      keep both files and serve neither, move it to another folder meanwhile";
        Err(needed(name, &above.display().to_string(), path, remedy))
    }

    /// Returns the name of the volume that serves a snapshot. If its overlay was renamed since,
    /// that volume still has the former name of the overlay.
    pub(super) fn title_of(&self, (volume, name): (&str, &str), config: &VolumeConfig) -> String {
        let title = format!("{volume}@{name}");
        let Some(files) = SnapshotFiles::of(config, name) else { return title };
        if self.has_definition(&title) {
            return title;
        }
        let (end, store) = (format!("@{name}"), StoreUri::File(files.frozen));
        let slots: Vec<_> = lock(&self.slots).values().cloned().collect();
        let serves = |slot: &&Arc<VolumeSlot>| {
            let is_on_it = |wanted: VolumeConfig| wanted.read_only && wanted.store == store;
            slot.name().ends_with(&end) && slot.wanted().is_some_and(is_on_it)
        };
        slots.iter().find(serves).map_or(title, |slot| slot.name().to_owned())
    }

    /// The paths of the overlays that are defined.
    pub(super) fn overlay_paths(&self) -> Vec<PathBuf> {
        let definitions = lock(&self.definitions);
        let volumes = definitions.config.as_ref().map(|config| &config.volumes);
        let overlays = volumes.into_iter().flatten().filter(|(_, config)| config.base.is_some());
        let path = |store: &StoreUri| match store {
            StoreUri::File(path) => Some(path.clone()),
            _ => None,
        };
        overlays.filter_map(|(_, config)| path(&config.store)).collect()
    }
}
