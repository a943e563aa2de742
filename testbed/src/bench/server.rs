//! The servers under measurement: how each is started on the same file, and when it serves.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::workdir::Workdir;
use super::{Error, handshake, io_context, process};

/// Longest time a server may take to serve all its volumes, or to end.
const PATIENCE: Duration = Duration::from_secs(60);

/// A server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The daemon under test.
    Ebbd,
    /// `nbdkit file`, with its default 16 threads per connection.
    Nbdkit,
    /// `qemu-storage-daemon` over io_uring, which is its fastest way to a file, in the page
    /// cache too.
    Qemu,
}

/// How the servers open the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setup {
    /// Through the page cache.
    PageCache,
    /// With O_DIRECT.
    Direct,
}

impl Kind {
    /// Name for the log.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ebbd => "ebbd",
            Self::Nbdkit => "nbdkit",
            Self::Qemu => "qemu-storage-daemon",
        }
    }

    /// The command that serves `disk` as export `disk` on `socket`, in the foreground.
    ///
    /// nbdkit has no O_DIRECT: it is not run with [`Setup::Direct`].
    #[must_use]
    pub fn one_disk(self, daemon: &Path, disk: &Path, socket: &Path, setup: Setup) -> Command {
        let direct = if setup == Setup::Direct { "on" } else { "off" };
        let (disk_text, socket_text) = (disk.display(), socket.display());
        match self {
            Self::Ebbd => {
                let mut command = Command::new(daemon);
                command.args(["serve", "--log", "warn", "--volume"]);
                command.arg(format!("disk=file:{disk_text},direct={direct}"));
                command.arg("--listen").arg(format!("unix:{socket_text}"));
                command
            }
            Self::Nbdkit => {
                let mut command = Command::new("nbdkit");
                command.args(["--foreground", "--unix"]).arg(socket).arg("file").arg(disk);
                command
            }
            Self::Qemu => {
                let mut command = qemu(socket);
                add_qemu_disk(&mut command, "disk", disk, direct);
                command
            }
        }
    }

    /// The command that serves many volumes on `socket`; the configuration of `ebbd` goes to a
    /// file in `work`. `None` for nbdkit, which opens a file only when a client asks for it.
    ///
    /// # Errors
    /// [`Error::Io`] when the configuration cannot be written.
    pub fn many_disks(
        self,
        daemon: &Path,
        volumes: &[(String, PathBuf)],
        socket: &Path,
        work: &Workdir,
    ) -> Result<Option<Command>, Error> {
        Ok(match self {
            Self::Ebbd => {
                let path = work.path("volumes.toml");
                fs::write(&path, configuration(volumes, socket))
                    .map_err(io_context(format!("writing {}", path.display())))?;
                let mut command = Command::new(daemon);
                command.arg("serve").arg("--config").arg(path);
                Some(command)
            }
            Self::Nbdkit => None,
            Self::Qemu => {
                let mut command = qemu(socket);
                for (name, path) in volumes {
                    add_qemu_disk(&mut command, name, path, "off");
                }
                Some(command)
            }
        })
    }
}

fn qemu(socket: &Path) -> Command {
    let mut command = Command::new("qemu-storage-daemon");
    command.arg("--nbd-server").arg(format!("addr.type=unix,addr.path={}", socket.display()));
    command
}

fn add_qemu_disk(command: &mut Command, name: &str, path: &Path, direct: &str) {
    command.arg("--blockdev").arg(format!(
        "driver=file,node-name={name},filename={},cache.direct={direct},aio=io_uring",
        path.display()
    ));
    command
        .arg("--export")
        .arg(format!("type=nbd,id={name},node-name={name},name={name},writable=on"));
}

/// A TOML file with every volume at its defaults.
fn configuration(volumes: &[(String, PathBuf)], socket: &Path) -> String {
    // Rust's escapes of a printable path are those of a TOML basic string.
    let mut text =
        format!("listen = [{:?}]\nlog = \"warn\"\n", format!("unix:{}", socket.display()));
    for (name, path) in volumes {
        let store = format!("file:{}", path.display());
        // Writing to a String does not fail.
        let _ = write!(text, "[volume.{name}]\nstore = {store:?}\n");
    }
    text
}

/// A running server. Dropped without [`Server::stop`], it is killed.
#[derive(Debug)]
pub struct Server {
    child: Child,
    name: &'static str,
    socket: PathBuf,
    output: PathBuf,
    started: Duration,
}

impl Server {
    /// Starts a server and returns once every one of `volumes` has replied to `NBD_OPT_GO`, each on
    /// a connection of its own. `name` identifies it in messages; its output goes to `output`.
    ///
    /// # Errors
    /// [`Error::Tool`] when it does not start; [`Error::Failed`] when it ends, refuses a
    /// volume or does not serve within a minute.
    pub fn start<'a>(
        name: &'static str,
        mut command: Command,
        socket: PathBuf,
        output: PathBuf,
        volumes: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self, Error> {
        let log = File::create(&output).map_err(io_context("making the server's log"))?;
        let also = log.try_clone().map_err(io_context("making the server's log"))?;
        command.stdin(Stdio::null()).stdout(also).stderr(log);
        let began = Instant::now();
        let child = command.spawn().map_err(|source| Error::Tool {
            program: name.into(),
            remedy: process::INSTALL,
            source,
        })?;
        let mut server = Self { child, name, socket, output, started: Duration::ZERO };
        for volume in volumes {
            server.wait_for(volume, began)?;
        }
        server.started = began.elapsed();
        Ok(server)
    }

    fn wait_for(&mut self, volume: &str, began: Instant) -> Result<(), Error> {
        loop {
            let Err(refusal) = handshake::go(&self.socket, volume) else { return Ok(()) };
            let waiting = "waiting for a server";
            if let Some(status) = self.child.try_wait().map_err(io_context(waiting))? {
                return Err(self.failed(&format!("ended with {status} before it served {volume}")));
            }
            if began.elapsed() > PATIENCE {
                return Err(self.failed(&format!("does not serve {volume}: {refusal}")));
            }
            // Short compared with the times measured here, long compared with the cost of a probe.
            std::thread::sleep(Duration::from_micros(500));
        }
    }

    /// Time from exec until the last volume was served.
    #[must_use]
    pub fn started(&self) -> Duration {
        self.started
    }

    /// The socket it listens on.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Ends the server by SIGTERM.
    ///
    /// # Errors
    /// [`Error::Failed`] when it exits with failure, or not within a minute.
    pub fn stop(mut self) -> Result<(), Error> {
        process::signal(&self.child, Signal::TERM)?;
        let status = process::finish(&mut self.child, self.name, PATIENCE)?;
        // Some leave the socket behind, and some refuse to start where one is.
        let _ = fs::remove_file(&self.socket);
        if status.success() {
            return Ok(());
        }
        Err(self.failed(&format!("ended with {status} on SIGTERM")))
    }

    fn failed(&self, what: &str) -> Error {
        let said = process::tail(&self.output);
        let what =
            if said.is_empty() { what.to_owned() } else { format!("{what}; it said: {said}") };
        Error::Failed { program: self.name.into(), what }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // After `stop` the child is already reaped and both calls do nothing.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_file(&self.socket);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(command: &Command) -> Vec<String> {
        command.get_args().map(|word| word.to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn every_server_gets_the_same_disk_and_socket() {
        let (disk, socket) = (Path::new("/d/disk.img"), Path::new("/d/s"));
        for kind in [Kind::Ebbd, Kind::Nbdkit, Kind::Qemu] {
            let command = kind.one_disk(Path::new("/b/ebbd"), disk, socket, Setup::PageCache);
            let all = words(&command).join(" ");
            assert!(all.contains("/d/disk.img") && all.contains("/d/s"), "{kind:?}: {all}");
        }
        let ebbd = Kind::Ebbd.one_disk(Path::new("/b/ebbd"), disk, socket, Setup::Direct);
        assert_eq!(
            words(&ebbd).join(" "),
            "serve --log warn --volume disk=file:/d/disk.img,direct=on --listen unix:/d/s"
        );
        let qemu = Kind::Qemu.one_disk(Path::new(""), disk, socket, Setup::Direct);
        assert!(words(&qemu).join(" ").contains("cache.direct=on,aio=io_uring"));
    }

    #[test]
    fn the_configuration_names_every_volume() {
        let volumes = [("v0".to_owned(), "/d/v0".into()), ("v1".to_owned(), "/d/v1".into())];
        assert_eq!(
            configuration(&volumes, Path::new("/d/s")),
            "listen = [\"unix:/d/s\"]\nlog = \"warn\"\n\
             [volume.v0]\nstore = \"file:/d/v0\"\n[volume.v1]\nstore = \"file:/d/v1\"\n"
        );
    }
}
