//! Replies of the transmission phase: what is to be sent, and its encoding into fixed arrays.
//!
//! Implements the sections "Simple reply message", "Structured reply chunk message", "Extended reply
//! chunk message" and "Structured reply types" of the protocol. Nothing here allocates: a
//! [`ReplyHeader`] is 64 bytes by value, and what follows it on the wire (data, descriptors, a message)
//! is not copied.
//!
//! Invariants: a client that negotiated nothing receives simple replies only ([`ReplyTo::chunks`] is
//! `None`); with structured replies, the reply to a READ consists of chunks even if the READ fails; with
//! extended headers, every reply does. Exactly one chunk of a reply is marked `last`, and it is sent last.

mod extents;
mod runs;
#[cfg(test)]
mod tests;

pub use extents::ExtentList;
pub use runs::{DataRun, zero_runs};

use ebb_io::{BudgetGuard, Buf, Charge};

use crate::decode::RequestHeader;
use crate::proto::{Errno, ReplyStyle, STRING_MAX, chunk, magic};

/// Memory that a request holds: from its connection's budget, and from its volume's share.
#[derive(Default)]
#[expect(dead_code, reason = "released when it is dropped")]
pub(crate) struct RequestMemory {
    pub(crate) budget: Option<BudgetGuard>,
    pub(crate) share: Option<Charge>,
}

/// A reply, or a part of one, that is to be sent.
pub(crate) struct Reply {
    pub(crate) to: ReplyTo,
    pub(crate) body: ReplyBody,
    /// Released when the reply has been sent.
    pub(crate) held: Option<RequestMemory>,
}

/// What a reply carries.
pub(crate) enum ReplyBody {
    /// Success without data.
    Done,
    /// An error, and a message for the client's user.
    Error(Errno, &'static str),
    /// The data of a read from `offset`; in one chunk if `unfragmented`; more data follows if not
    /// `last`.
    Data { offset: u64, data: Buf, unfragmented: bool, last: bool },
    /// The beginning of the data of a read, `length` bytes in all, which are sent in one chunk; only
    /// [`ReplyBody::More`] follows until the last piece.
    First { offset: u64, length: u32, data: Buf },
    /// The next piece of such a chunk.
    More { data: Buf, last: bool },
    /// `count` descriptors for a context.
    Status { context: u32, count: u32, descriptors: Buf },
}

/// The header of a reply or chunk, ready to be sent.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ReplyHeader {
    bytes: [u8; HEADER_MAX],
    len: usize,
}

/// Room in a [`ReplyHeader`]; the longest, an extended error with an offset, takes 46 bytes.
const HEADER_MAX: usize = 64;

impl ReplyHeader {
    const EMPTY: Self = Self { bytes: [0; HEADER_MAX], len: 0 };

    /// The bytes to send.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Appends a field. A field that does not fit is a bug in this file, which its tests find.
    #[inline]
    fn put<const N: usize>(mut self, field: [u8; N]) -> Self {
        let place = self.bytes.get_mut(self.len..).and_then(|rest| rest.first_chunk_mut::<N>());
        debug_assert!(place.is_some(), "a header has at most {HEADER_MAX} bytes");
        if let Some(place) = place {
            *place = field;
            self.len += N;
        }
        self
    }
}

impl core::fmt::Debug for ReplyHeader {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "ReplyHeader({:02x?})", self.as_bytes())
    }
}

/// The request that a reply is for, and the reply style of its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyTo {
    style: ReplyStyle,
    cookie: u64,
    offset: u64,
}

impl ReplyTo {
    /// Replies to this request.
    #[must_use]
    pub const fn new(style: ReplyStyle, request: &RequestHeader) -> Self {
        Self { style, cookie: request.cookie, offset: request.offset }
    }

    /// Success without a payload: the whole reply to all commands except READ and BLOCK_STATUS. For a
    /// READ with simple replies, the data follows.
    #[must_use]
    pub fn success(self) -> ReplyHeader {
        match self.style {
            ReplyStyle::Simple | ReplyStyle::Structured => self.simple(0),
            ReplyStyle::Extended => self.chunk(chunk::NONE, true, 0),
        }
    }

    /// Failure, and the end of the reply. Send the header, then the text returned: the message,
    /// or nothing if the reply style has no messages. A message of more than 4096 bytes is
    /// omitted.
    #[must_use]
    pub fn error(self, errno: Errno, message: &str) -> (ReplyHeader, &str) {
        if !self.style.is_chunked() {
            return (self.simple(errno.to_wire()), "");
        }
        let (message, len) = match u16::try_from(message.len()) {
            Ok(len) if message.len() <= STRING_MAX => (message, len),
            _ => ("", 0),
        };
        let header = self
            .chunk(chunk::ERROR, true, 6 + u64::from(len))
            .put(errno.to_wire().to_be_bytes())
            .put(len.to_be_bytes());
        (header, message)
    }

    /// Access to replies in chunks; `None` if the client negotiated simple replies only.
    #[must_use]
    pub const fn chunks(self) -> Option<Chunks> {
        if self.style.is_chunked() { Some(Chunks(self)) } else { None }
    }

    fn simple(self, error: u32) -> ReplyHeader {
        ReplyHeader::EMPTY
            .put(magic::SIMPLE_REPLY.to_be_bytes())
            .put(error.to_be_bytes())
            .put(self.cookie.to_be_bytes())
    }

    /// The header of a chunk in the negotiated style. `length` is far below 4 GiB in all
    /// chunks that are sent.
    #[inline]
    fn chunk(self, kind: u16, last: bool, length: u64) -> ReplyHeader {
        let flags = if last { chunk::FLAG_DONE } else { 0 };
        if self.style == ReplyStyle::Extended {
            ReplyHeader::EMPTY
                .put(magic::EXTENDED_REPLY.to_be_bytes())
                .put(flags.to_be_bytes())
                .put(kind.to_be_bytes())
                .put(self.cookie.to_be_bytes())
                .put(self.offset.to_be_bytes())
                .put(length.to_be_bytes())
        } else {
            ReplyHeader::EMPTY
                .put(magic::STRUCTURED_REPLY.to_be_bytes())
                .put(flags.to_be_bytes())
                .put(kind.to_be_bytes())
                .put(self.cookie.to_be_bytes())
                .put(u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes())
        }
    }
}

/// The chunks of a reply. Chunks may come in any order, but exactly one is `last`, and it comes
/// last; content must not overlap and must cover the request unless there is an error chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunks(ReplyTo);

impl Chunks {
    /// `NBD_REPLY_TYPE_NONE`: the end of a reply whose content was not marked `last`.
    #[must_use]
    pub fn none(self) -> ReplyHeader {
        self.0.chunk(chunk::NONE, true, 0)
    }

    /// `NBD_REPLY_TYPE_OFFSET_DATA`: `length` bytes (1 up to the maximum payload) from `offset`
    /// follow. Mark it `last` only when the data is available, since an error cannot follow it.
    #[must_use]
    pub fn data(self, offset: u64, length: u32, last: bool) -> ReplyHeader {
        debug_assert!(length > 0, "a content chunk describes at least one byte");
        self.0.chunk(chunk::OFFSET_DATA, last, 8 + u64::from(length)).put(offset.to_be_bytes())
    }

    /// `NBD_REPLY_TYPE_OFFSET_HOLE`: `length` bytes (at least 1) from `offset` are zero.
    #[must_use]
    pub fn hole(self, offset: u64, length: u32, last: bool) -> ReplyHeader {
        debug_assert!(length > 0, "a content chunk describes at least one byte");
        self.0
            .chunk(chunk::OFFSET_HOLE, last, 12)
            .put(offset.to_be_bytes())
            .put(length.to_be_bytes())
    }

    /// `NBD_REPLY_TYPE_BLOCK_STATUS`, or its extended form: the `count` (at least 1) descriptors
    /// of an [`ExtentList`] for the context follow.
    #[must_use]
    pub fn block_status(self, context_id: u32, count: u32, last: bool) -> ReplyHeader {
        debug_assert!(count > 0, "a status chunk has at least one descriptor");
        if self.0.style == ReplyStyle::Extended {
            self.0
                .chunk(chunk::BLOCK_STATUS_EXT, last, 8 + 16 * u64::from(count))
                .put(context_id.to_be_bytes())
                .put(count.to_be_bytes())
        } else {
            self.0
                .chunk(chunk::BLOCK_STATUS, last, 4 + 8 * u64::from(count))
                .put(context_id.to_be_bytes())
        }
    }
}
