//! A daemon hands over to its successor while clients use their connections: none of them notices more than a pause, and
//! whichever of the two daemons is killed, the other one serves.

#![allow(clippy::print_stdout, reason = "a test's figures")]

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use testbed::harness::ledger::Ledger;
use testbed::harness::nbd::{Client, Handshake, Request, read_reply, wire};
use testbed::harness::pattern::{Random, content};
use testbed::harness::process::{PATIENCE, until, wait};
use testbed::harness::server::Setup;
use testbed::harness::writer::{Promise, Writer, let_write};
use testbed::{Error, Result, Server, check};

const CONNECTIONS: usize = 64;
/// The bytes of one connection.
const SHARE: u64 = 1 << 20;
const BLOCK: u64 = 8 << 10;

fn setup(volume: &str, size: u64) -> Result<Setup> {
    let setup = Setup::new()?;
    let path = setup.image_path("disk");
    let volume = format!("disk=file:{},size={size},create=true{volume}", path.display());
    let control = setup.dir().join("control.sock");
    let state = setup.dir().join("state");
    Ok(setup.volume(&volume).arg("--control").arg(control).arg("--state").arg(state))
}

/// Writes and reads back on one connection until `end`; returns how long each request took.
fn use_connection(
    mut client: Client,
    at: u64,
    seed: u64,
    end: &AtomicBool,
) -> Result<Vec<Duration>> {
    let mut random = Random::new(seed);
    let mut stamps = vec![0; usize::try_from(SHARE / BLOCK).unwrap_or(0)];
    let mut times = Vec::new();
    let mut stamp = 0;
    while !end.load(Ordering::Relaxed) {
        let block = random.below(SHARE / BLOCK);
        let offset = at + block * BLOCK;
        let known = &mut stamps[usize::try_from(block).unwrap_or(0)];
        let length = usize::try_from(BLOCK).unwrap_or(0);
        let began = Instant::now();
        match random.below(8) {
            0 => client.flush()?,
            1..4 if *known > 0 => {
                let found = client.read(offset, u32::try_from(BLOCK).unwrap_or(0))?;
                check(found == content(*known, offset, length), || {
                    format!("the block at {offset} is not what was written")
                })?;
            }
            _ => {
                stamp += 1;
                *known = stamp;
                client.write(offset, &content(stamp, offset, length), 0)?;
            }
        }
        times.push(began.elapsed());
    }
    for (block, known) in (0..).zip(stamps).filter(|(_, known)| *known > 0) {
        let offset = at + block * BLOCK;
        let found = client.read(offset, u32::try_from(BLOCK).unwrap_or(0))?;
        check(found == content(known, offset, usize::try_from(BLOCK).unwrap_or(0)), || {
            format!("the block at {offset} is not what was written last")
        })?;
    }
    client.disconnect()?;
    Ok(times)
}

/// Hands over `times` times under the load of [`CONNECTIONS`] connections, and prints how long requests took at most.
fn rounds(volume: &str, times: usize) -> Result {
    let mut server = setup(volume, CONNECTIONS as u64 * SHARE)?.log_level("warn").start()?;
    let (end, failed) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let load: Vec<_> = (0..CONNECTIONS as u64)
            .map(|number| {
                let (socket, end, failed) = (server.socket(), &end, &failed);
                scope.spawn(move || {
                    let client = Client::open(&socket, "disk").map_err(Error::from);
                    let used = client
                        .and_then(|client| use_connection(client, number * SHARE, number, end));
                    failed.fetch_or(used.is_err(), Ordering::Relaxed);
                    used
                })
            })
            .collect();
        let handed = (0..times).try_for_each(|round| {
            std::thread::sleep(Duration::from_millis(300));
            let mut old = server.take_over()?;
            let status = wait(&mut old, PATIENCE)?;
            check(status.is_some_and(|status| status.success()), || {
                format!("takeover {round}: the predecessor ended with {status:?}")
            })?;
            check(!failed.load(Ordering::Relaxed), || format!("takeover {round}: a client failed"))
        });
        end.store(true, Ordering::Relaxed);
        let mut longest = Vec::new();
        let mut problems: Vec<String> = handed.err().iter().map(ToString::to_string).collect();
        for used in load {
            match used.join() {
                Ok(Ok(mut durations)) => {
                    durations.sort_unstable_by(|a, b| b.cmp(a));
                    longest.extend(durations.into_iter().take(times));
                }
                Ok(Err(error)) => problems.push(error.to_string()),
                Err(_) => problems.push("a client panicked".to_owned()),
            }
        }
        check(problems.is_empty(), || format!("{problems:?}\n--- log\n{}", server.log()))?;
        longest.sort_unstable();
        let at = |part: usize| longest.get(longest.len() * part / 100).copied().unwrap_or_default();
        println!(
            "pauses of {CONNECTIONS} connections in {times} takeovers: median {:?}, p99 {:?}, longest {:?}",
            at(50),
            at(99),
            longest.last()
        );
        server.healthy()?;
        server.stop()
    })
}

fn takeovers() -> usize {
    usize::try_from(seeded::scaled(6)).unwrap_or(6)
}

#[test]
fn no_client_fails_when_daemons_take_over_from_one_another() -> Result {
    rounds("", takeovers())
}

#[test]
fn no_client_fails_when_there_is_dirty_data() -> Result {
    rounds(",cache=writeback", takeovers())
}

/// A client that has sent a part of a request, or requests ahead, or does not receive its replies.
#[test]
fn what_a_client_has_sent_in_part_is_continued() -> Result {
    let mut server = setup("", 64 << 20)?.start()?;
    let request = |command, offset, length, cookie| {
        Request { command, offset, length, cookie, ..Request::default() }.bytes()
    };
    let open = || Client::open(&server.socket(), "disk").map(Client::into_stream);
    let (mut header, mut payload, mut many) = (open()?, open()?, open()?);
    let io = |error| Error::io("talk to the server")(error);
    // Half of a header.
    let first = request(wire::CMD_WRITE, 0, 4096, 1);
    header.write_all(&first[..11]).map_err(io)?;
    // A header and half of its data: a request that was begun, which the first daemon completes.
    payload.write_all(&request(wire::CMD_WRITE, 1 << 20, 4096, 2)).map_err(io)?;
    payload.write_all(&content(2, 1 << 20, 4096)[..1000]).map_err(io)?;
    // Many requests at once, whose replies are not received before the takeover.
    for number in 0..200 {
        many.write_all(&request(wire::CMD_READ, number * 4096, 4096, 100 + number)).map_err(io)?;
    }
    std::thread::sleep(Duration::from_millis(100));
    let complete = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        payload.write_all(&content(2, 1 << 20, 4096)[1000..]).map(|()| payload)
    });
    let replies = std::thread::spawn(move || {
        // The last ones are still to be sent when the takeover begins.
        std::thread::sleep(Duration::from_millis(300));
        let mut cookies = BTreeSet::new();
        for _ in 0..200 {
            let (cookie, error) = read_reply(&mut many)?;
            check(error == 0 && cookies.insert(cookie), || format!("reply {cookie}: {error}"))?;
            many.read_exact(&mut [0; 4096]).map_err(Error::io("receive data"))?;
        }
        Ok::<_, Error>(())
    });
    let mut old = server.take_over()?;
    let mut payload = complete.join().map_err(|_| Error::unexpected("panicked"))?.map_err(io)?;
    check(read_reply(&mut payload)? == (2, 0), || "the write that was begun failed".into())?;
    header.write_all(&first[11..]).map_err(io)?;
    header.write_all(&content(1, 0, 4096)).map_err(io)?;
    check(read_reply(&mut header)? == (1, 0), || "the write was not continued".into())?;
    replies.join().map_err(|_| Error::unexpected("panicked"))??;
    let mut client = Client::open(&server.socket(), "disk")?;
    check(client.read(0, 4096)? == content(1, 0, 4096), || "the continued write".into())?;
    check(client.read(1 << 20, 4096)? == content(2, 1 << 20, 4096), || "the begun write".into())?;
    check(wait(&mut old, PATIENCE)?.is_some_and(|status| status.success()), || server.log())?;
    server.stop()
}

/// How a daemon has ended, or `None` if it serves.
fn serves_or_has_ended(socket: &Path, daemon: &mut Child) -> Result<Option<ExitStatus>> {
    until("the old daemon", PATIENCE, || {
        let served = Handshake::connect(socket).is_ok();
        // It ends soon after it has handed over.
        let ended = wait(daemon, Duration::from_millis(100))?;
        Ok((served || ended.is_some()).then_some(ended))
    })
}

/// One of the two daemons is killed at a random moment of the takeover.
#[test]
fn either_daemon_serves_when_one_is_killed_in_the_takeover() -> Result {
    const DISK: usize = 16 << 20;
    let seed = seeded::seed("EBBD_TEST_SEED", 0xebb_7a0e);
    let mut random = Random::new(seed);
    let mut server = setup(",cache=writeback", DISK as u64)?.log_level("warn").start()?;
    let ledger = Mutex::new(Ledger::new(DISK));
    let (mut killed_old, mut killed_new, mut completed) = (0, 0, 0);
    for round in 0..seeded::scaled(24).max(8) {
        let place = |error: Error, server: &Server| {
            Error::unexpected(format!(
                "EBBD_TEST_SEED={seed}, round {round}: {error}\n{}",
                server.log()
            ))
        };
        let seeds = [random.next(), random.next()];
        let (delay, kills_old) = (random.below(250_000), random.below(2) == 0);
        let mut writers = Vec::new();
        for (number, seed) in seeds.into_iter().enumerate() {
            let client = Client::open(&server.socket(), "disk")?;
            let range = number * DISK / 2..(number + 1) * DISK / 2;
            writers.push(Writer::new(client, &ledger, range, seed, Promise::Durable));
        }
        std::thread::scope(|scope| {
            let writers: Vec<_> = writers.into_iter().map(|w| scope.spawn(|| w.run())).collect();
            let went = let_write(&ledger, 20, Duration::from_millis(1)).and_then(|()| {
                let mut old = server.begin_takeover()?;
                std::thread::sleep(Duration::from_micros(delay));
                if kills_old {
                    killed_old += 1;
                    old.kill().map_err(Error::io("kill the old daemon"))?;
                    old.wait().map_err(Error::io("kill the old daemon"))?;
                } else {
                    server.kill9()?;
                    match serves_or_has_ended(&server.socket(), &mut old)? {
                        None => {
                            killed_new += 1;
                            server.take_back(old);
                        }
                        // It had handed over: as any kill of a daemon.
                        Some(status) => {
                            completed += 1;
                            check(status.success(), || format!("the old daemon: {status}"))?;
                            server.restart()?;
                        }
                    }
                }
                server.wait_until_served()
            });
            // The writers end with the daemon.
            let killed = server.kill9();
            for writer in writers {
                writer.join().map_err(|_| Error::unexpected("a writer panicked"))??;
            }
            went.and(killed)
        })
        .map_err(|error| place(error, &server))?;
        server.restart()?;
        let mut ledger = ledger.lock().unwrap_or_else(PoisonError::into_inner);
        let mut client = Client::open(&server.socket(), "disk")?;
        for offset in (0..DISK as u64).step_by(1 << 20) {
            let found = client.read(offset, 1 << 20)?;
            ledger.crashed(offset, &found).map_err(|error| place(error, &server))?;
        }
    }
    println!("killed: {killed_old} old daemons, {killed_new} new ones, {completed} after the end");
    check(killed_old > 0 && killed_new + completed > 0, || "one of both was never killed".into())?;
    server.stop()
}

/// A configuration with which a daemon cannot start, or that another one was given at run time, is no reason to end.
#[test]
fn a_successor_that_cannot_serve_leaves_the_clients_to_the_old_daemon() -> Result {
    let setup = setup("", 1 << 20)?;
    let file = setup.dir().join("ebbd.toml");
    let write = |text: &str| std::fs::write(&file, text).map_err(Error::io("write the file"));
    write("")?;
    let mut server = setup.arg("--config").arg(&file).start()?;
    let added = format!("file:{}", server.dir().join("added.img").display());
    server.operator(&["volume", "add", "added", &added, "--size", "1M", "--create"])?.ok()?;
    // The successor would not have it.
    let ended = server.failing_takeover(&[])?;
    let refused = server.log().contains("would not have volume `added`");
    check(!ended.success() && refused, || server.log())?;
    server.operator(&["volume", "persist", "added"])?.ok()?;
    server.operator(&["set", "max_buffer_pages", "77"])?.ok()?;
    server.operator(&["limit", "added", "--iops", "5000"])?.ok()?;
    let mut clients =
        [Client::open(&server.socket(), "disk")?, Client::open(&server.socket(), "added")?];
    let all = |clients: &mut [Client; 2], with: &dyn Fn(&mut Client) -> Result| -> Result {
        clients.iter_mut().try_for_each(with)
    };
    all(&mut clients, &|client| Ok(client.write(0, &content(1, 0, 4096), 0)?))?;
    for round in 1..4 {
        // Another program has the address of its page.
        let taken = std::net::TcpListener::bind("127.0.0.1:0").map_err(Error::io("bind"))?;
        let address = taken.local_addr().map_err(Error::io("bind"))?;
        write(&format!("web = \"tcp:{address}\"\n"))?;
        let ended = server.failing_takeover(&[])?;
        check(!ended.success(), || format!("it ended with {ended}"))?;
        until("the old daemon serves again", PATIENCE, || {
            Ok(Handshake::connect(&server.socket()).is_ok().then_some(()))
        })?;
        all(&mut clients, &|client| {
            check(client.read(0, 4096)? == content(round, 0, 4096), || server.log())?;
            Ok(client.write(0, &content(round + 1, 0, 4096), 0)?)
        })?;
    }
    for (owner, name, value) in
        [(None, "max_buffer_pages", "77"), (Some("added"), "limit_iops", "5000")]
    {
        let of_volume = owner.map_or(Vec::new(), |volume| vec!["--volume", volume]);
        let found = server.operator(&[&["get", name][..], &of_volume].concat())?.ok()?;
        check(found.stdout.contains(value), || format!("{name} as it was set: {}", found.stdout))?;
    }
    server.healthy()?;
    server.stop()
}

/// The page's address is free for the successor. A volume whose file is gone ends a successor with `--strict`, and does not
/// keep the old daemon from serving the others again.
#[test]
fn the_page_and_a_volume_that_is_lost_keep_no_daemon_from_taking_over() -> Result {
    let free = std::net::TcpListener::bind("127.0.0.1:0").map_err(Error::io("bind"))?;
    let page = free.local_addr().map_err(Error::io("bind"))?.to_string();
    drop(free);
    let setup = setup("", 1 << 20)?.image("lost", 1 << 20)?.volume("memory=memory:1M");
    let (file, moved) = (setup.image_path("lost"), setup.image_path("moved"));
    let mut server = setup.arg("--web").arg(page).arg("--strict").start()?;
    let mut client = Client::open(&server.socket(), "disk")?;
    client.write(0, &content(1, 0, 4096), 0)?;
    let mut old = server.take_over()?;
    check(wait(&mut old, PATIENCE)?.is_some_and(|status| status.success()), || server.log())?;
    check(client.read(0, 4096)? == content(1, 0, 4096), || server.log())?;
    // The old daemon goes on, and so do its disks in memory.
    let mut memory = Client::open(&server.socket(), "memory")?;
    memory.write(0, &content(2, 0, 4096), 0)?;
    server.operator(&["volume", "resize", "memory", "2M"])?.ok()?;
    std::fs::rename(file, moved).map_err(Error::io("rename a file"))?;
    let ended = server.failing_takeover(&[])?;
    check(!ended.success(), || format!("it ended with {ended}"))?;
    until("the old daemon serves again", PATIENCE, || {
        Ok(Handshake::connect(&server.socket()).is_ok().then_some(()))
    })?;
    check(client.read(0, 4096)? == content(1, 0, 4096), || server.log())?;
    check(memory.read(0, 4096)? == content(2, 0, 4096), || server.log())?;
    check(server.log().contains("the successor could not start: volume lost"), || server.log())?;
    memory.disconnect()?;
    client.disconnect()?;
    server.stop()
}

/// A client must not go on with the content of another disk, or with that of a disk in memory, which ends with a process.
#[test]
fn a_client_is_not_continued_on_another_disk() -> Result {
    let setup = Setup::new()?;
    let file = setup.dir().join("ebbd.toml");
    let folder = setup.dir().to_owned();
    let write = |disk: &str| {
        let store = format!(
            "store = \"file:{}\"\nsize = \"1M\"\ncreate = true",
            folder.join(disk).display()
        );
        let memory = "[volume.memory]\nstore = \"memory:1M\"\n";
        std::fs::write(&file, format!("[volume.disk]\n{store}\n{memory}"))
            .map_err(Error::io("write the file"))
    };
    write("one.img")?;
    let control = folder.join("control.sock");
    let mut server = setup.arg("--config").arg(&file).arg("--control").arg(control).start()?;
    for (disk, goes_on) in [("one.img", true), ("two.img", false)] {
        let mut client = Client::open(&server.socket(), "disk")?;
        let mut of_memory = Client::open(&server.socket(), "memory")?;
        client.write(0, &content(1, 0, 4096), 0)?;
        write(disk)?;
        let mut old = server.take_over()?;
        check(wait(&mut old, PATIENCE)?.is_some_and(|status| status.success()), || server.log())?;
        check(client.flush().is_ok() == goes_on, || format!("{disk}: {}", server.log()))?;
        check(of_memory.flush().is_err(), || "the content of a disk in memory is lost".into())?;
    }
    server.stop()
}

/// Volumes and settings that only the state directory has keep a successor with another one from
/// taking over; the daemon goes on.
#[test]
fn successor_with_another_state_directory_is_refused() -> Result {
    let setup = Setup::new()?;
    let (dir, file) = (setup.dir().to_owned(), setup.dir().join("ebbd.toml"));
    let write = |state: &str| {
        let store = dir.join("disk.img");
        let disk = format!("store = \"file:{}\"\nsize = \"1M\"\ncreate = true", store.display());
        std::fs::write(&file, format!("{state}[volume.disk]\n{disk}\n"))
            .map_err(Error::io("write the file"))
    };
    let [own, other] =
        ["own", "other"].map(|name| format!("state = \"{}\"\n", dir.join(name).display()));
    write(&own)?;
    let control = dir.join("control.sock");
    let mut server = setup.arg("--config").arg(&file).arg("--control").arg(control).start()?;
    let added = format!("file:{}", dir.join("added.img").display());
    let add = ["volume", "add", "added", &added, "--size", "1M", "--create", "--persist"];
    server.operator(&add)?.ok()?;
    let mut client = Client::open(&server.socket(), "added")?;
    client.write(0, &content(1, 0, 4096), 0)?;
    let refused = |server: &mut Server, state: &str, what: &str| -> Result {
        write(state)?;
        let ended = server.failing_takeover(&[])?;
        check(!ended.success() && server.log().contains(what), || server.log())
    };
    for (state, what) in [("", "no state directory"), (&*other, "its state directory is")] {
        refused(&mut server, state, "would not have volume `added`")?;
        check(server.log().contains(what), || server.log())?;
        // Nothing was changed.
        check(client.read(0, 4096)? == content(1, 0, 4096), || server.log())?;
    }
    // As if its file system were not mounted.
    let rename = |from: &str, to: &str| std::fs::rename(dir.join(from), dir.join(to));
    rename("own", "away").map_err(Error::io("move the state directory"))?;
    refused(&mut server, &own, "finds another folder at that path")?;
    drop(std::fs::remove_dir_all(dir.join("own")));
    rename("away", "own").map_err(Error::io("move the state directory back"))?;
    write(&own)?;
    let mut old = server.take_over()?;
    check(wait(&mut old, PATIENCE)?.is_some_and(|status| status.success()), || server.log())?;
    check(client.read(0, 4096)? == content(1, 0, 4096), || server.log())?;
    client.disconnect()?;
    server.operator(&["volume", "remove", "added"])?.ok()?;
    server.operator(&["volume", "resize", "disk", "2M"])?.ok()?;
    refused(&mut server, &other, "would not have the settings of volume `disk`")?;
    server.operator(&["volume", "resize", "disk", "1M", "--shrink"])?.ok()?;
    // Nothing is kept.
    let mut old = server.take_over()?;
    check(wait(&mut old, PATIENCE)?.is_some_and(|status| status.success()), || server.log())?;
    server.healthy()?;
    server.stop()
}

/// Where no daemon answers, the option has no effect. The log names the socket, since a daemon may
/// run at another one.
#[test]
fn a_takeover_without_a_daemon_is_a_start() -> Result {
    let mut server = setup("", 1 << 20)?.arg("--takeover").start()?;
    let log = server.log();
    let line = log.lines().find(|line| line.contains("no daemon answers at the control socket"));
    check(line.is_some_and(|line| line.contains("socket=\"/")), || log.clone())?;
    Client::open(&server.socket(), "disk")?.disconnect()?;
    server.stop()
}
