//! Bytes to and from a server on a worker, in plain text or under TLS.
//!
//! One task receives and one sends; both hold the same [`Transport`]. Under TLS they share one
//! OpenSSL state, borrowed only between waits. What OpenSSL has to say on its own leaves through
//! the sender, so that records keep their order.

use std::cell::{Cell, RefCell};
use std::io;
use std::ops::Range;

use ebb_io::{Buf, Fd, Gather, Io};

use super::tls::TlsSession;

/// Cipher text received or sent at a time, bytes: a TLS record and its frame fit.
const CIPHER_BYTES: usize = 32 << 10;
/// Plain text put into one batch of records.
const PLAIN_BATCH: usize = 256 << 10;

/// A connection's bytes.
pub(crate) struct Transport {
    fd: Fd,
    tls: Option<RefCell<TlsSession>>,
    eof: Cell<bool>,
}

impl Transport {
    pub(crate) fn new(fd: Fd, tls: Option<TlsSession>) -> Transport {
        Transport { fd, tls: tls.map(RefCell::new), eof: Cell::new(false) }
    }

    /// Receives into `buf[range]`; 0 is the end.
    pub(crate) async fn recv(
        &self,
        io: &Io,
        buf: Buf,
        range: Range<usize>,
    ) -> (io::Result<usize>, Buf) {
        match &self.tls {
            None => io.recv(&self.fd, buf, range).await,
            Some(tls) => self.recv_tls(io, tls, buf, range).await,
        }
    }

    /// Receives exactly as much as the range is long.
    pub(crate) async fn recv_exact(
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
            let outcome = tls.borrow_mut().read(&mut buf[range.clone()]);
            match outcome {
                Ok(Some(count)) => return (Ok(count), buf),
                Ok(None) if self.eof.get() => return (Ok(0), buf),
                Ok(None) => {}
                Err(error) => return (Err(error), buf),
            }
            if let Err(error) = self.fill_tls(io, tls).await {
                return (Err(error), buf);
            }
        }
    }

    /// Takes more cipher text off the socket.
    async fn fill_tls(&self, io: &Io, tls: &RefCell<TlsSession>) -> io::Result<()> {
        let cipher = io.pool().take(CIPHER_BYTES).await;
        let (result, cipher) = io.recv(&self.fd, cipher, 0..CIPHER_BYTES).await;
        match result? {
            0 => self.eof.set(true),
            count => tls.borrow_mut().feed(&cipher[..count]),
        }
        Ok(())
    }

    /// True when OpenSSL has something to say on its own (an answer to a key update).
    pub(crate) fn wants_send(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.borrow_mut().has_output())
    }

    /// Sends all of the message; its buffers stay in it.
    pub(crate) async fn send(
        &self,
        io: &Io,
        message: Box<Gather>,
    ) -> (io::Result<()>, Box<Gather>) {
        match &self.tls {
            None => send_plain(io, &self.fd, message).await,
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
                Ok(count) => message.advance_keeping(count),
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
            send_plain(io, &self.fd, message).await.0?;
        }
    }

    /// Ends both directions: whoever sends or receives hears of it.
    pub(crate) fn shut(&self) {
        // A connection that is gone already is no loss.
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Both);
    }
}

async fn send_plain(io: &Io, fd: &Fd, mut message: Box<Gather>) -> (io::Result<()>, Box<Gather>) {
    while !message.is_empty() {
        let (result, returned) = io.send(fd, message).await;
        message = returned;
        match result {
            Ok(count) => message.advance_keeping(count),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return (Err(error), message),
        }
    }
    (Ok(()), message)
}

/// Encrypts a batch from the front of the message; returns the plain bytes taken.
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
