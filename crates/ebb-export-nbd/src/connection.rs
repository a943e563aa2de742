//! The transmission phase of one connection: reads requests, starts them on request tasks, sends replies.
//!
//! # Invariants
//! - A request is copied once off the wire, checked once, and replied to exactly once.
//! - What a client can make the server hold is bounded: [`IN_FLIGHT_MAX`] requests, and the memory
//!   budget of the connection. While either is exhausted, the socket is not read; nor while a request waits for the
//!   volume's limits, which it does before memory is charged for it.
//! - A request that has begun runs to completion, even if the client has disconnected, and the
//!   connection ends after it: so closing a volume waits for every write. Three kinds of request are cancelled
//!   when the client disconnects: BLOCK_STATUS and CACHE, which change nothing, and zeroes that have to be written
//!   out. CACHE, which may take minutes, is also cancelled when the connection ends for another reason.

mod halt;
mod keep;
mod pieces;
mod stall;
mod throttle;

use std::cell::Cell;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ebb_export::{
    ErrorLine, ErrorLines, PIECE, REQUEST_BYTES, RequestRunner, RequestTask, RequestTasks,
};
use ebb_io::{
    Budget, BudgetGuard, Buf, BufPool, Io, PollSource, QueueShare, Signal, was_cancelled,
};
use ebb_tls::Transport;
use ebb_volume::{ErrorKind, RequestCost, RequestKind, Stop, ToldLosses, Volume};

use self::stall::StallDetector;
use crate::clients::{ConnectedClient, NbdConnectionId, count};
use crate::decode::{self, Decoded, Fatal, NbdRequest, RequestHeader};
use crate::handshake::Session;
use crate::kept::KeptConnections;
use crate::receiver::Receiver;
use crate::reply::{Reply, ReplyBody, ReplyTo, RequestMemory};
use crate::request_task::{ConnectionStops, NbdJob, RequestContext, STATUS_BYTES_MAX, execute};
use crate::sender::Sender;

/// Requests of one connection in flight at a time.
const IN_FLIGHT_MAX: usize = 256;
/// A connection that makes no progress within the data of a WRITE or of a reply for so many checks in a
/// row (one per `IDLE_AFTER`) is closed if requests of its volume wait for memory.
const STALLED: u32 = 5;
/// Fewer bytes than this between two checks do not count as progress.
const PROGRESS: usize = 64 << 10;
/// How long a connection must be idle before its request tasks end.
const IDLE_AFTER: Duration = Duration::from_secs(1);
/// How long a client may take to receive its last replies when the connection ends.
const LAST_REPLIES_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a client may take to close its side of the connection after the server has closed its own.
const LINGER: Duration = Duration::from_secs(1);
/// After so many refused requests the connection yields to other tasks of the worker.
const REFUSED_AT_ONCE: u64 = 32;

/// Why a transmission phase ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectionEnd {
    /// The client sent `NBD_CMD_DISC`.
    #[error("the client disconnected")]
    Disconnect,
    /// The client closed the connection between two requests.
    #[error("the client closed the connection")]
    Closed,
    /// The volume or the server is stopping.
    #[error("the volume is being closed")]
    Stopped,
    /// The client continues at the daemon's successor ([`Server::keep_connections`](crate::Server::keep_connections)).
    #[error("handed over")]
    Kept,
    /// An operator ended the connection ([`Server::end_client`](crate::Server::end_client)).
    #[error("disconnected by an operator")]
    ByOperator,
    /// The volume's `allow` has changed ([`Server::end_disallowed`](crate::Server::end_disallowed)).
    #[error("no entry of the volume's `allow` matches the client any more")]
    NotAllowed,
    /// It held memory that other requests waited for, and neither sent nor received.
    #[error("the client stalled within a request while other requests waited for its memory")]
    Stalled,
    /// The client violated the protocol.
    #[error(transparent)]
    Protocol(#[from] Fatal),
    /// The connection failed.
    #[error("the connection failed")]
    Broken(#[from] io::Error),
}

/// One client's transmission phase.
pub(crate) struct Connection {
    io: Io,
    volume: Arc<Volume>,
    session: Session,
    transport: Transport,
    memory: Rc<Budget>,
    /// All of it, bytes. A request that needs more is alone, and executed in pieces that fit.
    memory_bytes: usize,
    /// The volume's share of the memory for requests.
    queue_share: Rc<QueueShare>,
    /// The page pool of this connection.
    buffers: BufPool,
    tasks: RequestTasks<NbdJob>,
    sender: Sender,
    requests: Cell<u64>,
    /// The socket, which the worker polls while requests come quickly.
    source: PollSource,
    /// Set by the first request after an idle period.
    awake: Signal,
    idle: Cell<bool>,
    /// The reader waits with a receive buffer of more than one page.
    waits_large: Cell<bool>,
    stopping: Cell<bool>,
    /// Set with `stopping`, for a reader that waits for memory or for a request task.
    halt: Signal,
    stops: ConnectionStops,
    told: ToldLosses,
    stalled: Cell<bool>,
    /// The connection is to be kept for a successor: no further request is begun.
    keeping: Cell<bool>,
    /// Whether the payload of the request that is being accepted was begun to be received.
    payload_begun: Cell<bool>,
    /// Whether a WRITE's data is being received, and the bytes received so far, over all WRITEs.
    receiving: Cell<bool>,
    received: Cell<usize>,
    error_lines: ErrorLines,
    client: Arc<ConnectedClient>,
}

impl Connection {
    pub(crate) fn new(
        io: Io,
        volume: Arc<Volume>,
        session: Session,
        transport: Transport,
        buffers: BufPool,
        memory_bytes: usize,
        client: Arc<ConnectedClient>,
    ) -> Rc<Connection> {
        let share = volume.share(buffers.memory().shares()).clone();
        let source = io.poll_source();
        Rc::new(Connection {
            told: volume.told_losses(),
            io,
            volume,
            session,
            transport,
            memory: Budget::new(memory_bytes),
            memory_bytes,
            queue_share: QueueShare::new(share),
            buffers,
            tasks: RequestTasks::new(IN_FLIGHT_MAX),
            sender: Sender::new(client.counters.clone()),
            requests: Cell::new(0),
            source,
            awake: Signal::default(),
            idle: Cell::new(true),
            waits_large: Cell::new(false),
            stopping: Cell::new(false),
            halt: Signal::default(),
            stops: ConnectionStops::default(),
            stalled: Cell::new(false),
            keeping: Cell::new(false),
            payload_begun: Cell::new(false),
            receiving: Cell::new(false),
            received: Cell::new(0),
            error_lines: ErrorLines::default(),
            client,
        })
    }

    /// Serves until the client disconnects, violates the protocol, one of `stops` (of the server, of the export) is set, or it
    /// is to be disconnected. On return no request of the connection is in flight. If it is kept for a successor, it is in
    /// `kept` then.
    pub(crate) async fn serve(
        self: &Rc<Self>,
        rest: &[u8],
        stops: [Arc<Stop>; 2],
        kept: &Arc<KeptConnections>,
    ) -> ConnectionEnd {
        let sending = {
            let this = self.clone();
            self.io.spawn(async move {
                let result = this.sender.run(&this.io, &this.transport).await;
                if result.is_err() {
                    // Replies cannot be sent, so no more requests are read.
                    this.sender.give_up();
                    this.stops.disconnected.stop();
                    this.stop_reading();
                }
                result
            })
        };
        // A separate task, so that no request polls it; it is cancelled when this function returns.
        let _housekeeping = self.io.spawn(self.clone().housekeeping(stops, kept.clone()));
        let mut receiver =
            Receiver::new(self.buffers.clone(), self.queue_share.clone(), rest).await;
        let end = match self.read_requests(&mut receiver).await {
            Ok(never) => match never {},
            Err(end) => end,
        };
        if matches!(end, ConnectionEnd::Closed | ConnectionEnd::Broken(_)) {
            self.stops.disconnected.stop();
        }
        self.stops.ended.stop();
        if matches!(end, ConnectionEnd::Kept) && !self.stalled.get() {
            // Boxed, as below.
            return Box::pin(self.keep(receiver, sending, kept)).await;
        }
        drop(receiver);
        let end = match end {
            _ if self.stalled.get() => ConnectionEnd::Stalled,
            ConnectionEnd::Stopped if self.client.not_allowed.load(Ordering::Relaxed) => {
                ConnectionEnd::NotAllowed
            }
            ConnectionEnd::Stopped if self.client.stop.is_stopped() => ConnectionEnd::ByOperator,
            end => end,
        };
        // Boxed, so that a live connection does not hold the memory of this future.
        Box::pin(self.finish(sending)).await;
        end
    }

    /// Waits for the requests in flight and sends the last replies.
    async fn finish(self: &Rc<Self>, sending: ebb_io::Task<io::Result<()>>) {
        self.tasks.retire_idle();
        if self.io.timeout(LAST_REPLIES_TIMEOUT, self.tasks.drain()).await.is_none() {
            // Reads wait until the client receives earlier replies: let them complete without it.
            self.sender.give_up();
            self.tasks.drain().await;
        }
        self.tasks.retire_idle();
        self.sender.finish();
        let sent = self.io.timeout(LAST_REPLIES_TIMEOUT, sending).await;
        if matches!(sent, Some(Ok(()))) {
            let _ = self.io.timeout(LAST_REPLIES_TIMEOUT, self.transport.finish(&self.io)).await;
            let _ = self.io.timeout(LINGER, self.transport.drain(&self.io)).await;
        }
        self.sender.clear();
    }

    fn stop_reading(&self) {
        self.stopping.set(true);
        self.halt.set();
    }

    /// Stops the reading of requests when one of `stops` is set; until then frees memory of idle connections
    /// and closes stalled ones.
    async fn housekeeping(self: Rc<Self>, stops: [Arc<Stop>; 2], kept: Arc<KeptConnections>) {
        let stopped = futures_lite::future::or(stops[0].wait(), stops[1].wait());
        let stopped = futures_lite::future::or(stopped, self.client.stop.wait());
        let checks = async {
            loop {
                self.awake.wait().await;
                let mut seen = u64::MAX;
                let mut stall_detector = StallDetector::default();
                while self.requests.get() != seen || self.is_busy() {
                    seen = self.requests.get();
                    self.io.sleep(IDLE_AFTER).await;
                    if stall_detector.has_stalled(&self) {
                        self.stalled.set(true);
                        self.sender.give_up();
                        self.transport.shut();
                        return;
                    }
                }
                self.idle.set(true);
                self.tasks.retire_idle();
                self.sender.shrink();
                self.queue_share.empty();
                if self.waits_large.get() && !self.transport.is_encrypted() {
                    // The reader continues with a page.
                    self.io.cancel_receives(self.transport.socket());
                }
            }
        };
        futures_lite::future::or(stopped, checks).await;
        if kept.are_wanted() && stops[0].is_stopped() && self.can_be_kept() {
            // Until the reader ends.
            Box::pin(self.begin_to_keep()).await;
        }
        self.stop_reading();
    }

    fn is_busy(&self) -> bool {
        self.tasks.busy() > 0 || self.receiving.get() || self.sender.holds_data()
    }

    async fn read_requests(
        self: &Rc<Self>,
        receiver: &mut Receiver,
    ) -> Result<std::convert::Infallible, ConnectionEnd> {
        loop {
            if self.stopping.get() {
                return Err(ConnectionEnd::Stopped);
            }
            self.payload_begun.set(false);
            if self.keeping.get() {
                return Err(ConnectionEnd::Kept);
            }
            match decode::decode_request(&self.session, receiver.bytes())? {
                Decoded::NeedMore(needed) => self.receive(receiver, needed).await?,
                Decoded::Request(header, consumed) => {
                    receiver.consume(consumed);
                    let accepted = self.accept(receiver, header).await;
                    if matches!(accepted, Err(ConnectionEnd::Kept)) {
                        // The successor begins it.
                        receiver.undo_consume(consumed);
                    }
                    accepted?;
                }
            }
        }
    }

    /// Receives until at least `needed` bytes are available, or fewer if the connection is to be kept
    /// or has become idle.
    async fn receive(&self, receiver: &mut Receiver, needed: usize) -> Result<(), ConnectionEnd> {
        self.source.wait();
        self.waits_large.set(receiver.is_large());
        let filled = {
            let filling = pin!(receiver.fill(&self.io, &self.transport, needed));
            self.unless_stopped(filling).await?
        };
        match filled {
            Ok(()) => Ok(()),
            Err(error) if was_cancelled(&error) && (self.keeping.get() || self.idle.get()) => {
                receiver.rest();
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                let between = receiver.bytes().is_empty();
                Err(if between { ConnectionEnd::Closed } else { ConnectionEnd::Broken(error) })
            }
            Err(error) => Err(ConnectionEnd::Broken(error)),
        }
    }

    /// Checks one request, receives its payload, and starts or refuses it.
    async fn accept(
        self: &Rc<Self>,
        receiver: &mut Receiver,
        header: RequestHeader,
    ) -> Result<(), ConnectionEnd> {
        self.requests.set(self.requests.get() + 1);
        self.source.note_requests(1);
        if self.idle.replace(false) {
            self.awake.set();
        }
        let arrived = self.io.iteration_start();
        let to = ReplyTo::new(self.session.style, &header);
        let operation = match decode::check(&header, &self.session) {
            Ok(NbdRequest::Disconnect) => return Err(ConnectionEnd::Disconnect),
            Ok(operation) => operation,
            Err(errno) => {
                self.skip(receiver, u64::from(header.payload_len)).await?;
                let budget = Some(self.reserve(REQUEST_BYTES).await?);
                count(&self.client.counters.begun, 1);
                count(&self.client.counters.completed, 1);
                let body = ReplyBody::Error(errno, decode::refusal(errno));
                self.sender.push(Reply {
                    to,
                    body,
                    held: Some(RequestMemory { budget, share: None }),
                });
                // Nothing here waits: thousands of refused requests in one buffer would occupy the worker.
                if self.requests.get().is_multiple_of(REFUSED_AT_ONCE) {
                    self.io.yield_iteration().await;
                }
                return Ok(());
            }
        };
        if let Some(waiting) = self.throttled(&operation) {
            // Boxed: it would make the task of every connection larger.
            Box::pin(self.throttle(waiting)).await?;
        }
        self.count(throttle::cost(&operation));
        let own = footprint(&operation);
        // The data alone: a request of the advertised size is executed whole.
        let fits = own <= self.memory_bytes.saturating_add(REQUEST_BYTES);
        let bytes = own.saturating_add(self.bounce(&operation));
        let budget = self.reserve(bytes).await?;
        match operation {
            NbdRequest::Write { offset, length, fua } => {
                let length = to_usize(length);
                let reserve = self.queue_share.share().reserve();
                if length > PIECE || bytes > reserve || !fits {
                    // Boxed: it is rare, and would make the task of every connection larger.
                    let pieces = (offset, length, fua);
                    let written = self.write_in_pieces(receiver, to, budget, pieces, fits);
                    return Box::pin(written).await;
                }
                let share = Some(self.share(receiver, bytes).await?);
                let held = RequestMemory { share, budget: Some(budget) };
                let payload = Some(self.payload(receiver, length).await?);
                let job =
                    || NbdJob { to, operation, arrived, payload, held, split: None, short: false };
                match self.tasks.try_idle(self) {
                    Some(task) => task.start(job()),
                    None => Box::pin(self.start_later(job())).await?,
                }
            }
            operation => {
                let (share, short) = match self.queue_share.try_take(bytes).filter(|_| fits) {
                    Some(share) => (share, false),
                    None => self.share_or_short(receiver, bytes, fits).await?,
                };
                let held = RequestMemory { share: Some(share), budget: Some(budget) };
                let job =
                    || NbdJob { to, operation, arrived, payload: None, held, split: None, short };
                match self.tasks.try_idle(self) {
                    Some(task) => task.start(job()),
                    None => Box::pin(self.start_later(job())).await?,
                }
            }
        }
        Ok(())
    }

    /// Counts a request that begins.
    #[inline]
    fn count(&self, cost: Option<RequestCost>) {
        count(&self.client.counters.begun, 1);
        match cost {
            Some(RequestCost { kind: RequestKind::Read, bytes }) => {
                count(&self.client.counters.read_bytes, bytes);
            }
            Some(RequestCost { kind: RequestKind::Write, bytes }) => {
                count(&self.client.counters.written_bytes, bytes);
            }
            None => {}
        }
    }

    /// Memory the store needs beside the request's buffer, for blocks that the request covers in part.
    fn bounce(&self, operation: &NbdRequest) -> usize {
        match operation {
            NbdRequest::Read { offset, length, .. } | NbdRequest::Write { offset, length, .. } => {
                self.volume.bounce_footprint(*offset, to_usize(*length))
            }
            _ => 0,
        }
    }

    /// Takes memory from the volume's share, in the order in which requests of the volume wait for it.
    /// Who waits holds none for received bytes: it might wait for that.
    async fn share(
        &self,
        receiver: &mut Receiver,
        bytes: usize,
    ) -> Result<ebb_io::Charge, ConnectionEnd> {
        if let Some(held) = self.queue_share.try_take(bytes) {
            return Ok(held);
        }
        receiver.release_charge();
        self.unless_halted(pin!(self.queue_share.take(bytes))).await
    }

    /// Takes memory from the connection's budget; waits until enough replies have been sent.
    async fn reserve(&self, bytes: usize) -> Result<BudgetGuard, ConnectionEnd> {
        match self.memory.try_take(bytes) {
            Some(held) => Ok(held),
            None => self.unless_halted(pin!(self.memory.take(bytes))).await,
        }
    }

    async fn payload(&self, receiver: &mut Receiver, length: usize) -> Result<Buf, ConnectionEnd> {
        self.receiving.set(true);
        self.payload_begun.set(true);
        if receiver.should_buffer(length) {
            self.receive(receiver, length).await.map_err(within)?;
        }
        let mut buf = self.buffers.take(length).await;
        let here = receiver.bytes().len().min(length);
        buf[..here].copy_from_slice(&receiver.bytes()[..here]);
        receiver.consume(here);
        let mut at = here;
        while at < length {
            let receiving = pin!(self.transport.recv(&self.io, buf, at..length));
            let (result, returned) = self.unless_stopped(receiving).await?;
            buf = returned;
            match result {
                // The request that has begun is carried out.
                Err(error) if self.keeping.get() && was_cancelled(&error) => {}
                Ok(0) => return Err(ConnectionEnd::Broken(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => {
                    at += count;
                    self.received.set(self.received.get().wrapping_add(count));
                }
                Err(error) => return Err(ConnectionEnd::Broken(error)),
            }
        }
        self.receiving.set(false);
        self.source.note_requests(0);
        Ok(buf)
    }

    async fn skip(&self, receiver: &mut Receiver, mut left: u64) -> Result<(), ConnectionEnd> {
        self.payload_begun.set(true);
        while left > 0 {
            if receiver.bytes().is_empty() {
                self.receive(receiver, 1).await.map_err(within)?;
            }
            let here = left.min(receiver.bytes().len() as u64);
            receiver.consume(usize::try_from(here).unwrap_or(usize::MAX));
            left -= here;
        }
        Ok(())
    }

    /// Starts a job as soon as a request task is idle. Boxed by its callers: waiting is rare, and would make the task
    /// of every connection larger.
    async fn start_later(self: &Rc<Self>, job: NbdJob) -> Result<(), ConnectionEnd> {
        let task = self.unless_halted(pin!(self.tasks.idle(self))).await?;
        task.start(job);
        Ok(())
    }

    /// Whether the client has disconnected and receives no more replies, even if requests sent before have not been
    /// read yet.
    fn is_disconnected(&self) -> bool {
        if !self.stops.disconnected.is_stopped() && self.transport.is_hung_up() {
            self.stops.disconnected.stop();
        }
        self.stops.disconnected.is_stopped()
    }

    fn log(&self, error: &ebb_volume::BlockError) {
        match self.error_lines.admit() {
            ErrorLine::Request => {
                let cause = error.source.as_ref().map(tracing::field::display);
                let (volume, connection) =
                    (&*self.client.volume, NbdConnectionId(self.client.number));
                tracing::warn!(%connection, volume, %error, cause, "a request failed");
            }
            ErrorLine::Notice => {
                let (volume, connection) =
                    (&*self.client.volume, NbdConnectionId(self.client.number));
                tracing::warn!(%connection, volume, "further failed requests are not logged");
            }
            ErrorLine::Nothing => {}
        }
    }
}

impl RequestRunner for Connection {
    type Job = NbdJob;
    type Scratch = ();

    fn tasks(&self) -> &RequestTasks<NbdJob> {
        &self.tasks
    }

    fn io(&self) -> &Io {
        &self.io
    }

    async fn execute(&self, task: &Rc<RequestTask<NbdJob>>) {
        let context = RequestContext {
            io: &self.io,
            volume: &self.volume,
            session: &self.session,
            buffers: &self.buffers,
            queue_share: &self.queue_share,
            memory_bytes: self.memory_bytes,
            sender: &self.sender,
            is_disconnected: &|| self.is_disconnected(),
            stops: &self.stops,
            told: &self.told,
        };
        if let Err(error) = execute(context, task).await
            && !(error.kind == ErrorKind::Closing && self.stops.disconnected.is_stopped())
        {
            self.log(&error);
        }
    }

    fn all_done(&self) {
        self.buffers.done(ebb_mem::clock::now());
    }
}

/// Memory a request may hold until its reply has been sent, bytes.
fn footprint(operation: &NbdRequest) -> usize {
    let data = match operation {
        NbdRequest::Read { length, .. } | NbdRequest::Write { length, .. } => to_usize(*length),
        NbdRequest::BlockStatus { .. } => STATUS_BYTES_MAX,
        _ => return REQUEST_BYTES,
    };
    BufPool::footprint(data).saturating_add(REQUEST_BYTES)
}

fn to_usize(length: u32) -> usize {
    usize::try_from(length).unwrap_or(usize::MAX)
}

/// The end of the stream within a payload is a failure, not an orderly close.
fn within(end: ConnectionEnd) -> ConnectionEnd {
    match end {
        ConnectionEnd::Closed => ConnectionEnd::Broken(io::ErrorKind::UnexpectedEof.into()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_task_of_a_request_is_small() {
        let bytes = RequestTasks::<NbdJob>::task_bytes::<Connection>();
        assert!(bytes <= 3200, "{bytes} bytes for each request in flight");
    }
}
