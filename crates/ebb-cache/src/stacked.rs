//! [`StackedLayers`]: several layers of a volume, and how they are exchanged while it is in use.
//!
//! # Invariants
//! - A request is carried out in *parts*, each of which one layer holds whole, one after the other and straight into
//!   the request's buffer (`lower_layers.rs`).
//! - A layer that is shorter than the volume reads as zeroes beyond its end.
//! - A request uses the stack that it began with. An exchange changes what the top layer is, or which layers are below it,
//!   never what the volume reads as; the layers that it takes away are closed when the last request that uses them ends.
//! - Layers are exchanged while no write is in flight ([`WriteGate`]), so that two writes of one block use the same `FirstWrites`
//!   (`first_writes.rs`).

use std::sync::Arc;
use std::time::Duration;

use arc_swap::{ArcSwap, Guard};
use ebb_block::{
    BLOCK, BlockError, BlockStore, Buf, BufResult, Capabilities, Extent, Identity, Io, Loss,
    Wanted, ZeroFlags,
};
use ebb_image::{DeltaHeader, Parent};

use crate::base::{BaseLayer, BaseLayers};
use crate::cached_store::CachedStore;
use crate::delta::Delta;
use crate::layer_identities::{MergedPair, NextLayers};
use crate::layers_error::{LayersError, SnapshotError};
use crate::lower_layers::{LowerLayers, ReadStep, RemainingRead, Stack, StackMap};
use crate::overlay::FillFrom;
use crate::stack_common::StackCommon;
use crate::stats::Mode;
use crate::volume::VolumeCache;
use crate::write_gate::{WriteGate, WritePass, WritePause};

/// How long the first pause of [`StackedLayers::pause_with_retries`] waits for the writes in flight.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// Writes pass for so many times as long before the next, which waits twice as long.
const PAUSE_SHARE: u32 = 20;

/// A delta of a volume.
#[derive(Clone, Debug)]
pub struct DeltaLayer {
    /// Its header.
    pub header: DeltaHeader,
    /// The file or server it is at, as it was opened.
    pub place: String,
    /// See [`BlockStore::identity`].
    pub identity: Identity,
}

/// See the module.
pub(crate) struct StackedLayers {
    stack: ArcSwap<Stack>,
    writes: WriteGate,
    pub(crate) common: Arc<StackCommon>,
}

impl std::fmt::Debug for StackedLayers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StackedLayers").field("stack", &*self.stack.load()).finish_non_exhaustive()
    }
}

/// A write of blocks that the top layer holds.
pub(crate) struct HeldWrite<'a> {
    pub(crate) top: Arc<CachedStore>,
    /// Where it is in that layer.
    pub(crate) position: u64,
    _pass: WritePass<'a>,
}

/// The same layers, for another stack of the volume.
fn again(layers: &[BaseLayer]) -> Result<Vec<BaseLayer>, SnapshotError> {
    layers.iter().map(BaseLayer::again).collect::<Option<_>>().ok_or(SnapshotError::Busy)
}

impl StackedLayers {
    pub(crate) fn new(
        name: &str,
        top: CachedStore,
        below: Vec<BaseLayer>,
        map: (StackMap, u64),
    ) -> Result<StackedLayers, LayersError> {
        let common = Arc::default();
        let stack = make_stack(name, Arc::new(top), below, map, &common)?;
        Ok(StackedLayers::of(stack, common))
    }

    fn of(stack: Stack, common: Arc<StackCommon>) -> StackedLayers {
        StackedLayers { stack: ArcSwap::from_pointee(stack), writes: WriteGate::default(), common }
    }

    /// The stack in use, for something short.
    #[inline]
    pub(crate) fn stack(&self) -> Guard<Arc<Stack>> {
        self.stack.load()
    }

    /// The stack in use, for a request.
    #[inline]
    pub(crate) fn kept_stack(&self) -> Arc<Stack> {
        self.stack.load_full()
    }

    /// Waits for the writes in flight, and holds up new ones.
    async fn pause(&self, io: &Io, limit: Duration) -> Result<WritePause<'_>, SnapshotError> {
        let paused = io.timeout(limit, self.writes.pause()).await;
        paused.ok_or(SnapshotError::Slow(limit))?.ok_or(SnapshotError::Busy)
    }

    /// As [`StackedLayers::pause`], until it succeeds or the volume is aborted: briefly at first, and with longer times in
    /// between, so that a write that hangs holds up others for a twentieth of the time.
    async fn pause_with_retries(
        &self,
        io: &Io,
        limit: Duration,
    ) -> Result<WritePause<'_>, SnapshotError> {
        let mut pause = FIRST_PAUSE.min(limit);
        loop {
            match self.pause(io, pause).await {
                Err(SnapshotError::Slow(_)) if !self.common.signal.is_raised() => {
                    io.sleep(pause * PAUSE_SHARE).await;
                    pause = limit.min(pause * 2);
                }
                paused => return paused,
            }
        }
    }

    /// Puts other layers below the top one. There is a pause.
    fn exchange(
        &self,
        name: &str,
        top: Arc<CachedStore>,
        below: Vec<BaseLayer>,
        deltas: Vec<Arc<Delta>>,
    ) -> Result<(), SnapshotError> {
        let before = self.kept_stack();
        let map = StackMap::Deltas { deltas, first_writes: Some(Box::default()) };
        let stack = make_stack(name, top, below, (map, before.lower.size()), &self.common)?;
        self.stack.store(Arc::new(stack));
        self.common.identities.note_exchanged();
        before.lower.share.iter().for_each(|share| share.leave());
        Ok(())
    }

    pub(crate) async fn push(
        &self,
        io: &Io,
        (name, bases): (&str, &BaseLayers),
        top: CachedStore,
        delta: Delta,
        limit: Duration,
    ) -> Result<(Arc<CachedStore>, Arc<Delta>), SnapshotError> {
        let _pause = self.pause(io, limit).await?;
        let before = self.kept_stack();
        let lower = &before.lower;
        let frozen = lower.deltas().first().filter(|_| lower.overlay().is_some());
        let frozen = frozen.ok_or(SnapshotError::NoOverlay)?;
        let mut below = again(&lower.layers)?;
        below.insert(0, bases.adopt(&before.top, frozen));
        let delta = Arc::new(delta);
        frozen.freeze(&delta);
        let deltas = std::iter::once(delta).chain(lower.deltas().iter().cloned());
        self.exchange(name, Arc::new(top), below, deltas.collect())?;
        Ok((before.top.clone(), frozen.clone()))
    }

    pub(crate) async fn fill(
        &self,
        io: &Io,
        offset: u64,
        most: u64,
        (from, until): (FillFrom, impl Future<Output = ()>),
    ) -> Result<u64, BlockError> {
        let (stack, _pass) = self.stack_to_write().await;
        if offset >= stack.lower.size() {
            return Ok(0);
        }
        stack.view().fill(io, (offset, most), from, until).await
    }

    pub(crate) async fn detach(
        &self,
        io: &Io,
        name: &str,
        limit: Duration,
    ) -> Result<(), SnapshotError> {
        let parent = |_: &LowerLayers| Some((Parent::default(), 0));
        self.set_parent(io, parent).await?;
        let _pause = self.pause_with_retries(io, limit).await?;
        let stack = self.kept_stack();
        let own = stack.lower.deltas().first().cloned().into_iter().collect();
        self.exchange(name, stack.top.clone(), Vec::new(), own)
    }

    pub(crate) async fn prepare_removal(&self, io: &Io) -> Result<(), SnapshotError> {
        self.flush(io).await?;
        let stack = self.kept_stack();
        let delta = stack.lower.delta(0).filter(|_| stack.lower.overlay().is_some());
        let delta = delta.ok_or(SnapshotError::NoOverlay)?;
        // Headers have two places in turn, and a delta that a snapshot has made has used one.
        Ok(delta.begin_writing(io, &stack.top).await?)
    }

    pub(crate) async fn remove_next(
        &self,
        io: &Io,
        name: &str,
        limit: Duration,
    ) -> Result<(), SnapshotError> {
        let parent = |lower: &LowerLayers| {
            let header = lower.delta(1)?.header();
            Some((header.parent, header.shown))
        };
        self.set_parent(io, parent).await?;
        let _pause = self.pause_with_retries(io, limit).await?;
        let stack = self.kept_stack();
        let mut deltas = stack.lower.deltas().to_vec();
        let below = again(stack.lower.layers.get(1..).unwrap_or_default())?;
        deltas.remove(1);
        self.exchange(name, stack.top.clone(), below, deltas)
    }

    /// Flushes, and writes another parent into the header of the top layer, with how much of that shows.
    async fn set_parent(
        &self,
        io: &Io,
        parent: impl Fn(&LowerLayers) -> Option<(Parent, u64)>,
    ) -> Result<(), SnapshotError> {
        self.flush(io).await?;
        let stack = self.kept_stack();
        let lower = &stack.lower;
        let delta = lower.delta(0).filter(|_| lower.overlay().is_some());
        let delta = delta.ok_or(SnapshotError::NoOverlay)?;
        let parent = parent(lower).ok_or(SnapshotError::NoLayer)?;
        Ok(delta.set_parent(io, &stack.top, parent).await?)
    }

    pub(crate) fn pair(&self, number: usize) -> Result<StackedLayers, SnapshotError> {
        let stack = self.kept_stack();
        let lower = &stack.lower;
        let deltas = lower.deltas().get(number..number + 2).filter(|_| number > 0);
        let layers = number.checked_sub(1).and_then(|at| lower.layers.get(at..at + 2));
        let (deltas, layers) = deltas.zip(layers).ok_or(SnapshotError::NoLayer)?;
        let capabilities = capabilities(layers[0].store(), &layers[1..])?;
        let (top, below) = (layers[0].shared_store(), again(&layers[1..])?);
        let map = StackMap::Deltas { deltas: deltas.to_vec(), first_writes: None };
        let common = self.common.clone();
        let (map, rest) = ((map, lower.size()), (capabilities, common.clone()));
        let pair = Stack { top, lower: LowerLayers::new(below, map, None, None, rest) };
        Ok(StackedLayers::of(pair, common))
    }

    pub(crate) async fn replace_pair(
        &self,
        io: &Io,
        (name, bases): (&str, &BaseLayers),
        number: usize,
        merged: &StackedLayers,
        limit: Duration,
    ) -> Result<(), SnapshotError> {
        let _pause = self.pause_with_retries(io, limit).await?;
        let (stack, merged) = (self.kept_stack(), merged.kept_stack());
        let merged_delta = merged.lower.deltas().first().ok_or(SnapshotError::NoLayer)?;
        let mut deltas = stack.lower.deltas().to_vec();
        let mut below = again(&stack.lower.layers)?;
        if number == 0 || number + 2 > deltas.len() || number + 1 > below.len() {
            return Err(SnapshotError::NoLayer);
        }
        deltas.splice(number..number + 2, [merged_delta.clone()]);
        below.splice(number - 1..=number, [bases.adopt(&merged.top, merged_delta)]);
        self.exchange(name, stack.top.clone(), below, deltas)
    }

    pub(crate) async fn top_as_parent(&self, io: &Io) -> Result<Parent, SnapshotError> {
        let stack = self.kept_stack();
        let delta = stack.lower.delta(0).ok_or(SnapshotError::NoOverlay)?;
        delta.settle_header(io, &stack.top).await?;
        Ok(delta.as_parent(&stack.top))
    }

    pub(crate) fn deltas(&self) -> Vec<DeltaLayer> {
        let stack = self.stack();
        let view = stack.view();
        let layers = stack.lower.deltas().iter().enumerate();
        let layer = |(number, delta): (usize, &Arc<Delta>)| {
            let store = view.layer(number)?;
            let (place, identity) = (store.place(), store.identity());
            Some(DeltaLayer { header: delta.header(), place, identity })
        };
        layers.filter_map(layer).collect()
    }

    /// The layers that may hold unstable data: the top one, those that were the top one until a
    /// snapshot, and those that lost writes of an earlier daemon.
    fn unstable_layers<T>(&self, of: impl Fn(&CachedStore) -> T) -> Vec<T> {
        let stack = self.stack();
        let lower = stack.lower.layers.iter().enumerate().filter(|(number, layer)| {
            stack.lower.delta(number + 1).is_some_and(Delta::is_unflushed)
                || layer.store().is_lost()
        });
        let lower = lower.map(|(_, layer)| layer.store());
        std::iter::once(&*stack.top).chain(lower).map(of).collect()
    }

    /// The sum of a figure of the caches of layers that may not be stable.
    pub(crate) fn sum(&self, of: impl Fn(&VolumeCache) -> u64) -> u64 {
        let caches = self.unstable_layers(|store| store.cache().map_or(0, |cache| of(cache)));
        caches.into_iter().sum()
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.unstable_layers(CachedStore::is_lost).contains(&true) || self.delta_loss().is_some()
    }

    pub(crate) fn loss(&self) -> Option<Loss> {
        let of_stores = self.unstable_layers(CachedStore::loss).into_iter().flatten().next();
        of_stores.or_else(|| self.delta_loss())
    }

    /// Acknowledged blocks that a delta holds and whose data may be lost.
    fn delta_loss(&self) -> Option<Loss> {
        self.stack().lower.deltas().iter().find_map(|delta| delta.loss())
    }

    /// Returns true if a kill of the daemon loses acknowledged writes: see [`Layers::loses_by_kill`](crate::Layers).
    #[inline]
    pub(crate) fn loses_by_kill(&self) -> bool {
        let stack = self.stack();
        stack.top.mode() == Mode::Writeback
            || stack.lower.deltas().iter().any(|delta| delta.has_pending())
    }

    /// Returns true if a layer that may not be stable is on a store with
    /// [`Store::reports_lost_writes`](ebb_store::Store::reports_lost_writes).
    pub(crate) fn reports_lost_writes(&self) -> bool {
        let stack = self.stack();
        let mut lower = stack.lower.layers.iter().enumerate();
        stack.top.store().reports_lost_writes()
            || lower.any(|(number, layer)| {
                layer.store().store().reports_lost_writes()
                    && stack.lower.delta(number + 1).is_some_and(Delta::is_unflushed)
            })
    }

    /// Bytes of blocks whose bits are in memory only.
    pub(crate) fn pending_bytes(&self) -> u64 {
        self.stack().lower.deltas().iter().map(|delta| delta.pending_bytes()).sum()
    }

    pub(crate) fn end_writeback(&self) {
        self.unstable_layers(CachedStore::end_writeback);
    }

    /// The keys of its layers, from the top on.
    fn keys(&self) -> Vec<String> {
        let stack = self.kept_stack();
        let below = stack.lower.layers.iter().map(|layer| layer.store().identity().key);
        std::iter::once(stack.top.identity().key).chain(below).collect()
    }

    /// See [`Layers::note_next`](crate::Layers::note_next).
    pub(crate) fn note_next(&self, next: NextLayers<'_>) {
        self.common.identities.note_next(self.keys(), next);
    }

    /// See [`Layers::note_next_merge`](crate::Layers::note_next_merge).
    pub(crate) fn note_next_merge(&self, pair: &MergedPair) {
        self.common.identities.note_next_merge(self.keys(), pair);
    }

    /// See [`Layers::has_pair`](crate::Layers::has_pair).
    pub(crate) fn has_pair(&self, pair: &MergedPair) -> bool {
        self.common.identities.has_pair(self.keys(), pair)
    }

    /// See [`Layers::note_merged`](crate::Layers::note_merged).
    pub(crate) fn note_merged(&self, pair: MergedPair) {
        self.common.identities.note_merged(pair);
    }

    pub(crate) fn identity(&self) -> Identity {
        let key = self.common.identities.key_of(self.keys());
        Identity { key, ..self.stack().top.identity() }
    }

    #[inline]
    pub(crate) fn start_read(&self, io: &Io, buf: &mut Buf, offset: u64) -> ReadStep<'static> {
        let stack = self.stack();
        let done = stack.view().read_cached(io, buf, offset);
        if done == buf.len() {
            return ReadStep::Complete;
        }
        ReadStep::Remaining(RemainingRead { stack: Guard::into_inner(stack), offset, done })
    }

    /// The top layer and the place there for a write of blocks that it holds, if that is known without waiting.
    #[inline]
    pub(crate) fn write_held(
        &self,
        io: &Io,
        (offset, length, fua): (u64, usize, bool),
    ) -> Option<HeldWrite<'_>> {
        let pass = self.writes.try_pass()?;
        let stack = self.stack();
        let position = stack.view().held_at(io, offset, length, fua)?;
        Some(HeldWrite { top: stack.top.clone(), position, _pass: pass })
    }

    /// A write that waits for the gate, or of blocks that the top layer does not hold yet.
    pub(crate) async fn write_slowly(
        &self,
        io: &Io,
        buf: Buf,
        offset: u64,
        fua: bool,
    ) -> BufResult {
        let (stack, _pass) = self.stack_to_write().await;
        stack.view().write(io, buf, offset, fua).await
    }

    /// The stack in use, for a request that changes data.
    async fn stack_to_write(&self) -> (Arc<Stack>, WritePass<'_>) {
        let pass = self.writes.pass().await;
        (self.kept_stack(), pass)
    }

    /// The top layer and its delta, if it is one that is written to.
    pub(crate) fn written_delta(&self) -> Option<(Arc<CachedStore>, Arc<Delta>)> {
        let stack = self.kept_stack();
        let delta = stack.lower.deltas().first().filter(|_| stack.lower.overlay().is_some())?;
        Some((stack.top.clone(), delta.clone()))
    }

    pub(crate) async fn flush(&self, io: &Io) -> Result<(), BlockError> {
        self.kept_stack().view().flush(io).await
    }

    /// Flushes the data that this daemon wrote, whether or not the names of the files are stable.
    pub(crate) async fn flush_content(&self, io: &Io) -> Result<(), BlockError> {
        let stack = self.kept_stack();
        match stack.lower.delta(0) {
            Some(_) => stack.view().flush_deltas(io).await,
            None => stack.top.flush_content(io).await,
        }
    }

    /// Returns true if the names of all files that are or were written to are stable.
    pub(crate) fn has_stable_names(&self) -> bool {
        let stack = self.kept_stack();
        let lower = stack.lower.layers.iter().enumerate();
        let deltas = lower.filter(|(number, _)| stack.lower.delta(number + 1).is_some());
        let stores = deltas.map(|(_, layer)| layer.store().store());
        std::iter::once(stack.top.store()).chain(stores).all(ebb_store::Store::has_stable_name)
    }

    /// Saves the block map. A failure is reported by the next flush.
    pub(crate) async fn save_map(&self, io: &Io) {
        let stack = self.kept_stack();
        let saved = stack.view().flush_deltas(io).await;
        if let (Err(error), Some(delta)) = (saved, stack.lower.delta(0)) {
            delta.report_later(error);
        }
    }

    pub(crate) async fn discard(&self, io: &Io, range: (u64, u64)) -> Result<(), BlockError> {
        let (stack, _pass) = self.stack_to_write().await;
        stack.view().discard(io, range).await
    }

    pub(crate) async fn write_zeroes(
        &self,
        io: &Io,
        range: (u64, u64),
        flags: ZeroFlags,
        wanted: Wanted<'_>,
    ) -> Result<(), BlockError> {
        let (stack, _pass) = self.stack_to_write().await;
        stack.view().write_zeroes(io, range, flags, wanted).await
    }

    pub(crate) async fn extents(
        &self,
        io: &Io,
        range: (u64, u64),
        limit: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        self.kept_stack().view().extents(io, range, limit).await
    }

    pub(crate) async fn prefetch(&self, io: &Io, range: (u64, u64)) -> Result<(), BlockError> {
        self.kept_stack().view().prefetch(io, range).await
    }

    pub(crate) fn abort(&self) {
        self.common.signal.raise();
        let stack = self.stack();
        stack.top.abort();
        stack.lower.layers.iter().for_each(BaseLayer::abort);
    }

    pub(crate) fn release(&self) {
        let stack = self.stack();
        stack.top.release();
        stack.lower.leave();
    }
}

/// The stack of a volume called `name`.
fn make_stack(
    name: &str,
    top: Arc<CachedStore>,
    below: Vec<BaseLayer>,
    (map, size): (StackMap, u64),
    common: &Arc<StackCommon>,
) -> Result<Stack, LayersError> {
    let mut capabilities = capabilities(&top, &below)?;
    if let StackMap::Deltas { first_writes: Some(_), .. } = &map {
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
    let rest = (capabilities, common.clone());
    Ok(Stack { top, lower: LowerLayers::new(below, (map, size), volume, share, rest) })
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
