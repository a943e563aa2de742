//! Kills and fences while a client writes and verifies, a cluster without space, and clones of a snapshot.
//!
//! With `--nocapture` the times are printed that a successor and a fenced client took.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use testbed::harness::ceph::Ceph;
use testbed::harness::ledger::Ledger;
use testbed::harness::nbd::{Client, wire};
use testbed::harness::pattern::Random;
use testbed::harness::process::{self, PATIENCE};
use testbed::harness::writer::{Promise, Writer, let_write};
use testbed::{Error, Result, Server, Tool, check};

use super::daemon::setup;

const MIB: u64 = 1 << 20;
const DISK: usize = 16 << 20;
/// librbd alone takes 26 seconds and more for the first write after a kill.
const LIMIT: Duration = Duration::from_secs(20);

/// The median and the longest of some times.
fn summary(times: &mut [Duration]) -> String {
    times.sort_unstable();
    let (middle, last) = (times.get(times.len() / 2), times.last());
    format!("{} times, median {middle:?}, longest {last:?}", times.len())
}

/// Writes until the daemon is killed, some requests later.
fn write_and_kill(server: &mut Server, ledger: &Mutex<Ledger>, random: &mut Random) -> Result<u64> {
    let client = Client::open(&server.socket(), "disk")?;
    // The last MiB is for the first write after the kill.
    let range = 0..DISK - (1 << 20);
    let writer = Writer::new(client, ledger, range, random.next(), Promise::Durable);
    let (least, delay) = (random.below(300), Duration::from_micros(random.below(20_000)));
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| writer.run());
        let healthy = let_write(ledger, least, delay).and_then(|()| server.healthy());
        server.kill9()?;
        healthy?;
        match writer.join() {
            Ok(count) => count.map_err(Error::from),
            Err(_) => Err(Error::unexpected("a writer panicked")),
        }
    })
}

#[test]
fn kills_under_load_lose_nothing_that_was_flushed() -> Result {
    let ceph = Ceph::start()?;
    ceph.create_image("disk", 16)?;
    let volume = format!("disk={},cache=writeback", ceph.uri("disk"));
    let mut server = setup(&ceph, &[&volume])?.start()?;
    let seed = seeded::seed("EBBD_TEST_SEED", 0xebb_d017);
    let mut random = Random::new(seed);
    let ledger = Mutex::new(Ledger::new(DISK));
    let (mut acknowledged, mut times) = (0, Vec::new());
    for round in 0..seeded::scaled(5) {
        let place = |error: Error| {
            Error::unexpected(format!("EBBD_TEST_SEED={seed}, round {round}: {error}"))
        };
        acknowledged += write_and_kill(&mut server, &ledger, &mut random).map_err(place)?;
        let begun = Instant::now();
        server.restart().map_err(place)?;
        // On a busy machine the cluster may need some seconds to break the lock.
        let mut client = process::until("the volume is served", PATIENCE, || {
            Ok(Client::open(&server.socket(), "disk").ok())
        })?;
        client.write(15 * MIB, &[1; 4096], wire::FLAG_FUA)?;
        let time = begun.elapsed();
        check(time < LIMIT, || format!("round {round}: the first write took {time:?}"))?;
        times.push(time);
        let mut ledger = ledger.lock().unwrap_or_else(PoisonError::into_inner);
        for offset in (0..15 * MIB).step_by(1 << 20) {
            ledger.crashed(offset, &client.read(offset, 1 << 20)?).map_err(place)?;
        }
        client.disconnect()?;
    }
    let promised = ledger.lock().unwrap_or_else(PoisonError::into_inner).promised();
    println!("start to first write: {}; {acknowledged} requests", summary(&mut times));
    check(acknowledged > 100 && promised > 100, || {
        format!("only {acknowledged} requests acknowledged, {promised} sectors promised")
    })?;
    server.stop()
}

#[test]
fn fenced_volumes_end_at_once_and_write_nothing_later() -> Result {
    let ceph = Ceph::start()?;
    ceph.create_image("disk", 16)?;
    let volume = format!("disk={},cache=none", ceph.uri("disk"));
    let mut server = setup(&ceph, &[&volume])?.start()?;
    let mut times = Vec::new();
    for round in 0..seeded::scaled(3) {
        let owner = ceph.lock_owner("disk")?.unwrap_or_default();
        let (mut client, fenced) =
            (Client::open(&server.socket(), "disk")?, AtomicBool::new(false));
        // Numbers, each in a sector of its own, until one is refused: the last that was acknowledged, and the time from
        // the fence to the refusal.
        let (last, time) = std::thread::scope(|scope| {
            let writing = scope.spawn(|| -> Result<(u64, Option<Instant>)> {
                for number in 1..u64::MAX {
                    let sector = [number.to_le_bytes(); 64].concat();
                    if client.write(number % 8192 * 512, &sector, 0).is_err() {
                        return Ok((number - 1, Some(Instant::now())));
                    }
                    check(!fenced.load(Ordering::SeqCst), || "a write after the fence".to_owned())?;
                }
                Ok((0, None))
            });
            ceph.command(&["osd", "blocklist", "add", &owner])?;
            let begun = Instant::now();
            // A request of a client that has the new map is answered when the OSD has it.
            ceph.rbd(&["ls", "rbd"])?;
            std::thread::sleep(Duration::from_secs(2));
            fenced.store(true, Ordering::SeqCst);
            let (last, ended) = writing.join().map_err(|_| Error::unexpected("no writer"))??;
            let time = ended.map_or(Duration::ZERO, |ended| ended.saturating_duration_since(begun));
            Ok::<_, Error>((last, time))
        })?;
        times.push(time);
        let mut client = Client::open(&server.socket(), "disk")?;
        for _ in 0..20 {
            let refused = client.write(8 * MIB, &[0xee; 4096], 0).map(drop);
            check(format!("{refused:?}").contains("108"), || {
                format!("round {round}: {refused:?} is no ESHUTDOWN")
            })?;
        }
        drop(client);
        // A new daemon reads what the old one has written, and nothing that it was refused, but the last.
        server.kill9()?;
        server.restart()?;
        let mut client = process::until("the volume is served", PATIENCE, || {
            Ok(Client::open(&server.socket(), "disk").ok())
        })?;
        let sector = |client: &mut Client, number: u64| -> Result<u64> {
            let data = client.read(number % 8192 * 512, 512)?;
            Ok(u64::from_le_bytes(data[..8].try_into().unwrap_or_default()))
        };
        check(sector(&mut client, last)? == last, || format!("round {round}: {last} is lost"))?;
        let later = sector(&mut client, last + 2)?;
        check(later != last + 2, || format!("round {round}: {later} is there after {last}"))?;
        let data = client.read(8 * MIB, 4096)?;
        check(data == [0; 4096], || format!("round {round}: a refused write is in the image"))?;
        client.write(0, &[0; 4096], wire::FLAG_FUA)?;
        client.command(wire::CMD_WRITE_ZEROES, 0, 0, 4 << 20)?;
        client.disconnect()?;
    }
    println!("fence to ESHUTDOWN: {}", summary(&mut times));
    server.stop()
}

#[test]
fn a_full_cluster_is_enospc_and_the_volume_recovers() -> Result {
    let ceph = Ceph::start()?;
    ceph.create_image("disk", 16)?;
    let volume = format!("disk={},cache=none", ceph.uri("disk"));
    let server = setup(&ceph, &[&volume])?.image("file", 16 * MIB)?.start()?;
    let mut client = Client::open(&server.socket(), "disk")?;
    client.write(0, &[1; 4096], wire::FLAG_FUA)?;
    client.write(8 * MIB, &vec![1; 2 << 20], wire::FLAG_FUA)?;
    ceph.set_full_ratio("0.00001")?;
    // Until the OSD has looked at its space, and the client has the new map. What is overwritten takes no more space, and is
    // not refused.
    let mut at = 4096;
    process::until("a write is refused", PATIENCE, || {
        at = (at + 4096) % (7 * MIB);
        let written = client.write(at, &[2; 4096], 0);
        Ok(written.is_err().then_some(format!("{written:?}")))
    })
    .and_then(|refusal| check(refusal.contains("28"), || format!("{refusal} is no ENOSPC")))?;
    let mut other = Client::open(&server.socket(), "file")?;
    other.write(0, &[3; 4096], wire::FLAG_FUA)?;
    let data = client.read(0, 4096)?;
    check(data == [1; 4096], || "other data was read".to_owned())?;
    ceph.set_full_ratio("0.95")?;
    process::until("a write is carried out", PATIENCE, || {
        Ok(client.write(at, &[4; 4096], wire::FLAG_FUA).ok())
    })?;
    client.write(4096, &[4; 4096], wire::FLAG_FUA)?;
    let data = client.read(0, 8192)?;
    check(data == [[1; 4096], [4; 4096]].concat(), || "other data after the recovery".to_owned())
}

#[test]
fn sixteen_overlays_over_a_snapshot_fetch_it_once() -> Result {
    const CLONES: u64 = 16;
    let ceph = Ceph::start()?;
    Tool::new("sh").args(["-c", "head -c 8M /dev/urandom >in"]).dir(ceph.dir()).ok()?;
    let from = ceph.dir().join("in").display().to_string();
    ceph.rbd(&["import", "--no-progress", &from, "rbd/golden"])?;
    ceph.rbd(&["snap", "create", "--no-progress", "rbd/golden@one"])?;
    let expected = std::fs::read(&from).map_err(Error::io("read the base"))?;
    let deltas = tempfile::tempdir().map_err(Error::io("make a directory"))?;
    let mut volumes = vec![format!("golden={}", ceph.uri("golden@one"))];
    volumes.extend((0..CLONES).map(|number| {
        let delta = deltas.path().join(format!("{number}.delta"));
        format!("clone{number}=file:{},base=golden,create=true", delta.display())
    }));
    let volumes: Vec<&str> = volumes.iter().map(String::as_str).collect();
    let server = setup(&ceph, &volumes)?.start()?;
    for number in 0..CLONES {
        let mut client = Client::open(&server.socket(), &format!("clone{number}"))?;
        client.write(number * 8192, &[7; 4096], 0)?;
        for at in (0..8 * MIB).step_by(1 << 20) {
            let from = usize::try_from(at).unwrap_or(0);
            let mut wanted = expected[from..from + (1 << 20)].to_vec();
            if at == 0 {
                let own = usize::try_from(number * 8192).unwrap_or(0);
                wanted[own..own + 4096].fill(7);
            }
            let data = client.read(at, 1 << 20)?;
            check(data == wanted, || format!("clone {number} reads other data at {at}"))?;
        }
        client.disconnect()?;
    }
    let stat = server.operator(&["stat", "--json"])?.ok()?.json()?;
    let volumes = stat["volumes"].as_array().cloned().unwrap_or_default();
    let of =
        |name: &str| -> u64 { volumes.iter().filter_map(|volume| volume[name].as_u64()).sum() };
    let (hit, miss) = (of("shared_hit_bytes"), of("shared_miss_bytes"));
    println!("{CLONES} clones of 8 MiB: {miss} bytes were fetched, {hit} found in the cache");
    check(miss <= 9 * MIB && hit >= 14 * 8 * MIB, || format!("{miss} bytes fetched, {hit} shared"))
}
