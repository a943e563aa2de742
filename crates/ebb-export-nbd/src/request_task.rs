//! Carrying out one request: what a lane does between taking a job and handing over its reply.
//!
//! A lane is a task that does one request after the other, so that nothing is allocated per
//! request. A connection has as many lanes as it has had requests at once; they end when it falls
//! silent.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use ebb_io::{BudgetGuard, Buf, BufPool, Charge, Io, QueueShare};
use ebb_volume::{BlockError, ErrorKind, Volume, ZeroFlags};

use crate::decode::Operation;
use crate::handshake::Session;
use crate::proto::{Errno, ExtentState};
use crate::reply::{ExtentList, ReplyTo};
use crate::sender::Sender;

/// Extents in one answer to BLOCK_STATUS: the client asks again for the rest.
const EXTENTS_MAX: u16 = 2048;
/// The longest answer to BLOCK_STATUS, bytes: its descriptors in their larger form.
pub(crate) const STATUS_BYTES_MAX: usize = 16 * EXTENTS_MAX as usize;

/// What a request without data counts against the memory budget, bytes.
pub(crate) const REQUEST_BYTES: usize = 512;
/// The most one piece of a request that is carried out in pieces takes, bytes.
const PIECE: usize = 1 << 20;

/// Memory that a request holds: of its connection's budget, and of its volume's share.
#[derive(Default)]
#[expect(dead_code, reason = "held, and given back when it is dropped")]
pub(crate) struct Room {
    pub(crate) budget: Option<BudgetGuard>,
    pub(crate) share: Option<Charge>,
}

/// What requests of a connection are carried out with.
#[derive(Clone, Copy)]
pub(crate) struct Means<'a> {
    pub(crate) io: &'a Io,
    pub(crate) volume: &'a Volume,
    pub(crate) session: &'a Session,
    pub(crate) buffers: &'a BufPool,
    pub(crate) queue_share: &'a Rc<QueueShare>,
    pub(crate) sender: &'a Sender,
    /// Whether the client is gone.
    pub(crate) gone: &'a dyn Fn() -> bool,
}

impl Means<'_> {
    /// How long a piece is that a volume is sure to find memory for, bytes.
    pub(crate) fn piece(queue_share: &QueueShare) -> usize {
        let most = queue_share.share().reserve().saturating_sub(REQUEST_BYTES).min(PIECE);
        // A power of two: that is what a buffer takes.
        (most.max(4096) / 2 + 1).next_power_of_two()
    }

    /// What a piece takes of the volume's share: its buffer, and what the store needs for parts of blocks as far as
    /// the volume is sure of it.
    pub(crate) fn piece_bytes(
        volume: &Volume,
        queue_share: &QueueShare,
        (offset, length): (u64, usize),
    ) -> usize {
        let buffer = BufPool::footprint(length);
        match volume.bounce_footprint(offset, length) {
            0 => buffer,
            bounce => (buffer + bounce).min(queue_share.share().reserve()).max(buffer),
        }
    }
}

/// A WRITE that is carried out in pieces; its reply leaves when the last one has ended.
pub(crate) struct Parts {
    to: ReplyTo,
    /// Pieces begun and not ended.
    left: Cell<usize>,
    /// All of them have begun.
    complete: Cell<bool>,
    failure: Cell<Option<(Errno, &'static str)>>,
    held: RefCell<Option<Room>>,
}

impl Parts {
    pub(crate) fn new(to: ReplyTo, held: Room) -> Rc<Parts> {
        Rc::new(Parts {
            to,
            left: Cell::new(0),
            complete: Cell::new(false),
            failure: Cell::new(None),
            held: RefCell::new(Some(held)),
        })
    }

    /// One more piece.
    pub(crate) fn begin(&self, last: bool) {
        self.left.set(self.left.get() + 1);
        self.complete.set(last);
    }

    /// A piece has ended; the reply if it was the last.
    fn end(&self, failure: Option<(Errno, &'static str)>) -> Option<Reply> {
        self.left.set(self.left.get() - 1);
        if self.failure.get().is_none() {
            self.failure.set(failure);
        }
        if self.left.get() > 0 || !self.complete.get() {
            return None;
        }
        let body = self.failure.get().map_or(Body::Done, |(errno, text)| Body::Error(errno, text));
        Some(Reply { to: self.to, body, held: self.held.take() })
    }
}

/// A request on its way, by value: nothing of it is read again from the client.
pub(crate) struct Job {
    pub(crate) to: ReplyTo,
    pub(crate) operation: Operation,
    /// The data of a write.
    pub(crate) payload: Option<Buf>,
    /// The memory and the place it takes until its reply has been sent.
    pub(crate) held: Room,
    /// The WRITE of which it is a piece.
    pub(crate) parts: Option<Rc<Parts>>,
    /// There was no memory for all of it: it is carried out in pieces, each with memory of its own.
    pub(crate) short: bool,
}

/// What is to be sent for a request.
pub(crate) struct Reply {
    pub(crate) to: ReplyTo,
    pub(crate) body: Body,
    /// Given back when the reply has been sent.
    pub(crate) held: Option<Room>,
}

/// What a reply carries.
pub(crate) enum Body {
    /// Success without data.
    Done,
    /// An error, and a word for the human at the client.
    Error(Errno, &'static str),
    /// The data of a read from `offset`; in one piece if `unfragmented`, more to come if not
    /// `last`.
    Data { offset: u64, data: Buf, unfragmented: bool, last: bool },
    /// The beginning of the data of a read, `length` bytes in all, which leave in one chunk; nothing
    /// but [`Body::More`] follows until the last.
    First { offset: u64, length: u32, data: Buf },
    /// More of it.
    More { data: Buf, last: bool },
    /// `count` descriptors for a context.
    Status { context: u32, count: u32, descriptors: Buf },
}

/// Carries out a job and hands its reply to the sender. An error is returned for the log; the
/// client gets its number.
pub(crate) async fn execute(means: Means<'_>, job: Job) -> Result<(), BlockError> {
    let Means { io, volume, session, buffers, sender, .. } = means;
    let Job { to, operation, payload, mut held, parts, short } = job;
    let result = match operation {
        Operation::Read { offset, length, unfragmented } => {
            let whole = unfragmented || to.chunks().is_none();
            let range = Range { offset, length, whole };
            match (short, whole) {
                (true, true) => return Box::pin(read_stream(means, to, range, held)).await,
                (true, false) => Box::pin(read_short(means, to, range, &mut held)).await,
                (false, _) => read(means, to, range).await,
            }
        }
        Operation::Write { offset, fua, .. } => match payload {
            Some(data) => volume.write(io, data, offset, fua).await.0.map(|()| Body::Done),
            None => unreachable!("the reader hands over every write with its payload"),
        },
        Operation::Flush => volume.flush(io).await.map(|()| Body::Done),
        Operation::Trim { offset, length, fua } => {
            volume.discard(io, offset, length, fua).await.map(|()| Body::Done)
        }
        Operation::Cache { offset, length } => {
            volume.prefetch(io, offset, length).await.map(|()| Body::Done)
        }
        Operation::WriteZeroes { offset, length, fua, no_hole, fast } => {
            let flags = ZeroFlags { may_unmap: !no_hole, fast_only: fast };
            let wanted = || !(means.gone)();
            let zeroes = volume.write_zeroes_while(io, offset, length, flags, fua, &wanted);
            zeroes.await.map(|()| Body::Done)
        }
        Operation::BlockStatus { offset, length, one } => {
            status(io, volume, buffers, session, (offset, length), one).await
        }
        Operation::Disconnect => Ok(Body::Done),
    };
    let (body, outcome) = match result {
        Ok(body) => (body, Ok(())),
        Err(error) => (Body::Error(errno(&error), text(error.kind)), Err(error)),
    };
    match parts {
        None => sender.push(Reply { to, body, held: Some(held) }),
        Some(parts) => {
            let failure = match body {
                Body::Error(errno, text) => Some((errno, text)),
                _ => None,
            };
            parts.end(failure).into_iter().for_each(|reply| sender.push(reply));
        }
    }
    outcome
}

/// What a read wants; `whole`: in one chunk.
struct Range {
    offset: u64,
    length: u32,
    whole: bool,
}

/// Reads; all but the last piece are handed to the sender here. A piece is read only while the
/// sender keeps up, so that data from memory does not pile up in ours.
async fn read(means: Means<'_>, to: ReplyTo, range: Range) -> Result<Body, BlockError> {
    let Means { io, volume, buffers, sender, .. } = means;
    let Range { mut offset, length: mut left, whole } = range;
    let piece = match volume.capabilities().read_piece {
        Some(piece) if !whole => piece,
        _ => left,
    };
    loop {
        sender.keeps_up().await;
        let length = left.min(piece);
        let buf = buffers.take(usize::try_from(length).unwrap_or(usize::MAX)).await;
        let (result, data) = volume.read(io, buf, offset).await;
        result?;
        left -= length;
        let body = Body::Data { offset, data, unfragmented: whole, last: left == 0 };
        if left == 0 {
            return Ok(body);
        }
        sender.push(Reply { to, body, held: None });
        offset += u64::from(length);
    }
}

/// As [`read`] in chunks, where the volume has not enough memory for all of them at once. Waits for
/// memory only while it holds none: what was read leaves without it.
async fn read_short(
    means: Means<'_>,
    to: ReplyTo,
    range: Range,
    held: &mut Room,
) -> Result<Body, BlockError> {
    let Means { io, volume, buffers, queue_share, sender, .. } = means;
    let Range { mut offset, length: mut left, .. } = range;
    loop {
        sender.keeps_up().await;
        let length = left.min(u32::try_from(Means::piece(queue_share)).unwrap_or(u32::MAX));
        let bytes = usize::try_from(length).unwrap_or(usize::MAX);
        let share =
            Some(queue_share.take(Means::piece_bytes(volume, queue_share, (offset, bytes))).await);
        let (result, data) = volume.read(io, buffers.take(bytes).await, offset).await;
        result?;
        left -= length;
        let body = Body::Data { offset, data, unfragmented: false, last: left == 0 };
        if left == 0 {
            held.share = share;
            return Ok(body);
        }
        sender.push(Reply { to, body, held: Some(Room { share, budget: None }) });
        offset += u64::from(length);
    }
}

/// Reads what must leave in one chunk, piece by piece, each of which leaves before the next one is
/// read: for want of memory. Nothing else leaves meanwhile, and a failure after the first piece ends
/// the connection, since nothing else can be said within a chunk ("Simple reply message").
async fn read_stream(
    means: Means<'_>,
    to: ReplyTo,
    range: Range,
    mut held: Room,
) -> Result<(), BlockError> {
    let Means { io, volume, buffers, queue_share, sender, .. } = means;
    let Range { mut offset, length, .. } = range;
    let piece = u32::try_from(Means::piece(queue_share)).unwrap_or(u32::MAX);
    // Taken once, before the turn, and used for all pieces: replies behind this one hold memory.
    let bytes = usize::try_from(piece).unwrap_or(usize::MAX);
    let share = queue_share.take(Means::piece_bytes(volume, queue_share, (offset, bytes))).await;
    held.share = Some(share);
    let turn = sender.stream_turn().await;
    let mut left = length;
    while left > 0 {
        let count = left.min(piece);
        let buf = buffers.take(usize::try_from(count).unwrap_or(usize::MAX)).await;
        let (result, data) = volume.read(io, buf, offset).await;
        if let Err(error) = result {
            if left == length {
                let body = Body::Error(errno(&error), text(error.kind));
                sender.push(Reply { to, body, held: Some(held) });
            } else {
                sender.break_off();
            }
            return Err(error);
        }
        let body = match left == length {
            true => Body::First { offset, length, data },
            false => Body::More { data, last: left == count },
        };
        left -= count;
        offset += u64::from(count);
        sender.push_stream(Reply { to, body, held: None }).await;
    }
    drop((turn, held));
    Ok(())
}

async fn status(
    io: &Io,
    volume: &Volume,
    buffers: &BufPool,
    session: &Session,
    (offset, length): (u64, u64),
    one: bool,
) -> Result<Body, BlockError> {
    let limit = if one { 1 } else { usize::from(EXTENTS_MAX) };
    let extents = volume.extents(io, offset, length, limit).await?;
    let mut bytes = Vec::new();
    let payload_max = session.export.block.maximum_payload();
    let asked = (length, one);
    let mut list =
        ExtentList::new(&mut bytes, session.style, asked, payload_max, u32::from(EXTENTS_MAX));
    for extent in extents {
        let state =
            if extent.hole { ExtentState::HOLE.with(ExtentState::ZERO) } else { ExtentState::NONE };
        if !list.push(extent.length, state) {
            break;
        }
    }
    let count = list.finish();
    let mut descriptors = buffers.take(bytes.len()).await;
    descriptors.copy_from_slice(&bytes);
    // `check` lets BLOCK_STATUS through only where a context was selected.
    let context = session.allocation_context.unwrap_or_default();
    Ok(Body::Status { context, count, descriptors })
}

/// The one table from kinds of errors to numbers on the wire ("Error values").
fn errno(error: &BlockError) -> Errno {
    match error.kind {
        // The volume has become shorter than the client believes.
        ErrorKind::OutOfRange
            if matches!(
                error.operation,
                ebb_volume::Operation::Write | ebb_volume::Operation::WriteZeroes
            ) =>
        {
            Errno::NoSpc
        }
        ErrorKind::Invalid | ErrorKind::OutOfRange => Errno::Inval,
        ErrorKind::ReadOnly => Errno::Perm,
        ErrorKind::NoSpace => Errno::NoSpc,
        ErrorKind::Unsupported => Errno::NotSup,
        ErrorKind::Closing => Errno::Shutdown,
        _ => Errno::Io,
    }
}

fn text(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::OutOfRange => "the range is not within the volume: it has become shorter",
        ErrorKind::NoSpace => "the store is full",
        ErrorKind::ReadOnly => "the volume is read-only",
        ErrorKind::Closing => "the volume is being closed",
        ErrorKind::Short => "the store is shorter than the volume",
        ErrorKind::Unsupported => "the store cannot do this",
        _ => "the store failed; the server's log says more",
    }
}
