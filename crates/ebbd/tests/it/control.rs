//! A running daemon, controlled through the program's own commands.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Output, Stdio};

const EBBD: &str = env!("CARGO_BIN_EXE_ebbd");

fn command() -> Command {
    let mut command = Command::new(EBBD);
    for variable in ["LISTEN_FDS", "LISTEN_PID", "EBBD_CONTROL", "NOTIFY_SOCKET"] {
        command.env_remove(variable);
    }
    // The pressure of this host must not affect the test.
    command.env("MEMORY_PRESSURE_WATCH", "/dev/null").stdin(Stdio::null());
    command
}

struct Daemon {
    child: Child,
    log: BufReader<ChildStderr>,
    control: PathBuf,
    config: PathBuf,
    _folder: tempfile::TempDir,
}

impl Daemon {
    /// A daemon with the volumes `disk` and `install cd`; `top` is the beginning of its file.
    fn start(top: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let (control, config) = (folder.path().join("c"), folder.path().join("ebbd.toml"));
        // The stale socket of a daemon that has ended.
        drop(UnixListener::bind(&control).expect("a socket"));
        fs::write(&config, file(folder.path(), top)).expect("written");
        let (child, log) = serve(&config, &control);
        let mut daemon = Self { child, log, control, config, _folder: folder };
        daemon.wait_for("ready");
        daemon
    }

    /// Kills the daemon, and starts its successor.
    fn restart(&mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("it ends");
        (self.child, self.log) = serve(&self.config, &self.control);
        self.wait_for("ready");
    }

    /// Reads the log up to a line with `text`.
    #[track_caller]
    fn wait_for(&mut self, text: &str) -> String {
        let mut all = String::new();
        loop {
            let before = all.len();
            let count = self.log.read_line(&mut all).expect("UTF-8");
            assert!(count > 0, "`{text}` is not in the log:\n{all}");
            if all[before..].contains(text) {
                return all;
            }
        }
    }

    fn rewrite(&self, top: &str) {
        let folder = self.config.parent().expect("a folder");
        fs::write(&self.config, file(folder, top)).expect("written");
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let status = Command::new("/bin/kill").args([name, &pid]).status();
        assert!(status.expect("/bin/kill (package procps) is there").success());
    }

    fn reload(&mut self) {
        self.signal("-HUP");
        self.wait_for("reloaded");
    }

    fn run(&self, args: &[&str]) -> Output {
        command().args(args).env("EBBD_CONTROL", &self.control).output().expect("it starts")
    }

    #[track_caller]
    fn says(&self, args: &[&str]) -> String {
        let output = self.run(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{args:?}: {stderr}");
        assert!(stderr.is_empty(), "{stderr}");
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    /// Asserts that the command is refused with the exit status of a usage mistake.
    #[track_caller]
    fn refuses(&self, args: &[&str], parts: &[&str]) {
        fails(&self.run(args), 2, parts);
    }

    fn stop(mut self) {
        self.signal("-TERM");
        let status = self.child.wait().expect("it ends");
        let mut rest = String::new();
        self.log.read_to_string(&mut rest).expect("UTF-8");
        assert_eq!(status.code(), Some(0), "{rest}");
        assert!(!self.control.exists(), "the daemon removes its socket");
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Needed after a failed assertion; otherwise the daemon has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The process of a daemon, and its log.
fn serve(config: &Path, control: &Path) -> (Child, BufReader<ChildStderr>) {
    let mut child = command()
        .args(["serve", "--config", config.to_str().expect("UTF-8")])
        .args(["--control", control.to_str().expect("UTF-8")])
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let log = BufReader::new(child.stderr.take().expect("piped"));
    (child, log)
}

#[track_caller]
fn fails(output: &Output, status: i32, parts: &[&str]) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{stderr}");
    assert!(output.stdout.is_empty());
    for part in parts {
        assert!(stderr.contains(part), "`{part}` is not in: {stderr}");
    }
}

fn file(folder: &Path, top: &str) -> String {
    format!(
        "{top}\nlisten = ['unix:{}/nbd']\n[volume.disk]\nstore = 'memory:1M'\n\
         max_buffer_pages = 7\n[volume.'install cd']\nstore = 'null:1G'\n",
        folder.display()
    )
}

#[test]
fn get_and_set() {
    let daemon = Daemon::start("max_buffer_pages = 100");
    let mode = fs::metadata(&daemon.control).expect("a socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o660);

    let get = ["get", "max_buffer_pages"];
    assert_eq!(daemon.says(&get), "100\n");
    assert_eq!(daemon.says(&[&get[..], &["--volume", "disk"]].concat()), "7\n");
    assert_eq!(daemon.says(&[&get[..], &["--volume", "install cd"]].concat()), "100\n");

    let set = ["set", "max_buffer_pages"];
    assert_eq!(daemon.says(&[&set[..], &["0"]].concat()), "max_buffer_pages: 100 -> 0\n");
    assert_eq!(daemon.says(&[&get[..], &["--volume", "install cd"]].concat()), "0\n");
    let own = ["9", "--volume", "install cd"];
    assert_eq!(daemon.says(&[&set[..], &own[..]].concat()), "max_buffer_pages: 0 -> 9\n");
    let unset = ["--unset", "--volume", "install cd"];
    assert_eq!(daemon.says(&[&set[..], &unset[..]].concat()), "max_buffer_pages: 9 -> 0\n");
    assert_eq!(daemon.says(&["set", "max_request", "1M"]), "max_request: 32M -> 1M\n");

    let table = daemon.says(&["get"]);
    assert!(table.starts_with("PARAMETER "), "{table}");
    for part in ["zone_limit_bytes.4K", "run-time", "0 to 60000", "milliseconds"] {
        assert!(table.contains(part), "{part}: {table}");
    }
    let table = daemon.says(&["get", "--volume", "disk"]);
    assert_eq!(table.lines().count(), 11, "{table}");

    daemon.refuses(&["get", "max_bufer_pages"], &["did you mean `max_buffer_pages`?"]);
    daemon.refuses(&["get", "log", "--volume", "dsik"], &["did you mean `disk`?"]);
    daemon.refuses(&["set", "max_buffer_pages", "-1"], &["0 to 1048576"]);
    daemon.refuses(&["set", "log", "inof"], &["did you mean `info`?"]);
    daemon.refuses(&["set", "connection_memory", "8K"], &["1M or more"]);
    daemon.refuses(&["set", "log"], &["<VALUE>"]);
    daemon.refuses(&["set", "log", "debug", "--unset"], &["--unset"]);
    daemon.refuses(&["bench", "nothing"], &["there is no volume `nothing`"]);
    assert_eq!(daemon.says(&get), "0\n");
    daemon.stop();
}

#[test]
fn parameters_act() {
    let mut daemon = Daemon::start("");
    daemon.says(&["set", "log", "error"]);
    daemon.says(&["set", "max_clients", "1"]);
    let nbd = daemon.config.with_file_name("nbd");
    let first = UnixStream::connect(&nbd).expect("connected");
    let mut hello = [0; 18];
    (&first).read_exact(&mut hello).expect("a greeting");
    // A client counts once it has chosen an export: fixed newstyle without zeroes, NBD_OPT_EXPORT_NAME.
    (&first).write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\x04disk").expect("sent");
    (&first).read_exact(&mut [0; 10]).expect("size and flags");
    let mut second = UnixStream::connect(&nbd).expect("connected");
    let mut rest = Vec::new();
    second.read_to_end(&mut rest).expect("closed");
    assert!(rest.is_empty(), "the second client is not served");
    let stat: serde_json::Value =
        serde_json::from_str(&daemon.says(&["stat", "--json"])).expect("JSON");
    assert_eq!(stat["clients"], 1);
    drop(first);
    daemon.says(&["set", "log", "info"]);
    let log = daemon.wait_for("parameter=\"log\"");
    assert!(!log.contains("max_clients"), "the refusal was not to be logged: {log}");
    daemon.stop();
}

#[test]
fn pressure_and_its_end_are_logged() {
    let mut daemon = Daemon::start("");
    assert_eq!(daemon.says(&["pressure", "L1"]), "");
    let log = daemon.wait_for("memory pressure: returning idle I/O memory");
    assert!(log.contains("level=\"squeeze\" cause="), "{log}");
    let log = daemon.wait_for("memory pressure has ended");
    assert!(log.contains("events=1 ") && log.contains("wired_bytes_before="), "{log}");
    daemon.stop();
}

#[test]
fn stat_and_pressure() {
    let daemon = Daemon::start("");
    let text = daemon.says(&["stat"]);
    for part in ["ebbd ", " resident", "pressure L", "VOLUME ", "install cd", "CLIENTS"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let stat = || -> serde_json::Value {
        serde_json::from_str(&daemon.says(&["stat", "--json"])).expect("JSON")
    };
    assert_eq!(stat()["workers"][0]["answers"], true);
    let drains =
        |stat: &serde_json::Value| stat["pressure"]["events"][2].as_u64().expect("a count");
    let before = drains(&stat());
    assert_eq!(daemon.says(&["pressure", "l2", "--seconds", "60"]), "");
    // Published by the monitor's own thread, some time after the reply.
    while drains(&stat()) == before {
        std::thread::yield_now();
    }
    let now = stat();
    assert_eq!((&now["pressure"]["level"], &now["pressure"]["name"]), (&2.into(), &"drain".into()));
    assert!(daemon.says(&["stat"]).contains("pressure L2 (drain)"));
    daemon.refuses(&["pressure", "L4"], &["L0"]);
    daemon.refuses(&["pressure", "L1", "--seconds", "0"], &["1..=86400"]);

    let mut stream = UnixStream::connect(&daemon.control).expect("connected");
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    for part in ["application/openmetrics-text", "ebbd_volume_size_bytes{volume=\"disk\"} 1048576"]
    {
        assert!(answer.contains(part), "{part}: {answer}");
    }
    daemon.stop();
}

#[test]
fn a_reload_keeps_what_was_set_unless_the_file_changed_it() {
    let mut daemon = Daemon::start("max_buffer_pages = 100\nbuffer_squeeze_duration_ms = 10");
    let get = |daemon: &Daemon, name: &str| daemon.says(&["get", name]).trim().to_owned();
    daemon.says(&["set", "max_buffer_pages", "1"]);
    daemon.says(&["set", "buffer_squeeze_duration_ms", "2"]);
    daemon.says(&["set", "max_buffer_pages", "3", "--volume", "disk"]);
    daemon.reload();
    assert_eq!(get(&daemon, "max_buffer_pages"), "1");

    daemon.rewrite("max_buffer_pages = 100\nbuffer_squeeze_duration_ms = 20\ncontrol = '/x/y'");
    daemon.signal("-HUP");
    // The option takes precedence over the file, so the socket stays and nothing is logged.
    daemon.wait_for("reloaded");
    assert_eq!(get(&daemon, "max_buffer_pages"), "1");
    assert_eq!(get(&daemon, "buffer_squeeze_duration_ms"), "20");
    assert_eq!(daemon.says(&["get", "max_buffer_pages", "--volume", "disk"]), "3\n");

    daemon.rewrite("max_buffer_pages = 101");
    daemon.reload();
    assert_eq!(get(&daemon, "max_buffer_pages"), "101");
    assert_eq!(get(&daemon, "buffer_squeeze_duration_ms"), "10");
    daemon.stop();
}

#[test]
fn a_reload_lists_volumes_that_are_not_served_and_is_status_5() {
    let mut daemon = Daemon::start("");
    let missing = daemon.config.with_file_name("missing.img");
    let add = |daemon: &Daemon, rest: &str| {
        daemon.rewrite("max_buffer_pages = 100");
        let text = fs::read_to_string(&daemon.config).expect("written");
        let failed = format!("[volume.lost]\nstore = 'file:{}'\n", missing.display());
        fs::write(&daemon.config, format!("{text}{failed}{rest}")).expect("written");
    };
    add(&daemon, "");
    daemon.restart();
    for args in [&["reload"][..], &["reload", "--wait"]] {
        let output = daemon.run(args);
        let said = String::from_utf8_lossy(&output.stdout);
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!((output.status.code(), lines.len(), lines[0]), (Some(5), 2, "reloaded"));
        assert!(lines[1].starts_with("not served: volume lost: "), "{said}");
        assert!(lines[1].contains("missing.img"), "{said}");
    }
    // One that cannot be changed keeps its old store, so that the file is not in force.
    add(&daemon, "");
    let text = fs::read_to_string(&daemon.config).expect("written");
    let changed = format!("store = 'file:{}'\n", missing.display());
    fs::write(&daemon.config, text.replace("store = 'memory:1M'\n", &changed)).expect("written");
    daemon.refuses(&["reload", "--wait"], &["volume disk: not changed", "missing.img"]);
    daemon.stop();
}

#[test]
fn many_volumes_that_cannot_be_opened_leave_room_in_the_log_and_in_the_events() {
    let mut daemon = Daemon::start("");
    let text = fs::read_to_string(&daemon.config).expect("written");
    let folder = daemon.config.with_file_name("none");
    let lost = |number| format!("[volume.lost{number}]\nstore = 'file:{}'\n", folder.display());
    let all: String = (0..1500).map(lost).collect();
    fs::write(&daemon.config, text + &all).expect("written");
    daemon.child.kill().expect("killed");
    daemon.child.wait().expect("it ends");
    (daemon.child, daemon.log) = serve(&daemon.config, &daemon.control);
    let log = daemon.wait_for("ready");
    let lines = |part: &str| log.lines().filter(|line| line.contains(part)).count();
    assert_eq!(lines("cannot open the volume"), 50, "{log}");
    assert_eq!(lines("further volumes cannot be opened"), 1, "{log}");
    assert!(log.contains("volumes=1450"), "{log}");
    // What was logged before is an event still.
    let events = daemon.says(&["events", "--lines", "10000"]);
    assert!(events.contains("memory pressure:"), "{events}");
    daemon.stop();
}

#[test]
fn many_sets_at_once() {
    let daemon = Daemon::start("");
    std::thread::scope(|scope| {
        for n in 0..8 {
            let daemon = &daemon;
            scope.spawn(move || daemon.says(&["set", "max_buffer_pages", &n.to_string()]));
        }
    });
    let value: u32 = daemon.says(&["get", "max_buffer_pages"]).trim().parse().expect("a number");
    assert!(value < 8, "{value}");
    daemon.stop();
}

#[test]
fn a_socket_in_use_is_not_taken() {
    let daemon = Daemon::start("");
    let nbd = daemon.config.with_file_name("other");
    let args = ["serve", "--volume", "a=null:1M", "--listen"];
    let listen = format!("unix:{}", nbd.display());
    let control = daemon.control.to_str().expect("UTF-8");
    let output = daemon.run(&[&args[..], &[&listen, "--control", control]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("in use by a running server"), "{stderr}");
    let output = daemon.run(&[&args[..], &[&listen, "--control", &listen]].concat());
    fails(&output, 2, &["an address for clients"]);
    assert_eq!(daemon.says(&["get", "max_buffer_pages"]), "1024\n");
    daemon.stop();
}

#[test]
fn a_second_daemon_on_one_state_directory_is_refused_and_a_successor_is_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let state = folder.path().join("state");
    let mut daemon = Daemon::start(&format!("state = '{}'", state.display()));
    daemon.reload();
    let nbd = format!("unix:{}", folder.path().join("other").display());
    let args = ["serve", "--volume", "a=null:1M", "--listen", &nbd, "--state"];
    let output = daemon.run(&[&args[..], &[state.to_str().expect("UTF-8")]].concat());
    let told = state.display().to_string();
    fails(&output, 1, &[&told, "another daemon uses this state directory", "stop that one"]);
    // Its predecessor was killed.
    daemon.restart();
    daemon.says(&["volume", "add", "kept", "null:1M", "--persist"]);
    daemon.restart();
    assert!(daemon.says(&["volume", "list"]).contains("kept"));
    daemon.stop();
}

#[test]
fn an_unreachable_daemon_is_status_3_with_advice() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("none");
    let path = path.to_str().expect("UTF-8");
    for args in [&["get"][..], &["set", "log", "info"], &["stat"], &["pressure", "L1"]] {
        let output = command().args(args).args(["--control", path]).output().expect("it starts");
        fails(&output, 3, &[path, "start it with `control`"]);
    }
    let output = command().args(["get", "--control", "tcp:h:1"]).output().expect("it starts");
    fails(&output, 2, &["unix:/path"]);

    // Another server.
    let socket = UnixListener::bind(path).expect("a socket");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = socket.accept().expect("a client");
            stream.write_all(b"220 mail\r\n").expect("sent");
            stream.shutdown(std::net::Shutdown::Write).expect("shut");
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let output = command().args(["get", "--control", path]).output().expect("it starts");
        fails(&output, 1, &["is not HTTP"]);
    });
}

/// A client that has selected the export `disk`.
fn connect(daemon: &Daemon) -> UnixStream {
    let path = daemon.config.parent().expect("a folder").join("nbd");
    let mut stream = UnixStream::connect(path).expect("it listens");
    let request = [&3u32.to_be_bytes()[..], b"IHAVEOPT", &[0, 0, 0, 1], &[0, 0, 0, 4], b"disk"];
    stream.write_all(&request.concat()).expect("sent");
    // The greeting, the size and the flags.
    stream.read_exact(&mut [0; 28]).expect("the export");
    stream
}

#[test]
fn limits_are_set_shown_and_reloaded() {
    let mut daemon = Daemon::start("");
    assert_eq!(
        daemon.says(&["limit", "disk", "--iops", "500", "--burst", "2s"]),
        "limit_iops: 0 -> 500\nlimit_burst_ms: 100 -> 2000\n"
    );
    assert_eq!(
        daemon.says(&["limit", "disk", "--clear"]),
        "limit_iops: 500 -> 0\nlimit_burst_ms: 2000 -> 100\n"
    );
    assert_eq!(daemon.says(&["limit", "disk", "--clear"]), "no limits were set\n");
    daemon.says(&["limit", "disk", "--iops", "500", "--burst", "2s"]);
    assert_eq!(daemon.says(&["limit", "disk", "--group", "gold"]), "limit_group: none -> gold\n");
    let log = daemon.wait_for("this group has no limits");
    assert!(log.contains("volume=\"disk\" limit_group=\"gold\""), "{log}");
    assert!(!log.contains("limit_read_iops"), "only a change is logged: {log}");
    assert_eq!(
        daemon.says(&["limit", "--group", "gold", "--bandwidth", "8M"]),
        "limit_bandwidth: 0 -> 8M\n"
    );
    let text = daemon.says(&["limit", "disk", "--json"]);
    let limits: ebb_api::LimitStat = serde_json::from_str(&text).expect("JSON");
    assert_eq!((limits.iops, limits.burst_ms), (500, 2000));
    assert!(daemon.says(&["limit", "--group", "gold"]).contains("8.0M"));
    assert_eq!(daemon.says(&["get", "limit_bandwidth", "--limit-group", "gold"]), "8M\n");
    assert!(daemon.says(&["stat"]).contains("LIMITS OF"));
    daemon.refuses(&["limit", "disc", "--iops", "1"], &["no volume `disc`", "did you mean `disk`"]);
    daemon.refuses(&["limit", "--group", "cold"], &["no group of limits `cold`"]);
    daemon.refuses(&["limit", "disk", "--bandwidth", "5"], &["out of range", "512"]);
    // All or nothing, whichever of them is wrong.
    let mistake = ["limit", "disk", "--iops", "9", "--no-group", "--write-bandwidth", "5"];
    daemon.refuses(&mistake, &["limit_write_bandwidth", "out of range"]);
    daemon.refuses(&[&mistake[..], &["--clear"]].concat(), &["out of range"]);
    assert_eq!(daemon.says(&["limit", "disk", "--json"]), text);
    assert_eq!(daemon.says(&["get", "limit_group", "--volume", "disk"]), "gold\n");
    daemon.refuses(&["limit", "disk", "--burst", "soon"], &["2s or 500ms"]);
    assert!(daemon.says(&["limit", "disk", "--clear"]).contains("limit_iops: 500 -> 0"));
    assert!(daemon.says(&["limit", "disk"]).contains("burst 100 ms"));
    // A reload changes what the file says of groups; what was set stays.
    daemon.rewrite("[limit_group.gold]\nlimit_iops = 9\n[nbd]\nmax_clients = 5");
    let text = fs::read_to_string(&daemon.config).expect("written");
    let (tables, rest) = text.split_once("listen").expect("a list");
    let (listen, rest) = rest.split_once('\n').expect("lines");
    fs::write(&daemon.config, format!("listen{listen}\n{tables}{rest}")).expect("written");
    daemon.reload();
    assert_eq!(daemon.says(&["get", "limit_iops", "--limit-group", "gold"]), "9\n");
    assert_eq!(daemon.says(&["get", "limit_bandwidth", "--limit-group", "gold"]), "8M\n");
    daemon.stop();
}

#[test]
fn the_limits_of_a_group_are_kept_in_the_state_directory() {
    let folder = tempfile::tempdir().expect("a folder");
    let top = format!("state = '{}'", folder.path().join("state").display());
    let daemon = Daemon::start(&top);
    let keep = ["limit", "--group", "gold/a", "--iops", "5", "--persist"];
    assert_eq!(daemon.says(&keep), "limit_iops: 0 -> 5\n");
    daemon.stop();
    let daemon = Daemon::start(&top);
    let iops = ["get", "limit_iops", "--limit-group", "gold/a"];
    assert_eq!(daemon.says(&iops), "5\n", "a restart keeps them");
    let clear = ["limit", "--group", "gold/a", "--clear", "--persist"];
    // The file is removed first, and its limits with it.
    assert_eq!(daemon.says(&clear), "limit_iops: 5 -> 0\n");
    assert_eq!(daemon.says(&iops), "0\n");
    let files = fs::read_dir(folder.path().join("state/groups")).expect("a folder");
    assert_eq!(files.count(), 0);
    daemon.stop();
}

/// The field of the log that names this test's user.
fn by() -> String {
    format!("by=\"uid:{}\"", rustix::process::getuid().as_raw())
}

#[test]
fn each_change_is_logged_with_who_made_it_and_only_a_change() {
    let mut daemon = Daemon::start("");
    let by = by();
    daemon.says(&["set", "max_clients", "256"]);
    daemon.says(&["set", "max_clients", "7"]);
    let log = daemon.wait_for("parameter set");
    assert!(log.ends_with(&format!("from=\"256\" to=\"7\" {by}\n")), "{log}");
    daemon.says(&["pressure", "L1"]);
    assert!(daemon.wait_for("published").contains(&by));
    daemon.says(&["volume", "add", "extra", "null:1M"]);
    assert!(daemon.wait_for("added volume=").ends_with(&format!("{by}\n")));
    daemon.says(&["volume", "rename", "extra", "other"]);
    assert!(daemon.wait_for("renamed volume=").ends_with(&format!("{by}\n")));
    daemon.says(&["volume", "remove", "other"]);
    assert!(daemon.wait_for("removed volume=").ends_with(&format!("{by}\n")));
    let operations = daemon.says(&["operation", "list"]);
    let uid = by.trim_start_matches("by=").trim_matches('"');
    assert_eq!(operations.matches(uid).count(), 3, "{operations}");
    daemon.says(&["reload"]);
    assert!(daemon.wait_for("reload requested").ends_with(&format!("{by}\n")));
    daemon.rewrite("no_such_key = 1\n");
    daemon.refuses(&["reload"], &["no_such_key"]);
    daemon.says(&["set", "max_clients", "9"]);
    let log = daemon.wait_for("to=\"9\"");
    assert_eq!(log.matches("no_such_key").count(), 1, "a failed reload is logged once: {log}");
    daemon.stop();
}

#[test]
fn what_watches_a_daemon_says_once_that_it_is_gone_and_goes_on_after_a_restart() {
    let mut daemon = Daemon::start("");
    for (args, first, after) in [
        (&["stat", "--watch", "--json"][..], "\"volumes\"", "\"volumes\""),
        (&["events", "--follow"], "ready", "ready"),
    ] {
        let mut watch = command()
            .args(args)
            .env("EBBD_CONTROL", &daemon.control)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let mut stdout = BufReader::new(watch.stdout.take().expect("piped"));
        let mut stderr = BufReader::new(watch.stderr.take().expect("piped"));
        let mut line_with = |part: &str| {
            let mut line = String::new();
            while !line.contains(part) {
                line.clear();
                assert!(stdout.read_line(&mut line).expect("UTF-8") > 0, "{args:?} has ended");
            }
        };
        line_with(first);
        daemon.child.kill().expect("killed");
        let mut said = String::new();
        stderr.read_line(&mut said).expect("UTF-8");
        assert!(said.contains("ebbd asks again each second"), "{args:?}: {said}");
        daemon.restart();
        said.clear();
        stderr.read_line(&mut said).expect("UTF-8");
        assert_eq!(said, "ebbd: the daemon replies again\n", "{args:?}");
        line_with(after);
        watch.kill().expect("it runs");
        watch.wait().expect("it ends");
    }
    daemon.stop();
}

#[test]
fn clients_are_listed_shown_and_disconnected() {
    let mut daemon = Daemon::start("");
    assert_eq!(daemon.says(&["client", "list"]), "no client is connected\n");
    let mut client = connect(&daemon);
    daemon.wait_for("connected");
    let views: Vec<ebb_api::ClientView> =
        serde_json::from_str(&daemon.says(&["client", "list", "--json"])).expect("JSON");
    let [view] = &views[..] else { panic!("{views:?}") };
    assert_eq!(
        (view.volume.as_str(), view.address.as_str(), view.export.as_str()),
        ("disk", "unix", "nbd")
    );
    assert_eq!(view.pid, Some(std::process::id()));
    assert!(view.identity.as_deref().is_some_and(|who| who.starts_with("uid:")));
    assert!(daemon.says(&["client", "list"]).contains(&view.id));
    assert!(daemon.says(&["client", "show", &view.id]).contains("volume disk"));
    daemon.refuses(&["client", "show", "nbd-999"], &["no client `nbd-999`", "ebbd client list"]);
    let said = daemon.says(&["client", "disconnect", &view.id]);
    assert_eq!(said, format!("{}: disconnecting from volume disk, in at most 5 s\n", view.id));
    assert_eq!(client.read(&mut [0]).expect("the end"), 0);
    let log = daemon.wait_for("disconnected by an operator");
    let line = |start: &str| {
        let found = log.lines().find(|line| line.contains(start));
        found.unwrap_or_else(|| panic!("no `{start}` in {log}")).to_owned()
    };
    let (named, by) = (format!("connection=\"{}\" volume=\"disk\"", view.id), by());
    assert!(line("disconnecting a client").ends_with(&format!("{named} {by}")), "{log}");
    let closed = line("INFO closed");
    let identity = by.replace("by=", "identity=");
    for part in [&named, &identity, "reason=\"disconnected by an operator\""] {
        assert!(closed.contains(part), "no {part} in {closed}");
    }
    daemon.stop();
}

/// Asks for an export as an NBD client of this test's user; the connection, if it was given.
fn open_export(socket: &Path, name: &str) -> Option<UnixStream> {
    let mut stream = UnixStream::connect(socket).expect("it listens");
    let length = u32::try_from(name.len()).expect("short").to_be_bytes();
    let request = [b"\0\0\0\x03IHAVEOPT\0\0\0\x01", &length[..], name.as_bytes()].concat();
    stream.write_all(&request).expect("sent");
    // The greeting, then the size and the flags of the export, or the end of the connection.
    stream.read_exact(&mut [0; 18]).expect("a greeting");
    stream.read_exact(&mut [0; 10]).is_ok().then_some(stream)
}

#[test]
fn access_is_given_and_taken_away_while_the_daemon_runs() {
    let mut daemon = Daemon::start("");
    let folder = daemon.config.parent().expect("a folder").to_owned();
    let socket = folder.join("nbd");
    let added =
        ["volume", "add", "mine", "null:1M", "--allow", "net:192.0.2.0/24", "--allow", "uid:root"];
    daemon.says(&added);
    assert!(daemon.says(&["volume", "show", "mine"]).contains("net:192.0.2.0/24, uid:root"));
    let uid = format!("uid:{}", rustix::process::getuid().as_raw());
    daemon.says(&["volume", "allow", "mine", &uid]);
    let mut client = open_export(&socket, "mine").expect("it may open it");
    daemon.says(&["volume", "allow", "mine", "--none"]);
    assert_eq!(client.read(&mut [0]).expect("the end"), 0, "disconnected");
    assert!(open_export(&socket, "mine").is_none());
    assert!(daemon.wait_for("refused").contains("no entry of the volume's `allow` matches"));
    daemon.says(&["volume", "allow", "mine", "--all"]);
    assert!(open_export(&socket, "mine").is_some());
    daemon.refuses(
        &["volume", "allow", "mine", "uid:no such user"],
        &["no user of that name", "check the spelling"],
    );
    daemon.refuses(&["volume", "allow", "disk", &uid], &["defined at", "ebbd reload"]);
    let mut reload = |allow: &str| {
        let filed = format!("[volume.filed]\nstore = 'null:1M'\nallow = [{allow}]\n");
        fs::write(&daemon.config, file(&folder, "") + &filed).expect("written");
        daemon.reload();
    };
    reload(&format!("'net:::1', '{uid}'"));
    let mut client = open_export(&socket, "filed").expect("it may open it");
    reload("'net:::1'");
    assert_eq!(client.read(&mut [0]).expect("the end"), 0, "disconnected");
    assert!(open_export(&socket, "filed").is_none());
    daemon.stop();
}
