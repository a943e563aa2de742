//! What every measurement is made of: stores (`nbdkit`), daemons in front of them, loads.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::stat::Stat;
use super::{Error, Options, log};
use crate::Tool;
use crate::bench::fio::{self, Load, Outcome, Until};
use crate::bench::process;
use crate::bench::server::Server;
use crate::bench::workdir::Workdir;
use crate::harness::nbd::{Client, Failure};
use crate::harness::pattern::Random;

/// A MiB, in bytes.
pub const MIB: u64 = 1 << 20;
/// The piece in which [`fill`] writes.
const PIECE: usize = 1 << 20;
/// The floor of the cache while it is warmed: a busy host's signs of memory pressure would keep it small.
/// What is measured then has no floor.
const FLOOR: &str = "512M";
/// Share of the reads that hit when a working set counts as cached, per cent.
pub const WARM: f64 = 99.9;
/// Passes over a working set until it must be cached; the cache pauses for some seconds after each
/// sign of memory pressure.
const PASSES: usize = 60;
/// Tries to measure without a sign of memory pressure from the host.
const TRIES: usize = 5;

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        Error::Failed { program: "the NBD client".into(), what: failure.to_string() }
    }
}

impl From<crate::Error> for Error {
    fn from(error: crate::Error) -> Self {
        Error::Failed { program: "a tool".into(), what: error.to_string() }
    }
}

/// The daemon, the directory and the options of one run.
#[derive(Debug)]
pub struct Rig<'a> {
    daemon: &'a Path,
    work: &'a Workdir,
    options: &'a Options,
}

/// A daemon under measurement, with its control socket.
#[derive(Debug)]
pub struct Daemon {
    program: PathBuf,
    control: PathBuf,
    /// The process and its NBD socket.
    pub server: Server,
}

impl<'a> Rig<'a> {
    pub(super) fn new(daemon: &'a Path, work: &'a Workdir, options: &'a Options) -> Self {
        Self { daemon, work, options }
    }

    /// The options of this run.
    #[must_use]
    pub fn options(&self) -> &Options {
        self.options
    }

    /// Random numbers of the run's seed; `stream` tells the users of one measurement apart.
    #[must_use]
    pub fn random(&self, stream: u64) -> Random {
        Random::new(u64::from(self.options.seed) << 32 | stream)
    }

    /// For each round the places `0..count` in the order to run them: every other round backwards,
    /// so that none always runs in another's wake.
    pub fn orders(&self, count: usize) -> impl Iterator<Item = Vec<usize>> {
        (0..self.options.rounds).map(move |round| {
            let mut order: Vec<usize> = (0..count).collect();
            if round % 2 == 1 {
                order.reverse();
            }
            order
        })
    }

    /// Starts `nbdkit` with the export `disk`. `name` is that of its socket and log.
    ///
    /// # Errors
    /// [`Error`] when it does not serve.
    pub fn nbdkit(&self, name: &str, arguments: &[&str]) -> Result<Server, Error> {
        let socket = self.work.path(&format!("{name}.sock"));
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--unix"]).arg(&socket).args(arguments);
        // Its cache filter keeps its file there.
        command.env("TMPDIR", self.work.path(""));
        Server::start("nbdkit", command, socket, self.work.path(&format!("{name}.log")), ["disk"])
    }

    /// Starts the daemon with a volume for each of `volumes`: its name, its store and its options,
    /// such as `cache=none`. `name` is that of its sockets and log.
    ///
    /// # Errors
    /// [`Error`] when it does not serve.
    pub fn ebbd(
        &self,
        name: &str,
        volumes: &[(&str, &Server, &str)],
        arguments: &[&str],
    ) -> Result<Daemon, Error> {
        let socket = self.work.path(&format!("{name}.sock"));
        let control = self.work.path(&format!("{name}.ctl"));
        let mut command = Command::new(self.daemon);
        command.args(["serve", "--log", "warn", "--control"]).arg(&control);
        command.arg("--listen").arg(format!("unix:{}", socket.display())).args(arguments);
        for (volume, store, options) in volumes {
            let mut text = format!("{volume}=nbd+unix:///disk?socket={}", store.socket().display());
            if !options.is_empty() {
                // Writing to a String does not fail.
                let _ = write!(text, ",{options}");
            }
            command.arg("--volume").arg(text);
        }
        let log = self.work.path(&format!("{name}.log"));
        let names = volumes.iter().map(|(volume, ..)| *volume);
        let server = Server::start("ebbd", command, socket, log, names)?;
        Ok(Daemon::new(self.daemon, control, server))
    }

    /// One run of `fio` on the first `bytes` of a server's export `disk`.
    ///
    /// # Errors
    /// [`Error`] when it fails or sees an error.
    pub fn fio(
        &self,
        server: &Server,
        load: Load,
        bytes: u64,
        until: Until,
    ) -> Result<Outcome, Error> {
        let report = self.work.path("fio.json");
        let mut command = Command::new("fio");
        command.args(fio::arguments(
            load,
            bytes,
            until,
            fio::Target::Nbd(server.socket()),
            &report,
        ));
        let seconds = match until {
            Until::Seconds(seconds) => u64::from(seconds),
            Until::EachBlockOnce => 600,
        };
        let limit = Duration::from_secs(seconds + 60);
        process::run(command, &self.work.path("client.log"), limit)?;
        fio::take_report(&report)
    }

    /// Has each 4 KiB of the first `bytes` read once, in random order.
    ///
    /// # Errors
    /// As [`Rig::fio`].
    pub fn pass(&self, server: &Server, bytes: u64) -> Result<(), Error> {
        let load = Load { pattern: "randread", block: 4096, depth: 64, connections: 1 };
        self.fio(server, load, bytes, Until::EachBlockOnce).map(drop)
    }

    /// Passes over the first `bytes` of the volume `disk` until the cache has all of it.
    ///
    /// # Errors
    /// As [`Rig::fio`]; or the cache does not keep it.
    pub fn warm(&self, daemon: &Daemon, bytes: u64) -> Result<(), Error> {
        daemon.set("cache_min", FLOOR)?;
        for _ in 0..PASSES {
            let before = daemon.stat()?.reads("disk")?;
            self.pass(&daemon.server, bytes)?;
            if daemon.stat()?.reads("disk")?.since(before).hit_percent()? >= WARM {
                return daemon.set("cache_min", "0");
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        let events = daemon.stat()?.pressure_events();
        let what = format!("does not keep the working set; {events} signs of memory pressure");
        Err(Error::Failed { program: "ebbd".into(), what })
    }

    /// Measures again if the host was short of memory meanwhile, which is not what is measured;
    /// after some tries the last result counts. `measure` gives a value and the daemon's
    /// [`Stat::pressure_events`].
    ///
    /// # Errors
    /// Those of `measure`.
    pub fn undisturbed(
        &self,
        mut measure: impl FnMut() -> Result<(f64, u64), Error>,
    ) -> Result<f64, Error> {
        for _ in 1..TRIES {
            match measure()? {
                (value, 0) => return Ok(value),
                (_, events) => log(format_args!("{events} signs of memory pressure: again")),
            }
        }
        let (value, events) = measure()?;
        log(format_args!("counted in spite of {events} signs of memory pressure"));
        Ok(value)
    }
}

impl Daemon {
    /// A daemon that runs already: its program, its control socket, its process.
    #[must_use]
    pub fn new(program: &Path, control: PathBuf, server: Server) -> Self {
        Self { program: program.to_path_buf(), control, server }
    }

    /// The current statistics.
    ///
    /// # Errors
    /// [`Error`] when the daemon does not reply, or not as expected.
    pub fn stat(&self) -> Result<Stat, Error> {
        let outcome = self.command("stat").arg("--json").ok()?;
        Ok(Stat::new(outcome.json()?))
    }

    /// Sets a parameter.
    ///
    /// # Errors
    /// [`Error`] when the daemon refuses.
    pub fn set(&self, name: &str, value: &str) -> Result<(), Error> {
        self.command("set").args([name, value]).ok().map(drop).map_err(Error::from)
    }

    /// Injects a level of pressure, such as `L1`.
    ///
    /// # Errors
    /// [`Error`] when the daemon refuses.
    pub fn pressure(&self, level: &str) -> Result<(), Error> {
        self.command("pressure").arg(level).ok().map(drop).map_err(Error::from)
    }

    /// Runs a command of its program, such as `volume snapshot`.
    ///
    /// # Errors
    /// [`Error`] when the daemon refuses.
    pub fn run(&self, words: &[&str]) -> Result<(), Error> {
        let tool = Tool::new(&self.program).args(words).arg("--control").arg(&self.control);
        tool.ok().map(drop).map_err(Error::from)
    }

    /// A connection to one of its volumes.
    ///
    /// # Errors
    /// [`Error`] when there is no such volume.
    pub fn client(&self, volume: &str) -> Result<Client, Error> {
        Ok(Client::open(self.server.socket(), volume)?)
    }

    fn command(&self, what: &str) -> Tool {
        Tool::new(&self.program).args([what, "--control"]).arg(&self.control)
    }
}

/// Writes `bytes` of data that does not compress to an export `disk`.
///
/// # Errors
/// [`Error`] when the server refuses.
pub fn fill(server: &Server, bytes: u64, mut random: Random) -> Result<(), Error> {
    let mut client = Client::open(server.socket(), "disk")?;
    let mut piece = vec![0; PIECE];
    for offset in (0..bytes).step_by(PIECE) {
        piece.chunks_mut(8).for_each(|word| word.copy_from_slice(&random.next().to_ne_bytes()));
        client.write(offset, &piece, 0)?;
    }
    client.flush()?;
    Ok(client.disconnect()?)
}
