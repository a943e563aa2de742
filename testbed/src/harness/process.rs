//! What a process holds, from `/proc`: memory, file descriptors; and waiting for its end.

use crate::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

/// The limit for every wait. It ends tests that hang and does not measure speed: a busy machine is
/// slow.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// The broker of a daemon.
///
/// # Errors
/// The daemon has ended, or has no broker.
pub fn broker_of(daemon: u32) -> Result<Pid> {
    let children = std::fs::read_to_string(format!("/proc/{daemon}/task/{daemon}/children"));
    let children = children.map_err(Error::io("read the children"))?;
    let named = |child: &&str| {
        let name = std::fs::read_to_string(format!("/proc/{child}/comm")).unwrap_or_default();
        name.trim() == "ebbd-broker"
    };
    let broker = children.split_whitespace().find(named).and_then(|child| child.parse().ok());
    broker.and_then(Pid::from_raw).ok_or_else(|| Error::unexpected("there is no broker"))
}

/// Resident memory in bytes that the process uses: what it has lent to the kernel (`LazyFree`) is
/// resident until it is discarded, but available to other processes.
///
/// # Errors
/// The process has ended.
pub fn resident(pid: u32) -> Result<u64> {
    let [resident, lent] = rollup(pid, ["Rss:", "LazyFree:"])?;
    Ok(resident.saturating_sub(lent))
}

/// As [`resident`], without the pages of mapped files, its program among them: they are page cache,
/// and how much of it is resident depends on what else runs on the machine. Includes swapped
/// memory.
///
/// # Errors
/// The process has ended.
pub fn own(pid: u32) -> Result<u64> {
    let [anonymous, lent, swapped] = rollup(pid, ["Anonymous:", "LazyFree:", "Swap:"])?;
    Ok(anonymous.saturating_sub(lent) + swapped)
}

/// Figures of all mappings of a process together, in bytes.
fn rollup<const N: usize>(pid: u32, names: [&str; N]) -> Result<[u64; N]> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = std::fs::read_to_string(&path).map_err(Error::io(&path))?;
    let mut figures = [0; N];
    for (figure, name) in figures.iter_mut().zip(names) {
        let value = text.lines().find_map(|line| line.strip_prefix(name));
        let kib = value.and_then(|value| value.trim().trim_end_matches(" kB").parse::<u64>().ok());
        // A process that has ended but was not waited for has none.
        let ended = || Error::unexpected(format!("process {pid} has ended"));
        *figure = kib.ok_or_else(ended)? * 1024;
    }
    Ok(figures)
}

/// Open file descriptors, each with its target, sorted.
///
/// # Errors
/// The process has ended.
pub fn open_files(pid: u32) -> Result<Vec<String>> {
    let path = format!("/proc/{pid}/fd");
    let entries = std::fs::read_dir(&path).map_err(Error::io(&path))?;
    let mut files: Vec<String> = entries
        .flatten()
        .filter_map(|e| {
            // A descriptor closed between listing and looking is simply not there any more.
            let target = std::fs::read_link(e.path()).ok()?;
            Some(format!("{} -> {}", e.file_name().to_string_lossy(), target.display()))
        })
        .collect();
    files.sort();
    Ok(files)
}

/// Waits for a child to end, at most `limit`; `None` if it still runs then.
///
/// # Errors
/// The system refuses to wait.
pub fn wait(child: &mut Child, limit: Duration) -> Result<Option<ExitStatus>> {
    if !ended(child, limit)? {
        return Ok(None);
    }
    child.wait().map(Some).map_err(Error::io("wait for a child"))
}

/// Waits like [`wait`], but leaves an ended child as it is, so that its process id stays its own.
pub(crate) fn ended(child: &Child, limit: Duration) -> Result<bool> {
    let deadline = Instant::now() + limit;
    let fd = match pidfd_open(pid_of(child)?, PidfdFlags::empty()) {
        Ok(fd) => fd,
        // Its status was fetched before.
        Err(rustix::io::Errno::SRCH) => return Ok(true),
        Err(e) => return Err(Error::io("pidfd_open")(e.into())),
    };
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(|e| Error::unexpected(e.to_string()))?;
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(0) if left.is_zero() => return Ok(false),
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(e) => return Err(Error::io("poll a pidfd")(e.into())),
        }
    }
}

/// The process id of a child, as `rustix` wants it.
pub(crate) fn pid_of(child: &Child) -> Result<Pid> {
    i32::try_from(child.id())
        .ok()
        .and_then(Pid::from_raw)
        .ok_or_else(|| Error::unexpected(format!("no process id: {}", child.id())))
}

/// What a process held at one moment, to see later that nothing leaked.
#[derive(Debug)]
pub struct Held {
    pid: u32,
    files: Vec<String>,
    own: u64,
}

impl Held {
    /// Samples a process.
    ///
    /// # Errors
    /// It has ended.
    pub fn by(pid: u32) -> Result<Held> {
        let mut files = open_files(pid)?;
        // What a worker opens to see the host's load when it first considers to poll, and keeps.
        files.retain(|file| !file.contains(" -> /proc/"));
        Ok(Held { pid, files, own: own(pid)? })
    }

    /// Waits until the process holds as many descriptors as then, and at most `slack` bytes more
    /// memory of its own.
    ///
    /// # Errors
    /// It still holds more after [`PATIENCE`]; the error shows what.
    pub fn returned(&self, slack: u64) -> Result {
        // Stock of a zone that ran out a moment ago begins to decay a minute later; the heap is trimmed three
        // times a minute.
        let back = until("descriptors and memory are given back", PATIENCE, || {
            let now = Held::by(self.pid)?;
            let fewer = now.files.len() <= self.files.len();
            Ok((fewer && now.own <= self.own + slack).then_some(()))
        });
        back.map_err(|e| match Held::by(self.pid) {
            Ok(now) => Error::unexpected(format!(
                "{e}\nmemory of its own {} KiB, was {} KiB (slack {} KiB)\n{} descriptors, were {}:\n{}",
                now.own / 1024,
                self.own / 1024,
                slack / 1024,
                now.files.len(),
                self.files.len(),
                now.files.join("\n"),
            )),
            Err(e) => e,
        })
    }
}

/// Calls `probe` until it returns a value, pausing a little between calls; fails after `limit`.
///
/// # Errors
/// What `probe` returns, or that `what` did not happen in time.
pub fn until<T>(
    what: &str,
    limit: Duration,
    mut probe: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(value) = probe()? {
            return Ok(value);
        }
        if Instant::now() >= deadline {
            return Err(Error::unexpected(format!("within {limit:?} not seen: {what}")));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn waiting_has_a_deadline_and_gives_the_status() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        assert_eq!(wait(&mut child, Duration::from_millis(20)).unwrap(), None);
        child.kill().unwrap();
        let status = wait(&mut child, PATIENCE).unwrap().unwrap();
        assert!(!status.success());
    }

    #[test]
    fn a_process_can_be_sampled() {
        let me = std::process::id();
        let before = open_files(me).unwrap();
        let file = tempfile::tempfile().unwrap();
        assert!(open_files(me).unwrap().len() > before.len());
        drop(file);
        let memory = vec![1_u8; 8 << 20];
        let (resident, own) = (resident(me).unwrap(), own(me).unwrap());
        assert!((8 << 20..=resident).contains(&own), "{own} of {resident} bytes");
        drop(memory);
    }
}
