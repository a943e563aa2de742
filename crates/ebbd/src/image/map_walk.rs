//! [`MapWalk`]: the block map of a delta, read from its start to its end.
//!
//! # Invariants
//! - Memory: one map page. The page that counts is the one that a daemon would use.
//! - Parts of the map that were never written are holes, and are not read.

use std::ops::Range;
use std::sync::Arc;

use ebb_block::{BlockStore, Buf};
use ebb_cache::CachedStore;
use ebb_image::{BLOCK, BLOCKS_PER_PAGE, Layout, MapCopy, MapSlot, PAGE, map_page};
use ebb_io::Io;

use super::error::ImageError;

/// See the module.
pub(super) struct MapWalk {
    store: Arc<CachedStore>,
    layout: Layout,
    delta: [u8; 16],
    /// The page that was read last: both slots, and which one counts.
    page: Option<(u32, Buf, [MapSlot; 2])>,
    /// Pages whose slots are holes.
    empty: Range<u32>,
}

impl MapWalk {
    pub(super) fn new(store: Arc<CachedStore>, layout: Layout, delta: [u8; 16]) -> MapWalk {
        MapWalk { store, layout, delta, page: None, empty: 0..0 }
    }

    pub(super) fn layout(&self) -> Layout {
        self.layout
    }

    /// Goes to a page: both slots of it, and what they hold; `None` if they are holes, as are all pages up to the one that
    /// is returned.
    ///
    /// # Errors
    /// Those of the store.
    pub(super) async fn load(&mut self, io: &Io, page: u32) -> Result<LoadedSlots<'_>, ImageError> {
        if !self.empty.contains(&page)
            && self.page.as_ref().map(|(number, ..)| *number) != Some(page)
        {
            let start = self.layout.map_slot(page, 0);
            let end = self.layout.map_slot(self.layout.map_pages(), 0).min(self.store.size());
            let rest = end.saturating_sub(start);
            let extents = self.store.extents(io, start, rest, 1).await;
            let extents = extents.map_err(ImageError::of(self.store.place()))?;
            let hole = extents.first().filter(|extent| extent.hole && extent.offset == start);
            let pages = hole.map_or(0, |hole| hole.length / (2 * PAGE));
            let pages = u32::try_from(pages).unwrap_or(0);
            if pages > 0 {
                self.empty = page..page.saturating_add(pages);
            } else {
                let bytes = 2 * map_page::BYTES;
                let buf = match self.page.take() {
                    Some((_, buf, _)) => buf,
                    None => io.pool().take(bytes).await,
                };
                let (result, buf) = self.store.read(io, buf, start).await;
                result.map_err(ImageError::of(self.store.place()))?;
                let of = |bytes| MapSlot::of(bytes, page, self.delta);
                let slots = [of(&buf[..map_page::BYTES]), of(&buf[map_page::BYTES..])];
                self.page = Some((page, buf, slots));
            }
        }
        if self.empty.contains(&page) {
            return Ok(LoadedSlots::Empty(self.empty.end));
        }
        match &self.page {
            Some((_, buf, slots)) => Ok(LoadedSlots::Page(buf, *slots)),
            None => Ok(LoadedSlots::Empty(page + 1)),
        }
    }

    /// What the delta has of the byte at `at`, and how many bytes from there are alike, at least 1
    /// and at most `most`.
    ///
    /// # Errors
    /// Those of the store.
    pub(super) async fn run(
        &mut self,
        io: &Io,
        at: u64,
        most: u64,
    ) -> Result<(MapContent, u64), ImageError> {
        let block = at / BLOCK;
        // At most 2^20 pages.
        let page = u32::try_from(block / BLOCKS_PER_PAGE).unwrap_or(u32::MAX);
        let first = block % BLOCKS_PER_PAGE;
        let (content, end) = match self.load(io, page).await? {
            LoadedSlots::Empty(end) => (MapContent::Absent, u64::from(end) * BLOCKS_PER_PAGE),
            LoadedSlots::Page(both, slots) => {
                let rest = BLOCKS_PER_PAGE - first;
                let (content, blocks) = match MapCopy::of(slots) {
                    MapCopy::Slot(slot) => {
                        let start = slot * map_page::BYTES;
                        let bits = &both[start + map_page::HEADER..start + map_page::BYTES];
                        let (held, blocks) = map_page::run(bits, first, rest);
                        (if held { MapContent::Held } else { MapContent::Absent }, blocks)
                    }
                    MapCopy::Never => (MapContent::Absent, rest),
                    MapCopy::Lost => (MapContent::Lost { page }, rest),
                };
                (content, block + blocks)
            }
        };
        let length = end.saturating_mul(BLOCK).saturating_sub(at);
        Ok((content, length.min(most).max(1)))
    }
}

/// What the block map says of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MapContent {
    /// The delta holds it.
    Held,
    /// What is below shows.
    Absent,
    /// Not known: this page of the map is damaged.
    Lost { page: u32 },
}

/// What [`MapWalk::load`] has found.
pub(super) enum LoadedSlots<'a> {
    /// Holes, up to this page.
    Empty(u32),
    /// Both slots of the page, and what they hold.
    Page(&'a [u8], [MapSlot; 2]),
}
