//! The transmission phase of one connection: read requests, hand them to lanes, send replies.
//!
//! # Invariants
//! - A request is copied once off the wire, checked once, and answered exactly once.
//! - What a client can make us hold is bounded: [`IN_FLIGHT_MAX`] requests, and the memory budget
//!   of the connection. Past either the socket is simply not read.
//! - Requests that have begun run to their end, also when the client is gone: only then does the
//!   connection end, so that closing a volume knows of every write. Questions for block status, which
//!   change nothing, end with the client, and so do zeroes that have to be written out.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ebb_io::{Budget, BudgetGuard, Buf, BufPool, Io, QueueShare, Signal};
use ebb_tls::Transport;
use ebb_volume::{ErrorKind, Mode, Stop, Volume};

use crate::decode::{self, Decoded, Fatal, Operation, RequestHeader};
use crate::handshake::Session;
use crate::proto::Errno;
use crate::receiver::Receiver;
use crate::reply::ReplyTo;
use crate::request_task::{
    Body, Job, Means, Parts, REQUEST_BYTES, Reply, Room, STATUS_BYTES_MAX, execute,
};
use crate::sender::Sender;

/// Requests of one connection under way at a time.
const IN_FLIGHT_MAX: usize = 256;
/// A longer WRITE is received and written in pieces: the first one of `FIRST`, the others of `PIECE`
/// bytes. So what a client makes us hold is what it has sent, and a piece.
const FIRST: usize = 256 << 10;
const PIECE: usize = 1 << 20;
/// A connection that moves nothing for so many looks in a row (see `SILENCE`), within the data of a
/// WRITE or of a reply, is closed if requests of its volume wait for memory.
const STALLED: u32 = 5;
/// Less than this between two looks is nothing.
const PROGRESS: usize = 64 << 10;
/// How long a connection must be silent before its lanes end.
const SILENCE: Duration = Duration::from_secs(1);
/// How long a client may take to receive its last replies when the server stops.
const FAREWELL: Duration = Duration::from_secs(10);
/// How long a client may take to close its side once ours is closed.
const LINGER: Duration = Duration::from_secs(1);
/// Failed requests logged per connection: a broken disk must not fill the log.
const ERRORS_LOGGED: u32 = 10;
/// Requests that are refused at once before others have their turn.
const REFUSED_AT_ONCE: u64 = 32;

/// Why a transmission phase ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum End {
    /// The client said goodbye.
    #[error("the client disconnected")]
    Disconnect,
    /// The client closed between two requests.
    #[error("the client closed the connection")]
    Closed,
    /// The volume or the server is stopping.
    #[error("the volume is being closed")]
    Stopped,
    /// It held memory others wait for, and neither sent nor received.
    #[error("the client stopped in the middle of a request while others waited for its memory")]
    Stalled,
    /// The client broke the protocol.
    #[error(transparent)]
    Protocol(#[from] Fatal),
    /// The connection broke.
    #[error("the connection broke")]
    Broken(#[from] io::Error),
}

/// One client's transmission phase.
pub(crate) struct Connection {
    io: Io,
    number: u64,
    volume: Arc<Volume>,
    session: Session,
    transport: Transport,
    memory: Rc<Budget>,
    /// The volume's share of the memory for requests.
    queue_share: Rc<QueueShare>,
    /// The page pool of this queue.
    buffers: BufPool,
    lanes: Lanes,
    sender: Sender,
    requests: Cell<u64>,
    /// Set by the first request after a silence.
    awake: Signal,
    dozing: Cell<bool>,
    stopping: Cell<bool>,
    /// Set with `stopping`, for a reader that waits for memory or a lane.
    halt: Signal,
    /// Sent when the client went without a goodbye: nobody takes answers any more.
    gone: Stop,
    stalled: Cell<bool>,
    /// A WRITE's data is being received, and how much of it has come so far, over all WRITEs.
    receiving: Cell<bool>,
    received: Cell<usize>,
    errors: Cell<u32>,
}

#[derive(Default)]
struct Lanes {
    idle: RefCell<Vec<Rc<Lane>>>,
    count: Cell<usize>,
    busy: Cell<usize>,
    /// Set when a lane becomes idle or ends.
    freed: Signal,
}

#[derive(Default)]
struct Lane {
    job: RefCell<Option<Job>>,
    signal: Signal,
    retire: Cell<bool>,
}

impl Connection {
    pub(crate) fn new(
        io: Io,
        number: u64,
        volume: Arc<Volume>,
        session: Session,
        transport: Transport,
        buffers: BufPool,
        memory_bytes: usize,
    ) -> Rc<Connection> {
        let share = volume.share(buffers.memory().shares()).clone();
        Rc::new(Connection {
            io,
            number,
            volume,
            session,
            transport,
            memory: Budget::new(memory_bytes),
            queue_share: QueueShare::new(share),
            buffers,
            lanes: Lanes::default(),
            sender: Sender::default(),
            requests: Cell::new(0),
            awake: Signal::default(),
            dozing: Cell::new(true),
            stopping: Cell::new(false),
            halt: Signal::default(),
            gone: Stop::default(),
            stalled: Cell::new(false),
            receiving: Cell::new(false),
            received: Cell::new(0),
            errors: Cell::new(0),
        })
    }

    /// Serves until the client leaves, breaks the protocol, or one of the stops is sent. On return
    /// nothing of the connection is under way any more.
    pub(crate) async fn serve(self: &Rc<Self>, rest: &[u8], stops: [Arc<Stop>; 2]) -> End {
        let sending = {
            let this = self.clone();
            self.io.spawn(async move {
                let result = this.sender.run(&this.io, &this.transport).await;
                if result.is_err() {
                    // Nobody reads replies: stop reading requests, too.
                    this.sender.give_up();
                    this.gone.stop();
                    this.stop_reading();
                }
                result
            })
        };
        // A task of its own, so that no request polls it; it ends with this function.
        let _housekeeping = self.io.spawn(self.clone().housekeeping(stops));
        let mut receiver =
            Receiver::new(self.buffers.clone(), self.queue_share.clone(), rest).await;
        let end = match self.read_requests(&mut receiver).await {
            Ok(never) => match never {},
            Err(end) => end,
        };
        if matches!(end, End::Closed | End::Broken(_)) {
            self.gone.stop();
        }
        drop(receiver);
        let end = if self.stalled.get() { End::Stalled } else { end };
        // Boxed, so that a connection that lives does not hold what it needs to end.
        Box::pin(self.finish(sending)).await;
        end
    }

    /// Waits for what is under way and sends the last replies.
    async fn finish(self: &Rc<Self>, sending: ebb_io::Task<io::Result<()>>) {
        self.retire_idle();
        if self.io.timeout(FAREWELL, self.lanes_done()).await.is_none() {
            // Reads wait for a client that does not receive: let them end without it.
            self.sender.give_up();
            self.lanes_done().await;
        }
        self.retire_idle();
        self.sender.finish();
        let sent = self.io.timeout(FAREWELL, sending).await;
        if matches!(sent, Some(Ok(()))) {
            let _ = self.io.timeout(FAREWELL, self.transport.finish(&self.io)).await;
            let _ = self.io.timeout(LINGER, self.transport.drain(&self.io)).await;
        }
        self.sender.clear();
    }

    async fn lanes_done(&self) {
        while self.lanes.busy.get() > 0 {
            self.lanes.freed.wait().await;
        }
    }

    fn stop_reading(&self) {
        self.stopping.set(true);
        self.halt.set();
    }

    /// Ends reading when told to stop; until then gives memory back after silence.
    async fn housekeeping(self: Rc<Self>, stops: [Arc<Stop>; 2]) {
        let stopped = futures_lite::future::or(stops[0].wait(), stops[1].wait());
        let tidying = async {
            loop {
                self.awake.wait().await;
                let mut seen = u64::MAX;
                let mut watch = Watch::default();
                while self.requests.get() != seen || self.is_busy() {
                    seen = self.requests.get();
                    self.io.sleep(SILENCE).await;
                    if watch.look(&self) {
                        self.stalled.set(true);
                        self.sender.give_up();
                        self.transport.shut();
                        return;
                    }
                }
                self.dozing.set(true);
                self.retire_idle();
                self.sender.shrink();
                self.queue_share.empty();
            }
        };
        futures_lite::future::or(stopped, tidying).await;
        self.stop_reading();
    }

    fn is_busy(&self) -> bool {
        self.lanes.busy.get() > 0 || self.receiving.get() || self.sender.holds_data()
    }

    fn retire_idle(&self) {
        for lane in self.lanes.idle.take() {
            lane.retire.set(true);
            lane.signal.set();
        }
    }

    async fn read_requests(
        self: &Rc<Self>,
        receiver: &mut Receiver,
    ) -> Result<std::convert::Infallible, End> {
        loop {
            if self.stopping.get() {
                return Err(End::Stopped);
            }
            match decode::decode_request(&self.session, receiver.bytes())? {
                Decoded::NeedMore(needed) => self.receive(receiver, needed).await?,
                Decoded::Request(header, consumed) => {
                    receiver.consume(consumed);
                    self.accept(receiver, header).await?;
                }
            }
        }
    }

    async fn receive(&self, receiver: &mut Receiver, needed: usize) -> Result<(), End> {
        let filled = {
            let filling = pin!(receiver.fill(&self.io, &self.transport, needed));
            self.unless_halted(filling).await?
        };
        match filled {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                let between = receiver.bytes().is_empty();
                Err(if between { End::Closed } else { End::Broken(error) })
            }
            Err(error) => Err(End::Broken(error)),
        }
    }

    /// Checks one request, takes its payload off the wire, and starts or refuses it.
    async fn accept(
        self: &Rc<Self>,
        receiver: &mut Receiver,
        header: RequestHeader,
    ) -> Result<(), End> {
        self.requests.set(self.requests.get() + 1);
        if self.dozing.replace(false) {
            self.awake.set();
        }
        let to = ReplyTo::new(self.session.style, &header);
        let operation = match decode::check(&header, &self.session) {
            Ok(Operation::Disconnect) => return Err(End::Disconnect),
            Ok(operation) => operation,
            Err(errno) => {
                self.skip(receiver, u64::from(header.payload_len)).await?;
                let budget = Some(self.reserve(REQUEST_BYTES).await?);
                let body = Body::Error(errno, refusal(errno));
                self.sender.push(Reply { to, body, held: Some(Room { budget, share: None }) });
                // Nothing of this waits: thousands of them in one buffer would hold the worker.
                if self.requests.get().is_multiple_of(REFUSED_AT_ONCE) {
                    self.io.yield_now().await;
                }
                return Ok(());
            }
        };
        let bytes = footprint(&operation).saturating_add(self.bounce(&operation));
        let budget = self.reserve(bytes).await?;
        match operation {
            Operation::Write { offset, length, fua } => {
                let length = to_usize(length);
                if length > PIECE || bytes > self.queue_share.share().reserve() {
                    return self.write_in_pieces(receiver, to, budget, (offset, length, fua)).await;
                }
                let held = Room { share: Some(self.share(bytes).await?), budget: Some(budget) };
                let payload = Some(self.payload(receiver, length).await?);
                self.start(Job { to, operation, payload, held, parts: None, short: false }).await
            }
            operation => {
                let (share, short) = self.share_or_short(bytes).await?;
                let held = Room { share: Some(share), budget: Some(budget) };
                self.start(Job { to, operation, payload: None, held, parts: None, short }).await
            }
        }
    }

    /// What the store takes beside the request's buffer, for parts of its blocks.
    fn bounce(&self, operation: &Operation) -> usize {
        match operation {
            Operation::Read { offset, length, .. } | Operation::Write { offset, length, .. } => {
                self.volume.bounce_footprint(*offset, to_usize(*length))
            }
            _ => 0,
        }
    }

    /// Takes memory of the volume's share, after the volume's other requests.
    async fn share(&self, bytes: usize) -> Result<ebb_io::Charge, End> {
        match self.queue_share.try_take(bytes) {
            Some(held) => Ok(held),
            None => self.unless_halted(pin!(self.queue_share.take(bytes))).await,
        }
    }

    /// The same for a request that is carried out in pieces if there is not enough for all of it,
    /// which a volume is sure of within its reserve only: then true, and only what the request
    /// itself takes.
    async fn share_or_short(&self, bytes: usize) -> Result<(ebb_io::Charge, bool), End> {
        if bytes <= self.queue_share.share().reserve() {
            return Ok((self.share(bytes).await?, false));
        }
        match self.queue_share.try_take(bytes) {
            Some(held) => Ok((held, false)),
            None => Ok((self.share(REQUEST_BYTES).await?, true)),
        }
    }

    /// Receives and writes a large WRITE piece by piece, each with memory of its own; the reply
    /// follows the last one.
    async fn write_in_pieces(
        self: &Rc<Self>,
        receiver: &mut Receiver,
        to: ReplyTo,
        budget: BudgetGuard,
        (mut offset, mut left, fua): (u64, usize, bool),
    ) -> Result<(), End> {
        let share = Some(self.share(REQUEST_BYTES).await?);
        let parts = Parts::new(to, Room { budget: Some(budget), share });
        let mut next = FIRST;
        while left > 0 {
            let length = left.min(next).min(Means::piece(&self.queue_share));
            next = PIECE;
            left -= length;
            parts.begin(left == 0);
            let piece = (offset, length);
            let share = Means::piece_bytes(&self.volume, &self.queue_share, piece);
            let share = Some(self.share(share).await?);
            let payload = Some(self.payload(receiver, length).await?);
            let held = Room { share, budget: None };
            let operation =
                Operation::Write { offset, length: u32::try_from(length).unwrap_or(u32::MAX), fua };
            let parts = Some(parts.clone());
            self.start(Job { to, operation, payload, held, parts, short: false }).await?;
            offset += length as u64;
        }
        Ok(())
    }

    /// Takes memory from the connection's budget, waiting for replies to leave if need be.
    async fn reserve(&self, bytes: usize) -> Result<BudgetGuard, End> {
        match self.memory.try_take(bytes) {
            Some(held) => Ok(held),
            None => self.unless_halted(pin!(self.memory.take(bytes))).await,
        }
    }

    /// Waits for something that depends on the client, but not longer than the server runs. It comes
    /// pinned: handed over by value it would be in the connection's task several times.
    async fn unless_halted<T>(&self, waiting: Pin<&mut impl Future<Output = T>>) -> Result<T, End> {
        if self.stopping.get() {
            return Err(End::Stopped);
        }
        let halted = async {
            self.halt.wait().await;
            Err(End::Stopped)
        };
        futures_lite::future::or(async { Ok(waiting.await) }, halted).await
    }

    async fn payload(&self, receiver: &mut Receiver, length: usize) -> Result<Buf, End> {
        self.receiving.set(true);
        if receiver.suits(length) {
            self.receive(receiver, length).await.map_err(within)?;
        }
        let mut buf = self.buffers.take(length).await;
        let here = receiver.bytes().len().min(length);
        buf[..here].copy_from_slice(&receiver.bytes()[..here]);
        receiver.consume(here);
        let mut at = here;
        while at < length {
            let receiving = pin!(self.transport.recv(&self.io, buf, at..length));
            let (result, returned) = self.unless_halted(receiving).await?;
            buf = returned;
            match result {
                Ok(0) => return Err(End::Broken(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => at += count,
                Err(error) => return Err(End::Broken(error)),
            }
            self.received.set(self.received.get().wrapping_add(at));
        }
        self.receiving.set(false);
        Ok(buf)
    }

    async fn skip(&self, receiver: &mut Receiver, mut left: u64) -> Result<(), End> {
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

    /// Gives a job to an idle lane, or to a new one, or waits for one.
    async fn start(self: &Rc<Self>, job: Job) -> Result<(), End> {
        let lanes = &self.lanes;
        let mut job = Some(job);
        loop {
            let idle = lanes.idle.borrow_mut().pop();
            if let Some(lane) = idle {
                lanes.busy.set(lanes.busy.get() + 1);
                *lane.job.borrow_mut() = job.take();
                lane.signal.set();
                return Ok(());
            }
            if lanes.count.get() < IN_FLIGHT_MAX {
                lanes.count.set(lanes.count.get() + 1);
                lanes.busy.set(lanes.busy.get() + 1);
                let lane = Rc::new(Lane { job: RefCell::new(job.take()), ..Lane::default() });
                lane.signal.set();
                self.io.spawn(self.clone().run_lane(lane)).detach();
                return Ok(());
            }
            self.unless_halted(pin!(lanes.freed.wait())).await?;
        }
    }

    async fn run_lane(self: Rc<Self>, lane: Rc<Lane>) {
        loop {
            lane.signal.wait().await;
            let Some(job) = lane.job.take() else {
                if lane.retire.get() {
                    self.lanes.count.set(self.lanes.count.get() - 1);
                    self.lanes.freed.set();
                    return;
                }
                continue;
            };
            // What changes nothing need not go on for a client that is gone, which matters where it is many
            // questions to another server. With a writeback cache it writes first.
            let only_asks = matches!(job.operation, Operation::BlockStatus { .. })
                && self.volume.cache_mode() != Mode::Writeback;
            let means = Means {
                io: &self.io,
                volume: &self.volume,
                session: &self.session,
                buffers: &self.buffers,
                queue_share: &self.queue_share,
                sender: &self.sender,
                gone: &|| self.is_gone(),
            };
            let mut doing = pin!(execute(means, job));
            let outcome = if only_asks {
                let gone = async {
                    self.gone.wait().await;
                    Ok(())
                };
                futures_lite::future::or(doing.as_mut(), gone).await
            } else {
                doing.await
            };
            if let Err(error) = outcome
                && !(error.kind == ErrorKind::Closing && self.gone.is_stopped())
            {
                self.log(&error);
            }
            self.lanes.busy.set(self.lanes.busy.get() - 1);
            if self.lanes.busy.get() == 0 {
                self.buffers.done(ebb_mem::clock::now());
            }
            self.lanes.idle.borrow_mut().push(lane.clone());
            self.lanes.freed.set();
        }
    }

    /// Whether the client takes no replies any more, also where requests that came before the end of the stream have not
    /// been read yet.
    fn is_gone(&self) -> bool {
        if !self.gone.is_stopped() && self.transport.is_hung_up() {
            self.gone.stop();
        }
        self.gone.is_stopped()
    }

    fn log(&self, error: &ebb_volume::BlockError) {
        let count = self.errors.get();
        self.errors.set(count.saturating_add(1));
        if count < ERRORS_LOGGED {
            let cause = error.source.as_ref().map(ToString::to_string).unwrap_or_default();
            tracing::warn!(connection = self.number, %error, cause);
        } else if count == ERRORS_LOGGED {
            tracing::warn!(connection = self.number, "more failed requests; not logged any more");
        }
    }
}

/// How long a connection has moved nothing while others waited.
#[derive(Default)]
struct Watch {
    received: usize,
    sent: usize,
    still: u32,
}

impl Watch {
    /// Whether the connection has stalled; to be asked about once in a `SILENCE`.
    fn look(&mut self, connection: &Connection) -> bool {
        let (received, sent) = (connection.received.get(), connection.transport.sent_bytes());
        let moved = received.wrapping_sub(self.received).max(sent.wrapping_sub(self.sent));
        (self.received, self.sent) = (received, sent);
        let holds = connection.receiving.get() || connection.sender.holds_data();
        let stands = holds && moved < PROGRESS && connection.queue_share.share().has_waiters();
        self.still = if stands { self.still + 1 } else { 0 };
        self.still >= STALLED
    }
}

/// What a request may hold until its reply has left, bytes.
fn footprint(operation: &Operation) -> usize {
    let data = match operation {
        Operation::Read { length, .. } | Operation::Write { length, .. } => to_usize(*length),
        Operation::BlockStatus { .. } => STATUS_BYTES_MAX,
        _ => return REQUEST_BYTES,
    };
    BufPool::footprint(data).saturating_add(REQUEST_BYTES)
}

fn to_usize(length: u32) -> usize {
    usize::try_from(length).unwrap_or(usize::MAX)
}

/// A stream that ends within a payload is broken, not closed.
fn within(end: End) -> End {
    match end {
        End::Closed => End::Broken(io::ErrorKind::UnexpectedEof.into()),
        other => other,
    }
}

fn refusal(errno: Errno) -> &'static str {
    match errno {
        Errno::Perm => "the volume is read-only",
        Errno::NoSpc => "past the end of the volume",
        Errno::Overflow => "longer than the largest request (see NBD_INFO_BLOCK_SIZE)",
        _ => "not valid: check range, alignment to 512 bytes, length, flags and command",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size_of_future<F: Future>(_: impl FnOnce(Rc<Connection>, Rc<Lane>) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn the_task_of_a_request_is_small() {
        let bytes = size_of_future(Connection::run_lane);
        assert!(bytes <= 3328, "{bytes} bytes for each request in flight");
    }
}
