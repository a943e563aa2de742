//! Whether an overlay was made above its base, by their files, which a daemon may have open.
//!
//! Bases on servers and in images of other formats are checked when the volume is opened.

use std::fs::File;
use std::io::{ErrorKind, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::Path;

use ebb_cache::{DeltaError, sample_places};
use ebb_config::{CHAIN_MOST, Config, NO_BASE, StoreUri, VolumeConfig};
use ebb_image::{
    DeltaHeader, HEADER_BYTES, HEADER_SLOTS, HeaderError, MAP_START, Parent, map_page,
};
use ebb_store::OpenError;

use crate::engine::snapshot_beside;
use crate::stores::StoreError;

/// Compares the delta of an overlay with its base and the snapshots between them.
///
/// # Errors
/// It was made above another base, or a file is no delta.
pub(super) fn check_base(config: &Config, volume: &VolumeConfig) -> Result<(), StoreError> {
    let (Some(base), StoreUri::File(path)) = (&volume.base, &volume.store) else { return Ok(()) };
    if is_absent(path) {
        // The daemon makes it, or its absence was reported.
        return Ok(());
    }
    let Some(mut header) = header_at(path, volume.create)? else { return Ok(()) };
    let Some(found) = parent_of(config, base)? else { return Ok(()) };
    for _ in 0..=CHAIN_MOST {
        let parent = &header.parent;
        if *parent == Parent::default() || parent.is(&found) {
            break;
        }
        let below = snapshot_beside(path, parent).filter(|_| parent.delta != found.delta);
        if let Some(path) = below.as_ref().filter(|path| is_absent(path))
            && parent.snapshot().is_some()
        {
            return Err(
                OpenError::Missing { path: path.clone(), read_only: true, link: None }.into()
            );
        }
        let Some(below) = below.filter(|below| below.exists()) else {
            return Err(DeltaError::other_base(volume.store.to_string(), parent, &found).into());
        };
        let Some(next) = header_at(&below, false)? else { break };
        header = next;
    }
    Ok(())
}

/// The base into which a commit of the overlay in a file has begun and not ended, if the file can be
/// read and says so.
pub(crate) fn half_committed_base(path: &Path) -> Option<String> {
    let parent = header_at(path, false).ok()??.parent;
    parent.is_mixed().then(|| parent.shown_place())
}

fn is_absent(path: &Path) -> bool {
    path.try_exists().is_ok_and(|there| !there)
}

/// The volume `base` as the parent of a delta; `None` if that is not known.
fn parent_of(config: &Config, base: &str) -> Result<Option<Parent>, StoreError> {
    if base == NO_BASE {
        return Ok(Some(Parent::default()));
    }
    let Some(volume) = config.volumes.get(base) else { return Ok(None) };
    let StoreUri::File(path) = &volume.store else { return Ok(None) };
    if volume.encryption.is_some() || !path.try_exists().unwrap_or(false) {
        return Ok(None);
    }
    let place = volume.store.to_string();
    if volume.base.is_some() {
        let Some(header) = header_at(path, volume.create)? else { return Ok(None) };
        let DeltaHeader { number, delta, layout, .. } = header;
        return Ok(Some(Parent { size: layout.size(), delta, number, samples: 0, place }));
    }
    let (file, size) = open(path)?;
    let mut samples = 0;
    for (offset, bytes) in sample_places(size) {
        let mut sample = vec![0; bytes];
        file.read_exact_at(&mut sample, offset).map_err(unread(path))?;
        samples = map_page::checksum(samples, &sample);
    }
    Ok(Some(Parent { size, samples, place, ..Parent::default() }))
}

/// The header of a delta; `None` if it may yet be made: the places of the header are empty.
fn header_at(path: &Path, create: bool) -> Result<Option<DeltaHeader>, StoreError> {
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

/// Returns true if a file has the block map of a delta.
fn has_map(file: &File) -> bool {
    let mut slots = vec![0; 2 * map_page::BYTES];
    file.read_exact_at(&mut slots, MAP_START).is_ok() && map_page::has_map(&slots)
}

/// A file or block device, and its size.
fn open(path: &Path) -> Result<(File, u64), StoreError> {
    let mut file = File::open(path).map_err(unread(path))?;
    let size = file.seek(SeekFrom::End(0)).map_err(unread(path))?;
    Ok((file, size))
}

fn unread(path: &Path) -> impl Fn(std::io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| {
        let action = "read it";
        OpenError::Io { path: path.clone(), action, source }.into()
    }
}
