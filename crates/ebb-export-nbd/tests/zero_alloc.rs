//! No request allocates from the heap once its connection is warm: a real server, a real client,
//! and an allocator that counts the allocations of the worker's thread.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "this is a test")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::{Client, FLUSH, FUA, READ, Rig, Style, file, memory, pattern};
use ebb_store::Direct;
use ebb_volume::Volume;

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// True on the threads whose allocations count.
    static COUNTS: Cell<bool> = const { Cell::new(false) };
}

fn note(layout: Layout) {
    if COUNTS.try_with(Cell::get) == Ok(true) {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        if std::env::var_os("EBB_SHOW_ALLOCATIONS").is_some() {
            COUNTS.set(false);
            println!("{} bytes\n{}", layout.size(), std::backtrace::Backtrace::force_capture());
            COUNTS.set(true);
        }
    }
}

// SAFETY: everything is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout);
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(layout);
        // SAFETY: as the caller promises.
        unsafe { System.realloc(ptr, layout, size) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SIZE: u64 = 4 << 20;
const BLOCK: u64 = 4096;
/// Attempts of which one must make no allocation.
const GOES: u32 = 5;

/// Sends a batch of `depth` requests, then receives their replies.
fn batch(client: &mut Client, depth: u64, round: u64, data: &[u8], bytes: &mut Vec<u8>) {
    bytes.clear();
    for number in 0..depth {
        let offset = (round * 31 + number * 7) % (SIZE / BLOCK) * BLOCK;
        match (round + number) % 8 {
            0..4 => bytes.extend(client.header(READ, 0, number + 1, offset, BLOCK)),
            kind @ 4..7 => {
                let flags = if kind == 6 { FUA } else { 0 };
                bytes.extend(client.header(1, flags, number + 1, offset, BLOCK));
                bytes.extend_from_slice(data);
            }
            _ => bytes.extend(client.header(FLUSH, 0, number + 1, 0, 0)),
        }
    }
    client.stream.write_all(bytes).unwrap();
    for _ in 0..depth {
        let kind = |cookie: u64| {
            let number = cookie - 1;
            let offset = (round * 31 + number * 7) % (SIZE / BLOCK) * BLOCK;
            ((round + number) % 8 < 4).then_some((offset, 4096))
        };
        assert_eq!(client.reply(kind).unwrap().error, 0);
    }
}

fn allocations(rig: &Rig, style: Style, depth: u64, requests: u64) -> u64 {
    let mut client = rig.client("disk", style);
    let data = pattern(1, 4096);
    let mut bytes = Vec::new();
    for round in 0..1000 / depth + 50 {
        batch(&mut client, depth, round, &data, &mut bytes);
    }
    // A connection is warm when it has had its maximum of requests in flight, which on
    // a busy machine may take more than one attempt; allocations per request would occur in every attempt.
    let mut count = 0;
    for _ in 0..GOES {
        let before = ALLOCATIONS.load(Ordering::SeqCst);
        for round in 0..requests / depth {
            batch(&mut client, depth, round, &data, &mut bytes);
        }
        count = ALLOCATIONS.load(Ordering::SeqCst) - before;
        if count == 0 {
            break;
        }
    }
    count
}

fn is_zero(volume: Arc<Volume>) {
    let rig = Rig::with([volume]);
    let mut filler = rig.client("disk", Style::Simple);
    for at in (0..SIZE).step_by(1 << 20) {
        assert_eq!(filler.write(0, at, &pattern(at, 1 << 20)), 0);
    }
    drop(filler);
    rig.run(|_, _| async { COUNTS.set(true) });
    for (style, depth) in [
        (Style::Simple, 1),
        (Style::Simple, 32),
        (Style::Structured, 1),
        (Style::Structured, 32),
        (Style::Extended, 32),
    ] {
        let requests = 4000;
        let count = allocations(&rig, style, depth, requests);
        assert_eq!(count, 0, "{count} allocations in {requests} requests, {style:?}, {depth} deep");
    }
    // The counter works: a new connection does allocate.
    let before = ALLOCATIONS.load(Ordering::SeqCst);
    drop(rig.client("disk", Style::Simple));
    assert!(ALLOCATIONS.load(Ordering::SeqCst) > before);
}

/// All in one test: the count is that of the process.
#[test]
fn a_warm_connection_allocates_nothing() {
    is_zero(memory("disk", SIZE));
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for direct in [Direct::Off, Direct::Auto] {
        is_zero(file("disk", &folder.path().join(format!("{direct:?}")), SIZE, direct));
    }
}
