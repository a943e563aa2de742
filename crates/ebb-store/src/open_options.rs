//! How to open a file store, and why that fails.

use std::borrow::Cow;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use ebb_advice::Advice;

/// The broker has ended.
pub(crate) const BROKER_ENDED: &str = "the process that opens files for the daemon has ended";
/// The remedy for that.
pub(crate) const RESTART: &str = "restart the daemon";

/// Whether I/O bypasses the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direct {
    /// O_DIRECT where the file system supports it, otherwise the page cache, with a note.
    #[default]
    Auto,
    /// O_DIRECT or an error.
    On,
    /// Through the page cache.
    Off,
}

/// How to open a file store.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// Refuse writes; the file need not be writable.
    pub read_only: bool,
    /// Whether to use O_DIRECT.
    pub direct: Direct,
    /// Create a sparse file of this many bytes if there is none; a smaller existing one is refused, unless `any_size`.
    pub create: Option<u64>,
    /// What an existing file holds says how large it is to be.
    pub any_size: bool,
    /// The volume existed before: if its file is missing it is not created, whatever `create` says.
    pub existing: bool,
    /// The file must be created: an existing one, or a symbolic link, is refused.
    pub only_new: bool,
}

impl OpenOptions {
    /// The size that an existing file must have at least.
    pub fn least_size(&self) -> Option<u64> {
        self.create.filter(|_| !self.any_size)
    }

    /// The size of the file to create if there is none.
    pub(crate) fn makes(&self) -> Option<u64> {
        self.create.filter(|_| !self.read_only && !self.existing)
    }
}

/// Why a file could not be opened as a store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are the words of the messages")]
pub enum OpenError {
    /// It does not exist, or is a symbolic link to `link`, where nothing is.
    #[error("{path}: {}", missing(link.as_deref()))]
    Missing { path: PathBuf, read_only: bool, link: Option<PathBuf> },
    /// The process has reached its limit of open files.
    #[error("{path}: the limit of open files is reached")]
    Descriptors { path: PathBuf },
    /// The broker has ended, which opens files for the daemon.
    #[error("{path}: {BROKER_ENDED}")]
    NoBroker { path: PathBuf },
    /// The daemon's user has no access; `read_only`: opening it read-only does not help.
    #[error("{path}: permission denied")]
    Denied { path: PathBuf, read_only: bool },
    /// Its file system is mounted read-only.
    #[error("{path}: its file system is mounted read-only")]
    ReadOnlyMount { path: PathBuf },
    /// The system permits it to no user, or the device to no process of the service.
    #[error("{path}: operation not permitted")]
    NotPermitted { path: PathBuf, read_only: bool, device: bool },
    /// A part of the path is no folder, too long, or a link to itself.
    #[error("{path}: cannot follow the path")]
    BadPath { path: PathBuf, source: io::Error },
    /// It does not exist, and would be lost with the next start of the host.
    #[error(
        "{path}: no file is created among the devices: it would be lost when the host restarts"
    )]
    AmongDevices { path: PathBuf },
    /// It exists, and only a new file will do.
    #[error("{path}: it exists, and is left as it is")]
    Exists { path: PathBuf },
    /// Another process has locked it.
    #[error("{path}: in use by another process, or by another volume (its lock is held)")]
    InUse { path: PathBuf },
    /// Neither a regular file nor a block device.
    #[error("{path}: is {what}")]
    WrongType { path: PathBuf, what: &'static str },
    /// Too small, or not a multiple of the sector size.
    #[error("{path}: is {size} bytes: a volume needs a multiple of 512 bytes, and at least 512")]
    Size { path: PathBuf, size: u64, remedy: &'static str },
    /// The existing file is smaller than the configured size.
    #[error("{path}: is {size} bytes, but the `size` of the volume is {wanted}")]
    OtherSize { path: PathBuf, size: u64, wanted: u64 },
    /// O_DIRECT was required and is not available.
    #[error("{path}: direct I/O does not work here ({reason})")]
    NoDirect { path: PathBuf, reason: String },
    /// Any other system error.
    #[error("{path}: cannot {action}")]
    Io { path: PathBuf, action: &'static str, source: io::Error },
}

/// The fault of a missing file.
fn missing(link: Option<&Path>) -> String {
    match link {
        Some(target) => format!("is a link to {}, where no file is", target.display()),
        None => "no such file".to_owned(),
    }
}

impl Advice for OpenError {
    fn remedy(&self) -> Option<Cow<'_, str>> {
        Some(match self {
            // Removing the link is none: with `create` an empty disk would take the place of the
            // file that it leads to.
            OpenError::Missing { link: Some(_), .. } => {
                "correct the link, or restore that file or mount its file system".into()
            }
            OpenError::Missing { path, .. } if names_device(path) => {
                "correct the path, or attach the device".into()
            }
            OpenError::Missing { read_only: true, .. } => {
                "correct the path, or restore the file or mount its file system".into()
            }
            OpenError::Missing { .. } => {
                "correct the path, or set `create` to create one, with a `size` unless it has a `base`"
                    .into()
            }
            OpenError::Descriptors { .. } => {
                "raise `LimitNOFILE` of the service, or `ulimit -n`".into()
            }
            OpenError::NoBroker { .. } => RESTART.into(),
            OpenError::Denied { read_only, .. } => format!(
                "give the daemon's user access to it{}; if `open_paths` is set, add its folder there",
                or_read_only(*read_only)
            )
            .into(),
            OpenError::ReadOnlyMount { .. } => {
                "mount it for writing, or set `read_only = true`".into()
            }
            OpenError::NotPermitted { device: true, .. } => {
                "allow the device with `DeviceAllow=` in the unit, or in the device rules of the \
                 container"
                    .into()
            }
            OpenError::BadPath { source, .. } => match source.raw_os_error() {
                Some(libc::ELOOP) => "correct the link in it that leads to itself".into(),
                Some(libc::ENAMETOOLONG) => "choose a shorter one".into(),
                _ => "correct it: a part of it is no folder".into(),
            },
            OpenError::AmongDevices { .. } => {
                "correct the path, attach the device, or create the file elsewhere".into()
            }
            OpenError::NotPermitted { read_only, .. } => format!(
                "if `lsattr` shows that it is immutable or append-only, change that with `chattr`{}",
                or_read_only(*read_only)
            )
            .into(),
            OpenError::Exists { .. } => "remove it if it is not needed".into(),
            OpenError::InUse { .. } => "stop that one first, or open both read-only".into(),
            OpenError::WrongType { .. } => "a volume needs a regular file or a block device".into(),
            OpenError::Size { remedy, .. } => (*remedy).into(),
            OpenError::OtherSize { .. } => {
                "correct it in the configuration, or in the volume's file in the state directory if a \
                 resize wrote it there, or remove it and `create` to use the file as it is, or grow \
                 the file with `truncate -s`"
                    .into()
            }
            OpenError::NoDirect { .. } => {
                "set `direct = \"auto\"` or \"off\" to use the page cache".into()
            }
            OpenError::Io { .. } => return None,
        })
    }
}

/// A further remedy where opening it read-only helps.
fn or_read_only(read_only: bool) -> &'static str {
    if read_only { "" } else { ", or set `read_only = true`" }
}

impl OpenError {
    /// A system error, with the action that failed.
    pub(crate) fn of(path: &Path, action: &'static str, source: io::Error) -> OpenError {
        let path = path.to_path_buf();
        match source.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE) => OpenError::Descriptors { path },
            Some(libc::ENOSYS) => OpenError::NoBroker { path },
            _ => OpenError::Io { path, action, source },
        }
    }

    /// As [`OpenError::Io`], unless the path itself is wrong.
    pub fn at_path(path: PathBuf, action: &'static str, source: io::Error) -> OpenError {
        match source.raw_os_error() {
            Some(libc::ELOOP | libc::ENAMETOOLONG | libc::ENOTDIR) => {
                OpenError::BadPath { path, source }
            }
            _ => OpenError::of(&path, action, source),
        }
    }
}

/// Returns true if a path names a device, or would. Looks at no file: threads without the right to
/// do so print remedies.
fn names_device(path: &Path) -> bool {
    path.starts_with("/dev") && !path.starts_with("/dev/shm")
}

/// Returns true if the folder of `path` is in the file system of `/dev`. Files in memory are meant
/// to be in `/dev/shm`, which is a plain folder in some containers.
pub(crate) fn is_among_devices(path: &Path) -> bool {
    if path.starts_with("/dev/shm") {
        return false;
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let found = std::fs::metadata(folder.unwrap_or(Path::new(".")));
    found.is_ok_and(|folder| is_mounted_at(Path::new("/dev"), folder.dev()))
}

/// Returns true if `device` is the number of the file system at `mount`, and not of `/`.
fn is_mounted_at(mount: &Path, device: u64) -> bool {
    let has = |place: &Path| std::fs::metadata(place).is_ok_and(|found| found.dev() == device);
    has(mount) && !has(Path::new("/"))
}

/// The error of opening a file, in words that say what to do.
pub(crate) fn explain(path: &Path, options: &OpenOptions, source: io::Error) -> OpenError {
    let path = path.to_path_buf();
    let read_only = options.read_only;
    match source.kind() {
        io::ErrorKind::NotFound => {
            let link = std::fs::read_link(&path).ok();
            OpenError::Missing { path, read_only, link }
        }
        io::ErrorKind::ReadOnlyFilesystem => OpenError::ReadOnlyMount { path },
        // EACCES has the same kind.
        _ if source.raw_os_error() == Some(libc::EPERM) => {
            let device = std::fs::metadata(&path).is_ok_and(|it| it.file_type().is_block_device());
            OpenError::NotPermitted { path, read_only, device }
        }
        io::ErrorKind::PermissionDenied => {
            let read_only = read_only || !is_readable(&path);
            OpenError::Denied { path, read_only }
        }
        _ => OpenError::at_path(path, "open it", source),
    }
}

/// Returns true if a file can be opened for reading. Does not wait for the other end of a FIFO.
fn is_readable(path: &Path) -> bool {
    use std::os::unix::fs::OpenOptionsExt;
    let mut how = std::fs::OpenOptions::new();
    how.read(true).custom_flags(libc::O_NONBLOCK).open(path).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_that_leads_nowhere_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("/no/such", &link).unwrap();
        let missing = || io::Error::from_raw_os_error(libc::ENOENT);
        let error = explain(&link, &OpenOptions::default(), missing());
        assert!(error.to_string().contains("is a link to /no/such, where no file is"), "{error}");
    }

    #[test]
    fn error_of_opening_a_file_has_a_remedy_that_fits() {
        let writable = OpenOptions::default();
        let read_only = OpenOptions { read_only: true, ..OpenOptions::default() };
        // No such file, so that it cannot be read either.
        for (error, options, has, has_not) in [
            (libc::ENOENT, &writable, "set `create`", "restore the file"),
            (libc::ENOENT, &read_only, "restore the file", "create"),
            (libc::EACCES, &writable, "give the daemon's user access", "read_only"),
            (libc::EPERM, &writable, "`lsattr`", "give the daemon's user access"),
            (libc::EPERM, &read_only, "`chattr`", "read_only"),
            (libc::EROFS, &writable, "mounted read-only", "give the daemon's user access"),
            (libc::ELOOP, &writable, "correct the link", "create"),
            (libc::ENAMETOOLONG, &writable, "choose a shorter one", "create"),
            (libc::ENOTDIR, &writable, "a part of it is no folder", "create"),
        ] {
            let error = explain(Path::new("disk"), options, io::Error::from_raw_os_error(error));
            let text = ebb_advice::full_text(&error);
            assert!(text.contains(has) && !text.contains(has_not), "{text}");
        }
    }

    #[test]
    fn files_of_a_mount_are_told_from_those_of_the_root() {
        let number = |path: &str| std::fs::metadata(path).unwrap().dev();
        assert!(is_mounted_at(Path::new("/proc"), number("/proc/sys")));
        assert!(!is_mounted_at(Path::new("/proc"), number("/")));
        assert!(!is_mounted_at(Path::new("/"), number("/")));
        assert!(!is_mounted_at(Path::new("/no/such"), number("/proc")));
    }

    #[test]
    fn files_of_memory_are_not_among_devices() {
        assert!(!is_among_devices(Path::new("/dev/shm/disk")));
        assert!(!is_among_devices(Path::new("disk")));
    }

    #[test]
    fn device_that_is_not_permitted_has_no_attributes_of_files() {
        let path = PathBuf::from("/dev/vda");
        let error = OpenError::NotPermitted { path, read_only: false, device: true };
        let text = ebb_advice::full_text(&error);
        assert!(text.contains("`DeviceAllow=`") && !text.contains("lsattr"), "{text}");
    }
}
