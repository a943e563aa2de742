//! Content safety of unwiring: a thread makes the kernel reclaim all the time, and every rewired page
//! either has its content or is reported lost. The long run is `mem-bench rewire`.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use ebb_mem::{Buffer, Memory, Options, OwnerId, RewireError, Worker, testing};

/// Every word of a page contains its page and how often it was filled.
fn fill(buffer: &mut Buffer, page: usize, mark: u64) {
    let bytes = buffer.bytes_mut(page..page + 1).unwrap();
    bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&mark.to_ne_bytes()));
}

fn holds(buffer: &Buffer, page: usize, mark: u64) -> bool {
    let bytes = buffer.bytes(page..page + 1).unwrap();
    bytes.chunks_exact(8).all(|word| word == mark.to_ne_bytes())
}

struct Reclaimer {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Reclaimer {
    fn start(buffers: &[Buffer]) -> Reclaimer {
        let range = |buffer: &Buffer| {
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
fn cycle(worker: &Worker, mut buffers: Vec<Buffer>, cycles: usize) -> usize {
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
            let pages =
                if round.is_multiple_of(3) { 1..buffer.pages() / 2 } else { 0..buffer.pages() };
            assert!(buffer.unwire(worker, pages));
        }
        if round.is_multiple_of(2) {
            worker.memory().settle();
        }
        for (buffer, marks) in buffers.iter_mut().zip(&mut marks) {
            let wanted = buffer.unwired().len();
            let discarded = loop {
                match buffer.rewire(worker, 0..buffer.pages()) {
                    Ok(discarded) => break discarded,
                    Err(RewireError::Busy) => std::thread::yield_now(),
                    Err(error) => panic!("{error}"),
                }
            };
            done += wanted;
            lost += discarded.len();
            for (page, mark) in marks.iter_mut().enumerate() {
                if discarded.contains(page) {
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

fn rig() -> (Arc<Memory>, Worker, OwnerId) {
    let memory = Memory::new(Options::new(64 << 20, Instant::now())).unwrap();
    let owner = memory.owner("cache").unwrap();
    (memory.clone(), memory.worker(|| ()), owner)
}

#[test]
fn every_lost_small_page_is_reported() {
    let (memory, worker, owner) = rig();
    let buffers = (0..32)
        .map(|_| Buffer::new(&worker, worker.alloc(65536, owner).unwrap()).unwrap())
        .collect();
    let lost = cycle(&worker, buffers, 20_000);
    assert!(lost > 0, "the reclaimer must win sometimes, or nothing was tested");
    assert_eq!(memory.rewires().1, lost as u64);
}

#[test]
fn every_lost_huge_page_is_reported() {
    let (_memory, worker, owner) = rig();
    let buffers =
        (0..4).map(|_| Buffer::new(&worker, worker.alloc_huge(owner).unwrap()).unwrap()).collect();
    let lost = cycle(&worker, buffers, 20_000);
    assert!(lost > 0, "the reclaimer must win sometimes, or nothing was tested");
}

#[test]
fn an_unwired_page_is_not_accessible() {
    let (_memory, worker, owner) = rig();
    let mut buffer = Buffer::new(&worker, worker.alloc(65536, owner).unwrap()).unwrap();
    assert!(buffer.unwire(&worker, 4..8));
    assert!(buffer.bytes(0..4).is_some() && buffer.bytes(8..16).is_some());
    assert!(buffer.bytes(7..9).is_none() && buffer.bytes_mut(0..16).is_none());
    assert!(buffer.bytes(0..17).is_none(), "outside");
    let mut buffer = buffer.into_block().unwrap_err();
    assert!(buffer.unwire(&worker, 0..0), "nothing to do");
    while buffer.rewire(&worker, 0..100).is_err() {}
    assert!(buffer.unwired().is_empty());
    worker.free(buffer.into_block().unwrap());
}
