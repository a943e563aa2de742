//! [`FileName`] makes the name of an open file stable.
//!
//! The name of a file that was renamed into its place is in memory only until the folder is
//! flushed. If that flush failed, or the daemon was killed before it, a power cut takes the name
//! back, and with it all data that was flushed since. So the first flush of an opened file flushes
//! its folder, and fails while that fails.
//!
//! # Invariants
//! - A failure is no loss of data: the next flush tries again.
//! - A file flushes its folder once at a time, on one helper thread, so that a folder that hangs
//!   takes no more threads.
//! - A flush of the folder that began before a rename says nothing about the new name.
//! - Once the name is stable, a request costs one look at a number.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ebb_block::{BlockError, Operation};
use ebb_io::{Fd, Io};
use tokio::sync::Mutex;

use crate::create::sync_folder;
use crate::open_options::{BROKER_ENDED, RESTART};

/// See the module.
#[derive(Debug)]
pub(crate) struct FileName {
    path: PathBuf,
    /// Twice the number of renames, and one more once the folder was flushed after the last.
    generation: AtomicU64,
    /// The log has said that the folder cannot be opened.
    is_noted: AtomicBool,
    /// The next flush of the file must use `fsync(2)`, since its folder was not flushed.
    needs_fsync: AtomicBool,
    turn: Mutex<()>,
}

/// The bit of a generation that is set while the name is stable.
const STABLE: u64 = 1;

fn is_stable(generation: u64) -> bool {
    generation & STABLE == STABLE
}

/// The part that was flushed to make a name stable.
#[derive(Debug, PartialEq, Eq)]
enum Flushed {
    Folder,
    /// The folder cannot be opened for this reason: the next flush of the file uses `fsync(2)`.
    FileOnly(String),
}

impl FileName {
    /// The name of a file that was opened at `path`. A name that needs no flush `is_stable`.
    pub(crate) fn new(path: &Path, is_stable: bool) -> FileName {
        FileName {
            path: path.to_path_buf(),
            generation: AtomicU64::new(is_stable.into()),
            is_noted: AtomicBool::new(false),
            needs_fsync: AtomicBool::new(false),
            turn: Mutex::new(()),
        }
    }

    /// Returns true once the folder was flushed.
    #[inline]
    pub(crate) fn is_stable(&self) -> bool {
        is_stable(self.generation())
    }

    fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Notes that the file was renamed, and that its folder could not be flushed.
    pub(crate) fn doubt(&self) {
        let next = |generation: u64| Some((generation | STABLE).wrapping_add(1));
        // Never an error: `next` always returns a value.
        let _ = self.generation.try_update(Ordering::AcqRel, Ordering::Acquire, next);
    }

    /// Returns true if the next flush of the file must use `fsync(2)`: on most file systems it
    /// makes the name of a new file stable, on some also the name of a renamed one. Its error is a
    /// loss, as the error of any flush.
    #[inline]
    pub(crate) fn needs_fsync(&self) -> bool {
        self.needs_fsync.load(Ordering::Acquire)
    }

    /// Notes that `fsync(2)` has succeeded.
    pub(crate) fn note_fsync(&self) {
        self.needs_fsync.store(false, Ordering::Release);
    }

    /// Flushes the folder of the open file `fd`, unless that has succeeded before.
    ///
    /// # Errors
    /// Errors of the system, as errors of a flush.
    pub(crate) async fn make_stable(&self, io: &Io, fd: &Fd) -> Result<(), BlockError> {
        if self.is_stable() {
            return Ok(());
        }
        let _turn = self.turn.lock().await;
        loop {
            let generation = self.generation();
            if is_stable(generation) {
                return Ok(());
            }
            let path = self.path.clone();
            let flushed = io.offload_on(fd, move |fd| flush_folder_of(&**fd, &path)).await;
            self.end(generation, flushed)?;
        }
    }

    /// As [`FileName::make_stable`], without a helper thread: for a simulation.
    #[cfg(feature = "sim")]
    pub(crate) fn make_stable_now(&self, file: &std::fs::File) -> Result<(), BlockError> {
        let generation = self.generation();
        if is_stable(generation) {
            return Ok(());
        }
        self.end(generation, flush_folder_of(file, &self.path))
    }

    /// Ends a flush of the folder that began at this `generation`. The name may have changed since.
    fn end(&self, generation: u64, flushed: io::Result<Flushed>) -> Result<(), BlockError> {
        let path = self.path.display();
        let flushed = flushed.map_err(|source| {
            let text = format!("cannot flush the folder of {path}: {source}");
            let error = BlockError::from_io(source, Operation::Flush, 0, 0);
            error.caused_by(Some(io::Error::other(text)))
        })?;
        if let Flushed::FileOnly(error) = flushed {
            self.needs_fsync.store(true, Ordering::Release);
            if !self.is_noted.swap(true, Ordering::Relaxed) {
                let file = self.path.display().to_string();
                tracing::warn!(
                    file,
                    error,
                    "cannot open the folder to flush it: the file alone is flushed"
                );
            }
        }
        let stable = generation | STABLE;
        let (stored, other) = (Ordering::AcqRel, Ordering::Acquire);
        // If it fails, the file was renamed meanwhile.
        let _ = self.generation.compare_exchange(generation, stable, stored, other);
        Ok(())
    }
}

/// Returns the present path of a file, which may have been renamed since it was opened; `None` if
/// it no longer has a name.
fn place_of(file: impl AsFd, opened_at: &Path) -> io::Result<Option<PathBuf>> {
    let fd = file.as_fd();
    if rustix::fs::fstat(fd)?.st_nlink == 0 {
        return Ok(None);
    }
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    let is_path = |path: &PathBuf| path.is_absolute() && path.parent().is_some();
    Ok(Some(link.ok().filter(is_path).unwrap_or_else(|| opened_at.to_path_buf())))
}

fn flush_folder_of(file: impl AsFd, opened_at: &Path) -> io::Result<Flushed> {
    let Some(path) = place_of(&file, opened_at)? else { return Ok(Flushed::Folder) };
    match sync_folder(&path) {
        Ok(()) => Ok(Flushed::Folder),
        Err(error) => out_of_reach(&error).map(Flushed::FileOnly).ok_or(error),
    }
}

/// Returns the reason if the folder cannot be opened, now or later: the broker or the permissions
/// forbid it, it is not visible from here, or the broker has ended (`ENOSYS`).
fn out_of_reach(error: &io::Error) -> Option<String> {
    match error.raw_os_error()? {
        libc::ENOSYS => Some(format!("{BROKER_ENDED}: {RESTART}")),
        libc::EACCES | libc::EPERM | libc::ENOENT | libc::ENOTDIR | libc::ELOOP => {
            Some(error.to_string())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "this is a test")]

    use std::fs::File;

    use super::*;

    #[test]
    fn folder_is_that_of_the_present_name() {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join("disk"), folder.path().join("moved"));
        let file = File::create(&path).unwrap();
        let real =
            |path: &Path| folder.path().canonicalize().unwrap().join(path.file_name().unwrap());
        assert_eq!(place_of(&file, &path).unwrap(), Some(real(&path)));
        std::fs::rename(&path, &other).unwrap();
        assert_eq!(place_of(&file, &path).unwrap(), Some(real(&other)));
        assert_eq!(flush_folder_of(&file, &path).unwrap(), Flushed::Folder);
        std::fs::remove_file(&other).unwrap();
        assert_eq!(place_of(&file, &path).unwrap(), None);
        assert_eq!(flush_folder_of(&file, &path).unwrap(), Flushed::Folder);
    }

    #[test]
    fn failed_flush_of_the_folder_fails_until_one_succeeds() {
        let name = FileName::new(Path::new("disk"), false);
        for number in [libc::EIO, libc::EMFILE, libc::ENFILE, libc::ENOMEM] {
            let error = name.end(0, Err(io::Error::from_raw_os_error(number))).unwrap_err();
            assert!(error.full_text().contains("cannot flush the folder of disk"), "{error}");
            assert!(!name.is_stable());
        }
        name.end(0, Ok(Flushed::Folder)).unwrap();
        assert!(name.is_stable());
        name.doubt();
        assert!(!name.is_stable());
    }

    #[test]
    fn flush_from_before_a_rename_leaves_the_name_in_doubt() {
        for is_stable in [false, true] {
            let name = FileName::new(Path::new("disk"), is_stable);
            name.doubt();
            let began = name.generation();
            name.doubt();
            name.end(began, Ok(Flushed::Folder)).unwrap();
            assert!(!name.is_stable(), "the folder was flushed before the second rename");
            name.end(name.generation(), Ok(Flushed::Folder)).unwrap();
            assert!(name.is_stable());
        }
    }

    #[test]
    fn folder_out_of_reach_does_not_fail_flushes() {
        let name = FileName::new(Path::new("disk"), false);
        assert!(!name.needs_fsync());
        name.end(0, Ok(Flushed::FileOnly("permission denied".to_owned()))).unwrap();
        assert!(name.is_stable() && name.needs_fsync());
        name.note_fsync();
        assert!(!name.needs_fsync());
        for number in [libc::EACCES, libc::EPERM, libc::ENOENT] {
            assert!(out_of_reach(&io::Error::from_raw_os_error(number)).is_some());
        }
        for number in [libc::EIO, libc::EMFILE, libc::ENOMEM] {
            assert!(out_of_reach(&io::Error::from_raw_os_error(number)).is_none());
        }
    }

    #[test]
    fn ended_broker_is_named_as_the_reason() {
        let reason = out_of_reach(&io::Error::from_raw_os_error(libc::ENOSYS)).unwrap();
        assert!(reason.contains("has ended: restart the daemon"), "{reason}");
        assert!(!reason.contains("os error"), "{reason}");
    }
}
