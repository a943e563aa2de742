//! Opening a file or block device: what is there, how it may be accessed, what the operator must
//! hear.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::SECTOR;
use crate::create::{create, inspect_folder, is_named};

/// How long to wait for another process to let go of a file.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);
/// How long between two looks at the lock.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// Whether I/O goes past the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direct {
    /// O_DIRECT where the file system has it, else through the page cache, with a note.
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
    /// Page cache or not.
    pub direct: Direct,
    /// Make a sparse file of this many bytes if there is none; one that is smaller is refused.
    pub create: Option<u64>,
    /// There was a file before: none is made in its place, whatever `create` says.
    pub existing: bool,
}

impl OpenOptions {
    /// The size of the file to make if there is none.
    fn makes(&self) -> Option<u64> {
        self.create.filter(|_| !self.read_only && !self.existing)
    }
}

/// Why a file could not become a store. Each message says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are the words of the messages")]
pub enum OpenError {
    /// It does not exist.
    #[error("{path}: no such file: give `create = true` and a `size` to make one")]
    Missing { path: PathBuf },
    /// The process has as many open files as it may.
    #[error(
        "{path}: no file descriptor is left to open it with: raise `LimitNOFILE` of the service, \
             or `ulimit -n`"
    )]
    Descriptors { path: PathBuf },
    /// The user of the daemon may not.
    #[error("{path}: permission denied: give the daemon's user access to it{}",
        if *.read_only { "" } else { ", or set `read_only = true`" })]
    Denied { path: PathBuf, read_only: bool },
    /// Another process has it.
    #[error(
        "{path}: in use by another process, or by another volume (its lock is held): stop that \
             one first, or open both read-only"
    )]
    InUse { path: PathBuf },
    /// Neither a regular file nor a block device.
    #[error("{path}: is {what}: a volume needs a regular file or a block device")]
    WrongType { path: PathBuf, what: &'static str },
    /// Too small, or not whole sectors.
    #[error(
        "{path}: is {size} bytes: a volume needs a multiple of 512 bytes, and at least 512: \
             grow it with `truncate -s`"
    )]
    Size { path: PathBuf, size: u64 },
    /// There is a file that is smaller than the one to be created.
    #[error(
        "{path}: is {size} bytes, but the configuration says {wanted}: \
             correct `size`, or leave it and `create` out to take the file as it is, \
             or grow it with `truncate -s`"
    )]
    OtherSize { path: PathBuf, size: u64, wanted: u64 },
    /// O_DIRECT was demanded and cannot be had.
    #[error(
        "{path}: direct I/O does not work here ({reason}): \
             set `direct = \"auto\"` or \"off\" to use the page cache"
    )]
    NoDirect { path: PathBuf, reason: String },
    /// Anything else.
    #[error("{path}: cannot {action}")]
    Io { path: PathBuf, action: &'static str, source: io::Error },
}

impl OpenError {
    /// What the system says, with what was being done.
    pub(crate) fn of(path: &Path, action: &'static str, source: io::Error) -> OpenError {
        let path = path.to_path_buf();
        match source.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE) => OpenError::Descriptors { path },
            _ => OpenError::Io { path, action, source },
        }
    }
}

/// An opened file with what was found out about it.
pub(crate) struct Opened {
    pub(crate) file: File,
    pub(crate) size: u64,
    pub(crate) block_device: bool,
    /// Alignment I/O needs: 1 through the page cache.
    pub(crate) alignment: u32,
    pub(crate) direct: bool,
    /// There was none: it was made.
    pub(crate) made: bool,
    pub(crate) notes: Vec<String>,
}

pub(crate) fn open(path: &Path, options: &OpenOptions) -> Result<Opened, OpenError> {
    let mut notes = Vec::new();
    let made = match options.makes() {
        Some(size) => create(path, size)?,
        None => false,
    };
    // Before opening: opening a FIFO would wait for its other end.
    let block_device = check_type(path, options)?;
    let direct_wanted = options.direct != Direct::Off;
    let (file, mut direct) = match try_open(path, options, direct_wanted) {
        Ok(file) => (file, direct_wanted),
        Err(error) if direct_wanted && error.raw_os_error() == Some(libc::EINVAL) => {
            let reason = "the file system refuses O_DIRECT";
            fall_back(path, options, reason, &mut notes)?;
            (try_open(path, options, false).map_err(|e| explain(path, options, e))?, false)
        }
        Err(error) => return Err(explain(path, options, error)),
    };
    lock(path, &file, options.read_only)?;
    let size = check_size(path, &file, options, &mut notes)?;
    let mut alignment = 1;
    let mut file = file;
    if direct {
        match probe_alignment(&file, size) {
            Ok(found) => alignment = found,
            Err(reason) => {
                fall_back(path, options, &reason, &mut notes)?;
                drop(file);
                file = try_open(path, options, false).map_err(|e| explain(path, options, e))?;
                lock(path, &file, options.read_only)?;
                direct = false;
            }
        }
    }
    Ok(Opened { file, size, block_device, alignment, direct, made, notes })
}

/// Whether another process, or another store of this one, holds the lock that opening the file would take; false also
/// where that cannot be found out. Does not wait.
pub fn is_in_use(path: &Path, options: &OpenOptions) -> bool {
    if check_type(path, options).is_err() {
        return false;
    }
    let Ok(file) = try_open(path, options, false) else { return false };
    let locked = if options.read_only { file.try_lock_shared() } else { file.try_lock() };
    matches!(locked, Err(std::fs::TryLockError::WouldBlock))
}

/// Looks whether a file could be opened with these options, and closes it again: nothing is made, and its lock is not
/// taken, so that it may be in use.
///
/// # Errors
/// As for opening it, other than those of the lock. A file that is still to be made is fine where its folder is.
pub fn inspect(path: &Path, options: &OpenOptions) -> Result<(), OpenError> {
    if options.makes().is_some() && !is_named(path)? {
        return inspect_folder(path);
    }
    check_type(path, options)?;
    let direct = options.direct != Direct::Off;
    let file = match try_open(path, options, direct) {
        Err(error) if direct && error.raw_os_error() == Some(libc::EINVAL) => {
            let reason = "the file system refuses O_DIRECT";
            fall_back(path, options, reason, &mut Vec::new())?;
            try_open(path, options, false)
        }
        other => other,
    };
    let file = file.map_err(|error| explain(path, options, error))?;
    check_size(path, &file, options, &mut Vec::new())?;
    Ok(())
}

fn try_open(path: &Path, options: &OpenOptions, direct: bool) -> io::Result<File> {
    let flags = if direct { libc::O_DIRECT } else { 0 };
    std::fs::OpenOptions::new().read(true).write(!options.read_only).custom_flags(flags).open(path)
}

/// Another open file description of the same file, whatever its name leads to now. `None` without `/proc`, or where
/// the file may be written and not read by this process.
pub(crate) fn again(file: &File) -> Option<File> {
    use std::os::fd::AsRawFd;
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()
}

pub(crate) fn explain(path: &Path, options: &OpenOptions, source: io::Error) -> OpenError {
    let path = path.to_path_buf();
    match source.kind() {
        io::ErrorKind::NotFound => OpenError::Missing { path },
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            OpenError::Denied { path, read_only: options.read_only }
        }
        _ => OpenError::of(&path, "open it", source),
    }
}

fn check_type(path: &Path, options: &OpenOptions) -> Result<bool, OpenError> {
    let metadata = std::fs::metadata(path).map_err(|e| explain(path, options, e))?;
    let kind = metadata.file_type();
    let what = match kind {
        _ if kind.is_file() => return Ok(false),
        _ if kind.is_block_device() => return Ok(true),
        _ if kind.is_dir() => "a directory",
        _ if kind.is_char_device() => "a character device",
        _ => "a FIFO or socket",
    };
    Err(OpenError::WrongType { path: path.into(), what })
}

/// Two writers of one image destroy it; the lock is advisory and goes with the descriptor.
///
/// A daemon that was killed holds its lock until the kernel has dealt with its last requests: a
/// successor waits that long. Opening happens on the main thread, never on a worker.
fn lock(path: &Path, file: &File, read_only: bool) -> Result<(), OpenError> {
    let deadline = Instant::now() + LOCK_PATIENCE;
    loop {
        let result = if read_only { file.try_lock_shared() } else { file.try_lock() };
        match result {
            Ok(()) => return Ok(()),
            Err(std::fs::TryLockError::WouldBlock) if Instant::now() < deadline => {
                std::thread::park_timeout(LOCK_PAUSE);
            }
            Err(std::fs::TryLockError::WouldBlock) => {
                return Err(OpenError::InUse { path: path.into() });
            }
            Err(std::fs::TryLockError::Error(source)) => {
                return Err(OpenError::Io { path: path.into(), action: "lock it", source });
            }
        }
    }
}

fn check_size(
    path: &Path,
    file: &File,
    options: &OpenOptions,
    notes: &mut Vec<String>,
) -> Result<u64, OpenError> {
    let size = size_of(path, file)?;
    if size < SECTOR || !size.is_multiple_of(SECTOR) {
        return Err(OpenError::Size { path: path.into(), size });
    }
    match options.create {
        // What the configuration has beyond its end would be missing.
        Some(wanted) if wanted > size => {
            return Err(OpenError::OtherSize { path: path.into(), size, wanted });
        }
        // It has grown since: `size` is that of the file to be made.
        Some(wanted) if wanted < size => notes.push(format!(
            "{}: is {size} bytes and the configuration says {wanted}: served as it is; \
             correct `size`, or leave it and `create` out",
            path.display()
        )),
        _ => {}
    }
    Ok(size)
}

fn size_of(path: &Path, file: &File) -> Result<u64, OpenError> {
    // The end by lseek is right for regular files and block devices alike.
    rustix::fs::seek(file, rustix::fs::SeekFrom::End(0)).map_err(|e| OpenError::Io {
        path: path.into(),
        action: "find out its size",
        source: e.into(),
    })
}

fn fall_back(
    path: &Path,
    options: &OpenOptions,
    reason: &str,
    notes: &mut Vec<String>,
) -> Result<(), OpenError> {
    if options.direct == Direct::On {
        return Err(OpenError::NoDirect { path: path.into(), reason: reason.into() });
    }
    notes.push(format!("direct I/O does not work here ({reason}): going through the page cache"));
    Ok(())
}

/// The smallest alignment a direct read accepts: devices with 4 KiB sectors refuse 512 bytes.
fn probe_alignment(file: &File, size: u64) -> Result<u32, String> {
    #[repr(align(4096))]
    struct Page([u8; 4096]);
    let mut page = Page([0; 4096]);
    for (alignment, bytes) in [(512u32, 512usize), (4096, 4096)] {
        match file.read_at(&mut page.0[..bytes], 0) {
            Ok(_) if size.is_multiple_of(u64::from(alignment)) => return Ok(alignment),
            Ok(_) => {
                return Err(format!("it needs a size that is a multiple of {alignment} bytes"));
            }
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            Err(error) => return Err(format!("a probing read failed: {error}")),
        }
    }
    Err("it accepts neither 512 nor 4096-byte requests".into())
}
