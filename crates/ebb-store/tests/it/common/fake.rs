//! An NBD server controlled by a test: it counts requests, and completes, refuses or ignores them.
#![allow(dead_code, reason = "each crate uses a part")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ebb_nbd_proto::{chunk, context, info, magic, option, option_reply};

pub(crate) const READ: u16 = 0;
pub(crate) const WRITE: u16 = 1;
pub(crate) const FLUSH: u16 = 3;
pub(crate) const BLOCK_STATUS: u16 = 7;
pub(crate) const REQ_ONE: u16 = 1 << 3;
const EINVAL: u32 = 22;
pub(crate) const ESHUTDOWN: u32 = 108;

/// `HAS_FLAGS`, `SEND_FLUSH`, `SEND_FUA`, `SEND_TRIM`.
pub(crate) const ONE_CONNECTION: u16 = 1 | 4 | 8 | 32;
/// With `CAN_MULTI_CONN`.
pub(crate) const MANY_CONNECTIONS: u16 = ONE_CONNECTION | 256;

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FakeRequest {
    /// The connection, numbered in order of arrival.
    pub(crate) connection: usize,
    pub(crate) command: u16,
    pub(crate) flags: u16,
    pub(crate) offset: u64,
    pub(crate) length: u32,
    /// A write of zeroes only.
    pub(crate) zeroes: bool,
}

/// How the server handles a request.
#[derive(Clone, Debug)]
pub(crate) enum Act {
    /// Success; a read returns bytes of this value.
    Good(u8),
    /// These extents, as length and state.
    Status(Vec<(u32, u32)>),
    Error(u32),
    /// No reply.
    Silence,
    /// Success, but not before [`Act::Release`].
    Defer,
    /// Success, and so for all deferred requests of the connection.
    Release,
    /// Chunks of a reply, ten a second, of which none is the last, until the connection or the server ends.
    Unfinished,
    /// Closes the connection.
    HangUp,
}

struct State {
    /// New connections learn this size, and are refused requests beyond it.
    size: AtomicU64,
    flags: u16,
    act: Box<dyn Fn(&FakeRequest) -> Act + Send + Sync>,
    requests: Mutex<Vec<FakeRequest>>,
    /// Accepted connections receive no greeting.
    mute: AtomicBool,
    accepted: AtomicUsize,
    open: AtomicUsize,
    over: AtomicBool,
    streams: Mutex<Vec<UnixStream>>,
}

pub(crate) struct Fake {
    state: Arc<State>,
    socket: PathBuf,
    _folder: tempfile::TempDir,
}

impl Fake {
    pub(crate) fn start(
        size: u64,
        flags: u16,
        act: impl Fn(&FakeRequest) -> Act + Send + Sync + 'static,
    ) -> Fake {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        let state = Arc::new(State {
            size: AtomicU64::new(size),
            flags,
            act: Box::new(act),
            requests: Mutex::default(),
            mute: AtomicBool::new(false),
            accepted: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
            over: AtomicBool::new(false),
            streams: Mutex::default(),
        });
        let own = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if own.over.load(Ordering::SeqCst) {
                    return;
                }
                let (state, stream) = (own.clone(), stream.unwrap());
                let closing = stream.try_clone().unwrap();
                state.streams.lock().unwrap().push(stream.try_clone().unwrap());
                let number = state.accepted.fetch_add(1, Ordering::SeqCst);
                state.open.fetch_add(1, Ordering::SeqCst);
                std::thread::spawn(move || {
                    // An error of the client closes the connection.
                    let _ = serve(&state, stream, number);
                    // Other handles of it are open.
                    let _ = closing.shutdown(std::net::Shutdown::Both);
                    state.open.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        Fake { state, socket, _folder: folder }
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// The requests so far.
    pub(crate) fn requests(&self) -> Vec<FakeRequest> {
        self.state.requests.lock().unwrap().clone()
    }

    pub(crate) fn count(&self, command: u16) -> usize {
        self.requests().iter().filter(|request| request.command == command).count()
    }

    /// From now on new connections receive no greeting.
    pub(crate) fn mute(&self) {
        self.state.mute.store(true, Ordering::SeqCst);
    }

    /// From now on new connections learn this size.
    pub(crate) fn set_size(&self, size: u64) {
        self.state.size.store(size, Ordering::SeqCst);
    }

    /// Replies that never end do so now, and no connection is accepted any more.
    pub(crate) fn close(&self) {
        self.state.over.store(true, Ordering::SeqCst);
    }

    pub(crate) fn accepted(&self) -> usize {
        self.state.accepted.load(Ordering::SeqCst)
    }

    /// Closes all connections.
    pub(crate) fn hang_up(&self) {
        for stream in self.state.streams.lock().unwrap().drain(..) {
            // The client may have closed it.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Connections that are open.
    pub(crate) fn open(&self) -> usize {
        self.state.open.load(Ordering::SeqCst)
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.state.over.store(true, Ordering::SeqCst);
        let _ = UnixStream::connect(&self.socket);
    }
}

/// Waits for a condition; only a hang exceeds the time limit.
pub(crate) fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(90);
    while !done() {
        assert!(Instant::now() < deadline, "timed out: {what}");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

fn take<const N: usize>(stream: &mut UnixStream) -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn serve(state: &State, mut stream: UnixStream, number: usize) -> std::io::Result<()> {
    if state.mute.load(Ordering::SeqCst) {
        // Ends when the client disconnects.
        let _: [u8; 1] = take(&mut stream)?;
        return Ok(());
    }
    let size = shake_hands(state, &mut stream)?;
    let mut deferred: Vec<[u8; 8]> = Vec::new();
    loop {
        let header: [u8; 28] = take(&mut stream)?;
        let mut request = FakeRequest {
            zeroes: false,
            connection: number,
            flags: u16::from_be_bytes([header[4], header[5]]),
            command: u16::from_be_bytes([header[6], header[7]]),
            offset: u64::from_be_bytes(header[16..24].try_into().unwrap()),
            length: u32::from_be_bytes(header[24..28].try_into().unwrap()),
        };
        if request.command == 2 {
            return Ok(());
        }
        if request.command == WRITE {
            let mut data = vec![0; usize::try_from(request.length).unwrap()];
            stream.read_exact(&mut data)?;
            request.zeroes = data.iter().all(|byte| *byte == 0);
        }
        state.requests.lock().unwrap().push(request);
        let cookie = &header[8..16];
        let beyond = request.offset.saturating_add(u64::from(request.length)) > size;
        match if beyond { Act::Error(EINVAL) } else { (state.act)(&request) } {
            Act::Good(value) if request.command == READ => {
                let mut payload = request.offset.to_be_bytes().to_vec();
                payload.resize(8 + usize::try_from(request.length).unwrap(), value);
                stream.write_all(&reply(cookie, chunk::OFFSET_DATA, &payload))?;
            }
            Act::Good(_) => stream.write_all(&reply(cookie, chunk::NONE, &[]))?,
            Act::Status(list) => {
                let mut payload = 1u32.to_be_bytes().to_vec();
                for (length, flags) in list {
                    payload.extend(length.to_be_bytes());
                    payload.extend(flags.to_be_bytes());
                }
                stream.write_all(&reply(cookie, chunk::BLOCK_STATUS, &payload))?;
            }
            Act::Error(error) => {
                let mut payload = error.to_be_bytes().to_vec();
                payload.extend([0, 0]);
                stream.write_all(&reply(cookie, chunk::ERROR, &payload))?;
            }
            Act::Silence => {}
            Act::Defer => deferred.push(header[8..16].try_into().unwrap()),
            Act::Release => {
                for cookie in deferred.drain(..) {
                    stream.write_all(&reply(&cookie, chunk::NONE, &[]))?;
                }
                stream.write_all(&reply(cookie, chunk::NONE, &[]))?;
            }
            Act::Unfinished => {
                while !state.over.load(Ordering::SeqCst) {
                    let mut bytes = reply(cookie, chunk::ERROR, &[0, 0, 0, 5, 0, 0]);
                    bytes[4..6].fill(0);
                    stream.write_all(&bytes)?;
                    std::thread::park_timeout(Duration::from_millis(100));
                }
            }
            Act::HangUp => return Ok(()),
        }
    }
}

fn reply(cookie: &[u8], kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut bytes = magic::STRUCTURED_REPLY.to_be_bytes().to_vec();
    bytes.extend(chunk::FLAG_DONE.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(cookie);
    bytes.extend(u32::try_from(payload.len()).unwrap().to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// Returns the size of the export for this connection.
fn shake_hands(state: &State, stream: &mut UnixStream) -> std::io::Result<u64> {
    stream.write_all(&magic::INIT.to_be_bytes())?;
    stream.write_all(&magic::OPTION.to_be_bytes())?;
    stream.write_all(&3u16.to_be_bytes())?;
    let _flags: [u8; 4] = take(stream)?;
    loop {
        let header: [u8; 16] = take(stream)?;
        let number = u32::from_be_bytes(header[8..12].try_into().unwrap());
        let length = u32::from_be_bytes(header[12..16].try_into().unwrap());
        let mut data = vec![0; usize::try_from(length).unwrap()];
        stream.read_exact(&mut data)?;
        let mut answer = |kind: u32, payload: &[u8]| {
            let mut bytes = magic::OPTION_REPLY.to_be_bytes().to_vec();
            bytes.extend(number.to_be_bytes());
            bytes.extend(kind.to_be_bytes());
            bytes.extend(u32::try_from(payload.len()).unwrap().to_be_bytes());
            bytes.extend(payload);
            stream.write_all(&bytes)
        };
        match number {
            option::STRUCTURED_REPLY => answer(option_reply::ACK, &[])?,
            option::SET_META_CONTEXT => {
                let mut payload = 1u32.to_be_bytes().to_vec();
                payload.extend(context::ALLOCATION.as_bytes());
                answer(option_reply::META_CONTEXT, &payload)?;
                answer(option_reply::ACK, &[])?;
            }
            option::GO => {
                let mut payload = info::EXPORT.to_be_bytes().to_vec();
                let size = state.size.load(Ordering::SeqCst);
                payload.extend(size.to_be_bytes());
                payload.extend(state.flags.to_be_bytes());
                answer(option_reply::INFO, &payload)?;
                answer(option_reply::ACK, &[])?;
                return Ok(size);
            }
            _ => answer(option_reply::ERR_UNSUP, &[])?,
        }
    }
}
