//! What `/proc` says about a server and the machine, and running a tool to its end.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Signal, kill_process};

use super::{Error, io_context, log};
use crate::harness::process::{pid_of, wait};

/// What to do when a tool is missing.
pub const INSTALL: &str = "run testbed/install";

/// CPU time of all threads of a process, running and ended, user and system, in microseconds. The
/// kernel counts it exactly and shows it in clock ticks (10 ms as a rule).
///
/// # Errors
/// [`Error`] when the process has ended or the text is not as `proc(5)` says.
pub fn cpu_us(pid: u32) -> Result<f64, Error> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))
        .map_err(io_context(format!("reading CPU time of process {pid}")))?;
    let ticks = cpu_ticks(&text)
        .ok_or_else(|| Error::Output { from: "/proc/PID/stat", what: text.clone() })?;
    Ok(ticks as f64 * 1e6 / rustix::param::clock_ticks_per_second() as f64)
}

/// CPU time of the threads of a process that live now, in microseconds. Finer than [`cpu_us`], which is in clock ticks.
///
/// # Errors
/// [`Error`] when the process has ended or the text is not as the kernel's documentation of `schedstat` says.
pub fn threads_cpu_us(pid: u32) -> Result<f64, Error> {
    let folder = format!("/proc/{pid}/task");
    let reading = || io_context(format!("reading {folder}"));
    let mut sum = 0;
    for thread in fs::read_dir(&folder).map_err(reading())? {
        let path = thread.map_err(reading())?.path().join("schedstat");
        let text = fs::read_to_string(path).map_err(reading())?;
        let time = text.split(' ').next().and_then(|nanos| nanos.parse::<u64>().ok());
        sum += time.ok_or(Error::Output { from: "/proc/PID/task/TID/schedstat", what: text })?;
    }
    Ok(sum as f64 / 1e3)
}

/// `utime + stime`, fields 14 and 15. The second field is a name in parentheses that may hold
/// blanks and parentheses itself.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace().skip(11).map(str::parse::<u64>);
    fields.next()?.ok()?.checked_add(fields.next()?.ok()?)
}

/// Number of times each thread of a process has gone to sleep, by thread id.
pub type Sleeps = BTreeMap<u64, u64>;

/// Reads how often each thread of a process has gone to sleep, and so was woken.
///
/// # Errors
/// [`Error`] when the process has ended or the text is not as `proc(5)` says.
pub fn sleeps(pid: u32) -> Result<Sleeps, Error> {
    let folder = format!("/proc/{pid}/task");
    let reading = || io_context(format!("reading {folder}"));
    let mut all = Sleeps::new();
    for thread in fs::read_dir(&folder).map_err(reading())? {
        let thread = thread.map_err(reading())?;
        let id = thread.file_name().to_str().and_then(|name| name.parse().ok());
        // A thread that has ended since.
        let Ok(text) = fs::read_to_string(thread.path().join("status")) else { continue };
        let id = id.ok_or_else(|| Error::Output { from: "/proc/PID/task", what: text.clone() })?;
        let count = text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        let count = count.and_then(|count| count.trim().parse::<u64>().ok());
        let count = count.ok_or(Error::Output { from: "/proc/PID/task/TID/status", what: text })?;
        all.insert(id, count);
    }
    Ok(all)
}

/// Number of wakeups between two moments of the threads that live at the second one. A thread that has ended in between
/// takes its count with it: the difference of two sums could be negative.
#[must_use]
pub fn wakeups(before: &Sleeps, now: &Sleeps) -> u64 {
    let of = |(id, count): (&u64, &u64)| {
        count.saturating_sub(before.get(id).copied().unwrap_or_default())
    };
    now.iter().map(of).sum()
}

/// Resident memory of a process in KiB, counted page by page (`VmRSS` lags behind by some pages per
/// CPU, more than a small daemon's growth).
///
/// # Errors
/// [`Error`] when the process has ended or the text is not as `proc(5)` says.
pub fn resident_kib(pid: u32) -> Result<f64, Error> {
    rollup(pid, "Rss:")
}

/// As [`resident_kib`], without the program and memory that is shared with others: what it allocated itself.
///
/// # Errors
/// As [`resident_kib`].
pub fn anonymous_kib(pid: u32) -> Result<f64, Error> {
    rollup(pid, "Anonymous:")
}

/// As [`anonymous_kib`], without what is lent to the kernel, which takes it when it needs memory.
///
/// # Errors
/// As [`resident_kib`].
pub fn kept_kib(pid: u32) -> Result<f64, Error> {
    Ok(rollup(pid, "Anonymous:")? - rollup(pid, "LazyFree:")?)
}

fn rollup(pid: u32, field: &str) -> Result<f64, Error> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))
        .map_err(io_context(format!("reading resident memory of process {pid}")))?;
    rollup_field(&text, field).ok_or(Error::Output { from: "/proc/PID/smaps_rollup", what: text })
}

fn rollup_field(rollup: &str, field: &str) -> Option<f64> {
    let line = rollup.lines().find_map(|line| line.strip_prefix(field))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u32>().ok().map(f64::from)
}

/// Sends a signal to a child.
///
/// # Errors
/// [`Error::Io`] when the child has ended.
pub fn signal(child: &Child, signal: Signal) -> Result<(), Error> {
    let sending = || format!("signalling process {}", child.id());
    let pid = pid_of(child)
        .map_err(|error| Error::Failed { program: "kill".into(), what: error.to_string() })?;
    kill_process(pid, signal).map_err(|error| io_context(sending())(error.into()))
}

/// Waits for a child's end; after `limit` ends it by SIGTERM, then SIGKILL, and fails.
///
/// # Errors
/// [`Error::Failed`] when it took longer.
pub fn finish(child: &mut Child, program: &str, limit: Duration) -> Result<ExitStatus, Error> {
    let failed = |what: String| Error::Failed { program: program.into(), what };
    if let Some(status) = wait(child, limit).map_err(|error| failed(error.to_string()))? {
        return Ok(status);
    }
    // Politely first: perf and strace then end or release what they watch.
    signal(child, Signal::TERM)?;
    if !matches!(wait(child, Duration::from_secs(5)), Ok(Some(_))) {
        child.kill().map_err(io_context(format!("killing {program}")))?;
        child.wait().map_err(io_context(format!("waiting for {program}")))?;
    }
    Err(failed(format!("was not done after {limit:?} and was ended")))
}

/// Runs a command with its output in `output`, for at most `limit`.
///
/// # Errors
/// [`Error::Tool`] when it does not start, [`Error::Failed`] when it exits with failure or
/// takes longer, with the end of its output.
pub fn run(mut command: Command, output: &Path, limit: Duration) -> Result<(), Error> {
    let program = command.get_program().to_string_lossy().into_owned();
    let (stdout, stderr) = fs::File::create(output)
        .and_then(|file| Ok((file.try_clone()?, file)))
        .map_err(io_context(format!("making {}", output.display())))?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(stdout)
        .stderr(stderr)
        .spawn()
        .map_err(|source| Error::Tool { program: program.clone(), remedy: INSTALL, source })?;
    let status = finish(&mut child, &program, limit)?;
    if status.success() {
        return Ok(());
    }
    Err(Error::Failed { program, what: format!("{status}: {}", tail(output)) })
}

/// The end of a log file, for an error message.
#[must_use]
pub fn tail(path: &Path) -> String {
    let text = fs::read(path).unwrap_or_default();
    let last = &text[text.len().saturating_sub(2000)..];
    String::from_utf8_lossy(last).trim().to_owned()
}

/// First line of what `program --version` prints.
fn version(program: &str) -> Result<String, Error> {
    let output = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .output()
        .map_err(|source| Error::Tool { program: program.into(), remedy: INSTALL, source })?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().next().unwrap_or("no version").to_owned())
}

/// Logs what the figures depend on, and so checks that every one of `tools` is there.
///
/// # Errors
/// [`Error::Tool`] for the first tool that is missing.
pub fn describe_machine(daemon: &Path, tools: &[&str]) -> Result<(), Error> {
    for program in tools {
        log(format_args!("{program}: {}", version(program)?));
    }
    log(format_args!("measured daemon: {}", daemon.display()));
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let processors = std::thread::available_parallelism().map_or(0, usize::from);
    log(format_args!(
        "kernel {}, {processors} processors shared by server and client",
        kernel.trim(),
    ));
    describe_load();
    Ok(())
}

/// Logs the load average: what else ran beside the measurement, and the measurement itself.
pub fn describe_load() {
    let busy = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    log(format_args!("load average {}", busy.trim()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ended_threads_make_no_negative_count() {
        let before = Sleeps::from([(1, 100), (2, 5000)]);
        let now = Sleeps::from([(1, 103), (7, 4)]);
        assert_eq!(wakeups(&before, &now), 7);
    }

    #[test]
    fn cpu_time_survives_any_process_name() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 9 0 0 0 31 11 5 6 20 0 1 0 99 1 1";
        assert_eq!(cpu_ticks(stat), Some(42));
        for broken in ["", "7 (a", "7 (a) S 1", "7 (a) S 1 7 7 0 -1 4 9 0 0 0 x 11"] {
            assert_eq!(cpu_ticks(broken), None, "{broken:?}");
        }
    }

    #[test]
    fn resident_memory_is_read_from_the_rollup() {
        let rollup = "55d0-7ffc ---p 00000000 00:00 0  [rollup]\nRss:         4516 kB\nPss: 1 kB\n";
        assert_eq!(rollup_field(rollup, "Rss:"), Some(4516.0));
        assert_eq!(rollup_field("Pss: 1 kB\n", "Rss:"), None);
        assert!(resident_kib(std::process::id()).unwrap() > 100.0);
    }

    #[test]
    fn failure_carries_the_output_and_slowness_ends() {
        let directory = tempfile::tempdir().unwrap();
        let output = directory.path().join("out");
        let mut command = Command::new("sh");
        command.args(["-c", "echo because >&2; exit 3"]);
        let error = run(command, &output, Duration::from_secs(20)).unwrap_err().to_string();
        assert!(error.contains("because") && error.contains('3'), "{error}");
        let mut command = Command::new("sleep");
        command.arg("60");
        let error = run(command, &output, Duration::from_millis(20)).unwrap_err();
        assert!(error.to_string().contains("was ended"), "{error}");
        let missing = run(Command::new("no-such-tool"), &output, Duration::from_secs(1));
        assert!(missing.unwrap_err().to_string().contains(INSTALL));
    }
}
