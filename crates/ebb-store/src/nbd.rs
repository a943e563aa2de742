//! A remote export as a store: an NBD client.
//!
//! Implements the client side of the NBD protocol document: fixed newstyle with `NBD_OPT_GO`, block
//! sizes, structured replies, `base:allocation`, TRIM, WRITE_ZEROES (fast, without holes), CACHE,
//! TLS.
//!
//! # Guarantees
//! - A read succeeds only if each of its bytes was received exactly once; anything else is an error
//!   of that request and closes the connection. No length, offset or count from the server reaches
//!   an allocation or an index unchecked.
//! - A lost connection is reconnected without limit, with waiting times that double up to two
//!   seconds. Requests in flight are submitted again: reads, and writes, zeroes and discards that
//!   were not acknowledged, for which repetition is harmless. A request that cannot be completed
//!   within [`NbdOptions::reconnect`] fails.
//! - **A flush covers what was acknowledged**, also on earlier connections, as far as a client can
//!   know. A server may keep acknowledged data in a volatile cache until a flush, and a client
//!   cannot distinguish a network failure from a restart of the server. Therefore:
//!   - With [`LostWrites::Flush`] (the default), the first request of a new connection is a flush,
//!     and no other is submitted before it has succeeded. If it fails, the next flush of the store
//!     fails, as if the server had returned the error to that. This covers everything if the
//!     server kept running, or if its process was killed after it had passed its writes to its kernel (files, block devices). It does not cover a crash of
//!     the server's *host*, nor a server killed with a write-back cache of its own.
//!   - With [`LostWrites::Report`], if changes were acknowledged and not flushed when a connection
//!     was lost, the next flush fails, once, and reports how many. For servers with such a cache.
//! - **Limit:** a connection can be lost after the server has executed a flush and before its reply has arrived. The
//!   flush is sent again. If the first one had failed, the second one may succeed over lost data, because a server, as
//!   Linux does for it, may report a failed writeback only once; with [`LostWrites::Flush`] the store then reports
//!   nothing. With [`LostWrites::Report`] the flush fails whenever a connection was lost with unflushed changes.
//! - A write with FUA is sent as a write and then a flush, so that an error of the write is known
//!   to be its own, and later flushes can succeed. Only a server that offers FUA and no flush gets
//!   the flag.
//! - For a server that does not offer flush, `flush` succeeds: it declares that it has no volatile
//!   cache.
//! - An export that returns smaller, with smaller blocks or without features that requests use is
//!   not used: the attempt to connect fails, and the reason is in [`StoreState::last_error`]. One
//!   that has grown is served with its former size until the store is resized.
//! - A server that still executes a request of a lost connection, after the same request was
//!   acknowledged on a new one, can undo a later write. The protocol has no fence against this;
//!   servers avoid it by completing the requests of a connection before they release it.
//! - A server that shuts down and waits for its clients is released: when one connection receives
//!   `NBD_ESHUTDOWN`, or cannot be established, idle connections send a flush as a probe and
//!   receive that error, too.
//! - A server that vanishes from a TCP network is detected within a minute. For one that keeps its
//!   connection open and never replies, requests wait, and [`StoreState::silent_seconds`] reports
//!   it; with [`NbdOptions::silence`] its connection counts as lost after that time. There is no
//!   such limit by default: a server that is merely slow may still execute requests of the
//!   connection that was closed after later writes on the next one (see above). Set a limit only
//!   for servers that do not, or where an error is better than a wait.

mod backoff;
mod census;
mod connect;
mod connector;
mod export;
mod first;
mod handshake;
mod link;
mod options;
mod reply;
mod route;
#[cfg(feature = "sim")]
pub(crate) mod sim;
mod size;
mod slots;
mod state;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ebb_block::unaligned::{self, Blocks};
use ebb_block::{
    BlockError, BlockLock, BlockStore, BufResult, Capabilities, DeviceIdentity, ErrorKind, Extent,
    Identity, LaterFlushes, Operation, Remaining, Resize, ResizeError, SECTOR, Tracking, ZeroFlags,
    check_size_change, push_extent, whole_sectors,
};
use ebb_io::{Buf, Io};
use ebb_nbd_proto::{Command, CommandFlags, Errno, TransmissionFlags};
use ebb_tls::{ClientTls, TlsError};

use census::Counted;
pub use census::RemoteConnections;
use first::FirstConnection;
use link::Remote;
pub use options::{
    LostWrites, NbdAddress, NbdError, NbdOptions, NbdTls, NbdTlsKeys, RECONNECT_DEFAULT,
};
use route::Routes;
use slots::{RemoteRequest, RequestFailure, RequestOutcome};
pub use state::StoreState;
pub(crate) use state::is_silence;
use state::{LostChanges, RemoteState};

/// The longest range of a request without data: below 2^32, and a multiple of every block size.
const RANGE_MAX: u64 = 1 << 30;
/// How often a write with FUA is sent if each time the connection is lost before its flush.
const FUA_ATTEMPTS: u32 = 8;
/// The most extents of one block status request.
const EXTENTS_PER_REQUEST: usize = 4096;
/// The longest range of a block status request: longer than [`RANGE_MAX`], since large holes need
/// fewer requests then.
const STATUS_MAX: u64 = 1 << 31;
/// Block status requests sent for one call. A reply may end before its range does ("the server MAY
/// return fewer extents"), and the caller continues from there: so a large export does not delay a
/// request, a client or a shutdown for longer. Enough for a range of 32 bits.
const STATUS_REQUESTS: usize = 4;

/// An export of an NBD server.
#[derive(Debug)]
pub struct NbdStore {
    remote: Arc<Remote>,
    routes: Routes,
    /// Held shared by aligned writes and exclusively by unaligned ones; `None` where all are
    /// aligned.
    unaligned: Option<BlockLock>,
    tracking: Tracking,
    _counted: Counted,
}

impl Drop for NbdStore {
    fn drop(&mut self) {
        self.remote.shared.close();
        self.remote.first.close();
    }
}

impl NbdStore {
    /// Connects to read the properties of the export; blocks for at most ten seconds. Workers make
    /// their connections when they first need one, and reconnect by themselves. If the server does
    /// not offer several connections, the first worker that needs one uses this one.
    ///
    /// # Errors
    /// [`NbdError`], each with a remedy. An unreachable server is an error here, as a
    /// missing file is: the caller decides whether to try again.
    pub fn open(options: NbdOptions) -> Result<(NbdStore, Vec<String>), NbdError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let tls = options.tls.as_ref().map(|tls| client_tls(&options.address, tls)).transpose()?;
        let connected = connect::connect(&options, tls.as_ref())?;
        let export = connected.export.clone();
        if let Err(error) = export.check(&options) {
            connected.disconnect();
            return Err(error);
        }
        let mut notes = Vec::new();
        if !export.offers(TransmissionFlags::SEND_FLUSH) && !options.read_only {
            notes.push("the server does not offer flush: it decides when writes are stable".into());
        }
        if !export.offers(TransmissionFlags::CAN_MULTI_CONN) {
            notes.push("the server allows only one connection: the workers share it".into());
        }
        let unaligned = (u64::from(export.min_block) > SECTOR).then(BlockLock::default);
        let flushes = export.offers(TransmissionFlags::SEND_FLUSH);
        // Without flush nothing is volatile on the server: a lost connection loses nothing.
        let shared =
            RemoteState::new(if flushes { options.lost_writes } else { LostWrites::Flush });
        let (size, size_seen) = (AtomicU64::new(export.size), AtomicU64::new(export.size));
        let first = FirstConnection::default();
        if export.offers(TransmissionFlags::CAN_MULTI_CONN) {
            connected.disconnect();
        } else {
            first.keep(connected);
        }
        let remote = Arc::new(Remote { options, tls, export, size, size_seen, shared, first });
        let routes = Routes::new(NEXT.fetch_add(1, Ordering::Relaxed), remote.clone());
        let tracking = Tracking::default();
        let _counted = Counted::store(remote.has_several_connections());
        Ok((NbdStore { remote, routes, unaligned, tracking, _counted }, notes))
    }

    /// The state of the connections.
    pub fn state(&self) -> StoreState {
        self.remote.shared.state(self.remote.options.address.to_string())
    }

    /// See [`LostWrites::Report`].
    #[inline]
    pub(crate) fn reports_lost_writes(&self) -> bool {
        self.remote.shared.reports_lost_writes()
    }

    fn offers(&self, flag: TransmissionFlags) -> bool {
        self.remote.export.offers(flag)
    }

    fn is_aligned(&self, offset: u64, length: u64) -> bool {
        offset.is_multiple_of(self.block()) && length.is_multiple_of(self.block())
    }

    /// Submits one request.
    async fn submit(
        &self,
        io: &Io,
        (command, flags): (Command, CommandFlags),
        (offset, length): (u64, u64),
    ) -> Result<RequestOutcome<Buf>, RequestFailure> {
        // Callers pass at most RANGE_MAX.
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        let limit = EXTENTS_PER_REQUEST;
        let request = RemoteRequest { command, flags, offset, length, at: 0, limit, zeroes: false };
        let outcome = self.routes.request(io, request, None).await;
        match outcome.result {
            Ok(()) => Ok(outcome),
            Err(failure) => Err(failure),
        }
    }

    /// Submits as many requests as a range needs.
    async fn submit_range(
        &self,
        io: &Io,
        what: (Command, CommandFlags),
        offset: u64,
        length: u64,
    ) -> Result<(), RequestFailure> {
        let end = offset + length;
        let mut at = offset;
        while at < end {
            let count = (end - at).min(RANGE_MAX);
            self.submit(io, what, (at, count)).await?;
            at += count;
        }
        Ok(())
    }

    fn error(
        &self,
        failure: RequestFailure,
        operation: Operation,
        offset: u64,
        length: u64,
    ) -> BlockError {
        let source = match failure {
            RequestFailure::Server(code) => {
                // An error number that the protocol does not define is an I/O error.
                let code =
                    if code == Errno::Overflow.to_wire() { Errno::Io.to_wire() } else { code };
                io::Error::from_raw_os_error(match i32::try_from(code) {
                    Ok(code @ (1 | 5 | 12 | 22 | 28 | 95)) => code,
                    _ => libc::EIO,
                })
            }
            RequestFailure::Protocol(what) => {
                let address = &self.remote.options.address;
                io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("NBD server {address} violated the protocol: {what}"),
                )
            }
            RequestFailure::Lost if self.remote.shared.is_aborted() => {
                let address = &self.remote.options.address;
                let what = format!("aborted before the NBD server {address} replied");
                let source = Some(io::Error::new(io::ErrorKind::Interrupted, what));
                return BlockError::new(ErrorKind::Closing, operation, offset, length)
                    .caused_by(source);
            }
            RequestFailure::Lost => {
                let limit = self.remote.options.reconnect.as_secs_f64();
                let last = self.remote.shared.last_error();
                io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("no reply from the NBD server within {limit} s: {last}"),
                )
            }
        };
        BlockError::from_io(source, operation, offset, length)
    }

    async fn read_whole(&self, io: &Io, buf: Buf, offset: u64) -> BufResult {
        self.transfer(io, (Command::Read, CommandFlags::NONE), buf, offset, Operation::Read).await
    }

    /// Sends a flush, if the server supports it.
    async fn flush_server(&self, io: &Io) -> Result<(), BlockError> {
        if self.remote.options.read_only || !self.offers(TransmissionFlags::SEND_FLUSH) {
            return Ok(());
        }
        let mark = self.remote.shared.mark();
        let result = self.submit(io, (Command::Flush, CommandFlags::NONE), (0, 0)).await;
        result.map_err(|failure| self.error(failure, Operation::Flush, 0, self.size()))?;
        self.remote.shared.cover(mark);
        Ok(())
    }

    async fn write_whole(&self, io: &Io, mut buf: Buf, offset: u64, fua: bool) -> BufResult {
        let by_flush = fua && self.has_fua_by_flush();
        let flags = CommandFlags::NONE.with_if(fua && !by_flush, CommandFlags::FUA);
        for _ in 0..FUA_ATTEMPTS {
            let lost = self.remote.shared.lost_connections();
            let what = (Command::Write, flags);
            let (mut result, back) = self.transfer(io, what, buf, offset, Operation::Write).await;
            buf = back;
            if by_flush && result.is_ok() {
                // A loss of earlier changes is for those who flush them.
                result = self.flush_server(io).await;
            }
            // A server that ended before the flush may have lost the write.
            if !by_flush || result.is_err() || self.remote.shared.lost_connections() == lost {
                return (result, buf);
            }
        }
        let source = std::io::Error::other("the connection was lost before each flush");
        let error = BlockError::from_io(source, Operation::Flush, offset, buf.len() as u64);
        (Err(error), buf)
    }

    /// Transfers the whole buffer in requests of at most the server's limit.
    async fn transfer(
        &self,
        io: &Io,
        (command, flags): (Command, CommandFlags),
        mut buf: Buf,
        offset: u64,
        operation: Operation,
    ) -> BufResult {
        let whole = buf.len();
        let most = usize::try_from(self.remote.export.max_block).unwrap_or(usize::MAX);
        let mut at = 0;
        while at < whole {
            let count = (whole - at).min(most);
            let length = u32::try_from(count).unwrap_or(u32::MAX);
            let offset = offset + at as u64;
            let request =
                RemoteRequest { command, flags, offset, length, at, limit: 0, zeroes: false };
            let outcome = self.routes.request(io, request, Some(buf)).await;
            let fail = |failure| self.error(failure, operation, offset, u64::from(length));
            buf = match outcome.buf {
                Some(buf) => buf,
                // Only a worker that ends keeps a buffer, and this task ends with it.
                None => return (Err(fail(RequestFailure::Lost)), io.pool().take(whole).await),
            };
            if let Err(failure) = outcome.result {
                return (Err(fail(failure)), buf);
            }
            at += count;
        }
        (Ok(()), buf)
    }
}

impl BlockStore for NbdStore {
    fn size(&self) -> u64 {
        self.remote.size()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            read_only: self.remote.options.read_only,
            discard: self.offers(TransmissionFlags::SEND_TRIM),
            fast_zero: self.offers(TransmissionFlags::SEND_WRITE_ZEROES),
            alignment: self.remote.export.min_block,
            direct: false,
            read_piece: None,
        }
    }

    /// Its address and the export's name.
    fn identity(&self) -> Identity {
        let options = &self.remote.options;
        Identity::of_key(format!("NBD export `{}` of {}", options.export, options.address))
    }

    fn place(&self) -> String {
        self.remote.options.address.to_string()
    }

    fn device_identity(&self) -> Option<DeviceIdentity> {
        Some(DeviceIdentity::Server(self.remote.options.address.to_string()))
    }

    #[inline]
    fn tracking(&self) -> Option<&Tracking> {
        Some(&self.tracking)
    }

    fn bounce_bytes(&self, offset: u64, length: usize) -> usize {
        unaligned::bounce_bytes(self.block(), offset, length)
    }

    async fn read(&self, io: &Io, buf: Buf, offset: u64) -> BufResult {
        if self.is_aligned(offset, buf.len() as u64) {
            return self.read_whole(io, buf, offset).await;
        }
        // Boxed, because it would enlarge the future of every request.
        Box::pin(unaligned::read(self, io, buf, offset)).await
    }

    async fn write(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        let Some(lock) = &self.unaligned else {
            return self.write_whole(io, buf, offset, fua).await;
        };
        if self.is_aligned(offset, buf.len() as u64) {
            let _shared = lock.read().await;
            return self.write_whole(io, buf, offset, fua).await;
        }
        let _alone = lock.write().await;
        // Boxed, as in `read`.
        Box::pin(unaligned::write(self, io, buf, offset, fua)).await
    }

    async fn flush(&self, io: &Io) -> Result<(), BlockError> {
        self.flush_server(io).await?;
        match self.remote.shared.take_lost() {
            Some(lost) => {
                let source = io::Error::other(lost);
                Err(BlockError::from_io(source, Operation::Flush, 0, self.size()))
            }
            None => Ok(()),
        }
    }

    async fn discard(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        // Parts of blocks are not discarded.
        let start = offset.next_multiple_of(self.block());
        let end = (offset + length) - (offset + length) % self.block();
        if !self.offers(TransmissionFlags::SEND_TRIM) || start >= end {
            return Ok(());
        }
        let shared = match &self.unaligned {
            Some(lock) => Some(lock.read().await),
            None => None,
        };
        let what = (Command::Trim, CommandFlags::NONE);
        let result = self.submit_range(io, what, start, end - start).await;
        drop(shared);
        result.map_err(|failure| self.error(failure, Operation::Discard, offset, length))
    }

    /// By the server: what remains is nothing, parts of blocks, or all.
    async fn zero_range(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
    ) -> Result<Remaining, BlockError> {
        let end = offset + length;
        let can = self.offers(TransmissionFlags::SEND_WRITE_ZEROES);
        let fast = self.offers(TransmissionFlags::SEND_FAST_ZERO);
        if flags.fast_only && !(can && fast && self.is_aligned(offset, length)) {
            let kind = ErrorKind::Unsupported;
            return Err(BlockError::new(kind, Operation::WriteZeroes, offset, length));
        }
        if !can {
            return Ok([offset..end, end..end]);
        }
        let head = offset.next_multiple_of(self.block()).min(end);
        let tail = (end - end % self.block()).max(head);
        let shared = match &self.unaligned {
            Some(lock) => Some(lock.read().await),
            None => None,
        };
        let command_flags = CommandFlags::NONE
            .with_if(!flags.may_unmap, CommandFlags::NO_HOLE)
            .with_if(flags.fast_only, CommandFlags::FAST_ZERO);
        let what = (Command::WriteZeroes, command_flags);
        let result = self.submit_range(io, what, head, tail - head).await;
        drop(shared);
        result.map_err(|failure| self.error(failure, Operation::WriteZeroes, offset, length))?;
        Ok([offset..head, tail..end])
    }

    /// Without allocating memory.
    async fn zero_blocks(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        let _shared = match &self.unaligned {
            Some(lock) => Some(lock.read().await),
            None => None,
        };
        let request = RemoteRequest {
            command: Command::Write,
            flags: CommandFlags::NONE,
            offset,
            length: u32::try_from(length).unwrap_or(u32::MAX),
            at: 0,
            limit: 0,
            zeroes: true,
        };
        let result = self.routes.request(io, request, None).await.result;
        result.map_err(|failure| self.error(failure, Operation::WriteZeroes, offset, length))
    }

    /// The most bytes of one write.
    fn zero_blocks_max(&self) -> u64 {
        u64::from(self.remote.export.max_block)
    }

    async fn extents(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        if self.remote.export.allocation.is_none() || length == 0 {
            return Ok(vec![Extent { offset, length, hole: false }]);
        }
        let end = offset + length;
        let fail = |failure| self.error(failure, Operation::Extents, offset, length);
        // With the flag the server returns exactly one extent, as long as it can.
        let one = CommandFlags::NONE.with_if(limit == 1, CommandFlags::REQ_ONE);
        let rounds = if limit == 1 { 1 } else { STATUS_REQUESTS };
        let mut list: Vec<Extent> = Vec::new();
        let mut at = offset;
        for _ in 0..rounds {
            if at >= end || list.len() > limit {
                break;
            }
            let start = at - at % self.block();
            let until = end.next_multiple_of(self.block()).min(start + STATUS_MAX);
            let what = (Command::BlockStatus, one);
            let outcome = self.submit(io, what, (start, until - start)).await.map_err(fail)?;
            let before = at;
            for extent in outcome.extents {
                let (from, to) = (extent.offset.max(at), (extent.offset + extent.length).min(end));
                if from < to {
                    push_extent(&mut list, Extent { offset: from, length: to - from, ..extent });
                    at = to;
                }
            }
            if at == before {
                return Err(fail(RequestFailure::Protocol("block status without an extent")));
            }
        }
        let mut list = whole_sectors(list);
        list.truncate(limit);
        Ok(list)
    }

    async fn prefetch(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        if !self.offers(TransmissionFlags::SEND_CACHE) || length == 0 {
            return Ok(());
        }
        let start = offset - offset % self.block();
        let end = (offset + length).next_multiple_of(self.block());
        let what = (Command::Cache, CommandFlags::NONE);
        let result = self.submit_range(io, what, start, end - start).await;
        result.map_err(|failure| self.error(failure, Operation::Prefetch, offset, length))
    }

    /// True for a server that did not answer, or whose lost writes are to be reported ([`LostWrites`]): only one flush
    /// fails for that. False for an error that the server returned.
    fn later_flushes(&self, error: &BlockError) -> LaterFlushes {
        let Some(source) = &error.source else { return LaterFlushes::Succeed };
        match source.get_ref().and_then(|cause| cause.downcast_ref::<LostChanges>()) {
            Some(lost) if lost.reported => LaterFlushes::Fail,
            Some(_) => LaterFlushes::Hide,
            None if source.raw_os_error().is_some() => LaterFlushes::Fail,
            None => LaterFlushes::Succeed,
        }
    }

    /// An error of a write with the flag FUA could be the error of other data, and every later
    /// flush would have to fail: the flag is used only for a server that offers it and no flush.
    fn has_fua_by_flush(&self) -> bool {
        self.offers(TransmissionFlags::SEND_FLUSH) || !self.offers(TransmissionFlags::SEND_FUA)
    }

    async fn check_resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        let size = self.size_of_export(io).await?;
        let to = order.to.unwrap_or(size);
        check_size_change(self.size(), to, self.block(), order.shrink)?;
        if to == size { Ok(to) } else { Err(ResizeError::Server { size }) }
    }

    /// Uses the size of the server's export. A connection that knows a smaller one is replaced when a request needs it.
    async fn resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        let to = self.check_resize(io, order).await?;
        self.remote.size.store(to, Ordering::SeqCst);
        self.remote.size_seen.store(to, Ordering::SeqCst);
        Ok(to)
    }

    /// Changes that were acknowledged and not flushed stay counted in [`StoreState::unflushed`].
    fn abort(&self) {
        self.remote.shared.abort();
        self.remote.first.close();
    }
}

impl Blocks for NbdStore {
    fn block(&self) -> u64 {
        u64::from(self.remote.export.min_block)
    }

    fn read_blocks(&self, io: &Io, buf: Buf, offset: u64) -> impl Future<Output = BufResult> {
        self.read_whole(io, buf, offset)
    }

    fn write_blocks(
        &self,
        io: &Io,
        buf: Buf,
        offset: u64,
        fua: bool,
    ) -> impl Future<Output = BufResult> {
        self.write_whole(io, buf, offset, fua)
    }
}

/// The TLS configuration of connections to the server at `address`.
fn client_tls(address: &NbdAddress, tls: &NbdTls) -> Result<ClientTls, TlsError> {
    let host = tls.hostname.clone().or_else(|| match address {
        // A certificate has no zones.
        NbdAddress::Tcp { host, .. } => host.split('%').next().map(str::to_owned),
        NbdAddress::Unix(_) => None,
    });
    ClientTls::new(&tls.keys, host, tls.verify)
}
