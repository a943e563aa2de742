//! Limits: asked and measured, over NBD with fio; and the shares of a group.
//!
//! The peer of a figure is what was asked for: the limit, or a third of what the group has passed. The shared-memory Xen
//! part is a program of `library-benches`, `limit-shm`.
//!
//! Invariants:
//! - The volumes are in the daemon's memory, so that only the limits slow the client down.
//! - Limits are set at run time with `ebbd limit`, before fio starts.
//! - A missed target is a result, not a failure: the line says `short`.

use std::io;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::figure::{Bar, Figure};
use super::fio::{self, Load, Until};
use super::server::Server;
use super::workdir::Workdir;
use super::{Error, Options, io_context, log, process};

/// How far a measured rate may be from the limit, and a share from the others.
const RATE: f64 = 0.03;
const SHARE: f64 = 0.05;

const IOPS: f64 = 5000.0;
const BANDWIDTH: f64 = 200e6;
const VOLUMES: [&str; 3] = ["disk", "second", "third"];
const BYTES: u64 = 256 << 20;

/// Runs all measurements the options ask for; returns how many failed to run.
///
/// # Errors
/// Nothing can be measured at all, or `print` fails.
pub fn run(
    options: &Options,
    mut print: impl FnMut(&Figure) -> io::Result<()>,
) -> Result<usize, Error> {
    let daemon = super::daemon_path()?;
    let work = Workdir::without_disk(&super::place()?)?;
    process::describe_load();
    let (mut failed, rig) = (0, Rig { options, daemon: &daemon, work: &work });
    for pattern in ["randread", "randwrite"] {
        for depth in [1, 64] {
            let asked = [
                (format!("limit_nbd_{pattern}_4k_qd{depth}_iops"), 4096, IOPS),
                (format!("limit_nbd_{pattern}_64k_qd{depth}_mb_per_s"), 65_536, BANDWIDTH / 1e6),
            ];
            for (name, block, asked) in asked {
                if !options.wants(&name) {
                    continue;
                }
                let load = Load { pattern, block, depth, connections: 1 };
                match rig.rate(load, name.ends_with("iops")) {
                    Ok(ours) => {
                        let bar = Bar::Within(RATE);
                        print(&Figure { name, ours, peer: Some(asked), bar })
                            .map_err(io_context("printing a figure"))?;
                    }
                    Err(error) => {
                        log(format_args!("{name}: {error}"));
                        failed += 1;
                    }
                }
            }
        }
    }
    for (name, depths) in [("equal", [16, 16, 16]), ("unequal", [64, 16, 4])] {
        let name = format!("limit_nbd_group_{name}_depths");
        if !options.wants(&name) {
            continue;
        }
        match rig.group(depths) {
            Ok(rates) => {
                let sum: f64 = rates.iter().sum();
                let figure = |name, ours, peer, most| Figure {
                    name,
                    ours,
                    peer: Some(peer),
                    bar: Bar::Within(most),
                };
                print(&figure(format!("{name}_sum_iops"), sum, 3.0 * IOPS, RATE))
                    .map_err(io_context("printing a figure"))?;
                for (volume, rate) in VOLUMES.iter().zip(rates) {
                    print(&figure(format!("{name}_{volume}_iops"), rate, sum / 3.0, SHARE))
                        .map_err(io_context("printing a figure"))?;
                }
            }
            Err(error) => {
                log(format_args!("{name}: {error}"));
                failed += 1;
            }
        }
    }
    Ok(failed)
}

struct Rig<'a> {
    options: &'a Options,
    daemon: &'a Path,
    work: &'a Workdir,
}

impl Rig<'_> {
    fn serve(&self) -> Result<Server, Error> {
        let (socket, control) = (self.work.path("disk.sock"), self.work.path("control.sock"));
        let mut command = Command::new(self.daemon);
        command.args(["serve", "--log", "warn", "--listen"]);
        command.arg(format!("unix:{}", socket.display())).arg("--control").arg(&control);
        for volume in VOLUMES {
            command.args(["--volume", &format!("{volume}=memory:{BYTES}")]);
        }
        Server::start("ebbd", command, socket, self.work.path("server.log"), VOLUMES)
    }

    fn limit(&self, arguments: &[&str]) -> Result<(), Error> {
        let mut limit = Command::new(self.daemon);
        limit.arg("limit").args(arguments).arg("--control").arg(self.work.path("control.sock"));
        process::run(limit, &self.work.path("client.log"), Duration::from_secs(60))
    }

    fn fio(&self, load: Load, server: &Server, volume: &str) -> Command {
        let report = self.work.path(&format!("{volume}.json"));
        let until = Until::Seconds(self.options.seconds);
        let mut fio = Command::new("fio");
        for argument in
            fio::arguments(load, BYTES, until, fio::Target::Nbd(server.socket()), &report)
        {
            match argument.to_str().and_then(|text| text.strip_prefix("--uri=nbd+unix:///disk")) {
                Some(rest) => fio.arg(format!("--uri=nbd+unix:///{volume}{rest}")),
                None => fio.arg(argument),
            };
        }
        fio
    }

    /// The rate of one load: requests per second, or 10^6 bytes per second.
    fn rate(&self, load: Load, requests: bool) -> Result<f64, Error> {
        let server = self.serve()?;
        match requests {
            true => self.limit(&["disk", "--iops", "5000"])?,
            false => self.limit(&["disk", "--bandwidth", "200000000"])?,
        }
        let time = Duration::from_secs(u64::from(self.options.seconds) + 60);
        process::run(self.fio(load, &server, "disk"), &self.work.path("client.log"), time)?;
        let outcome = fio::take_report(&self.work.path("disk.json"))?;
        server.stop()?;
        Ok(if requests { outcome.iops } else { outcome.megabytes })
    }

    /// The requests per second of three volumes of a group, at the same time.
    fn group(&self, depths: [u32; 3]) -> Result<Vec<f64>, Error> {
        let server = self.serve()?;
        self.limit(&["--group", "gold", "--iops", "15000"])?;
        for volume in VOLUMES {
            self.limit(&[volume, "--group", "gold"])?;
        }
        let mut running = Vec::new();
        for (volume, depth) in VOLUMES.into_iter().zip(depths) {
            let load = Load { pattern: "randread", block: 4096, depth, connections: 1 };
            running.push(Running::start(self.fio(load, &server, volume))?);
        }
        let time = Duration::from_secs(u64::from(self.options.seconds) + 60);
        for mut fio in running {
            process::finish(&mut fio.0, "fio", time)?;
        }
        let rate = |volume: &str| {
            fio::take_report(&self.work.path(&format!("{volume}.json"))).map(|fio| fio.iops)
        };
        let rates = VOLUMES.into_iter().map(rate).collect::<Result<_, _>>()?;
        server.stop()?;
        Ok(rates)
    }
}

/// A program that is ended when it is dropped.
struct Running(Child);

impl Running {
    fn start(mut command: Command) -> Result<Self, Error> {
        let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().map(Running).map_err(io_context("starting fio"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail if it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
