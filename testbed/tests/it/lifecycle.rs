//! Starting, stopping and changing a running daemon.

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal, pidfd_getfd, pidfd_open};
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use testbed::harness::binary::{self, Build};
use testbed::harness::ledger::Ledger;
use testbed::harness::nbd::{Client, Failure, Handshake};
use testbed::harness::pattern::{Random, content};
use testbed::harness::process::{PATIENCE, until};
use testbed::harness::server::Setup;
use testbed::harness::writer::{Promise, Writer, let_write};
use testbed::{Error, Result, Server, Tool, check};

const MIB: u64 = 1 << 20;
const DISK: usize = 16 << 20;

#[test]
fn readiness_is_reported_to_the_service_manager_and_in_the_log() -> Result {
    let setup = Setup::new()?.image("disk", MIB)?;
    let path = setup.dir().join("notify.sock");
    let manager = UnixDatagram::bind(&path).map_err(Error::io("bind"))?;
    manager.set_read_timeout(Some(PATIENCE)).map_err(Error::io("set a time limit"))?;
    let mut server = setup.env("NOTIFY_SOCKET", &path).start()?;
    let next = || {
        let mut message = [0; 4096];
        let length = manager.recv(&mut message).map_err(Error::io("wait for a notification"))?;
        Ok::<_, Error>(String::from_utf8_lossy(&message[..length]).into_owned())
    };
    let told = next()?;
    check(told.lines().any(|l| l == "READY=1"), || format!("READY=1 first, not {told:?}"))?;
    until("ready in the log", PATIENCE, || Ok(server.log().contains("ready").then_some(())))?;
    server.stop()?;
    // STOPPING=1 arrives before the daemon exits, possibly after other notifications.
    until("STOPPING=1", PATIENCE, || Ok(next()?.lines().any(|l| l == "STOPPING=1").then_some(())))
}

/// The notifications of a daemon to its service manager.
struct Manager(UnixDatagram);

impl Manager {
    fn new(path: &std::path::Path) -> Result<Manager> {
        let manager = UnixDatagram::bind(path).map_err(Error::io("bind"))?;
        manager.set_read_timeout(Some(PATIENCE)).map_err(Error::io("set a time limit"))?;
        Ok(Manager(manager))
    }

    /// The next notification that holds this line.
    fn next_with(&self, line: &str) -> Result<String> {
        until(line, PATIENCE, || {
            let mut message = [0; 4096];
            let length =
                self.0.recv(&mut message).map_err(Error::io(format!("wait for {line}")))?;
            let text = String::from_utf8_lossy(&message[..length]).into_owned();
            Ok(text.lines().any(|found| found == line).then_some(text))
        })
    }
}

#[test]
fn a_reload_and_the_volumes_served_are_reported_to_the_service_manager() -> Result {
    let setup = Setup::new()?;
    let file = setup.dir().join("ebbd.toml");
    let write = |text: &str| fs::write(&file, text).map_err(Error::io("write a configuration"));
    write("[volume.one]\nstore = \"memory:1M\"\n")?;
    let path = setup.dir().join("notify.sock");
    let manager = Manager::new(&path)?;
    let monotonic_usec = || {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        i128::from(now.tv_sec) * 1_000_000 + i128::from(now.tv_nsec) / 1000
    };
    let mut server = setup.arg("--config").arg(&file).env("NOTIFY_SOCKET", &path).start()?;
    let ready = manager.next_with("READY=1")?;
    let says = |text: &str, line: &str| text.lines().any(|found| found == line);
    check(says(&ready, "STATUS=1 of 1 volume served"), || ready.clone())?;

    // systemd waits for a notification that is later than its signal, and then for READY=1.
    write("[volume.one]\nstore = \"memory:1M\"\n[volume.two]\nstore = \"memory:1M\"\n")?;
    let before = monotonic_usec();
    server.signal(Signal::HUP)?;
    let reloading = manager.next_with("RELOADING=1")?;
    let time = reloading.lines().find_map(|line| line.strip_prefix("MONOTONIC_USEC="));
    let time: i128 = time.and_then(|time| time.parse().ok()).unwrap_or_default();
    check((before..=monotonic_usec()).contains(&time), || format!("{before}: {reloading}"))?;
    let ready = manager.next_with("READY=1")?;
    check(says(&ready, "STATUS=2 of 2 volumes served"), || ready.clone())?;
    Client::open(&server.socket(), "two")?.disconnect()?;

    // A reload that changes nothing because of a mistake ends as well.
    write("[volume.one]\nstroe = 1\n")?;
    server.signal(Signal::HUP)?;
    manager.next_with("RELOADING=1")?;
    manager.next_with("READY=1")?;
    // Two in quick succession: there is an end after the last one.
    server.signal(Signal::HUP)?;
    server.signal(Signal::HUP)?;
    manager.next_with("RELOADING=1")?;
    manager.next_with("READY=1")?;
    server.healthy()?;
    server.stop()
}

#[test]
fn nothing_acknowledged_is_lost_by_a_stop_under_load() -> Result {
    let seed = seeded::seed("EBBD_TEST_SEED", 0xebb_d004);
    let mut random = Random::new(seed);
    let mut server = Server::with_disk(DISK as u64)?;
    let ledger = Mutex::new(Ledger::new(DISK));
    for (round, signal) in [Signal::TERM, Signal::INT, Signal::TERM].into_iter().enumerate() {
        let place = |e: Error| Error::unexpected(format!("EBBD_TEST_SEED={seed}, {round}: {e}"));
        let mut writers = Vec::new();
        for n in 0..2 {
            let client = Client::open(&server.socket(), "disk")?;
            let range = n * DISK / 2..(n + 1) * DISK / 2;
            let promise = Promise::Acknowledged;
            writers.push(Writer::new(client, &ledger, range, random.next(), promise));
        }
        let least = 200 + random.below(600);
        let delay = Duration::from_micros(random.below(20_000));
        std::thread::scope(|scope| {
            let writers: Vec<_> = writers.into_iter().map(|w| scope.spawn(|| w.run())).collect();
            let written = let_write(&ledger, least, delay);
            let stopped = server.signal(signal).and_then(|()| server.wait(PATIENCE));
            // Kill it even after an error: the writers end only when the daemon does.
            server.kill9()?;
            for writer in writers {
                writer.join().map_err(|_| Error::unexpected("a writer panicked"))??;
            }
            written?;
            check(stopped?.code() == Some(0), || format!("{signal:?}: exit status 0"))
        })
        .map_err(place)?;
        // Read from the image itself: the daemon has exited.
        let image = fs::read(server.image_path("disk")).map_err(Error::io("read the image"))?;
        let mut ledger = ledger.lock().unwrap_or_else(PoisonError::into_inner);
        check(ledger.promised() > 100, || "hardly anything was written".into())?;
        ledger.crashed(0, &image).map_err(place)?;
        server.restart().map_err(place)?;
    }
    server.stop()
}

#[test]
fn a_hangup_rereads_the_configuration() -> Result {
    let setup = Setup::new()?;
    let file = setup.dir().join("ebbd.toml");
    let write = |volumes: &str| {
        let text: String = volumes
            .split_whitespace()
            .map(|name| format!("[volume.{name}]\nstore = \"memory:1M\"\n"))
            .collect();
        fs::write(&file, text).map_err(Error::io("write a configuration"))
    };
    write("stays goes")?;
    let mut server = setup.arg("--config").arg(&file).start()?;
    let mut stays = Client::open(&server.socket(), "stays")?;
    let mut goes = Client::open(&server.socket(), "goes")?;
    let data = content(1, 0, 4096);
    stays.write(0, &data, 0)?;
    goes.write(0, &data, 0)?;

    write("stays comes")?;
    server.signal(Signal::HUP)?;
    let socket = server.socket();
    let names = || -> Result<Vec<String>> {
        let mut names = Handshake::connect(&socket)?.list()?;
        names.sort();
        Ok(names)
    };
    until("volumes comes and stays", PATIENCE, || {
        Ok((names()? == ["comes", "stays"]).then_some(()))
    })?;
    check(stays.read(0, 4096)? == data, || "a volume that stays has changed".into())?;
    Client::open(&socket, "comes")?.disconnect()?;
    until("the connection to a volume that goes ends", PATIENCE, || match goes.read(0, 512) {
        Ok(_) => Ok(None),
        Err(Failure::Io(_) | Failure::Refused(_)) => Ok(Some(())),
        Err(e) => Err(e.into()),
    })?;

    // A mistake changes nothing, and is logged.
    let before = server.log().len();
    fs::write(&file, "[volume.stays]\nstroe = 1\n").map_err(Error::io("write"))?;
    server.signal(Signal::HUP)?;
    until("the mistake in the log", PATIENCE, || {
        Ok(server.log()[before..].contains("stroe").then_some(()))
    })?;
    check(names()? == ["comes", "stays"], || "a mistake has changed the volumes".into())?;
    check(stays.read(0, 4096)? == data, || "a mistake has changed a volume".into())?;
    server.healthy()?;
    server.stop()
}

#[test]
fn volumes_are_not_mixed_up() -> Result {
    let mut setup = Setup::new()?;
    for n in 0..20 {
        setup = setup.image(&format!("v{n}"), MIB)?;
    }
    let mut server = setup.start()?;
    let mut clients = Vec::new();
    for n in 0..20 {
        clients.push(Client::open(&server.socket(), &format!("v{n}"))?);
    }
    for (stamp, client) in (1..).zip(&mut clients) {
        client.write(4096, &content(stamp, 4096, 4096), 0)?;
    }
    for (stamp, client) in (1..).zip(&mut clients) {
        let seen = client.read(4096, 4096)?;
        check(seen == content(stamp, 4096, 4096), || {
            format!("volume {stamp} has data of another volume")
        })?;
    }
    drop(clients);
    server.healthy()?;
    server.stop()
}

#[test]
fn a_volume_grows_while_it_is_used_and_shrinks_only_with_the_flag() -> Result {
    let setup = Setup::new()?.image("disk", MIB)?;
    let control = setup.dir().join("control.sock");
    let mut server = setup.arg("--control").arg(&control).start()?;
    let resize = |arguments: &[&str]| -> Result<Tool> {
        let tool = Tool::new(&binary::ebbd(Build::AsTests)?)
            .args(["volume", "resize", "--wait"])
            .args(arguments);
        Ok(tool.arg("--control").arg(&control))
    };
    let mut early = Client::open(&server.socket(), "disk")?;
    early.write(4096, &content(1, 4096, 4096), 0)?;
    resize(&["disk", "2M"])?.ok()?;
    let mut late = Client::open(&server.socket(), "disk")?;
    late.write(2 * MIB - 4096, &content(2, 0, 4096), 0)?;
    check(late.read(2 * MIB - 4096, 4096)? == content(2, 0, 4096), || "the new end".into())?;
    check(early.read(4096, 4096)? == content(1, 4096, 4096), || "the old data".into())?;

    for (arguments, word) in
        [(&["disk", "1M"][..], "--shrink"), (&["disk", "1000"], "512"), (&["disc", "4M"], "disk")]
    {
        let refused = resize(arguments)?.run()?;
        check(!refused.status.success() && refused.stderr.contains(word), || {
            format!("{arguments:?}: {refused:?}")
        })?;
    }
    check(late.read(2 * MIB - 4096, 4096)? == content(2, 0, 4096), || "kept".into())?;
    resize(&["disk", "1M", "--shrink"])?.ok()?;
    check(late.read(2 * MIB - 4096, 4096).is_err(), || "read past the end".into())?;
    check(late.read(4096, 4096)? == content(1, 4096, 4096), || "what is left".into())?;
    server.healthy()?;
    server.stop()
}

#[test]
fn a_volume_that_has_grown_is_served_again_after_a_restart() -> Result {
    let setup = Setup::new()?;
    let (image, control) = (setup.dir().join("grows.img"), setup.dir().join("control.sock"));
    let mut server = setup
        .volume(&format!("grows=file:{},size=1M,create=true", image.display()))
        .volume("other=memory:1M")
        .arg("--control")
        .arg(&control)
        .start()?;
    let resize = Tool::new(binary::ebbd(Build::AsTests)?)
        .args(["volume", "resize", "grows", "2M", "--wait"]);
    resize.arg("--control").arg(&control).ok()?;
    server.stop()?;
    // The configured size is still 1 MiB.
    server.restart()?;
    let mut client = Client::open(&server.socket(), "grows")?;
    check(client.size == 2 * MIB, || format!("{} bytes", client.size))?;
    client.write(2 * MIB - 4096, &content(3, 0, 4096), 0)?;
    Client::open(&server.socket(), "other")?.disconnect()?;
    until("a warning with the configured size", PATIENCE, || {
        Ok(server.log().contains("1048576").then_some(()))
    })?;
    client.disconnect()?;
    server.stop()
}

/// The sockets at which a process listens, which stay open as long as these are.
fn listening_sockets(process: u32) -> Result<Vec<OwnedFd>> {
    let failed =
        |error: rustix::io::Errno| Error::io("duplicate a descriptor of ebbd")(error.into());
    let number = process.try_into().ok().and_then(Pid::from_raw);
    let number = number.ok_or_else(|| Error::unexpected("the number of a process"))?;
    let process_fd = pidfd_open(number, PidfdFlags::empty()).map_err(failed)?;
    let folder = format!("/proc/{process}/fd");
    let mut sockets = Vec::new();
    for entry in fs::read_dir(folder).map_err(Error::io("list descriptors"))? {
        let name = entry.map_err(Error::io("list descriptors"))?.file_name();
        let Some(fd) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        // It may have been closed.
        let Ok(socket) = pidfd_getfd(&process_fd, fd, PidfdGetfdFlags::empty()) else { continue };
        if rustix::net::sockopt::socket_acceptconn(&socket).is_ok_and(|listens| listens) {
            sockets.push(socket);
        }
    }
    Ok(sockets)
}

/// The kernel keeps the sockets of a killed daemon open until its last requests have completed, on a disk that hangs for long.
/// Here the test keeps them.
#[test]
fn a_daemon_waits_for_the_last_requests_of_one_that_was_killed() -> Result {
    let mut server = Server::with_disk(MIB)?;
    let held = listening_sockets(server.pid()?)?;
    check(!held.is_empty(), || "a socket that listens".into())?;
    server.kill9()?;
    let log = server.dir().join("log");
    let freeing = std::thread::spawn(move || {
        let told = until("the daemon that waits, in its log", PATIENCE, || {
            let text = fs::read_to_string(&log).unwrap_or_default();
            Ok(text.contains("its server has ended").then_some(()))
        });
        drop(held);
        told
    });
    server.restart()?;
    freeing.join().map_err(|_| Error::unexpected("the thread panicked"))??;
    server.stop()
}
