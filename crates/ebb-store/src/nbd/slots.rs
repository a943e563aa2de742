//! The requests of one connection: queued, sent and completed. No I/O.
//!
//! Invariants:
//! - A request completes once. A cookie names a slot *and* its generation, so that a late or forged
//!   reply matches no other request.
//! - A slot keeps its buffer, or records that the sender or receiver has it, until the request has
//!   completed, also if no task waits for it any more.
//! - A read succeeds only if each of its bytes was received exactly once.
//! - Nothing is allocated once warm: slots, lists and coverage are reused.

use std::collections::VecDeque;
use std::ops::{DerefMut, Range};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use ebb_nbd_proto::{Command, CommandFlags, Errno, ExtentState, REQUEST_LEN, magic};

use super::reply::{Coverage, FrameContent, ProtocolViolation, ReplyFrame};
use ebb_block::{Extent, push_extent};

/// A request to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RemoteRequest {
    pub(crate) command: Command,
    pub(crate) flags: CommandFlags,
    pub(crate) offset: u64,
    pub(crate) length: u32,
    /// Where the data is in the buffer.
    pub(crate) at: usize,
    /// The most extents to return.
    pub(crate) limit: usize,
    /// A write of zeroes, which has no buffer.
    pub(crate) zeroes: bool,
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestFailure {
    /// The server returned this error.
    Server(u32),
    /// The reply violated the protocol.
    Protocol(&'static str),
    /// No connection within the time limit; the link has the reason.
    Lost,
}

impl RemoteRequest {
    /// The end of its range, bytes.
    pub(crate) fn end(&self) -> u64 {
        self.offset.saturating_add(u64::from(self.length))
    }
}

/// The result of a request.
#[derive(Debug)]
pub(crate) struct RequestOutcome<B> {
    pub(crate) result: Result<(), RequestFailure>,
    pub(crate) buf: Option<B>,
    pub(crate) extents: Vec<Extent>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestPhase {
    Free,
    Queued,
    Sent,
    Completed,
}

/// Identifies a request: slot and generation, as on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cookie(pub(crate) u64);

#[derive(Debug)]
struct RequestSlot<B, H> {
    phase: RequestPhase,
    generation: u32,
    request: RemoteRequest,
    buf: Option<B>,
    /// The sender or the receiver has the buffer.
    buf_out: bool,
    /// No task waits for the request any more.
    abandoned: bool,
    /// See [`RequestSlots::mark_late`].
    late: bool,
    /// It was sent on an earlier connection, and not replied to.
    again: bool,
    failure: Option<RequestFailure>,
    coverage: Coverage,
    extents: Vec<Extent>,
    /// The offset that the next descriptor describes.
    status_at: u64,
    waker: Option<std::task::Waker>,
    /// When a connection was first lost with this request in flight.
    lost: Option<Instant>,
    /// A guard that is released when the request completes.
    guard: Option<H>,
}

/// What the receiver does next for a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ReplyStep {
    /// Nothing: the frame is complete.
    Done,
    /// Receive the next bytes into this part of the buffer.
    Fill(Range<usize>),
    /// Pass the next `entries` descriptors to [`RequestSlots::describe`].
    Describe(u32),
    /// Discard this many bytes.
    Skip(u32),
}

/// The requests of one connection. `B` is the buffer, `H` a guard that each request holds.
#[derive(Debug)]
pub(crate) struct RequestSlots<B, H> {
    list: Vec<RequestSlot<B, H>>,
    free: Vec<usize>,
    queue: VecDeque<usize>,
    /// Replies to reads come in chunks.
    structured: bool,
    allocation: Option<u32>,
    /// When a connection was first lost since the last reply.
    outage: Option<Instant>,
}

impl<B, H> Default for RequestSlots<B, H> {
    fn default() -> Self {
        RequestSlots {
            list: Vec::new(),
            free: Vec::new(),
            queue: VecDeque::new(),
            structured: false,
            allocation: None,
            outage: None,
        }
    }
}

impl<B: DerefMut<Target = [u8]>, H> RequestSlots<B, H> {
    /// Sets what the next connection negotiated.
    pub(crate) fn agree(&mut self, structured: bool, allocation: Option<u32>) {
        self.structured = structured;
        self.allocation = allocation;
    }

    /// Since when a request has been without a connection that replies, if it has waited for a slot since `waiting`.
    pub(crate) fn lost_since(&self, waiting: Option<Instant>) -> Option<Instant> {
        Some(self.outage?.max(waiting?))
    }

    /// Queues a request. The buffer is at least `request.at` plus the request's length. `lost`: as
    /// [`RequestSlots::lost_since`] says.
    pub(crate) fn push(
        &mut self,
        request: RemoteRequest,
        buf: Option<B>,
        guard: Option<H>,
        lost: Option<Instant>,
    ) -> Cookie {
        let index = self.place();
        let slot = &mut self.list[index];
        slot.phase = RequestPhase::Queued;
        slot.request = request;
        slot.buf = buf;
        slot.guard = guard;
        slot.lost = lost;
        let cookie = cookie(index, slot.generation);
        self.queue.push_back(index);
        cookie
    }

    /// As [`RequestSlots::push`], at the front of the queue.
    pub(crate) fn push_first(&mut self, request: RemoteRequest) -> Cookie {
        let cookie = self.push(request, None, None, None);
        self.queue.rotate_right(1);
        cookie
    }

    fn place(&mut self) -> usize {
        if let Some(index) = self.free.pop() {
            return index;
        }
        self.list.push(RequestSlot {
            phase: RequestPhase::Free,
            generation: 0,
            request: RemoteRequest {
                command: Command::Flush,
                flags: CommandFlags::NONE,
                offset: 0,
                length: 0,
                at: 0,
                limit: 0,
                zeroes: false,
            },
            buf: None,
            buf_out: false,
            abandoned: false,
            late: false,
            again: false,
            failure: None,
            coverage: Coverage::default(),
            extents: Vec::new(),
            status_at: 0,
            waker: None,
            lost: None,
            guard: None,
        });
        self.list.len() - 1
    }

    pub(crate) fn has_queued(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Whether a request is queued that ends at or before `size`.
    pub(crate) fn has_queued_within(&self, size: u64) -> bool {
        self.first_within(size).is_some()
    }

    /// The place in the queue of the first request that ends at or before `size`.
    fn first_within(&self, size: u64) -> Option<usize> {
        self.queue.iter().position(|index| self.list[*index].request.end() <= size)
    }

    /// Marks the requests that wait for their replies as late.
    pub(crate) fn mark_late(&mut self) {
        for slot in &mut self.list {
            slot.late = slot.phase == RequestPhase::Sent;
        }
    }

    /// How many requests that were marked as late still wait for their replies.
    pub(crate) fn late(&self) -> usize {
        self.list.iter().filter(|slot| slot.late && slot.phase == RequestPhase::Sent).count()
    }

    /// Whether a request waits for its reply.
    pub(crate) fn has_sent(&self) -> bool {
        self.list.iter().any(|slot| slot.phase == RequestPhase::Sent)
    }

    /// Requests that have not completed.
    #[cfg(test)]
    pub(crate) fn busy(&self) -> usize {
        self.list.len() - self.free.len()
    }

    /// The next request to send, of those that end at or before `size`: its header, and the data of a write, whose
    /// buffer is out until [`RequestSlots::return_buf`].
    pub(crate) fn next_to_send(&mut self, size: u64) -> Option<ToSend<B>> {
        let index = self.queue.remove(self.first_within(size)?)?;
        let slot = &mut self.list[index];
        slot.phase = RequestPhase::Sent;
        slot.late = false;
        let again = std::mem::take(&mut slot.again);
        slot.status_at = slot.request.offset;
        let cookie = cookie(index, slot.generation);
        let payload = if slot.request.command == Command::Write { slot.buf.take() } else { None };
        slot.buf_out = payload.is_some();
        let length = usize::try_from(slot.request.length).unwrap_or(0);
        let range = slot.request.at..slot.request.at + length;
        let zeroes = if slot.request.zeroes { length } else { 0 };
        let header = header(&slot.request, cookie);
        Some(ToSend { cookie, header, payload, range, zeroes, again })
    }

    /// The sender or receiver returns a buffer.
    pub(crate) fn return_buf(&mut self, cookie: Cookie, buf: B) {
        if let Some(slot) = self.slot(cookie) {
            slot.buf = Some(buf);
            slot.buf_out = false;
            self.settle(cookie);
        }
    }

    /// The buffer of a read, to be filled; it is out until [`RequestSlots::return_buf`].
    pub(crate) fn take_buf(&mut self, cookie: Cookie) -> Option<B> {
        let slot = self.slot(cookie)?;
        let buf = slot.buf.take()?;
        slot.buf_out = true;
        Some(buf)
    }

    /// What to do for a frame.
    ///
    /// # Errors
    /// The connection must be closed. The request concerned, if there is one, has failed.
    pub(crate) fn apply(&mut self, frame: &ReplyFrame) -> Result<ReplyStep, ProtocolViolation> {
        let cookie = Cookie(frame.cookie);
        let structured = self.structured;
        let allocation = self.allocation;
        let slot = self.slot(cookie).filter(|slot| slot.phase == RequestPhase::Sent);
        let slot = slot.ok_or(ProtocolViolation("a reply to a request that was not sent"))?;
        let step = slot.apply(frame, structured, allocation);
        if let Err(violation) = step {
            self.fail(cookie, RequestFailure::Protocol(violation.0));
        }
        step
    }

    /// The payload of the frame was received: completes the request if the frame was its last.
    /// Returns whether a write was acknowledged that is not stable.
    ///
    /// # Errors
    /// As [`RequestSlots::apply`].
    pub(crate) fn finish(&mut self, frame: &ReplyFrame) -> Result<bool, ProtocolViolation> {
        let cookie = Cookie(frame.cookie);
        let Some(slot) = self.slot(cookie) else { return Ok(false) };
        if !frame.done || slot.phase != RequestPhase::Sent {
            return Ok(false);
        }
        let request = slot.request;
        if slot.failure.is_none()
            && request.command == Command::Read
            && !slot.coverage.is_whole(request.length)
        {
            let violation = ProtocolViolation("a read ended before all of its bytes were sent");
            self.fail(cookie, RequestFailure::Protocol(violation.0));
            return Err(violation);
        }
        slot.phase = RequestPhase::Completed;
        let changes =
            matches!(request.command, Command::Write | Command::WriteZeroes | Command::Trim);
        let volatile =
            changes && slot.failure.is_none() && !request.flags.contains(CommandFlags::FUA);
        self.outage = None;
        self.settle(cookie);
        Ok(volatile)
    }

    /// True for a reply that says that the server is shutting down: the request is for its
    /// successor.
    pub(crate) fn is_shutdown_error(&self, frame: &ReplyFrame) -> bool {
        let shutdown = Errno::Shutdown.to_wire();
        matches!(frame.content, FrameContent::Simple { error } | FrameContent::Error { error, .. } if error == shutdown)
    }

    /// Adds one descriptor of eight bytes.
    ///
    /// # Errors
    /// As [`RequestSlots::apply`].
    pub(crate) fn describe(
        &mut self,
        cookie: Cookie,
        bytes: [u8; 8],
    ) -> Result<(), ProtocolViolation> {
        let Some(slot) = self.slot(cookie) else { return Ok(()) };
        let (length, state) = (u64::from_be_bytes(bytes) >> 32, u64::from_be_bytes(bytes));
        if length == 0 {
            let violation = ProtocolViolation("an extent of no bytes");
            self.fail(cookie, RequestFailure::Protocol(violation.0));
            return Err(violation);
        }
        // The last one may extend beyond the requested range.
        let end = slot.request.offset + u64::from(slot.request.length);
        let length = length.min(end.saturating_sub(slot.status_at));
        let state = ExtentState(u32::try_from(state & 0xffff_ffff).unwrap_or(0));
        let hole = state.contains(ExtentState::HOLE.with(ExtentState::ZERO));
        if length > 0 && slot.extents.len() <= slot.request.limit {
            push_extent(&mut slot.extents, Extent { offset: slot.status_at, length, hole });
            slot.status_at += length;
        }
        Ok(())
    }

    /// After a connection was lost: queues again, at the front, what was sent and not replied to. All buffers have
    /// been returned. Requests that first lost a connection longer than `limit` ago fail instead, sent
    /// or not: a connection whose first flush is not replied to sends nothing else.
    pub(crate) fn replay(&mut self, now: Instant, limit: Duration) {
        self.outage.get_or_insert(now);
        for index in 0..self.list.len() {
            let slot = &mut self.list[index];
            let sent = match slot.phase {
                RequestPhase::Sent => true,
                RequestPhase::Queued => false,
                _ => continue,
            };
            let id = cookie(index, slot.generation);
            let lost = *slot.lost.get_or_insert(now);
            if slot.abandoned || now.saturating_duration_since(lost) > limit {
                if !sent {
                    self.queue.retain(|&queued| queued != index);
                }
                self.fail(id, RequestFailure::Lost);
                continue;
            }
            if !sent {
                continue;
            }
            slot.phase = RequestPhase::Queued;
            slot.again = true;
            slot.failure = None;
            slot.coverage.clear();
            slot.extents.clear();
            self.queue.push_front(index);
        }
    }

    /// Fails all queued requests.
    pub(crate) fn fail_queued(&mut self) {
        while let Some(index) = self.queue.pop_front() {
            let id = cookie(index, self.list[index].generation);
            self.fail(id, RequestFailure::Lost);
        }
    }

    /// Fails all requests: there will be no further connection.
    pub(crate) fn fail_all(&mut self) {
        self.queue.clear();
        for index in 0..self.list.len() {
            let slot = &mut self.list[index];
            slot.buf_out = false;
            let id = cookie(index, slot.generation);
            self.fail(id, RequestFailure::Lost);
        }
    }

    /// Fails a request that has not completed.
    pub(crate) fn fail(&mut self, cookie: Cookie, failure: RequestFailure) {
        if let Some(slot) = self.slot(cookie)
            && slot.phase != RequestPhase::Completed
        {
            slot.failure = Some(failure);
            slot.phase = RequestPhase::Completed;
            self.settle(cookie);
        }
    }

    /// The result, once the request has completed; this frees its slot.
    pub(crate) fn poll(&mut self, cookie: Cookie, cx: &Context<'_>) -> Poll<RequestOutcome<B>> {
        let Some(slot) = self.slot(cookie) else {
            // Unreachable: only the waiting task takes the result.
            let result = Err(RequestFailure::Protocol("the request has completed"));
            return Poll::Ready(RequestOutcome { result, buf: None, extents: Vec::new() });
        };
        if slot.phase != RequestPhase::Completed || slot.buf_out {
            match &mut slot.waker {
                Some(waker) => waker.clone_from(cx.waker()),
                None => slot.waker = Some(cx.waker().clone()),
            }
            return Poll::Pending;
        }
        let result = slot.failure.take().map_or(Ok(()), Err);
        let (buf, extents) = (slot.buf.take(), std::mem::take(&mut slot.extents));
        self.release(cookie);
        Poll::Ready(RequestOutcome { result, buf, extents })
    }

    /// No task waits for the request any more. If it was not sent, it never will be.
    pub(crate) fn abandon(&mut self, cookie: Cookie) {
        let Some(slot) = self.slot(cookie) else { return };
        slot.abandoned = true;
        slot.waker = None;
        if slot.phase == RequestPhase::Queued {
            slot.phase = RequestPhase::Completed;
            let index = index_of(cookie);
            self.queue.retain(|queued| *queued != index);
        }
        self.settle(cookie);
    }

    fn settle(&mut self, cookie: Cookie) {
        let Some(slot) = self.slot(cookie) else { return };
        if slot.phase != RequestPhase::Completed || slot.buf_out {
            return;
        }
        if slot.abandoned {
            slot.buf = None;
            self.release(cookie);
        } else if let Some(waker) = slot.waker.take() {
            waker.wake();
        }
    }

    fn release(&mut self, cookie: Cookie) {
        if let Some(slot) = self.slot(cookie) {
            slot.phase = RequestPhase::Free;
            slot.generation = slot.generation.wrapping_add(1);
            slot.abandoned = false;
            slot.again = false;
            slot.failure = None;
            slot.coverage.clear();
            slot.extents.clear();
            slot.lost = None;
            slot.waker = None;
            slot.guard = None;
            self.free.push(index_of(cookie));
        }
    }

    fn slot(&mut self, cookie: Cookie) -> Option<&mut RequestSlot<B, H>> {
        let generation = u32::try_from(cookie.0 >> 32).ok()?;
        let slot = self.list.get_mut(index_of(cookie))?;
        (slot.generation == generation && slot.phase != RequestPhase::Free).then_some(slot)
    }
}

/// A request to be sent.
#[derive(Debug)]
pub(crate) struct ToSend<B> {
    pub(crate) cookie: Cookie,
    pub(crate) header: [u8; REQUEST_LEN],
    pub(crate) payload: Option<B>,
    /// The part of the payload's buffer to send.
    pub(crate) range: Range<usize>,
    /// This many zeroes instead of a payload.
    pub(crate) zeroes: usize,
    /// It was sent on an earlier connection, and not replied to.
    pub(crate) again: bool,
}

impl<B: DerefMut<Target = [u8]>, H> RequestSlot<B, H> {
    fn apply(
        &mut self,
        frame: &ReplyFrame,
        structured: bool,
        allocation: Option<u32>,
    ) -> Result<ReplyStep, ProtocolViolation> {
        let read = self.request.command == Command::Read;
        match frame.content {
            FrameContent::Simple { error } => {
                if read && structured {
                    return Err(ProtocolViolation(
                        "a simple reply to a read although structured replies were negotiated",
                    ));
                }
                if error == 0 && self.request.command == Command::BlockStatus {
                    return Err(ProtocolViolation("a simple reply to a block status request"));
                }
                if error != 0 {
                    self.failure = Some(RequestFailure::Server(error));
                    return Ok(ReplyStep::Done);
                }
                if !read {
                    return Ok(ReplyStep::Done);
                }
                self.part(self.request.offset, self.request.length).map(ReplyStep::Fill)
            }
            _ if !structured => {
                Err(ProtocolViolation("a chunk although simple replies were negotiated"))
            }
            FrameContent::None if frame.done => Ok(ReplyStep::Done),
            FrameContent::None => Err(ProtocolViolation("an empty chunk that is not the last one")),
            FrameContent::Data { offset, length } if read => {
                self.part(offset, length).map(ReplyStep::Fill)
            }
            FrameContent::Hole { offset, length } if read => {
                let range = self.part(offset, length)?;
                if let Some(part) = self.buf.as_mut().and_then(|buf| buf.get_mut(range)) {
                    part.fill(0);
                }
                Ok(ReplyStep::Done)
            }
            FrameContent::Status { context, entries }
                if self.request.command == Command::BlockStatus
                    && Some(context) == allocation
                    && self.extents.is_empty() =>
            {
                Ok(ReplyStep::Describe(entries))
            }
            FrameContent::Error { error, rest } => {
                self.failure.get_or_insert(RequestFailure::Server(error));
                Ok(ReplyStep::Skip(rest))
            }
            _ => Err(ProtocolViolation("a chunk that does not fit its request")),
        }
    }

    /// The range of the buffer for `length` bytes of the export at `offset`, recorded as received.
    fn part(&mut self, offset: u64, length: u32) -> Result<Range<usize>, ProtocolViolation> {
        let outside = ProtocolViolation("data outside the requested range");
        let start = offset.checked_sub(self.request.offset).ok_or(outside)?;
        let start = u32::try_from(start).map_err(|_| outside)?;
        let end = start.checked_add(length).filter(|end| *end <= self.request.length);
        let end = end.ok_or(outside)?;
        self.coverage.add(start, end)?;
        let place = |at: u32| usize::try_from(at).map_or(usize::MAX, |at| self.request.at + at);
        Ok(place(start)..place(end))
    }
}

fn cookie(index: usize, generation: u32) -> Cookie {
    // There are far fewer slots than 2^32: the link limits them.
    Cookie(u64::from(generation) << 32 | u64::try_from(index).unwrap_or(0))
}

fn index_of(cookie: Cookie) -> usize {
    usize::try_from(cookie.0 & 0xffff_ffff).unwrap_or(usize::MAX)
}

fn header(request: &RemoteRequest, cookie: Cookie) -> [u8; REQUEST_LEN] {
    let mut bytes = [0; REQUEST_LEN];
    bytes[..4].copy_from_slice(&magic::REQUEST.to_be_bytes());
    bytes[4..6].copy_from_slice(&request.flags.0.to_be_bytes());
    bytes[6..8].copy_from_slice(&request.command.to_wire().to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.0.to_be_bytes());
    bytes[16..24].copy_from_slice(&request.offset.to_be_bytes());
    bytes[24..].copy_from_slice(&request.length.to_be_bytes());
    bytes
}

#[cfg(test)]
mod tests;
