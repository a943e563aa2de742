//! What a real daemon logs about stores that are lost, silent or broken. Lines are counted, also during many
//! failures.

use testbed::harness::nbd::{Client, Failure};
use testbed::harness::nbdkit::Nbdkit;
use testbed::harness::process;
use testbed::harness::server::Setup;
use testbed::{Error, Result, Server, check};

const LOST: &str = "the connection to the server was lost; requests wait";
const MOMENT: &str = "was lost and made again at once";
const BACK: &str = "connected to the server again";
const SILENT: &str = "no reply for 1";
const ANSWERED: &str = "the requests without a reply have completed";

fn lines<'a>(log: &'a str, what: &str) -> Vec<&'a str> {
    log.lines().filter(|line| line.contains(what)).collect()
}

fn until_logged(server: &Server, what: &str, count: usize) -> Result {
    process::until(what, process::PATIENCE, || {
        Ok((lines(&server.log(), what).len() >= count).then_some(()))
    })
}

fn expect(server: &Server, what: &str, counts: std::ops::RangeInclusive<usize>) -> Result {
    let log = server.log();
    let count = lines(&log, what).len();
    check(counts.contains(&count), || format!("{count} lines `{what}`, not {counts:?}:\n{log}"))
}

fn started(store: &Nbdkit, setup: Setup) -> Result<Server> {
    setup.volume(&format!("disk={}", store.uri())).args(["--workers", "2"]).start()
}

#[test]
fn a_lost_server_and_its_return_are_logged_once_with_volume_server_and_remedy() -> Result {
    let setup = Setup::new()?;
    let mut store = Nbdkit::start(setup.dir(), &["memory", "16M"])?;
    let mut server = started(&store, setup)?;
    // One connection per worker, so that several are lost at once.
    let mut clients =
        [Client::open(&server.socket(), "disk")?, Client::open(&server.socket(), "disk")?];
    for client in &mut clients {
        client.read(0, 4096)?;
    }
    expect(&server, "WARN", 0..=0)?;
    store.kill()?;
    until_logged(&server, LOST, 1)?;
    store.restart()?;
    until_logged(&server, BACK, 1)?;
    expect(&server, LOST, 1..=1)?;
    expect(&server, BACK, 1..=1)?;
    let log = server.log();
    let told = lines(&log, LOST)[0];
    for part in ["WARN", "volume=\"disk\"", "store.sock", "reason=", "check that the server runs"] {
        check(told.contains(part), || format!("no `{part}` in: {told}"))?;
    }
    check(lines(&log, BACK)[0].contains("seconds="), || "no duration of the outage".to_owned())?;
    for client in &mut clients {
        client.read(0, 4096)?;
    }
    server.healthy()?;
    server.stop()
}

#[test]
fn a_server_that_comes_and_goes_does_not_fill_the_log() -> Result {
    let setup = Setup::new()?;
    let mut store = Nbdkit::start(setup.dir(), &["memory", "16M"])?;
    let mut server = started(&store, setup)?;
    for round in 0..25 {
        let mut client = Client::open(&server.socket(), "disk")?;
        client.write(round * 4096, &[1; 4096], 0)?;
        store.restart()?;
        client.read(round * 4096, 4096)?;
    }
    until_logged(&server, "was lost", 1)?;
    // Three failures a minute are logged, and the end of each; the machine may be slow.
    let log = server.log();
    let all = lines(&log, LOST).len() + lines(&log, MOMENT).len() + lines(&log, BACK).len();
    check(all <= 18, || format!("{all} lines about 25 restarts:\n{log}"))?;
    server.healthy()?;
    server.stop()
}

#[test]
fn a_server_that_does_not_reply_is_logged_after_ten_seconds_and_so_is_its_reply() -> Result {
    let setup = Setup::new()?;
    let store = Nbdkit::start(setup.dir(), &["memory", "16M"])?;
    let mut server = started(&store, setup)?;
    let socket = server.socket();
    Client::open(&socket, "disk")?.read(0, 4096)?;
    store.stand_still()?;
    // The connections may break before the server continues.
    let writers: Vec<_> = (1..5)
        .map(|number| {
            let socket = socket.clone();
            let write = move |mut client: Client| client.write(number * 4096, &[1; 4096], 0);
            std::thread::spawn(move || Client::open(&socket, "disk").and_then(write))
        })
        .collect();
    let told = until_logged(&server, SILENT, 1);
    store.go_on()?;
    told?;
    until_logged(&server, ANSWERED, 1)?;
    for writer in writers {
        let _ = writer.join().map_err(|_| Error::unexpected("a writer panicked"))?;
    }
    expect(&server, SILENT, 1..=1)?;
    expect(&server, ANSWERED, 1..=1)?;
    let log = server.log();
    let told = lines(&log, SILENT)[0];
    for part in ["WARN", "volume=\"disk\"", "store.sock", "requests=", "`?silence=SECONDS`"] {
        check(told.contains(part), || format!("no `{part}` in: {told}"))?;
    }
    server.healthy()?;
    server.stop()
}

#[test]
fn a_storm_of_failures_is_a_line_with_a_count() -> Result {
    let setup = Setup::new()?;
    let faults = ["--filter=error", "memory", "16M"];
    let rates = ["error-pwrite=ENOSPC", "error-pwrite-rate=100%"];
    let store = Nbdkit::start(setup.dir(), &[&faults[..], &rates].concat())?;
    let mut server = started(&store, setup)?;
    let mut client = Client::open(&server.socket(), "disk")?;
    let mut storm = |count: u64| -> Result {
        for number in 0..count {
            let outcome = client.write(number % 4096 * 4096, &[1; 4096], 0);
            let refused = matches!(outcome, Err(Failure::Refused { .. }));
            check(refused, || format!("a write to a full store: {outcome:?}"))?;
        }
        Ok(())
    };
    storm(1)?;
    until_logged(&server, "writing failed", 1)?;
    storm(2000)?;
    // One line a minute: the test took less, unless the machine is slow.
    expect(&server, "writing failed", 1..=5)?;
    let log = server.log();
    let told = lines(&log, "writing failed")[0];
    for part in ["WARN", "volume=\"disk\"", "store.sock", "count=1", "the store is full", "space"] {
        check(told.contains(part), || format!("no `{part}` in: {told}"))?;
    }
    client.flush()?;
    client.read(0, 4096)?;
    server.healthy()?;
    server.stop()
}
