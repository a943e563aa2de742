//! A test store that is the content of a file: names, identity and the first bytes are the file's, and what can be read of the
//! store is on the test disk.

use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ebb_block::{BlockError, Extent, Identity, Io, Operation};

use super::{Disk, TestStore, lock, place};
use crate::FileNumber;

/// Bytes that are in the file, too.
pub(super) const HEAD: u64 = 8192;
/// Zeroes of this size are a hole.
const BLOCK: usize = 4096;

impl TestStore {
    pub(super) fn open(disk: Arc<Disk>) -> TestStore {
        TestStore {
            #[cfg(feature = "sim")]
            name: crate::file_name::FileName::new(
                std::path::Path::new("a test"),
                disk.file.is_none(),
            ),
            disk,
            tracking: Arc::default(),
        }
    }

    /// As a file does. There are folders in a simulation only; elsewhere the disk says whether
    /// flushing one fails.
    #[allow(clippy::unused_async, reason = "as the method of a file")]
    pub(crate) async fn make_name_stable(&self, _io: &Io) -> Result<(), BlockError> {
        if self.disk.name_fails.load(Ordering::SeqCst) {
            let source = io::Error::other("cannot flush the folder of a test");
            return Err(BlockError::from_io(source, Operation::Flush, 0, 0));
        }
        #[cfg(feature = "sim")]
        if let Some(file) = &self.disk.file {
            return self.name.make_stable_now(file);
        }
        Ok(())
    }

    pub(crate) fn lost_nothing(&self, error: &BlockError) -> bool {
        let timed_out = |source: &io::Error| source.kind() == io::ErrorKind::TimedOut;
        self.disk.silent.load(Ordering::SeqCst) && error.source.as_ref().is_some_and(timed_out)
    }

    pub(crate) fn reports_lost_writes(&self) -> bool {
        self.disk.reports_once.load(Ordering::SeqCst)
    }

    pub(crate) fn has_stable_name(&self) -> bool {
        #[cfg(feature = "sim")]
        if self.disk.file.is_some() {
            return self.name.is_stable();
        }
        !self.disk.name_fails.load(Ordering::SeqCst)
    }
}

impl Disk {
    /// The number of its file, if it has one.
    pub(crate) fn number(&self) -> Option<io::Result<FileNumber>> {
        let found = self.file.as_ref()?.metadata();
        Some(found.map(|found| FileNumber::File { device: found.dev(), inode: found.ino() }))
    }

    pub(super) fn file_identity(&self) -> Option<Identity> {
        self.file.as_ref().map(crate::identity_of_file)
    }

    /// Writes the first bytes to the file. A file in memory takes them.
    pub(super) fn write_head(&self) {
        let Some(file) = &self.file else { return };
        let bytes = lock(&self.bytes);
        let head = bytes.seen.len().min(place(HEAD));
        let _ = file.write_all_at(&bytes.seen[..head], 0);
    }

    /// Holes and data of a range, if it has a file: what is zeroes is a hole, as on a file system that looks.
    pub(super) fn file_extents(
        &self,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Option<Vec<Extent>> {
        self.file.as_ref()?;
        let bytes = lock(&self.bytes);
        let (mut at, end) =
            (place(offset), place(offset.saturating_add(length)).min(bytes.seen.len()));
        let mut found: Vec<Extent> = Vec::new();
        while at < end {
            let until = (at / BLOCK * BLOCK + BLOCK).min(end);
            let hole = bytes.seen[at..until].iter().all(|byte| *byte == 0);
            let length = (until - at) as u64;
            let count = found.len();
            match found.last_mut() {
                Some(last) if last.hole == hole => last.length += length,
                _ if count >= limit => break,
                _ => found.push(Extent { offset: at as u64, length, hole }),
            }
            at = until;
        }
        Some(found)
    }
}
