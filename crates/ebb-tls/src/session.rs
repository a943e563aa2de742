//! One connection's TLS state, over memory.

use std::io::{self, Read, Write};

use openssl::ssl::{ErrorCode, Ssl, SslStream};
use openssl::x509::X509VerifyResult;

/// What was taken of the output is forgotten from so many bytes on, even if it never becomes empty.
const COMPACT: usize = 64 << 10;

/// The two ends OpenSSL reads from and writes to.
#[derive(Debug, Default)]
struct Pipe {
    input: Vec<u8>,
    /// Bytes of `input` already read.
    read: usize,
    output: Vec<u8>,
    /// Bytes of `output` already taken.
    taken: usize,
}

impl Read for Pipe {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let available = &self.input[self.read..];
        if available.is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let count = available.len().min(buf.len());
        buf[..count].copy_from_slice(&available[..count]);
        self.read += count;
        if self.read == self.input.len() {
            self.input.clear();
            self.read = 0;
        }
        Ok(count)
    }
}

impl Write for Pipe {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        if self.taken >= COMPACT {
            self.output.drain(..self.taken);
            self.taken = 0;
        }
        self.output.extend_from_slice(buf);
        Ok(buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// One connection's TLS state. The caller moves cipher text between it and the socket.
pub struct TlsSession {
    stream: SslStream<Pipe>,
    shaken: bool,
}

impl std::fmt::Debug for TlsSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsSession").field("shaken", &self.shaken).finish_non_exhaustive()
    }
}

impl TlsSession {
    /// A session that knows whether it connects or accepts.
    pub(crate) fn new(ssl: Ssl) -> io::Result<TlsSession> {
        let stream = SslStream::new(ssl, Pipe::default()).map_err(io::Error::other)?;
        Ok(TlsSession { stream, shaken: false })
    }

    /// Adds cipher text from the other side. Bounded: the caller receives more only after reading.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.stream.get_mut().input.extend_from_slice(bytes);
    }

    /// True while cipher text waits for the other side.
    pub fn has_output(&self) -> bool {
        !self.stream.get_ref().output.is_empty()
    }

    /// Bytes of cipher text that wait for the other side.
    pub fn output_bytes(&self) -> usize {
        let pipe = self.stream.get_ref();
        pipe.output.len() - pipe.taken
    }

    /// Moves cipher text for the other side into `target`; 0 when there is none.
    pub fn take_output(&mut self, target: &mut [u8]) -> usize {
        let pipe = self.stream.get_mut();
        let available = &pipe.output[pipe.taken..];
        let count = available.len().min(target.len());
        target[..count].copy_from_slice(&available[..count]);
        pipe.taken += count;
        if pipe.taken == pipe.output.len() {
            pipe.output.clear();
            pipe.taken = 0;
        }
        count
    }

    /// Goes on with the handshake as far as the input reaches; true when it is done.
    ///
    /// # Errors
    /// The handshake has failed; what is left to say about it is in the output.
    pub fn handshake(&mut self) -> io::Result<bool> {
        if self.shaken {
            return Ok(true);
        }
        let Err(error) = self.stream.do_handshake() else {
            self.shaken = true;
            return Ok(true);
        };
        if matches!(error.code(), ErrorCode::WANT_READ | ErrorCode::WANT_WRITE) {
            return Ok(false);
        }
        let reason = match self.stream.ssl().verify_result() {
            X509VerifyResult::OK => error.to_string(),
            bad => format!("the certificate of the other side: {}", bad.error_string()),
        };
        Err(io::Error::other(format!("TLS handshake failed: {reason}")))
    }

    fn ready(&mut self) -> io::Result<&mut SslStream<Pipe>> {
        if self.shaken {
            return Ok(&mut self.stream);
        }
        Err(io::Error::other("the TLS handshake has not ended"))
    }

    /// Decrypts into `target`: bytes, 0 at the end of the stream, `None` when more input is needed.
    ///
    /// # Errors
    /// The stream is not what the other side sent, or the handshake has not ended.
    pub fn read(&mut self, target: &mut [u8]) -> io::Result<Option<usize>> {
        match self.ready()?.ssl_read(target) {
            Ok(count) => Ok(Some(count)),
            Err(error) => match error.code() {
                ErrorCode::WANT_READ | ErrorCode::WANT_WRITE => Ok(None),
                ErrorCode::ZERO_RETURN => Ok(Some(0)),
                _ => Err(error.into_io_error().unwrap_or_else(io::Error::other)),
            },
        }
    }

    /// Encrypts all of `bytes`.
    ///
    /// # Errors
    /// The handshake has not ended, or the session is broken.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.ready()?.write_all(bytes)
    }

    /// Queues the farewell.
    pub fn close(&mut self) {
        if self.shaken {
            // The other side may be gone already: no loss.
            let _ = self.stream.shutdown();
        }
    }
}
