//! A worker in a simulation: on the simulation's thread, with the simulation's clock, and with an order of tasks
//! that a seed determines (feature `sim`).
//!
//! The ring, its operations and the sockets are the real ones. A run is repeatable because it uses one
//! thread only: sockets and eventfds of one thread complete within
//! the call that fills them or when completions are read next. Operations that the kernel executes on its own
//! threads (files, `fdatasync`) are not repeatable: a simulation uses stores in memory.
//!
//! # Invariants
//! - Time does not pass during an iteration of the worker's loop: timers wait until the simulation advances the clock
//!   ([`ebb_mem::clock::set`]).
//! - A thread has one worker at a time. Dropping it corresponds to killing a process: its tasks are dropped,
//!   and nothing is flushed.

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use ebb_mem::Memory;
use ebb_mem::random::{STEP, mix};

use crate::worker::{Io, SteppedWorker, WorkerHandle};

thread_local! {
    static ORDER: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Makes the tasks of this thread run in an order that `seed` determines; `None`: in the order they become ready.
pub fn set_order(seed: Option<u64>) {
    ORDER.set(seed);
}

/// A number below `count`, if there is a choice and a seed.
pub(crate) fn choose(count: usize) -> Option<usize> {
    let seed = ORDER.get().filter(|_| count > 1)?;
    let seed = seed.wrapping_add(STEP);
    ORDER.set(Some(seed));
    usize::try_from(mix(seed) % count as u64).ok()
}

/// A worker that the simulation runs on its own thread.
pub struct SimWorker(SteppedWorker);

impl SimWorker {
    /// The worker of this thread.
    ///
    /// # Errors
    /// As [`crate::Worker::start`].
    pub fn new(name: &str, memory: &Arc<Memory>) -> io::Result<SimWorker> {
        SteppedWorker::new(name, memory).map(SimWorker)
    }

    /// The interface for its tasks.
    #[must_use]
    pub fn io(&self) -> &Io {
        &self.0.io
    }

    /// A handle as other threads use it. Its `block_on` must not be called: the worker would not run meanwhile.
    #[must_use]
    pub fn handle(&self) -> WorkerHandle {
        self.0.handle()
    }

    /// Runs one iteration of its loop. False if there was nothing to do.
    pub fn iterate(&mut self) -> bool {
        self.0.iterate()
    }

    /// As [`SimWorker::iterate`], and sleeps in the ring until a completion arrives if there is
    /// nothing to do, as a worker's thread does. Then runs the tasks that are ready: if it sleeps
    /// next, it has done all it can.
    pub fn iterate_or_sleep(&mut self) {
        self.0.iterate_or_sleep();
    }

    /// When the next iteration is due if nothing else makes one necessary before.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.0.next_deadline()
    }
}

impl std::fmt::Debug for SimWorker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimWorker").finish_non_exhaustive()
    }
}
