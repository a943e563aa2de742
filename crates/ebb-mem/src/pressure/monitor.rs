//! The monitor's thread: waits for notifications, samples the other sources, runs the ladder, publishes.
//!
//! One `poll(2)` waits for the triggers and an eventfd for [`Handle`], with a timeout from the ladder and
//! the sampler. Once running, the thread opens no files and, unless a source is lost, allocates nothing:
//! it must work when no memory is available.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::cgroup::{CgroupFiles, V1Pressure, places};
use super::files::Roots;
use super::host::{HostMemory, swappiness_note};
use super::psi::{self, PsiScope};
use super::report::{ProbedSource, SourceKind, SourceReport};
use super::sampler::{BUSY, FAST, Sampler};
use super::shared::{Pressure, Publisher};
use super::signals::Signals;
use super::source::Source;
use super::systemd::{Systemd, Watch};
use super::{Ladder, Level, Thresholds, ThresholdsError};

/// How long a source that has just woken the thread is left out of the wait: a source that is ready all the
/// time (such as a FIFO with a busy writer) cannot keep the thread busy.
const MUTE: Duration = FAST;

/// Largest number of descriptors in a wait: the eventfd and each source that can wake.
const WAITS: usize = 16;

/// Called when a source is lost while the monitor runs.
pub type OnLostSource = Box<dyn FnMut(&ProbedSource) + Send>;

/// Which sources to use, and how. Start from [`MonitorOptions::new`].
pub struct MonitorOptions {
    /// Where the kernel's files are.
    pub roots: Roots,
    /// The ladder's constants.
    pub thresholds: Thresholds,
    /// Spreads this daemon's times against those of other daemons on the host: use a different one for each.
    pub seed: u64,
    /// systemd's variables; [`Watch::from_environment`] has them.
    pub systemd: Option<Watch>,
    /// Whether to set triggers on pressure files. Default true.
    pub triggers: bool,
    /// Whether to call `sysinfo(2)`. If not, all figures come from the files below `roots`. Default true.
    pub sysinfo: bool,
    /// Called in the monitor's thread when a source is lost while running, for the log.
    pub on_lost_source: Option<OnLostSource>,
}

impl MonitorOptions {
    /// The defaults: the usual places, everything on, no systemd.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self {
            roots: Roots::default(),
            thresholds: Thresholds::default(),
            seed,
            systemd: None,
            triggers: true,
            sysinfo: true,
            on_lost_source: None,
        }
    }
}

impl std::fmt::Debug for MonitorOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MonitorOptions")
            .field("roots", &self.roots)
            .field("thresholds", &self.thresholds)
            .field("seed", &self.seed)
            .field("systemd", &self.systemd)
            .field("triggers", &self.triggers)
            .field("sysinfo", &self.sysinfo)
            .finish_non_exhaustive()
    }
}

/// The monitor could not start. Missing sources are not an error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MonitorStartError {
    /// A threshold is out of range.
    #[error(transparent)]
    Thresholds(#[from] ThresholdsError),
    /// No eventfd: most likely the process or the host has too many open files.
    #[error("cannot create the memory pressure monitor's eventfd: raise the limit on open files")]
    Eventfd(#[source] io::Error),
    /// No thread: most likely the process or the host has too many tasks.
    #[error("cannot start the memory pressure monitor's thread: raise the limit on tasks")]
    Thread(#[source] io::Error),
}

/// State shared with the handles.
struct MonitorShared {
    wake: OwnedFd,
    /// A level requested by hand, plus one; 0 for none.
    injected: AtomicU8,
    stop: AtomicBool,
    report: Mutex<SourceReport>,
}

impl MonitorShared {
    fn wake(&self) {
        // Fails only when the counter is full: then a wake-up is pending.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// Injects levels into a monitor. Cheap to clone; has no effect after its monitor was dropped.
#[derive(Clone)]
pub struct Handle(Arc<MonitorShared>);

impl Handle {
    /// Requests a level by hand. It is published within milliseconds, holds and falls as a measured one
    /// does, and rises at once if measured signs require it. [`Level::L0`] takes effect at once. Of several
    /// requests before the monitor wakes, the latest counts.
    pub fn inject(&self, level: Level) {
        self.0.injected.store(level.number() + 1, Ordering::Release);
        self.0.wake();
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle").finish_non_exhaustive()
    }
}

/// The running monitor. Dropping it stops its thread; the published level stays as it is.
pub struct Monitor {
    inner: Arc<MonitorShared>,
    pressure: Pressure,
    thread: Option<JoinHandle<()>>,
}

impl Monitor {
    /// Starts with a new [`Pressure`], see [`Monitor::pressure`].
    ///
    /// # Errors
    /// As [`Monitor::start_with`].
    pub fn start(options: MonitorOptions) -> Result<(Self, SourceReport), MonitorStartError> {
        let (publisher, _) = Pressure::new(crate::clock::now());
        Self::start_with(options, publisher)
    }

    /// Probes the sources and starts the thread, which publishes through `publisher`. The report lists the
    /// sources.
    ///
    /// # Errors
    /// A threshold out of range, or no eventfd or thread. Missing sources are not an error.
    pub fn start_with(
        options: MonitorOptions,
        publisher: Publisher,
    ) -> Result<(Self, SourceReport), MonitorStartError> {
        let now = crate::clock::now();
        let ladder = Ladder::new(options.thresholds.clone(), options.seed, now)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| MonitorStartError::Eventfd(error.into()))?;
        let mut report = SourceReport::default();
        let sources = probe(&options, now, &mut report);
        let sources =
            sources.into_iter().map(|source| SourceSlot { source, muted: None }).collect();
        let pressure = publisher.pressure();
        let inner = Arc::new(MonitorShared {
            wake,
            injected: AtomicU8::new(0),
            stop: AtomicBool::new(false),
            report: Mutex::new(report.clone()),
        });
        let mut worker = MonitorThread {
            inner: Arc::clone(&inner),
            sources,
            ladder,
            sampler: Sampler::new(),
            publisher,
            on_lost_source: options.on_lost_source,
        };
        let thread = std::thread::Builder::new()
            .name("ebb-pressure".into())
            .stack_size(256 * 1024)
            .spawn(move || worker.run())
            .map_err(MonitorStartError::Thread)?;
        Ok((Self { inner, pressure, thread: Some(thread) }, report))
    }

    /// The published value.
    #[must_use]
    pub fn pressure(&self) -> Pressure {
        self.pressure.clone()
    }

    /// A handle that injects levels.
    #[must_use]
    pub fn handle(&self) -> Handle {
        Handle(Arc::clone(&self.inner))
    }

    /// The sources in use now: those found at the start, less those lost since.
    #[must_use]
    pub fn report(&self) -> SourceReport {
        self.inner.report.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Stops the thread and waits until it has ended: no callback runs after that. Dropping does the same.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.inner.stop.store(true, Ordering::Release);
        self.inner.wake();
        if let Some(thread) = self.thread.take()
            // Dropped by a callback: the thread ends by itself afterwards.
            && thread.thread().id() != std::thread::current().id()
        {
            // A panic in it was reported where it happened.
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Monitor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Monitor").field("pressure", &self.pressure).finish_non_exhaustive()
    }
}

/// Finds the sources.
fn probe(
    options: &MonitorOptions,
    now: Instant,
    report: &mut SourceReport,
) -> Vec<Box<dyn Source>> {
    let mut sources: Vec<Box<dyn Source>> = Vec::new();
    let roots = &options.roots;
    report.notes.extend(swappiness_note(roots));
    // The pressure file that systemd named must not be read, nor watched twice.
    let mut theirs = None;
    match &options.systemd {
        Some(watch) if watch.is_off() => {
            let path = Some(watch.path().to_path_buf());
            report.missing(SourceKind::Systemd, path, "turns monitoring off".into());
            report.notes.push(
                "MEMORY_PRESSURE_WATCH=/dev/null: memory pressure is not monitored; to monitor it, unset \
                 the variable or remove MemoryPressureWatch=off from the unit"
                    .into(),
            );
            return sources;
        }
        Some(watch) => {
            let path = watch.path().to_path_buf();
            match Systemd::open(watch) {
                Ok((source, detail)) => {
                    theirs = path.canonicalize().ok();
                    report.found(SourceKind::Systemd, Some(path), detail.into());
                    sources.push(Box::new(source));
                }
                Err(problem) => report.missing(SourceKind::Systemd, Some(path), problem),
            }
        }
        None => report.missing(SourceKind::Systemd, None, "not set".into()),
    }
    let free = |path: &PathBuf| theirs.is_none() || path.canonicalize().ok() != theirs;
    if let Some(host) = HostMemory::probe(roots, options.sysinfo, &options.thresholds, report) {
        sources.push(Box::new(host));
    }
    let stalls = |path: PathBuf, scope, report: &mut SourceReport, sources: &mut Vec<_>| {
        if free(&path) {
            psi::probe(&path, scope, options.triggers, now, report, sources);
        }
    };
    stalls(roots.proc.join("pressure/memory"), PsiScope::Host, report, &mut sources);
    let (v2, v1) = places(roots);
    match &v2 {
        // The root's pressure is the host's.
        Some(place) if !place.is_root() => {
            stalls(place.own.join("memory.pressure"), PsiScope::Own, report, &mut sources);
        }
        _ => report.missing(SourceKind::CgroupStall, None, "no cgroup v2 below the root".into()),
    }
    for (kind, place) in [(SourceKind::CgroupV2, &v2), (SourceKind::CgroupV1, &v1)] {
        let Some(place) = place else {
            report.missing(kind, None, "no such hierarchy".into());
            continue;
        };
        if let Some(files) = CgroupFiles::probe(kind, place, report) {
            sources.push(Box::new(files));
        }
        if kind == SourceKind::CgroupV1 && options.triggers {
            let path = Some(place.own.clone());
            match V1Pressure::arm(&place.own) {
                Ok(source) => {
                    report.found(SourceKind::CgroupV1Pressure, path, "level medium".into());
                    sources.push(Box::new(source));
                }
                Err(error) => {
                    report.missing(SourceKind::CgroupV1Pressure, path, error.to_string());
                }
            }
        }
    }
    sources
}

struct SourceSlot {
    source: Box<dyn Source>,
    /// Left out of the wait until this time.
    muted: Option<Instant>,
}

struct MonitorThread {
    inner: Arc<MonitorShared>,
    sources: Vec<SourceSlot>,
    ladder: Ladder,
    sampler: Sampler,
    publisher: Publisher,
    on_lost_source: Option<OnLostSource>,
}

impl MonitorThread {
    fn run(&mut self) {
        let mut timeout = Duration::ZERO;
        loop {
            let ready = self.wait(timeout);
            if self.inner.stop.load(Ordering::Acquire) {
                return;
            }
            let now = crate::clock::now();
            let signals = self.sample(now, &ready);
            let event = self.ladder.step(now, &signals);
            if let Some(event) = event {
                self.publisher.publish(event.level, event.cause, now);
            }
            timeout = self.timeout(now, &signals);
        }
    }

    /// Waits; returns the events of each source.
    fn wait(&mut self, timeout: Duration) -> [PollFlags; WAITS] {
        let now = crate::clock::now();
        let mut timeout = timeout;
        let mut fds: [PollFd<'_>; WAITS] = std::array::from_fn(|_| {
            PollFd::from_borrowed_fd(self.inner.wake.as_fd(), PollFlags::IN)
        });
        let mut used = 1;
        let mut waiting = [None; WAITS];
        for (at, slot) in self.sources.iter().enumerate() {
            let Some((fd, flags)) = slot.source.wait() else { continue };
            if let Some(until) = slot.muted.filter(|until| *until > now) {
                timeout = timeout.min(until.duration_since(now));
                continue;
            }
            if let (Some(entry), Some(index)) = (fds.get_mut(used), waiting.get_mut(used)) {
                *entry = PollFd::from_borrowed_fd(fd, flags);
                *index = Some(at);
                used += 1;
            }
        }
        let limit = Timespec::try_from(timeout).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
        let mut ready = [PollFlags::empty(); WAITS];
        let fds = fds.get_mut(..used).unwrap_or_default();
        // An interrupted wait counts as a short one. Otherwise only a lack of kernel memory fails.
        if poll(fds, Some(&limit)).is_err() {
            return ready;
        }
        for (fd, index) in fds.iter().zip(waiting) {
            if let Some(slot) = index.and_then(|at| ready.get_mut(at)) {
                *slot = fd.revents();
            }
        }
        if fds.first().is_some_and(|fd| !fd.revents().is_empty()) {
            let mut count = [0; 8];
            let _ = rustix::io::read(&self.inner.wake, &mut count);
        }
        ready
    }

    /// Samples every source, and takes the level that a handle has injected.
    fn sample(&mut self, now: Instant, ready: &[PollFlags; WAITS]) -> Signals {
        let mut signals = Signals::default();
        let awake = self.ladder.alert() || self.sampler.interval() < BUSY;
        let mut lost: Option<(usize, String)> = None;
        for (at, slot) in self.sources.iter_mut().enumerate() {
            let events = ready.get(at).copied().unwrap_or(PollFlags::empty());
            let mut result = Ok(());
            if !events.is_empty() {
                slot.muted = Some(now + MUTE);
                result = slot.source.ready(events, now, &mut signals);
            }
            if let Err(error) = result.and_then(|()| slot.source.sample(now, awake, &mut signals)) {
                // One at a time: another lost source fails again at the next sample.
                lost = Some((at, error.0));
            }
        }
        if let Some((at, reason)) = lost {
            self.lose(at, &reason);
        }
        signals.injected = self
            .inner
            .injected
            .swap(0, Ordering::Acquire)
            .checked_sub(1)
            .and_then(Level::from_number);
        signals
    }

    fn lose(&mut self, at: usize, reason: &str) {
        let slot = self.sources.swap_remove(at);
        let kind = slot.source.kind();
        let path = slot.source.path().map(std::path::Path::to_path_buf);
        let lost = ProbedSource { kind, path, detail: format!("lost: {reason}") };
        {
            let mut report = self.inner.report.lock().unwrap_or_else(PoisonError::into_inner);
            report.listening.retain(|found| found.kind != kind || found.path != lost.path);
            report.missing.push(lost.clone());
        }
        if let Some(callback) = &mut self.on_lost_source {
            callback(&lost);
        }
    }

    /// The timeout of the next wait.
    fn timeout(&mut self, now: Instant, signals: &Signals) -> Duration {
        let moved = signals.notices > 0
            || !signals.host_stall.some.is_zero()
            || !signals.own_stall.some.is_zero()
            || signals.cgroup.is_some_and(|cgroup| cgroup.reclaims > 0);
        let alert = self.ladder.alert();
        let thresholds = self.ladder.thresholds();
        let memory = (signals.host.as_ref(), signals.cgroup.as_ref());
        let interval = self.sampler.next(now, memory, thresholds, moved, alert);
        let deadline = self.ladder.deadline().saturating_duration_since(now);
        interval.min(deadline).max(Duration::from_millis(1))
    }
}
