//! The seccomp profile of the container: a daemon serves volumes of each kind under it, and what it does not list is
//! denied.

use super::{directory, packaging};
use std::fs;
use std::path::Path;
use testbed::harness::binary::{self, Build};
use testbed::harness::nbd::Client;
use testbed::harness::server::Setup;
use testbed::harness::tls::{Authority, Role};
use testbed::{Error, Result, Server, Tool, check};

fn with_seccomp() -> Result<Tool> {
    Ok(Tool::new(env!("CARGO_BIN_EXE_with-seccomp")))
}

/// A daemon with volumes of each kind under a profile, not started.
fn confined(options: &[&str], profile: &Path, remote: &Server) -> Result<Setup> {
    let mut prefix = vec![env!("CARGO_BIN_EXE_with-seccomp").to_owned()];
    prefix.extend(options.iter().map(|&option| option.to_owned()));
    prefix.push(profile.display().to_string());
    let setup = Setup::new()?.under(&prefix);
    let keys =
        Authority::new(setup.dir().join("ca"))?.issue(Role::Server, setup.dir().join("tls"))?;
    let (image, written) = (setup.dir().join("file.img"), setup.dir().join("written.img"));
    let control = setup.dir().join("control.sock");
    Ok(setup
        .volume("memory=memory:16M")
        .volume(&format!("file=file:{},size=64M,create=true", image.display()))
        .volume(&format!("written=file:{},size=64M,create=true,cache=writeback", written.display()))
        .volume(&format!("remote=nbd+unix:///disk?socket={}", remote.socket().display()))
        .args(["--tls", "on", "--tls-certificates"])
        .arg(&keys)
        .args(["--web", "tcp:127.0.0.1:0", "--control"])
        .arg(&control))
}

#[test]
fn a_daemon_serves_under_the_profile_and_no_call_of_it_is_denied() -> Result {
    let profile = packaging().join("seccomp.json");
    let remote = Server::with_disk(16 << 20)?;
    let mut server = confined(&["--kill"], &profile, &remote)?.start()?;
    let control = server.dir().join("control.sock");
    for volume in ["memory", "file", "written", "remote"] {
        let uri = server.uri(volume);
        Tool::new("qemu-img")
            .args(["bench", "-q", "-f", "raw", "-w", "-c", "300", "-d", "16", &uri])
            .ok()?;
        let commands = ["-c", "discard 0 1M", "-c", "write -z 1M 1M", "-c", "flush"];
        Tool::new("qemu-io").args(["-f", "raw"]).args(commands).arg(&uri).ok()?;
        Tool::new("nbdinfo").args(["--map", &uri]).ok()?;
    }
    let tls =
        server.tls_uri("", "file", &format!("tls-certificates={}/tls", server.dir().display()));
    Tool::new("nbdinfo").args(["--size", &tls]).ok()?;
    let ebbd = binary::ebbd(Build::AsTests)?;
    let ask = |arguments: &[&str]| {
        Tool::new(&ebbd).args(arguments).arg("--control").arg(&control).ok().map(drop)
    };
    ask(&["stat"])?;
    ask(&["volume", "resize", "file", "65M", "--wait"])?;
    ask(&["pressure", "L3"])?;
    server.healthy()?;
    server.stop()
}

#[test]
fn the_profile_denies_what_it_does_not_list_and_is_needed_for_io_uring() -> Result {
    let profile = packaging().join("seccomp.json");
    let run = |program: &[&str]| with_seccomp()?.arg(&profile).args(program).run();
    let allowed = run(&["ls", "/"])?;
    allowed.check(allowed.status.success(), "a plain program to run")?;
    for program in [&["unshare", "--user", "true"][..], &["strace", "true"]] {
        let denied = run(program)?;
        // strace finds its child gone in some runs.
        let said = ["not permitted", "ptrace"].iter().any(|text| denied.stderr.contains(text));
        denied.check(!denied.status.success() && said, "the call to be denied")?;
    }

    // Without io_uring, as by Docker's own profile, the daemon does not start and says why.
    let text = fs::read_to_string(&profile).map_err(Error::io("read the profile"))?;
    let directory = directory()?;
    let plain = directory.path().join("seccomp.json");
    let text = text.replace("\"io_uring_setup\", ", "");
    fs::write(&plain, text).map_err(Error::io("write a profile"))?;
    let refused = with_seccomp()?
        .arg(&plain)
        .arg(binary::ebbd(Build::AsTests)?)
        .args(["serve", "--volume", "a=memory:1M", "--listen"])
        .arg(format!("unix:{}/nbd.sock", directory.path().display()))
        .fails()?;
    refused.check(refused.stderr.contains("io_uring"), "the reason to be io_uring")
}

#[test]
fn the_container_file_names_what_is_there() -> Result {
    let text = fs::read_to_string(packaging().join("Containerfile"))
        .map_err(Error::io("read the Containerfile"))?;
    for line in text.lines().filter(|line| line.starts_with("COPY --from=build /src/packaging/")) {
        let source = line.split_whitespace().nth(2).unwrap_or_default();
        let file = packaging().join(source.trim_start_matches("/src/packaging/"));
        check(file.is_file(), || format!("{line}: no {}", file.display()))?;
    }
    for line in ["USER 999:999", "STOPSIGNAL SIGTERM"] {
        check(text.lines().any(|found| found == line), || format!("no {line}"))?;
    }
    // The daemon starts with the arguments of the image.
    let command = text.lines().find_map(|line| line.strip_prefix("CMD "));
    let command: Vec<String> = serde_json::from_str(command.unwrap_or_default())
        .map_err(|e| Error::unexpected(format!("CMD is no list of words: {e}")))?;
    let directory = directory()?;
    let at = |name: &str| directory.path().join(name).display().to_string();
    let config = fs::read_to_string(packaging().join("ebbd.toml"))
        .map_err(Error::io("read ebbd.toml"))?
        .replace("/run/ebbd", &at(""))
        .replace("/var/lib/ebbd", &at(""));
    fs::write(at("ebbd.toml"), config).map_err(Error::io("write a configuration"))?;
    let words = command.iter().map(|word| match word.as_str() {
        "/etc/ebbd/ebbd.toml" => at("ebbd.toml"),
        "tcp:0.0.0.0:10809" => "tcp:127.0.0.1:0".into(),
        word => word.to_owned(),
    });
    let checked = Tool::new(binary::ebbd(Build::AsTests)?).args(words).arg("--check").run()?;
    checked.check(checked.status.success(), "the arguments of the image to be valid")
}

#[test]
fn volumes_are_read_and_written_under_the_profile_as_containers_apply_it() -> Result {
    let remote = Server::with_disk(16 << 20)?;
    let mut server = confined(&[], &packaging().join("seccomp.json"), &remote)?.start()?;
    for volume in ["memory", "file", "written", "remote"] {
        let mut client = Client::open(&server.socket(), volume)?;
        client.write(4096, &[9; 4096], 0)?;
        check(client.read(4096, 4096)? == [9; 4096], || format!("{volume}: other data"))?;
        client.disconnect()?;
    }
    server.healthy()?;
    server.stop()
}
