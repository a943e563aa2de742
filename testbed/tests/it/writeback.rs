//! `cache = "writeback"` in the daemon, in front of a third-party remote store: writes acknowledged
//! from memory, flushes, and the store's content after failures, kills and shutdowns.

use std::fs;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use testbed::harness::binary::{self, Build};
use testbed::harness::ledger::Ledger;
use testbed::harness::nbd::{Client, Failure};
use testbed::harness::pattern::{Random, content};
use testbed::harness::process::{PATIENCE, until};
use testbed::harness::server::Setup;
use testbed::harness::writer::{Promise, Writer, let_write};
use testbed::{Error, Nbdkit, Result, Server, Tool, check};

const PAGE: u64 = 4096;
const SIZE: u64 = 16 << 20;
/// A placeholder for the path of the store's file, which survives a restart of the server.
const DATA: &str = "DATA";

/// A daemon with volumes on stores of their own, each an `nbdkit`.
struct Rig {
    stores: Vec<Nbdkit>,
    server: Server,
    control: PathBuf,
    /// While this file exists every write to a store with the `error` filter fails.
    trouble: PathBuf,
}

impl Rig {
    /// Volumes `disk0`, `disk1` and so on, each on `nbdkit` with these parameters.
    fn new(plugins: &[&[&str]], arguments: &[&str]) -> Result<Rig> {
        let mut setup = Setup::new()?;
        let trouble = setup.dir().join("trouble");
        let mut stores = Vec::new();
        for (number, plugin) in plugins.iter().enumerate() {
            let dir = setup.dir().join(format!("store{number}"));
            fs::create_dir(&dir).map_err(Error::io("make a folder"))?;
            let file = format!("error-file={}", trouble.display());
            let data = dir.join("data");
            let made = fs::File::create(&data).and_then(|file| file.set_len(SIZE));
            made.map_err(Error::io("make the store's file"))?;
            let data = data.display().to_string();
            let mut parameters = plugin.to_vec();
            parameters.iter_mut().filter(|word| **word == DATA).for_each(|word| *word = &data);
            if plugin.contains(&"--filter=error") {
                parameters.push(&file);
            }
            let store = Nbdkit::start(&dir, &parameters)?;
            setup = setup.volume(&format!("disk{number}={},cache=writeback", store.uri()));
            stores.push(store);
        }
        let control = setup.dir().join("control.sock");
        let setup = setup.arg("--control").arg(&control).args(arguments).arg("--cache-min=64M");
        Ok(Rig { stores, server: setup.start()?, control, trouble })
    }

    fn client(&self, disk: &str) -> Result<Client> {
        Ok(Client::open(&self.server.socket(), disk)?)
    }

    fn stat(&self) -> Result<Value> {
        let ebbd = binary::ebbd(Build::AsTests)?;
        Tool::new(&ebbd).arg("stat").arg("--control").arg(&self.control).arg("--json").ok()?.json()
    }

    fn ebbd(&self, arguments: &[&str]) -> Result<Tool> {
        let ebbd = binary::ebbd(Build::AsTests)?;
        Ok(Tool::new(&ebbd).args(arguments).arg("--control").arg(&self.control))
    }

    /// The number of memory pressure events of the host.
    fn signs_of_pressure(&self) -> Result<u64> {
        let stat = self.stat()?;
        let events = stat["pressure"]["events"].as_array().cloned().unwrap_or_default();
        Ok(events.iter().skip(1).filter_map(Value::as_u64).sum())
    }

    /// A figure of the first backing device.
    fn bdi(&self, field: &str) -> Result<u64> {
        let stat = self.stat()?;
        let value = stat["bdis"][0][field].as_u64();
        value.ok_or_else(|| Error::unexpected(format!("no {field} in {stat}")))
    }

    /// Checks that the store holds these pages, written with this stamp.
    fn holds(&self, store: usize, pages: &[u64], stamp: u64) -> Result {
        let mut client = self.stores[store].client()?;
        for page in pages {
            let data = client.read(page * PAGE, 4096)?;
            check(data == content(stamp, page * PAGE, 4096), || {
                format!("page {page} is not in store {store}")
            })?;
        }
        Ok(client.disconnect()?)
    }
}

/// The numbers below `end` in random order.
fn shuffled(end: u64, random: &mut Random) -> Vec<u64> {
    let mut all: Vec<u64> = (0..end).collect();
    for place in (1..all.len()).rev() {
        let other = random.below(place as u64 + 1);
        all.swap(place, usize::try_from(other).unwrap_or(0));
    }
    all
}

fn write_pages(client: &mut Client, pages: &[u64], stamp: u64) -> Result {
    for page in pages {
        client.write(page * PAGE, &content(stamp, page * PAGE, 4096), 0)?;
    }
    Ok(())
}

#[test]
fn writes_are_acknowledged_from_memory_and_a_flush_writes_them_to_the_store() -> Result {
    let mut rig = Rig::new(&[&["memory", "16M", "--filter=delay", "wdelay=1ms"]], &[])?;
    let mut random = Random::new(seeded::seed("EBBD_TEST_SEED", 0xebb_b001));
    let pages = shuffled(64, &mut random);
    let mut client = rig.client("disk0")?;
    let mut gathered = false;
    // If the host is short of memory everything is written at once: then try again.
    for _ in 0..10 {
        let before = (rig.stores[0].count("Write")?, rig.signs_of_pressure()?);
        for stamp in 1..=40 {
            write_pages(&mut client, &pages, stamp)?;
        }
        let writes = rig.stores[0].count("Write")? - before.0;
        // Fewer writes than requests: neighbouring pages are written together, and repeated writes once.
        gathered = writes < 40 * 64 / 2;
        if gathered {
            break;
        }
        let signs = rig.signs_of_pressure()? - before.1;
        check(signs > 0, || format!("{writes} writes reached the store"))?;
        client.flush()?;
        std::thread::sleep(Duration::from_secs(3));
    }
    check(gathered, || "the host was short of memory in every attempt".into())?;
    let own = client.read(0, 4096)?;
    check(own == content(40, 0, 4096), || "a read does not see the write".into())?;
    client.flush()?;
    check(rig.stores[0].count("Flush")? > 0, || "no flush reached the store".into())?;
    rig.holds(0, &pages, 40)?;
    let stat = rig.stat()?;
    let bdi = &stat["bdis"][0];
    check(bdi["volumes"][0] == "disk0" && bdi["written_bytes"].as_u64() > Some(0), || {
        format!("the figures of the backing device are missing: {stat}")
    })?;
    check(bdi["dirty_bytes"] == 0 && bdi["writeback_bytes"] == 0, || {
        format!("there is dirty data after a flush: {bdi}")
    })?;
    client.disconnect()?;
    rig.server.stop()
}

#[test]
fn what_was_durable_before_a_kill_is_in_the_store() -> Result {
    let mut rig = Rig::new(&[&["file", DATA]], &[])?;
    let mut random = Random::new(seeded::seed("EBBD_TEST_SEED", 0xebb_b002));
    let size = usize::try_from(SIZE).map_err(|_| Error::unexpected("the size"))?;
    let ledger = Mutex::new(Ledger::new(size));
    let mut acknowledged = 0;
    for round in 0..10 {
        let least = random.below(400);
        let delay = Duration::from_micros(500 + random.below(20_000));
        let mut writers = Vec::new();
        for n in 0..2 {
            let range = n * size / 2..(n + 1) * size / 2;
            let client = rig.client("disk0")?;
            writers.push(Writer::new(client, &ledger, range, random.next(), Promise::Durable));
        }
        let server = &mut rig.server;
        acknowledged += std::thread::scope(|scope| {
            let writers: Vec<_> = writers.into_iter().map(|w| scope.spawn(|| w.run())).collect();
            let healthy = let_write(&ledger, least, delay).and_then(|()| server.healthy());
            server.kill9()?;
            healthy?;
            let ended = writers.into_iter().map(|w| w.join());
            ended
                .map(|result| match result {
                    Ok(count) => count.map_err(Error::from),
                    Err(_) => Err(Error::unexpected("a writer panicked")),
                })
                .sum::<Result<u64>>()
        })?;
        let mut ledger = ledger.lock().unwrap_or_else(PoisonError::into_inner);
        // nbdkit may crash when its client is killed.
        rig.stores[0].restart()?;
        let mut store = rig.stores[0].client()?;
        for offset in (0..SIZE).step_by(1 << 20) {
            let place = |e| Error::unexpected(format!("round {round}: {e}"));
            ledger.crashed(offset, &store.read(offset, 1 << 20)?).map_err(place)?;
        }
        store.disconnect()?;
        drop(ledger);
        rig.server.restart()?;
    }
    let promised = ledger.lock().unwrap_or_else(PoisonError::into_inner).promised();
    check(acknowledged > 500 && promised > 500, || {
        format!("only {acknowledged} requests acknowledged, {promised} sectors promised")
    })?;
    rig.server.stop()
}

#[test]
fn a_shutdown_writes_everything_to_the_store() -> Result {
    let mut rig = Rig::new(&[&["memory", "16M", "--filter=delay", "wdelay=5ms"]], &[])?;
    let pages = shuffled(512, &mut Random::new(seeded::seed("EBBD_TEST_SEED", 0xebb_b003)));
    let mut client = rig.client("disk0")?;
    write_pages(&mut client, &pages, 9)?;
    rig.server.stop()?;
    rig.holds(0, &pages, 9)
}

const FAILING: [&str; 4] = ["memory", "16M", "--filter=error", "error-pwrite-rate=100%"];

#[test]
fn a_failing_store_fails_the_flush_and_its_data_is_kept() -> Result {
    let mut rig = Rig::new(&[&FAILING], &[])?;
    fs::write(&rig.trouble, "").map_err(Error::io("make trouble"))?;
    let pages = shuffled(128, &mut Random::new(seeded::seed("EBBD_TEST_SEED", 0xebb_b004)));
    let mut client = rig.client("disk0")?;
    write_pages(&mut client, &pages, 5)?;
    let told = client.flush();
    check(matches!(told, Err(Failure::Refused(_))), || {
        format!("the result of the flush: {told:?}")
    })?;
    let own = client.read(PAGE, 4096)?;
    check(own == content(5, PAGE, 4096), || "the data is lost".into())?;
    fs::remove_file(&rig.trouble).map_err(Error::io("end the trouble"))?;
    // A background write that failed meanwhile is reported by one more flush.
    let _ = client.flush();
    client.flush()?;
    rig.holds(0, &pages, 5)?;
    client.disconnect()?;
    rig.server.stop()
}

#[test]
fn a_stop_that_cannot_write_lists_what_is_left() -> Result {
    let mut rig = Rig::new(&[&FAILING], &["--drain=2"])?;
    fs::write(&rig.trouble, "").map_err(Error::io("make trouble"))?;
    let mut client = rig.client("disk0")?;
    write_pages(&mut client, &[1, 3, 5], 5)?;
    rig.server.signal(Signal::TERM)?;
    let status = rig.server.wait(PATIENCE)?;
    let log = rig.server.log();
    check(status.code() == Some(1), || format!("exit {status}\n{log}"))?;
    check(log.contains("unwritten_bytes=12288"), || format!("unwritten data is not listed\n{log}"))
}

#[test]
fn a_dead_store_delays_no_other_store() -> Result {
    let dead: &[&str] = &["memory", "16M", "--filter=delay", "wdelay=3600"];
    let mut rig = Rig::new(&[dead, &["memory", "16M"]], &["--drain=1"])?;
    let mut slow = rig.client("disk0")?;
    // Until the writer is throttled, or the whole volume is dirty.
    let stuck = std::thread::spawn(move || {
        let pages: Vec<u64> = (0..SIZE / PAGE).collect();
        let _ = write_pages(&mut slow, &pages, 1);
    });
    until("a write to the dead store is in flight", PATIENCE, || {
        let stat = rig.stat()?;
        let all = stat["bdis"].as_array().cloned().unwrap_or_default();
        let some = |bdi: &Value| bdi["volumes"][0] == "disk0" && bdi["writeback_bytes"] != 0;
        Ok(all.iter().any(some).then_some(()))
    })?;
    let pages = shuffled(1024, &mut Random::new(seeded::seed("EBBD_TEST_SEED", 0xebb_b005)));
    let mut fast = rig.client("disk1")?;
    for stamp in 1..=4 {
        write_pages(&mut fast, &pages, stamp)?;
        fast.flush()?;
    }
    rig.holds(1, &pages, 4)?;
    fast.disconnect()?;
    rig.server.healthy()?;
    rig.server.kill9()?;
    stuck.join().map_err(|_| Error::unexpected("the writer panicked"))
}

/// The store accepts a megabyte per second, after a burst of two.
const SLOW: [&str; 4] = ["null", "1G", "--filter=rate", "rate=8M"];

#[test]
fn bounds_of_a_device_are_set_while_it_runs_and_hold_from_the_first_byte() -> Result {
    let mut rig = Rig::new(&[&SLOW], &["--drain=1"])?;
    let name = rig.stat()?["bdis"][0]["name"].as_str().unwrap_or_default().to_owned();
    let set = |arguments: &[&str]| rig.ebbd(&[arguments, &["--bdi", &name]].concat())?.ok();
    set(&["set", "max_bytes", "256K"])?;
    set(&["set", "strict_limit", "on"])?;
    set(&["set", "min_ratio", "0.5"])?;
    set(&["set", "max_ratio", "12.5"])?;
    let refused = rig.ebbd(&["set", "min_ratio", "13", "--bdi", &name])?.run()?;
    check(refused.status.code() == Some(2), || format!("min_ratio above max_ratio: {refused:?}"))?;
    let table = rig.ebbd(&["stat", "bdi"])?.ok()?;
    let shown = ["0.5%", "12.5%", "256.0K", "yes"].iter().all(|word| table.stdout.contains(word));
    check(shown, || format!("the settings are not shown:\n{}", table.stdout))?;

    // Writes until the daemon ends.
    let mut client = rig.client("disk0")?;
    let writer = std::thread::spawn(move || {
        let data = content(1, 0, 65536);
        for turn in 0.. {
            if client.write(turn % 4096 * 65536, &data, 0).is_err() {
                break;
            }
        }
    });
    let held = || -> Result<u64> {
        let stat = rig.stat()?;
        let of = |field: &str| stat["bdis"][0][field].as_u64().unwrap_or(u64::MAX / 2);
        Ok(of("dirty_bytes") + of("writeback_bytes"))
    };
    for _ in 0..20 {
        let held = held()?;
        check(held <= 256 << 10, || {
            format!("{held} bytes are dirty or in writeback, with a limit of 256 KiB")
        })?;
        check(rig.bdi("threshold_bytes")? <= 256 << 10, || {
            "the threshold is above the limit".into()
        })?;
    }
    check(rig.bdi("written_bytes")? > 256 << 10, || "nothing is written".into())?;
    set(&["set", "max_bytes", "--unset"])?;
    until("more is dirty without the limit", PATIENCE, || {
        Ok((rig.bdi("threshold_bytes")? > 512 << 10 && held()? > 512 << 10).then_some(()))
    })?;
    set(&["set", "max_bytes", "128K"])?;
    until("data above the new limit is written", PATIENCE, || {
        Ok((held()? <= 128 << 10).then_some(()))
    })?;
    rig.server.healthy()?;
    rig.server.kill9()?;
    writer.join().map_err(|_| Error::unexpected("the writer panicked"))
}

#[test]
fn bounds_of_a_device_come_from_the_file_and_change_with_it() -> Result {
    let setup = Setup::new()?;
    let dir = setup.dir().join("store");
    fs::create_dir(&dir).map_err(Error::io("make a folder"))?;
    let store = Nbdkit::start(&dir, &["memory", "16M"])?;
    let uri = store.uri();
    let (file, control) = (setup.dir().join("ebbd.toml"), setup.dir().join("control.sock"));
    let configure = |bounds: &str| {
        let volume = format!("[volume.disk0]\nstore = \"{uri}\"\n");
        let more = "cache = \"writeback\"\nbdi = \"stick\"\n";
        let text = format!("[bdi.stick]\n{bounds}\n[bdi.ghost]\nmin_ratio = 1\n{volume}{more}");
        fs::write(&file, text).map_err(Error::io("write the configuration"))
    };
    configure("max_bytes = \"512K\"")?;
    let setup = setup.arg("--config").arg(&file).arg("--control").arg(&control);
    let server = setup.start()?;
    let mut rig = Rig { stores: vec![store], server, control, trouble: PathBuf::new() };
    check(rig.bdi("max_bytes")? == 512 << 10, || "the configured limit is not in force".into())?;
    check(rig.server.log().contains("bdi=\"ghost\""), || {
        "the device without a volume is not logged".into()
    })?;
    rig.ebbd(&["set", "strict_limit", "on", "--bdi", "stick"])?.ok()?;

    // A mistake changes nothing.
    configure("min_ratio = 200")?;
    rig.server.signal(Signal::HUP)?;
    until("the mistake is logged", PATIENCE, || {
        Ok(rig.server.log().contains("bdi.stick.min_ratio").then_some(()))
    })?;
    check(rig.bdi("max_bytes")? == 512 << 10, || "a mistake changed something".into())?;
    configure("max_bytes = \"768K\"\nmax_ratio = 50")?;
    rig.server.signal(Signal::HUP)?;
    until("the file is read", PATIENCE, || Ok((rig.bdi("max_bytes")? == 768 << 10).then_some(())))?;
    let stat = rig.stat()?;
    let bdi = &stat["bdis"][0];
    check(bdi["max_ratio"] == 0.5 && bdi["strict_limit"] == true, || {
        format!("the value set at run time or the configured one is not in force: {bdi}")
    })?;
    rig.server.stop()
}
