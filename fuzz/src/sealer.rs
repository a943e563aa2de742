//! A TLS client that sends what no TLS library sends: any record, sealed with the keys of a
//! connection whose handshake a library completed.
//!
//! One suite, ChaCha20-Poly1305 with SHA-256 and a pre-shared key, in TLS 1.2 (RFC 5246, 7905) and
//! TLS 1.3 (RFC 8446).

use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex, PoisonError};

use openssl::hash::MessageDigest;
use openssl::pkey::PKey;
use openssl::sign::Signer;
use openssl::ssl::{Ssl, SslContext, SslMethod, SslRef, SslStream, SslVersion};
use openssl::symm::{Cipher, encrypt_aead};

/// Content types of records.
pub const CHANGE_CIPHER_SPEC: u8 = 20;
pub const ALERT: u8 = 21;
pub const HANDSHAKE: u8 = 22;
pub const DATA: u8 = 23;

/// Types of handshake messages.
pub const HELLO_REQUEST: u8 = 0;
pub const CLIENT_HELLO: u8 = 1;
pub const KEY_UPDATE: u8 = 24;

/// The key of the client `alice`, and the line of a server's key file that holds it.
pub const KEY: [u8; 16] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16];
pub const KEY_LINE: &str = "alice:0102030405060708090a0b0c0d0e0f10\n";

/// A client's end of a connection that is in memory.
#[derive(Debug, Default)]
pub struct Wire {
    pub to_client: Vec<u8>,
    pub to_server: Vec<u8>,
}

impl Read for Wire {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let count = buf.len().min(self.to_client.len());
        if count == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        buf[..count].copy_from_slice(&self.to_client[..count]);
        self.to_client.drain(..count);
        Ok(count)
    }
}

impl Write for Wire {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.to_server.extend_from_slice(buf);
        Ok(buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

type Secrets = Arc<Mutex<Vec<String>>>;

/// What clients are made from; they come with the secrets of TLS 1.3.
pub struct Library {
    context: SslContext,
    secrets: Secrets,
    version: SslVersion,
}

impl Library {
    /// Clients of one version.
    pub fn new(version: SslVersion) -> Self {
        let secrets = Secrets::default();
        let mut builder = SslContext::builder(SslMethod::tls_client()).expect("a context");
        builder.set_min_proto_version(Some(version)).expect("a version");
        builder.set_max_proto_version(Some(version)).expect("a version");
        builder.set_cipher_list("ECDHE-PSK-CHACHA20-POLY1305").expect("a suite");
        builder.set_ciphersuites("TLS_CHACHA20_POLY1305_SHA256").expect("a suite");
        builder.set_psk_client_callback(|_, _, identity, key| {
            identity[..6].copy_from_slice(b"alice\0");
            key[..KEY.len()].copy_from_slice(&KEY);
            Ok(KEY.len())
        });
        let lines = secrets.clone();
        builder.set_keylog_callback(move |_, line| {
            lines.lock().unwrap_or_else(PoisonError::into_inner).push(line.to_owned());
        });
        Self { context: builder.build(), secrets, version }
    }

    /// A client that goes as far with its handshake as its stream lets it. One at a time: the secrets are those of the last.
    pub fn client<S: Read + Write>(&self, stream: S) -> SslStream<S> {
        self.secrets.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let ssl = Ssl::new(&self.context).expect("a session");
        let mut stream = SslStream::new(ssl, stream).expect("a session");
        // What it waits for comes later, or has come if the stream blocks.
        let _ = stream.connect();
        stream
    }

    /// Takes over what a client sends, after its handshake.
    pub fn sealer(&self, ssl: &SslRef) -> Sealer {
        if self.version == SslVersion::TLS1_2 {
            let mut master = [0; 48];
            ssl.session().expect("a session").master_key(&mut master);
            let mut seed = b"key expansion".to_vec();
            let mut random = [0; 32];
            ssl.server_random(&mut random);
            seed.extend(random);
            ssl.client_random(&mut random);
            seed.extend(random);
            // The client's key, the server's, the client's nonce, the server's.
            let keys = prf(&master, &seed, 32 + 32 + 12);
            let (key, iv) = (array(&keys[..32]), array(&keys[64..]));
            // Number 0 was the Finished message.
            return Sealer { secret: None, key, iv, number: 1 };
        }
        let lines = self.secrets.lock().unwrap_or_else(PoisonError::into_inner);
        let line = lines.iter().find(|line| line.starts_with("CLIENT_TRAFFIC_SECRET_0 "));
        let digits = line.and_then(|line| line.rsplit(' ').next()).expect("the secret is printed");
        let secret: Vec<u8> = (0..digits.len() / 2)
            .map(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).expect("digits"))
            .collect();
        Sealer::of_secret(secret)
    }
}

/// Seals records with a client's keys.
pub struct Sealer {
    /// Of TLS 1.3: from which the next keys are made.
    secret: Option<Vec<u8>>,
    key: [u8; 32],
    iv: [u8; 12],
    number: u64,
}

impl Sealer {
    fn of_secret(secret: Vec<u8>) -> Self {
        let key = array(&expand(&secret, "key", 32));
        let iv = array(&expand(&secret, "iv", 12));
        Self { secret: Some(secret), key, iv, number: 0 }
    }

    /// A record as it goes over the wire.
    pub fn seal(&mut self, kind: u8, content: &[u8]) -> Vec<u8> {
        let mut nonce = self.iv;
        for (byte, number) in nonce[4..].iter_mut().zip(self.number.to_be_bytes()) {
            *byte ^= number;
        }
        let (mut plain, mut outer) = (content.to_vec(), kind);
        if self.secret.is_some() {
            plain.push(kind);
            outer = DATA;
        }
        let length = u16::try_from(plain.len() + 16).expect("a record's length");
        let mut record = vec![outer, 3, 3];
        record.extend(length.to_be_bytes());
        let known = if self.secret.is_some() {
            record.clone()
        } else {
            let mut known = self.number.to_be_bytes().to_vec();
            known.extend([kind, 3, 3]);
            known.extend((length - 16).to_be_bytes());
            known
        };
        let mut tag = [0; 16];
        let cipher = Cipher::chacha20_poly1305();
        let sealed = encrypt_aead(cipher, &self.key, Some(&nonce), &known, &plain, &mut tag);
        record.extend(sealed.expect("sealing"));
        record.extend(tag);
        self.number += 1;
        record
    }

    /// A record that says that the keys change (TLS 1.3), sealed with the old ones; then changes them.
    pub fn update(&mut self, answer: bool) -> Vec<u8> {
        let record = self.seal(HANDSHAKE, &message(KEY_UPDATE, &[u8::from(answer)]));
        if let Some(secret) = &self.secret {
            *self = Self::of_secret(expand(secret, "traffic upd", 32));
        }
        record
    }
}

/// A handshake message with its head.
pub fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).expect("a message's length").to_be_bytes();
    [&[kind], &length[1..], body].concat()
}

/// A ClientHello of TLS 1.2 that requests a renegotiation.
pub fn hello() -> Vec<u8> {
    let body = [&[3, 3][..], &[7; 32], &[0, 0, 2, 0xcc, 0xac, 1, 0]].concat();
    message(CLIENT_HELLO, &body)
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes[..N].try_into().expect("as many as requested")
}

fn hmac(key: &[u8], parts: &[&[u8]]) -> Vec<u8> {
    let key = PKey::hmac(key).expect("a key");
    let mut signer = Signer::new(MessageDigest::sha256(), &key).expect("a signer");
    parts.iter().for_each(|part| signer.update(part).expect("signing"));
    signer.sign_to_vec().expect("signing")
}

/// `PRF` of TLS 1.2; `seed` begins with the label.
fn prf(secret: &[u8], seed: &[u8], length: usize) -> Vec<u8> {
    let (mut out, mut a) = (Vec::new(), hmac(secret, &[seed]));
    while out.len() < length {
        out.extend(hmac(secret, &[&a, seed]));
        a = hmac(secret, &[&a]);
    }
    out
}

/// `HKDF-Expand-Label` of TLS 1.3 with an empty context, up to 32 bytes.
fn expand(secret: &[u8], label: &str, length: u8) -> Vec<u8> {
    let name = [b"tls13 ", label.as_bytes()].concat();
    let size = u8::try_from(name.len()).expect("a short label");
    let mut out = hmac(secret, &[&[0, length, size], &name, &[0, 1]]);
    out.truncate(length.into());
    out
}
