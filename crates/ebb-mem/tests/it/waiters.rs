//! Waiting for memory: the order, cancellation, and wake-ups.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Instant;

use ebb_mem::{AllocWait, Block, Memory, MemoryOptions, OwnerId, WorkerMemory};

const MIB: usize = 1 << 20;

#[derive(Default)]
struct Bell(AtomicUsize);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Bell {
    fn rung(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

struct Waiting {
    future: Pin<Box<AllocWait>>,
    bell: Arc<Bell>,
}

impl Waiting {
    fn new(worker: &WorkerMemory, len: usize, owner: OwnerId) -> Waiting {
        Waiting { future: Box::pin(worker.alloc_wait(len, owner)), bell: Arc::default() }
    }

    fn poll(&mut self) -> Option<Block> {
        let waker = Waker::from(self.bell.clone());
        match self.future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(result) => Some(result.unwrap()),
            Poll::Pending => None,
        }
    }
}

fn rig(ceiling: usize) -> (Arc<Memory>, OwnerId) {
    let memory = Memory::new(MemoryOptions::new(ceiling, Instant::now())).unwrap();
    let owner = memory.owner("test").unwrap();
    (memory, owner)
}

#[test]
fn waiters_are_served_in_order() {
    let (memory, owner) = rig(8 * MIB);
    let worker = memory.worker(|| ());
    let mut held: Vec<Block> = (0..8).map(|_| worker.alloc(MIB, owner).unwrap()).collect();
    assert!(worker.alloc(4096, owner).is_err());
    let mut waiting: Vec<Waiting> = (0..3).map(|_| Waiting::new(&worker, MIB, owner)).collect();
    assert!(waiting.iter_mut().all(|waiting| waiting.poll().is_none()));
    assert_eq!(memory.stats().waiting, 3);
    worker.free(held.pop().unwrap());
    assert!(waiting[0].bell.rung() > 0, "the first is woken");
    assert_eq!(waiting[2].bell.rung(), 0, "the last is not");
    assert!(waiting[1].poll().is_none(), "a waiter does not overtake, even when polled first");
    assert!(worker.alloc(4096, owner).is_err(), "nor does a new allocation");
    held.push(waiting[0].poll().unwrap());
    assert!(waiting[1].poll().is_none(), "one block, one waiter");
    worker.free(held.pop().unwrap());
    held.push(waiting[1].poll().unwrap());
    worker.free(held.pop().unwrap());
    held.push(waiting[2].poll().unwrap());
    assert_eq!(memory.stats().waiting, 0);
    held.into_iter().for_each(|block| worker.free(block));
    assert_eq!(memory.stats().zones[8].sleeps, 3);
}

#[test]
fn a_cancelled_waiter_wakes_the_next_one() {
    let (memory, owner) = rig(4 * MIB);
    let worker = memory.worker(|| ());
    let mut held: Vec<Block> = (0..4).map(|_| worker.alloc(MIB, owner).unwrap()).collect();
    let mut first = Waiting::new(&worker, MIB, owner);
    let mut second = Waiting::new(&worker, MIB, owner);
    assert!(first.poll().is_none() && second.poll().is_none());
    worker.free(held.pop().unwrap());
    drop(first);
    assert!(second.bell.rung() > 0);
    held.push(second.poll().unwrap());
    held.into_iter().for_each(|block| worker.free(block));
    assert_eq!(memory.stats().waiting, 0);
}

#[test]
fn a_waiter_gets_memory_cached_by_another_worker() {
    let (memory, owner) = rig(4 * MIB);
    let woken = Arc::new(AtomicUsize::new(0));
    let count = woken.clone();
    let rich = memory.worker(move || _ = count.fetch_add(1, Ordering::Relaxed));
    let poor = memory.worker(|| ());
    let blocks: Vec<Block> = (0..64).map(|_| rich.alloc(65536, owner).unwrap()).collect();
    let mut waiting = Waiting::new(&poor, 65536, owner);
    assert!(waiting.poll().is_none());
    assert!(woken.load(Ordering::Relaxed) > 0, "all workers are requested to free their caches");
    let now = Instant::now();
    rich.poll(now);
    let mut blocks = blocks.into_iter();
    rich.free(blocks.next().unwrap());
    assert!(waiting.bell.rung() > 0, "freed memory is not cached while an allocation waits");
    let block = waiting.poll().unwrap();
    poor.free(block);
    blocks.for_each(|block| rich.free(block));
    assert!(rich.cached_bytes() > 0, "and is cached again afterwards");
}

#[test]
fn a_zone_limit_makes_only_its_own_zone_wait() {
    let (memory, owner) = rig(64 * MIB);
    let worker = memory.worker(|| ());
    memory.set_zone_limit(65536, Some(2 * 65536));
    let a = worker.alloc(65536, owner).unwrap();
    let b = worker.alloc(65536, owner).unwrap();
    assert!(worker.alloc(65536, owner).is_err());
    let mut waiting = Waiting::new(&worker, 65536, owner);
    assert!(waiting.poll().is_none());
    let other = worker.alloc(4096, owner).unwrap();
    worker.free(other);
    assert!(waiting.poll().is_none());
    worker.free(a);
    let c = waiting.poll().unwrap();
    let mut waiting = Waiting::new(&worker, 65536, owner);
    assert!(waiting.poll().is_none());
    memory.set_zone_limit(65536, None);
    assert!(waiting.bell.rung() > 0, "raising the limit wakes the waiter");
    let d = waiting.poll().unwrap();
    [b, c, d].into_iter().for_each(|block| worker.free(block));
}

#[test]
fn a_waiter_that_its_zone_keeps_waiting_wakes_the_next_one() {
    let (memory, owner) = rig(4 * MIB);
    let worker = memory.worker(|| ());
    let mut large: Vec<Block> = (0..3).map(|_| worker.alloc(MIB, owner).unwrap()).collect();
    let small: Vec<Block> = (0..16).map(|_| worker.alloc(65536, owner).unwrap()).collect();
    let mut first = Waiting::new(&worker, 65536, owner);
    let mut second = Waiting::new(&worker, MIB, owner);
    assert!(first.poll().is_none() && second.poll().is_none());
    memory.set_zone_limit(65536, Some(2 * 65536));
    worker.free(large.pop().unwrap());
    assert_eq!(second.bell.rung(), 0, "it is not the first");
    assert!(first.poll().is_none(), "its zone has reached its limit");
    assert!(second.bell.rung() > 0);
    large.push(second.poll().unwrap());
    drop(first);
    large.into_iter().chain(small).for_each(|block| worker.free(block));
}

#[test]
fn a_length_that_can_never_be_allocated_is_refused_at_once() {
    let (memory, owner) = rig(4 * MIB);
    let worker = memory.worker(|| ());
    for len in [8 * MIB, ebb_mem::MAX_BLOCK_BYTES + 1, usize::MAX] {
        assert!(worker.alloc(len, owner).is_err());
        let mut future = Box::pin(worker.alloc_wait(len, owner));
        let poll = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(matches!(poll, Poll::Ready(Err(_))), "{len}");
    }
    assert_eq!(memory.stats().waiting, 0);
}

#[test]
fn a_large_block_gets_its_memory_under_a_lowered_ceiling() {
    let (memory, owner) = rig(16 * MIB);
    let worker = memory.worker(|| ());
    let held: Vec<Block> = (0..8).map(|_| worker.alloc(MIB, owner).unwrap()).collect();
    // The request was admitted under the ceiling of 16 MiB.
    memory.set_ceiling(4 * MIB, 16 * MIB);
    assert!(worker.alloc(4096, owner).is_err(), "more is in use than the ceiling allows");
    let mut large = Waiting::new(&worker, 12 * MIB, owner);
    assert!(large.poll().is_none(), "it waits, and does not fail");
    for block in held {
        worker.free(block);
    }
    let block = large.poll().expect("it gets its memory when other blocks are free");
    assert!(worker.alloc(4096, owner).is_err(), "small blocks keep to the lowered ceiling");
    worker.free(block);
    memory.set_ceiling(16 * MIB, 16 * MIB);
    assert!(worker.alloc(12 * MIB, owner).is_ok());
}

#[test]
fn the_part_for_requests_follows_the_ceiling() {
    let (memory, _) = rig(16 * MIB);
    assert_eq!(memory.shares().total(), 12 * MIB);
    memory.set_share_eighths(3);
    assert_eq!(memory.shares().total(), 6 * MIB);
    memory.set_ceiling(8 * MIB, 16 * MIB);
    assert_eq!(memory.shares().total(), 3 * MIB, "not three quarters of it again");
}
