//! TLS for NBD: contexts from the operator's files, sessions over memory.
//!
//! Answers "TLS support" of the protocol. File names are those of other NBD servers:
//! `ca-cert.pem`, `server-cert.pem`, `server-key.pem` in a folder, or one file of pre-shared keys
//! with lines `name:hex`. At least TLS 1.2. OpenSSL does the cryptography; it never sees a socket.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use openssl::ssl::{
    ErrorCode, HandshakeError, MidHandshakeSslStream, Ssl, SslContext, SslContextBuilder,
    SslFiletype, SslMethod, SslOptions, SslStream, SslVerifyMode, SslVersion,
};

/// Longest file of pre-shared keys, bytes.
const PSK_FILE_MAX: u64 = 1 << 20;

/// Why TLS could not be set up. Each message says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are the words of the messages")]
pub enum TlsError {
    /// A file is missing or cannot be read.
    #[error("{path}: cannot be read: TLS needs {purpose}")]
    File { path: PathBuf, purpose: &'static str, source: io::Error },
    /// A file does not hold what it should.
    #[error("{path}: is not {purpose} ({reason})")]
    Content { path: PathBuf, purpose: &'static str, reason: String },
    /// A line of a key file is malformed.
    #[error("{path}: line {line}: expected `name:key` with the key in hexadecimal digits")]
    Psk { path: PathBuf, line: usize },
    /// The key and the certificate do not belong together.
    #[error("{path}: the key is not that of server-cert.pem")]
    Mismatch { path: PathBuf },
    /// OpenSSL refused.
    #[error("OpenSSL could not be set up for TLS")]
    Setup(#[from] openssl::error::ErrorStack),
}

/// What TLS sessions are made from.
#[derive(Clone)]
pub struct TlsContext(SslContext);

impl std::fmt::Debug for TlsContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TlsContext")
    }
}

fn builder() -> Result<SslContextBuilder, TlsError> {
    let mut builder = SslContext::builder(SslMethod::tls_server())?;
    builder.set_min_proto_version(Some(SslVersion::TLS1_2))?;
    builder.set_options(SslOptions::NO_RENEGOTIATION | SslOptions::NO_COMPRESSION);
    // Disks are not visited by browsers: sessions are long and few, and tickets only cost.
    builder.set_num_tickets(0)?;
    Ok(builder)
}

impl TlsContext {
    /// From `ca-cert.pem`, `server-cert.pem` and `server-key.pem` in `folder`; with `verify_peer`
    /// clients must show a certificate signed by the CA.
    ///
    /// # Errors
    /// [`TlsError`], naming the file and the remedy.
    pub fn from_certificates(folder: &Path, verify_peer: bool) -> Result<TlsContext, TlsError> {
        let mut builder = builder()?;
        let certificate = existing(folder, "server-cert.pem", "the server's certificate (PEM)")?;
        builder.set_certificate_chain_file(&certificate).map_err(|e| TlsError::Content {
            path: certificate,
            purpose: "a certificate in PEM form",
            reason: e.to_string(),
        })?;
        let key = existing(folder, "server-key.pem", "the server's private key (PEM)")?;
        builder.set_private_key_file(&key, SslFiletype::PEM).map_err(|e| TlsError::Content {
            path: key.clone(),
            purpose: "a private key in PEM form that fits server-cert.pem",
            reason: e.to_string(),
        })?;
        builder.check_private_key().map_err(|_| TlsError::Mismatch { path: key })?;
        if verify_peer {
            let ca = existing(folder, "ca-cert.pem", "the CA that signs clients' certificates")?;
            builder.set_ca_file(&ca).map_err(|e| TlsError::Content {
                path: ca,
                purpose: "a CA certificate in PEM form",
                reason: e.to_string(),
            })?;
            builder.set_verify(SslVerifyMode::PEER | SslVerifyMode::FAIL_IF_NO_PEER_CERT);
        }
        Ok(TlsContext(builder.build()))
    }

    /// From a file of pre-shared keys: lines `name:hex`, `#` starts a comment.
    ///
    /// # Errors
    /// [`TlsError`], naming the file, the line and the remedy.
    pub fn from_psk(path: &Path) -> Result<TlsContext, TlsError> {
        let keys = Arc::new(read_psk(path)?);
        let mut builder = builder()?;
        // Clients offer suites with and without PSK; without a certificate only these can work.
        builder.set_cipher_list("PSK")?;
        builder.set_psk_server_callback(move |_, identity, out| {
            let Some(key) = identity.and_then(|name| keys.get(name)) else { return Ok(0) };
            let Some(room) = out.get_mut(..key.len()) else { return Ok(0) };
            room.copy_from_slice(key);
            Ok(key.len())
        });
        Ok(TlsContext(builder.build()))
    }

    pub(crate) fn session(&self) -> io::Result<TlsSession> {
        let ssl = Ssl::new(&self.0).map_err(io::Error::other)?;
        Ok(TlsSession(State::Start(ssl, Pipe::default())))
    }
}

fn existing(folder: &Path, name: &str, purpose: &'static str) -> Result<PathBuf, TlsError> {
    let path = folder.join(name);
    match std::fs::File::open(&path) {
        Ok(_) => Ok(path),
        Err(source) => Err(TlsError::File { path, purpose, source }),
    }
}

fn read_psk(path: &Path) -> Result<HashMap<Vec<u8>, Vec<u8>>, TlsError> {
    let fail = |source| {
        let purpose = "a file of pre-shared keys (make one with `psktool`)";
        TlsError::File { path: path.into(), purpose, source }
    };
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(fail)?;
    file.take(PSK_FILE_MAX).read_to_string(&mut text).map_err(fail)?;
    let mut keys = HashMap::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let bad = || TlsError::Psk { path: path.into(), line: index + 1 };
        let (name, hex) = line.rsplit_once(':').ok_or_else(bad)?;
        let key = from_hex(hex).ok_or_else(bad)?;
        if name.is_empty() || key.is_empty() {
            return Err(bad());
        }
        keys.insert(name.as_bytes().to_vec(), key);
    }
    if keys.is_empty() {
        return Err(TlsError::Content {
            path: path.into(),
            purpose: "a file of pre-shared keys",
            reason: "there is no key in it".into(),
        });
    }
    Ok(keys)
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(2) {
        return None;
    }
    let digits: Option<Vec<u32>> = text.chars().map(|c| c.to_digit(16)).collect();
    digits?.chunks(2).map(|pair| u8::try_from(pair[0] << 4 | pair[1]).ok()).collect()
}

/// The two ends OpenSSL reads from and writes to: memory.
#[derive(Debug, Default)]
pub(crate) struct Pipe {
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
        self.output.extend_from_slice(buf);
        Ok(buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[allow(clippy::large_enum_variant, reason = "one per connection, and it ends as the large one")]
enum State {
    Start(Ssl, Pipe),
    Handshaking(MidHandshakeSslStream<Pipe>),
    Ready(SslStream<Pipe>),
    Failed(Pipe),
}

/// One connection's TLS state.
pub(crate) struct TlsSession(State);

impl TlsSession {
    fn pipe(&mut self) -> &mut Pipe {
        match &mut self.0 {
            State::Start(_, pipe) | State::Failed(pipe) => pipe,
            State::Handshaking(stream) => stream.get_mut(),
            State::Ready(stream) => stream.get_mut(),
        }
    }

    /// Adds cipher text from the client. Bounded: the caller receives more only after reading.
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        self.pipe().input.extend_from_slice(bytes);
    }

    pub(crate) fn has_output(&self) -> bool {
        match &self.0 {
            State::Ready(stream) => !stream.get_ref().output.is_empty(),
            _ => false,
        }
    }

    /// Moves cipher text for the client into `target`; 0 when there is none.
    pub(crate) fn take_output(&mut self, target: &mut [u8]) -> usize {
        let pipe = self.pipe();
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
    pub(crate) fn handshake(&mut self) -> io::Result<bool> {
        let state = std::mem::replace(&mut self.0, State::Failed(Pipe::default()));
        let result = match state {
            State::Start(ssl, pipe) => ssl.accept(pipe),
            State::Handshaking(stream) => stream.handshake(),
            ready @ (State::Ready(_) | State::Failed(_)) => {
                self.0 = ready;
                return Ok(matches!(self.0, State::Ready(_)));
            }
        };
        match result {
            Ok(stream) => {
                self.0 = State::Ready(stream);
                Ok(true)
            }
            Err(HandshakeError::WouldBlock(stream)) => {
                self.0 = State::Handshaking(stream);
                Ok(false)
            }
            Err(HandshakeError::Failure(mut stream)) => {
                let reason = stream.error().to_string();
                self.0 = State::Failed(std::mem::take(stream.get_mut()));
                Err(io::Error::other(format!("TLS handshake failed: {reason}")))
            }
            Err(HandshakeError::SetupFailure(error)) => Err(io::Error::other(error)),
        }
    }

    fn ready(&mut self) -> io::Result<&mut SslStream<Pipe>> {
        match &mut self.0 {
            State::Ready(stream) => Ok(stream),
            _ => Err(io::Error::other("the TLS handshake has not ended")),
        }
    }

    /// Decrypts into `target`: bytes, 0 at the end of the stream, `None` when more input is needed.
    pub(crate) fn read(&mut self, target: &mut [u8]) -> io::Result<Option<usize>> {
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
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.ready()?.write_all(bytes)
    }

    /// Queues the farewell.
    pub(crate) fn close(&mut self) {
        if let State::Ready(stream) = &mut self.0 {
            // A client that is gone already is no loss.
            let _ = stream.shutdown();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn psk(text: &str) -> Result<HashMap<Vec<u8>, Vec<u8>>, TlsError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        read_psk(file.path())
    }

    #[test]
    fn keys_are_read_by_name() {
        let keys = psk("# keys\nalice:0aFF\n\nb:o:b:01\n").unwrap();
        assert_eq!(keys[b"alice".as_slice()], [0x0a, 0xff]);
        assert_eq!(keys[b"b:o:b".as_slice()], [1]);
    }

    #[test]
    fn a_bad_line_is_named() {
        for text in ["alice", "alice:", ":00", "alice:0", "alice:zz", "ok:00\nalice:é0"] {
            let line = text.lines().count();
            match psk(text) {
                Err(TlsError::Psk { line: found, .. }) => assert_eq!(found, line, "{text:?}"),
                other => panic!("{text:?}: {other:?}"),
            }
        }
        assert!(matches!(psk("# nothing\n"), Err(TlsError::Content { .. })));
    }

    #[test]
    fn a_missing_certificate_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = TlsContext::from_certificates(folder.path(), false).unwrap_err();
        assert!(error.to_string().contains("server-cert.pem"), "{error}");
    }
}
