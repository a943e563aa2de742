//! Stops, reloads and successors under difficult conditions: dead devices, hanging files, no free descriptors.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use testbed::bench::outage::dead::{Dead, Kind};
use testbed::harness::binary::{self, Build};
use testbed::harness::nbd::{Client, Request, wire};
use testbed::harness::pattern::content;
use testbed::harness::process::{self, until};
use testbed::harness::server::Setup;
use testbed::{Error, Result, Server, Tool, check};

const MIB: u64 = 1 << 20;
/// A time limit that only a hang exceeds.
const SOON: Duration = Duration::from_secs(60);

fn log_has(server: &Server, words: &str) -> Result {
    until(words, SOON, || Ok(server.log().contains(words).then_some(())))
}

#[test]
fn a_successor_serves_healthy_volumes_while_a_dead_device_blocks_the_old_daemon() -> Result {
    let setup = Setup::new()?.image("disk", MIB)?;
    let broken = |error| Error::unexpected(format!("a device that can die: {error}"));
    let dead = Dead::make(Kind::Device, setup.dir()).map_err(broken)?;
    let control = setup.dir().join("control.sock");
    let mut server = setup
        // A device that hangs in fsync: the process ends only when the device responds.
        .volume(&format!("dead={},direct=off", dead.uri()))
        .args(["--drain", "2", "--control"])
        .arg(&control)
        .start()?;
    let outcome = while_it_is_held(&mut server, &dead, &control);
    // First: what follows waits for the old process.
    dead.revive();
    let mut old = outcome?;
    let status = process::wait(&mut old, SOON)?;
    check(status.and_then(|s| s.code()) == Some(1), || format!("{status:?}\n{}", server.log()))?;
    until("the device is served again", SOON, || Ok(Client::open(&server.socket(), "dead").ok()))?;
    server.healthy()?;
    server.stop()
}

fn while_it_is_held(server: &mut Server, dead: &Dead, control: &Path) -> Result<Child> {
    let socket = server.socket();
    let mut client = Client::open(&socket, "dead")?;
    client.write(0, &content(1, 0, 4096), 0)?;
    dead.die().map_err(|error| Error::unexpected(format!("die: {error}")))?;
    client.write(8192, &content(1, 8192, 4096), 0)?;
    // This client never receives a reply: the kernel keeps the old process's sockets, too.
    let mut waiting = client.into_stream();
    let flush = Request { command: wire::CMD_FLUSH, ..Request::default() };
    waiting.write_all(&flush.bytes()).map_err(Error::io("send a flush"))?;
    Client::open(&socket, "disk")?.write(4096, &content(2, 4096, 4096), 0)?;
    server.signal(Signal::TERM)?;
    log_has(server, "1 volume(s) could not be flushed: dead (")?;
    let old = server.succeed()?;
    let mut client = Client::open(&socket, "disk")?;
    check(client.read(4096, 4096)? == content(2, 4096, 4096), || "a write is lost".into())?;
    client.write(8192, &content(3, 8192, 4096), 0)?;
    client.flush()?;
    let ebbd = binary::ebbd(Build::AsTests)?;
    until("the dead device is shown", SOON, || {
        let stat = Tool::new(&ebbd).args(["stat", "--control"]).arg(control).limit(SOON).ok()?;
        Ok(stat.stdout.contains("dead is not served").then_some(()))
    })?;
    waiting.set_nonblocking(true).map_err(Error::io("look for a reply"))?;
    let replied = waiting.read(&mut [0; 16]).is_ok_and(|length| length > 0);
    check(!replied, || "a flush of a dead device was completed".into())?;
    Ok(old)
}

#[test]
fn statistics_are_available_when_no_descriptors_are_left() -> Result {
    let setup = Setup::new()?;
    let control = setup.dir().join("control.sock");
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 64; exec \"$@\"", "sh"]).arg(binary::ebbd(Build::AsTests)?);
    command.args(["serve", "--workers", "1", "--volume", "disk=memory:1M", "--listen"]);
    command.arg(format!("unix:{}", setup.socket().display())).arg("--control").arg(&control);
    let mut daemon = Daemon(command.stderr(Stdio::null()).spawn().map_err(Error::io("start"))?);
    let descriptors = format!("/proc/{}/fd", daemon.0.id());
    let first = until("a client", SOON, || Ok(Client::open(&setup.socket(), "disk").ok()))?;
    let mut clients = vec![first];
    let taken = || -> Result<usize> {
        let all = fs::read_dir(&descriptors).map_err(Error::io("count descriptors"))?;
        // Inherited descriptors may be above the limit.
        let numbers = all.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        Ok(numbers.filter(|number: &u32| *number < 64).count())
    };
    // Clients leave some: connections to the control socket take those.
    let mut others = Vec::new();
    // Checked twice: a descriptor may be in use for a moment only.
    while taken()? < 64 || taken()? < 64 {
        match Client::open(&setup.socket(), "disk") {
            Ok(client) if others.is_empty() => clients.push(client),
            _ => {
                // The least of some: one may be in use for a moment only.
                let before = (0..5).map(|_| taken()).collect::<Result<Vec<_>>>()?;
                let before = before.into_iter().min().unwrap_or_default();
                others.push(UnixStream::connect(&control).map_err(Error::io("connect"))?);
                until("it is accepted", SOON, || Ok((taken()? > before).then_some(())))?;
            }
        }
    }
    // More than once: the reserved descriptor is available again after each reply.
    for _ in 0..3 {
        let stat = Tool::new(binary::ebbd(Build::AsTests)?).args(["stat", "--control"]);
        let stat = stat.arg(&control).limit(SOON).ok()?.stdout;
        check(stat.contains("disk"), || format!("no statistics:\n{stat}"))?;
        check(taken()? == 64, || "there are free descriptors, so the reply proves nothing".into())?;
    }
    drop((clients, others));
    daemon.signal(Signal::TERM)?;
    let status = process::wait(&mut daemon.0, SOON)?;
    check(status.and_then(|s| s.code()) == Some(0), || format!("{status:?}"))
}

/// Clients beyond the limit are turned away while there are descriptors for a reload and for
/// changes of volumes.
#[test]
fn clients_leave_descriptors_to_administration() -> Result {
    let setup = Setup::new()?.image("disk", MIB)?;
    let dir = setup.dir().to_owned();
    let limit = ["sh", "-c", "ulimit -n 128; exec \"$0\" \"$@\""].map(str::to_owned);
    let mut server = setup
        .under(&limit)
        .volume(&format!("grows=file:{}/grows.img,create=true,size=1M", dir.display()))
        .arg("--state")
        .arg(dir.join("state"))
        .arg("--control")
        .arg(dir.join("control.sock"))
        .start()?;
    let mut clients = Vec::new();
    while clients.len() < 128 {
        match Client::open(&server.socket(), "disk") {
            Ok(client) => clients.push(client),
            Err(_) => break,
        }
    }
    check((32..128).contains(&clients.len()), || format!("{} clients", clients.len()))?;
    log_has(&server, "raise LimitNOFILE")?;
    for _ in 0..2 {
        server.operator(&["reload"])?.ok()?;
    }
    server.operator(&["volume", "resize", "grows", "2M"])?.ok()?;
    drop(clients);
    server.stop()
}

/// With fewer descriptors than volumes the daemon serves as many as leave some for clients, and says why not all.
#[test]
fn volumes_leave_descriptors_to_clients() -> Result {
    let setup = Setup::new()?;
    let (socket, control) = (setup.socket(), setup.dir().join("control.sock"));
    let mut config = String::new();
    for number in 0..100 {
        let path = setup.dir().join(format!("v{number}.img"));
        fs::File::create(&path)
            .and_then(|file| file.set_len(1 << 20))
            .map_err(Error::io("an image"))?;
        config += &format!("[volume.v{number}]\nstore = \"file:{}\"\n", path.display());
    }
    let file = setup.dir().join("ebbd.toml");
    fs::write(&file, config).map_err(Error::io("write a configuration"))?;
    let log = setup.dir().join("log");
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 80; exec \"$@\"", "sh"]).arg(binary::ebbd(Build::AsTests)?);
    command.args(["serve", "--workers", "1", "--config"]).arg(&file).arg("--listen");
    command.arg(format!("unix:{}", socket.display())).arg("--control").arg(&control);
    command.stderr(fs::File::create(&log).map_err(Error::io("the log"))?);
    let mut daemon = Daemon(command.spawn().map_err(Error::io("start"))?);
    let served = until("a client", SOON, || {
        Ok((0..100).find_map(|number| Client::open(&socket, &format!("v{number}")).ok()))
    })?;
    let stat = Tool::new(binary::ebbd(Build::AsTests)?).args(["stat", "--control"]);
    let stat = stat.arg(&control).limit(SOON).ok()?.stdout;
    check(stat.contains("raise LimitNOFILE"), || format!("no remedy:\n{stat}"))?;
    drop(served);
    daemon.signal(Signal::TERM)?;
    let status = process::wait(&mut daemon.0, SOON)?;
    let text = fs::read_to_string(&log).unwrap_or_default();
    check(status.and_then(|s| s.code()) == Some(0), || format!("{status:?}\n{text}"))
}

/// Remote volumes connect when they are first used, and again when their server is back: clients leave descriptors for
/// that.
#[test]
fn clients_leave_descriptors_to_the_connections_of_remote_volumes() -> Result {
    // Read-only, so that they may be on one export.
    const VOLUMES: usize = 30;
    let mut backend = Setup::new()?.image("disk", MIB)?.start()?;
    let setup = Setup::new()?;
    let (socket, log) = (setup.socket(), setup.dir().join("log"));
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 128; exec \"$@\"", "sh"]).arg(binary::ebbd(Build::AsTests)?);
    command.args(["serve", "--workers", "1", "--listen"]);
    command.arg(format!("unix:{}", socket.display()));
    for number in 0..VOLUMES {
        let store = format!("nbd+unix:///disk?socket={}&reconnect=5", backend.socket().display());
        command.args(["--volume", &format!("v{number}={store},cache=none,read-only=true")]);
    }
    command.stderr(fs::File::create(&log).map_err(Error::io("the log"))?);
    let mut daemon = Daemon(command.spawn().map_err(Error::io("start"))?);
    let name = |number: usize| format!("v{}", number % VOLUMES);
    let mut clients = vec![until("a client", SOON, || Ok(Client::open(&socket, "v0").ok()))?];
    let text = || fs::read_to_string(&log).unwrap_or_default();
    // Until one is refused, or waits without a descriptor.
    while clients.len() < 128 && !text().contains("raise LimitNOFILE") {
        match Client::open(&socket, &name(clients.len())) {
            Ok(client) => clients.push(client),
            Err(_) => break,
        }
    }
    check(clients.len() >= VOLUMES, || format!("{} clients\n{}", clients.len(), text()))?;
    for (number, client) in clients.iter_mut().take(VOLUMES).enumerate() {
        let read = client.read(0, 4096);
        check(read.is_ok(), || format!("volume {number}: {read:?}\n{}", text()))?;
    }
    check(text().contains("raise LimitNOFILE"), || format!("no remedy:\n{}", text()))?;
    drop(clients);
    daemon.signal(Signal::TERM)?;
    let status = process::wait(&mut daemon.0, SOON)?;
    check(status.and_then(|s| s.code()) == Some(0), || format!("{status:?}\n{}", text()))?;
    backend.stop()
}

#[test]
fn a_stop_does_not_wait_for_a_socket_that_another_server_has() -> Result {
    let setup = Setup::new()?;
    let control = setup.dir().join("control.sock");
    for path in [&setup.socket(), &control] {
        let other = UnixListener::bind(path).map_err(Error::io("bind"))?;
        let listen = format!("unix:{}", setup.socket().display());
        let mut command = Command::new(binary::ebbd(Build::AsTests)?);
        command.args(["serve", "--volume", "disk=memory:1M", "--listen", &listen, "--control"]);
        command.arg(&control).stderr(Stdio::piped());
        let mut daemon = Daemon(command.spawn().map_err(Error::io("start ebbd"))?);
        // The daemon checks whether a server listens on the socket.
        other.accept().map_err(Error::io("accept"))?;
        daemon.signal(Signal::TERM)?;
        let mut said = String::new();
        let stderr = daemon.0.stderr.as_mut();
        let stderr = stderr.ok_or_else(|| Error::unexpected("no log"))?;
        stderr.read_to_string(&mut said).map_err(Error::io("read the log"))?;
        let status = process::wait(&mut daemon.0, SOON)?;
        check(status.and_then(|s| s.code()) == Some(0), || format!("{status:?}\n{said}"))?;
        check(!said.contains("ready"), || format!("reported as ready:\n{said}"))?;
        drop(other);
        fs::remove_file(path).map_err(Error::io("remove the socket"))?;
    }
    Ok(())
}

#[test]
fn a_stop_does_not_wait_for_a_configuration_that_cannot_be_read() -> Result {
    let setup = Setup::new()?;
    let (config, pipe) = (setup.dir().join("ebbd.toml"), setup.dir().join("pipe"));
    let image = setup.dir().join("disk.img");
    let made = fs::File::create(&image).and_then(|file| file.set_len(MIB));
    made.map_err(Error::io("make an image"))?;
    let text =
        format!("[volume.disk]\nstore = \"file:{}\"\ncache = \"writeback\"\n", image.display());
    fs::write(&config, text).map_err(Error::io("write the configuration"))?;
    let mut server = setup.arg("--config").arg(&config).start()?;
    let mut client = Client::open(&server.socket(), "disk")?;
    client.write(0, &content(4, 0, 4096), 0)?;
    // Opening it for reading waits for a writer, as for a file on a server that does not respond.
    Tool::new("mkfifo").arg(&pipe).ok()?;
    fs::rename(&pipe, &config).map_err(Error::io("put a pipe in place"))?;
    until("a reload that hangs", SOON, || {
        server.signal(Signal::HUP)?;
        Ok(server.log().contains("still being read").then_some(()))
    })?;
    check(client.read(0, 4096)? == content(4, 0, 4096), || {
        "wrong data is served during the reload".into()
    })?;
    server.stop()?;
    let kept = fs::read(&image).map_err(Error::io("read the image"))?;
    check(kept[..4096] == content(4, 0, 4096), || "an acknowledged write is lost".into())
}

/// Killed when dropped.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Daemon {
    fn signal(&self, signal: Signal) -> Result {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, signal).map_err(|e| Error::io("signal")(e.into()))
    }

    fn has_thread(&self, name: &str) -> bool {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.0.id())).into_iter().flatten();
        let names = tasks.flatten().map(|task| fs::read_to_string(task.path().join("comm")));
        names.flatten().any(|found| found.trim() == name)
    }
}

#[test]
fn a_reload_requested_during_the_start_is_carried_out() -> Result {
    let setup = Setup::new()?;
    let (config, mute) = (setup.dir().join("ebbd.toml"), setup.dir().join("mute.sock"));
    // Accepts connections and never replies: the start waits for it for seconds.
    let _listener = UnixListener::bind(&mute).map_err(Error::io("bind"))?;
    let text = format!(
        "listen = [\"unix:{}\"]\n[volume.mute]\nstore = \"nbd+unix:///x?socket={}\"\n",
        setup.socket().display(),
        mute.display()
    );
    fs::write(&config, &text).map_err(Error::io("write the configuration"))?;
    let mut command = Command::new(binary::ebbd(Build::AsTests)?);
    command.args(["serve", "--drain", "2", "--config"]).arg(&config).stderr(Stdio::null());
    let mut daemon = Daemon(command.spawn().map_err(Error::io("start ebbd"))?);
    until("the start", SOON, || Ok(daemon.has_thread("ebbd-helper").then_some(())))?;
    fs::write(&config, format!("{text}[volume.added]\nstore = \"memory:1M\"\n"))
        .map_err(Error::io("write the configuration"))?;
    daemon.signal(Signal::HUP)?;
    until("the volume that was added", SOON, || Ok(Client::open(&setup.socket(), "added").ok()))?;
    daemon.signal(Signal::TERM)?;
    let status = process::wait(&mut daemon.0, SOON)?;
    check(status.and_then(|s| s.code()) == Some(0), || format!("{status:?}"))
}

/// The state of each volume by its name.
fn states(server: &Server) -> Result<std::collections::BTreeMap<String, String>> {
    let list = server.operator(&["volume", "list", "--json"])?.ok()?.json()?;
    let all = list.as_array().cloned().unwrap_or_default();
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    Ok(all.iter().map(|volume| (text(&volume["name"]), text(&volume["state"]))).collect())
}

/// `create` is an instruction for once. A volume whose file is missing later is not served as an
/// empty one.
#[test]
fn volume_that_has_existed_is_not_created_again() -> Result {
    let setup = Setup::new()?.image("disk", MIB)?;
    let dir = setup.dir().to_owned();
    let (mount, fstab) = (dir.join("mnt"), dir.join("fstab"));
    fs::create_dir(&mount).map_err(Error::io("make a folder"))?;
    let line = format!("/dev/none {} ext4 nofail 0 2\n", mount.display());
    fs::write(&fstab, line).map_err(Error::io("write a table"))?;
    let mounts = format!("mount --bind '{}' /etc/fstab && exec \"$0\" \"$@\"", fstab.display());
    let prefix = ["unshare", "--mount", "sh", "-c", &mounts].map(str::to_owned);
    let created =
        |name: &str| format!("{name}=file:{}/{name}.img,create=true,size=1M", dir.display());
    let mut server = setup
        .under(&prefix)
        .volume(&created("first"))
        .volume(&format!("third=file:{}/third.img,create=true,size=1M", mount.display()))
        .arg("--state")
        .arg(dir.join("state"))
        .arg("--control")
        .arg(dir.join("control.sock"))
        .start()?;
    let store = format!("file:{}/second.img", dir.display());
    let add = ["volume", "add", "second", &store, "--size", "1M", "--create", "--persist"];
    server.operator(&add)?.ok()?;
    for name in ["first", "second"] {
        let mut client = Client::open(&server.socket(), name)?;
        client.write(0, &content(1, 0, 4096), 0)?;
        client.flush()?;
    }
    let shown = states(&server)?;
    check(shown["third"] == "failed", || format!("made in a mount point: {shown:?}"))?;
    server.kill9()?;
    let moves = |back: bool| -> Result {
        for name in ["first.img", "second.img"] {
            let (here, away) = (dir.join(name), dir.join(name).with_extension("away"));
            let (from, to) = if back { (away, here) } else { (here, away) };
            fs::rename(from, to).map_err(Error::io("move a file"))?;
        }
        Ok(())
    };
    moves(false)?;
    server.restart()?;
    let shown = states(&server)?;
    for name in ["first", "second", "third"] {
        check(shown[name] == "failed", || format!("{name}: {shown:?}"))?;
    }
    let status = server.operator(&["status"])?.fails()?;
    status.check(
        status.stdout.contains("the file that was created for this volume is missing"),
        "why `first` is not served",
    )?;
    status.check(status.stdout.contains("nothing is mounted at"), "why `third` is not served")?;
    for path in [dir.join("first.img"), dir.join("second.img"), mount.join("third.img")] {
        check(!path.exists(), || format!("{} was made", path.display()))?;
    }
    moves(true)?;
    until("both are served again", SOON, || {
        let shown = states(&server)?;
        Ok((shown["first"] == "serving" && shown["second"] == "serving").then_some(()))
    })?;
    for name in ["first", "second"] {
        let mut client = Client::open(&server.socket(), name)?;
        check(client.read(0, 4096)? == content(1, 0, 4096), || format!("{name} has other data"))?;
    }
    server.stop()
}

/// Whoever can write the state directory, or add volumes, gets no program run and no file of the
/// daemon changed.
#[test]
fn state_directory_is_not_trusted_like_the_configuration() -> Result {
    let setup = Setup::new()?.image("disk", MIB)?;
    let dir = setup.dir().to_owned();
    let (state, witness) = (dir.join("state"), dir.join("witness"));
    let volumes = state.join("volumes");
    fs::create_dir_all(&volumes).map_err(Error::io("make a folder"))?;
    let evil = |name: &str, text: String| {
        fs::write(volumes.join(name), text).map_err(Error::io("write a state file"))
    };
    let store = format!("store = \"file:{}/disk.img\"\n", dir.display());
    let program = format!("encryption = \"command:/usr/bin/touch {}\"\n", witness.display());
    evil("program.toml", store + &program)?;
    evil("inside.toml", format!("store = \"file:{}/inside.toml\"\n", volumes.display()))?;
    let control = dir.join("control.sock");
    let setup = setup.arg("--state").arg(&state).arg("--control").arg(&control);
    let mut server = setup.start()?;
    let status = server.operator(&["status"])?.fails()?;
    for part in ["cannot name a program", "in a folder of the daemon's state"] {
        status.check(status.stdout.contains(part), part)?;
    }
    check(!witness.exists(), || "a program of the state directory ran".into())?;
    std::os::unix::fs::symlink(&volumes, dir.join("link")).map_err(Error::io("make a link"))?;
    for place in ["state/volumes/new.toml", "link/new.toml", "state/volumes/../volumes/new.toml"] {
        let store = format!("file:{}/{place}", dir.display());
        let add = ["volume", "add", "new", &store, "--size", "1M", "--create"];
        let refused = server.operator(&add)?.fails()?;
        refused.check(refused.stderr.contains("in a folder of the daemon's state"), place)?;
        check(!volumes.join("new.toml").exists(), || format!("{place} was made"))?;
    }
    // An image next to the state is not among it.
    let store = format!("file:{}/image", state.display());
    server.operator(&["volume", "add", "new", &store, "--size", "1M", "--create"])?.ok()?;
    server.stop()
}

/// Of a volume, and of a group that does not exist yet.
#[test]
fn limits_that_cannot_be_kept_are_not_set() -> Result {
    let setup = Setup::new()?;
    let control = setup.dir().join("control.sock");
    let mut server = setup.volume("disk=null:1M").arg("--control").arg(control).start()?;
    for owner in [&["disk"][..], &["--group", "gold"]] {
        let keep = [&["limit"], owner, &["--iops", "5", "--persist"]].concat();
        let refused = server.operator(&keep)?.run()?;
        let named = refused.stderr.contains("no state directory");
        refused.check(!refused.status.success() && named, "the cause")?;
    }
    let limits = server.operator(&["limit"])?.ok()?.stdout;
    check(limits.contains("no volume and no group has limits"), || limits.clone())?;
    server.stop()
}
