//! Counts the system calls of a server while fio runs.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;

use super::workdir::Workdir;
use super::{Error, io_context, log, process};

/// What counts the calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counter {
    /// `perf stat` on the tracepoint `raw_syscalls:sys_enter`; hardly slows the server.
    Perf,
    /// `strace -c -f`; slows the server so much that requests queue up and batches grow.
    Strace,
}

const TRACEPOINT: &str = "raw_syscalls:sys_enter";

impl Counter {
    /// perf where it can count on this machine, else strace; the log says which.
    #[must_use]
    pub fn choose() -> Self {
        let tried = Command::new("perf")
            .args(["stat", "-x,", "-e", TRACEPOINT, "--", "true"])
            .stdin(Stdio::null())
            .output();
        let reason = match tried {
            Ok(output) if output.status.success() => {
                match perf_count(&String::from_utf8_lossy(&output.stderr)) {
                    Ok(count) if count > 0 => {
                        log(format_args!("counting system calls by perf stat -e {TRACEPOINT}"));
                        return Self::Perf;
                    }
                    _ => "it counts nothing".to_owned(),
                }
            }
            Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            Err(error) => error.to_string(),
        };
        log(format_args!(
            "perf cannot count system calls here ({reason}); using strace -c -f, which slows the \
             server, so that calls per request come out too low where it works in batches"
        ));
        Self::Strace
    }

    /// Runs `load` to its end and returns the calls process `pid` made meanwhile, in all threads.
    ///
    /// # Errors
    /// [`Error`] when the counter or the load fails.
    pub fn count(
        self,
        pid: u32,
        load: &Command,
        work: &Workdir,
        limit: Duration,
    ) -> Result<u64, Error> {
        let report = work.path("syscalls.txt");
        let read = || {
            fs::read_to_string(&report).map_err(io_context(format!("reading {}", report.display())))
        };
        match self {
            Self::Perf => {
                // perf counts for as long as the command it is given runs.
                let mut perf = Command::new("perf");
                perf.args(["stat", "-x,", "-e", TRACEPOINT, "-o"]).arg(&report);
                perf.args(["-p", &pid.to_string(), "--"]).arg(load.get_program());
                perf.args(load.get_args());
                process::run(perf, &work.path("client.log"), limit)?;
                perf_count(&read()?)
            }
            Self::Strace => {
                under_strace(pid, load, work, &report, limit)?;
                strace_count(&read()?)
            }
        }
    }
}

fn under_strace(
    pid: u32,
    load: &Command,
    work: &Workdir,
    report: &Path,
    limit: Duration,
) -> Result<(), Error> {
    let said = work.path("strace.log");
    let log = File::create(&said).map_err(io_context("making the log of strace"))?;
    let mut strace = Command::new("strace")
        .args(["-c", "-f", "-o"])
        .arg(report)
        .args(["-p", &pid.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .map_err(|source| Error::Tool {
            program: "strace".into(),
            remedy: process::INSTALL,
            source,
        })?;
    let attached =
        crate::harness::process::until("strace attached", Duration::from_secs(10), || {
            let ended = !matches!(strace.try_wait(), Ok(None));
            Ok((ended || process::tail(&said).contains("attached")).then_some(()))
        });
    let mut client = Command::new(load.get_program());
    client.args(load.get_args());
    let ran = attached
        .map_err(|error| Error::Failed { program: "strace".into(), what: error.to_string() })
        .and_then(|()| process::run(client, &work.path("client.log"), limit));
    // On SIGINT strace detaches from the server and writes its table; it then ends by that signal.
    process::signal(&strace, Signal::INT)?;
    process::finish(&mut strace, "strace", Duration::from_secs(20))?;
    ran
}

/// The count in a line of `perf stat -x,`: `count,unit,event,...`.
fn perf_count(text: &str) -> Result<u64, Error> {
    text.lines()
        .find(|line| line.contains(TRACEPOINT))
        .and_then(|line| line.split(',').next()?.trim().parse().ok())
        .ok_or_else(|| Error::Output { from: "perf stat", what: text.trim().to_owned() })
}

/// The sum in the last line of `strace -c`: `% time, seconds, usecs/call, calls, [errors], total`.
fn strace_count(text: &str) -> Result<u64, Error> {
    text.lines()
        .rfind(|line| line.trim_end().ends_with(" total"))
        .and_then(|line| line.split_ascii_whitespace().nth(3)?.parse().ok())
        .ok_or_else(|| Error::Output { from: "strace -c", what: text.trim().to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn perf_output_is_read() {
        let text = "# started on Sat\n\n576755,,raw_syscalls:sys_enter,856344233,100.00,,\n";
        assert_eq!(perf_count(text).unwrap(), 576_755);
        for broken in ["", "<not counted>,,raw_syscalls:sys_enter,0,100.00,,", "12,,cycles,,,"] {
            assert!(perf_count(broken).is_err(), "{broken:?}");
        }
    }

    #[test]
    fn strace_output_is_read() {
        let table = "% time     seconds  usecs/call     calls    errors syscall\n\
            ------ ----------- ----------- --------- --------- ----------------\n \
            60.00    0.000003           1         2           read\n\
            ------ ----------- ----------- --------- --------- ----------------\n\
            100.00    0.000005           0       144        19 total\n";
        assert_eq!(strace_count(table).unwrap(), 144);
        assert!(strace_count("").is_err());
    }
}
