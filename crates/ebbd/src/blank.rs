//! Whether a store is known to hold nothing, so that a new delta may take its place.
//!
//! # Invariants
//! - A regular file is blank if all of it is a hole: what takes no space was not written.
//! - A device, an export or an image that does not say so is blank if it reads as zeroes where file systems, partition tables,
//!   volume managers and images of all kinds have what they are recognised by, at the start and at the end, and at samples in
//!   between.

use ebb_block::{BlockError, BlockStore};
use ebb_cache::CachedStore;
use ebb_io::Io;

/// Extents that are looked at to find out that a store is one hole.
const EXTENTS: usize = 64;
/// What is read of the start and of the end, bytes.
const ENDS: u64 = 1 << 20;
/// Bytes of a sample, and how many there are.
const SAMPLE: u64 = 4096;
const SAMPLES: u64 = 32;
/// Bytes that are read at once.
const PIECE: u64 = 64 << 10;

/// What a store is known to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blankness {
    /// Zeroes only.
    Zeroes,
    /// Nothing that is recognised by anything, but perhaps data.
    Blank,
    /// Something.
    Used,
}

/// Looks at a store.
///
/// # Errors
/// Those of the store.
pub(crate) async fn blankness(io: &Io, store: &CachedStore) -> Result<Blankness, BlockError> {
    let size = store.size();
    let extents = store.extents(io, 0, size, EXTENTS).await?;
    let end = extents.last().map_or(0, |extent| extent.offset + extent.length);
    if end == size && extents.iter().all(|extent| extent.hole) {
        return Ok(Blankness::Zeroes);
    }
    if store.store().is_regular_file() {
        return Ok(Blankness::Used);
    }
    let last = size.saturating_sub(ENDS) / SAMPLE * SAMPLE;
    let mut parts = vec![(0, ENDS.min(size)), (last, size - last)];
    let sample = |number: u64| {
        let at = u128::from(last) * u128::from(number) / u128::from(SAMPLES);
        let at = u64::try_from(at).unwrap_or(0) / SAMPLE * SAMPLE;
        (at, SAMPLE.min(size - at))
    };
    parts.extend((1..SAMPLES).map(sample));
    for (start, length) in parts {
        let (mut at, end) = (start, start + length);
        while at < end {
            let bytes = usize::try_from(PIECE.min(end - at)).unwrap_or(0);
            let buf = io.pool().take(bytes).await;
            // Not by way of the cache, which would keep it.
            let (result, buf) = store.store().read(io, buf, at).await;
            result?;
            if buf.iter().any(|byte| *byte != 0) {
                return Ok(Blankness::Used);
            }
            at += bytes.max(1) as u64;
        }
    }
    Ok(Blankness::Blank)
}
