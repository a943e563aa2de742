//! Requests for parts of blocks, on stores whose blocks are larger than sectors.
//!
//! Whole blocks are transferred between the store and the request's own buffer. Parts of blocks, at
//! both ends, go through a bounce buffer, as in the Linux `dm-ebs` target: of one block, or of two
//! if the request lies within two blocks. So a request of any length takes only [`bounce_bytes`] in
//! addition to its own buffer, which callers charge.

use std::ops::Range;

use ebb_io::{Buf, Io};

use crate::store::BufResult;

/// Bytes copied before the worker's other tasks run.
const COPY: usize = 1 << 20;

/// A store with blocks. Offsets and lengths are multiples of [`Blocks::block`].
pub trait Blocks {
    /// Bytes of a block.
    fn block(&self) -> u64;
    /// Fills the whole buffer.
    fn read_blocks(&self, io: &Io, buf: Buf, offset: u64) -> impl Future<Output = BufResult>;
    /// Writes the whole buffer.
    fn write_blocks(
        &self,
        io: &Io,
        buf: Buf,
        offset: u64,
        fua: bool,
    ) -> impl Future<Output = BufResult>;
}

/// Whether a request consists of whole blocks.
#[inline]
pub fn is_aligned(block: u64, offset: u64, length: usize) -> bool {
    if block.is_power_of_two() {
        // The usual case, without a division.
        return (offset | length as u64) & (block - 1) == 0;
    }
    offset.is_multiple_of(block) && (length as u64).is_multiple_of(block)
}

/// Bytes of the bounce buffer of a request; 0 if it needs none.
#[inline]
pub fn bounce_bytes(block: u64, offset: u64, length: usize) -> usize {
    if length == 0 || is_aligned(block, offset, length) {
        return 0;
    }
    let edges = [0, 1].map(|number| SplitPlan::new(block, offset, length).edges[number].bytes);
    edges[0].max(edges[1])
}

/// A part of a request that goes through the bounce buffer.
#[derive(Clone, Copy, Debug, Default)]
struct BounceEdge {
    /// The blocks that contain it.
    start: u64,
    bytes: usize,
    /// Its offset in these blocks.
    skip: usize,
    /// Its offset in the request.
    at: usize,
    length: usize,
}

impl BounceEdge {
    fn in_bounce(&self) -> Range<usize> {
        self.skip..self.skip + self.length
    }

    fn in_request(&self) -> Range<usize> {
        self.at..self.at + self.length
    }
}

/// How a request is split.
#[derive(Debug)]
struct SplitPlan {
    edges: [BounceEdge; 2],
    /// Whole blocks, as a range of the request.
    body: Range<usize>,
}

impl SplitPlan {
    fn new(block: u64, offset: u64, length: usize) -> SplitPlan {
        // Both are less than a block, and a block of any store is far less than 2^32.
        let to_usize = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let (skip, end) = (to_usize(offset % block), offset + length as u64);
        let (tail, size) = (to_usize(end % block), to_usize(block));
        let start = offset - offset % block;
        let wide = (skip + length).next_multiple_of(size);
        if wide <= 2 * size {
            let only = BounceEdge { start, bytes: wide, skip, at: 0, length };
            return SplitPlan { edges: [only, BounceEdge::default()], body: 0..0 };
        }
        let mut plan = SplitPlan { edges: [BounceEdge::default(); 2], body: 0..length - tail };
        if skip > 0 {
            plan.edges[0] = BounceEdge { start, bytes: size, skip, at: 0, length: size - skip };
            plan.body.start = size - skip;
        }
        if tail > 0 {
            let (start, at) = (end - tail as u64, length - tail);
            plan.edges[1] = BounceEdge { start, bytes: size, skip: 0, at, length: tail };
        }
        plan
    }

    /// One of the two edges. Recomputed, as a kept plan would enlarge the future of every request.
    fn edge(block: u64, offset: u64, length: usize, number: usize) -> Option<BounceEdge> {
        let edge = SplitPlan::new(block, offset, length).edges[number];
        (edge.length > 0).then_some(edge)
    }
}

/// Moves a part of the buffer to another position in it, some bytes at a time.
async fn shift(io: &Io, buf: &mut Buf, from: Range<usize>, to: usize) {
    let length = from.len();
    let mut done = 0;
    while done < length {
        let count = COPY.min(length - done);
        // Upwards from the end, downwards from the start: nothing is overwritten before it was
        // moved.
        let at = if to > from.start { length - done - count } else { done };
        let piece = from.start + at..from.start + at + count;
        buf.copy_within(piece, to + at);
        done += count;
        if done < length {
            io.yield_now().await;
        }
    }
}

/// Restores the length of the request's buffer. It is shorter only if the worker that held it
/// ended.
fn restore(buf: &mut Buf, length: usize) {
    buf.set_len(length.min(buf.capacity()));
}

/// Fills the whole buffer from `offset`.
pub async fn read(store: &impl Blocks, io: &Io, mut buf: Buf, offset: u64) -> BufResult {
    let (block, length) = (store.block(), buf.len());
    let body = SplitPlan::new(block, offset, length).body;
    if !body.is_empty() {
        // To the start of the buffer, which is aligned in memory, as direct I/O requires.
        buf.set_len(body.len());
        let (result, back) = store.read_blocks(io, buf, offset + body.start as u64).await;
        buf = back;
        restore(&mut buf, length);
        if result.is_err() || buf.len() < length {
            return (result, buf);
        }
        if body.start > 0 {
            shift(io, &mut buf, 0..body.len(), body.start).await;
        }
    }
    let mut bounce = io.pool().take(bounce_bytes(block, offset, length)).await;
    for number in [0, 1] {
        let Some(edge) = SplitPlan::edge(block, offset, length, number) else { continue };
        bounce.set_len(edge.bytes);
        let (result, back) = store.read_blocks(io, bounce, edge.start).await;
        bounce = back;
        if result.is_err() {
            return (result, buf);
        }
        if let Some(edge) = SplitPlan::edge(block, offset, length, number) {
            buf[edge.in_request()].copy_from_slice(&bounce[edge.in_bounce()]);
        }
    }
    (Ok(()), buf)
}

/// Writes the whole buffer at `offset`. The caller prevents other writes to these blocks meanwhile.
pub async fn write(
    store: &impl Blocks,
    io: &Io,
    mut buf: Buf,
    offset: u64,
    fua: bool,
) -> BufResult {
    let (block, length) = (store.block(), buf.len());
    let mut bounce = io.pool().take(bounce_bytes(block, offset, length)).await;
    for number in [0, 1] {
        let Some(edge) = SplitPlan::edge(block, offset, length, number) else { continue };
        bounce.set_len(edge.bytes);
        let (result, back) = store.read_blocks(io, bounce, edge.start).await;
        bounce = back;
        if result.is_err() {
            return (result, buf);
        }
        let Some(edge) = SplitPlan::edge(block, offset, length, number) else { continue };
        bounce[edge.in_bounce()].copy_from_slice(&buf[edge.in_request()]);
        let (result, back) = store.write_blocks(io, bounce, edge.start, fua).await;
        bounce = back;
        if result.is_err() {
            return (result, buf);
        }
    }
    let body = SplitPlan::new(block, offset, length).body;
    if body.is_empty() {
        return (Ok(()), buf);
    }
    // From the start of the buffer, as in `read`; then moved back, since callers may write it
    // again.
    let head = body.start;
    if head > 0 {
        restore(&mut bounce, head);
        bounce.copy_from_slice(&buf[..head]);
        shift(io, &mut buf, body.clone(), 0).await;
    }
    buf.set_len(body.len());
    let (result, mut buf) = store.write_blocks(io, buf, offset + head as u64, fua).await;
    restore(&mut buf, length);
    if head > 0 && buf.len() == length {
        shift(io, &mut buf, 0..body.len(), head).await;
        buf[..head].copy_from_slice(&bounce);
    }
    (result, buf)
}
