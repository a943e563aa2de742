//! [`Layers`]: a volume as a stack of one or more layers, which overlays, snapshots and clones are made of.
//!
//! The top layer is the volume's own: a store and its part of the cache. Below it are read-only layers, which volumes
//! share ([`BaseLayer`]). A [`LayerMap`] says which layer holds what. Several layers are in `stacked.rs`.
//!
//! # Invariants
//! - With one layer a request costs one branch more than in [`CachedStore`] ([`Layers::start_read`]).
//! - A stack of several layers is writable only as an overlay: its top layer is a delta ([`Layers::overlay`]).

mod changes;
pub(crate) mod figures;
mod resize;

use std::sync::Arc;
use std::time::Duration;

use ebb_block::{
    BlockError, BlockStore, Buf, BufResult, Capabilities, DeviceIdentity, ErrorKind, Extent,
    Identity, Io, Loss, Operation, Resize, ResizeError, Wanted, ZeroFlags,
};
use ebb_image::Parent;
use ebb_store::Store;

use crate::base::{BaseLayer, BaseLayers};
use crate::cached_store::CachedStore;
use crate::delta::Delta;
use crate::first_writes::FirstWrites;
use crate::layer_identities::{MergedPair, NextLayers};
use crate::layers_error::{LayersError, SnapshotError};
use crate::lower_layers::{LayerMap, ReadStep, StackMap};
use crate::overlay::FillFrom;
use crate::stacked::{DeltaLayer, StackedLayers};
use crate::stats::Mode;

/// The layers of a volume, used as one store.
#[derive(Debug)]
pub struct Layers(Kind);

#[derive(Debug)]
enum Kind {
    Only(Arc<CachedStore>),
    Several(Box<StackedLayers>),
}

impl From<CachedStore> for Layers {
    /// One layer.
    fn from(top: CachedStore) -> Layers {
        Layers(Kind::Only(Arc::new(top)))
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
        let map = (StackMap::Given(map), top.size());
        let stacked = StackedLayers::new(name, top, below, map)?;
        Ok(Layers(Kind::Several(Box::new(stacked))))
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
        let first_writes = (!read_only).then(Box::<FirstWrites>::default);
        let map = (StackMap::Deltas { deltas, first_writes }, size);
        let stacked = StackedLayers::new(name, top, below, map)?;
        Ok(Layers(Kind::Several(Box::new(stacked))))
    }

    fn stacked(&self) -> Option<&StackedLayers> {
        match &self.0 {
            Kind::Only(_) => None,
            Kind::Several(stacked) => Some(stacked),
        }
    }

    fn stacked_or<E>(&self, error: E) -> Result<&StackedLayers, E> {
        self.stacked().ok_or(error)
    }

    /// Makes a snapshot: what the volume holds now does not change any more, and `top`, an empty
    /// delta above that, is written from now on. Waits for the writes in flight, for at most
    /// `limit`; writes that begin meanwhile wait, too. Returns the layer that was the top one, with
    /// its delta. It is stable after the next flush of the volume that succeeds.
    ///
    /// # Errors
    /// [`SnapshotError`]; nothing is changed then.
    pub async fn push(
        &self,
        io: &Io,
        (name, bases): (&str, &BaseLayers),
        top: CachedStore,
        delta: Delta,
        limit: Duration,
    ) -> Result<(Arc<CachedStore>, Arc<Delta>), SnapshotError> {
        let stacked = self.stacked_or(SnapshotError::NoOverlay)?;
        stacked.push(io, (name, bases), top, delta, limit).await
    }

    /// Copies the data of the layers below at `offset` into the top layer, at most `most` bytes, a
    /// multiple of 4 KiB. Returns the number of bytes that were looked at, more than `most` in an
    /// empty part, 0 at the end. The copies stay when the volume is closed or killed.
    ///
    /// # Errors
    /// Those of the stores; [`ErrorKind::ReadOnly`] if it is no overlay that is written to.
    pub async fn fill(
        &self,
        io: &Io,
        offset: u64,
        most: u64,
        from: FillFrom,
    ) -> Result<u64, BlockError> {
        let refused = BlockError::new(ErrorKind::ReadOnly, Operation::Write, offset, most);
        self.stacked_or(refused)?.fill(io, offset, most, (from, std::future::pending())).await
    }

    /// As [`Layers::fill`], and ends with `until`, unless it has begun to write: a layer below may hang.
    ///
    /// # Errors
    /// As those of [`Layers::fill`]; [`ErrorKind::Closing`] if it has ended with `until`.
    pub async fn fill_until(
        &self,
        io: &Io,
        (offset, most): (u64, u64),
        from: FillFrom,
        until: impl Future<Output = ()>,
    ) -> Result<u64, BlockError> {
        let refused = BlockError::new(ErrorKind::ReadOnly, Operation::Write, offset, most);
        self.stacked_or(refused)?.fill(io, offset, most, (from, until)).await
    }

    /// Notes in the top layer that nothing is below it, and takes the layers below away, after [`Layers::fill`] has copied
    /// everything from 0 to the end while no snapshot was made.
    ///
    /// # Errors
    /// Those of the store: then nothing is changed. [`SnapshotError`]: the layers below stay until the volume is opened anew.
    pub async fn detach(&self, io: &Io, name: &str, limit: Duration) -> Result<(), SnapshotError> {
        self.stacked_or(SnapshotError::NoOverlay)?.detach(io, name, limit).await
    }

    /// Gives back the space beyond the end of an overlay that had `from` bytes before it became smaller; the volume is in use.
    /// No resize begins before it ends. Errors of the store are ignored: only space is at stake.
    pub async fn discard_beyond_end(&self, io: &Io, from: u64) {
        if let Kind::Several(stacked) = &self.0 {
            Box::pin(resize::discard_beyond_end(stacked, io, from)).await;
        }
    }

    /// Makes written data stable, and reserves room for one more header of the top layer:
    /// [`Layers::remove_next`] needs nothing else.
    ///
    /// # Errors
    /// [`SnapshotError`]: there is no room, or no overlay.
    pub async fn prepare_removal(&self, io: &Io) -> Result<(), SnapshotError> {
        self.stacked_or(SnapshotError::NoOverlay)?.prepare_removal(io).await
    }

    /// Takes away the layer below the top one, a delta, after [`Layers::fill`] has copied all that it holds while no snapshot
    /// was made. The layer's file is not needed any more, also if the volume is killed.
    ///
    /// # Errors
    /// As those of [`Layers::detach`].
    pub async fn remove_next(
        &self,
        io: &Io,
        name: &str,
        limit: Duration,
    ) -> Result<(), SnapshotError> {
        self.stacked_or(SnapshotError::NoOverlay)?.remove_next(io, name, limit).await
    }

    /// The delta `number` from the top and the one below it, read-only and without what is below them.
    ///
    /// # Errors
    /// [`SnapshotError::NoLayer`] if they are not both deltas below the top layer.
    pub fn pair(&self, number: usize) -> Result<Layers, SnapshotError> {
        let pair = self.stacked_or(SnapshotError::NoOverlay)?.pair(number)?;
        Ok(Layers(Kind::Several(Box::new(pair))))
    }

    /// Puts the top layer of `merged`, a delta that holds all that the delta `number` from the top and the one below it hold,
    /// in their place.
    ///
    /// # Errors
    /// [`SnapshotError`]; nothing is changed then.
    pub async fn replace_pair(
        &self,
        io: &Io,
        (name, bases): (&str, &BaseLayers),
        number: usize,
        merged: &Layers,
        limit: Duration,
    ) -> Result<(), SnapshotError> {
        let stacked = self.stacked_or(SnapshotError::NoOverlay)?;
        let merged = merged.stacked_or(SnapshotError::NoOverlay)?;
        stacked.replace_pair(io, (name, bases), number, merged, limit).await
    }

    /// Copies the data of its deltas at `offset` to `into`, at most `most` bytes, a multiple of
    /// 4 KiB; zeroes are written as such. With `hidden` it also writes zeroes where they read as
    /// such whatever is below: beyond the smallest size that the volume has had. Returns the number
    /// of bytes that were looked at, more than `most` in an empty part, 0 at the end.
    ///
    /// # Errors
    /// Those of the stores; [`ErrorKind::Invalid`] if it has no deltas.
    pub async fn copy_held(
        &self,
        io: &Io,
        (offset, most): (u64, u64),
        (into, hidden): (&impl BlockStore, bool),
    ) -> Result<u64, BlockError> {
        let refused = BlockError::new(ErrorKind::Invalid, Operation::Read, offset, most);
        let stack = self.stacked_or(refused)?.kept_stack();
        stack.view().copy_held(io, (offset, most), (into, hidden)).await
    }

    /// Notes which exchange of the layers is about to be made, until it has been made or another
    /// one is noted. To be recorded ([`Layers::next_identity`]) before the first step of it that a
    /// kill does not take back.
    pub fn note_next(&self, next: NextLayers<'_>) {
        self.stacked().iter().for_each(|stacked| stacked.note_next(next));
    }

    /// Returns true if it has both layers, one directly above the other.
    pub fn has_pair(&self, pair: &MergedPair) -> bool {
        self.stacked().is_some_and(|stacked| stacked.has_pair(pair))
    }

    /// Notes that a file is about to take the place of two layers, here still in use, that it
    /// shares with another volume. To be recorded as [`Layers::note_next`].
    pub fn note_next_merge(&self, pair: &MergedPair) {
        self.stacked().iter().for_each(|stacked| stacked.note_next_merge(pair));
    }

    /// Notes that the file has taken the place of the two layers: a successor finds it.
    pub fn note_merged(&self, pair: MergedPair) {
        if let Some(stacked) = self.stacked() {
            stacked.note_merged(pair);
        }
    }

    /// The key of the identity that it has after the exchange that is expected, if there is one.
    pub fn next_identity(&self) -> Option<String> {
        self.stacked()?.common.identities.next()
    }

    /// The keys of the identities that it had before exchanges since it was opened.
    pub fn former_identities(&self) -> Vec<String> {
        self.stacked().map_or_else(Vec::new, |stacked| stacked.common.identities.former())
    }

    /// What is now the top layer, as the parent of a delta above it.
    ///
    /// # Errors
    /// [`SnapshotError::NoOverlay`] if it is no delta; those of its store if an earlier write of its header has failed.
    pub async fn top_as_parent(&self, io: &Io) -> Result<Parent, SnapshotError> {
        self.stacked_or(SnapshotError::NoOverlay)?.top_as_parent(io).await
    }

    /// Its deltas, from the top on.
    pub fn deltas(&self) -> Vec<DeltaLayer> {
        self.stacked().map(StackedLayers::deltas).unwrap_or_default()
    }

    /// The snapshots below it, from the newest on.
    pub fn snapshots(&self) -> Vec<String> {
        let deltas = self.deltas().into_iter();
        deltas.filter_map(|delta| delta.header.parent.snapshot().map(str::to_owned)).collect()
    }

    /// Bytes of its layers that their stores do not have yet.
    pub fn dirty(&self) -> u64 {
        match &self.0 {
            Kind::Only(top) => top.cache().map_or(0, |cache| cache.dirty()),
            Kind::Several(stacked) => stacked.sum(|cache| cache.dirty()),
        }
    }

    /// Bytes of its layers that their stores have and that are not known to be stable there.
    pub fn unstable(&self) -> u64 {
        match &self.0 {
            Kind::Only(top) => top.cache().map_or(0, |cache| cache.unstable()),
            Kind::Several(stacked) => {
                // Data of pending blocks may be dirty, too.
                let pending = stacked.pending_bytes().saturating_sub(self.dirty());
                stacked.sum(|cache| cache.unstable()).max(pending)
            }
        }
    }

    /// Returns true if a kill of the daemon may lose writes that were acknowledged and not flushed: they are in its memory, or
    /// their block map is. Neither waits nor allocates.
    #[inline]
    pub fn loses_by_kill(&self) -> bool {
        match &self.0 {
            Kind::Only(top) => top.mode() == Mode::Writeback,
            Kind::Several(stacked) => stacked.loses_by_kill(),
        }
    }

    /// Returns true if no flush of a successor reports the loss of writes that were acknowledged
    /// and not flushed, if this process ends now: they are lost by the end, or their store reports
    /// losses to this process alone. Neither waits nor allocates.
    #[inline]
    pub fn may_hide_loss(&self) -> bool {
        match &self.0 {
            Kind::Only(top) => self.loses_by_kill() || top.store().reports_lost_writes(),
            Kind::Several(stacked) => stacked.loses_by_kill() || stacked.reports_lost_writes(),
        }
    }

    /// Saves the block map of an overlay, and the data that it describes, if a kill of the daemon would lose some of it. A
    /// failure is reported by the next flush.
    pub async fn save_map(&self, io: &Io) {
        if let Some(stacked) = self.stacked().filter(|stacked| stacked.pending_bytes() > 0) {
            stacked.save_map(io).await;
        }
    }

    /// Flushes the data that this daemon wrote, whether or not the names of the files are stable.
    ///
    /// # Errors
    /// Those of a flush.
    pub async fn flush_content(&self, io: &Io) -> Result<(), BlockError> {
        match &self.0 {
            Kind::Only(top) => top.flush_content(io).await,
            Kind::Several(stacked) => Box::pin(stacked.flush_content(io)).await,
        }
    }

    /// Returns true if the names of all files that are or were written to are stable.
    pub fn has_stable_names(&self) -> bool {
        match &self.0 {
            Kind::Only(top) => top.store().has_stable_name(),
            Kind::Several(stacked) => stacked.has_stable_names(),
        }
    }

    /// See [`CachedStore::is_lost`]; of any layer that is not stable.
    pub fn is_lost(&self) -> bool {
        match &self.0 {
            Kind::Only(top) => top.is_lost(),
            Kind::Several(stacked) => stacked.is_lost(),
        }
    }

    /// See [`CachedStore::loss`].
    pub fn loss(&self) -> Option<Loss> {
        match &self.0 {
            Kind::Only(top) => top.loss(),
            Kind::Several(stacked) => stacked.loss(),
        }
    }

    /// Ends writeback in the background. Dirty data stays dirty.
    pub fn end_writeback(&self) {
        match &self.0 {
            Kind::Only(top) => top.end_writeback(),
            Kind::Several(stacked) => stacked.end_writeback(),
        }
    }

    /// Passes the store of each layer to `of`, from the top on.
    pub fn each_store<T>(&self, mut of: impl FnMut(&Store) -> T) -> Vec<T> {
        match &self.0 {
            Kind::Only(top) => vec![of(top.store())],
            Kind::Several(stacked) => {
                let stack = stacked.stack();
                let mut found = vec![of(stack.top.store())];
                let lower = stack.lower.layers.iter().map(|layer| layer.store().store());
                found.extend(lower.map(of));
                found
            }
        }
    }

    /// Layers, the top one included.
    pub fn depth(&self) -> usize {
        1 + self.stacked().map_or(0, |stacked| stacked.stack().lower.layers.len())
    }

    /// The volume's own layer. A snapshot puts another one in its place.
    #[inline]
    pub fn top(&self) -> Arc<CachedStore> {
        match &self.0 {
            Kind::Only(top) => top.clone(),
            Kind::Several(stacked) => stacked.stack().top.clone(),
        }
    }

    /// The layer, if there is only one.
    #[inline]
    pub fn only(&self) -> Option<&CachedStore> {
        match &self.0 {
            Kind::Only(top) => Some(top),
            Kind::Several(_) => None,
        }
    }

    /// Begins a read of the whole buffer at `offset`: completes it if it is in memory, else says what is to be done. Neither
    /// waits nor allocates.
    #[inline]
    pub fn start_read(&self, io: &Io, buf: &mut Buf, offset: u64) -> ReadStep<'_> {
        match &self.0 {
            Kind::Only(top) => ReadStep::of(top),
            Kind::Several(stacked) => stacked.start_read(io, buf, offset),
        }
    }
}

impl BlockStore for Layers {
    fn size(&self) -> u64 {
        match &self.0 {
            Kind::Only(top) => top.size(),
            Kind::Several(stacked) => stacked.stack().lower.size(),
        }
    }

    #[inline]
    fn capabilities(&self) -> Capabilities {
        match &self.0 {
            Kind::Only(top) => top.capabilities(),
            Kind::Several(stacked) => stacked.stack().lower.capabilities,
        }
    }

    /// That of all layers: the same top layer above another base holds other data.
    fn identity(&self) -> Identity {
        match &self.0 {
            Kind::Only(top) => top.identity(),
            Kind::Several(stacked) => stacked.identity(),
        }
    }

    fn place(&self) -> String {
        self.top().place()
    }

    fn device_identity(&self) -> Option<DeviceIdentity> {
        self.top().device_identity()
    }

    #[inline]
    fn bounce_bytes(&self, offset: u64, length: usize) -> usize {
        match &self.0 {
            Kind::Only(top) => top.bounce_bytes(offset, length),
            Kind::Several(stacked) => stacked.stack().view().bounce_bytes(offset, length),
        }
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
        let stacked = match &self.0 {
            Kind::Only(top) => return top.write(io, buf, offset, fua).await,
            Kind::Several(stacked) => stacked,
        };
        let Some(held) = stacked.write_held(io, (offset, buf.len(), fua)) else {
            return Box::pin(stacked.write_slowly(io, buf, offset, fua)).await;
        };
        held.top.write(io, buf, held.position, false).await
    }

    async fn flush(&self, io: &Io) -> Result<(), BlockError> {
        match &self.0 {
            Kind::Only(top) => top.flush(io).await,
            // Boxed, as what remains of a read.
            Kind::Several(stacked) => Box::pin(stacked.flush(io)).await,
        }
    }

    async fn discard(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        match &self.0 {
            Kind::Only(top) => top.discard(io, offset, length).await,
            Kind::Several(stacked) => Box::pin(stacked.discard(io, (offset, length))).await,
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
        match &self.0 {
            Kind::Only(top) => top.write_zeroes_while(io, offset, length, flags, wanted).await,
            Kind::Several(stacked) => {
                Box::pin(stacked.write_zeroes(io, (offset, length), flags, wanted)).await
            }
        }
    }

    async fn extents(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        match &self.0 {
            Kind::Only(top) => top.extents(io, offset, length, limit).await,
            Kind::Several(_) if length == 0 => {
                let top = self.top();
                top.extents(io, offset, length, limit).await
            }
            Kind::Several(stacked) => Box::pin(stacked.extents(io, (offset, length), limit)).await,
        }
    }

    async fn prefetch(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        match &self.0 {
            Kind::Only(top) => top.prefetch(io, offset, length).await,
            Kind::Several(stacked) => Box::pin(stacked.prefetch(io, (offset, length))).await,
        }
    }

    /// Only of one layer.
    fn has_direct_access(&self) -> bool {
        self.only().is_some_and(BlockStore::has_direct_access)
    }

    fn read_in_place(&self, offset: u64, length: u64, see: impl FnMut(&[u8])) -> bool {
        self.only().is_some_and(|top| top.read_in_place(offset, length, see))
    }

    fn write_in_place(&self, offset: u64, length: u64, put: impl FnMut(&mut [u8])) -> bool {
        self.only().is_some_and(|top| top.write_in_place(offset, length, put))
    }

    async fn check_resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        match &self.0 {
            Kind::Only(top) => top.check_resize(io, order).await,
            Kind::Several(stacked) => resize::check(stacked, order),
        }
    }

    /// Of an overlay that becomes smaller no request beyond the new end may be in flight.
    async fn resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        match &self.0 {
            Kind::Only(top) => top.resize(io, order).await,
            Kind::Several(stacked) => Box::pin(resize::resize(stacked, io, order)).await,
        }
    }

    /// Requests of this volume fail; a layer below is aborted once all of its users are.
    fn abort(&self) {
        match &self.0 {
            Kind::Only(top) => top.abort(),
            Kind::Several(stacked) => stacked.abort(),
        }
    }

    fn release(&self) {
        match &self.0 {
            Kind::Only(top) => top.release(),
            Kind::Several(stacked) => stacked.release(),
        }
    }
}
