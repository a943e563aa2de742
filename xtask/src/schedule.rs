//! Starts jobs, the widest and slowest first, while there are processors for them.
//!
//! # Invariants
//! - The jobs that run keep busy one processor more than the machine has, at most, going by what
//!   they took in the last run.
//! - Jobs that need to be alone run one by one, after all others; those of a group, one by one.
//! - A job counts as passed only if its program says that it ran all of its tests.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use crate::Result;
use crate::plan::{Job, Taken};
use crate::programs::Programs;
use crate::report;

/// See the crate `seeded`.
const FULL_SCALE: &str = "50";
/// On all architectures that Linux runs on today.
const TICKS_PER_SECOND: f64 = 100.0;
/// After this long a job is killed and has failed.
const LIMIT: Duration = Duration::from_secs(2700);

/// A job that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) name: String,
    pub(crate) tests: usize,
    pub(crate) taken: Taken,
    /// The names of the tests that failed; the name of the job if it named none.
    pub(crate) failed: Vec<String>,
    pub(crate) log: PathBuf,
}

#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) ended: Vec<Ended>,
    pub(crate) seconds: f64,
    pub(crate) target: PathBuf,
    pub(crate) is_full_scale: bool,
}

/// A job that has ended, and what it leaves to others.
struct Done {
    ended: Ended,
    processors: f64,
    group: Option<String>,
}

/// What all jobs of a run share.
struct Place<'a> {
    programs: &'a Programs,
    logs: &'a Path,
    scale: Option<&'static str>,
}

/// Runs all jobs.
pub(crate) fn run(mut jobs: Vec<Job>, programs: &Programs, is_full_scale: bool) -> Result<Outcome> {
    let logs = programs.target.join("test-logs");
    // Logs of tests that no longer exist are not kept.
    let _ = std::fs::remove_dir_all(&logs);
    std::fs::create_dir_all(&logs).map_err(|error| format!("{}: {error}", logs.display()))?;
    let found = std::thread::available_parallelism().map_or(1, usize::from);
    let total = f64::from(u16::try_from(found).unwrap_or(u16::MAX)) + 1.0;
    // Those that need several processors first: later they would wait until the end.
    jobs.sort_by(|a, b| {
        let order = (a.alone, b.processors.max(1.0), b.seconds);
        order
            .partial_cmp(&(b.alone, a.processors.max(1.0), a.seconds))
            .unwrap_or(std::cmp::Ordering::Equal)
    });
    let scale =
        (is_full_scale && std::env::var_os("EBBD_TEST_SCALE").is_none()).then_some(FULL_SCALE);
    let started = Instant::now();
    let (sender, receiver) = channel();
    let (mut ended, mut busy, mut running) = (Vec::new(), 0.0, 0);
    let mut groups = BTreeSet::new();
    while !jobs.is_empty() || running > 0 {
        let may_start = |job: &Job| {
            let has_room = running == 0 || (!job.alone && busy + job.processors <= total);
            has_room && job.group.as_ref().is_none_or(|group| !groups.contains(group))
        };
        if let Some(next) = jobs.iter().position(may_start) {
            let job = jobs.remove(next);
            // A job alone is the first only when no other is left.
            let processors = if job.alone { total } else { job.processors };
            busy += processors;
            running += 1;
            groups.extend(job.group.clone());
            start(job, processors, &Place { programs, logs: &logs, scale }, sender.clone())?;
            continue;
        }
        let Ok(done) = receiver.recv() else { break };
        running -= 1;
        // Sums of fractions are not exact.
        busy = if running == 0 { 0.0 } else { busy - done.processors };
        if let Some(group) = &done.group {
            groups.remove(group);
        }
        report::ended(&done.ended);
        ended.push(done.ended);
    }
    let seconds = started.elapsed().as_secs_f64();
    Ok(Outcome { ended, seconds, target: programs.target.clone(), is_full_scale })
}

/// Starts a job and a thread that waits for it.
fn start(job: Job, processors: f64, place: &Place<'_>, sender: Sender<Done>) -> Result<()> {
    let name = job.name();
    let log = place.logs.join(format!("{}.log", name.replace(['/', ':', ' '], "-")));
    let error = |error: std::io::Error| format!("{}: {error}", log.display());
    let file = File::create(&log).map_err(error)?;
    let other = file.try_clone().map_err(error)?;
    let mut command = Command::new(&job.program.path);
    command.arg("--nocapture").arg("--exact").args(&job.tests);
    command.current_dir(&job.program.dir).env("CARGO_MANIFEST_DIR", &job.program.dir);
    command.env("EBBD_BIN_AS_TESTS", &place.programs.daemon);
    if let Some(scale) = place.scale {
        command.env("EBBD_TEST_SCALE", scale);
    }
    command.stdin(Stdio::null()).stdout(file).stderr(other).process_group(0);
    let child = command.spawn().map_err(|error| format!("{name} cannot be started: {error}"))?;
    std::thread::spawn(move || {
        let started = Instant::now();
        let (is_ok, processor_seconds) = wait(child);
        let taken = Taken { seconds: started.elapsed().as_secs_f64(), processor_seconds };
        let failed = failures(&job, is_ok, &log);
        let ended = Ended { name, tests: job.tests.len(), taken, failed, log };
        // Without a receiver the run is over.
        let _ = sender.send(Done { ended, processors, group: job.group });
    });
    Ok(())
}

/// Returns true if it succeeded in time, and the processor time that it took.
fn wait(mut child: Child) -> (bool, f64) {
    let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let (ended, end) = channel::<()>();
    let watchdog = std::thread::spawn(move || {
        if let (Err(RecvTimeoutError::Timeout), Some(group)) = (end.recv_timeout(LIMIT), group) {
            // It may have ended by itself.
            let _ = kill_process_group(group, Signal::KILL);
        }
    });
    if let Some(pid) = group {
        // Its times can be read until it is waited for. If this fails, so does the wait.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let _ = waitid(WaitId::Pid(pid), options);
    }
    let taken = processor_seconds(child.id());
    let is_ok = child.wait().is_ok_and(|status| status.success());
    drop(ended);
    (is_ok && watchdog.join().is_ok(), taken)
}

/// The processor time of a process that has ended, and of those that it waited for: proc(5).
fn processor_seconds(process: u32) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let after_name = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks = after_name.split_whitespace().skip(11).take(4);
    ticks.filter_map(|field| field.parse::<f64>().ok()).sum::<f64>() / TICKS_PER_SECOND
}

/// The tests of a job that failed, from the lines that libtest prints.
fn failures(job: &Job, is_ok: bool, log: &Path) -> Vec<String> {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let all = format!("test result: ok. {} passed; 0 failed; 0 ignored", job.tests.len());
    if is_ok && text.lines().any(|line| line.starts_with(&all)) {
        return Vec::new();
    }
    let failed = text.lines().filter_map(|line| line.strip_prefix("    "));
    let failed = failed.filter(|name| job.tests.iter().any(|test| test == name));
    let mut failed = failed.map(|test| job.program.full_name(test)).collect::<Vec<_>>();
    failed.sort();
    failed.dedup();
    if failed.is_empty() {
        failed.push(job.name());
    }
    failed
}
