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

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ebb_advice::Advised;
use ebb_api::Refusal;
use ebb_config::StoreUri;
use ebb_control::Refused;
use ebb_image::{DeltaHeader, HEADER_BYTES, HeaderError, Parent};
use ebb_store::sync_folder;

use super::new_file::{header_of, remove_file};
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
        let parent = || -> io::Result<Option<Parent>> {
            let Some(file) = open_candidate(path)? else { return Ok(None) };
            Ok(read_header(&file)?.map(|header| header.parent))
        };
        let remedy =
            "repair the file or let the daemon read it, or move it away if it is not needed";
        match parent().map_err(|error| cannot_see(path, what, &error, remedy))? {
            // Its place does not count: the base may have been moved since.
            Some(parent) if parent.is(&self.parent) && !self.has_copy(&parent) => {
                Err(self.is_below(path, what, &parent))
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

    /// Returns the refusal because of the overlay at `path`, which has `parent` in its header.
    fn is_below(&self, path: &Path, what: &str, parent: &Parent) -> Refused {
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
            (message, remedy)
        } else {
            let message = match is_named {
                true => format!("{path} is an overlay above {what}, and would be lost"),
                false => format!(
                    "{path} would be lost if it is an overlay above {what}, and not above a copy: \
                     its base was {place}"
                ),
            };
            let remedy = match self.is_mixed {
                false => {
                    "flatten it with `ebbd volume flatten`, after adding it as a volume if it is none; if it is a \
                     snapshot, delete it with `ebbd volume delete-snapshot`; if it is not needed, remove its volume \
                     if it has one, and then the file"
                }
                true => {
                    "move it to another folder, to read it above a backup of the base, or remove it: the commit has \
                     begun, and the base may be a mix of old and new data"
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
    /// Fails if another delta needs this one. Blocks.
    pub(super) fn must_be_unneeded(&self) -> Result<(), Refused> {
        let folder = folder_of(&self.path);
        let remedy = "let the daemon read the folder, and try again";
        let list = std::fs::read_dir(folder);
        for entry in list.map_err(|error| cannot_look(folder, &error, remedy))? {
            let entry = entry.map_err(|error| cannot_look(folder, &error, remedy))?;
            let path = self.path.with_file_name(entry.file_name());
            if path == self.path
                || (self.leftovers.contains(&path) && !self.volumes.contains(&path))
            {
                continue;
            }
            self.must_not_be_above(&path)?;
        }
        self.volumes.iter().try_for_each(|path| self.must_not_be_above(path))
    }

    fn must_not_be_above(&self, path: &Path) -> Result<(), Refused> {
        let look = || -> io::Result<bool> {
            let Some(file) = open_candidate(path)? else { return Ok(false) };
            let Some(header) = read_header(&file)? else { return Ok(false) };
            let is_above = header.parent.delta == self.delta && header.delta != self.delta;
            Ok(is_above && !self.layers.contains(&ebb_store::try_identity_of_file(&file)?.key))
        };
        let remedy =
            "repair the file or let the daemon read it, or move it away if it is not needed";
        if !look().map_err(|error| cannot_look(path, &error, remedy))? {
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

impl Engine {
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
