//! The suite by which an export shows that it keeps every guard of `ebb_export::guards`.
//!
//! An export implements [`ExportUnderTest`] over the client, frontend or ring of its own tests, and
//! runs [`check_all`] in `tests/it/guards.rs`. The suite acts as the daemon does: it owns the
//! registry, replaces volumes, resizes them, and kills or stops the export while a peer is
//! attached.
//!
//! `EBB_GUARD=<name>` selects one guard.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod attaching;
mod ending;
mod restarting;
mod volumes;

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_export::guards::{ExportKind, Guard, GuardAnswer, answer};
use ebb_mem::Memory;
use ebb_volume::{Volume, Volumes};

/// The time after which a test reports a hang.
pub const HANG: Duration = Duration::from_secs(90);

/// A broken promise.
pub type Violation = String;

/// `Err` with the text unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err(format!($($text)+));
        }
    };
}
pub(crate) use ensure;

/// The fate of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The request succeeded.
    Done,
    /// The request failed.
    Failed,
    /// The connection ended without a reply.
    Gone,
}

/// A peer of an export: a client, or a guest with its disk.
pub trait Peer: Sized {
    /// Sends a write and does not wait.
    fn submit_write(&mut self, at: u64, data: &[u8]);

    /// Waits for the reply to one of the requests sent.
    fn wait(&mut self) -> Reply;

    /// Reads, and returns the data unless the request fails.
    fn read(&mut self, at: u64, len: usize) -> Option<Vec<u8>>;

    /// Flushes.
    fn flush(&mut self) -> Reply;

    /// Waits until the export announces this size; false if the protocol has no such message.
    fn await_size(&mut self, size: u64) -> bool;

    /// Waits until the export detaches the peer.
    fn await_end(&mut self);

    /// Detaches the peer as its owner does.
    fn detach(self);

    /// Writes and waits for the reply.
    fn write(&mut self, at: u64, data: &[u8]) -> Reply {
        self.submit_write(at, data);
        self.wait()
    }
}

/// The outcome of an attachment.
pub enum Attached<P> {
    /// The peer's requests are carried out.
    Served(P),
    /// The peer is attached, and its requests wait for another writer to end.
    Waiting(P),
    /// The export rejects the peer, for this reason as far as it says one.
    Rejected(String),
}

/// The end of a daemon, as a peer that stays attached sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// A kill: requests in flight have no reply, and nothing is saved.
    Kill,
    /// A stop that keeps peers for a successor, after which all volumes were closed.
    HandOver {
        /// Acknowledged data could not be made stable.
        lost: bool,
    },
}

/// A stop or a removal that has begun.
pub struct Ending(Box<dyn FnOnce()>);

impl Ending {
    /// An end that is reached when `wait` returns.
    pub fn new(wait: impl FnOnce() + 'static) -> Ending {
        Ending(Box::new(wait))
    }

    /// Waits for the end.
    pub fn finish(self) {
        (self.0)();
    }
}

/// An export in this process, with its peers.
pub trait ExportUnderTest: Sized {
    /// The export's column of the table.
    const EXPORT: ExportKind;
    /// Whether a peer stays attached after [`End::Kill`].
    const SURVIVES_KILL: bool;
    /// A peer of it.
    type Peer: Peer;

    /// Starts the export on one worker of this memory, without volumes.
    fn start(memory: &Arc<Memory>) -> Self;

    /// The registry, which outlives the export's ends.
    fn volumes(&self) -> &Volumes;

    /// Adds a volume or replaces the one of its name.
    fn serve(&mut self, volume: Arc<Volume>);

    /// Attaches a volume, called `disk` or `other`, for writing.
    fn attach(&mut self, owner: u16, volume: &str) -> Attached<Self::Peer>;

    /// An entry of `allow` that admits this owner.
    fn admitting(&self, owner: u16) -> String;

    /// Detaches the peers that `allow` no longer admits. Does not wait.
    fn end_disallowed(&self);

    /// Tells the export that volumes were resized.
    fn announce_sizes(&self);

    /// Tells the export that a volume's layers were exchanged.
    fn note_backing(&self, volume: &Arc<Volume>);

    /// Begins to withdraw a volume that was removed from the registry.
    fn begin_withdraw(&self, volume: &Arc<Volume>) -> Ending;

    /// Begins an orderly stop.
    fn begin_stop(&mut self) -> Ending;

    /// Ends the export; peers may stay attached.
    fn end(&mut self, end: End);

    /// Starts a successor.
    fn start_again(&mut self);

    /// Has a peer go on with the export, as its protocol does; false if it is not served.
    fn resume(&mut self, peer: &mut Self::Peer) -> bool;
}

/// Checks that an export keeps all guards of the table. Panics with all violations.
pub fn check_all<E: ExportUnderTest>() {
    let mut violations = Vec::new();
    let only = std::env::var("EBB_GUARD").ok();
    let known = |name: &String| Guard::ALL.iter().any(|guard| guard.name() == name);
    assert!(only.as_ref().is_none_or(known), "there is no guard {only:?}");
    for guard in Guard::ALL {
        if only.as_ref().is_some_and(|only| *only != guard.name()) {
            continue;
        }
        if let GuardAnswer::Keeps(_) = answer(guard, E::EXPORT)
            && let Err(violation) = caught(|| check::<E>(guard))
        {
            violations.push(format!("{}: {violation}", guard.name()));
        }
    }
    let name = E::EXPORT.crate_name();
    assert!(violations.is_empty(), "{name} breaks guards:\n{}", violations.join("\n"));
}

/// A panic, such as the report of a hang, as the violation of its guard.
fn caught(check: impl FnOnce() -> Result<(), Violation>) -> Result<(), Violation> {
    std::panic::catch_unwind(AssertUnwindSafe(check)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        Err(text.unwrap_or_default())
    })
}

fn check<E: ExportUnderTest>(guard: Guard) -> Result<(), Violation> {
    match guard {
        Guard::StoreIdentity => restarting::store_identity::<E>(),
        Guard::OneWriter => attaching::one_writer::<E>(),
        Guard::AccessList => attaching::access_list::<E>(),
        Guard::SizeChange => attaching::size_change::<E>(),
        Guard::UnstableWrites => restarting::unstable_writes::<E>(),
        Guard::Limits => ending::limits::<E>(),
        Guard::Stop => ending::stop::<E>(),
        Guard::Removal => ending::removal::<E>(),
        Guard::Restart => restarting::restart::<E>(),
    }
}

/// The ends after which a peer stays attached.
fn ends<E: ExportUnderTest>() -> Vec<End> {
    let kept = End::HandOver { lost: false };
    if E::SURVIVES_KILL { vec![End::Kill, kept] } else { vec![kept] }
}

/// A served peer, or the violation that it is not served.
fn served<E: ExportUnderTest>(
    export: &mut E,
    owner: u16,
    volume: &str,
) -> Result<E::Peer, Violation> {
    match export.attach(owner, volume) {
        Attached::Served(peer) => Ok(peer),
        Attached::Waiting(_) => Err(format!("owner {owner} waits for {volume}")),
        Attached::Rejected(why) => Err(format!("owner {owner} cannot attach {volume}: {why}")),
    }
}

/// `Err` unless a request succeeded.
fn done(reply: Reply, request: &str) -> Result<(), Violation> {
    ensure!(reply == Reply::Done, "{request}: {reply:?}");
    Ok(())
}

/// Waits until `condition` holds, for a bounded time.
pub fn until(event: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < HANG, "this did not happen: {event}");
        std::thread::park_timeout(Duration::from_millis(1));
    }
}
