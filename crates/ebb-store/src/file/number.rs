//! The number of an open file, by which it is compared with others.

use ebb_sandbox::threads;
use rustix::fs::FileType;

use super::FileStore;

/// Identifies an open file, or the device behind a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileNumber {
    /// A file.
    File {
        /// The file system, as `st_dev`.
        device: u64,
        /// Its inode number.
        inode: u64,
    },
    /// A block device, as `st_rdev`.
    Device(u64),
}

impl FileStore {
    /// Identifies the open file, even if it was renamed.
    ///
    /// # Errors
    /// Those of `fstat`.
    pub fn number(&self) -> std::io::Result<FileNumber> {
        let fd = self.fd.clone();
        // Not by a worker itself.
        let found = threads::call(move || rustix::fs::fstat(&*fd))??;
        if FileType::from_raw_mode(found.st_mode) == FileType::BlockDevice {
            return Ok(FileNumber::Device(found.st_rdev));
        }
        Ok(FileNumber::File { device: found.st_dev, inode: found.st_ino })
    }
}
