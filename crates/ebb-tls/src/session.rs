//! The TLS state of one connection, which reads and writes memory.

use std::io::{self, Read, Write};

use openssl::nid::Nid;
use openssl::ssl::{ErrorCode, Ssl, SslStream};
use openssl::x509::X509VerifyResult;

/// Output that has been taken is removed once it has so many bytes, even if the output never becomes empty.
const COMPACT: usize = 64 << 10;

/// How often OpenSSL may read input during one [`TlsSession::read`]. It reads a record's header and then its body, and
/// by itself goes on with the next record until one has data: a peer that sends thousands of records without data
/// would occupy the thread.
const READS_AT_ONCE: u32 = 2;

/// The buffers that OpenSSL reads from and writes to.
#[derive(Debug, Default)]
struct Pipe {
    input: Vec<u8>,
    /// Bytes of `input` already read.
    read: usize,
    /// How often `input` may still be read; `None`: as often as there is some.
    reads_left: Option<u32>,
    output: Vec<u8>,
    /// Bytes of `output` already taken.
    taken: usize,
}

impl Read for Pipe {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let available = &self.input[self.read..];
        if available.is_empty() || self.reads_left == Some(0) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.reads_left = self.reads_left.map(|left| left - 1);
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

/// The most bytes of a name of a peer.
const NAME_MAX: usize = 512;

/// A name that a peer has chosen, as it is: it decides what the peer may open. `None` for one that is too long, or that
/// would be shown as another one: with control characters, invisible ones, or such as change the direction of text.
fn usable(name: &[u8]) -> Option<&str> {
    let hidden = |c: char| {
        c.is_control()
            || matches!(c, '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}' | '\u{feff}')
    };
    let name = std::str::from_utf8(name).ok().filter(|name| name.len() <= NAME_MAX)?;
    (!name.is_empty() && !name.chars().any(hidden)).then_some(name)
}

/// What a [`TlsSession::read`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsRead {
    /// It decrypted so many bytes; 0 at the end of the stream.
    Data(usize),
    /// It took input that has no data, such as a key update, and there is more input: read again, after other work.
    Again,
    /// It needs more input.
    NeedsInput,
}

/// The TLS state of one connection. The caller moves cipher text between it and the socket.
pub struct TlsSession {
    stream: SslStream<Pipe>,
    established: bool,
}

impl std::fmt::Debug for TlsSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsSession").field("established", &self.established).finish_non_exhaustive()
    }
}

impl TlsSession {
    /// A session; `ssl` is set up to connect or to accept.
    pub(crate) fn new(ssl: Ssl) -> io::Result<TlsSession> {
        let stream = SslStream::new(ssl, Pipe::default()).map_err(io::Error::other)?;
        Ok(TlsSession { stream, established: false })
    }

    /// True for the side that accepts: its peer sends the first message.
    pub fn is_server(&self) -> bool {
        self.stream.ssl().is_server()
    }

    /// Who the peer is: `psk:NAME` by its key, or `cn:NAME` by its certificate, which was verified and has one such name.
    /// `None` also for names that are longer than 512 bytes or have characters that are not shown.
    pub fn peer_identity(&self) -> Option<String> {
        let ssl = self.stream.ssl();
        if let Some(name) = crate::psk_name::of(ssl).or_else(|| ssl.psk_identity()) {
            return Some(format!("psk:{}", usable(name)?));
        }
        let certificate = ssl.peer_certificate()?;
        let mut names = certificate.subject_name().entries_by_nid(Nid::COMMONNAME);
        let name = names.next().filter(|_| names.next().is_none())?;
        // OpenSSL converts to UTF-8 what is in another encoding.
        let name = name.data().to_string().ok()?;
        Some(format!("cn:{}", usable(name.as_bytes())?))
    }

    /// Adds cipher text from the peer. Bounded: the caller receives more only after reading.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.stream.get_mut().input.extend_from_slice(bytes);
    }

    /// True while there is cipher text to send.
    pub fn has_output(&self) -> bool {
        !self.stream.get_ref().output.is_empty()
    }

    /// Bytes of cipher text to send.
    pub fn output_bytes(&self) -> usize {
        let pipe = self.stream.get_ref();
        pipe.output.len() - pipe.taken
    }

    /// Moves cipher text to send into `target`; 0 when there is none.
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

    /// Continues the handshake as far as the input allows; true when it has completed.
    ///
    /// # Errors
    /// The handshake has failed; an alert for the peer may be in the output.
    pub fn handshake(&mut self) -> io::Result<bool> {
        if self.established {
            return Ok(true);
        }
        let Err(error) = self.stream.do_handshake() else {
            self.established = true;
            return Ok(true);
        };
        if matches!(error.code(), ErrorCode::WANT_READ | ErrorCode::WANT_WRITE) {
            return Ok(false);
        }
        let reason = match self.stream.ssl().verify_result() {
            X509VerifyResult::OK => error.to_string(),
            bad => format!("the peer's certificate: {}", bad.error_string()),
        };
        Err(io::Error::other(format!("TLS handshake failed: {reason}")))
    }

    fn ready(&mut self) -> io::Result<&mut SslStream<Pipe>> {
        if self.established {
            return Ok(&mut self.stream);
        }
        Err(io::Error::other("the TLS handshake has not completed"))
    }

    /// Decrypts into `target`. Takes at most one record of the input, so that each call does little work, whatever the
    /// peer sends.
    ///
    /// # Errors
    /// The stream was corrupted, or the handshake has not completed.
    pub fn read(&mut self, target: &mut [u8]) -> io::Result<TlsRead> {
        let stream = self.ready()?;
        stream.get_mut().reads_left = Some(READS_AT_ONCE);
        let outcome = stream.ssl_read(target);
        let pipe = stream.get_mut();
        // All permitted reads took input: a read is not repeated without progress.
        let limited = pipe.reads_left.take() == Some(0) && pipe.read < pipe.input.len();
        match outcome {
            Ok(count) => Ok(TlsRead::Data(count)),
            Err(error) => match error.code() {
                ErrorCode::WANT_READ | ErrorCode::WANT_WRITE if limited => Ok(TlsRead::Again),
                ErrorCode::WANT_READ | ErrorCode::WANT_WRITE => Ok(TlsRead::NeedsInput),
                ErrorCode::ZERO_RETURN => Ok(TlsRead::Data(0)),
                _ => Err(error.into_io_error().unwrap_or_else(io::Error::other)),
            },
        }
    }

    /// Encrypts all of `bytes`.
    ///
    /// # Errors
    /// The handshake has not completed, or the session has failed.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.ready()?.write_all(bytes)
    }

    /// Puts a `close_notify` alert into the output.
    pub fn close(&mut self) {
        if self.established {
            // Fails if the peer has closed the session already.
            let _ = self.stream.shutdown();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is shortened or replaced would be another client.
    #[test]
    fn a_name_counts_as_it_is_or_not_at_all() {
        let long = "a".repeat(NAME_MAX);
        for name in ["alice", "ali?ce", "ünïcode", " ", &long] {
            assert_eq!(usable(name.as_bytes()), Some(name));
        }
        let longer = format!("{long}a");
        for name in ["", "ali\u{1}ce", "alice\0", "a\nb", "a\u{202e}b", "a\u{200b}b", &longer] {
            assert_eq!(usable(name.as_bytes()), None, "{name:?}");
        }
        assert_eq!(usable(b"ali\xffce"), None);
    }
}
