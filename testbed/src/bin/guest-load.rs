//! The load of a guest's disk: reads or writes that bypass the page cache with so many requests in
//! flight, and prints the cost of one; or writes and reads verified content for a given time.
//!
//! One thread and the kernel's own asynchronous I/O, so that the load itself costs little and
//! always the same. (An `io_uring` passes requests that would have to wait for a free tag to its
//! worker threads, which cost more than a disk's backend does.)
//!
//! ```text
//! guest-load DEVICE rr|rw|sr|sw SIZE DEPTH COUNT   random or sequential, read or write
//! guest-load DEVICE churn DEPTH SECONDS SEED       verified, 4 KiB to 128 KiB, random
//! guest-load hog MIB RATE                          holds memory, touches RATE MiB of it a second
//! ```
//!
//! It prints `load MODE SIZE DEPTH COUNT us_per_op worst_us errors`, or `churn COUNT errors wrong`.
//! Exit status 1 when a request failed or a byte was wrong.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use testbed::harness::pattern::Random;

const BLOCK: usize = 4096;
/// Blocks in the largest request of `churn`; no two requests touch one slot at a time.
const SLOT: usize = 32;
/// `churn` goes over this much of the disk at most.
const CHURN_BLOCKS: u64 = 16 << 8;
const O_DIRECT: i32 = 0x4000;
const USAGE: &str = "guest-load DEVICE rr|rw|sr|sw SIZE DEPTH COUNT \
    | DEVICE churn DEPTH SECONDS SEED | hog MIB RATE";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match words.as_slice() {
        ["hog", mib, rate] => hog(mib, rate),
        [device, "churn", depth, seconds, seed] => churn(device, depth, seconds, seed),
        [device, mode, size, depth, count] => load(device, mode, size, depth, count),
        _ => Err(io::Error::other(USAGE)),
    };
    match result {
        Ok((line, good)) => {
            say(&line);
            ExitCode::from(u8::from(!good))
        }
        Err(error) => {
            say(&format!("guest-load: {error}"));
            ExitCode::from(2)
        }
    }
}

fn say(line: &str) {
    // There is nowhere to report a closed console.
    let _ = io::Write::write_all(&mut io::stdout().lock(), format!("{line}\n").as_bytes());
}

fn number(text: &str) -> io::Result<usize> {
    let (digits, unit) = match text.as_bytes().last() {
        Some(b'k') => (&text[..text.len() - 1], 1 << 10),
        Some(b'm') => (&text[..text.len() - 1], 1 << 20),
        _ => (text, 1),
    };
    let value = digits.parse::<usize>().ok().and_then(|n| n.checked_mul(unit));
    value.ok_or_else(|| io::Error::other(format!("{text} is no number; {USAGE}")))
}

fn index(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

/// A disk open past the page cache, with its requests.
struct Disk {
    file: File,
    bytes: u64,
    queue: Queue,
    /// Memory of all requests, and where the first aligned byte of it lies.
    memory: Vec<u8>,
    first: usize,
    /// Bytes of memory for each request.
    size: usize,
}

/// One request: slot of memory, place on the disk, length.
struct Request {
    slot: usize,
    write: bool,
    offset: u64,
    length: usize,
}

impl Disk {
    fn open(device: &str, size: usize, depth: usize) -> io::Result<Disk> {
        let mut file =
            OpenOptions::new().read(true).write(true).custom_flags(O_DIRECT).open(device)?;
        let bytes = file.seek(SeekFrom::End(0))?;
        let memory = vec![0x5a_u8; depth * size + BLOCK];
        let first = memory.as_ptr().align_offset(BLOCK);
        Ok(Disk { file, bytes, queue: Queue::new(depth)?, memory, first, size })
    }

    fn buffer(&mut self, slot: usize, length: usize) -> &mut [u8] {
        let start = self.first + slot * self.size;
        &mut self.memory[start..start + length]
    }

    /// Queues a request; [`Disk::wait`] submits it.
    fn start(&mut self, request: &Request) {
        let buffer = self.buffer(request.slot, request.length).as_mut_ptr();
        let entry = Control {
            data: request.slot as u64,
            operation: u16::from(request.write),
            fd: self.file.as_raw_fd(),
            buffer: buffer as u64,
            bytes: request.length as u64,
            offset: request.offset,
            ..Control::default()
        };
        self.queue.line.push(entry);
    }

    /// Submits what is queued and waits for at least one completion; returns slot and result of
    /// each.
    fn wait(&mut self, done: &mut Vec<(usize, i64)>) -> io::Result<()> {
        self.queue.send()?;
        self.queue.wait(done)
    }
}

/// The kernel's `struct iocb`.
#[repr(C)]
#[derive(Default, Clone, Copy)]
struct Control {
    data: u64,
    key: u32,
    flags: u32,
    operation: u16,
    priority: i16,
    fd: i32,
    buffer: u64,
    bytes: u64,
    offset: u64,
    reserved: u64,
    more_flags: u32,
    event_fd: u32,
}

/// The kernel's `struct io_event`.
#[repr(C)]
#[derive(Default, Clone, Copy)]
struct Event {
    data: u64,
    object: u64,
    result: i64,
    more: i64,
}

/// A context of asynchronous I/O.
struct Queue {
    context: usize,
    line: Vec<Control>,
    events: Vec<Event>,
}

impl Queue {
    fn new(depth: usize) -> io::Result<Queue> {
        let mut context = 0_usize;
        // SAFETY: the call writes one word, which `context` is.
        let status = unsafe { libc::syscall(libc::SYS_io_setup, depth, &raw mut context) };
        answer(status)?;
        Ok(Queue {
            context,
            line: Vec::with_capacity(depth),
            events: vec![Event::default(); depth],
        })
    }

    fn send(&mut self) -> io::Result<()> {
        let mut sent = 0;
        while sent < self.line.len() {
            let pointers: Vec<*mut Control> =
                self.line[sent..].iter_mut().map(std::ptr::from_mut).collect();
            let (context, count, all) = (self.context, pointers.len(), pointers.as_ptr());
            // SAFETY: `pointers` holds `count` pointers to entries that live through the call, which
            // copies them. The buffers they name belong to the disk, are never resized, and each
            // serves one request at a time; both loads wait for all of theirs before they return.
            let status = unsafe { libc::syscall(libc::SYS_io_submit, context, count, all) };
            sent += answer(status)?;
        }
        self.line.clear();
        Ok(())
    }

    fn wait(&mut self, done: &mut Vec<(usize, i64)>) -> io::Result<()> {
        done.clear();
        let (context, most, events) = (self.context, self.events.len(), self.events.as_mut_ptr());
        let none: *const libc::timespec = std::ptr::null();
        let count = loop {
            // SAFETY: the call writes at most `most` events, for which `events` has room.
            let status = unsafe {
                libc::syscall(libc::SYS_io_getevents, context, 1_usize, most, events, none)
            };
            match answer(status) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        done.extend(self.events[..count].iter().map(|e| (index(e.data), e.result)));
        Ok(())
    }
}

/// What a system call gave back: a count, or the error.
fn answer(status: libc::c_long) -> io::Result<usize> {
    usize::try_from(status).map_err(|_| io::Error::last_os_error())
}

fn load(
    device: &str,
    mode: &str,
    size: &str,
    depth: &str,
    count: &str,
) -> io::Result<(String, bool)> {
    let (bytes, depth, count) = (number(size)?, number(depth)?, number(count)?);
    let (random, write) = match mode {
        "rr" => (true, false),
        "rw" => (true, true),
        "sr" => (false, false),
        "sw" => (false, true),
        _ => return Err(io::Error::other(USAGE)),
    };
    let mut disk = Disk::open(device, bytes, depth)?;
    let places = (disk.bytes / bytes as u64).max(1);
    let mut generator = Random::new(7);
    let mut started_at = vec![Instant::now(); depth];
    let (mut started, mut ended, mut errors) = (0_usize, 0_usize, 0_usize);
    let (mut worst, mut done) = (Duration::ZERO, Vec::with_capacity(depth));
    let mut free: Vec<usize> = (0..depth).collect();
    let begin = Instant::now();
    while ended < count {
        // One clock reading for all: it is a system call here, and not a cheap one.
        let now = Instant::now();
        while started < count
            && let Some(slot) = free.pop()
        {
            let place = if random { generator.below(places) } else { started as u64 % places };
            started_at[slot] = now;
            disk.start(&Request { slot, write, offset: place * bytes as u64, length: bytes });
            started += 1;
        }
        disk.wait(&mut done)?;
        let now = Instant::now();
        for (slot, result) in done.drain(..) {
            worst = worst.max(now - started_at[slot]);
            errors += usize::from(usize::try_from(result) != Ok(bytes));
            ended += 1;
            free.push(slot);
        }
    }
    let micros = begin.elapsed().as_secs_f64() * 1e6 / count as f64;
    let worst = worst.as_micros();
    Ok((format!("load {mode} {size} {depth} {count} {micros:.3} {worst} {errors}"), errors == 0))
}

/// A neighbour: holds memory that does not compress well and goes over it again and again, until it
/// is killed.
fn hog(mib: &str, rate: &str) -> io::Result<(String, bool)> {
    const TICKS: usize = 50;
    let (pages, step) = (number(mib)? * 256, number(rate)? * 256 / TICKS);
    let mut random = Random::new(1);
    let mut memory = vec![0_u8; pages * BLOCK];
    for page in memory.chunks_exact_mut(BLOCK) {
        for word in page[..BLOCK / 2].chunks_exact_mut(8) {
            word.copy_from_slice(&random.next().to_ne_bytes());
        }
    }
    let mut at = 0;
    loop {
        for _ in 0..step {
            memory[at * BLOCK] = memory[at * BLOCK].wrapping_add(1);
            at = (at + 1) % pages.max(1);
        }
        std::thread::sleep(Duration::from_secs(1) / 50);
    }
}

/// Fills `buffer` with the content of version `version` of `block`.
fn fill(buffer: &mut [u8], block: u64, version: u64) {
    for (word, bytes) in (block * 512..).zip(buffer.chunks_exact_mut(8)) {
        bytes.copy_from_slice(&content(word, version).to_ne_bytes());
    }
}

fn holds(buffer: &[u8], block: u64, version: u64) -> bool {
    let mut words = (block * 512..).zip(buffer.chunks_exact(8));
    // A block never written by this run may hold anything.
    version == 0 || words.all(|(word, bytes)| bytes == content(word, version).to_ne_bytes())
}

fn content(word: u64, version: u64) -> u64 {
    word.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(version)
}

fn churn(device: &str, depth: &str, seconds: &str, seed: &str) -> io::Result<(String, bool)> {
    let (depth, seconds) = (number(depth)?, number(seconds)?);
    let mut random = Random::new(number(seed)? as u64);
    let mut disk = Disk::open(device, SLOT * BLOCK, depth)?;
    let blocks = (disk.bytes / BLOCK as u64).min(CHURN_BLOCKS);
    let areas = index(blocks) / SLOT;
    let mut versions = vec![0_u64; areas * SLOT];
    let mut flying: Vec<Option<(bool, usize, usize)>> = vec![None; depth];
    let mut busy = vec![false; areas];
    let (mut count, mut errors, mut wrong, mut version) = (0_u64, 0_u64, 0_u64, 0_u64);
    let mut done = Vec::with_capacity(depth);
    let end = Instant::now() + Duration::from_secs(seconds as u64);
    loop {
        let over = Instant::now() >= end;
        for (slot, flight) in flying.iter_mut().enumerate() {
            if over || flight.is_some() {
                continue;
            }
            let area = index(random.below(areas as u64));
            if busy[area] {
                continue;
            }
            busy[area] = true;
            let from = index(random.below(SLOT as u64));
            let length = 1 + index(random.below((SLOT - from) as u64));
            let first = area * SLOT + from;
            let write = random.below(2) == 0;
            if write {
                version += 1;
                for (n, block) in (first..first + length).enumerate() {
                    versions[block] = version;
                    let whole = disk.buffer(slot, length * BLOCK);
                    fill(&mut whole[n * BLOCK..][..BLOCK], block as u64, version);
                }
            }
            *flight = Some((write, first, length));
            let (offset, length) = ((first * BLOCK) as u64, length * BLOCK);
            disk.start(&Request { slot, write, offset, length });
        }
        if flying.iter().all(Option::is_none) {
            if over {
                break;
            }
            continue;
        }
        disk.wait(&mut done)?;
        for &(slot, result) in &done {
            let Some((write, first, length)) = flying[slot].take() else { continue };
            busy[first / SLOT] = false;
            count += 1;
            if usize::try_from(result) != Ok(length * BLOCK) {
                errors += 1;
            } else if !write {
                for n in 0..length {
                    let block = first + n;
                    let bytes = &disk.buffer(slot, length * BLOCK)[n * BLOCK..][..BLOCK];
                    wrong += u64::from(!holds(bytes, block as u64, versions[block]));
                }
            }
        }
    }
    Ok((format!("churn {count} {errors} {wrong}"), errors + wrong == 0))
}
