//! A start of the program: what is open before all stores are, what the status says of volumes that
//! no client has used, and which volumes are kept for the next start.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Output, Stdio};

const EBBD: &str = env!("CARGO_BIN_EXE_ebbd");

struct Daemon {
    child: Child,
    log: BufReader<ChildStderr>,
    control: PathBuf,
}

impl Daemon {
    /// A daemon on this configuration in `folder`, which may not be ready yet.
    fn begin(folder: &Path, name: &str, config: &str) -> Daemon {
        let file = folder.join(format!("{name}.toml"));
        let control = folder.join(format!("{name}.control"));
        fs::write(&file, config.replace("DIR", folder.to_str().expect("UTF-8"))).expect("written");
        let mut child = command()
            .args(["serve", "--config", file.to_str().expect("UTF-8")])
            .args(["--control", control.to_str().expect("UTF-8")])
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let log = BufReader::new(child.stderr.take().expect("piped"));
        Daemon { child, log, control }
    }

    /// Reads the log up to a line with `text`, and returns what was read.
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

    fn run(&self, args: &[&str]) -> Output {
        command().args(args).env("EBBD_CONTROL", &self.control).output().expect("it starts")
    }

    /// What a command that succeeds prints.
    #[track_caller]
    fn says(&self, args: &[&str]) -> String {
        let output = self.run(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{args:?}: {stderr}");
        String::from_utf8(output.stdout).expect("UTF-8")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn command() -> Command {
    let mut command = Command::new(EBBD);
    for variable in ["LISTEN_FDS", "LISTEN_PID", "EBBD_CONTROL", "NOTIFY_SOCKET"] {
        command.env_remove(variable);
    }
    // The pressure of this host must not affect the test.
    command.env("MEMORY_PRESSURE_WATCH", "/dev/null").stdin(Stdio::null());
    command
}

#[test]
fn a_daemon_that_has_not_needed_its_server_is_healthy() {
    let folder = tempfile::tempdir().expect("a folder");
    let served = "listen = ['unix:DIR/server']\n[volume.far]\nstore = 'memory:1M'\n";
    let mut server = Daemon::begin(folder.path(), "far", served);
    server.wait_for("ready");
    let remote = "listen = ['unix:DIR/near']\n[volume.near]\n\
                  store = 'nbd+unix:///far?socket=DIR/server'\n";
    let mut daemon = Daemon::begin(folder.path(), "near", remote);
    daemon.wait_for("ready");
    assert!(daemon.says(&["status"]).starts_with("ok"), "{}", daemon.says(&["status"]));
    assert!(daemon.says(&["stat", "remote"]).contains("no request has needed it yet"));
}

#[test]
fn only_a_volume_that_ends_with_the_daemon_needs_to_be_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    let config =
        "listen = ['unix:DIR/nbd']\nstate = 'DIR/state'\n[volume.disk]\nstore = 'memory:1M'\n";
    let mut daemon = Daemon::begin(folder.path(), "kept", config);
    daemon.wait_for("ready");
    daemon.says(&["volume", "add", "added", "null:1M"]);
    let persist = |name| daemon.says(&["volume", "persist", name]);
    let memory =
        "disk: nothing to do, the configuration keeps it, without its data, which is in memory\n";
    assert_eq!(persist("disk"), memory);
    assert_eq!(persist("added"), "added: kept for the next start\n");
    assert!(folder.path().join("state/volumes/added.toml").exists());
}

#[test]
fn reload_that_replaces_a_disk_in_memory_warns_of_the_loss() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = "listen = ['unix:DIR/nbd']\n[volume.disk]\nstore = 'memory:4M'\n";
    let mut daemon = Daemon::begin(folder.path(), "loss", config);
    daemon.wait_for("ready");
    let file = folder.path().join("loss.toml");
    let text = fs::read_to_string(&file).expect("it is there");
    fs::write(&file, text.replace("4M", "2M")).expect("written");
    daemon.says(&["reload"]);
    let log = daemon.wait_for("reloaded");
    assert!(log.contains("its content in memory was lost"), "{log}");
}
