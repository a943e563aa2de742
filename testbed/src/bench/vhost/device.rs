//! What a device costs by itself: its rings, allocations, and memory while it does nothing.
//!
//! The program `ring-cost` and the test `warm` measure rings and allocations of the crate alone. Idle devices are
//! those of a running daemon: a client connects to a thousand, each with two queues that served a request.

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::servers::{Backend, Kind, Programs};
use crate::bench::figure::{Bar, Figure};
use crate::bench::workdir::Workdir;
use crate::bench::{command, place, process};
use crate::harness::binary;
use crate::{Error, Result, Tool};

/// Most nanoseconds of a request in a ring, in batches.
const RING_NS: f64 = 65.0;
/// Most bytes of the daemon's own memory for an idle device, KiB.
const DEVICE_KIB: f64 = 100.0;
/// Waking a worker to count its allocations takes some, of thousands of requests.
const ALLOCATIONS: f64 = 0.002;
const DEVICES: usize = 1000;
/// Time for the daemon to finish what the connections began: unused buffers are lent after a second.
const SETTLE: Duration = Duration::from_secs(3);

/// Name of the figure of allocations.
pub const ALLOCATED: &str = "vhost_warm_ring_allocations_per_req";
/// What the names of all figures of rings begin with.
pub const RING: &str = "vhost_ring_";
/// Names of the figures of idle devices.
pub const IDLE: [&str; 2] = ["vhost_idle_device_KiB", "vhost_idle_devices_answered"];

/// The cost of a request in a ring: of each format, in batches of 1 and of 32.
///
/// # Errors
/// The program cannot be built or run.
pub fn rings() -> Result<Vec<Figure>> {
    let program = binary::release("library-benches", "ring-cost")?;
    let outcome = Tool::new(program).arg("1").limit(Duration::from_secs(300)).ok()?;
    let mut figures = Vec::new();
    for line in outcome.stdout.lines() {
        // "split indirect inflight 32 41.7", or "-" for "inflight"
        let words: Vec<&str> = line.split(' ').collect();
        let [format, chain, inflight, batch, ns] = words[..] else {
            return Err(outcome.unexpected(&format!("a line of five words, not {line:?}")));
        };
        let inflight = if inflight == "-" { "" } else { "_inflight" };
        let bar = match batch {
            "1" => Bar::None,
            "32" => Bar::AtMost(RING_NS),
            _ => continue,
        };
        let ours = ns.parse().map_err(|_| outcome.unexpected("nanoseconds"))?;
        let name = format!("{RING}{format}_{chain}{inflight}_batch{batch}_ns");
        figures.push(Figure { name, ours, peer: None, bar });
    }
    Ok(figures)
}

/// Allocations of a queue that has served requests before: the most of three kinds of requests.
///
/// # Errors
/// The test cannot be built, or fails.
pub fn allocations() -> Result<Figure> {
    let outcome = Tool::new(env!("CARGO"))
        .args(["test", "--quiet", "--package", "ebb-export-vhost", "--test", "it"])
        .args(["warm::a_warm_queue_allocates_nothing", "--", "--nocapture"])
        .dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
        .limit(Duration::from_secs(1200))
        .ok()?;
    let per_request = |line: &str| -> Option<f64> {
        let (calls, requests) = line.strip_suffix(" requests")?.split_once(" allocations in ")?;
        Some(calls.parse::<f64>().ok()? / requests.parse::<f64>().ok()?)
    };
    let most = outcome.stderr.lines().filter_map(per_request).reduce(f64::max);
    let ours = most.ok_or_else(|| outcome.unexpected("a number of allocations"))?;
    Ok(Figure { name: ALLOCATED.into(), ours, peer: None, bar: Bar::AtMost(ALLOCATIONS) })
}

/// Memory of the daemon for each of a thousand idle devices, and how many still answer.
///
/// # Errors
/// The daemon or the client fails to run.
pub fn idle(programs: &Programs) -> Result<Vec<Figure>> {
    let bench = |error: crate::bench::Error| Error::unexpected(error.to_string());
    let work = Workdir::without_disk(&place().map_err(bench)?).map_err(bench)?;
    let (folder, config) = (work.path("s"), work.path("volumes.toml"));
    fs::create_dir(&folder).map_err(Error::io("make a directory"))?;
    let control = work.path("control.sock");
    let mut text = format!("log = \"warn\"\nvhost_user = {folder:?}\ncontrol = {control:?}\n");
    for number in 0..DEVICES {
        // Writing to a String does not fail.
        let _ = write!(text, "[volume.disk{number}]\nstore = \"null:1G\"\n");
    }
    fs::write(&config, text).map_err(Error::io("write the configuration"))?;
    let arguments = ["serve".into(), "--config".into(), config.display().to_string()];
    let program = programs.path(Kind::Ebbd).ok_or_else(|| Error::unexpected("no daemon"))?;
    let output = work.path("backend.log");
    let daemon = Backend::start(Kind::Ebbd, program, &arguments, &output).map_err(bench)?;
    wait_for(|| folder.join(format!("disk{}.sock", DEVICES - 1)).exists())?;
    std::thread::sleep(SETTLE);
    let anonymous = || process::anonymous_kib(daemon.pid()).map_err(bench);
    let before = anonymous()?;
    let mut holder = Holder::start(&folder)?;
    if holder.line()? != "ready" {
        return Err(Error::unexpected(format!("the client to connect: {}", daemon.said())));
    }
    std::thread::sleep(SETTLE);
    let each = (anonymous()? - before) / DEVICES as f64;
    let answered = holder.answered()?;
    drop(holder);
    daemon.stop().map_err(bench)?;
    let (all, [memory, answering]) = (DEVICES as f64, IDLE.map(String::from));
    Ok(vec![
        Figure { name: memory, ours: each, peer: None, bar: Bar::AtMost(DEVICE_KIB) },
        Figure { name: answering, ours: answered, peer: Some(all), bar: Bar::AtLeastRatio(1.0) },
    ])
}

fn wait_for(mut done: impl FnMut() -> bool) -> Result {
    let limit = std::time::Instant::now() + Duration::from_secs(60);
    while !done() {
        if std::time::Instant::now() > limit {
            return Err(Error::unexpected("the daemon to serve all devices within a minute"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// The client that holds all devices. It ends when it is dropped, at the latest after the daemon has replied to nothing for
/// a minute.
struct Holder {
    client: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Holder {
    fn start(folder: &std::path::Path) -> Result<Holder> {
        let mut client = Command::new(command::beside("vhost-load")?)
            .arg("hold")
            .arg(folder)
            .arg(DEVICES.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(Error::io("start the client"))?;
        let lines = client.stdout.take().ok_or_else(|| Error::unexpected("a pipe"))?;
        Ok(Holder { client, lines: BufReader::new(lines) })
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.lines.read_line(&mut line).map_err(Error::io("read what the client says"))?;
        Ok(line.trim().to_owned())
    }

    /// Has it use each device once more.
    fn answered(&mut self) -> Result<f64> {
        let input = self.client.stdin.as_mut().ok_or_else(|| Error::unexpected("a pipe"))?;
        input.write_all(b"\n").map_err(Error::io("tell the client"))?;
        let line = self.line()?;
        let count = line.strip_prefix("answered ").and_then(|count| count.parse().ok());
        count.ok_or_else(|| Error::unexpected(format!("a number of devices, not {line:?}")))
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // Both fail if it has ended.
        let _ = self.client.kill();
        let _ = self.client.wait();
    }
}
