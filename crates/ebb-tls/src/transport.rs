//! The byte stream of a socket, in plain text or under TLS.
//!
//! One task receives and one sends; both use the same [`Transport`]. Under TLS they share one
//! OpenSSL state, which is never borrowed across a wait. Records that OpenSSL produces by itself (tickets,
//! key updates) are sent by the sending task, so that records keep their order.

use std::cell::{Cell, RefCell};
use std::io;
use std::ops::Range;

use ebb_io::{Buf, Fd, Gather, Io, Signal, was_cancelled};

use crate::handshake_threads::{self, PeerKey};
use crate::{TlsRead, TlsSession};

/// Cipher text received or sent at a time, bytes: more than one TLS record.
const CIPHER_BYTES: usize = 32 << 10;
/// Nothing is received while more cipher text waits to be sent, bytes.
const OUTPUT_MAX: usize = 64 << 10;
/// Plain text encrypted into one batch of records, bytes.
const PLAIN_BATCH: usize = 256 << 10;

/// What a receiver does under TLS before it yields to other tasks of the worker: so much work of records with data, of
/// which each counts 1, and of records without, which cost more: a key update derives keys.
const WORK_AT_ONCE: u32 = 32;
const WORK_OF_DATA: u32 = 1;
const WORK_OF_MESSAGE: u32 = 8;

/// The byte stream of one connection.
pub struct Transport {
    fd: Fd,
    tls: Option<RefCell<TlsSession>>,
    wants_send: Signal,
    /// Set when cipher text has been sent, or cannot be.
    drained: Signal,
    /// Sending has failed.
    broken: Cell<bool>,
    eof: Cell<bool>,
    /// Work since the receiver last let other tasks run.
    work: Cell<u32>,
    /// Bytes written to the socket so far; wraps.
    sent: Cell<usize>,
}

impl std::fmt::Debug for Transport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transport").field("tls", &self.tls).finish_non_exhaustive()
    }
}

impl Transport {
    /// In plain text, or with a session whose handshake has completed.
    pub fn new(fd: Fd, session: Option<TlsSession>) -> Transport {
        let tls = session.map(RefCell::new);
        Transport {
            fd,
            tls,
            wants_send: Signal::default(),
            drained: Signal::default(),
            broken: Cell::new(false),
            eof: Cell::new(false),
            work: Cell::new(0),
            sent: Cell::new(0),
        }
    }

    /// Waits until receiving has produced cipher text, which [`Transport::send_pending`] sends.
    pub async fn wants_send(&self) {
        self.wants_send.wait().await;
    }

    /// Receives into `buf[range]`; 0 is the end of the stream.
    pub async fn recv(&self, io: &Io, buf: Buf, range: Range<usize>) -> (io::Result<usize>, Buf) {
        match &self.tls {
            None => io.recv(&self.fd, buf, range).await,
            Some(tls) => self.recv_tls(io, tls, buf, range).await,
        }
    }

    /// Receives exactly `range.len()` bytes.
    pub async fn recv_exact(
        &self,
        io: &Io,
        mut buf: Buf,
        mut range: Range<usize>,
    ) -> (io::Result<()>, Buf) {
        if self.tls.is_none() {
            return io.recv_exact(&self.fd, buf, range).await;
        }
        while !range.is_empty() {
            let (result, returned) = self.recv(io, buf, range.clone()).await;
            buf = returned;
            match result {
                Ok(0) => return (Err(io::ErrorKind::UnexpectedEof.into()), buf),
                Ok(count) => range.start += count,
                Err(error) => return (Err(error), buf),
            }
        }
        (Ok(()), buf)
    }

    async fn recv_tls(
        &self,
        io: &Io,
        tls: &RefCell<TlsSession>,
        mut buf: Buf,
        range: Range<usize>,
    ) -> (io::Result<usize>, Buf) {
        loop {
            // The socket's next bytes may hold thousands of records: reading them needs no wait.
            if self.work.get() >= WORK_AT_ONCE {
                self.work.set(0);
                io.yield_iteration().await;
            }
            let outcome = tls.borrow_mut().read(&mut buf[range.clone()]);
            if tls.borrow().has_output() {
                self.wants_send.set();
            }
            let outcome = match outcome {
                Ok(outcome) => outcome,
                Err(error) => return (Err(error), buf),
            };
            match outcome {
                TlsRead::Data(count) => {
                    self.work.set(self.work.get() + WORK_OF_DATA);
                    return (Ok(count), buf);
                }
                TlsRead::Again => self.work.set(self.work.get() + WORK_OF_MESSAGE),
                TlsRead::NeedsInput if self.eof.get() => return (Ok(0), buf),
                TlsRead::NeedsInput => {}
            }
            // Do not receive from a peer that does not receive what it causes this side to send.
            while tls.borrow().output_bytes() > OUTPUT_MAX {
                if self.broken.get() {
                    return (Err(io::ErrorKind::BrokenPipe.into()), buf);
                }
                self.drained.wait().await;
            }
            if outcome == TlsRead::NeedsInput
                && let Err(error) = self.fill_tls(io, tls).await
            {
                return (Err(error), buf);
            }
        }
    }

    /// Receives more cipher text from the socket.
    async fn fill_tls(&self, io: &Io, tls: &RefCell<TlsSession>) -> io::Result<()> {
        let cipher = io.pool().take(CIPHER_BYTES).await;
        let (result, cipher) = io.recv(&self.fd, cipher, 0..CIPHER_BYTES).await;
        match result? {
            0 => self.eof.set(true),
            count => tls.borrow_mut().feed(&cipher[..count]),
        }
        Ok(())
    }

    /// Sends all of the message, or what can be sent before an error. Its buffers stay in it.
    pub async fn send(&self, io: &Io, message: Box<Gather>) -> (io::Result<()>, Box<Gather>) {
        match &self.tls {
            None => self.send_plain(io, message).await,
            Some(tls) => self.send_tls(io, tls, message).await,
        }
    }

    async fn send_tls(
        &self,
        io: &Io,
        tls: &RefCell<TlsSession>,
        mut message: Box<Gather>,
    ) -> (io::Result<()>, Box<Gather>) {
        loop {
            let taken = encrypt(&mut tls.borrow_mut(), &message);
            match taken {
                Ok(count) => message.advance(count),
                Err(error) => return (Err(error), message),
            }
            if let Err(error) = self.send_output(io, tls).await {
                return (Err(error), message);
            }
            if message.is_empty() {
                return (Ok(()), message);
            }
        }
    }

    /// Sends pending cipher text, if any.
    ///
    /// # Errors
    /// Those of the socket.
    pub async fn send_pending(&self, io: &Io) -> io::Result<()> {
        match &self.tls {
            None => Ok(()),
            Some(tls) => self.send_output(io, tls).await,
        }
    }

    async fn send_output(&self, io: &Io, tls: &RefCell<TlsSession>) -> io::Result<()> {
        loop {
            let mut cipher = io.pool().take(CIPHER_BYTES).await;
            let count = tls.borrow_mut().take_output(&mut cipher);
            if count == 0 {
                return Ok(());
            }
            let mut message = Box::<Gather>::default();
            let index = message.hold(cipher);
            message.push_range(index, 0..count);
            let result = self.send_plain(io, message).await.0;
            self.broken.set(self.broken.get() || result.is_err());
            self.drained.set();
            result?;
        }
    }

    /// Runs the handshake, its expensive part on another thread, queued under `peer`. The stream then uses
    /// TLS.
    ///
    /// # Errors
    /// Those of the socket, or the handshake failed.
    pub async fn start_tls(
        &mut self,
        io: &Io,
        session: TlsSession,
        peer: PeerKey,
    ) -> io::Result<()> {
        let mut tls = RefCell::new(session);
        // The client begins: without its first message there is nothing to compute.
        let mut input_due = tls.borrow().is_server();
        loop {
            if input_due {
                self.fill_tls(io, &tls).await?;
                if self.eof.get() {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            }
            let (returned, done) = handshake_threads::handshake(tls.into_inner(), peer).await;
            tls = RefCell::new(returned);
            // Also after a failure: there may be an alert for the peer.
            self.send_output(io, &tls).await?;
            if done? {
                self.tls = Some(tls);
                return Ok(());
            }
            input_due = true;
        }
    }

    /// Its socket.
    pub fn socket(&self) -> &Fd {
        &self.fd
    }

    /// Bytes of unsent cipher text.
    pub fn queued_bytes(&self) -> usize {
        self.tls.as_ref().map_or(0, |tls| tls.borrow().output_bytes())
    }

    /// Receives and discards data until the peer has closed its side: closing a TCP socket with unread
    /// bytes resets the connection, which discards data that the peer has not received yet.
    pub async fn drain(&self, io: &Io) {
        let mut buf = io.pool().take(CIPHER_BYTES).await;
        loop {
            let (result, returned) = io.recv(&self.fd, buf, 0..CIPHER_BYTES).await;
            buf = returned;
            if !matches!(result, Ok(1..)) {
                return;
            }
        }
    }

    /// Sends the `close_notify` alert of TLS and shuts down the sending side.
    pub async fn finish(&self, io: &Io) {
        if let Some(tls) = &self.tls {
            tls.borrow_mut().close();
            let _ = self.send_output(io, tls).await;
        }
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Write);
    }

    async fn send_plain(&self, io: &Io, mut message: Box<Gather>) -> (io::Result<()>, Box<Gather>) {
        while !message.is_empty() {
            let (result, returned) = io.send(&self.fd, message).await;
            message = returned;
            match result {
                Ok(count) => {
                    self.sent.set(self.sent.get().wrapping_add(count));
                    message.advance(count);
                }
                // Cancelled to see how much was sent.
                Err(error)
                    if error.kind() == io::ErrorKind::Interrupted || was_cancelled(&error) => {}
                Err(error) => return (Err(error), message),
            }
        }
        (Ok(()), message)
    }

    /// Bytes written to the socket so far; the number wraps.
    pub fn sent_bytes(&self) -> usize {
        self.sent.get()
    }

    /// Whether the peer has disconnected and receives no more data. False for a peer that has only shut down its
    /// sending side.
    pub fn is_hung_up(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        // POLLHUP and POLLERR are always reported.
        let mut fds = [PollFd::new(&self.fd, PollFlags::empty())];
        let found = poll(&mut fds, Some(&Timespec::default()));
        found.is_ok() && fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
    }

    /// As [`Transport::is_hung_up`], or the peer has only ended its own direction: one that waits for no reply.
    pub fn is_abandoned(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut fds = [PollFd::new(&self.fd, PollFlags::RDHUP)];
        let found = poll(&mut fds, Some(&Timespec::default()));
        let gone = PollFlags::HUP | PollFlags::ERR | PollFlags::RDHUP;
        found.is_ok() && fds[0].revents().intersects(gone)
    }

    /// Whether TLS encrypts it.
    pub fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// Who the peer is, as TLS has established it: `psk:NAME`, or `cn:NAME` of its certificate.
    pub fn peer_identity(&self) -> Option<String> {
        self.tls.as_ref()?.borrow().peer_identity()
    }

    /// Shuts down both directions: pending sends and receives end.
    pub fn shut(&self) {
        self.broken.set(true);
        self.drained.set();
        // Fails if the peer has disconnected already.
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Both);
    }
}

/// Encrypts a batch from the front of the message; returns the number of plain bytes encrypted.
fn encrypt(tls: &mut TlsSession, message: &Gather) -> io::Result<usize> {
    let mut taken = 0;
    let mut outcome = Ok(());
    message.for_each(|bytes| {
        let bytes = &bytes[..bytes.len().min(PLAIN_BATCH - taken)];
        outcome = tls.write(bytes);
        if outcome.is_ok() {
            taken += bytes.len();
        }
        outcome.is_ok() && taken < PLAIN_BATCH
    });
    outcome.map(|()| taken)
}
