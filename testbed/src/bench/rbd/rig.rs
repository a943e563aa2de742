//! What every measurement is made of: the cluster, images, daemons in front of them, and runs of fio.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::{Error, Options, log};
use crate::bench::cache::rig::Daemon;
use crate::bench::fio::{self, Load, Outcome, Target, Until};
use crate::bench::server::Server;
use crate::bench::workdir::Workdir;
use crate::bench::{io_context, process};
use crate::harness::ceph::Ceph;

/// Size of an image that is read and written, in MiB.
pub const IMAGE_MIB: u64 = 256;
/// The same in bytes.
pub const IMAGE_BYTES: u64 = IMAGE_MIB << 20;

/// The cluster, the daemon, the directory and the options of one run.
#[derive(Debug)]
pub struct Rig<'a> {
    ceph: Ceph,
    /// The cluster's configuration, with librbd's cache off: fio's engine does not set that itself.
    configuration: PathBuf,
    daemon: &'a Path,
    work: &'a Workdir,
    options: &'a Options,
}

impl<'a> Rig<'a> {
    /// Starts a cluster.
    ///
    /// # Errors
    /// [`Error`] when it does not start.
    pub fn new(daemon: &'a Path, work: &'a Workdir, options: &'a Options) -> Result<Self, Error> {
        log("starting a Ceph cluster");
        let ceph = Ceph::start()?;
        let configuration = work.path("ceph.conf");
        let text = fs::read_to_string(ceph.configuration())
            .map_err(io_context("reading the cluster's configuration"))?;
        let text = text.replacen("[client]\n", "[client]\nrbd_cache = false\n", 1);
        fs::write(&configuration, text).map_err(io_context("writing ceph.conf"))?;
        Ok(Self { ceph, configuration, daemon, work, options })
    }

    /// The cluster.
    #[must_use]
    pub fn ceph(&self) -> &Ceph {
        &self.ceph
    }

    /// The options of this run.
    #[must_use]
    pub fn options(&self) -> &Options {
        self.options
    }

    /// A file of this name in the run's directory.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.work.path(name)
    }

    /// For each round the places `0..count` in the order to run them: every other round backwards, so that none always
    /// runs in another's wake.
    pub fn orders(&self, count: usize) -> impl Iterator<Item = Vec<usize>> {
        (0..self.options.rounds).map(move |round| match round % 2 {
            0 => (0..count).collect(),
            _ => (0..count).rev().collect(),
        })
    }

    /// A new image of [`IMAGE_MIB`], fully written: an object that does not exist is read faster.
    ///
    /// # Errors
    /// [`Error`] when it cannot be made or written.
    pub fn full_image(&self, name: &str) -> Result<(), Error> {
        self.ceph.create_image(name, IMAGE_MIB)?;
        let load = Load { pattern: "write", block: 1 << 20, depth: 8, connections: 1 };
        self.fio(Target::Rbd(name), load, Until::EachBlockOnce).map(drop)
    }

    /// Removes images.
    ///
    /// # Errors
    /// [`Error`] when one is in use.
    pub fn remove_images(&self, names: &[&str]) -> Result<(), Error> {
        for name in names {
            self.ceph.rbd(&["rm", "--no-progress", &format!("rbd/{name}")])?;
        }
        Ok(())
    }

    /// The command of a daemon named `name`, with a state directory of its own and these volumes (`NAME=STORE,OPTIONS`).
    fn command(&self, name: &str, volumes: &[String]) -> Command {
        let mut command = Command::new(self.daemon);
        command.env("LD_LIBRARY_PATH", self.ceph.library_path());
        command.args(["serve", "--log", "warn", "--listen"]);
        command.arg(format!("unix:{}", self.path(&format!("{name}.sock")).display()));
        command.arg("--control").arg(self.path(&format!("{name}.ctl")));
        command.arg("--state").arg(self.path(&format!("{name}.state")));
        for volume in volumes {
            command.arg("--volume").arg(volume);
        }
        command
    }

    /// Starts a daemon, and waits until it serves `served`. One that was started under the same `name` before has the
    /// same state directory.
    ///
    /// # Errors
    /// [`Error`] when it does not serve them.
    pub fn ebbd(&self, name: &str, volumes: &[String], served: &[&str]) -> Result<Daemon, Error> {
        let socket = self.path(&format!("{name}.sock"));
        // A daemon that was killed leaves its sockets.
        for left in [&socket, &self.path(&format!("{name}.ctl"))] {
            let _ = fs::remove_file(left);
        }
        let log = self.log_of(name);
        let command = self.command(name, volumes);
        let server = Server::start("ebbd", command, socket, log, served.iter().copied())?;
        Ok(Daemon::new(self.daemon, self.path(&format!("{name}.ctl")), server))
    }

    /// The log of the last daemon of this name.
    #[must_use]
    pub fn log_of(&self, name: &str) -> PathBuf {
        self.path(&format!("{name}.log"))
    }

    /// A volume on an image, with the cache in this mode.
    #[must_use]
    pub fn volume(&self, name: &str, image: &str, cache: &str) -> String {
        format!("{name}={},cache={cache}", self.ceph.uri(image))
    }

    /// One run of fio on the first [`IMAGE_BYTES`].
    ///
    /// # Errors
    /// [`Error`] when it fails or sees an error.
    pub fn fio(&self, target: Target<'_>, load: Load, until: Until) -> Result<Outcome, Error> {
        let report = self.path("fio.json");
        let mut command = Command::new("fio");
        command.env("LD_LIBRARY_PATH", self.ceph.library_path());
        command.env("CEPH_CONF", &self.configuration);
        command.args(fio::arguments(load, IMAGE_BYTES, until, target, &report));
        let seconds = match until {
            Until::Seconds(seconds) => u64::from(seconds),
            Until::EachBlockOnce => 600,
        };
        process::run(command, &self.path("client.log"), Duration::from_secs(seconds + 60))?;
        fio::take_report(&report)
    }
}
