//! The client: keeps so many requests in flight in each queue, for a time or a number of requests, each queue on a thread
//! of its own as a guest with a processor for each.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use super::frontend::Frontend;
use super::ring::{DriverQueue, MOST_IN_FLIGHT};
use crate::bench::process;
use crate::harness::pattern::Random;

/// Until when a client runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum End {
    /// So long.
    Time(Duration),
    /// So many requests of each queue; no clock is read between them.
    Requests(u64),
}

/// A load.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// Writes, or reads.
    pub write: bool,
    /// Requests in flight in each queue, 1 to [`MOST_IN_FLIGHT`].
    pub depth: u16,
    /// Queues.
    pub queues: u16,
    /// Blocks of 4 KiB that are used, from the beginning of the disk: those that are read must begin with their numbers.
    /// 0: all, of a backend that stores nothing.
    pub blocks: u64,
    /// Requests of each queue before those that are measured, of one block after the other.
    pub warm: u64,
    /// Until when.
    pub end: End,
    /// The process whose processor time is measured.
    pub backend: Option<u32>,
}

/// What came of a load. `Display` gives the line that [`Outcome::value`] reads.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// Requests that were measured.
    pub requests: u64,
    /// Time of the requests, seconds.
    pub seconds: f64,
    /// Processor time of the backend, µs.
    pub cpu_us: f64,
    /// Time of each request, ns; with one in flight and an end in time only.
    latencies: Vec<u32>,
    /// Requests that failed.
    pub errors: u64,
    /// Blocks with other content.
    pub wrong: u64,
}

impl Outcome {
    /// Time of a request that so many percent of them did not exceed, µs; 0 if none was measured. Sorted before.
    fn percentile_us(&self, percent: usize) -> f64 {
        let at = self.latencies.len() * percent / 100;
        self.latencies.get(at).or(self.latencies.last()).map_or(0.0, |ns| f64::from(*ns) / 1e3)
    }

    fn add(&mut self, other: Outcome) {
        self.requests += other.requests;
        self.seconds = self.seconds.max(other.seconds);
        self.latencies.extend(other.latencies);
        self.errors += other.errors;
        self.wrong += other.wrong;
    }

    /// The number of a key in the line that an outcome is shown as.
    #[must_use]
    pub fn value(line: &str, key: &str) -> Option<f64> {
        let pair = |pair: &str| pair.split_once('=').filter(|(k, _)| *k == key)?.1.parse().ok();
        line.split_whitespace().find_map(pair)
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Outcome { requests, seconds, cpu_us, errors, wrong, .. } = self;
        let [p50, p99] = [50, 99].map(|percent| self.percentile_us(percent));
        write!(
            f,
            "requests={requests} seconds={seconds:.9} p50_us={p50:.3} p99_us={p99:.3} cpu_us={cpu_us} \
             errors={errors} wrong={wrong}"
        )
    }
}

/// Runs a load at the backend of this socket.
///
/// # Errors
/// The backend refuses or ends.
pub fn run(socket: &Path, load: &Load) -> io::Result<Outcome> {
    let frontend = Frontend::connect(socket, load.queues, load.write)?;
    let all = frontend.blocks;
    let blocks = if load.blocks == 0 { all } else { load.blocks.min(all) };
    let cpu_us = || -> io::Result<f64> {
        load.backend.map_or(Ok(0.0), |pid| process::cpu_us(pid).map_err(io::Error::other))
    };
    let mut queues = frontend.queues;
    let mut sum = Outcome::default();
    let warm = Barrier::new(queues.len() + 1);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (1..)
            .zip(&mut queues)
            .map(|(seed, queue)| {
                let mut driven = Driven::new(queue, load, blocks, seed);
                let warm = &warm;
                scope.spawn(move || {
                    let warmed = driven.drive(End::Requests(load.warm));
                    driven.next = None;
                    warm.wait();
                    warm.wait();
                    warmed.and_then(|_| driven.drive(load.end))
                })
            })
            .collect();
        warm.wait();
        let before = cpu_us();
        warm.wait();
        for thread in threads {
            let outcome = thread.join().map_err(|_| io::Error::other("a client's thread ended"))?;
            sum.add(outcome?);
        }
        sum.cpu_us = cpu_us()? - before?;
        Ok::<(), io::Error>(())
    })?;
    sum.latencies.sort_unstable();
    Ok(sum)
}

/// A queue under load.
struct Driven<'a> {
    queue: &'a mut DriverQueue,
    depth: u16,
    verified: bool,
    random: Random,
    /// The next block, as long as blocks are used in sequence.
    next: Option<u64>,
    blocks: u64,
    /// The block of each slot.
    block: Vec<u64>,
    done: Vec<u16>,
    outcome: Outcome,
}

impl<'a> Driven<'a> {
    fn new(queue: &'a mut DriverQueue, load: &Load, blocks: u64, seed: u64) -> Driven<'a> {
        Driven {
            queue,
            depth: load.depth.clamp(1, MOST_IN_FLIGHT),
            verified: load.blocks > 0 && !load.write,
            random: Random::new(seed),
            next: Some(0),
            blocks,
            block: vec![0; usize::from(MOST_IN_FLIGHT)],
            done: Vec::with_capacity(usize::from(MOST_IN_FLIGHT)),
            outcome: Outcome::default(),
        }
    }

    fn submit(&mut self, slot: u16) {
        let block = match &mut self.next {
            Some(next) => {
                *next += 1;
                (*next - 1) % self.blocks.max(1)
            }
            None => self.random.below(self.blocks),
        };
        self.block[usize::from(slot)] = block;
        self.queue.submit(slot, block);
    }

    /// Waits until at least one request is done; returns how many are.
    fn reap(&mut self) -> io::Result<u64> {
        self.done.clear();
        loop {
            self.outcome.errors += self.queue.reap(&mut self.done);
            if !self.done.is_empty() {
                break;
            }
            self.queue.wait()?;
        }
        if self.verified {
            let is_wrong =
                |slot: &&u16| self.queue.first_word(**slot) != self.block[usize::from(**slot)];
            self.outcome.wrong += self.done.iter().filter(is_wrong).count() as u64;
        }
        Ok(self.done.len() as u64)
    }

    /// Keeps requests in flight until the end, and waits for the last ones.
    fn drive(&mut self, end: End) -> io::Result<Outcome> {
        self.outcome = Outcome::default();
        let begin = Instant::now();
        let mut last = begin;
        (0..self.depth).for_each(|slot| self.submit(slot));
        self.queue.publish()?;
        let mut in_flight = u64::from(self.depth);
        loop {
            let done = self.reap()?;
            self.outcome.requests += done;
            in_flight -= done;
            let over = match end {
                End::Requests(most) => self.outcome.requests + in_flight >= most,
                End::Time(limit) => {
                    let now = Instant::now();
                    if self.depth == 1 {
                        let ns = u32::try_from((now - last).as_nanos()).unwrap_or(u32::MAX);
                        self.outcome.latencies.push(ns);
                    }
                    last = now;
                    now - begin >= limit
                }
            };
            if over {
                break;
            }
            for at in 0..self.done.len() {
                self.submit(self.done[at]);
            }
            in_flight += done;
            self.queue.publish()?;
        }
        let timed = matches!(end, End::Time(_));
        self.outcome.seconds = if timed { last - begin } else { begin.elapsed() }.as_secs_f64();
        while in_flight > 0 {
            in_flight -= self.reap()?;
        }
        Ok(std::mem::take(&mut self.outcome))
    }
}

/// Queues of a device that does nothing.
const IDLE_QUEUES: u16 = 2;
/// How often a connection to such a device is tried.
const CONNECTS: u32 = 10;

/// Connects to `disk0.sock`, `disk1.sock`, ... in a folder, and sends one request to each queue.
///
/// # Errors
/// A backend refuses, or does not answer.
pub fn connect_all(folder: &Path, count: usize) -> io::Result<Vec<Frontend>> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let most = rustix::process::Rlimit { current: limit.maximum, maximum: limit.maximum };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, most)?;
    let connect = |number: usize| {
        let path = folder.join(format!("disk{number}.sock"));
        // The daemon limits how many descriptors frontends take at a time: QEMU connects again, too, after a second.
        let again = (1..CONNECTS).find_map(|_| {
            let device = Frontend::connect(&path, IDLE_QUEUES, true).ok();
            if device.is_none() {
                std::thread::sleep(Duration::from_secs(1));
            }
            device
        });
        let mut device = again.map_or_else(|| Frontend::connect(&path, IDLE_QUEUES, true), Ok)?;
        match answers(&mut device) {
            true => Ok(device),
            false => Err(io::Error::other(format!("disk{number} fails a request"))),
        }
    };
    (0..count).map(connect).collect()
}

/// Whether each queue of a device completes a request.
pub fn answers(device: &mut Frontend) -> bool {
    let one = |queue: &mut DriverQueue| -> io::Result<bool> {
        queue.submit(0, 0);
        queue.publish()?;
        let mut done = Vec::new();
        loop {
            let failures = queue.reap(&mut done);
            if !done.is_empty() || failures > 0 {
                return Ok(failures == 0);
            }
            queue.wait()?;
        }
    };
    device.queues.iter_mut().all(|queue| matches!(one(queue), Ok(true)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_an_outcome_is_read_again() {
        let latencies = vec![1000, 2000, 3000, 4000];
        let outcome =
            Outcome { requests: 4, seconds: 0.5, cpu_us: 20.0, latencies, errors: 1, wrong: 2 };
        let line = outcome.to_string();
        let value = |key| Outcome::value(&line, key);
        assert_eq!(value("requests"), Some(4.0));
        assert_eq!(value("seconds"), Some(0.5));
        assert_eq!(value("p50_us"), Some(3.0));
        assert_eq!(value("p99_us"), Some(4.0));
        assert_eq!(value("cpu_us"), Some(20.0));
        assert_eq!((value("errors"), value("wrong"), value("none")), (Some(1.0), Some(2.0), None));
    }
}
