//! Writes to a volume of several layers: they go to its top layer, a delta, and its map says what that holds.
//!
//! # Invariants
//! - A block is noted as held only after its data was written ([`Delta::flush`](crate::Delta) says what a flush then does).
//! - A write to a part of a block that the delta does not hold copies the rest of the block from below. Writes of blocks that
//!   the delta does not hold exclude each other where they overlap ([`FirstWrites`]), so that none is lost below such a copy.
//! - A copy that is dropped before it has completed may still be carried out by the store: its blocks are not written until
//!   the volume is opened anew.
//! - Writes of blocks that are held, which is what a disk in use mostly writes, lock no blocks.

mod noted;

use std::future::poll_fn;
use std::ops::Range;
use std::pin::pin;
use std::task::Poll;

use ebb_block::{
    BlockError, BlockStore, Buf, BufResult, ErrorKind, Io, Operation, SECTOR, Wanted, ZeroFlags,
};
use ebb_image::BLOCK;

use crate::first_writes::FirstWrites;
use crate::lower_layers::{LayerStack, block_bytes, of_request};

/// Bytes of both slots of a map page.
const MAP_BYTES: usize = 8192;

/// Which layers [`Layers::fill`](crate::Layers::fill) copies from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FillFrom {
    /// All below the top one. Zeroes are not copied: they are what a layer without a base reads as.
    All,
    /// The one below the top one, which is a delta. Its zeroes are written as such: what is below it may be other data.
    Next,
}

impl FillFrom {
    fn is_wanted(self, layer: usize) -> bool {
        match self {
            FillFrom::All => layer != 0,
            FillFrom::Next => layer == 1,
        }
    }
}

/// What is below a part of the top layer.
enum ReadBelow {
    /// For so many bytes nothing that is copied.
    Nothing(u64),
    /// Data, of so many bytes.
    Part(CopiedPart, u64),
}

/// The blocks that a range touches.
fn touched_blocks(offset: u64, length: u64) -> Range<u64> {
    offset / BLOCK..(offset + length).div_ceil(BLOCK)
}

/// How a range divides: partial blocks at its ends that have to be completed from below, and what is written as it is.
struct Division {
    head: Option<u64>,
    tail: Option<u64>,
    body: Range<u64>,
}

fn interrupted(operation: Operation, (offset, length): (u64, u64)) -> BlockError {
    let source = std::io::Error::other(
        "an earlier write to the same block was interrupted and may still be carried out: restart the daemon, or remove the \
         volume and add it again",
    );
    BlockError::new(ErrorKind::Io, operation, offset, length).caused_by(Some(source))
}

impl<'a> LayerStack<'a> {
    /// Fails if the stack is read-only.
    fn overlay(
        self,
        operation: Operation,
        (offset, length): (u64, u64),
    ) -> Result<(&'a FirstWrites, u64), BlockError> {
        match self.lower.overlay() {
            Some((lock, shift)) => Ok((lock, shift)),
            None => Err(BlockError::new(ErrorKind::ReadOnly, operation, offset, length)),
        }
    }

    /// Where a range is in the top layer, if a write of it is one of that layer, as far as that is known without
    /// waiting: the layer holds all of it, and nothing has to be made stable.
    #[inline]
    pub(crate) fn held_at(self, io: &Io, offset: u64, length: usize, fua: bool) -> Option<u64> {
        let (_, shift) = self.lower.overlay().filter(|_| !fua)?;
        let (mut at, end) = (offset, offset + length as u64);
        while at < end {
            match self.find(io, at, end - at, &[]) {
                Ok(run) if run.layer == 0 => at += run.length.max(1),
                _ => return None,
            }
        }
        Some(offset + shift)
    }

    /// Whether the top layer holds all of a range.
    async fn holds(self, io: &Io, offset: u64, length: u64) -> Result<bool, BlockError> {
        let (mut at, end) = (offset, offset + length);
        while at < end {
            let run = self.find_loaded(io, at, end - at).await?;
            if run.layer != 0 {
                return Ok(false);
            }
            at += run.length.max(1);
        }
        Ok(true)
    }

    /// Divides a range whose blocks are locked.
    async fn divide(self, io: &Io, offset: u64, length: u64) -> Result<Division, BlockError> {
        let end = offset + length;
        let blocks = touched_blocks(offset, length);
        // The last block of the volume may be a part, too.
        let is_part = |block: u64| {
            offset > block * BLOCK || end < ((block + 1) * BLOCK).min(self.lower.size())
        };
        let (first, last) = (blocks.start, blocks.end - 1);
        let mut division = Division { head: None, tail: None, body: offset..end };
        if is_part(first) && !self.holds(io, first * BLOCK, 1).await? {
            division.head = Some(first);
            division.body.start = end.min((first + 1) * BLOCK);
        }
        if last != first && is_part(last) && !self.holds(io, last * BLOCK, 1).await? {
            division.tail = Some(last);
            division.body.end = last * BLOCK;
        }
        Ok(division)
    }

    /// Completes a partial block from below and writes it. `put` gets the block and where it begins in the volume.
    async fn complete_block(
        self,
        io: &Io,
        shift: u64,
        block: u64,
        put: impl FnOnce(&mut [u8], u64),
    ) -> Result<(), BlockError> {
        let start = block * BLOCK;
        let length = BLOCK.min(self.lower.size() - start);
        let bytes = usize::try_from(BLOCK).unwrap_or(0);
        let mut buf = io.pool().take(bytes).await;
        buf.set_len(usize::try_from(length).unwrap_or(bytes));
        let (result, mut buf) = self.read_all(io, buf, start).await;
        result?;
        put(&mut buf, start);
        let filled = buf.len();
        buf.set_len(bytes);
        buf[filled..].fill(0);
        let (result, _) = self.top.write(io, buf, start + shift, false).await;
        result
    }

    /// See [`BlockStore::write`].
    pub(crate) async fn write(self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        let range = (offset, buf.len() as u64);
        let (result, buf) = self.write_range(io, buf, offset).await;
        let result = match result {
            Ok(()) if fua => self.flush(io).await,
            result => result,
        };
        (result.map_err(|error| of_request(error, range)), buf)
    }

    async fn write_range(self, io: &Io, mut buf: Buf, offset: u64) -> BufResult {
        let range = (offset, buf.len() as u64);
        let (blocks_lock, shift) = match self.overlay(Operation::Write, range) {
            Ok(found) => found,
            Err(error) => return (Err(error), buf),
        };
        match self.holds(io, offset, range.1).await {
            Ok(false) => {}
            Ok(true) => return self.top.write(io, buf, offset + shift, false).await,
            Err(error) => return (Err(error), buf),
        }
        let blocks = touched_blocks(offset, range.1);
        let Some(mut guard) = blocks_lock.lock(&blocks).await else {
            return (Err(interrupted(Operation::Write, range)), buf);
        };
        let losses = self.known_losses();
        let division = match self.divide(io, offset, range.1).await {
            Ok(division) => division,
            Err(error) => return (Err(error), buf),
        };
        guard.releases = division.head.or(division.tail).is_none();
        let mut result = Ok(());
        for block in division.head.into_iter().chain(division.tail) {
            let put = |to: &mut [u8], start: u64| copy_part(to, start, &buf, offset);
            result = result.and(self.complete_block(io, shift, block, put).await);
        }
        if result.is_ok() && !division.body.is_empty() {
            let (whole, body) = (buf.window(), &division.body);
            buf.set_window(whole, bytes(body.start - offset)..bytes(body.end - offset));
            (result, buf) = self.top.write(io, buf, body.start + shift, false).await;
            buf.restore(whole);
        }
        guard.releases = true;
        if result.is_ok() {
            result = self.note_held(io, range.0, range.1, losses).await;
        }
        (result, buf)
    }

    /// See [`BlockStore::write_zeroes_while`].
    pub(crate) async fn write_zeroes(
        self,
        io: &Io,
        range: (u64, u64),
        flags: ZeroFlags,
        wanted: Wanted<'_>,
    ) -> Result<(), BlockError> {
        let (offset, length) = range;
        let (blocks_lock, shift) = self.overlay(Operation::WriteZeroes, range)?;
        let blocks = touched_blocks(offset, length);
        let Some(mut guard) = blocks_lock.lock(&blocks).await else {
            return Err(interrupted(Operation::WriteZeroes, range));
        };
        let losses = self.known_losses();
        let division = self.divide(io, offset, length).await?;
        guard.releases = division.head.or(division.tail).is_none();
        let mut result = Ok(());
        for block in division.head.into_iter().chain(division.tail) {
            let put = |to: &mut [u8], start: u64| {
                let from = bytes(offset.saturating_sub(start)).min(to.len());
                let end = bytes((offset + length).saturating_sub(start)).min(to.len());
                to[from..end].fill(0);
            };
            result = result.and(self.complete_block(io, shift, block, put).await);
        }
        let body = &division.body;
        if result.is_ok() && !body.is_empty() {
            // All of the last block, if it is a part of one.
            let end = if body.end == self.lower.size() {
                body.end.next_multiple_of(BLOCK)
            } else {
                body.end
            };
            let (at, length) = (body.start + shift, end - body.start);
            result = self.top.write_zeroes_while(io, at, length, flags, wanted).await;
        }
        guard.releases = true;
        if result.is_ok() {
            result = self.note_held(io, range.0, range.1, losses).await;
        }
        result.map_err(|error| of_request(error, range))
    }

    /// See [`BlockStore::discard`]: of what the top layer holds. It stays held, since what is below may be older data.
    pub(crate) async fn discard(self, io: &Io, range: (u64, u64)) -> Result<(), BlockError> {
        let (_, shift) = self.overlay(Operation::Discard, range)?;
        let (mut at, end) = (range.0, range.0 + range.1);
        while at < end {
            let run = self.find_loaded(io, at, end - at).await;
            let run = run.map_err(|error| of_request(error, range))?;
            if run.layer == 0 {
                let discarded = self.top.discard(io, at + shift, run.length).await;
                discarded.map_err(|error| of_request(error, range))?;
            }
            at += run.length.max(1);
            io.yield_now().await;
        }
        Ok(())
    }

    /// A request of several layers may need more than its bounce buffer: a map page, or the block that a write completes. It
    /// must not wait for that while other requests that hold memory wait, too.
    #[inline]
    pub(crate) fn bounce_bytes(self, offset: u64, length: usize) -> usize {
        // Parts begin and end at multiples of 4 KiB, or where the request does.
        let block = block_bytes(self.lower.capabilities);
        let aligned = (offset | length as u64).is_multiple_of(BLOCK);
        let bounce = if aligned || block as u64 <= SECTOR { 0 } else { 2 * block };
        let own = match (self.lower.deltas().is_empty(), aligned) {
            (true, _) => 0,
            (false, true) => MAP_BYTES,
            (false, false) => 2 * MAP_BYTES,
        };
        bounce + own
    }

    /// Whether a range of a layer begins with a hole, and how long that is, or the data, in whole blocks. A hole need not be
    /// read, which would take memory of the cache.
    async fn first_extent(
        self,
        io: &Io,
        layer: usize,
        range: (u64, u64),
    ) -> Result<(bool, u64), BlockError> {
        let Some(store) = self.layer(layer) else { return Ok((true, range.1)) };
        let shift = self.lower.delta(layer).map_or(0, |delta| delta.layout().data_start());
        let position = range.0 + shift;
        let length = store.size().saturating_sub(position).min(range.1);
        if length == 0 {
            return Ok((true, range.1));
        }
        let found = pin!(store.extents(io, position, length, 1));
        let found = self.end(found, store, Operation::Extents, range).await?;
        let whole = |bytes: u64| if bytes >= range.1 { range.1 } else { bytes / BLOCK * BLOCK };
        Ok(match found.first().map(|extent| (extent.hole, whole(extent.length))) {
            Some((hole, bytes)) if bytes > 0 => (hole, bytes),
            // Less than a block: the block is read.
            _ => (false, BLOCK.min(range.1)),
        })
    }

    /// Reads the data to copy from the layers below at `offset`, at most `most` bytes; or returns
    /// how many of `length` bytes are empty, up to all that a page of the block map describes.
    async fn read_below(
        self,
        io: &Io,
        (offset, length): (u64, u64),
        most: u64,
        from: FillFrom,
    ) -> Result<ReadBelow, BlockError> {
        let run = self.find_loaded(io, offset, length).await?;
        let range = (offset, run.length.min(length));
        if !from.is_wanted(run.layer) {
            return Ok(ReadBelow::Nothing(range.1));
        }
        let range = match from {
            FillFrom::All => match self.first_extent(io, run.layer, range).await? {
                (true, hole) => return Ok(ReadBelow::Nothing(hole)),
                (false, data) => (offset, data.min(most)),
            },
            FillFrom::Next => (offset, range.1.min(most)),
        };
        // Before the lock: writes that wait for that hold buffers, and there may be no memory until they complete.
        let buf = CopiedPart::take(io, range.1).await;
        // Also before the lock: what is below does not change, and writes do not wait for a slow or hanging base.
        CopiedPart::read(self, io, range, buf).await.map(|part| ReadBelow::Part(part, range.1))
    }

    /// Copies what the layers below hold at `offset` into the top layer, at most `most` bytes; returns the bytes that were
    /// looked at. Ends with `until`, unless it has begun to write.
    pub(crate) async fn fill(
        self,
        io: &Io,
        (offset, most): (u64, u64),
        from: FillFrom,
        until: impl Future<Output = ()>,
    ) -> Result<u64, BlockError> {
        let rest = self.lower.size() - offset;
        let range = (offset, most.min(rest));
        let (blocks_lock, shift) = self.overlay(Operation::Write, range)?;
        let ended = || BlockError::new(ErrorKind::Closing, Operation::Write, range.0, range.1);
        let read = self.read_below(io, (offset, rest), most, from);
        let (mut read, mut until) = (pin!(read), pin!(until));
        let read = poll_fn(|cx| match read.as_mut().poll(cx) {
            Poll::Pending => until.as_mut().poll(cx).map(|()| Err(ended())),
            read => read,
        });
        let (mut part, length) = match read.await? {
            ReadBelow::Nothing(bytes) => return Ok(bytes),
            ReadBelow::Part(part, length) => (part, length),
        };
        let range = (offset, length);
        let Some(mut guard) = blocks_lock.lock(&touched_blocks(offset, range.1)).await else {
            return Err(interrupted(Operation::Write, range));
        };
        // A write may have completed meanwhile. Blocks that the top layer holds are written without the lock, so that a copy
        // of one would replace a later write.
        let run = self.find_loaded(io, offset, range.1).await?;
        let range = (offset, run.length.min(range.1));
        if !from.is_wanted(run.layer) {
            return Ok(range.1);
        }
        part.shorten(range.1);
        guard.releases = false;
        let losses = self.known_losses();
        let mut written = Ok(());
        while let Some(piece) = part.next_piece().filter(|_| written.is_ok()) {
            let position = offset + piece.start + shift;
            let length = piece.end - piece.start;
            written = match (piece.is_zero, from) {
                (true, FillFrom::All) => continue,
                (true, FillFrom::Next) => {
                    let flags = ZeroFlags { may_unmap: true, fast_only: false };
                    self.top.write_zeroes(io, position, length, flags).await
                }
                (false, _) => part.write(io, &piece, (self.top, position)).await,
            };
            if written.is_ok() {
                let end = (offset + piece.end).min(self.lower.size());
                let begin = offset + piece.start;
                written = self.note_held(io, begin, end - begin, losses).await;
            }
        }
        guard.releases = true;
        written.map(|()| range.1)
    }

    /// Copies what the deltas hold at `offset` to `into`, at most `most` bytes; returns the bytes that were looked at. With
    /// `hidden` also zeroes where the base does not show.
    pub(crate) async fn copy_held(
        self,
        io: &Io,
        (offset, most): (u64, u64),
        (into, hidden): (&impl BlockStore, bool),
    ) -> Result<u64, BlockError> {
        let rest = self.lower.size().saturating_sub(offset);
        if rest == 0 {
            return Ok(0);
        }
        // An empty part is passed over a page of the block map at a time.
        let run = self.find_loaded(io, offset, rest).await?;
        let empty = run.length.min(rest);
        let range = (offset, empty.min(most));
        if run.layer >= self.lower.deltas().len() {
            let shown = self.lower.deltas().iter().map(|delta| delta.shown()).min();
            if hidden && shown.is_some_and(|shown| offset >= shown) {
                let flags = ZeroFlags { may_unmap: true, fast_only: false };
                into.write_zeroes(io, range.0, range.1, flags).await?;
                return Ok(range.1);
            }
            return Ok(empty);
        }
        let buf = CopiedPart::take(io, range.1).await;
        let mut part = CopiedPart::read(self, io, range, buf).await?;
        while let Some(piece) = part.next_piece() {
            // Not beyond the end of the volume.
            let piece = Piece { end: piece.end.min(range.1), ..piece };
            let position = offset + piece.start;
            if piece.is_zero {
                let flags = ZeroFlags { may_unmap: true, fast_only: false };
                into.write_zeroes(io, position, piece.end - piece.start, flags).await?;
            } else {
                part.write(io, &piece, (into, position)).await?;
            }
        }
        Ok(range.1)
    }

    /// Makes acknowledged writes stable. The layers of this daemon's writes come first: a layer
    /// below that fails or hangs, or a folder, keeps none of them from being saved.
    pub(crate) async fn flush(self, io: &Io) -> Result<(), BlockError> {
        if self.lower.delta(0).is_none() {
            return self.top.flush(io).await;
        }
        self.flush_deltas(io).await?;
        self.make_lower_stable(io).await
    }

    /// Makes stable what earlier daemons wrote to the layers below, and the names of all files.
    async fn make_lower_stable(self, io: &Io) -> Result<(), BlockError> {
        let mut failed = Ok(());
        let below = self.lower.layers.iter().rev().filter(|layer| layer.is_unflushed());
        for layer in below.filter(|_| self.lower.overlay().is_some()) {
            let range = (0, self.lower.size());
            let flush = pin!(layer.flush_earlier_writes(io));
            failed = failed.and(self.end(flush, layer.store(), Operation::Flush, range).await);
        }
        for number in (0..=self.lower.layers.len()).rev() {
            let Some(store) = self.lower.delta(number).and_then(|_| self.layer(number)) else {
                continue;
            };
            failed = failed.and(store.store().make_name_stable(io).await);
        }
        failed
    }

    /// As [`LayerStack::flush`], of the writes of this daemon only: those of earlier ones survive
    /// its end, and a layer below may hang, or the folder of a file.
    pub(crate) async fn flush_deltas(self, io: &Io) -> Result<(), BlockError> {
        let Some(delta) = self.lower.delta(0) else { return self.top.flush(io).await };
        self.flush_frozen(io).await?;
        delta.flush(io, self.top).await
    }
}

/// A run of blocks that are all zeroes, or are not; from the first byte that was read.
struct Piece {
    start: u64,
    end: u64,
    is_zero: bool,
}

/// What is copied from one place to another, in whole blocks.
struct CopiedPart {
    buf: Option<Buf>,
    next: u64,
}

impl CopiedPart {
    /// A buffer for a part of `length` bytes, or of fewer.
    async fn take(io: &Io, length: u64) -> Buf {
        io.pool().take(bytes(length.next_multiple_of(BLOCK))).await
    }

    async fn read(
        stack: LayerStack<'_>,
        io: &Io,
        (offset, length): (u64, u64),
        mut buf: Buf,
    ) -> Result<CopiedPart, BlockError> {
        let whole = bytes(length.next_multiple_of(BLOCK));
        buf.set_len(bytes(length));
        let (result, mut buf) = stack.read_all(io, buf, offset).await;
        result?;
        buf.set_len(whole);
        buf[bytes(length)..].fill(0);
        Ok(CopiedPart { buf: Some(buf), next: 0 })
    }

    /// Leaves out what is behind `length` bytes.
    fn shorten(&mut self, length: u64) {
        if let Some(buf) = &mut self.buf {
            buf.set_len(buf.len().min(bytes(length.next_multiple_of(BLOCK))));
        }
    }

    fn next_piece(&mut self) -> Option<Piece> {
        let buf = self.buf.as_ref()?;
        let whole = buf.len() as u64;
        let is_zero = |at: u64| {
            let words = buf[bytes(at)..bytes(at + BLOCK)].chunks_exact(8);
            words
                .map(|word| u64::from_ne_bytes(word.try_into().unwrap_or([1; 8])))
                .all(|word| word == 0)
        };
        let start = self.next;
        if start >= whole {
            return None;
        }
        let (zero, mut end) = (is_zero(start), start + BLOCK);
        while end < whole && is_zero(end) == zero {
            end += BLOCK;
        }
        self.next = end;
        Some(Piece { start, end, is_zero: zero })
    }

    async fn write(
        &mut self,
        io: &Io,
        piece: &Piece,
        (into, position): (&impl BlockStore, u64),
    ) -> Result<(), BlockError> {
        let Some(mut buf) = self.buf.take() else { return Ok(()) };
        let all = buf.window();
        buf.set_window(all, bytes(piece.start)..bytes(piece.end));
        let (result, mut buf) = into.write(io, buf, position, false).await;
        buf.restore(all);
        self.buf = Some(buf);
        result
    }
}

fn bytes(count: u64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}

/// Copies the part of a request's data that falls into a block.
fn copy_part(to: &mut [u8], start: u64, data: &[u8], offset: u64) {
    let (from, into) = match offset.checked_sub(start) {
        Some(into) => (0, bytes(into)),
        None => (bytes(start - offset), 0),
    };
    let count = to.len().saturating_sub(into).min(data.len().saturating_sub(from));
    to[into..into + count].copy_from_slice(&data[from..from + count]);
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn the_part_of_a_request_in_a_block_is_copied() {
        let data: Vec<u8> = (1..=10).collect();
        let copied = |start, offset| {
            let mut to = [0; 6];
            copy_part(&mut to, start, &data, offset);
            to
        };
        assert_eq!(copied(100, 102), [0, 0, 1, 2, 3, 4]);
        assert_eq!(copied(100, 98), [3, 4, 5, 6, 7, 8]);
        assert_eq!(copied(100, 92), [9, 10, 0, 0, 0, 0]);
        assert_eq!(copied(100, 90), [0; 6]);
    }
}
