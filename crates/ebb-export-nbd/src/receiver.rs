//! The receiving side of a connection: a buffer that requests are decoded from.
//!
//! It starts with one page, grows while bursts fill it, and shrinks to one page when little is
//! received, so that an idle connection holds one page.

use std::io;
use std::rc::Rc;

use ebb_io::{Buf, BufPool, Charge, Io, QueueShare};
use ebb_tls::Transport;

/// The buffer of an idle connection, bytes.
const SMALL: usize = 4 << 10;
/// The largest buffer of a busy connection, bytes.
const LARGE: usize = 256 << 10;

/// Received bytes that have not been consumed yet.
pub(crate) struct Receiver {
    buffers: BufPool,
    queue_share: Rc<QueueShare>,
    /// Memory from the volume's share, for a buffer of more than one page.
    charge: Option<Charge>,
    buf: Option<Buf>,
    start: usize,
    end: usize,
    /// Where the bytes were that the last [`Receiver::consume`] removed, if no bytes remained.
    consumed: (usize, usize),
    /// Wanted size of the next buffer, bytes.
    wanted: usize,
}

impl Receiver {
    /// A receiver that begins with the bytes received after the handshake.
    pub(crate) async fn new(
        buffers: BufPool,
        queue_share: Rc<QueueShare>,
        rest: &[u8],
    ) -> Receiver {
        let mut buf = buffers.take(rest.len().max(SMALL)).await;
        buf[..rest.len()].copy_from_slice(rest);
        let (buf, end) = (Some(buf), rest.len());
        Receiver {
            buffers,
            queue_share,
            charge: None,
            buf,
            start: 0,
            end,
            consumed: (0, 0),
            wanted: SMALL,
        }
    }

    /// The received bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        match &self.buf {
            Some(buf) => &buf[self.start..self.end],
            None => &[],
        }
    }

    /// Removes bytes from the front.
    pub(crate) fn consume(&mut self, count: usize) {
        debug_assert!(count <= self.end - self.start);
        self.start = (self.start + count).min(self.end);
        if self.start == self.end {
            self.consumed = (self.start - count.min(self.start), self.end);
            (self.start, self.end) = (0, 0);
        }
    }

    /// Takes back the last [`Receiver::consume`], of `count` bytes, after which nothing may have been received.
    pub(crate) fn undo_consume(&mut self, count: usize) {
        // All bytes were consumed: they are where they were.
        if self.start == self.end {
            (self.start, self.end) = self.consumed;
        } else {
            self.start = self.start.saturating_sub(count);
        }
    }

    /// Whether a payload of this length is better received through this buffer (together with the
    /// requests that follow it) than directly into its own.
    pub(crate) fn should_buffer(&self, length: usize) -> bool {
        length <= LARGE / 8
    }

    /// Whether it has, or wants, a buffer of more than one page.
    pub(crate) fn is_large(&self) -> bool {
        self.wanted > SMALL || self.buf.as_ref().is_some_and(|buf| buf.capacity() > SMALL)
    }

    /// Makes the next buffer a page, if that suffices.
    pub(crate) fn rest(&mut self) {
        self.wanted = SMALL;
    }

    /// Gives its memory back to the volume's share, for a request of this connection that waits for
    /// some. The buffer stays until the next bytes are received.
    pub(crate) fn release_charge(&mut self) {
        self.charge = None;
        self.wanted = SMALL;
    }

    /// Receives until at least `needed` bytes are available.
    ///
    /// # Errors
    /// `UnexpectedEof` when the stream ends before that; [`Receiver::bytes`] says whether it ended within
    /// the needed bytes or before the first of them.
    pub(crate) async fn fill(
        &mut self,
        io: &Io,
        transport: &Transport,
        needed: usize,
    ) -> io::Result<()> {
        while self.end - self.start < needed {
            let mut buf = self.make_room(needed).await;
            buf.set_len(buf.capacity());
            let room = self.end..buf.capacity();
            let space = room.len();
            let (result, buf) = transport.recv(io, buf, room).await;
            self.buf = Some(buf);
            let count = result?;
            if count == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.end += count;
            if count == space {
                self.wanted = (self.wanted * 4).min(LARGE);
            } else if count < self.wanted / 16 {
                self.wanted = SMALL;
            }
        }
        Ok(())
    }

    /// Takes memory from the volume's share for a buffer of the wanted size; if there is not enough, the
    /// wanted size becomes `SMALL`.
    fn reserve_wanted(&mut self) {
        let has = self.charge.as_ref().map_or(SMALL, Charge::bytes);
        if self.wanted > has {
            self.charge = self.queue_share.try_take(self.wanted);
            if self.charge.is_none() {
                self.wanted = SMALL;
            }
        } else if self.wanted <= SMALL {
            self.charge = None;
        }
    }

    /// A buffer with the unconsumed bytes at `start..end` and room for `needed` in all.
    async fn make_room(&mut self, needed: usize) -> Buf {
        let unconsumed = self.end - self.start;
        self.reserve_wanted();
        let capacity = self.wanted.max(needed);
        let old = self.buf.take();
        match old {
            Some(mut buf) if buf.capacity() >= capacity => {
                let fitting = buf.capacity() == capacity || (unconsumed > 0 && capacity > SMALL);
                if fitting {
                    if self.start + needed > buf.capacity() || self.start > buf.capacity() / 2 {
                        buf.set_len(buf.capacity());
                        buf.copy_within(self.start..self.end, 0);
                        (self.start, self.end) = (0, unconsumed);
                    }
                    return buf;
                }
                // It is larger than wanted and holds few bytes or none: return it to the pool.
                if unconsumed == 0 {
                    drop(buf);
                    return self.buffers.take(capacity).await;
                }
                let mut page = self.buffers.take(capacity).await;
                page[..unconsumed].copy_from_slice(&buf[self.start..self.end]);
                (self.start, self.end) = (0, unconsumed);
                page
            }
            old => {
                let mut buf = self.buffers.take(capacity).await;
                if let Some(old) = old {
                    buf[..unconsumed].copy_from_slice(&old[self.start..self.end]);
                }
                (self.start, self.end) = (0, unconsumed);
                buf
            }
        }
    }
}
