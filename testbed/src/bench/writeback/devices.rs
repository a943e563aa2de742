//! A simulator's setup on real devices: an `nbdkit` for each, a daemon in front of them, a thread
//! for each writer, and one that samples the daemon.
//!
//! A device is `nbdkit --threads=1 --filter=rate null`: it serves one write after the other, at its
//! rate; `burstiness` is what it accepts at once after an idle time. One that dies is stopped
//! (SIGSTOP): connected, and silent. Writers write sequentially over a gigabyte, one write at a
//! time, no faster than their model; a write that takes longer than [`PAUSE`] counts as a pause,
//! including the time to the daemon and back.

use std::fmt::Write as _;
use std::io::{Read, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ebb_writeback::{BdiOptions, Nanos, SECOND};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use writeback_sim::device::Model;
use writeback_sim::real::PAUSE;
use writeback_sim::world::{SAMPLE, Sample, Setup, SimRun, WriterModel};

use crate::bench::server::Server;
use crate::bench::workdir::Workdir;
use crate::bench::{Error, io_context};
use crate::harness::nbd::{Client, Failure};

/// Size of each device and of the region a writer goes round in: more than is ever held.
const BYTES: u64 = 1 << 30;
/// The floor of the daemon's cache: more than is ever dirty, since writes that find no memory go to
/// the store at its speed.
const FLOOR: &str = "512M";

fn failed(program: &str, what: impl Into<String>) -> Error {
    Error::Failed { program: program.into(), what: what.into() }
}

fn nanos(time: Duration) -> Nanos {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The devices and the daemon of one run.
#[derive(Debug)]
pub struct Rig {
    devices: Vec<Server>,
    daemon: Server,
    control: PathBuf,
}

/// What a writer wrote, and when each of its pauses ended and how long it was.
type Waits = (u64, Vec<(Nanos, Nanos)>);
/// What was observed: statistics, writers, and signs of memory pressure.
type Watched = (Vec<Look>, Vec<Waits>, u64);

/// One sample of the daemon's statistics.
#[derive(Debug, Clone)]
struct Look {
    at: Nanos,
    devices: Vec<Sample>,
}

impl Rig {
    /// Starts what the setup describes.
    ///
    /// # Errors
    /// [`Error`] when something does not serve.
    pub fn start(daemon: &Path, work: &Workdir, setup: &Setup) -> Result<Rig, Error> {
        let mut devices = Vec::new();
        for (number, (model, _)) in setup.devices.iter().enumerate() {
            let rest = model.burst as f64 / model.rate as f64;
            let parameters = format!("rate={} burstiness={rest}", model.rate * 8);
            let parameters: Vec<&str> = parameters.split(' ').collect();
            devices.push(store(
                work,
                &format!("device{number}"),
                &[&["--filter=rate"], &parameters[..]].concat(),
            )?);
        }
        let mut text = String::new();
        for (number, (_, options)) in setup.devices.iter().enumerate() {
            bounds(&mut text, number, options);
        }
        for (number, writer) in setup.writers.iter().enumerate() {
            let device = devices
                .get(writer.device)
                .ok_or_else(|| failed("the setup", "a writer on no device"))?;
            // Writing to a String does not fail.
            let _ = write!(
                text,
                "[volume.w{number}]\nstore = \"nbd+unix:///w{number}?socket={}\"\ncache = \"writeback\"\n\
                 bdi = \"d{}\"\n",
                device.socket().display(),
                writer.device,
            );
        }
        let config = work.path("real.toml");
        std::fs::write(&config, text).map_err(io_context("writing the configuration"))?;
        let (socket, control) = (work.path("real.sock"), work.path("real.ctl"));
        let mut command = Command::new(daemon);
        command.args(["serve", "--log", "warn", "--drain", "1", "--config"]).arg(config);
        command.arg("--control").arg(&control);
        // Half of the cache may be dirty.
        command.arg("--cache-max").arg((setup.limit * 2).to_string()).args(["--cache-min", FLOOR]);
        command.arg("--listen").arg(format!("unix:{}", socket.display()));
        let names: Vec<String> =
            (0..setup.writers.len()).map(|number| format!("w{number}")).collect();
        let names = names.iter().map(String::as_str);
        let daemon = Server::start("ebbd", command, socket, work.path("real.log"), names)?;
        // Devices begin idle.
        thread::sleep(Duration::from_millis(500));
        Ok(Rig { devices, daemon, control })
    }

    /// Runs the writers, and samples the daemon. Also returns how many signs of memory pressure the
    /// daemon had to respond to: a run with some does not match its description.
    ///
    /// # Errors
    /// [`Error`] when a writer or the daemon fails.
    pub fn run(&self, setup: &Setup) -> Result<(SimRun, u64), Error> {
        let ended = AtomicBool::new(false);
        let start = Instant::now();
        let result: Result<Watched, Error> = thread::scope(|scope| {
            let writers: Vec<_> = (0..)
                .zip(&setup.writers)
                .map(|(number, model)| {
                    scope.spawn(move || self.write(number, model, setup.length, start))
                })
                .collect();
            let watch = scope.spawn(|| self.watch(start, setup, &ended));
            for (device, (model, _)) in self.devices.iter().zip(&setup.devices) {
                if let Some(dies) = model.dies {
                    thread::sleep(Duration::from_nanos(dies).saturating_sub(start.elapsed()));
                    signal(device, Signal::STOP)?;
                }
            }
            thread::sleep(Duration::from_nanos(setup.length).saturating_sub(start.elapsed()));
            ended.store(true, Ordering::SeqCst);
            let looks = watch.join().map_err(|_| failed("the watcher", "panicked"))??;
            let pressure = pressure(&self.control)?;
            // A writer that waits for a device that died ends when the daemon is killed.
            signal(&self.daemon, Signal::KILL)?;
            let waits = writers
                .into_iter()
                .map(|writer| writer.join().map_err(|_| failed("a writer", "panicked"))?);
            let waits = waits.collect::<Result<Vec<_>, Error>>()?;
            Ok((looks, waits, pressure))
        });
        for device in &self.devices {
            // A stopped process must be killed.
            signal(device, Signal::CONT)?;
        }
        let (looks, waits, pressure) = result?;
        Ok((assemble(setup, &looks, waits), pressure))
    }

    /// One writer: the bytes it wrote, and its pauses. It ends with its span, or with the daemon.
    fn write(
        &self,
        number: usize,
        model: &WriterModel,
        length: Nanos,
        start: Instant,
    ) -> Result<Waits, Error> {
        let mut client = Client::open(self.daemon.socket(), &format!("w{number}"))?;
        let request = usize::try_from(model.request).unwrap_or(usize::MAX);
        let data = vec![0x5a; request];
        let end = model.span.1.min(length);
        thread::sleep(Duration::from_nanos(model.span.0).saturating_sub(start.elapsed()));
        let (mut accepted, mut waits) = (0, Vec::new());
        let each = u128::from(model.request) * u128::from(SECOND) / u128::from(model.speed.max(1));
        let each = Duration::from_nanos(u64::try_from(each).unwrap_or(u64::MAX));
        loop {
            let asked = start.elapsed();
            if nanos(asked) >= end {
                return Ok((accepted, waits));
            }
            let written = client.write(accepted % BYTES, &data, 0);
            let now = start.elapsed();
            match written {
                Ok(()) => accepted += model.request,
                // Killed at the end of the run.
                Err(Failure::Io(_)) if nanos(now) >= length => return Ok((accepted, waits)),
                Err(error) => return Err(error.into()),
            }
            if nanos(now - asked) >= PAUSE {
                waits.push((nanos(now), nanos(now - asked)));
            }
            // No faster than its model: what was slept too long is not made up for.
            if let Some(left) =
                (asked + each).checked_sub(now).filter(|left| *left > Duration::from_micros(100))
            {
                thread::sleep(left);
            }
        }
    }

    fn watch(&self, start: Instant, setup: &Setup, ended: &AtomicBool) -> Result<Vec<Look>, Error> {
        let mut looks = Vec::new();
        while !ended.load(Ordering::SeqCst) {
            let asked = nanos(start.elapsed());
            let answer = get(&self.control, "/v1/bdis")?;
            let at = u64::midpoint(asked, nanos(start.elapsed()));
            looks.push(Look { at, devices: samples(&answer, setup)? });
            let next = (at / SAMPLE + 1) * SAMPLE;
            thread::sleep(Duration::from_nanos(next).saturating_sub(start.elapsed()));
        }
        Ok(looks)
    }
}

/// Starts an `nbdkit` that discards writes, with these options and parameters: one request at a
/// time unless they say otherwise. Its export is `disk`.
///
/// # Errors
/// [`Error`] when it does not serve.
pub fn store(work: &Workdir, name: &str, more: &[&str]) -> Result<Server, Error> {
    let socket = work.path(&format!("{name}.sock"));
    let mut command = Command::new("nbdkit");
    command.args(["--foreground", "--threads=1", "--unix"]).arg(&socket);
    let (filters, parameters): (Vec<&str>, Vec<&str>) =
        more.iter().copied().partition(|word| word.starts_with("--"));
    command.args(filters).arg("null").arg(BYTES.to_string()).args(parameters);
    Server::start("nbdkit", command, socket, work.path(&format!("{name}.log")), ["disk"])
}

/// The table of a device's bounds.
fn bounds(text: &mut String, number: usize, options: &BdiOptions) {
    let BdiOptions { max_bytes, strict_limit, .. } = options;
    // Writing to a String does not fail.
    let _ = writeln!(text, "[bdi.d{number}]\nstrict_limit = {strict_limit}");
    if *max_bytes != u64::MAX {
        let _ = writeln!(text, "max_bytes = {max_bytes}");
    }
}

fn signal(server: &Server, signal: Signal) -> Result<(), Error> {
    let pid = i32::try_from(server.pid()).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| failed("a server", "has no process id"))?;
    kill_process(pid, signal).map_err(|error| io_context("sending a signal")(error.into()))
}

/// The reply of the control socket.
fn get(control: &Path, path: &str) -> Result<Value, Error> {
    let asking = || io_context(format!("asking for {path}"));
    let mut stream = UnixStream::connect(control).map_err(asking())?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).map_err(asking())?;
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n").map_err(asking())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).map_err(asking())?;
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    serde_json::from_str(body)
        .map_err(|error| Error::Output { from: "the control socket", what: error.to_string() })
}

/// Signs of memory pressure that the daemon responded to.
///
/// # Errors
/// [`Error`] when it does not reply.
pub fn pressure(control: &Path) -> Result<u64, Error> {
    let stat = get(control, "/v1/stat")?;
    let events = stat["pressure"]["events"].as_array().cloned().unwrap_or_default();
    Ok(events.iter().skip(1).filter_map(Value::as_u64).sum())
}

/// A number of the only backing device.
///
/// # Errors
/// [`Error`] when the daemon does not reply, or has no such number.
pub fn bdi(control: &Path, field: &str) -> Result<u64, Error> {
    let answer = get(control, "/v1/bdis")?;
    answer[0][field].as_u64().ok_or_else(|| Error::Output {
        from: "the control socket",
        what: format!("no {field} in {answer}"),
    })
}

/// The devices in the order of the setup.
fn samples(answer: &Value, setup: &Setup) -> Result<Vec<Sample>, Error> {
    let all = answer.as_array().map_or(&[][..], Vec::as_slice);
    let of = |(number, (model, _)): (usize, &(Model, BdiOptions))| {
        let name = format!("d{number}");
        let bdi = all.iter().find(|bdi| bdi["name"] == name.as_str());
        let field = |field: &str| bdi.and_then(|bdi| bdi[field].as_u64());
        let sample = || {
            let written = field("written_bytes")?;
            Some(Sample {
                threshold: field("threshold_bytes")?,
                held: field("dirty_bytes")? + field("writeback_bytes")?,
                bandwidth: field("bandwidth_bytes_per_second")?,
                // What it wrote is the time it took: it has a rate.
                busy: nanos(Duration::from_secs_f64(written as f64 / model.rate as f64)),
                written,
            })
        };
        sample().ok_or_else(|| Error::Output {
            from: "the control socket",
            what: format!("no figures of {name} in {answer}"),
        })
    };
    setup.devices.iter().enumerate().map(of).collect()
}

/// Converts samples at uneven times to even ones: each is the last sample before it.
fn assemble(setup: &Setup, looks: &[Look], waits: Vec<Waits>) -> SimRun {
    let mut run = SimRun { devices: vec![Vec::new(); setup.devices.len()], ..SimRun::default() };
    let mut last = vec![Sample::default(); setup.devices.len()];
    let mut looks = looks.iter().peekable();
    for at in (0..=setup.length).step_by(usize::try_from(SAMPLE).unwrap_or(1)) {
        while let Some(look) = looks.next_if(|look| look.at <= at) {
            last.clone_from(&look.devices);
        }
        for (samples, sample) in run.devices.iter_mut().zip(&last) {
            samples.push(*sample);
        }
    }
    for (accepted, pauses) in waits {
        run.accepted.push(accepted);
        run.pauses.push(pauses);
    }
    run
}

#[cfg(test)]
mod tests {
    use super::*;
    use writeback_sim::law::Law;

    #[test]
    fn uneven_samples_become_even_ones() {
        let scenario = writeback_sim::real::ALL[3];
        let setup = Setup { length: 4 * SAMPLE, ..(scenario.setup)(Law::Horizon) };
        let look = |at, held| {
            let sample = Sample { held, ..Sample::default() };
            Look { at, devices: vec![sample, Sample::default()] }
        };
        let looks = [look(1, 5), look(SAMPLE + 1, 6), look(SAMPLE + 2, 7), look(4 * SAMPLE, 9)];
        let run = assemble(&setup, &looks, vec![(10, vec![(1, 2)])]);
        let held: Vec<u64> = run.devices[0].iter().map(|sample| sample.held).collect();
        assert_eq!(held, [0, 5, 7, 7, 9]);
        assert_eq!((run.accepted, run.pauses), (vec![10], vec![vec![(1, 2)]]));
    }

    #[test]
    fn statistics_are_read_by_name_and_missing_ones_are_reported() {
        let setup = (writeback_sim::real::ALL[4].setup)(Law::Horizon);
        let full = serde_json::json!([{"name": "d0", "written_bytes": 60_000_000,
            "threshold_bytes": 7, "dirty_bytes": 3, "writeback_bytes": 2,
            "bandwidth_bytes_per_second": 9}]);
        let sample = samples(&full, &setup).unwrap()[0];
        assert_eq!((sample.held, sample.threshold, sample.busy), (5, 7, SECOND));
        assert!(samples(&serde_json::json!([]), &setup).unwrap_err().to_string().contains("d0"));
        let mut text = String::new();
        bounds(&mut text, 0, &setup.devices[0].1);
        assert_eq!(text, "[bdi.d0]\nstrict_limit = true\nmax_bytes = 7000000\n");
    }
}
