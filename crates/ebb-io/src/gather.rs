//! A message of many pieces for one send: the headers and payloads of a batch of replies.
//!
//! Invariants: pieces are sent in the order they were pushed; payload buffers are kept until the whole
//! batch has been sent; nothing moves while the kernel reads it (the ring holds the `Box`); zeroes need no
//! memory, whatever their length.

use std::ops::Range;

use crate::buf::Buf;

/// Pieces of one message: the kernel takes at most 1024.
const MAX_PARTS: usize = 256;
/// Bytes of small pieces (headers) in one message.
const MAX_INLINE: usize = 16 << 10;

/// The source of all zeroes that are sent: static, read-only, and aligned for direct I/O.
#[repr(align(4096))]
struct Zeroes([u8; 64 << 10]);
static ZEROES: Zeroes = Zeroes([0; 64 << 10]);

enum MessagePart {
    Inline(Range<usize>),
    Buf {
        index: usize,
        range: Range<usize>,
    },
    /// At most as long as [`ZEROES`].
    Zeroes(usize),
}

/// A message under construction, reused from batch to batch.
pub struct Gather {
    parts: Vec<MessagePart>,
    inline: Vec<u8>,
    bufs: Vec<Buf>,
    total: usize,
    sent: usize,
    vectors: Vec<libc::iovec>,
    header: libc::msghdr,
}

impl Default for Gather {
    fn default() -> Self {
        // SAFETY: all zeroes is a valid empty msghdr: null pointers with zero lengths.
        let header = unsafe { std::mem::zeroed() };
        Gather {
            parts: Vec::new(),
            inline: Vec::new(),
            bufs: Vec::new(),
            total: 0,
            sent: 0,
            vectors: Vec::new(),
            header,
        }
    }
}

impl Gather {
    /// Whether `parts` more pieces with `inline` bytes of small ones fit.
    #[inline]
    pub fn has_room(&self, parts: usize, inline: usize) -> bool {
        self.parts.len() + parts <= MAX_PARTS && self.inline.len() + inline <= MAX_INLINE
    }

    /// True when all of the message has been sent.
    pub fn is_empty(&self) -> bool {
        self.sent == self.total
    }

    /// Bytes not yet sent.
    pub fn remaining(&self) -> usize {
        self.total - self.sent
    }

    /// Appends a copy of `bytes`.
    #[inline]
    pub fn push_bytes(&mut self, bytes: &[u8]) {
        let start = self.inline.len();
        self.inline.extend_from_slice(bytes);
        self.total += bytes.len();
        let end = self.inline.len();
        match self.parts.last_mut() {
            Some(MessagePart::Inline(range)) => range.end = end,
            _ => self.parts.push(MessagePart::Inline(start..end)),
        }
    }

    /// Takes ownership of a buffer, of which [`Gather::push_range`] appends pieces; returns its index.
    #[inline]
    pub fn hold(&mut self, buf: Buf) -> usize {
        self.bufs.push(buf);
        self.bufs.len() - 1
    }

    /// Appends a piece of a held buffer.
    ///
    /// # Panics
    /// If the range is not within the buffer.
    #[inline]
    pub fn push_range(&mut self, index: usize, range: Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.bufs[index].len());
        self.total += range.len();
        self.parts.push(MessagePart::Buf { index, range });
    }

    /// The number of pieces for `length` bytes of zeroes, for [`Gather::has_room`].
    pub const fn zero_parts(length: usize) -> usize {
        length.div_ceil(ZEROES.0.len())
    }

    /// Appends zeroes, which need no buffer.
    pub fn push_zeroes(&mut self, length: usize) {
        self.total += length;
        let mut left = length;
        while left > 0 {
            let count = left.min(ZEROES.0.len());
            self.parts.push(MessagePart::Zeroes(count));
            left -= count;
        }
    }

    /// Notes that `bytes` more have been sent. The buffers are kept until [`Gather::clear`] or
    /// [`Gather::take_back`].
    pub fn advance(&mut self, bytes: usize) {
        self.sent = self.total.min(self.sent + bytes);
    }

    /// Clears the message and returns the held buffers in the order of [`Gather::hold`], for callers
    /// that need them after they were sent.
    pub fn take_back(&mut self) -> impl Iterator<Item = Buf> {
        self.parts.clear();
        self.inline.clear();
        self.total = 0;
        self.sent = 0;
        self.bufs.drain(..)
    }

    /// Clears the message and frees the buffers.
    #[inline]
    pub fn clear(&mut self) {
        self.parts.clear();
        self.inline.clear();
        self.bufs.clear();
        self.total = 0;
        self.sent = 0;
    }

    /// Calls `f` with each unsent piece in order, until it returns false.
    pub fn for_each(&self, mut f: impl FnMut(&[u8]) -> bool) {
        let mut skip = self.sent;
        for part in &self.parts {
            let bytes: &[u8] = match part {
                MessagePart::Inline(range) => &self.inline[range.clone()],
                MessagePart::Buf { index, range } => &self.bufs[*index][range.clone()],
                MessagePart::Zeroes(length) => &ZEROES.0[..*length],
            };
            if skip >= bytes.len() {
                skip -= bytes.len();
                continue;
            }
            if !f(&bytes[skip..]) {
                return;
            }
            skip = 0;
        }
    }

    /// The message header for the unsent part. Valid until the Gather is changed or dropped.
    pub(crate) fn message(&mut self) -> *const libc::msghdr {
        self.vectors();
        self.header.msg_iov = self.vectors.as_mut_ptr();
        self.header.msg_iovlen = self.vectors.len();
        &raw const self.header
    }

    /// The unsent part. Valid as long as the result of [`Gather::message`].
    pub(crate) fn vectors(&mut self) -> &[libc::iovec] {
        let mut vectors = std::mem::take(&mut self.vectors);
        vectors.clear();
        self.for_each(|bytes| {
            let base = bytes.as_ptr().cast_mut().cast();
            vectors.push(libc::iovec { iov_base: base, iov_len: bytes.len() });
            true
        });
        self.vectors = vectors;
        &self.vectors
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buf::private_pool;

    fn bytes_of(gather: &Gather) -> Vec<u8> {
        let mut all = Vec::new();
        gather.for_each(|b| {
            all.extend_from_slice(b);
            true
        });
        all
    }

    #[test]
    fn pieces_are_sent_in_order_and_survive_short_sends() {
        let pool = private_pool();
        let mut gather = Gather::default();
        let mut buf = pool.get_for_test(6);
        buf.copy_from_slice(b"abcdef");
        gather.push_bytes(b"12");
        gather.push_bytes(b"3");
        let index = gather.hold(buf);
        gather.push_range(index, 0..2);
        gather.push_bytes(b"--");
        gather.push_range(index, 4..6);
        let whole = b"123ab--ef".to_vec();
        for cut in 0..whole.len() {
            assert_eq!(bytes_of(&gather), whole[cut..]);
            assert_eq!(gather.remaining(), whole.len() - cut);
            gather.advance(1);
        }
        assert!(gather.is_empty());
        gather.clear();
        assert_eq!(pool.used_bytes(), 0, "sent buffers are back in the pool");
    }

    #[test]
    fn the_message_lists_every_unsent_piece() {
        let mut gather = Gather::default();
        gather.push_bytes(b"hello");
        gather.advance(2);
        // SAFETY: the gather is alive and unchanged while the header is read.
        let header = unsafe { &*gather.message() };
        assert_eq!(header.msg_iovlen, 1);
        // SAFETY: one vector was built, and the Gather that owns it is still borrowed here.
        let vector = unsafe { &*header.msg_iov };
        assert_eq!(vector.iov_len, 3);
    }

    #[test]
    fn zeroes_need_no_memory_and_survive_short_sends() {
        let mut gather = Gather::default();
        let length = 2 * ZEROES.0.len() + 512;
        gather.push_bytes(b"head");
        gather.push_zeroes(length);
        gather.push_bytes(b"tail");
        let whole = [b"head".as_slice(), &vec![0; length], b"tail"].concat();
        assert_eq!((gather.parts.len(), Gather::zero_parts(length)), (5, 3));
        for cut in [0, 3, 4, 5, ZEROES.0.len(), length + 3, length + 4, length + 6] {
            gather.sent = 0;
            gather.advance(cut);
            assert!(bytes_of(&gather) == whole[cut..], "{cut}");
        }
        assert!(gather.bufs.is_empty());
    }

    #[test]
    fn held_buffers_are_returned_in_order() {
        let pool = private_pool();
        let mut gather = Gather::default();
        for length in [1, 2, 3] {
            let index = gather.hold(pool.get_for_test(length));
            gather.push_range(index, 0..length);
        }
        gather.advance(6);
        assert!(gather.is_empty());
        let lengths: Vec<_> = gather.take_back().map(|buf| buf.len()).collect();
        assert_eq!(lengths, [1, 2, 3]);
        assert_eq!((gather.remaining(), pool.used_bytes()), (0, 0));
    }

    #[test]
    fn the_size_of_a_message_is_bounded() {
        let mut gather = Gather::default();
        assert!(gather.has_room(MAX_PARTS, MAX_INLINE));
        gather.push_bytes(&[0; 100]);
        assert!(!gather.has_room(MAX_PARTS, 1));
        assert!(!gather.has_room(1, MAX_INLINE));
    }
}
