//! Threads for what a worker may not do itself, and for calls that may block for as long as a disk or a server hangs:
//! opening stores, the state directory, system calls for which the ring has no operation.
//!
//! # Invariants
//! - A thread that is made here for a worker has not the worker's restrictions: a thread that has none makes it.
//! - A call of [`run`] begins at once: on a thread that is idle, or on a new one. One that hangs delays no other.
//! - A thread that was idle for [`IDLE`] ends. Until then the next call does not pay for a thread: making and ending one
//!   interrupts every other thread of the process, since its stack is mapped and unmapped.

#[cfg(feature = "sim")]
pub mod sim;

use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::Duration;

/// How long a thread waits for another call.
const IDLE: Duration = Duration::from_secs(5);
/// Enough for a TLS handshake.
const STACK_BYTES: usize = 512 << 10;
/// Enough for making threads.
const MAKER_STACK_BYTES: usize = 128 << 10;

type Call = Box<dyn FnOnce() + Send>;

/// A thread that the maker is to make.
struct Order {
    builder: Builder,
    run: Call,
    made: SyncSender<io::Result<()>>,
}

/// The thread that makes threads for workers, as soon as there are workers with restrictions.
static MAKER: Mutex<Option<Sender<Order>>> = Mutex::new(None);

thread_local! {
    /// This thread has restrictions that a thread made by it would have, too.
    static RESTRICTED: Cell<bool> = const { Cell::new(false) };
}

#[derive(Default)]
struct Threads {
    calls: VecDeque<Call>,
    /// Threads that wait for calls.
    idle: usize,
}

static THREADS: Mutex<Threads> = Mutex::new(Threads { calls: VecDeque::new(), idle: 0 });
static MORE: Condvar = Condvar::new();

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the thread that makes threads for workers, unless it runs. To be called before a worker is restricted, by a
/// thread that is not.
pub(crate) fn start_maker() -> io::Result<()> {
    let mut maker = lock(&MAKER);
    if maker.is_some() {
        return Ok(());
    }
    let (sender, orders) = channel::<Order>();
    let make = move || {
        for Order { builder, run, made } in orders {
            // Who has ordered it waits for this.
            let _ = made.send(builder.spawn(run).map(drop));
        }
    };
    Builder::new().name("ebbd-threads".into()).stack_size(MAKER_STACK_BYTES).spawn(make)?;
    *maker = Some(sender);
    Ok(())
}

/// From now on the threads that this thread wants are made by another one.
pub(crate) fn note_restricted() {
    RESTRICTED.set(true);
}

/// Makes a thread that has not the restrictions of a worker, whichever thread calls this. It is not joined.
///
/// # Errors
/// Those of making a thread; then `run` is dropped.
pub fn spawn(builder: Builder, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    if !RESTRICTED.get() {
        return builder.spawn(run).map(drop);
    }
    let maker = lock(&MAKER).clone();
    let gone = || io::Error::other("the thread that makes threads has ended");
    let (made, waits) = sync_channel(1);
    let order = Order { builder, run: Box::new(run), made };
    maker.ok_or_else(gone)?.send(order).map_err(|_| gone())?;
    waits.recv().map_err(|_| gone())?
}

/// Runs a call on a helper thread. Does not wait for it.
///
/// # Errors
/// If there is no idle thread, and no new one can be started; then the call is dropped.
pub fn run(call: impl FnOnce() + Send + 'static) -> io::Result<()> {
    #[cfg(feature = "sim")]
    let Some(call) = sim::keep(call) else { return Ok(()) };
    let mut threads = lock(&THREADS);
    if threads.idle > threads.calls.len() {
        threads.calls.push_back(Box::new(call));
        drop(threads);
        MORE.notify_one();
        return Ok(());
    }
    drop(threads);
    let serve = move || {
        call();
        while let Some(next) = next_call() {
            next();
        }
    };
    spawn(Builder::new().name("ebbd-helper".into()).stack_size(STACK_BYTES), serve)
}

/// Makes a rare system call that returns at once: itself, or, on a worker that may not make it, on a helper thread, for
/// which it waits.
///
/// # Errors
/// If no thread can be started.
pub fn call<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    if !RESTRICTED.get() {
        return Ok(call());
    }
    let (sender, result) = sync_channel(1);
    run(move || drop(sender.send(call())))?;
    result.recv().map_err(|_| io::Error::other("a helper thread has ended"))
}

/// Waits for a call; `None` if there was none for [`IDLE`].
fn next_call() -> Option<Call> {
    let mut threads = lock(&THREADS);
    threads.idle += 1;
    let waited = MORE.wait_timeout_while(threads, IDLE, |threads| threads.calls.is_empty());
    let (mut threads, _) = waited.unwrap_or_else(PoisonError::into_inner);
    threads.idle -= 1;
    threads.calls.pop_front()
}

#[cfg(test)]
mod tests {
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

    /// The thread that made the calling one is not known, so that the maker's own mark stands for it.
    #[test]
    fn a_restricted_thread_has_its_threads_made_by_another() {
        let refused = std::thread::spawn(|| {
            note_restricted();
            // No maker was started yet in this process, or it was by another test: both are well.
            start_maker().unwrap();
            let (sender, receiver) = channel();
            let builder = Builder::new().name("made".into());
            spawn(builder, move || sender.send(RESTRICTED.get()).unwrap()).unwrap();
            let made = receiver.recv().unwrap();
            let own = std::thread::current().id();
            (made, call(move || std::thread::current().id() != own).unwrap())
        });
        assert_eq!(refused.join().unwrap(), (false, true));
    }

    #[test]
    fn without_restrictions_a_rare_call_is_made_at_once() {
        let own = std::thread::current().id();
        assert!(call(move || std::thread::current().id() == own).unwrap());
    }
}
