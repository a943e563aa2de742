//! Operations whose system calls fail, one at a time: the volume is served afterwards as before or
//! as asked, its data is right, and the operation can be repeated.
//!
//! strace(1) injects the faults into the running daemon. It counts the calls of each thread, so
//! that a fault may happen in more than one thread of an operation. A sample is tried, and
//! all of them at a scale (`EBBD_TEST_SCALE`) of 700.

#![allow(clippy::print_stderr, reason = "the seed and the faults of a failure")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use testbed::harness::nbd::Client;
use testbed::harness::pattern::{Random, content};
use testbed::harness::process::until;
use testbed::harness::server::Setup;
use testbed::harness::tool::Outcome;
use testbed::{Error, Result, Server, check};

/// A time limit that only a hang exceeds.
const SOON: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
/// Faults in the sample at full scale, and at any scale: few operations make each call.
const SAMPLE: u64 = 64;
const LEAST: usize = 16;

/// System calls of changes of files, as strace names sets of them.
const CALLS: [&str; 9] = [
    "openat",
    "/^rename",
    "/^link",
    "/^unlink",
    "fsync",
    "fdatasync",
    "ftruncate",
    "fallocate",
    "/stat",
];
const OPERATIONS: [&str; 8] =
    ["add", "rename", "remove", "resize", "snapshot", "delete-snapshot", "flatten", "commit"];

/// A call that fails.
#[derive(Clone, Copy, Debug)]
struct Fault {
    operation: &'static str,
    calls: &'static str,
    number: u32,
}

/// The calls of a process fail until this is dropped.
struct Injector(Child);

impl Injector {
    fn attach(server: &Server, fault: Fault) -> Result<Injector> {
        let inject = format!("inject={}:error=EIO:when={}", fault.calls, fault.number);
        let mut command = Command::new("strace");
        command.args(["-f", "-o", "/dev/null", "-e"]).arg(inject).arg("-p");
        command.arg(server.pid()?.to_string()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(Error::io("start strace"))?;
        let stderr = child.stderr.take().ok_or_else(|| Error::unexpected("no output"))?;
        let injector = Injector(child);
        let mut lines = BufReader::new(stderr).lines().map_while(std::io::Result::ok);
        let attached = lines.find(|line| line.contains("attached"));
        check(attached.is_some(), || "strace has not attached".into())?;
        Ok(injector)
    }
}

impl Drop for Injector {
    fn drop(&mut self) {
        if let Some(pid) = Pid::from_raw(self.0.id().cast_signed()) {
            let _ = kill_process(pid, Signal::INT);
        }
        let _ = self.0.wait();
    }
}

/// A daemon with a volume of each kind, for one fault.
struct Round<'a> {
    server: &'a Server,
    fault: Fault,
    number: usize,
}

impl Round<'_> {
    fn name(&self, what: &str) -> String {
        format!("{what}{}", self.number)
    }

    fn file(&self, what: &str) -> String {
        format!("file:{}/{}", self.server.dir().display(), self.name(what))
    }

    fn ok(&self, words: &[&str]) -> Result {
        self.server.operator(words)?.ok().map(drop)
    }

    /// The state of each volume of this round that is known.
    fn states(&self) -> Result<Vec<(String, String)>> {
        let list = self.server.operator(&["volume", "list", "--json"])?.ok()?.json()?;
        let all = list.as_array().cloned().unwrap_or_default();
        let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        let all = all.iter().map(|volume| (text(&volume["name"]), text(&volume["state"])));
        let own = |name: &str| {
            let name = name.split('@').next().unwrap_or_default();
            name.trim_start_matches(|c: char| !c.is_ascii_digit()) == self.number.to_string()
        };
        Ok(all.filter(|(name, _)| own(name)).collect())
    }

    /// A base with data and an overlay above it whose first block was written, with a snapshot.
    fn prepare(&self) -> Result {
        let base = self.server.dir().join(self.name("base"));
        fs::write(base, content(1, 0, 1 << 20)).map_err(Error::io("write a base"))?;
        let (base, overlay) = (self.name("base"), self.name("disk"));
        self.ok(&["volume", "add", &base, &self.file("base"), "--read-only", "--persist"])?;
        let file = self.file("delta");
        let add = ["volume", "add", &overlay, &file, "--base", &base, "--create", "--persist"];
        self.ok(&add)?;
        let mut client = Client::open(&self.server.socket(), &overlay)?;
        client.write(0, &content(2, 0, 4096), 0)?;
        client.flush()?;
        drop(client);
        until("no client", SOON, || {
            let clients = self.server.operator(&["client", "list", "--json"])?.ok()?.json()?;
            Ok(clients.as_array().is_none_or(Vec::is_empty).then_some(()))
        })?;
        if self.fault.operation == "delete-snapshot" {
            self.ok(&["volume", "snapshot", &overlay, "old"])?;
        }
        Ok(())
    }

    fn carry_out(&self) -> Result<Outcome> {
        let (disk, to, new) = (self.name("disk"), self.name("new"), self.file("image"));
        let words = match self.fault.operation {
            "add" => {
                vec!["volume", "add", &to, &new, "--size", "1M", "--create", "--persist"]
            }
            "rename" => vec!["volume", "rename", &disk, &to],
            "remove" => vec!["volume", "remove", &disk],
            "resize" => vec!["volume", "resize", &disk, "2M"],
            "snapshot" => vec!["volume", "snapshot", &disk, "one"],
            "delete-snapshot" => vec!["volume", "delete-snapshot", &disk, "old"],
            "flatten" => vec!["volume", "flatten", &disk],
            _ => vec!["volume", "commit", &disk],
        };
        self.server.operator(&words)?.run()
    }

    /// All volumes are served, and the overlay has its data under one name.
    fn check_served(&self) -> Result {
        until("all are served", SOON, || {
            let all = self.states()?;
            let left = |name: &str, state: &str| {
                let removed = self.fault.operation == "remove" && name == self.name("disk");
                state == "serving" || (removed && state == "failed")
            };
            Ok(all.iter().all(|(name, state)| left(name, state)).then_some(()))
        })?;
        let names: Vec<_> =
            self.states()?.into_iter().filter(|(_, state)| state == "serving").collect();
        let has = |name: &str| names.iter().any(|(found, _)| *found == self.name(name));
        let overlay = match (has("disk"), has("new"), self.fault.operation) {
            (true, _, "add") | (true, false, _) => self.name("disk"),
            (false, true, "rename") => self.name("new"),
            (false, false, "remove") => return Ok(()),
            _ => return Err(Error::unexpected(format!("served: {names:?}"))),
        };
        let mut client = Client::open(&self.server.socket(), &overlay)?;
        check(client.read(0, 4096)? == content(2, 0, 4096), || "lost what was written".into())?;
        let below = client.read(4096, 4096)? == content(1, 4096, 4096);
        check(below, || "lost what the base holds".into())
    }

    /// The message of a failed operation agrees with the snapshot's file.
    fn check_said(&self, said: &str) -> Result {
        let inode = |end: &str| {
            let path = self.server.dir().join(self.name("delta") + end);
            fs::metadata(path).ok().map(|found| found.ino())
        };
        let (expected, words) = match self.fault.operation {
            "snapshot" => {
                let made = inode("@one").is_some_and(|made| Some(made) != inode(""));
                (made, "the snapshot was made")
            }
            "delete-snapshot" => {
                (inode("@old").is_some() && self.is_merged()?, "its file is still there")
            }
            _ => return Ok(()),
        };
        check(said.contains(words) == expected, || format!("`{words}` is not {expected}"))
    }

    /// The overlay no longer needs its snapshot.
    fn is_merged(&self) -> Result<bool> {
        let disk = self.name("disk");
        let shown = self.server.operator(&["volume", "show", &disk, "--json"])?.ok()?.json()?;
        Ok(shown["stat"]["layers"].as_u64().is_some_and(|layers| layers < 3))
    }

    /// Returns true if the operation has failed.
    fn run(&self) -> Result<bool> {
        self.prepare()?;
        let injector = Injector::attach(self.server, self.fault)?;
        let tool = self.carry_out()?;
        drop(injector);
        let explain = |error: Error| {
            let (fault, said) = (self.fault, &tool.stderr);
            Error::unexpected(format!("{fault:?}: {error}\n{said}"))
        };
        self.check_served().map_err(explain)?;
        let has_failed = !tool.status.success();
        if has_failed {
            eprintln!("{}", tool.stderr.trim_end());
            check(tool.stderr.contains(": "), || "no reason".into()).map_err(explain)?;
            self.check_said(&tool.stderr).map_err(explain)?;
            // What failed can be done now, unless it was done.
            let again = self.carry_out()?;
            let done =
                ["there is no", "exists", "there is a volume", "no writable overlay", "has none"];
            let is_done =
                again.status.success() || done.iter().any(|why| again.stderr.contains(why));
            check(is_done, || format!("again: {}", again.stderr)).map_err(explain)?;
            self.check_served().map_err(explain)?;
        }
        self.clear()?;
        Ok(has_failed)
    }

    /// Removes the volumes of the round.
    fn clear(&self) -> Result {
        let mut names: Vec<_> = self.states()?.into_iter().map(|(name, _)| name).collect();
        // Those above the others first.
        names.sort_by_key(|name| (name.starts_with("base"), name.clone()));
        for name in names {
            self.ok(&["volume", "remove", &name])?;
            // A snapshot stays while the file of its overlay needs it.
            if [self.name("disk"), self.name("new")].contains(&name) {
                let _ = fs::remove_file(self.server.dir().join(self.name("delta")));
            }
        }
        Ok(())
    }
}

#[test]
fn failing_call_leaves_the_volume_as_before_or_as_asked() -> Result {
    let mut faults: Vec<Fault> = Vec::new();
    for operation in OPERATIONS {
        for calls in CALLS {
            faults.extend((1..=3).map(|number| Fault { operation, calls, number }));
        }
    }
    let seed = seeded::seed("EBBD_TEST_SEED", 0x5eed);
    eprintln!("EBBD_TEST_SEED={seed}");
    let sample = usize::try_from(seeded::scaled(SAMPLE)).unwrap_or(usize::MAX);
    let sample = sample.clamp(LEAST, faults.len());
    if sample < faults.len() {
        let mut random = Random::new(seed);
        for at in 0..sample {
            let left = u64::try_from(faults.len() - at).unwrap_or(1);
            let other = at + usize::try_from(random.below(left)).unwrap_or(0);
            faults.swap(at, other);
        }
        faults.truncate(sample);
    }
    let setup = Setup::new()?.image("disk", MIB)?.args(["--workers", "1", "--sandbox", "off"]);
    let (state, control) = (setup.dir().join("state"), setup.dir().join("control.sock"));
    let setup = setup.arg("--state").arg(state).arg("--control").arg(control);
    let mut server = setup.start()?;
    let mut failed = 0;
    for (number, fault) in faults.into_iter().enumerate() {
        eprintln!("{fault:?}");
        failed += usize::from(Round { server: &server, fault, number }.run()?);
    }
    eprintln!("{failed} operations have failed");
    check(failed > 0, || "no fault was injected".into())?;
    server.stop()
}
