//! A sparse store in memory: only blocks that were written take space.
//!
//! Blocks are spread over [`SHARDS`] locked maps, so that workers on different parts of a volume do
//! not meet; no lock is shared between volumes, and none is held across a wait. Requests that
//! overlap are atomic per 4 KiB block, as a disk's would be per sector.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::{BLOCK, Buf, BufResult, Extent, push_extent};

const SHARDS: u64 = 16;
const BLOCK_BYTES: usize = 4096;

type Block = Box<[u8; BLOCK_BYTES]>;
type Shard = Mutex<HashMap<u64, Block>>;

/// A volatile store.
#[derive(Debug)]
pub struct MemoryStore {
    size: u64,
    shards: Vec<Shard>,
}

/// One block's part of a range: block number, first byte within it, bytes.
struct Piece {
    block: u64,
    start: usize,
    length: usize,
}

fn pieces(offset: u64, length: u64) -> impl Iterator<Item = Piece> {
    let end = offset + length;
    let mut at = offset;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let (block, start) = (at / BLOCK, at % BLOCK);
        let length = (BLOCK - start).min(end - at);
        at += length;
        // Both are at most 4096.
        Some(Piece { block, start: to_usize(start), length: to_usize(length) })
    })
}

fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

impl MemoryStore {
    /// An empty store of `size` bytes; reads give zeroes.
    pub fn new(size: u64) -> MemoryStore {
        MemoryStore { size, shards: (0..SHARDS).map(|_| Shard::default()).collect() }
    }

    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Bytes of memory behind the store.
    pub fn allocated(&self) -> u64 {
        let blocks: usize = self.shards.iter().map(|s| lock(s).len()).sum();
        blocks as u64 * BLOCK
    }

    fn shard(&self, block: u64) -> MutexGuard<'_, HashMap<u64, Block>> {
        // Sixteen neighbouring blocks share a shard, so that large requests lock less often.
        lock(&self.shards[to_usize(block / 16 % SHARDS)])
    }

    pub(crate) fn read(&self, mut buf: Buf, offset: u64) -> BufResult {
        let mut at = 0;
        for piece in pieces(offset, buf.len() as u64) {
            let target = &mut buf[at..at + piece.length];
            match self.shard(piece.block).get(&piece.block) {
                Some(block) => {
                    target.copy_from_slice(&block[piece.start..piece.start + piece.length]);
                }
                None => target.fill(0),
            }
            at += piece.length;
        }
        (Ok(()), buf)
    }

    pub(crate) fn write(&self, buf: Buf, offset: u64) -> BufResult {
        let mut at = 0;
        for piece in pieces(offset, buf.len() as u64) {
            let mut shard = self.shard(piece.block);
            let block = shard.entry(piece.block).or_insert_with(|| Box::new([0; BLOCK_BYTES]));
            block[piece.start..piece.start + piece.length]
                .copy_from_slice(&buf[at..at + piece.length]);
            at += piece.length;
        }
        (Ok(()), buf)
    }

    /// Frees whole blocks and zeroes parts of blocks. Costs what is allocated, not what is asked.
    pub(crate) fn discard(&self, offset: u64, length: u64) {
        let end = offset + length;
        let whole = offset.div_ceil(BLOCK)..end / BLOCK;
        if whole.is_empty() {
            pieces(offset, length).for_each(|piece| self.zero(&piece));
            return;
        }
        let (head, tail) = (whole.start * BLOCK - offset, end - whole.end * BLOCK);
        pieces(offset, head).for_each(|piece| self.zero(&piece));
        pieces(whole.end * BLOCK, tail).for_each(|piece| self.zero(&piece));
        if whole.end - whole.start <= self.allocated() / BLOCK {
            whole.for_each(|block| drop(self.shard(block).remove(&block)));
        } else {
            for shard in &self.shards {
                lock(shard).retain(|block, _| !whole.contains(block));
            }
        }
    }

    fn zero(&self, piece: &Piece) {
        let mut shard = self.shard(piece.block);
        if let Some(block) = shard.get_mut(&piece.block) {
            block[piece.start..piece.start + piece.length].fill(0);
        }
    }

    /// Walks what is allocated (sorted), so that a huge empty store costs nothing.
    pub(crate) fn extents(&self, offset: u64, length: u64, limit: usize) -> Vec<Extent> {
        let end = offset + length;
        let range = offset / BLOCK..end.div_ceil(BLOCK);
        let mut blocks: Vec<u64> = Vec::new();
        for shard in &self.shards {
            blocks.extend(lock(shard).keys().filter(|block| range.contains(block)));
        }
        blocks.sort_unstable();
        let mut list = Vec::new();
        let mut at = offset;
        for block in blocks {
            let data = (block * BLOCK).max(offset)..((block + 1) * BLOCK).min(end);
            if data.start > at {
                push_extent(&mut list, Extent { offset: at, length: data.start - at, hole: true });
            }
            let length = data.end - data.start;
            push_extent(&mut list, Extent { offset: data.start, length, hole: false });
            at = data.end;
            if list.len() > limit {
                break;
            }
        }
        if at < end {
            push_extent(&mut list, Extent { offset: at, length: end - at, hole: true });
        }
        list.truncate(limit);
        list
    }
}

fn lock(shard: &Shard) -> MutexGuard<'_, HashMap<u64, Block>> {
    // A panic elsewhere leaves whole blocks behind: the data is as good as before.
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}
