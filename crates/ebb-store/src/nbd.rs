//! A remote export as a store: an NBD client.
//!
//! Answers the published protocol as a client: fixed newstyle with `NBD_OPT_GO`, block sizes,
//! structured replies, `base:allocation`, FUA, TRIM, WRITE_ZEROES (fast, without holes), CACHE, TLS.
//!
//! # What is promised
//! - A read succeeds when each of its bytes has come exactly once; whatever else a server says is an
//!   error of that request, and ends the connection. No length, offset or count of a server
//!   reaches an allocation or an index unchecked.
//! - A lost connection is made again, for ever, with waiting times that double up to two seconds.
//!   Requests under way are asked again: reads, and writes, zeroes and discards that were not
//!   acknowledged, which doing twice does not change. What cannot be answered within
//!   [`NbdOptions::reconnect`] fails.
//! - **A flush covers what was acknowledged**, on earlier connections, too, as far as a client can
//!   know. A server may keep what it acknowledged in a volatile cache until a flush, and a client cannot
//!   tell a lost network from a server that began anew. So:
//!   - [`LostWrites::Flush`] (the default): the first request of a new connection is a flush, and
//!     nothing else is asked before it has succeeded. If it fails, the next flush of the store does.
//!     This covers everything where the server lived on, and where its process was killed and had
//!     handed its writes to its kernel (files, block devices). It does not cover a crash of the server's
//!     *host*, nor a server killed with a write-back cache of its own.
//!   - [`LostWrites::Report`]: where changes were acknowledged and not flushed when a connection was
//!     lost, the next flush fails, once, and says how many. For servers of the second kind.
//! - A server that offers no flush has nothing to flush by its own account: `flush` succeeds.
//! - An export that comes back with another size, smaller blocks or fewer abilities is not used:
//!   the attempt counts as failed, and the reason is in [`StoreState::last_error`].
//! - A server that still executes a request of a lost connection after the same request was
//!   acknowledged on a new one can undo a later write. The protocol has no fence against it; servers
//!   avoid it by ending the requests of a connection before they let go of it.
//! - A server that is told to stop and waits for its clients is let go: when one connection hears
//!   `NBD_ESHUTDOWN`, or cannot be made, those at rest ask for a flush, and hear it, too.
//! - A server that vanishes from a TCP network is noticed within a minute. One that keeps a connection up
//!   and never answers is waited for, and [`StoreState::silent_seconds`] tells of it; with
//!   [`NbdOptions::silence`] its connection counts as lost after that time. There is no such limit by
//!   default: a server that is only slow may still execute what it was asked on the connection that was
//!   given up, after later writes on the next one (see above). A limit is for servers of which it is
//!   known that they do not, or where failing is better than waiting.

mod backoff;
mod connect;
mod export;
mod handshake;
mod link;
mod options;
mod reply;
mod route;
#[cfg(feature = "sim")]
pub(crate) mod sim;
mod slots;
mod state;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::blocks::BlockOrder;
use ebb_io::{Buf, Io};
use ebb_nbd_proto::{Command, CommandFlags, Errno, TransmissionFlags};
use ebb_tls::{ClientTls, TlsError};

use crate::syncs::Syncs;
use crate::unaligned::{self, Blocks};
use crate::zeroes::{Left, Zeroing};
use crate::{
    BlockError, BufResult, Capabilities, ErrorKind, Extent, Operation, SECTOR, Watched, ZeroFlags,
    push_extent,
};
use link::Remote;
pub use options::{
    LostWrites, NbdAddress, NbdError, NbdOptions, NbdTls, NbdTlsKeys, RECONNECT_DEFAULT,
};
use route::Routes;
use slots::{Failure, Outcome, Request};
use state::Shared;
pub use state::StoreState;

/// The longest range of a request without data: below 2^32, and a multiple of every block size.
const RANGE_MAX: u64 = 1 << 30;
/// Extents asked for at a time.
const EXTENTS_AT_ONCE: usize = 4096;
/// The longest range of a question for block status: as [`RANGE_MAX`], fewer questions for large holes.
const STATUS_MAX: u64 = 1 << 31;
/// Questions for one request for block status. An answer may end before the range it is about ("the
/// server MAY return fewer extents"), and who asked goes on from there: a large export keeps no request, no
/// client and no stop for longer than this. Enough for a request of 32 bits in one answer.
const STATUS_ROUNDS: usize = 4;

/// An export of an NBD server.
#[derive(Debug)]
pub struct NbdStore {
    remote: Arc<Remote>,
    routes: Routes,
    /// Held shared by aligned writes and alone by unaligned ones; `None` where all are aligned.
    unaligned: Option<BlockOrder>,
    syncs: Syncs,
    zeroing: Zeroing,
    watched: Watched,
}

impl Drop for NbdStore {
    fn drop(&mut self) {
        self.remote.shared.close();
    }
}

impl NbdStore {
    /// Connects once to learn what the export is; blocks, for ten seconds at most. Workers connect
    /// by themselves when they first need to, and from then on again whenever it must be.
    ///
    /// # Errors
    /// [`NbdError`], each with a remedy. A server that is not there is an error here, as a file
    /// that is not there: who starts the daemon decides whether to try again.
    pub fn open(options: NbdOptions) -> Result<(NbdStore, Vec<String>), NbdError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let tls = options.tls.as_ref().map(|tls| client_tls(&options.address, tls)).transpose()?;
        let export = connect::connect(&options, tls.as_ref())?.goodbye();
        let mut notes = Vec::new();
        if !export.offers(TransmissionFlags::SEND_FLUSH) && !options.read_only {
            notes.push("the server offers no flush: writes are as stable as it makes them".into());
        }
        if !export.offers(TransmissionFlags::CAN_MULTI_CONN) {
            notes.push("the server allows one connection: workers share it".into());
        }
        let unaligned = (u64::from(export.min_block) > SECTOR).then(BlockOrder::default);
        let shared = Shared::new(options.lost_writes);
        let remote = Arc::new(Remote { options, tls, export, shared });
        let routes = Routes::new(NEXT.fetch_add(1, Ordering::Relaxed), remote.clone());
        let (syncs, zeroing, watched) = Default::default();
        Ok((NbdStore { remote, routes, unaligned, syncs, zeroing, watched }, notes))
    }

    /// Which store it is: its address and the export's name.
    pub(crate) fn identity(&self) -> crate::Identity {
        let options = &self.remote.options;
        crate::Identity::of_key(format!("NBD export `{}` of {}", options.export, options.address))
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        self.remote.export.size
    }

    /// Gives the store up, from any thread: what waits for the server fails at once, whatever it waits
    /// for, and so does all that comes later. What was acknowledged and not flushed stays counted in
    /// [`StoreState::unflushed`].
    pub fn abort(&self) {
        self.remote.shared.abort();
    }

    pub(crate) fn syncs(&self) -> &Syncs {
        &self.syncs
    }

    pub(crate) fn zeroing(&self) -> &Zeroing {
        &self.zeroing
    }

    /// The most one write may move, bytes.
    pub(crate) fn write_most(&self) -> u64 {
        u64::from(self.remote.export.max_block)
    }

    /// How the connections fare.
    pub fn state(&self) -> StoreState {
        self.remote.shared.state(self.remote.options.address.to_string())
    }

    pub(crate) fn capabilities(&self) -> Capabilities {
        Capabilities {
            discard: self.offers(TransmissionFlags::SEND_TRIM),
            fast_zero: self.offers(TransmissionFlags::SEND_WRITE_ZEROES),
            alignment: self.remote.export.min_block,
            direct: false,
            read_piece: None,
        }
    }

    pub(crate) fn watched(&self) -> &Watched {
        &self.watched
    }

    fn offers(&self, flag: TransmissionFlags) -> bool {
        self.remote.export.offers(flag)
    }

    fn is_aligned(&self, offset: u64, length: u64) -> bool {
        offset.is_multiple_of(self.block()) && length.is_multiple_of(self.block())
    }

    /// See [`bounce_bytes`](crate::Store::bounce_bytes).
    pub(crate) fn bounce_bytes(&self, offset: u64, length: usize) -> usize {
        unaligned::bounce_bytes(self.block(), offset, length)
    }

    /// Asks once.
    async fn ask(
        &self,
        io: &Io,
        (command, flags): (Command, CommandFlags),
        (offset, length): (u64, u64),
    ) -> Result<Outcome<Buf>, Failure> {
        // Callers keep to RANGE_MAX.
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        let limit = EXTENTS_AT_ONCE;
        let request = Request { command, flags, offset, length, at: 0, limit, zeroes: false };
        let outcome = self.routes.request(io, request, None).await;
        match outcome.result {
            Ok(()) => Ok(outcome),
            Err(failure) => Err(failure),
        }
    }

    /// Asks for a range in as many requests as it takes.
    async fn ask_range(
        &self,
        io: &Io,
        what: (Command, CommandFlags),
        offset: u64,
        length: u64,
    ) -> Result<(), Failure> {
        let end = offset + length;
        let mut at = offset;
        while at < end {
            let count = (end - at).min(RANGE_MAX);
            self.ask(io, what, (at, count)).await?;
            at += count;
        }
        Ok(())
    }

    fn error(
        &self,
        failure: Failure,
        operation: Operation,
        offset: u64,
        length: u64,
    ) -> BlockError {
        let source = match failure {
            Failure::Server(code) => {
                // What the protocol does not name is an I/O error.
                let code =
                    if code == Errno::Overflow.to_wire() { Errno::Io.to_wire() } else { code };
                io::Error::from_raw_os_error(match i32::try_from(code) {
                    Ok(code @ (1 | 5 | 12 | 22 | 28 | 95)) => code,
                    _ => libc::EIO,
                })
            }
            Failure::Broken(what) => {
                let address = &self.remote.options.address;
                io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("NBD server {address} broke the protocol: {what}"),
                )
            }
            Failure::Lost if self.remote.shared.is_aborted() => {
                let address = &self.remote.options.address;
                let what = format!("given up before the NBD server {address} answered");
                let source = Some(io::Error::new(io::ErrorKind::Interrupted, what));
                let error = BlockError::new(ErrorKind::Closing, operation, offset, length);
                return BlockError { source, ..error };
            }
            Failure::Lost => {
                let limit = self.remote.options.reconnect.as_secs_f64();
                let last = self.remote.shared.last_error();
                io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("no answer from the NBD server within {limit} s: {last}"),
                )
            }
        };
        BlockError::from_io(source, operation, offset, length)
    }

    pub(crate) async fn read(&self, io: &Io, buf: Buf, offset: u64) -> BufResult {
        if self.is_aligned(offset, buf.len() as u64) {
            return self.read_whole(io, buf, offset).await;
        }
        // In a box, since every request in flight holds what its longest way needs.
        Box::pin(unaligned::read(self, io, buf, offset)).await
    }

    async fn read_whole(&self, io: &Io, buf: Buf, offset: u64) -> BufResult {
        self.transfer(io, (Command::Read, CommandFlags::NONE), buf, offset, Operation::Read).await
    }

    async fn write_whole(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        let by_flag = fua && self.offers(TransmissionFlags::SEND_FUA);
        let flags = CommandFlags::NONE.with_if(by_flag, CommandFlags::FUA);
        let what = (Command::Write, flags);
        let (mut result, buf) = self.transfer(io, what, buf, offset, Operation::Write).await;
        if fua && !by_flag && result.is_ok() {
            result = self.flush(io).await;
        }
        (result, buf)
    }

    /// Moves the whole buffer in requests the server takes.
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
            let request = Request { command, flags, offset, length, at, limit: 0, zeroes: false };
            let outcome = self.routes.request(io, request, Some(buf)).await;
            let fail = |failure| self.error(failure, operation, offset, u64::from(length));
            buf = match outcome.buf {
                Some(buf) => buf,
                // Only a worker that ends keeps a buffer; who asked ends with it.
                None => return (Err(fail(Failure::Lost)), io.pool().take(whole).await),
            };
            if let Err(failure) = outcome.result {
                return (Err(fail(failure)), buf);
            }
            at += count;
        }
        (Ok(()), buf)
    }

    pub(crate) async fn write(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        let Some(lock) = &self.unaligned else {
            return self.write_whole(io, buf, offset, fua).await;
        };
        if self.is_aligned(offset, buf.len() as u64) {
            let _shared = lock.read().await;
            return self.write_whole(io, buf, offset, fua).await;
        }
        let _alone = lock.write().await;
        // In a box, as there.
        Box::pin(unaligned::write(self, io, buf, offset, fua)).await
    }

    pub(crate) async fn flush(&self, io: &Io) -> Result<(), BlockError> {
        if self.remote.options.read_only || !self.offers(TransmissionFlags::SEND_FLUSH) {
            return Ok(());
        }
        let shared = &self.remote.shared;
        let mark = shared.mark();
        let asked = self.ask(io, (Command::Flush, CommandFlags::NONE), (0, 0)).await;
        asked.map_err(|failure| self.error(failure, Operation::Flush, 0, self.size()))?;
        if let Some(what) = shared.take_lost() {
            let source = io::Error::other(what);
            return Err(BlockError::from_io(source, Operation::Flush, 0, self.size()));
        }
        shared.cover(mark);
        Ok(())
    }

    pub(crate) async fn discard(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
    ) -> Result<(), BlockError> {
        // Parts of blocks stay.
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
        let result = self.ask_range(io, what, start, end - start).await;
        drop(shared);
        result.map_err(|failure| self.error(failure, Operation::Discard, offset, length))
    }

    /// Has the server make zeroes, and says what is left to write out: nothing, parts of blocks, or all.
    pub(crate) async fn zero_quickly(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
    ) -> Result<Left, BlockError> {
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
        let result = self.ask_range(io, what, head, tail - head).await;
        drop(shared);
        result.map_err(|failure| self.error(failure, Operation::WriteZeroes, offset, length))?;
        Ok([offset..head, tail..end])
    }

    /// Writes zeroes over whole blocks, at most [`NbdStore::write_most`] bytes; no memory is needed.
    pub(crate) async fn zero_blocks(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
    ) -> Result<(), BlockError> {
        let _shared = match &self.unaligned {
            Some(lock) => Some(lock.read().await),
            None => None,
        };
        let request = Request {
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

    pub(crate) async fn extents(
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
        // With the flag the server says one extent, and as far as it goes.
        let one = CommandFlags::NONE.with_if(limit == 1, CommandFlags::REQ_ONE);
        let rounds = if limit == 1 { 1 } else { STATUS_ROUNDS };
        let mut list: Vec<Extent> = Vec::new();
        let mut at = offset;
        for _ in 0..rounds {
            if at >= end || list.len() > limit {
                break;
            }
            let start = at - at % self.block();
            let until = end.next_multiple_of(self.block()).min(start + STATUS_MAX);
            let what = (Command::BlockStatus, one);
            let outcome = self.ask(io, what, (start, until - start)).await.map_err(fail)?;
            let before = at;
            for extent in outcome.extents {
                let (from, to) = (extent.offset.max(at), (extent.offset + extent.length).min(end));
                if from < to {
                    push_extent(&mut list, Extent { offset: from, length: to - from, ..extent });
                    at = to;
                }
            }
            if at == before {
                return Err(fail(Failure::Broken("block status without an extent")));
            }
        }
        list.truncate(limit);
        Ok(list)
    }

    pub(crate) async fn prefetch(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
    ) -> Result<(), BlockError> {
        if !self.offers(TransmissionFlags::SEND_CACHE) || length == 0 {
            return Ok(());
        }
        let start = offset - offset % self.block();
        let end = (offset + length).next_multiple_of(self.block());
        let what = (Command::Cache, CommandFlags::NONE);
        let result = self.ask_range(io, what, start, end - start).await;
        result.map_err(|failure| self.error(failure, Operation::Prefetch, offset, length))
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

/// What encrypted connections to the server at `address` are made from.
fn client_tls(address: &NbdAddress, tls: &NbdTls) -> Result<ClientTls, TlsError> {
    let host = tls.hostname.clone().or_else(|| match address {
        NbdAddress::Tcp { host, .. } => Some(host.clone()),
        NbdAddress::Unix(_) => None,
    });
    ClientTls::new(&tls.keys, host, tls.verify)
}
