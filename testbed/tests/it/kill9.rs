//! The daemon is killed repeatedly in the middle of writing: all data that it reported as durable
//! survives.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use testbed::harness::ledger::Ledger;
use testbed::harness::nbd::{Client, wire};
use testbed::harness::pattern::Random;
use testbed::harness::server::Setup;
use testbed::harness::writer::{Promise, Writer, let_write};
use testbed::{Error, Result, Server, check};

const ROUNDS: u32 = 24;
const DISK: usize = 16 << 20;
/// Each has a connection of its own.
const WRITERS: usize = 2;

/// Writes on every connection until the daemon is killed, `delay` after `least` acknowledged requests.
fn write_and_kill(
    server: &mut Server,
    ledger: &Mutex<Ledger>,
    random: &mut Random,
    (least, delay): (u64, Duration),
) -> Result<u64> {
    let share = DISK / WRITERS;
    let mut writers = Vec::new();
    for n in 0..WRITERS {
        let client = Client::open(&server.socket(), "disk")?;
        check(client.flags & wire::FLAG_CAN_MULTI_CONN != 0, || {
            "no multi-connection: a flush covers its own connection only".into()
        })?;
        let range = n * share..(n + 1) * share;
        writers.push(Writer::new(client, ledger, range, random.next(), Promise::Durable));
    }
    std::thread::scope(|scope| {
        let writers: Vec<_> = writers.into_iter().map(|w| scope.spawn(|| w.run())).collect();
        // Kill it even after an error: the writers end only when the daemon does.
        let healthy = let_write(ledger, least, delay).and_then(|()| server.healthy());
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
        // Some rounds kill it at once.
        let least = random.below(25) * random.below(25);
        let delay = Duration::from_micros(500 + random.below(20_000));
        let place = |e: Error| {
            Error::unexpected(format!(
                "EBBD_TEST_SEED={seed}, round {round}, {least} and {delay:?}: {e}"
            ))
        };
        acknowledged +=
            write_and_kill(&mut server, &ledger, &mut random, (least, delay)).map_err(place)?;
        server.restart().map_err(place)?;
        let mut ledger = ledger.lock().unwrap_or_else(PoisonError::into_inner);
        verify(&server, &mut ledger).map_err(place)?;
    }
    let promised = ledger.lock().unwrap_or_else(PoisonError::into_inner).promised();
    // A test that wrote next to nothing proves nothing.
    check(acknowledged > 1000 && promised > 1000, || {
        format!("only {acknowledged} requests acknowledged, {promised} sectors promised")
    })?;
    server.stop()
}

#[test]
fn what_was_durable_before_a_kill_is_there_after_it() -> Result {
    let seed = seeded::seed("EBBD_TEST_SEED", 0xebb_d001);
    rounds(Setup::new()?.image("disk", DISK as u64)?, seed)
}

#[test]
fn also_through_the_page_cache() -> Result {
    let setup = Setup::new()?.log_level("warn");
    let path = setup.image_path("disk");
    let volume = format!("disk=file:{},size=16M,create=true,direct=off", path.display());
    rounds(setup.volume(&volume), seeded::seed("EBBD_TEST_SEED", 0xebb_d002))
}
