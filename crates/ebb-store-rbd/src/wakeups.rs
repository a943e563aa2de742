//! The eventfd of each worker with requests at librbd, by which other threads wake its task.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use ebb_io::Fd;
use ebb_sandbox::threads;
use rustix::event::{EventfdFlags, eventfd};

/// The wake-up of one worker.
#[derive(Debug)]
pub(crate) struct WorkerWakeup {
    event: Fd,
    /// A store was aborted, or went offline.
    ends: AtomicBool,
}

/// Those of all workers.
static WAKEUPS: Mutex<Vec<Weak<WorkerWakeup>>> = Mutex::new(Vec::new());

impl WorkerWakeup {
    pub(crate) fn new() -> std::io::Result<Arc<WorkerWakeup>> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        // Once per worker, which may not make it.
        let event = ebb_io::fd_from(threads::call(move || eventfd(0, flags))??);
        let wakeup = Arc::new(WorkerWakeup { event, ends: AtomicBool::new(false) });
        // A list of pointers: it is valid also after a panic of another thread.
        let mut all = WAKEUPS.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|known| known.strong_count() > 0);
        all.push(Arc::downgrade(&wakeup));
        Ok(wakeup)
    }

    /// What the worker waits for.
    pub(crate) fn event(&self) -> &Fd {
        &self.event
    }

    /// Wakes the worker's task. It neither allocates nor waits.
    pub(crate) fn wake(&self) {
        // EAGAIN means that it is woken already.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// Takes the wake-ups so far. Returns whether requests may have to end.
    pub(crate) fn take(&self) -> bool {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.event, &mut count);
        self.ends.swap(false, Ordering::AcqRel)
    }
}

/// Makes all workers look at their requests in flight, because a store was aborted or went offline.
pub(crate) fn end_requests() {
    let all = WAKEUPS.lock().unwrap_or_else(PoisonError::into_inner);
    for wakeup in all.iter().filter_map(Weak::upgrade) {
        wakeup.ends.store(true, Ordering::Release);
        wakeup.wake();
    }
}
