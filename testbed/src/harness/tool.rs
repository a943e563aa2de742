//! Runs a program with a time limit and keeps everything it said.

use crate::harness::process;
use crate::harness::process::PATIENCE;
use crate::{Error, Result};
use rustix::process::{Signal, kill_process_group};
use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

/// A program to run, with its arguments. [`Tool::run`] runs it; the default time limit is [`PATIENCE`].
#[derive(Debug, Clone)]
pub struct Tool {
    program: OsString,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    dir: Option<PathBuf>,
    stdin: Vec<u8>,
    limit: Duration,
}

/// How a program ended and what it said.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The command, as typed in a shell.
    pub command: String,
    /// How it ended.
    pub status: ExitStatus,
    /// Its standard output, invalid UTF-8 replaced.
    pub stdout: String,
    /// Its standard error, invalid UTF-8 replaced.
    pub stderr: String,
}

impl Tool {
    /// A program, looked up in `PATH` unless it holds a slash.
    pub fn new(program: impl AsRef<OsStr>) -> Tool {
        Tool {
            program: program.as_ref().into(),
            args: Vec::new(),
            env: Vec::new(),
            dir: None,
            stdin: Vec::new(),
            limit: PATIENCE,
        }
    }

    /// Adds one argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Tool {
        self.args.push(arg.as_ref().into());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Tool {
        self.args.extend(args.into_iter().map(|a| a.as_ref().into()));
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Tool {
        self.env.push((name.as_ref().into(), value.as_ref().into()));
        self
    }

    /// Runs in this directory.
    #[must_use]
    pub fn dir(mut self, dir: impl Into<PathBuf>) -> Tool {
        self.dir = Some(dir.into());
        self
    }

    /// Gives this as standard input; the default is none.
    #[must_use]
    pub fn stdin(mut self, text: impl Into<Vec<u8>>) -> Tool {
        self.stdin = text.into();
        self
    }

    /// Kills the program and all it started after this time.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Tool {
        self.limit = limit;
        self
    }

    fn command_line(&self) -> String {
        let words = std::iter::once(&self.program).chain(&self.args);
        let quoted = words.map(|w| {
            let w = w.to_string_lossy();
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./:,+%@".contains(c);
            if !w.is_empty() && w.chars().all(plain) { w.into() } else { format!("'{w}'") }
        });
        quoted.collect::<Vec<String>>().join(" ")
    }

    /// Runs the program to its end, whatever its status.
    ///
    /// # Errors
    /// It is not installed, or has not ended in time (then it is killed, and the error holds what
    /// it had said).
    pub fn run(&self) -> Result<Outcome> {
        let mut command = Command::new(&self.program);
        command.args(&self.args).envs(self.env.iter().map(|(n, v)| (n, v)));
        // A group of its own: what the program starts ends with it.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.process_group(0);
        if let Some(dir) = &self.dir {
            command.current_dir(dir);
        }
        let line = self.command_line();
        let mut child = command.spawn().map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => {
                Error::MissingProgram { program: self.program.to_string_lossy().into() }
            }
            _ => Error::io(&line)(e),
        })?;
        let group = process::pid_of(&child)?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take();
        let stderr = child.stderr.take();
        thread::scope(|scope| {
            scope.spawn(move || {
                // A program that ends without reading its input is judged by its status.
                stdin.map(|mut pipe| pipe.write_all(&self.stdin))
            });
            let stdout = scope.spawn(move || collect(stdout));
            let stderr = scope.spawn(move || collect(stderr));
            let ended = process::ended(&child, self.limit);
            // Also after a proper end: nothing it started may keep the pipes open, or live on.
            let _ = kill_process_group(group, Signal::KILL);
            let status = child.wait().map_err(Error::io(&line));
            let stdout = stdout.join().unwrap_or_default();
            let stderr = stderr.join().unwrap_or_default();
            match ended? {
                true => Ok(Outcome { status: status?, command: line, stdout, stderr }),
                false => Err(Error::unexpected(format!(
                    "$ {line}\ndid not end within {:?}\n--- stdout\n{stdout}--- stderr\n{stderr}",
                    self.limit
                ))),
            }
        })
    }

    /// Runs the program and expects success.
    ///
    /// # Errors
    /// As [`Tool::run`]; or the program failed.
    pub fn ok(&self) -> Result<Outcome> {
        let outcome = self.run()?;
        if outcome.status.success() { Ok(outcome) } else { Err(outcome.unexpected("to succeed")) }
    }

    /// Runs the program and expects a failure that it reported itself (an exit status, no signal).
    ///
    /// # Errors
    /// As [`Tool::run`]; or the program succeeded or died by a signal.
    pub fn fails(&self) -> Result<Outcome> {
        let outcome = self.run()?;
        match outcome.status.code() {
            Some(0) | None => Err(outcome.unexpected("to fail with an exit status")),
            Some(_) => Ok(outcome),
        }
    }
}

impl Outcome {
    /// An error that shows the whole run and says what was expected of it.
    #[must_use]
    pub fn unexpected(&self, expected: &str) -> Error {
        Error::unexpected(format!("expected {expected}:\n{self}"))
    }

    /// Asks for a condition on this outcome.
    ///
    /// # Errors
    /// The condition does not hold; the error shows the whole run.
    pub fn check(&self, condition: bool, expected: &str) -> Result {
        if condition { Ok(()) } else { Err(self.unexpected(expected)) }
    }

    /// Standard output as JSON.
    ///
    /// # Errors
    /// It is none.
    pub fn json(&self) -> Result<serde_json::Value> {
        serde_json::from_str(&self.stdout)
            .map_err(|e| self.unexpected(&format!("JSON on standard output ({e})")))
    }
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "$ {}\n{}\n--- stdout\n{}\n--- stderr\n{}",
            self.command, self.status, self.stdout, self.stderr
        )
    }
}

fn collect(pipe: Option<impl Read>) -> String {
    let mut bytes = Vec::new();
    if let Some(mut pipe) = pipe {
        // A broken pipe ends the text; what came before it is kept.
        let _ = pipe.read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_and_status_are_kept() {
        let outcome = Tool::new("sh").args(["-c", "cat; echo err >&2; exit 3"]).stdin("in").run();
        let outcome = outcome.unwrap();
        assert_eq!((outcome.stdout.as_str(), outcome.stderr.as_str()), ("in", "err\n"));
        assert_eq!(outcome.status.code(), Some(3));
        assert!(Tool::new("true").ok().is_ok() && Tool::new("true").fails().is_err());
        assert!(Tool::new("false").fails().is_ok() && Tool::new("false").ok().is_err());
        assert!(Tool::new("sh").args(["-c", "kill -9 $$"]).fails().is_err());
    }

    #[test]
    fn a_hanging_program_is_ended_with_what_it_started() {
        let hang = Tool::new("sh").args(["-c", "echo before; sleep 60 & sleep 60"]);
        let error = hang.limit(Duration::from_millis(100)).run().unwrap_err().to_string();
        assert!(error.contains("did not end") && error.contains("before"), "{error}");
    }

    #[test]
    fn a_missing_program_names_the_remedy() {
        let error = Tool::new("no-such-program-here").run().unwrap_err().to_string();
        assert!(error.contains("testbed/install"), "{error}");
    }
}
