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
//! - A snapshot puts a new top layer above the others ([`Layers::push`]), while no write is in flight. The stack of before
//!   stays for the requests that use it, until the volume is closed: there are no more stacks than layers may be.
//! - A stack of several layers is writable only as an overlay: its top layer is a delta ([`Layers::overlay`]).

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ebb_block::{
    BLOCK, BlockError, BlockStore, Buf, BufResult, Capabilities, DeviceIdentity, ErrorKind, Extent,
    Identity, Io, Loss, Operation, Resize, ResizeError, SECTOR, Wanted, ZeroFlags,
};
use ebb_image::Parent;
use ebb_store::Store;

use crate::base::{BaseLayer, BaseLayers};
use crate::cache::CacheError;
use crate::cached_store::CachedStore;
use crate::delta::Delta;
use crate::first_writes::FirstWrites;
use crate::lower_layers::{LayerMap, LayerStack, LowerLayers, ReadStep, StackMap, block_bytes};
use crate::pages::PAGE;
use crate::stats::Mode;
use crate::write_gate::{WriteGate, WritePass};

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

/// Runs that a request for changes looks at; it may end early.
const CHANGES_AT_ONCE: usize = 4096;

/// Bytes of both slots of a map page.
const MAP_BYTES: usize = 8192;

/// Snapshots of a volume while it is open.
const SNAPSHOTS: usize = 16;

/// The top layer and those below it.
#[derive(Debug)]
struct Stack {
    top: Arc<CachedStore>,
    lower: Option<Box<LowerLayers>>,
}

/// The stacks that snapshots have made.
#[derive(Default)]
struct LaterStacks {
    /// How many there are: the last one is in use.
    count: AtomicUsize,
    list: [OnceLock<Stack>; SNAPSHOTS],
    writes: WriteGate,
}

/// The layers of a volume, used as one store.
pub struct Layers {
    first: Stack,
    /// `None`: there is one layer.
    later: Option<Box<LaterStacks>>,
}

impl std::fmt::Debug for Layers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Layers").field("stack", self.current()).finish_non_exhaustive()
    }
}

/// Why there is no snapshot.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// It has no delta that could be frozen.
    #[error("only an overlay that is written to has snapshots: give the volume a `base`")]
    NoOverlay,
    /// Another snapshot is being made.
    #[error("another snapshot of the volume is being made: try again in a moment")]
    Busy,
    /// Too many since it was opened.
    #[error(
        "the volume has as many snapshots as it may have while it is open: close it, and open it again"
    )]
    TooMany,
    /// A write did not complete in time.
    #[error("writes of the volume did not complete within {0:?}: see whether its store responds")]
    Slow(Duration),
    /// The layers cannot be put together.
    #[error(transparent)]
    Layers(#[from] LayersError),
}

impl From<CachedStore> for Layers {
    /// One layer.
    fn from(top: CachedStore) -> Layers {
        Layers { first: Stack { top: Arc::new(top), lower: None }, later: None }
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
        let first_writes = (!read_only).then(Box::<FirstWrites>::default);
        Layers::make(name, top, below, (StackMap::Deltas { deltas, first_writes }, size))
    }

    fn make(
        name: &str,
        top: CachedStore,
        below: Vec<BaseLayer>,
        map: (StackMap, u64),
    ) -> Result<Layers, LayersError> {
        let first = make_stack(name, Arc::new(top), below, map)?;
        Ok(Layers { first, later: Some(Box::default()) })
    }

    /// Makes a snapshot: what the volume holds now does not change any more, and `top`, an empty delta above that, is
    /// written from now on. Waits for the writes in flight, for at most `limit`; writes that begin meanwhile wait, too.
    /// Returns the layer that was the top one. It is stable after the next flush of the volume.
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
    ) -> Result<Arc<CachedStore>, SnapshotError> {
        let Some(later) = &self.later else { return Err(SnapshotError::NoOverlay) };
        let paused = io.timeout(limit, later.writes.pause()).await;
        let _pause = paused.ok_or(SnapshotError::Slow(limit))?.ok_or(SnapshotError::Busy)?;
        let (before, count) = (self.current(), later.count.load(Ordering::Acquire));
        let place = later.list.get(count).ok_or(SnapshotError::TooMany)?;
        let Some(lower) = before.lower.as_deref().filter(|lower| lower.overlay().is_some()) else {
            return Err(SnapshotError::NoOverlay);
        };
        let Some(frozen) = lower.deltas().first() else { return Err(SnapshotError::NoOverlay) };
        let again = lower.layers.iter().map(BaseLayer::again).collect::<Option<Vec<_>>>();
        let mut below = again.ok_or(SnapshotError::Busy)?;
        below.insert(0, bases.adopt(&before.top, frozen));
        let deltas = std::iter::once(Arc::new(delta)).chain(lower.deltas().iter().cloned());
        let first_writes = Some(Box::<FirstWrites>::default());
        let map = StackMap::Deltas { deltas: deltas.collect(), first_writes };
        let stack = make_stack(name, Arc::new(top), below, (map, lower.size()))?;
        frozen.freeze();
        // There is one pause at a time, so that the place is free.
        if place.set(stack).is_err() {
            return Err(SnapshotError::Busy);
        }
        later.count.store(count + 1, Ordering::Release);
        lower.share.iter().for_each(|share| share.leave());
        Ok(before.top.clone())
    }

    /// Copies what the layers below hold at `offset` into the top layer, at most `most` bytes, a multiple of 4 KiB. Returns
    /// the bytes that were looked at, 0 at the end. What is copied stays when the volume is closed or killed.
    ///
    /// # Errors
    /// Those of the stores; [`ErrorKind::ReadOnly`] if it is no overlay that is written to.
    pub async fn fill(&self, io: &Io, offset: u64, most: u64) -> Result<u64, BlockError> {
        let refuse = || BlockError::new(ErrorKind::ReadOnly, Operation::Write, offset, most);
        let (stack, _pass) = self.stack_to_write().await.ok_or_else(refuse)?;
        if offset >= stack.lower.size() {
            return Ok(0);
        }
        stack.fill(io, offset, most).await
    }

    /// Notes in the top layer that nothing is below it, after [`Layers::fill`] has copied everything from 0 to the end while
    /// no snapshot was made. Until it is opened anew the volume looks into the layers below for what is zeroes.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn detach(&self, io: &Io) -> Result<(), BlockError> {
        self.flush(io).await?;
        let Stack { top, lower } = self.current();
        match lower.as_ref().and_then(|lower| lower.delta(0)) {
            Some(delta) => delta.detach(io, top).await,
            None => Ok(()),
        }
    }

    #[inline]
    fn current(&self) -> &Stack {
        let Some(later) = &self.later else { return &self.first };
        let last = later.count.load(Ordering::Acquire).checked_sub(1);
        let last = last.and_then(|last| later.list.get(last)).and_then(OnceLock::get);
        last.unwrap_or(&self.first)
    }

    /// What is now the top layer, as the parent of a delta above it; `None` if it is no delta.
    pub fn top_as_parent(&self) -> Option<Parent> {
        let Stack { top, lower } = self.current();
        Some(lower.as_ref()?.delta(0)?.as_parent(top))
    }

    /// The snapshots below it, from the newest on.
    pub fn snapshots(&self) -> Vec<String> {
        let deltas = self.current().lower.iter().flat_map(|lower| lower.deltas());
        deltas.filter_map(|delta| delta.header().parent.snapshot().map(str::to_owned)).collect()
    }

    /// Which parts of a range have been written since a snapshot, in order, at most `limit`: their lengths, and whether they
    /// have. The list may end before the range does.
    ///
    /// # Errors
    /// Those of the stores; [`ErrorKind::Invalid`] if there is no such snapshot.
    pub async fn changes(
        &self,
        io: &Io,
        snapshot: &str,
        (offset, length): (u64, u64),
        limit: usize,
    ) -> Result<Vec<(u64, bool)>, BlockError> {
        let refuse = || BlockError::new(ErrorKind::Invalid, Operation::Extents, offset, length);
        let stack = self.stack_of_several().ok_or_else(refuse)?;
        let mut deltas = stack.lower.deltas().iter();
        // The layers above the snapshot hold what was written since.
        let above = deltas.position(|delta| delta.header().parent.snapshot() == Some(snapshot));
        let above = above.ok_or_else(refuse)?;
        let (mut list, mut at, end) = (Vec::<(u64, bool)>::new(), offset, offset + length);
        for _ in 0..CHANGES_AT_ONCE {
            if at >= end || list.len() > limit {
                break;
            }
            let run = stack.find_loaded(io, at, end - at).await?;
            let changed = run.layer <= above;
            match list.last_mut() {
                Some((length, same)) if *same == changed => *length += run.length,
                _ => list.push((run.length, changed)),
            }
            at += run.length.max(1);
        }
        list.truncate(limit);
        Ok(list)
    }

    /// All stacks, the one in use last.
    fn stacks(&self) -> impl Iterator<Item = &Stack> {
        let later = self.later.iter().flat_map(|later| later.list.iter().filter_map(OnceLock::get));
        std::iter::once(&self.first).chain(later)
    }

    /// Bytes of its layers that their stores do not have yet.
    pub fn dirty(&self) -> u64 {
        let caches = self.stacks().filter_map(|stack| stack.top.cache());
        caches.map(|cache| cache.dirty()).sum()
    }

    /// Bytes of its layers that their stores have and that are not known to be stable there.
    pub fn unstable(&self) -> u64 {
        let caches = self.stacks().filter_map(|stack| stack.top.cache());
        caches.map(|cache| cache.unstable()).sum()
    }

    /// See [`CachedStore::is_lost`]; of any layer that was written to.
    pub fn is_lost(&self) -> bool {
        self.stacks().any(|stack| stack.top.is_lost())
    }

    /// See [`CachedStore::loss`].
    pub fn loss(&self) -> Option<Loss> {
        self.stacks().find_map(|stack| stack.top.loss())
    }

    /// Ends writeback in the background. Dirty data stays dirty.
    pub fn end_writeback(&self) {
        self.stacks().for_each(|stack| stack.top.end_writeback());
    }

    /// Layers, the top one included.
    pub fn depth(&self) -> usize {
        1 + self.current().lower.as_ref().map_or(0, |lower| lower.layers.len())
    }

    /// Bytes of the caches of the layers below, which other volumes may use, too.
    pub fn shared_cache_bytes(&self) -> u64 {
        let layers = self.current().lower.iter().flat_map(|lower| &lower.layers);
        let caches = layers.filter_map(BaseLayer::cache);
        caches.map(|cache| cache.held() * PAGE).sum()
    }

    /// The volume's own layer.
    #[inline]
    pub fn top(&self) -> &CachedStore {
        &self.current().top
    }

    /// The layer, if there is only one.
    #[inline]
    pub fn only(&self) -> Option<&CachedStore> {
        if self.later.is_none() { Some(&self.first.top) } else { None }
    }

    /// Begins a read of the whole buffer at `offset`: completes it if it is in memory and not in the top layer, else says
    /// what is to be done. Neither waits nor allocates.
    #[inline]
    pub fn start_read(&self, io: &Io, buf: &mut Buf, offset: u64) -> ReadStep<'_> {
        match self.stack_of_several() {
            None => ReadStep::of(&self.first.top),
            Some(stack) => stack.read_cached(io, buf, offset),
        }
    }

    #[inline]
    fn stack_of_several(&self) -> Option<LayerStack<'_>> {
        self.later.as_ref()?;
        let Stack { top, lower } = self.current();
        lower.as_deref().map(|lower| LayerStack { top, lower })
    }

    /// A write that waits for the gate, or of blocks that the top layer does not hold yet.
    async fn write_slowly(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        match self.stack_to_write().await {
            Some((stack, _pass)) => stack.write(io, buf, offset, fua).await,
            None => self.first.top.write(io, buf, offset, fua).await,
        }
    }

    /// As [`Layers::stack_of_several`], for a request that changes data.
    async fn stack_to_write(&self) -> Option<(LayerStack<'_>, WritePass<'_>)> {
        let pass = self.later.as_ref()?.writes.pass().await;
        Some((self.stack_of_several()?, pass))
    }
}

/// The stack of a volume called `name`.
fn make_stack(
    name: &str,
    top: Arc<CachedStore>,
    below: Vec<BaseLayer>,
    (map, size): (StackMap, u64),
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
    let lower = LowerLayers::new(below, (map, size), volume, share, capabilities);
    Ok(Stack { top, lower: Some(Box::new(lower)) })
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
        let Stack { top, lower } = self.current();
        lower.as_ref().map_or_else(|| top.size(), |lower| lower.size())
    }

    #[inline]
    fn capabilities(&self) -> Capabilities {
        match self.stack_of_several() {
            None => self.first.top.capabilities(),
            Some(stack) => stack.lower.capabilities,
        }
    }

    /// That of all layers: the same top layer above another base holds other data.
    fn identity(&self) -> Identity {
        let Stack { top, lower } = self.current();
        let mut identity = top.identity();
        for layer in lower.iter().flat_map(|lower| &lower.layers) {
            identity.key = format!("{} above {}", identity.key, layer.store().identity().key);
        }
        identity
    }

    fn place(&self) -> String {
        self.current().top.place()
    }

    fn device_identity(&self) -> Option<DeviceIdentity> {
        self.current().top.device_identity()
    }

    /// A request of several layers may need more than its bounce buffer: a map page, or the block that a write completes. It
    /// must not wait for that while other requests that hold memory wait, too.
    #[inline]
    fn bounce_bytes(&self, offset: u64, length: usize) -> usize {
        let Some(stack) = self.stack_of_several() else {
            return self.first.top.bounce_bytes(offset, length);
        };
        // Parts begin and end at multiples of 4 KiB, or where the request does.
        let block = block_bytes(stack.lower.capabilities);
        let aligned = (offset | length as u64).is_multiple_of(BLOCK);
        let bounce = if aligned || block as u64 <= SECTOR { 0 } else { 2 * block };
        let own = match (stack.lower.deltas().is_empty(), aligned) {
            (true, _) => 0,
            (false, true) => MAP_BYTES,
            (false, false) => 2 * MAP_BYTES,
        };
        bounce + own
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
        let Some(later) = &self.later else {
            return self.first.top.write(io, buf, offset, fua).await;
        };
        let pass = later.writes.try_pass();
        let held = match (&pass, self.stack_of_several()) {
            (Some(_), Some(stack)) => {
                stack.held_at(io, offset, buf.len(), fua).map(|position| (stack.top, position))
            }
            _ => None,
        };
        if let Some((top, position)) = held {
            let written = top.write(io, buf, position, false).await;
            drop(pass);
            return written;
        }
        drop(pass);
        Box::pin(self.write_slowly(io, buf, offset, fua)).await
    }

    async fn flush(&self, io: &Io) -> Result<(), BlockError> {
        match self.stack_of_several() {
            None => self.first.top.flush(io).await,
            Some(stack) => Box::pin(stack.flush(io)).await,
        }
    }

    async fn discard(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        if self.later.is_none() {
            return self.first.top.discard(io, offset, length).await;
        }
        Box::pin(async {
            match self.stack_to_write().await {
                Some((stack, _pass)) => stack.discard(io, (offset, length)).await,
                None => Ok(()),
            }
        })
        .await
    }

    async fn write_zeroes_while(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
        wanted: Wanted<'_>,
    ) -> Result<(), BlockError> {
        if self.later.is_none() {
            return self.first.top.write_zeroes_while(io, offset, length, flags, wanted).await;
        }
        Box::pin(async {
            match self.stack_to_write().await {
                Some((stack, _pass)) => {
                    stack.write_zeroes(io, (offset, length), flags, wanted).await
                }
                None => Ok(()),
            }
        })
        .await
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
            _ => self.current().top.extents(io, offset, length, limit).await,
        }
    }

    async fn prefetch(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        match self.stack_of_several() {
            Some(stack) => Box::pin(stack.prefetch(io, (offset, length))).await,
            None => self.current().top.prefetch(io, offset, length).await,
        }
    }

    /// Only of one layer.
    fn has_direct_access(&self) -> bool {
        self.later.is_none() && self.current().top.has_direct_access()
    }

    fn read_in_place(&self, offset: u64, length: u64, see: impl FnMut(&[u8])) -> bool {
        self.later.is_none() && self.current().top.read_in_place(offset, length, see)
    }

    fn write_in_place(&self, offset: u64, length: u64, put: impl FnMut(&mut [u8])) -> bool {
        self.later.is_none() && self.current().top.write_in_place(offset, length, put)
    }

    async fn check_resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        if self.later.is_some() {
            return Err(ResizeError::Unsupported("a volume of several layers keeps its size"));
        }
        self.current().top.check_resize(io, order).await
    }

    async fn resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        self.check_resize(io, order).await?;
        self.current().top.resize(io, order).await
    }

    /// Requests of this volume fail; a layer below is aborted once all of its users are.
    fn abort(&self) {
        for Stack { top, lower } in self.stacks() {
            top.abort();
            lower.iter().for_each(|lower| lower.abort());
        }
    }

    fn release(&self) {
        // The tops of earlier stacks are layers of later ones.
        self.current().top.release();
        for Stack { lower, .. } in self.stacks() {
            lower.iter().for_each(|lower| lower.leave());
        }
    }
}
