//! A worker without a thread, for simulations.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use ebb_mem::Memory;
use ebb_param::Parameter;

use super::{Io, WorkerHandle, run_ready};
use crate::busy_poll::PollParameters;
use crate::remote::{READY, WORKER, WorkerRemote};
use crate::ring::IoRing;

/// A worker whose owner runs each iteration, on the owner's thread: see [`crate::sim`].
pub(crate) struct SteppedWorker {
    pub(crate) io: Io,
    rearm: bool,
}

impl SteppedWorker {
    pub(crate) fn new(name: &str, memory: &Arc<Memory>) -> io::Result<SteppedWorker> {
        assert_eq!(WORKER.get(), 0, "one worker on a thread at a time");
        let owner = memory.owner(name).map_err(io::Error::other)?;
        let never = Arc::new(PollParameters::new(Parameter::new(0)));
        let io = Io::new(IoRing::new(false)?, WorkerRemote::new()?, (memory, owner), never);
        Ok(SteppedWorker { io, rearm: true })
    }

    pub(crate) fn handle(&self) -> WorkerHandle {
        WorkerHandle(self.io.0.shared.clone())
    }

    pub(crate) fn iterate(&mut self) -> bool {
        self.io.iterate(&mut self.rearm, false)
    }

    pub(crate) fn iterate_or_sleep(&mut self) {
        self.io.iterate(&mut self.rearm, true);
        run_ready();
    }

    /// When there is something to do, if nothing else happens before.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let now = ebb_mem::clock::now();
        // A timer that fired at the end of an iteration has woken its task.
        let is_ready = READY.with_borrow(|ready| !ready.is_empty());
        if is_ready { Some(now) } else { self.io.next_deadline(now) }
    }
}

impl Drop for SteppedWorker {
    fn drop(&mut self) {
        self.io.wind_down();
        READY.with_borrow_mut(VecDeque::clear);
        WORKER.set(0);
    }
}
