//! An NBD client of the world: uses the real protocol over a real socket, with several requests in
//! flight, and checks each reply against the oracle. It never waits: the world's loop steps it.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::manner::{LARGEST, Manner};
use crate::oracle::{Change, Oracle, SECTOR, Writing};
use crate::random::Random;

const READ: u16 = 0;
const WRITE: u16 = 1;
const DISC: u16 = 2;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const CACHE: u16 = 5;
const WRITE_ZEROES: u16 = 6;
const FUA: u16 = 1;

/// Errors of the protocol.
mod nbd_error {
    pub(super) const EINVAL: u32 = 22;
    pub(super) const ENOSPC: u32 = 28;
    pub(super) const EOVERFLOW: u32 = 75;
    pub(super) const ESHUTDOWN: u32 = 108;
}

const OPTION_EXPORT: u32 = 7;
const OPTION_STRUCTURED: u32 = 8;
const OPTION_EXTENDED: u32 = 11;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Style {
    Simple,
    Structured,
    Extended,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Waits for the server's greeting.
    Greeting,
    /// Waits for the reply to an option.
    Option(u32),
    Transmission,
    /// Has sent NBD_CMD_DISC.
    Over,
    /// The server refused the export.
    Refused,
}

enum Kind {
    Read {
        begun: u64,
        data: Vec<u8>,
        covered: usize,
    },
    Change(Writing),
    Flush {
        begun: u64,
    },
    /// A request whose result is not checked.
    Hint,
}

impl std::fmt::Debug for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Kind::Read { begun, .. } => write!(f, "read since {begun}"),
            Kind::Change(writing) => write!(f, "{writing:?}"),
            Kind::Flush { begun } => write!(f, "flush since {begun}"),
            Kind::Hint => f.write_str("hint"),
        }
    }
}

/// A request in flight.
#[derive(Debug)]
struct Request {
    kind: Kind,
    first: usize,
    count: usize,
    error: u32,
    /// The number of resizes when it was sent, if it lies beyond the end.
    beyond: Option<u64>,
    command: u16,
    sent: Instant,
}

/// The result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StepResult {
    Idle,
    Busy,
    /// The connection has ended.
    Ended,
}

/// See the module.
pub(crate) struct Client {
    stream: UnixStream,
    style: Style,
    phase: Phase,
    export: String,
    manner: Manner,
    random: Random,
    input: Vec<u8>,
    output: Vec<u8>,
    written: usize,
    cookie: u64,
    open: HashMap<u64, Request>,
    /// The size in sectors, as the server reported it.
    size: usize,
    next_at: Instant,
    /// Does not read replies.
    pub(crate) deaf: bool,
    /// The daemon may disconnect it: it did not read replies for a while, or its daemon has ended.
    pub(crate) may_be_ended: bool,
    /// Submits no more requests.
    pub(crate) quiet: bool,
    /// Each request and reply is printed.
    told: bool,
    /// Requests that have completed, and those of them that succeeded.
    pub(crate) answered: u64,
    pub(crate) succeeded: u64,
    /// The longest time to a reply.
    pub(crate) slowest: Duration,
}

fn be16(bytes: &[u8]) -> u16 {
    u16::from_be_bytes(bytes[..2].try_into().unwrap())
}

fn be32(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(bytes[..4].try_into().unwrap())
}

fn be64(bytes: &[u8]) -> u64 {
    u64::from_be_bytes(bytes[..8].try_into().unwrap())
}

fn counted(bytes: &[u8]) -> Vec<u8> {
    [&u32::try_from(bytes.len()).unwrap().to_be_bytes()[..], bytes].concat()
}

impl Client {
    pub(crate) fn new(
        stream: UnixStream,
        export: &str,
        manner: Manner,
        mut random: Random,
        now: Instant,
    ) -> Client {
        stream.set_nonblocking(true).unwrap();
        let style = random.pick(&[Style::Simple, Style::Structured, Style::Extended]);
        Client {
            stream,
            style,
            phase: Phase::Greeting,
            export: export.to_owned(),
            manner,
            random,
            input: Vec::new(),
            output: Vec::new(),
            written: 0,
            cookie: 0,
            open: HashMap::new(),
            size: 0,
            next_at: now,
            deaf: false,
            may_be_ended: false,
            quiet: false,
            told: crate::trace::is_told(),
            answered: 0,
            succeeded: 0,
            slowest: Duration::ZERO,
        }
    }

    /// Requests in flight.
    pub(crate) fn open(&self) -> usize {
        self.open.len()
    }

    /// When the oldest request was sent.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.open.values().map(|request| request.sent).min()
    }

    /// When it needs its next step if it receives nothing before.
    pub(crate) fn wants(&self) -> Option<Instant> {
        let may = self.phase == Phase::Transmission && self.open.len() < self.manner.depth;
        (may && !self.quiet && !self.deaf).then_some(self.next_at)
    }

    /// One step: send, receive, submit.
    ///
    /// # Errors
    /// A promise that was not kept.
    pub(crate) fn step(&mut self, oracle: &mut Oracle, now: Instant) -> Result<StepResult, String> {
        let mut busy = self.send();
        if !self.deaf {
            match self.receive() {
                Ok(heard) => busy |= heard,
                Err(()) => return Ok(StepResult::Ended),
            }
            while self.take(oracle, now)? {
                busy = true;
            }
        }
        if self.phase == Phase::Refused {
            return Ok(StepResult::Ended);
        }
        while self.wants().is_some_and(|at| at <= now) {
            self.submit(oracle, now);
            busy = true;
            let pause = self.random.below(self.manner.pause_us + 1);
            if pause > 0 {
                self.next_at = now + Duration::from_micros(pause);
            }
        }
        busy |= self.send();
        Ok(if busy { StepResult::Busy } else { StepResult::Idle })
    }

    /// The connection ends. Returns the changes whose outcome is unknown: the server continues them
    /// until its side of the connection ends, too.
    pub(crate) fn leave(mut self, oracle: &mut Oracle) -> Vec<Writing> {
        let mut orphans = Vec::new();
        let mut open: Vec<_> = self.open.drain().collect();
        open.sort_unstable_by_key(|(cookie, _)| *cookie);
        for (_, request) in open {
            match request.kind {
                Kind::Change(writing) => orphans.push(writing),
                Kind::Read { begun, .. } => oracle.end_read(begun),
                _ => {}
            }
        }
        orphans
    }

    /// Disconnects; the server closes the connection when all requests have completed.
    pub(crate) fn goodbye(&mut self) {
        if self.phase == Phase::Transmission {
            self.quiet = true;
            let header = self.header(DISC, 0, 0, 0, 0);
            self.output.extend(header);
            self.phase = Phase::Over;
        }
    }

    /// The sectors of its export.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    pub(crate) fn was_refused(&self) -> bool {
        self.phase == Phase::Refused
    }

    pub(crate) fn is_serving(&self) -> bool {
        self.phase == Phase::Transmission
    }

    fn send(&mut self) -> bool {
        let mut busy = false;
        while self.written < self.output.len() {
            match self.stream.write(&self.output[self.written..]) {
                Ok(count) => {
                    self.written += count;
                    busy = true;
                }
                // The socket is full or disconnected: reading shows which.
                Err(_) => break,
            }
        }
        if self.written == self.output.len() {
            self.output.clear();
            self.written = 0;
        }
        busy
    }

    fn receive(&mut self) -> Result<bool, ()> {
        let mut chunk = [0; 64 << 10];
        let mut busy = false;
        loop {
            match self.stream.read(&mut chunk) {
                // Data received before the end is processed first.
                Ok(0) if busy => return Ok(true),
                Ok(0) => return Err(()),
                Ok(count) => {
                    self.input.extend_from_slice(&chunk[..count]);
                    busy = true;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(busy),
                Err(_) => return Err(()),
            }
        }
    }

    fn option(&mut self, number: u32, data: &[u8]) {
        self.output.extend_from_slice(b"IHAVEOPT");
        self.output.extend_from_slice(&number.to_be_bytes());
        self.output.extend(counted(data));
        self.phase = Phase::Option(number);
    }

    fn enter(&mut self) {
        let data = [counted(self.export.as_bytes()), vec![0, 0]].concat();
        self.option(OPTION_EXPORT, &data);
    }

    /// Processes one message of the server, if it is complete.
    fn take(&mut self, oracle: &mut Oracle, now: Instant) -> Result<bool, String> {
        match self.phase {
            Phase::Greeting => {
                let Some(greeting) = self.input.first_chunk::<18>() else { return Ok(false) };
                if greeting != b"NBDMAGICIHAVEOPT\0\x03" {
                    return Err(format!("greeting {greeting:?}"));
                }
                self.input.drain(..18);
                self.output.extend_from_slice(&3u32.to_be_bytes());
                match self.style {
                    Style::Simple => self.enter(),
                    Style::Structured => self.option(OPTION_STRUCTURED, b""),
                    Style::Extended => self.option(OPTION_EXTENDED, b""),
                }
                Ok(true)
            }
            Phase::Option(number) => self.take_option(number),
            Phase::Transmission | Phase::Over | Phase::Refused => self.take_reply(oracle, now),
        }
    }

    fn take_option(&mut self, number: u32) -> Result<bool, String> {
        let Some(header) = self.input.first_chunk::<20>() else { return Ok(false) };
        let (kind, length) = (be32(&header[12..]), be32(&header[16..]) as usize);
        if self.input.len() < 20 + length {
            return Ok(false);
        }
        if be32(&header[8..]) != number {
            return Err(format!("option {number} has the reply {}", be32(&header[8..])));
        }
        let data: Vec<u8> = self.input.drain(..20 + length).skip(20).collect();
        match (number, kind) {
            (OPTION_EXPORT, REPLY_INFO) if data.starts_with(&[0, 0]) => {
                self.size = usize::try_from(be64(&data[2..])).unwrap() / SECTOR;
            }
            (OPTION_EXPORT, REPLY_INFO) => {}
            (OPTION_EXPORT, REPLY_ACK) => self.phase = Phase::Transmission,
            (OPTION_EXPORT, _) => self.phase = Phase::Refused,
            (_, REPLY_ACK) => self.enter(),
            (number, kind) => return Err(format!("option {number} is refused with {kind:#x}")),
        }
        Ok(true)
    }

    fn header(&self, command: u16, flags: u16, cookie: u64, offset: u64, length: u64) -> Vec<u8> {
        let extended = self.style == Style::Extended;
        let mut bytes = Vec::with_capacity(32);
        let magic: u32 = if extended { 0x21e4_1c71 } else { 0x2560_9513 };
        bytes.extend(magic.to_be_bytes());
        let flags = if extended && command == WRITE { flags | 32 } else { flags };
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

    /// Submits one request.
    fn submit(&mut self, oracle: &mut Oracle, now: Instant) {
        let random = &mut self.random;
        // Also beyond the end, if it was shrunk after this client read its size.
        let size = self.size;
        let is_large = self.manner.large > 0 && random.below(1000) < self.manner.large;
        let longest = if is_large { LARGEST } else { self.manner.longest };
        let count = 1 + random.index(longest.min(size));
        let reach = self.manner.reach.min(size);
        let from = if self.manner.at_end { size - reach } else { 0 };
        let first = (from + random.index(reach)).min(size - count);
        // Mostly whole pages, as guests do.
        let (first, count) = if random.chance(70) && size >= 8 {
            let first = first / 8 * 8;
            (first, count.next_multiple_of(8).min((size - first) / 8 * 8).max(8).min(size - first))
        } else {
            (first, count)
        };
        if random.chance(self.manner.flushes) {
            return self.flush(oracle, now);
        }
        if random.chance(self.manner.reads) {
            if random.chance(3) {
                return self.request(CACHE, 0, (first, count), Kind::Hint, None, now);
            }
            return self.read(first, count, oracle, now);
        }
        let fua = random.chance(8);
        let flags = if fua { FUA } else { 0 };
        let (command, change) = match random.below(12) {
            0 => (TRIM, Change::Discard),
            1 => (WRITE_ZEROES, Change::Zeroes),
            _ => (WRITE, Change::Data),
        };
        let writing = oracle.begin(change, first, count, fua);
        let beyond = beyond(oracle, first + count);
        self.request(command, flags, (first, count), Kind::Change(writing), beyond, now);
        if change == Change::Data {
            let at = self.output.len();
            self.output.resize(at + count * SECTOR, 0);
            Oracle::fill(writing.number, first, &mut self.output[at..]);
        }
    }

    /// Submits this read now, whatever its behaviour.
    pub(crate) fn read(&mut self, first: usize, count: usize, oracle: &mut Oracle, now: Instant) {
        let begun = oracle.begin_read();
        let data = vec![0xee; count * SECTOR];
        let kind = Kind::Read { begun, data, covered: 0 };
        self.request(READ, 0, (first, count), kind, beyond(oracle, first + count), now);
    }

    /// Submits a flush now.
    pub(crate) fn flush(&mut self, oracle: &mut Oracle, now: Instant) {
        let begun = oracle.now();
        self.request(FLUSH, 0, (0, 0), Kind::Flush { begun }, None, now);
    }

    fn request(
        &mut self,
        command: u16,
        flags: u16,
        (first, count): (usize, usize),
        kind: Kind,
        beyond: Option<u64>,
        now: Instant,
    ) {
        self.cookie += 1;
        let (offset, length) = ((first * SECTOR) as u64, (count * SECTOR) as u64);
        let header = self.header(command, flags, self.cookie, offset, length);
        self.output.extend(header);
        if self.told {
            println!(
                "    {} submits {}: {command} {first}+{count} flags {flags} {kind:?}",
                self.export, self.cookie
            );
        }
        self.open.insert(
            self.cookie,
            Request { kind, first, count, error: 0, beyond, command, sent: now },
        );
    }

    fn take_reply(&mut self, oracle: &mut Oracle, now: Instant) -> Result<bool, String> {
        let Some(magic) = self.input.first_chunk::<4>().copied() else { return Ok(false) };
        let (header, extended) = match u32::from_be_bytes(magic) {
            0x6744_6698 => return self.take_simple(oracle, now),
            0x668e_33ef if self.style == Style::Structured => (20, false),
            0x6e8a_278c if self.style == Style::Extended => (32, true),
            other => return Err(format!("a reply begins with {other:#x}")),
        };
        if self.input.len() < header {
            return Ok(false);
        }
        let length = if extended {
            usize::try_from(be64(&self.input[24..])).unwrap()
        } else {
            be32(&self.input[16..]) as usize
        };
        if self.input.len() < header + length {
            return Ok(false);
        }
        let (flags, kind, cookie) =
            (be16(&self.input[4..]), be16(&self.input[6..]), be64(&self.input[8..]));
        let payload: Vec<u8> = self.input.drain(..header + length).skip(header).collect();
        let Some(request) = self.open.get_mut(&cookie) else {
            return Err(format!("a chunk for a request that is not in flight: cookie {cookie}"));
        };
        chunk(request, kind, &payload)?;
        if flags & 1 != 0 {
            self.finish(cookie, oracle, now)?;
        }
        Ok(true)
    }

    fn take_simple(&mut self, oracle: &mut Oracle, now: Instant) -> Result<bool, String> {
        if self.input.len() < 16 {
            return Ok(false);
        }
        let (error, cookie) = (be32(&self.input[4..]), be64(&self.input[8..]));
        let Some(request) = self.open.get_mut(&cookie) else {
            return Err(format!("a reply to a request that is not in flight: cookie {cookie}"));
        };
        let mut length = 16;
        if let (0, Kind::Read { data, covered, .. }) = (error, &mut request.kind) {
            length += data.len();
            if self.input.len() < length {
                return Ok(false);
            }
            data.copy_from_slice(&self.input[16..length]);
            *covered = data.len();
        }
        request.error = error;
        self.input.drain(..length);
        self.finish(cookie, oracle, now)?;
        Ok(true)
    }

    fn finish(&mut self, cookie: u64, oracle: &mut Oracle, now: Instant) -> Result<(), String> {
        let Some(request) = self.open.remove(&cookie) else { return Ok(()) };
        let done = request.error == 0;
        if self.told {
            let time = now - request.sent;
            println!(
                "    {} received the reply to {cookie}: {} after {time:?}",
                self.export, request.error
            );
        }
        self.answered += 1;
        self.succeeded += u64::from(done);
        self.slowest = self.slowest.max(now - request.sent);
        if let Kind::Read { begun, .. } = &request.kind {
            oracle.end_read(*begun);
        }
        if request.beyond.is_some_and(|resizes| oracle.end_and_resizes().1 == resizes) {
            check_beyond(&request)?;
        }
        match request.kind {
            Kind::Read { begun, data, covered } if done => {
                if covered != data.len() {
                    return Err(format!("a read of {} bytes returned {covered}", data.len()));
                }
                oracle.check(begun, request.first, &data)?;
            }
            Kind::Change(writing) => oracle.end(writing, done),
            Kind::Flush { begun } if done => oracle.flushed(begun),
            _ => {}
        }
        Ok(())
    }

    /// The requests in flight, for messages.
    pub(crate) fn describe(&self) -> String {
        let mut open: Vec<_> = self.open.iter().collect();
        open.sort_unstable_by_key(|(cookie, _)| **cookie);
        let open: Vec<String> = open
            .iter()
            .map(|(cookie, request)| {
                let kind = match &request.kind {
                    Kind::Read { .. } => "read",
                    Kind::Change(_) => "change",
                    Kind::Flush { .. } => "flush",
                    Kind::Hint => "hint",
                };
                format!("{cookie}: {kind} {}+{}", request.first, request.count)
            })
            .collect();
        format!("{} {:?} {:?}: {}", self.export, self.style, self.phase, open.join(", "))
    }
}

/// The number of resizes, if a request up to `end` lies beyond the end of the volume.
fn beyond(oracle: &Oracle, end: usize) -> Option<u64> {
    let (size, resizes) = oracle.end_and_resizes();
    (end > size).then_some(resizes)
}

/// Checks the reply to a request beyond the end. If the volume is being closed or the request is too
/// long, other errors are valid, too.
fn check_beyond(request: &Request) -> Result<(), String> {
    let expected = match request.command {
        WRITE | WRITE_ZEROES => nbd_error::ENOSPC,
        _ => nbd_error::EINVAL,
    };
    let others = [nbd_error::EINVAL, nbd_error::EOVERFLOW, nbd_error::ESHUTDOWN];
    let long = request.count > 7;
    match request.error {
        error if error == expected || error == nbd_error::ESHUTDOWN => Ok(()),
        error if long && others.contains(&error) => Ok(()),
        error => Err(format!(
            "command {} at {}+{} is beyond the end, but its reply is {error}",
            request.command, request.first, request.count
        )),
    }
}

/// Adds a chunk to the reply that it belongs to.
fn chunk(request: &mut Request, kind: u16, payload: &[u8]) -> Result<(), String> {
    let start = (request.first * SECTOR) as u64;
    match (kind, &mut request.kind) {
        (0, _) => Ok(()),
        (1, Kind::Read { data, covered, .. }) => {
            let at = usize::try_from(be64(payload).wrapping_sub(start)).unwrap_or(usize::MAX);
            let end = at.saturating_add(payload.len() - 8);
            let Some(place) = data.get_mut(at..end) else {
                return Err("data outside the read".into());
            };
            place.copy_from_slice(&payload[8..]);
            *covered += payload.len() - 8;
            Ok(())
        }
        (2, Kind::Read { data, covered, .. }) => {
            let at = usize::try_from(be64(payload).wrapping_sub(start)).unwrap_or(usize::MAX);
            let length = be32(&payload[8..]) as usize;
            let Some(place) = data.get_mut(at..at.saturating_add(length)) else {
                return Err("a hole outside the read".into());
            };
            place.fill(0);
            *covered += length;
            Ok(())
        }
        (0x8001 | 0x8002, _) => {
            request.error = be32(payload).max(1);
            Ok(())
        }
        (other, _) => Err(format!("a chunk of type {other:#x} in a reply to {:?}", request.kind)),
    }
}
