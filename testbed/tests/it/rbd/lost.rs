//! What other clients of a cluster, or the cluster itself, take away from a volume: a snapshot, the lock, the size, replies.

use testbed::harness::ceph::Ceph;
use testbed::harness::nbd::Client;
use testbed::harness::process::{self, PATIENCE};
use testbed::{Error, Result, check};

use super::daemon::setup;

const MIB: u64 = 1 << 20;

/// Fills the first bytes of an image with a value, by `rbd`.
fn fill(ceph: &Ceph, image: &str, value: u8, bytes: u64) -> Result {
    let path = ceph.dir().join(format!("fill-{value}")).display().to_string();
    let content = vec![value; usize::try_from(bytes).unwrap_or(0)];
    std::fs::write(&path, content).map_err(Error::io("write a file"))?;
    ceph.rbd(&["import", "--no-progress", &path, &format!("rbd/{image}")]).map(drop)
}

#[test]
fn a_snapshot_that_is_removed_takes_its_volume_offline() -> Result {
    let ceph = Ceph::start()?;
    fill(&ceph, "golden", 0x11, 16 * MIB)?;
    ceph.rbd(&["snap", "create", "--no-progress", "rbd/golden@one"])?;
    let server =
        setup(&ceph, &[&format!("disk={},cache=none", ceph.uri("golden@one"))])?.start()?;
    let mut client = Client::open(&server.socket(), "disk")?;
    check(client.read(0, 4096)? == [0x11; 4096], || "not what the snapshot has".to_owned())?;
    check(server.log().contains("rbd snap protect rbd/golden@one"), || server.log())?;
    ceph.rbd(&["snap", "rm", "--no-progress", "rbd/golden@one"])?;
    let write =
        ["bench", "--io-type", "write", "--io-total", "8M", "--io-size", "1M", "rbd/golden"];
    ceph.rbd(&write)?;
    // Reads fail, and until then have what the snapshot had.
    process::until("a read fails", PATIENCE, || match client.read(0, 4096) {
        Err(_) => Ok(Some(())),
        Ok(data) => {
            check(data == [0x11; 4096], || "other data than the snapshot had".to_owned())?;
            Ok(None)
        }
    })?;
    process::until("the volume is told to be offline", PATIENCE, || {
        let stat = server.operator(&["stat", "--json"])?.ok()?;
        Ok(stat.stdout.contains("was removed").then_some(()))
    })
}

#[test]
fn a_read_only_volume_has_the_size_that_its_image_gets() -> Result {
    let ceph = Ceph::start()?;
    ceph.create_image("disk", 16)?;
    let volume = format!("disk={},read-only=true", ceph.uri("disk"));
    let server = setup(&ceph, &[&volume])?.start()?;
    check(Client::open(&server.socket(), "disk")?.size == 16 * MIB, || "the size".to_owned())?;
    ceph.rbd(&["resize", "--no-progress", "--size", "32M", "rbd/disk"])?;
    process::until("the volume has the new size", PATIENCE, || {
        Ok((Client::open(&server.socket(), "disk")?.size == 32 * MIB).then_some(()))
    })
}

#[test]
fn an_idle_volume_notices_that_it_was_fenced() -> Result {
    let ceph = Ceph::start()?;
    ceph.create_image("disk", 16)?;
    let volume = format!("disk={},cache=writeback", ceph.uri("disk"));
    let server = setup(&ceph, &[&volume])?.start()?;
    let mut client = Client::open(&server.socket(), "disk")?;
    client.write(0, &[1; 65536], 0)?;
    client.flush()?;
    let owner = ceph.lock_owner("disk")?.unwrap_or_default();
    ceph.blocklist(&owner)?;
    // Without a request of any client.
    process::until("the fence is noticed", PATIENCE, || {
        let stat = server.operator(&["stat", "--json"])?.ok()?;
        Ok(stat.stdout.contains("blocklist").then_some(()))
    })?;
    // Also after the entry has expired, nothing is read: another client may have written.
    ceph.command(&["osd", "blocklist", "rm", &owner])?;
    process::until("what the cache has is refused", PATIENCE, || {
        Ok(client.read(0, 4096).is_err().then_some(()))
    })
}

#[test]
fn requests_that_time_out_again_and_again_hold_a_bounded_memory() -> Result {
    const EACH: usize = 4 << 20;
    let ceph = Ceph::start()?;
    ceph.create_image("disk", 64)?;
    let volume = format!("disk={}&timeout=1,cache=none", ceph.uri("disk"));
    let server = setup(&ceph, &[&volume])?.arg("--workers").arg("1").image("file", MIB)?.start()?;
    let wired = || -> Result<u64> {
        let stat = server.operator(&["stat", "--json"])?.ok()?.json()?;
        stat["memory"]["wired_bytes"]
            .as_u64()
            .ok_or_else(|| Error::unexpected(format!("no wired_bytes in {stat}")))
    };
    let before = wired()?;
    ceph.halt_osd(true)?;
    let failures: Result<Vec<u32>> = std::thread::scope(|scope| {
        let clients = (0..4_u64).map(|number| {
            let server = &server;
            scope.spawn(move || -> Result<u32> {
                let mut failures = 0;
                let mut client = Client::open(&server.socket(), "disk")?;
                for _ in 0..10 {
                    let written = client.write(number * EACH as u64, &[1; EACH], 0);
                    failures += u32::from(written.is_err());
                }
                Ok(failures)
            })
        });
        let clients: Vec<_> = clients.collect();
        let ended = || Error::unexpected("a client ended");
        clients.into_iter().map(|client| client.join().map_err(|_| ended())?).collect()
    });
    let held = wired();
    let file = Client::open(&server.socket(), "file")?.write(0, &[1; 4096], 0);
    ceph.halt_osd(false)?;
    let failures: u32 = failures?.iter().sum();
    let held = held?.saturating_sub(before);
    // 160 MiB were refused; librbd holds those of one window, and each client has a buffer.
    check(failures > 30 && held <= 40 * MIB, || {
        format!("{failures} failures, {held} bytes are held")
    })?;
    file?;
    process::until("the memory is given back", PATIENCE, || {
        Ok((wired()?.saturating_sub(before) < 8 * MIB).then_some(()))
    })?;
    let mut client = Client::open(&server.socket(), "disk")?;
    client.write(0, &[2; 4096], 0)?;
    check(client.read(0, 4096)? == [2; 4096], || "other data".to_owned())
}
