//! Another size of the volume of a delta in use.
//!
//! The header says the size. It is written when everything else is as the new size needs it, so that a crash leaves the
//! volume of before or the new one; and what lies beyond the end, on the store or in the map, has no meaning.
//!
//! # Growing, in this order on the disk
//! 1. The store is large enough.
//! 2. Between the old end and the end of its block are zeroes: a write up to the end of the volume leaves there what the store
//!    held, and the block may be held.
//! 3. No bit of a block beyond the old end is set. One may be, after the volume became smaller; and the store may hold
//!    anything where the map of a larger volume is.
//! 4. Both are stable. Then the header is written, and is stable before a request can see the new size.
//!
//! What was added reads as zeroes: the delta does not hold it, and what is below does not show beyond the smallest size that
//! the volume has had (`DeltaHeader::shown`).
//!
//! # Shrinking
//! No request beyond the new end is in flight. The header is written, with the new size and less that shows. From then on the
//! blocks beyond have no meaning: their pending bits are forgotten, and their space is given back: a file is truncated, other
//! stores are discarded there afterwards (`Layers::discard_beyond_end`), while requests and flushes go on.

use std::sync::atomic::Ordering;

use ebb_block::{BlockError, BlockStore, Io, Resize, ResizeError, ZeroFlags};
use ebb_image::{BLOCK, BLOCKS_PER_PAGE, DeltaHeader, Layout, LayoutError, map_page};

use super::{Delta, PendingChange};
use crate::cached_store::CachedStore;
use crate::page_states::EMPTY;

/// The errors of a layout as those of a resize.
fn no_layout(error: LayoutError) -> ResizeError {
    match error {
        LayoutError::Full { most } => ResizeError::Room { most },
        LayoutError::Size(_) => ResizeError::Unsupported {
            why: "an overlay has at most 64 TiB",
            remedy: "choose a smaller size",
        },
        error => ResizeError::Metadata(std::io::Error::other(error).into()),
    }
}

fn not_written(error: BlockError) -> ResizeError {
    ResizeError::Metadata(error.into())
}

impl Delta {
    /// The layout for a volume of another size.
    ///
    /// # Errors
    /// There is no room for it.
    pub(crate) fn layout_at(&self, size: u64) -> Result<Layout, ResizeError> {
        self.layout().resized(size).map_err(no_layout)
    }

    /// Makes the volume larger. One call at a time.
    ///
    /// # Errors
    /// [`ResizeError`]; the volume keeps its size.
    pub(crate) async fn grow(
        &self,
        io: &Io,
        store: &CachedStore,
        to: u64,
    ) -> Result<(), ResizeError> {
        let new = self.layout_at(to)?;
        grow_store(io, store, new.store_size()).await?;
        let _turn = self.saving.enter().await;
        self.must_be_uninterrupted().map_err(not_written)?;
        let change = PendingChange::begin(self);
        let prepared = self.prepare_growth(io, store, new).await;
        change.end();
        prepared.map_err(not_written)?;
        let change = |header: &mut DeltaHeader| header.layout = new;
        self.write_header(io, store, change).await.map_err(not_written)
    }

    /// Zeroes and an empty map beyond the end, stable.
    async fn prepare_growth(
        &self,
        io: &Io,
        store: &CachedStore,
        new: Layout,
    ) -> Result<(), BlockError> {
        let old = self.layout();
        let flags = ZeroFlags { may_unmap: true, fast_only: false };
        let rest = old.size().next_multiple_of(BLOCK) - old.size();
        if rest > 0 {
            store.write_zeroes(io, old.data_start() + old.size(), rest, flags).await?;
        }
        self.clear_beyond(io, store, old.blocks()).await?;
        let pages = old.map_pages()..new.map_pages();
        if !pages.is_empty() {
            let start = old.map_slot(pages.start, 0);
            let length = old.map_slot(pages.end, 0) - start;
            store.write_zeroes(io, start, length, flags).await?;
            self.pages.set_known(pages.start, EMPTY);
            let mut found = self.found.lock();
            found.retain(|(page, _)| *page < pages.start);
            self.has_found.store(!found.is_empty(), Ordering::Release);
        }
        self.saves.fetch_add(1, Ordering::SeqCst);
        self.flush_store(io, store).await
    }

    /// Clears the bits from a block on in the page of that block.
    async fn clear_beyond(
        &self,
        io: &Io,
        store: &CachedStore,
        block: u64,
    ) -> Result<(), BlockError> {
        let first = block % BLOCKS_PER_PAGE;
        let page = u32::try_from(block / BLOCKS_PER_PAGE).unwrap_or(u32::MAX);
        if first == 0 {
            return Ok(());
        }
        // Also if the copy that counts has none: a save that failed may have left such bits in the other slot, which this
        // write replaces. The page is looked at first, so that it is among those that are made stable.
        drop(self.newest(io, store, page).await?);
        // Before the other slot is written, as in a save.
        self.make_found_stable(io, store).await?;
        let clear = |page: &mut [u8]| map_page::clear_from(&mut page[map_page::HEADER..], first);
        let written = self.write_page(io, store, page, clear).await?;
        self.flush_store(io, store).await?;
        self.note_stable(&written);
        Ok(())
    }

    /// Makes the volume smaller. One call at a time, and no request beyond the new end is in flight.
    ///
    /// # Errors
    /// [`ResizeError`]; the volume keeps its size.
    pub(crate) async fn shrink(
        &self,
        io: &Io,
        store: &CachedStore,
        to: u64,
    ) -> Result<(), ResizeError> {
        let new = self.layout_at(to)?;
        {
            let _turn = self.saving.enter().await;
            self.must_be_uninterrupted().map_err(not_written)?;
            let change = |header: &mut DeltaHeader| {
                header.layout = new;
                header.shown = header.shown.min(to);
            };
            self.write_header(io, store, change).await.map_err(not_written)?;
            let mut pending = self.pending.lock();
            pending.cut(new.blocks());
            self.has_pending.store(!pending.is_empty(), Ordering::Release);
            self.own.begin_again();
        }
        // The volume has its new size, whatever becomes of the space. A device or an image keeps what the operator gave it.
        if store.store().is_regular_file() {
            let order = Resize { to: Some(new.store_size()), shrink: true };
            let _ = store.resize(io, order).await;
        }
        Ok(())
    }

    /// Discards what the store has beyond the end of a volume that had `from` bytes and became smaller. No growth begins
    /// before it ends.
    pub(crate) async fn discard_beyond_end(&self, io: &Io, store: &CachedStore, from: u64) {
        let Ok(old) = self.layout_at(from) else { return };
        let start = self.layout().store_size();
        let length = old.store_size().min(store.size()).saturating_sub(start);
        if length > 0 && store.capabilities().discard {
            let _ = store.discard(io, start, length).await;
        }
    }
}

/// Makes the store large enough; of one that cannot grow from here, adopts what it has got elsewhere.
async fn grow_store(io: &Io, store: &CachedStore, needed: u64) -> Result<(), ResizeError> {
    if store.size() >= needed {
        return Ok(());
    }
    let order = Resize { to: Some(needed), shrink: false };
    match store.resize(io, order).await {
        Ok(_) => {}
        Err(ResizeError::Device { size } | ResizeError::Server { size }) if size >= needed => {
            store.resize(io, Resize { to: None, shrink: false }).await?;
        }
        Err(ResizeError::Device { size } | ResizeError::Server { size }) => {
            return Err(ResizeError::TooSmall { size, needed });
        }
        Err(error) => return Err(error),
    }
    match store.size() {
        size if size < needed => Err(ResizeError::TooSmall { size, needed }),
        _ => Ok(()),
    }
}
