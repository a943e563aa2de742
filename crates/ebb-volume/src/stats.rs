//! Counters of one volume, written by the workers that serve it.

use std::sync::atomic::{AtomicU64, Ordering};

use ebb_store::Operation;

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
    requests: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
}

/// Counters of a volume by operation.
#[derive(Debug, Default)]
pub struct VolumeStats {
    counters: [OperationCounters; OPERATIONS],
}

fn index(operation: Operation) -> usize {
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
    #[inline]
    pub(crate) fn count(&self, operation: Operation, length: u64, ok: bool) {
        let counters = &self.counters[index(operation)];
        counters.requests.fetch_add(1, Ordering::Relaxed);
        let (cell, amount) = if ok { (&counters.bytes, length) } else { (&counters.errors, 1) };
        cell.fetch_add(amount, Ordering::Relaxed);
    }

    /// The counters of one kind of operation.
    pub fn of(&self, operation: Operation) -> OperationStats {
        let counters = &self.counters[index(operation)];
        OperationStats {
            requests: counters.requests.load(Ordering::Relaxed),
            bytes: counters.bytes.load(Ordering::Relaxed),
            errors: counters.errors.load(Ordering::Relaxed),
        }
    }
}
