//! Stores hold the data of volumes: regular files, block devices, remote NBD exports, memory, null.
//!
//! A volume validates each request before it calls its store: offset and length are multiples of
//! 512 bytes and within the size. A store completes the whole request or fails it.
//!
//! # Invariants
//! - A short read or write is continued, or reported as [`ErrorKind::Short`]; never success.
//! - `flush` completes when every write acknowledged before it is stable (`fdatasync`).
//! - A write with `fua` completes when that write is stable.
//! - After a flush or a write with `fua` has failed, other than for lack of space, no flush
//!   succeeds while acknowledged data may be lost (`flush_state.rs`).
//! - Buffers are owned by the operation and returned with the result.
//!
//! To add a store: one file with the functions of [`Store`], one variant, one arm in each `match`
//! here, and its URI in the configuration of `ebbd`.

mod blocks;
mod create;
mod error;
#[cfg(feature = "test-store")]
mod faulty;
mod file;
mod flush_state;
mod health;
mod identity;
mod memory;
mod nbd;
mod null;
mod open;
mod open_options;
mod resize;
mod unaligned;
mod zeroes;

pub use ebb_io::{Buf, Io};
pub use error::{BlockError, ErrorKind, Operation};
#[cfg(feature = "test-store")]
pub use faulty::{Disk, Faults, Record, TestStore};
pub use file::{FileNumber, FileStore};
pub use flush_state::Loss;
pub use health::{FailedKind, StoreHealth};
pub use identity::Identity;
pub use memory::MemoryStore;
#[cfg(feature = "sim")]
pub use nbd::sim::set_peer;
pub use nbd::{
    LostWrites, NbdAddress, NbdError, NbdOptions, NbdStore, NbdTls, NbdTlsKeys, RECONNECT_DEFAULT,
    StoreState,
};
pub use null::NullStore;
pub use open::{inspect, is_in_use};
pub use open_options::{Direct, OpenError, OpenOptions};
pub use resize::{Resize, ResizeError};
pub use zeroes::Wanted;

/// Bytes of a logical sector: every offset and length is a multiple of it.
pub const SECTOR: u64 = 512;
/// Bytes of a block: the preferred I/O size of stores, and the size of a page.
pub const BLOCK: u64 = 4096;

/// The result of an operation on a buffer, and the buffer.
pub type BufResult = (Result<(), BlockError>, Buf);

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
    /// Discarding frees space.
    pub discard: bool,
    /// Zeroes can be written without transferring them.
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

/// See [`Capabilities::read_piece`].
pub(crate) const MEMORY_PIECE: u32 = 128 << 10;

/// Bytes copied before the worker's other tasks run.
const COPY_BYTES: usize = 256 << 10;

/// The store of one volume.
#[derive(Debug)]
pub enum Store {
    /// A regular file or a block device.
    File(FileStore),
    /// Sparse memory, lost when the process ends.
    Memory(MemoryStore),
    /// Reads return zeroes, writes are discarded.
    Null(NullStore),
    /// An export of an NBD server.
    Nbd(NbdStore),
    /// A store for tests that fails on command.
    #[cfg(feature = "test-store")]
    Test(std::sync::Arc<TestStore>),
}

impl Store {
    /// Its size in bytes. May change while the store is open, see [`Store::resize`].
    pub fn size(&self) -> u64 {
        match self {
            Store::File(s) => s.size(),
            Store::Memory(s) => s.size(),
            Store::Null(s) => s.size(),
            Store::Nbd(s) => s.size(),
            #[cfg(feature = "test-store")]
            Store::Test(s) => s.size(),
        }
    }

    /// What the store can do.
    pub fn capabilities(&self) -> Capabilities {
        match self {
            Store::File(s) => s.capabilities(),
            Store::Nbd(s) => s.capabilities(),
            #[cfg(feature = "test-store")]
            Store::Test(_) => Capabilities {
                discard: true,
                fast_zero: true,
                alignment: 1,
                direct: true,
                read_piece: None,
            },
            Store::Memory(_) | Store::Null(_) => Capabilities {
                discard: true,
                fast_zero: true,
                alignment: 1,
                direct: false,
                read_piece: Some(MEMORY_PIECE),
            },
        }
    }

    /// Bytes of the bounce buffer of a READ or WRITE, for parts of blocks at its ends: at most two
    /// blocks, and 0 for a request of whole blocks. Callers charge it, see
    /// [`ebb_io::BufPool::footprint`].
    #[inline]
    pub fn bounce_bytes(&self, offset: u64, length: usize) -> usize {
        match self {
            Store::File(s) => s.bounce_bytes(offset, length),
            Store::Nbd(s) => s.bounce_bytes(offset, length),
            Store::Memory(_) | Store::Null(_) => 0,
            #[cfg(feature = "test-store")]
            Store::Test(_) => 0,
        }
    }

    /// The store's identity, which survives a restart of the daemon.
    pub fn identity(&self) -> Identity {
        match self {
            Store::File(s) => s.identity(),
            Store::Memory(s) => s.identity(),
            Store::Null(_) => Identity::of_key("null".to_owned()),
            Store::Nbd(s) => s.identity(),
            #[cfg(feature = "test-store")]
            Store::Test(s) => Identity::of_key(format!("test {}", s.number())),
        }
    }

    /// The state of a store behind a network; `None` for local stores.
    pub fn state(&self) -> Option<StoreState> {
        match self {
            Store::Nbd(s) => Some(s.state()),
            Store::File(_) | Store::Memory(_) | Store::Null(_) => None,
            #[cfg(feature = "test-store")]
            Store::Test(_) => None,
        }
    }

    /// Counters from which outages are detected; `None` for stores in memory.
    pub fn health(&self) -> Option<&StoreHealth> {
        match self {
            Store::File(s) => Some(s.health()),
            Store::Nbd(s) => Some(s.health()),
            #[cfg(feature = "test-store")]
            Store::Test(s) => Some(s.health()),
            Store::Memory(_) | Store::Null(_) => None,
        }
    }

    /// The file or server, for messages.
    pub fn place(&self) -> String {
        match self {
            Store::File(s) => s.path().display().to_string(),
            Store::Nbd(s) => s.state().address,
            Store::Memory(_) | Store::Null(_) => "memory".to_owned(),
            #[cfg(feature = "test-store")]
            Store::Test(_) => "a test".to_owned(),
        }
    }

    #[inline]
    pub(crate) fn begin(&self) -> TrackedRequest<'_> {
        let health = self.health();
        TrackedRequest { health, _begun: health.map(StoreHealth::begin) }
    }

    /// True if the data is in this process, so that [`Store::read_in_place`] and
    /// [`Store::write_in_place`] work.
    pub fn has_direct_access(&self) -> bool {
        matches!(self, Store::Memory(_) | Store::Null(_))
    }

    /// Reads a range in place: calls `see` on each piece in order, which no other task changes
    /// during the call. False, without a call, for stores without direct access.
    pub fn read_in_place(&self, offset: u64, length: u64, see: impl FnMut(&[u8])) -> bool {
        match self {
            Store::Memory(s) => s.read_in_place(offset, length, see),
            Store::Null(s) => s.read_in_place(length, see),
            _ => return false,
        }
        true
    }

    /// Writes a range in place: calls `put` on each piece in order, which holds the old data and is
    /// to be filled with the new. False, without a call, for stores without direct access.
    pub fn write_in_place(&self, offset: u64, length: u64, put: impl FnMut(&mut [u8])) -> bool {
        match self {
            Store::Memory(s) => s.write_in_place(offset, length, put),
            Store::Null(s) => s.write_in_place(length, put),
            _ => return false,
        }
        true
    }

    /// Fills the whole buffer from `offset`.
    pub async fn read(&self, io: &Io, buf: Buf, offset: u64) -> BufResult {
        let tracked = self.begin();
        let (result, buf) = match self {
            Store::File(s) => s.read(io, buf, offset).await,
            Store::Nbd(s) => s.read(io, buf, offset).await,
            #[cfg(feature = "test-store")]
            Store::Test(s) => s.read(io, buf, offset).await,
            Store::Memory(_) | Store::Null(_) => (Ok(()), self.copy_out(io, buf, offset).await),
        };
        (tracked.end(result), buf)
    }

    /// Reads from a store in memory, some bytes at a time.
    async fn copy_out(&self, io: &Io, mut buf: Buf, offset: u64) -> Buf {
        let mut at = 0;
        loop {
            let end = buf.len().min(at + COPY_BYTES);
            let part = &mut buf[at..end];
            match self {
                Store::Memory(s) => s.read(part, offset + at as u64),
                _ => part.fill(0),
            }
            if end == buf.len() {
                return buf;
            }
            at = end;
            io.yield_now().await;
        }
    }

    /// Writes the whole buffer at `offset`; with `fua` it is stable on return. After an error with
    /// `fua` flushes fail, as after an error of [`Store::flush`], unless the store was merely full.
    pub async fn write(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        let sync = self.begin_stable(fua);
        // One call for both cases: each await point adds to the size of every request's future.
        let written = self.write_to(io, buf, offset, fua).await;
        match sync {
            Some(sync) => self.end_stable(io, sync, offset, written).await,
            None => written,
        }
    }

    async fn write_to(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        let tracked = self.begin();
        let (result, buf) = match self {
            Store::File(s) => s.write(io, buf, offset, fua).await,
            Store::Nbd(s) => s.write(io, buf, offset, fua).await,
            #[cfg(feature = "test-store")]
            Store::Test(s) => s.write(io, buf, offset, fua).await,
            Store::Memory(s) => (Ok(()), copy_in(s, io, buf, offset).await),
            Store::Null(_) => (Ok(()), buf),
        };
        (tracked.end(result), buf)
    }

    /// Frees the space of a range if the store can; the content of the range is unspecified
    /// afterwards. Succeeds without effect on a store that cannot discard.
    pub async fn discard(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        let tracked = self.begin();
        let result = match self {
            Store::File(s) => s.discard(io, offset, length).await,
            Store::Nbd(s) => s.discard(io, offset, length).await,
            #[cfg(feature = "test-store")]
            Store::Test(s) => s.zero(io, Operation::Discard, offset, length).await,
            Store::Memory(s) => {
                s.discard(io, offset, length).await;
                Ok(())
            }
            Store::Null(_) => Ok(()),
        };
        tracked.end(result)
    }

    /// The runs of data and holes in a range, in order and without gaps: at least one and at most
    /// `limit`. The list may end before the range does, also where a store would have to search for
    /// long.
    pub async fn extents(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        let tracked = self.begin();
        let result = match self {
            Store::File(s) => s.extents(io, offset, length, limit).await,
            Store::Nbd(s) => s.extents(io, offset, length, limit).await,
            #[cfg(feature = "test-store")]
            Store::Test(_) => Ok(TestStore::extents(offset, length)),
            Store::Memory(s) => Ok(s.extents(io, offset, length, limit).await),
            Store::Null(_) => Ok(vec![Extent { offset, length, hole: true }]),
        };
        tracked.end(result)
    }

    /// Aborts the store, from any thread: all requests that wait for a server, flushes included,
    /// and all later ones fail with [`ErrorKind::Closing`]. Operations that the kernel has begun on
    /// a file or device cannot be cancelled and run to completion.
    pub fn abort(&self) {
        match self {
            Store::Nbd(s) => s.abort(),
            Store::File(_) | Store::Memory(_) | Store::Null(_) => {}
            #[cfg(feature = "test-store")]
            Store::Test(_) => {}
        }
    }

    /// Drops the store's lock, so that another process can open it. For a store that is closed and
    /// has no write in flight. The descriptor alone does not drop it in time: the process lives on
    /// while the kernel holds a request of another store.
    pub fn release(&self) {
        match self {
            Store::File(s) => s.release(),
            Store::Nbd(_) | Store::Memory(_) | Store::Null(_) => {}
            #[cfg(feature = "test-store")]
            Store::Test(_) => {}
        }
    }

    /// Hints that a range will be read soon.
    pub async fn prefetch(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        let tracked = self.begin();
        let result = match self {
            Store::File(s) => s.prefetch(io, offset, length).await,
            Store::Nbd(s) => s.prefetch(io, offset, length).await,
            #[cfg(feature = "test-store")]
            Store::Test(_) => Ok(()),
            Store::Memory(_) | Store::Null(_) => Ok(()),
        };
        tracked.end(result)
    }
}

/// Writes to memory, some bytes at a time.
async fn copy_in(store: &MemoryStore, io: &Io, buf: Buf, offset: u64) -> Buf {
    let mut at = 0;
    loop {
        let end = buf.len().min(at + COPY_BYTES);
        store.write(&buf[at..end], offset + at as u64);
        if end == buf.len() {
            return buf;
        }
        at = end;
        io.yield_now().await;
    }
}

/// A request in flight, counted if the store has health counters.
pub(crate) struct TrackedRequest<'a> {
    health: Option<&'a StoreHealth>,
    _begun: Option<health::InFlightRequest<'a>>,
}

impl TrackedRequest<'_> {
    /// Ends the request; counts a failure.
    pub(crate) fn end<T>(self, result: Result<T, BlockError>) -> Result<T, BlockError> {
        if let (Some(health), Err(error)) = (self.health, &result) {
            health.note(error);
        }
        result
    }
}

/// Appends an extent, merging it with the last one if both are data or both are holes.
pub(crate) fn push_extent(list: &mut Vec<Extent>, next: Extent) {
    match list.last_mut() {
        Some(last) if last.hole == next.hole => last.length += next.length,
        _ => list.push(next),
    }
}
