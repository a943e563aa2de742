//! The receiving end of a connection: a buffer that requests are decoded from.
//!
//! It starts with one page, grows while bursts fill it, and goes back to one page when the client
//! falls silent, so that an idle connection holds one page.

use std::io;
use std::rc::Rc;

use ebb_io::{Buf, BufPool, Charge, Io, QueueShare};
use ebb_tls::Transport;

/// What an idle connection holds, bytes.
const SMALL: usize = 4 << 10;
/// What a busy one may grow to, bytes.
const LARGE: usize = 256 << 10;

/// Received bytes that were not consumed yet.
pub(crate) struct Receiver {
    buffers: BufPool,
    queue_share: Rc<QueueShare>,
    /// What more than a page takes of the volume's share.
    room: Option<Charge>,
    buf: Option<Buf>,
    start: usize,
    end: usize,
    /// What the next buffer should hold, bytes.
    wanted: usize,
}

impl Receiver {
    /// A receiver with bytes that came in behind the handshake.
    pub(crate) async fn new(
        buffers: BufPool,
        queue_share: Rc<QueueShare>,
        rest: &[u8],
    ) -> Receiver {
        let mut buf = buffers.take(rest.len().max(SMALL)).await;
        buf[..rest.len()].copy_from_slice(rest);
        let (buf, end) = (Some(buf), rest.len());
        Receiver { buffers, queue_share, room: None, buf, start: 0, end, wanted: SMALL }
    }

    /// What is there.
    pub(crate) fn bytes(&self) -> &[u8] {
        match &self.buf {
            Some(buf) => &buf[self.start..self.end],
            None => &[],
        }
    }

    /// Takes bytes off the front.
    pub(crate) fn consume(&mut self, count: usize) {
        debug_assert!(count <= self.end - self.start);
        self.start = (self.start + count).min(self.end);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Whether a payload of this length is better received through this buffer (with whatever
    /// follows it) than straight into its own.
    pub(crate) fn suits(&self, length: usize) -> bool {
        length <= LARGE / 8
    }

    /// Receives until at least `needed` bytes are there.
    ///
    /// # Errors
    /// `UnexpectedEof` when the stream ends within them, or with none of them, which callers tell
    /// apart by [`Receiver::bytes`].
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

    /// Has memory for as large a buffer as is wanted, or wants a small one.
    fn afford(&mut self) {
        let has = self.room.as_ref().map_or(SMALL, Charge::bytes);
        if self.wanted > has {
            self.room = self.queue_share.try_take(self.wanted);
            if self.room.is_none() {
                self.wanted = SMALL;
            }
        } else if self.wanted <= SMALL {
            self.room = None;
        }
    }

    /// A buffer with the unconsumed bytes at `start..end` and room for `needed` in all.
    async fn make_room(&mut self, needed: usize) -> Buf {
        let unconsumed = self.end - self.start;
        self.afford();
        let capacity = self.wanted.max(needed);
        let old = self.buf.take();
        match old {
            Some(mut buf) if buf.capacity() >= capacity => {
                let fitting = buf.capacity() == capacity || unconsumed > 0;
                if fitting {
                    if self.start + needed > buf.capacity() || self.start > buf.capacity() / 2 {
                        buf.set_len(buf.capacity());
                        buf.copy_within(self.start..self.end, 0);
                        (self.start, self.end) = (0, unconsumed);
                    }
                    return buf;
                }
                // Nothing is kept, and it is larger than wanted: the pool has better use for it.
                drop(buf);
                self.buffers.take(capacity).await
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
