//! Stores hold the data of volumes: regular files, block devices, both also encrypted, qcow2 images (read-only), remote NBD
//! exports, images of Ceph clusters (`ebb-store-rbd`), memory, null.
//!
//! Each implements [`BlockStore`], the contract of `ebb-block`; [`Store`] is the one of them that a volume uses. It
//! dispatches each request with one `match` (`dispatch!`), through [`ebb_block::tracked`], which checks ranges, counts
//! requests and remembers failed syncs. docs/guides/adding-a-store.md shows how to add one.
//!
//! # Invariants
//! - Those of `ebb-block`. What else a store promises is at the top of its file.
//! - No request passes a `dyn` or a boxed future on the usual path.

mod create;
mod encrypted;
mod encrypted_error;
mod encrypted_keys;
#[cfg(feature = "test-store")]
mod faulty;
mod file;
mod file_identity;
mod file_name;
mod foreign;
mod memory;
mod nbd;
mod null;
mod open;
mod open_options;
mod qcow2;
#[cfg(feature = "sim")]
mod sim_folders;

use ebb_block::{
    BlockError, BlockStore, Buf, BufResult, Capabilities, DeviceIdentity, Extent, ForeignResult,
    ForeignVectors, Identity, Io, LaterFlushes, Loss, Remaining, Resize, ResizeError, StoreHealth,
    Tracking, Wanted, ZeroFlags, tracked,
};

pub use create::{give_name, is_without_links, sync_folder};
pub use ebb_store_rbd::{
    RBD_CONNECTIONS_MOST, RBD_TIMEOUT_DEFAULT, RbdClusterState, RbdEncryption, RbdEncryptionFormat,
    RbdError, RbdLibrary, RbdOptions, RbdStore, end_process_with_librbd, rbd_changes, rbd_clusters,
    wait_for_closed_images,
};
pub use encrypted::EncryptedStore;
pub use encrypted_error::EncryptedError;
pub use encrypted_keys::{HeaderOfFile, OpenKeys};
#[cfg(feature = "test-store")]
pub use faulty::{Disk, Faults, Record, TestStore};
pub use file::{FileNumber, FileStore};
pub use file_identity::{identity_of_file, try_identity_of_file};
pub use foreign::ForeignFormat;
pub use memory::MemoryStore;
#[cfg(feature = "sim")]
pub use nbd::sim::set_peer;
pub use nbd::{
    LostWrites, NbdAddress, NbdError, NbdOptions, NbdStore, NbdTls, NbdTlsKeys, RECONNECT_DEFAULT,
    RemoteConnections, StoreState,
};
pub use null::NullStore;
pub use open::{inspect, is_in_use};
pub use open_options::{Direct, OpenError, OpenOptions};
pub use qcow2::Qcow2Store;
pub use qcow2::check::{CheckedTables, Qcow2Info};
pub use qcow2::fault::{Qcow2Error, Qcow2Fault};
pub use qcow2::map as qcow2_map;
#[cfg(feature = "sim")]
pub use sim_folders::set_folder_sync;

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
    /// An image in QEMU's format, read-only.
    Qcow2(Qcow2Store),
    /// An image of a Ceph cluster.
    Rbd(RbdStore),
    /// A regular file or a block device that holds it encrypted.
    Encrypted(EncryptedStore),
    /// A store for tests that fails on command.
    #[cfg(feature = "test-store")]
    Test(std::sync::Arc<TestStore>),
    /// A store for tests that holds an encrypted volume.
    #[cfg(feature = "test-store")]
    TestEncrypted(EncryptedStore<TestStore>),
}

/// Evaluates `$body` with `$leaf` being the store of the variant: the only place that lists them.
macro_rules! dispatch {
    ($store:expr, $leaf:ident => $body:expr) => {
        match $store {
            Store::File($leaf) => $body,
            Store::Memory($leaf) => $body,
            Store::Null($leaf) => $body,
            Store::Nbd($leaf) => $body,
            Store::Qcow2($leaf) => $body,
            Store::Rbd($leaf) => $body,
            Store::Encrypted($leaf) => $body,
            #[cfg(feature = "test-store")]
            Store::TestEncrypted($leaf) => $body,
            #[cfg(feature = "test-store")]
            Store::Test(shared) => {
                let $leaf: &TestStore = shared;
                $body
            }
        }
    };
}

/// The state of an image in the terms of a server's: an image that is offline has lost its connection.
fn rbd_state(state: ebb_store_rbd::RbdState) -> StoreState {
    let offline = state.offline.is_some();
    StoreState {
        address: format!("rbd:{}", state.image),
        connections: u64::from(!offline),
        lost: u64::from(offline),
        in_flight: state.in_flight,
        last_error: state.last_error,
        since_seconds: state.since_seconds,
        silent_seconds: state.silent_seconds,
        offline,
        ..StoreState::default()
    }
}

impl Store {
    /// True once after the size of the store may have changed elsewhere: its volume is to be resized to what it has now.
    pub fn take_changed(&self) -> bool {
        match self {
            Store::Rbd(store) => store.take_changed(),
            _ => false,
        }
    }

    /// Whether it is a regular file, whose size is what its content needs. (A test store is as one.)
    pub fn is_regular_file(&self) -> bool {
        match self {
            Store::File(file) => !file.block_device,
            #[cfg(feature = "test-store")]
            Store::Test(test) => !test.device.load(std::sync::atomic::Ordering::Relaxed),
            _ => false,
        }
    }

    /// Identifies its file or device; `None` if it has none.
    ///
    /// # Errors
    /// Those of `fstat`.
    pub fn number(&self) -> Option<std::io::Result<FileNumber>> {
        match self {
            Store::File(file) => Some(file.number()),
            Store::Qcow2(image) => Some(image.number()),
            Store::Encrypted(volume) => Some(volume.number()),
            #[cfg(feature = "test-store")]
            Store::Test(test) => test.number(),
            #[cfg(feature = "test-store")]
            Store::TestEncrypted(volume) => volume.holder().number(),
            Store::Memory(_) | Store::Null(_) | Store::Nbd(_) | Store::Rbd(_) => None,
        }
    }

    /// Lets other processes open its file to read it: nothing is written to it from now on.
    ///
    /// # Errors
    /// Those of `flock`.
    pub fn share_lock(&self) -> std::io::Result<()> {
        match self {
            Store::File(file) => file.share_lock(),
            #[cfg(feature = "test-store")]
            Store::Test(test) => {
                test.shared.store(true, std::sync::atomic::Ordering::SeqCst);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// The state of a store behind a network; `None` for local stores.
    pub fn state(&self) -> Option<StoreState> {
        match self {
            Store::Nbd(store) => Some(store.state()),
            Store::Rbd(store) => Some(rbd_state(store.state())),
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

    /// Returns true once after losses that only one flush reported. What it reported may not have
    /// reached a client yet.
    pub fn take_reports(&self) -> bool {
        self.leaf_tracking().is_some_and(Tracking::take_reports)
    }

    /// Returns true if `error` of a flush says only that a server did not reply: nothing is lost,
    /// and a later flush covers what this one was for.
    pub fn lost_nothing(&self, error: &BlockError) -> bool {
        match self {
            Store::Nbd(_) => nbd::is_silence(error),
            #[cfg(feature = "test-store")]
            Store::Test(test) => test.lost_nothing(error),
            _ => false,
        }
    }

    /// Returns true if `error` of a flush is the only report that changes may be lost: later
    /// flushes succeed.
    pub fn is_only_report(&self, error: &BlockError) -> bool {
        dispatch!(self, leaf => leaf.later_flushes(error)) == LaterFlushes::Hide
    }

    /// Returns true if changes that a lost connection may have cost are reported to this opening
    /// alone: the flushes of another one succeed.
    #[inline]
    pub fn reports_lost_writes(&self) -> bool {
        match self {
            Store::Nbd(store) => store.reports_lost_writes(),
            #[cfg(feature = "test-store")]
            Store::Test(test) => test.reports_lost_writes(),
            _ => false,
        }
    }

    /// True while every flush fails because changes may be lost.
    pub fn is_lost(&self) -> bool {
        self.leaf_tracking().is_some_and(Tracking::is_lost)
    }

    /// The first loss that was not repaired by writing the data again.
    pub fn loss(&self) -> Option<Loss> {
        self.leaf_tracking().and_then(Tracking::loss)
    }

    /// As a flush, also of a file that is open read-only: makes the writes of earlier processes
    /// stable.
    ///
    /// # Errors
    /// As for a flush.
    pub async fn flush_earlier_writes(&self, io: &Io) -> Result<(), BlockError> {
        match self {
            Store::File(file) => file.cover_earlier_writes(),
            Store::Encrypted(volume) => volume.parts().0.cover_earlier_writes(),
            _ => {}
        }
        self.flush_content(io).await
    }

    /// Flushes the data, whether or not the name of its file is stable.
    ///
    /// # Errors
    /// As for a flush.
    pub async fn flush_content(&self, io: &Io) -> Result<(), BlockError> {
        tracked::flush(&Untracked(self), io).await
    }

    /// Makes the name of its file stable, which the first flush needs. A failure is no loss: a
    /// later call may succeed.
    ///
    /// # Errors
    /// Those of the flush of the folder.
    #[inline]
    pub async fn make_name_stable(&self, io: &Io) -> Result<(), BlockError> {
        match self {
            Store::File(file) => file.make_name_stable(io).await,
            Store::Encrypted(volume) => volume.parts().0.make_name_stable(io).await,
            #[cfg(feature = "test-store")]
            Store::Test(test) => test.make_name_stable(io).await,
            #[cfg(feature = "test-store")]
            Store::TestEncrypted(volume) => volume.holder().make_name_stable(io).await,
            Store::Memory(_) | Store::Null(_) | Store::Nbd(_) | Store::Qcow2(_) | Store::Rbd(_) => {
                Ok(())
            }
        }
    }

    /// Returns true if the name of its file is stable, see [`Store::make_name_stable`].
    pub fn has_stable_name(&self) -> bool {
        match self {
            Store::File(file) => file.has_stable_name(),
            Store::Encrypted(volume) => volume.parts().0.has_stable_name(),
            #[cfg(feature = "test-store")]
            Store::Test(test) => test.has_stable_name(),
            #[cfg(feature = "test-store")]
            Store::TestEncrypted(volume) => volume.holder().has_stable_name(),
            Store::Memory(_) | Store::Null(_) | Store::Nbd(_) | Store::Qcow2(_) | Store::Rbd(_) => {
                true
            }
        }
    }

    /// Notes that its file has another path now.
    pub fn note_renamed(&self, path: &std::path::Path) {
        match self {
            Store::File(file) => file.note_renamed(path),
            Store::Encrypted(volume) => volume.parts().0.note_renamed(path),
            _ => {}
        }
    }

    /// Notes that the name of its file may no longer be stable: the next flush makes it stable, or
    /// fails.
    pub fn doubt_name(&self) {
        match self {
            Store::File(file) => file.doubt_name(),
            Store::Encrypted(volume) => volume.parts().0.doubt_name(),
            _ => {}
        }
    }

    /// Makes the name of the file stable, which a write with FUA needs first. If the folder cannot
    /// be opened, the file is flushed with `fsync(2)` instead.
    #[inline]
    async fn make_stable_for_fua(&self, io: &Io) -> Result<(), BlockError> {
        self.make_name_stable(io).await?;
        let file = match self {
            Store::File(file) => file,
            Store::Encrypted(volume) => volume.parts().0,
            _ => return Ok(()),
        };
        if file.needs_fsync() { Box::pin(self.flush_content(io)).await } else { Ok(()) }
    }

    /// See [`tracked::flush_rewritten`]; the name of its file is the caller's business.
    ///
    /// # Errors
    /// As for a flush.
    pub async fn flush_rewritten(&self, io: &Io, seen: u64) -> Result<(), BlockError> {
        tracked::flush_rewritten(&Untracked(self), io, seen).await
    }
}

/// The store of the variant, without counting its requests and remembering its failures: the one kind of store for
/// which the daemon has the code of [`tracked`].
struct Untracked<'a>(&'a Store);

impl BlockStore for Untracked<'_> {
    #[inline]
    fn size(&self) -> u64 {
        self.0.size()
    }

    #[inline]
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn identity(&self) -> Identity {
        self.0.identity()
    }

    fn place(&self) -> String {
        self.0.place()
    }

    #[inline]
    fn tracking(&self) -> Option<&Tracking> {
        self.0.leaf_tracking()
    }

    #[inline]
    async fn read(&self, io: &Io, buf: Buf, offset: u64) -> BufResult {
        dispatch!(self.0, leaf => leaf.read(io, buf, offset).await)
    }

    #[inline]
    async fn write(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        dispatch!(self.0, leaf => leaf.write(io, buf, offset, fua).await)
    }

    async fn read_foreign(
        &self,
        io: &Io,
        vectors: Box<ForeignVectors>,
        offset: u64,
    ) -> ForeignResult {
        dispatch!(self.0, leaf => leaf.read_foreign(io, vectors, offset).await)
    }

    async fn write_foreign(
        &self,
        io: &Io,
        vectors: Box<ForeignVectors>,
        offset: u64,
    ) -> ForeignResult {
        dispatch!(self.0, leaf => leaf.write_foreign(io, vectors, offset).await)
    }

    async fn flush(&self, io: &Io) -> Result<(), BlockError> {
        dispatch!(self.0, leaf => leaf.flush(io).await)
    }

    async fn discard(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        dispatch!(self.0, leaf => leaf.discard(io, offset, length).await)
    }

    async fn zero_range(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
    ) -> Result<Remaining, BlockError> {
        dispatch!(self.0, leaf => leaf.zero_range(io, offset, length, flags).await)
    }

    async fn zero_blocks(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        dispatch!(self.0, leaf => leaf.zero_blocks(io, offset, length).await)
    }

    fn zero_blocks_max(&self) -> u64 {
        dispatch!(self.0, leaf => leaf.zero_blocks_max())
    }

    async fn extents(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        dispatch!(self.0, leaf => leaf.extents(io, offset, length, limit).await)
    }

    async fn prefetch(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        dispatch!(self.0, leaf => leaf.prefetch(io, offset, length).await)
    }

    fn later_flushes(&self, error: &BlockError) -> LaterFlushes {
        dispatch!(self.0, leaf => leaf.later_flushes(error))
    }

    async fn has_no_unreported_error(&self, io: &Io) -> bool {
        dispatch!(self.0, leaf => leaf.has_no_unreported_error(io).await)
    }

    fn has_fua_by_flush(&self) -> bool {
        dispatch!(self.0, leaf => leaf.has_fua_by_flush())
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
        tracked::read(&Untracked(self), io, buf, offset).await
    }

    async fn write(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        if fua && let Err(error) = self.make_stable_for_fua(io).await {
            return (Err(error), buf);
        }
        tracked::write(&Untracked(self), io, buf, offset, fua).await
    }

    fn takes_foreign(&self, offset: u64, vectors: &ForeignVectors) -> bool {
        dispatch!(self, leaf => leaf.takes_foreign(offset, vectors))
    }

    async fn read_foreign(
        &self,
        io: &Io,
        vectors: Box<ForeignVectors>,
        offset: u64,
    ) -> ForeignResult {
        tracked::read_foreign(&Untracked(self), io, vectors, offset).await
    }

    async fn write_foreign(
        &self,
        io: &Io,
        vectors: Box<ForeignVectors>,
        offset: u64,
    ) -> ForeignResult {
        tracked::write_foreign(&Untracked(self), io, vectors, offset).await
    }

    async fn flush(&self, io: &Io) -> Result<(), BlockError> {
        let named = self.make_name_stable(io).await;
        // Data is flushed even if the folder cannot be.
        self.flush_content(io).await?;
        named
    }

    async fn discard(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        tracked::discard(&Untracked(self), io, offset, length).await
    }

    async fn write_zeroes_while(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
        wanted: Wanted<'_>,
    ) -> Result<(), BlockError> {
        tracked::write_zeroes_while(&Untracked(self), io, offset, length, flags, wanted).await
    }

    async fn extents(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        tracked::extents(&Untracked(self), io, offset, length, limit).await
    }

    async fn prefetch(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        tracked::prefetch(&Untracked(self), io, offset, length).await
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
