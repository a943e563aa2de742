//! A dead store beside healthy ones at every stage of a daemon: start, reload, resize, shutdown.
//! Healthy volumes are served and written without delay; the log names the dead ones.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use testbed::bench::outage::dead::{Dead, Kind};
use testbed::harness::binary::{self, Build};
use testbed::harness::nbd::{Client, Failure, Handshake, go_data, option_bytes, wire};
use testbed::harness::pattern::content;
use testbed::harness::process::{PATIENCE, until};
use testbed::harness::server::Setup;
use testbed::{Error, Result, Server, Tool, check};

const MIB: u64 = 1 << 20;
const HEALTHY: [&str; 3] = ["one", "two", "three"];

fn broken(what: &str) -> impl Fn(testbed::bench::Error) -> Error {
    let what = what.to_owned();
    move |error| Error::unexpected(format!("{what}: {error}"))
}

/// A daemon with healthy volumes on files and volumes on stores that can die, all with the same cache mode.
struct Rig {
    server: Server,
    dead: Vec<Dead>,
    config: PathBuf,
    control: PathBuf,
    cache: &'static str,
    /// Requests that never complete.
    waiting: Vec<std::thread::JoinHandle<()>>,
}

impl Rig {
    fn new(kind: Kind, count: usize, cache: &'static str, drain: &str) -> Result<Rig> {
        let setup = Setup::new()?;
        let dead: Vec<Dead> = (0..count)
            .map(|_| Dead::make(kind, setup.dir()).map_err(broken("a store that can die")))
            .collect::<Result<_>>()?;
        let (config, control) = (setup.dir().join("ebbd.toml"), setup.dir().join("control.sock"));
        let setup = setup.arg("--config").arg(&config).arg("--control").arg(&control);
        let setup = setup.args(["--drain", drain]).log_level("debug");
        let dir = setup.dir().to_owned();
        for name in HEALTHY.iter().chain(&["spare"]) {
            let path = dir.join(format!("{name}.img"));
            let made = fs::File::create(&path).and_then(|file| file.set_len(MIB));
            made.map_err(Error::io("make an image"))?;
        }
        let text = text(&dir, &HEALTHY, &dead, cache);
        fs::write(&config, text).map_err(Error::io("write the configuration"))?;
        let server = setup.start()?;
        Ok(Rig { server, dead, config, control, cache, waiting: Vec::new() })
    }

    fn configure(&self, healthy: &[&str], dead: usize) -> Result {
        let text = text(self.server.dir(), healthy, &self.dead[..dead], self.cache);
        fs::write(&self.config, text).map_err(Error::io("write the configuration"))?;
        self.server.signal(Signal::HUP)
    }

    /// Makes the stores that can die do so, after an acknowledged write and with requests in flight.
    fn die(&mut self) -> Result {
        let mut clients = Vec::new();
        for number in 0..self.dead.len() {
            let mut client = Client::open(&self.server.socket(), &format!("dead{number}"))?;
            client.write(0, &content(7, 0, 4096), 0)?;
            clients.push(client);
        }
        for dead in &self.dead {
            dead.die().map_err(broken("die"))?;
        }
        for mut client in clients {
            self.waiting.push(std::thread::spawn(move || {
                let _ = client.write(8192, &content(7, 8192, 4096), 0);
                let _ = client.flush();
            }));
        }
        Ok(())
    }

    /// Writes that are acknowledged, and not flushed.
    fn write_healthy(&self, names: &[&str], stamp: u64) -> Result {
        for name in names {
            let mut client = Client::open(&self.server.socket(), name)?;
            client.write(4096, &content(stamp, 4096, 65536), 0)?;
        }
        Ok(())
    }

    fn check_images(&self, names: &[&str], stamp: u64) -> Result {
        for name in names {
            let image = fs::read(self.server.dir().join(format!("{name}.img")));
            let image = image.map_err(Error::io("read an image"))?;
            check(image[4096..4096 + 65536] == content(stamp, 4096, 65536), || {
                format!("{name} was not written\n{}", self.server.log())
            })?;
        }
        Ok(())
    }

    /// The daemon exits with 1 after it has closed every healthy volume, and lists only the dead ones.
    fn ends_with_the_dead_listed(&mut self) -> Result {
        let status = self.server.wait(PATIENCE)?;
        let log = self.server.log();
        check(status.code() == Some(1), || format!("exit {status}\n{log}"))?;
        let listed = |name: &str| {
            log.lines().any(|line| {
                line.contains("could be made stable") && line.contains(&format!("\"{name}\""))
            })
        };
        for name in HEALTHY.iter().chain(&["memory"]) {
            check(!listed(name), || format!("{name} is listed\n{log}"))?;
        }
        for number in 0..self.dead.len() {
            let name = format!("dead{number}");
            check(listed(&name), || format!("{name} is not listed\n{log}"))?;
            let last = log.lines().last().unwrap_or_default().to_owned();
            check(last.contains(&name), || format!("{name} is not in the last line\n{log}"))?;
        }
        self.join()
    }

    fn join(&mut self) -> Result {
        for thread in self.waiting.drain(..) {
            thread.join().map_err(|_| Error::unexpected("a client panicked"))?;
        }
        Ok(())
    }

    fn ebbd(&self, arguments: &[&str]) -> Result<Tool> {
        let ebbd = binary::ebbd(Build::AsTests)?;
        Ok(Tool::new(&ebbd).args(arguments).arg("--control").arg(&self.control).limit(PATIENCE))
    }

    fn log_has(&self, words: &str) -> Result {
        until(words, PATIENCE, || Ok(self.server.log().contains(words).then_some(())))
    }

    fn names(&self) -> Result<Vec<String>> {
        let mut names = Handshake::connect(&self.server.socket())?.list()?;
        names.sort();
        Ok(names)
    }
}

fn text(dir: &Path, healthy: &[&str], dead: &[Dead], cache: &str) -> String {
    let mut text = "[volume.memory]\nstore = \"memory:1M\"\n".to_owned();
    for name in healthy {
        let path = dir.join(format!("{name}.img"));
        let path = path.display();
        text += &format!("[volume.{name}]\nstore = \"file:{path}\"\ncache = \"{cache}\"\n");
    }
    for (number, store) in dead.iter().enumerate() {
        let uri = store.uri();
        text += &format!("[volume.dead{number}]\nstore = \"{uri}\"\ncache = \"{cache}\"\n");
    }
    text
}

fn everywhere(test: impl Fn(Kind, &'static str) -> Result) -> Result {
    for kind in [Kind::Silent, Kind::Gone] {
        for cache in ["none", "writethrough", "writeback"] {
            let place = format!("{}, cache {cache}", kind.name());
            test(kind, cache).map_err(|e| Error::unexpected(format!("{place}: {e}")))?;
        }
    }
    Ok(())
}

#[test]
fn a_shutdown_with_a_dead_store_writes_other_volumes_and_lists_only_that_store() -> Result {
    everywhere(|kind, cache| {
        let mut rig = Rig::new(kind, 1, cache, "2")?;
        rig.die()?;
        rig.write_healthy(&HEALTHY, 3)?;
        rig.server.signal(Signal::TERM)?;
        rig.ends_with_the_dead_listed()?;
        rig.check_images(&HEALTHY, 3)?;
        let log = rig.server.log();
        let listed = log.find("could be made stable").unwrap_or_default();
        for name in HEALTHY {
            let closed = log.find(&format!("volume closed volume=\"{name}\""));
            check(closed.is_some_and(|at| at < listed), || {
                format!("{name} was not closed before the time limit\n{log}")
            })?;
        }
        Ok(())
    })
}

#[test]
fn a_second_signal_ends_a_stop_soon_and_still_writes_what_can_be() -> Result {
    let mut rig = Rig::new(Kind::Silent, 1, "writeback", "3600")?;
    rig.die()?;
    rig.write_healthy(&HEALTHY, 4)?;
    rig.server.signal(Signal::TERM)?;
    // Two pending signals would count as one.
    rig.log_has("stopping: completing")?;
    rig.server.signal(Signal::TERM)?;
    rig.log_has("second signal")?;
    rig.ends_with_the_dead_listed()?;
    rig.check_images(&HEALTHY, 4)
}

#[test]
fn a_third_signal_gives_up() -> Result {
    let mut rig = Rig::new(Kind::Silent, 1, "none", "3600")?;
    rig.die()?;
    for signal in [Signal::TERM, Signal::INT, Signal::TERM] {
        rig.server.signal(signal)?;
        std::thread::sleep(Duration::from_millis(100));
    }
    let status = rig.server.wait(PATIENCE)?;
    check(status.code() == Some(1), || format!("exit {status}\n{}", rig.server.log()))?;
    rig.join()
}

#[test]
fn a_reload_and_a_resize_with_a_dead_store_change_other_volumes() -> Result {
    everywhere(|kind, cache| {
        let mut rig = Rig::new(kind, 1, cache, "2")?;
        rig.die()?;
        rig.write_healthy(&["one"], 5)?;
        rig.ebbd(&["volume", "resize", "two", "2M", "--wait"])?.ok()?;
        check(Client::open(&rig.server.socket(), "two")?.size == 2 * MIB, || "two's size".into())?;
        // Removes `one` and the dead volume, and adds `spare`.
        rig.configure(&["two", "three", "spare"], 0)?;
        until("one is removed and spare added", PATIENCE, || {
            Ok((rig.names()? == ["memory", "spare", "three", "two"]).then_some(()))
        })?;
        rig.log_has("volume=\"one\"")?;
        rig.log_has("withdrawn volume=\"one\"")?;
        rig.check_images(&["one"], 5)?;
        rig.write_healthy(&["three", "spare"], 6)?;
        rig.server.signal(Signal::TERM)?;
        rig.ends_with_the_dead_listed()?;
        rig.check_images(&["three", "spare"], 6)
    })
}

#[test]
fn a_stop_does_not_wait_for_a_reload() -> Result {
    let mut rig = Rig::new(Kind::Silent, 4, "none", "20")?;
    rig.die()?;
    rig.write_healthy(&HEALTHY, 8)?;
    rig.configure(&["one"], 0)?;
    until("the reload", PATIENCE, || Ok((rig.names()? == ["memory", "one"]).then_some(())))?;
    rig.server.signal(Signal::TERM)?;
    // In sequence this would take 100 s.
    rig.ends_with_the_dead_listed()?;
    let log = rig.server.log();
    check(!log.contains("reloaded"), || {
        format!("an interrupted reload is reported as done:\n{log}")
    })?;
    rig.check_images(&HEALTHY, 8)
}

#[test]
fn a_reload_that_cannot_open_a_store_keeps_the_one_that_is_served() -> Result {
    let setup = Setup::new()?;
    let (config, dir) = (setup.dir().join("ebbd.toml"), setup.dir().to_owned());
    let image = |name: &str, stamp| -> Result<PathBuf> {
        let path = dir.join(name);
        fs::write(&path, content(stamp, 0, 1 << 20)).map_err(Error::io("make an image"))?;
        Ok(path)
    };
    let (first, second) = (image("first", 1)?, image("second", 2)?);
    let configure = |path: &Path, more: &str| {
        let text = format!("[volume.disk]\nstore = \"file:{}\"\n{more}", path.display());
        fs::write(&config, text).map_err(Error::io("write the configuration"))
    };
    configure(&first, "")?;
    let mut server = setup.arg("--config").arg(&config).start()?;
    let mut client = Client::open(&server.socket(), "disk")?;
    let logged = |server: &Server, from: usize, words: &str| {
        until(words, PATIENCE, || Ok(server.log()[from..].contains(words).then_some(())))
    };

    // A wrong path; then the same file with options with which it cannot be opened.
    let absent = dir.join("absent");
    for (path, more, word) in
        [(&absent, "", "absent"), (&first, "create = true\nsize = \"2M\"\n", "2097152")]
    {
        let from = server.log().len();
        configure(path, more)?;
        server.signal(Signal::HUP)?;
        logged(&server, from, "reloaded")?;
        let said = server.log()[from..].to_owned();
        let told = said.lines().any(|line| {
            line.contains("ERROR") && line.contains("served as before") && line.contains(word)
        });
        check(told, || format!("the failure is not logged:\n{said}"))?;
        check(client.read(4096, 4096)? == content(1, 4096, 4096), || "another disk".into())?;
        Client::open(&server.socket(), "disk")?.disconnect()?;
    }

    // The same file with another cache mode: the volume is withdrawn and served again.
    let from = server.log().len();
    configure(&first, "cache = \"writeback\"\n")?;
    server.signal(Signal::HUP)?;
    logged(&server, from, "reloaded")?;
    let mut client = Client::open(&server.socket(), "disk")?;
    check(client.read(4096, 4096)? == content(1, 4096, 4096), || "another disk".into())?;
    client.write(0, &content(9, 0, 4096), 0)?;

    // Another file that exists. Acknowledged data is in the first file.
    let from = server.log().len();
    configure(&second, "")?;
    server.signal(Signal::HUP)?;
    logged(&server, from, "reloaded")?;
    let mut client = Client::open(&server.socket(), "disk")?;
    check(client.read(4096, 4096)? == content(2, 4096, 4096), || "the old disk".into())?;
    let kept = fs::read(&first).map_err(Error::io("read the image"))?;
    check(kept[..4096] == content(9, 0, 4096), || "the write is lost".into())?;
    server.healthy()?;
    server.stop()
}

/// The server's refusal of an export: the type of its reply, and its text.
fn refusal(socket: &Path, export: &str) -> Result<(u32, String)> {
    let mut stream = Handshake::connect(socket)?.into_stream();
    let sent = stream.write_all(&option_bytes(wire::OPT_GO, &go_data(export)));
    sent.map_err(Error::io("request an export"))?;
    let mut head = [0; 20];
    stream.read_exact(&mut head).map_err(Error::io("read the reply"))?;
    let number =
        |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let mut text = vec![0; usize::try_from(number(16)).unwrap_or(0).min(4096)];
    stream.read_exact(&mut text).map_err(Error::io("read the reply"))?;
    Ok((number(12), String::from_utf8_lossy(&text).into_owned()))
}

#[test]
fn a_volume_that_cannot_be_opened_is_refused_and_retried_while_other_volumes_are_served() -> Result
{
    let setup = Setup::new()?.image("disk", MIB)?;
    let (absent, mute) = (setup.dir().join("absent"), setup.dir().join("mute.sock"));
    // Accepts connections and never replies.
    let _listener = UnixListener::bind(&mute).map_err(Error::io("bind"))?;
    let control = setup.dir().join("control.sock");
    let mut server = setup
        .volume(&format!("absent=file:{}", absent.display()))
        .volume(&format!("mute=nbd+unix:///x?socket={}", mute.display()))
        .arg("--control")
        .arg(&control)
        .args(["--drain", "2"])
        .start()?;
    let socket = server.socket();
    let mut client = Client::open(&socket, "disk")?;
    client.write(0, &content(1, 0, 4096), 0)?;
    check(Handshake::connect(&socket)?.list()? == ["disk"], || {
        "the list has more than the volumes that are served".into()
    })?;
    let (kind, text) = refusal(&socket, "absent")?;
    check(kind == wire::REP_ERR_UNKNOWN && text.contains("absent: no such file"), || {
        format!("refused by {kind:#x}, {text:?}")
    })?;
    let (kind, text) = refusal(&socket, "mute")?;
    check(kind == wire::REP_ERR_UNKNOWN && text.contains("open"), || {
        format!("refused by {kind:#x}, {text:?}")
    })?;
    let (kind, text) = refusal(&socket, "none")?;
    check(kind == wire::REP_ERR_UNKNOWN && text.contains("no export"), || {
        format!("refused by {kind:#x}, {text:?}")
    })?;

    let ebbd = |arguments: &[&str]| -> Result<Tool> {
        let tool = Tool::new(binary::ebbd(Build::AsTests)?).args(arguments);
        Ok(tool.arg("--control").arg(&control))
    };
    let stat = ebbd(&["stat", "--json"])?.ok()?.json()?;
    let volumes = stat["volumes"].as_array().cloned().unwrap_or_default();
    let of = |name: &str| volumes.iter().find(|v| v["name"] == name).cloned().unwrap_or_default();
    let reason = of("absent")["failure"]["reason"].as_str().unwrap_or_default().to_owned();
    check(of("absent")["state"] == "failed" && reason.contains("set `create`"), || {
        format!("no reason and remedy: {stat}")
    })?;
    check(of("disk")["state"] == "serving" && of("disk")["failure"] == Value::Null, || {
        format!("disk is not shown as served: {stat}")
    })?;
    check(matches!(of("mute")["state"].as_str(), Some("opening" | "failed")), || {
        format!("mute is shown as served: {stat}")
    })?;
    let table = ebbd(&["stat"])?.ok()?.stdout;
    check(table.contains("absent is not served"), || format!("not in the table:\n{table}"))?;
    let refused = ebbd(&["volume", "resize", "absent", "1M"])?.run()?;
    check(!refused.status.success() && refused.stderr.contains("failed"), || {
        format!("a resize of a volume that is not served: {refused:?}")
    })?;

    let made = fs::File::create(&absent).and_then(|file| file.set_len(2 * MIB));
    made.map_err(Error::io("make the image"))?;
    until("the volume is served", PATIENCE, || match Client::open(&socket, "absent") {
        Ok(client) => Ok(Some(client.size)),
        Err(Failure::OptionRefused(_)) => Ok(None),
        Err(error) => Err(error.into()),
    })?;
    check(client.read(0, 4096)? == content(1, 0, 4096), || "the data of disk has changed".into())?;
    client.disconnect()?;
    server.healthy()?;
    server.stop()
}

#[test]
fn a_strict_daemon_does_not_start_without_a_volume() -> Result {
    let setup = Setup::new()?.image("disk", MIB)?;
    let absent = setup.dir().join("absent").display().to_string();
    let listen = format!("unix:{}", setup.socket().display());
    let outcome = Tool::new(binary::ebbd(Build::AsTests)?)
        .args(["serve", "--strict", "--volume", "memory=memory:1M"])
        .args(["--volume", &format!("absent=file:{absent}"), "--listen", &listen])
        .limit(PATIENCE)
        .run()?;
    check(outcome.status.code() == Some(1) && outcome.stderr.contains(&absent), || {
        format!("{outcome:?}")
    })
}

#[test]
fn a_strict_start_does_not_wait_without_limit_for_a_store_that_hangs() -> Result {
    let setup = Setup::new()?;
    let mute = setup.dir().join("mute.sock");
    // Accepts connections and never replies.
    let _listener = UnixListener::bind(&mute).map_err(Error::io("bind"))?;
    let listen = format!("unix:{}", setup.socket().display());
    let outcome = Tool::new(binary::ebbd(Build::AsTests)?)
        .args(["serve", "--strict"])
        .args(["--volume", &format!("mute=nbd+unix:///x?socket={}", mute.display())])
        .args(["--listen", &listen])
        .limit(PATIENCE)
        .run()?;
    let told = outcome.stderr.contains("volume mute: its store has not replied within")
        && outcome.stderr.contains("without --strict");
    check(outcome.status.code() == Some(1) && told, || format!("{outcome:?}"))
}

/// The reply to a request at the control socket; `None` if nothing listens there.
fn control_replies(control: &Path, path: &str) -> Option<String> {
    let mut stream = UnixStream::connect(control).ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: ebbd\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).ok()?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply).ok()?;
    Some(reply)
}

/// A start beside a store that hangs; false if the daemon was ready before all that must work earlier was tried.
fn is_served_before_ready() -> Result<bool> {
    let setup = Setup::new()?.image("disk", MIB)?;
    let (mute, control) = (setup.dir().join("mute.sock"), setup.dir().join("control.sock"));
    // Accepts connections and never replies.
    let _listener = UnixListener::bind(&mute).map_err(Error::io("bind"))?;
    let notify = setup.dir().join("notify.sock");
    let manager = UnixDatagram::bind(&notify).map_err(Error::io("bind"))?;
    manager.set_nonblocking(true).map_err(Error::io("do not wait"))?;
    let mut server = setup
        .volume(&format!("mute=nbd+unix:///x?socket={}", mute.display()))
        .arg("--control")
        .arg(&control)
        .env("NOTIFY_SOCKET", &notify)
        .without_waiting_for_volumes()
        .start()?;
    let ready = control_replies(&control, "/readyz");
    let health = control_replies(&control, "/v1/health");
    let read = Client::open(&server.socket(), "disk")?.read(0, 4096)?;
    let refused = refusal(&server.socket(), "mute")?;
    let early = manager.recv(&mut [0; 4096]).is_err();
    if early {
        check(ready.is_some_and(|reply| reply.contains("the daemon is starting")), || {
            "not ready is not told".into()
        })?;
        check(health.is_some_and(|reply| reply.contains("its store is being opened")), || {
            "the status does not name the volume".into()
        })?;
        check(read == vec![0; 4096], || "wrong data".into())?;
        check(refused.0 == wire::REP_ERR_UNKNOWN && refused.1.contains("is being opened"), || {
            format!("refused by {refused:?}")
        })?;
        // A reload that is requested now follows the start.
        server.signal(Signal::HUP)?;
        let followed = || {
            Ok(server.log().split_once("ready volumes").map(|(_, rest)| rest.contains("reloaded")))
        };
        until("the reload", PATIENCE, || followed().map(|seen| seen.filter(|seen| *seen)))?;
    }
    server.stop()?;
    Ok(early)
}

#[test]
fn a_start_serves_what_responds_before_it_is_ready() -> Result {
    // On a host that is very busy, the daemon may be ready before this test has used it.
    for _ in 0..5 {
        if is_served_before_ready()? {
            return Ok(());
        }
    }
    Err(Error::unexpected("nothing is served before the daemon is ready"))
}

#[test]
fn a_strict_start_opens_nothing_before_all_volumes_are_served() -> Result {
    let setup = Setup::new()?;
    let (mute, control) = (setup.dir().join("mute.sock"), setup.dir().join("control.sock"));
    let _listener = UnixListener::bind(&mute).map_err(Error::io("bind"))?;
    let listen = format!("unix:{}", setup.socket().display());
    let outcome = Tool::new(binary::ebbd(Build::AsTests)?)
        .args(["serve", "--strict", "--log", "debug", "--volume", "memory=memory:1M"])
        .args(["--volume", &format!("mute=nbd+unix:///x?socket={}", mute.display())])
        .args(["--listen", &listen, "--control"])
        .arg(&control)
        .limit(PATIENCE)
        .run()?;
    check(outcome.status.code() == Some(1), || format!("{outcome:?}"))?;
    check(!outcome.stderr.contains("listening") && !control.exists(), || format!("{outcome:?}"))
}
