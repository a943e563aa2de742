//! A sparse store in memory: only blocks that were written take space.
//!
//! Blocks are kept in chunks of 16, and chunks in [`SHARDS`] maps with a lock each, so that workers
//! on different parts of a volume do not contend. No lock is shared between volumes, and none is
//! held across an await. Overlapping requests are atomic per 4 KiB block, as a disk's are per
//! sector.
//!
//! Each map has an ordered list of its keys, which changes only when a chunk is added or removed:
//! discards and extents find the allocated chunks of a range without visiting others. They process
//! some chunks at a time, and the worker's other tasks run in between.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ebb_block::{
    BLOCK, BlockError, BlockStore, Buf, BufResult, Capabilities, Extent, Identity, Io,
    MEMORY_PIECE, NONE_REMAINING, Remaining, Resize, ResizeError, ZeroFlags, check_size_change,
    push_extent,
};

use crate::COPY_BYTES;

const SHARDS: u64 = 16;
const BLOCK_BYTES: usize = 4096;
/// Blocks of a chunk: neighbours are found with one lookup.
const CHUNK_BLOCKS: u64 = 16;
const CHUNK: usize = 16;
/// What reads return where nothing was written.
const HOLE: &[u8; BLOCK_BYTES] = &[0; BLOCK_BYTES];
/// The content of a chunk that does not exist.
const EMPTY: &[Option<Block>; CHUNK] = &[const { None }; CHUNK];

type Block = Box<[u8; BLOCK_BYTES]>;
type Shard = Mutex<ShardChunks>;

/// Chunks that are freed, or listed, before the worker's other tasks run.
const FREED_AT_ONCE: usize = 16;
const LISTED_AT_ONCE: usize = 256;

/// The chunks of one shard.
#[derive(Debug)]
struct ShardChunks {
    chunks: HashMap<u64, BlockChunk, KeyedHash>,
    /// Their numbers.
    order: BTreeSet<u64>,
    /// Allocated blocks.
    blocks: u64,
}

impl ShardChunks {
    fn get(&self, number: u64) -> Option<&BlockChunk> {
        self.chunks.get(&number)
    }

    /// Frees the blocks of a chunk that are in a range.
    fn free(&mut self, number: u64, blocks: &Range<u64>) {
        let Some(chunk) = self.chunks.get_mut(&number) else { return };
        let first = number * CHUNK_BLOCKS;
        for block in first.max(blocks.start)..blocks.end.min(first + CHUNK_BLOCKS) {
            self.blocks -= u64::from(chunk.slot(block).take().is_some());
        }
        if chunk.blocks.iter().all(Option::is_none) {
            self.chunks.remove(&number);
            self.order.remove(&number);
        }
    }
}

/// Neighbouring blocks.
#[derive(Debug, Default)]
struct BlockChunk {
    blocks: [Option<Block>; CHUNK],
}

impl BlockChunk {
    fn get(&self, block: u64) -> Option<&Block> {
        self.blocks[to_usize(block % CHUNK_BLOCKS)].as_ref()
    }

    fn slot(&mut self, block: u64) -> &mut Option<Block> {
        &mut self.blocks[to_usize(block % CHUNK_BLOCKS)]
    }
}

/// Hashes a chunk number with two multiplications under a secret key: a guest chooses the numbers
/// and must not be able to cause collisions.
#[derive(Clone, Debug)]
struct KeyedHash(u64, u64);

impl KeyedHash {
    fn new() -> KeyedHash {
        let random = RandomState::new();
        KeyedHash(random.hash_one(0), random.hash_one(1) | 1)
    }
}

impl BuildHasher for KeyedHash {
    type Hasher = KeyedHasher;

    fn build_hasher(&self) -> KeyedHasher {
        KeyedHasher { keys: self.clone(), state: 0 }
    }
}

struct KeyedHasher {
    keys: KeyedHash,
    state: u64,
}

impl Hasher for KeyedHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(self.state ^ u64::from(*byte)));
    }

    #[inline]
    fn write_u64(&mut self, value: u64) {
        let KeyedHash(add, multiply) = self.keys;
        let product = u128::from(value ^ add) * u128::from(multiply);
        // The product is folded; each half fits in 64 bits.
        let (low, high) = (product & u128::from(u64::MAX), product >> 64);
        self.state = u64::try_from(low ^ high).unwrap_or_default();
    }

    fn finish(&self) -> u64 {
        self.state
    }
}

/// A volatile store. A clone is the same store: the content lasts until the last one is dropped.
#[derive(Clone, Debug)]
pub struct MemoryStore {
    /// No other store has it.
    nonce: u64,
    size: Arc<AtomicU64>,
    shards: Arc<[Shard]>,
}

/// The part of a range in one block: block number, first byte within it, bytes.
struct BlockPiece {
    block: u64,
    start: usize,
    length: usize,
}

fn pieces(offset: u64, length: u64) -> impl Iterator<Item = BlockPiece> {
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
        Some(BlockPiece { block, start: to_usize(start), length: to_usize(length) })
    })
}

/// A number below the blocks of a chunk, or the bytes of a block.
fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

impl MemoryStore {
    /// An empty store of `size` bytes; reads give zeroes.
    pub fn new(size: u64) -> MemoryStore {
        let keys = KeyedHash::new();
        let part = |_| {
            let chunks = HashMap::with_hasher(keys.clone());
            Mutex::new(ShardChunks { chunks, order: BTreeSet::new(), blocks: 0 })
        };
        let shards = (0..SHARDS).map(part);
        let nonce = ebb_block::nonce();
        MemoryStore { nonce, size: Arc::new(AtomicU64::new(size)), shards: shards.collect() }
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// Bytes of memory that the store has allocated.
    #[cfg(any(test, feature = "test-store"))]
    pub fn allocated(&self) -> u64 {
        self.shards.iter().map(|shard| lock(shard).blocks).sum::<u64>() * BLOCK
    }

    fn shard(&self, block: u64) -> MutexGuard<'_, ShardChunks> {
        // Neighbouring blocks share a shard, so that large requests lock less often.
        lock(&self.shards[to_usize(block / CHUNK_BLOCKS % SHARDS)])
    }

    /// Calls `see` on each piece of a range in order, in place.
    fn see_pieces(&self, offset: u64, length: u64, mut see: impl FnMut(&[u8])) {
        let (number, start) = (offset / BLOCK, to_usize(offset % BLOCK));
        if length <= BLOCK && start + to_usize(length) <= BLOCK_BYTES {
            // The common case: one block, or a part of it.
            let shard = self.shard(number);
            let block = shard.get(number / CHUNK_BLOCKS).and_then(|chunk| chunk.get(number));
            return see(&block.map_or(HOLE, |block| &**block)[start..start + to_usize(length)]);
        }
        for run in runs(offset, length) {
            let shard = self.shard(run.0 / BLOCK);
            let chunk = shard.get(run.0 / BLOCK / CHUNK_BLOCKS);
            let blocks = chunk.map_or(EMPTY, |chunk| &chunk.blocks);
            let (mut start, mut left) = (to_usize(run.0 % BLOCK), to_usize(run.1));
            for block in blocks.iter().skip(to_usize(run.0 / BLOCK % CHUNK_BLOCKS)) {
                let piece = &block.as_deref().unwrap_or(HOLE)[start..];
                if left <= piece.len() {
                    see(&piece[..left]);
                    break;
                }
                see(piece);
                (start, left) = (0, left - piece.len());
            }
        }
    }

    /// Calls `put` on each piece of a range in order, in place.
    fn put_pieces(&self, offset: u64, length: u64, mut put: impl FnMut(&mut [u8])) {
        for run in runs(offset, length) {
            let mut shard = self.shard(run.0 / BLOCK);
            let ShardChunks { chunks, order, blocks } = &mut *shard;
            let chunk = match chunks.entry(run.0 / BLOCK / CHUNK_BLOCKS) {
                Entry::Occupied(there) => there.into_mut(),
                Entry::Vacant(slot) => {
                    order.insert(*slot.key());
                    slot.insert(BlockChunk::default())
                }
            };
            let (mut start, mut left) = (to_usize(run.0 % BLOCK), to_usize(run.1));
            for block in chunk.blocks.iter_mut().skip(to_usize(run.0 / BLOCK % CHUNK_BLOCKS)) {
                let block = block.get_or_insert_with(|| {
                    *blocks += 1;
                    Box::new([0; BLOCK_BYTES])
                });
                let piece = &mut block[start..];
                if left <= piece.len() {
                    put(&mut piece[..left]);
                    break;
                }
                let whole = piece.len();
                put(piece);
                (start, left) = (0, left - whole);
            }
        }
    }

    fn copy_out(&self, mut rest: &mut [u8], offset: u64) {
        self.see_pieces(offset, rest.len() as u64, |piece| {
            let (here, after) = std::mem::take(&mut rest).split_at_mut(piece.len());
            here.copy_from_slice(piece);
            rest = after;
        });
    }

    fn copy_in(&self, mut rest: &[u8], offset: u64) {
        self.put_pieces(offset, rest.len() as u64, |piece| {
            let (here, after) = rest.split_at(piece.len());
            piece.copy_from_slice(here);
            rest = after;
        });
    }

    /// Frees whole blocks and zeroes parts of blocks. The cost depends on what is allocated in the
    /// range.
    async fn free_range(&self, io: &Io, offset: u64, length: u64) {
        let end = offset + length;
        let whole = offset.div_ceil(BLOCK)..end / BLOCK;
        if whole.is_empty() {
            pieces(offset, length).for_each(|piece| self.zero(&piece));
            return;
        }
        let (head, tail) = (whole.start * BLOCK - offset, end - whole.end * BLOCK);
        pieces(offset, head).for_each(|piece| self.zero(&piece));
        pieces(whole.end * BLOCK, tail).for_each(|piece| self.zero(&piece));
        let chunks = whole.start / CHUNK_BLOCKS..whole.end.div_ceil(CHUNK_BLOCKS);
        if chunks.end - chunks.start <= SHARDS {
            chunks.for_each(|number| self.shard(number * CHUNK_BLOCKS).free(number, &whole));
            return;
        }
        for shard in &*self.shards {
            let mut from = chunks.start;
            loop {
                let next = free_some(&mut lock(shard), from..chunks.end, &whole);
                let Some(next) = next else { break };
                from = next;
                io.yield_now().await;
            }
        }
    }

    fn zero(&self, piece: &BlockPiece) {
        let mut shard = self.shard(piece.block);
        let chunk = shard.chunks.get_mut(&(piece.block / CHUNK_BLOCKS));
        if let Some(block) = chunk.and_then(|chunk| chunk.slot(piece.block).as_mut()) {
            block[piece.start..piece.start + piece.length].fill(0);
        }
    }
}

impl BlockStore for MemoryStore {
    fn size(&self) -> u64 {
        self.bytes()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            read_only: false,
            discard: true,
            fast_zero: true,
            alignment: 1,
            direct: false,
            read_piece: Some(MEMORY_PIECE),
        }
    }

    fn identity(&self) -> Identity {
        Identity::of_key(format!("memory {:016x}", self.nonce))
    }

    fn place(&self) -> String {
        "memory".to_owned()
    }

    async fn read(&self, io: &Io, mut buf: Buf, offset: u64) -> BufResult {
        let mut at = 0;
        loop {
            let end = buf.len().min(at + COPY_BYTES);
            self.copy_out(&mut buf[at..end], offset + at as u64);
            if end == buf.len() {
                return (Ok(()), buf);
            }
            at = end;
            io.yield_now().await;
        }
    }

    async fn write(&self, io: &Io, buf: Buf, offset: u64, _fua: bool) -> BufResult {
        let mut at = 0;
        loop {
            let end = buf.len().min(at + COPY_BYTES);
            self.copy_in(&buf[at..end], offset + at as u64);
            if end == buf.len() {
                return (Ok(()), buf);
            }
            at = end;
            io.yield_now().await;
        }
    }

    async fn flush(&self, _io: &Io) -> Result<(), BlockError> {
        Ok(())
    }

    async fn discard(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        self.free_range(io, offset, length).await;
        Ok(())
    }

    async fn zero_range(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        _flags: ZeroFlags,
    ) -> Result<Remaining, BlockError> {
        self.free_range(io, offset, length).await;
        Ok(NONE_REMAINING)
    }

    /// Visits only allocated chunks, in order, so that a huge empty store costs nothing.
    async fn extents(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        let end = offset + length;
        let range = offset / BLOCK..end.div_ceil(BLOCK);
        let last = range.end.div_ceil(CHUNK_BLOCKS);
        let after =
            |part: &ShardChunks, from: u64| part.order.range(from.min(last)..last).next().copied();
        // The next chunk of each shard.
        let first = |shard| after(&lock(shard), range.start / CHUNK_BLOCKS);
        let mut next: Vec<Option<u64>> = self.shards.iter().map(first).collect();
        let (mut list, mut at, mut listed) = (Vec::new(), offset, 0);
        while list.len() <= limit
            && let Some(number) = next.iter().flatten().min().copied()
        {
            let mut there = 0u32;
            {
                let shard = self.shard(number * CHUNK_BLOCKS);
                for (slot, block) in
                    shard.get(number).into_iter().flat_map(|c| &c.blocks).enumerate()
                {
                    there |= u32::from(block.is_some()) << slot;
                }
                next[to_usize(number % SHARDS)] = after(&shard, number + 1);
            }
            let blocks = number * CHUNK_BLOCKS..(number + 1) * CHUNK_BLOCKS;
            for block in blocks.filter(|block| range.contains(block)) {
                if there >> (block % CHUNK_BLOCKS) & 1 == 0 {
                    continue;
                }
                let data = (block * BLOCK).max(offset)..((block + 1) * BLOCK).min(end);
                if data.start > at {
                    let length = data.start - at;
                    push_extent(&mut list, Extent { offset: at, length, hole: true });
                }
                let length = data.end - data.start;
                push_extent(&mut list, Extent { offset: data.start, length, hole: false });
                at = data.end;
            }
            listed += 1;
            if listed % LISTED_AT_ONCE == 0 {
                io.yield_now().await;
            }
        }
        if at < end {
            push_extent(&mut list, Extent { offset: at, length: end - at, hole: true });
        }
        list.truncate(limit);
        Ok(list)
    }

    fn has_direct_access(&self) -> bool {
        true
    }

    fn read_in_place(&self, offset: u64, length: u64, see: impl FnMut(&[u8])) -> bool {
        self.see_pieces(offset, length, see);
        true
    }

    fn write_in_place(&self, offset: u64, length: u64, put: impl FnMut(&mut [u8])) -> bool {
        self.put_pieces(offset, length, put);
        true
    }

    async fn check_resize(&self, _io: &Io, order: Resize) -> Result<u64, ResizeError> {
        let from = self.size();
        let to = order.to.unwrap_or(from);
        check_size_change(from, to, BLOCK, order.shrink).map(|()| to)
    }

    async fn resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        let from = self.size();
        let to = self.check_resize(io, order).await?;
        self.size.store(to, Ordering::Relaxed);
        if to < from {
            self.free_range(io, to, from - to).await;
        }
        Ok(to)
    }
}

/// Frees blocks of a few chunks of a shard. Returns where to continue, if there may be more.
fn free_some(part: &mut ShardChunks, mut chunks: Range<u64>, blocks: &Range<u64>) -> Option<u64> {
    for _ in 0..FREED_AT_ONCE {
        let number = part.order.range(chunks.clone()).next().copied()?;
        part.free(number, blocks);
        chunks.start = number + 1;
        if chunks.is_empty() {
            return None;
        }
    }
    Some(chunks.start)
}

/// The parts of a range that are in one chunk each: offset and length.
fn runs(offset: u64, length: u64) -> impl Iterator<Item = (u64, u64)> {
    let (end, chunk) = (offset + length, BLOCK * CHUNK_BLOCKS);
    let mut at = offset;
    std::iter::from_fn(move || {
        let from = at;
        at = end.min((from / chunk + 1).saturating_mul(chunk));
        (from < end).then(|| (from, at - from))
    })
}

fn lock(shard: &Shard) -> MutexGuard<'_, ShardChunks> {
    // A thread that panicked left whole blocks: the data is still consistent.
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}
