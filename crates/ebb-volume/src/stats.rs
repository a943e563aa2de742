//! Counters and times of one volume, written by the workers that serve it.
//!
//! Requests are counted by the histogram of their times: a request costs two additions, in a slot of its worker.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use ebb_block::{Io, Operation};
use ebb_io::{PerWorker, WorkerCount};

use crate::latency::{LatencySnapshot, OperationTimes};

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

/// Counters of a volume by operation. Those of a worker's slot are allocated with its first request.
#[derive(Debug, Default)]
pub struct VolumeStats {
    counters: PerWorker<OnceLock<Box<WorkerCounters>>>,
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
        let counters = self.here(io, request.operation);
        let service = io.recent_time().saturating_duration_since(request.at);
        counters.times.service.record(io.slot(), service);
        let (cell, amount) = if ok { (&counters.bytes, length) } else { (&counters.errors, 1) };
        cell.add(io.slot(), amount);
        service
    }

    /// Notes that the volume gets a request now that `arrived` earlier: it waited for memory, for a free task, or for
    /// its data.
    #[inline]
    pub fn note_queued(&self, io: &Io, operation: Operation, arrived: Instant) {
        self.here(io, operation).times.note_queued(io.slot(), arrived, io.iteration_start());
    }

    /// The counters of one kind of operation that this worker writes.
    #[inline]
    fn here(&self, io: &Io, operation: Operation) -> &OperationCounters {
        let slot = &self.counters[io.slot()];
        let counters = match slot.get() {
            Some(counters) => counters,
            None => Self::allocate(slot),
        };
        &counters.0[index(operation)]
    }

    #[cold]
    #[inline(never)]
    fn allocate(slot: &OnceLock<Box<WorkerCounters>>) -> &WorkerCounters {
        slot.get_or_init(Box::default)
    }

    /// The counters of one kind of operation of all slots.
    fn all(&self, operation: Operation) -> impl Iterator<Item = &OperationCounters> {
        self.counters.iter().filter_map(|slot| slot.get()).map(move |all| &all.0[index(operation)])
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
        let all = self.counters.iter().filter_map(|slot| slot.get()).flat_map(|all| all.0.iter());
        all.fold(0u64, |sum, one| sum.wrapping_add(one.bytes.get()).wrapping_add(one.errors.get()))
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
