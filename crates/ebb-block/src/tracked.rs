//! How a store is called: each function here does what every store needs around a request, and calls the store's method
//! of the same name.
//!
//! - The range is checked: sectors, within the size.
//! - The request is counted as in flight, and its failure recorded ([`StoreHealth`](crate::StoreHealth)).
//! - Flushes that arrive while one is in flight are merged into the next one; after a failed sync no flush succeeds
//!   while acknowledged data may be lost (`flush_state.rs`).
//!
//! Four names belong together. [`Tracking`] is the state: the counters and the record of failed flushes, a field of each
//! store that can fail. The functions of this module (`tracked::read` and so on) are the code: they call a store and keep
//! its `Tracking`. [`Tracked`] is any store with this code around it, itself a store. `ebb-store`'s enum `Store` has the
//! code around it already: its methods are these functions, called with `Untracked`, which is the enum without them. So
//! the code is compiled once for all variants, a request passes one `match` and no pointer to a function, and `Store`
//! returns no `Tracking` of its own, so that nothing is counted twice.

use ebb_io::{Buf, ForeignVectors, Io};

use crate::error::{BlockError, ErrorKind, Operation};
use crate::flush_state::{FlushRole, PendingSync};
use crate::identity::{DeviceIdentity, Identity};
use crate::resize::{Resize, ResizeError};
use crate::store::{
    BlockStore, BufResult, Capabilities, Extent, ForeignResult, Wanted, ZeroFlags, check_range,
};
use crate::tracking::{CountedRequest, Tracking};

/// A store as its callers use it, see the [module](self).
#[derive(Debug)]
pub struct Tracked<S>(pub S);

/// See [`BlockStore::read`].
#[inline]
pub async fn read<S: BlockStore>(store: &S, io: &Io, buf: Buf, offset: u64) -> BufResult {
    if let Err(error) = check_range(store, Operation::Read, offset, buf.len() as u64) {
        return (Err(error), buf);
    }
    let request = CountedRequest::begin(store.tracking(), io);
    let (result, buf) = store.read(io, buf, offset).await;
    (request.end(result), buf)
}

/// See [`BlockStore::write`]. After an error with `fua` flushes fail, as after an error of
/// [`flush`], unless the store was merely full, or the error was the write's and not the sync's
/// ([`BlockStore::has_fua_by_flush`]).
#[inline]
pub async fn write<S: BlockStore>(
    store: &S,
    io: &Io,
    buf: Buf,
    offset: u64,
    fua: bool,
) -> BufResult {
    if let Err(error) = check_range(store, Operation::Write, offset, buf.len() as u64) {
        return (Err(error), buf);
    }
    let sync = match store.tracking() {
        Some(tracking) if fua => Some(tracking.syncs.begin()),
        _ => None,
    };
    // One call for both cases: each await point adds to the size of every request's future.
    let written = write_counted(store, io, buf, offset, fua).await;
    match sync {
        Some(sync) => end_stable(store, io, sync, offset, written).await,
        None => written,
    }
}

/// See [`BlockStore::read_foreign`].
#[inline]
pub async fn read_foreign<S: BlockStore>(
    store: &S,
    io: &Io,
    vectors: Box<ForeignVectors>,
    offset: u64,
) -> ForeignResult {
    if let Err(error) = check_range(store, Operation::Read, offset, vectors.remaining() as u64) {
        return (Err(error), vectors);
    }
    let request = CountedRequest::begin(store.tracking(), io);
    let (result, vectors) = store.read_foreign(io, vectors, offset).await;
    (request.end(result), vectors)
}

/// See [`BlockStore::write_foreign`].
#[inline]
pub async fn write_foreign<S: BlockStore>(
    store: &S,
    io: &Io,
    vectors: Box<ForeignVectors>,
    offset: u64,
) -> ForeignResult {
    if let Err(error) = check_range(store, Operation::Write, offset, vectors.remaining() as u64) {
        return (Err(error), vectors);
    }
    let request = CountedRequest::begin(store.tracking(), io);
    let (result, vectors) = store.write_foreign(io, vectors, offset).await;
    (request.end(result), vectors)
}

async fn write_counted<S: BlockStore>(
    store: &S,
    io: &Io,
    buf: Buf,
    offset: u64,
    fua: bool,
) -> BufResult {
    let request = CountedRequest::begin(store.tracking(), io);
    let (result, buf) = store.write(io, buf, offset, fua).await;
    (request.end(result), buf)
}

fn lost(operation: Operation, offset: u64, length: u64) -> BlockError {
    BlockError::new(ErrorKind::Lost, operation, offset, length)
}

/// Makes all acknowledged writes stable.
///
/// # Errors
/// The store's. From then on [`ErrorKind::Lost`]: changes since the last successful
/// flush may be on no disk, and no later flush can show that they are. This ends with
/// [`flush_rewritten`], or when the store is reopened.
pub async fn flush<S: BlockStore>(store: &S, io: &Io) -> Result<(), BlockError> {
    let Some(tracking) = store.tracking() else { return store.flush(io).await };
    let Some(mut joined) = tracking.syncs.join() else {
        return Err(lost(Operation::Flush, 0, store.size()));
    };
    match joined.role().await {
        FlushRole::Covered => Ok(()),
        FlushRole::Failed => Err(tracking.syncs.failure(store.size())),
        FlushRole::Lead(pending, number) => {
            sync(store, tracking, io, Some(pending)).await?;
            joined.covers(number);
            Ok(())
        }
    }
}

/// As [`flush`], by a caller that has written again, since [`Tracking::losses`] was `seen`,
/// every change since the last successful flush. If it succeeds and no sync has failed since,
/// flushes succeed again.
///
/// # Errors
/// As [`flush`].
pub async fn flush_rewritten<S: BlockStore>(
    store: &S,
    io: &Io,
    seen: u64,
) -> Result<(), BlockError> {
    let Some(tracking) = store.tracking() else { return store.flush(io).await };
    sync(store, tracking, io, tracking.syncs.begin_rewritten(seen)).await?;
    tracking.syncs.note_repaired(seen);
    Ok(())
}

async fn sync<S: BlockStore>(
    store: &S,
    tracking: &Tracking,
    io: &Io,
    sync: Option<PendingSync<'_>>,
) -> Result<(), BlockError> {
    let Some(sync) = sync else { return Err(lost(Operation::Flush, 0, store.size())) };
    let request = CountedRequest::begin(Some(tracking), io);
    let result = store.flush(io).await;
    match request.end(result) {
        Err(error) => {
            sync.fail(store.later_flushes(&error), &error);
            Err(error)
        }
        Ok(()) if sync.succeed(true).await => Ok(()),
        Ok(()) => Err(lost(Operation::Flush, 0, store.size())),
    }
}

/// Completes a write with FUA.
async fn end_stable<S: BlockStore>(
    store: &S,
    io: &Io,
    sync: PendingSync<'_>,
    offset: u64,
    (result, buf): BufResult,
) -> BufResult {
    let length = buf.len() as u64;
    match result {
        Err(error) if error.operation != Operation::Flush && store.has_fua_by_flush() => {
            sync.end();
            (Err(error), buf)
        }
        Err(error) if error.kind == ErrorKind::NoSpace => {
            sync.mark_doubtful();
            let (only_no_space, buf) = Box::pin(is_only_no_space(store, io, buf, offset)).await;
            match only_no_space {
                true => sync.end(),
                false => sync.fail(store.later_flushes(&error), &error),
            }
            (Err(error), buf)
        }
        Err(error) => {
            sync.fail(store.later_flushes(&error), &error);
            (Err(error), buf)
        }
        // Direct I/O reports an error only to the request that it belongs to.
        Ok(()) => match sync.succeed(!store.capabilities().direct).await {
            true => (Ok(()), buf),
            false => (Err(lost(Operation::Write, offset, length)), buf),
        },
    }
}

/// Whether a write with FUA failed with "no space" only because the write itself found none:
/// its sync may have received the error of older data.
async fn is_only_no_space<S: BlockStore>(store: &S, io: &Io, buf: Buf, offset: u64) -> (bool, Buf) {
    let (again, buf) = write_counted(store, io, buf, offset, false).await;
    let full = again.is_err_and(|error| error.kind == ErrorKind::NoSpace);
    (full && store.has_no_unreported_error(io).await, buf)
}

/// See [`BlockStore::discard`].
///
/// # Errors
/// The store's.
pub async fn discard<S: BlockStore>(
    store: &S,
    io: &Io,
    offset: u64,
    length: u64,
) -> Result<(), BlockError> {
    check_range(store, Operation::Discard, offset, length)?;
    let request = CountedRequest::begin(store.tracking(), io);
    request.end(store.discard(io, offset, length).await)
}

/// See [`BlockStore::write_zeroes_while`], which counts its requests itself.
///
/// # Errors
/// The store's.
pub async fn write_zeroes_while<S: BlockStore>(
    store: &S,
    io: &Io,
    offset: u64,
    length: u64,
    flags: ZeroFlags,
    wanted: Wanted<'_>,
) -> Result<(), BlockError> {
    check_range(store, Operation::WriteZeroes, offset, length)?;
    store.write_zeroes_while(io, offset, length, flags, wanted).await
}

/// See [`BlockStore::extents`].
///
/// # Errors
/// The store's.
pub async fn extents<S: BlockStore>(
    store: &S,
    io: &Io,
    offset: u64,
    length: u64,
    limit: usize,
) -> Result<Vec<Extent>, BlockError> {
    check_range(store, Operation::Extents, offset, length)?;
    let request = CountedRequest::begin(store.tracking(), io);
    request.end(store.extents(io, offset, length, limit).await)
}

/// See [`BlockStore::prefetch`].
///
/// # Errors
/// The store's.
pub async fn prefetch<S: BlockStore>(
    store: &S,
    io: &Io,
    offset: u64,
    length: u64,
) -> Result<(), BlockError> {
    check_range(store, Operation::Prefetch, offset, length)?;
    let request = CountedRequest::begin(store.tracking(), io);
    request.end(store.prefetch(io, offset, length).await)
}

impl<S: BlockStore> BlockStore for Tracked<S> {
    fn size(&self) -> u64 {
        self.0.size()
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn identity(&self) -> Identity {
        self.0.identity()
    }

    fn place(&self) -> String {
        self.0.place()
    }

    fn device_identity(&self) -> Option<DeviceIdentity> {
        self.0.device_identity()
    }

    fn tracking(&self) -> Option<&Tracking> {
        self.0.tracking()
    }

    fn bounce_bytes(&self, offset: u64, length: usize) -> usize {
        self.0.bounce_bytes(offset, length)
    }

    async fn read(&self, io: &Io, buf: Buf, offset: u64) -> BufResult {
        read(&self.0, io, buf, offset).await
    }

    async fn write(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        write(&self.0, io, buf, offset, fua).await
    }

    async fn flush(&self, io: &Io) -> Result<(), BlockError> {
        flush(&self.0, io).await
    }

    async fn discard(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        discard(&self.0, io, offset, length).await
    }

    async fn write_zeroes_while(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
        wanted: Wanted<'_>,
    ) -> Result<(), BlockError> {
        write_zeroes_while(&self.0, io, offset, length, flags, wanted).await
    }

    async fn extents(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        extents(&self.0, io, offset, length, limit).await
    }

    async fn prefetch(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        prefetch(&self.0, io, offset, length).await
    }

    fn has_direct_access(&self) -> bool {
        self.0.has_direct_access()
    }

    fn read_in_place(&self, offset: u64, length: u64, see: impl FnMut(&[u8])) -> bool {
        self.0.read_in_place(offset, length, see)
    }

    fn write_in_place(&self, offset: u64, length: u64, put: impl FnMut(&mut [u8])) -> bool {
        self.0.write_in_place(offset, length, put)
    }

    async fn check_resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        self.0.check_resize(io, order).await
    }

    async fn resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        self.0.resize(io, order).await
    }

    fn abort(&self) {
        self.0.abort();
    }

    fn release(&self) {
        self.0.release();
    }
}
