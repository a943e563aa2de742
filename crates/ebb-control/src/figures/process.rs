//! The figures of the process, from `/proc/self` (proc(5)).
//!
//! # Invariants
//! - The files stay open once they were: a daemon whose broker has ended opens no file, and reports
//!   figures that it measured.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime};

use ebb_api::stat::ProcessStat;

/// More than one of these files has.
const FILE_BYTES: usize = 4096;

static STATM: ProcFile = ProcFile::new("/proc/self/statm");
static STAT: ProcFile = ProcFile::new("/proc/self/stat");
static FDS: ProcFile = ProcFile::new("/proc/self/fd");

/// A file of this process in `/proc`.
struct ProcFile {
    path: &'static str,
    open: OnceLock<File>,
}

impl ProcFile {
    const fn new(path: &'static str) -> ProcFile {
        ProcFile { path, open: OnceLock::new() }
    }

    /// The open file; `None` if it cannot be opened, which the next call tries again.
    fn file(&self) -> Option<&File> {
        if let Some(file) = self.open.get() {
            return Some(file);
        }
        let file = File::open(self.path).ok()?;
        Some(self.open.get_or_init(|| file))
    }

    /// Its text of now; empty if it cannot be read.
    fn text(&self) -> String {
        let mut bytes = [0; FILE_BYTES];
        let read = self.file().and_then(|file| file.read_at(&mut bytes, 0).ok()).unwrap_or(0);
        String::from_utf8_lossy(bytes.get(..read).unwrap_or_default()).into_owned()
    }
}

/// Opens the files, while a file can be opened.
pub(crate) fn open() {
    for file in [&STATM, &STAT, &FDS] {
        file.file();
    }
}

/// Resident memory, bytes; 0 if it cannot be read.
pub(crate) fn resident_bytes() -> u64 {
    memory_bytes(1)
}

/// A number of `/proc/self/statm`, which are in pages, as bytes.
fn memory_bytes(place: usize) -> u64 {
    let text = STATM.text();
    let pages: u64 = text.split(' ').nth(place).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages.saturating_mul(u64::try_from(rustix::param::page_size()).unwrap_or(u64::MAX))
}

/// The process, whose daemon started at `started`; what cannot be read is 0.
pub(crate) fn process_stat(started: Instant) -> ProcessStat {
    use rustix::process::{Resource, getrlimit};
    let (cpu_ticks, threads) = of_stat(&STAT.text()).unwrap_or_default();
    let ticks = rustix::param::clock_ticks_per_second().max(1);
    let cpu = Duration::from_millis(cpu_ticks.saturating_mul(1000) / ticks);
    let start = SystemTime::now().checked_sub(started.elapsed());
    let since = start.and_then(|start| start.duration_since(SystemTime::UNIX_EPOCH).ok());
    ProcessStat {
        cpu_seconds: cpu.as_secs_f64(),
        virtual_bytes: memory_bytes(0),
        open_fds: open_fds(),
        max_fds: getrlimit(Resource::Nofile).current,
        threads,
        start_time: since.unwrap_or_default().as_secs_f64(),
    }
}

/// Open descriptors, without the one that lists them. The directory's size is their number since Linux 6.2.
fn open_fds() -> u64 {
    let found = FDS.file().and_then(|folder| folder.metadata().ok());
    let size = found.map_or(0, |found| found.len());
    if size > 0 {
        return size;
    }
    let listed = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    u64::try_from(listed).unwrap_or(0).saturating_sub(1)
}

/// Ticks of the processors in user and kernel mode, and the number of threads, of the text of `/proc/self/stat`.
fn of_stat(text: &str) -> Option<(u64, u64)> {
    // The name before may have spaces and brackets.
    let rest = text.rsplit_once(") ")?.1;
    // The first field here is the third of proc_pid_stat(5).
    let field = |number: usize| rest.split(' ').nth(number - 3)?.parse::<u64>().ok();
    Some((field(14)?.saturating_add(field(15)?), field(20)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figures_of_the_process_are_read() {
        assert!(resident_bytes() > 1 << 20);
        let stat = process_stat(Instant::now());
        assert!(stat.virtual_bytes > resident_bytes() && stat.threads > 0, "{stat:?}");
        assert!(stat.start_time > 1.7e9 && stat.max_fds.is_some(), "{stat:?}");
        let files: Vec<_> = (0..10).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
        // Other tests open and close files, too.
        assert!(stat.open_fds >= 3 && process_stat(Instant::now()).open_fds >= 13);
        drop(files);
    }

    #[test]
    fn figures_are_those_of_now_and_need_no_file_to_be_opened() {
        open();
        assert!([&STATM, &STAT, &FDS].iter().all(|file| file.open.get().is_some()));
        let before = process_stat(Instant::now());
        let reserved = vec![0_u8; 256 << 20];
        let now = process_stat(Instant::now());
        assert!(now.virtual_bytes > before.virtual_bytes + (128 << 20), "{before:?} {now:?}");
        drop(reserved);
        let none = ProcFile::new("/proc/self/none");
        assert!(none.text().is_empty() && none.open.get().is_none());
    }

    #[test]
    fn a_name_with_brackets_is_no_field() {
        let text = "7 (a) b) S 1 7 7 0 -1 4194560 90 0 0 0 150 50 0 0 20 0 12 0 100 1000 200";
        assert_eq!(of_stat(text), Some((200, 12)));
        assert_eq!(of_stat("7 (a) S 1"), None);
        assert_eq!(of_stat(""), None);
    }
}
