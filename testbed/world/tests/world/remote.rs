//! An NBD server of the world: it runs on another host and has the store of one volume. It uses the
//! real protocol over a real unix socket and is stepped by the world's loop. It is killed, loses
//! data that was not flushed, stops replying, shuts down, restarts, and replies late and in any
//! order.
//!
//! It keeps what the protocol requires of servers: a flush makes stable what it acknowledged
//! before, and after NBD_CMD_DISC it completes the requests of the connection before it closes it.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ebb_nbd_proto::{
    Command, CommandFlags, Errno, HandshakeFlags, Reader, TransmissionFlags, chunk, info, magic,
    option, option_reply,
};

use crate::oracle::SECTOR;
use crate::random::Random;

/// A request that was read from a connection.
struct Job {
    connection: u64,
    cookie: u64,
    command: Command,
    flags: CommandFlags,
    offset: usize,
    length: usize,
    data: Vec<u8>,
    /// When it is carried out; after that, when its reply is sent.
    due: Instant,
    /// Its error and data, once it was carried out.
    done: Option<(u32, Vec<u8>)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Flags,
    Options,
    Transmission,
}

struct Connection {
    number: u64,
    stream: UnixStream,
    phase: Phase,
    structured: bool,
    input: Vec<u8>,
    output: Vec<u8>,
    ended: bool,
    /// The client sent NBD_CMD_DISC: its earlier requests are completed.
    polite: bool,
}

/// The state of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Health {
    Well,
    /// No process listens.
    Dead,
    /// Accepts connections, and does not reply.
    Silent,
    /// Shutting down: replies `NBD_ESHUTDOWN`, and exits when its clients have disconnected.
    Leaving,
}

/// How fast and how well it replies.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pace {
    /// The longest time that a request takes to be carried out, and then its reply, microseconds.
    pub(crate) work_us: u64,
    pub(crate) answer_us: u64,
    /// The number of reads that fail, of 1,000.
    pub(crate) bad_reads: u64,
}

struct Server {
    path: PathBuf,
    listener: Option<UnixListener>,
    health: Health,
    pace: Pace,
    flags: TransmissionFlags,
    structured: bool,
    blocks: (u32, u32),
    connections: Vec<Connection>,
    jobs: Vec<Job>,
    number: u64,
    /// What reads return; what is stable; the sectors in which the two may differ.
    seen: Vec<u8>,
    stable: Vec<u8>,
    dirty: BTreeSet<usize>,
    random: Random,
    /// A violation of the protocol by a client.
    wrong: Option<String>,
}

/// See the module.
#[derive(Clone)]
pub(crate) struct Remote(Arc<Mutex<Server>>);

impl Remote {
    /// A server with this many zero bytes, which offers features drawn at random.
    pub(crate) fn new(bytes: usize, random: &mut Random) -> Remote {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("ebb-world-{}-{number}", std::process::id());
        let always = TransmissionFlags::HAS_FLAGS
            .with(TransmissionFlags::SEND_FLUSH)
            .with(TransmissionFlags::SEND_TRIM);
        let flags = always
            .with_if(random.chance(70), TransmissionFlags::SEND_FUA)
            .with_if(random.chance(70), TransmissionFlags::SEND_WRITE_ZEROES)
            .with_if(random.chance(50), TransmissionFlags::SEND_CACHE)
            .with_if(random.chance(70), TransmissionFlags::CAN_MULTI_CONN);
        let least = if bytes.is_multiple_of(4096) { random.pick(&[1, 512, 4096]) } else { 512 };
        let blocks = (least, random.pick(&[64 << 10, 32 << 20]));
        let mut server = Server {
            path: std::env::temp_dir().join(name),
            listener: None,
            health: Health::Dead,
            pace: Pace { work_us: random.pick(&[0, 20, 500]), ..Pace::default() },
            flags,
            structured: random.chance(70),
            blocks,
            connections: Vec::new(),
            jobs: Vec::new(),
            number: 0,
            seen: vec![0; bytes],
            stable: vec![0; bytes],
            dirty: BTreeSet::new(),
            random: random.fork(),
            wrong: None,
        };
        server.listen();
        Remote(Arc::new(Mutex::new(server)))
    }

    fn server(&self) -> MutexGuard<'_, Server> {
        self.0.lock().unwrap()
    }

    /// Where it listens.
    pub(crate) fn path(&self) -> PathBuf {
        self.server().path.clone()
    }

    pub(crate) fn health(&self) -> Health {
        self.server().health
    }

    /// Kills its process; requests in flight are carried out or not. With `host` its host crashes,
    /// and any data that was not flushed may be lost, too.
    pub(crate) fn die(&self, host: bool) {
        self.server().die(host);
    }

    /// Makes it healthy: it is restarted if necessary, and replies.
    pub(crate) fn come_back(&self) {
        let mut server = self.server();
        if server.health == Health::Dead {
            server.listen();
        }
        server.health = Health::Well;
    }

    /// Makes it stop replying, or shut down.
    pub(crate) fn change_health(&self, health: Health) {
        self.server().health = health;
    }

    /// Whether a few requests in sequence may take a second.
    pub(crate) fn is_slow(&self) -> bool {
        let Pace { work_us, answer_us, .. } = self.server().pace;
        work_us + answer_us >= 10_000
    }

    pub(crate) fn set_pace(&self, pace: Pace) {
        self.server().pace = pace;
    }

    /// One step. False if there was nothing to do.
    pub(crate) fn step(&self, now: Instant) -> bool {
        self.server().step(now)
    }

    /// When it needs its next step if nothing happens before.
    pub(crate) fn wants(&self) -> Option<Instant> {
        let server = self.server();
        let acts = matches!(server.health, Health::Well | Health::Leaving);
        server.jobs.iter().map(|job| job.due).min().filter(|_| acts)
    }

    /// A violation of the protocol by a client.
    pub(crate) fn wrong(&self) -> Option<String> {
        self.server().wrong.take()
    }
}

impl Server {
    fn listen(&mut self) {
        let _ = std::fs::remove_file(&self.path);
        let listener = UnixListener::bind(&self.path).unwrap();
        listener.set_nonblocking(true).unwrap();
        self.listener = Some(listener);
        self.health = Health::Well;
    }

    fn die(&mut self, host: bool) {
        for connection in std::mem::take(&mut self.connections) {
            self.let_go(&connection);
        }
        self.listener = None;
        if self.random.chance(50) {
            let _ = std::fs::remove_file(&self.path);
        }
        self.health = Health::Dead;
        if host {
            for sector in std::mem::take(&mut self.dirty) {
                let range = sector * SECTOR..(sector + 1) * SECTOR;
                if self.random.chance(50) {
                    self.stable[range.clone()].copy_from_slice(&self.seen[range]);
                } else {
                    self.seen[range.clone()].copy_from_slice(&self.stable[range]);
                }
            }
        }
    }

    /// Ends the requests of a closed connection: each is carried out now, or never.
    fn let_go(&mut self, connection: &Connection) {
        let (own, rest): (Vec<_>, Vec<_>) =
            self.jobs.drain(..).partition(|job| job.connection == connection.number);
        self.jobs = rest;
        for job in own.into_iter().filter(|job| job.done.is_none()) {
            if connection.polite || self.random.chance(50) {
                self.carry_out(&job);
            }
        }
    }

    fn step(&mut self, now: Instant) -> bool {
        let mut busy = self.accept();
        if matches!(self.health, Health::Dead | Health::Silent) {
            return busy;
        }
        for at in 0..self.connections.len() {
            busy |= self.receive(at, now);
        }
        while let Some(at) = self.connections.iter().position(|connection| connection.ended) {
            let connection = self.connections.remove(at);
            self.let_go(&connection);
            busy = true;
        }
        busy |= self.work(now);
        for connection in &mut self.connections {
            busy |= connection.send();
        }
        if self.health == Health::Leaving && self.connections.is_empty() {
            self.die(false);
        }
        busy
    }

    fn accept(&mut self) -> bool {
        let mut busy = false;
        while let Some(Ok((stream, _))) = self.listener.as_ref().map(UnixListener::accept) {
            stream.set_nonblocking(true).unwrap();
            let flags = HandshakeFlags::FIXED_NEWSTYLE.with(HandshakeFlags::NO_ZEROES);
            let mut output = magic::INIT.to_be_bytes().to_vec();
            output.extend(magic::OPTION.to_be_bytes());
            output.extend(flags.0.to_be_bytes());
            self.number += 1;
            self.connections.push(Connection {
                number: self.number,
                stream,
                phase: Phase::Flags,
                structured: false,
                input: Vec::new(),
                output,
                ended: false,
                polite: false,
            });
            busy = true;
        }
        busy
    }

    /// Processes what a connection has received.
    fn receive(&mut self, at: usize, now: Instant) -> bool {
        let busy = self.connections[at].receive();
        loop {
            let connection = &mut self.connections[at];
            let took = match connection.phase {
                Phase::Flags if connection.input.len() >= 4 => {
                    connection.input.drain(..4);
                    connection.phase = Phase::Options;
                    true
                }
                Phase::Flags => false,
                Phase::Options => self.take_option(at),
                Phase::Transmission => self.take_request(at, now),
            };
            if !took {
                return busy;
            }
        }
    }

    fn take_option(&mut self, at: usize) -> bool {
        let (size, flags, blocks) = (self.seen.len() as u64, self.flags, self.blocks);
        let structured = self.structured;
        let connection = &mut self.connections[at];
        let mut reader = Reader::new(&connection.input);
        let (_, number, length) = (reader.u64(), reader.u32(), reader.u32());
        let (Some(number), Some(length)) = (number, length) else { return false };
        if connection.input.len() < 16 + length as usize {
            return false;
        }
        connection.input.drain(..16 + length as usize);
        match number {
            option::STRUCTURED_REPLY if structured => {
                connection.structured = true;
                connection.reply(number, option_reply::ACK, &[]);
            }
            option::GO => {
                let mut export = info::EXPORT.to_be_bytes().to_vec();
                export.extend(size.to_be_bytes());
                export.extend(flags.0.to_be_bytes());
                connection.reply(number, option_reply::INFO, &export);
                let mut sizes = info::BLOCK_SIZE.to_be_bytes().to_vec();
                for size in [blocks.0, blocks.0.max(4096), blocks.1] {
                    sizes.extend(size.to_be_bytes());
                }
                connection.reply(number, option_reply::INFO, &sizes);
                connection.reply(number, option_reply::ACK, &[]);
                connection.phase = Phase::Transmission;
            }
            _ => connection.reply(number, option_reply::ERR_UNSUP, &[]),
        }
        true
    }

    fn take_request(&mut self, at: usize, now: Instant) -> bool {
        let connection = &mut self.connections[at];
        let mut reader = Reader::new(&connection.input);
        let (opening, flags, command) = (reader.u32(), reader.u16(), reader.u16());
        let (cookie, offset, length) = (reader.u64(), reader.u64(), reader.u32());
        let (Some(flags), Some(command), Some(cookie), Some(offset), Some(length)) =
            (flags, command, cookie, offset, length)
        else {
            return false;
        };
        let command = Command::from_wire(command);
        let length = length as usize;
        let with_data = if command == Command::Write { length } else { 0 };
        if connection.input.len() < 28 + with_data {
            return false;
        }
        let data: Vec<u8> = connection.input.drain(..28 + with_data).skip(28).collect();
        if command == Command::Disconnect {
            (connection.ended, connection.polite) = (true, true);
            return false;
        }
        let number = connection.number;
        let twice = self.jobs.iter().any(|job| (job.connection, job.cookie) == (number, cookie));
        let least = self.blocks.0 as usize;
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        let fits = offset.saturating_add(length) <= self.seen.len()
            && [offset, length].iter().all(|n| n.is_multiple_of(least.max(SECTOR)))
            && (with_data == 0 || length <= self.blocks.1 as usize);
        if opening != Some(magic::REQUEST) || twice || !fits {
            let what = format!("{opening:x?} {command:?} {offset}+{length}, cookie twice: {twice}");
            self.wrong = Some(format!("the server received an invalid request: {what}"));
            return false;
        }
        let due = now + Duration::from_micros(self.random.below(self.pace.work_us + 1));
        let flags = CommandFlags(flags);
        let done = None;
        let job =
            Job { connection: number, cookie, command, flags, offset, length, data, due, done };
        self.jobs.push(job);
        true
    }

    /// Carries out what is due, and sends replies that are due.
    fn work(&mut self, now: Instant) -> bool {
        let mut busy = false;
        while let Some(at) = self.jobs.iter().position(|job| job.due <= now) {
            busy = true;
            let mut job = self.jobs.swap_remove(at);
            if let Some((error, data)) = job.done.take() {
                self.answer(&job, error, &data);
                continue;
            }
            let late = self.random.below(self.pace.answer_us + 1);
            job.due = now + Duration::from_micros(late);
            job.done = Some(if self.health == Health::Leaving {
                (Errno::Shutdown.to_wire(), Vec::new())
            } else {
                self.carry_out(&job)
            });
            self.jobs.push(job);
        }
        busy
    }

    fn carry_out(&mut self, job: &Job) -> (u32, Vec<u8>) {
        let range = job.offset..job.offset + job.length;
        match job.command {
            Command::Read if self.random.below(1000) < self.pace.bad_reads => {
                return (Errno::Io.to_wire(), Vec::new());
            }
            Command::Read => return (0, self.seen[range].to_vec()),
            Command::Write => self.seen[range.clone()].copy_from_slice(&job.data),
            Command::WriteZeroes => self.seen[range.clone()].fill(0),
            // The content of a trimmed range is undefined.
            Command::Trim if self.random.chance(50) => self.seen[range.clone()].fill(0),
            Command::Flush => {
                for sector in std::mem::take(&mut self.dirty) {
                    let range = sector * SECTOR..(sector + 1) * SECTOR;
                    self.stable[range.clone()].copy_from_slice(&self.seen[range]);
                }
                return (0, Vec::new());
            }
            _ => return (0, Vec::new()),
        }
        let fua = job.flags.contains(CommandFlags::FUA);
        if fua {
            self.stable[range.clone()].copy_from_slice(&self.seen[range.clone()]);
        }
        for sector in range.start / SECTOR..range.end / SECTOR {
            match fua {
                true => self.dirty.remove(&sector),
                false => self.dirty.insert(sector),
            };
        }
        (0, Vec::new())
    }

    fn answer(&mut self, job: &Job, error: u32, data: &[u8]) {
        let mut all = self.connections.iter_mut();
        let Some(connection) = all.find(|connection| connection.number == job.connection) else {
            return;
        };
        let output = &mut connection.output;
        if !connection.structured {
            output.extend(magic::SIMPLE_REPLY.to_be_bytes());
            output.extend(error.to_be_bytes());
            output.extend(job.cookie.to_be_bytes());
            output.extend(data);
            return;
        }
        let mut chunk = |last: bool, kind: u16, parts: [&[u8]; 2]| {
            output.extend(magic::STRUCTURED_REPLY.to_be_bytes());
            output.extend((if last { chunk::FLAG_DONE } else { 0 }).to_be_bytes());
            output.extend(kind.to_be_bytes());
            output.extend(job.cookie.to_be_bytes());
            let length = parts[0].len() + parts[1].len();
            output.extend(u32::try_from(length).unwrap().to_be_bytes());
            parts.iter().for_each(|part| output.extend(*part));
        };
        if error != 0 {
            return chunk(true, chunk::ERROR, [&error.to_be_bytes(), &[0, 0]]);
        }
        if job.command != Command::Read {
            return chunk(true, chunk::NONE, [&[], &[]]);
        }
        // Sometimes in two pieces, the second one first.
        let half = if self.random.chance(30) { data.len() / 2 } else { 0 };
        for (from, part) in [(half, &data[half..]), (0, &data[..half])] {
            if !part.is_empty() {
                let offset = (job.offset + from) as u64;
                let last = from == 0;
                chunk(last, chunk::OFFSET_DATA, [&offset.to_be_bytes(), part]);
            }
        }
    }
}

impl Connection {
    fn receive(&mut self) -> bool {
        let mut chunk = [0; 64 << 10];
        let mut busy = false;
        loop {
            match self.stream.read(&mut chunk) {
                Ok(0) => break self.ended = true,
                Ok(count) => {
                    self.input.extend_from_slice(&chunk[..count]);
                    busy = true;
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(_) => break self.ended = true,
            }
        }
        busy
    }

    fn send(&mut self) -> bool {
        let mut sent = 0;
        while let Ok(count @ 1..) = self.stream.write(&self.output[sent..]) {
            sent += count;
        }
        self.output.drain(..sent);
        sent > 0
    }

    fn reply(&mut self, number: u32, kind: u32, data: &[u8]) {
        self.output.extend(magic::OPTION_REPLY.to_be_bytes());
        self.output.extend(number.to_be_bytes());
        self.output.extend(kind.to_be_bytes());
        self.output.extend(u32::try_from(data.len()).unwrap().to_be_bytes());
        self.output.extend(data);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}
