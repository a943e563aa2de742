//! Reading small files as a whole with a size limit, and files kept open for repeated reads.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

/// Size limit for small files: the longest, `memory.stat` and `/proc/meminfo`, have a few kilobytes.
pub(super) const SMALL: usize = 16 * 1024;
/// Size limit for `/proc/zoneinfo`, which grows with zones times processors.
pub(super) const LARGE: usize = 4 * 1024 * 1024;

/// Where the kernel's files are. By default `/proc` and `/sys/fs/cgroup`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots {
    /// The process file system.
    pub proc: PathBuf,
    /// The cgroup file system: version 2, or the directory of version 1's hierarchies.
    pub cgroup: PathBuf,
}

impl Default for Roots {
    fn default() -> Self {
        Self { proc: PathBuf::from("/proc"), cgroup: PathBuf::from("/sys/fs/cgroup") }
    }
}

/// Opens without acquiring a controlling terminal, without waiting for the other end of a FIFO, and
/// close-on-exec.
pub(super) fn open(path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let flags = flags | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

/// The first `cap` bytes of a file as text; invalid UTF-8 is replaced.
pub(super) fn read(path: &Path, cap: usize) -> io::Result<String> {
    let file = open(path, OFlags::RDONLY)?;
    let mut bytes = Vec::new();
    io::Read::read_to_end(
        &mut io::Read::take(File::from(file), u64::try_from(cap).unwrap_or(u64::MAX)),
        &mut bytes,
    )?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// A small file kept open. Each read starts at its beginning and uses the file's own buffer: it does not
/// allocate.
pub(super) struct OpenFile {
    fd: OwnedFd,
    path: PathBuf,
    buffer: Box<[u8; 4096]>,
}

impl OpenFile {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let fd = open(path, OFlags::RDONLY)?;
        Ok(Self { fd, path: path.to_path_buf(), buffer: Box::new([0; 4096]) })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The current text, without what is past 4 KiB or follows invalid UTF-8.
    pub(super) fn read_text(&mut self) -> io::Result<&str> {
        let length =
            rustix::io::retry_on_intr(|| rustix::io::pread(&self.fd, &mut self.buffer[..], 0))?;
        let bytes = self.buffer.get(..length).unwrap_or_default();
        Ok(match std::str::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => bytes
                .get(..error.valid_up_to())
                .and_then(|start| std::str::from_utf8(start).ok())
                .unwrap_or_default(),
        })
    }
}
