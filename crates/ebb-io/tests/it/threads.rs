//! A worker and other threads: spawning tasks, waking them, stopping, and panics.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::task::{Poll, Waker};
use std::time::Duration;

use common::{HANG, Random, on_worker, poll_once, until, within};
use ebb_io::{Io, Signal, Worker, fd_from};

#[test]
fn several_threads_block_on_one_worker() {
    within(|| {
        let workers = [Worker::start_alone("one").unwrap(), Worker::start_alone("two").unwrap()];
        std::thread::scope(|scope| {
            for thread in 0..8u64 {
                let handles = [workers[0].handle(), workers[1].handle()];
                scope.spawn(move || {
                    for number in 0..200u64 {
                        let handle = &handles[usize::from(number % 2 == 0)];
                        let sum = handle.block_on(move |io| async move {
                            io.yield_now().await;
                            thread * 1000 + number
                        });
                        assert_eq!(sum, Some(thread * 1000 + number));
                    }
                });
            }
        });
    });
}

/// A counter that other threads increase.
#[derive(Default)]
struct Mailbox {
    value: AtomicU64,
    waker: Mutex<Option<Waker>>,
}

impl Mailbox {
    fn add(&self, amount: u64) {
        self.value.fetch_add(amount, Ordering::SeqCst);
        let waker = self.waker.lock().unwrap().take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn reaches(&self, sum: u64) -> impl Future<Output = ()> + '_ {
        poll_fn(move |cx| {
            *self.waker.lock().unwrap() = Some(cx.waker().clone());
            match self.value.load(Ordering::SeqCst) >= sum {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        })
    }
}

/// Stresses the inbox and the wake-up eventfd with seeds: a lost wake-up
/// or a lost start shows as a hang.
#[test]
fn no_wake_up_and_no_start_is_lost() {
    const SEEDS: u64 = 40;
    const THREADS: u64 = 4;
    const ACTS: u64 = 150;
    for seed in 0..SEEDS {
        within(move || {
            let worker = Worker::start_alone("stress").unwrap();
            let boxes: Vec<_> = (0..3).map(|_| Arc::new(Mailbox::default())).collect();
            let started = Arc::new(AtomicU64::new(0));
            let start_line = Arc::new(Barrier::new(usize::try_from(THREADS).unwrap()));
            let (done, all_done) = mpsc::channel();
            // One task per mailbox waits for each sum, one after the other.
            for mailbox in &boxes {
                let (mailbox, done) = (mailbox.clone(), done.clone());
                worker.handle().spawn(move |_| async move {
                    for sum in 1..=THREADS * ACTS {
                        mailbox.reaches(sum).await;
                    }
                    done.send(()).unwrap();
                });
            }
            std::thread::scope(|scope| {
                for thread in 0..THREADS {
                    let (handle, boxes) = (worker.handle(), boxes.clone());
                    let (started, start_line) = (started.clone(), start_line.clone());
                    scope.spawn(move || {
                        let mut random = Random::new(seed * THREADS + thread + 1);
                        start_line.wait();
                        for _ in 0..ACTS {
                            boxes.iter().for_each(|mailbox| mailbox.add(1));
                            match random.below(8) {
                                0 => {
                                    let started = started.clone();
                                    let result = handle.block_on(move |_| async move {
                                        started.fetch_add(1, Ordering::SeqCst)
                                    });
                                    assert!(result.is_some());
                                }
                                1 => std::thread::yield_now(),
                                2 => (0..random.below(300)).for_each(|_| std::hint::spin_loop()),
                                _ => {}
                            }
                        }
                    });
                }
            });
            for _ in &boxes {
                let hint = "a wake-up was lost";
                all_done.recv_timeout(HANG / 2).unwrap_or_else(|_| panic!("seed {seed}: {hint}"));
            }
        });
    }
}

/// Sets a flag when it is dropped.
struct Dropped(Arc<AtomicBool>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[test]
fn a_stopped_worker_has_dropped_its_tasks_and_may_still_be_woken() {
    within(|| {
        let worker = Worker::start_alone("woken").unwrap();
        let mailbox = Arc::new(Mailbox::default());
        let dropped = Arc::new(AtomicBool::new(false));
        let (for_task, mark) = (mailbox.clone(), Dropped(dropped.clone()));
        let (waiting, is_waiting) = mpsc::channel();
        worker.handle().spawn(move |_| async move {
            let _mark = mark;
            waiting.send(()).unwrap();
            for_task.reaches(1).await;
            unreachable!("the mailbox is not filled while the worker runs");
        });
        is_waiting.recv().unwrap();
        drop(worker);
        assert!(dropped.load(Ordering::SeqCst), "the task was dropped with its worker");
        mailbox.add(1);
    });
}

/// Such a task is referenced only by itself: what it owns must be dropped with the worker.
#[test]
fn a_task_that_waits_for_itself_is_dropped_too() {
    within(|| {
        let worker = Worker::start_alone("knot").unwrap();
        let dropped = Arc::new(AtomicBool::new(false));
        let mark = Dropped(dropped.clone());
        worker.handle().block_on(move |io| async move {
            let signal = Rc::new(Signal::default());
            let knot = async move {
                let _mark = mark;
                signal.wait().await;
            };
            io.spawn(knot).detach();
            io.yield_now().await;
        });
        drop(worker);
        assert!(dropped.load(Ordering::SeqCst));
    });
}

#[test]
fn work_for_a_stopped_worker_is_dropped() {
    within(|| {
        let worker = Worker::start_alone("stopped").unwrap();
        let handle = worker.handle();
        drop(worker);
        let dropped = Arc::new(AtomicBool::new(false));
        let mark = Dropped(dropped.clone());
        handle.spawn(move |_| async move { drop(mark) });
        assert!(dropped.load(Ordering::SeqCst), "what the closure owns was dropped");
        assert_eq!(handle.block_on(|_| async { 1 }), None);
    });
}

#[test]
fn block_on_returns_none_when_the_worker_stops() {
    for seed in 0..50 {
        within(move || {
            let worker = Worker::start_alone("stopping").unwrap();
            let threads: Vec<_> = (0..4u64)
                .map(|thread| {
                    let handle = worker.handle();
                    std::thread::spawn(move || {
                        let mut random = Random::new(seed * 4 + thread + 1);
                        let mut results = 0u64;
                        loop {
                            let waits = random.below(4) == 0;
                            let result = handle.block_on(move |_| async move {
                                if waits {
                                    std::future::pending::<()>().await;
                                }
                            });
                            match result {
                                Some(()) => results += 1,
                                None => return results,
                            }
                        }
                    })
                })
                .collect();
            std::thread::yield_now();
            drop(worker);
            for thread in threads {
                thread.join().unwrap();
            }
        });
    }
}

/// The kernel delivers completions only to a thread that enters it; a worker that always has
/// ready tasks must enter it, too.
#[test]
fn a_busy_worker_still_sees_completions_and_other_threads() {
    on_worker(|io| async move {
        let (here, mut there) = UnixStream::pair().unwrap();
        let fd = fd_from(here);
        let received = Rc::new(Cell::new(false));
        let busy = {
            let (io2, received) = (io.clone(), received.clone());
            io.spawn(async move {
                while !received.get() {
                    io2.yield_now().await;
                }
            })
        };
        let receiving = {
            let (io2, received) = (io.clone(), received.clone());
            io.spawn(async move {
                let (result, _) = io2.recv(&fd, io2.pool().get_for_test(1), 0..1).await;
                assert_eq!(result.unwrap(), 1);
                received.set(true);
            })
        };
        io.sleep(Duration::from_millis(5)).await;
        std::thread::spawn(move || there.write_all(b"x").unwrap());
        receiving.await;
        busy.await;
    });
}

#[derive(Default)]
struct CallCounter {
    now: AtomicUsize,
    most: AtomicUsize,
    calls: AtomicUsize,
}

impl CallCounter {
    fn call(&self, until: Option<&Barrier>) {
        let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
        self.calls.fetch_add(1, Ordering::SeqCst);
        match until {
            Some(barrier) => drop(barrier.wait()),
            None => std::thread::sleep(Duration::from_millis(1)),
        }
        self.now.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Offloaded calls of one worker at a time, as documented.
const AT_ONCE: usize = 8;

#[test]
fn at_most_eight_calls_are_offloaded_at_a_time() {
    on_worker(|io| async move {
        let counter = Arc::new(CallCounter::default());
        let tasks: Vec<_> = (0..100)
            .map(|_| {
                let (io2, counter) = (io.clone(), counter.clone());
                io.spawn(async move { io2.offload(move || counter.call(None)).await })
            })
            .collect();
        for task in tasks {
            task.await;
        }
        assert_eq!(counter.calls.load(Ordering::SeqCst), 100);
        assert!(counter.most.load(Ordering::SeqCst) <= AT_ONCE);
    });
}

/// A call that has begun cannot be stopped: after its future is dropped it still counts towards the limit.
#[test]
fn a_dropped_call_counts_towards_the_limit_while_it_runs() {
    on_worker(|io| async move {
        let counter = Arc::new(CallCounter::default());
        let barrier = Arc::new(Barrier::new(AT_ONCE + 1));
        let mut pending = Vec::new();
        for _ in 0..AT_ONCE {
            let (counter, barrier) = (counter.clone(), barrier.clone());
            let mut call = Box::pin(io.offload(move || counter.call(Some(&barrier))));
            assert!(poll_once(&mut call).await.is_pending());
            pending.push(call);
        }
        until(&io, "all have begun", || counter.calls.load(Ordering::SeqCst) == AT_ONCE).await;
        drop(pending);
        let late = {
            let (io2, counter) = (io.clone(), counter.clone());
            io.spawn(async move { io2.offload(move || counter.call(None)).await })
        };
        io.sleep(Duration::from_millis(20)).await;
        assert_eq!(counter.calls.load(Ordering::SeqCst), AT_ONCE, "eight are still running");
        barrier.wait();
        late.await;
        assert!(counter.most.load(Ordering::SeqCst) <= AT_ONCE);
    });
}

/// More calls hang on one device than run at a time: calls on other files complete, and so do calls without a file.
#[test]
fn calls_that_hang_on_one_file_do_not_delay_calls_on_another() {
    on_worker(|io| async move {
        let counter = Arc::new(CallCounter::default());
        let barrier = Arc::new(Barrier::new(2 + 1));
        let pipes: Vec<_> = (0..2).map(|_| std::io::pipe().unwrap()).collect();
        let ends: Vec<_> = pipes.into_iter().map(|(end, _)| ebb_io::fd_from(end)).collect();
        let hanging: Vec<_> = (0..40)
            .map(|_| {
                let (io2, end) = (io.clone(), ends[0].clone());
                let (counter, barrier) = (counter.clone(), barrier.clone());
                io.spawn(async move {
                    io2.offload_on(&end, move |_| counter.call(Some(&barrier))).await;
                })
            })
            .collect();
        until(&io, "two have begun", || counter.calls.load(Ordering::SeqCst) == 2).await;
        for _ in 0..20 {
            io.offload_on(&ends[1], |_| ()).await;
            io.offload(|| ()).await;
        }
        assert_eq!(counter.calls.load(Ordering::SeqCst), 2, "two of a file at a time");
        // The remaining calls on that file run, two at a time.
        for _ in 0..20 {
            let barrier = barrier.clone();
            io.offload(move || barrier.wait().is_leader()).await;
        }
        for call in hanging {
            call.await;
        }
        assert_eq!(counter.calls.load(Ordering::SeqCst), 40);
        assert_eq!(counter.most.load(Ordering::SeqCst), 2);
    });
}

#[test]
fn a_stop_does_not_wait_for_offloaded_calls() {
    within(|| {
        let worker = Worker::start_alone("offload").unwrap();
        let barrier = Arc::new(Barrier::new(2));
        let (begun, has_begun) = mpsc::channel();
        let for_call = barrier.clone();
        worker.handle().spawn(move |io| async move {
            io.offload(move || {
                begun.send(()).unwrap();
                for_call.wait();
            })
            .await;
        });
        has_begun.recv().unwrap();
        drop(worker);
        // The call returns only now, after its task was dropped.
        barrier.wait();
    });
}

/// Where panics unwind, a panic ends the worker like a stop: all tasks are dropped, and all waits end.
#[test]
fn a_panic_in_a_task_ends_the_worker() {
    within(|| {
        let worker = Worker::start_alone("panics").unwrap();
        let handle = worker.handle();
        let dropped = Arc::new(AtomicBool::new(false));
        let mark = Dropped(dropped.clone());
        let waiting = {
            let handle = worker.handle();
            let (sent, is_waiting) = mpsc::channel();
            let thread = std::thread::spawn(move || {
                handle.block_on(move |io: Io| async move {
                    let (here, _there) = UnixStream::pair().unwrap();
                    let fd = fd_from(here);
                    let receive = io.recv(&fd, io.pool().get_for_test(4096), 0..1);
                    let _mark = mark;
                    sent.send(()).unwrap();
                    let _ = receive.await;
                })
            });
            is_waiting.recv().unwrap();
            thread
        };
        let result = handle.block_on(|_| async { assert!(panics_disabled(), "on purpose") });
        assert_eq!(result, None);
        assert_eq!(waiting.join().unwrap(), None, "other tasks were dropped, too");
        assert!(dropped.load(Ordering::SeqCst));
        assert_eq!(handle.block_on(|_| async { 1 }), None, "the worker has ended");
        drop(worker);
    });
}

/// Always false, which the compiler does not know.
fn panics_disabled() -> bool {
    std::env::var_os("EBB_IO_TEST_WITHOUT_PANIC").is_some()
}
