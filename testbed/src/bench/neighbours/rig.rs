//! A daemon with a unix socket and a TLS port, a sink, and the flood.

use std::fs::File;
use std::io::Read;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::super::{Error, io_context, log, process};
use super::{Key, flood, reader};
use crate::harness::tls::{Authority, Role};

/// After so long a step counts as hanging.
const HANG: Duration = Duration::from_secs(60);
/// Before it is measured, the flood goes on for so long: the daemon answers some seconds of handshakes that come
/// at once without a rest, and that is over then.
const WARM_UP: Duration = Duration::from_secs(4);

/// Where the flood goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    Daemon = 0,
    Sink = 1,
}

pub(super) struct Rig {
    dir: tempfile::TempDir,
    child: Child,
    daemon: SocketAddr,
    sink: SocketAddr,
    processors: CpuSet,
}

/// Binds the calling thread, and what it starts from now on, to one of the processors it may use: `part` 0 is the
/// first, 1 the second (the first again if there is no other).
fn bind_to(all: &CpuSet, part: usize) -> Result<(), Error> {
    let numbers: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|number| all.is_set(*number)).collect();
    let Some(number) = numbers.get(part).or(numbers.first()) else { return Ok(()) };
    let mut one = CpuSet::new();
    one.set(*number);
    sched_setaffinity(None, &one)
        .map_err(|error| io_context("binding to a processor")(error.into()))
}

/// A port that was free a moment ago.
fn free_address() -> Result<SocketAddr, Error> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(io_context("finding a port"))?;
    listener.local_addr().map_err(io_context("finding a port"))
}

/// A listener that reads and discards, until the process ends.
fn sink() -> Result<SocketAddr, Error> {
    let context = || io_context("a listener on loopback");
    let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(context())?;
    let address = listener.local_addr().map_err(context())?;
    std::thread::spawn(move || {
        // As many as the flood keeps open, and a few: the oldest are looked at first.
        let mut open = std::collections::VecDeque::new();
        let mut buf = [0; 4096];
        for mut stream in listener.incoming().flatten() {
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            while matches!(stream.read(&mut buf), Ok(1..)) {}
            open.push_back(stream);
            if open.len() > 128
                && let Some(mut oldest) = open.pop_front()
            {
                while matches!(oldest.read(&mut buf), Ok(1..)) {}
            }
        }
    });
    Ok(address)
}

impl Rig {
    pub(super) fn start(daemon: &Path, place: &Path, key: Key) -> Result<Rig, Error> {
        let failed = |error: crate::Error| Error::Failed {
            program: "certtool".to_owned(),
            what: error.to_string(),
        };
        let processors = sched_getaffinity(None)
            .map_err(|error| io_context("reading the processors of this process")(error.into()))?;
        // The sink belongs to the flood's side.
        bind_to(&processors, 1)?;
        let sink = sink()?;
        bind_to(&processors, 0)?;
        let dir = tempfile::tempdir_in(place).map_err(io_context("a directory"))?;
        let authority = Authority::new(dir.path().join("authority")).map_err(failed)?;
        let folder = dir.path().join("server");
        match key {
            Key::EcdsaP256 => authority.issue(Role::Server, &folder),
            Key::Rsa4096 => authority.issue_rsa(Role::Server, 4096, &folder),
        }
        .map_err(failed)?;
        let image = File::create(dir.path().join("disk.img")).map_err(io_context("the image"))?;
        image.set_len(reader::VOLUME).map_err(io_context("the image"))?;
        let log = File::create(dir.path().join("log")).map_err(io_context("the log"))?;
        let address = free_address()?;
        let mut command = Command::new(daemon);
        command.args(["serve", "--tls", "on", "--listen"]);
        command.arg(format!("unix:{}", dir.path().join("nbd.sock").display()));
        command.arg("--listen").arg(format!("tcp:{address}"));
        command.arg("--tls-certificates").arg(&folder);
        command.arg("--volume").arg(format!("disk=file:{}", dir.path().join("disk.img").display()));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child = command.spawn().map_err(|source| Error::Tool {
            program: daemon.display().to_string(),
            remedy: "build it with `cargo build --release -p ebbd`, or set EBBD_BIN",
            source,
        })?;
        let mut rig = Rig { dir, child, daemon: address, sink, processors };
        rig.ready()?;
        Ok(rig)
    }

    fn ready(&mut self) -> Result<(), Error> {
        let begun = Instant::now();
        loop {
            match flood::answered(self.daemon) {
                Ok(bytes) => {
                    log(format_args!("a ClientHello is answered with {bytes} bytes"));
                    return Ok(());
                }
                Err(error) if begun.elapsed() > HANG => return Err(self.failed(error)),
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
            if self.child.try_wait().map_err(io_context("waiting for ebbd"))?.is_some() {
                return Err(self.failed("ended at once"));
            }
        }
    }

    fn failed(&self, what: impl std::fmt::Display) -> Error {
        let tail = process::tail(&self.dir.path().join("log"));
        Error::Failed { program: "ebbd".to_owned(), what: format!("{what}; its log: {tail}") }
    }

    /// Reads a second of a client on the unix socket, beside the flood if there is one.
    pub(super) fn reads(
        &mut self,
        depth: usize,
        time: Duration,
        target: Option<Target>,
    ) -> Result<f64, Error> {
        let socket = self.dir.path().join("nbd.sock");
        let Some(target) = target else { return reader::rate(&socket, depth, time) };
        if target == Target::Daemon {
            flood::answered(self.daemon).map_err(|error| self.failed(error))?;
        }
        let address = if target == Target::Daemon { self.daemon } else { self.sink };
        let own = std::env::current_exe().map_err(io_context("finding this program's own path"))?;
        let mut command = Command::new(own);
        // It outlasts the measurement.
        let seconds = (time + WARM_UP).as_secs() + 2;
        command.args([flood::ARGUMENT, &address.to_string(), &seconds.to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        bind_to(&self.processors, 1)?;
        let child = command.spawn().map_err(io_context("starting the flood"));
        bind_to(&self.processors, 0)?;
        let mut child = child?;
        std::thread::sleep(WARM_UP);
        let rate = reader::rate(&socket, depth, time);
        process::finish(&mut child, "the flood", HANG + time)?;
        let mut said = String::new();
        let mut pipe = child.stdout.take();
        let read = pipe.as_mut().map(|pipe| pipe.read_to_string(&mut said));
        read.transpose().map_err(io_context("reading what the flood did"))?;
        let rate = rate?;
        let said = said.trim();
        log(format_args!(
            "beside a flood of the {target:?}: {rate:.0} reads/s; in {seconds} s it opened, and had answered: {said}"
        ));
        Ok(rate)
    }

    /// Stops the daemon, which must succeed.
    pub(super) fn stop(&mut self) -> Result<(), Error> {
        process::signal(&self.child, Signal::TERM)?;
        let status = process::finish(&mut self.child, "ebbd", HANG)?;
        if status.success() { Ok(()) } else { Err(self.failed(status)) }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ = sched_setaffinity(None, &self.processors);
        // The daemon has ended already after a successful stop.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
