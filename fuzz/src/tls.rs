//! Records of TLS: what a peer may send before it has keys, and with keys.
//!
//! Whatever it sends, in whatever pieces: the server reads what was sealed in the order it was
//! sealed and nothing else, sends only what was written and short responses, and after an error
//! reads nothing more. A client that sends only valid records reads what the server wrote.

use ebb_tls::{ServerTls, TlsRead, TlsSession};
use openssl::ssl::{SslStream, SslVersion};

use super::Finding;
use super::choices::Choices;
use super::sealer::{self, ALERT, CHANGE_CIPHER_SPEC, DATA, HANDSHAKE, Library, Sealer, Wire};

macro_rules! ensure {
    ($holds:expr, $($text:tt)+) => {
        if !$holds {
            return Err(Finding(format!($($text)+)));
        }
    };
}

/// The most a server sends to a peer without keys, bytes: hello, parameters, finished, alerts.
const GREETING_MAX: usize = 8 << 10;
/// The most it sends for one record, bytes: an alert, or a response to a change of keys, sealed.
const ANSWER_MAX: usize = 64;

/// The server's side of a connection.
pub trait Session {
    fn feed(&mut self, bytes: &[u8]);
    fn handshake(&mut self) -> std::io::Result<bool>;
    fn read(&mut self, target: &mut [u8]) -> std::io::Result<TlsRead>;
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<()>;
    fn take_output(&mut self, target: &mut [u8]) -> usize;
    fn output_bytes(&self) -> usize;
}

impl Session for TlsSession {
    fn feed(&mut self, bytes: &[u8]) {
        self.feed(bytes);
    }

    fn handshake(&mut self) -> std::io::Result<bool> {
        self.handshake()
    }

    fn read(&mut self, target: &mut [u8]) -> std::io::Result<TlsRead> {
        self.read(target)
    }

    fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.write(bytes)
    }

    fn take_output(&mut self, target: &mut [u8]) -> usize {
        self.take_output(target)
    }

    fn output_bytes(&self) -> usize {
        self.output_bytes()
    }
}

/// What conversations are made from; made once.
pub struct Rig {
    server: ServerTls,
    libraries: [Library; 2],
}

impl Rig {
    /// A server with [`sealer::KEY_LINE`], and clients of both versions.
    pub fn new(server: ServerTls) -> Self {
        let libraries = [SslVersion::TLS1_2, SslVersion::TLS1_3].map(Library::new);
        Self { server, libraries }
    }
}

/// What happened in a conversation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// Handshakes that ended.
    pub shaken: u64,
    /// Records sent with keys.
    pub records: u64,
    /// Conversations that the server closed.
    pub failed: u64,
    /// Bytes the server has read, and the client.
    pub read: u64,
    pub received: u64,
}

/// One conversation.
///
/// # Errors
/// What the server did that it must not.
pub fn run<S: Session>(
    rig: &Rig,
    wrap: impl Fn(TlsSession) -> S,
    data: &[u8],
) -> Result<Tally, Finding> {
    let mut choices = Choices::new(data);
    let mut server = wrap(rig.server.session().expect("a session"));
    let library = &rig.libraries[choices.below(2)];
    let mut client = library.client(Wire::default());
    if choices.below(4) == 0 {
        return without_keys(&mut server, &mut client, &mut choices);
    }
    shake(&mut server, &mut client, &mut choices)?;
    let mut talk = Talk {
        tls13: client.ssl().version2() == Some(SslVersion::TLS1_3),
        sealer: library.sealer(client.ssl()),
        server,
        wire: Vec::new(),
        sealed: Vec::new(),
        read: 0,
        written: Vec::new(),
        said: Vec::new(),
        end: End::Open,
        may_fail: false,
        odd: false,
        tally: Tally { shaken: 1, ..Tally::default() },
    };
    while !choices.is_exhausted() {
        talk.say(&mut choices);
        let count = if choices.often() { talk.wire.len() } else { choices.below(64) };
        talk.deliver(count, &mut choices)?;
    }
    talk.deliver(usize::MAX, &mut choices)?;
    talk.judge_end(&mut client)
}

/// Bytes of no conversation, or of the beginning of one.
fn without_keys<S: Session>(
    server: &mut S,
    client: &mut SslStream<Wire>,
    choices: &mut Choices<'_>,
) -> Result<Tally, Finding> {
    let hello = std::mem::take(&mut client.get_mut().to_server);
    let (mut said, mut tally) = (0, Tally::default());
    while !choices.is_exhausted() && tally.failed == 0 {
        let mut bytes = match choices.below(4) {
            0 => hello[..place(choices, hello.len() + 1)].to_vec(),
            // A message cut into records, each with a head of its own.
            1 => hello[5..]
                .chunks(1 + choices.below(64))
                .flat_map(|part| plain(HANDSHAKE, part))
                .collect(),
            2 => {
                let body = vec![choices.byte(); choices.below(256)];
                let kind =
                    choices.pick(&[HANDSHAKE, HANDSHAKE, DATA, ALERT, CHANGE_CIPHER_SPEC, 0x80, 0]);
                plain(kind, &body)
            }
            // The beginning of a message of 16 MiB.
            _ => plain(
                HANDSHAKE,
                &[&[sealer::CLIENT_HELLO, 0xff, 0xff, 0xff], &[3; 200][..]].concat(),
            ),
        };
        if choices.often() && !bytes.is_empty() {
            let at = place(choices, bytes.len());
            bytes[at] = choices.byte();
        }
        for piece in bytes.chunks(1 + choices.below(256)) {
            server.feed(piece);
            match server.handshake() {
                Ok(done) => ensure!(!done, "a handshake ends without the client's part"),
                Err(_) => tally.failed = 1,
            }
            said += drain(server, &mut Vec::new(), 4096);
            ensure!(said <= GREETING_MAX, "{said} bytes said to a peer without keys");
            let read = server.read(&mut [0; 64]);
            ensure!(read.is_err(), "data read before the handshake has ended: {read:?}");
        }
    }
    Ok(tally)
}

/// A place in something of this length.
fn place(choices: &mut Choices<'_>, length: usize) -> usize {
    let length = length.max(1) as u64;
    usize::try_from(choices.number() % length).unwrap_or_default()
}

fn plain(kind: u8, body: &[u8]) -> Vec<u8> {
    let length = u16::try_from(body.len()).expect("a record's length");
    [&[kind, 3, 1][..], &length.to_be_bytes(), body].concat()
}

fn drain<S: Session>(server: &mut S, into: &mut Vec<u8>, piece: usize) -> usize {
    let (mut bytes, before) = (vec![0; piece.max(1)], into.len());
    loop {
        match server.take_output(&mut bytes) {
            0 => return into.len() - before,
            count => into.extend_from_slice(&bytes[..count]),
        }
    }
}

fn shake<S: Session>(
    server: &mut S,
    client: &mut SslStream<Wire>,
    choices: &mut Choices<'_>,
) -> Result<(), Finding> {
    let piece = 16 + choices.below(256);
    for _ in 0..4 {
        let mut shaken = false;
        for bytes in std::mem::take(&mut client.get_mut().to_server).chunks(piece) {
            server.feed(bytes);
            shaken = server.handshake().map_err(|e| Finding(format!("a good handshake: {e}")))?;
        }
        let into = &mut client.get_mut().to_client;
        let said = drain(server, into, piece);
        ensure!(said <= GREETING_MAX, "{said} bytes said in a handshake");
        let ended = client.do_handshake().is_ok();
        if shaken && ended {
            return Ok(());
        }
    }
    Err(Finding("a good handshake does not end".to_owned()))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Open,
    /// The client has sent its close alert.
    Closed,
    /// The server reads no more.
    Failed,
}

/// A conversation with keys.
struct Talk<S> {
    tls13: bool,
    server: S,
    sealer: Sealer,
    /// Sealed, not yet delivered.
    wire: Vec<u8>,
    /// Plain text that the server is to read, and how much of it it has.
    sealed: Vec<u8>,
    read: usize,
    /// Plain text that the server wrote, and all the cipher text it sent.
    written: Vec<u8>,
    said: Vec<u8>,
    end: End,
    /// The client has violated the protocol: the server may close the connection.
    may_fail: bool,
    /// The client's library cannot continue.
    odd: bool,
    tally: Tally,
}

impl<S: Session> Talk<S> {
    /// Seals one record, or makes the server write.
    fn say(&mut self, choices: &mut Choices<'_>) {
        let rare = choices.rarely();
        let record = match (choices.below(8), rare) {
            (0..=2, false) => {
                let data = vec![choices.byte(); 1 + choices.below(256) * choices.pick(&[1, 1, 60])];
                self.sealed.extend_from_slice(&data);
                self.sealer.seal(DATA, &data)
            }
            (3, false) => {
                let data =
                    vec![choices.byte(); 1 + choices.below(256) * choices.pick(&[1, 1, 200])];
                if self.server.write(&data).is_ok() {
                    self.written.extend_from_slice(&data);
                }
                return;
            }
            (4, false) => {
                drain(&mut self.server, &mut self.said, 1 + choices.below(256));
                return;
            }
            (5..=6, false) if self.tls13 => self.sealer.update(choices.often()),
            // Refused by a warning, and the connection continues.
            (5..=6, false) => {
                self.odd = true;
                self.sealer.seal(HANDSHAKE, &sealer::hello())
            }
            // Empty records: some are accepted, many in a row are not.
            (_, false) => {
                self.may_fail = true;
                self.sealer.seal(DATA, &[])
            }
            (kind, true) => {
                (self.may_fail, self.odd) = (true, true);
                self.wrong(kind, choices)
            }
        };
        self.tally.records += 1;
        self.wire.extend(record);
    }

    /// An invalid record.
    fn wrong(&mut self, kind: usize, choices: &mut Choices<'_>) -> Vec<u8> {
        match kind {
            0 => self.sealer.seal(HANDSHAKE, &[sealer::CLIENT_HELLO, 0xff, 0xff, 0xff, 3, 3, 3]),
            1 => self.sealer.seal(ALERT, &[choices.pick(&[1, 2]), choices.byte()]),
            2 => self.sealer.seal(HANDSHAKE, &sealer::message(sealer::HELLO_REQUEST, &[])),
            3 => self.sealer.seal(CHANGE_CIPHER_SPEC, &[1]),
            4 => {
                let kind = choices.byte();
                self.sealer.seal(if kind == DATA { 0 } else { kind }, &[choices.byte(); 5])
            }
            5 => plain(choices.byte(), &vec![choices.byte(); choices.below(256)]),
            6 => self.sealer.update(true),
            _ => {
                let mut record = self.sealer.seal(DATA, &[0xee; 40]);
                let at = choices.below(record.len());
                record[at] ^= 1 << choices.below(8);
                record
            }
        }
    }

    /// Makes the server read what has arrived.
    fn deliver(&mut self, count: usize, choices: &mut Choices<'_>) -> Result<(), Finding> {
        let bytes: Vec<u8> = self.wire.drain(..count.min(self.wire.len())).collect();
        self.server.feed(&bytes);
        let mut target = vec![0; 1 + choices.below(256) * choices.pick(&[1, 64])];
        loop {
            match self.server.read(&mut target) {
                Ok(TlsRead::Data(0)) => {
                    ensure!(self.may_fail, "the end of a stream that continues");
                    self.end = End::Closed;
                    break;
                }
                Ok(TlsRead::Data(count)) => {
                    ensure!(self.end == End::Open, "data read after {:?}", self.end);
                    let expected = self.sealed.get(self.read..self.read + count);
                    ensure!(expected == Some(&target[..count]), "other data read than was sent");
                    self.read += count;
                    self.tally.read += count as u64;
                }
                Ok(TlsRead::Again) => {}
                Ok(TlsRead::NeedsInput) => break,
                Err(error) => {
                    ensure!(self.may_fail, "a good stream fails: {error}");
                    self.end = End::Failed;
                    self.tally.failed = 1;
                    break;
                }
            }
        }
        let records = usize::try_from(self.tally.records).unwrap_or(usize::MAX);
        let heads = self.written.len() / 1024 + 32 * records + 1024;
        let most = self.written.len() + heads + ANSWER_MAX * records + GREETING_MAX;
        let said = self.said.len() + self.server.output_bytes();
        ensure!(said <= most, "{said} bytes said to {records} records");
        Ok(())
    }

    /// Everything that was sealed has been read, and the client reads what was written.
    fn judge_end(mut self, client: &mut SslStream<Wire>) -> Result<Tally, Finding> {
        let all = self.read == self.sealed.len();
        ensure!(all || self.may_fail, "{} of {} bytes read", self.read, self.sealed.len());
        drain(&mut self.server, &mut self.said, 1 << 10);
        if self.odd || self.end != End::Open {
            return Ok(self.tally);
        }
        client.get_mut().to_client.append(&mut self.said);
        let mut received = vec![0; self.written.len() + 1];
        let mut count = 0;
        while let Ok(more @ 1..) = client.ssl_read(&mut received[count..]) {
            count += more;
        }
        ensure!(
            received[..count] == self.written[..],
            "the client reads {count} bytes, not the {} written",
            self.written.len()
        );
        self.tally.received = count as u64;
        Ok(self.tally)
    }
}
