//! Reading lent memory in place, and small buffers: a thread makes the kernel reclaim continuously, and
//! every byte that is read is correct or reported lost.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use ebb_mem::{
    Memory, MemoryOptions, Offers, OwnerId, Residency, RewireError, SmallBuffer, WorkerMemory,
    testing,
};

const PAGE: usize = 4096;

/// Makes the kernel reclaim lent pages of some ranges, until it is dropped.
struct Reclaimer {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Reclaimer {
    fn start(ranges: Vec<(usize, usize)>) -> Reclaimer {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                ranges.iter().for_each(|&(start, len)| testing::take(start, len));
                std::thread::yield_now();
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

/// Every word contains its position and how often its page was filled.
fn fill(bytes: &mut [u8], mark: u64) {
    for (number, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&(mark << 10 | number as u64).to_ne_bytes());
    }
}

/// Whether `bytes`, read from `from` on, are those that [`fill`] wrote.
fn holds(bytes: &[u8], from: usize, mark: u64) -> bool {
    let expected: Vec<u8> =
        (0..512u64).flat_map(|number| (mark << 10 | number).to_ne_bytes()).collect();
    bytes == &expected[from..from + bytes.len()]
}

/// The part of a page that is read in a round: all of it, or some with and without the first word.
fn part(round: usize) -> (usize, usize) {
    match round % 5 {
        0 | 1 => (0, PAGE),
        2 => (512, 1024),
        3 => (0, 512),
        _ => (3, 2 + round % 100),
    }
}

fn rig() -> (Arc<Memory>, WorkerMemory, OwnerId) {
    let memory = Memory::new(MemoryOptions::new(64 << 20, Instant::now())).unwrap();
    let owner = memory.owner("cache").unwrap();
    (memory.clone(), memory.worker(|| ()), owner)
}

#[test]
fn data_read_from_lent_small_pages_is_correct_or_reported_lost() {
    let (memory, worker, owner) = rig();
    let mut buffers: Vec<SmallBuffer> = (0..48)
        .map(|number| SmallBuffer::new(worker.alloc(PAGE << (number % 5), owner).unwrap()).unwrap())
        .collect();
    let mut marks: Vec<Vec<u64>> = Vec::new();
    for (number, buffer) in buffers.iter_mut().enumerate() {
        let of = |page: usize| (number << 8 | page) as u64 + 1;
        for page in 0..buffer.pages() {
            fill(buffer.bytes_mut(page..page + 1).unwrap(), of(page));
        }
        marks.push((0..buffer.pages()).map(of).collect());
    }
    let ranges = buffers
        .iter()
        .map(|buffer| {
            let bytes = buffer.bytes(0..buffer.pages()).unwrap();
            (bytes.as_ptr().addr(), bytes.len())
        })
        .collect();
    let reclaimer = Reclaimer::start(ranges);
    let (mut read, mut lost) = (0u64, 0u64);
    let mut out = [0u8; PAGE];
    let mut round = 0;
    while read < 60_000 || lost < 1000 {
        round += 1;
        for buffer in &mut buffers {
            let all = buffer.all();
            assert_eq!(buffer.unwire(&worker, all) | buffer.unwired(), all);
        }
        {
            let mut offers = Offers::new(&memory);
            buffers.iter().for_each(|buffer| offers.add(buffer));
        }
        if round % 3 == 0 {
            memory.settle();
        }
        for (buffer, marks) in buffers.iter_mut().zip(&mut marks) {
            for (page, mark) in marks.iter_mut().enumerate() {
                let (from, len) = part(round + page);
                if buffer.unwired() >> page & 1 == 0 {
                    continue;
                }
                read += 1;
                if buffer.read_unwired(&memory, page, from, &mut out[..len]) {
                    assert!(holds(&out[..len], from, *mark), "page {page}: lost and not reported");
                    continue;
                }
                lost += 1;
                // Filled again, as in a cache.
                let discarded = loop {
                    match buffer.rewire(&worker, 1 << page) {
                        Ok(discarded) => break discarded,
                        Err(RewireError::Busy) => std::thread::yield_now(),
                        Err(error) => panic!("{error}"),
                    }
                };
                assert_eq!(discarded, 1 << page, "a lost page stays lost");
                *mark += 1 << 20;
                fill(buffer.bytes_mut(page..page + 1).unwrap(), *mark);
            }
        }
        // From time to time all pages are wired, and lent again.
        if round % 7 == 0 {
            for (buffer, marks) in buffers.iter_mut().zip(&mut marks) {
                let discarded = loop {
                    match buffer.rewire(&worker, buffer.all()) {
                        Ok(discarded) => break discarded,
                        Err(_) => std::thread::yield_now(),
                    }
                };
                for (page, mark) in marks.iter_mut().enumerate() {
                    if discarded >> page & 1 == 1 {
                        *mark += 1 << 20;
                        fill(buffer.bytes_mut(page..page + 1).unwrap(), *mark);
                    }
                    assert!(holds(buffer.bytes(page..page + 1).unwrap(), 0, *mark));
                }
            }
        }
    }
    drop(reclaimer);
    buffers.into_iter().for_each(|buffer| buffer.free(&worker));
    drop(worker);
    let figures = memory.stats();
    let cache = figures.owners.iter().find(|owner| owner.name == "cache" && owner.wired != 0);
    assert!(cache.is_none(), "the owner has no memory: {cache:?}");
}

#[test]
fn a_page_rewired_before_it_is_offered_stays_resident() {
    let (memory, worker, owner) = rig();
    let unwired = || {
        let mut buffer = SmallBuffer::new(worker.alloc(65536, owner).unwrap()).unwrap();
        fill(buffer.bytes_mut(0..1).unwrap(), 7);
        assert_eq!(buffer.unwire(&worker, 0b11), 0b11);
        assert!(buffer.bytes(0..1).is_none() && buffer.bytes(2..16).is_some());
        assert_eq!(buffer.rewire(&worker, 1), Ok(0));
        testing::enter_pages();
        {
            let mut offers = Offers::new(&memory);
            offers.add(&buffer);
        }
        memory.settle();
        let start = buffer.bytes(0..1).unwrap().as_ptr().addr();
        // The kernel skips a lent page while another reclaimer has isolated it, as that of another test may.
        for _ in 0..20 {
            testing::take_everywhere(&[(start, 65536)]);
        }
        buffer
    };
    // The kernel ignores the advice if it cannot split a huge page: try other buffers until it does not.
    let mut buffer = unwired();
    let mut refused = Vec::new();
    while buffer.resident(&memory) & 0b10 != 0 && refused.len() < 200 {
        refused.push(std::mem::replace(&mut buffer, unwired()));
    }
    SmallBuffer::free_all(&worker, refused.into_iter(), true);
    assert_eq!(buffer.resident(&memory) & 0b11, 0b01, "the second page was lent, the first not");
    let mut residency = Residency::default();
    residency.begin();
    assert_eq!(residency.maybe_gone(&memory, &buffer) & 0b11, 0b10);
    assert!(holds(buffer.bytes(0..1).unwrap(), 0, 7));
    assert!(!buffer.read_unwired(&memory, 1, 0, &mut [0; 8]));
    let stats = memory.stats();
    let figures = stats.owners.iter().find(|owner| owner.name == "cache" && owner.wired != 0);
    assert_eq!(figures.map(|owner| (owner.wired, owner.unwired)), Some((15 * 4096, 4096)));
    SmallBuffer::free_all(&worker, std::iter::once(buffer), true);
    memory.settle();
    assert_eq!(memory.stats().arena.resident(), 0);
}

#[test]
fn only_small_blocks_become_small_buffers() {
    let (_memory, worker, owner) = rig();
    let block = SmallBuffer::new(worker.alloc(65537, owner).unwrap()).unwrap_err();
    worker.free(block);
    let block = SmallBuffer::new(worker.alloc(2 << 20, owner).unwrap()).unwrap_err();
    worker.free(block);
}
