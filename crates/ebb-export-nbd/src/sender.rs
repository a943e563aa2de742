//! The sending end of a connection: replies wait here and leave in batches.
//!
//! All replies that are ready when the sender runs leave in one message. A reply's memory and place
//! are given back when it has left. Replies leave whole and in the order they became ready.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;

use ebb_io::{BudgetGuard, Gather, Io, Signal};

use crate::lane::{Body, Reply};
use crate::reply::{Chunks, zero_runs};
use crate::transport::Transport;

/// Runs of data and zeroes one read is split into at most; what follows is sent as data.
const RUNS_MAX: usize = 16;
/// Zeroes shorter than this are sent as data, bytes.
const HOLE_MIN: usize = 4096;
/// Pieces and header bytes one reply may take: a read of `RUNS_MAX` runs and the rest.
const PARTS_MAX: usize = 2 * RUNS_MAX + 3;
const INLINE_MAX: usize = 64 * PARTS_MAX;

/// See the module.
#[derive(Default)]
pub(crate) struct Sender {
    queue: RefCell<VecDeque<Reply>>,
    ready: Signal,
    finish: std::cell::Cell<bool>,
}

impl Sender {
    /// Queues a reply. Bounded by the connection's memory budget, of which each holds a part.
    pub(crate) fn push(&self, reply: Reply) {
        self.queue.borrow_mut().push_back(reply);
        self.ready.set();
    }

    /// Lets [`Sender::run`] end when everything has left.
    pub(crate) fn finish(&self) {
        self.finish.set(true);
        self.ready.set();
    }

    /// Gives memory back that a burst made grow.
    pub(crate) fn shrink(&self) {
        let mut queue = self.queue.borrow_mut();
        if queue.is_empty() {
            *queue = VecDeque::new();
        }
    }

    /// Sends until `finish`, or an error.
    pub(crate) async fn run(&self, io: &Io, transport: &Transport) -> io::Result<()> {
        let mut message = Box::<Gather>::default();
        let mut held: Vec<BudgetGuard> = Vec::new();
        loop {
            if self.queue.borrow().is_empty() {
                transport.send_pending(io).await?;
                if self.finish.get() {
                    return Ok(());
                }
                futures_lite::future::or(self.ready.wait(), transport.wants_send.wait()).await;
                continue;
            }
            while message.has_room(PARTS_MAX, INLINE_MAX) {
                let Some(reply) = self.queue.borrow_mut().pop_front() else { break };
                held.extend(encode(reply, &mut message));
            }
            let (result, returned) = transport.send(io, message).await;
            message = returned;
            held.clear();
            result?;
        }
    }

    /// Drops what cannot be sent any more.
    pub(crate) fn clear(&self) {
        self.queue.borrow_mut().clear();
    }
}

/// Appends a reply; returns what to give back when it has left.
fn encode(reply: Reply, message: &mut Gather) -> Option<BudgetGuard> {
    let Reply { to, body, held } = reply;
    match body {
        Body::Done => message.push_bytes(to.success().as_bytes()),
        Body::Error(errno, text) => {
            let (header, text) = to.error(errno, text);
            message.push_bytes(header.as_bytes());
            message.push_bytes(text.as_bytes());
        }
        Body::Data { offset, data, unfragmented } => match to.chunks() {
            None => {
                message.push_bytes(to.success().as_bytes());
                let length = data.len();
                let index = message.hold(data);
                message.push_range(index, 0..length);
            }
            Some(chunks) => encode_data(message, chunks, offset, data, unfragmented),
        },
        Body::Status { context, count, descriptors } => {
            // Only connections with chunks can select a context.
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

/// Sends data as data and zeroes as holes, unless the client wants it in one piece.
fn encode_data(
    message: &mut Gather,
    chunks: Chunks,
    offset: u64,
    data: ebb_io::Buf,
    unfragmented: bool,
) {
    let length = data.len();
    if unfragmented {
        let whole = Run { start: 0, end: length, zero: false };
        let index = message.hold(data);
        push_run(message, chunks, offset, index, whole, true);
        return;
    }
    let mut runs = [Run::default(); RUNS_MAX + 1];
    let count = split(&data, &mut runs);
    let index = message.hold(data);
    for (number, run) in runs[..count].iter().enumerate() {
        push_run(message, chunks, offset, index, *run, number + 1 == count);
    }
}

#[derive(Clone, Copy, Default)]
struct Run {
    start: usize,
    end: usize,
    zero: bool,
}

/// Splits data into at most `RUNS_MAX` runs and a rest that counts as data; returns how many.
fn split(data: &[u8], runs: &mut [Run; RUNS_MAX + 1]) -> usize {
    let mut count = 0;
    for run in zero_runs(data, HOLE_MIN) {
        if count == RUNS_MAX {
            runs[count] = Run { start: run.offset, end: data.len(), zero: false };
            return count + 1;
        }
        runs[count] = Run { start: run.offset, end: run.offset + run.len, zero: run.zero };
        count += 1;
    }
    count
}

fn push_run(message: &mut Gather, chunks: Chunks, offset: u64, index: usize, run: Run, last: bool) {
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
