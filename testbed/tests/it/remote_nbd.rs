//! Volumes whose store is an NBD server: `nbdkit`, `qemu-nbd`, or another ebbd; over TLS; and with
//! servers that are killed and restarted under load.

use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use testbed::harness::binary::{self, Build};
use testbed::harness::nbd::Client;
use testbed::harness::pattern::content;
use testbed::harness::process;
use testbed::harness::server::Setup;
use testbed::harness::tls::{Authority, Role, pre_shared_keys};
use testbed::{Error, Result, Server, Tool, check};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 64 * MIB;

/// A third-party NBD server on a unix socket; killed when dropped.
struct Backend {
    program: &'static str,
    arguments: Vec<String>,
    socket: PathBuf,
    child: Option<Child>,
}

impl Backend {
    /// `SOCKET` in the arguments stands for the socket's path in `dir`.
    fn start(dir: &Path, program: &'static str, arguments: &[&str]) -> Result<Backend> {
        let socket = dir.join("backend.sock");
        let path = socket.display().to_string();
        let arguments = arguments.iter().map(|text| text.replace("SOCKET", &path)).collect();
        let mut backend = Backend { program, arguments, socket, child: None };
        backend.restart()?;
        Ok(backend)
    }

    /// `nbdkit` over a sparse file `backend.img` in `dir`.
    fn nbdkit(dir: &Path, options: &[&str]) -> Result<Backend> {
        let image = dir.join("backend.img");
        let file = File::create(&image).map_err(Error::io("make an image"))?;
        file.set_len(SIZE).map_err(Error::io("make an image"))?;
        let image = format!("file={}", image.display());
        let all = [&["-f", "-U", "SOCKET"], options, &["file", &image]].concat();
        Backend::start(dir, "nbdkit", &all)
    }

    fn restart(&mut self) -> Result {
        self.spawn()?;
        let socket = self.socket.clone();
        process::until("the backend server", process::PATIENCE, || {
            Ok(UnixStream::connect(&socket).ok())
        })
        .map(drop)
    }

    /// Starts it, and does not connect to it.
    fn spawn(&mut self) -> Result {
        let _ = fs::remove_file(&self.socket);
        let mut command = Command::new(self.program);
        command.args(&self.arguments).stdin(Stdio::null()).stderr(Stdio::null());
        let failed = |e| Error::io(format!("{} (run testbed/install)", self.program))(e);
        self.child = Some(command.spawn().map_err(failed)?);
        Ok(())
    }

    fn kill(&mut self) -> Result {
        if let Some(mut child) = self.child.take() {
            child.kill().map_err(Error::io("kill a server"))?;
            child.wait().map_err(Error::io("wait for a server"))?;
        }
        Ok(())
    }

    fn volume(&self, scheme: &str, parameters: &str) -> String {
        format!("disk={scheme}:///?socket={}{parameters}", self.socket.display())
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// Copies a file in and out, and compares; `qemu-io` writes, zeroes, discards and reads.
fn used_by_real_clients(server: &mut Server) -> Result {
    let (source, back) = (server.dir().join("source"), server.dir().join("back"));
    let mut data = content(3, 0, 24 << 20);
    data.resize(40 << 20, 0);
    data.extend(content(4, 0, 24 << 20));
    fs::write(&source, &data).map_err(Error::io("write a file"))?;
    let uri = server.uri("disk");
    Tool::new("nbdcopy").args(["--connections=4", "--flush"]).arg(&source).arg(&uri).ok()?;
    Tool::new("nbdcopy").arg("--connections=4").arg(&uri).arg(&back).ok()?;
    Tool::new("cmp").arg(&source).arg(&back).ok()?;
    let options = server.qemu_options("disk");
    let commands = [
        "write -P 7 1M 300k",
        "write -f -P 8 1536 512",
        "write -z -u 1100k 100k",
        "discard 2M 1M",
        "flush",
        "read -P 7 1M 76k",
        "read -P 0 1100k 100k",
        "read -P 7 1200k 100k",
        "read -P 8 1536 512",
    ];
    let mut tool = Tool::new("qemu-io").arg("--image-opts").arg(&options);
    for command in commands {
        tool = tool.args(["-c", command]);
    }
    let outcome = tool.ok()?;
    let said = format!("{}{}", outcome.stdout, outcome.stderr);
    outcome.check(!said.contains("fail") && !said.contains("rror"), "no failure")?;
    server.healthy()
}

#[test]
fn real_clients_over_nbdkit() -> Result {
    let setup = Setup::new()?;
    let backend = Backend::nbdkit(setup.dir(), &[])?;
    let mut server =
        setup.volume(&backend.volume("nbd+unix", "")).args(["--workers", "2"]).start()?;
    used_by_real_clients(&mut server)?;
    server.stop()
}

#[test]
fn real_clients_over_qemu_nbd() -> Result {
    let setup = Setup::new()?;
    let image = setup.dir().join("backend.img");
    let file = File::create(&image).map_err(Error::io("make an image"))?;
    file.set_len(SIZE).map_err(Error::io("make an image"))?;
    let image = image.display().to_string();
    let arguments = ["-k", "SOCKET", "-f", "raw", "-t", "--shared=0", "--discard=unmap", &image];
    let backend = Backend::start(setup.dir(), "qemu-nbd", &arguments)?;
    let mut server = setup.volume(&backend.volume("nbd+unix", "")).start()?;
    used_by_real_clients(&mut server)?;
    server.stop()
}

/// Runs the verified load, and calls `end_and_restart` several times meanwhile.
fn under_load(server: &mut Server, mut end_and_restart: impl FnMut() -> Result) -> Result {
    let mut times = 0;
    // On a busy machine a restart takes longer, and a load ends after few of them: then run another.
    while times < 4 {
        let tool = server.verified_load();
        let job = std::thread::spawn(move || tool.run());
        while !job.is_finished() {
            std::thread::park_timeout(Duration::from_millis(700));
            if times < 6 {
                end_and_restart()?;
                times += 1;
            }
        }
        let outcome = job.join().map_err(|_| Error::unexpected("the load panicked"))??;
        outcome.check(outcome.status.success(), "fio finds its data and no error")?;
    }
    server.healthy()
}

#[test]
fn a_server_killed_under_verified_load_is_not_noticed() -> Result {
    let setup = Setup::new()?;
    let mut backend = Backend::nbdkit(setup.dir(), &[])?;
    let control = format!("unix:{}", setup.dir().join("control.sock").display());
    let volume = backend.volume("nbd+unix", "");
    let mut server = setup.volume(&volume).args(["--control", &control]).start()?;
    under_load(&mut server, || {
        backend.kill()?;
        backend.restart()
    })?;
    let ebbd = testbed::harness::binary::ebbd(testbed::harness::binary::Build::AsTests)?;
    let stat = Tool::new(ebbd).args(["stat", "--control", &control]).ok()?;
    let said =
        stat.stdout.contains("connected (1 connection,") && !stat.stdout.contains(" 0 reconnects");
    stat.check(said, "the state of the connection")?;
    server.stop()
}

#[test]
fn ebbd_behind_ebbd_killed_under_verified_load_is_not_noticed() -> Result {
    let mut back = Server::with_disk(SIZE)?;
    let uri = back.uri("disk");
    let setup = Setup::new()?.volume(&format!("disk={uri}")).args(["--workers", "2"]);
    let mut server = setup.start()?;
    used_by_real_clients(&mut server)?;
    under_load(&mut server, || {
        back.kill9()?;
        back.restart()
    })?;
    server.stop()?;
    back.stop()
}

#[test]
fn a_slow_server_serves() -> Result {
    let setup = Setup::new()?;
    let filters = ["--filter=delay", "--filter=rate"];
    let backend = Backend::nbdkit(setup.dir(), &filters)?;
    drop(backend);
    let options =
        ["-f", "-U", "SOCKET", "--filter=delay", "--filter=rate", "--filter=retry-request"];
    let image = format!("file={}", setup.dir().join("backend.img").display());
    let values = ["delay-read=2ms", "delay-write=2ms", "rate=2G"];
    let all = [&options[..], &["file", &image], &values].concat();
    let backend = Backend::start(setup.dir(), "nbdkit", &all)?;
    let mut server = setup.volume(&backend.volume("nbd+unix", "")).start()?;
    used_by_real_clients(&mut server)?;
    server.stop()
}

#[test]
fn over_tls_with_certificates_and_with_keys() -> Result {
    let setup = Setup::new()?;
    let authority = Authority::new(setup.dir().join("authority"))?;
    let own = authority.issue(Role::Server, setup.dir().join("server"))?;
    let client = authority.issue(Role::Client, setup.dir().join("client"))?;
    let stranger = Authority::new(setup.dir().join("other"))?
        .issue(Role::Client, setup.dir().join("stranger"))?;
    let certificates = format!("--tls-certificates={}", own.display());
    let options = ["--tls=require", &certificates, "--tls-verify-peer"];
    let backend = Backend::nbdkit(setup.dir(), &options)?;
    let with = |folder: &Path| {
        let parameters = format!("&tls-certificates={}&tls-hostname=localhost", folder.display());
        backend.volume("nbds+unix", &parameters)
    };
    for (volume, remedy) in [
        (backend.volume("nbd+unix", ""), "nbds://"),
        (with(&stranger), "certificate"),
        (with(&client).replace("localhost", "elsewhere"), "certificate"),
    ] {
        let outcome = checked(&volume)?;
        outcome.check(outcome.stderr.contains(remedy), "a remedy")?;
    }
    let mut server = setup.volume(&with(&client)).start()?;
    used_by_real_clients(&mut server)?;
    server.stop()?;
    drop(backend);

    let setup = Setup::new()?;
    let keys = pre_shared_keys(&setup.dir().join("keys"), &["alice", "bob"])?;
    let psk = format!("--tls-psk={}", keys.display());
    let mut backend = Backend::nbdkit(setup.dir(), &["--tls=require", &psk])?;
    let parameters = format!("&tls-psk-file={}", keys.display());
    let volume = backend.volume("nbds+unix", &parameters).replace(":///", "://alice@/");
    let wrong = volume.replace("alice", "carol");
    let outcome = checked(&wrong)?;
    outcome.check(outcome.stderr.contains("has no key for `carol`"), "a remedy")?;
    let mut server = setup.volume(&volume).start()?;
    under_load(&mut server, || {
        backend.kill()?;
        backend.restart()
    })?;
    server.stop()
}

/// The outcome of `ebbd serve --check` with a volume that cannot be opened.
fn checked(volume: &str) -> Result<testbed::harness::tool::Outcome> {
    let ebbd = testbed::harness::binary::ebbd(testbed::harness::binary::Build::AsTests)?;
    // A check makes no socket.
    let listen = format!("unix:{}", std::env::temp_dir().join("ebbd-checked.sock").display());
    let outcome = Tool::new(ebbd)
        .args(["serve", "--check", "--listen", &listen, "--volume", volume])
        .run()?;
    outcome.check(!outcome.status.success(), "a refusal")?;
    Ok(outcome)
}

#[test]
fn an_unreachable_server_is_named_with_a_remedy() -> Result {
    let outcome = checked("disk=nbd+unix:///?socket=/nonexistent/socket")?;
    outcome.check(outcome.stderr.contains("is it running there?"), "a remedy")?;
    let outcome = checked("disk=nbd://127.0.0.1:1/")?;
    outcome.check(outcome.stderr.contains("127.0.0.1:1: cannot connect"), "the address")
}

/// `qemu-nbd` without `--persistent` ends with its first client.
#[test]
fn server_of_a_single_client_serves_a_volume() -> Result {
    let setup = Setup::new()?;
    let (image, socket) = (setup.dir().join("backend.img"), setup.dir().join("backend.sock"));
    let file = File::create(&image).map_err(Error::io("make an image"))?;
    file.set_len(SIZE).map_err(Error::io("make an image"))?;
    let arguments = vec![
        "--format=raw".to_owned(),
        format!("--socket={}", socket.display()),
        image.display().to_string(),
    ];
    let mut store = Backend { program: "qemu-nbd", arguments, socket: socket.clone(), child: None };
    store.spawn()?;
    process::until("the socket", process::PATIENCE, || Ok(socket.exists().then_some(())))?;
    let setup = setup.volume(&store.volume("nbd+unix", "")).args(["--workers", "2"]);
    let mut server = setup.start()?;
    let mut client = Client::open(&server.socket(), "disk")?;
    client.write(4096, &content(1, 4096, 4096), 0)?;
    client.flush()?;
    check(client.read(4096, 4096)? == content(1, 4096, 4096), || server.log())?;
    drop(client);
    check(!server.log().contains("was lost"), || server.log())?;
    server.stop()
}

/// Extended on the server while it is used, through nbdkit (which sends each new connection the size of its file) and
/// through qemu-nbd (which is restarted with the larger image, and permits one connection).
#[test]
fn a_remote_volume_follows_its_export() -> Result {
    for (program, cache) in [
        ("nbdkit", "none"),
        ("nbdkit", "writeback"),
        ("qemu-nbd", "none"),
        ("qemu-nbd", "writeback"),
    ] {
        let setup = Setup::new()?;
        let mut store = match program {
            "nbdkit" => Backend::nbdkit(setup.dir(), &[])?,
            _ => {
                let image = setup.dir().join("backend.img");
                let file = File::create(&image).map_err(Error::io("make an image"))?;
                file.set_len(SIZE).map_err(Error::io("make an image"))?;
                let image = image.display().to_string();
                let all = ["--persistent", "--format=raw", "--socket=SOCKET", &image];
                Backend::start(setup.dir(), program, &all)?
            }
        };
        let image = setup.dir().join("backend.img");
        let control = setup.dir().join("control.sock");
        let volume = format!("{},cache={cache}", store.volume("nbd+unix", ""));
        let setup = setup.volume(&volume).arg("--control").arg(&control).args(["--workers", "2"]);
        let mut server = setup.start()?;
        let mut client = Client::open(&server.socket(), "disk")?;
        client.write(SIZE - 4096, &content(1, 0, 4096), 0)?;
        let file = File::options().write(true).open(&image);
        let file = file.map_err(Error::io("open the image"))?;
        file.set_len(SIZE * 2).map_err(Error::io("extend the image"))?;
        if program == "qemu-nbd" {
            store.kill()?;
            store.restart()?;
        }
        check(client.read(SIZE - 4096, 4096)? == content(1, 0, 4096), || "the old end".into())?;
        let ebbd = binary::ebbd(Build::AsTests)?;
        let resize = Tool::new(&ebbd)
            .args(["volume", "resize", "disk", "--wait", "--control"])
            .arg(&control)
            .ok()?;
        let expected = format!("disk: {}M -> {}M\n", SIZE >> 20, SIZE >> 19);
        resize.check(resize.stdout == expected, &expected)?;
        let mut late = Client::open(&server.socket(), "disk")?;
        late.write(SIZE * 2 - 4096, &content(2, 0, 4096), 0)?;
        late.flush()?;
        client.flush()?;
        let bytes = fs::read(&image).map_err(Error::io("read the image"))?;
        let size = usize::try_from(SIZE).unwrap_or(usize::MAX);
        for (end, seed) in [(size, 1), (size * 2, 2)] {
            check(bytes[end - 4096..end] == content(seed, 0, 4096), || {
                format!("{program}, {cache}: what was flushed is not in the image before {end}")
            })?;
        }
        // The kill of the other server is logged if the next look at the connections comes in time.
        let is_lost = program == "nbdkit" && server.log().contains("was lost and made again");
        check(!is_lost, || server.log())?;
        server.healthy()?;
        server.stop()?;
    }
    Ok(())
}

/// On a server no new file can take the place of a delta.
#[test]
fn delta_on_a_server_has_snapshots_once_it_is_in_a_file() -> Result {
    let setup = Setup::new()?;
    let store = Backend::nbdkit(setup.dir(), &[])?;
    let (base, copy) = (setup.dir().join("golden.raw"), setup.dir().join("copy.delta"));
    fs::write(&base, content(1, 0, 8 << 20)).map_err(Error::io("write the base"))?;
    let control = setup.dir().join("control.sock");
    let setup = setup.volume(&format!("golden=file:{},read-only=true", base.display()));
    let mut server = setup.arg("--control").arg(&control).start()?;
    let on_server = format!("nbd+unix:///?socket={}", store.socket.display());
    let in_file = format!("file:{}", copy.display());
    let add = |store: &str, more: &[&str]| {
        let args = ["volume", "add", "disk", store, "--base", "golden", "--wait"];
        server.operator(&[&args[..], more].concat())?.ok()
    };
    add(&on_server, &["--create"])?;
    let mut client = Client::open(&server.socket(), "disk")?;
    client.write(MIB, &content(2, 0, 4096), 0)?;
    client.flush()?;
    drop(client);
    let refused = server.operator(&["volume", "snapshot", "disk", "one"])?.fails()?;
    let remedy = "`ebbd image import STORE file:PATH --raw`";
    refused.check(refused.stderr.contains(remedy), remedy)?;
    server.operator(&["volume", "remove", "disk", "--wait"])?.ok()?;
    let ebbd = Tool::new(binary::ebbd(Build::AsTests)?);
    ebbd.args(["image", "import", &on_server, &in_file, "--raw"]).ok()?;
    add(&in_file, &[])?;
    server.operator(&["volume", "snapshot", "disk", "one"])?.ok()?;
    let mut client = Client::open(&server.socket(), "disk@one")?;
    check(client.read(MIB, 4096)? == content(2, 0, 4096), || "another snapshot".into())?;
    check(client.read(0, 4096)? == content(1, 0, 4096), || "not the base".into())?;
    drop(client);
    server.healthy()?;
    server.stop()
}

/// One word for the state of a volume, whoever asks.
#[test]
fn dead_server_shows_one_state_on_every_surface() -> Result {
    let setup = Setup::new()?;
    let mut store = Backend::nbdkit(setup.dir(), &[])?;
    let control = setup.dir().join("control.sock");
    let setup = setup.volume(&store.volume("nbd+unix", "")).volume("local=null:1M");
    let mut server = setup.arg("--control").arg(&control).start()?;
    let mut client = Client::open(&server.socket(), "disk")?;
    client.read(0, 4096)?;
    let states = || -> Result<Vec<String>> {
        let list = server.operator(&["volume", "list", "--json"])?.ok()?.json()?;
        let show = server.operator(&["volume", "show", "disk", "--json"])?.ok()?.json()?;
        let stat = server.operator(&["stat", "volume", "disk", "--json"])?.ok()?.json()?;
        let summary: serde_json::Value = control_json(&control, "/v1/summary")?;
        let one = control_json(&control, "/v1/volumes/disk/stat")?;
        let in_list = |all: &serde_json::Value| {
            let all = all.as_array().cloned().unwrap_or_default();
            all.iter().find(|one| one["name"] == "disk").map(|one| one["state"].to_string())
        };
        let metrics = control_reply(&control, "/metrics")?;
        let metric = metrics.lines().find(|line| {
            line.starts_with("ebbd_volume_state{") && line.contains("volume=\"disk\"")
        });
        let metric = metric.and_then(|line| line.split("state=\"").nth(1)?.split('"').next());
        Ok([
            in_list(&list).unwrap_or_default(),
            show["stat"]["state"].to_string(),
            stat["state"].to_string(),
            in_list(&summary["volumes"]).unwrap_or_default(),
            one["state"].to_string(),
            format!("\"{}\"", metric.unwrap_or_default()),
        ]
        .to_vec())
    };
    let all = |word: &str| -> Result {
        process::until(word, process::PATIENCE, || {
            let found = states()?;
            Ok(found.iter().all(|one| *one == format!("\"{word}\"")).then_some(()))
        })
        .map_err(|error| Error::unexpected(format!("{error}: {:?}", states())))
    };
    all("serving")?;
    server.operator(&["status"])?.ok()?;
    store.kill()?;
    all("disconnected")?;
    let status = server.operator(&["status"])?.run()?;
    status
        .check(status.stdout.starts_with("failing: 1 of 2 volumes serving\n"), "1 of 2 serving")?;
    store.restart()?;
    all("serving")?;
    client.read(0, 4096)?;
    server.operator(&["status"])?.ok()?;
    server.stop()
}

#[test]
fn failed_write_to_a_dead_server_is_not_blamed_on_space() -> Result {
    let setup = Setup::new()?;
    let mut store = Backend::nbdkit(setup.dir(), &[])?;
    let mut server = setup.volume(&store.volume("nbd+unix", "&reconnect=1")).start()?;
    let mut client = Client::open(&server.socket(), "disk")?;
    client.write(0, &content(1, 0, 4096), 0)?;
    client.flush()?;
    store.kill()?;
    check(client.write(4096, &content(1, 0, 4096), 0).is_err(), || "without a server".into())?;
    let line = process::until("the line", process::PATIENCE, || {
        let log = server.log();
        Ok(log.lines().find(|line| line.contains("writing failed")).map(str::to_owned))
    })?;
    let is_true = line.contains("start the server, or restore the network");
    check(is_true && !line.contains("free space"), || line)?;
    store.restart()?;
    process::until("a write", process::PATIENCE, || {
        Ok(client.write(4096, &content(1, 0, 4096), 0).is_ok().then_some(()))
    })?;
    client.flush()?;
    server.stop()
}

/// Reads of an overlay need the server of its base.
#[test]
fn dead_server_of_a_base_is_shown_as_a_failure_of_the_overlay() -> Result {
    let setup = Setup::new()?;
    let mut store = Backend::nbdkit(setup.dir(), &[])?;
    let (delta, control) = (setup.dir().join("top.delta"), setup.dir().join("control.sock"));
    let base = format!("{},read-only=true", store.volume("nbd+unix", "&reconnect=1"));
    let top = format!("top=file:{},base=disk,create=true", delta.display());
    let mut server = setup.volume(&base).volume(&top).arg("--control").arg(&control).start()?;
    let mut client = Client::open(&server.socket(), "top")?;
    client.read(0, 4096)?;
    server.operator(&["status"])?.ok()?;
    store.kill()?;
    check(client.read(SIZE / 2, 4096).is_err(), || "a read without a server".into())?;
    for part in ["volume top: its server unix:", "volume top: 1 request to its store has failed"] {
        process::until(part, process::PATIENCE, || {
            Ok(server.operator(&["status"])?.run()?.stdout.contains(part).then_some(()))
        })?;
    }
    let log = server.log();
    let line = log.lines().find(|line| line.contains("reading failed"));
    for part in ["volume=\"top\"", "backend.sock", "cannot connect"] {
        check(line.is_some_and(|line| line.contains(part)), || format!("no `{part}`: {log}"))?;
    }
    store.restart()?;
    process::until("a read", process::PATIENCE, || {
        Ok(client.read(SIZE / 2, 4096).is_ok().then_some(()))
    })?;
    process::until("the connection", process::PATIENCE, || {
        let status = server.operator(&["status"])?.run()?;
        Ok((!status.stdout.contains("is not connected")).then_some(()))
    })?;
    server.stop()
}

fn control_reply(control: &Path, path: &str) -> Result<String> {
    use std::io::{Read as _, Write as _};
    let mut stream = UnixStream::connect(control).map_err(Error::io("connect"))?;
    let request = format!("GET {path} HTTP/1.0\r\nHost: ebbd\r\n\r\n");
    stream.write_all(request.as_bytes()).map_err(Error::io("send"))?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply).map_err(Error::io("receive"))?;
    Ok(reply)
}

fn control_json(control: &Path, path: &str) -> Result<serde_json::Value> {
    let reply = control_reply(control, path)?;
    let body = reply.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    serde_json::from_str(body).map_err(|error| Error::unexpected(format!("{error}: {reply}")))
}
