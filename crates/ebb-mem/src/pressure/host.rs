//! The host's memory: free memory from `sysinfo(2)` at every sample, available memory from `/proc/meminfo`
//! only when it may matter: while plenty is free, once in ten seconds.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use super::files::{LARGE, OpenFile, Roots, SMALL, read};
use super::parse;
use super::report::{SourceKind, SourceReport};
use super::signals::{HostSample, Signals, Watermarks};
use super::source::{Source, SourceLost};
use super::thresholds::Thresholds;

/// Largest age of the figure of available memory while plenty is free, and was when it was read.
const AVAILABLE_AGE: Duration = Duration::from_secs(10);

pub(super) struct HostMemory {
    meminfo: Option<OpenFile>,
    sysinfo: bool,
    watermarks: Option<Watermarks>,
    available_low: u32,
    /// When `meminfo` was last read, if plenty was free then.
    meminfo_read: Option<Instant>,
}

impl HostMemory {
    /// Probes. With `sysinfo: false` all figures come from the files.
    pub(super) fn probe(
        roots: &Roots,
        sysinfo: bool,
        thresholds: &Thresholds,
        report: &mut SourceReport,
    ) -> Option<Self> {
        let zones = roots.proc.join("zoneinfo");
        let watermarks = match watermarks(&zones) {
            Ok(marks) => {
                let detail = format!("target {} KiB free", marks.high / 1024);
                report.found(SourceKind::Watermarks, Some(zones), detail);
                Some(marks)
            }
            Err(error) => {
                report.missing(SourceKind::Watermarks, Some(zones), error.to_string());
                None
            }
        };
        let path = roots.proc.join("meminfo");
        let meminfo = OpenFile::open(&path).and_then(|mut file| {
            let text = file.read_text()?;
            let all = ["MemTotal", "MemFree"].iter().all(|k| parse::meminfo(text, k).is_some());
            if all { Ok(file) } else { Err(not_understood()) }
        });
        let meminfo = match (meminfo, sysinfo) {
            (Ok(file), true) => {
                let detail =
                    "free memory by sysinfo; available memory by meminfo when free memory is low";
                report.found(SourceKind::HostMemory, Some(path), detail.into());
                Some(file)
            }
            (Ok(file), false) => {
                report.found(SourceKind::HostMemory, Some(path), "free and available".into());
                Some(file)
            }
            (Err(error), true) => {
                let detail = format!("free memory by sysinfo only; meminfo: {error}");
                report.found(SourceKind::HostMemory, None, detail);
                None
            }
            (Err(error), false) => {
                report.missing(SourceKind::HostMemory, Some(path), error.to_string());
                return None;
            }
        };
        let available_low = thresholds.available_low;
        Some(Self { meminfo, sysinfo, watermarks, available_low, meminfo_read: None })
    }

    fn read(&mut self, now: Instant) -> io::Result<Option<HostSample>> {
        let watermarks = self.watermarks;
        let quick = self.sysinfo.then(by_sysinfo);
        let mut is_plenty = false;
        if let Some((total, free)) = quick {
            // Available memory is at least a little less than free memory: no need to read it while plenty
            // is free.
            let low = total / 1000 * u64::from(self.available_low);
            let reserve = watermarks.map_or(total / 50, |marks| marks.high.saturating_mul(2));
            let plenty = free > low.saturating_add(low / 4).saturating_add(reserve);
            let recent = self.meminfo_read.is_some_and(|at| now.duration_since(at) < AVAILABLE_AGE);
            is_plenty = plenty;
            if plenty && recent {
                return Ok(Some(HostSample { total, free, available: None, watermarks }));
            }
        }
        let Some(file) = &mut self.meminfo else {
            return Ok(quick.map(|(total, free)| HostSample {
                total,
                free,
                available: None,
                watermarks,
            }));
        };
        let text = file.read_text()?;
        self.meminfo_read = is_plenty.then_some(now);
        let available = parse::meminfo(text, "MemAvailable");
        let by_file =
            || Some((parse::meminfo(text, "MemTotal")?, parse::meminfo(text, "MemFree")?));
        let sizes = quick.or_else(by_file);
        Ok(sizes.map(|(total, free)| HostSample { total, free, available, watermarks }))
    }
}

impl Source for HostMemory {
    fn kind(&self) -> SourceKind {
        SourceKind::HostMemory
    }

    fn path(&self) -> Option<&Path> {
        self.meminfo.as_ref().map(OpenFile::path)
    }

    fn sample(&mut self, now: Instant, _: bool, signals: &mut Signals) -> Result<(), SourceLost> {
        match self.read(now) {
            Ok(host) => signals.host = host,
            // Free memory is still known from `sysinfo(2)`.
            Err(_) if self.sysinfo => self.meminfo = None,
            Err(error) => return Err(SourceLost(error.to_string())),
        }
        Ok(())
    }
}

fn by_sysinfo() -> (u64, u64) {
    let info = rustix::system::sysinfo();
    let unit = u64::from(info.mem_unit.max(1));
    (to_u64(info.totalram).saturating_mul(unit), to_u64(info.freeram).saturating_mul(unit))
}

/// The kernel's `unsigned long` is 32 or 64 bits wide.
fn to_u64<T: TryInto<u64>>(value: T) -> u64 {
    value.try_into().unwrap_or(u64::MAX)
}

fn watermarks(path: &Path) -> io::Result<Watermarks> {
    let page = to_u64(rustix::param::page_size());
    parse::zoneinfo(&read(path, LARGE)?, page).ok_or_else(not_understood)
}

/// Total and available memory of the host, in bytes, from `meminfo`.
pub(super) fn total_and_available(roots: &Roots) -> Option<(u64, Option<u64>)> {
    let text = read(&roots.proc.join("meminfo"), SMALL).ok()?;
    Some((parse::meminfo(&text, "MemTotal")?, parse::meminfo(&text, "MemAvailable")))
}

/// Above this value the kernel prefers swapping to discarding lent pages.
const SWAPPINESS_LIMIT: u64 = 100;

/// A note, if the host prefers swapping to discarding lent pages.
pub(super) fn swappiness_note(roots: &Roots) -> Option<String> {
    let text = read(&roots.proc.join("sys/vm/swappiness"), SMALL).ok()?;
    let value = parse::size(&text).filter(|value| *value > SWAPPINESS_LIMIT)?;
    Some(format!(
        "vm.swappiness is {value}: above {SWAPPINESS_LIMIT} the kernel swaps before it discards lent \
         memory, so memory is released only when this daemon detects memory pressure; set vm.swappiness \
         to {SWAPPINESS_LIMIT} or less"
    ))
}

pub(super) fn not_understood() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "cannot parse the content")
}
