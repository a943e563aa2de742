//! The backends under measurement: their programs, their command lines, and running one.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;

use crate::bench::{Error, daemon_path, io_context, log, process};
use crate::guest::kernel;

/// How long the daemon may take to end.
const PATIENCE: Duration = Duration::from_secs(60);
/// Names the program of Cloud Hypervisor.
const CLOUD_HYPERVISOR: &str = "VHOST_USER_BLOCK";
/// The environment variable with more arguments of `ebbd serve`.
const EBBD_ARGUMENTS: &str = "EBBD_ARGS";

/// A backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The daemon under test.
    Ebbd,
    /// The daemon under test with its cache, which holds all that is used.
    EbbdCached,
    /// `qemu-storage-daemon` as installed, over io_uring.
    Qemu7,
    /// The one of bookworm-backports.
    Qemu10,
    /// Cloud Hypervisor's `vhost_user_block`.
    CloudHypervisor,
}

/// What is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Data<'a> {
    /// Nothing: reads return zeroes, or leave the guest's memory as it is (QEMU, which copies nothing).
    Null,
    /// A file, through the page cache.
    File(&'a Path),
}

/// Where the programs are.
#[derive(Debug, Clone)]
pub struct Programs {
    ebbd: PathBuf,
    qemu7: PathBuf,
    qemu10: PathBuf,
    cloud_hypervisor: Option<PathBuf>,
}

impl Programs {
    /// Finds them. That of Cloud Hypervisor is in no package: without it, its absence is logged.
    ///
    /// # Errors
    /// Another is missing.
    pub fn find() -> Result<Programs, Error> {
        let qemu10 = kernel::cache().join("qemu-backports/usr/bin/qemu-storage-daemon");
        let qemu10 = qemu10.canonicalize().map_err(|source| Error::Tool {
            program: qemu10.display().to_string(),
            remedy: process::INSTALL,
            source,
        })?;
        let qemu7 = crate::guest::which(Path::new("qemu-storage-daemon")).map_err(|error| {
            let what = format!("{error}: {}", process::INSTALL);
            Error::Failed { program: "qemu-storage-daemon".into(), what }
        })?;
        let cloud_hypervisor = std::env::var_os(CLOUD_HYPERVISOR).map(PathBuf::from);
        if cloud_hypervisor.is_none() {
            log(format_args!(
                "NOT RUN: Cloud Hypervisor's vhost_user_block, which {CLOUD_HYPERVISOR} may name \
                 (docs/results/vhost.md says how to build it)"
            ));
        }
        Ok(Programs { ebbd: daemon_path()?, qemu7, qemu10, cloud_hypervisor })
    }

    /// The program of a kind; `None`: it is not here.
    #[must_use]
    pub fn path(&self, kind: Kind) -> Option<&Path> {
        match kind {
            Kind::Ebbd | Kind::EbbdCached => Some(&self.ebbd),
            Kind::Qemu7 => Some(&self.qemu7),
            Kind::Qemu10 => Some(&self.qemu10),
            Kind::CloudHypervisor => self.cloud_hypervisor.as_deref(),
        }
    }

    /// The kinds that can serve this, ours first.
    #[must_use]
    pub fn kinds(&self, data: Data<'_>) -> Vec<Kind> {
        let all = match data {
            Data::Null => vec![Kind::Ebbd, Kind::Qemu7, Kind::Qemu10],
            Data::File(_) => {
                vec![Kind::Ebbd, Kind::EbbdCached, Kind::Qemu7, Kind::Qemu10, Kind::CloudHypervisor]
            }
        };
        all.into_iter().filter(|kind| self.path(*kind).is_some()).collect()
    }
}

impl Kind {
    /// Its name in the log and in guests.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Kind::Ebbd => "ebbd",
            Kind::EbbdCached => "ebbd-cached",
            Kind::Qemu7 => "qsd7",
            Kind::Qemu10 => "qsd10",
            Kind::CloudHypervisor => "vhost_user_block",
        }
    }

    /// Whether it is a build of ours.
    #[must_use]
    pub fn is_ours(self) -> bool {
        matches!(self, Kind::Ebbd | Kind::EbbdCached)
    }

    /// Its arguments to serve `data` at `folder/disk.sock`, with so many queues. QEMU has a thread for I/O, which polls, if
    /// there is a processor for it (`docs/results/vhost.md` compares both).
    #[must_use]
    pub fn arguments(
        self,
        data: Data<'_>,
        folder: &str,
        queues: u16,
        processors: u32,
    ) -> Vec<String> {
        let socket = format!("{folder}/disk.sock");
        match (self, data) {
            (Kind::Ebbd | Kind::EbbdCached, data) => {
                let cache = if self == Kind::Ebbd { "" } else { ",cache=writeback" };
                let store = match data {
                    Data::Null => "null:4G".to_owned(),
                    Data::File(path) => format!("file:{}", path.display()),
                };
                let mut arguments = vec![
                    "serve".to_owned(),
                    "--log".into(),
                    "warn".into(),
                    "--control".into(),
                    format!("{folder}/control.sock"),
                    "--volume".into(),
                    format!("disk={store}{cache}"),
                    "--vhost-user".into(),
                    folder.into(),
                ];
                let more = std::env::var(EBBD_ARGUMENTS).unwrap_or_default();
                arguments.extend(more.split_whitespace().map(str::to_owned));
                arguments
            }
            (Kind::Qemu7 | Kind::Qemu10, data) => {
                let driver = match data {
                    Data::Null => "driver=null-co,size=4294967296,read-zeroes=off".to_owned(),
                    Data::File(path) => {
                        format!(
                            "driver=file,filename={},cache.direct=off,aio=io_uring",
                            path.display()
                        )
                    }
                };
                let (thread, polled) = match processors {
                    0 | 1 => (vec![], ""),
                    _ => (vec!["--object".to_owned(), "iothread,id=io0".into()], ",iothread=io0"),
                };
                let export = format!(
                    "type=vhost-user-blk,id=e0,node-name=n0,addr.type=unix,addr.path={socket},writable=on,\
                     num-queues={queues}{polled}"
                );
                let disk = ["--blockdev".to_owned(), format!("{driver},node-name=n0")];
                thread.into_iter().chain(disk).chain(["--export".to_owned(), export]).collect()
            }
            (Kind::CloudHypervisor, data) => {
                let path = match data {
                    Data::Null => Path::new("/dev/null"),
                    Data::File(path) => path,
                };
                let path = path.display();
                let disk =
                    format!("path={path},socket={socket},num_queues={queues},queue_size=128");
                vec!["--block-backend".to_owned(), disk]
            }
        }
    }
}

/// A running backend. Dropped without [`Backend::stop`], it is killed.
#[derive(Debug)]
pub struct Backend {
    child: Child,
    kind: Kind,
    output: PathBuf,
}

impl Backend {
    /// Starts a program; what it says goes to `output`.
    ///
    /// # Errors
    /// [`Error::Tool`] when it does not start.
    pub fn start(
        kind: Kind,
        program: &Path,
        arguments: &[String],
        output: &Path,
    ) -> Result<Backend, Error> {
        let log = File::create(output).map_err(io_context("making a backend's log"))?;
        let also = log.try_clone().map_err(io_context("making a backend's log"))?;
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(also).stderr(log);
        let child = command.spawn().map_err(|source| Error::Tool {
            program: program.display().to_string(),
            remedy: process::INSTALL,
            source,
        })?;
        Ok(Backend { child, kind, output: output.into() })
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it said, for an error message.
    #[must_use]
    pub fn said(&self) -> String {
        process::tail(&self.output)
    }

    /// Ends it: ours by SIGTERM. Peers are killed: those of QEMU 7.2 do not always end by themselves.
    ///
    /// # Errors
    /// The daemon under test ends with a failure, or does not end.
    pub fn stop(mut self) -> Result<(), Error> {
        if !self.kind.is_ours() {
            return Ok(());
        }
        let name = self.kind.name();
        process::signal(&self.child, Signal::TERM)?;
        let status = process::finish(&mut self.child, name, PATIENCE)?;
        if status.success() {
            return Ok(());
        }
        let what = format!("ended with {status}: {}", self.said());
        Err(Error::Failed { program: name.into(), what })
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        // Both fail if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
