//! Busy polling before sleep, by counts: what is polled, when, and what it costs.
//!
//! A poll finds a request only if its client runs meanwhile. So the tests run one at a time, and
//! the worker and its client have a processor each, where the machine has two.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_io::{PollParameters, Worker, WorkerStats, fd_from};
use ebb_mem::{Memory, MemoryOptions};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Round trips after which a quick client was polled for at least once, also on a busy machine.
const MANY: usize = 20_000;

/// The processors of this process: one test uses them at a time.
static PROCESSORS: LazyLock<Mutex<CpuSet>> =
    LazyLock::new(|| Mutex::new(sched_getaffinity(None).unwrap()));

/// A worker on the first processor; this thread, its client, moves to the last one.
fn worker(poll_us: u32) -> (Worker, Arc<PollParameters>, MutexGuard<'static, CpuSet>) {
    let turn = PROCESSORS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut usable = (0..CpuSet::MAX_CPU).filter(|processor| turn.is_set(*processor));
    let first = usable.next().unwrap();
    let memory = Memory::new(MemoryOptions::new(64 << 20, Instant::now())).unwrap();
    let polling = Arc::new(PollParameters::unrestrained(poll_us));
    move_to(first);
    let worker = Worker::start_polling("poll", &memory, &polling).unwrap();
    let last = usable.next_back().unwrap_or(first);
    move_to(last);
    (worker, polling, turn)
}

/// Keeps this thread, and those that it starts, on one processor.
fn move_to(processor: usize) {
    let mut one = CpuSet::new();
    one.set(processor);
    sched_setaffinity(None, &one).unwrap();
}

fn stats(worker: &Worker) -> WorkerStats {
    worker.handle().block_on(|io| async move { io.stats() }).unwrap()
}

/// A server on the worker that returns each byte it receives, and its client.
fn echo(worker: &Worker) -> UnixStream {
    let (client, server) = UnixStream::pair().unwrap();
    worker.handle().spawn(move |io| async move {
        let fd = fd_from(server);
        let source = io.poll_source();
        let mut buf = io.pool().take(1).await;
        loop {
            source.wait();
            let (result, returned) = io.recv(&fd, buf, 0..1).await;
            source.note_requests(1);
            let mut message = Box::<ebb_io::Gather>::default();
            message.push_bytes(&returned[..1]);
            buf = returned;
            if !matches!(result, Ok(1)) || io.send(&fd, message).await.0.is_err() {
                return;
            }
        }
    });
    client
}

/// A request as of a client on another processor: the pause before it is longer than on the worker's own.
fn call(client: &mut UnixStream) {
    let since = Instant::now();
    while since.elapsed() < Duration::from_micros(30) {
        std::hint::spin_loop();
    }
    client.write_all(b"x").unwrap();
    client.read_exact(&mut [0]).unwrap();
}

/// Calls until the worker has polled successfully.
fn call_until_polled(worker: &Worker, client: &mut UnixStream) -> WorkerStats {
    let before = stats(worker).polls;
    for _ in 0..MANY {
        (0..10).for_each(|_| call(client));
        let now = stats(worker);
        if now.polls > before {
            return now;
        }
    }
    panic!("never polled: {:?}", stats(worker));
}

#[test]
fn a_quick_client_is_polled_for_and_a_quiet_one_is_not() {
    let (worker, _, _turn) = worker(1000);
    let mut client = echo(&worker);
    call_until_polled(&worker, &mut client);
    // The client is quiet from here on. The poll for it ends after 1 ms; until then it finds these queries instead.
    (0..1000).for_each(|_| {
        stats(&worker);
    });
    let quiet = stats(&worker);
    for _ in 0..1000 {
        let now = stats(&worker);
        assert_eq!((now.polls, now.unsuccessful_polls), (quiet.polls, quiet.unsuccessful_polls));
    }
}

#[test]
fn with_poll_us_0_there_is_one_system_call_per_request_and_no_poll() {
    let (worker, polling, _turn) = worker(1000);
    let mut client = echo(&worker);
    call_until_polled(&worker, &mut client);
    polling.poll_us.set(0);
    call(&mut client);
    call(&mut client);
    let before = stats(&worker);
    (0..2000).for_each(|_| call(&mut client));
    let after = stats(&worker);
    assert_eq!((after.polls, after.unsuccessful_polls), (before.polls, before.unsuccessful_polls));
    // One to wait for each request; the allowance is for the worker's timers.
    assert!(after.enters - before.enters <= 2000 + 200, "{before:?} {after:?}");
    polling.poll_us.set(1000);
    call_until_polled(&worker, &mut client);
}

#[test]
fn idle_connections_are_not_polled() {
    let (worker, _, _turn) = worker(1000);
    let mut quiet: Vec<UnixStream> = (0..200).map(|_| echo(&worker)).collect();
    call_until_polled(&worker, &mut quiet[0]);
    quiet.iter_mut().for_each(call);
    // The last poll ends after 1 ms; until then it finds these queries instead.
    (0..1000).for_each(|_| {
        stats(&worker);
    });
    let before = stats(&worker);
    for _ in 0..1000 {
        let now = stats(&worker);
        assert_eq!((now.polls, now.unsuccessful_polls), (before.polls, before.unsuccessful_polls));
    }
}

#[test]
fn the_worker_does_not_poll_while_tasks_are_ready() {
    let (worker, _, _turn) = worker(1000);
    let mut client = echo(&worker);
    call_until_polled(&worker, &mut client);
    let (before, after) = worker
        .handle()
        .block_on(|io| async move {
            let before = io.stats();
            for _ in 0..10_000 {
                io.yield_now().await;
            }
            (before, io.stats())
        })
        .unwrap();
    assert_eq!((before.polls, before.unsuccessful_polls), (after.polls, after.unsuccessful_polls));
}

/// A producer in shared memory, as a guest's ring: a number of requests, and an eventfd's stand-in.
#[test]
fn a_producer_in_shared_memory_is_polled_and_else_waited_for() {
    let (worker, polling, _turn) = worker(1000);
    let (produced, waits) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let consumed = Arc::new(AtomicU64::new(0));
    let (mut bell, event) = UnixStream::pair().unwrap();
    let (theirs, asleep, done) = (produced.clone(), waits.clone(), consumed.clone());
    worker.handle().spawn(move |io| async move {
        let fd = fd_from(event);
        let (sent, taken) = (theirs.clone(), done.clone());
        let has = move || sent.load(Ordering::SeqCst) > taken.load(Ordering::SeqCst);
        let source = io.poll_source_in_memory(has.clone());
        let mut buf = io.pool().take(1).await;
        loop {
            while has() {
                done.fetch_add(1, Ordering::SeqCst);
                source.note_requests(1);
            }
            if source.poll().await {
                continue;
            }
            asleep.store(true, Ordering::SeqCst);
            if has() {
                continue;
            }
            let (result, returned) = io.recv(&fd, buf, 0..1).await;
            buf = returned;
            if !matches!(result, Ok(1)) {
                return;
            }
        }
    });
    let mut send = || {
        let number = produced.fetch_add(1, Ordering::SeqCst) + 1;
        if waits.swap(false, Ordering::SeqCst) {
            bell.write_all(b"x").unwrap();
        }
        while consumed.load(Ordering::SeqCst) < number {
            std::hint::spin_loop();
        }
    };
    let found = (0..MANY).any(|_| {
        (0..10).for_each(|_| send());
        stats(&worker).polls > 0
    });
    assert!(found, "{:?}", stats(&worker));
    polling.poll_us.set(0);
    (0..10).for_each(|_| send());
    let before = stats(&worker).polls;
    (0..100).for_each(|_| send());
    assert_eq!(stats(&worker).polls, before);
}
