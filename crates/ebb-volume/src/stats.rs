//! Counters of one volume: written by the workers that serve it, read by whoever shows them.

use std::sync::atomic::{AtomicU64, Ordering};

use ebb_store::Operation;

const OPERATIONS: usize = 7;

/// Counters of one kind of operation since the volume was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperationStats {
    /// Requests that ended, well or not.
    pub requests: u64,
    /// Bytes of those that ended well.
    pub bytes: u64,
    /// Requests that failed in the store (not those refused by the checks).
    pub errors: u64,
}

#[derive(Debug, Default)]
struct Cells {
    requests: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
}

/// Counters of a volume by operation.
#[derive(Debug, Default)]
pub struct VolumeStats {
    cells: [Cells; OPERATIONS],
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
    pub(crate) fn count(&self, operation: Operation, length: u64, ok: bool) {
        let cells = &self.cells[index(operation)];
        cells.requests.fetch_add(1, Ordering::Relaxed);
        let (cell, amount) = if ok { (&cells.bytes, length) } else { (&cells.errors, 1) };
        cell.fetch_add(amount, Ordering::Relaxed);
    }

    /// Requests that changed data, or may have.
    pub(crate) fn changes(&self) -> u64 {
        let of = |operation| self.cells[index(operation)].requests.load(Ordering::Relaxed);
        let all = [Operation::Write, Operation::Discard, Operation::WriteZeroes];
        all.into_iter().map(of).fold(0, u64::wrapping_add)
    }

    /// The counters of one kind of operation.
    pub fn of(&self, operation: Operation) -> OperationStats {
        let cells = &self.cells[index(operation)];
        OperationStats {
            requests: cells.requests.load(Ordering::Relaxed),
            bytes: cells.bytes.load(Ordering::Relaxed),
            errors: cells.errors.load(Ordering::Relaxed),
        }
    }
}
