//! Busy polling: what a worker does before it sleeps while requests come quickly.
//!
//! A wake-up of a sleeping processor costs more than many requests: an interrupt to another processor, two context
//! switches, and in a virtual machine the same again in the hypervisor. Where the next request usually comes sooner than that,
//! the worker checks for it in a loop instead of sleeping, as KVM does for an idle virtual processor (Linux,
//! `Documentation/virt/kvm/halt-polling.rst`). One policy serves guest rings, clients' sockets and the sockets of remote
//! stores; each of them is a [`PollSource`].
//!
//! A check is a read of memory: the flag by which io_uring reports that sockets, files or other threads have work for this
//! thread (`IORING_SQ_TASKRUN`), the completion queue, and the producer index of each polled guest ring. So polling makes no
//! system calls, and its cost does not depend on the number of connections.
//!
//! # Invariants
//! - A source is polled only while its requests come faster than one per `poll_us`, and for no longer than
//!   `poll_us` for each request since it last waited, and 1 ms in all (`pace.rs`). A poll without success is followed by
//!   sleep; each further one lets twice as many pauses pass before the next attempt. An idle source costs nothing.
//! - The worker polls only when it would otherwise sleep: never while a task is ready, an operation waits to be
//!   submitted or a completion to be processed, and never past the next timer.
//! - Unsuccessful polls take no more than one [`SHARE`]th of a worker's time, and at most half of the processors poll at once:
//!   none of a machine with one, where a client could not run meanwhile. A guest has processors of its own, also where
//!   the machine is a Xen control domain with one: so one worker may always poll guest rings.
//! - Polling gives way: a worker that polls while no processor of the machine is idle, or that waits for its own processor,
//!   stops doing so for a time that doubles from [`GIVE_WAY_FIRST`] to [`GIVE_WAY_MAX`]. Of a single processor only the
//!   waiting counts, since it is never idle while the worker polls.
//! - With `poll_us` 0, and in a simulation, there is no polling and no system call for it.

mod load;
mod pace;
mod source;

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ebb_param::Parameter;

pub(crate) use self::source::PollList;
pub use self::source::PollSource;

use self::load::LoadSample;

/// Unsuccessful polls take at most this fraction of a worker's time.
pub(crate) const SHARE: u32 = 16;
/// The most time for unsuccessful polls that a worker saves up.
pub(crate) const SAVED_MAX: Duration = Duration::from_millis(10);
/// How long a worker polls before it checks whether other programs need the processor.
const WINDOW: Duration = Duration::from_millis(100);
/// Polling gives way if the idle time of all processors together was less than this part of a window, of one processor.
const IDLE_PART: u32 = 8;
/// Polling gives way if the worker was ready to run, but waited for a processor, for more than this part of a window. A
/// client that wakes up on the worker's processor delays it, too, by up to a seventh of a window.
const DELAYED_PART: u32 = 4;
/// For how long polling gives way the first time, and at most.
pub(crate) const GIVE_WAY_FIRST: Duration = Duration::from_secs(1);
pub(crate) const GIVE_WAY_MAX: Duration = Duration::from_secs(32);

/// The parameter `poll_us`, shared by all workers and changeable at any time.
#[derive(Debug)]
pub struct PollParameters {
    /// How long a worker polls a source before it sleeps: microseconds for each request since the source last waited; 0
    /// disables polling. It applies the next time a source waits.
    pub poll_us: Parameter<u32>,
    /// How many workers may poll at once, how many if they poll guest rings, and how many do.
    pollers_max: u32,
    ring_pollers_max: u32,
    pollers: AtomicU32,
    /// The process has one processor.
    alone: bool,
    /// Whether to give way to other programs.
    gives_way: bool,
}

impl Default for PollParameters {
    /// `poll_us` 100.
    fn default() -> PollParameters {
        PollParameters::new(Parameter::new(100))
    }
}

impl PollParameters {
    /// Parameters for this machine: at most half of the processors that the process may use poll at once, and at least
    /// one may poll guest rings.
    #[must_use]
    pub fn new(poll_us: Parameter<u32>) -> PollParameters {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        PollParameters::with_processors(poll_us, processors)
    }

    fn with_processors(poll_us: Parameter<u32>, processors: usize) -> PollParameters {
        let pollers_max = u32::try_from(processors / 2).unwrap_or(u32::MAX);
        PollParameters {
            poll_us,
            pollers_max,
            ring_pollers_max: pollers_max.max(1),
            pollers: AtomicU32::new(0),
            alone: processors <= 1,
            gives_way: true,
        }
    }

    /// Parameters with which every worker may poll at any time, however busy the machine is.
    #[cfg(any(test, feature = "testing"))]
    #[must_use]
    pub fn unrestrained(poll_us: u32) -> PollParameters {
        PollParameters {
            pollers_max: u32::MAX,
            ring_pollers_max: u32::MAX,
            gives_way: false,
            ..PollParameters::new(Parameter::new(poll_us))
        }
    }

    fn each(&self) -> Duration {
        Duration::from_micros(self.poll_us.get().into())
    }

    /// Permission to poll, among others guest rings if `rings`, unless as many workers poll as may.
    fn begin(&self, rings: bool) -> Option<Polling<'_>> {
        let most = if rings { self.ring_pollers_max } else { self.pollers_max };
        let more = |pollers: u32| (pollers < most).then_some(pollers + 1);
        self.pollers.try_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(Polling(self))
    }
}

/// One worker that polls.
pub(crate) struct Polling<'a>(&'a PollParameters);

impl Drop for Polling<'_> {
    fn drop(&mut self) {
        self.0.pollers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The share of a processor that one worker may use for polls; see the module. It has no clock and makes no system call.
#[derive(Debug)]
pub(crate) struct PollShare {
    /// Time that unsuccessful polls may take, and when it was last increased.
    saved: Duration,
    saved_at: Instant,
    /// The load of the machine when the current window began.
    window: Option<(Instant, LoadSample)>,
    /// Polling gives way until then, and for how long it does the next time.
    gives_way_until: Option<Instant>,
    next_pause: Duration,
}

impl PollShare {
    pub(crate) fn new(now: Instant) -> PollShare {
        PollShare {
            saved: SAVED_MAX,
            saved_at: now,
            window: None,
            gives_way_until: None,
            next_pause: GIVE_WAY_FIRST,
        }
    }

    /// Whether polling gives way to other programs.
    fn gives_way(&self, now: Instant) -> bool {
        self.gives_way_until.is_some_and(|until| now < until)
    }

    /// Whether a poll of at most `time` may begin.
    pub(crate) fn permits(&mut self, time: Duration, now: Instant) -> bool {
        if self.gives_way(now) {
            return false;
        }
        let earned = now.saturating_duration_since(self.saved_at) / SHARE;
        self.saved = (self.saved + earned).min(SAVED_MAX);
        self.saved_at = now;
        self.saved >= time
    }

    /// Notes a poll that took this long and found nothing.
    pub(crate) fn note_unsuccessful(&mut self, took: Duration) {
        self.saved = self.saved.saturating_sub(took);
    }

    /// Whether the load of the machine is to be read now and passed to [`PollShare::note_load`].
    pub(crate) fn wants_load(&self, now: Instant) -> bool {
        let ended = |since| now.saturating_duration_since(since) >= WINDOW;
        !self.gives_way(now) && self.window.is_none_or(|(since, _)| ended(since))
    }

    /// Notes the load of the machine, which decides at the end of a window whether polling gives way.
    pub(crate) fn note_load(&mut self, load: LoadSample, now: Instant) {
        let Some((since, before)) = self.window.replace((now, load)) else { return };
        let took = now.saturating_duration_since(since);
        // Most of a longer window passed without polls: it says little about what they cost.
        if took > 2 * WINDOW {
            return;
        }
        let idle = load.idle.zip(before.idle).map(|(idle, before)| idle.saturating_sub(before));
        let starved = idle.is_some_and(|idle| idle < took / IDLE_PART)
            || load.delayed.saturating_sub(before.delayed) > took / DELAYED_PART;
        if starved {
            self.window = None;
            self.gives_way_until = Some(now + self.next_pause);
            self.next_pause = (2 * self.next_pause).min(GIVE_WAY_MAX);
        } else {
            self.next_pause = GIVE_WAY_FIRST;
        }
    }
}

#[cfg(test)]
mod tests;
