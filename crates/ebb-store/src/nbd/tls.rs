//! TLS as a client: contexts from the operator's files, sessions over memory.
//!
//! Answers "TLS support" of the protocol. At least TLS 1.2. OpenSSL does the cryptography and never
//! sees a socket: cipher text goes in by [`TlsSession::feed`] and out by
//! [`TlsSession::take_output`], on a helper thread in the handshake and on a worker after it.

use std::io::{self, Read, Write};
use std::path::Path;

use openssl::ssl::{
    ErrorCode, HandshakeError, MidHandshakeSslStream, Ssl, SslContext, SslContextBuilder,
    SslFiletype, SslMethod, SslOptions, SslStream, SslVerifyMode, SslVersion,
};

use super::options::{NbdAddress, NbdError, NbdOptions, NbdTls, NbdTlsKeys};

/// Longest file of pre-shared keys, bytes.
const PSK_FILE_MAX: u64 = 1 << 20;

/// What sessions are made from.
#[derive(Clone)]
pub(crate) struct TlsContext {
    context: SslContext,
    /// The name the server must have.
    host: Option<String>,
    verify: bool,
}

impl std::fmt::Debug for TlsContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TlsContext")
    }
}

fn keys_error(path: &Path, what: impl Into<String>) -> NbdError {
    NbdError::Keys { path: path.into(), what: what.into() }
}

impl TlsContext {
    /// Reads the keys.
    pub(crate) fn new(options: &NbdOptions, tls: &NbdTls) -> Result<TlsContext, NbdError> {
        let setup = |error: openssl::error::ErrorStack| NbdError::TlsFailed {
            address: options.address.to_string(),
            source: io::Error::other(error),
        };
        let mut builder = SslContext::builder(SslMethod::tls_client()).map_err(setup)?;
        builder.set_min_proto_version(Some(SslVersion::TLS1_2)).map_err(setup)?;
        builder.set_options(SslOptions::NO_RENEGOTIATION | SslOptions::NO_COMPRESSION);
        let mut verify = tls.verify;
        match &tls.keys {
            NbdTlsKeys::System => builder.set_default_verify_paths().map_err(setup)?,
            NbdTlsKeys::Certificates(folder) => certificates(&mut builder, folder)?,
            NbdTlsKeys::Psk { file, user } => {
                let key = read_psk(file, user)?;
                let user = user.clone();
                // Without certificates only these suites can work.
                builder.set_cipher_list("PSK").map_err(setup)?;
                builder.set_psk_client_callback(move |_, _, identity, out| {
                    let (name, end) = (user.as_bytes(), user.len());
                    let (Some(place), Some(room)) =
                        (identity.get_mut(..=end), out.get_mut(..key.len()))
                    else {
                        return Ok(0);
                    };
                    place[..end].copy_from_slice(name);
                    place[end] = 0;
                    room.copy_from_slice(&key);
                    Ok(key.len())
                });
                verify = false;
            }
        }
        let mode = if verify { SslVerifyMode::PEER } else { SslVerifyMode::NONE };
        builder.set_verify(mode);
        let host = tls.hostname.clone().or_else(|| match &options.address {
            NbdAddress::Tcp { host, .. } => Some(host.clone()),
            NbdAddress::Unix(_) => None,
        });
        Ok(TlsContext { context: builder.build(), host, verify })
    }

    pub(crate) fn session(&self) -> io::Result<TlsSession> {
        let mut ssl = Ssl::new(&self.context).map_err(io::Error::other)?;
        if let Some(host) = &self.host {
            let address = host.parse::<std::net::IpAddr>();
            if address.is_err() {
                ssl.set_hostname(host).map_err(io::Error::other)?;
            }
            if self.verify {
                let wanted = match address {
                    Ok(address) => ssl.param_mut().set_ip(address),
                    Err(_) => ssl.param_mut().set_host(host),
                };
                wanted.map_err(io::Error::other)?;
            }
        }
        Ok(TlsSession(State::Start(ssl, Pipe::default())))
    }
}

fn certificates(builder: &mut SslContextBuilder, folder: &Path) -> Result<(), NbdError> {
    let ca = folder.join("ca-cert.pem");
    builder
        .set_ca_file(&ca)
        .map_err(|_| keys_error(&ca, "is no CA certificate (PEM) that can be read"))?;
    let (certificate, key) = (folder.join("client-cert.pem"), folder.join("client-key.pem"));
    if !certificate.exists() {
        return Ok(());
    }
    builder
        .set_certificate_chain_file(&certificate)
        .map_err(|_| keys_error(&certificate, "is no certificate (PEM) that can be read"))?;
    builder
        .set_private_key_file(&key, SslFiletype::PEM)
        .map_err(|_| keys_error(&key, "is no private key (PEM) of client-cert.pem"))
}

fn read_psk(path: &Path, user: &str) -> Result<Vec<u8>, NbdError> {
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(|e| keys_error(path, e.to_string()))?;
    file.take(PSK_FILE_MAX)
        .read_to_string(&mut text)
        .map_err(|e| keys_error(path, e.to_string()))?;
    for line in text.lines().map(str::trim) {
        if let Some((name, hex)) = line.rsplit_once(':')
            && name == user
        {
            let key = from_hex(hex).filter(|key| !key.is_empty());
            return key.ok_or_else(|| {
                keys_error(path, format!("the key of `{user}` is not hexadecimal"))
            });
        }
    }
    let what = format!("has no key for `{user}`: write nbds://NAME@HOST with a name that is there");
    Err(keys_error(path, what))
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
    read: usize,
    output: Vec<u8>,
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

impl std::fmt::Debug for TlsSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TlsSession")
    }
}

impl TlsSession {
    fn pipe(&mut self) -> &mut Pipe {
        match &mut self.0 {
            State::Start(_, pipe) | State::Failed(pipe) => pipe,
            State::Handshaking(stream) => stream.get_mut(),
            State::Ready(stream) => stream.get_mut(),
        }
    }

    /// Adds cipher text from the server. Bounded: the caller receives more only after reading.
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        self.pipe().input.extend_from_slice(bytes);
    }

    pub(crate) fn has_output(&mut self) -> bool {
        !self.pipe().output.is_empty()
    }

    /// Moves cipher text for the server into `target`; 0 when there is none.
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
            State::Start(ssl, pipe) => ssl.connect(pipe),
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
                let verified = stream.ssl().verify_result();
                let mut reason = stream.error().to_string();
                if verified != openssl::x509::X509VerifyResult::OK {
                    reason = format!("the server's certificate: {}", verified.error_string());
                }
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
}
