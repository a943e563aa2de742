//! Where the bytes live: regular files, block devices, remote NBD exports, memory, and nothing at all.
//!
//! A store is asked by a volume, which has checked the request: offsets and lengths are within the
//! size and multiples of 512 bytes. A store does the I/O, whole or not at all:
//!
//! # Invariants
//! - A short read or write is continued, or reported as [`ErrorKind::Short`]; never success.
//! - `flush` returns when every write acknowledged before it is stable (`fdatasync`).
//! - A write with `fua` returns when that write is stable.
//! - After a flush or a write with `fua` has failed (other than for want of room) no flush succeeds over what may be lost (`syncs.rs`).
//! - Buffers are owned by the operation and come back with the result.
//!
//! To add a store: one file with the functions of [`Store`], one variant, one line in each
//! function here, and its URI in the program's configuration.

mod blocks;
mod create;
mod error;
#[cfg(feature = "test-store")]
mod faulty;
mod file;
mod identity;
mod memory;
mod nbd;
mod null;
mod open;
mod resize;
mod syncs;
mod unaligned;
mod watched;
mod zeroes;

pub use ebb_io::{Buf, Io};
pub use error::{BlockError, ErrorKind, Operation};
#[cfg(feature = "test-store")]
pub use faulty::{Disk, Faults, Record, TestStore};
pub use file::{FileNumber, FileStore};
pub use identity::Identity;
pub use memory::MemoryStore;
#[cfg(feature = "sim")]
pub use nbd::sim::set_peer;
pub use nbd::{
    LostWrites, NbdAddress, NbdError, NbdOptions, NbdStore, NbdTls, NbdTlsKeys, RECONNECT_DEFAULT,
    StoreState,
};
pub use null::NullStore;
pub use open::{Direct, OpenError, OpenOptions, inspect, is_in_use};
pub use resize::{Resize, ResizeError};
pub use syncs::Loss;
pub use watched::{FailedKind, Watched};
pub use zeroes::Wanted;

/// Bytes of a logical sector: every offset and length is a multiple.
pub const SECTOR: u64 = 512;
/// Bytes of a block: what stores prefer, and the size of a page.
pub const BLOCK: u64 = 4096;

/// What became of an operation on a buffer, with the buffer.
pub type BufResult = (Result<(), BlockError>, Buf);

/// How zeroes may be written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZeroFlags {
    /// The store may leave a hole (false: keep the space allocated).
    pub may_unmap: bool,
    /// Fail with [`ErrorKind::Unsupported`] rather than write zeroes out one by one.
    pub fast_only: bool,
}

/// A run of a volume that is alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// Bytes; never 0.
    pub length: u64,
    /// Nothing is allocated here and reads give zeroes.
    pub hole: bool,
}

/// What a store can do beyond reading and writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Discarding gives space back.
    pub discard: bool,
    /// Zeroes can be written without moving them.
    pub fast_zero: bool,
    /// Offset and length that need no copying, bytes (1: any).
    pub alignment: u32,
    /// I/O goes past the page cache.
    pub direct: bool,
    /// Long reads are best done in pieces of this many bytes: from memory, a piece that is passed
    /// on before the next is read stays in the processor's cache, and only pieces take memory.
    /// `None` where each read is a journey of its own.
    pub read_piece: Option<u32>,
}

/// See [`Capabilities::read_piece`].
pub(crate) const MEMORY_PIECE: u32 = 128 << 10;

/// Bytes that are copied between two looks at other tasks.
const COPIED_AT_ONCE: usize = 256 << 10;

/// A place for bytes.
#[derive(Debug)]
pub enum Store {
    /// A regular file or a block device.
    File(FileStore),
    /// Sparse memory, lost at the end of the process.
    Memory(MemoryStore),
    /// Reads zeroes, forgets writes.
    Null(NullStore),
    /// An export of an NBD server.
    Nbd(NbdStore),
    /// One that fails when a test says so.
    #[cfg(feature = "test-store")]
    Test(std::sync::Arc<TestStore>),
}

impl Store {
    /// Bytes. May change while the store is open, see [`Store::resize`].
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

    /// Bytes of the buffer that a READ or WRITE takes beside its own, for parts of blocks at its ends: at most two
    /// blocks, and 0 where the request is of whole blocks. Callers account for it, as [`ebb_io::BufPool::footprint`] says.
    pub fn bounce_bytes(&self, offset: u64, length: usize) -> usize {
        match self {
            Store::File(s) => s.bounce_bytes(offset, length),
            Store::Nbd(s) => s.bounce_bytes(offset, length),
            Store::Memory(_) | Store::Null(_) => 0,
            #[cfg(feature = "test-store")]
            Store::Test(_) => 0,
        }
    }

    /// Which store it is.
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

    /// How a store behind a network fares; `None` for those on this machine.
    pub fn state(&self) -> Option<StoreState> {
        match self {
            Store::Nbd(s) => Some(s.state()),
            Store::File(_) | Store::Memory(_) | Store::Null(_) => None,
            #[cfg(feature = "test-store")]
            Store::Test(_) => None,
        }
    }

    /// What of it is watched, so that its outages are told; `None` for those in memory.
    pub fn watched(&self) -> Option<&Watched> {
        match self {
            Store::File(s) => Some(s.watched()),
            Store::Nbd(s) => Some(s.watched()),
            #[cfg(feature = "test-store")]
            Store::Test(s) => Some(s.watched()),
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

    pub(crate) fn begin(&self) -> Request<'_> {
        let watched = self.watched();
        Request { watched, _begun: watched.map(Watched::begin) }
    }

    /// True if the bytes lie in this process: [`Store::show`] and [`Store::fill`] work.
    pub fn is_at_hand(&self) -> bool {
        matches!(self, Store::Memory(_) | Store::Null(_))
    }

    /// Shows a range in order, piece by piece, where it lies; what `see` does is over before anybody
    /// else changes the piece. False, and nothing shown, for stores that are not at hand.
    pub fn show(&self, offset: u64, length: u64, see: impl FnMut(&[u8])) -> bool {
        match self {
            Store::Memory(s) => s.show(offset, length, see),
            Store::Null(s) => s.show(length, see),
            _ => return false,
        }
        true
    }

    /// Has a range filled in order, piece by piece, where it lies: `put` sees what was there and
    /// leaves what shall be. False, and nothing done, for stores that are not at hand.
    pub fn fill(&self, offset: u64, length: u64, put: impl FnMut(&mut [u8])) -> bool {
        match self {
            Store::Memory(s) => s.fill(offset, length, put),
            Store::Null(s) => s.fill(length, put),
            _ => return false,
        }
        true
    }

    /// Fills the whole buffer from `offset`.
    pub async fn read(&self, io: &Io, buf: Buf, offset: u64) -> BufResult {
        let watch = self.begin();
        let (result, buf) = match self {
            Store::File(s) => s.read(io, buf, offset).await,
            Store::Nbd(s) => s.read(io, buf, offset).await,
            #[cfg(feature = "test-store")]
            Store::Test(s) => s.read(io, buf, offset).await,
            Store::Memory(_) | Store::Null(_) => (Ok(()), self.copy_out(io, buf, offset).await),
        };
        (watch.ended(result), buf)
    }

    /// Reads what is at hand, some at a time.
    async fn copy_out(&self, io: &Io, mut buf: Buf, offset: u64) -> Buf {
        let mut at = 0;
        loop {
            let end = buf.len().min(at + COPIED_AT_ONCE);
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

    /// Writes the whole buffer at `offset`; with `fua` it is stable on return.
    /// After an error with `fua` flushes fail, as after one of [`Store::flush`], unless the store was merely full.
    pub async fn write(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        let sync = self.begin_stable(fua);
        // In one place for both, as every request holds what its longest way needs.
        let written = self.write_to(io, buf, offset, fua).await;
        match sync {
            Some(sync) => self.end_stable(io, sync, offset, written).await,
            None => written,
        }
    }

    async fn write_to(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        let watch = self.begin();
        let (result, buf) = match self {
            Store::File(s) => s.write(io, buf, offset, fua).await,
            Store::Nbd(s) => s.write(io, buf, offset, fua).await,
            #[cfg(feature = "test-store")]
            Store::Test(s) => s.write(io, buf, offset, fua).await,
            Store::Memory(s) => (Ok(()), copy_in(s, io, buf, offset).await),
            Store::Null(_) => (Ok(()), buf),
        };
        (watch.ended(result), buf)
    }

    /// Gives the space of a range back if the store can; what is read there afterwards is
    /// unspecified. A store that cannot does nothing.
    pub async fn discard(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        let watch = self.begin();
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
        watch.ended(result)
    }

    /// The runs of data and holes in a range, in order and without gaps, at least one and at most `limit`
    /// of them. The rest is left out, and so may be what a store would have to search for long.
    pub async fn extents(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        let watch = self.begin();
        let result = match self {
            Store::File(s) => s.extents(io, offset, length, limit).await,
            Store::Nbd(s) => s.extents(io, offset, length, limit).await,
            #[cfg(feature = "test-store")]
            Store::Test(_) => Ok(TestStore::extents(offset, length)),
            Store::Memory(s) => Ok(s.extents(io, offset, length, limit).await),
            Store::Null(_) => Ok(vec![Extent { offset, length, hole: true }]),
        };
        watch.ended(result)
    }

    /// Gives the store up, from any thread: requests that wait for a server, a flush included, and all
    /// that come later fail with [`ErrorKind::Closing`]. Operations the kernel has begun on a file or device
    /// cannot be taken back: they end in their time.
    pub fn abort(&self) {
        match self {
            Store::Nbd(s) => s.abort(),
            Store::File(_) | Store::Memory(_) | Store::Null(_) => {}
            #[cfg(feature = "test-store")]
            Store::Test(_) => {}
        }
    }

    /// Lets another process have the store: takes its lock off. For a store that is closed, with nothing
    /// in flight that changes it. The process itself may live on for as long as the kernel holds a
    /// request of its other stores, and its descriptors, with their locks, live as long.
    pub fn release(&self) {
        match self {
            Store::File(s) => s.release(),
            Store::Nbd(_) | Store::Memory(_) | Store::Null(_) => {}
            #[cfg(feature = "test-store")]
            Store::Test(_) => {}
        }
    }

    /// Tells the store that a range will be read soon.
    pub async fn prefetch(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        let watch = self.begin();
        let result = match self {
            Store::File(s) => s.prefetch(io, offset, length).await,
            Store::Nbd(s) => s.prefetch(io, offset, length).await,
            #[cfg(feature = "test-store")]
            Store::Test(_) => Ok(()),
            Store::Memory(_) | Store::Null(_) => Ok(()),
        };
        watch.ended(result)
    }
}

/// Writes to memory, some at a time.
async fn copy_in(store: &MemoryStore, io: &Io, buf: Buf, offset: u64) -> Buf {
    let mut at = 0;
    loop {
        let end = buf.len().min(at + COPIED_AT_ONCE);
        store.write(&buf[at..end], offset + at as u64);
        if end == buf.len() {
            return buf;
        }
        at = end;
        io.yield_now().await;
    }
}

/// A request of a store that is watched, or of one that is not.
pub(crate) struct Request<'a> {
    watched: Option<&'a Watched>,
    _begun: Option<watched::Begun<'a>>,
}

impl Request<'_> {
    /// It has ended; a failure is noted.
    pub(crate) fn ended<T>(self, result: Result<T, BlockError>) -> Result<T, BlockError> {
        if let (Some(watched), Err(error)) = (self.watched, &result) {
            watched.note(error);
        }
        result
    }
}

/// Joins neighbours that are alike: how stores build their answer to `extents`.
pub(crate) fn push_extent(list: &mut Vec<Extent>, next: Extent) {
    match list.last_mut() {
        Some(last) if last.hole == next.hole => last.length += next.length,
        _ => list.push(next),
    }
}
