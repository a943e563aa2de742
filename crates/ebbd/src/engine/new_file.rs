//! The files that operations on overlays make, before they take the names of others: their names, and what is left of an
//! operation that was interrupted.
//!
//! # Invariants
//! - Nothing is removed but a regular file that is no volume's and is a delta, or one whose header was not yet written.
//! - No symbolic link is followed, and nothing is waited for: a FIFO in the folder is refused.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ebb_api::Refusal;
use ebb_config::StoreUri;
use ebb_control::Refused;
use ebb_image::{DeltaHeader, HEADER_BYTES};

use super::Engine;
use super::manage::blocking;
use crate::stores::StoreTarget;

/// The name of the file that `what` makes in the place of `path`: hidden, in the same folder.
pub(super) fn new_file(path: &Path, what: &str) -> Option<PathBuf> {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name()?);
    name.push(format!(".ebbd-{what}"));
    Some(path.with_file_name(name))
}

fn failed(what: &str, path: &Path, error: &io::Error) -> Refused {
    let message = format!("cannot {what} {}: {error}", path.display());
    Refused::new(Refusal::Failed, "not_made", message, "correct that, and try again")
}

/// Opens a regular file for reading. Blocks, but not on a FIFO or a symbolic link, which are refused.
///
/// # Errors
/// Those of the system; [`io::ErrorKind::InvalidInput`] for another kind of file.
pub(super) fn open_regular(path: &Path) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file")),
    }
}

/// The header of a delta. Blocks.
///
/// # Errors
/// The file cannot be read, or has no valid header.
pub(super) fn header_of(path: &Path) -> Result<DeltaHeader, Refused> {
    let mut slots = vec![0; 2 * HEADER_BYTES];
    let read = open_regular(path).and_then(|file| file.read_exact_at(&mut slots, 0));
    read.map_err(|error| failed("read", path, &error))?;
    decode(&slots).map_err(|error| failed("read", path, &io::Error::other(error)))
}

fn decode(slots: &[u8]) -> Result<DeltaHeader, ebb_image::HeaderError> {
    DeltaHeader::decode([&slots[..HEADER_BYTES], &slots[HEADER_BYTES..]])
}

/// Whether a file was made by an operation: a delta, or what becomes one when its header is written.
fn is_made_by_us(file: &File) -> io::Result<bool> {
    let mut slots = vec![0; 2 * HEADER_BYTES];
    match file.read_exact_at(&mut slots, 0) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
        Ok(()) => Ok(slots.iter().all(|byte| *byte == 0) || decode(&slots).is_ok()),
    }
}

/// Removes the file at `path` if there is one. Blocks.
///
/// # Errors
/// Those of the system.
pub(super) fn remove_file(path: &Path) -> Result<(), Refused> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(failed("remove", path, &error))
        }
        _ => Ok(()),
    }
}

/// Removes what an interrupted operation has left at `path`. Blocks.
fn remove_if_left(path: &Path) -> Result<(), Refused> {
    let foreign = || {
        let message = format!("{} exists, and was not made by ebbd", path.display());
        Refused::new(Refusal::Conflict, "exists", message, "move it away, and try again")
    };
    let file = match open_regular(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => return Err(foreign()),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Err(foreign()),
        Err(error) => return Err(failed("open", path, &error)),
    };
    let is_free = file.try_lock_shared().is_ok();
    if !is_free || !is_made_by_us(&file).map_err(|error| failed("read", path, &error))? {
        return Err(foreign());
    }
    remove_file(path)
}

impl Engine {
    /// Removes what an interrupted operation has left at `path`, the name of a file that the next one is to make.
    ///
    /// # Errors
    /// Another file is there: it is left as it is.
    pub(super) async fn remove_leftover(&self, path: &Path) -> Result<(), Refused> {
        self.must_be_no_volume(&[], path, "move it away, and try again").await?;
        let path = path.to_path_buf();
        blocking(move || remove_if_left(&path)).await
    }

    /// Refuses to touch a file that a volume is on, other than those with these names.
    ///
    /// # Errors
    /// There is such a volume; or the file cannot be looked at.
    pub(super) async fn must_be_no_volume(
        &self,
        names: &[&str],
        path: &Path,
        remedy: &str,
    ) -> Result<(), Refused> {
        let store = StoreUri::File(path.to_path_buf());
        let look = store.clone();
        let file = blocking(move || {
            let found = StoreTarget::of(&look);
            found.map_err(|error| {
                Refused::new(Refusal::Failed, "not_made", error.full_text(), "see to the file")
            })
        });
        let file = file.await?;
        match self.other_volume_on(names, &store, file.as_ref()) {
            None => Ok(()),
            Some(other) => {
                let message =
                    format!("{} is the file of volume `{other}`, which needs it", path.display());
                Err(Refused::new(Refusal::Conflict, "in_use", message, remedy))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "this is a test")]

    use super::*;

    #[test]
    fn only_what_an_operation_has_left_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = new_file(&folder.path().join("disk.delta"), "next").unwrap();
        assert!(path.ends_with(".disk.delta.ebbd-next"));
        assert_eq!(remove_if_left(&path), Ok(()), "there is none");
        std::fs::write(&path, vec![0; 1 << 16]).unwrap();
        assert_eq!(remove_if_left(&path), Ok(()));
        assert!(!path.exists());

        let other = folder.path().join("other");
        std::fs::write(&other, vec![7; 1 << 16]).unwrap();
        std::fs::rename(&other, &path).unwrap();
        assert_eq!(remove_if_left(&path).unwrap_err().body.error, "exists");
        std::fs::rename(&path, &other).unwrap();
        std::os::unix::fs::symlink(&other, &path).unwrap();
        assert_eq!(remove_if_left(&path).unwrap_err().body.error, "exists");
        std::fs::remove_file(&path).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &path,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .unwrap();
        assert_eq!(remove_if_left(&path).unwrap_err().body.error, "exists");
        assert!(header_of(&path).is_err(), "and does not wait");
        assert!(std::fs::symlink_metadata(&path).is_ok() && other.exists());
    }
}
