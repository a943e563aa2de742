//! One daemon with healthy volumes, and perhaps a dead one, taken through load, reload, resize and stop.

use std::fmt::Write as _;
use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::harness::nbd::{Handshake, wire};

use super::super::{Error, io_context, process};
use super::dead::{Dead, SIZE};
use super::load;

/// After so long a step counts as hanging.
pub(super) const HANG: Duration = Duration::from_secs(120);
/// Seconds the daemon gives a dead volume at a stop.
const DRAIN: &str = "10";
/// Healthy volumes, and bytes of each.
const HEALTHY: usize = 4;
const VOLUME: u64 = 256 << 20;
/// Acknowledged and not flushed on each healthy volume before a stop, bytes.
const DIRTY: u64 = 16 << 20;
/// Memory limit of the daemon's control group while its ceiling is being exhausted, bytes.
const GROUP_LIMIT: u64 = 256 << 20;
const GROUPS: &str = "/sys/fs/cgroup/memory";

/// How the memory ceiling is kept exhausted during the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Siege {
    /// It is not.
    None,
    /// 64 clients announce writes of 32 MiB and send 1,000 bytes.
    Headers,
    /// 16 clients of the silent store have two writes of 31 MiB each in flight.
    SilentStore,
}

impl Siege {
    pub(super) fn suffix(self) -> &'static str {
        match self {
            Siege::None => "",
            Siege::Headers => "_64_headers",
            Siege::SilentStore => "_16_clients",
        }
    }
}

pub(super) struct Rig {
    dir: tempfile::TempDir,
    child: Child,
    daemon: PathBuf,
    cache: &'static str,
    dead: Option<String>,
    group: Option<PathBuf>,
    /// Held open: requests that wait for the dead store.
    _waiting: Vec<UnixStream>,
}

impl Rig {
    pub(super) fn start(
        daemon: &Path,
        place: &Path,
        cache: &'static str,
        dead: Option<&Dead>,
        siege: Siege,
    ) -> Result<Rig, Error> {
        let dir = tempfile::tempdir_in(place).map_err(io_context("a directory"))?;
        let log = File::create(dir.path().join("log")).map_err(io_context("the log"))?;
        write_config(dir.path(), cache, dead.map(Dead::uri).as_deref(), false)?;
        let group = if siege == Siege::None { None } else { Some(limited_group()?) };
        let mut command = match &group {
            None => Command::new(daemon),
            // The shell enters the group, then becomes the daemon.
            Some(group) => {
                let mut shell = Command::new("sh");
                shell.args(["-c", "echo $$ >\"$0\" && exec \"$@\""]);
                shell.arg(group.join("cgroup.procs")).arg(daemon);
                shell
            }
        };
        // At this level the log tells when each volume is closed.
        command
            .args(["serve", "--log", "debug", "--drain", DRAIN, "--config"])
            .arg(dir.path().join("ebbd.toml"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child = command.spawn().map_err(|source| Error::Tool {
            program: daemon.display().to_string(),
            remedy: "build it with `cargo build --release -p ebbd`, or set EBBD_BIN",
            source,
        })?;
        let mut rig = Rig {
            dir,
            child,
            daemon: daemon.to_owned(),
            cache,
            dead: dead.map(Dead::uri),
            group,
            _waiting: Vec::new(),
        };
        rig.until("readiness", |rig| rig.log().contains("ready volumes"))?;
        if let Some(dead) = dead {
            dead.die()?;
            rig.wait_on_the_dead(siege)?;
        }
        Ok(rig)
    }

    fn wait_on_the_dead(&mut self, siege: Siege) -> Result<(), Error> {
        let socket = self.socket();
        let few =
            [(wire::CMD_WRITE, 0, 4096), (wire::CMD_READ, 1 << 20, 4096), (wire::CMD_FLUSH, 0, 0)];
        for _ in 0..4 {
            self._waiting.push(load::in_flight(&socket, "dead", &few)?);
        }
        match siege {
            Siege::None => {}
            Siege::Headers => {
                for _ in 0..64 {
                    self._waiting.push(load::header_only(&socket, "victim", 32 << 20)?);
                }
            }
            Siege::SilentStore => {
                let large = [(wire::CMD_WRITE, 0, 31 << 20), (wire::CMD_WRITE, 64 << 20, 31 << 20)];
                for _ in 0..16 {
                    self._waiting.push(load::in_flight(&socket, "dead", &large)?);
                }
            }
        }
        Ok(())
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("nbd.sock")
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// The 99th percentile of the healthy volumes' latencies, microseconds.
    pub(super) fn load(&mut self, seconds: u32) -> Result<f64, Error> {
        load::p99(&self.socket(), &healthy(), seconds)
    }

    /// Adds a healthy volume and removes one; seconds until clients see both.
    pub(super) fn reload(&mut self) -> Result<f64, Error> {
        write_config(self.dir.path(), self.cache, self.dead.as_deref(), true)?;
        let begun = Instant::now();
        process::signal(&self.child, Signal::HUP)?;
        self.until("the reload", |rig| {
            let names = Handshake::connect(&rig.socket()).and_then(|mut shake| shake.list());
            names.is_ok_and(|names| {
                names.iter().any(|name| name == "added")
                    && !names.iter().any(|name| name == "removed")
            })
        })?;
        Ok(begun.elapsed().as_secs_f64())
    }

    /// Has a healthy volume grow; seconds.
    pub(super) fn resize(&mut self) -> Result<f64, Error> {
        let begun = Instant::now();
        let mut command = Command::new(&self.daemon);
        command
            .args(["volume", "resize", "h0", "512M", "--wait", "--control"])
            .arg(self.dir.path().join("control.sock"));
        process::run(command, &self.dir.path().join("resize"), HANG)?;
        Ok(begun.elapsed().as_secs_f64())
    }

    /// Seconds from SIGTERM until every healthy volume is closed: written back and flushed.
    pub(super) fn stop(&mut self) -> Result<f64, Error> {
        for volume in healthy() {
            load::dirty(&self.socket(), &volume, DIRTY)?;
        }
        let begun = Instant::now();
        process::signal(&self.child, Signal::TERM)?;
        self.until("the stop of healthy volumes", |rig| {
            let log = rig.log();
            healthy().iter().all(|name| {
                let volume = format!("volume=\"{name}\"");
                log.lines().any(|line| line.contains("volume closed") && line.contains(&volume))
            })
        })?;
        Ok(begun.elapsed().as_secs_f64())
    }

    /// Waits for the daemon's end.
    pub(super) fn finish(&mut self) -> Result<(), Error> {
        process::finish(&mut self.child, "ebbd", HANG).map(drop)
    }

    fn until(&mut self, what: &str, done: impl Fn(&Rig) -> bool) -> Result<(), Error> {
        let begun = Instant::now();
        while !done(self) {
            let gone = self.child.try_wait().map_err(io_context("waiting for ebbd"))?;
            // Its last lines may have been written after the log was read.
            if (gone.is_some() && !done(self)) || begun.elapsed() > HANG {
                let tail = process::tail(&self.dir.path().join("log"));
                let what = format!("{what} does not end ({gone:?}); its log: {tail}");
                return Err(Error::Failed { program: "ebbd".to_owned(), what });
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        // The daemon has ended already after a successful stop.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(group) = &self.group {
            let _ = std::fs::remove_dir(group);
        }
    }
}

fn healthy() -> Vec<String> {
    (0..HEALTHY).map(|number| format!("h{number}")).collect()
}

fn write_config(dir: &Path, cache: &str, dead: Option<&str>, changed: bool) -> Result<(), Error> {
    let at = |name: &str| dir.join(name).display().to_string();
    let mut text = format!(
        "listen = [\"unix:{}\"]\ncontrol = \"unix:{}\"\n[nbd]\nmax_clients = 256\n",
        at("nbd.sock"),
        at("control.sock")
    );
    let mut names = healthy();
    names.push("victim".to_owned());
    names.push(if changed { "added" } else { "removed" }.to_owned());
    for name in &names {
        let store = at(&format!("{name}.img"));
        // Text into a string: that cannot fail.
        let _ = write!(
            text,
            "[volume.{name}]\nstore = \"file:{store}\"\nsize = \"{VOLUME}\"\ncreate = true\ncache = \"{cache}\"\n"
        );
    }
    if let Some(uri) = dead {
        let _ = write!(text, "[volume.dead]\nstore = \"{uri}\"\ncache = \"{cache}\"\n");
    }
    std::fs::write(dir.join("ebbd.toml"), text).map_err(io_context("the configuration"))
}

/// A memory control group (version 1) of its own with a limit.
fn limited_group() -> Result<PathBuf, Error> {
    let group = Path::new(GROUPS).join(format!("bench-outage-{}", std::process::id()));
    let context = || io_context("a memory control group (version 1, as root) under /sys/fs/cgroup");
    std::fs::create_dir_all(&group).map_err(context())?;
    std::fs::write(group.join("memory.limit_in_bytes"), GROUP_LIMIT.to_string())
        .map_err(context())?;
    Ok(group)
}

const _: () = assert!(SIZE >= 128 << 20, "requests in flight lie within the dead store");
