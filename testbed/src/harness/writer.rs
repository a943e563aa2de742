//! A connection that writes as fast as possible, and records what was acknowledged in a [`Ledger`].
//!
//! Writes, writes of zeroes and flushes in random order, many in flight, of 512 bytes to 32 KiB,
//! some with FUA. It runs until the connection ends, by which the daemon's end is observed.

use crate::Result;
use crate::harness::ledger::{Flush, Ledger, Ticket};
use crate::harness::nbd::{Client, Failure, Request, read_reply, wire};
use crate::harness::pattern::{Random, SECTOR, content};
use crate::harness::process::{PATIENCE, until};
use std::collections::HashMap;
use std::io::Write;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Requests in flight.
const DEPTH: usize = 16;
/// One request in flight per slot of this many bytes at most, so that no two touch one sector.
const SLOT: usize = 32 << 10;

/// What counts as a promise that data survives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Promise {
    /// FUA, or a FLUSH sent after the acknowledgement: what a crash must not lose.
    Durable,
    /// The acknowledgement alone: what a proper stop must not lose.
    Acknowledged,
}

/// The request that a reply belongs to.
#[derive(Debug)]
enum Open {
    Write(Ticket, bool, usize),
    Flush(Flush),
}

/// See the module.
#[derive(Debug)]
pub struct Writer<'a> {
    promise: Promise,
    stream: UnixStream,
    random: Random,
    ledger: &'a Mutex<Ledger>,
    slots: Range<usize>,
    busy: Vec<usize>,
    open: HashMap<u64, Open>,
    cookie: u64,
}

impl Writer<'_> {
    /// A writer on a connection of its own, for the bytes of the disk in `range` (multiples of 32
    /// KiB), which no other writer may use.
    #[must_use]
    pub fn new(
        client: Client,
        ledger: &Mutex<Ledger>,
        range: Range<usize>,
        seed: u64,
        promise: Promise,
    ) -> Writer<'_> {
        Writer {
            promise,
            stream: client.into_stream(),
            random: Random::new(seed),
            ledger,
            slots: range.start / SLOT..range.end / SLOT,
            busy: Vec::new(),
            open: HashMap::new(),
            cookie: 0,
        }
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs until the connection ends; gives the number of acknowledged requests.
    ///
    /// # Errors
    /// The server refused a request other than by ending, or broke the protocol.
    pub fn run(mut self) -> std::result::Result<u64, Failure> {
        let mut acknowledged = 0;
        loop {
            while self.open.len() < DEPTH {
                if self.send().is_err() {
                    return Ok(acknowledged);
                }
            }
            match read_reply(&mut self.stream) {
                Ok((cookie, 0)) => self.done(cookie)?,
                // It says that it is ending, and does.
                Ok((_, wire::ESHUTDOWN)) => return Ok(acknowledged),
                Ok((_, error)) => return Err(Failure::Refused(error)),
                Err(Failure::Io(_)) => return Ok(acknowledged),
                Err(e) => return Err(e),
            }
            acknowledged += 1;
        }
    }

    fn send(&mut self) -> std::io::Result<()> {
        self.cookie += 1;
        let mut request = Request { cookie: self.cookie, ..Request::default() };
        let mut payload = Vec::new();
        let open = if self.random.below(10) == 0 {
            request.command = wire::CMD_FLUSH;
            Open::Flush(self.ledger().flush())
        } else {
            let slots = self.slots.len() as u64;
            let slot = loop {
                let slot = self.slots.start + index(self.random.below(slots));
                if !self.busy.contains(&slot) {
                    break slot;
                }
            };
            let first = index(self.random.below((SLOT / SECTOR) as u64));
            let count = 1 + index(self.random.below((SLOT / SECTOR - first) as u64));
            let first = slot * SLOT / SECTOR + first;
            let fua = self.random.below(4) == 0;
            let zeroes = self.random.below(8) == 0;
            let stamp = if zeroes { 0 } else { self.random.next() };
            request.command = if zeroes { wire::CMD_WRITE_ZEROES } else { wire::CMD_WRITE };
            request.flags = if fua { wire::FLAG_FUA } else { 0 };
            request.offset = (first * SECTOR) as u64;
            request.length = u32::try_from(count * SECTOR).unwrap_or(0);
            if !zeroes {
                payload = content(stamp, request.offset, count * SECTOR);
            }
            self.busy.push(slot);
            Open::Write(self.ledger().write(stamp, first..first + count), fua, slot)
        };
        self.open.insert(self.cookie, open);
        self.stream.write_all(&[&request.bytes(), payload.as_slice()].concat())
    }

    fn done(&mut self, cookie: u64) -> std::result::Result<(), Failure> {
        match self.open.remove(&cookie) {
            Some(Open::Write(ticket, fua, slot)) => {
                self.busy.retain(|s| *s != slot);
                let kept = fua || self.promise == Promise::Acknowledged;
                self.ledger().written(ticket, kept);
            }
            Some(Open::Flush(flush)) => self.ledger().flushed(flush),
            None => return Err(Failure::Protocol(format!("a reply for {cookie}: not open"))),
        }
        Ok(())
    }
}

/// Waits until so many more requests were acknowledged, and a little longer, to stop a daemon at any moment of its
/// work: a time alone is all idle on a busy machine.
///
/// # Errors
/// They were not acknowledged in time.
pub fn let_write(ledger: &Mutex<Ledger>, more: u64, longer: Duration) -> Result {
    let answers = || ledger.lock().unwrap_or_else(PoisonError::into_inner).answers();
    let enough = answers() + more;
    until(&format!("{more} writes"), PATIENCE, || Ok((answers() >= enough).then_some(())))?;
    std::thread::sleep(longer);
    Ok(())
}

/// Numbers here are below the size of a small disk.
fn index(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}
