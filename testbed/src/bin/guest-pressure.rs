//! Runs in a guest that is short of memory: many volumes used one after the other, a neighbour that
//! allocates; prints the results. See `testbed::bench::pressure`.
//!
//! SOCKET is that of NBD, or the directory of those of vhost-user-blk.
//!
//! `guest-pressure run SOCKET PID VOLUMES MIB` prints one line of `key=value` pairs; PID is the
//! daemon's, and MIB is what the neighbour takes, or `all-MIB` for all that is available but that.
//! `guest-pressure fill SOCKET VOLUMES` only uses the volumes. It runs `guest-pressure neighbour
//! MIB` as a separate process: for each line it reads it touches all its memory and prints the
//! microseconds that took and the slowest MiB of them.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};
use testbed::bench::pressure::Disk;
use testbed::{Error, Result};

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;
/// Volumes that are in use while the neighbour allocates.
const ACTIVE: usize = 4;
/// Requests of a burst: all of them are in flight at once.
const DEPTH: u32 = 32;
/// Requests of a burst when volumes are used again, under pressure.
const AGAIN: u32 = 16;
/// How long volumes idle before the neighbour comes: more than any interval of the daemon.
const IDLE: Duration = Duration::from_millis(2500);
/// From one volume's burst to the next one's.
const PAUSE: Duration = Duration::from_millis(40);

/// The kernel's counters and the daemon's memory at a moment.
#[derive(Clone, Copy, Default)]
struct Counts {
    pages_in: u64,
    pages_out: u64,
    major: u64,
    lazily_freed: u64,
}

fn field(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let word = line.and_then(|rest| rest.split_whitespace().next());
    word.and_then(|word| word.parse().ok()).unwrap_or(0)
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(path).map_err(Error::io(path))
}

fn counts() -> Result<Counts> {
    let text = read("/proc/vmstat")?;
    Ok(Counts {
        pages_in: field(&text, "pswpin "),
        pages_out: field(&text, "pswpout "),
        major: field(&text, "pgmajfault "),
        lazily_freed: field(&text, "pglazyfreed "),
    })
}

/// KiB of the daemon that are its own and not lent, and that are in swap. The pages of its program depend on the build, and
/// the memory of guests that it maps is theirs.
fn daemon_kib(pid: &str) -> Result<(u64, u64)> {
    let text = read(&format!("/proc/{pid}/smaps_rollup"))?;
    let own = field(&text, "Anonymous:").saturating_sub(field(&text, "LazyFree:"));
    Ok((own, field(&text, "Swap:")))
}

fn open(socket: &str, volumes: usize) -> Result<Vec<Disk>> {
    (0..volumes).map(|n| Disk::open(Path::new(socket), &format!("v{n}"))).collect()
}

/// A burst at each volume, one after the other.
fn use_all(disks: &mut [Disk], depth: u32) -> Result {
    for disk in disks {
        disk.burst(depth)?;
        sleep(PAUSE);
    }
    Ok(())
}

/// The process that allocates.
struct Neighbour {
    child: Child,
    answers: BufReader<std::process::ChildStdout>,
}

impl Neighbour {
    fn new(mib: &str) -> Result<Neighbour> {
        let me = std::env::current_exe().map_err(Error::io("find myself"))?;
        let mut child = Command::new(me)
            .args(["neighbour", mib])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(Error::io("start the neighbour"))?;
        let answers = child.stdout.take().ok_or_else(|| Error::unexpected("no pipe"))?;
        Ok(Neighbour { child, answers: BufReader::new(answers) })
    }

    /// Has it touch all its memory: microseconds, and those of the worst MiB.
    fn touch(&mut self) -> Result<(u64, u64)> {
        let pipe = self.child.stdin.as_mut().ok_or_else(|| Error::unexpected("no pipe"))?;
        writeln!(pipe).map_err(Error::io("ask the neighbour"))?;
        let mut line = String::new();
        self.answers.read_line(&mut line).map_err(Error::io("hear the neighbour"))?;
        let mut numbers = line.split_whitespace().map(str::parse);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(all)), Some(Ok(worst))) => Ok((all, worst)),
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

fn neighbour(mib: &str) -> Result {
    let mib: usize = mib.parse().map_err(|_| Error::unexpected("MIB is a number"))?;
    let mut memory = Vec::new();
    for line in io::stdin().lock().lines() {
        line.map_err(Error::io("hear"))?;
        let started = Instant::now();
        if memory.is_empty() {
            // Zeroed memory of this size is mapped, not touched.
            memory = vec![0_u8; mib * MIB];
        }
        let mut worst = Duration::ZERO;
        for part in memory.chunks_mut(MIB) {
            let step = Instant::now();
            for page in part.chunks_mut(PAGE) {
                page[0] = std::hint::black_box(page[0].wrapping_add(1));
            }
            worst = worst.max(step.elapsed());
        }
        let all = started.elapsed();
        writeln!(io::stdout().lock(), "{} {}", all.as_micros(), worst.as_micros())
            .map_err(Error::io("answer"))?;
    }
    Ok(())
}

/// Uses volumes without an end while `go` is set; counts the bursts.
fn keep_using(disks: &mut [Disk], go: &AtomicBool, bursts: &AtomicU64) -> Result {
    while go.load(Ordering::Relaxed) {
        for disk in disks.iter_mut() {
            disk.burst(16)?;
            bursts.fetch_add(1, Ordering::Relaxed);
            sleep(Duration::from_millis(20));
        }
    }
    Ok(())
}

/// The memory that the neighbour takes.
#[derive(Clone, Copy)]
enum Demand {
    Mib(u64),
    /// The available memory before the volumes are used, less this many MiB: the shortage does not
    /// depend on the size of the programs, which are also in memory.
    AllBut(u64),
}

impl Demand {
    fn parse(text: &str) -> Result<Demand> {
        let number = |text: &str| text.parse().map_err(|_| Error::unexpected("MIB is a number"));
        match text.strip_prefix("all-") {
            Some(rest) => Ok(Demand::AllBut(number(rest)?)),
            None => Ok(Demand::Mib(number(text)?)),
        }
    }

    fn mib(self, available_kib: u64) -> u64 {
        match self {
            Demand::Mib(mib) => mib,
            Demand::AllBut(rest) => (available_kib >> 10).saturating_sub(rest),
        }
    }
}

fn available_kib() -> Result<u64> {
    Ok(field(&read("/proc/meminfo")?, "MemAvailable:"))
}

fn run(socket: &str, pid: &str, volumes: usize, demand: Demand) -> Result {
    let mut active = open(socket, ACTIVE)?;
    let mut disks = open(socket, volumes)?;
    let taken = demand.mib(available_kib()?);
    let started = Instant::now();
    use_all(&mut disks, DEPTH)?;
    let fill = started.elapsed().as_micros();
    let (filled, _) = daemon_kib(pid)?;
    sleep(IDLE);
    let (idle, _) = daemon_kib(pid)?;
    let available = available_kib()?;
    let before = counts()?;
    let (go, bursts) = (AtomicBool::new(true), AtomicU64::new(0));
    let mut neighbour = Neighbour::new(&taken.to_string())?;
    let (first, used, again, middle, swapped) = std::thread::scope(|scope| -> Result<_> {
        let user = scope.spawn(|| keep_using(&mut active, &go, &bursts));
        let mut work = || {
            let first = neighbour.touch()?;
            let middle = counts()?;
            let (_, swapped) = daemon_kib(pid)?;
            let started = Instant::now();
            use_all(&mut disks, AGAIN)?;
            let used =
                started.elapsed().saturating_sub(PAUSE * u32::try_from(volumes).unwrap_or(0));
            let again = neighbour.touch()?;
            Ok((first, used, again, middle, swapped))
        };
        let done: Result<_> = work();
        go.store(false, Ordering::Relaxed);
        user.join().map_err(|_| Error::unexpected("the user of volumes died"))??;
        done
    })?;
    let after = counts()?;
    let (end, _) = daemon_kib(pid)?;
    writeln!(
        io::stdout().lock(),
        "filled_kib={filled} idle_kib={idle} end_kib={end} available_kib={available} taken_mib={taken} \
         swapped_kib={swapped} out={} in={} out_first={} major={} lazily_freed={} \
         first_us={} worst_us={} again_us={} neighbour_us={} reuse_us={} fill_us={fill} \
         bursts={}",
        after.pages_out - before.pages_out,
        after.pages_in - before.pages_in,
        middle.pages_out - before.pages_out,
        after.major - before.major,
        after.lazily_freed - before.lazily_freed,
        first.0,
        first.1.max(again.1),
        again.0,
        first.0 + again.0,
        used.as_micros(),
        bursts.load(Ordering::Relaxed),
    )
    .map_err(Error::io("tell"))
}

fn dispatch(args: &[String]) -> Result {
    let number = |text: &str| text.parse().map_err(|_| Error::unexpected("VOLUMES is a number"));
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["neighbour", mib] => neighbour(mib),
        ["fill", socket, volumes] => use_all(&mut open(socket, number(volumes)?)?, DEPTH),
        ["run", socket, pid, volumes, mib] => {
            run(socket, pid, number(volumes)?, Demand::parse(mib)?)
        }
        _ => Err(Error::unexpected(
            "usage: guest-pressure run SOCKET PID VOLUMES MIB|all-MIB | fill SOCKET VOLUMES | neighbour MIB",
        )),
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match dispatch(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // If stderr is closed, too, the exit status still shows it.
            let _ = writeln!(io::stderr().lock(), "guest-pressure: {error}");
            ExitCode::FAILURE
        }
    }
}
