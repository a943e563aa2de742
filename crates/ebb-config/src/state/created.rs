//! The volumes of the configuration whose files were created: `DIR/created` has a file for each,
//! with its stores.
//!
//! A configuration with `create = true` is read at every start. Without the record, a volume whose
//! file is missing, because its file system is not mounted, would be served as a blank disk.
//!
//! Earlier versions wrote no records. They kept the size that a volume was resized to, which shows
//! that its file existed.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::{
    StateDir, StateError, StateFolder, StoredVolume, failed, not_mounted, parse, read_file,
};
use crate::StoreUri;

/// The number of stores that a record has at most.
const MOST: usize = 64;

impl StateDir {
    /// The directory of the records, used as one of volumes.
    pub(super) fn created(&self) -> StateDir {
        StateDir { volumes: self.volumes.with_file_name("created") }
    }

    /// The files that show that the store of a volume was created before; none if it may be
    /// created. Blocks.
    ///
    /// # Errors
    /// [`StateError`]: the record cannot be read, and the store may have been created.
    pub fn signs_of_creation(
        &self,
        volume: &str,
        store: &StoreUri,
    ) -> Result<Vec<PathBuf>, StateError> {
        let path = self.created().path_of(volume);
        if let Some(point) = self.unmounted() {
            return Err(failed("read", &path)(not_mounted(&point)));
        }
        let names = names_of(store);
        let mut recorded = Vec::new();
        for path in self.records(&path)? {
            if self.recorded_stores(&path)?.iter().any(|known| names.contains(known)) {
                recorded.push(path);
            }
        }
        let resized = self.was_resized(volume, store).then(|| self.path_of(volume));
        Ok(recorded.into_iter().chain(resized).collect())
    }

    /// All records, and `own`, which may be missing: the volume may have had another name.
    fn records(&self, own: &Path) -> Result<Vec<PathBuf>, StateError> {
        let folder = self.created().volumes;
        let list = match std::fs::read_dir(&folder) {
            Ok(list) => list,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed("read", &folder)(error)),
        };
        let mut all = vec![own.to_owned()];
        for entry in list {
            let path = entry.map_err(failed("read", &folder))?.path();
            if path != own && path.extension().is_some_and(|end| end == "toml") {
                all.push(path);
            }
        }
        Ok(all)
    }

    /// The stores of a record.
    fn recorded_stores(&self, path: &Path) -> Result<Vec<String>, StateError> {
        let bad = |source| StateError::Io { action: "read", path: path.to_owned(), source };
        let found = read_file(&self.created().volumes, path);
        let found = found.map_err(|error| {
            bad(error.source.unwrap_or_else(|| std::io::Error::other(error.message)))
        })?;
        let table: toml::Table = match found {
            Some(text) => text.parse().map_err(|error| bad(std::io::Error::other(error)))?,
            None => return Ok(Vec::new()),
        };
        let stores = table.get("stores").and_then(|stores| stores.as_array()).into_iter().flatten();
        Ok(stores.filter_map(|store| store.as_str()).map(str::to_owned).collect())
    }

    /// Returns true if the directory has a size that the store was resized to. Blocks.
    fn was_resized(&self, volume: &str, store: &StoreUri) -> bool {
        let path = self.path_of(volume);
        let text = read_file(&self.volumes, &path).ok().flatten();
        let kept = text.and_then(|text| parse(volume, &text, &path).ok());
        let Some(StoredVolume::Overrides(kept)) = kept else { return false };
        let replaces = kept.size_replaces.as_deref().and_then(|text| text.rsplit_once(' '));
        replaces.is_some_and(|(resized, _)| resized == store.to_string())
    }

    /// Records that the store of a volume was created. The record is stable when this returns.
    /// Blocks.
    ///
    /// # Errors
    /// [`StateError`].
    pub fn note_created(&self, volume: &str, store: &StoreUri) -> Result<(), StateError> {
        let created = self.created();
        let path = created.checked_path(volume)?;
        let mut stores = self.recorded_stores(&path)?;
        let mut names = names_of(store);
        names.retain(|name| !stores.contains(name));
        if names.is_empty() {
            return Ok(());
        }
        stores.append(&mut names);
        stores.drain(..stores.len().saturating_sub(MOST));
        if !created.volumes.exists() {
            created.create()?;
            if let Some(parent) = created.volumes.parent() {
                let synced = File::open(parent).and_then(|folder| folder.sync_all());
                synced.map_err(failed("write", parent))?;
            }
        }
        StateFolder(&created.volumes).replace(&path, &text(stores))
    }
}

/// The ways to write a store that are compared: as it is, without detours, and without links. A
/// file system that is not mounted may hide a link.
fn names_of(store: &StoreUri) -> Vec<String> {
    let of = |path: PathBuf| match store {
        StoreUri::Qcow2(_) => StoreUri::Qcow2(path).to_string(),
        _ => StoreUri::File(path).to_string(),
    };
    let mut names = vec![store.to_string()];
    if let StoreUri::File(path) | StoreUri::Qcow2(path) = store {
        names.extend(std::path::absolute(path).ok().map(of));
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = std::fs::canonicalize(folder.unwrap_or(Path::new("."))).ok();
        names.extend(folder.zip(path.file_name()).map(|(folder, name)| of(folder.join(name))));
    }
    names.sort_unstable();
    names.dedup();
    names
}

fn text(stores: Vec<String>) -> String {
    let table: toml::Table = [("stores".to_owned(), stores.into())].into_iter().collect();
    format!(
        "# Written by ebbd: files of this volume that exist. Remove this record to let ebbd create new ones.\n{table}"
    )
}
