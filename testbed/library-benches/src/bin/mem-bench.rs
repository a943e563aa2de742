//! The measurements of elastic memory: one line each on stdout, in the form
//! `name ours peer ratio bar ok|short`; remarks go to stderr.
//!
//! `mem-bench [--seconds N] [--cycles N] [NAME...]`: `--seconds` is the length of the sawtooth soak,
//! `--cycles` the number of unwire/rewire cycles, names choose some of the measurements.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ebb_mem::{
    Block, IdlePolicy, Memory, MemoryOptions, Offers, OwnerId, PagePool, Reclaim, SmallBuffer,
    WorkerMemory, testing,
};
use library_benches::{note, result};

const MIB: usize = 1 << 20;
/// Bytes one worker has in flight in the mixed load.
const FLIGHT: usize = 7 * MIB / 2;

struct Line {
    name: &'static str,
    ours: f64,
    peer: f64,
    ratio: f64,
    bar: f64,
    /// The ratio may be at most the bar, rather than at least.
    most: bool,
}

fn report(line: &Line) {
    let good = if line.most { line.ratio <= line.bar } else { line.ratio >= line.bar };
    let Line { name, ours, peer, ratio, bar, .. } = line;
    let verdict = if good { "ok" } else { "short" };
    result(format_args!("{name} {ours:.3} {peer:.3} {ratio:.3} {bar:.3} {verdict}"));
}

#[allow(clippy::cast_precision_loss, reason = "figures for people")]
fn float(value: u64) -> f64 {
    value as f64
}

/// A cheap, repeatable source of numbers.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 11).unwrap_or(0) % limit
    }
}

fn memory(ceiling: usize, policy: IdlePolicy) -> (Arc<Memory>, OwnerId) {
    let options = MemoryOptions { policy, ..MemoryOptions::new(ceiling, Instant::now()) };
    let memory = Memory::new(options).expect("address space for the bench");
    let owner = memory.owner("bench").expect("an owner");
    (memory, owner)
}

/// Best of several rounds: the machine is shared, the fastest round was disturbed least.
fn best(rounds: usize, mut round: impl FnMut() -> f64) -> f64 {
    (0..rounds).map(|_| round()).fold(f64::INFINITY, f64::min)
}

fn hit_path() {
    const OPS: u32 = 250_000;
    let (memory, owner) = memory(1 << 30, IdlePolicy::Elastic);
    let worker = memory.worker(|| ());
    thread_local! {
        static LIST: std::cell::RefCell<Vec<usize>> = std::cell::RefCell::new(vec![7; 16]);
    }
    let nanos = |start: Instant| start.elapsed().as_secs_f64() * 1e9 / f64::from(OPS);
    // Alternating, so that both run under the same conditions; the fastest round of each counts.
    let (mut ours, mut peer) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..40 {
        let start = Instant::now();
        for _ in 0..OPS {
            match worker.alloc(std::hint::black_box(4096), owner) {
                Ok(block) => worker.free(std::hint::black_box(block)),
                Err(error) => panic!("{error}"),
            }
        }
        ours = ours.min(nanos(start));
        let start = Instant::now();
        for _ in 0..OPS {
            let item = LIST.with_borrow_mut(Vec::pop);
            LIST.with_borrow_mut(|list| list.extend(std::hint::black_box(item)));
        }
        peer = peer.min(nanos(start));
    }
    // The bar is a difference: at most 10 ns over the plain list.
    report(&Line { name: "hit-path-ns", ours, peer, ratio: ours - peer, bar: 10.0, most: true });
}

/// Requests of mixed sizes, `flight` bytes of them in flight, each page written to as by an I/O. Returns
/// the seconds for `ops` requests, and how many were refused at first. The mix shifts between small and
/// large requests, and the load varies, as with many guests on one backend.
fn mixed(worker: &WorkerMemory, owner: OwnerId, ops: usize, flight: usize) -> (f64, u64) {
    const SMALL: [usize; 5] = [4096, 4096, 4096, 8192, 16384];
    const LARGE: [usize; 5] = [16384, 32768, 65536, 65536, 131_072];
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
    let mut held: Vec<Block> = Vec::with_capacity(flight / 4096);
    let mut bytes = 0;
    let mut waits = 0;
    let start = Instant::now();
    for op in 0..ops {
        let sizes = if op / 4096 % 2 == 0 { SMALL } else { LARGE };
        let len = sizes[numbers.below(sizes.len())];
        let most = if op / 1024 % 2 == 0 { flight } else { flight / 4 };
        while bytes + len > most {
            let block = held.swap_remove(numbers.below(held.len()));
            bytes -= block.capacity();
            worker.free(block);
        }
        let block = loop {
            if worker.needs_poll() {
                worker.poll(Instant::now());
            }
            match worker.alloc(len, owner) {
                Ok(block) => break block,
                Err(error) => {
                    waits += 1;
                    let Some(other) = held.pop() else { panic!("{error}") };
                    bytes -= other.capacity();
                    worker.free(other);
                }
            }
        };
        for page in 0..len / 4096 {
            let first = block.as_ptr().wrapping_add(page * 4096);
            // SAFETY: inside the block just allocated.
            unsafe { first.write_volatile(1) };
        }
        bytes += block.capacity();
        held.push(block);
    }
    let time = start.elapsed().as_secs_f64();
    held.into_iter().for_each(|block| worker.free(block));
    (time, waits)
}

fn mixed_with(policy: IdlePolicy, ceiling: usize, ops: usize, flight: usize) -> f64 {
    best(3, || {
        let (memory, owner) = memory(ceiling, policy);
        let ready = Arc::new(std::sync::Barrier::new(2));
        let other = {
            let (memory, ready) = (memory.clone(), ready.clone());
            std::thread::spawn(move || {
                let worker = memory.worker(|| ());
                ready.wait();
                mixed(&worker, owner, ops, flight).0
            })
        };
        let worker = memory.worker(|| ());
        ready.wait();
        let (time, _) = mixed(&worker, owner, ops, flight);
        time.max(other.join().expect("the other worker"))
    })
}

fn caches() {
    let ours = mixed_with(IdlePolicy::Elastic, 1 << 30, 200_000, FLIGHT);
    let peer = mixed_with(IdlePolicy::Uncached, 1 << 30, 200_000, FLIGHT);
    report(&Line { name: "mixed-caches-s", ours, peer, ratio: peer / ours, bar: 2.0, most: false });
}

/// How long one call takes to return a gigabyte to the kernel, in milliseconds: the lower bound.
fn raw_return(bytes: usize) -> f64 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new anonymous mapping at an address of the kernel's choice.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0) };
    assert!(start != libc::MAP_FAILED, "address space for the bench");
    // SAFETY: the mapping made above.
    unsafe { libc::madvise(start, bytes, libc::MADV_NOHUGEPAGE) };
    for page in 0..bytes / 4096 {
        let first = start.cast::<u8>().wrapping_add(page * 4096);
        // SAFETY: inside the mapping made above.
        unsafe { first.write_volatile(1) };
    }
    let begun = Instant::now();
    // SAFETY: the mapping made above, which nothing else refers to.
    unsafe { libc::madvise(start, bytes, libc::MADV_DONTNEED) };
    let time = begun.elapsed().as_secs_f64() * 1e3;
    // SAFETY: the mapping made above, not used any more.
    unsafe { libc::munmap(start, bytes) };
    time
}

/// 1 GiB of idle pool memory, all of it wired (the worst case: memory that has been idle for 100 ms is
/// lent already): milliseconds from the event until the kernel has all of it, compared with the time of
/// the kernel's call alone.
fn give_back() {
    let total = 1 << 30;
    let size = 64 << 10;
    let (mut ours, mut peer) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..5 {
        let (memory, owner) = memory(2 << 30, IdlePolicy::Elastic);
        let worker = memory.worker(|| ());
        let parameters = ebb_mem::PoolParameters::default();
        parameters.max_buffer_pages.set(u32::MAX);
        let pool = PagePool::new(&worker, owner, &parameters);
        let mut blocks = Vec::new();
        for _ in 0..total / size {
            let mut block = pool.take(size).expect("memory for the bench");
            block.chunks_mut(4096).for_each(|page| page[0] = 1);
            blocks.push(block);
        }
        blocks.into_iter().for_each(|block| pool.put(block));
        let start = Instant::now();
        memory.squeeze(start);
        memory.reclaim(Reclaim::Drain, start);
        while worker.needs_poll() {
            worker.poll(start);
        }
        memory.settle();
        ours = ours.min(start.elapsed().as_secs_f64() * 1e3);
        assert!(memory.stats().arena.resident() == 0, "all of it was returned");
        peer = peer.min(raw_return(total));
    }
    report(&Line { name: "give-back-1g-ms", ours, peer, ratio: ours, bar: 50.0, most: true });
}

/// Varying load: cached and free memory stays within the bound of the estimator.
fn sawtooth(seconds: u64) {
    let (memory, owner) = memory(1 << 30, IdlePolicy::Elastic);
    let worker = memory.worker(|| ());
    let mut numbers = Numbers(42);
    let start = Instant::now();
    let mut held: Vec<Block> = Vec::new();
    let mut samples: Vec<(f64, f64)> = Vec::new();
    let mut worst: f64 = 0.0;
    // Time is compressed: each iteration stands for a second of the estimator.
    let mut turn = 0u32;
    while start.elapsed() < Duration::from_secs(seconds) {
        let now = start + Duration::from_secs(u64::from(turn));
        let phase = turn % 40;
        let depth = if phase < 20 { 100 * phase as usize } else { 100 * (40 - phase) as usize };
        for _ in 0..400 {
            if held.len() < depth {
                let len = 4096 << numbers.below(5);
                held.extend(worker.alloc(len, owner).ok());
            } else if !held.is_empty() {
                let victim = numbers.below(held.len());
                worker.free(held.swap_remove(victim));
            }
        }
        worker.poll(now);
        memory.tick(now);
        turn += 1;
        let stats = memory.stats();
        for zone in stats.zones.iter().filter(|zone| zone.item_bytes > 0) {
            // Four thirds of the working set, the floor, one whole bucket, and the worker's two
            // buckets.
            let floor = (256 << 10) / zone.item_bytes + 3 * zone.bucket_max;
            let bound = zone.wss + zone.wss / 3 + floor as u64;
            worst = worst.max(float(zone.free) / float(bound));
        }
        let free: u64 = stats.zones.iter().map(|z| z.free * z.item_bytes as u64).sum();
        if phase == 39 {
            samples.push((f64::from(turn), float(free) / float(MIB as u64)));
        }
    }
    let half = samples.len() / 2;
    let mean = |part: &[(f64, f64)]| {
        part.iter().map(|s| s.1).sum::<f64>() / f64::max(1.0, float(part.len() as u64))
    };
    let (first, second) = (mean(&samples[..half]), mean(&samples[half..]));
    report(&Line {
        name: "sawtooth-bound",
        ours: worst,
        peer: 1.0,
        ratio: worst,
        bar: 1.0,
        most: true,
    });
    let slope = if first > 0.0 { second / first } else { 1.0 };
    report(&Line {
        name: "sawtooth-slope",
        ours: second,
        peer: first,
        ratio: slope,
        bar: 1.05,
        most: true,
    });
}

/// Unwires and rewires beside a thread that makes the kernel reclaim all lent pages.
fn rewire(name: &'static str, cycles: u64) {
    let (memory, owner) = memory(64 * MIB, IdlePolicy::Elastic);
    let worker = memory.worker(|| ());
    let pages = 16;
    let mut buffers: Vec<SmallBuffer> = (0..64)
        .map(|_| {
            let block = worker.alloc(pages * 4096, owner);
            SmallBuffer::new(block.expect("memory for the bench")).expect("small enough")
        })
        .collect();
    let fill = |buffer: &mut SmallBuffer, page: usize, seed: u64| {
        if let Some(bytes) = buffer.bytes_mut(page..page + 1) {
            let word = (seed << 16 | page as u64).to_ne_bytes();
            bytes.chunks_exact_mut(8).for_each(|chunk| chunk.copy_from_slice(&word));
        }
    };
    for (seed, buffer) in buffers.iter_mut().enumerate() {
        (0..pages).for_each(|page| fill(buffer, page, seed as u64));
    }
    let ranges: Vec<(usize, usize)> = buffers
        .iter()
        .map(|b| (b.bytes(0..pages).map_or(0, |bytes| bytes.as_ptr() as usize), pages * 4096))
        .collect();
    let stop = Arc::new(AtomicBool::new(false));
    let reclaimer = {
        let stop = stop.clone();
        std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                for &(start, len) in &ranges {
                    testing::take(start, len);
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        })
    };
    let (mut done, mut lost, mut wrong, mut busy) = (0u64, 0u64, 0u64, 0u64);
    let mut unwired = vec![false; buffers.len()];
    let start = Instant::now();
    let mut numbers = Numbers(7);
    while done < cycles {
        let seed = numbers.below(buffers.len());
        let buffer = &mut buffers[seed];
        if !unwired[seed] {
            unwired[seed] = buffer.unwire(&worker, buffer.all()) == buffer.all();
            Offers::new(&memory).add(buffer);
            continue;
        }
        let Ok(gone) = buffer.rewire(&worker, buffer.all()) else {
            busy += 1;
            std::thread::yield_now();
            continue;
        };
        unwired[seed] = false;
        done += pages as u64;
        lost += u64::from(gone.count_ones());
        for page in 0..pages {
            if gone >> page & 1 == 1 {
                fill(buffer, page, seed as u64);
                continue;
            }
            let word = ((seed as u64) << 16 | page as u64).to_ne_bytes();
            // A few words of each page, ends included: reading all of it would measure memory.
            let bytes = buffer.bytes(page..page + 1).unwrap_or_default();
            let good =
                [0, 8, 2048, 4088].iter().all(|&at| bytes.get(at..at + 8) == Some(&word[..]));
            wrong += u64::from(!good);
        }
    }
    let rate = float(done) / start.elapsed().as_secs_f64();
    stop.store(true, Ordering::Relaxed);
    let _ = reclaimer.join();
    note(format_args!(
        "# {name}: {done} page cycles, {lost} lost and detected, {busy} busy, {rate:.0}/s"
    ));
    report(&Line {
        name,
        ours: float(wrong),
        peer: float(lost),
        ratio: float(wrong),
        bar: 0.0,
        most: true,
    });
    buffers.into_iter().for_each(|buffer| buffer.free(&worker));
}

/// The cost of lending: CPU nanoseconds per page, lent in a batch and wired again.
fn lend_cost() {
    let (memory, owner) = memory(256 * MIB, IdlePolicy::Elastic);
    let worker = memory.worker(|| ());
    let mut buffers: Vec<SmallBuffer> = (0..256)
        .filter_map(|_| SmallBuffer::new(worker.alloc(64 << 10, owner).ok()?).ok())
        .collect();
    for buffer in &mut buffers {
        buffer.bytes_mut(0..16).into_iter().for_each(|bytes| bytes.fill(1));
    }
    let per_page = best(5, || {
        let start = Instant::now();
        for buffer in &mut buffers {
            buffer.unwire(&worker, buffer.all());
            Offers::new(&memory).add(buffer);
        }
        memory.settle();
        for buffer in &mut buffers {
            while buffer.rewire(&worker, buffer.all()).is_err() {}
        }
        start.elapsed().as_secs_f64() * 1e9 / 4096.0
    });
    buffers.into_iter().for_each(|buffer| buffer.free(&worker));
    let refault = best(5, || {
        memory.reclaim(Reclaim::DrainWorkers, Instant::now());
        worker.poll(Instant::now());
        memory.settle();
        memory.calm();
        let start = Instant::now();
        let blocks: Vec<_> = (0..256)
            .filter_map(|_| {
                let mut block = worker.alloc(64 << 10, owner).ok()?;
                block.chunks_mut(4096).for_each(|page| page[0] = 1);
                Some(block)
            })
            .collect();
        let time = start.elapsed().as_secs_f64() * 1e9 / 4096.0;
        blocks.into_iter().for_each(|block| worker.free(block));
        time
    });
    report(&Line {
        name: "lend-and-rewire-ns-a-page",
        ours: per_page,
        peer: refault,
        ratio: refault / per_page,
        bar: 2.0,
        most: false,
    });
}

fn main() {
    let mut names = Vec::new();
    let (mut seconds, mut cycles) = (5, 10_000_000);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut number = || arguments.next().and_then(|n| n.parse().ok());
        match argument.as_str() {
            "--seconds" => seconds = number().unwrap_or(seconds),
            "--cycles" => cycles = number().unwrap_or(cycles),
            _ => names.push(argument),
        }
    }
    let wanted = |name: &str| names.is_empty() || names.iter().any(|n| n == name);
    note(format_args!("# name ours peer ratio bar verdict"));
    if wanted("hit-path") {
        hit_path();
    }
    if wanted("caches") {
        caches();
    }
    if wanted("give-back") {
        give_back();
    }
    if wanted("sawtooth") {
        sawtooth(seconds);
    }
    if wanted("lend-cost") {
        lend_cost();
    }
    if wanted("rewire") {
        rewire("rewire-4k-undetected", cycles);
    }
}
