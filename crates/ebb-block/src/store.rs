//! [`BlockStore`]: what a store implements.

use std::ops::Range;

use ebb_io::{Buf, ForeignVectors, Io};

use crate::SECTOR;
use crate::error::{BlockError, ErrorKind, Operation};
use crate::flush_state::LaterFlushes;
use crate::identity::{DeviceIdentity, Identity};
use crate::resize::{Resize, ResizeError};
use crate::tracking::{CountedRequest, Tracking};
use crate::zeroes::{Remaining, ZeroPiece};

/// The result of an operation on a buffer, and the buffer.
pub type BufResult = (Result<(), BlockError>, Buf);

/// The result of an operation on foreign memory, and its list.
pub type ForeignResult = (Result<(), BlockError>, Box<ForeignVectors>);

/// Whether the zeroes of a request are still wanted.
pub type Wanted<'a> = &'a dyn Fn() -> bool;

/// How zeroes may be written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZeroFlags {
    /// The store may leave a hole (false: keep the space allocated).
    pub may_unmap: bool,
    /// Fail with [`ErrorKind::Unsupported`] rather than write zeroes as data.
    pub fast_only: bool,
}

/// A range of a volume that is either all data or all hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// Bytes; never 0.
    pub length: u64,
    /// Nothing is allocated here, and reads return zeroes.
    pub hole: bool,
}

/// What a store can do beyond reading and writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Requests that change data fail with [`ErrorKind::ReadOnly`], which [`Tracked`](crate::Tracked) sees to: the volume
    /// is read-only, whatever its configuration.
    pub read_only: bool,
    /// Discarding frees space.
    pub discard: bool,
    /// Zeroes can be written without transferring them. Where this is false, [`ZeroFlags::fast_only`] is refused.
    pub fast_zero: bool,
    /// Alignment of offset and length below which a bounce buffer is needed, bytes (1: any).
    pub alignment: u32,
    /// I/O bypasses the page cache.
    pub direct: bool,
    /// Long reads are best split into pieces of this many bytes: a piece that is sent before the
    /// next is read stays in the processor's cache, and only one piece at a time takes memory.
    /// `None` where each read is a round trip to a device or server.
    pub read_piece: Option<u32>,
}

/// Appends an extent, merging it with the last one if both are data or both are holes.
pub fn push_extent(list: &mut Vec<Extent>, next: Extent) {
    match list.last_mut() {
        Some(last) if last.hole == next.hole => last.length += next.length,
        _ => list.push(next),
    }
}

/// Moves the bounds of consecutive extents to whole sectors: a sector with data in it counts as data. The first extent begins
/// at a sector; a hole at the end that is shorter counts as data if it would be the only extent.
pub fn whole_sectors(mut list: Vec<Extent>) -> Vec<Extent> {
    let is_whole = |extent: &Extent| (extent.offset | extent.length).is_multiple_of(SECTOR);
    let Some(first) = list.first().copied() else { return list };
    if list.iter().all(is_whole) {
        return list;
    }
    let mut at = first.offset;
    let mut rounded = Vec::with_capacity(list.len());
    for extent in list.drain(..) {
        let end = extent.offset + extent.length;
        let end = if extent.hole { end - end % SECTOR } else { end.next_multiple_of(SECTOR) };
        if end > at {
            push_extent(&mut rounded, Extent { offset: at, length: end - at, hole: extent.hole });
            at = end;
        }
    }
    if rounded.is_empty() {
        rounded.push(Extent { offset: first.offset, length: SECTOR, hole: false });
    }
    rounded
}

/// Bytes of the buffer from which [`BlockStore::zero_blocks`] writes by default.
const ZERO_BUFFER: u64 = 64 << 10;

/// Where the bytes of a volume are.
///
/// # What arrives
/// A store is called through [`Tracked`](crate::Tracked), or by another store that does the same. So offsets and
/// lengths arrive as multiples of [`SECTOR`] within [`BlockStore::size`], and the sum of both cannot overflow; lengths
/// of reads and writes are those of their buffers. No request that changes data arrives at a store that is
/// [read-only](Capabilities::read_only). Requests arrive concurrently, from several threads, with `io` being the worker
/// that the request is on.
///
/// # Cancellation
/// A future may be dropped at any await. The store must stay usable. The request may still be carried out later, so
/// that the content of its range is unknown until it is written again; nothing outside the range changes. A flush, or a
/// write with FUA, that is dropped counts as failed (`Tracked` does that).
///
/// # Errors
/// [`BlockError`] with the operation and range of the request, and a kind: [`ErrorKind::NoSpace`] where space ran out,
/// [`ErrorKind::Unsupported`], [`ErrorKind::Closing`] after [`BlockStore::abort`], else mostly [`ErrorKind::Io`] with
/// the system's error as its source. A failed write may have written any part of its range.
///
/// # Work on the worker's thread
/// A method must not block its thread, and yields ([`Io::yield_now`]) about every 256 KiB that it copies. Nothing of a
/// guest's choosing may lead to a panic, an unchecked sum, or an unbounded loop, queue or allocation.
#[allow(async_fn_in_trait, reason = "a request stays on its worker: no caller needs `Send`")]
pub trait BlockStore {
    // What it is.

    /// Its size in bytes: a multiple of [`SECTOR`]. Cheap: it is called for each request. Changes only by
    /// [`BlockStore::resize`].
    fn size(&self) -> u64;

    /// What the store can do. Must not change while the store is open. Cheap.
    fn capabilities(&self) -> Capabilities;

    /// The store's identity, which survives a restart of the daemon.
    fn identity(&self) -> Identity;

    /// The file or server, for messages.
    fn place(&self) -> String;

    /// The device or server that its writes wait for; `None` if it shares none with another store. May block: it is
    /// called when the store is opened, not on a worker.
    fn device_identity(&self) -> Option<DeviceIdentity> {
        None
    }

    /// The counters of its requests and of its failed syncs: a field of the store. `None` is right only for a store
    /// whose requests neither wait nor fail, such as memory.
    #[inline]
    fn tracking(&self) -> Option<&Tracking> {
        None
    }

    /// Bytes of the bounce buffer of a READ or WRITE, for parts of blocks at its ends: at most two blocks, and 0 for a
    /// request of whole blocks ([`unaligned::bounce_bytes`](crate::unaligned::bounce_bytes)). Callers charge it, see
    /// [`ebb_io::BufPool::footprint`].
    #[inline]
    fn bounce_bytes(&self, offset: u64, length: usize) -> usize {
        let _ = (offset, length);
        0
    }

    // Requests.

    /// Fills the whole buffer from `offset`. What was never written reads as zeroes, or as what the store held when it
    /// was opened. The buffer comes back with its length, also with an error; its content is then undefined.
    async fn read(&self, io: &Io, buf: Buf, offset: u64) -> BufResult;

    /// Writes the whole buffer at `offset`; with `fua` it is stable on return. From then on reads return it, on every
    /// worker. The buffer comes back unchanged, also with an error: callers write it again.
    async fn write(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult;

    /// Whether [`BlockStore::read_foreign`] and [`BlockStore::write_foreign`] can transfer this memory from or to
    /// `offset`. The default is false.
    fn takes_foreign(&self, offset: u64, vectors: &ForeignVectors) -> bool {
        let _ = (offset, vectors);
        false
    }

    /// As [`BlockStore::read`], straight into memory that is shared with another process. Called only where
    /// [`BlockStore::takes_foreign`] is true. The list comes back advanced by what was read.
    async fn read_foreign(
        &self,
        io: &Io,
        vectors: Box<ForeignVectors>,
        offset: u64,
    ) -> ForeignResult {
        let _ = io;
        (Err(unsupported_foreign(Operation::Read, offset, &vectors)), vectors)
    }

    /// As [`BlockStore::write`] without FUA, straight from memory that is shared with another process, which may change it
    /// meanwhile: then each byte is written as it is or as it was.
    async fn write_foreign(
        &self,
        io: &Io,
        vectors: Box<ForeignVectors>,
        offset: u64,
    ) -> ForeignResult {
        let _ = io;
        (Err(unsupported_foreign(Operation::Write, offset, &vectors)), vectors)
    }

    /// Makes stable what was acknowledged before the call, from any worker: writes, zeroes and discards. Succeeds
    /// without effect where nothing is volatile or everything is.
    ///
    /// `Tracked` merges concurrent flushes and fails all later ones after a failure, so a store need neither merge them
    /// nor remember its failures.
    async fn flush(&self, io: &Io) -> Result<(), BlockError>;

    /// Frees the space of a range if the store can; the content of the range is unspecified afterwards, each sector of
    /// it old data or zeroes. Parts of blocks may be left as they are. The default succeeds without effect, which is
    /// right for a store that cannot discard.
    async fn discard(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        let _ = (io, offset, length);
        Ok(())
    }

    /// Makes a range read as zeroes as far as that needs no transfer, and returns what remains to be written as data:
    /// nothing, the two ends of the range, or all of it. With [`ZeroFlags::fast_only`] it does all of it or fails with
    /// [`ErrorKind::Unsupported`], and changes nothing then. The default does nothing fast.
    async fn zero_range(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
    ) -> Result<Remaining, BlockError> {
        let _ = io;
        if flags.fast_only {
            let kind = ErrorKind::Unsupported;
            return Err(BlockError::new(kind, Operation::WriteZeroes, offset, length));
        }
        Ok([offset..offset + length, 0..0])
    }

    /// Writes zeroes as data over whole blocks, at most [`PIECE_BYTES`](crate::PIECE_BYTES) and
    /// [`BlockStore::zero_blocks_max`]. The default writes from a buffer of 64 KiB; a store that can send a zero page
    /// many times takes no memory for it.
    async fn zero_blocks(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        let bytes = usize::try_from(length.min(ZERO_BUFFER)).unwrap_or(0);
        let mut buf = io.pool().take(bytes).await;
        buf.fill(0);
        let mut at = 0;
        while at < length {
            buf.set_len(usize::try_from((length - at).min(bytes as u64)).unwrap_or(bytes));
            let (result, back) = self.write(io, buf, offset + at, false).await;
            result?;
            buf = back;
            at += buf.len().max(1) as u64;
        }
        Ok(())
    }

    /// The most bytes of one [`BlockStore::zero_blocks`]: a multiple of the block.
    fn zero_blocks_max(&self) -> u64 {
        u64::MAX
    }

    /// Makes a range read as zeroes.
    async fn write_zeroes(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
    ) -> Result<(), BlockError> {
        self.write_zeroes_while(io, offset, length, flags, &|| true).await
    }

    /// As [`BlockStore::write_zeroes`]; fails with [`ErrorKind::Closing`] if zeroes must be written as data and
    /// `wanted` returns false. The range then holds old data or zeroes. A store implements [`BlockStore::zero_range`]
    /// and [`BlockStore::zero_blocks`], and leaves this as it is; it counts its requests itself.
    async fn write_zeroes_while(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
        wanted: Wanted<'_>,
    ) -> Result<(), BlockError> {
        let request = CountedRequest::begin(self.tracking(), io);
        let remaining = self.zero_range(io, offset, length, flags).await;
        let remaining = request.end(remaining)?;
        if remaining.iter().all(Range::is_empty) {
            return Ok(());
        }
        // Boxed: few stores need it, and it would enlarge the future of every request.
        Box::pin(write_zeroes_as_data(self, io, remaining, wanted)).await
    }

    /// The runs of data and holes in a range, in order and without gaps: at least one and at most `limit`. The list may
    /// end before the range does, also where a store would have to search for long. A hole reads as zeroes. The default
    /// reports data.
    async fn extents(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        let _ = (io, limit);
        Ok(vec![Extent { offset, length, hole: false }])
    }

    /// Hints that a range will be read soon.
    async fn prefetch(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        let _ = (io, offset, length);
        Ok(())
    }

    // Access without a buffer, for stores whose data is in this process.

    /// True if the data is in this process, so that [`BlockStore::read_in_place`] and [`BlockStore::write_in_place`]
    /// work.
    fn has_direct_access(&self) -> bool {
        false
    }

    /// Reads a range in place: calls `see` on each piece in order, which no other task changes during the call. False,
    /// without a call, for stores without direct access.
    fn read_in_place(&self, offset: u64, length: u64, see: impl FnMut(&[u8])) -> bool {
        let _ = (offset, length, see);
        false
    }

    /// Writes a range in place: calls `put` on each piece in order, which holds the old data and is to be filled with
    /// the new. False, without a call, for stores without direct access.
    fn write_in_place(&self, offset: u64, length: u64, put: impl FnMut(&mut [u8])) -> bool {
        let _ = (offset, length, put);
        false
    }

    // Failed syncs, see `Tracked`.

    /// The outcome of flushes after a sync has failed with `error`. The default is the safe answer.
    fn later_flushes(&self, error: &BlockError) -> LaterFlushes {
        let _ = error;
        LaterFlushes::Fail
    }

    /// After a write with FUA found no space: true if no sync error has occurred that another request has consumed. The
    /// default is the safe answer.
    async fn has_no_unreported_error(&self, io: &Io) -> bool {
        let _ = io;
        false
    }

    /// True if a write with FUA is a write and then a flush, whose errors have
    /// [`Operation::Flush`]. Any other error of such a write loses nothing, since only a sync can
    /// report the loss of other data. The default is the safe answer.
    fn has_fua_by_flush(&self) -> bool {
        false
    }

    // Its life.

    /// The size in bytes that [`BlockStore::resize`] would result in; nothing is changed.
    ///
    /// # Errors
    /// [`ResizeError`]: it would not be resized. The default is [`ResizeError::Unsupported`].
    async fn check_resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        let _ = (io, order);
        Err(ResizeError::Unsupported {
            why: "this store keeps its size",
            remedy: "copy the disk to a file or device of the size that you need, with `ebbd image export`",
        })
    }

    /// Resizes the store and returns its new size in bytes; what is added reads as zeroes. One call at a time for each
    /// store. Before shrinking, the caller waits until no write beyond the new end is in flight: one that runs after a
    /// file was truncated would extend it again.
    ///
    /// # Errors
    /// [`ResizeError`]; its size is unchanged then. The default is [`ResizeError::Unsupported`].
    async fn resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        self.check_resize(io, order).await
    }

    /// Aborts the store, from any thread: all requests that wait for a server, flushes included, and all later ones
    /// fail with [`ErrorKind::Closing`]. Operations that the kernel has begun on a file or device cannot be cancelled
    /// and run to completion. The default does nothing.
    fn abort(&self) {}

    /// Drops the store's lock, so that another process can open it. For a store that is closed and has no write in
    /// flight. The descriptor alone does not drop it in time: the process lives on while the kernel holds a request of
    /// another store. The default does nothing.
    fn release(&self) {}
}

#[cold]
fn unsupported_foreign(operation: Operation, offset: u64, vectors: &ForeignVectors) -> BlockError {
    BlockError::new(ErrorKind::Unsupported, operation, offset, vectors.remaining() as u64)
}

/// Writes zeroes as data over what [`BlockStore::zero_range`] has left.
///
/// # Errors
/// Those of the store, and [`ErrorKind::Closing`] once `wanted` returns false.
pub async fn write_zeroes_as_data<S: BlockStore + ?Sized>(
    store: &S,
    io: &Io,
    remaining: Remaining,
    wanted: Wanted<'_>,
) -> Result<(), BlockError> {
    let (block, most) = (u64::from(store.capabilities().alignment), store.zero_blocks_max());
    let _permit = match store.tracking() {
        Some(tracking) => Some(tracking.zero_permits.acquire().await),
        None => None,
    };
    for mut range in remaining {
        while !range.is_empty() {
            let piece = ZeroPiece::first_of(&range, block.max(1), most);
            if !wanted() {
                let (kind, operation) = (ErrorKind::Closing, Operation::WriteZeroes);
                let left = range.end - range.start;
                return Err(BlockError::new(kind, operation, range.start, left));
            }
            let request = CountedRequest::begin(store.tracking(), io);
            let result = match piece {
                ZeroPiece::Whole(length) => store.zero_blocks(io, range.start, length).await,
                ZeroPiece::Part(length) => {
                    // Less than a block.
                    let length = usize::try_from(length).unwrap_or(usize::MAX);
                    let mut buf = io.pool().take(length).await;
                    buf.fill(0);
                    store.write(io, buf, range.start, false).await.0
                }
            };
            let result = result.map_err(|mut error| {
                error.operation = Operation::WriteZeroes;
                error
            });
            request.end(result)?;
            range.start += piece.bytes();
        }
    }
    Ok(())
}

/// Checks that a request arrives as [`BlockStore`] promises it to a store.
///
/// # Errors
/// [`ErrorKind::Invalid`], [`ErrorKind::OutOfRange`], or [`ErrorKind::ReadOnly`] for a change of a read-only store.
#[inline]
pub(crate) fn check_range<S: BlockStore + ?Sized>(
    store: &S,
    operation: Operation,
    offset: u64,
    length: u64,
) -> Result<(), BlockError> {
    if !(offset | length).is_multiple_of(SECTOR) {
        return Err(BlockError::new(ErrorKind::Invalid, operation, offset, length));
    }
    if offset.checked_add(length).is_none_or(|end| end > store.size()) {
        return Err(BlockError::new(ErrorKind::OutOfRange, operation, offset, length));
    }
    let changes =
        matches!(operation, Operation::Write | Operation::Discard | Operation::WriteZeroes);
    if changes && store.capabilities().read_only {
        return Err(BlockError::new(ErrorKind::ReadOnly, operation, offset, length));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// No byte of data becomes one of a hole, and the list advances.
        #[test]
        fn rounded_extents_cover_all_data(
            start in 0u64..4,
            lengths in prop::collection::vec((1u64..1500, any::<bool>()), 1..12),
        ) {
            let mut at = start * SECTOR;
            let mut list = Vec::new();
            for (length, hole) in lengths {
                push_extent(&mut list, Extent { offset: at, length, hole });
                at += length;
            }
            let rounded = whole_sectors(list.clone());
            let mut end = start * SECTOR;
            for extent in &rounded {
                prop_assert_eq!(extent.offset, end);
                prop_assert!(extent.length > 0 && extent.length.is_multiple_of(SECTOR));
                end += extent.length;
                for data in list.iter().filter(|extent| !extent.hole) {
                    let apart = end <= data.offset || data.offset + data.length <= extent.offset;
                    prop_assert!(!extent.hole || apart, "{data:?} in {extent:?}");
                }
            }
            prop_assert!(end > start * SECTOR && end.abs_diff(at) < 2 * SECTOR);
            prop_assert!(rounded.windows(2).all(|pair| pair[0].hole != pair[1].hole));
        }
    }
}
