//! [`Layers`]: a volume as a stack of one or more layers, the seam for overlays, snapshots and clones.
//!
//! The top layer is the volume's own: a store and its part of the cache. Below it are read-only layers, which volumes
//! share ([`BaseLayer`]). A [`LayerMap`] says which layer holds what.
//!
//! # Invariants
//! - With one layer a request costs one branch more than in [`CachedStore`] ([`Layers::start_read`]).
//! - A request is carried out in *parts*, each of which one layer holds whole, one after the other and straight into
//!   the request's buffer (`lower_layers.rs`).
//! - A layer that is shorter than the volume reads as zeroes beyond its end.
//! - A stack of several layers is writable only as an overlay: its top layer is a delta ([`Layers::overlay`]).

use std::sync::Arc;

use ebb_block::{
    BLOCK, BlockError, BlockStore, Buf, BufResult, Capabilities, DeviceIdentity, Extent, Identity,
    Io, Resize, ResizeError, SECTOR, Wanted, ZeroFlags,
};
use ebb_store::Store;

use crate::base::BaseLayer;
use crate::cache::CacheError;
use crate::cached_store::CachedStore;
use crate::delta::Delta;
use crate::lower_layers::{LayerMap, LayerStack, LowerLayers, ReadStep, StackMap, block_bytes};
use crate::overlay::Overlay;
use crate::stats::Mode;

/// Why a stack cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayersError {
    /// Requests could not be divided at every 4 KiB.
    #[error(
        "{place} has blocks of {block} bytes: a store used as a layer may have at most {}",
        BLOCK
    )]
    Blocks {
        /// The store.
        place: String,
        /// Bytes of its blocks.
        block: u32,
    },
    /// A layer is there twice.
    #[error("{place} is used twice as a layer of one volume")]
    Twice {
        /// The store.
        place: String,
    },
    /// The top layer would have a writeback cache.
    #[error(
        "a volume of several layers is read-only: set `cache = \"writethrough\"` for the volume on {place}"
    )]
    Writeback {
        /// The store.
        place: String,
    },
    /// A delta has no cache.
    #[error(
        "the delta {place} has no cache, which its block map needs: set `cache = \"writethrough\"` or `\"writeback\"`"
    )]
    NoCache {
        /// The store.
        place: String,
    },
    /// The volume cannot have a part of the cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
}

/// The layers of a volume, used as one store.
#[derive(Debug)]
pub struct Layers {
    top: CachedStore,
    lower: Option<Box<LowerLayers>>,
}

impl From<CachedStore> for Layers {
    /// One layer.
    fn from(top: CachedStore) -> Layers {
        Layers { top, lower: None }
    }
}

impl From<Store> for Layers {
    /// One layer, without a cache.
    fn from(store: Store) -> Layers {
        CachedStore::from(store).into()
    }
}

impl Layers {
    /// The layers of the volume called `name`: `top`, which has its size, and those of `below` from top to bottom.
    ///
    /// # Errors
    /// [`LayersError`].
    pub fn stack(
        name: &str,
        top: CachedStore,
        below: Vec<BaseLayer>,
        map: Box<dyn LayerMap>,
    ) -> Result<Layers, LayersError> {
        if below.is_empty() {
            return Ok(top.into());
        }
        if top.mode() == Mode::Writeback {
            return Err(LayersError::Writeback { place: top.place() });
        }
        let size = top.size();
        Layers::make(name, top, below, (StackMap::Given(map), size))
    }

    /// The layers of an overlay called `name`: `top` and the first ones of `below` are `deltas`, one each; below them is a
    /// plain layer, or none. Writable unless `read_only`.
    ///
    /// # Errors
    /// [`LayersError`].
    pub fn overlay(
        name: &str,
        top: CachedStore,
        below: Vec<BaseLayer>,
        deltas: Vec<Arc<Delta>>,
        read_only: bool,
    ) -> Result<Layers, LayersError> {
        let stores = std::iter::once(&top).chain(below.iter().map(BaseLayer::store));
        for store in stores.take(deltas.len()) {
            if store.cache().is_none() {
                return Err(LayersError::NoCache { place: store.place() });
            }
        }
        let size = deltas.first().map_or(top.size(), |delta| delta.layout().size());
        let overlay = (!read_only).then(Box::<Overlay>::default);
        Layers::make(name, top, below, (StackMap::Deltas { deltas, overlay }, size))
    }

    fn make(
        name: &str,
        top: CachedStore,
        below: Vec<BaseLayer>,
        (map, size): (StackMap, u64),
    ) -> Result<Layers, LayersError> {
        let mut capabilities = capabilities(&top, &below)?;
        if let StackMap::Deltas { overlay: Some(_), .. } = &map {
            let Capabilities { read_only, discard, fast_zero, .. } = top.capabilities();
            capabilities = Capabilities { read_only, discard, fast_zero, ..capabilities };
        }
        for (number, layer) in below.iter().enumerate() {
            if below[..number].iter().any(|above| above.is_same(layer)) {
                return Err(LayersError::Twice { place: layer.store().place() });
            }
        }
        let shared: Vec<_> = below.iter().filter_map(BaseLayer::cache).collect();
        let volume = match (top.cache(), shared.first()) {
            (Some(own), _) => Some(own.clone()),
            (None, Some(shared)) => Some(top.empty_part(&shared.cache, name)?),
            (None, None) => None,
        };
        let share = match (&volume, shared.is_empty()) {
            (Some(volume), false) => Some(volume.cache.add_stack(volume, &shared)),
            _ => None,
        };
        let lower = LowerLayers::new(below, (map, size), volume, share, capabilities);
        Ok(Layers { top, lower: Some(Box::new(lower)) })
    }

    /// The volume's own layer.
    #[inline]
    pub fn top(&self) -> &CachedStore {
        &self.top
    }

    /// The layer, if there is only one.
    #[inline]
    pub fn only(&self) -> Option<&CachedStore> {
        if self.lower.is_none() { Some(&self.top) } else { None }
    }

    /// Begins a read of the whole buffer at `offset`: completes it if it is in memory and not in the top layer, else says
    /// what is to be done. Neither waits nor allocates.
    #[inline]
    pub fn start_read(&self, io: &Io, buf: &mut Buf, offset: u64) -> ReadStep<'_> {
        match self.stack_of_several() {
            None => ReadStep::of(&self.top),
            Some(stack) => stack.read_cached(io, buf, offset),
        }
    }

    #[inline]
    fn stack_of_several(&self) -> Option<LayerStack<'_>> {
        self.lower.as_deref().map(|lower| LayerStack { top: &self.top, lower })
    }
}

/// Those of a stack of several layers.
fn capabilities(top: &CachedStore, below: &[BaseLayer]) -> Result<Capabilities, LayersError> {
    let mut all =
        Capabilities { read_only: true, discard: false, fast_zero: false, ..top.capabilities() };
    for layer in std::iter::once(top).chain(below.iter().map(BaseLayer::store)) {
        let own = layer.capabilities();
        if u64::from(own.alignment) > BLOCK {
            return Err(LayersError::Blocks { place: layer.place(), block: own.alignment });
        }
        all.alignment = all.alignment.max(own.alignment);
        all.direct &= own.direct;
        all.read_piece = all.read_piece.zip(own.read_piece).map(|(one, other)| one.min(other));
    }
    Ok(all)
}

impl BlockStore for Layers {
    fn size(&self) -> u64 {
        self.lower.as_ref().map_or_else(|| self.top.size(), |lower| lower.size())
    }

    #[inline]
    fn capabilities(&self) -> Capabilities {
        match &self.lower {
            None => self.top.capabilities(),
            Some(lower) => lower.capabilities,
        }
    }

    /// That of all layers: the same top layer above another base holds other data.
    fn identity(&self) -> Identity {
        let mut identity = self.top.identity();
        for layer in self.lower.iter().flat_map(|lower| &lower.layers) {
            identity.key = format!("{} above {}", identity.key, layer.store().identity().key);
        }
        identity
    }

    fn place(&self) -> String {
        self.top.place()
    }

    fn device_identity(&self) -> Option<DeviceIdentity> {
        self.top.device_identity()
    }

    #[inline]
    fn bounce_bytes(&self, offset: u64, length: usize) -> usize {
        let Some(lower) = &self.lower else { return self.top.bounce_bytes(offset, length) };
        // Parts begin and end at multiples of 4 KiB, or where the request does.
        let block = block_bytes(lower.capabilities);
        let aligned = (offset | length as u64).is_multiple_of(BLOCK);
        if aligned || block as u64 <= SECTOR { 0 } else { 2 * block }
    }

    async fn read(&self, io: &Io, mut buf: Buf, offset: u64) -> BufResult {
        match self.start_read(io, &mut buf, offset) {
            ReadStep::Layer(layer) => layer.read(io, buf, offset).await,
            ReadStep::Store(store) => store.read(io, buf, offset).await,
            ReadStep::Complete => (Ok(()), buf),
            ReadStep::Remaining(remaining) => remaining.read(io, buf).await,
        }
    }

    async fn write(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        match self.stack_of_several() {
            None => self.top.write(io, buf, offset, fua).await,
            Some(stack) => match stack.held_at(io, offset, buf.len(), fua) {
                Some(position) => self.top.write(io, buf, position, false).await,
                None => Box::pin(stack.write(io, buf, offset, fua)).await,
            },
        }
    }

    async fn flush(&self, io: &Io) -> Result<(), BlockError> {
        match self.stack_of_several() {
            None => self.top.flush(io).await,
            Some(stack) => Box::pin(stack.flush(io)).await,
        }
    }

    async fn discard(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        match self.stack_of_several() {
            None => self.top.discard(io, offset, length).await,
            Some(stack) => Box::pin(stack.discard(io, (offset, length))).await,
        }
    }

    async fn write_zeroes_while(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
        wanted: Wanted<'_>,
    ) -> Result<(), BlockError> {
        match self.stack_of_several() {
            None => self.top.write_zeroes_while(io, offset, length, flags, wanted).await,
            Some(stack) => Box::pin(stack.write_zeroes(io, (offset, length), flags, wanted)).await,
        }
    }

    async fn extents(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        match self.stack_of_several() {
            // Boxed, as what remains of a read.
            Some(stack) if length > 0 => Box::pin(stack.extents(io, (offset, length), limit)).await,
            _ => self.top.extents(io, offset, length, limit).await,
        }
    }

    async fn prefetch(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        match self.stack_of_several() {
            Some(stack) => Box::pin(stack.prefetch(io, (offset, length))).await,
            None => self.top.prefetch(io, offset, length).await,
        }
    }

    /// Only of one layer.
    fn has_direct_access(&self) -> bool {
        self.lower.is_none() && self.top.has_direct_access()
    }

    fn read_in_place(&self, offset: u64, length: u64, see: impl FnMut(&[u8])) -> bool {
        self.lower.is_none() && self.top.read_in_place(offset, length, see)
    }

    fn write_in_place(&self, offset: u64, length: u64, put: impl FnMut(&mut [u8])) -> bool {
        self.lower.is_none() && self.top.write_in_place(offset, length, put)
    }

    async fn check_resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        if self.lower.is_some() {
            return Err(ResizeError::Unsupported("a volume of several layers keeps its size"));
        }
        self.top.check_resize(io, order).await
    }

    async fn resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        self.check_resize(io, order).await?;
        self.top.resize(io, order).await
    }

    /// Requests of this volume fail; a layer below is aborted once all of its users are.
    fn abort(&self) {
        self.top.abort();
        self.lower.iter().for_each(|lower| lower.abort());
    }

    fn release(&self) {
        self.top.release();
        self.lower.iter().for_each(|lower| lower.leave());
    }
}
