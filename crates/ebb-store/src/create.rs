//! Creating the file of a new volume. Its name appears when it has its size and is stable, so that
//! a process that is killed meanwhile, or a file system that refuses the size, leaves nothing at
//! the path.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags};

use crate::open_options::{OpenError, OpenOptions, explain, is_among_devices};

/// How long another process may hold the claim to a name; it holds it for a rename.
const CLAIM_PATIENCE: Duration = Duration::from_secs(5);
const CLAIM_PAUSE: Duration = Duration::from_millis(5);

/// The error of a file that cannot be created.
fn not_created(path: &Path, source: io::Error) -> OpenError {
    let action = match (source.kind(), source.raw_os_error()) {
        (io::ErrorKind::ReadOnlyFilesystem, _) => {
            "create the file (its file system is mounted read-only, so mount it for writing)"
        }
        (io::ErrorKind::InvalidFilename, _) => "create the file (choose a shorter name)",
        (io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded, _) => {
            "create the file (free space and inodes on its file system)"
        }
        (_, Some(libc::EPERM)) => {
            "create the file (if `lsattr -d` shows that its folder is immutable, change that with `chattr`)"
        }
        (io::ErrorKind::PermissionDenied, _) => {
            "create the file (let the daemon's user write to its folder; if `open_paths` is set, add the folder there)"
        }
        (io::ErrorKind::NotFound | io::ErrorKind::NotADirectory, _) => {
            "create the file (make its folder, or mount its file system; if `open_paths` is set, add the folder there)"
        }
        _ => "create the file",
    };
    OpenError::of(path, action, source)
}

/// Whether `path` exists, without following a symbolic link.
///
/// # Errors
/// That cannot be determined: only "no such file" means that it does not exist.
pub(crate) fn is_named(path: &Path) -> Result<bool, OpenError> {
    match std::fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(source) => Err(explain(path, &OpenOptions::default(), source)),
    }
}

/// The directory of a file.
pub(crate) fn folder_of(path: &Path) -> &Path {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new("."))
}

/// Rejects a new file in `/dev`, whose file system is in memory.
fn must_be_lasting(path: &Path) -> Result<(), OpenError> {
    match is_among_devices(path) {
        true => Err(OpenError::AmongDevices { path: path.to_path_buf() }),
        false => Ok(()),
    }
}

/// Checks that the directory of a new file exists, and that a file can be made in it.
pub(crate) fn inspect_folder(path: &Path) -> Result<(), OpenError> {
    must_be_lasting(path)?;
    let fail = |source| not_created(path, source);
    let found = std::fs::metadata(folder_of(path)).map_err(fail)?;
    if !found.is_dir() {
        return Err(fail(io::ErrorKind::NotADirectory.into()));
    }
    let access = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
    rustix::fs::access(folder_of(path), access).map_err(|error| fail(error.into()))
}

/// The file system and the inode of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InodeNumber(u64, u64);

impl InodeNumber {
    pub(crate) fn of(file: &File) -> io::Result<InodeNumber> {
        let found = file.metadata()?;
        Ok(InodeNumber(found.dev(), found.ino()))
    }
}

/// Creates a sparse file of `size` bytes at `path` unless there is one; returns the new file's number.
pub(crate) fn create(path: &Path, size: u64) -> Result<Option<InodeNumber>, OpenError> {
    if is_named(path)? {
        return Ok(None);
    }
    must_be_lasting(path)?;
    let folder = folder_of(path);
    let made = match unnamed(folder, path, size)? {
        Some(made) => made,
        None => named(folder, path, size)?,
    };
    if made.is_some() {
        sync_folder(path).map_err(|source| {
            OpenError::of(path, "make the name of the new file stable", source)
        })?;
    }
    Ok(made)
}

/// Gives a new file its size and makes it stable.
fn set_size(path: &Path, file: &File, size: u64) -> Result<InodeNumber, OpenError> {
    let fail = |action| move |source| OpenError::of(path, action, source);
    file.set_len(size).map_err(|source| {
        let too_large = [io::ErrorKind::FileTooLarge, io::ErrorKind::InvalidInput];
        let action = match too_large.contains(&source.kind()) {
            true => "create a file of that size: correct `size`",
            false => "give the new file its size",
        };
        OpenError::of(path, action, source)
    })?;
    file.sync_all().map_err(fail("make the new file stable"))?;
    InodeNumber::of(file).map_err(fail("look at the new file"))
}

/// Uses a file without a name (`O_TMPFILE`), linked when it is complete. `None` where the file
/// system has no `O_TMPFILE`, or there is no `/proc` to link it from.
fn unnamed(
    folder: &Path,
    path: &Path,
    size: u64,
) -> Result<Option<Option<InodeNumber>>, OpenError> {
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    let file = match rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => File::from(file),
        // Old kernels take the flag for an attempt to write to a directory.
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR | rustix::io::Errno::INVAL) => {
            return Ok(None);
        }
        Err(error) => return Err(not_created(path, error.into())),
    };
    let made = set_size(path, &file, size)?;
    let number = format!("/proc/self/fd/{}", file.as_raw_fd());
    match rustix::fs::linkat(CWD, number, CWD, path, AtFlags::SYMLINK_FOLLOW) {
        Ok(()) => Ok(Some(Some(made))),
        Err(rustix::io::Errno::EXIST) => Ok(Some(None)),
        Err(_) => Ok(None),
    }
}

/// Uses a file of another name in the same directory, renamed when it is complete.
fn named(folder: &Path, path: &Path, size: u64) -> Result<Option<InodeNumber>, OpenError> {
    use std::os::unix::fs::OpenOptionsExt;
    let fail = |source| not_created(path, source);
    let beside = beside(folder, path);
    let mut how = std::fs::OpenOptions::new();
    let file = how.write(true).create_new(true).mode(0o600).open(&beside).map_err(fail)?;
    let made = set_size(path, &file, size).and_then(|made| match give_name(&beside, path) {
        Ok(()) => Ok(Some(made)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
        Err(error) => Err(fail(error)),
    });
    if !matches!(made, Ok(Some(_))) {
        let _ = std::fs::remove_file(&beside);
    }
    made
}

/// A name that no other process or attempt uses.
fn beside(folder: &Path, path: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{:016x}.new", ebb_block::nonce()));
    folder.join(name)
}

/// Makes the name of the file at `path` stable: flushes its directory. Does nothing on file systems
/// without a flush of directories.
///
/// # Errors
/// Those of the system.
pub fn sync_folder(path: &Path) -> io::Result<()> {
    #[cfg(feature = "sim")]
    if let Some(synced) = crate::sim_folders::sync(folder_of(path)) {
        return synced;
    }
    match File::open(folder_of(path))?.sync_all() {
        Err(error) if is_without_flush(&error) => Ok(()),
        flushed => flushed,
    }
}

/// The file system has no flush of directories.
fn is_without_flush(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP | libc::ENOSYS))
}

/// Renames a file without replacing an existing one.
///
/// # Errors
/// Those of the system; [`io::ErrorKind::AlreadyExists`] if there is one.
pub fn give_name(from: &Path, to: &Path) -> io::Result<()> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // The file system does not support the flag.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
            match std::fs::hard_link(from, to) {
                Err(error) if is_without_links(&error) => give_claimed_name(from, to),
                linked => linked.and_then(|()| std::fs::remove_file(from)),
            }
        }
        outcome => Ok(outcome?),
    }
}

/// Returns true if a file may have got no second name because its file system has no hard links:
/// EPERM also means that the file or its folder is immutable.
#[must_use]
pub fn is_without_links(error: &io::Error) -> bool {
    let number = error.raw_os_error();
    matches!(number, Some(libc::EPERM | libc::EOPNOTSUPP | libc::ENOSYS))
}

/// Renames a file on a file system that has no way to refuse to replace one. The lock of a hidden
/// file next to it keeps other processes of ebbd from giving the same name meanwhile.
fn give_claimed_name(from: &Path, to: &Path) -> io::Result<()> {
    let mut name = OsString::from(".");
    name.push(to.file_name().unwrap_or_default());
    name.push(".ebbd-claim");
    let path = folder_of(to).join(name);
    let claim = lock_claim(&path)?;
    let given = match std::fs::symlink_metadata(to) {
        Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => std::fs::rename(from, to),
        Err(error) => Err(error),
    };
    // A claim that stays has no lock, and is used again.
    let _ = std::fs::remove_file(&path);
    drop(claim);
    given
}

/// Makes a file and locks it, within [`CLAIM_PATIENCE`]. A process that is killed leaves it,
/// without a lock. Others may write to the folder: neither a pipe nor a lock of theirs holds this
/// up.
fn lock_claim(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let deadline = ebb_io::clock::now() + CLAIM_PATIENCE;
    let failed =
        |kind, what: &str| Err(io::Error::new(kind, format!("{}: {what}", path.display())));
    loop {
        let mut how = std::fs::OpenOptions::new();
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        how.write(true).create(true).truncate(false).mode(0o600).custom_flags(flags);
        let claim = how.open(path)?;
        if !claim.metadata()?.is_file() {
            return failed(io::ErrorKind::InvalidInput, "not a regular file");
        }
        match claim.try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) if ebb_io::clock::now() < deadline => {
                std::thread::park_timeout(CLAIM_PAUSE);
                continue;
            }
            Err(std::fs::TryLockError::WouldBlock) => {
                return failed(io::ErrorKind::TimedOut, "locked by another process");
            }
            Err(std::fs::TryLockError::Error(error)) => return Err(error),
        }
        // The previous holder of the lock may have removed the file.
        let is_it = |found: std::fs::Metadata| {
            claim.metadata().is_ok_and(|own| (own.dev(), own.ino()) == (found.dev(), found.ino()))
        };
        if std::fs::symlink_metadata(path).is_ok_and(is_it) {
            return Ok(claim);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "this is a test")]

    use super::*;

    const MIB: u64 = 1 << 20;

    fn names(folder: &Path) -> Vec<OsString> {
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    }

    #[test]
    fn claimed_name_replaces_no_file_and_leaves_no_claim() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("part"), folder.path().join("disk"));
        // That of a process that was killed.
        std::fs::write(folder.path().join(".disk.ebbd-claim"), "").unwrap();
        std::fs::write(&from, "new").unwrap();
        give_claimed_name(&from, &to).unwrap();
        assert_eq!(names(folder.path()), ["disk"]);
        std::fs::write(&from, "other").unwrap();
        let refused = give_claimed_name(&from, &to).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read(&to).unwrap(), b"new");
        let mut left = names(folder.path());
        left.sort();
        assert_eq!(left, ["disk", "part"]);
    }

    #[test]
    fn one_of_many_gets_a_claimed_name() {
        let folder = tempfile::tempdir().unwrap();
        let to = folder.path().join("disk");
        let given: usize = std::thread::scope(|scope| {
            let all: Vec<_> = (0..8)
                .map(|number| {
                    let (from, to) = (folder.path().join(format!("part{number}")), &to);
                    std::fs::write(&from, number.to_string()).unwrap();
                    scope.spawn(move || usize::from(give_claimed_name(&from, to).is_ok()))
                })
                .collect();
            all.into_iter().map(|one| one.join().unwrap()).sum()
        });
        assert_eq!((given, names(folder.path()).len()), (1, 8));
    }

    #[test]
    fn with_and_without_unnamed_files_a_name_appears_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        type Make = fn(&Path, &Path, u64) -> Result<Option<InodeNumber>, OpenError>;
        let methods: [(&str, Make); 2] = [
            ("named", named),
            ("whichever", |folder, path, size| {
                Ok(match unnamed(folder, path, size)? {
                    Some(made) => made,
                    None => named(folder, path, size)?,
                })
            }),
        ];
        for (name, make) in methods {
            let path = folder.path().join(name);
            // No file system has files of that size.
            let refused = make(folder.path(), &path, u64::MAX - 511).unwrap_err();
            assert!(refused.to_string().contains("correct `size`"), "{refused}");
            assert!(!path.exists());
            let made = make(folder.path(), &path, MIB).unwrap().unwrap();
            assert_eq!(made, InodeNumber::of(&File::open(&path).unwrap()).unwrap());
            let first = std::fs::metadata(&path).unwrap();
            assert_eq!((first.len(), first.mode() & 0o777), (MIB, 0o600));
            // An existing file is never replaced.
            assert_eq!(make(folder.path(), &path, 2 * MIB).unwrap(), None);
            let second = std::fs::metadata(&path).unwrap();
            assert_eq!((second.ino(), second.len()), (first.ino(), MIB));
        }
        let mut left = names(folder.path());
        left.sort();
        assert_eq!(left, ["named", "whichever"], "nothing else is left in the folder");
    }
}
