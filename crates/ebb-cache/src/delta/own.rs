//! Counting the blocks that a delta holds.

use ebb_block::{BlockError, BlockStore, Io};
use ebb_image::{BLOCKS_PER_PAGE, Layout, MapSlot, map_page};

use super::Delta;
use crate::base_samples::read;
use crate::cached_store::CachedStore;
use crate::page_states::{EMPTY, FIRST, SECOND};

/// Map pages that are read at once: 256 KiB.
const PAGES: u32 = 32;
/// Bytes of both slots of a page.
const BOTH: u64 = 2 * map_page::BYTES as u64;

impl Delta {
    /// Blocks that it holds, as of its last flush; `None` until they are counted.
    pub(crate) fn own_blocks(&self) -> Option<u64> {
        self.own.get()
    }

    /// Counts the blocks of some more map pages, which takes a read of 256 KiB at most. True: all are counted.
    ///
    /// # Errors
    /// Those of the store.
    pub(crate) async fn count_own(&self, io: &Io, store: &CachedStore) -> Result<bool, BlockError> {
        // Saves change pages and their numbers.
        let _turn = self.saving.enter().await;
        let Some(first) = self.own.next() else { return Ok(true) };
        let layout = self.layout();
        let start = layout.map_slot(first, 0);
        let rest = layout.map_slot(layout.map_pages(), 0).saturating_sub(start);
        if rest == 0 {
            self.own.note_counted(first, 0, true);
            return Ok(true);
        }
        // Not by way of the cache, where they would replace pages that are used, and be noted as looked at.
        let store = store.store();
        let found = store.extents(io, start, rest, 1).await?;
        let hole = found.first().filter(|extent| extent.hole).map_or(0, |extent| extent.length);
        let empty = u32::try_from(hole.min(rest) / BOTH).unwrap_or(0);
        if empty > 0 {
            self.note_counted(layout, first + empty, 0);
            return Ok(self.own.next().is_none());
        }
        let end = layout.map_pages().min(first.saturating_add(PAGES));
        let bytes = usize::try_from(u64::from(end - first) * BOTH).unwrap_or(0);
        let slots = read(io, store, start, bytes).await?;
        let mut blocks = 0;
        for (page, both) in (first..end).zip(slots.chunks(2 * map_page::BYTES)) {
            blocks += self.blocks_of(layout, page, both.split_at(map_page::BYTES));
        }
        self.note_counted(layout, end, blocks);
        Ok(self.own.next().is_none())
    }

    fn note_counted(&self, layout: Layout, end: u32, blocks: u64) {
        self.own.note_counted(end, blocks, end >= layout.map_pages());
    }

    /// The blocks of a page, by the slot of it that counts.
    fn blocks_of(&self, layout: Layout, page: u32, (first, second): (&[u8], &[u8])) -> u64 {
        let of = |slot| MapSlot::of(slot, page, self.id);
        let slot = match self.pages.load(page) {
            Some(EMPTY) => None,
            Some(FIRST) => Some(0),
            Some(SECOND) => Some(1),
            _ => MapSlot::newest([of(first), of(second)]),
        };
        let Some(slot) = slot else { return 0 };
        let bits = if slot == 0 { first } else { second };
        let start = u64::from(page) * BLOCKS_PER_PAGE;
        let end = layout.blocks().saturating_sub(start).min(BLOCKS_PER_PAGE);
        map_page::count(&bits[map_page::HEADER..], end)
    }
}
