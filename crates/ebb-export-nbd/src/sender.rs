//! The sending side of a connection: queues replies and sends them in batches.
//!
//! All replies that are ready when the sender runs are sent in one message. A reply's memory is
//! released when it has been sent. Replies are sent whole and in the order they became ready.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};

use ebb_export::ReplyDue;
use ebb_io::{Budget, BudgetGuard, Buf, Gather, Io, Signal};
use ebb_tls::Transport;

use crate::clients::{ClientCounters, count};
use crate::reply::{Chunks, Reply, ReplyBody, RequestMemory, zero_runs};

/// The most runs of data and zeroes that one read is split into; the remainder is sent as data.
const RUNS_MAX: usize = 16;
/// Zeroes shorter than this are sent as data, bytes.
const HOLE_MIN: usize = 4096;
/// Pieces and header bytes that one reply may need: a read of `RUNS_MAX` runs and the remainder.
const PARTS_MAX: usize = 2 * RUNS_MAX + 3;
const INLINE_MAX: usize = 64 * PARTS_MAX;

/// Unsent data from which on further reads wait, bytes: about what stays in a processor's cache, and no less
/// than a socket accepts at once.
pub(crate) const UNSENT_MAX: usize = 256 << 10;

/// Queues the replies of one connection and sends them.
pub(crate) struct Sender {
    queue: RefCell<VecDeque<Reply>>,
    ready: Signal,
    finish: Cell<bool>,
    /// The memory of the message is freed before the next wait.
    shrinks: Cell<bool>,
    /// Bytes of data in the queue and in the message that is being sent.
    unsent: Cell<usize>,
    /// Replies cannot be sent any more: reads do not wait.
    given_up: Cell<bool>,
    waiting_reads: RefCell<VecDeque<Waker>>,
    stream: StreamedChunk,
    counters: Arc<ClientCounters>,
}

/// The chunk that is sent in pieces, of which there is at most one at a time; see [`ReplyBody::First`].
struct StreamedChunk {
    /// Admits one chunk at a time.
    permits: Rc<Budget>,
    /// The first piece has been put into a message, and the last one has not.
    on: Cell<bool>,
    /// The piece to be sent next.
    piece: RefCell<Option<Reply>>,
    /// Set when a piece has been sent, or cannot be sent any more.
    sent: Signal,
    /// The rest of the chunk could not be read.
    broken: Cell<bool>,
}

impl Sender {
    /// Counts completed requests in `counters`.
    pub(crate) fn new(counters: Arc<ClientCounters>) -> Sender {
        Sender {
            counters,
            queue: RefCell::default(),
            ready: Signal::default(),
            finish: Cell::new(false),
            shrinks: Cell::new(false),
            unsent: Cell::new(0),
            given_up: Cell::new(false),
            waiting_reads: RefCell::default(),
            stream: StreamedChunk {
                permits: Budget::new(1),
                on: Cell::new(false),
                piece: RefCell::default(),
                sent: Signal::default(),
                broken: Cell::new(false),
            },
        }
    }
}

impl Sender {
    /// Waits until a chunk may be sent in pieces.
    pub(crate) async fn begin_stream(&self) -> BudgetGuard {
        self.stream.permits.take(1).await
    }

    /// Queues a piece of such a chunk and waits until it has been sent, or cannot be sent any more.
    pub(crate) async fn push_stream(&self, reply: Reply) {
        match &reply.body {
            ReplyBody::First { .. } => self.push(reply),
            _ => {
                self.unsent.set(self.unsent.get() + data_bytes(&reply));
                *self.stream.piece.borrow_mut() = Some(reply);
                self.ready.set();
            }
        }
        if !self.given_up.get() {
            self.stream.sent.wait().await;
        }
    }

    /// The rest of a chunk could not be read: the connection must end.
    pub(crate) fn break_off(&self) {
        self.stream.broken.set(true);
        self.ready.set();
    }

    /// The next reply to send, if one is ready.
    #[inline]
    fn next(&self) -> Option<Reply> {
        if self.stream.on.get() {
            return self.stream.piece.borrow_mut().take();
        }
        self.queue.borrow_mut().pop_front()
    }

    fn is_idle(&self) -> bool {
        match self.stream.on.get() {
            true => self.stream.piece.borrow().is_none(),
            false => self.queue.borrow().is_empty(),
        }
    }

    /// Whether data waits to be sent, or is being sent.
    pub(crate) fn holds_data(&self) -> bool {
        self.unsent.get() > 0
    }

    /// Whether there are replies to be sent; after [`Sender::finish`] there are until [`Sender::run`] returns.
    pub(crate) fn has_replies(&self) -> bool {
        self.holds_data() || !self.is_idle() || self.finish.get()
    }

    /// Queues a reply. The queue is bounded by the connection's memory budget, of which each reply holds a part.
    #[inline]
    pub(crate) fn push(&self, reply: Reply) {
        self.unsent.set(self.unsent.get() + data_bytes(&reply));
        self.queue.borrow_mut().push_back(reply);
        self.ready.set();
    }

    /// Queues a reply, or the last part of one, which completes its request.
    #[inline]
    pub(crate) fn complete(&self, reply: Reply, due: ReplyDue) {
        due.settle();
        count(&self.counters.completed, 1);
        self.push(reply);
    }

    /// Waits while `most` bytes of data or more are unsent. For reads before they take memory:
    /// reads of a slow store all start at once, since little data is unsent; reads from memory
    /// proceed at the rate at which the client receives.
    pub(crate) async fn wait_until_unsent_below(&self, most: usize) {
        poll_fn(|cx| {
            if self.unsent.get() < most || self.given_up.get() {
                return Poll::Ready(());
            }
            self.waiting_reads.borrow_mut().push_back(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Wakes all waiting reads, which check again: the first may use up the room.
    fn wake_waiting(&self) {
        while let Some(waker) = self.waiting_reads.borrow_mut().pop_front() {
            waker.wake();
        }
    }

    /// Notes that the client receives no more replies.
    pub(crate) fn give_up(&self) {
        self.given_up.set(true);
        self.stream.sent.set();
        self.wake_waiting();
    }

    /// Lets [`Sender::run`] return when everything has been sent.
    pub(crate) fn finish(&self) {
        self.finish.set(true);
        self.ready.set();
    }

    /// Frees the memory of the queue and of the message, which a burst may have made large.
    pub(crate) fn shrink(&self) {
        let mut queue = self.queue.borrow_mut();
        if queue.is_empty() {
            *queue = VecDeque::new();
        }
        self.shrinks.set(true);
        self.ready.set();
    }

    /// Sends until `finish`, or an error.
    pub(crate) async fn run(&self, io: &Io, transport: &Transport) -> io::Result<()> {
        let mut message = Box::<Gather>::default();
        let mut held: Vec<RequestMemory> = Vec::new();
        let mut sending = 0;
        loop {
            if self.stream.broken.get() {
                return Err(io::Error::other(
                    "the store failed within a reply that was sent in part",
                ));
            }
            if self.is_idle() {
                transport.send_pending(io).await?;
                if self.finish.get() {
                    return Ok(());
                }
                if self.shrinks.take() {
                    *message = Gather::default();
                    held = Vec::new();
                }
                futures_lite::future::or(self.ready.wait(), transport.wants_send()).await;
                continue;
            }
            let mut streamed = false;
            while message.has_room(PARTS_MAX, INLINE_MAX) {
                let Some(reply) = self.next() else { break };
                sending += data_bytes(&reply);
                streamed |= self.note_piece(&reply.body);
                held.extend(encode(reply, &mut message));
            }
            let (result, returned) = transport.send(io, message).await;
            message = returned;
            if streamed {
                self.stream.sent.set();
            }
            message.clear();
            held.clear();
            self.unsent.set(self.unsent.get() - std::mem::take(&mut sending));
            self.wake_waiting();
            result?;
        }
    }

    /// Whether this is a piece of a streamed chunk; notes whether the chunk has begun or ended with it.
    fn note_piece(&self, body: &ReplyBody) -> bool {
        match body {
            // All of it, if more memory is free than when the request was admitted.
            ReplyBody::First { length, data, .. } => {
                self.stream.on.set(data.len() as u64 != u64::from(*length));
            }
            ReplyBody::More { last, .. } => self.stream.on.set(!last),
            _ => return false,
        }
        true
    }

    /// Drops replies that cannot be sent any more.
    pub(crate) fn clear(&self) {
        self.queue.borrow_mut().clear();
    }
}

#[inline]
fn data_bytes(reply: &Reply) -> usize {
    match &reply.body {
        ReplyBody::Data { data, .. }
        | ReplyBody::First { data, .. }
        | ReplyBody::More { data, .. } => data.len(),
        _ => 0,
    }
}

/// Appends a reply; returns the memory to release when it has been sent.
#[inline]
fn encode(reply: Reply, message: &mut Gather) -> Option<RequestMemory> {
    let Reply { to, body, held } = reply;
    match body {
        ReplyBody::Done => message.push_bytes(to.success().as_bytes()),
        ReplyBody::Error(errno, text) => {
            let (header, text) = to.error(errno, text);
            message.push_bytes(header.as_bytes());
            message.push_bytes(text.as_bytes());
        }
        ReplyBody::Data { offset, data, unfragmented, last } => match to.chunks() {
            None => {
                message.push_bytes(to.success().as_bytes());
                let length = data.len();
                let index = message.hold(data);
                message.push_range(index, 0..length);
            }
            Some(chunks) => {
                let content = ChunkContent { chunks, offset, last };
                encode_data(message, content, data, unfragmented);
            }
        },
        ReplyBody::First { offset, length, data } => {
            match to.chunks() {
                None => message.push_bytes(to.success().as_bytes()),
                Some(chunks) => message.push_bytes(chunks.data(offset, length, true).as_bytes()),
            }
            push_all(message, data);
        }
        ReplyBody::More { data, .. } => push_all(message, data),
        ReplyBody::Status { context, count, descriptors } => {
            // Only connections with chunked replies can select a context.
            if let Some(chunks) = to.chunks() {
                message.push_bytes(chunks.block_status(context, count, true).as_bytes());
                let length = descriptors.len();
                let index = message.hold(descriptors);
                message.push_range(index, 0..length);
            }
        }
    }
    held
}

fn push_all(message: &mut Gather, data: Buf) {
    let length = data.len();
    let index = message.hold(data);
    message.push_range(index, 0..length);
}

/// How the data of a read is put into chunks.
#[derive(Clone, Copy)]
struct ChunkContent {
    chunks: Chunks,
    /// Offset of the first byte in the volume.
    offset: u64,
    /// No data of the read follows.
    last: bool,
}

/// Sends data as data chunks and zeroes as hole chunks, unless the client requested a single chunk.
fn encode_data(message: &mut Gather, content: ChunkContent, data: Buf, unfragmented: bool) {
    let length = data.len();
    if unfragmented {
        let whole = ChunkRun { start: 0, end: length, zero: false };
        let index = message.hold(data);
        push_run(message, content, index, whole);
        return;
    }
    let mut runs = [ChunkRun::default(); RUNS_MAX + 1];
    let count = split(&data, &mut runs);
    let index = message.hold(data);
    for (number, run) in runs[..count].iter().enumerate() {
        let last = content.last && number + 1 == count;
        push_run(message, ChunkContent { last, ..content }, index, *run);
    }
}

#[derive(Clone, Copy, Default)]
struct ChunkRun {
    start: usize,
    end: usize,
    zero: bool,
}

/// Splits data into at most `RUNS_MAX` runs and a remainder that counts as data; returns their number.
fn split(data: &[u8], runs: &mut [ChunkRun; RUNS_MAX + 1]) -> usize {
    let mut count = 0;
    for run in zero_runs(data, HOLE_MIN) {
        if count == RUNS_MAX {
            runs[count] = ChunkRun { start: run.offset, end: data.len(), zero: false };
            return count + 1;
        }
        runs[count] = ChunkRun { start: run.offset, end: run.offset + run.len, zero: run.zero };
        count += 1;
    }
    count
}

fn push_run(message: &mut Gather, content: ChunkContent, index: usize, run: ChunkRun) {
    let ChunkContent { chunks, offset, last } = content;
    let at = offset + run.start as u64;
    // A read is at most 64 MiB long.
    let length = u32::try_from(run.end - run.start).unwrap_or(u32::MAX);
    if run.zero {
        message.push_bytes(chunks.hole(at, length, last).as_bytes());
    } else {
        message.push_bytes(chunks.data(at, length, last).as_bytes());
        message.push_range(index, run.start..run.end);
    }
}
