//! The cost of elastic memory and its response time, on a running daemon of the release build:
//!
//! - The overhead test: sequential 4 KiB writes to a disk in memory, each acknowledged before the
//!   next is sent (and 32 at a time, as a guest's page cache sends them), flushed at the end, with
//!   `max_buffer_pages` 0 against 1024. Five runs each. A run is cut into segments of about 5 ms
//!   that alternate between two equal volumes on one worker (A B B A), one with each setting,
//!   swapped from run to run; its rate is the median of its segments', so that a segment during
//!   which another process used the CPU does not count. So both of a pair of runs have seen the
//!   same machine, and the pairs are compared by Student's t.
//! - The memory of an idle connection.
//! - The time from a sign of pressure until the page pools of idle queues are empty.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::figure::{Bar, Figure, median};
use super::{Options, student};
use crate::harness::binary::{self, Build};
use crate::harness::nbd::{Client, Request, read_reply, wire};
use crate::harness::process::{own, until};
use crate::harness::server::{Server, Setup};
use crate::{Error, Result, check};

/// Bytes of a request in the overhead test, and of the disk.
const BLOCK: usize = 4096;
const BLOCK_BYTES: u32 = 4096;
const DISK_BLOCKS: usize = 16384;
const DISK_BYTES: u64 = 64 << 20;
/// The volumes of the overhead test, and how long it writes to one before it switches to the other.
const VOLUMES: [&str; 2] = ["a", "b"];
const SEGMENTS_A_SECOND: usize = 200;
/// How many connections are idle.
const CONNECTIONS: u64 = 1000;
/// Volumes, each with a queue of its own, in the test of response times, and the requests and bytes
/// that fill each pool.
const QUEUES: usize = 32;
const DEPTH: u32 = 16;
const REQUEST_BYTES: u32 = 64 << 10;
/// Longest wait for something that takes milliseconds as a rule.
const PATIENCE: Duration = Duration::from_secs(30);

/// Figures of the overhead test at a depth.
fn overhead_names(depth: usize) -> [String; 3] {
    ["MBps", "t_to_critical", "ci95_pct"].map(|what| format!("pool_0_vs_1024_qd{depth}_{what}"))
}

const CONNECTION_FIGURES: [&str; 2] =
    ["nbd_rss_per_idle_connection_KiB", "nbd_rss_per_used_connection_KiB"];
const ANSWER_FIGURES: [&str; 2] = ["l1_to_idle_pools_ms", "l1_by_command_ms"];

/// Runs what the options select: `rounds` is the number of runs, `seconds` the time of writing of
/// each. Returns how many measurements failed to run; each was logged.
///
/// # Errors
/// `print` fails, or the daemon is missing.
pub fn run(options: &Options, mut print: impl FnMut(&Figure) -> io::Result<()>) -> Result<usize> {
    let daemon = binary::ebbd(Build::Release)?;
    let mut failed = 0;
    let mut report = |name: &str, result: Result<Vec<Figure>>| -> Result {
        match result {
            Ok(figures) => figures
                .iter()
                .filter(|figure| options.wants(&figure.name))
                .try_for_each(&mut print)
                .map_err(Error::io("write a figure")),
            Err(error) => {
                failed += 1;
                super::log(format_args!("{name} FAILED: {error}"));
                Ok(())
            }
        }
    };
    for depth in [1, 32] {
        if overhead_names(depth).iter().any(|name| options.wants(name)) {
            report("overhead", overhead(&daemon, options, depth))?;
        }
    }
    if CONNECTION_FIGURES.iter().any(|name| options.wants(name)) {
        report("idle connections", connections())?;
    }
    if ANSWER_FIGURES.iter().any(|name| options.wants(name)) {
        report("answers", answers(&daemon, options.rounds))?;
    }
    Ok(failed)
}

/// A daemon with one worker: both settings must see the same.
fn daemon(text: &str, rest: &[&str]) -> Result<Server> {
    let setup = Setup::new()?.build(Build::Release).log_level("warn");
    let file = setup.dir().join("ebbd.toml");
    std::fs::write(&file, text).map_err(Error::io("write a configuration"))?;
    let control = setup.dir().join("control");
    let setup = setup.arg("--config").arg(file).arg("--control").arg(control);
    // Without the host's pressure: it comes from a FIFO, if at all.
    let fifo = setup.dir().join("pressure");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)
        .map_err(|error| Error::io("make a FIFO")(error.into()))?;
    setup.env("MEMORY_PRESSURE_WATCH", fifo).args(rest).start()
}

/// A connection that writes in sequence, `depth` blocks at a time, round and round.
struct Writer {
    stream: UnixStream,
    batch: Vec<u8>,
    depth: usize,
    next: u64,
}

impl Writer {
    fn open(server: &Server, volume: &str, depth: usize) -> Result<Writer> {
        let stream = Client::open(&server.socket(), volume)?.into_stream();
        let one = request(wire::CMD_WRITE, 0, BLOCK_BYTES);
        let block = [one.bytes().as_slice(), &[0x5a; BLOCK]].concat();
        Ok(Writer { stream, batch: block.repeat(depth), depth, next: 0 })
    }

    /// Writes at least `blocks` blocks, then flushes; the time, and how many they were.
    fn write(&mut self, blocks: usize) -> Result<(Duration, usize)> {
        let start = Instant::now();
        let rounds = blocks.div_ceil(self.depth);
        for _ in 0..rounds {
            for part in self.batch.chunks_exact_mut(28 + BLOCK) {
                part[16..24].copy_from_slice(&self.next.to_be_bytes());
                self.next = (self.next + u64::from(BLOCK_BYTES)) % DISK_BYTES;
            }
            self.stream.write_all(&self.batch).map_err(Error::io("write"))?;
            (0..self.depth).try_for_each(|_| self.reply())?;
        }
        let flush = request(wire::CMD_FLUSH, 0, 0).bytes();
        self.stream.write_all(&flush).map_err(Error::io("write"))?;
        self.reply()?;
        Ok((start.elapsed(), rounds * self.depth))
    }

    fn reply(&mut self) -> Result {
        let (_, error) = read_reply(&mut self.stream)?;
        check(error == 0, || format!("a write was refused with error {error}"))
    }
}

fn request(command: u16, offset: u64, length: u32) -> Request {
    Request { flags: 0, command, cookie: 1, offset, length }
}

/// The overhead test; ours is `max_buffer_pages` 0, the peer 1024.
fn overhead(program: &Path, options: &Options, depth: usize) -> Result<Vec<Figure>> {
    let mut text = "workers = 1\n".to_owned();
    for volume in VOLUMES {
        write!(text, "[volume.{volume}]\nstore = \"memory:{}M\"\n", DISK_BYTES >> 20)
            .map_err(|error| Error::unexpected(error.to_string()))?;
    }
    let mut server = daemon(&text, &[])?;
    let seconds = usize::try_from(options.seconds).unwrap_or(usize::MAX);
    let mut segment = 1;
    let mut writers = Vec::new();
    for volume in VOLUMES {
        let mut writer = Writer::open(&server, volume, depth)?;
        // Every block has its memory, and the rate is known.
        let (time, blocks) = writer.write(2 * DISK_BLOCKS)?;
        let milliseconds = usize::try_from(time.as_millis()).unwrap_or(usize::MAX).max(1);
        segment = (blocks * 1000 / milliseconds / SEGMENTS_A_SECOND).max(1);
        writers.push(writer);
    }
    let mut rates = [Vec::new(), Vec::new()];
    for run in 0..options.rounds {
        // The first volume has 0 pages in one run and 1024 in the next.
        let swap = run % 2 == 1;
        for (volume, pages) in VOLUMES.iter().zip(if swap { ["1024", "0"] } else { ["0", "1024"] })
        {
            control(program, &server, &["set", "--volume", volume, "max_buffer_pages", pages])?;
        }
        let mut segments = [Vec::new(), Vec::new()];
        for pair in 0..SEGMENTS_A_SECOND * seconds {
            let order = if pair % 2 == 0 { [0, 1] } else { [1, 0] };
            for which in order {
                let (time, blocks) = writers[which].write(segment)?;
                let setting = if swap { 1 - which } else { which };
                segments[setting].push((blocks * BLOCK) as f64 / time.as_secs_f64() / 1e6);
            }
        }
        let [zero, full] = segments.map(|segments| median(&segments).unwrap_or_default());
        super::log(format_args!(
            "run {} at depth {depth}: {zero:.1} MB/s with 0 pages, {full:.1} with 1024",
            run + 1
        ));
        rates[0].push(zero);
        rates[1].push(full);
    }
    server.healthy()?;
    server.stop()?;
    let none = || Error::unexpected("Student's t takes 2 to 16 runs");
    let paired = student::paired(&rates[0], &rates[1]).ok_or_else(none)?;
    let pooled = student::pooled(&rates[0], &rates[1]).ok_or_else(none)?;
    for (name, test) in [("pairs", paired), ("independent", pooled)] {
        super::log(format_args!(
            "depth {depth}, {name}: {:+.2} % +- {:.2} % at 95 %, {} degrees of freedom: {}",
            test.percent,
            test.half_width,
            test.freedom,
            if test.proven() { "a difference" } else { "no difference proven" }
        ));
    }
    let mean = |row: &[f64]| row.iter().sum::<f64>() / row.len() as f64;
    let [rate, t, width] = overhead_names(depth);
    let figure = |name, ours, peer, bar| Figure { name, ours, peer, bar };
    Ok(vec![
        figure(rate, mean(&rates[0]), Some(mean(&rates[1])), Bar::None),
        // At most 1: the interval holds zero, so no difference is proven.
        figure(t, paired.percent.abs() / paired.half_width, None, Bar::AtMost(1.0)),
        figure(width, paired.half_width, None, Bar::AtMost(3.0)),
    ])
}

/// Runs a command of the daemon's program on its control socket.
fn control(program: &Path, server: &Server, arguments: &[&str]) -> Result {
    let output = Command::new(program)
        .args(arguments)
        .env("EBBD_CONTROL", server.dir().join("control"))
        .output()
        .map_err(Error::io("run ebbd"))?;
    check(output.status.success(), || {
        format!("ebbd {arguments:?}: {}", String::from_utf8_lossy(&output.stderr))
    })
}

/// Memory of a thousand connections that do nothing: never used, and used once.
fn connections() -> Result<Vec<Figure>> {
    let (idle, used) = connection_bytes()?;
    let figure = |name: &str, bytes: u64| Figure {
        name: name.into(),
        ours: bytes as f64 / 1024.0,
        peer: None,
        bar: Bar::AtMost(16.0),
    };
    let [first, second] = CONNECTION_FIGURES;
    Ok(vec![figure(first, idle), figure(second, used)])
}

/// Bytes of the daemon's own memory, without pages of the program, for each of a thousand connections: in the
/// transmission phase and never used, and idle after a read and a write of 64 KiB.
///
/// # Errors
/// The daemon does not serve so many.
pub fn connection_bytes() -> Result<(u64, u64)> {
    let text = format!(
        "[nbd]\nmax_clients = {}\n[volume.disk]\nstore = \"null:{}M\"\n",
        CONNECTIONS + 10,
        DISK_BYTES >> 20
    );
    let mut server = daemon(&text, &[])?;
    let pid = server.pid()?;
    let use_once = |client: &mut Client| -> Result {
        client.write(0, &[1; REQUEST_BYTES as usize], 0)?;
        client.read(0, REQUEST_BYTES)?;
        Ok(())
    };
    // The first pays for what all share.
    let mut first = Client::open(&server.socket(), "disk")?;
    use_once(&mut first)?;
    let before = settled(pid)?;
    let mut clients = (0..CONNECTIONS)
        .map(|_| Ok(Client::open(&server.socket(), "disk")?))
        .collect::<Result<Vec<_>>>()?;
    let idle = settled(pid)?;
    clients.iter_mut().try_for_each(use_once)?;
    let used = settled(pid)?;
    server.healthy()?;
    drop((first, clients));
    server.stop()?;
    let each = |bytes: u64| bytes.saturating_sub(before) / CONNECTIONS;
    Ok((each(idle), each(used)))
}

/// Resident memory once it has not changed for a while: what is idle for a second is lent.
fn settled(pid: u32) -> Result<u64> {
    std::thread::sleep(Duration::from_millis(2500));
    let mut last = own(pid)?;
    until("resident memory rests", PATIENCE, || {
        std::thread::sleep(Duration::from_millis(500));
        let before = std::mem::replace(&mut last, own(pid)?);
        Ok((last.abs_diff(before) < 16 << 10).then_some(last))
    })
}

/// Milliseconds from a sign of pressure until the pools of all queues, every one idle, are empty:
/// the worst of the rounds. First by the daemon's pressure monitor, then by `ebbd pressure`.
///
/// Each round has a daemon of its own, because a daemon responds less and less often to
/// notifications that are not confirmed.
fn answers(program: &Path, rounds: u32) -> Result<Vec<Figure>> {
    let mut text = String::new();
    for queue in 0..QUEUES {
        write!(text, "[volume.q{queue}]\nstore = \"null:64M\"\n")
            .map_err(|error| Error::unexpected(error.to_string()))?;
    }
    let mut figures = Vec::new();
    for (way, name) in ANSWER_FIGURES.iter().enumerate() {
        let mut worst = 0.0f64;
        for round in 0..rounds {
            let (pages, time) = answer(program, &text, way == 0)?;
            let ms = time.as_secs_f64() * 1e3;
            super::log(format_args!(
                "{name} round {}: {pages} pages of {QUEUES} idle pools back after {ms:.1} ms",
                round + 1
            ));
            worst = worst.max(ms);
        }
        let bar = Bar::AtMost(100.0);
        figures.push(Figure { name: (*name).into(), ours: worst, peer: None, bar });
    }
    Ok(figures)
}

/// One response of a daemon with this configuration: pages in the idle pools, and the time until
/// they were empty.
fn answer(program: &Path, text: &str, watch: bool) -> Result<(u64, Duration)> {
    let mut server = daemon(text, &[])?;
    let mut queues = (0..QUEUES)
        .map(|queue| Ok(Client::open(&server.socket(), &format!("q{queue}"))?.into_stream()))
        .collect::<Result<Vec<_>>>()?;
    queues.iter_mut().try_for_each(fill)?;
    // Longer than pools wait before they lend: the workers sleep.
    std::thread::sleep(Duration::from_millis(300));
    let socket = server.dir().join("control");
    let (pages, before) = pools(&stat(&socket)?)?;
    check(pages > 0, || "the pools kept nothing".into())?;
    let fifo = server.dir().join("pressure");
    let start = Instant::now();
    if watch {
        File::options()
            .write(true)
            .open(&fifo)
            .and_then(|mut file| file.write_all(b"x"))
            .map_err(Error::io("write to the watched FIFO"))?;
    } else {
        control(program, &server, &["pressure", "L1"])?;
    }
    let time = until("the pools are empty", PATIENCE, || {
        let (pages, squeezes) = pools(&stat(&socket)?)?;
        let answered = pages == 0 && squeezes >= before + QUEUES as u64;
        Ok(answered.then(|| start.elapsed()))
    })?;
    server.healthy()?;
    server.stop()?;
    Ok((pages, time))
}

/// Makes a queue's pool grow: as many requests at once, all of them completed.
fn fill(stream: &mut UnixStream) -> Result {
    let all: Vec<u8> =
        (0..DEPTH).flat_map(|_| request(wire::CMD_READ, 0, REQUEST_BYTES).bytes()).collect();
    stream.write_all(&all).map_err(Error::io("write"))?;
    let mut data = vec![0; REQUEST_BYTES as usize];
    for _ in 0..DEPTH {
        let (_, error) = read_reply(stream)?;
        check(error == 0, || format!("a read was refused with error {error}"))?;
        stream.read_exact(&mut data).map_err(Error::io("read"))?;
    }
    Ok(())
}

/// Pages in all pools, kept or lent, and the number of their squeezes.
fn pools(stat: &Value) -> Result<(u64, u64)> {
    let pools = stat.pointer("/memory/pools").and_then(Value::as_array);
    let pools = pools.ok_or_else(|| Error::unexpected(format!("no pools in {stat}")))?;
    let sum = |name: &str| pools.iter().filter_map(|pool| pool[name].as_u64()).sum::<u64>();
    Ok((sum("free_pages") + sum("lent_pages"), sum("squeezes")))
}

/// The daemon's figures, from its control socket.
///
/// # Errors
/// It does not answer.
pub fn stat(control: &Path) -> Result<Value> {
    let mut stream =
        UnixStream::connect(control).map_err(Error::io(control.display().to_string()))?;
    let request = "GET /v1/stat HTTP/1.1\r\nHost: ebbd\r\nConnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).map_err(Error::io("ask the control socket"))?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).map_err(Error::io("read from the control socket"))?;
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    serde_json::from_str(body).map_err(|error| Error::unexpected(format!("{error} in: {answer}")))
}
