//! A worker in a simulation: on the simulation's thread, in its time, its tasks in an order that a seed
//! decides (feature `sim`).
//!
//! The ring, its operations and the sockets behind them are the real ones. What makes a run repeatable
//! is that nothing of it happens on another thread: sockets and eventfds of one thread complete within
//! the call that fills them or in the next look at the ring. Operations the kernel hands to threads of its
//! own (files, `fdatasync`) are not repeatable: a simulation uses stores in memory.
//!
//! # Invariants
//! - Time stands still while a worker turns: who waits for time waits until the simulation moves the clock
//!   ([`ebb_mem::clock::set`]).
//! - A thread has one worker at a time. Dropping it is what a kill is to a process: its tasks are dropped,
//!   and nothing is flushed.

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use ebb_mem::Memory;

use crate::worker::{Io, Turned, WorkerHandle};

thread_local! {
    static ORDER: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Has the tasks of this thread run in an order that `seed` decides; `None`: as they become ready.
pub fn set_order(seed: Option<u64>) {
    ORDER.set(seed);
}

/// One of `count`, if there is a choice and a seed.
pub(crate) fn choose(count: usize) -> Option<usize> {
    let seed = ORDER.get().filter(|_| count > 1)?;
    // SplitMix64 (Steele, Lea, Flood 2014).
    let seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    ORDER.set(Some(seed));
    let mixed = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    usize::try_from((mixed ^ (mixed >> 31)) % count as u64).ok()
}

/// See the module.
pub struct SimWorker(Turned);

impl SimWorker {
    /// The worker of this thread.
    ///
    /// # Errors
    /// As [`crate::Worker::start`].
    pub fn new(name: &str, memory: &Arc<Memory>) -> io::Result<SimWorker> {
        Turned::new(name, memory).map(SimWorker)
    }

    /// Its tasks' way to it.
    #[must_use]
    pub fn io(&self) -> &Io {
        &self.0.io
    }

    /// A handle as other threads have one. Its `block_on` must not be called: nobody would turn.
    #[must_use]
    pub fn handle(&self) -> WorkerHandle {
        self.0.handle()
    }

    /// One turn of its loop. False if there was nothing to do.
    pub fn turn(&mut self) -> bool {
        self.0.turn()
    }

    /// When it must turn again if nothing happens before.
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
