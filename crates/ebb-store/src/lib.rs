//! Stores hold the data of volumes: regular files, block devices, remote NBD exports, memory, null.
//!
//! Each implements [`BlockStore`], the contract of `ebb-block`; [`Store`] is the one of them that a volume uses. It
//! dispatches each request with one `match` (`dispatch!`), through [`ebb_block::tracked`], which checks ranges, counts
//! requests and remembers failed syncs. docs/guides/adding-a-store.md shows how to add one.
//!
//! # Invariants
//! - Those of `ebb-block`. What else a store promises is at the top of its file.
//! - No request passes a `dyn` or a boxed future on the usual path.

mod create;
#[cfg(feature = "test-store")]
mod faulty;
mod file;
mod file_identity;
mod memory;
mod nbd;
mod null;
mod open;
mod open_options;

use ebb_block::{
    BlockError, BlockStore, Buf, BufResult, Capabilities, DeviceIdentity, Extent, Identity, Io,
    Loss, Resize, ResizeError, StoreHealth, Tracking, Wanted, ZeroFlags, tracked,
};

#[cfg(feature = "test-store")]
pub use faulty::{Disk, Faults, Record, TestStore};
pub use file::{FileNumber, FileStore};
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

/// Bytes copied before the worker's other tasks run.
pub(crate) const COPY_BYTES: usize = 256 << 10;

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

/// Evaluates `$body` with `$leaf` being the store of the variant: the only place that lists them.
macro_rules! dispatch {
    ($store:expr, $leaf:ident => $body:expr) => {
        match $store {
            Store::File($leaf) => $body,
            Store::Memory($leaf) => $body,
            Store::Null($leaf) => $body,
            Store::Nbd($leaf) => $body,
            #[cfg(feature = "test-store")]
            Store::Test(shared) => {
                let $leaf: &TestStore = shared;
                $body
            }
        }
    };
}

impl Store {
    /// The state of a store behind a network; `None` for local stores.
    pub fn state(&self) -> Option<StoreState> {
        match self {
            Store::Nbd(store) => Some(store.state()),
            _ => None,
        }
    }

    /// That of the variant. As a store this has none: its requests are counted already.
    #[inline]
    fn leaf_tracking(&self) -> Option<&Tracking> {
        dispatch!(self, leaf => leaf.tracking())
    }

    /// Counters from which outages are detected; `None` for stores in memory.
    pub fn health(&self) -> Option<&StoreHealth> {
        self.leaf_tracking().map(Tracking::health)
    }

    /// The number of losses so far: failed syncs. See [`Store::flush_rewritten`].
    pub fn losses(&self) -> u64 {
        self.leaf_tracking().map_or(0, Tracking::losses)
    }

    /// True while every flush fails because changes may be lost.
    pub fn is_lost(&self) -> bool {
        self.leaf_tracking().is_some_and(Tracking::is_lost)
    }

    /// The first loss that was not repaired by writing the data again.
    pub fn loss(&self) -> Option<Loss> {
        self.leaf_tracking().and_then(Tracking::loss)
    }

    /// See [`tracked::flush_rewritten`].
    ///
    /// # Errors
    /// As those of a flush.
    pub async fn flush_rewritten(&self, io: &Io, seen: u64) -> Result<(), BlockError> {
        dispatch!(self, leaf => tracked::flush_rewritten(leaf, io, seen).await)
    }
}

impl BlockStore for Store {
    fn size(&self) -> u64 {
        dispatch!(self, leaf => leaf.size())
    }

    fn capabilities(&self) -> Capabilities {
        dispatch!(self, leaf => leaf.capabilities())
    }

    fn identity(&self) -> Identity {
        dispatch!(self, leaf => leaf.identity())
    }

    fn place(&self) -> String {
        dispatch!(self, leaf => leaf.place())
    }

    fn device_identity(&self) -> Option<DeviceIdentity> {
        dispatch!(self, leaf => leaf.device_identity())
    }

    #[inline]
    fn bounce_bytes(&self, offset: u64, length: usize) -> usize {
        dispatch!(self, leaf => leaf.bounce_bytes(offset, length))
    }

    async fn read(&self, io: &Io, buf: Buf, offset: u64) -> BufResult {
        dispatch!(self, leaf => tracked::read(leaf, io, buf, offset).await)
    }

    async fn write(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        dispatch!(self, leaf => tracked::write(leaf, io, buf, offset, fua).await)
    }

    async fn flush(&self, io: &Io) -> Result<(), BlockError> {
        dispatch!(self, leaf => tracked::flush(leaf, io).await)
    }

    async fn discard(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        dispatch!(self, leaf => tracked::discard(leaf, io, offset, length).await)
    }

    async fn write_zeroes_while(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
        wanted: Wanted<'_>,
    ) -> Result<(), BlockError> {
        dispatch!(self, leaf => {
            tracked::write_zeroes_while(leaf, io, offset, length, flags, wanted).await
        })
    }

    async fn extents(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        dispatch!(self, leaf => tracked::extents(leaf, io, offset, length, limit).await)
    }

    async fn prefetch(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        dispatch!(self, leaf => tracked::prefetch(leaf, io, offset, length).await)
    }

    fn has_direct_access(&self) -> bool {
        dispatch!(self, leaf => leaf.has_direct_access())
    }

    fn read_in_place(&self, offset: u64, length: u64, see: impl FnMut(&[u8])) -> bool {
        dispatch!(self, leaf => leaf.read_in_place(offset, length, see))
    }

    fn write_in_place(&self, offset: u64, length: u64, put: impl FnMut(&mut [u8])) -> bool {
        dispatch!(self, leaf => leaf.write_in_place(offset, length, put))
    }

    async fn check_resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        dispatch!(self, leaf => leaf.check_resize(io, order).await)
    }

    async fn resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        dispatch!(self, leaf => leaf.resize(io, order).await)
    }

    fn abort(&self) {
        dispatch!(self, leaf => leaf.abort());
    }

    fn release(&self) {
        dispatch!(self, leaf => leaf.release());
    }
}
