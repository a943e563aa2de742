//! One backing device's handle: what the data path and the flusher call.
//!
//! Invariants:
//! - Bytes are dirty, then under writeback, then gone (or dirty again after a failure); no call makes
//!   a counter negative, whatever order or sizes it comes in.
//! - Every call is O(1) and allocates nothing, but those that add a volume.
//! - A handle touches its own state and atomics of [`Shared`]: two handles never wait for each other.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::config::{BdiOptions, Error, Law};
use crate::fair::Tab;
use crate::flush::{FlushPlan, Position};
use crate::horizon::{Ours, Pace};
use crate::linux::{Bounds, Linux, Task};
use crate::shared::{Shared, Slot};
use crate::shares::starting;
use crate::stats::{BdiStats, Pauses, VolumeStats};
use crate::units::{MILLISECOND, Nanos, RATE_MOST, SECOND, WHOLE, mul_div};

/// After a failure nothing is sent for this long, doubling up to the second.
const BACKOFF: Nanos = 100 * MILLISECOND;
const BACKOFF_MOST: Nanos = SECOND;
/// Failures in a row after which the device counts as stuck.
const FAILURES: u32 = 3;
/// A write larger than this part of the limit is to be split.
const SPLIT: u64 = 4;

/// A volume on a backing device. Of use with the [`Bdi`] that gave it only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct VolumeId(usize);

/// The answer to a write that wants to become dirty data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It may; its bytes are counted as dirty from now on.
    Go,
    /// Not yet, and nothing was counted: ask again at this moment, or when
    /// [`Bdi::on_written`] says that those who wait should.
    PauseUntil(Nanos),
    /// Too large for the limit: ask for pieces of at most this many bytes.
    Split(u64),
}

/// How a write to the store ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The store has all of it.
    Written,
    /// It has not: the data is dirty still, and is to be retried.
    Failed,
}

#[derive(Debug)]
struct Volume {
    tab: Tab,
    task: Task,
    dirty: u64,
    writeback: u64,
    pauses: Pauses,
}

#[derive(Debug)]
enum Engine {
    Ours(Box<Ours>),
    Linux(Linux),
}

/// Busy time, for the utilisation of the last second or two.
#[derive(Debug, Clone, Copy, Default)]
struct Busy {
    since: Option<Nanos>,
    total: Nanos,
    /// Two marks at least a second apart: when, and the total then.
    marks: [(Nanos, Nanos); 2],
}

impl Busy {
    fn at(&self, now: Nanos) -> Nanos {
        self.total.saturating_add(self.since.map_or(0, |since| now.saturating_sub(since)))
    }

    fn mark(&mut self, now: Nanos) {
        if now.saturating_sub(self.marks[1].0) >= SECOND {
            self.marks = [self.marks[1], (now, self.at(now))];
        }
    }

    fn utilisation(&self, now: Nanos) -> u32 {
        let (then, total) = self.marks[0];
        let passed = now.saturating_sub(then).max(1);
        let busy = self.at(now).saturating_sub(total);
        u32::try_from(mul_div(busy, u64::from(WHOLE), passed)).unwrap_or(WHOLE).min(WHOLE)
    }
}

/// The handle of one backing device; see the crate's introduction for who calls what.
///
/// `&mut self` throughout: keep it on one thread, or behind a lock of its own. Dropping it frees its
/// slot, and what was still counted for it.
#[derive(Debug)]
pub struct Bdi {
    shared: Arc<Shared>,
    index: usize,
    options: BdiOptions,
    engine: Engine,
    volumes: Vec<Option<Volume>>,
    /// The next tab to look at in passing.
    hand: usize,
    dirty: u64,
    writeback: u64,
    dirtied: u64,
    written: u64,
    failures: u64,
    failed_in_a_row: u32,
    not_before: Nanos,
    /// How long after a failure: longer after each try that failed.
    pause: Nanos,
    busy: Busy,
    pauses: Pauses,
}

impl Bdi {
    pub(crate) fn new(shared: Arc<Shared>, index: usize, options: BdiOptions, now: Nanos) -> Self {
        let rate = options.rate.map(|rate| rate.clamp(1, RATE_MOST));
        let engine = match shared.law {
            Law::Horizon => Engine::Ours(Box::new(Ours::new(rate, now))),
            Law::Linux | Law::LinuxOld { .. } => Engine::Linux(Linux::new(rate, now)),
        };
        let busy = Busy { marks: [(now, 0); 2], ..Busy::default() };
        let mut bdi = Self {
            shared,
            index,
            options,
            engine,
            volumes: Vec::new(),
            hand: 0,
            dirty: 0,
            writeback: 0,
            dirtied: 0,
            written: 0,
            failures: 0,
            failed_in_a_row: 0,
            not_before: 0,
            pause: BACKOFF,
            busy,
            pauses: Pauses::default(),
        };
        bdi.publish();
        bdi
    }

    fn slot(&self) -> &Slot {
        &self.shared.slots[self.index]
    }

    fn held(&self) -> u64 {
        self.dirty.saturating_add(self.writeback)
    }

    fn bounds(&self) -> Bounds {
        let BdiOptions { min_ratio, max_ratio, max_bytes, strict_limit: strict, .. } = self.options;
        Bounds { min_ratio, max_ratio, max_bytes, strict }
    }

    /// The threshold as pacing sees it; above 0.
    fn threshold(&self) -> u64 {
        let granted = self.slot().threshold.load(Relaxed).max(1);
        self.starting(granted).unwrap_or(granted)
    }

    /// The bound of a device that is only just being measured, if that is less than `granted`.
    fn starting(&self, granted: u64) -> Option<u64> {
        match &self.engine {
            Engine::Ours(ours) => starting(ours.rate.proven(), granted),
            Engine::Linux(_) => None,
        }
    }

    /// Tells the keeper and the other handles.
    fn publish(&mut self) {
        let (rate, proven) = match &mut self.engine {
            Engine::Ours(ours) => (ours.rate.value(), ours.rate.proven()),
            Engine::Linux(linux) => (linux.estimate(), u64::MAX),
        };
        let slot = self.slot();
        slot.dirty.store(self.dirty, Relaxed);
        slot.writeback.store(self.writeback, Relaxed);
        slot.rate.store(rate, Relaxed);
        slot.proven.store(proven, Relaxed);
    }

    /// Adds a volume; `weight` (1 to 1000) is its part of the pace beside the other volumes here.
    ///
    /// # Errors
    /// [`Error::Weight`]; [`Error::ManyVolumes`] when there are [`crate::Options::volumes`] already.
    pub fn add_volume(&mut self, weight: u32) -> Result<VolumeId, Error> {
        if !(1..=1000).contains(&weight) {
            return Err(Error::Weight { weight });
        }
        let volume = Volume {
            tab: Tab::new(weight),
            task: Task::default(),
            dirty: 0,
            writeback: 0,
            pauses: Pauses::default(),
        };
        if let Some(free) = self.volumes.iter().position(Option::is_none) {
            self.volumes[free] = Some(volume);
            return Ok(VolumeId(free));
        }
        if self.volumes.len() >= self.shared.volumes {
            return Err(Error::ManyVolumes { most: self.shared.volumes });
        }
        self.volumes.push(Some(volume));
        Ok(VolumeId(self.volumes.len() - 1))
    }

    /// Removes a volume. What it still has dirty is no longer counted (a caller that drains first has
    /// nothing); what is in flight is, until it is done.
    pub fn remove_volume(&mut self, volume: VolumeId, now: Nanos) {
        let Some(mut removed) = self.volumes.get_mut(volume.0).and_then(Option::take) else {
            return;
        };
        let (held, threshold) = (self.held(), self.threshold());
        if let Engine::Ours(ours) = &mut self.engine {
            ours.turn(held, threshold, now);
            ours.gone(&mut removed.tab, Pace::Free, (0, 0));
        }
        let dirty = removed.dirty.min(self.dirty);
        self.dirty -= dirty;
        self.shared.give_back(dirty);
        self.publish();
    }

    /// A write of `bytes` to `volume` wants to become dirty data; it first asked at `asked` (equal to
    /// `now` then), from which its wait is counted.
    ///
    /// Only the first of a volume's waiting writes should ask: the others wait in line behind it.
    /// Bytes that are dirty already and are overwritten need not ask.
    pub fn ask(&mut self, volume: VolumeId, bytes: u64, asked: Nanos, now: Nanos) -> Verdict {
        self.slot().asked.store(now.max(1), Relaxed);
        let limit = self.shared.limit.load(Relaxed);
        if bytes > limit / SPLIT {
            let piece = (limit / SPLIT / 2).max(4096);
            // In whole pages, as far as that goes.
            return Verdict::Split(piece - piece % 4096);
        }
        let verdict = match self.shared.law {
            Law::Horizon => self.ask_ours(volume, bytes, now),
            Law::Linux | Law::LinuxOld { .. } => self.ask_linux(volume, bytes, now),
        };
        if verdict == Verdict::Go {
            self.dirty = self.dirty.saturating_add(bytes);
            self.dirtied = self.dirtied.saturating_add(bytes);
            let pause = now.saturating_sub(asked);
            self.pauses.add(pause);
            if let Some(volume) = self.volumes.get_mut(volume.0).and_then(Option::as_mut) {
                volume.dirty = volume.dirty.saturating_add(bytes);
                volume.pauses.add(pause);
            }
            self.publish();
        }
        verdict
    }

    fn ask_ours(&mut self, volume: VolumeId, bytes: u64, now: Nanos) -> Verdict {
        let (held, threshold) = (self.held(), self.threshold());
        let Engine::Ours(ours) = &mut self.engine else { return Verdict::Go };
        let free = held.saturating_add(bytes) <= ours.free(threshold);
        if !free {
            ours.turn(held, threshold, now);
        }
        // One tab per call, so that nobody is counted as behind for long who is not.
        self.hand = (self.hand + 1) % self.volumes.len().max(1);
        if let Some(Some(other)) = self.volumes.get_mut(self.hand) {
            ours.look(&mut other.tab);
        }
        let slot = &self.shared.slots[self.index];
        let Some(Some(entry)) = self.volumes.get_mut(volume.0) else {
            return Verdict::PauseUntil(now.saturating_add(SECOND));
        };
        let pace = if free {
            Pace::Free
        } else {
            let at = (held, threshold, self.options.strict_limit);
            ours.judge(&mut entry.tab, at, bytes, now)
        };
        if let Pace::Wait(until) = pace {
            return Verdict::PauseUntil(until);
        }
        // Within what is kept for it a device may use the last byte; beyond, it leaves the others theirs.
        let within = held.saturating_add(bytes) <= slot.kept.load(Relaxed);
        let leave = if within { 0 } else { self.shared.reserve.load(Relaxed) };
        if !self.shared.reserve(bytes, leave) {
            return Verdict::PauseUntil(ours.limited(now));
        }
        ours.gone(&mut entry.tab, pace, (bytes, self.options.io_cost));
        Verdict::Go
    }

    fn ask_linux(&mut self, volume: VolumeId, bytes: u64, now: Nanos) -> Verdict {
        let (held, bounds) = (self.held(), self.bounds());
        let Engine::Linux(linux) = &mut self.engine else { return Verdict::Go };
        let Some(Some(entry)) = self.volumes.get_mut(volume.0) else {
            return Verdict::PauseUntil(now.saturating_add(SECOND));
        };
        let around = (&*self.shared, &bounds);
        let until = linux.ask(&mut entry.task, around, held, now);
        if until > now {
            return Verdict::PauseUntil(until);
        }
        self.shared.take(bytes);
        linux.dirtied(&mut entry.task, around, (held.saturating_add(bytes), bytes), now);
        Verdict::Go
    }

    /// The flusher has sent `bytes` of dirty data of `volume` to the store.
    pub fn on_writeback(&mut self, volume: VolumeId, bytes: u64, now: Nanos) {
        let bytes = bytes.min(self.dirty);
        if self.writeback == 0 && bytes > 0 {
            self.busy.since = Some(now);
            self.slot().last_completed.store(now, Relaxed);
            match &mut self.engine {
                Engine::Ours(ours) => ours.rate.busy(now),
                Engine::Linux(linux) if self.shared.law == Law::Linux => linux.busy(now),
                Engine::Linux(_) => {}
            }
        }
        self.dirty -= bytes;
        self.writeback = self.writeback.saturating_add(bytes);
        if let Some(volume) = self.volumes.get_mut(volume.0).and_then(Option::as_mut) {
            let bytes = bytes.min(volume.dirty);
            volume.dirty -= bytes;
            volume.writeback = volume.writeback.saturating_add(bytes);
        }
        self.publish();
    }

    /// A write of `bytes` that was sent at `sent` has ended. True: those who wait should ask again now,
    /// the first of each volume.
    #[must_use]
    pub fn on_written(
        &mut self,
        volume: VolumeId,
        bytes: u64,
        sent: Nanos,
        outcome: Outcome,
        now: Nanos,
    ) -> bool {
        let bytes = bytes.min(self.writeback);
        self.writeback -= bytes;
        if let Some(since) = self.busy.since {
            self.busy.total = self.busy.total.saturating_add(now.saturating_sub(since));
            self.busy.since = (self.writeback > 0).then_some(now);
        }
        self.busy.mark(now);
        if let Some(volume) = self.volumes.get_mut(volume.0).and_then(Option::as_mut) {
            let own = bytes.min(volume.writeback);
            volume.writeback -= own;
            if outcome == Outcome::Failed {
                volume.dirty = volume.dirty.saturating_add(own);
            }
        }
        match outcome {
            Outcome::Written => self.success(bytes, sent, now),
            Outcome::Failed => self.failure(bytes, sent, now),
        }
        self.publish();
        let (held, threshold) = (self.held(), self.threshold());
        match &mut self.engine {
            Engine::Ours(ours) => {
                if held == 0 {
                    ours.flusher.rest();
                }
                ours.turn(held, threshold, now);
                ours.ask_again(held, threshold, now)
            }
            Engine::Linux(_) => false,
        }
    }

    fn success(&mut self, bytes: u64, sent: Nanos, now: Nanos) {
        self.failed_in_a_row = 0;
        self.not_before = 0;
        self.written = self.written.saturating_add(bytes);
        self.shared.give_back(bytes);
        let (bounds, more) = (self.bounds(), self.dirty > 0);
        match &mut self.engine {
            Engine::Ours(ours) => {
                ours.rate.completed(bytes, more, now);
                ours.flusher.latency.add(now.saturating_sub(sent), now);
            }
            Engine::Linux(linux) => linux.written(&self.shared, &bounds, bytes, now),
        }
        let slot = self.slot();
        slot.last_completed.store(now, Relaxed);
        slot.failing.store(false, Relaxed);
    }

    fn failure(&mut self, bytes: u64, sent: Nanos, now: Nanos) {
        self.dirty = self.dirty.saturating_add(bytes);
        self.failures = self.failures.saturating_add(1);
        self.failed_in_a_row = self.failed_in_a_row.saturating_add(1);
        // Writes that were under way together are one try.
        if self.not_before == 0 {
            self.pause = BACKOFF;
        } else if sent >= self.not_before {
            self.pause = self.pause.saturating_mul(2).min(BACKOFF_MOST);
        }
        self.not_before = now.saturating_add(self.pause);
        if let Engine::Ours(ours) = &mut self.engine {
            ours.rate.failed(now);
        }
        self.slot().failing.store(self.failed_in_a_row >= FAILURES, Relaxed);
    }

    /// Dirty data of `volume` is gone without being written: it was trimmed.
    pub fn on_dropped(&mut self, volume: VolumeId, bytes: u64) {
        let bytes = bytes.min(self.dirty);
        self.dirty -= bytes;
        self.shared.give_back(bytes);
        if let Some(volume) = self.volumes.get_mut(volume.0).and_then(Option::as_mut) {
            volume.dirty -= bytes.min(volume.dirty);
        }
        self.publish();
        if let (0, Engine::Ours(ours)) = (self.held(), &mut self.engine) {
            ours.flusher.rest();
        }
    }

    /// What the flusher should do now. To be asked when something was dirtied while it slept, after
    /// each completion, and at least once a second while anything is dirty.
    pub fn plan(&mut self, now: Nanos) -> FlushPlan {
        let (dirty, writeback, threshold) = (self.dirty, self.writeback, self.threshold());
        let (max_chunk, max_in_flight) = (self.options.max_chunk, self.options.max_in_flight);
        let shared = &self.shared;
        let held = shared.total.load(Relaxed);
        let limit = shared.limit.load(Relaxed);
        let urgent = shared.pressure.load(Relaxed) > 0 || held > limit - limit / 8;
        let (start, in_flight, chunk) = match &mut self.engine {
            Engine::Ours(ours) => {
                let rate = ours.rate.value();
                let at = Position {
                    threshold,
                    dirty,
                    writeback,
                    rate,
                    urgent,
                    max_chunk,
                    max_in_flight,
                };
                ours.flusher.plan(&at)
            }
            Engine::Linux(linux) => {
                let over = held > shared.thresholds().1 || dirty > linux.background(shared);
                (dirty > 0 && over, max_in_flight, max_chunk)
            }
        };
        let expired = now.saturating_sub(shared.expire);
        FlushPlan { start, in_flight, chunk, expired, not_before: self.not_before }
    }

    /// Changes the bounds while it runs. [`BdiOptions::rate`] is not looked at.
    ///
    /// # Errors
    /// [`Error::Ratio`], [`Error::Chunk`], or [`Error::MinRatios`] with what the others have.
    pub fn set_options(&mut self, options: BdiOptions) -> Result<(), Error> {
        options.checked()?;
        crate::writeback::check_min_ratios(&self.shared, Some(self.index), options.min_ratio)?;
        crate::writeback::publish_options(self.slot(), &options);
        self.options = options;
        Ok(())
    }

    /// The bounds in force.
    #[must_use]
    pub fn options(&self) -> &BdiOptions {
        &self.options
    }

    /// What the device makes, in bytes per second: worth remembering for [`BdiOptions::rate`].
    /// `None` before anything has completed.
    #[must_use]
    pub fn measured_rate(&self) -> Option<u64> {
        (self.written > 0).then(|| self.slot().rate.load(Relaxed))
    }

    /// This device's figures.
    pub fn stats(&mut self, now: Nanos) -> BdiStats {
        let (held, bounds) = (self.held(), self.bounds());
        let threshold = match &mut self.engine {
            Engine::Ours(_) => self.threshold(),
            Engine::Linux(linux) => linux.threshold(&self.shared, &bounds, held),
        };
        let limit = self.shared.limit.load(Relaxed);
        let share = mul_div(threshold, u64::from(WHOLE), limit);
        BdiStats {
            dirty: self.dirty,
            writeback: self.writeback,
            threshold,
            bandwidth: self.slot().rate.load(Relaxed),
            share: u32::try_from(share).unwrap_or(WHOLE).min(WHOLE),
            utilisation: self.busy.utilisation(now),
            written: self.written,
            dirtied: self.dirtied,
            failures: self.failures,
            stuck: self.slot().stuck.load(Relaxed),
            pauses: self.pauses,
            min_ratio: bounds.min_ratio,
            max_ratio: bounds.max_ratio,
            max_bytes: bounds.max_bytes,
            strict_limit: bounds.strict,
        }
    }

    /// A volume's figures; `None` if it is not here.
    #[must_use]
    pub fn volume_stats(&self, volume: VolumeId) -> Option<VolumeStats> {
        let volume = self.volumes.get(volume.0)?.as_ref()?;
        let Volume { dirty, writeback, pauses, .. } = *volume;
        Some(VolumeStats { dirty, writeback, pauses })
    }
}

impl Drop for Bdi {
    fn drop(&mut self) {
        self.shared.give_back(self.held());
        let slot = self.slot();
        slot.dirty.store(0, Relaxed);
        slot.writeback.store(0, Relaxed);
        slot.min_ratio.store(0, Relaxed);
        slot.used.store(false, Relaxed);
    }
}
