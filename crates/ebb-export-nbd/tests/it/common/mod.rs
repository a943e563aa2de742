//! A simple blocking NBD client for all three reply styles, and a server.
//!
//! The client is written from the protocol text alone: it shares no code with the server.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ebb_export_nbd::{Server, ServerLimits, ServerTls, TlsMode};
use ebb_io::{Io, Worker, fd_from};
use ebb_store::{Direct, FileStore, MemoryStore, OpenOptions, Store};
use ebb_volume::{Volume, VolumeOptions, Volumes};

/// The time after which a test reports a hang.
pub(crate) const HANG: Duration = Duration::from_secs(180);

pub(crate) const READ: u16 = 0;
pub(crate) const WRITE: u16 = 1;
pub(crate) const DISC: u16 = 2;
pub(crate) const FLUSH: u16 = 3;
pub(crate) const TRIM: u16 = 4;
pub(crate) const CACHE: u16 = 5;
pub(crate) const WRITE_ZEROES: u16 = 6;
pub(crate) const BLOCK_STATUS: u16 = 7;

pub(crate) const FUA: u16 = 1;
pub(crate) const NO_HOLE: u16 = 2;
pub(crate) const DF: u16 = 4;
pub(crate) const REQ_ONE: u16 = 8;
pub(crate) const FAST_ZERO: u16 = 16;
pub(crate) const PAYLOAD_LEN: u16 = 32;

pub(crate) const EPERM: u32 = 1;
pub(crate) const EINVAL: u32 = 22;
pub(crate) const ENOSPC: u32 = 28;
pub(crate) const EOVERFLOW: u32 = 75;
pub(crate) const ENOTSUP: u32 = 95;

pub(crate) trait Stream: Read + Write + Send + std::fmt::Debug {}
impl<T: Read + Write + Send + std::fmt::Debug> Stream for T {}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    Simple,
    Structured,
    Extended,
}

/// The types and payloads of the replies to an option.
pub(crate) type OptionReplies = Vec<(u32, Vec<u8>)>;

pub(crate) const STYLES: [Style; 3] = [Style::Simple, Style::Structured, Style::Extended];

pub(crate) struct Client {
    pub(crate) stream: Box<dyn Stream>,
    pub(crate) style: Style,
    pub(crate) size: u64,
    pub(crate) flags: u16,
    pub(crate) context: u32,
    /// Incomplete replies, with the bytes of content received.
    partial: HashMap<u64, (Reply, usize)>,
}

/// One reply, assembled from its chunks.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) cookie: u64,
    pub(crate) error: u32,
    /// The data of a read, with holes filled in, if the length of the read was given.
    pub(crate) data: Vec<u8>,
}

fn be32(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(bytes[..4].try_into().unwrap())
}

fn be64(bytes: &[u8]) -> u64 {
    u64::from_be_bytes(bytes[..8].try_into().unwrap())
}

pub(crate) fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap()
}

impl Client {
    /// Reads the greeting and agrees to fixed newstyle without zeroes.
    pub(crate) fn greet(stream: &mut dyn Stream) -> std::io::Result<()> {
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        assert_eq!(&greeting, b"NBDMAGICIHAVEOPT\0\x03");
        stream.write_all(&3u32.to_be_bytes())
    }

    /// Sends an option; returns the types and payloads of its replies up to the last.
    pub(crate) fn option(
        stream: &mut dyn Stream,
        option: u32,
        payload: &[u8],
    ) -> std::io::Result<Vec<(u32, Vec<u8>)>> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        stream.write_all(&[b"IHAVEOPT", &option.to_be_bytes()[..], &length, payload].concat())?;
        let mut replies = Vec::new();
        loop {
            let mut header = [0; 20];
            stream.read_exact(&mut header)?;
            assert_eq!(be64(&header), 0x3_e889_0455_65a9);
            assert_eq!(be32(&header[8..]), option);
            let kind = be32(&header[12..]);
            let mut payload = vec![0; be32(&header[16..]) as usize];
            stream.read_exact(&mut payload)?;
            replies.push((kind, payload));
            if kind == 1 || kind & 1 << 31 != 0 {
                return Ok(replies);
            }
        }
    }

    /// From a stream on which the greeting was exchanged to the transmission phase.
    pub(crate) fn go(stream: Box<dyn Stream>, name: &str, style: Style) -> std::io::Result<Client> {
        Client::enter(stream, name, style, &[0, 1, 0, 3])
    }

    /// As [`Client::go`], and requests these infos: their number, and the number of each.
    pub(crate) fn enter(
        mut stream: Box<dyn Stream>,
        name: &str,
        style: Style,
        infos: &[u8],
    ) -> std::io::Result<Client> {
        let counted = |text: &str| {
            [&u32::try_from(text.len()).unwrap().to_be_bytes()[..], text.as_bytes()].concat()
        };
        let mut context = 0;
        if style != Style::Simple {
            let option = if style == Style::Structured { 8 } else { 11 };
            assert_eq!(Client::option(&mut stream, option, b"")?, [(1, vec![])]);
            let queries = [counted(name), vec![0, 0, 0, 1], counted("base:allocation")].concat();
            let replies = Client::option(&mut stream, 10, &queries)?;
            assert_eq!((replies.len(), replies[0].0), (2, 4), "{replies:?}");
            assert_eq!(&replies[0].1[4..], b"base:allocation");
            context = be32(&replies[0].1);
        }
        let selected = Client::select(stream, name, (style, context), infos)?;
        Ok(selected.unwrap_or_else(|replies| panic!("the export was refused: {replies:?}")))
    }

    /// Selects an export and requests infos, as [`Client::enter`]; the replies if the server
    /// rejects that.
    pub(crate) fn select(
        mut stream: Box<dyn Stream>,
        name: &str,
        (style, context): (Style, u32),
        infos: &[u8],
    ) -> std::io::Result<Result<Client, OptionReplies>> {
        let length = u32::try_from(name.len()).unwrap().to_be_bytes();
        let request = [&length[..], name.as_bytes(), infos].concat();
        let replies = Client::option(&mut stream, 7, &request)?;
        if replies.last().unwrap().0 != 1 {
            return Ok(Err(replies));
        }
        let export = &replies.iter().find(|(kind, p)| *kind == 3 && p[..2] == [0, 0]).unwrap().1;
        let (size, flags) = (be64(&export[2..]), u16::from_be_bytes([export[10], export[11]]));
        Ok(Ok(Client { stream, style, size, flags, context, partial: HashMap::new() }))
    }

    /// Without a connection, for [`Client::header`].
    pub(crate) fn detached(style: Style) -> Client {
        let stream = Box::new(std::io::Cursor::new(Vec::new()));
        Client { stream, style, size: 0, flags: 0, context: 0, partial: HashMap::new() }
    }

    /// The bytes of a request header.
    pub(crate) fn header(
        &self,
        command: u16,
        flags: u16,
        cookie: u64,
        offset: u64,
        length: u64,
    ) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(32);
        let extended = self.style == Style::Extended;
        let magic: u32 = if extended { 0x21e4_1c71 } else { 0x2560_9513 };
        bytes.extend(magic.to_be_bytes());
        let flags = if extended && command == WRITE { flags | PAYLOAD_LEN } else { flags };
        bytes.extend(flags.to_be_bytes());
        bytes.extend(command.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        match extended {
            true => bytes.extend(length.to_be_bytes()),
            false => bytes.extend(u32::try_from(length).unwrap().to_be_bytes()),
        }
        bytes
    }

    pub(crate) fn send(&mut self, command: u16, flags: u16, cookie: u64, offset: u64, length: u64) {
        let header = self.header(command, flags, cookie, offset, length);
        self.stream.write_all(&header).unwrap();
    }

    pub(crate) fn send_write(&mut self, flags: u16, cookie: u64, offset: u64, data: &[u8]) {
        let mut bytes = self.header(WRITE, flags, cookie, offset, data.len() as u64);
        bytes.extend_from_slice(data);
        self.stream.write_all(&bytes).unwrap();
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// One chunk: flags, type, cookie, payload.
    fn chunk(&mut self, magic: [u8; 4]) -> std::io::Result<(u16, u16, u64, Vec<u8>)> {
        let extended = self.style == Style::Extended;
        let expected: u32 = if extended { 0x6e8a_278c } else { 0x668e_33ef };
        assert_eq!(magic, expected.to_be_bytes());
        let mut rest = vec![0; if extended { 28 } else { 16 }];
        self.stream.read_exact(&mut rest)?;
        let length =
            if extended { to_usize(be64(&rest[20..])) } else { be32(&rest[12..]) as usize };
        let mut payload = vec![0; length];
        self.stream.read_exact(&mut payload)?;
        let short = |at: usize| u16::from_be_bytes([rest[at], rest[at + 1]]);
        Ok((short(0), short(2), be64(&rest[4..]), payload))
    }

    /// Receives until one reply is complete, whichever request it is for. `read` maps the cookie of a read to
    /// its (offset, length), so that its data can be assembled. Chunks of different replies
    /// may be interleaved.
    pub(crate) fn reply(
        &mut self,
        read: impl Fn(u64) -> Option<(u64, usize)>,
    ) -> std::io::Result<Reply> {
        loop {
            let mut magic = [0; 4];
            self.stream.read_exact(&mut magic)?;
            if magic == 0x6744_6698u32.to_be_bytes() {
                return self.simple_reply(read);
            }
            let (flags, kind, cookie, payload) = self.chunk(magic)?;
            let range = read(cookie);
            let (mut reply, mut covered) = self.partial.remove(&cookie).unwrap_or_else(|| {
                let data = vec![0xee; range.map_or(0, |(_, length)| length)];
                (Reply { cookie, error: 0, data }, 0)
            });
            covered += take_chunk(&mut reply, kind, range.map_or(0, |(offset, _)| offset), payload);
            if flags & 1 == 0 {
                self.partial.insert(cookie, (reply, covered));
                continue;
            }
            if let (Some((_, length)), 0) = (range, reply.error) {
                assert_eq!(covered, length, "every byte once");
            }
            return Ok(reply);
        }
    }

    fn simple_reply(
        &mut self,
        read: impl Fn(u64) -> Option<(u64, usize)>,
    ) -> std::io::Result<Reply> {
        assert_ne!(self.style, Style::Extended, "only chunks with extended headers");
        let mut rest = [0; 12];
        self.stream.read_exact(&mut rest)?;
        let mut reply = Reply { error: be32(&rest), cookie: be64(&rest[4..]), data: Vec::new() };
        if let (0, Some((_, length))) = (reply.error, read(reply.cookie)) {
            assert_eq!(self.style, Style::Simple, "replies to reads are chunks");
            reply.data = vec![0; length];
            self.stream.read_exact(&mut reply.data)?;
        }
        Ok(reply)
    }

    /// A request without data, and its error.
    pub(crate) fn ask(&mut self, command: u16, flags: u16, offset: u64, length: u64) -> u32 {
        self.send(command, flags, 0xa5, offset, length);
        let reply = self.reply(|_| None).unwrap();
        assert_eq!(reply.cookie, 0xa5);
        reply.error
    }

    pub(crate) fn write(&mut self, flags: u16, offset: u64, data: &[u8]) -> u32 {
        self.send_write(flags, 0x77, offset, data);
        let reply = self.reply(|_| None).unwrap();
        assert_eq!(reply.cookie, 0x77);
        reply.error
    }

    pub(crate) fn read(&mut self, offset: u64, length: usize) -> Result<Vec<u8>, u32> {
        self.send(READ, 0, 0x55, offset, length as u64);
        let reply = self.reply(|_| Some((offset, length))).unwrap();
        assert_eq!(reply.cookie, 0x55);
        if reply.error == 0 { Ok(reply.data) } else { Err(reply.error) }
    }

    /// True if the server has closed the connection in order: end of stream, not a reset.
    pub(crate) fn is_at_end(&mut self) -> bool {
        matches!(self.stream.read(&mut [0; 1]), Ok(0))
    }
}

/// Puts a chunk into its reply, whose data begins at `start`; returns the bytes of content it had.
fn take_chunk(reply: &mut Reply, kind: u16, start: u64, payload: Vec<u8>) -> usize {
    match kind {
        0 => 0,
        1 => {
            let at = to_usize(be64(&payload) - start);
            reply.data[at..at + payload.len() - 8].copy_from_slice(&payload[8..]);
            payload.len() - 8
        }
        2 => {
            let at = to_usize(be64(&payload) - start);
            let length = be32(&payload[8..]) as usize;
            reply.data[at..at + length].fill(0);
            length
        }
        5 | 6 => {
            reply.data = payload;
            0
        }
        0x8001 | 0x8002 => {
            reply.error = be32(&payload);
            assert_ne!(reply.error, 0);
            let text = usize::from(u16::from_be_bytes([payload[4], payload[5]]));
            std::str::from_utf8(&payload[6..6 + text]).unwrap();
            0
        }
        other => panic!("chunk of type {other}"),
    }
}

/// A server on a new worker, listening on a unix socket.
pub(crate) struct Rig {
    pub(crate) server: Server,
    worker: Option<Worker>,
    folder: tempfile::TempDir,
}

impl Rig {
    pub(crate) fn new(limits: ServerLimits, tls: TlsMode, context: Option<ServerTls>) -> Rig {
        Rig::on(Worker::start_alone("nbd-test").unwrap(), limits, tls, context)
    }

    /// On a worker that the test provides.
    pub(crate) fn on(
        worker: Worker,
        limits: ServerLimits,
        tls: TlsMode,
        context: Option<ServerTls>,
    ) -> Rig {
        Rig::over(worker, Server::new(Volumes::default(), limits, tls, context))
    }

    /// With a server that the test provides.
    pub(crate) fn over(worker: Worker, server: Server) -> Rig {
        let folder = tempfile::tempdir().unwrap();
        let rig = Rig { server, worker: Some(worker), folder };
        rig.listen(fd_from(UnixListener::bind(rig.path()).unwrap()));
        rig
    }

    pub(crate) fn with(volumes: impl IntoIterator<Item = Arc<Volume>>) -> Rig {
        let rig = Rig::new(ServerLimits::default(), TlsMode::Off, None);
        volumes
            .into_iter()
            .for_each(|volume| rig.server.volumes().add(volume, std::sync::Arc::default()));
        rig
    }

    pub(crate) fn listen(&self, socket: ebb_io::Fd) {
        let (server, handle) = (self.server.clone(), self.worker().handle());
        let workers = vec![handle.clone()];
        handle.spawn(move |io| async move { server.listen(io, socket, workers).await });
    }

    /// Ends as by a kill: requests in flight are not completed.
    pub(crate) fn kill(&mut self) {
        drop(self.worker.take());
    }

    pub(crate) fn worker(&self) -> &Worker {
        self.worker.as_ref().unwrap()
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join("nbd.sock")
    }

    pub(crate) fn stream(&self) -> UnixStream {
        let stream = UnixStream::connect(self.path()).unwrap();
        stream.set_read_timeout(Some(HANG)).unwrap();
        stream.set_write_timeout(Some(HANG)).unwrap();
        stream
    }

    pub(crate) fn client(&self, name: &str, style: Style) -> Client {
        let mut stream: Box<dyn Stream> = Box::new(self.stream());
        Client::greet(&mut stream).unwrap();
        Client::go(stream, name, style).unwrap()
    }

    /// Runs a future of the server on its worker; panics if that takes too long.
    pub(crate) fn run<T: Send + 'static, Fut: Future<Output = T> + 'static>(
        &self,
        call: impl FnOnce(Server, Io) -> Fut + Send + 'static,
    ) -> T {
        let (server, handle) = (self.server.clone(), self.worker().handle());
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let _ = sender.send(handle.block_on(move |io| call(server, io)));
        });
        receiver
            .recv_timeout(HANG)
            .expect("the server does not respond")
            .expect("the worker panicked; see above")
    }

    pub(crate) fn stop(&self) {
        self.run(|server, _| async move { server.stop().await });
    }
}

pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = std::time::Instant::now();
    while !condition() {
        assert!(begun.elapsed() < HANG, "{what}");
        std::thread::yield_now();
    }
}

pub(crate) fn memory(name: &str, size: u64) -> Arc<Volume> {
    let store = Store::Memory(MemoryStore::new(size));
    Volume::new(name, store, VolumeOptions::default())
}

pub(crate) fn read_only(name: &str, size: u64) -> Arc<Volume> {
    Volume::new(
        name,
        Store::Memory(MemoryStore::new(size)),
        VolumeOptions { read_only: true, ..VolumeOptions::default() },
    )
}

pub(crate) fn file(name: &str, path: &std::path::Path, size: u64, direct: Direct) -> Arc<Volume> {
    let options = OpenOptions { create: Some(size), direct, ..OpenOptions::default() };
    let store = FileStore::open(path, &options).unwrap().0;
    Volume::new(name, Store::File(store), VolumeOptions::default())
}

/// Bytes that differ by position and by seed, none of them zero.
pub(crate) fn pattern(seed: u64, length: usize) -> Vec<u8> {
    (0..length as u64)
        .map(|at| u8::try_from((at * 7 + at / 251 + seed) % 255 + 1).unwrap())
        .collect()
}
