//! Which layer of a stack holds what: by the block maps of its deltas, from the top down.
//!
//! # Invariants
//! - Beyond the end of a delta are zeroes, and so they are beyond what shows of the layers below it ([`Delta::shown`]).
//! - A run ends where a layer above begins to hold something.
//!
//! [`Delta::shown`]: crate::delta::Delta::shown

use std::pin::pin;

use ebb_block::{BLOCK, BlockError, Io, Operation};
use ebb_image::BLOCKS_PER_PAGE;

use super::{LayerRun, LayerStack, MapMiss, StackMap, no_such_layer};
use crate::delta::LoadedPage;

impl LayerStack<'_> {
    /// Which layer holds the byte at `offset`, and for how many of the `length` bytes from there, at least one; from the
    /// block maps that are in memory and those of `loaded`.
    #[inline]
    pub(crate) fn find(
        self,
        io: &Io,
        offset: u64,
        length: u64,
        loaded: &[LoadedPage],
    ) -> Result<LayerRun, MapMiss> {
        match &self.lower.map {
            StackMap::Given(map) => Ok(map.run(offset, length)),
            StackMap::Deltas { .. } => self.find_below(io, 0, (offset, length), loaded),
        }
    }

    /// As [`LayerStack::find`] in a stack without the first layers, as far as they are deltas.
    fn find_below(
        self,
        io: &Io,
        skipped: usize,
        (offset, mut length): (u64, u64),
        loaded: &[LoadedPage],
    ) -> Result<LayerRun, MapMiss> {
        let deltas = self.lower.deltas();
        let block = offset / BLOCK;
        let mut blocks = (offset + length).div_ceil(BLOCK) - block;
        let run = |layer, blocks: u64, length| {
            let end = ((block + blocks) * BLOCK).min(offset + length);
            LayerRun { layer, length: end - offset }
        };
        let zeroes = self.lower.layers.len() + 1;
        let page = u32::try_from(block / BLOCKS_PER_PAGE).unwrap_or(u32::MAX);
        let first = block % BLOCKS_PER_PAGE;
        for (number, delta) in deltas.iter().enumerate().skip(skipped) {
            // Beyond the end of a layer are zeroes, whatever is below it there.
            let own = delta.layout().size().saturating_sub(offset);
            if own == 0 {
                return Ok(run(zeroes, blocks, length));
            }
            length = length.min(own);
            blocks = blocks.min((offset % BLOCK + own).div_ceil(BLOCK));
            let loaded = loaded.iter().find(|one| (one.layer, one.page) == (number, page));
            let found = match (loaded, self.layer(number)) {
                (Some(loaded), _) => delta.find_loaded(loaded, first, blocks),
                (None, Some(store)) => delta.find(io, store, (page, first), blocks),
                (None, None) => None,
            };
            let Some(found) = found else { return Err(MapMiss { layer: number, page }) };
            blocks = blocks.min(found.blocks);
            if found.held {
                return Ok(run(number, blocks, length));
            }
            // Nor does what is below show beyond this.
            let shown = delta.shown().saturating_sub(offset);
            if shown == 0 {
                return Ok(run(zeroes, blocks, length));
            }
            length = length.min(shown);
        }
        Ok(run(deltas.len(), blocks, length))
    }

    /// As [`LayerStack::find`]; loads block maps that are not in memory.
    pub(crate) async fn find_loaded(
        self,
        io: &Io,
        offset: u64,
        length: u64,
    ) -> Result<LayerRun, BlockError> {
        self.find_loaded_below(io, 0, (offset, length)).await
    }

    /// As [`LayerStack::find_loaded`] in a stack without the first `skipped` layers, as far as they are deltas.
    pub(crate) async fn find_loaded_below(
        self,
        io: &Io,
        skipped: usize,
        (offset, length): (u64, u64),
    ) -> Result<LayerRun, BlockError> {
        let mut loaded: Vec<LoadedPage> = Vec::new();
        loop {
            let found = match skipped {
                0 => self.find(io, offset, length, &loaded),
                _ => self.find_below(io, skipped, (offset, length), &loaded),
            };
            let miss = match found {
                Ok(run) => return Ok(run),
                Err(miss) => miss,
            };
            let (delta, store) = (self.lower.delta(miss.layer), self.layer(miss.layer));
            let Some((delta, store)) = delta.zip(store) else {
                return Err(no_such_layer(miss.layer, Operation::Read, offset, length));
            };
            let load = pin!(delta.load(io, store, (miss.layer, miss.page)));
            let page = self.end(load, store, Operation::Read, (offset, length)).await?;
            // Instead of one that is older than a save.
            loaded.retain(|other| (other.layer, other.page) != (page.layer, page.page));
            loaded.push(page);
        }
    }
}
