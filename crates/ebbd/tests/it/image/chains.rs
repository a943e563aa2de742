//! Deltas and snapshots that a daemon has written are looked at and exported when it has ended.

use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use super::common::{Folder, Running, ebbd, image, nbd, qemu, until};

fn write(uri: &str, commands: &[&str]) {
    let commands: Vec<&str> = commands.iter().flat_map(|command| ["-c", command]).collect();
    qemu("qemu-io", &[&["-f", "raw"], &commands[..], &[uri]].concat());
}

fn serve(folder: &Folder, socket: &Path) -> Running {
    let mut daemon = Command::new(env!("CARGO_BIN_EXE_ebbd"));
    daemon.args(["serve", "--listen", &format!("unix:{}", socket.display())]);
    daemon.args(["--control", &folder.text("control")]);
    daemon.args(["--volume", &format!("base=qcow2:{}", folder.text("base.qcow2"))]);
    daemon.args([
        "--volume",
        &format!("web=file:{},base=base,create=true,size=12M", folder.text("web.delta")),
    ]);
    let daemon = Running(daemon.stderr(Stdio::null()).spawn().unwrap());
    until("the daemon listens", || std::os::unix::net::UnixStream::connect(socket).is_ok());
    daemon
}

#[test]
fn an_export_is_what_the_daemon_served() {
    let folder = Folder::new();
    let base = folder.text("base.qcow2");
    qemu("qemu-img", &["create", "-q", "-f", "qcow2", &base, "8M"]);
    qemu("qemu-io", &["-f", "qcow2", "-c", "write -q -P 1 0 3M", &base]);
    let socket = folder.path("socket");
    let uri = nbd("web", &socket);
    let mut daemon = serve(&folder, &socket);
    let control = folder.text("control");
    write(&uri, &["write -q -P 2 1000k 5000", "write -q -P 3 11M 64k", "flush"]);
    ebbd(&["volume", "snapshot", "web", "one", "--control", &control]).check(0, "");
    write(&uri, &["write -q -P 4 1002k 512", "write -q -z 11M 4k", "write -q -P 5 7M 4k", "flush"]);
    let served = folder.text("served.raw");
    qemu("qemu-img", &["convert", "-f", "raw", "-O", "raw", &uri, &served]);
    let delta = folder.file("web.delta");
    let base_store = format!("qcow2:{base}");
    let out = folder.file("out.raw");
    // In use: the message says what to do.
    image(&["export", &delta, &out, "--base", &base_store]).check(1, "a running daemon");
    // A snapshot is a read-only file that both may have open.
    image(&["check", &folder.file("web.delta@one"), "--base", &base_store]).check(0, "no damage");
    kill_process(Pid::from_child(&daemon.0), Signal::TERM).unwrap();
    assert!(daemon.0.wait().unwrap().success());

    image(&["check", &delta]).check(0, "no damage found");
    // The plain base is below the snapshot.
    image(&["check", &delta, "--base", &base_store]).check(1, "is not directly below");
    image(&["info", &folder.text("web.delta")]).check(2, "is no store; write file:");
    let info = image(&["info", &delta, "--json"]).json();
    assert_eq!(info["format"], "delta");
    assert_eq!(info["virtual_size"], 12 << 20);
    let held = info["delta"]["held_blocks"].as_u64().unwrap();
    assert_eq!(held, 3, "{info}");
    let chain = info["delta"]["chain"].as_array().unwrap();
    let told: Vec<_> = chain.iter().map(|layer| (&layer["format"], &layer["state"])).collect();
    let found = serde_json::json!(["delta", "found", "plain", "found"]);
    assert_eq!(serde_json::json!([told[0].0, told[0].1, told[1].0, told[1].1]), found, "{info}");
    assert_eq!(told.len(), 2);
    image(&["info", &delta]).check(0, "below that");
    let map = image(&["map", &delta, "--json"]).json();
    let contents = map.as_array().unwrap().iter().map(|run| run["content"].as_str().unwrap());
    let contents: Vec<&str> = contents.collect();
    assert_eq!(contents, ["base", "data", "base", "data", "base", "zero", "base"], "{map}");

    image(&["export", &delta, &out]).check(1, "give that with `--base STORE`");
    image(&["export", &delta, &out, "--base", &folder.file("served.raw")]).check(1, "is not that");
    image(&["export", &delta, &out, "--base", &base_store, "--base", &folder.file("served.raw")])
        .check(1, "leave out this `--base`");
    image(&["export", &delta, &out, "--base", &base_store]).check(0, "12M");
    let (ours, theirs) =
        (std::fs::read(folder.path("out.raw")).unwrap(), std::fs::read(&served).unwrap());
    assert!(ours == theirs);
    // As a raw disk, it is copied as it is.
    image(&["import", &delta, &folder.file("copy.delta"), "--raw"]).check(0, "");
    let same = std::fs::read(folder.path("copy.delta")).unwrap();
    assert!(same == std::fs::read(folder.path("web.delta")).unwrap());

    // The snapshot from another place, and not found.
    std::fs::create_dir(folder.path("moved")).unwrap();
    std::fs::rename(folder.path("web.delta@one"), folder.path("moved/one")).unwrap();
    let moved = folder.file("moved/one");
    image(&["export", &delta, &folder.file("b.raw"), "--base", &base_store])
        .check(1, "no other folder is searched");
    image(&["export", &delta, &folder.file("b.raw"), "--base", &base_store, "--base", &moved])
        .check(0, "12M");
    assert!(std::fs::read(folder.path("b.raw")).unwrap() == theirs);
}
