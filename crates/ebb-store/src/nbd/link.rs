//! One connection of one worker: connect, serve, detect its loss, wait, connect again.
//!
//! A supervisor task runs as long as the store or the worker. While a connection is up it receives,
//! and a second task sends. When the connection ends, for whatever reason, both directions are shut
//! down, all buffers are returned, and requests without a reply are submitted again on the next
//! connection, in no particular order: none of them was acknowledged, so none has an order.
//!
//! Invariants:
//! - At most [`IN_FLIGHT`] requests have a slot; further ones wait for one.
//! - A request fails for lack of a connection when there has been none for `reconnect`, and at once
//!   while that lasts; attempts to connect continue without limit. It also fails if it was without a
//!   reply for that long since it lost a connection, or waited for a slot meanwhile.
//! - Before any other request is sent on a new connection, it is flushed if there is something that
//!   a flush would have covered on the old one.
//! - While requests are in flight, it is checked each second whether the server replies; an idle
//!   connection has no timer.

mod receive_buffer;
mod renew;
mod watch;

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ebb_advice::Advised;
use ebb_io::{Budget, BudgetGuard, Buf, Gather, Io, PollSource, Signal, fd_from};
use ebb_nbd_proto::{Command, CommandFlags, REQUEST_LEN, TransmissionFlags, magic};
use ebb_tls::{ClientTls, Transport};

use super::backoff::Backoff;
use super::census::Counted;
use super::connect::{ATTEMPT, Connected, connect_off_worker};
use super::export::RemoteExport;
use super::first::FirstConnection;
use super::options::{LostWrites, NbdError, NbdOptions};
use super::reply::{FRAME_MAX, ProtocolViolation, ReplyFrame, decode};
use super::slots::{
    Cookie, RemoteRequest, ReplyStep, RequestFailure, RequestOutcome, RequestSlots,
};
use super::state::RemoteState;
use receive_buffer::{ReceiveBuffer, ReceiveError};
use renew::FIRST_HOLD;

/// The most requests in flight on one connection.
pub(crate) const IN_FLIGHT: usize = 128;
/// Bytes received at a time when the next frame is not known to be large.
const STAGE_BYTES: usize = 16 << 10;
/// A connection that lasted this long counts as successful, whether or not it had requests.
const STABLE_CONNECTION: Duration = Duration::from_secs(5);
/// The time limit for sending `NBD_CMD_DISC`.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// The most bytes of data in one message.
const BATCH_BYTES: usize = 1 << 20;
/// Pieces of a message that a request takes: its header, and its buffer or zeroes.
const PARTS_MOST: usize = 2 + Gather::zero_parts(ebb_block::PIECE_BYTES);

/// Shared by the links of a store.
#[derive(Debug)]
pub(crate) struct Remote {
    pub(crate) options: NbdOptions,
    pub(crate) tls: Option<ClientTls>,
    /// The export as it was when the store was opened, but for its size.
    pub(crate) export: RemoteExport,
    /// The size in use, bytes: that of the export when the store was opened or last resized.
    pub(crate) size: AtomicU64,
    /// The size of the export when a worker last connected, bytes.
    pub(crate) size_seen: AtomicU64,
    pub(crate) shared: RemoteState,
    /// The connection on which the store was opened.
    pub(crate) first: FirstConnection,
}

/// The end of a connection.
struct ConnectionEnd {
    /// Why it ended.
    reason: String,
    /// The server ever replied.
    served: bool,
    /// The server did not reply for too long, and may still run.
    silent: bool,
}

impl Remote {
    pub(crate) fn size(&self) -> u64 {
        self.size.load(Ordering::SeqCst)
    }

    /// Whether each worker has a connection of its own.
    pub(crate) fn has_several_connections(&self) -> bool {
        self.export.offers(TransmissionFlags::CAN_MULTI_CONN)
            && self.options.lost_writes == LostWrites::Flush
    }
}

/// Held by a request in flight.
struct InFlightGuard {
    _room: BudgetGuard,
    remote: Arc<Remote>,
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.remote.shared.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One worker's connection.
pub(crate) struct Link {
    remote: Arc<Remote>,
    slots: RefCell<RequestSlots<Buf, InFlightGuard>>,
    room: Rc<Budget>,
    /// The socket, which the worker polls for replies that come quickly.
    source: PollSource,
    /// There is something to send, or the connection has ended.
    work: Signal,
    /// No timer checks whether the server replies, until `busy` is signalled.
    idle: Cell<bool>,
    busy: Signal,
    /// When the server last replied, or when a request ended an idle time.
    last_reply: Cell<Instant>,
    /// The connection is being closed because the server has been silent for this long.
    silence_limit_reached: Cell<Option<Duration>>,
    /// The size of the export for the current connection, bytes; without a connection all requests fit.
    connection_size: Cell<u64>,
    /// The current connection is to be replaced by one that knows the larger size.
    outgrown: Cell<bool>,
    /// The link itself has ended the last connection, to replace it: nothing that was sent on it lacks a reply.
    replaced: Cell<bool>,
    /// The current connection is to end.
    closing: Cell<bool>,
    /// No connection for longer than the limit: requests fail at once.
    down: Cell<bool>,
    ended: Cell<bool>,
}

impl Link {
    /// Starts the supervisor on this worker; `at_end` runs when it ends.
    pub(crate) fn start(io: &Io, remote: Arc<Remote>, at_end: impl FnOnce() + 'static) -> Rc<Link> {
        let link = Rc::new(Link {
            remote,
            slots: RefCell::default(),
            room: Budget::new(IN_FLIGHT),
            source: io.poll_source(),
            work: Signal::default(),
            idle: Cell::new(false),
            busy: Signal::default(),
            last_reply: Cell::new(ebb_io::clock::now()),
            silence_limit_reached: Cell::new(None),
            connection_size: Cell::new(u64::MAX),
            outgrown: Cell::new(false),
            replaced: Cell::new(false),
            closing: Cell::new(false),
            down: Cell::new(false),
            ended: Cell::new(false),
        });
        let guard = SupervisorGuard { link: link.clone(), at_end: Some(at_end) };
        let (own, own_io) = (link.clone(), io.clone());
        let supervisor = async move {
            own.supervise(&own_io).await;
            drop(guard);
        };
        io.spawn(supervisor).detach();
        link
    }

    /// Submits a request and waits for its reply.
    pub(crate) async fn request(
        &self,
        request: RemoteRequest,
        buf: Option<Buf>,
    ) -> RequestOutcome<Buf> {
        let mut waiting = None;
        let room = match self.room.try_take(1) {
            Some(room) => room,
            None => {
                waiting = Some(ebb_io::clock::now());
                self.room.take(1).await
            }
        };
        let lost = self.slots.borrow().lost_since(waiting);
        let overdue =
            lost.is_some_and(|at| ebb_io::clock::since(at) > self.remote.options.reconnect);
        if overdue || self.down.get() || self.ended.get() {
            return RequestOutcome { result: Err(RequestFailure::Lost), buf, extents: Vec::new() };
        }
        if request.end() > self.connection_size.get() {
            self.outgrown.set(true);
        }
        self.remote.shared.in_flight.fetch_add(1, Ordering::Relaxed);
        let held = InFlightGuard { _room: room, remote: self.remote.clone() };
        let cookie = self.slots.borrow_mut().push(request, buf, Some(held), lost);
        self.work.set();
        self.wait(cookie).await
    }

    async fn wait(&self, cookie: Cookie) -> RequestOutcome<Buf> {
        let mut pending = AbandonOnDrop { link: self, cookie: Some(cookie) };
        let outcome = poll_fn(|cx| self.slots.borrow_mut().poll(cookie, cx)).await;
        pending.cookie = None;
        outcome
    }

    async fn supervise(self: &Rc<Self>, io: &Io) {
        let remote = self.remote.clone();
        let limit = remote.options.reconnect;
        let mut backoff = Backoff::new(remote.options.jitter_seed);
        let mut lost_at = ebb_io::clock::now();
        let mut again = false;
        while !remote.shared.is_closed() {
            let Some(attempted) = remote.shared.unless_closed(self.attempt(io, lost_at)).await
            else {
                break;
            };
            match attempted {
                Ok(connected) => {
                    self.down.set(false);
                    let since = ebb_io::clock::now();
                    // The server was not lost when this connection was made.
                    let continues = self.replaced.get();
                    let ConnectionEnd { reason, served, silent } =
                        self.serve(io, connected, again).await;
                    again = true;
                    let idle = !self.slots.borrow().has_sent();
                    let stable = ebb_io::clock::since(since) >= STABLE_CONNECTION;
                    if served || idle || stable || continues {
                        backoff.reset();
                        lost_at = ebb_io::clock::now();
                    }
                    if self.replaced.get() {
                        continue;
                    }
                    self.slots.borrow_mut().replay(ebb_io::clock::now(), limit);
                    remote.shared.note_error(&reason, silent);
                }
                Err(error) => {
                    if self.replaced.take() {
                        // Nothing is to be sent again; the queued requests are without a server from now on.
                        self.slots.borrow_mut().replay(ebb_io::clock::now(), limit);
                        remote.shared.count_lost();
                    }
                    remote.shared.note_attempt(&error);
                    remote.shared.request_probe_limited();
                }
            }
            if remote.shared.is_closed() {
                break;
            }
            let left = limit.saturating_sub(ebb_io::clock::since(lost_at));
            let _ = remote.shared.unless_closed(self.pause(io, backoff.next(), left)).await;
        }
    }

    /// Waits before the next attempt. If the time limit expires meanwhile, waiting requests fail.
    async fn pause(&self, io: &Io, pause: Duration, left: Duration) {
        if !self.down.get() && left <= pause {
            io.sleep(left).await;
            self.give_up();
            io.sleep(pause.saturating_sub(left)).await;
        } else {
            io.sleep(pause).await;
        }
    }

    /// One attempt, which may be dropped. If the time limit expires meanwhile, waiting requests
    /// fail.
    async fn attempt(&self, io: &Io, lost_at: Instant) -> Result<Connected, NbdError> {
        let connect = async {
            match self.first(io).await {
                Some(first) => Ok(first),
                None => connect_off_worker(io, self.remote.clone()).await,
            }
        };
        let mut attempt = std::pin::pin!(connect);
        let mut left = self.remote.options.reconnect.saturating_sub(ebb_io::clock::since(lost_at));
        if self.replaced.get() {
            // The link itself has ended the connection: the server is not lost.
            left = left.max(ATTEMPT);
        }
        let connected = if self.down.get() {
            attempt.await
        } else if let Some(result) = io.timeout(left, attempt.as_mut()).await {
            result
        } else {
            self.give_up();
            attempt.await
        };
        let connected = connected?;
        let remote = &self.remote;
        remote.export.replaced_by(&connected.export, remote.size(), &remote.options)?;
        remote.size_seen.store(connected.export.size, Ordering::SeqCst);
        Ok(connected)
    }

    /// The connection on which the store was opened, if no other worker has it and it fits.
    async fn first(&self, io: &Io) -> Option<Connected> {
        let remote = &self.remote;
        if !remote.first.is_kept() {
            return None;
        }
        let taken = remote.clone();
        let connected = io.offload(move || taken.first.take()).await?;
        let fits = remote.export.replaced_by(&connected.export, remote.size(), &remote.options);
        if fits.is_err() {
            // The size was changed since.
            connected.disconnect();
            return None;
        }
        Some(connected)
    }

    fn give_up(&self) {
        self.down.set(true);
        self.slots.borrow_mut().fail_queued();
    }

    /// Serves one connection until it ends.
    async fn serve(self: &Rc<Self>, io: &Io, connected: Connected, again: bool) -> ConnectionEnd {
        let shared = &self.remote.shared;
        let fd = fd_from(connected.fd);
        let counted = Counted::connection();
        let id = shared.connected(&fd, again && !self.replaced.take());
        let transport = Rc::new(Transport::new(fd, connected.tls));
        let export = connected.export;
        self.closing.set(false);
        self.connection_size.set(export.size);
        self.slots.borrow_mut().agree(export.structured, export.allocation);
        let mark = shared.mark();
        let first = again && shared.is_dirty() && export.offers(TransmissionFlags::SEND_FLUSH);
        let flush = first.then(|| self.slots.borrow_mut().push_first(flush_request()));
        let (own, own_io, wire) = (self.clone(), io.clone(), transport.clone());
        let hold_back = Rc::new(Cell::new(first));
        let gate = hold_back.clone();
        let sender = io.spawn(async move { own.send(&own_io, &wire, &gate).await });
        let cover = flush.map(|cookie| {
            let own = self.clone();
            io.spawn(async move { own.cover(cookie, mark, &hold_back).await })
        });
        let (own, own_io, wire) = (self.clone(), io.clone(), transport.clone());
        let watch = io.spawn(async move { own.watch(&own_io, &wire, id).await });
        let mut end = ConnectionEnd { reason: "closed".to_owned(), served: false, silent: false };
        if !shared.is_closed() {
            end.reason = self.receive(io, &transport, &mut end.served).await;
        }
        watch.cancel().await;
        if let Some(silence) = self.silence_limit_reached.take() {
            let error = NbdError::Silent { seconds: silence.as_secs() };
            (end.reason, end.silent) = (Advised(error).to_string(), true);
        }
        self.wind_up(io, &transport, id, sender, cover).await;
        drop((transport, counted));
        end
    }

    async fn wind_up(
        &self,
        io: &Io,
        transport: &Transport,
        id: u64,
        sender: ebb_io::Task<()>,
        cover: Option<ebb_io::Task<()>>,
    ) {
        self.closing.set(true);
        self.connection_size.set(u64::MAX);
        self.outgrown.set(false);
        self.source.cancel();
        self.work.set();
        if self.remote.shared.is_closed() && !self.remote.shared.is_aborted() {
            let _ = io.timeout(DISCONNECT_TIMEOUT, sender).await;
        } else {
            // Wakes a sender that waits for room in the socket, so that it returns its buffers.
            transport.shut();
            sender.await;
        }
        if let Some(cover) = cover {
            cover.cancel().await;
        }
        transport.shut();
        self.remote.shared.disconnected(id, self.replaced.get());
    }

    /// Waits for the flush that comes first on a new connection, then permits other requests.
    async fn cover(&self, cookie: Cookie, mark: u64, hold_back: &Cell<bool>) {
        let result = self.wait(cookie).await.result;
        self.conclude_flush(result, mark, "the flush after reconnecting");
        hold_back.set(false);
        self.work.set();
    }

    async fn send(self: &Rc<Self>, io: &Io, transport: &Transport, hold_back: &Cell<bool>) {
        let mut message = Box::<Gather>::default();
        let mut away: Vec<Cookie> = Vec::with_capacity(IN_FLIGHT);
        let mut alone = hold_back.get();
        let mut hold = FIRST_HOLD;
        loop {
            if self.is_to_finish() && self.finish_requests(io, transport, &mut hold).await {
                self.replaced.set(true);
                break;
            }
            while !self.closing.get() && !self.is_to_finish() && self.has_work(alone, hold_back) {
                self.pack(&mut message, &mut away, alone);
                alone = false;
                let (result, returned) = transport.send(io, message).await;
                message = returned;
                self.source.wait();
                let mut slots = self.slots.borrow_mut();
                for (cookie, buf) in away.drain(..).zip(message.take_back()) {
                    slots.return_buf(cookie, buf);
                }
                drop(slots);
                if result.is_err() {
                    self.closing.set(true);
                    // The receiver reads the end of the stream, and returns the reason.
                    transport.shut();
                }
            }
            if self.closing.get() {
                break;
            }
            if transport.send_pending(io).await.is_err() {
                self.closing.set(true);
                transport.shut();
                break;
            }
            futures_lite::future::or(self.work.wait(), transport.wants_send()).await;
        }
        let closed = self.remote.shared.is_closed() && !self.remote.shared.is_aborted();
        if closed || self.replaced.get() {
            message.push_bytes(&disconnect_request());
            let _ = io.timeout(DISCONNECT_TIMEOUT, transport.send(io, message)).await;
        }
        if self.replaced.get() {
            transport.shut();
        }
    }

    fn has_work(&self, alone: bool, hold_back: &Cell<bool>) -> bool {
        let may = alone || !hold_back.get();
        may && self.slots.borrow().has_queued_within(self.end_of_requests())
    }

    /// Puts what is queued into one message; with `alone` only the first request.
    fn pack(&self, message: &mut Gather, away: &mut Vec<Cookie>, alone: bool) {
        let end = self.end_of_requests();
        let mut slots = self.slots.borrow_mut();
        if self.idle.replace(false) {
            self.last_reply.set(ebb_io::clock::now());
            self.busy.set();
        }
        while message.has_room(PARTS_MOST, REQUEST_LEN) && message.remaining() < BATCH_BYTES {
            let Some(next) = slots.next_to_send(end) else { return };
            if next.again {
                self.remote.shared.note_replayed();
            }
            message.push_bytes(&next.header);
            message.push_zeroes(next.zeroes);
            if let Some(buf) = next.payload {
                let index = message.hold(buf);
                message.push_range(index, next.range);
                away.push(next.cookie);
            }
            if alone {
                return;
            }
        }
    }

    /// Receives until the connection ends; returns the reason.
    async fn receive(&self, io: &Io, transport: &Transport, served: &mut bool) -> String {
        let mut stage =
            ReceiveBuffer { buf: Some(io.pool().take(STAGE_BYTES).await), start: 0, end: 0 };
        loop {
            let late = self.late_requests();
            match self.next_frame(io, transport, &mut stage).await {
                Ok(true) => {
                    *served = true;
                    // Replies to other requests do not hide that late ones get none.
                    if late == 0 || self.late_requests() < late {
                        self.last_reply.set(ebb_io::clock::now());
                    }
                }
                Ok(false) => {}
                Err(ReceiveError::ProtocolViolation(ProtocolViolation(what))) => {
                    return format!("the server violated the protocol: {what}");
                }
                Err(ReceiveError::ShuttingDown) => {
                    self.remote.shared.request_probe();
                    return "the server is shutting down".to_owned();
                }
                Err(ReceiveError::Io(error)) => return format!("the connection was lost: {error}"),
            }
        }
    }

    /// Receives one frame; true if it completes a request, or has data of one.
    async fn next_frame(
        &self,
        io: &Io,
        transport: &Transport,
        stage: &mut ReceiveBuffer,
    ) -> Result<bool, ReceiveError> {
        let (frame, used) = loop {
            if let Some(found) = decode(stage.bytes())? {
                break found;
            }
            stage.more(io, transport, FRAME_MAX).await?;
        };
        stage.start += used;
        let step = {
            let mut slots = self.slots.borrow_mut();
            if slots.is_shutdown_error(&frame) {
                return Err(ReceiveError::ShuttingDown);
            }
            slots.apply(&frame)?
        };
        let replies = frame.done || matches!(step, ReplyStep::Fill(_));
        match step {
            ReplyStep::Done => {}
            ReplyStep::Fill(range) => self.fill(io, transport, stage, &frame, range).await?,
            ReplyStep::Skip(count) => stage.skip(io, transport, count).await?,
            ReplyStep::Describe(entries) => {
                for _ in 0..entries {
                    let bytes = stage.take8(io, transport).await?;
                    self.slots.borrow_mut().describe(Cookie(frame.cookie), bytes)?;
                }
            }
        }
        if self.slots.borrow_mut().finish(&frame)? {
            self.remote.shared.acknowledge();
        }
        self.source.note_requests(1);
        if self.slots.borrow().has_sent() {
            self.source.wait();
        }
        if self.outgrown.get() {
            self.work.set();
        }
        Ok(replies)
    }

    /// The data of a read: what was received already is copied, the rest is received in place.
    async fn fill(
        &self,
        io: &Io,
        transport: &Transport,
        stage: &mut ReceiveBuffer,
        frame: &ReplyFrame,
        range: std::ops::Range<usize>,
    ) -> Result<(), ReceiveError> {
        let cookie = Cookie(frame.cookie);
        let Some(mut buf) = self.slots.borrow_mut().take_buf(cookie) else {
            return Err(ProtocolViolation("data for a request without a buffer").into());
        };
        let ready = stage.bytes().len().min(range.len());
        let rest = range.start + ready..range.end;
        buf[range.start..rest.start].copy_from_slice(&stage.bytes()[..ready]);
        stage.start += ready;
        let mut result = Ok(());
        if !rest.is_empty() {
            (result, buf) = transport.recv_exact(io, buf, rest).await;
        }
        self.slots.borrow_mut().return_buf(cookie, buf);
        result.map_err(ReceiveError::Io)
    }
}

/// A waiting request: dropping this abandons it.
struct AbandonOnDrop<'a> {
    link: &'a Link,
    cookie: Option<Cookie>,
}

impl Drop for AbandonOnDrop<'_> {
    fn drop(&mut self) {
        if let Some(cookie) = self.cookie {
            self.link.slots.borrow_mut().abandon(cookie);
        }
    }
}

/// Marks the end of the supervisor, also when its worker stops.
struct SupervisorGuard<F: FnOnce()> {
    link: Rc<Link>,
    at_end: Option<F>,
}

impl<F: FnOnce()> Drop for SupervisorGuard<F> {
    fn drop(&mut self) {
        self.link.ended.set(true);
        if let Ok(mut slots) = self.link.slots.try_borrow_mut() {
            slots.fail_all();
        }
        if let Some(at_end) = self.at_end.take() {
            at_end();
        }
    }
}

fn flush_request() -> RemoteRequest {
    RemoteRequest {
        command: Command::Flush,
        flags: CommandFlags::NONE,
        offset: 0,
        length: 0,
        at: 0,
        limit: 0,
        zeroes: false,
    }
}

/// `NBD_CMD_DISC`.
fn disconnect_request() -> [u8; REQUEST_LEN] {
    let mut bytes = [0; REQUEST_LEN];
    bytes[..4].copy_from_slice(&magic::REQUEST.to_be_bytes());
    bytes[6..8].copy_from_slice(&Command::Disconnect.to_wire().to_be_bytes());
    bytes
}
