//! The handle of one backing device: called by the data path and the flusher.
//!
//! Invariants:
//! - Bytes are dirty, then under writeback, then written (or dirty again after a failure); no call makes a
//!   counter negative, whatever its order or sizes.
//! - Every call is O(1) and allocates nothing, except those that add a volume.
//! - A handle touches its own state and the atomics of [`SharedState`]: handles never wait for each other.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::config::{BdiOptions, WritebackError};
use crate::fair::VolumeAccount;
use crate::flush::{FlushPlan, FlushPosition};
use crate::horizon::{HorizonState, PaceDecision};
use crate::shared::{DeviceSlot, SharedState};
use crate::shares::starting;
use crate::stats::{BdiStats, BdiVolumeStats, Pauses};
use crate::units::{MILLISECOND, Nanos, RATE_MOST, SECOND, WHOLE, mul_div};

/// After a failure nothing is sent for this long, doubling up to one second.
const BACKOFF: Nanos = 100 * MILLISECOND;
const BACKOFF_MOST: Nanos = SECOND;
/// Consecutive failures after which the device counts as stuck.
const FAILURES: u32 = 3;
/// A write larger than this fraction of the limit must be split.
const SPLIT: u64 = 4;

/// A volume on a backing device. Valid only with the [`Bdi`] that returned it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct VolumeId(pub(crate) usize);

/// The result of a request to make data dirty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Granted; the bytes are counted as dirty from now on.
    Go,
    /// Not yet, and nothing was counted: retry at this moment, or when [`Bdi::on_written`] returns true.
    PauseUntil(Nanos),
    /// Too large for the limit: request pieces of at most this many bytes.
    Split(u64),
}

/// The result of a write to the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteOutcome {
    /// The store has all of it.
    Written,
    /// The write failed: the data is still dirty and will be retried.
    Failed,
}

#[derive(Debug)]
struct BdiVolume {
    account: VolumeAccount,
    dirty: u64,
    writeback: u64,
    pauses: Pauses,
}

/// Busy time, for the utilisation of the last one to two seconds.
#[derive(Debug, Clone, Copy, Default)]
struct BusyTime {
    since: Option<Nanos>,
    total: Nanos,
    /// Two marks at least a second apart: the moment, and the total at that moment.
    marks: [(Nanos, Nanos); 2],
}

impl BusyTime {
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

/// The handle of one backing device; the crate documentation says which thread calls what.
///
/// `&mut self` throughout: keep it on one thread, or behind a lock of its own. Dropping it frees its slot and
/// everything counted for it.
#[derive(Debug)]
pub struct Bdi {
    shared: Arc<SharedState>,
    index: usize,
    options: BdiOptions,
    horizon: HorizonState,
    volumes: Vec<Option<BdiVolume>>,
    /// The next volume whose account is updated in passing.
    next_account: usize,
    /// The last writer was told to wait for the rate: its device must show one.
    is_waited_for: bool,
    dirty: u64,
    writeback: u64,
    dirtied: u64,
    written: u64,
    failures: u64,
    failed_in_a_row: u32,
    not_before: Nanos,
    /// The delay after a failure; doubles with each consecutive failure.
    pause: Nanos,
    busy: BusyTime,
    pauses: Pauses,
}

impl Bdi {
    pub(crate) fn new(
        shared: Arc<SharedState>,
        index: usize,
        options: BdiOptions,
        now: Nanos,
    ) -> Self {
        let rate = options.rate.map(|rate| rate.clamp(1, RATE_MOST));
        let busy = BusyTime { marks: [(now, 0); 2], ..BusyTime::default() };
        let mut bdi = Self {
            shared,
            index,
            options,
            horizon: HorizonState::new(rate, now),
            volumes: Vec::new(),
            next_account: 0,
            is_waited_for: false,
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

    fn slot(&self) -> &DeviceSlot {
        &self.shared.slots[self.index]
    }

    fn held(&self) -> u64 {
        self.dirty.saturating_add(self.writeback)
    }

    /// The threshold that pacing uses; above 0.
    fn threshold(&self) -> u64 {
        let granted = self.slot().threshold.load(Relaxed).max(1);
        starting(self.horizon.rate.proven(), granted).unwrap_or(granted)
    }

    /// Publishes the state to the control thread and the other handles.
    fn publish(&mut self) {
        let (rate, proven) = (self.horizon.rate.value(), self.horizon.rate.proven());
        let slot = self.slot();
        slot.dirty.store(self.dirty, Relaxed);
        slot.writeback.store(self.writeback, Relaxed);
        slot.rate.store(rate, Relaxed);
        slot.proven.store(proven, Relaxed);
    }

    /// Adds a volume; `weight` (1 to 1000) is its share relative to the other volumes of the device.
    ///
    /// # Errors
    /// [`WritebackError::Weight`]; [`WritebackError::ManyVolumes`] when there are
    /// [`crate::WritebackOptions::volumes`] already.
    pub fn add_volume(&mut self, weight: u32) -> Result<VolumeId, WritebackError> {
        if !(1..=1000).contains(&weight) {
            return Err(WritebackError::Weight { weight });
        }
        let volume = BdiVolume {
            account: VolumeAccount::new(weight),
            dirty: 0,
            writeback: 0,
            pauses: Pauses::default(),
        };
        if let Some(free) = self.volumes.iter().position(Option::is_none) {
            self.volumes[free] = Some(volume);
            return Ok(VolumeId(free));
        }
        if self.volumes.len() >= self.shared.volumes {
            return Err(WritebackError::ManyVolumes { most: self.shared.volumes });
        }
        self.volumes.push(Some(volume));
        Ok(VolumeId(self.volumes.len() - 1))
    }

    /// Removes a volume. Its remaining dirty bytes are no longer counted (a caller that drains first has
    /// none); bytes in flight are counted until their writes complete.
    pub fn remove_volume(&mut self, volume: VolumeId, now: Nanos) {
        let Some(mut removed) = self.volumes.get_mut(volume.0).and_then(Option::take) else {
            return;
        };
        let (held, threshold) = (self.held(), self.threshold());
        self.horizon.advance(held, threshold, now);
        self.horizon.charge(&mut removed.account, PaceDecision::Free, (0, 0));
        let dirty = removed.dirty.min(self.dirty);
        self.dirty -= dirty;
        self.shared.release(dirty);
        self.publish();
    }

    /// Requests to make a write of `bytes` to `volume` dirty; it was first requested at `requested` (equal to
    /// `now` on the first call), and its wait is counted from then.
    ///
    /// Only the first of a volume's waiting writes should call this; the others queue behind it. Overwriting
    /// bytes that are dirty already needs no request.
    pub fn reserve(
        &mut self,
        volume: VolumeId,
        bytes: u64,
        requested: Nanos,
        now: Nanos,
    ) -> Verdict {
        self.slot().last_request.store(now.max(1), Relaxed);
        let limit = self.shared.limit.load(Relaxed);
        if bytes > limit / SPLIT {
            let piece = (limit / SPLIT / 2).max(4096);
            // In whole pages where possible.
            return Verdict::Split(piece - piece % 4096);
        }
        let verdict = self.pace(volume, bytes, now);
        if verdict == Verdict::Go {
            self.dirty = self.dirty.saturating_add(bytes);
            self.dirtied = self.dirtied.saturating_add(bytes);
            let pause = now.saturating_sub(requested);
            self.pauses.add(pause);
            if let Some(volume) = self.volumes.get_mut(volume.0).and_then(Option::as_mut) {
                volume.dirty = volume.dirty.saturating_add(bytes);
                volume.pauses.add(pause);
            }
            self.publish();
        }
        verdict
    }

    /// Decides, and reserves the bytes of the limit if they are granted.
    fn pace(&mut self, volume: VolumeId, bytes: u64, now: Nanos) -> Verdict {
        let (held, threshold) = (self.held(), self.threshold());
        let horizon = &mut self.horizon;
        let free = held.saturating_add(bytes) <= horizon.free(threshold);
        if !free {
            horizon.advance(held, threshold, now);
        }
        // One account per call, so that no idle volume is counted as waiting for long.
        self.next_account = (self.next_account + 1) % self.volumes.len().max(1);
        if let Some(Some(other)) = self.volumes.get_mut(self.next_account) {
            horizon.refresh(&mut other.account);
        }
        let slot = &self.shared.slots[self.index];
        let Some(Some(entry)) = self.volumes.get_mut(volume.0) else {
            return Verdict::PauseUntil(now.saturating_add(SECOND));
        };
        let pace = if free {
            PaceDecision::Free
        } else {
            let at = (held, threshold, self.options.strict_limit);
            horizon.decide(&mut entry.account, at, bytes, now)
        };
        self.is_waited_for = matches!(pace, PaceDecision::Wait(_));
        if let PaceDecision::Wait(until) = pace {
            return Verdict::PauseUntil(until);
        }
        // Within its reserved part a device may use the last byte of the limit; beyond it, the parts reserved
        // for other devices stay free.
        let within = held.saturating_add(bytes) <= slot.kept.load(Relaxed);
        let leave = if within { 0 } else { self.shared.reserve.load(Relaxed) };
        if !self.shared.reserve(bytes, leave) {
            return Verdict::PauseUntil(horizon.limited(now));
        }
        horizon.charge(&mut entry.account, pace, (bytes, self.options.io_cost));
        Verdict::Go
    }

    /// The flusher has sent `bytes` of dirty data of `volume` to the store.
    pub fn on_writeback(&mut self, volume: VolumeId, bytes: u64, now: Nanos) {
        let bytes = bytes.min(self.dirty);
        if self.writeback == 0 && bytes > 0 {
            self.busy.since = Some(now);
            self.slot().last_completed.store(now, Relaxed);
            self.horizon.rate.busy(now);
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

    /// A write of `bytes` that was sent at `sent` has completed. Returns true if waiting writers should retry
    /// now, the first of each volume.
    #[must_use]
    pub fn on_written(
        &mut self,
        volume: VolumeId,
        bytes: u64,
        sent: Nanos,
        outcome: WriteOutcome,
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
            if outcome == WriteOutcome::Failed {
                volume.dirty = volume.dirty.saturating_add(own);
            }
        }
        match outcome {
            WriteOutcome::Written => self.success(bytes, sent, now),
            WriteOutcome::Failed => self.failure(bytes, sent, now),
        }
        self.publish();
        let (held, threshold) = (self.held(), self.threshold());
        if held == 0 {
            self.horizon.flusher.stop();
        }
        self.horizon.advance(held, threshold, now);
        self.horizon.retry_reservation(held, threshold, now)
    }

    fn success(&mut self, bytes: u64, sent: Nanos, now: Nanos) {
        self.failed_in_a_row = 0;
        self.not_before = 0;
        self.written = self.written.saturating_add(bytes);
        self.shared.release(bytes);
        self.horizon.rate.completed(bytes, self.dirty > 0, now);
        self.horizon.flusher.latency.add(now.saturating_sub(sent), now);
        let slot = self.slot();
        slot.last_completed.store(now, Relaxed);
        slot.failing.store(false, Relaxed);
    }

    fn failure(&mut self, bytes: u64, sent: Nanos, now: Nanos) {
        self.dirty = self.dirty.saturating_add(bytes);
        self.failures = self.failures.saturating_add(1);
        self.failed_in_a_row = self.failed_in_a_row.saturating_add(1);
        // Failures of concurrent writes count as one attempt.
        if self.not_before == 0 {
            self.pause = BACKOFF;
        } else if sent >= self.not_before {
            self.pause = self.pause.saturating_mul(2).min(BACKOFF_MOST);
        }
        self.not_before = now.saturating_add(self.pause);
        self.horizon.rate.failed(now);
        self.slot().failing.store(self.failed_in_a_row >= FAILURES, Relaxed);
    }

    /// Dirty data of `volume` was discarded without being written: it was trimmed.
    pub fn on_dropped(&mut self, volume: VolumeId, bytes: u64) {
        let bytes = bytes.min(self.dirty);
        self.dirty -= bytes;
        self.shared.release(bytes);
        if let Some(volume) = self.volumes.get_mut(volume.0).and_then(Option::as_mut) {
            volume.dirty -= bytes.min(volume.dirty);
        }
        self.publish();
        if self.held() == 0 {
            self.horizon.flusher.stop();
        }
    }

    /// What the flusher should do now. Call it when data became dirty while the flusher slept, after each
    /// completion, and at least once a second while anything is dirty.
    pub fn plan(&mut self, now: Nanos) -> FlushPlan {
        let (dirty, writeback, threshold) = (self.dirty, self.writeback, self.threshold());
        let (max_chunk, max_in_flight) = (self.options.max_chunk, self.options.max_in_flight);
        let shared = &self.shared;
        let held = shared.total.load(Relaxed);
        let limit = shared.limit.load(Relaxed);
        let urgent = shared.pressure.load(Relaxed) > 0 || held > limit - limit / 8;
        let urgent = urgent || self.is_waited_for;
        let rate = self.horizon.rate.value();
        let at =
            FlushPosition { threshold, dirty, writeback, rate, urgent, max_chunk, max_in_flight };
        let (start, in_flight, chunk) = self.horizon.flusher.plan(&at);
        let expired = now.saturating_sub(shared.expire);
        FlushPlan { start, in_flight, chunk, expired, not_before: self.not_before }
    }

    /// Changes the bounds at run time. [`BdiOptions::rate`] is ignored.
    ///
    /// # Errors
    /// [`WritebackError::Ratio`], [`WritebackError::Chunk`], or [`WritebackError::MinRatios`] with the sum over all
    /// devices.
    pub fn set_options(&mut self, options: BdiOptions) -> Result<(), WritebackError> {
        options.checked()?;
        self.shared.check_min_ratios(Some(self.index), options.min_ratio)?;
        self.slot().publish_options(&options);
        self.options = options;
        Ok(())
    }

    /// The bounds in force.
    #[must_use]
    pub fn options(&self) -> &BdiOptions {
        &self.options
    }

    /// Statistics of this device.
    pub fn stats(&mut self, now: Nanos) -> BdiStats {
        let threshold = self.threshold();
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
            min_ratio: self.options.min_ratio,
            max_ratio: self.options.max_ratio,
            max_bytes: self.options.max_bytes,
            strict_limit: self.options.strict_limit,
        }
    }

    /// Statistics of a volume; `None` if it is not on this device.
    #[must_use]
    pub fn volume_stats(&self, volume: VolumeId) -> Option<BdiVolumeStats> {
        let volume = self.volumes.get(volume.0)?.as_ref()?;
        let BdiVolume { dirty, writeback, pauses, .. } = *volume;
        Some(BdiVolumeStats { dirty, writeback, pauses })
    }
}

impl Drop for Bdi {
    fn drop(&mut self) {
        self.shared.release(self.held());
        let slot = self.slot();
        slot.dirty.store(0, Relaxed);
        slot.writeback.store(0, Relaxed);
        slot.min_ratio.store(0, Relaxed);
        slot.used.store(false, Relaxed);
    }
}
