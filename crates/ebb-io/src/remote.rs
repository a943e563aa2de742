//! The part of a worker that other threads use: a locked inbox and an eventfd, which are not on any data path; and the
//! run queue, which only the worker's own thread uses.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_task::Runnable;

use crate::worker::Io;

pub(crate) type Starter = Box<dyn FnOnce(&Io) + Send>;

thread_local! {
    /// Which worker runs on this thread (0: none), and its run queue.
    pub(crate) static WORKER: Cell<u64> = const { Cell::new(0) };
    pub(crate) static READY: RefCell<VecDeque<Runnable>> = const { RefCell::new(VecDeque::new()) };
}

/// The part of a worker that other threads use.
pub(crate) struct WorkerRemote {
    pub(crate) id: u64,
    pub(crate) wake: OwnedFd,
    inbox: Mutex<Inbox>,
    pub(crate) stop: AtomicBool,
}

#[derive(Default)]
pub(crate) struct Inbox {
    pub(crate) runnables: Vec<Runnable>,
    pub(crate) starters: Vec<Starter>,
    /// The worker has stopped: new work is dropped.
    pub(crate) closed: bool,
}

impl WorkerRemote {
    pub(crate) fn new() -> io::Result<Arc<WorkerRemote>> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // SAFETY: no preconditions; the result is checked.
        let wake = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if wake < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor, owned here only.
        let wake = unsafe { OwnedFd::from_raw_fd(wake) };
        Ok(Arc::new(WorkerRemote {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            wake,
            inbox: Mutex::default(),
            stop: AtomicBool::new(false),
        }))
    }

    pub(crate) fn schedule(&self, runnable: Runnable) {
        if WORKER.try_with(Cell::get) == Ok(self.id) {
            // While the thread ends, the queue may not be accessible; then the task is dropped.
            let mut pending = Some(runnable);
            let _ = READY.try_with(|ready| {
                if let Ok(mut ready) = ready.try_borrow_mut() {
                    ready.extend(pending.take());
                }
            });
            return;
        }
        self.inbox().runnables.push(runnable);
        self.signal_wake();
    }

    pub(crate) fn start(&self, starter: Starter) {
        {
            let mut inbox = self.inbox();
            if inbox.closed {
                drop(inbox);
                return drop(starter);
            }
            inbox.starters.push(starter);
        }
        self.signal_wake();
    }

    pub(crate) fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn signal_wake(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight readable bytes. EAGAIN (a full counter) means that a wake-up is pending already.
        unsafe { libc::write(self.wake.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }
}
