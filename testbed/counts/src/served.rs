//! The program that is measured: one worker, one export, one volume and a client, all on one
//! thread.
//!
//! # Invariants
//! - Product code runs in [`counted_iteration`] and nowhere else while requests are measured, so
//!   that the client's work is in no count.
//! - The thread's clock does not move by itself: no timer makes two runs differ. It advances by
//!   [`STEP`] a batch.
//! - The worker sleeps in its ring as in the daemon, so an operation that the kernel executes on
//!   another thread costs as much as one that it completes at once.

pub mod host;
mod nbd;
mod vhost;
mod vhost_parts;
mod xen;

use std::fmt;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::console::{note, result};
use counting_allocator::{mark_thread, marked_calls};
use ebb_io::sim::SimWorker;

pub use host::{Host, VolumeKind};

/// The load that writes all blocks.
const FIRST: Load = Load { name: "first", write: true, bytes: 4096, depth: 1 };
/// What passes on the clock with each batch of requests.
const STEP: Duration = Duration::from_micros(20);
/// Batches before the first that is measured.
pub const WARM: usize = 300;

/// An error of the measured program: it ends the run.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// Through what requests arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Export {
    /// NBD over a unix socket, simple replies.
    Nbd,
    /// vhost-user-blk: one split ring in shared memory.
    Vhost,
    /// Xen's block protocol in shared memory, with persistent grants.
    Xen,
}

impl Export {
    /// All of them.
    pub const ALL: [Export; 3] = [Export::Nbd, Export::Vhost, Export::Xen];

    /// The name in the figures.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Export::Nbd => "nbd",
            Export::Vhost => "vhost",
            Export::Xen => "xen",
        }
    }
}

/// Batches of equal requests, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// The name in the figures.
    pub name: &'static str,
    /// Requests are writes.
    pub write: bool,
    /// Bytes of a request.
    pub bytes: usize,
    /// Requests that are sent together.
    pub depth: usize,
}

const LOADS: [Load; 4] = [
    Load { name: "read_4k", write: false, bytes: 4096, depth: 1 },
    Load { name: "write_4k", write: true, bytes: 4096, depth: 1 },
    Load { name: "read_4k_qd16", write: false, bytes: 4096, depth: 16 },
    Load { name: "read_128k", write: false, bytes: 128 << 10, depth: 1 },
];

impl Load {
    /// The batches that have `requests` requests at least.
    #[must_use]
    pub fn batches(&self, requests: usize) -> usize {
        requests.div_ceil(self.depth)
    }
}

/// The loads of this volume. A file's operations in batches complete as the kernel's threads do:
/// two runs differ.
pub fn loads(volume: VolumeKind) -> impl Iterator<Item = Load> {
    LOADS.into_iter().filter(move |load| load.depth == 1 || volume != VolumeKind::File)
}

/// A client or guest on the thread of the worker. It never waits.
pub(crate) trait Client {
    /// Sends a batch of requests; the first is at `offset`, the others follow it.
    fn send(&mut self, load: Load, offset: u64) -> Result<(), Error>;

    /// Receives what has arrived; true once each request of the batch has succeeded.
    fn receive(&mut self) -> Result<bool, Error>;
}

/// The cost of a load, over all its requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Requests.
    pub requests: u64,
    /// Operations of the ring.
    pub operations: u64,
    /// Calls of the allocator.
    pub allocations: u64,
    /// Bytes copied by this process; see the crate.
    pub copied: u64,
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cost { requests, operations, allocations, copied } = self;
        write!(
            f,
            "requests={requests} operations={operations} allocations={allocations} copied={copied}"
        )
    }
}

/// One iteration of the worker's loop. Callgrind collects costs within this function only, by its
/// name.
#[inline(never)]
pub fn counted_iteration(worker: &mut SimWorker) {
    worker.iterate_or_sleep();
    // Callgrind sees no end of a function that ends with a jump.
    std::hint::black_box(());
}

/// Callgrind forgets all costs when this function begins, by its name.
#[inline(never)]
pub fn load_begins(load: &str) {
    // Not as the end: functions with the same code are merged.
    std::hint::black_box((load, "begins"));
}

/// Callgrind writes the costs of a load when this function returns, by its name.
#[inline(never)]
pub fn load_has_ended(load: &str) {
    std::hint::black_box((load, "ended"));
}

/// Measures all loads: `requests` of each at least. `copied` is the counter of copied bytes, and
/// `report` receives the cost of each.
///
/// # Errors
/// The export could not be started, or a request failed.
pub fn measure(
    export: Export,
    volume: VolumeKind,
    requests: usize,
    copied: fn() -> u64,
    mut report: impl FnMut(&str, Cost),
) -> Result<(), Error> {
    let mut host = Host::new(volume)?;
    let client: Box<dyn Client> = match export {
        Export::Nbd => Box::new(nbd::connect(&mut host)?),
        Export::Vhost => Box::new(vhost::connect(&mut host)?),
        Export::Xen => Box::new(xen::connect(&mut host)?),
    };
    let now = Instant::now();
    ebb_mem::clock::set(Some(now));
    let mut run = Run { host, client, now, copied };
    // All blocks have data in the file, and are in the cache. Callgrind forgets system calls only
    // with a dump of some counted instructions.
    for number in 0..usize::try_from(host::SIZE)? / FIRST.bytes {
        run.batch(FIRST, number, counted_iteration)?;
    }
    load_has_ended(FIRST.name);
    for load in loads(volume) {
        let cost = run.load(load, requests)?;
        load_has_ended(load.name);
        report(load.name, cost);
    }
    Ok(())
}

struct Run {
    host: Host,
    client: Box<dyn Client>,
    now: Instant,
    copied: fn() -> u64,
}

impl Run {
    /// Sends a batch and waits for its replies; `iterate` is an iteration of the worker.
    fn batch(
        &mut self,
        load: Load,
        number: usize,
        mut iterate: impl FnMut(&mut SimWorker),
    ) -> Result<(), Error> {
        self.now += STEP;
        ebb_mem::clock::set(Some(self.now));
        let all = (load.bytes * load.depth) as u64;
        self.client.send(load, number as u64 * all % host::SIZE)?;
        loop {
            // The worker slept before the batch was sent.
            iterate(&mut self.host.worker);
            if self.client.receive()? {
                return Ok(());
            }
        }
    }

    fn load(&mut self, load: Load, requests: usize) -> Result<Cost, Error> {
        for number in 0..WARM {
            self.batch(load, number, SimWorker::iterate_or_sleep)?;
        }
        load_begins(load.name);
        let batches = load.batches(requests);
        let copied = self.copied;
        let counts = || (marked_calls(), copied());
        let operations = self.host.worker.io().stats().operations;
        let mut cost = Cost { requests: (batches * load.depth) as u64, ..Cost::default() };
        for number in 0..batches {
            self.batch(load, number, |worker| {
                let before = counts();
                mark_thread(true);
                counted_iteration(worker);
                mark_thread(false);
                let after = counts();
                cost.allocations += after.0 - before.0;
                cost.copied += after.1 - before.1;
            })?;
        }
        cost.operations = self.host.worker.io().stats().operations - operations;
        Ok(cost)
    }
}

/// The measured program: `EXPORT VOLUME REQUESTS`. Prints the cost of each load.
pub fn main(copied: fn() -> u64) -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let word = |at: usize| words.get(at).map_or("", String::as_str);
    let export = Export::ALL.into_iter().find(|export| export.name() == word(0));
    let volume = VolumeKind::ALL.into_iter().find(|volume| volume.name() == word(1));
    let (Some(export), Some(volume), Ok(requests)) = (export, volume, word(2).parse()) else {
        note(format_args!("usage: served nbd|vhost|xen null|file|cached REQUESTS"));
        return ExitCode::FAILURE;
    };
    match measure(export, volume, requests, copied, |load, cost| {
        result(format_args!("{load} {cost}"));
    }) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            note(format_args!("{} on {}: {error}", export.name(), volume.name()));
            ExitCode::FAILURE
        }
    }
}
