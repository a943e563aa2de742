//! The headers of overlays in files, which a daemon may have open.

use std::fs::File;
use std::io::{ErrorKind, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::Path;

use ebb_cache::{DeltaError, sample_places};
use ebb_image::{
    DeltaHeader, HEADER_BYTES, HEADER_SLOTS, HeaderError, MAP_START, Parent, map_page,
};
use ebb_store::OpenError;

use crate::stores::StoreError;

/// The base into which a commit of the overlay in a file has begun and not ended, if the file can
/// be read and says so.
pub(crate) fn half_committed_base(path: &Path) -> Option<String> {
    let parent = header_at(path, false).ok()??.parent;
    parent.is_mixed().then(|| parent.shown_place())
}

/// Returns true if the delta in a file needs no base; false if the file cannot be read.
pub(crate) fn is_flattened(path: &Path) -> bool {
    let header = header_at(path, false);
    header.is_ok_and(|found| found.is_some_and(|found| found.parent == Parent::default()))
}

/// The header of a delta; `None` if it may yet be made: the places of the header are empty.
pub(crate) fn header_at(path: &Path, create: bool) -> Result<Option<DeltaHeader>, StoreError> {
    let (file, size) = open(path)?;
    let mut slots = [vec![0; HEADER_BYTES], vec![0; HEADER_BYTES]];
    for (slot, at) in slots.iter_mut().zip(HEADER_SLOTS) {
        match file.read_exact_at(slot, at) {
            // It is too small for a header.
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {}
            outcome => outcome.map_err(unread(path))?,
        }
    }
    let place = || path.display().to_string();
    match DeltaHeader::decode([&slots[0], &slots[1]]) {
        Ok(header) if header.layout.store_size() > size => {
            let (place, expected) = (place(), header.layout.store_size());
            Err(DeltaError::Truncated { place, size, expected }.into())
        }
        Ok(header) => Ok(Some(header)),
        Err(HeaderError::NotADelta) if slots.iter().flatten().all(|byte| *byte == 0) => Ok(None),
        Err(HeaderError::NotADelta) if has_map(&file) => {
            let source = HeaderError::Damaged;
            Err(DeltaError::Header { place: place(), source }.into())
        }
        Err(HeaderError::NotADelta) if create && size > 0 => {
            Err(StoreError::NotEmpty { place: place() })
        }
        Err(source) => Err(DeltaError::Header { place: place(), source }.into()),
    }
}

/// A file that is no delta as the parent of one.
pub(crate) fn plain_parent(path: &Path, place: String) -> Result<Parent, StoreError> {
    let (file, size) = open(path)?;
    let mut samples = 0;
    for (offset, bytes) in sample_places(size) {
        let mut sample = vec![0; bytes];
        file.read_exact_at(&mut sample, offset).map_err(unread(path))?;
        samples = map_page::checksum(samples, &sample);
    }
    Ok(Parent { size, samples, place, ..Parent::default() })
}

/// Returns true if a file has the block map of a delta.
fn has_map(file: &File) -> bool {
    let mut slots = vec![0; 2 * map_page::BYTES];
    file.read_exact_at(&mut slots, MAP_START).is_ok() && map_page::has_map(&slots)
}

/// A file or block device, and its size.
pub(crate) fn open(path: &Path) -> Result<(File, u64), StoreError> {
    let mut file = File::open(path).map_err(unread(path))?;
    let size = file.seek(SeekFrom::End(0)).map_err(unread(path))?;
    Ok((file, size))
}

pub(crate) fn unread(path: &Path) -> impl Fn(std::io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| {
        let action = "read it";
        OpenError::Io { path: path.clone(), action, source }.into()
    }
}
