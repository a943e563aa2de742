//! One daemon under test: its directory, socket, log, start and every way to end it.
//!
//! Invariants:
//! * Each server has a directory of its own, so tests may run side by side.
//! * The image files live in that directory and outlast a stop, so [`Server::restart`] finds them.
//! * What the daemon logged is printed when the server is dropped: the test harness shows it for a
//!   failed test only.

use crate::harness::binary::{self, Build};
use crate::harness::process;
use crate::harness::process::PATIENCE;
use crate::{Error, Result, Tool, check};
use rustix::process::{Signal, kill_process};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// Longer than the daemon itself waits for stores at its start.
const START_LIMIT: Duration = Duration::from_secs(9);

/// What a daemon is to be started with.
#[derive(Debug)]
pub struct Setup {
    dir: TempDir,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    /// A program that runs the daemon, with its arguments.
    prefix: Vec<String>,
    log_level: &'static str,
    waits_for_volumes: bool,
    build: Build,
}

/// A daemon, running unless it was stopped.
#[derive(Debug)]
pub struct Server {
    setup: Setup,
    child: Option<Child>,
}

impl Setup {
    /// A daemon without volumes, on a unix socket in a fresh directory.
    ///
    /// # Errors
    /// No directory can be made.
    pub fn new() -> Result<Setup> {
        let dir = TempDir::with_prefix("ebbd-").map_err(Error::io("make a directory"))?;
        Ok(Setup {
            dir,
            args: Vec::new(),
            env: Vec::new(),
            prefix: Vec::new(),
            log_level: "info",
            waits_for_volumes: true,
            build: Build::AsTests,
        })
    }

    /// The directory that holds socket, log and images.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Adds a volume over a sparse file `NAME.img` of `size` bytes in the server's directory.
    ///
    /// # Errors
    /// The file cannot be made.
    pub fn image(self, name: &str, size: u64) -> Result<Setup> {
        let path = self.image_path(name);
        let file = File::create_new(&path).map_err(Error::io(path.display().to_string()))?;
        file.set_len(size).map_err(Error::io(path.display().to_string()))?;
        Ok(self.volume(&format!("{name}=file:{}", path.display())))
    }

    /// Adds `--volume TEXT`.
    #[must_use]
    pub fn volume(self, text: &str) -> Setup {
        self.arg("--volume").arg(text)
    }

    /// Adds an argument after `ebbd serve`.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Setup {
        self.args.push(arg.as_ref().into());
        self
    }

    /// Adds arguments after `ebbd serve`.
    #[must_use]
    pub fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Setup {
        self.args.extend(args.into_iter().map(|a| a.as_ref().into()));
        self
    }

    /// Serves all volumes over vhost-user-blk, too, and has a control socket.
    #[must_use]
    pub fn vhost_user(self) -> Setup {
        let (sockets, control) = (self.dir().join("vhost"), self.dir().join("control.sock"));
        self.arg("--vhost-user").arg(sockets).arg("--control").arg(control)
    }

    /// Sets an environment variable of the daemon.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Setup {
        self.env.push((name.into(), value.as_ref().into()));
        self
    }

    /// Log level; the default is `info`. Tests that make thousands of connections use less.
    #[must_use]
    pub fn log_level(mut self, level: &'static str) -> Setup {
        self.log_level = level;
        self
    }

    /// A start waits for the daemon's greeting alone: for tests whose stores do not respond.
    #[must_use]
    pub fn without_waiting_for_volumes(mut self) -> Setup {
        self.waits_for_volumes = false;
        self
    }

    /// Runs the daemon by another program, whose arguments end with those of the daemon.
    #[must_use]
    pub fn under(mut self, prefix: &[String]) -> Setup {
        self.prefix = prefix.to_vec();
        self
    }

    /// Which build of the daemon; the default is the one of the tests.
    #[must_use]
    pub fn build(mut self, build: Build) -> Setup {
        self.build = build;
        self
    }

    /// Path of the image that [`Setup::image`] makes.
    #[must_use]
    pub fn image_path(&self, name: &str) -> PathBuf {
        self.dir().join(format!("{name}.img"))
    }

    /// Path of the unix socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.dir().join("nbd.sock")
    }

    /// Starts the daemon and waits until it serves.
    ///
    /// # Errors
    /// It does not start in time or ends at once; the error shows its log.
    pub fn start(self) -> Result<Server> {
        let mut server = Server { setup: self, child: None };
        server.restart()?;
        Ok(server)
    }

    fn command(&self) -> Result<Command> {
        let ebbd = binary::ebbd(self.build)?;
        let mut command = match self.prefix.split_first() {
            Some((program, arguments)) => {
                let mut command = Command::new(program);
                command.args(arguments).arg(ebbd);
                command
            }
            None => Command::new(ebbd),
        };
        command.args(["serve", "--log", self.log_level, "--listen"]);
        command.arg(format!("unix:{}", self.socket().display()));
        command.args(&self.args);
        command.envs(self.env.iter().map(|(n, v)| (n, v)));
        Ok(command)
    }
}

impl Server {
    /// A server with one volume called `disk` of `size` bytes.
    ///
    /// # Errors
    /// As [`Setup::start`].
    pub fn with_disk(size: u64) -> Result<Server> {
        Setup::new()?.image("disk", size)?.start()
    }

    /// Path of the unix socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.setup.socket()
    }

    /// The socket of a volume for vhost-user-blk; see [`Setup::vhost_user`].
    #[must_use]
    pub fn vhost_socket(&self, volume: &str) -> PathBuf {
        self.dir().join(format!("vhost/{volume}.sock"))
    }

    /// A command of the operator, to the control socket `control.sock` in the server's directory.
    ///
    /// # Errors
    /// The daemon's binary cannot be built.
    pub fn operator(&self, arguments: &[&str]) -> Result<Tool> {
        let tool = Tool::new(binary::ebbd(self.setup.build)?).args(arguments);
        Ok(tool.arg("--control").arg(self.dir().join("control.sock")))
    }

    /// A job of `fio` that writes and reads back with checksums for some seconds, on volume `disk`.
    pub fn verified_load(&self) -> Tool {
        Tool::new("fio")
            .args(["--name=verify", "--ioengine=nbd", "--rw=randrw", "--bsrange=512-64k"])
            .args(["--bs_unaligned=0", "--iodepth=16", "--size=48M", "--io_size=300M"])
            .args(["--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--verify_backlog=64"])
            .args(["--rate_iops=1500", "--fsync=50", "--randrepeat=1", "--blockalign=512"])
            .args(["--time_based", "--runtime=6"])
            .arg(format!("--uri={}", self.uri("disk")))
            .dir(self.dir())
            .limit(PATIENCE * 4)
    }

    /// URI of an export, as NBD tools take it.
    #[must_use]
    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket().display())
    }

    /// URI of an export over TLS, with more parameters such as `tls-certificates=DIR`.
    /// `user` stands before an `@`, or is empty.
    #[must_use]
    pub fn tls_uri(&self, user: &str, export: &str, parameters: &str) -> String {
        let at = if user.is_empty() { String::new() } else { format!("{user}@") };
        format!("nbds+unix://{at}/{export}?socket={}&{parameters}", self.socket().display())
    }

    /// QEMU's options for an export: `driver=nbd,...`.
    #[must_use]
    pub fn qemu_options(&self, export: &str) -> String {
        let socket = self.socket();
        format!("driver=nbd,server.type=unix,server.path={},export={export}", socket.display())
    }

    /// The directory that holds socket, log and images.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.setup.dir()
    }

    /// Path of the image behind a volume made with [`Setup::image`].
    #[must_use]
    pub fn image_path(&self, name: &str) -> PathBuf {
        self.setup.image_path(name)
    }

    /// Bytes that the image behind a volume takes on the host's disk.
    ///
    /// # Errors
    /// There is no such image.
    pub fn image_usage(&self, name: &str) -> Result<u64> {
        let path = self.image_path(name);
        let meta = path.metadata().map_err(Error::io(path.display().to_string()))?;
        Ok(meta.blocks() * 512)
    }

    /// Process id.
    ///
    /// # Errors
    /// The daemon was stopped.
    pub fn pid(&self) -> Result<u32> {
        self.child
            .as_ref()
            .map(Child::id)
            .ok_or_else(|| Error::unexpected("the daemon is not running"))
    }

    /// Everything the daemon has said, over all its starts.
    #[must_use]
    pub fn log(&self) -> String {
        let mut bytes = Vec::new();
        let read = File::open(self.log_path()).and_then(|mut f| f.read_to_end(&mut bytes));
        match read {
            Ok(_) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(e) => format!("(no log: {e})"),
        }
    }

    fn log_path(&self) -> PathBuf {
        self.dir().join("log")
    }

    /// Starts the daemon again with the same arguments, on the same images.
    ///
    /// # Errors
    /// It runs already, does not start in time, or ends at once; the error shows its log.
    pub fn restart(&mut self) -> Result {
        check(self.child.is_none(), || "the daemon runs already".into())?;
        let starts = self.starts_completed();
        let mut command = self.setup.command()?;
        self.child = Some(self.spawn(&mut command)?);
        let socket = self.socket();
        let ready = process::until("an NBD greeting", PATIENCE, || {
            let child = self.child.as_mut();
            match child.map(Child::try_wait).transpose().map_err(Error::io("look at ebbd"))? {
                Some(None) => Ok(crate::harness::nbd::Handshake::connect(&socket).ok()),
                ended => Err(Error::unexpected(format!("ended at once: {ended:?}"))),
            }
        });
        if let Err(e) = ready {
            self.kill9()?;
            return Err(Error::unexpected(format!("{command:?}\n{e}\n--- log\n{}", self.log())));
        }
        self.wait_for_volumes(starts);
        Ok(())
    }

    /// As [`Server::restart`], and does not wait until it serves.
    ///
    /// # Errors
    /// It runs already, or cannot be started.
    pub fn begin_restart(&mut self) -> Result {
        check(self.child.is_none(), || "the daemon runs already".into())?;
        let mut command = self.setup.command()?;
        self.child = Some(self.spawn(&mut command)?);
        Ok(())
    }

    /// Waits until the daemon has reported the end of its start: on a slow disk it greets clients
    /// before its volumes are open. A daemon that ends, or reports nothing, is left to the test.
    fn wait_for_volumes(&mut self, starts: usize) {
        let reports = matches!(self.setup.log_level, "info" | "debug" | "trace");
        if !reports || !self.setup.waits_for_volumes {
            return;
        }
        let _ = process::until("the end of the start", START_LIMIT, || {
            let ended = !matches!(self.child.as_mut().map(Child::try_wait), Some(Ok(None)));
            Ok((ended || self.starts_completed() > starts).then_some(()))
        });
    }

    /// Number of starts whose end the log reports.
    fn starts_completed(&self) -> usize {
        let ends = |line: &&str| line.contains(" ready ") || line.contains("\"message\":\"ready\"");
        self.log().lines().filter(ends).count()
    }

    /// Starts a successor while the old daemon is ending; the old one is returned.
    ///
    /// # Errors
    /// As [`Server::restart`].
    pub fn succeed(&mut self) -> Result<Child> {
        let old = self.child.take().ok_or_else(|| Error::unexpected("not running"))?;
        self.restart()?;
        Ok(old)
    }

    /// Starts a successor with `--takeover`, and returns the old daemon, which exits by itself.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn begin_takeover(&mut self) -> Result<Child> {
        let old = self.child.take().ok_or_else(|| Error::unexpected("not running"))?;
        let mut command = self.setup.command()?;
        command.arg("--takeover");
        self.child = Some(self.spawn(&mut command)?);
        Ok(old)
    }

    /// As [`Server::begin_takeover`], and waits until the successor serves new clients.
    ///
    /// # Errors
    /// It does not in time; the error shows its log.
    pub fn take_over(&mut self) -> Result<Child> {
        let old = self.begin_takeover()?;
        self.wait_until_served()?;
        Ok(old)
    }

    /// Starts a successor with more arguments, which cannot serve, and waits for its end.
    ///
    /// # Errors
    /// It does not end.
    pub fn failing_takeover(&mut self, arguments: &[String]) -> Result<ExitStatus> {
        let mut command = self.setup.command()?;
        command.arg("--takeover").args(arguments);
        let mut child = self.spawn(&mut command)?;
        let ended = process::wait(&mut child, PATIENCE)?;
        ended.ok_or_else(|| Error::unexpected(format!("it has not ended\n{}", self.log())))
    }

    /// Runs the daemon by another program from its next start on, as [`Setup::under`].
    pub fn set_prefix(&mut self, prefix: Vec<String>) {
        self.setup.prefix = prefix;
    }

    /// The daemon that serves after a takeover that has failed.
    pub fn take_back(&mut self, old: Child) {
        self.child = Some(old);
    }

    /// Waits until the daemon greets new clients.
    ///
    /// # Errors
    /// It does not in time; the error shows its log.
    pub fn wait_until_served(&mut self) -> Result {
        let socket = self.socket();
        let served = process::until("an NBD greeting", PATIENCE, || {
            Ok(crate::harness::nbd::Handshake::connect(&socket).ok())
        });
        served.map(drop).map_err(|e| Error::unexpected(format!("{e}\n--- log\n{}", self.log())))
    }

    fn spawn(&self, command: &mut Command) -> Result<Child> {
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.log_path())
            .map_err(Error::io("open the log"))?;
        let out = log.try_clone().map_err(Error::io("open the log"))?;
        command.stdin(Stdio::null()).stdout(out).stderr(log);
        command.spawn().map_err(Error::io(format!("{command:?}")))
    }

    /// Sends a signal to the daemon.
    ///
    /// # Errors
    /// It is not running.
    pub fn signal(&self, signal: Signal) -> Result {
        let child = self.child.as_ref();
        let pid = process::pid_of(child.ok_or_else(|| Error::unexpected("not running"))?)?;
        kill_process(pid, signal).map_err(|e| Error::io("send a signal")(e.into()))
    }

    /// Stops the daemon (SIGTERM), waits for it and expects exit status 0.
    ///
    /// # Errors
    /// It does not end in time, or with another status; the error shows its log.
    pub fn stop(&mut self) -> Result {
        self.signal(Signal::TERM)?;
        let status = self.wait(PATIENCE)?;
        check(status.code() == Some(0), || {
            format!("SIGTERM: expected exit status 0, seen {status}\n--- log\n{}", self.log())
        })
    }

    /// Waits for the daemon to end by itself.
    ///
    /// # Errors
    /// It still runs after `limit`; then it is killed.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let child = self.child.as_mut().ok_or_else(|| Error::unexpected("not running"))?;
        let status = process::wait(child, limit)?;
        if status.is_none() {
            self.kill9()?;
        }
        self.child = None;
        status.ok_or_else(|| {
            Error::unexpected(format!("did not end within {limit:?}\n--- log\n{}", self.log()))
        })
    }

    /// Kills the daemon (SIGKILL) and waits until it has ended.
    ///
    /// # Errors
    /// The system refuses.
    pub fn kill9(&mut self) -> Result {
        if let Some(mut child) = self.child.take() {
            child.kill().map_err(Error::io("kill ebbd"))?;
            child.wait().map_err(Error::io("wait for ebbd"))?;
        }
        Ok(())
    }

    /// Asks that the daemon still runs and has logged neither a panic nor a failed assertion.
    ///
    /// # Errors
    /// It does not, or has.
    pub fn healthy(&mut self) -> Result {
        let log = self.log();
        check(!log.contains("panicked"), || format!("the daemon panicked:\n{log}"))?;
        let child = self.child.as_mut().ok_or_else(|| Error::unexpected("not running"))?;
        match child.try_wait().map_err(Error::io("look at ebbd"))? {
            None => Ok(()),
            Some(status) => Err(Error::unexpected(format!("ended with {status}:\n{log}"))),
        }
    }
}

impl Drop for Server {
    #[expect(clippy::print_stderr, reason = "shown by the test harness for a failed test")]
    fn drop(&mut self) {
        let _ = self.kill9();
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        let shown = lines.len().saturating_sub(200);
        eprintln!("--- log of {} (last {} lines)", self.dir().display(), lines.len() - shown);
        for line in &lines[shown..] {
            eprintln!("{line}");
        }
    }
}
