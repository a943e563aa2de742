//! Models of concurrency under shuttle: each runs thousands of schedules of threads over this crate's
//! code, with a kernel that checks the advice it gets.
//!
//! Run with `cargo test -p ebb-mem --features shuttle --lib models`.

#![allow(clippy::unwrap_used, reason = "a model may panic")]

use std::collections::HashSet;
use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Instant;

use shuttle::sync::Mutex as ModelMutex;
use shuttle::thread;

use crate::advise::{AdvisorControl, Kernel, SharedArena};
use crate::arena::{Arena, Give, PageCounts, Retake};
use crate::block::Block;
use crate::class::PAGE_BYTES;
use crate::memory::{Memory, Reclaim};
use crate::options::MemoryOptions;
use crate::pool::{PagePool, PoolParameters};
use crate::sync::Ordering;
use crate::sys::{PageAdvice, Span};
use crate::zone::{Bucket, Zone};

const SCHEDULES: usize = 2000;

fn check(model: impl Fn() + Send + Sync + 'static) {
    let scheduler = shuttle::scheduler::RandomScheduler::new(SCHEDULES);
    let mut config = shuttle::Config::new();
    // A memory is built on the model's stack.
    config.stack_size = 512 << 10;
    shuttle::Runner::new(scheduler, config).run(model);
}

/// The pages in use, as recorded by their users.
#[derive(Clone, Default)]
struct InUse(Arc<ModelMutex<HashSet<usize>>>);

impl InUse {
    fn begin(&self, span: Span) {
        let mut pages = self.0.lock().unwrap();
        (span.page..span.page + span.pages).for_each(|page| assert!(pages.insert(page)));
    }

    fn end(&self, span: Span) {
        let mut pages = self.0.lock().unwrap();
        (span.page..span.page + span.pages).for_each(|page| assert!(pages.remove(&page)));
    }

    fn assert_none(&self, spans: &[Span]) {
        let pages = self.0.lock().unwrap();
        for span in spans {
            let hit = (span.page..span.page + span.pages).find(|page| pages.contains(page));
            assert_eq!(hit, None, "advised while in use");
        }
    }
}

/// A kernel whose calls take time, and during which the advised pages must not be in use.
struct Checking(InUse);

impl Kernel for Checking {
    fn advise(&mut self, spans: &[Span], _: PageAdvice, _: &mut dyn FnMut(Span)) {
        self.0.assert_none(spans);
        thread::yield_now();
        self.0.assert_none(spans);
        thread::yield_now();
        self.0.assert_none(spans);
    }
}

#[test]
fn no_page_is_in_use_while_it_is_advised() {
    check(|| {
        let shared = Arc::new(SharedArena::new(Arena::new(2, 1024, true)));
        let in_use = InUse::default();
        // The advisor, and its helper.
        let advisors: Vec<_> = (0..2)
            .map(|_| {
                let (shared, in_use) = (shared.clone(), in_use.clone());
                thread::spawn(move || {
                    let mut kernel = Checking(in_use);
                    for _ in 0..4 {
                        shared.step(&mut kernel);
                        thread::yield_now();
                    }
                })
            })
            .collect();
        let takers: Vec<_> = (0..2)
            .map(|taker| {
                let (shared, in_use) = (shared.clone(), in_use.clone());
                thread::spawn(move || {
                    for round in 0..3 {
                        let page = shared.lock().take(0).unwrap();
                        let span = Span { page, pages: 1 };
                        in_use.begin(span);
                        thread::yield_now();
                        in_use.end(span);
                        // Allocated and lent, then wired again, as in a pool.
                        shared.lock().offer_allocated(span);
                        thread::yield_now();
                        let back = shared.lock().retake(span);
                        match back {
                            Retake::Wired => {
                                in_use.begin(span);
                                thread::yield_now();
                                in_use.end(span);
                            }
                            Retake::Busy => {}
                            Retake::Exhausted => panic!("there is room"),
                        }
                        let give = if (taker + round) % 2 == 0 { Give::Lend } else { Give::Return };
                        shared.lock().give(page, 0, give);
                    }
                })
            })
            .collect();
        takers.into_iter().chain(advisors).for_each(|thread| thread.join().unwrap());
        let mut kernel = Checking(in_use);
        while shared.step(&mut kernel) {}
        let arena = shared.lock();
        arena.check();
        assert_eq!(arena.counts().wired, 0);
    });
}

#[test]
fn advisor_and_helper_finish_and_stop_together() {
    check(|| {
        let shared = Arc::new(SharedArena::new(Arena::new(4, 2048, true)));
        let control = Arc::new(AdvisorControl::default());
        let in_use = InUse::default();
        let loops: [fn(&SharedArena, &mut Checking, &AdvisorControl); 2] = [
            |shared, kernel, control| shared.run(kernel, control),
            |shared, kernel, control| shared.run_helper(kernel, control),
        ];
        let advisors = loops.map(|run| {
            let (shared, control, in_use) = (shared.clone(), control.clone(), in_use.clone());
            thread::spawn(move || run(&shared, &mut Checking(in_use), &control))
        });
        for class in [8, 0, 7] {
            let page = shared.lock().take(class).unwrap();
            shared.lock().give(page, class, Give::Return);
        }
        // A lost wake-up, here or at the stop, is a deadlock, which shuttle reports.
        shared.settle();
        assert_eq!(shared.lock().counts(), PageCounts::default());
        shared.stop(&control);
        advisors.into_iter().for_each(|advisor| advisor.join().unwrap());
    });
}

#[test]
fn bucket_exchange_neither_loses_nor_duplicates_blocks() {
    check(|| {
        let zone = Arc::new(Zone::new(0, 64 << 20));
        zone.missed(1000);
        zone.missed(1000);
        let workers: Vec<_> = (0..2u32)
            .map(|worker| {
                let zone = zone.clone();
                thread::spawn(move || {
                    let mut mine: Vec<u32> = Vec::new();
                    let mut bucket = Box::new(Bucket::new(4));
                    let base = worker * 100;
                    (base..base + 4).for_each(|page| assert!(bucket.push(page)));
                    for _ in 0..3 {
                        if bucket.is_empty() {
                            let _ = zone.exchange_empty(&mut bucket);
                        } else {
                            let _ = zone.exchange_full(&mut bucket);
                        }
                        mine.extend(bucket.pop());
                    }
                    mine.extend(std::iter::from_fn(|| bucket.pop()));
                    mine
                })
            })
            .collect();
        let reclaimer = {
            let zone = zone.clone();
            thread::spawn(move || {
                let mut reclaimed = Vec::new();
                let bucket = zone.depot().reclaim_above(0);
                if let Some(mut bucket) = bucket {
                    reclaimed.extend(std::iter::from_fn(|| bucket.pop()));
                    zone.depot().put_empty(bucket);
                }
                reclaimed
            })
        };
        let mut all: Vec<u32> =
            workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect();
        all.extend(reclaimer.join().unwrap());
        while let Some(mut bucket) = zone.depot().reclaim_above(0) {
            all.extend(std::iter::from_fn(|| bucket.pop()));
        }
        all.sort_unstable();
        let expected: Vec<u32> = (0..4).chain(100..104).collect();
        assert_eq!(all, expected);
        assert_eq!(zone.depot().items(), 0);
    });
}

fn memory() -> (Arc<Memory>, crate::OwnerId) {
    let options = MemoryOptions {
        reserve_bytes: 4 << 20,
        owners: 4,
        ..MemoryOptions::new(1 << 20, Instant::now())
    };
    let memory = Memory::without_advisor(options).unwrap();
    let owner = memory.owner("model").unwrap();
    (memory, owner)
}

/// The advisor of a memory without advisor threads.
fn advise(memory: &Memory, in_use: &InUse) {
    let mut kernel = Checking(in_use.clone());
    while memory.core.arena.step(&mut kernel) {}
}

fn span(memory: &Memory, block: &Block) -> Span {
    let page = memory.core.reservation.page_of(block.start()).unwrap();
    Span { page, pages: block.capacity() / PAGE_BYTES }
}

#[test]
fn a_purge_by_another_thread_empties_a_worker_and_advises_nothing_in_use() {
    check(|| {
        let (memory, owner) = memory();
        let in_use = InUse::default();
        let now = Instant::now();
        let owner_of_worker = {
            let (memory, in_use) = (memory.clone(), in_use.clone());
            thread::spawn(move || {
                let worker = memory.worker(|| ());
                for _ in 0..3 {
                    let block = worker.alloc(4096, owner).unwrap();
                    in_use.begin(span(&memory, &block));
                    thread::yield_now();
                    in_use.end(span(&memory, &block));
                    worker.free(block);
                    if worker.needs_poll() {
                        worker.poll(now);
                    }
                }
                // The loop's last poll.
                worker.poll(now);
                if memory.stats().purges > 0 {
                    assert!(!worker.needs_poll());
                }
            })
        };
        let reclaimer = {
            let (memory, in_use) = (memory.clone(), in_use.clone());
            thread::spawn(move || {
                memory.reclaim(Reclaim::DrainWorkers, now);
                advise(&memory, &in_use);
            })
        };
        owner_of_worker.join().unwrap();
        reclaimer.join().unwrap();
        memory.core.arena.lock().offer_free(PageAdvice::Return);
        advise(&memory, &in_use);
        assert_eq!(memory.stats().arena.resident(), 0);
        assert_eq!(memory.stats().blocks_out(), 0);
    });
}

#[test]
fn a_squeeze_concurrent_with_requests_empties_the_pool() {
    check(|| {
        let (memory, owner) = memory();
        let in_use = InUse::default();
        let now = Instant::now();
        let queue = {
            let (memory, in_use) = (memory.clone(), in_use.clone());
            thread::spawn(move || {
                let worker = memory.worker(|| ());
                let pool = PagePool::new(&worker, owner, &PoolParameters::default());
                for _ in 0..3 {
                    let block = pool.take(4096).unwrap();
                    in_use.begin(span(&memory, &block));
                    thread::yield_now();
                    in_use.end(span(&memory, &block));
                    pool.put(block);
                    worker.poll(now);
                }
                let squeezed = memory.last_squeeze().1 > 0;
                worker.poll(now);
                if squeezed {
                    assert_eq!(pool.free_pages(), (0, 0), "the next poll carries out the squeeze");
                }
            })
        };
        let squeezer = {
            let (memory, in_use) = (memory.clone(), in_use.clone());
            thread::spawn(move || {
                memory.squeeze(now);
                advise(&memory, &in_use);
                memory.squeeze(now);
            })
        };
        queue.join().unwrap();
        squeezer.join().unwrap();
        assert_eq!(memory.stats().owners[1].wired + memory.stats().owners[1].unwired, 0);
        assert_eq!(memory.stats().blocks_out(), 0);
    });
}

struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// The smallest executor: polls the future, parks until woken. A lost wake-up is a deadlock, which shuttle
/// reports.
fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = Box::pin(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        thread::park();
    }
}

#[test]
fn every_waiter_gets_memory() {
    check(|| {
        let (memory, owner) = memory();
        // Each allocation needs half of the memory. All must complete, although workers that are done
        // keep their caches and poll only when requested.
        let finished = Arc::new(shuttle::sync::atomic::AtomicUsize::new(0));
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let (memory, finished) = (memory.clone(), finished.clone());
                thread::spawn(move || {
                    let me = thread::current();
                    let worker = memory.worker(move || me.unpark());
                    for _ in 0..2 {
                        let block = block_on(worker.alloc_wait(512 << 10, owner)).unwrap();
                        thread::yield_now();
                        worker.free(block);
                        if worker.needs_poll() {
                            worker.poll(Instant::now());
                        }
                    }
                    finished.fetch_add(1, Ordering::SeqCst);
                    while finished.load(Ordering::SeqCst) < 3 {
                        if worker.needs_poll() {
                            worker.poll(Instant::now());
                        }
                        thread::yield_now();
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(memory.stats().waiting, 0);
        assert_eq!(memory.stats().blocks_out(), 0);
    });
}
