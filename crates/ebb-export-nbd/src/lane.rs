//! Carrying out one request: what a lane does between taking a job and handing over its reply.
//!
//! A lane is a task that does one request after the other, so that nothing is allocated per
//! request. A connection has as many lanes as it has had requests at once; they end when it falls
//! silent.

use ebb_io::{BudgetGuard, Buf, BufPool, Io};
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

/// A request on its way, by value: nothing of it is read again from the client.
pub(crate) struct Job {
    pub(crate) to: ReplyTo,
    pub(crate) operation: Operation,
    /// The data of a write.
    pub(crate) payload: Option<Buf>,
    /// The memory and the place it takes until its reply has been sent.
    pub(crate) held: BudgetGuard,
}

/// What is to be sent for a request.
pub(crate) struct Reply {
    pub(crate) to: ReplyTo,
    pub(crate) body: Body,
    /// Given back when the reply has been sent.
    pub(crate) held: Option<BudgetGuard>,
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
    /// `count` descriptors for a context.
    Status { context: u32, count: u32, descriptors: Buf },
}

/// Carries out a job and hands its reply to the sender. An error is returned for the log; the
/// client gets its number.
pub(crate) async fn execute(
    io: &Io,
    volume: &Volume,
    session: &Session,
    buffers: &BufPool,
    sender: &Sender,
    job: Job,
) -> Result<(), BlockError> {
    let Job { to, operation, payload, held } = job;
    let result = match operation {
        Operation::Read { offset, length, unfragmented } => {
            let whole = unfragmented || to.chunks().is_none();
            read(io, volume, buffers, sender, to, Range { offset, length, whole }).await
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
            volume.write_zeroes(io, offset, length, flags, fua).await.map(|()| Body::Done)
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
    sender.push(Reply { to, body, held: Some(held) });
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
async fn read(
    io: &Io,
    volume: &Volume,
    buffers: &BufPool,
    sender: &Sender,
    to: ReplyTo,
    range: Range,
) -> Result<Body, BlockError> {
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
