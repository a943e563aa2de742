//! Threads for calls that may block for as long as a disk or a server hangs: opening stores, and the state directory.
//!
//! # Invariants
//! - A call begins at once: on a thread that is idle, or on a new one. One that hangs delays no other.
//! - A thread that was idle for [`IDLE`] ends. Until then the next call does not pay for a thread: making and ending one
//!   interrupts every other thread of the process, since its stack is mapped and unmapped.

use std::collections::VecDeque;
use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long a thread waits for another call.
const IDLE: Duration = Duration::from_secs(5);
/// Enough for a TLS handshake.
const STACK_BYTES: usize = 512 << 10;

type Call = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Threads {
    calls: VecDeque<Call>,
    /// Threads that wait for calls.
    idle: usize,
}

static THREADS: Mutex<Threads> = Mutex::new(Threads { calls: VecDeque::new(), idle: 0 });
static MORE: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, Threads> {
    THREADS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a call on a helper thread. Does not wait for it.
///
/// # Errors
/// If there is no idle thread, and no new one can be started; then the call is dropped.
pub(crate) fn run(call: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let mut threads = lock();
    if threads.idle > threads.calls.len() {
        threads.calls.push_back(Box::new(call));
        drop(threads);
        MORE.notify_one();
        return Ok(());
    }
    drop(threads);
    let thread = std::thread::Builder::new().name("ebbd-helper".into()).stack_size(STACK_BYTES);
    let serve = move || {
        call();
        while let Some(next) = next_call() {
            next();
        }
    };
    thread.spawn(serve).map(drop)
}

/// Waits for a call; `None` if there was none for [`IDLE`].
fn next_call() -> Option<Call> {
    let mut threads = lock();
    threads.idle += 1;
    let waited = MORE.wait_timeout_while(threads, IDLE, |threads| threads.calls.is_empty());
    let (mut threads, _) = waited.unwrap_or_else(PoisonError::into_inner);
    threads.idle -= 1;
    threads.calls.pop_front()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread::ThreadId;

    use super::*;

    fn thread_of_a_call() -> ThreadId {
        let (sender, receiver) = channel();
        run(move || sender.send(std::thread::current().id()).unwrap()).unwrap();
        receiver.recv().unwrap()
    }

    #[test]
    fn calls_that_hang_delay_no_other_and_threads_are_used_again() {
        let (release, hang) = channel::<()>();
        let hang = std::sync::Arc::new(Mutex::new(hang));
        for _ in 0..8 {
            let hang = hang.clone();
            run(move || assert!(hang.lock().unwrap().recv().is_err())).unwrap();
        }
        // Each of these would wait for ever behind one that hangs.
        let used: Vec<ThreadId> = (0..200).map(|_| thread_of_a_call()).collect();
        drop(release);
        let mut different = used.clone();
        different.sort_by_key(|id| format!("{id:?}"));
        different.dedup();
        assert!(different.len() < 200, "each call has had a thread of its own");
    }
}
