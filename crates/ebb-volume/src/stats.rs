//! Counters and times of one volume, written by the workers that serve it.
//!
//! Requests are counted by the histogram of their times: a request costs two additions, in a slot of its worker.
//!
//! A volume can be put to rest, and its next request wakes it ([`VolumeStats::rest`]), so that samplers need not look at
//! volumes without requests. A request reads a flag for this, in the line of its worker's slot that it reads anyway.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ebb_block::{Histogram, Io, LatencySnapshot, Operation};
use ebb_io::{PerWorker, WorkerCount, WorkerSlot};

const OPERATIONS: usize = 7;

/// Counters of one kind of operation since the volume was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperationStats {
    /// Requests that completed, with or without success.
    pub requests: u64,
    /// Bytes of the successful ones.
    pub bytes: u64,
    /// Requests that failed in the store (not those refused by the checks).
    pub errors: u64,
}

/// The times of one kind of operation.
#[derive(Debug, Default)]
struct OperationTimes {
    /// From the worker's loop iteration in which the volume got the request until it completed.
    service: Histogram,
    /// From the arrival of the request until the volume got it; only of requests that waited.
    queued: Histogram,
}

impl OperationTimes {
    #[inline]
    fn note_queued(&self, slot: WorkerSlot, arrived: Instant, now: Instant) {
        if now > arrived {
            self.queued.record(slot, now - arrived);
        }
    }
}

#[derive(Debug, Default)]
struct OperationCounters {
    times: OperationTimes,
    bytes: WorkerCount,
    errors: WorkerCount,
}

/// A request that the volume has begun.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Started {
    operation: Operation,
    at: Instant,
}

impl Started {
    #[inline]
    pub(crate) fn new(io: &Io, operation: Operation) -> Started {
        Started { operation, at: io.iteration_start() }
    }

    #[inline]
    pub(crate) fn operation(self) -> Operation {
        self.operation
    }
}

/// What the workers of one slot have counted.
#[derive(Debug, Default)]
#[repr(align(64))]
struct WorkerCounters([OperationCounters; OPERATIONS]);

/// How often a volume of this process was woken.
static WOKEN: AtomicU64 = AtomicU64::new(0);

/// What the workers of one slot share with samplers.
#[derive(Debug, Default)]
struct StatsSlot {
    counters: OnceLock<Box<WorkerCounters>>,
    /// A request has completed since the volume was put to rest.
    awake: AtomicBool,
}

impl StatsSlot {
    #[cold]
    #[inline(never)]
    fn wake(&self) {
        self.awake.store(true, Ordering::Relaxed);
        WOKEN.fetch_add(1, Ordering::Release);
    }
}

/// Counters of a volume by operation. Those of a worker's slot are allocated with its first request.
#[derive(Debug, Default)]
pub struct VolumeStats {
    counters: PerWorker<StatsSlot>,
}

/// The number of an operation, also in tracepoints.
pub(crate) fn index(operation: Operation) -> usize {
    match operation {
        Operation::Read => 0,
        Operation::Write => 1,
        Operation::Flush => 2,
        Operation::Discard => 3,
        Operation::WriteZeroes => 4,
        Operation::Extents => 5,
        Operation::Prefetch => 6,
    }
}

impl VolumeStats {
    /// Counts a request that completes now; returns its service time.
    #[inline(always)]
    pub(crate) fn complete(&self, io: &Io, request: Started, length: u64, ok: bool) -> Duration {
        let slot = &self.counters[io.slot()];
        let counters = Self::here(slot, request.operation);
        let service = io.recent_time().saturating_duration_since(request.at);
        counters.times.service.record(io.slot(), service);
        let (cell, amount) = if ok { (&counters.bytes, length) } else { (&counters.errors, 1) };
        cell.add(io.slot(), amount);
        // After the count: who sees the volume awake sees that, too.
        if !slot.awake.load(Ordering::Relaxed) {
            slot.wake();
        }
        service
    }

    /// Notes that the volume gets a request now that `arrived` earlier: it waited for memory, for a free task, or for
    /// its data.
    #[inline]
    pub fn note_queued(&self, io: &Io, operation: Operation, arrived: Instant) {
        let counters = Self::here(&self.counters[io.slot()], operation);
        counters.times.note_queued(io.slot(), arrived, io.iteration_start());
    }

    /// The counters of one kind of operation that this worker writes.
    #[inline]
    fn here(slot: &StatsSlot, operation: Operation) -> &OperationCounters {
        let counters = match slot.counters.get() {
            Some(counters) => counters,
            None => Self::allocate(&slot.counters),
        };
        &counters.0[index(operation)]
    }

    #[cold]
    #[inline(never)]
    fn allocate(slot: &OnceLock<Box<WorkerCounters>>) -> &WorkerCounters {
        slot.get_or_init(Box::default)
    }

    fn slots(&self) -> impl Iterator<Item = &WorkerCounters> {
        self.counters.iter().filter_map(|slot| slot.counters.get()).map(Box::as_ref)
    }

    /// The counters of one kind of operation of all slots.
    fn all(&self, operation: Operation) -> impl Iterator<Item = &OperationCounters> {
        self.slots().map(move |all| &all.0[index(operation)])
    }

    /// The counters of one kind of operation.
    pub fn of(&self, operation: Operation) -> OperationStats {
        self.all(operation).fold(OperationStats::default(), |sum, counters| OperationStats {
            requests: sum.requests + counters.times.service.count(),
            bytes: sum.bytes.wrapping_add(counters.bytes.get()),
            errors: sum.errors + counters.errors.get(),
        })
    }

    /// A number that changes when a request with data completes, and when one fails. It is cheap: it reads no histogram.
    pub fn activity(&self) -> u64 {
        let all = self.slots().flat_map(|all| all.0.iter());
        all.fold(0u64, |sum, one| sum.wrapping_add(one.bytes.get()).wrapping_add(one.errors.get()))
    }

    /// Puts the volume to rest: its next request changes [`VolumeStats::woken`]. Returns whether it was awake. A request
    /// that completes at the same time may go unnoticed until the next one: so samplers look at volumes at rest
    /// sometimes, too.
    pub fn rest(&self) -> bool {
        let mut was_awake = false;
        for slot in self.counters.iter().filter(|slot| slot.awake.load(Ordering::Relaxed)) {
            slot.awake.store(false, Ordering::Relaxed);
            was_awake = true;
        }
        was_awake
    }

    /// A number that changes when a volume of this process wakes: a request of it completes while it is at rest, as
    /// volumes are at first.
    pub fn woken() -> u64 {
        WOKEN.load(Ordering::Acquire)
    }

    /// How long requests took, from the worker's loop iteration in which the volume got them until they completed.
    pub fn service_times(&self, operation: Operation) -> LatencySnapshot {
        LatencySnapshot::of(self.all(operation).map(|counters| &counters.times.service))
    }

    /// How long requests waited between their arrival and the volume; without those that did not wait.
    pub fn queued_times(&self, operation: Operation) -> LatencySnapshot {
        LatencySnapshot::of(self.all(operation).map(|counters| &counters.times.queued))
    }
}
