//! Content safety of unwiring: a thread makes the kernel reclaim continuously, and every rewired page
//! either has its content or is reported lost. The long run is `mem-bench rewire`.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use ebb_mem::{
    Memory, MemoryOptions, Offers, OwnerId, RewireError, SmallBuffer, WorkerMemory, testing,
};

/// Every word of a page contains its page and how often it was filled.
fn fill(buffer: &mut SmallBuffer, page: usize, mark: u64) {
    let bytes = buffer.bytes_mut(page..page + 1).unwrap();
    bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&mark.to_ne_bytes()));
}

fn holds(buffer: &SmallBuffer, page: usize, mark: u64) -> bool {
    let bytes = buffer.bytes(page..page + 1).unwrap();
    bytes.chunks_exact(8).all(|word| word == mark.to_ne_bytes())
}

struct Reclaimer {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Reclaimer {
    fn start(buffers: &[SmallBuffer]) -> Reclaimer {
        let range = |buffer: &SmallBuffer| {
            let bytes = buffer.bytes(0..buffer.pages()).unwrap();
            (bytes.as_ptr().addr(), bytes.len())
        };
        let ranges: Vec<(usize, usize)> = buffers.iter().map(range).collect();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                for &(start, len) in &ranges {
                    testing::take(start, len);
                }
                std::thread::sleep(std::time::Duration::from_micros(100));
            }
        });
        Reclaimer { stop, thread: Some(thread) }
    }
}

impl Drop for Reclaimer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// `cycles` pages unwired and rewired; returns how many were lost.
fn cycle(worker: &WorkerMemory, mut buffers: Vec<SmallBuffer>, cycles: u32) -> u32 {
    let reclaimer = Reclaimer::start(&buffers);
    let mut marks: Vec<Vec<u64>> = Vec::new();
    for (number, buffer) in buffers.iter_mut().enumerate() {
        let of = |page: usize| (number << 32 | page << 8) as u64 | 1;
        (0..buffer.pages()).for_each(|page| fill(buffer, page, of(page)));
        marks.push((0..buffer.pages()).map(of).collect());
    }
    let (mut done, mut lost, mut round) = (0, 0, 0u64);
    while done < cycles {
        round += 1;
        for buffer in &mut buffers {
            // In some rounds a part only.
            let pages = if round.is_multiple_of(3) { 0b1111_1110 } else { buffer.all() };
            assert_eq!(buffer.unwire(worker, pages), pages);
        }
        {
            let mut offers = Offers::new(worker.memory());
            buffers.iter().for_each(|buffer| offers.add(buffer));
        }
        if round.is_multiple_of(2) {
            worker.memory().settle();
        }
        for (buffer, marks) in buffers.iter_mut().zip(&mut marks) {
            done += buffer.unwired().count_ones();
            let discarded = loop {
                match buffer.rewire(worker, buffer.all()) {
                    Ok(discarded) => break discarded,
                    Err(RewireError::Busy) => std::thread::yield_now(),
                    Err(error) => panic!("{error}"),
                }
            };
            lost += discarded.count_ones();
            for (page, mark) in marks.iter_mut().enumerate() {
                if discarded >> page & 1 == 1 {
                    *mark += 1 << 40;
                    fill(buffer, page, *mark);
                }
                assert!(holds(buffer, page, *mark), "page {page} lost and not reported");
            }
        }
    }
    drop(reclaimer);
    buffers.into_iter().for_each(|buffer| buffer.free(worker));
    lost
}

fn rig() -> (Arc<Memory>, WorkerMemory, OwnerId) {
    let memory = Memory::new(MemoryOptions::new(64 << 20, Instant::now())).unwrap();
    let owner = memory.owner("cache").unwrap();
    (memory.clone(), memory.worker(|| ()), owner)
}

#[test]
fn every_lost_small_page_is_reported() {
    let (_memory, worker, owner) = rig();
    let buffers =
        (0..32).map(|_| SmallBuffer::new(worker.alloc(65536, owner).unwrap()).unwrap()).collect();
    let lost = cycle(&worker, buffers, 20_000);
    assert!(lost > 0, "the kernel discarded no page, so that was not tested");
}

#[test]
fn a_lent_page_is_not_accessible() {
    let (_memory, worker, owner) = rig();
    let mut buffer = SmallBuffer::new(worker.alloc(65536, owner).unwrap()).unwrap();
    assert_eq!(buffer.unwire(&worker, 0b1111_0000), 0b1111_0000);
    assert!(buffer.bytes(0..4).is_some() && buffer.bytes(8..16).is_some());
    assert!(buffer.bytes(7..9).is_none() && buffer.bytes_mut(0..16).is_none());
    assert!(buffer.bytes(0..17).is_none(), "outside");
    assert_eq!(buffer.unwire(&worker, 0), 0, "nothing to do");
    while buffer.rewire(&worker, u16::MAX).is_err() {}
    assert!(buffer.unwired() == 0 && buffer.bytes(0..16).is_some());
    buffer.free(&worker);
}
