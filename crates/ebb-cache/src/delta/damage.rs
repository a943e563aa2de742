//! Damage of a delta: how it is recognised, and its errors.

use ebb_block::{BlockError, BlockStore, ErrorKind, Io, Operation};
use ebb_image::{MAP_START, PAGE, map_page};

use crate::base_samples::read;
use crate::cached_store::CachedStore;

/// Returns true if the store has the block map of a delta, whose header may be damaged.
pub(super) async fn has_map(io: &Io, store: &CachedStore) -> Result<bool, BlockError> {
    let bytes = 2 * map_page::BYTES;
    if store.size() < MAP_START + 2 * PAGE {
        return Ok(false);
    }
    Ok(map_page::has_map(&read(io, store.store(), MAP_START, bytes).await?))
}

#[cold]
pub(super) fn damaged_page(page: u32, offset: u64) -> BlockError {
    let source = std::io::Error::other(format!(
        "page {page} of the block map is damaged: the store returned other data than was written; \
         remove the volume or stop the daemon, look at its files with `ebbd image check`, and \
         restore a damaged one from a backup"
    ));
    BlockError::new(ErrorKind::Io, Operation::Read, offset, PAGE).caused_by(Some(source))
}

#[cold]
pub(super) fn lost_page(page: u32, offset: u64) -> BlockError {
    let source = std::io::Error::other(format!(
        "page {page} of the block map is not what it was when the volume was opened: the store has lost it"
    ));
    BlockError::new(ErrorKind::Io, Operation::Write, offset, PAGE).caused_by(Some(source))
}
