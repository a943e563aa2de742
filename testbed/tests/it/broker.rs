//! The broker: what a daemon that it guards can do, and what code that has hijacked the daemon cannot.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::{Signal, kill_process};
use testbed::harness::nbd::Client;
use testbed::harness::process::{PATIENCE, broker_of, until};
use testbed::harness::server::Setup;
use testbed::{Error, Result, Server, Tool, check};

const MIB: u64 = 1 << 20;

const DONE: i32 = 0;
const REFUSED: i32 = 10;
const NO_BROKER: i32 = 11;

/// Does something in a process that is guarded, or not: the exit status, and what it wrote.
fn run(deed: &str, guard: &str) -> Result<(Option<i32>, String)> {
    let folder = tempfile::tempdir().map_err(Error::io("make a folder"))?;
    let of = |path: &str| folder.path().join(path);
    let io = Error::io("make files");
    for name in ["in/deep", "out", "read", "flat/folder"] {
        fs::create_dir_all(of(name)).map_err(Error::io("make a folder"))?;
    }
    for (name, text) in
        [("in/kept", "kept"), ("in/rules", "rules"), ("out/file", "secret"), ("read/file", "read")]
    {
        fs::write(of(name), text).map_err(Error::io("make a file"))?;
    }
    let link =
        |to: &str, at: &str| std::os::unix::fs::symlink(to, of(at)).map_err(Error::io("link"));
    link("../out/file", "in/deep/link")?;
    link("../rules", "in/deep/rules")?;
    let fifo = Command::new("mkfifo").arg(of("in/fifo")).status().map_err(io)?;
    check(fifo.success(), || "mkfifo".into())?;
    let program = env!("CARGO_BIN_EXE_guarded");
    // Also waits for the end of its output, which the broker has, too.
    let done = Tool::new(program).arg(deed).arg(folder.path()).arg(guard).run()?;
    let secret = fs::read(of("out/file")).unwrap_or_default();
    check(guard == "off" || secret == b"secret", || format!("{deed}: the file outside changed"))?;
    Ok((done.status.code(), done.stderr.clone()))
}

fn is(deed: &str, guard: &str, wanted: i32) -> Result {
    let (status, said) = run(deed, guard)?;
    check(status == Some(wanted), || format!("{deed} with the broker {guard}: {status:?} {said}"))
}

/// It succeeds without the broker, so that the broker is what refuses it.
fn refused(deeds: &[&str]) -> Result {
    for deed in deeds {
        is(deed, "off", DONE)?;
        is(deed, "on", REFUSED)?;
    }
    Ok(())
}

#[test]
fn a_guarded_daemon_opens_connects_and_makes_what_it_may() -> Result {
    for deed in
        ["files", "beside", "own-figures", "sockets", "connect-twice", "ring", "name-allowed"]
    {
        is(deed, "on", DONE)?;
    }
    // The program itself is right about what the kernel does.
    for deed in ["files", "own-figures", "sockets"] {
        is(deed, "off", DONE)?;
    }
    Ok(())
}

#[test]
fn a_hijacked_daemon_opens_nothing_that_the_rules_do_not_name() -> Result {
    refused(&["open", "open-by-dots", "open-from-folder", "open-by-name"])?;
    refused(&["append-only", "times"])?;
    refused(&[
        "write",
        "write-again",
        "make",
        "make-below",
        "delete",
        "mode",
        "folder",
        "change-folder",
    ])
}

#[test]
fn a_hijacked_daemon_brings_no_file_to_where_it_may_open_it() -> Result {
    refused(&["link-in", "rename-in", "rename-out", "symbolic-link"])?;
    refused(&["rename-folder", "exchange-folder", "rename-link", "link-link"])
}

#[test]
fn a_hijacked_daemon_does_not_change_the_rules() -> Result {
    refused(&["rules", "rename-rules"])
}

#[test]
fn a_hijacked_daemon_does_not_change_the_rules_where_any_path_is_allowed() -> Result {
    for deed in [
        "rules",
        "rename-rules",
        "rules-by-dots",
        "rules-by-link",
        "rules-by-number",
        "link-rules",
        "delete-rules",
        "move-rules",
    ] {
        is(deed, "off", DONE)?;
        is(deed, "addresses", REFUSED)?;
    }
    // It may change all else.
    is("files", "addresses", DONE)
}

#[test]
fn programs_are_run_as_the_configuration_names_them_and_no_others() -> Result {
    is("key-program", "on", DONE)?;
    refused(&["other-program", "other-arguments", "own-program"])
}

#[test]
fn a_broker_that_hangs_is_ended_and_no_call_waits_for_it() -> Result {
    is("hung-broker", "off", DONE)?;
    is("hung-broker", "on", NO_BROKER)
}

#[test]
fn a_hijacked_daemon_reaches_no_process_by_the_broker() -> Result {
    refused(&["own-memory", "broker-memory", "broker-descriptor", "descriptor-folder"])?;
    refused(&["other-process", "kernel-setting"])
}

#[test]
fn a_hijacked_daemon_connects_to_nothing_that_the_rules_do_not_name() -> Result {
    refused(&["connect", "connect-unix", "connect-abstract", "datagrams", "send-early"])?;
    refused(&["listen", "listen-unix", "unix-datagrams", "pair-of-datagrams", "route"])?;
    // Where TCP Fast Open is switched off, they fail without the broker, too.
    let fast = fs::read_to_string("/proc/sys/net/ipv4/tcp_fastopen").unwrap_or_default();
    if fast.trim().parse::<u32>().is_ok_and(|bits| bits & 1 != 0) {
        refused(&["fast-open", "fast-open-at-once"])
    } else {
        is("fast-open", "on", REFUSED)?;
        is("fast-open-at-once", "on", REFUSED)
    }
}

#[test]
fn a_socket_that_the_broker_has_not_made_is_not_connected() -> Result {
    refused(&["connect-early", "connect-exchanged"])
}

#[test]
fn a_hijacked_daemon_has_no_ring_that_opens_or_connects() -> Result {
    refused(&["free-ring"])
}

#[test]
fn wrong_arguments_fail_as_the_kernel_fails_them() -> Result {
    is("wrong-arguments", "on", DONE)
}

#[test]
fn a_call_that_hangs_delays_no_other() -> Result {
    is("hanging", "on", DONE)
}

#[test]
fn nothing_is_opened_when_the_broker_has_ended() -> Result {
    is("after-the-broker", "off", DONE)?;
    is("after-the-broker", "on", NO_BROKER)
}

#[test]
fn a_broker_that_cannot_be_put_in_charge_changes_nothing() -> Result {
    is("second-broker", "on", DONE)
}

#[test]
fn the_broker_ends_with_the_daemon() -> Result {
    let (status, said) = run("own-figures", "on")?;
    check(status == Some(DONE) && Path::new("/proc").exists(), || said)
}

/// A daemon with a configuration file, and the file's path.
fn with_file(more: &str) -> Result<(Server, PathBuf)> {
    let setup = Setup::new()?;
    let (file, control) = (setup.dir().join("ebbd.toml"), setup.dir().join("control.sock"));
    let disk = setup.dir().join("disks/disk");
    fs::create_dir(setup.dir().join("disks")).map_err(Error::io("make a folder"))?;
    let made = fs::File::create(&disk).and_then(|file| file.set_len(MIB));
    made.map_err(Error::io("make a disk"))?;
    write(&file, &disk, more)?;
    let server = setup.arg("--config").arg(&file).arg("--control").arg(control).start()?;
    Ok((server, file))
}

fn write(file: &Path, disk: &Path, more: &str) -> Result {
    let folder = disk.parent().and_then(Path::parent).unwrap_or(Path::new("."));
    let more = more.replace("DIR", &folder.display().to_string());
    let text = format!("{more}\n[volume.disk]\nstore = \"file:{}\"\n", disk.display());
    fs::write(file, text).map_err(Error::io("write the configuration"))
}

#[test]
fn volumes_are_added_where_the_file_allows_it_at_once() -> Result {
    let (mut server, file) = with_file("open_paths = []\nconnect_to = []")?;
    let of = |path: &str| server.dir().join(path);
    let disk = |path: &str| {
        let made = fs::File::create(of(path)).and_then(|file| file.set_len(MIB));
        made.map_err(Error::io("make a disk")).map(|()| format!("file:{}", of(path).display()))
    };
    fs::create_dir_all(of("disks/more")).map_err(Error::io("make a folder"))?;
    let (beside, elsewhere) = (disk("disks/beside")?, disk("disks/more/elsewhere")?);
    let add = |name: &str, store: &str| server.operator(&["volume", "add", name, store])?.run();
    // Beside a disk of the configuration.
    let added = add("beside", &beside)?;
    added.check(added.status.success(), "added")?;
    let refused = add("elsewhere", &elsewhere)?;
    refused
        .check(!refused.status.success() && refused.stderr.contains("`open_paths`"), "remedy")?;
    let remote = add("remote", "nbd://127.0.0.1:1/")?;
    remote.check(!remote.status.success() && remote.stderr.contains("`connect_to`"), "a remedy")?;
    // The daemon reads it, and that is no reason to serve it.
    let host = server.operator(&["volume", "add", "host", "file:/etc/passwd", "--read-only"])?;
    let host = host.run()?;
    let says = "a file of the host outside of `open_paths`";
    host.check(!host.status.success() && host.stderr.contains(says), "not served")?;
    let link = of("disks/link");
    std::os::unix::fs::symlink("/etc/passwd", &link).map_err(Error::io("make a link"))?;
    let link = format!("file:{}", link.display());
    let host = server.operator(&["volume", "add", "host", &link, "--read-only"])?.run()?;
    host.check(!host.status.success() && host.stderr.contains(says), "not served by a link")?;
    let more = of("disks/more");
    write(
        &file,
        &of("disks/disk"),
        &format!("open_paths = [{more:?}]\nconnect_to = ['127.0.0.1']"),
    )?;
    let added = add("elsewhere", &elsewhere)?;
    added.check(added.status.success(), "added without a reload")?;
    let remote = add("remote", "nbd://127.0.0.1:1/")?;
    remote.check(remote.stderr.contains("is it running there?"), "the kernel's own refusal")?;
    let log = server.log();
    check(log.contains("the broker refused to open"), || log.clone())?;
    // The folder is named, since the new file has no name before it is complete.
    let apart = of("apart");
    fs::create_dir(&apart).map_err(Error::io("make a folder"))?;
    let new = format!("file:{}", apart.join("new.img").display());
    let refused = server.operator(&["volume", "add", "new", &new, "--create", "--size", "1M"])?;
    refused.fails()?;
    let log = server.log();
    let folder = format!("the broker refused to make a file in {apart:?}");
    check(log.contains(&folder), || log.clone())?;
    server.healthy()
}

/// Sends a signal to the broker of a daemon, and waits for the report.
fn lose_broker(server: &Server, signal: Signal) -> Result {
    let broker = broker_of(server.pid()?)?;
    kill_process(broker, signal)
        .map_err(|error| Error::unexpected(format!("signal the broker: {error}")))?;
    until("the report", PATIENCE, || {
        let stat = server.operator(&["stat", "--json"])?.ok()?.json()?;
        let parts = stat["sandbox"].as_array().cloned().unwrap_or_default();
        let part = parts.into_iter().find(|part| part["mechanism"] == "broker");
        let ended = part.filter(|part| part["in_force"] == false);
        Ok(ended.filter(|part| part["remedy"].as_str().unwrap_or_default().contains("restart")))
    })?;
    let status = server.operator(&["status"])?.run()?;
    status.check(status.stdout.starts_with("degraded"), "the state")?;
    status.check(status.stdout.contains("restart the daemon"), "a remedy")?;
    let stat = server.operator(&["stat", "--json"])?.ok()?.json()?;
    let [resident, threads] = [&stat["resident_bytes"], &stat["process"]["threads"]];
    check(resident.as_u64() > Some(1 << 20) && threads.as_u64() > Some(0), || stat.to_string())?;
    let log = server.log();
    check(log.contains("ERROR the broker, which opens files"), || log.clone())
}

#[test]
fn a_daemon_whose_broker_has_ended_says_so_and_serves_on() -> Result {
    let (mut server, _) = with_file("state = \"DIR/state\"")?;
    lose_broker(&server, Signal::KILL)?;
    let more = server.operator(&["volume", "add", "more", "memory:1M"])?.run()?;
    more.check(more.status.success(), "what opens nothing is added")?;
    let other = server.dir().join("disks/other");
    let made = fs::File::create(&other).and_then(|file| file.set_len(MIB));
    made.map_err(Error::io("make a disk"))?;
    let path = format!("file:{}", other.display());
    let more = server.operator(&["volume", "add", "file", &path])?.run()?;
    more.check(!more.status.success(), "a file is not opened")?;
    more.check(more.stderr.contains("has ended: restart the daemon"), "a remedy")?;
    for change in [
        &["reload"][..],
        &["config", "diff"],
        &["volume", "add", "kept", "memory:1M", "--persist"],
        &["limit", "disk", "--iops", "5", "--persist"],
        &["volume", "rename", "disk", "new"],
        &["volume", "remove", "disk"],
    ] {
        let refused = server.operator(change)?.run()?;
        let named = refused.stderr.contains("the broker") && refused.stderr.contains("restart");
        refused.check(!refused.status.success() && named, "the cause and a remedy")?;
    }
    let failed = |failure| Error::unexpected(format!("{failure:?}"));
    let mut client = Client::open(&server.socket(), "disk").map_err(failed)?;
    client.write(0, &[7; 4096], 0).and_then(|()| client.flush()).map_err(failed)?;
    let read = client.read(0, 4096).map_err(failed)?;
    check(read == [7; 4096], || "the disk is served on".into())?;
    client.disconnect().map_err(failed)?;
    server.stop()
}

#[test]
fn a_daemon_whose_broker_hangs_says_so_and_stops_with_its_data_written() -> Result {
    let (mut server, _) = with_file("")?;
    let file = server.dir().join("disks/disk");
    let failed = |failure| Error::unexpected(format!("{failure:?}"));
    let mut client = Client::open(&server.socket(), "disk").map_err(failed)?;
    client.write(0, &[7; 4096], 0).map_err(failed)?;
    lose_broker(&server, Signal::STOP)?;
    client.write(4096, &[8; 4096], 0).map_err(failed)?;
    client.disconnect().map_err(failed)?;
    server.stop()?;
    let data = fs::read(file).map_err(Error::io("read the disk"))?;
    check(data[..4096] == [7; 4096] && data[4096..8192] == [8; 4096], || "data is lost".into())
}

#[test]
fn a_stop_does_not_wait_for_a_broker_that_hangs() -> Result {
    let (mut server, _) = with_file("")?;
    let broker = broker_of(server.pid()?)?;
    kill_process(broker, Signal::STOP)
        .map_err(|error| Error::unexpected(format!("signal the broker: {error}")))?;
    server.stop()
}

#[test]
fn a_daemon_that_may_open_little_opens_what_it_needs() -> Result {
    let (mut server, _) = with_file("open_paths = []\nconnect_to = []")?;
    server.operator(&["stat"])?.ok()?;
    server.operator(&["reload"])?.ok()?;
    server.operator(&["volume", "add", "more", "memory:1M"])?.ok()?;
    server.healthy()?;
    server.stop()?;
    let log = server.log();
    check(!log.contains("the broker refused"), || log.clone())
}
