//! What every measurement is made of: the base, overlays of each server, daemons from a configuration.
//!
//! All servers use the page cache, which has all of the base: ebbd with `direct = "off"`, as the others do by default.

use std::fs::{self, File};
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::client::{BLOCK, Client, Image};
use super::{Error, Options};
use crate::bench::cache::rig::Daemon;
use crate::bench::server::Server;
use crate::bench::workdir::Workdir;
use crate::bench::{io_context, log, process};

/// Name of the volume that is the base of others.
pub const BASE: &str = "golden";
/// Name of the overlay of a daemon that has one.
pub const OVERLAY: &str = "disk";
/// The file of that overlay, and of the peers' overlays.
const DELTA: &str = "disk.delta";

/// The daemon, the directory and the options of one run.
#[derive(Debug)]
pub struct Rig<'a> {
    daemon: &'a Path,
    work: &'a Workdir,
    options: &'a Options,
}

/// A server of an overlay of the base, which is empty at the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The daemon under test.
    Ebbd,
    /// `qemu-nbd` with a qcow2 file of clusters of 64 KiB, its default.
    QemuNbd,
    /// The `cow` filter of nbdkit over its `file`, with blocks of 64 KiB, their default.
    NbdkitCow,
    /// The same with blocks of 4 KiB: it copies nothing for a write of a whole block, and its map is larger.
    NbdkitCow4k,
}

impl Kind {
    /// Name for the log.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ebbd => "ebbd",
            Self::QemuNbd => "qemu-nbd",
            Self::NbdkitCow => "nbdkit --filter=cow",
            Self::NbdkitCow4k => "nbdkit --filter=cow cow-block-size=4096",
        }
    }
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

    /// For each round the places `0..count` in the order to run them: the first round and every other one backwards, so
    /// that none always runs in another's wake.
    pub fn orders(&self, count: usize) -> impl Iterator<Item = Vec<usize>> {
        (0..self.options.common.rounds).map(move |round| match round % 2 {
            0 => (0..count).rev().collect(),
            _ => (0..count).collect(),
        })
    }

    /// A file of this name in the run's directory.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.work.path(name)
    }

    /// Blocks of the base.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        if self.options.quick { 1 << 16 } else { 1 << 18 }
    }

    /// Bytes of the base.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        u64::from(self.blocks()) * BLOCK as u64
    }

    /// What the base holds.
    #[must_use]
    pub fn image(&self) -> Image {
        Image::new(self.blocks())
    }

    /// The file of the base, which is made if it is not there and read into the page cache.
    ///
    /// # Errors
    /// [`Error::Io`] from the file system.
    pub fn base(&self) -> Result<PathBuf, Error> {
        let path = self.path("base.raw");
        let making = || io_context(format!("making {}", path.display()));
        if !path.exists() {
            log(format_args!("writing {} bytes to {}", self.bytes(), path.display()));
            let mut file =
                BufWriter::with_capacity(1 << 20, File::create(&path).map_err(making())?);
            let (image, mut block) = (self.image(), Vec::new());
            for number in 0..image.blocks() {
                block.clear();
                image.content(number, &mut block);
                file.write_all(&block).map_err(making())?;
            }
            let file = file.into_inner().map_err(|error| making()(error.into_error()))?;
            file.sync_all().map_err(making())?;
        }
        let mut file = File::open(&path).map_err(making())?;
        let mut piece = vec![0; 1 << 20];
        while file.read(&mut piece).map_err(making())? > 0 {}
        Ok(path)
    }

    /// Starts an empty overlay of the base: the server, the name of its export, and the file of its delta; nbdkit's is a
    /// file without a name.
    ///
    /// # Errors
    /// [`Error`] when it does not serve.
    pub fn overlay(&self, kind: Kind) -> Result<(Server, &'static str, PathBuf), Error> {
        let (base, delta) = (self.base()?, self.path(DELTA));
        self.remove(DELTA)?;
        if kind == Kind::Ebbd {
            let config =
                format!("{}{}", self.base_volume("")?, self.overlay_volume("create = true"));
            return Ok((self.ebbd("overlay", &config, &[OVERLAY])?.server, OVERLAY, delta));
        }
        let socket = self.path("peer.sock");
        let mut command = match kind {
            Kind::Ebbd | Kind::QemuNbd => {
                let mut create = Command::new("qemu-img");
                create.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]);
                create.arg(base).arg(&delta);
                process::run(create, &self.path("client.log"), Duration::from_secs(60))?;
                let mut command = Command::new("qemu-nbd");
                command.args(["--format=qcow2", "--cache=writeback", "--persistent"]);
                command.args(["--export-name", OVERLAY, "--socket"]).arg(&socket).arg(&delta);
                command
            }
            Kind::NbdkitCow | Kind::NbdkitCow4k => {
                let mut command = Command::new("nbdkit");
                command.args(["--foreground", "--filter=cow", "--unix"]).arg(&socket);
                command.arg("file").arg(base);
                command.args((kind == Kind::NbdkitCow4k).then_some("cow-block-size=4096"));
                command
            }
        };
        // The filter keeps its file there.
        command.env("TMPDIR", self.path(""));
        let log = self.path("peer.log");
        Ok((Server::start(kind.name(), command, socket, log, [OVERLAY])?, OVERLAY, delta))
    }

    /// Removes a file of the directory if it is there.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be removed.
    pub fn remove(&self, name: &str) -> Result<(), Error> {
        let path = self.path(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(io_context(format!("removing {}", path.display()))(error))
            }
            _ => Ok(()),
        }
    }

    /// The configuration of the base as a volume, with these lines.
    ///
    /// # Errors
    /// As [`Rig::base`].
    pub fn base_volume(&self, lines: &str) -> Result<String, Error> {
        let lines = format!("read_only = true\ndirect = \"off\"\n{lines}");
        Ok(volume(BASE, &format!("file:{}", self.base()?.display()), &lines))
    }

    /// The configuration of the overlay [`OVERLAY`], with these lines.
    #[must_use]
    pub fn overlay_volume(&self, lines: &str) -> String {
        self.delta_volume(OVERLAY, BASE, lines)
    }

    /// The configuration of a volume whose delta is in the file `NAME.delta`, with these lines.
    #[must_use]
    pub fn delta_volume(&self, name: &str, base: &str, lines: &str) -> String {
        let store = format!("file:{}", self.path(&format!("{name}.delta")).display());
        volume(name, &store, &format!("base = {base:?}\ndirect = \"off\"\n{lines}"))
    }

    /// Starts the daemon with a configuration, and waits until it serves `volumes`. `name` is that of its sockets, its
    /// configuration and its log.
    ///
    /// # Errors
    /// [`Error`] when it does not serve them all.
    pub fn ebbd(&self, name: &str, config: &str, volumes: &[&str]) -> Result<Daemon, Error> {
        let [socket, control, file, log] =
            ["sock", "ctl", "toml", "log"].map(|end| self.path(&format!("{name}.{end}")));
        let [listen, control_at] =
            [&socket, &control].map(|path| format!("unix:{}", path.display()));
        let head = format!("listen = [{listen:?}]\ncontrol = {control_at:?}\nlog = \"warn\"\n");
        fs::write(&file, head + config)
            .map_err(io_context(format!("writing {}", file.display())))?;
        let mut command = Command::new(self.daemon);
        // Otherwise it serves without a volume that it cannot open, and tries again.
        command.args(["serve", "--strict", "--config"]).arg(file);
        let server = Server::start("ebbd", command, socket, log, volumes.iter().copied())?;
        Ok(Daemon::new(self.daemon, control, server))
    }
}

/// The configuration of a volume; `lines` are its other keys.
#[must_use]
pub fn volume(name: &str, store: &str, lines: &str) -> String {
    // Rust's escapes of a printable path are those of a TOML basic string.
    format!("[volume.{name}]\nstore = {store:?}\n{lines}\n")
}

/// Ends a connection and its server.
///
/// # Errors
/// [`Error`] when the server does not end well.
pub fn stop(client: Client, server: Server) -> Result<(), Error> {
    client.disconnect()?;
    server.stop()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_has_its_keys() {
        let text = volume("disk", "file:/d/disk.delta", "base = \"golden\"\ncreate = true");
        let lines: Vec<&str> = text.lines().collect();
        let store = "store = \"file:/d/disk.delta\"";
        assert_eq!(lines, ["[volume.disk]", store, "base = \"golden\"", "create = true"]);
    }
}
