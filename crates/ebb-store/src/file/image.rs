//! The file of an image, which has any size and a disk in it.

use std::path::Path;

use ebb_io::Fd;

use super::FileStore;
use crate::open::{self, Content};
use crate::open_options::{OpenError, OpenOptions};

impl FileStore {
    /// As [`FileStore::open`], for the file of an image: it may have any size, and is aligned to sectors at most.
    pub(crate) fn open_image(
        path: &Path,
        options: &OpenOptions,
    ) -> Result<(FileStore, Vec<String>), OpenError> {
        Ok(FileStore::of(open::open(path, options, Content::Image)?, path, options))
    }

    /// Its descriptor, perhaps open for direct I/O.
    pub(crate) fn descriptor(&self) -> &Fd {
        &self.fd
    }
}
