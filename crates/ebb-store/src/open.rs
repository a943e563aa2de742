//! Opening a file or block device: its type and size, how it may be accessed, and what to log.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use ebb_block::SECTOR;

use crate::create::{InodeNumber, create, inspect_folder, is_named};
use crate::foreign::ForeignFormat;
use crate::open_options::{Direct, OpenError, OpenOptions, explain};

/// How long to wait for another process to release its lock.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);
/// How long to wait between two attempts to lock.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// An opened file and its properties.
pub(crate) struct OpenedFile {
    pub(crate) file: File,
    /// Bytes, a multiple of a sector unless this is an image.
    pub(crate) size: u64,
    /// Where the file ends, if reads beyond that return zeroes.
    pub(crate) padded_from: Option<u64>,
    pub(crate) block_device: bool,
    /// Alignment that I/O needs, bytes: 1 through the page cache.
    pub(crate) alignment: u32,
    pub(crate) direct: bool,
    /// The file did not exist and was created.
    pub(crate) made: bool,
    pub(crate) notes: Vec<String>,
}

/// What a file holds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Content {
    /// The bytes of a volume.
    Disk,
    /// An image, of any size, with a disk in it. Its clusters, and what is read of its tables, may be as short as a sector
    /// of 512 bytes: direct I/O that needs more is not used.
    Image,
}

pub(crate) fn open(
    path: &Path,
    options: &OpenOptions,
    content: Content,
) -> Result<OpenedFile, OpenError> {
    let mut notes = Vec::new();
    let made = match options.makes() {
        Some(size) => create(path, size)?,
        None => None,
    };
    let exists = || OpenError::Exists { path: path.to_path_buf() };
    if made.is_none() && options.only_new {
        return Err(exists());
    }
    // Before opening, because opening a FIFO waits for its other end.
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
    // Another process that may write to the folder may have put another file at the path.
    if made.is_some() && made != InodeNumber::of(&file).ok() {
        return Err(exists());
    }
    lock(path, &file, options.read_only)?;
    let size = match content {
        Content::Disk => check_size(path, &file, options, &mut notes)?,
        Content::Image => size_of(path, &file)?,
    };
    let mut alignment = 1;
    let mut file = file;
    if direct {
        let found = match find_alignment(&file, size) {
            Ok(found) if content == Content::Image && u64::from(found) > SECTOR => {
                Err(format!("the device has sectors of {found} bytes"))
            }
            found => found,
        };
        match found {
            Ok(found) => alignment = found,
            Err(reason) => {
                fall_back(path, options, &reason, &mut notes)?;
                drop(file);
                file = try_open(path, options, false).map_err(|e| explain(path, options, e))?;
                if made.is_some() && made != InodeNumber::of(&file).ok() {
                    return Err(exists());
                }
                lock(path, &file, options.read_only)?;
                direct = false;
            }
        }
    }
    let (size, padded_from) = match content {
        Content::Image => (size, Some(size)),
        Content::Disk if size.is_multiple_of(SECTOR) => (size, None),
        Content::Disk => (size.next_multiple_of(SECTOR), Some(size)),
    };
    let made = made.is_some();
    Ok(OpenedFile { file, size, padded_from, block_device, alignment, direct, made, notes })
}

/// Whether another process, or another store of this process, holds the lock that opening the file
/// would take; false also where that cannot be determined. Does not wait.
pub fn is_in_use(path: &Path, options: &OpenOptions) -> bool {
    if check_type(path, options).is_err() {
        return false;
    }
    let Ok(file) = try_open(path, options, false) else { return false };
    let locked = if options.read_only { file.try_lock_shared() } else { file.try_lock() };
    matches!(locked, Err(std::fs::TryLockError::WouldBlock))
}

/// Checks whether a file could be opened with these options, and closes it again. Nothing is
/// created and no lock is taken, so that the file may be in use.
///
/// # Errors
/// As for opening it, without those of the lock. A file that is still to be created needs only its
/// directory.
pub fn inspect(path: &Path, options: &OpenOptions) -> Result<(), OpenError> {
    if options.makes().is_some() && !is_named(path)? {
        return inspect_folder(path);
    }
    let file = try_access(path, options)?;
    check_size(path, &file, options, &mut Vec::new())?;
    Ok(())
}

/// As [`inspect`] for the file of an image; returns its size.
pub(crate) fn inspect_image(path: &Path, options: &OpenOptions) -> Result<u64, OpenError> {
    size_of(path, &try_access(path, options)?)
}

/// Opens a file as [`open`] would, without its lock.
fn try_access(path: &Path, options: &OpenOptions) -> Result<File, OpenError> {
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
    file.map_err(|error| explain(path, options, error))
}

fn try_open(path: &Path, options: &OpenOptions, direct: bool) -> io::Result<File> {
    let mut flags = if direct { libc::O_DIRECT } else { 0 };
    if options.only_new {
        flags |= libc::O_NOFOLLOW;
    }
    std::fs::OpenOptions::new().read(true).write(!options.read_only).custom_flags(flags).open(path)
}

/// Another open file description of the same file, even if the file was renamed. `None` without
/// `/proc`, or where this process may write the file but not read it.
pub(crate) fn reopen(file: &File) -> Option<File> {
    use std::os::fd::AsRawFd;
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()
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

/// Two writers of one image destroy it. The lock is that of `flock(2)`: advisory, on the open file description, and
/// released with it. It excludes other daemons, not programs that lock otherwise or not at all: QEMU's locks are those of
/// `fcntl(2)` (`F_OFD_SETLK`), and a mount takes none.
///
/// A daemon that was killed holds its lock until the kernel has completed its last requests, and a
/// successor waits that long. So this blocks: files are opened on a thread of their own, never on a worker.
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
    if !size.is_multiple_of(SECTOR) && options.read_only {
        let padding = size.next_multiple_of(SECTOR) - size;
        let path = path.display();
        notes.push(format!("{path}: is {size} bytes: read with {padding} zero bytes at its end"));
    } else if size < SECTOR || !size.is_multiple_of(SECTOR) {
        return Err(OpenError::Size {
            path: path.into(),
            size,
            remedy: remedy_of_size(file, size),
        });
    }
    match options.least_size() {
        // Data that the configuration promises beyond the end would be missing.
        Some(wanted) if wanted > size => {
            return Err(OpenError::OtherSize { path: path.into(), size, wanted });
        }
        // It has grown since it was created: `size` is the size to create it with.
        Some(wanted) if wanted < size => notes.push(format!(
            "{}: is {size} bytes and the configuration says {wanted}: served as it is; \
             correct `size`, or remove it and `create`",
            path.display()
        )),
        _ => {}
    }
    Ok(size)
}

/// The remedy for a file whose size no volume has.
fn remedy_of_size(file: &File, size: u64) -> &'static str {
    if file.metadata().is_ok_and(|found| !found.is_file()) {
        return "attach the device, or insert a medium";
    }
    if size == 0 {
        return "grow it with `truncate -s`";
    }
    // The file may be open for direct I/O.
    match reopen(file).and_then(|file| ForeignFormat::of_file(&file).ok().flatten()) {
        Some(ForeignFormat::Delta) => {
            "it is the store of an overlay, and was truncated: restore it from a backup"
        }
        Some(ForeignFormat::Qcow) => {
            "it looks like a qcow2 image: serve the disk in it with `qcow2:` instead of `file:`; a raw disk: grow it with \
             `truncate -s`, or set `read_only = true`"
        }
        _ => "grow it with `truncate -s`, or set `read_only = true`",
    }
}

fn size_of(path: &Path, file: &File) -> Result<u64, OpenError> {
    // The end found by lseek is right for regular files and block devices alike.
    rustix::fs::seek(file, rustix::fs::SeekFrom::End(0)).map_err(|e| OpenError::Io {
        path: path.into(),
        action: "read its size",
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

/// The alignment of offsets and lengths that direct I/O on a file needs: 512 or 4096 bytes.
///
/// The kernel states it since Linux 6.1, for most file systems. Otherwise test reads find it, of data only: a file system
/// reads a hole without its device, whatever the alignment.
fn find_alignment(file: &File, size: u64) -> Result<u32, String> {
    let found = match stated_alignment(file) {
        Some(0) => Err("the file system does not support it for this file".into()),
        Some(stated @ 1..=512) if stated.is_power_of_two() => Ok(512),
        Some(stated @ 513..=4096) if stated.is_power_of_two() => Ok(4096),
        Some(stated) => Err(format!("it needs an alignment of {stated} bytes")),
        None => probe_alignment(file, data_of(file, size)),
    }?;
    match size.is_multiple_of(u64::from(found)) {
        true => Ok(found),
        false => Err(format!("it needs a size that is a multiple of {found} bytes")),
    }
}

/// The larger of the alignments that the kernel states for offsets and for memory; `None` if it states none.
fn stated_alignment(file: &File) -> Option<u32> {
    use rustix::fs::{AtFlags, StatxFlags};
    let found = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    let is_stated = StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::DIOALIGN);
    let offset = found.stx_dio_offset_align;
    // Without direct I/O both are 0.
    let larger = if offset == 0 { 0 } else { offset.max(found.stx_dio_mem_align) };
    is_stated.then_some(larger)
}

/// `TMPFS_MAGIC` of Linux's include/uapi/linux/magic.h.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Whether the content of a file is memory: it is on tmpfs.
pub(crate) fn is_in_memory(file: &std::fs::File) -> bool {
    let found = rustix::fs::fstatfs(file);
    found.is_ok_and(|found| u64::try_from(found.f_type).is_ok_and(|kind| kind == TMPFS_MAGIC))
}

/// An aligned offset before the first data of a file: `None` if it has none. All of a file on tmpfs counts as data.
fn data_of(file: &File, size: u64) -> Option<u64> {
    if is_in_memory(file) {
        return Some(0);
    }
    let data = rustix::fs::seek(file, rustix::fs::SeekFrom::Data(0)).ok()?;
    Some(data - data % 4096).filter(|data| *data < size)
}

/// The smallest alignment of a direct read that succeeds at `data`: devices with 4 KiB sectors reject 512 bytes. Without
/// data to read, the alignment that suits both.
fn probe_alignment(file: &File, data: Option<u64>) -> Result<u32, String> {
    #[repr(align(4096))]
    struct Page([u8; 4096]);
    let mut page = Page([0; 4096]);
    let Some(data) = data else { return Ok(4096) };
    for (alignment, bytes) in [(512u32, 512usize), (4096, 4096)] {
        match file.read_at(&mut page.0[..bytes], data) {
            Ok(_) => return Ok(alignment),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            Err(error) => return Err(format!("a test read failed: {error}")),
        }
    }
    Err("it accepts neither 512 nor 4096-byte requests".into())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "this is a test")]

    use super::*;

    #[test]
    fn device_without_a_size_is_not_grown_like_a_file() {
        // Whatever is not a regular file is a device here.
        let device = File::open("/dev/null").unwrap();
        assert!(remedy_of_size(&device, 0).contains("insert a medium"));
        let file = tempfile::tempfile().unwrap();
        assert_eq!(remedy_of_size(&file, 0), "grow it with `truncate -s`");
    }

    /// A direct read of a hole reaches no device, so that any length succeeds.
    #[test]
    fn alignment_is_not_probed_in_a_hole() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = folder.path().join("sparse");
        File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let file = File::open(&path).unwrap();
        assert_eq!(probe_alignment(&file, data_of(&file, 1 << 20)), Ok(4096));
        let written = File::options().write(true).open(&path).unwrap();
        written.write_all_at(&[1; 4096], 512 << 10).unwrap();
        assert_eq!(data_of(&file, 1 << 20), Some(512 << 10));
        assert_eq!(probe_alignment(&file, data_of(&file, 1 << 20)), Ok(512));
    }
}
