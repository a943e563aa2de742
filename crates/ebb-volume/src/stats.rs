//! Counters and times of one volume, written by the workers that serve it.
//!
//! Requests are counted by the histogram of their times: a request costs two atomic additions.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ebb_block::{Io, Operation};

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
    bytes: AtomicU64,
    errors: AtomicU64,
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

/// Counters of a volume by operation.
#[derive(Debug, Default)]
pub struct VolumeStats {
    counters: [OperationCounters; OPERATIONS],
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
    #[inline]
    pub(crate) fn complete(&self, io: &Io, request: Started, length: u64, ok: bool) -> Duration {
        let counters = &self.counters[index(request.operation)];
        let service = io.recent_time().saturating_duration_since(request.at);
        counters.times.service.record(service);
        let (cell, amount) = if ok { (&counters.bytes, length) } else { (&counters.errors, 1) };
        cell.fetch_add(amount, Ordering::Relaxed);
        service
    }

    /// Notes that the volume gets a request now that `arrived` earlier: it waited for memory, for a free task, or for
    /// its data.
    #[inline]
    pub fn note_queued(&self, io: &Io, operation: Operation, arrived: Instant) {
        self.counters[index(operation)].times.note_queued(arrived, io.iteration_start());
    }

    /// The counters of one kind of operation.
    pub fn of(&self, operation: Operation) -> OperationStats {
        let counters = &self.counters[index(operation)];
        OperationStats {
            requests: counters.times.service.count(),
            bytes: counters.bytes.load(Ordering::Relaxed),
            errors: counters.errors.load(Ordering::Relaxed),
        }
    }

    /// How long requests took, from the worker's loop iteration in which the volume got them until they completed.
    pub fn service_times(&self, operation: Operation) -> LatencySnapshot {
        self.counters[index(operation)].times.service.snapshot()
    }

    /// How long requests waited between their arrival and the volume; without those that did not wait.
    pub fn queued_times(&self, operation: Operation) -> LatencySnapshot {
        self.counters[index(operation)].times.queued.snapshot()
    }
}
