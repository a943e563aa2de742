//! What the layers of a volume hold and share, for statistics.

use ebb_block::{BlockError, BlockStore, Io};
use ebb_image::BLOCK;

use super::Layers;
use crate::base::BaseLayer;
use crate::pages::PAGE;
use crate::shared_reads::SharedReads;
use crate::stacked::StackedLayers;

/// A layer below the top one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerFigures {
    /// Its store.
    pub place: String,
    /// The name of the snapshot that it is.
    pub snapshot: Option<String>,
    /// Bytes of its cache, which other volumes may use, too.
    pub cache_bytes: u64,
}

impl Layers {
    /// The layers below the top one, from top to bottom.
    pub fn below(&self) -> Vec<LayerFigures> {
        let Some(stacked) = self.stacked() else { return Vec::new() };
        let stack = stacked.stack();
        let lower = &stack.lower;
        let figures = |(number, layer): (usize, &BaseLayer)| {
            // The layer above it names it.
            let parent = lower.deltas().get(number).map(|above| above.header().parent);
            let snapshot = parent.as_ref().and_then(|parent| parent.snapshot()).map(str::to_owned);
            let place = layer.store().place();
            let has_name = |name: &String| place.ends_with(&format!("@{name}"));
            let place = match (&parent, &snapshot) {
                // It was opened as the top layer, and its file has another name since.
                (Some(parent), Some(name)) if !has_name(name) => parent.shown_place(),
                _ => place,
            };
            let cache_bytes = layer.cache().map_or(0, |cache| cache.held() * PAGE);
            LayerFigures { place, snapshot, cache_bytes }
        };
        lower.layers.iter().enumerate().map(figures).collect()
    }

    /// Bytes of the caches of the layers below, which other volumes may use, too.
    pub fn shared_cache_bytes(&self) -> u64 {
        let Some(stacked) = self.stacked() else { return 0 };
        let stack = stacked.stack();
        let caches = stack.lower.layers.iter().filter_map(BaseLayer::cache);
        caches.map(|cache| cache.held() * PAGE).sum()
    }

    /// Bytes that its own delta holds, as of the last flush; `None` if it is no overlay, or they are not counted yet.
    pub fn own_bytes(&self) -> Option<u64> {
        let stack = self.stacked()?.stack();
        stack.lower.delta(0)?.own_blocks().map(|blocks| blocks * BLOCK)
    }

    /// Counts more of what its own delta holds, for [`Layers::own_bytes`]. True: there is no more to count.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn count_own(&self, io: &Io) -> Result<bool, BlockError> {
        let Some(stack) = self.stacked().map(StackedLayers::kept_stack) else { return Ok(true) };
        match stack.lower.delta(0) {
            Some(delta) => delta.count_own(io, &stack.top).await,
            None => Ok(true),
        }
    }

    /// What its reads found in the layers below.
    pub fn shared_reads(&self) -> SharedReads {
        self.stacked().map(|stacked| stacked.common.reads.sum()).unwrap_or_default()
    }
}
