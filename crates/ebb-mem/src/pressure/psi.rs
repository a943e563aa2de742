//! Pressure stall information: triggers that wake, and totals that are polled.
//!
//! Reading a pressure file starves the triggers that unprivileged processes have on it. So where
//! the trigger is unprivileged, the total of the same file is read only while something is going
//! on: the trigger wakes from calm, polling follows what comes after.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::fs::OFlags;

use super::files::{Watched, open};
use super::host::not_understood;
use super::parse;
use super::report::{Report, SourceKind};
use super::signals::{Signals, Stall};
use super::source::{Gone, Source};

/// What to ask for, most wanted first. Windows other than multiples of 2 s need CAP_SYS_RESOURCE.
/// 20 ms in 500 ms is the stall from which the answer to pressure is reckoned, in the shortest window.
const REQUESTS: [(&str, bool); 2] =
    [("some 20000 500000\0", true), ("some 50000 2000000\0", false)];

/// Stalls from before a trigger was set may fire it at once.
const BACKLOG: Duration = Duration::from_millis(100);

/// Whose pressure file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Whose {
    Host,
    Own,
}

/// Probes one pressure file: a trigger where wanted and possible, and its total.
pub(super) fn probe(
    path: &Path,
    whose: Whose,
    triggers: bool,
    now: Instant,
    report: &mut Report,
    sources: &mut Vec<Box<dyn Source>>,
) {
    let (trigger_kind, total_kind) = match whose {
        Whose::Host => (SourceKind::HostTrigger, SourceKind::HostStall),
        Whose::Own => (SourceKind::CgroupTrigger, SourceKind::CgroupStall),
    };
    let mut only_awake = false;
    if triggers {
        match arm(path) {
            Ok((fd, privileged)) => {
                only_awake = !privileged;
                let window =
                    if privileged { "500 ms" } else { "2 s, for want of CAP_SYS_RESOURCE" };
                let detail = format!("window {window}");
                report.found(trigger_kind, Some(path.to_path_buf()), detail);
                let path = path.to_path_buf();
                sources.push(Box::new(Trigger { kind: trigger_kind, path, fd, armed: now }));
            }
            Err(error) => {
                report.missing(trigger_kind, Some(path.to_path_buf()), error.to_string());
            }
        }
    } else {
        report.missing(trigger_kind, Some(path.to_path_buf()), "turned off".into());
    }
    match Total::open(path, whose, total_kind, only_awake) {
        Ok(total) => {
            let detail = if only_awake { "polled while awake" } else { "polled" };
            report.found(total_kind, Some(path.to_path_buf()), detail.into());
            sources.push(Box::new(total));
        }
        Err(error) => report.missing(total_kind, Some(path.to_path_buf()), error.to_string()),
    }
}

/// Opens a pressure file and sets a trigger. Also tells whether it is a privileged one.
fn arm(path: &Path) -> io::Result<(OwnedFd, bool)> {
    let fd = open(path, OFlags::RDWR)?;
    let mut refused = None;
    for (request, privileged) in REQUESTS {
        match write_once(fd.as_fd(), request.as_bytes()) {
            Ok(()) => return Ok((fd, privileged)),
            Err(error) => refused = Some(error),
        }
    }
    Err(refused.unwrap_or_else(not_understood))
}

/// One write, all or nothing: the kernel takes a request as a whole.
pub(super) fn write_once(fd: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<()> {
    let written = rustix::io::retry_on_intr(|| rustix::io::write(fd, bytes))?;
    if written == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

struct Trigger {
    kind: SourceKind,
    path: PathBuf,
    fd: OwnedFd,
    armed: Instant,
}

impl Source for Trigger {
    fn kind(&self) -> SourceKind {
        self.kind
    }

    fn path(&self) -> Option<&Path> {
        Some(&self.path)
    }

    fn wait(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        Some((self.fd.as_fd(), PollFlags::PRI))
    }

    fn ready(&mut self, events: PollFlags, now: Instant, s: &mut Signals) -> Result<(), Gone> {
        if events.intersects(PollFlags::ERR | PollFlags::NVAL) {
            return Err(Gone("the kernel removed the trigger".into()));
        }
        if events.contains(PollFlags::PRI) && now.duration_since(self.armed) >= BACKLOG {
            s.notices = s.notices.saturating_add(1);
        }
        Ok(())
    }
}

struct Total {
    kind: SourceKind,
    whose: Whose,
    file: Watched,
    only_awake: bool,
    last: Option<Stall>,
}

impl Total {
    fn open(path: &Path, whose: Whose, kind: SourceKind, only_awake: bool) -> io::Result<Self> {
        let mut file = Watched::open(path)?;
        // Text that is not understood now may be later: only the reading must work. Where reading
        // harms a trigger, one look at the start does not matter.
        file.look()?;
        Ok(Self { kind, whose, file, only_awake, last: None })
    }
}

impl Source for Total {
    fn kind(&self) -> SourceKind {
        self.kind
    }

    fn path(&self) -> Option<&Path> {
        Some(self.file.path())
    }

    fn sample(&mut self, _: Instant, awake: bool, s: &mut Signals) -> Result<(), Gone> {
        if self.only_awake && !awake {
            // What it grows by meanwhile will not have happened when it is next read.
            self.last = None;
            return Ok(());
        }
        let text = self.file.look().map_err(|error| Gone(error.to_string()))?;
        let Some(total) = parse::psi(text) else {
            return Ok(());
        };
        let Some(before) = self.last.replace(total) else {
            return Ok(());
        };
        let grown = Stall {
            some: total.some.saturating_sub(before.some),
            full: total.full.saturating_sub(before.full),
        };
        match self.whose {
            Whose::Host => s.host_stall = grown,
            Whose::Own => s.own_stall = grown,
        }
        Ok(())
    }
}
