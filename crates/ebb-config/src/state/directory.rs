//! Changes of the files of the state directory. A change that cannot be made stable is undone.
//!
//! # Invariants
//! - When a change has failed, the directory is as it was before, or the error says that it is not
//!   ([`StateError::is_applied`]).
//! - Each step passes [`fails`], where tests inject faults.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::{StateError, TEMPORARY, failed};

#[cfg(any(test, feature = "state-faults"))]
pub(super) use super::faults::fails;

#[cfg(not(any(test, feature = "state-faults")))]
#[allow(clippy::unnecessary_wraps, reason = "a test injects faults here")]
pub(super) fn fails(_: &Path, _: StateStep) -> io::Result<()> {
    Ok(())
}

/// A step of a change of the directory, or of reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateStep {
    /// Finding out whether its file system is mounted.
    FindMount,
    /// Listing the files.
    List,
    /// Reading a file.
    Read,
    /// Creating a temporary file, or a second name of a file.
    Create,
    /// Writing a temporary file.
    Write,
    /// Making a file stable.
    SyncFile,
    /// Renaming a file.
    Rename,
    /// Removing a file.
    Remove,
    /// Making the directory stable.
    SyncFolder,
}

/// The directory.
#[derive(Clone, Copy, Debug)]
pub(super) struct StateFolder<'a>(pub(super) &'a Path);

impl StateFolder<'_> {
    fn temporary(self) -> PathBuf {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        self.0.join(format!("{TEMPORARY}{}-{number}", std::process::id()))
    }

    /// Writes a file in place of the one before, if there is one.
    pub(super) fn replace(self, path: &Path, text: &str) -> Result<(), StateError> {
        let (new, old) = (self.temporary(), self.temporary());
        let result = self.replace_with(path, text, (&new, &old));
        for left in [&new, &old] {
            // The next start removes it, if this also fails.
            let _ = fs::remove_file(left);
        }
        result
    }

    fn replace_with(
        self,
        path: &Path,
        text: &str,
        (new, old): (&Path, &Path),
    ) -> Result<(), StateError> {
        let mut kept = Ok(false);
        let mut write = || {
            fails(self.0, StateStep::Create)?;
            let mut options = OpenOptions::new();
            let mut file = options.write(true).create_new(true).mode(0o640).open(new)?;
            fails(self.0, StateStep::Write)?;
            file.write_all(text.as_bytes())?;
            fails(self.0, StateStep::SyncFile)?;
            file.sync_all()?;
            kept = self.keep(path, old);
            self.rename_file(new, path)
        };
        write().map_err(failed("write", path))?;
        self.make_stable().map_err(|source| {
            let undo = match kept {
                Ok(true) => self.rename_file(old, path),
                Ok(false) => self.remove_file(path),
                Err(error) => Err(error),
            };
            self.unstable(("write", path), source, undo)
        })
    }

    /// Writes a temporary file of `bytes` and removes it: fails if a change of the directory would
    /// fail as it is now.
    pub(super) fn try_out(self, bytes: usize) -> Result<(), StateError> {
        let path = self.temporary();
        let write = || {
            fails(self.0, StateStep::Create)?;
            let mut options = OpenOptions::new();
            let mut file = options.write(true).create_new(true).mode(0o640).open(&path)?;
            fails(self.0, StateStep::Write)?;
            file.write_all(&vec![b'#'; bytes])?;
            fails(self.0, StateStep::SyncFile)?;
            file.sync_all()
        };
        let written = write();
        // The next start removes it, if this also fails.
        let removed = fs::remove_file(&path);
        written.and(removed).map_err(failed("write a file in", self.0))
    }

    /// Gives a file a second name, and returns whether there is one. Not every file system has second names.
    fn keep(self, path: &Path, second: &Path) -> io::Result<bool> {
        fails(self.0, StateStep::Create)?;
        match fs::hard_link(path, second) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Renames a file.
    pub(super) fn rename(self, old: &Path, new: &Path) -> Result<(), StateError> {
        self.rename_file(old, new).map_err(failed("rename", old))?;
        self.make_stable().map_err(|source| {
            let undo = self.rename_file(new, old);
            self.unstable(("rename", old), source, undo)
        })
    }

    /// Removes a file. Returns whether there was one; its absence is stable in both cases.
    pub(super) fn remove(self, path: &Path) -> Result<bool, StateError> {
        let existed = match self.remove_file(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            removed => removed.map(|()| true),
        };
        let existed = existed.map_err(failed("remove", path))?;
        // An earlier call may have removed it without that becoming stable.
        match self.make_stable() {
            Ok(()) => Ok(existed),
            // The directory is absent, and may return with the file.
            Err(source) if !existed && source.kind() == ErrorKind::NotFound => {
                Err(failed("remove", path)(source))
            }
            Err(source) => {
                let (action, path) = ("remove", path.to_owned());
                Err(StateError::NotStable { action, path, source, applied: true })
            }
        }
    }

    /// The error of a change that could not be made stable, with the result of undoing it.
    fn unstable(
        self,
        (action, path): (&'static str, &Path),
        source: io::Error,
        undo: io::Result<()>,
    ) -> StateError {
        let (path, applied) = (path.to_owned(), undo.is_err());
        // Both ways may remain for a power cut to choose, if this also fails.
        match undo.and_then(|()| self.make_stable()) {
            Ok(()) => StateError::Io { action, path, source },
            Err(_) => StateError::NotStable { action, path, source, applied },
        }
    }

    fn rename_file(self, from: &Path, to: &Path) -> io::Result<()> {
        fails(self.0, StateStep::Rename)?;
        fs::rename(from, to)
    }

    fn remove_file(self, path: &Path) -> io::Result<()> {
        fails(self.0, StateStep::Remove)?;
        fs::remove_file(path)
    }

    /// Makes the names in the directory stable.
    pub(super) fn make_stable(self) -> io::Result<()> {
        fails(self.0, StateStep::SyncFolder)?;
        File::open(self.0)?.sync_all()
    }
}
