//! Runs in a guest that is short of memory: an I/O job over the daemon's export `v`, next to a
//! build or a neighbour that allocates; prints the results. See `testbed::bench::cache_guest`.
//!
//! `guest-cache build PID MIB COMMAND...` and `guest-cache neighbour PID MIB MIB` print one line of
//! `key=value` pairs; PID is the daemon's, the first MIB the working set of the job. It runs
//! `guest-cache touch MIB` as a separate process, which allocates and touches this memory, prints
//! how many microseconds that took and for how many of them it had a processor, and keeps it until
//! its standard input ends.
//!
//! `guest-cache watch NAME MIB MIB` is the demo: the second MIB is what the neighbour takes; it
//! prints samples and marks, see `testbed::demo`. It runs `guest-cache visit MIB`, which takes
//! memory in small steps, uses it, and ends.

use serde_json::Value;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};
use testbed::bench::cache_guest::{PIECE_BYTES, THINK_MS};
use testbed::bench::elastic::stat;
use testbed::demo;
use testbed::harness::nbd::{Client, Request, read_reply, wire};
use testbed::harness::pattern::Random;
use testbed::{Error, Result, check};

const SOCKET: &str = "/tmp/nbd.sock";
const CONTROL: &str = "/tmp/control.sock";
const PAGE: usize = 4096;
const MIB: usize = 1 << 20;
/// Requests in flight when data is read as fast as possible.
const DEPTH: u32 = 16;
/// Long enough for the daemon to lend what is not used.
const REST: Duration = Duration::from_secs(3);
/// Reads between two samples of the hit ratio, and how long it may take to recover.
const WINDOW: u32 = 256;
const PATIENCE: Duration = Duration::from_secs(90);

/// The kernel's counters at a moment.
#[derive(Clone, Copy)]
struct Counts {
    pages_in: u64,
    pages_out: u64,
    major: u64,
    lazily_freed: u64,
    /// Pages that the kernel scanned to reclaim memory.
    scanned: u64,
    /// Pages that were reclaimed directly, while an allocation waited.
    direct: u64,
    /// How often an allocation waited.
    stalls: u64,
    /// Processor time of the daemon, ms.
    daemon_ms: u64,
}

fn field(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let word = line.and_then(|rest| rest.split_whitespace().next());
    word.and_then(|word| word.parse().ok()).unwrap_or(0)
}

fn last(line: &str) -> u64 {
    line.rsplit(' ').next().and_then(|word| word.parse().ok()).unwrap_or(0)
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(path).map_err(Error::io(path))
}

fn counts(pid: &str) -> Result<Counts> {
    let text = read("/proc/vmstat")?;
    let stat = read(&format!("/proc/{pid}/stat"))?;
    // User and system time, in ticks of 10 ms: fields 12 and 13 after the name in parentheses.
    let times = stat.rsplit(')').next().unwrap_or_default().split_whitespace().skip(11).take(2);
    let ticks: u64 = times.filter_map(|word| word.parse::<u64>().ok()).sum();
    Ok(Counts {
        scanned: field(&text, "pgscan_kswapd ") + field(&text, "pgscan_direct "),
        direct: field(&text, "pgsteal_direct "),
        stalls: text.lines().filter(|line| line.starts_with("allocstall_")).map(last).sum(),
        daemon_ms: ticks * 10,
        pages_in: field(&text, "pswpin "),
        pages_out: field(&text, "pswpout "),
        major: field(&text, "pgmajfault "),
        lazily_freed: field(&text, "pglazyfreed "),
    })
}

/// What the counters gained, as pairs.
fn gained(before: Counts, after: Counts) -> String {
    format!(
        "in={} out={} major={} lazily_freed={} scanned={} direct={} \
         stalls={} daemon_ms={}",
        after.pages_in - before.pages_in,
        after.pages_out - before.pages_out,
        after.major - before.major,
        after.lazily_freed - before.lazily_freed,
        after.scanned - before.scanned,
        after.direct - before.direct,
        after.stalls - before.stalls,
        after.daemon_ms - before.daemon_ms,
    )
}

/// What the daemon says of its cache; all 0 without one.
#[derive(Clone, Copy)]
struct Held {
    space_kib: u64,
    wired_kib: u64,
    hit: u64,
    miss: u64,
}

fn held() -> Result<Held> {
    let output = Command::new("ebbd")
        .args(["stat", "--json", "--control", CONTROL])
        .output()
        .map_err(Error::io("run ebbd stat"))?;
    let stat: Value = serde_json::from_slice(&output.stdout)
        .map_err(|error| Error::unexpected(format!("ebbd stat --json: {error}")))?;
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let volume = &stat["volumes"][0]["cache"];
    Ok(Held {
        space_kib: number(&stat["cache"]["bufspace_bytes"]) >> 10,
        wired_kib: number(&stat["cache"]["bufwiredspace_bytes"]) >> 10,
        hit: number(&volume["hit_bytes"]),
        miss: number(&volume["miss_bytes"]),
    })
}

/// Share of the bytes read between two samples that was found, per cent.
fn hit_percent(before: Held, after: Held) -> u64 {
    let (hit, miss) = (after.hit - before.hit, after.miss - before.miss);
    (hit * 100).checked_div(hit + miss).unwrap_or(0)
}

/// The program that does I/O.
struct Job {
    stream: UnixStream,
    pieces: u64,
    random: Random,
    data: Vec<u8>,
}

impl Job {
    fn open(mib: u64) -> Result<Job> {
        let piece = u64::from(PIECE_BYTES);
        Ok(Job {
            stream: Client::open(Path::new(SOCKET), "v")?.into_stream(),
            pieces: (mib << 20) / piece,
            random: Random::new(7),
            data: vec![0; usize::try_from(PIECE_BYTES).unwrap_or(0)],
        })
    }

    fn ask(&mut self, piece: u64) -> Result {
        let (command, length) = (wire::CMD_READ, PIECE_BYTES);
        let offset = piece * u64::from(length);
        let request = Request { flags: 0, command, cookie: piece, offset, length };
        self.stream.write_all(&request.bytes()).map_err(Error::io("send a request"))
    }

    fn take(&mut self) -> Result {
        let (_, error) = read_reply(&mut self.stream)?;
        if error != 0 {
            return Err(Error::unexpected(format!("a read was refused with error {error}")));
        }
        self.stream.read_exact(&mut self.data).map_err(Error::io("read a reply"))
    }

    /// Reads pieces as fast as may be: `next` says which.
    fn read_all(&mut self, count: u64, mut next: impl FnMut(&mut Random, u64) -> u64) -> Result {
        let depth = u64::from(DEPTH).min(count);
        for n in 0..count + depth {
            if n >= depth {
                self.take()?;
            }
            if n < count {
                let piece = next(&mut self.random, n);
                self.ask(piece)?;
            }
        }
        Ok(())
    }

    /// The whole working set, twice: it is in the cache, and known to be used more than once.
    fn warm(&mut self) -> Result {
        let pieces = self.pieces;
        self.read_all(2 * pieces, |_, n| n % pieces)
    }

    /// `count` pieces in no order.
    fn some(&mut self, count: u32) -> Result {
        let pieces = self.pieces;
        self.read_all(u64::from(count), |random, _| random.below(pieces))
    }

    /// Reads and thinks while `go` is set. Returns the reads, and how long they took altogether.
    fn work(&mut self, go: &AtomicBool) -> Result<(u32, Duration)> {
        let (mut reads, mut waited) = (0, Duration::ZERO);
        while go.load(Ordering::Relaxed) {
            let started = Instant::now();
            let piece = self.random.below(self.pieces);
            self.ask(piece)?;
            self.take()?;
            waited += started.elapsed();
            reads += 1;
            sleep(Duration::from_millis(THINK_MS));
        }
        Ok((reads, waited))
    }
}

/// Has the job work while `other` runs. Returns what `other` does, and a line about the job.
fn beside<T>(job: &mut Job, other: impl FnOnce() -> Result<T>) -> Result<(T, String)> {
    let go = AtomicBool::new(true);
    let started = Instant::now();
    scope(|scope| {
        let worker = scope.spawn(|| job.work(&go));
        let done = other();
        go.store(false, Ordering::Relaxed);
        let seconds = started.elapsed().as_secs_f64();
        let (reads, waited) =
            worker.join().map_err(|_| Error::unexpected("the I/O job died"))??;
        let line = format!(
            "reads={reads} reads_per_s={:.2} read_us={}",
            f64::from(reads) / seconds,
            waited.as_micros() / u128::from(reads.max(1)),
        );
        Ok((done?, line))
    })
}

fn daemon_line(pid: &str) -> Result<String> {
    let text = read(&format!("/proc/{pid}/smaps_rollup"))?;
    let held = held()?;
    Ok(format!(
        "space_kib={} wired_kib={} daemon_kib={} daemon_swap_kib={}",
        held.space_kib,
        held.wired_kib,
        field(&text, "Rss:"),
        field(&text, "Swap:"),
    ))
}

fn build(pid: &str, mib: u64, command: &[&str]) -> Result {
    let (program, arguments) =
        command.split_first().ok_or_else(|| Error::unexpected("a COMMAND is needed"))?;
    let mut job = Job::open(mib)?;
    job.warm()?;
    sleep(REST);
    let (full, before) = (held()?, counts(pid)?);
    let available = field(&read("/proc/meminfo")?, "MemAvailable:");
    let started = Instant::now();
    let (status, line) = beside(&mut job, || {
        // The build's output belongs on the console, not into the results.
        let status = Command::new(program).args(arguments).stdout(io::stderr()).status();
        status.map_err(Error::io("run the build"))
    })?;
    let took = started.elapsed().as_millis();
    let (after, end) = (counts(pid)?, held()?);
    if !status.success() {
        return Err(Error::unexpected(format!("the build failed: {status}")));
    }
    tell(&format!(
        "build_ms={took} {} {line} hit_percent={} full_kib={} available_kib={available} {}",
        gained(before, after),
        hit_percent(full, end),
        full.space_kib,
        daemon_line(pid)?,
    ))
}

/// The process that allocates.
struct Neighbour {
    child: Child,
    answers: BufReader<ChildStdout>,
}

impl Neighbour {
    fn new(arguments: &[&str]) -> Result<Neighbour> {
        let me = std::env::current_exe().map_err(Error::io("find myself"))?;
        let mut child = Command::new(me)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(Error::io("start the neighbour"))?;
        let answers = child.stdout.take().ok_or_else(|| Error::unexpected("no pipe"))?;
        Ok(Neighbour { child, answers: BufReader::new(answers) })
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line).map_err(Error::io("hear the neighbour"))?;
        Ok(line)
    }

    /// Starts it and waits until it has touched all: the microseconds that took, and those of them
    /// in which it ran.
    fn start(mib: &str) -> Result<(Neighbour, [u64; 2])> {
        let mut neighbour = Neighbour::new(&["touch", mib])?;
        let line = neighbour.line()?;
        let mut words = line.split_whitespace().map(|word| word.parse().ok());
        match (words.next().flatten(), words.next().flatten()) {
            (Some(took), Some(ran)) => Ok((neighbour, [took, ran])),
            _ => Err(Error::unexpected(format!("the neighbour said {line:?}: out of memory?"))),
        }
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Microseconds for which this process had a processor.
fn ran() -> Result<u64> {
    let text = read("/proc/self/schedstat")?;
    let nanos = text.split(' ').next().and_then(|word| word.parse::<u64>().ok());
    nanos.map(|nanos| nanos / 1000).ok_or_else(|| Error::unexpected(format!("schedstat: {text:?}")))
}

fn touch(mib: usize) -> Result {
    let (started, before) = (Instant::now(), ran()?);
    // Zeroed memory of this size is mapped, not touched.
    let mut memory = vec![0_u8; mib * MIB];
    for page in memory.chunks_mut(PAGE) {
        page[0] = std::hint::black_box(1);
    }
    let took = started.elapsed().as_micros();
    tell(&format!("{took} {}", ran()? - before))?;
    io::stdin().read_to_end(&mut Vec::new()).map_err(Error::io("wait"))?;
    std::hint::black_box(&memory);
    Ok(())
}

fn neighbour(pid: &str, mib: u64, allocates: &str) -> Result {
    let mut job = Job::open(mib)?;
    job.warm()?;
    sleep(REST);
    let start = held()?;
    job.some(WINDOW)?;
    let full = held()?;
    sleep(REST);
    let available = field(&read("/proc/meminfo")?, "MemAvailable:");
    let before = counts(pid)?;
    let ((neighbour, [took, ran]), line) = beside(&mut job, || Neighbour::start(allocates))?;
    let after = counts(pid)?;
    let beside_it = held()?;
    drop(neighbour);
    let full_percent = hit_percent(start, full);
    let freed = Instant::now();
    let mut seen = held()?;
    let mut back = 0;
    let mut windows = 0;
    while full_percent > 0 && back * 10 < full_percent * 9 && freed.elapsed() < PATIENCE {
        job.some(WINDOW)?;
        let now = held()?;
        back = hit_percent(seen, now);
        seen = now;
        windows += 1;
    }
    tell(&format!(
        "touch_ms={:.2} touch_ran_ms={:.2} {} {line} full_percent={full_percent} back_percent={back} back_ms={} \
         back_reads={} full_kib={} beside_kib={} available_kib={available} {}",
        took as f64 / 1000.0,
        ran as f64 / 1000.0,
        gained(before, after),
        freed.elapsed().as_millis(),
        windows * WINDOW,
        full.space_kib,
        beside_it.space_kib,
        daemon_line(pid)?,
    ))
}

/// Takes memory by the MiB, then goes over all of it a few times. Says how long that took without
/// pauses.
fn visit(mib: usize) -> Result {
    // Zeroed memory of this size is mapped, not touched.
    let mut memory = vec![0_u8; mib * MIB];
    let mut worked = Duration::ZERO;
    let mut touch = |part: &mut [u8]| {
        let started = Instant::now();
        for page in part.chunks_mut(PAGE) {
            page[0] = std::hint::black_box(page[0].wrapping_add(1));
        }
        worked += started.elapsed();
    };
    for part in memory.chunks_mut(MIB) {
        touch(part);
        sleep(demo::STEP);
    }
    tell("taken")?;
    for _ in 0..demo::PASSES {
        touch(&mut memory);
        sleep(demo::PASS);
    }
    tell(&worked.as_micros().to_string())
}

/// Samples of the cache, free memory and swap while `go` is set. One that comes late is not
/// repeated.
fn sample(name: &str, started: Instant, go: &AtomicBool) -> Result {
    while go.load(Ordering::Relaxed) {
        let begun = Instant::now();
        let (memory, vm) = (read("/proc/meminfo")?, read("/proc/vmstat")?);
        let stat = stat(Path::new(CONTROL))?;
        let bytes = |value: &Value| value.as_u64().unwrap_or(0);
        tell(&format!(
            "{name}-sample ms={} cache_kib={} free_kib={} out={} hit={} miss={}",
            begun.duration_since(started).as_millis(),
            bytes(&stat["cache"]["bufspace_bytes"]) >> 10,
            field(&memory, "MemFree:"),
            field(&vm, "pswpout "),
            bytes(&stat["volumes"][0]["cache"]["hit_bytes"]),
            bytes(&stat["volumes"][0]["cache"]["miss_bytes"]),
        ))?;
        sleep(demo::SAMPLE.saturating_sub(begun.elapsed()));
    }
    Ok(())
}

/// The neighbour comes once the cache `is_full`, and goes.
fn visited(name: &str, started: Instant, mib: u64, is_full: &Receiver<()>) -> Result {
    let mark = |what: &str| tell(&format!("{name}-{what} {}", started.elapsed().as_millis()));
    is_full.recv().map_err(|_| Error::unexpected("the reader died"))?;
    mark("warm")?;
    sleep(demo::BEFORE);
    mark("comes")?;
    let mut neighbour = Neighbour::new(&["visit", &mib.to_string()])?;
    let taken = neighbour.line()?;
    mark("taken")?;
    let worked = neighbour.line()?;
    drop(neighbour);
    mark("done")?;
    check(taken == "taken\n" && !worked.is_empty(), || {
        "the neighbour ended early: out of memory?".into()
    })?;
    tell(&format!("{name}-worked {}", worked.trim_end()))?;
    sleep(demo::AFTER);
    mark("end")
}

fn watch(name: &str, mib: u64, takes: u64) -> Result {
    let mut job = Job::open(mib)?;
    let (started, go) = (Instant::now(), AtomicBool::new(true));
    let (full, is_full) = mpsc::channel();
    scope(|scope| {
        let sampler = scope.spawn(|| sample(name, started, &go));
        let go = &go;
        let reader = scope.spawn(move || -> Result {
            sleep(demo::CALM);
            job.warm()?;
            full.send(()).map_err(|_| Error::unexpected("nobody waits for the cache"))?;
            while go.load(Ordering::Relaxed) {
                job.some(demo::BURST)?;
                sleep(demo::THINK);
            }
            Ok(())
        });
        let visited = visited(name, started, takes, &is_full);
        go.store(false, Ordering::Relaxed);
        reader.join().map_err(|_| Error::unexpected("the reader died"))??;
        sampler.join().map_err(|_| Error::unexpected("the sampler died"))??;
        visited
    })
}

fn tell(line: &str) -> Result {
    writeln!(io::stdout().lock(), "{line}").map_err(Error::io("tell"))
}

fn dispatch(args: &[String]) -> Result {
    let number = |text: &str| text.parse().map_err(|_| Error::unexpected("MIB is a number"));
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["touch", mib] => touch(usize::try_from(number(mib)?).unwrap_or(usize::MAX)),
        ["build", pid, mib, command @ ..] => build(pid, number(mib)?, command),
        ["neighbour", pid, mib, allocates] => neighbour(pid, number(mib)?, allocates),
        ["watch", name, mib, takes] => watch(name, number(mib)?, number(takes)?),
        ["visit", mib] => visit(usize::try_from(number(mib)?).unwrap_or(usize::MAX)),
        _ => Err(Error::unexpected(
            "usage: guest-cache build PID MIB COMMAND... | neighbour PID MIB MIB | touch MIB | \
             watch NAME MIB MIB | visit MIB",
        )),
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match dispatch(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // If stderr is closed, too, the exit status still shows it.
            let _ = writeln!(io::stderr().lock(), "guest-cache: {error}");
            ExitCode::FAILURE
        }
    }
}
