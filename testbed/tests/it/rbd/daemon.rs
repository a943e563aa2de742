//! The daemon with volumes on images: a kill, a second daemon, a fence, a resize, an OSD and a monitor that are away, and a
//! machine without Ceph.

use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use testbed::harness::ceph::Ceph;
use testbed::harness::nbd::{Client, wire};
use testbed::harness::process::{self, PATIENCE};
use testbed::{Error, Result, Setup, Tool, check};

const MIB: u64 = 1 << 20;

/// A daemon with a state directory, which finds librbd among the packages.
pub(super) fn setup(ceph: &Ceph, volumes: &[&str]) -> Result<Setup> {
    let mut setup = Setup::new()?.env("LD_LIBRARY_PATH", ceph.library_path());
    let (state, control) = (setup.dir().join("state"), setup.dir().join("control.sock"));
    setup = setup.arg("--state").arg(state).arg("--control").arg(control);
    for volume in volumes {
        setup = setup.volume(volume);
    }
    Ok(setup)
}

#[test]
fn a_client_reads_what_rbd_exports_and_the_other_way_round() -> Result {
    let ceph = Ceph::start()?;
    let path = |name: &str| ceph.dir().join(name).display().to_string();
    Tool::new("sh").args(["-c", "head -c 16M /dev/urandom >in"]).dir(ceph.dir()).ok()?;
    ceph.rbd(&["import", "--no-progress", &path("in"), "rbd/disk"])?;
    ceph.rbd(&["snap", "create", "--no-progress", "rbd/disk@one"])?;
    ceph.create_image("copy", 16)?;
    let disk = format!("disk={}", ceph.uri("disk@one"));
    let copy = format!("copy={},cache=writeback", ceph.uri("copy"));
    let server = setup(&ceph, &[&disk, &copy])?.start()?;
    let uri = |volume: &str| format!("nbd+unix:///{volume}?socket={}", server.socket().display());
    Tool::new("nbdcopy").args([uri("disk"), path("out")]).ok()?;
    Tool::new("cmp").args([path("in"), path("out")]).ok()?;
    Tool::new("nbdcopy").args(["--flush".to_owned(), path("in"), uri("copy")]).ok()?;
    ceph.rbd(&["export", "--no-progress", "rbd/copy", &path("copied")])?;
    Tool::new("cmp").args([path("in"), path("copied")]).ok()?;
    let info = Tool::new("nbdinfo").args(["--json".to_owned(), uri("disk")]).ok()?;
    let read_only = info.json()?["exports"][0]["is_read_only"] == true;
    info.check(read_only, "a snapshot to be read-only")
}

#[test]
fn a_killed_daemon_is_followed_at_once_and_nothing_flushed_is_lost() -> Result {
    let ceph = Ceph::start()?;
    ceph.create_image("disk", 64)?;
    let volume = format!("disk={},cache=writeback", ceph.uri("disk"));
    let mut server = setup(&ceph, &[&volume])?.start()?;
    for round in 0..5_u8 {
        let owner = ceph.lock_owner("disk")?;
        let mut client = Client::open(&server.socket(), "disk")?;
        let at = u64::from(round) * 8 * MIB;
        client.write(at, &[round + 1; 65536], 0)?;
        client.flush()?;
        // In flight, not flushed: any part of it may be there.
        client.write(at + MIB, &[0xee; 65536], 0)?;
        server.kill9()?;
        server.restart()?;
        // librbd alone would wait half a minute for the lock of the dead client.
        let mut client = process::until("the volume is served", PATIENCE, || {
            Ok(Client::open(&server.socket(), "disk").ok())
        })?;
        client.write(at + 2 * MIB, &[0xaa; 4096], 0)?;
        client.flush()?;
        for earlier in 0..=round {
            let data = client.read(u64::from(earlier) * 8 * MIB, 65536)?;
            check(data.iter().all(|byte| *byte == earlier + 1), || {
                format!("round {round}: what was flushed in round {earlier} is lost")
            })?;
        }
        client.disconnect()?;
        let now = ceph.lock_owner("disk")?;
        check(now.is_some() && now != owner, || format!("{owner:?} has the lock, {now:?}"))?;
    }
    check(server.log().contains("has ended"), || "the broken lock is not logged".to_owned())
}

/// Less than the time after which a cluster ends the watch of a client that is gone: 30 s.
const AFTER_END: Duration = Duration::from_secs(10);

#[test]
fn a_stop_ends_in_order_and_leaves_neither_a_lock_nor_a_watch() -> Result {
    let ceph = Ceph::start()?;
    ceph.create_image("disk", 64)?;
    let volume = format!("disk={},cache=writeback", ceph.uri("disk"));
    for round in 0..8_u8 {
        // Each has a state directory of its own, and so could not break a lock that the one before has left.
        let mut server = setup(&ceph, &[&volume])?.start()?;
        let mut client = Client::open(&server.socket(), "disk")?;
        for block in 0..256 {
            client.write(block * 65536, &[round + 1; 65536], 0)?;
        }
        client.disconnect()?;
        // It fails if the daemon is ended by a signal of its own, or says that it failed.
        server.stop()?;
        check(ceph.lock_owner("disk")?.is_none(), || format!("round {round}: the lock is left"))?;
        // The cluster may take a moment; a watch that was left ends after half a minute.
        process::until("no watch is left", AFTER_END, || {
            let status = ceph.rbd(&["status", "--format", "json", "rbd/disk"])?;
            Ok((status.json()?["watchers"].as_array().map_or(1, Vec::len) == 0).then_some(()))
        })?;
    }
    Ok(())
}

#[test]
fn the_lock_of_another_client_is_not_broken_and_it_is_told() -> Result {
    let ceph = Ceph::start()?;
    ceph.create_image("disk", 16)?;
    let volume = format!("disk={}", ceph.uri("disk"));
    let first = setup(&ceph, &[&volume])?.start()?;
    let owner = ceph.lock_owner("disk")?.unwrap_or_default();
    // It has a state directory of its own, as a daemon on another host. It serves, without the volume.
    let second = setup(&ceph, &[&volume])?.start()?;
    process::until("the refusal is logged", PATIENCE, || {
        let log = second.log();
        Ok((log.contains("has its lock") && log.contains(&owner)).then_some(()))
    })?;
    check(Client::open(&second.socket(), "disk").is_err(), || "a second writer".to_owned())?;
    let mut client = Client::open(&first.socket(), "disk")?;
    client.write(0, &[1; 4096], 0)?;
    client.flush()?;
    check(ceph.lock_owner("disk")? == Some(owner), || "the lock was taken away".to_owned())
}

#[test]
fn a_fenced_volume_goes_offline_and_another_store_notices_nothing() -> Result {
    let ceph = Ceph::start()?;
    ceph.create_image("disk", 16)?;
    let volume = format!("disk={},cache=writeback", ceph.uri("disk"));
    let server = setup(&ceph, &[&volume])?.image("file", 16 * MIB)?.start()?;
    let mut client = Client::open(&server.socket(), "disk")?;
    client.write(0, &[1; 4096], 0)?;
    client.flush()?;
    ceph.blocklist(&ceph.lock_owner("disk")?.unwrap_or_default())?;
    // In memory it may be acknowledged.
    let _ = client.write(4096, &[2; 4096], 0);
    let refused = client.flush();
    check(refused.is_err(), || "a flush has succeeded after the fence".to_owned())?;
    let refused = client.read(8 * MIB, 4096).map(drop);
    check(format!("{refused:?}").contains("108"), || format!("{refused:?} is no ESHUTDOWN"))?;
    let mut other = Client::open(&server.socket(), "file")?;
    other.write(0, &[3; 4096], 0)?;
    other.flush()?;
    let stat = server.operator(&["stat", "--json"])?.ok()?;
    stat.check(stat.stdout.contains("blocklist"), "the reason")?;
    let cluster = stat.json()?["clusters"][0].clone();
    let fenced = cluster["state"] == "fenced" && cluster["offline"] == 1;
    check(fenced, || format!("the cluster is not told as fenced: {cluster}"))?;
    process::until("the volume is logged as offline", PATIENCE, || {
        Ok(server.log().contains("the volume is offline").then_some(()))
    })?;
    // Nothing was written after the fence.
    let export = ceph.dir().join("export").display().to_string();
    ceph.rbd(&["export", "--no-progress", "rbd/disk", &export])?;
    let content = fs::read(&export).map_err(Error::io("read the export"))?;
    check(content[..4096] == [1; 4096] && content[4096..8192] == [0; 4096], || {
        "a write after the fence is in the image".to_owned()
    })
}

#[test]
fn a_fenced_volume_refuses_what_its_cache_has_and_can_be_removed_and_added_again() -> Result {
    let ceph = Ceph::start()?;
    ceph.create_image("disk", 16)?;
    let server = setup(&ceph, &[])?.image("file", 16 * MIB)?.start()?;
    let add =
        || server.operator(&["volume", "add", "disk", &ceph.uri("disk"), "--cache", "writeback"]);
    add()?.ok()?;
    let mut client = Client::open(&server.socket(), "disk")?;
    client.write(0, &[1; 65536], 0)?;
    client.flush()?;
    ceph.blocklist(&ceph.lock_owner("disk")?.unwrap_or_default())?;
    // It is acknowledged if the volume does not know of the fence yet, and is never written.
    let is_acknowledged = client.write(65536, &[2; 65536], 0).is_ok();
    check(client.flush().is_err(), || "a flush has succeeded after the fence".to_owned())?;
    process::until("the volume refuses a read of what its cache has", PATIENCE, || {
        Ok(client.read(0, 4096).is_err().then_some(()))
    })?;
    drop(client);
    // The data cannot be written any more: this does not wait for it, and says what is lost.
    let removed = server.operator(&["volume", "remove", "disk", "--wait"])?.run()?;
    let said = format!("{}{}", removed.stdout, removed.stderr);
    let is_named = said.contains("64K") || said.contains("65536");
    removed.check(is_named == is_acknowledged, "the lost data, if there is any")?;
    add()?.ok()?;
    let mut client = Client::open(&server.socket(), "disk")?;
    let data = client.read(0, 131_072)?;
    check(data[..65536] == [1; 65536] && data[65536..] == [0; 65536], || {
        "not what was flushed before the fence".to_owned()
    })
}

#[test]
fn a_resize_by_rbd_is_followed_and_one_by_ebbd_resizes_the_image() -> Result {
    let ceph = Ceph::start()?;
    ceph.create_image("disk", 16)?;
    let volume = format!("disk={}", ceph.uri("disk"));
    let server = setup(&ceph, &[&volume])?.start()?;
    let has = |size: u64| {
        process::until("the volume has the new size", PATIENCE, || {
            Ok((Client::open(&server.socket(), "disk")?.size == size).then_some(()))
        })
    };
    // The time includes how long `rbd` runs: what it has sent is seen before it has ended.
    let begun = Instant::now();
    ceph.rbd(&["resize", "--no-progress", "--size", "32M", "rbd/disk"])?;
    let ended = Instant::now();
    has(32 * MIB)?;
    println!("resize by rbd took {:?}, seen {:?} later", ended - begun, ended.elapsed());
    ceph.rbd(&["resize", "--no-progress", "--allow-shrink", "--size", "8M", "rbd/disk"])?;
    has(8 * MIB)?;
    server.operator(&["volume", "resize", "disk", "24M"])?.ok()?;
    has(24 * MIB)?;
    let info = ceph.rbd(&["info", "--format", "json", "rbd/disk"])?.json()?;
    check(info["size"].as_u64() == Some(24 * MIB), || info.to_string())
}

/// What a client of a volume does while its OSD is halted: it writes and verifies, one request after the other, each time a
/// block more. Returns the number of requests, and the longest time that one took.
fn write_until(
    mut client: Client,
    area: u64,
    end: &AtomicBool,
    done: &AtomicU64,
) -> Result<(u64, Duration)> {
    let (mut count, mut longest) = (0, Duration::ZERO);
    while !end.load(Ordering::SeqCst) {
        let (at, value) = (area + count % 256 * 4096, count.to_le_bytes());
        let begun = Instant::now();
        client.write(at, &value.repeat(512), if count % 8 == 0 { wire::FLAG_FUA } else { 0 })?;
        let data = client.read(at, 4096)?;
        longest = longest.max(begun.elapsed());
        check(data == value.repeat(512), || format!("request {count} has read other data"))?;
        count += 1;
        done.fetch_add(1, Ordering::SeqCst);
    }
    Ok((count, longest))
}

/// Ends the clients also if a check fails.
struct EndOnDrop<'a>(&'a AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// How long the OSD is halted.
fn osd_seconds() -> u64 {
    seeded::scaled(12).max(12)
}

#[test]
fn an_osd_and_a_monitor_that_are_away_delay_requests_and_fail_none() -> Result {
    let mut ceph = Ceph::start()?;
    ceph.create_image("disk", 16)?;
    let volume = format!("disk={},cache=none", ceph.uri("disk"));
    let server = setup(&ceph, &[&volume])?.image("file", 16 * MIB)?.start()?;
    let (end, done) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let _end = EndOnDrop(&end);
        let mut clients = Vec::new();
        for number in 0..4 {
            let client = Client::open(&server.socket(), "disk")?;
            let (end, done) = (&end, &done);
            clients.push(scope.spawn(move || write_until(client, number * MIB, end, done)));
        }
        let busy = |more: u64| {
            let from = done.load(Ordering::SeqCst);
            process::until("requests complete", PATIENCE, || {
                Ok((done.load(Ordering::SeqCst) >= from + more).then_some(()))
            })
        };
        busy(20)?;
        ceph.halt_osd(true)?;
        // Meanwhile another store is as before, and the operator can see it.
        let mut other = Client::open(&server.socket(), "file")?;
        let (begun, mut slow) = (Instant::now(), false);
        while begun.elapsed() < Duration::from_secs(osd_seconds()) {
            other.write(0, &[3; 4096], 0)?;
            other.flush()?;
            if !slow && begun.elapsed() > Duration::from_secs(4) {
                let stat = server.operator(&["stat", "cluster", "--json"])?.ok()?.json()?;
                slow = stat[0]["state"] == "silent" && stat[0]["slow"].as_u64() == Some(4);
            }
        }
        let halted = done.load(Ordering::SeqCst);
        ceph.halt_osd(false)?;
        busy(20)?;
        end.store(true, Ordering::SeqCst);
        let (mut count, mut longest) = (0, Duration::ZERO);
        for client in clients {
            let ended = client.join().map_err(|_| Error::unexpected("a client panicked"))??;
            (count, longest) = (count + ended.0, longest.max(ended.1));
        }
        println!(
            "OSD halted for {} s: {halted} of {count} writes and reads before, longest {longest:?}, none failed",
            osd_seconds()
        );
        check(slow && longest >= Duration::from_secs(osd_seconds() / 2), || {
            format!("a halted OSD has answered: longest {longest:?}, told as slow: {slow}")
        })
    })?;
    check(server.log().contains("check `ceph status`"), || {
        format!("the outage is not logged:\n{}", server.log())
    })?;
    let stat = server.operator(&["stat", "cluster", "--json"])?.ok()?.json()?;
    let well = stat[0]["state"] == "up"
        && stat[0]["slow"].as_u64() == Some(0)
        && stat[0]["slow_requests"].as_u64() >= Some(4)
        && stat[0]["errors"].as_u64() == Some(0)
        && stat[0]["times"]["write"]["count"].as_u64() > Some(20);
    check(well, || format!("after the outage: {stat}"))?;
    let mut client = Client::open(&server.socket(), "disk")?;
    ceph.stop_monitor()?;
    client.write(8192, &[4; 4096], 0)?;
    client.flush()?;
    ceph.start_monitor()?;
    ceph.stop_osd()?;
    std::thread::scope(|scope| {
        let written = scope.spawn(|| -> Result { Ok(client.write(12288, &[5; 4096], 0)?) });
        ceph.start_osd()?;
        written.join().map_err(|_| Error::unexpected("the client ended"))?
    })?;
    let data = client.read(8192, 8192)?;
    check(data == [[4; 4096], [5; 4096]].concat(), || "other data after the restart".to_owned())
}

#[test]
fn a_cluster_that_cannot_be_reached_is_told_as_down() -> Result {
    let mut ceph = Ceph::start()?;
    ceph.create_image("disk", 16)?;
    ceph.stop_monitor()?;
    let volume = format!("disk={}", ceph.uri("disk"));
    let server = setup(&ceph, &[&volume])?.start()?;
    process::until("the cluster is told as down", PATIENCE, || {
        let stat = server.operator(&["stat", "cluster", "--json"])?.ok()?.json()?;
        let down = stat[0]["state"] == "down" && stat[0]["last_error"].is_string();
        Ok(down.then_some(()))
    })?;
    ceph.start_monitor()?;
    process::until("the volume is served", PATIENCE, || {
        Ok(Client::open(&server.socket(), "disk").ok().map(drop))
    })?;
    let stat = server.operator(&["stat", "cluster", "--json"])?.ok()?.json()?;
    let up = stat[0]["state"] == "up" && stat[0]["images"] == 1 && stat[0]["connections"] == 1;
    check(up && stat[0]["fsid"].as_str() != Some(""), || stat.to_string())?;
    let metrics = server.operator(&["stat"])?.ok()?;
    metrics.check(metrics.stdout.contains("CEPH CLUSTER"), "the table of clusters")
}

#[test]
fn fifty_images_share_the_threads_of_one_cluster_handle() -> Result {
    let ceph = Ceph::start()?;
    let names: Vec<String> = (0..50).map(|number| format!("disk{number}")).collect();
    for name in &names {
        ceph.create_image(name, 8)?;
    }
    let volumes: Vec<String> =
        names.iter().map(|name| format!("{name}={},cache=none", ceph.uri(name))).collect();
    // The threads and the memory of a daemon after each of its volumes was written to.
    let measure = |volumes: &[String]| -> Result<(usize, u64)> {
        let volumes: Vec<&str> = volumes.iter().map(String::as_str).collect();
        let mut server = setup(&ceph, &volumes)?.image("file", MIB)?.start()?;
        for name in &names[..volumes.len()] {
            let mut client = Client::open(&server.socket(), name)?;
            client.write(0, &[1; 4096], 0)?;
            client.disconnect()?;
        }
        let pid = server.pid()?;
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).map_err(Error::io("list threads"))?;
        // Threads that open an image, or call a helper, end by themselves.
        let named = |name: &str| name.starts_with("ebbd") || name.starts_with("ebb-");
        let of_library = tasks.flatten().filter(|task| {
            let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            !named(&name) && !name.starts_with("rbd-") && !name.starts_with("blocking")
        });
        let threads = of_library.count();
        // Idle memory is given back within some seconds.
        let mut least = u64::MAX;
        for _ in 0..20 {
            least = least.min(process::own(pid)?);
            std::thread::sleep(Duration::from_millis(250));
        }
        let measured = (threads, least);
        // In order, so that the next daemon, with another state directory, finds no lock.
        server.stop()?;
        Ok(measured)
    };
    let (_, one) = measure(&volumes[..1])?;
    let (threads, all) = measure(&volumes)?;
    check(threads <= 17, || format!("{threads} threads of librbd"))?;
    let each = all.saturating_sub(one) / 49;
    eprintln!("{threads} threads, {each} bytes for each further image");
    // 510 KiB, some more with another allocation of arenas.
    check(each <= 544 << 10, || format!("{each} bytes for each further image"))?;
    Ok(())
}

#[test]
fn the_daemon_runs_without_librbd_and_names_its_package() -> Result {
    // An empty file in the library's place is what a machine without Ceph has: nothing that can be opened.
    let empty = tempfile::tempdir().map_err(Error::io("make a directory"))?;
    fs::write(empty.path().join("librbd.so.1"), "").map_err(Error::io("write a file"))?;
    let server = Setup::new()?
        .env("LD_LIBRARY_PATH", empty.path())
        .image("file", MIB)?
        .volume("disk=rbd:rbd/disk")
        .start()?;
    process::until("the package is named", PATIENCE, || {
        Ok(server.log().contains("librbd1").then_some(()))
    })?;
    Client::open(&server.socket(), "file")?.disconnect()?;
    Ok(())
}
