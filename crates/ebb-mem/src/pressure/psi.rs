//! Pressure stall information: triggers that wake, and totals that are polled.
//!
//! Reading a pressure file delays the triggers that unprivileged processes have on it. Where the trigger is
//! unprivileged, the total of the same file is therefore read only under pressure: the trigger reports the
//! beginning, polling the course.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::fs::OFlags;

use super::files::{OpenFile, open};
use super::host::not_understood;
use super::parse;
use super::report::{SourceKind, SourceReport};
use super::signals::{Signals, Stall};
use super::source::{Source, SourceLost};

/// Trigger requests, the preferred one first. Windows other than multiples of 2 s need CAP_SYS_RESOURCE.
/// The first is the default of [`super::Thresholds::strong_stall`] in the shortest window.
const REQUESTS: [(&str, bool); 2] =
    [("some 20000 500000\0", true), ("some 50000 2000000\0", false)];

/// Stalls from before a trigger was set may fire it at once: events in this time are ignored.
const BACKLOG: Duration = Duration::from_millis(100);

/// The tasks that a pressure file covers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PsiScope {
    Host,
    Own,
}

/// Probes one pressure file: a trigger where wanted and possible, and its total.
pub(super) fn probe(
    path: &Path,
    scope: PsiScope,
    triggers: bool,
    now: Instant,
    report: &mut SourceReport,
    sources: &mut Vec<Box<dyn Source>>,
) {
    let (trigger_kind, total_kind) = match scope {
        PsiScope::Host => (SourceKind::HostTrigger, SourceKind::HostStall),
        PsiScope::Own => (SourceKind::CgroupTrigger, SourceKind::CgroupStall),
    };
    let mut only_awake = false;
    if triggers {
        match arm(path) {
            Ok((fd, privileged)) => {
                only_awake = !privileged;
                let window = if privileged { "500 ms" } else { "2 s, without CAP_SYS_RESOURCE" };
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
    match Total::open(path, scope, total_kind, only_awake) {
        Ok(total) => {
            let detail = if only_awake { "polled under pressure" } else { "polled" };
            report.found(total_kind, Some(path.to_path_buf()), detail.into());
            sources.push(Box::new(total));
        }
        Err(error) => report.missing(total_kind, Some(path.to_path_buf()), error.to_string()),
    }
}

/// Opens a pressure file and sets a trigger. Also returns whether it is a privileged one.
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

    fn ready(
        &mut self,
        events: PollFlags,
        now: Instant,
        s: &mut Signals,
    ) -> Result<(), SourceLost> {
        if events.intersects(PollFlags::ERR | PollFlags::NVAL) {
            return Err(SourceLost("the kernel removed the trigger".into()));
        }
        if events.contains(PollFlags::PRI) && now.duration_since(self.armed) >= BACKLOG {
            s.notices = s.notices.saturating_add(1);
        }
        Ok(())
    }
}

struct Total {
    kind: SourceKind,
    scope: PsiScope,
    file: OpenFile,
    only_awake: bool,
    last: Option<Stall>,
}

impl Total {
    fn open(path: &Path, scope: PsiScope, kind: SourceKind, only_awake: bool) -> io::Result<Self> {
        let mut file = OpenFile::open(path)?;
        // Only the read must succeed: the text may become parsable later. One read at the start does no
        // harm to a trigger.
        file.read_text()?;
        Ok(Self { kind, scope, file, only_awake, last: None })
    }
}

impl Source for Total {
    fn kind(&self) -> SourceKind {
        self.kind
    }

    fn path(&self) -> Option<&Path> {
        Some(self.file.path())
    }

    fn sample(&mut self, _: Instant, awake: bool, s: &mut Signals) -> Result<(), SourceLost> {
        if self.only_awake && !awake {
            // Stalls until the next read must not count as new ones then.
            self.last = None;
            return Ok(());
        }
        let text = self.file.read_text().map_err(|error| SourceLost(error.to_string()))?;
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
        match self.scope {
            PsiScope::Host => s.host_stall = grown,
            PsiScope::Own => s.own_stall = grown,
        }
        Ok(())
    }
}
