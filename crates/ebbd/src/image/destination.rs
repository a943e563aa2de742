//! Where a disk is copied to.
//!
//! # Invariants
//! - A new file has another name in the same folder until it is complete and stable, and is removed if the copy fails. An
//!   existing file is never replaced by it. The next copy to the same name removes the file of one that was killed.
//! - Data is overwritten only with `--force`. Beyond the end of the source a destination keeps its data. A file that
//!   is not longer than the source is empty if the copy fails.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ebb_block::{BlockStore, nonce};
use ebb_cache::CachedStore;
use ebb_config::StoreUri;
use ebb_io::Io;
use ebb_store::{give_name, sync_folder};

use super::error::ImageError;
use super::open::{Access, open_now};
use crate::stores::StoreTarget;

/// A partial file without a lock is the leftover of a copy that was killed if it was not written to for so long. A copy
/// that has just begun has no lock yet.
const STALE: Duration = Duration::from_secs(60);
/// Extents that are looked at to find out that a store is empty.
const EXTENTS: usize = 64;

/// What a copy that fails leaves.
#[derive(Clone, Debug)]
enum Remains {
    /// A file with this name, to be removed.
    Partial(PathBuf),
    /// A file that is to be made empty.
    Overwritten(PathBuf),
    /// What was there before, partly overwritten.
    Kept,
}

/// Cleans up after a copy, once.
#[derive(Debug)]
pub(super) struct Leftover {
    remains: Remains,
    is_over: AtomicBool,
}

impl Leftover {
    fn new(remains: Remains) -> Arc<Leftover> {
        Arc::new(Leftover { remains, is_over: AtomicBool::new(false) })
    }

    /// Removes what a copy that failed has left. Does nothing the second time, and after a copy that succeeded.
    pub(super) fn clean(&self) {
        if self.is_over.swap(true, Ordering::SeqCst) {
            return;
        }
        // Nothing else can be done about an error here: the copy has failed already, and says so.
        let _ = match &self.remains {
            Remains::Partial(path) => std::fs::remove_file(path),
            Remains::Overwritten(path) => {
                File::options().write(true).open(path).and_then(|file| file.set_len(0))
            }
            Remains::Kept => Ok(()),
        };
    }

    /// What a copy that was interrupted has done to the destination, for the message.
    pub(super) fn after_interrupt(&self) -> &'static str {
        match self.remains {
            Remains::Partial(_) => ", and the new file was removed",
            Remains::Overwritten(_) => ", and the file is empty now",
            Remains::Kept => ", and the destination is partly overwritten",
        }
    }
}

/// A new file that has another name until it is complete.
#[derive(Debug)]
pub(super) struct NewFile {
    path: PathBuf,
    partial: PathBuf,
    leftover: Arc<Leftover>,
}

impl Drop for NewFile {
    fn drop(&mut self) {
        self.leftover.clean();
    }
}

impl NewFile {
    /// Chooses the other name of the file that is to be at `path`, where none is.
    pub(super) fn at(path: &Path) -> NewFile {
        let mut name = partial_prefix(path);
        name.push(format!("{:016x}{PARTIAL_END}", nonce()));
        let partial = path.with_file_name(name);
        let leftover = Leftover::new(Remains::Partial(partial.clone()));
        NewFile { path: path.to_path_buf(), partial, leftover }
    }

    /// The name that it has until then.
    pub(super) fn partial(&self) -> &Path {
        &self.partial
    }

    /// Gives it its name and makes that stable. Its content is stable already.
    ///
    /// # Errors
    /// Those of the system; it is removed then.
    pub(super) fn finish(self) -> Result<(), ImageError> {
        let action = "give the new file its name, since there is a file now";
        give_name(&self.partial, &self.path).map_err(ImageError::io(&self.path, action))?;
        self.leftover.is_over.store(true, Ordering::SeqCst);
        let action = "make the name of the new file stable";
        sync_folder(&self.path).map_err(ImageError::io(&self.path, action))
    }
}

/// The end of the name of a file that is not complete.
const PARTIAL_END: &str = ".part";

/// Returns the start of the names of files that are to be at `path`.
fn partial_prefix(path: &Path) -> OsString {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".");
    name
}

/// Removes files that copies to `path` have left because they were killed. Errors are of no importance for this copy.
fn remove_stale(path: &Path) {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let Ok(list) = std::fs::read_dir(folder.unwrap_or(Path::new("."))) else { return };
    let prefix = partial_prefix(path);
    for entry in list.flatten() {
        let name = entry.file_name();
        let number = name.as_encoded_bytes().strip_prefix(prefix.as_encoded_bytes());
        let number = number.and_then(|rest| rest.strip_suffix(PARTIAL_END.as_bytes()));
        let is_ours = number
            .is_some_and(|number| number.len() == 16 && number.iter().all(u8::is_ascii_hexdigit));
        if is_ours && is_stale(&entry.path()).unwrap_or(false) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

fn is_stale(path: &Path) -> std::io::Result<bool> {
    if !std::fs::symlink_metadata(path)?.is_file() {
        return Ok(false);
    }
    let file = File::open(path)?;
    let age = file.metadata()?.modified()?.elapsed().unwrap_or_default();
    // A copy in progress holds the lock of its store.
    Ok(age >= STALE && file.try_lock().is_ok())
}

/// See the module.
pub(super) struct Destination {
    store: Arc<CachedStore>,
    is_zero: bool,
    new: Option<NewFile>,
    leftover: Arc<Leftover>,
}

impl Drop for Destination {
    fn drop(&mut self) {
        self.leftover.clean();
    }
}

impl Destination {
    /// Opens or creates the destination for a disk of `size` bytes; `sources` are what is copied.
    ///
    /// # Errors
    /// [`ImageError`].
    pub(super) async fn open(
        io: &Io,
        uri: &StoreUri,
        sources: &[Arc<CachedStore>],
        (size, force): (u64, bool),
    ) -> Result<Destination, ImageError> {
        match uri {
            StoreUri::File(path) => {
                let sources = sources.to_vec();
                let (uri, path) = (uri.clone(), path.clone());
                let open = move || open_file(&uri, &path, &sources, (size, force));
                io.offload(open).await
            }
            StoreUri::Nbd(_) | StoreUri::Rbd(_) => {
                let named = uri.clone();
                let store = io.offload(move || open_now(&named, Access::Write)).await?;
                let is_zero = is_empty(io, &store).await?;
                if !is_zero && !force {
                    let holds = "is not known to be empty, and would be overwritten".to_owned();
                    return Err(ImageError::Exists { place: uri.to_string(), holds });
                }
                existing(store, size, is_zero)
            }
            StoreUri::Qcow2(_) | StoreUri::Memory(_) | StoreUri::Null(_) => {
                Err(ImageError::NoDestination { place: uri.to_string() })
            }
        }
    }

    /// What is written to.
    pub(super) fn store(&self) -> &Arc<CachedStore> {
        &self.store
    }

    /// Whether it is known to hold zeroes only.
    pub(super) fn is_zero(&self) -> bool {
        self.is_zero
    }

    /// What is to be cleaned up if the process is to end before the copy is complete.
    pub(super) fn leftover(&self) -> Arc<Leftover> {
        match &self.new {
            Some(new) => new.leftover.clone(),
            None => self.leftover.clone(),
        }
    }

    /// Completes the copy, whose data is stable. Blocks.
    ///
    /// # Errors
    /// Those of the system; a new file is removed then.
    pub(super) fn finish(mut self) -> Result<(), ImageError> {
        self.leftover.is_over.store(true, Ordering::SeqCst);
        self.new.take().map_or(Ok(()), NewFile::finish)
    }
}

async fn is_empty(io: &Io, store: &impl BlockStore) -> Result<bool, ImageError> {
    let size = store.size();
    let extents = store.extents(io, 0, size, EXTENTS).await;
    let extents = extents.map_err(ImageError::of(store.place()))?;
    let end = extents.last().map_or(0, |extent| extent.offset + extent.length);
    Ok(end == size && extents.iter().all(|extent| extent.hole))
}

/// A store that was there before.
fn existing(
    store: ebb_store::Store,
    wanted: u64,
    is_zero: bool,
) -> Result<Destination, ImageError> {
    let size = store.size();
    if size < wanted {
        return Err(ImageError::TooSmall { place: store.place(), size, wanted });
    }
    let (store, leftover) = (Arc::new(store.into()), Leftover::new(Remains::Kept));
    Ok(Destination { store, is_zero, new: None, leftover })
}

fn open_file(
    uri: &StoreUri,
    path: &Path,
    sources: &[Arc<CachedStore>],
    (size, force): (u64, bool),
) -> Result<Destination, ImageError> {
    let found = match std::fs::metadata(path) {
        Ok(found) => found,
        // A symbolic link that leads nowhere is reported when the file gets its name.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            if folder.is_some_and(|folder| !folder.exists()) {
                return Err(ImageError::NoFolder { path: path.to_path_buf() });
            }
            remove_stale(path);
            let new = NewFile::at(path);
            let partial = StoreUri::File(new.partial().to_path_buf());
            let store = open_now(&partial, Access::Create(size))?;
            let (store, leftover) = (Arc::new(store.into()), Leftover::new(Remains::Kept));
            return Ok(Destination { store, is_zero: true, new: Some(new), leftover });
        }
        Err(error) => return Err(ImageError::io(path, "look at it")(error)),
    };
    let own = StoreTarget::of(uri)?;
    for source in sources {
        let other = StoreTarget::of_open(source.store())?;
        if own.is_some() && own == other {
            return Err(ImageError::SameFile { place: uri.to_string() });
        }
    }
    if found.file_type().is_block_device() {
        if !force {
            let holds = "is a block device, which would be overwritten".to_owned();
            return Err(ImageError::Exists { place: uri.to_string(), holds });
        }
        return existing(open_now(uri, Access::Write)?, size, false);
    }
    if !found.is_file() {
        // A FIFO would be waited for.
        return Err(ImageError::NoDestination { place: uri.to_string() });
    }
    if found.len() > 0 && !force {
        let holds = format!("exists and has {} bytes", found.len());
        return Err(ImageError::Exists { place: uri.to_string(), holds });
    }
    if found.len() > size {
        return existing(open_now(uri, Access::Write)?, size, false);
    }
    empty(path, size)?;
    let leftover = Leftover::new(Remains::Overwritten(path.to_path_buf()));
    let store = open_now(uri, Access::Write).inspect_err(|error| {
        // Another program that has it open now may have written to it.
        if !matches!(error, ImageError::InUse { .. }) {
            leftover.clean();
        }
    })?;
    Ok(Destination { store: Arc::new(store.into()), is_zero: true, new: None, leftover })
}

/// Makes a file one of zeroes, unless it is in use.
fn empty(path: &Path, size: u64) -> Result<(), ImageError> {
    let file = File::options().read(true).write(true).open(path);
    let file = file.map_err(ImageError::io(path, "open it for writing"))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(std::fs::TryLockError::WouldBlock) => {
            return Err(ImageError::in_use(path));
        }
        Err(std::fs::TryLockError::Error(error)) => {
            return Err(ImageError::io(path, "lock it")(error));
        }
    }
    let sized = file.set_len(0).and_then(|()| file.set_len(size));
    sized.map_err(ImageError::io(path, "set its size"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "this is a test")]

    use super::*;

    fn names(folder: &Path) -> Vec<OsString> {
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    }

    #[test]
    fn a_new_file_has_its_name_when_it_is_complete_or_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.raw");
        let new = NewFile::at(&path);
        std::fs::write(new.partial(), "data").unwrap();
        assert!(!path.exists());
        drop(new);
        assert!(names(folder.path()).is_empty());
        let new = NewFile::at(&path);
        std::fs::write(new.partial(), "data").unwrap();
        new.finish().unwrap();
        assert_eq!(names(folder.path()), ["disk.raw"]);
        // One that appeared meanwhile stays as it is.
        let new = NewFile::at(&path);
        std::fs::write(new.partial(), "other").unwrap();
        assert!(matches!(new.finish(), Err(ImageError::Io { .. })));
        assert_eq!(names(folder.path()), ["disk.raw"]);
        assert_eq!(std::fs::read(&path).unwrap(), b"data");
    }

    #[test]
    fn leftover_of_killed_copy_is_removed_by_the_next() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.raw");
        let part = |name: &str, age: u64| {
            let path = folder.path().join(name);
            let file = File::create(&path).unwrap();
            let then = std::time::SystemTime::now() - Duration::from_secs(age);
            file.set_modified(then).unwrap();
            file
        };
        let of = |number: u32| format!(".disk.raw.{number:016x}.part");
        let busy = part(&of(1), 600);
        busy.lock().unwrap();
        part(&of(2), 600);
        part(&of(3), 0);
        part(".disk.raw.mine.part", 600);
        part(".other.raw.0000000000000004.part", 600);
        remove_stale(&path);
        let mut left = names(folder.path());
        left.sort();
        let kept = [of(1), of(3)].map(OsString::from);
        assert_eq!(left[..2], kept);
        assert_eq!(left.len(), 4, "{left:?}");
    }

    #[test]
    fn a_file_that_was_overwritten_is_empty_after_a_failure() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.raw");
        std::fs::write(&path, "old").unwrap();
        let leftover = Leftover::new(Remains::Overwritten(path.clone()));
        leftover.clean();
        assert_eq!(std::fs::read(&path).unwrap(), b"");
        // Once: afterwards it may be another program's.
        std::fs::write(&path, "new").unwrap();
        leftover.clean();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
    }
}
