//! `ebbd image clear`: writes zeroes over a store, so that a delta can be made there.
//!
//! # Invariants
//! - What is known to hold something is cleared only if that was asked for, and a regular file never.

use ebb_block::{BlockStore, ZeroFlags};
use ebb_cache::CachedStore;
use ebb_config::StoreUri;
use ebb_io::Io;

use super::error::ImageError;
use super::open::{Access, open_now};
use crate::blank::{Blankness, blankness};

/// Bytes of a request: it also is what a store that cannot zero by itself writes before other requests are served.
const AT_ONCE: u64 = 16 << 20;

/// Clears a store, and returns its size.
///
/// # Errors
/// [`ImageError`].
pub(super) async fn clear(io: &Io, uri: &StoreUri, force: bool) -> Result<u64, ImageError> {
    let refused = || ImageError::NotCleared { place: uri.to_string() };
    if !matches!(uri, StoreUri::File(_) | StoreUri::Nbd(_) | StoreUri::Rbd(_)) {
        return Err(refused());
    }
    let named = uri.clone();
    let store = io.offload(move || open_now(&named, Access::Write)).await?;
    let store = CachedStore::from(store);
    if store.store().is_regular_file() {
        return Err(refused());
    }
    let failed = |error| ImageError::of(store.place())(error);
    let found = Box::pin(blankness(io, &store)).await.map_err(failed)?;
    let size = store.size();
    if found == Blankness::Zeroes {
        return Ok(size);
    }
    if found == Blankness::Used && !force {
        return Err(ImageError::Used { place: uri.to_string() });
    }
    let flags = ZeroFlags { may_unmap: true, fast_only: false };
    let mut at = 0;
    while at < size {
        let length = AT_ONCE.min(size - at);
        store.write_zeroes(io, at, length, flags).await.map_err(failed)?;
        at += length;
    }
    store.flush(io).await.map_err(failed)?;
    Ok(size)
}
