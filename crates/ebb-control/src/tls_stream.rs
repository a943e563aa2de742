//! A connection of the page under TLS, as a stream for HTTP.
//!
//! The expensive part of a handshake runs on the threads of `ebb-tls`, in turn by address and with limited processor
//! time, so that handshakes delay neither the control socket nor the page for other peers.
//!
//! # Invariants
//! - At most one record of cipher text waits in each direction, and what one handshake message produces.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use ebb_tls::{PeerKey, ServerTls, TlsRead, TlsSession};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// Cipher text that is received at a time, bytes, and plain text that is sent at a time: at most one record.
const PIECE: usize = 4 << 10;
const RECORD: usize = 16 << 10;

/// A TCP connection, in plain text or under TLS.
pub(crate) enum PageStream {
    Plain(TcpStream),
    Encrypted(Box<TlsStream>),
}

/// A connection under TLS whose handshake has completed.
pub(crate) struct TlsStream {
    tcp: TcpStream,
    session: TlsSession,
    /// Cipher text that is being sent.
    out: Vec<u8>,
    sent: usize,
    ended: bool,
}

impl TlsStream {
    /// Accepts a client, whose handshake is queued under `peer`.
    ///
    /// # Errors
    /// Those of the socket, or the handshake failed.
    pub(crate) async fn accept(
        tcp: TcpStream,
        tls: &ServerTls,
        peer: PeerKey,
    ) -> io::Result<TlsStream> {
        let session = tls.session()?;
        let mut stream = TlsStream { tcp, session, out: Vec::new(), sent: 0, ended: false };
        loop {
            std::future::poll_fn(|cx| stream.poll_receive(cx)).await?;
            if stream.ended {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let TlsStream { tcp, session, out, sent, ended } = stream;
            let (session, done) = ebb_tls::handshake(session, peer).await;
            stream = TlsStream { tcp, session, out, sent, ended };
            // Also after a failure: there may be an alert for the peer.
            std::future::poll_fn(|cx| stream.poll_send(cx)).await?;
            if done? {
                return Ok(stream);
            }
        }
    }

    /// Receives cipher text.
    fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut piece = [0; PIECE];
        let mut buf = ReadBuf::new(&mut piece);
        ready!(Pin::new(&mut self.tcp).poll_read(cx, &mut buf))?;
        self.ended = buf.filled().is_empty();
        self.session.feed(buf.filled());
        Poll::Ready(Ok(()))
    }

    /// Sends all cipher text that there is.
    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            while let Some(rest) = self.out.get(self.sent..).filter(|rest| !rest.is_empty()) {
                let count = ready!(Pin::new(&mut self.tcp).poll_write(cx, rest))?;
                if count == 0 {
                    return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                }
                self.sent += count;
            }
            self.sent = 0;
            let size = self.session.output_bytes();
            self.out.resize(size.min(2 * RECORD), 0);
            let count = self.session.take_output(&mut self.out);
            self.out.truncate(count);
            if count == 0 {
                self.out.shrink_to(0);
                return Poll::Ready(Ok(()));
            }
        }
    }

    fn poll_decrypt(
        &mut self,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            match self.session.read(buf.initialize_unfilled())? {
                TlsRead::Data(count) => {
                    buf.advance(count);
                    return Poll::Ready(Ok(()));
                }
                TlsRead::Again => {
                    // Other connections first: a peer may send records without data, endlessly.
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                // A peer that has closed the connection without an alert; HTTP has lengths of its own.
                TlsRead::NeedsInput if self.ended => return Poll::Ready(Ok(())),
                TlsRead::NeedsInput => {
                    // What OpenSSL answers by itself, such as key updates, before more is received.
                    ready!(self.poll_send(cx))?;
                    ready!(self.poll_receive(cx))?;
                }
            }
        }
    }

    fn poll_encrypt(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        // The earlier record first, so that one at most waits.
        ready!(self.poll_send(cx))?;
        let piece = bytes.get(..bytes.len().min(RECORD)).unwrap_or_default();
        self.session.write(piece)?;
        // What does not fit is sent by the next call, or by a flush.
        if let Poll::Ready(Err(error)) = self.poll_send(cx) {
            return Poll::Ready(Err(error));
        }
        Poll::Ready(Ok(piece.len()))
    }
}

impl AsyncRead for PageStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_read(cx, buf),
            Self::Encrypted(stream) => stream.poll_decrypt(cx, buf),
        }
    }
}

impl AsyncWrite for PageStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_write(cx, bytes),
            Self::Encrypted(stream) => stream.poll_encrypt(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_flush(cx),
            Self::Encrypted(stream) => stream.poll_send(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_shutdown(cx),
            Self::Encrypted(stream) => {
                ready!(stream.poll_send(cx))?;
                stream.session.close();
                ready!(stream.poll_send(cx))?;
                Pin::new(&mut stream.tcp).poll_shutdown(cx)
            }
        }
    }
}
