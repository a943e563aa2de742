//! Executes one request: from the job that a request task receives to the reply it passes to the sender.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Instant;

use ebb_export::{ReplyDue, RequestTask, longest_piece, piece_bytes};
use ebb_io::{Buf, BufPool, Io, QueueShare};
use ebb_volume::{BlockError, ErrorKind, Mode, Operation, Stop, ToldLosses, Volume, ZeroFlags};

use crate::decode::NbdRequest;
use crate::handshake::Session;
use crate::proto::{Errno, ExtentState};
use crate::reply::{ExtentList, Reply, ReplyBody, ReplyTo, RequestMemory};
use crate::sender::{Sender, UNSENT_MAX};

/// Extents in one reply to BLOCK_STATUS: the client requests the remaining ones again.
const EXTENTS_MAX: u16 = 2048;
/// The longest reply to BLOCK_STATUS, bytes: its descriptors in their extended form.
pub(crate) const STATUS_BYTES_MAX: usize = 16 * EXTENTS_MAX as usize;

/// What the requests of a connection need for their execution.
#[derive(Clone, Copy)]
pub(crate) struct RequestContext<'a> {
    pub(crate) io: &'a Io,
    pub(crate) volume: &'a Volume,
    pub(crate) session: &'a Session,
    pub(crate) buffers: &'a BufPool,
    pub(crate) queue_share: &'a Rc<QueueShare>,
    /// The memory of the connection.
    pub(crate) memory_bytes: usize,
    pub(crate) sender: &'a Sender,
    /// Checks whether the client has disconnected.
    pub(crate) is_disconnected: &'a dyn Fn() -> bool,
    pub(crate) stops: &'a ConnectionStops,
    /// The losses of the volume that the client has learned of.
    pub(crate) told: &'a ToldLosses,
}

/// What ends requests of a connection early.
#[derive(Default)]
pub(crate) struct ConnectionStops {
    /// Set when the client disconnected without `NBD_CMD_DISC`: replies cannot be sent any more.
    pub(crate) disconnected: Stop,
    /// Set when no more requests are read, whatever the reason.
    pub(crate) ended: Stop,
}

impl RequestContext<'_> {
    /// What a piece takes from the volume's share.
    fn piece_bytes(&self, offset: u64, length: usize) -> usize {
        piece_bytes(self.queue_share, length, self.volume.bounce_footprint(offset, length))
    }

    /// The longest piece for which the memory of the volume and of the connection suffice, bytes.
    fn longest_piece(&self) -> u32 {
        let most = longest_piece(self.queue_share).min(piece_within(self.memory_bytes));
        u32::try_from(most).unwrap_or(u32::MAX)
    }
}

/// Lower bound of the longest piece, bytes.
const PAGE: usize = 4096;

/// The longest piece of a request that has this memory of a connection, bytes: a power of two, as
/// the size of a buffer is. Two pieces fit, so that one is transferred while the store has the
/// other.
pub(crate) fn piece_within(memory_bytes: usize) -> usize {
    1 << (memory_bytes / 2).max(PAGE).ilog2()
}

/// A WRITE that is executed in pieces; its reply is sent when the last piece has completed.
pub(crate) struct SplitWrite {
    to: ReplyTo,
    /// Pieces in flight.
    in_flight: Cell<usize>,
    /// All pieces have begun.
    all_begun: Cell<bool>,
    failure: Cell<Option<(Errno, &'static str)>>,
    held: RefCell<Option<RequestMemory>>,
}

impl SplitWrite {
    pub(crate) fn new(to: ReplyTo, held: RequestMemory) -> Rc<SplitWrite> {
        Rc::new(SplitWrite {
            to,
            in_flight: Cell::new(0),
            all_begun: Cell::new(false),
            failure: Cell::new(None),
            held: RefCell::new(Some(held)),
        })
    }

    /// Counts one more piece.
    pub(crate) fn begin(&self, last: bool) {
        self.in_flight.set(self.in_flight.get() + 1);
        self.all_begun.set(last);
    }

    /// Notes that a piece has completed; returns the reply if it was the last.
    fn end(&self, failure: Option<(Errno, &'static str)>, piece: ReplyDue) -> Option<Reply> {
        piece.settle();
        self.in_flight.set(self.in_flight.get() - 1);
        if self.failure.get().is_none() {
            self.failure.set(failure);
        }
        if self.in_flight.get() > 0 || !self.all_begun.get() {
            return None;
        }
        let body = self
            .failure
            .get()
            .map_or(ReplyBody::Done, |(errno, text)| ReplyBody::Error(errno, text));
        Some(Reply { to: self.to, body, held: self.held.take() })
    }
}

/// A checked request, by value: nothing of it is read from the client again.
pub(crate) struct NbdJob {
    pub(crate) to: ReplyTo,
    pub(crate) operation: NbdRequest,
    /// When its header was received.
    pub(crate) arrived: Instant,
    /// The data of a write.
    pub(crate) payload: Option<Buf>,
    /// The memory it holds until its reply has been sent.
    pub(crate) held: RequestMemory,
    /// The WRITE of which it is a piece.
    pub(crate) split: Option<Rc<SplitWrite>>,
    /// There was not enough memory for all of it: it is executed in pieces, each with its own memory.
    pub(crate) short: bool,
}

/// Executes the job of `task`, if there is one, and passes its reply to the sender. An error is returned for the
/// log; the client receives its NBD error number. The job is taken here, so that it is moved once.
pub(crate) async fn execute(
    context: RequestContext<'_>,
    task: &RequestTask<NbdJob>,
) -> Result<(), BlockError> {
    let RequestContext { io, volume, sender, .. } = context;
    let Some((NbdJob { to, operation, arrived, payload, mut held, split, short }, due)) =
        task.take()
    else {
        return Ok(());
    };
    volume.stats().note_queued(io, kind(&operation), arrived);
    let result = match operation {
        NbdRequest::Read { offset, length, unfragmented } => {
            let whole = unfragmented || to.chunks().is_none();
            let range = ReadRange { offset, length, whole };
            match (short, whole) {
                (true, true) => return Box::pin(read_stream(context, to, range, held, due)).await,
                (true, false) => Box::pin(read_short(context, to, range, &mut held)).await,
                (false, _) => read(context, to, range).await,
            }
        }
        NbdRequest::Write { offset, fua, .. } => match payload {
            Some(data) => volume.write(io, data, offset, fua).await.0.map(|()| ReplyBody::Done),
            None => unreachable!("the reader passes every write with its payload"),
        },
        NbdRequest::Flush => volume.flush_for(io, context.told).await.map(|()| ReplyBody::Done),
        NbdRequest::Trim { offset, length, fua } => {
            volume.discard(io, offset, length, fua).await.map(|()| ReplyBody::Done)
        }
        // Boxed: it is rare, and would make every request's task larger.
        NbdRequest::Cache { offset, length } => {
            match Box::pin(prefetch_until_ended(context, offset, length)).await {
                Some(result) => result,
                None => {
                    due.waive();
                    return Ok(());
                }
            }
        }
        NbdRequest::WriteZeroes { offset, length, fua, no_hole, fast } => {
            let flags = ZeroFlags { may_unmap: !no_hole, fast_only: fast };
            let wanted = || !(context.is_disconnected)();
            let zeroes = volume.write_zeroes_while(io, offset, length, flags, fua, &wanted);
            zeroes.await.map(|()| ReplyBody::Done)
        }
        NbdRequest::BlockStatus { offset, length, one } => {
            match status_unless_disconnected(context, (offset, length), one).await {
                Some(result) => result,
                None => {
                    due.waive();
                    return Ok(());
                }
            }
        }
        NbdRequest::Disconnect => Ok(ReplyBody::Done),
    };
    let (body, outcome) = match result {
        Ok(body) => (body, Ok(())),
        Err(error) => (ReplyBody::Error(errno(&error), text(error.kind)), Err(error)),
    };
    match split {
        None => sender.complete(Reply { to, body, held: Some(held) }, due),
        Some(split) => {
            let failure = match body {
                ReplyBody::Error(errno, text) => Some((errno, text)),
                _ => None,
            };
            split.end(failure, due).into_iter().for_each(|reply| sender.push(reply));
        }
    }
    outcome
}

/// As which operation the volume counts a request.
#[inline]
fn kind(request: &NbdRequest) -> Operation {
    match request {
        NbdRequest::Read { .. } => Operation::Read,
        NbdRequest::Write { .. } => Operation::Write,
        NbdRequest::Flush | NbdRequest::Disconnect => Operation::Flush,
        NbdRequest::Trim { .. } => Operation::Discard,
        NbdRequest::Cache { .. } => Operation::Prefetch,
        NbdRequest::WriteZeroes { .. } => Operation::WriteZeroes,
        NbdRequest::BlockStatus { .. } => Operation::Extents,
    }
}

/// The range of a read; `whole`: to be sent in one chunk.
struct ReadRange {
    offset: u64,
    length: u32,
    whole: bool,
}

/// Reads; all but the last piece are passed to the sender here. A piece is read only while little data is
/// unsent, so that reads that are faster than the client do not fill the memory.
async fn read(
    context: RequestContext<'_>,
    to: ReplyTo,
    range: ReadRange,
) -> Result<ReplyBody, BlockError> {
    let RequestContext { io, volume, buffers, sender, .. } = context;
    let ReadRange { mut offset, length: mut left, whole } = range;
    let piece = match volume.capabilities().read_piece {
        Some(piece) if !whole => piece,
        _ => left,
    };
    loop {
        sender.wait_until_unsent_below(UNSENT_MAX).await;
        let length = left.min(piece);
        let buf = buffers.take(usize::try_from(length).unwrap_or(usize::MAX)).await;
        let (result, data) = volume.read(io, buf, offset).await;
        result?;
        left -= length;
        let body = ReplyBody::Data { offset, data, unfragmented: whole, last: left == 0 };
        if left == 0 {
            return Ok(body);
        }
        sender.push(Reply { to, body, held: None });
        offset += u64::from(length);
    }
}

/// As [`read`] in chunks, where the volume or the connection does not have enough memory for all of
/// them at once. Waits for memory only while it holds none: a piece that was read is sent with its
/// own memory.
async fn read_short(
    context: RequestContext<'_>,
    to: ReplyTo,
    range: ReadRange,
    held: &mut RequestMemory,
) -> Result<ReplyBody, BlockError> {
    let RequestContext { io, volume, buffers, queue_share, sender, .. } = context;
    let ReadRange { mut offset, length: mut left, .. } = range;
    // A piece, and the unsent ones before it, fit into the memory of the connection.
    let unsent = UNSENT_MAX.min(context.memory_bytes / 2);
    loop {
        sender.wait_until_unsent_below(unsent).await;
        let length = left.min(context.longest_piece());
        let bytes = usize::try_from(length).unwrap_or(usize::MAX);
        let share = Some(queue_share.take(context.piece_bytes(offset, bytes)).await);
        let (result, data) = volume.read(io, buffers.take(bytes).await, offset).await;
        result?;
        left -= length;
        let body = ReplyBody::Data { offset, data, unfragmented: false, last: left == 0 };
        if left == 0 {
            held.share = share;
            return Ok(body);
        }
        sender.push(Reply { to, body, held: Some(RequestMemory { share, budget: None }) });
        offset += u64::from(length);
    }
}

/// Reads data that must be sent in one chunk in pieces, because there is not enough memory for all of it: each
/// piece is sent before the next one is read. No other reply is sent meanwhile, and a failure after the first piece
/// ends the connection, since an error cannot be reported within a chunk ("Simple reply message").
async fn read_stream(
    context: RequestContext<'_>,
    to: ReplyTo,
    range: ReadRange,
    mut held: RequestMemory,
    due: ReplyDue,
) -> Result<(), BlockError> {
    let RequestContext { io, volume, buffers, queue_share, sender, .. } = context;
    let ReadRange { mut offset, length, .. } = range;
    let piece = context.longest_piece();
    // Taken once for all pieces, and before the stream begins: replies queued behind it hold memory, so a stream
    // must not wait for memory.
    let bytes = usize::try_from(piece).unwrap_or(usize::MAX);
    held.share = Some(queue_share.take(context.piece_bytes(offset, bytes)).await);
    let permit = sender.begin_stream().await;
    let mut left = length;
    while left > 0 {
        let count = left.min(piece);
        let buf = buffers.take(usize::try_from(count).unwrap_or(usize::MAX)).await;
        let (result, data) = volume.read(io, buf, offset).await;
        if let Err(error) = result {
            if left == length {
                let body = ReplyBody::Error(errno(&error), text(error.kind));
                sender.complete(Reply { to, body, held: Some(held) }, due);
            } else {
                due.waive();
                sender.break_off();
            }
            return Err(error);
        }
        let body = match left == length {
            true => ReplyBody::First { offset, length, data },
            false => ReplyBody::More { data, last: left == count },
        };
        left -= count;
        offset += u64::from(count);
        sender.push_stream(Reply { to, body, held: None }).await;
    }
    due.settle();
    drop((permit, held));
    Ok(())
}

/// As [`status`]. It changes nothing and is cancelled when the client disconnects, which matters where it is many
/// requests to another server: then the result is `None`. With a writeback cache it writes dirty data first, so it runs to
/// completion.
async fn status_unless_disconnected(
    context: RequestContext<'_>,
    range: (u64, u64),
    one: bool,
) -> Option<Result<ReplyBody, BlockError>> {
    let cancelled = async {
        match context.volume.cache_mode() {
            Mode::Writeback => std::future::pending().await,
            _ => context.stops.disconnected.wait().await,
        }
        None
    };
    futures_lite::future::or(async { Some(status(context, range, one).await) }, cancelled).await
}

/// Prefetches. This changes nothing, whatever the cache, and may be many requests to another server: when the client
/// disconnects it is cancelled, and the result is `None`; when the connection ends for another reason, such as the
/// end of the daemon, it is cancelled with an error.
async fn prefetch_until_ended(
    context: RequestContext<'_>,
    offset: u64,
    length: u64,
) -> Option<Result<ReplyBody, BlockError>> {
    let prefetched = async {
        let result = context.volume.prefetch(context.io, offset, length).await;
        Some(result.map(|()| ReplyBody::Done))
    };
    let cancelled = async {
        context.stops.disconnected.wait().await;
        None
    };
    let ended = async {
        context.stops.ended.wait().await;
        // Not a failure of the volume: nothing is logged.
        Some(Ok(ReplyBody::Error(Errno::Shutdown, "the connection is being closed")))
    };
    let cancelled = futures_lite::future::or(cancelled, ended);
    futures_lite::future::or(prefetched, cancelled).await
}

async fn status(
    context: RequestContext<'_>,
    (offset, length): (u64, u64),
    one: bool,
) -> Result<ReplyBody, BlockError> {
    let RequestContext { io, volume, buffers, session, .. } = context;
    let limit = if one { 1 } else { usize::from(EXTENTS_MAX) };
    let states: Vec<(u64, ExtentState)> = match &session.changed_since {
        Some(snapshot) => {
            let changes = volume.changes(io, (snapshot, None), (offset, length), limit);
            let changes = Box::pin(changes).await?;
            let state =
                |changed| if changed { crate::proto::context::DIRTY } else { ExtentState::NONE };
            changes.into_iter().map(|(length, changed)| (length, state(changed))).collect()
        }
        None => {
            let hole = ExtentState::HOLE.with(ExtentState::ZERO);
            let state = |is_hole| if is_hole { hole } else { ExtentState::NONE };
            let extents = volume.extents(io, offset, length, limit).await?;
            extents.into_iter().map(|extent| (extent.length, state(extent.hole))).collect()
        }
    };
    let mut bytes = Vec::new();
    let payload_max = session.export.block.maximum_payload();
    let requested = (length, one);
    let mut list =
        ExtentList::new(&mut bytes, session.style, requested, payload_max, u32::from(EXTENTS_MAX));
    for (length, state) in states {
        if !list.push(length, state) {
            break;
        }
    }
    let count = list.finish();
    let mut descriptors = buffers.take(bytes.len()).await;
    descriptors.copy_from_slice(&bytes);
    // `check` accepts BLOCK_STATUS only if a context was selected.
    let context = session.context.unwrap_or_default();
    Ok(ReplyBody::Status { context, count, descriptors })
}

/// Maps kinds of errors to NBD error numbers ("Error values").
fn errno(error: &BlockError) -> Errno {
    match error.kind {
        // The volume has become shorter than the size the client was told.
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
        ErrorKind::Closing | ErrorKind::Offline => Errno::Shutdown,
        _ => Errno::Io,
    }
}

fn text(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::OutOfRange => "the range is not within the volume, which has become shorter",
        ErrorKind::NoSpace => "the store is full",
        ErrorKind::ReadOnly => "the volume is read-only",
        ErrorKind::Closing => "the volume is being closed",
        ErrorKind::Offline => "the store is offline; see the server's log",
        ErrorKind::Short => "the store is shorter than the volume",
        ErrorKind::Unsupported => "the store does not support this request",
        _ => "the store failed; see the server's log",
    }
}
