//! The threads that connect to servers. An attempt blocks for up to [`ATTEMPT`], or longer while a name is resolved.
//!
//! Each attempt has a thread of its own, because system calls for all other volumes share the pool of the `blocking`
//! crate, which attempts to connect to dead servers would fill.
//!
//! # Invariants
//! - At most [`AT_ONCE`] attempts run at a time, and [`TO_ONE_ADDRESS`] to one address; further ones wait.
//! - Half of the first number is kept for addresses whose last attempt was not slow, for each [`KEPT_FOR_ONE`]; a
//!   quarter for those of them to which no attempt is running. Half of the second is kept for exports to which no
//!   attempt is running and the last one was not slow. So attempts to connect to servers that do not reply wait for
//!   each other, and hardly ever delay one to a server that does, also before they have been slow.
//! - Of the attempts that may run, those go first whose address has the fewest running ones, then those whose export
//!   has, then the oldest.
//! - A link has one attempt at a time, which is removed when it is dropped before it runs.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_io::{Io, clock};

use super::connect::ATTEMPT;

/// Attempts at a time: of all volumes, and to one address.
const AT_ONCE: usize = 256;
const TO_ONE_ADDRESS: usize = 64;
/// So many to an address whose last attempt was not slow may be among those that are kept for such addresses.
const KEPT_FOR_ONE: usize = 16;
/// An attempt that took this long, whatever its result, was slow: a server that is far away, or has thousands of clients
/// to accept after a restart, needs seconds.
const SLOW: Duration = Duration::from_secs(5);
/// How much longer than [`ATTEMPT`] a running attempt is waited for, so that its own error is reported if it has one.
/// Resolving a name may take longer, and cannot be interrupted: its thread counts as running until it ends.
const GRACE: Duration = Duration::from_millis(500);
/// Addresses, and exports of one, that are remembered as slow.
const REMEMBERED: usize = 8 << 10;
/// Enough for a TLS handshake.
const STACK_BYTES: usize = 512 << 10;

type Job = Box<dyn FnOnce() + Send>;

static ATTEMPTS: Mutex<Attempts<Job>> = Mutex::new(Attempts::new());

fn attempts() -> MutexGuard<'static, Attempts<Job>> {
    // Its methods do not panic.
    ATTEMPTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What an attempt connects to: an address, and one of its exports.
pub(super) type Target = (String, String);

/// Runs `connect` on a thread as soon as the limits permit, which may be never if the server does not reply. When it
/// runs, it is waited for no longer than its time limit.
///
/// # Errors
/// `TimedOut`; or the thread could not be started.
pub(super) async fn run<T: Send + 'static>(
    io: &Io,
    target: Target,
    connect: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    // The first message is empty, and says that the attempt has begun.
    let (sender, receiver) = async_channel::bounded(2);
    let job = Box::new(move || {
        // These fail if the attempt was dropped.
        let _ = sender.try_send(None);
        let _ = sender.try_send(Some(connect()));
    });
    let number = attempts().push(target.clone(), job);
    let _waiting = Waiting(target, number);
    start_permitted();
    let no_thread =
        |_| io::Error::other("cannot start a thread: raise TasksMax, or the limit of processes");
    receiver.recv().await.map_err(no_thread)?;
    match io.timeout(ATTEMPT + GRACE, receiver.recv()).await {
        Some(Ok(Some(result))) => Ok(result),
        _ => Err(io::ErrorKind::TimedOut.into()),
    }
}

/// Removes an attempt that does not run yet.
struct Waiting(Target, u64);

impl Drop for Waiting {
    fn drop(&mut self) {
        attempts().withdraw(&self.0, self.1);
    }
}

/// A running attempt.
struct Running {
    target: Target,
    since: Instant,
}

impl Drop for Running {
    fn drop(&mut self) {
        attempts().end(&self.target, clock::since(self.since) >= SLOW);
        start_permitted();
    }
}

fn start_permitted() {
    loop {
        // Not in the loop's condition, where it would be locked during the body.
        let next = attempts().take_next();
        let Some((target, job)) = next else { return };
        // Outside of the thread: it is dropped below if that does not start.
        let held = Arc::new(Mutex::new(Some(job)));
        let (own, own_target) = (held.clone(), target.clone());
        let thread =
            std::thread::Builder::new().name("ebbd-connect".into()).stack_size(STACK_BYTES);
        let started = ebb_sandbox::threads::spawn(thread, move || {
            let _running = Running { target: own_target, since: clock::now() };
            let job = own.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(job) = job {
                job();
            }
        });
        if started.is_err() {
            attempts().end(&target, false);
        }
    }
}

/// Running attempts to one address, or to one export.
#[derive(Debug, Default)]
struct Share {
    running: usize,
    /// The last one was slow.
    slow: bool,
}

impl Share {
    fn is_fresh(&self) -> bool {
        self.running == 0 && !self.slow
    }

    fn end(&mut self, slow: bool) {
        self.running = self.running.saturating_sub(1);
        self.slow = slow;
    }
}

/// The most attempts to one address, among which one more for an export may begin.
fn most_to_one_address(export: &Share) -> usize {
    if export.is_fresh() { TO_ONE_ADDRESS } else { TO_ONE_ADDRESS / 2 }
}

/// The most attempts at a time, among which one more to an address may begin.
fn most_at_once(address: &Share) -> usize {
    if address.is_fresh() {
        AT_ONCE
    } else if !address.slow && address.running < KEPT_FOR_ONE {
        AT_ONCE - AT_ONCE / 4
    } else {
        AT_ONCE / 2
    }
}

#[derive(Debug)]
struct Export<J> {
    share: Share,
    /// With increasing numbers.
    waiting: VecDeque<(u64, J)>,
}

#[derive(Debug)]
struct Address<J> {
    share: Share,
    exports: BTreeMap<String, Export<J>>,
}

/// All attempts of the process.
#[derive(Debug)]
struct Attempts<J> {
    running: usize,
    next: u64,
    addresses: BTreeMap<String, Address<J>>,
}

impl<J> Default for Export<J> {
    fn default() -> Export<J> {
        Export { share: Share::default(), waiting: VecDeque::new() }
    }
}

impl<J> Default for Address<J> {
    fn default() -> Address<J> {
        Address { share: Share::default(), exports: BTreeMap::new() }
    }
}

impl<J> Export<J> {
    fn is_busy(&self) -> bool {
        self.share.running > 0 || !self.waiting.is_empty()
    }
}

impl<J> Attempts<J> {
    const fn new() -> Attempts<J> {
        Attempts { running: 0, next: 0, addresses: BTreeMap::new() }
    }

    /// Adds an attempt that waits; returns its number.
    fn push(&mut self, (address, export): Target, job: J) -> u64 {
        let number = self.next;
        self.next += 1;
        let address = self.addresses.entry(address).or_default();
        address.exports.entry(export).or_default().waiting.push_back((number, job));
        number
    }

    fn withdraw(&mut self, target: &Target, number: u64) {
        let Some(address) = self.addresses.get_mut(&target.0) else { return };
        if let Some(export) = address.exports.get_mut(&target.1) {
            export.waiting.retain(|(waiting, _)| *waiting != number);
        }
        self.forget(target);
    }

    /// The next attempt that may run; it counts as running until [`Attempts::end`].
    fn take_next(&mut self) -> Option<(Target, J)> {
        let mut first: Option<((usize, usize, u64), Target)> = None;
        for (name, address) in &self.addresses {
            let (share, exports) = (&address.share, &address.exports);
            if share.running >= TO_ONE_ADDRESS || self.running >= most_at_once(share) {
                continue;
            }
            for (export_name, export) in exports {
                let Some((number, _)) = export.waiting.front() else { continue };
                let rank = (share.running, export.share.running, *number);
                if share.running < most_to_one_address(&export.share)
                    && first.as_ref().is_none_or(|(best, _)| rank < *best)
                {
                    first = Some((rank, (name.clone(), export_name.clone())));
                }
            }
        }
        let (_, target) = first?;
        let address = self.addresses.get_mut(&target.0)?;
        let export = address.exports.get_mut(&target.1)?;
        let (_, job) = export.waiting.pop_front()?;
        self.running += 1;
        address.share.running += 1;
        export.share.running += 1;
        Some((target, job))
    }

    /// A running attempt has ended.
    fn end(&mut self, target: &Target, slow: bool) {
        self.running = self.running.saturating_sub(1);
        if let Some(address) = self.addresses.get_mut(&target.0) {
            address.share.end(slow);
            if let Some(export) = address.exports.get_mut(&target.1) {
                export.share.end(slow);
            }
        }
        self.forget(target);
    }

    /// Removes what need not be remembered of a target.
    fn forget(&mut self, (name, export_name): &Target) {
        let many = self.addresses.len() > REMEMBERED;
        let Some(address) = self.addresses.get_mut(name) else { return };
        let many_exports = address.exports.len() > REMEMBERED;
        let is_idle =
            |export: &Export<J>| !export.is_busy() && (many_exports || !export.share.slow);
        if address.exports.get(export_name).is_some_and(is_idle) {
            address.exports.remove(export_name);
        }
        if address.exports.is_empty() || (many && !address.exports.values().any(Export::is_busy)) {
            self.addresses.remove(name);
        }
    }
}

#[cfg(test)]
mod tests;
