//! Requests without a buffer: carried out at once between memory of this process and the caller's, or by the kernel straight
//! from or to memory that is shared with another process.
//!
//! # Invariants
//! - Such a request passes the gate and the checks of the volume, and is counted, as any other.

use ebb_block::{BlockError, BlockStore, ErrorKind, ForeignResult, ForeignVectors, Io, Operation};
use ebb_cache::{CachedStore, StoreCache};

use super::Volume;
use crate::gate::Pass;
use crate::stats::Started;

impl Volume {
    /// The store, if requests go straight to it: there is one layer, without a cache.
    #[inline]
    fn plain_store(&self) -> Option<&ebb_store::Store> {
        self.store.only().and_then(CachedStore::uncached)
    }

    /// Whether [`Volume::read_foreign`] and [`Volume::write_foreign`] can transfer this memory from or to `offset`.
    #[inline]
    pub fn takes_foreign(&self, offset: u64, vectors: &ForeignVectors) -> bool {
        self.plain_store().is_some_and(|store| store.takes_foreign(offset, vectors))
    }

    /// As [`Volume::read`], straight into memory that is shared with another process, if [`Volume::takes_foreign`] is
    /// true.
    pub async fn read_foreign(
        &self,
        io: &Io,
        vectors: Box<ForeignVectors>,
        offset: u64,
    ) -> ForeignResult {
        let length = vectors.remaining() as u64;
        let request = match self.admit(io, Operation::Read, offset, length) {
            Ok(request) => request,
            Err(error) => return (Err(error), vectors),
        };
        let Some(store) = self.plain_store() else {
            let refusal = self.refusal(ErrorKind::Unsupported, Operation::Read, offset, length);
            return (request.complete(Err(refusal)), vectors);
        };
        let (result, vectors) = store.read_foreign(io, vectors, offset).await;
        (request.complete(result), vectors)
    }

    /// As [`Volume::write`] without FUA, straight from memory that is shared with another process, if
    /// [`Volume::takes_foreign`] is true.
    pub async fn write_foreign(
        &self,
        io: &Io,
        vectors: Box<ForeignVectors>,
        offset: u64,
    ) -> ForeignResult {
        let length = vectors.remaining() as u64;
        let request = match self.admit(io, Operation::Write, offset, length) {
            Ok(request) => request,
            Err(error) => return (Err(error), vectors),
        };
        let Some(store) = self.plain_store() else {
            let refusal = self.refusal(ErrorKind::Unsupported, Operation::Write, offset, length);
            return (request.complete(Err(refusal)), vectors);
        };
        let (result, vectors) = store.write_foreign(io, vectors, offset).await;
        (request.complete(result), vectors)
    }

    /// Access to what the volume's cache holds, for reads that are carried out at once. `None` if it has none, or has
    /// several layers, and when it is being closed.
    pub fn cached_access<'a>(&'a self, io: &'a Io) -> Option<CachedAccess<'a>> {
        let layer = self.store.only().filter(|layer| layer.has_cache())?;
        Some(CachedAccess { volume: self, layer, io, _pass: self.gate.enter(io.slot())? })
    }

    /// Direct access to the data, if the store is in memory and the volume has no cache: for requests that are
    /// carried out at once, without a buffer and without waiting. `None` otherwise, and when it is being closed.
    pub fn direct_access<'a>(&'a self, io: &'a Io) -> Option<DirectAccess<'a>> {
        if !self.store.has_direct_access() {
            return None;
        }
        Some(DirectAccess { volume: self, io, _pass: self.gate.enter(io.slot())? })
    }
}

/// What a volume's cache holds, see [`Volume::cached_access`]. Closing waits until it is dropped: it must not be kept
/// across an await.
pub struct CachedAccess<'a> {
    volume: &'a Volume,
    layer: &'a CachedStore,
    io: &'a Io,
    _pass: Pass<'a>,
}

impl CachedAccess<'_> {
    /// The most bytes of one read.
    pub const MOST: usize = StoreCache::AT_ONCE;

    /// Passes `length` bytes at `offset` to `put`, in pieces with their places in the request, in any order. False if they
    /// are not all in memory, or cannot be read: then `put` may have had some of them, and [`Volume::read`] reads them, or
    /// says why not.
    #[inline]
    pub fn read(&self, offset: u64, length: usize, mut put: impl FnMut(usize, &[u8])) -> bool {
        if self.volume.validate(Operation::Read, offset, length as u64).is_err()
            || length > Self::MOST
        {
            return false;
        }
        let started = Started::new(self.io, Operation::Read);
        if !self.layer.read_cached_pieces(self.io, (offset, length), &mut put) {
            return false;
        }
        self.volume.account(self.io, started, (offset, length as u64), Ok(())).is_ok()
    }
}

/// A volume's data in memory, see [`Volume::direct_access`]. Closing waits until it is dropped: it must not
/// be kept across an await.
pub struct DirectAccess<'a> {
    volume: &'a Volume,
    io: &'a Io,
    _pass: Pass<'a>,
}

impl DirectAccess<'_> {
    /// Passes `length` bytes at `offset` to `see`, in order, in pieces of at most a page.
    ///
    /// # Errors
    /// As [`Volume::read`]; then `see` was not called.
    pub fn read(&self, offset: u64, length: u64, see: impl FnMut(&[u8])) -> Result<(), BlockError> {
        self.volume.validate(Operation::Read, offset, length)?;
        self.volume.store.read_in_place(offset, length, see);
        self.account(Operation::Read, offset, length)
    }

    /// Lets `put` overwrite `length` bytes at `offset`, in order, in pieces of at most a page.
    ///
    /// # Errors
    /// As [`Volume::write`]; then `put` was not called.
    pub fn write(
        &self,
        offset: u64,
        length: u64,
        put: impl FnMut(&mut [u8]),
    ) -> Result<(), BlockError> {
        self.volume.validate(Operation::Write, offset, length)?;
        self.volume.store.write_in_place(offset, length, put);
        self.account(Operation::Write, offset, length)
    }

    #[inline]
    fn account(&self, operation: Operation, offset: u64, length: u64) -> Result<(), BlockError> {
        self.volume.account(self.io, Started::new(self.io, operation), (offset, length), Ok(()))
    }
}
