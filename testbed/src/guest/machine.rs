//! A guest that runs, and what is left of it.

use super::qmp::Qmp;
use crate::harness::process;
use crate::harness::process::{PATIENCE, until};
use crate::{Error, Result};
use rustix::process::{Signal, kill_process};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::Child;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

/// What is left of a guest that powered off.
#[derive(Debug)]
pub struct Outcome {
    /// Exit status of the script.
    pub status: i32,
    /// The whole console.
    pub console: String,
    answers: Vec<(String, String)>,
}

/// A guest that runs.
#[derive(Debug)]
pub struct Machine {
    pub(super) qemu: Child,
    pub(super) limit: Duration,
    pub(super) dir: TempDir,
    pub(super) qmp: Option<Qmp>,
    /// Held while any guest of a test runs.
    pub(super) alone: Arc<File>,
}

impl Machine {
    /// Waits for the guest to power off.
    ///
    /// # Errors
    /// It did not in time (then it is killed), or crashed; the error shows the console.
    pub fn wait(mut self) -> Result<Outcome> {
        let ended = process::wait(&mut self.qemu, self.limit)?;
        let console = self.text("console");
        let answers = self.answers();
        let status =
            answers.iter().rev().find_map(|(k, v)| (k == "exit").then(|| v.parse().ok())?);
        match (ended, status) {
            (Some(end), Some(status)) if end.success() => Ok(Outcome { status, console, answers }),
            (ended, _) => Err(Error::unexpected(format!(
                "the guest did not end by itself (QEMU: {ended:?})\n--- QEMU\n{}--- console\n{console}",
                self.text("qemu.log"),
            ))),
        }
    }

    /// What the script has said so far: keys and values.
    #[must_use]
    pub fn answers(&self) -> Vec<(String, String)> {
        let text = self.text("answers");
        // The last line may not be complete yet.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let pair = |line: &str| {
            let (key, value) = line.trim().split_once(' ').unwrap_or((line.trim(), ""));
            (key.to_owned(), value.to_owned())
        };
        whole.lines().map(pair).collect()
    }

    /// What the guest has printed on its console so far.
    #[must_use]
    pub fn console(&self) -> String {
        self.text("console")
    }

    /// How often the script of an interactive guest has been ready for a call, since its QEMU started.
    #[must_use]
    pub fn ready_count(&self) -> usize {
        ready_count(&self.answers())
    }

    /// Waits until an interactive guest waits for a call, for the `count`th time since its QEMU started.
    ///
    /// # Errors
    /// Its script or QEMU ended instead, or it took too long; the error shows the console.
    pub fn ready(&mut self, count: usize) -> Result {
        let waited = until(&format!("the guest is ready, {count} times"), self.limit, || {
            let answers = self.answers();
            let ended = self.qemu.try_wait().map_err(Error::io("look at QEMU"))?;
            match answers.iter().find(|(key, _)| key == "exit") {
                Some((_, status)) => {
                    Err(Error::unexpected(format!("its script ended with {status}")))
                }
                None if ended.is_some() => Err(Error::unexpected(format!("QEMU ended: {ended:?}"))),
                None => Ok((ready_count(&answers) >= count).then_some(())),
            }
        });
        waited.map_err(|e| {
            let (qemu, console) = (self.text("qemu.log"), self.console());
            Error::unexpected(format!("{e}\n--- QEMU\n{qemu}--- console\n{console}"))
        })
    }

    /// Has an interactive guest that is ready carry out a command, and waits for its end.
    ///
    /// # Errors
    /// As [`Machine::ready`]; a command that fails ends the script.
    pub fn call(&mut self, command: &str) -> Result {
        let count = self.ready_count();
        self.order(command)?;
        self.ready(count + 1)
    }

    /// Sends a command to an interactive guest that is ready, and does not wait.
    ///
    /// # Errors
    /// QEMU has ended.
    pub fn order(&self, command: &str) -> Result {
        let line = File::options().write(true).open(self.dir.path().join("line.in"));
        line.and_then(|mut line| line.write_all(format!("{command}\n").as_bytes()))
            .map_err(Error::io("send a command to the guest"))
    }

    /// The last result that the script has reported under this key.
    ///
    /// # Errors
    /// There is none.
    pub fn answer(&self, key: &str) -> Result<String> {
        let found = self.answers().into_iter().rev().find(|(k, _)| k == key);
        let missing = || Error::unexpected(format!("no answer {key}\n{}", self.console()));
        found.map(|(_, value)| value).ok_or_else(missing)
    }

    /// The connection to QEMU's monitor.
    ///
    /// # Errors
    /// QEMU has ended, or its greeting does not come.
    pub fn qmp(&mut self) -> Result<&mut Qmp> {
        if self.qmp.is_none() {
            let path = self.dir.path().join("qmp");
            let socket = until("QEMU's monitor", PATIENCE, || match Qmp::connect(&path) {
                Ok(qmp) => Ok(Some(qmp)),
                Err(Error::Io { .. })
                    if self.qemu.try_wait().map_err(Error::io("look at QEMU"))?.is_none() =>
                {
                    Ok(None)
                }
                Err(e) => Err(e),
            })?;
            self.qmp = Some(socket);
        }
        self.qmp.as_mut().ok_or_else(|| Error::unexpected("no monitor"))
    }

    /// Whether QEMU runs.
    ///
    /// # Errors
    /// The system refuses to say.
    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.qemu.try_wait().map_err(Error::io("look at QEMU"))?.is_none())
    }

    /// Whether QEMU has ended by a signal of a fault: an abort, or a wrong access to memory.
    ///
    /// # Errors
    /// The system refuses to say.
    pub fn crashed(&mut self) -> Result<bool> {
        let ended = self.qemu.try_wait().map_err(Error::io("look at QEMU"))?;
        let faults = [Signal::ABORT, Signal::SEGV, Signal::BUS, Signal::ILL];
        let signal = ended.and_then(|status| status.signal());
        Ok(faults.iter().any(|fault| signal == Some(fault.as_raw())))
    }

    /// Stops QEMU (SIGSTOP): its connections stay.
    ///
    /// # Errors
    /// It has ended.
    pub fn freeze(&self) -> Result {
        let pid = process::pid_of(&self.qemu)?;
        kill_process(pid, Signal::STOP).map_err(|e| Error::io("stop QEMU")(e.into()))
    }

    /// Lets a stopped QEMU run again.
    ///
    /// # Errors
    /// It has ended.
    pub fn thaw(&self) -> Result {
        let pid = process::pid_of(&self.qemu)?;
        kill_process(pid, Signal::CONT).map_err(|e| Error::io("continue QEMU")(e.into()))
    }

    /// Cuts the power: what the guest had not written to its disks is lost.
    pub fn cut_power(self) {}

    fn text(&self, file: &str) -> String {
        let bytes = fs::read(self.dir.path().join(file)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// How often the script of an interactive guest has waited for a call.
fn ready_count(answers: &[(String, String)]) -> usize {
    answers.iter().filter(|(key, _)| key == "ready").count()
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

impl Outcome {
    /// The last result that the script reported under this key.
    ///
    /// # Errors
    /// It reported none; the error shows the console.
    pub fn answer(&self, key: &str) -> Result<&str> {
        let found = self.answers.iter().rev().find(|(k, _)| k == key);
        found
            .map(|(_, value)| value.as_str())
            .ok_or_else(|| self.unexpected(&format!("an answer called {key}")))
    }

    /// All results that the script reported under this key, in order.
    pub fn all<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> {
        self.answers.iter().filter(move |(k, _)| k == key).map(|(_, value)| value.as_str())
    }

    /// An error that shows the console and says what was expected of the guest.
    #[must_use]
    pub fn unexpected(&self, expected: &str) -> Error {
        Error::unexpected(format!("expected {expected}\n--- console\n{}", self.console))
    }
}
