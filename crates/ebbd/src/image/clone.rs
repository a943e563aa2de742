//! `ebbd image clone`: a copy of a raw file that shares its blocks, by the file system.
//!
//! # Invariants
//! - The source is locked as a read-only store is, so that no daemon writes to it meanwhile.
//! - As every new file, the copy has its name when it is complete and stable.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;

use ebb_config::StoreUri;
use rustix::io::Errno;

use super::destination::NewFile;
use super::error::ImageError;
use super::open::{Access, open_now};

/// Makes the copy. Blocks.
///
/// # Errors
/// [`ImageError`]; [`ImageError::NoReflink`] where the file system cannot do it.
pub(super) fn clone_file(source: &StoreUri, dest: &StoreUri) -> Result<(), ImageError> {
    let no_file = |uri: &StoreUri| ImageError::NoFile { place: uri.to_string() };
    let StoreUri::File(from) = source else { return Err(no_file(source)) };
    let StoreUri::File(to) = dest else { return Err(no_file(dest)) };
    // First: it says what is wrong with the source, and opening a FIFO would wait for its other end.
    let locked = open_now(source, Access::Read)?;
    if !std::fs::metadata(from).map_err(ImageError::io(from, "look at it"))?.is_file() {
        return Err(no_file(source));
    }
    let data = File::open(from).map_err(ImageError::io(from, "open it"))?;
    if std::fs::symlink_metadata(to).is_ok() {
        let (place, holds) = (dest.to_string(), "exists, and a clone is a new file".to_owned());
        return Err(ImageError::Exists { place, holds });
    }
    let new = NewFile::at(to);
    let mut how = File::options();
    let copy = how.write(true).create_new(true).mode(0o600).open(new.partial());
    let copy = copy.map_err(ImageError::io(to, "create it (does its folder exist?)"))?;
    rustix::fs::ioctl_ficlone(&copy, &data).map_err(|error| match error {
        Errno::OPNOTSUPP | Errno::XDEV | Errno::INVAL | Errno::NOTTY | Errno::NOSYS => {
            ImageError::NoReflink { place: dest.to_string(), reason: error.into() }
        }
        error => ImageError::io(to, "clone into it")(error.into()),
    })?;
    copy.sync_all().map_err(ImageError::io(to, "make it stable"))?;
    drop(locked);
    new.finish()
}
