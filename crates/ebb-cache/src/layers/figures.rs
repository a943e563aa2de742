//! What the layers of a volume hold and share, for statistics.

use ebb_block::BlockStore;

use super::Layers;
use crate::base::BaseLayer;
use crate::pages::PAGE;
use crate::shared_reads::SharedReads;

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

    /// What its reads found in the layers below.
    pub fn shared_reads(&self) -> SharedReads {
        self.stacked().map(|stacked| stacked.common.reads.sum()).unwrap_or_default()
    }
}
