//! The layers below the top one: which layer holds what, and reads of several parts or that wait for a shared layer.
//!
//! # Invariants
//! - A read that is in memory is completed by [`LayerStack::read_cached`], without an allocation and without waiting.
//! - What remains of a read is one future, however many layers it needs, and boxed: then a request of a volume of one
//!   layer is no larger. The layer of a part is found before the part is read, so that there is no recursion.
//! - A request that waits for a lower layer ends when its volume is aborted, even if the store never completes it.
//! - Errors name the request's range, and the place of the layer if that is not the top one.

mod find;

use std::fmt;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;

use ebb_block::{
    BLOCK, BlockError, BlockStore, Buf, BufResult, Capabilities, ErrorKind, Extent, Io, Operation,
    SECTOR, push_extent,
};

use crate::base::BaseLayer;
use crate::cached_store::CachedStore;
use crate::delta::Delta;
use crate::fair_share::StackShare;
use crate::first_writes::FirstWrites;
use crate::stack_common::StackCommon;
use crate::volume::{StoreCache, VolumeCache};
use ebb_store::Store;

/// Bytes of a request of several parts that are copied without yielding to other tasks.
const AT_ONCE: usize = 256 << 10;
/// Parts of a request for extents or of a prefetch, which may end early.
const PARTS_AT_ONCE: usize = 256;

/// What one layer holds, see [`LayerMap::run`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerRun {
    /// Which layer: 0 is the top, 1 the one below it.
    pub layer: usize,
    /// For how many bytes.
    pub length: u64,
}

/// Which layer of a stack holds what, if no block maps say so: for stacks that are made of plain stores.
pub trait LayerMap: fmt::Debug + Send + Sync {
    /// The layer that holds the byte at `offset` of the volume, and how many of the `length` bytes from there it holds:
    /// at least one sector, and up to a multiple of 4 KiB of the volume or to the end of the range. It may be fewer
    /// than there are. Called for each part of each request: it neither waits nor allocates.
    fn run(&self, offset: u64, length: u64) -> LayerRun;
}

/// What says which layer holds what.
#[derive(Debug)]
pub(crate) enum StackMap {
    Given(Box<dyn LayerMap>),
    /// The block maps of deltas: those of the first layers from the top on. Below is a plain layer, or nothing.
    Deltas {
        deltas: Vec<Arc<Delta>>,
        /// Excludes first writes of the same blocks. `None`: the stack is read-only.
        first_writes: Option<Box<FirstWrites>>,
    },
}

/// A block map that has to be loaded to answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MapMiss {
    layer: usize,
    page: u32,
}

/// The layers below the top one.
#[derive(Debug)]
pub(crate) struct LowerLayers {
    pub(crate) layers: Vec<BaseLayer>,
    pub(crate) map: StackMap,
    /// The size of the volume, if the top layer is no delta, which may get another one.
    size: u64,
    /// The volume among those that share the cache: its top layer's part, or an empty one. `None` if no layer is
    /// cached.
    pub(crate) volume: Option<Arc<VolumeCache>>,
    /// Its share, if one of the lower layers is cached.
    pub(crate) share: Option<Arc<StackShare>>,
    pub(crate) capabilities: Capabilities,
    common: Arc<StackCommon>,
}

impl LowerLayers {
    pub(crate) fn new(
        layers: Vec<BaseLayer>,
        (map, size): (StackMap, u64),
        volume: Option<Arc<VolumeCache>>,
        share: Option<Arc<StackShare>>,
        (capabilities, common): (Capabilities, Arc<StackCommon>),
    ) -> LowerLayers {
        LowerLayers { layers, map, size, volume, share, capabilities, common }
    }

    /// The size of the volume.
    #[inline]
    pub(crate) fn size(&self) -> u64 {
        self.delta(0).map_or(self.size, |delta| delta.layout().size())
    }

    /// The delta that layer `layer` is, if it is one.
    #[inline]
    pub(crate) fn delta(&self, layer: usize) -> Option<&Delta> {
        match &self.map {
            StackMap::Given(_) => None,
            StackMap::Deltas { deltas, .. } => deltas.get(layer).map(|delta| &**delta),
        }
    }

    /// The deltas, from the top on.
    pub(crate) fn deltas(&self) -> &[Arc<Delta>] {
        match &self.map {
            StackMap::Given(_) => &[],
            StackMap::Deltas { deltas, .. } => deltas,
        }
    }

    /// What makes the stack writable, and where the volume's data begins in the top layer.
    pub(crate) fn overlay(&self) -> Option<(&FirstWrites, u64)> {
        let StackMap::Deltas { first_writes, .. } = &self.map else { return None };
        first_writes.as_deref().zip(self.delta(0).map(|delta| delta.layout().data_start()))
    }

    /// Ends the use of these layers, when no request is in flight.
    pub(crate) fn leave(&self) {
        self.share.iter().for_each(|share| share.leave());
        self.layers.iter().for_each(BaseLayer::leave);
    }
}

impl Drop for LowerLayers {
    fn drop(&mut self) {
        self.leave();
    }
}

/// A part of a request.
struct LayerPart<'a> {
    /// The layer that holds it; `None`: the layer is shorter, and the part reads as zeroes.
    layer: Option<&'a CachedStore>,
    /// Where it is in the layer.
    position: u64,
    length: u64,
}

/// What is to be done for a read, see [`Layers::start_read`](crate::Layers::start_read).
#[derive(Debug)]
pub enum ReadStep<'a> {
    /// This layer carries it out, from its cache or its store. A caller with many requests calls its `read` itself: each
    /// function on the way, even if it only passes a request on, moves the buffer and enlarges the future of the request.
    Layer(&'a CachedStore),
    /// This store carries it out: the layer has no cache.
    Store(&'a Store),
    /// It was in memory, and is complete.
    Complete,
    /// It waits for layers, or is long.
    Remaining(RemainingRead),
}

impl<'a> ReadStep<'a> {
    /// For a read of this layer only.
    #[inline]
    pub(crate) fn of(layer: &'a CachedStore) -> ReadStep<'a> {
        layer.uncached().map_or(ReadStep::Layer(layer), ReadStep::Store)
    }
}

/// What remains of a read of several layers. It keeps the layers that it began with.
#[derive(Debug)]
pub struct RemainingRead {
    pub(crate) stack: Arc<Stack>,
    pub(crate) offset: u64,
    /// Bytes that are in the buffer already.
    pub(crate) done: usize,
}

impl RemainingRead {
    /// Completes the read, with the buffer that it began with.
    #[must_use]
    pub fn read(self, io: &Io, buf: Buf) -> Pin<Box<impl Future<Output = BufResult>>> {
        Box::pin(async move { self.stack.view().read_parts(io, buf, self.offset, self.done).await })
    }
}

/// The top layer and those below it.
#[derive(Debug)]
pub(crate) struct Stack {
    pub(crate) top: Arc<CachedStore>,
    pub(crate) lower: LowerLayers,
}

impl Stack {
    #[inline]
    pub(crate) fn view(&self) -> LayerStack<'_> {
        LayerStack { top: &self.top, lower: &self.lower }
    }
}

impl LayerStack<'_> {
    /// Reads the rest of the buffer, which begins at `offset` and has `done` bytes already.
    async fn read_parts(self, io: &Io, mut buf: Buf, offset: u64, done: usize) -> BufResult {
        let stack = self;
        let whole = buf.window();
        let length = whole.len();
        let range = (offset, length as u64);
        let (mut at, mut copied) = (done, 0);
        while at < length {
            if copied >= AT_ONCE {
                io.yield_now().await;
                copied = 0;
            }
            if stack.lower.common.signal.is_raised() {
                return (Err(closing(Operation::Read, range)), buf);
            }
            let position = offset + at as u64;
            let part = match stack.part(io, Operation::Read, position, (length - at) as u64).await {
                Ok(part) => part,
                Err(error) => return (Err(of_request(error, range)), buf),
            };
            // At most what is left of the buffer.
            let mut end = at + usize::try_from(part.length).unwrap_or(length - at);
            let Some(layer) = part.layer else {
                end = end.min(at + AT_ONCE);
                buf[at..end].fill(0);
                (copied, at) = (copied + end - at, end);
                continue;
            };
            let cached = stack.shared_bytes(layer, part.position, end - at);
            buf.set_window(whole, at..end);
            let read = PartRead { stack, layer, position: part.position };
            let done = if read.may_read_into(at) {
                match read.read(io, buf).await {
                    Some(done) => done,
                    None => {
                        return (
                            Err(closing(Operation::Read, range)),
                            io.pool().take(length).await,
                        );
                    }
                }
            } else {
                read.read_by_blocks(io, buf).await
            };
            let result;
            (result, buf) = done;
            let is_whole = buf.len() == end - at;
            buf.restore(whole);
            let result = match result {
                Ok(()) if !is_whole || buf.len() != length => Err(other_buffer(range)),
                result => result,
            };
            if let Err(error) = result {
                return (Err(stack.of_layer(of_request(error, range), layer)), buf);
            }
            if let Some(cached) = cached {
                stack.lower.common.reads.note(io, cached, (end - at) as u64);
            }
            (copied, at) = (copied + end - at, end);
        }
        (Ok(()), buf)
    }
}

/// A part of a read that a layer holds. The buffer shows it alone.
#[derive(Clone, Copy)]
struct PartRead<'a> {
    stack: LayerStack<'a>,
    layer: &'a CachedStore,
    position: u64,
}

impl PartRead<'_> {
    /// Whether the store can read into a buffer from its byte `at`: for direct I/O only where that is aligned in memory.
    fn may_read_into(self, at: usize) -> bool {
        let capabilities = self.layer.capabilities();
        !capabilities.direct || at.is_multiple_of(block_bytes(capabilities))
    }

    /// `None` if the volume was aborted; the store may still use the buffer.
    async fn read(self, io: &Io, buf: Buf) -> Option<BufResult> {
        let read = pin!(self.layer.read(io, buf, self.position));
        self.stack.lower.common.signal.race(read).await
    }

    /// Reads block by block through a bounce buffer.
    async fn read_by_blocks(self, io: &Io, mut buf: Buf) -> BufResult {
        let block = block_bytes(self.layer.capabilities());
        let mut bounce = io.pool().take(block).await;
        let (mut at, mut copied) = (0, 0);
        while at < buf.len() {
            if copied >= AT_ONCE {
                io.yield_now().await;
                copied = 0;
            }
            let position = self.position + at as u64;
            let into = usize::try_from(position % block as u64).unwrap_or(0);
            let length = (block - into).min(buf.len() - at);
            bounce.set_len(length);
            let Some((result, back)) = PartRead { position, ..self }.read(io, bounce).await else {
                return (Err(closing(Operation::Read, (position, length as u64))), buf);
            };
            bounce = back;
            if result.is_err() {
                return (result, buf);
            }
            if bounce.len() != length {
                return (Err(other_buffer((position, length as u64))), buf);
            }
            buf[at..at + length].copy_from_slice(&bounce);
            (copied, at) = (copied + length, at + length);
        }
        (Ok(()), buf)
    }
}

/// All layers of a volume of several.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerStack<'a> {
    pub(crate) top: &'a CachedStore,
    pub(crate) lower: &'a LowerLayers,
}

impl<'a> LayerStack<'a> {
    /// Makes the volume active.
    #[inline]
    fn note_use(self) {
        if let Some(volume) = &self.lower.volume {
            volume.note_use();
        }
    }

    /// Reads what is in memory, up to the first part that is not; returns the bytes that are in the buffer then.
    #[inline]
    pub(crate) fn read_cached(self, io: &Io, buf: &mut Buf, offset: u64) -> usize {
        self.note_use();
        let (length, mut done) = (buf.len(), 0);
        while done < length && length <= StoreCache::AT_ONCE {
            let position = offset + done as u64;
            let left = (length - done) as u64;
            let Ok(run) = self.find(io, position, left, &[]) else { break };
            let Ok(part) = self.part_of(run, Operation::Read, position, left) else { break };
            let end = done + usize::try_from(part.length).unwrap_or(length - done);
            let is_read = match part.layer {
                Some(layer) => layer.read_cached(io, &mut buf[done..end], part.position),
                None => {
                    buf[done..end].fill(0);
                    true
                }
            };
            if !is_read {
                break;
            }
            if part.layer.is_some_and(|layer| !self.is_top(layer)) {
                let length = (end - done) as u64;
                self.lower.common.reads.note(io, length, length);
            }
            done = end;
        }
        done
    }

    fn is_top(self, layer: &CachedStore) -> bool {
        std::ptr::eq(layer, self.top)
    }

    /// How many of these bytes are in memory, if the layer is below the top one.
    fn shared_bytes(self, layer: &CachedStore, position: u64, length: usize) -> Option<u64> {
        let cached = || layer.cache().map_or(0, |cache| cache.cached_bytes(position, length));
        (!self.is_top(layer)).then(cached)
    }

    /// The part of a request that begins at `offset`.
    async fn part(
        self,
        io: &Io,
        operation: Operation,
        offset: u64,
        length: u64,
    ) -> Result<LayerPart<'a>, BlockError> {
        let run = match self.find(io, offset, length, &[]) {
            Ok(run) => run,
            Err(_) => Box::pin(self.find_loaded(io, offset, length)).await?,
        };
        self.part_of(run, operation, offset, length)
    }

    #[inline]
    fn part_of(
        self,
        run: LayerRun,
        operation: Operation,
        offset: u64,
        length: u64,
    ) -> Result<LayerPart<'a>, BlockError> {
        // A delta may end within a block.
        let unit = if self.lower.delta(0).is_some() { SECTOR } else { BLOCK };
        debug_assert!(
            run.length >= length || run.length > 0 && (offset + run.length).is_multiple_of(unit),
            "the map of the layers ends a run of {} bytes at {offset} within a block",
            run.length
        );
        let Some(layer) = self.layer(run.layer) else {
            if self.lower.delta(0).is_some() && run.layer == self.lower.layers.len() + 1 {
                // There is no base, or a layer above it ends before.
                let length = run.length.max(SECTOR).min(length);
                return Ok(LayerPart { layer: None, position: offset, length });
            }
            return Err(no_such_layer(run.layer, operation, offset, length));
        };
        let shift = self.lower.delta(run.layer).map_or(0, |delta| delta.layout().data_start());
        let (position, length) = (offset + shift, run.length.max(SECTOR).min(length));
        let left = layer.size().saturating_sub(position);
        Ok(match left {
            0 => LayerPart { layer: None, position, length },
            left => LayerPart { layer: Some(layer), position, length: length.min(left) },
        })
    }

    /// Layer `number` from the top.
    #[inline]
    pub(crate) fn layer(self, number: usize) -> Option<&'a CachedStore> {
        match number.checked_sub(1) {
            None => Some(self.top),
            Some(number) => self.lower.layers.get(number).map(BaseLayer::store),
        }
    }

    /// Reads the whole buffer.
    pub(crate) async fn read_all(self, io: &Io, buf: Buf, offset: u64) -> BufResult {
        Box::pin(self.read_parts(io, buf, offset, 0)).await
    }

    /// An error of a layer: the top one is the volume's own store, which messages name anyway.
    fn of_layer(self, error: BlockError, layer: &CachedStore) -> BlockError {
        if self.is_top(layer) || error.kind == ErrorKind::Closing {
            return error;
        }
        let place = format!("base {}", layer.place());
        let source = std::io::Error::other(match &error.source {
            Some(cause) => format!("{place}: {cause}"),
            None => place,
        });
        error.caused_by(Some(source))
    }

    /// See [`BlockStore::extents`]; of at least one byte.
    pub(crate) async fn extents(
        self,
        io: &Io,
        (offset, length): (u64, u64),
        limit: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        self.note_use();
        let (mut list, mut at, end) = (Vec::new(), offset, offset + length);
        for _ in 0..PARTS_AT_ONCE {
            if at >= end || list.len() > limit {
                break;
            }
            let part = self.part(io, Operation::Extents, at, end - at).await;
            let part = part.map_err(|error| of_request(error, (offset, length)))?;
            let Some(layer) = part.layer else {
                push_extent(&mut list, Extent { offset: at, length: part.length, hole: true });
                at += part.length;
                continue;
            };
            let found = pin!(layer.extents(io, part.position, part.length, limit));
            let found = self.end(found, layer, Operation::Extents, (offset, length)).await?;
            // The list may end before the part does.
            let shift = part.position - at;
            for extent in found {
                let extent = Extent { offset: extent.offset - shift, ..extent };
                at = extent.offset + extent.length;
                push_extent(&mut list, extent);
            }
        }
        list.truncate(limit);
        Ok(list)
    }

    /// See [`BlockStore::prefetch`]. As for a single layer, at most a quarter of the cache is loaded.
    pub(crate) async fn prefetch(
        self,
        io: &Io,
        (offset, length): (u64, u64),
    ) -> Result<(), BlockError> {
        self.note_use();
        let most = self.lower.volume.as_ref().map(|volume| volume.cache.limit_bytes() / 4);
        let (mut at, end) = (offset, offset + length.min(most.unwrap_or(u64::MAX)));
        for _ in 0..PARTS_AT_ONCE {
            if at >= end {
                break;
            }
            let part = self.part(io, Operation::Prefetch, at, end - at).await;
            let part = part.map_err(|error| of_request(error, (offset, length)))?;
            if let Some(layer) = part.layer {
                let load = pin!(layer.prefetch(io, part.position, part.length));
                self.end(load, layer, Operation::Prefetch, (offset, length)).await?;
            }
            at += part.length;
        }
        Ok(())
    }

    /// Waits for a part of a request that has no buffer.
    pub(crate) async fn end<T>(
        self,
        wait: Pin<&mut impl Future<Output = Result<T, BlockError>>>,
        layer: &CachedStore,
        operation: Operation,
        range: (u64, u64),
    ) -> Result<T, BlockError> {
        let result = self.lower.common.signal.race(wait).await;
        let result = result.unwrap_or_else(|| Err(closing(operation, range)));
        result.map_err(|error| self.of_layer(of_request(error, range), layer))
    }
}

#[cold]
fn no_such_layer(layer: usize, operation: Operation, offset: u64, length: u64) -> BlockError {
    let source = std::io::Error::other(format!("the map of the layers names layer {layer}"));
    BlockError::new(ErrorKind::Io, operation, offset, length).caused_by(Some(source))
}

/// The store returned another buffer, so that the parts before may be lost.
#[cold]
fn other_buffer((offset, length): (u64, u64)) -> BlockError {
    let source = std::io::Error::other("the store returned a buffer of another length");
    BlockError::new(ErrorKind::Io, Operation::Read, offset, length).caused_by(Some(source))
}

/// The volume was aborted.
#[cold]
fn closing(operation: Operation, (offset, length): (u64, u64)) -> BlockError {
    BlockError::new(ErrorKind::Closing, operation, offset, length)
}

/// The error of a part, as that of its request.
#[cold]
pub(crate) fn of_request(mut error: BlockError, (offset, length): (u64, u64)) -> BlockError {
    (error.offset, error.length) = (offset, length);
    error
}

/// Bytes of a block.
pub(crate) fn block_bytes(capabilities: Capabilities) -> usize {
    usize::try_from(capabilities.alignment).unwrap_or(usize::MAX)
}
