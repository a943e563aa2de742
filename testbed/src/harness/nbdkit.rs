//! A remote store by a third-party server: `nbdkit` on a unix socket, which counts its requests.
//!
//! Its log filter writes a line per request, flushed at once, so that a test can determine by
//! counts, not by time, what reached the store.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Signal, kill_process};

use crate::harness::nbd::Client;
use crate::harness::process;
use crate::harness::process::PATIENCE;
use crate::{Error, Result};

/// A running `nbdkit`, killed when dropped.
#[derive(Debug)]
pub struct Nbdkit {
    socket: PathBuf,
    log: PathBuf,
    arguments: Vec<String>,
    child: Option<Child>,
}

impl Nbdkit {
    /// Starts it with a plugin and its parameters (and more filters, if any), its socket and the log
    /// of its requests in `dir`.
    ///
    /// # Errors
    /// It is not installed, or does not serve in time.
    pub fn start(dir: &Path, arguments: &[&str]) -> Result<Nbdkit> {
        let (socket, log) = (dir.join("store.sock"), dir.join("store.log"));
        let arguments = arguments.iter().map(ToString::to_string).collect();
        let mut store = Nbdkit { socket, log, arguments, child: None };
        store.restart()?;
        Ok(store)
    }

    /// Starts it again after [`Nbdkit::kill`].
    ///
    /// # Errors
    /// As [`Nbdkit::start`].
    pub fn restart(&mut self) -> Result {
        self.kill()?;
        // A killed one leaves its socket behind, and the next refuses to start there.
        let _ = fs::remove_file(&self.socket);
        let mut command = Command::new("nbdkit");
        command.arg("--foreground").arg("--unix").arg(&self.socket).arg("--filter=log");
        command.args(&self.arguments);
        command.arg(format!("logfile={}", self.log.display())).arg("logappend=true");
        command.stdin(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => Error::MissingProgram { program: "nbdkit".into() },
            _ => Error::io("start nbdkit")(e),
        })?;
        self.child = Some(child);
        let serves = || Ok(Client::open(&self.socket, "").ok());
        process::until("nbdkit serves", PATIENCE, serves)?.disconnect()?;
        Ok(())
    }

    /// Kills it (SIGKILL) and waits until it has ended.
    ///
    /// # Errors
    /// The system refuses.
    pub fn kill(&mut self) -> Result {
        if let Some(mut child) = self.child.take() {
            child.kill().map_err(Error::io("kill nbdkit"))?;
            child.wait().map_err(Error::io("wait for nbdkit"))?;
        }
        Ok(())
    }

    /// Stops it (SIGSTOP): it keeps its connections and does not reply until [`Nbdkit::go_on`].
    ///
    /// # Errors
    /// It does not run.
    pub fn stand_still(&self) -> Result {
        let pid = self.signal(Signal::STOP)?;
        // Each thread stops by itself, a moment later.
        process::until("nbdkit stands still", PATIENCE, || {
            let tasks = format!("/proc/{pid}/task");
            let tasks = fs::read_dir(&tasks).map_err(Error::io("read the threads of nbdkit"))?;
            let still = tasks.flatten().all(|task| {
                let status = fs::read_to_string(task.path().join("status")).unwrap_or_default();
                status.contains("State:\tT")
            });
            Ok(still.then_some(()))
        })
    }

    /// Continues it after [`Nbdkit::stand_still`].
    ///
    /// # Errors
    /// It does not run.
    pub fn go_on(&self) -> Result {
        self.signal(Signal::CONT).map(drop)
    }

    fn signal(&self, signal: Signal) -> Result<u32> {
        let child = self.child.as_ref().ok_or_else(|| Error::unexpected("nbdkit does not run"))?;
        let sent = kill_process(process::pid_of(child)?, signal);
        sent.map_err(|e| Error::io("signal nbdkit")(e.into()))?;
        Ok(child.id())
    }

    /// The URI under which a daemon finds it.
    #[must_use]
    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }

    /// A connection past the daemon, to see what the store really holds.
    ///
    /// # Errors
    /// It does not run.
    pub fn client(&self) -> Result<Client> {
        Ok(Client::open(&self.socket, "")?)
    }

    /// The number of requests of a kind so far, named as in its log: `Read`, `Write`, `Zero`,
    /// `Trim`, `Flush`.
    ///
    /// # Errors
    /// The log cannot be read.
    pub fn count(&self, kind: &str) -> Result<usize> {
        let text = fs::read_to_string(&self.log).map_err(Error::io("read the log of nbdkit"))?;
        let word = format!(" {kind} ");
        Ok(text.lines().filter(|line| line.contains(&word)).count())
    }

    /// Byte offset and length of every read so far.
    ///
    /// # Errors
    /// The log cannot be read.
    pub fn reads(&self) -> Result<Vec<(u64, u64)>> {
        let text = fs::read_to_string(&self.log).map_err(Error::io("read the log of nbdkit"))?;
        let number = |line: &str, field: &str| {
            let digits = line.split_once(field)?.1.split(' ').next()?;
            u64::from_str_radix(digits, 16).ok()
        };
        let reads = text.lines().filter(|line| line.contains(" Read "));
        reads
            .map(|line| number(line, " offset=0x").zip(number(line, " count=0x")))
            .collect::<Option<_>>()
            .ok_or_else(|| {
                Error::unexpected(format!("the log of nbdkit is not understood:\n{text}"))
            })
    }

    /// As [`Nbdkit::count`] once no request has arrived for a while: read-ahead has ended.
    ///
    /// # Errors
    /// The log cannot be read, or requests continue without end.
    pub fn count_at_rest(&self, kind: &str) -> Result<usize> {
        let mut last = (usize::MAX, std::time::Instant::now());
        process::until("no more requests to the store", PATIENCE, || {
            let count = self.count(kind)?;
            if count != last.0 {
                last = (count, std::time::Instant::now());
            }
            Ok((last.1.elapsed() > Duration::from_millis(300)).then_some(count))
        })
    }
}

impl Drop for Nbdkit {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}
