//! [`plain_parent`]: by what a delta recognises a base that is no delta.

use ebb_block::{BlockError, BlockStore, Buf, Io};
use ebb_image::{PAGE, Parent, map_page};

use crate::cached_store::CachedStore;

const SECTOR: u64 = 512;

/// Bytes from the store, or its cache.
pub(crate) async fn read(
    io: &Io,
    store: &impl BlockStore,
    offset: u64,
    bytes: usize,
) -> Result<Buf, BlockError> {
    let buf = io.pool().take(bytes).await;
    let (result, buf) = store.read(io, buf, offset).await;
    result.map(|()| buf)
}

/// Samples of a base.
const SAMPLES: u64 = 32;

/// Where the samples of a plain base of `size` bytes are: offsets and bytes.
pub fn sample_places(size: u64) -> impl Iterator<Item = (u64, usize)> {
    let last = size.saturating_sub(PAGE) / SECTOR * SECTOR;
    (0..=SAMPLES).map(move |number| {
        let at = u128::from(last) * u128::from(number) / u128::from(SAMPLES);
        let offset = u64::try_from(at).unwrap_or(0) / PAGE * PAGE;
        let offset = if number == SAMPLES { last } else { offset };
        (offset, usize::try_from(PAGE.min(size - offset)).unwrap_or(map_page::BYTES))
    })
}

/// What a delta above a plain base records of it: its size, and a checksum of samples, the first and the last 4 KiB among
/// them.
///
/// # Errors
/// Those of the store.
pub async fn plain_parent(io: &Io, store: &CachedStore) -> Result<Parent, BlockError> {
    let size = store.size();
    let mut samples = 0u32;
    for (offset, bytes) in sample_places(size) {
        // Not by way of the cache, as a header: reading ahead from a sample would be wasted.
        let buf = read(io, store.store(), offset, bytes).await?;
        samples = map_page::checksum(samples, &buf);
    }
    Ok(Parent { size, samples, place: store.place(), ..Parent::default() })
}
