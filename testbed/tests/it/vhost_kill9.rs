//! The daemon is killed again and again while a guest writes and verifies over vhost-user-blk: no request fails, none is
//! lost, none hangs. With each QEMU.

use std::time::{Duration, Instant};

use tempfile::TempDir;
use testbed::guest::vhost::Qemu;
use testbed::guest::{Guest, Machine};
use testbed::harness::pattern::Random;
use testbed::harness::process::{PATIENCE, until};
use testbed::{Error, Result, Server, Setup, Tool, check};

/// The time in which every QEMU ends the handshake of a connection whose queues are all served.
const AFTER_HANDSHAKE: Duration = Duration::from_millis(700);
const QUEUES: u32 = 4;
const MIB: u64 = 1 << 20;

/// Passes of verified writes and reads, until there is a file `stop`; `fio` verifies each block after it was written, and
/// all of them at the end of a pass.
const FUNCTIONS: &str = r#"
pass() {
    /fio/lib/ld-linux-x86-64.so.2 --library-path /fio/lib /fio/fio --name=verify --filename=/dev/vda --size=48M --direct=1 --ioengine=libaio \
        --iodepth=16 --rw=randrw --bsrange=4k-64k --blockalign=4k --verify=crc32c --verify_fatal=1 --do_verify=1 \
        --verify_backlog=64 --fsync=50 --time_based --runtime=4 --randrepeat=0 >/tmp/fio 2>&1
}
passes() {
    count=0
    while [ ! -e /tmp/stop ]; do
        pass || { cat /tmp/fio; return 1; }
        count=$((count + 1))
        echo "$count" >/tmp/count
    done
}
begin() {
    (passes) &
    loader=$!
}
end_of_load() {
    touch /tmp/stop
    wait "$loader"
    say passes $(cat /tmp/count)
    if dmesg | grep -E 'I/O error|blocked for more'; then return 1; fi
}
"#;

/// `fio` with its libraries, which are too large for an initramfs.
fn fio_tree() -> Result<TempDir> {
    let dir = TempDir::with_prefix("fio-").map_err(Error::io("make a directory"))?;
    Tool::new("sh")
        .args([
            "-euc",
            "mkdir lib; program=$(command -v fio); cp \"$program\" fio; \
            ldd \"$program\" | grep -o '/[^ ]*' | xargs cp -Lt lib",
        ])
        .dir(dir.path())
        .ok()?;
    Ok(dir)
}

/// Waits until the daemon has completed requests of the guest.
fn until_served(server: &Server, guest: &Machine) -> Result {
    until("the guest's requests are completed", PATIENCE, || {
        check(!guest.console().contains("I/O error"), || "a request has failed".into())?;
        let stat = server.operator(&["stat", "--json"])?.run()?;
        if !stat.status.success() {
            return Ok(None);
        }
        let operations = &stat.json()?["volumes"][0]["operations"];
        let of = |kind: &str| operations[kind]["requests"].as_u64().unwrap_or(0);
        Ok((of("read") + of("write") > 0).then_some(()))
    })
}

/// Waits until QEMU has sent nearly all of the handshake: the daemon serves every queue.
fn until_all_queues_are_served(server: &Server) -> Result {
    until("all queues are served", PATIENCE, || {
        let stat = server.operator(&["stat", "vhost", "--json"])?.ok()?.json()?;
        Ok((stat[0]["queues"] == QUEUES).then_some(()))
    })
}

fn kills(qemu: Qemu) -> Result {
    let count = u32::try_from(seeded::scaled(20)).unwrap_or(u32::MAX);
    let fio = fio_tree()?;
    let setup = Setup::new()?.image("disk", 64 * MIB)?;
    let mut server = setup.vhost_user().start()?;
    let guest = Guest::interactive(FUNCTIONS).qemu(qemu).processors(QUEUES);
    let queues = format!("num-queues={QUEUES}");
    let guest = guest.vhost_user(&server.vhost_socket("disk"), &[&queues]);
    let mut guest = guest.tree(fio.path(), "/fio", 160).boot()?;
    guest.ready(1)?;
    let killed = kill_daemons(&mut server, &mut guest, count);
    killed.map_err(|error| {
        // What the daemon knows of the guest's connection: a frontend that has sent nothing has no queues there.
        let stat = server.operator(&["stat", "vhost", "--json"]).and_then(|stat| stat.run());
        let stat = stat.map(|stat| stat.stdout).unwrap_or_default();
        Error::unexpected(format!("{error}\n--- vhost\n{stat}\n--- console\n{}", guest.console()))
    })?;
    guest.order("end")?;
    guest.wait()?;
    server.healthy()?;
    server.stop()
}

#[expect(clippy::print_stderr, reason = "shown with --nocapture")]
fn kill_daemons(server: &mut Server, guest: &mut Machine, count: u32) -> Result {
    let seed = seeded::seed("EBBD_TEST_SEED", 0xebb_d009);
    eprintln!("EBBD_TEST_SEED={seed}");
    let mut random = Random::new(seed);
    guest.call("begin")?;
    until_served(server, guest)?;
    let mut pauses = Vec::new();
    for kill in 0..count {
        std::thread::sleep(Duration::from_millis(random.below(600)));
        let since = Instant::now();
        // If the backend ends before QEMU has all its features, QEMU connects again, but sends
        // nothing. So a second kill finds QEMU stopped.
        let twice = kill % 4 == 3;
        if twice {
            guest.freeze()?;
        }
        server.kill9()?;
        server.restart()?;
        if twice {
            std::thread::sleep(Duration::from_millis(random.below(600)));
            server.kill9()?;
            server.restart()?;
            guest.thaw()?;
        }
        until_served(server, guest)?;
        if !twice {
            pauses.push(since.elapsed());
        }
        // The end of the handshake shows in nothing that the daemon sees. A machine that is slow to
        // connect is slow to end it.
        until_all_queues_are_served(server)?;
        std::thread::sleep(AFTER_HANDSHAKE.max(since.elapsed()));
    }
    guest.call("end_of_load")?;
    check(guest.answer("passes")? != "0", || "the load was carried out".into())?;
    pauses.sort();
    eprintln!(
        "measured: {count} kills, {} passes; from the kill to the next request p50 {:?}, at most {:?}",
        guest.answer("passes")?,
        pauses.get(pauses.len() / 2),
        pauses.last()
    );
    Ok(())
}

#[test]
fn nothing_is_lost_when_the_daemon_is_killed_under_qemu_7_2() -> Result {
    kills(Qemu::Installed)
}

#[test]
fn nothing_is_lost_when_the_daemon_is_killed_under_qemu_10() -> Result {
    kills(Qemu::Backports)
}
