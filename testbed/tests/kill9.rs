//! The daemon is killed in the middle of writing, again and again: everything that it said was
//! durable is there afterwards.

use std::collections::HashMap;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use testbed::ledger::{Flush, Ledger, Ticket};
use testbed::nbd::{Client, Failure, Request, read_reply, wire};
use testbed::pattern::{Random, SECTOR, content};
use testbed::server::Setup;
use testbed::{Error, Result, Server, check};

const ROUNDS: u32 = 24;
const DISK: usize = 16 << 20;
/// Two writers on connections of their own, each with this many requests in flight.
const WRITERS: usize = 2;
const DEPTH: usize = 16;
/// One request in flight per slot at most, so that no two touch the same sector.
const SLOT: usize = 32 << 10;

/// What a reply is waited for.
enum Open {
    Write(Ticket, bool, usize),
    Flush(Flush),
}

/// One connection that writes as fast as it may until the daemon is gone.
struct Writer<'a> {
    stream: UnixStream,
    random: Random,
    ledger: &'a Mutex<Ledger>,
    slots: Range<usize>,
    busy: Vec<usize>,
    open: HashMap<u64, Open>,
    cookie: u64,
}

impl Writer<'_> {
    fn ledger(&self) -> std::sync::MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs until the connection breaks; gives the number of acknowledged requests.
    fn run(mut self) -> std::result::Result<u64, Failure> {
        let mut acknowledged = 0;
        loop {
            while self.open.len() < DEPTH {
                if self.send().is_err() {
                    return Ok(acknowledged);
                }
            }
            match read_reply(&mut self.stream) {
                Ok((cookie, 0)) => self.done(cookie)?,
                Ok((_, error)) => return Err(Failure::Refused(error)),
                Err(Failure::Io(_)) => return Ok(acknowledged),
                Err(e) => return Err(e),
            }
            acknowledged += 1;
        }
    }

    fn send(&mut self) -> std::io::Result<()> {
        use std::io::Write;
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
            let stamp = if zeroes { 0 } else { self.random.bits() };
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
                self.ledger().written(ticket, fua);
            }
            Some(Open::Flush(flush)) => self.ledger().flushed(flush),
            None => return Err(Failure::Protocol(format!("a reply for {cookie}: not open"))),
        }
        Ok(())
    }
}

/// Numbers here are below the size of a small disk.
fn index(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

/// Writes on every connection until the daemon is killed after `delay`.
fn write_and_kill(
    server: &mut Server,
    ledger: &Mutex<Ledger>,
    random: &mut Random,
    delay: Duration,
) -> Result<u64> {
    let slots = DISK / SLOT / WRITERS;
    let mut writers = Vec::new();
    for n in 0..WRITERS {
        let client = Client::open(&server.socket(), "disk")?;
        check(client.flags & wire::FLAG_CAN_MULTI_CONN != 0, || {
            "no multi-connection: a flush covers its own connection only".into()
        })?;
        writers.push(Writer {
            stream: client.into_stream(),
            random: Random::new(random.bits()),
            ledger,
            slots: n * slots..(n + 1) * slots,
            busy: Vec::new(),
            open: HashMap::new(),
            cookie: 0,
        });
    }
    std::thread::scope(|scope| {
        let writers: Vec<_> = writers.into_iter().map(|w| scope.spawn(|| w.run())).collect();
        std::thread::sleep(delay);
        // Whatever is wrong: the writers end with the daemon only.
        let healthy = server.healthy();
        server.kill9()?;
        healthy?;
        let ended = writers.into_iter().map(|w| w.join());
        let counts = ended.map(|result| match result {
            Ok(count) => count.map_err(Error::from),
            Err(_) => Err(Error::unexpected("a writer panicked")),
        });
        counts.sum()
    })
}

fn verify(server: &Server, ledger: &mut Ledger) -> Result {
    let mut client = Client::open(&server.socket(), "disk")?;
    for offset in (0..DISK as u64).step_by(1 << 20) {
        ledger.crashed(offset, &client.read(offset, 1 << 20)?)?;
    }
    Ok(client.disconnect()?)
}

fn rounds(setup: Setup, seed: u64) -> Result {
    let mut server = setup.start()?;
    let mut random = Random::new(seed);
    let ledger = Mutex::new(Ledger::new(DISK));
    let mut acknowledged = 0;
    for round in 0..ROUNDS {
        let delay = Duration::from_micros(500 + random.below(120_000));
        let place = |e: Error| {
            Error::unexpected(format!("EBBD_TEST_SEED={seed}, round {round}, {delay:?}: {e}"))
        };
        acknowledged += write_and_kill(&mut server, &ledger, &mut random, delay).map_err(place)?;
        server.restart().map_err(place)?;
        let mut ledger = ledger.lock().unwrap_or_else(PoisonError::into_inner);
        verify(&server, &mut ledger).map_err(place)?;
    }
    let promised = ledger.lock().unwrap_or_else(PoisonError::into_inner).promised();
    // A test that wrote nothing has shown nothing.
    check(acknowledged > 1000 && promised > 1000, || {
        format!("only {acknowledged} requests acknowledged, {promised} sectors promised")
    })?;
    server.stop()
}

#[test]
fn what_was_durable_before_a_kill_is_there_after_it() -> Result {
    let seed = Random::seed(0xebb_d001);
    rounds(Setup::new()?.image("disk", DISK as u64)?, seed)
}

#[test]
fn also_through_the_page_cache() -> Result {
    let setup = Setup::new()?.log_level("warn");
    let path = setup.image_path("disk");
    let volume = format!("disk=file:{},size=16M,create=true,direct=off", path.display());
    rounds(setup.volume(&volume), Random::seed(0xebb_d002))
}
