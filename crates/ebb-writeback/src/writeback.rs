//! The control thread's side: adding devices, changing the limit, dividing it into thresholds.
//!
//! Invariant: no write waits for anything here; handles continue while the control thread runs.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::bdi::Bdi;
use crate::config::{BdiOptions, MAX_LIMIT, MIN_LIMIT, WritebackError, WritebackOptions};
use crate::dirty_limit::PressureLevel;
use crate::shared::{DeviceSlot, SharedState};
use crate::shares::{Activity, DeviceClaim, DeviceShare, divide};
use crate::stats::WritebackStats;
use crate::units::{MILLISECOND, Nanos, SECOND, WHOLE, part};

/// A device with nothing dirty counts as active for this long after its last write.
const ACTIVE: Nanos = SECOND;
/// A device that holds something counts as draining when no write was requested for this long. Longer than
/// the time after which waiting writers retry.
const DRAINING: Nanos = 250 * MILLISECOND;
/// Busy without a completion for this long: stuck.
const STUCK: Nanos = SECOND;

/// All backing devices: created once, [updated](Writeback::update) by one thread.
#[derive(Debug)]
pub struct Writeback {
    shared: Arc<SharedState>,
    /// As set, before pressure.
    limit: u64,
    pressure: PressureLevel,
    kept_at: Option<Nanos>,
    claims: Vec<DeviceClaim>,
    shares: Vec<DeviceShare>,
}

impl Writeback {
    /// A controller without devices.
    ///
    /// # Errors
    /// [`WritebackError`] for options out of range.
    pub fn new(options: &WritebackOptions) -> Result<Self, WritebackError> {
        options.checked()?;
        Ok(Self {
            shared: Arc::new(SharedState::new(options)),
            limit: options.limit.min(MAX_LIMIT),
            pressure: PressureLevel::Calm,
            kept_at: None,
            claims: Vec::with_capacity(options.bdis),
            shares: Vec::with_capacity(options.bdis),
        })
    }

    /// Adds a backing device. Dropping the handle removes it.
    ///
    /// # Errors
    /// [`WritebackError`] for options out of range, minimum ratios above the whole, or too many devices.
    pub fn add_bdi(&mut self, options: BdiOptions, now: Nanos) -> Result<Bdi, WritebackError> {
        options.checked()?;
        self.shared.check_min_ratios(None, options.min_ratio)?;
        let free = self.shared.slots.iter().position(|slot| !slot.used.load(Relaxed));
        let most = self.shared.slots.len();
        let index = free.ok_or(WritebackError::ManyBdis { most })?;
        let slot = &self.shared.slots[index];
        slot.used.store(true, Relaxed);
        slot.last_request.store(0, Relaxed);
        slot.threshold.store(0, Relaxed);
        slot.kept.store(0, Relaxed);
        slot.failing.store(false, Relaxed);
        slot.stuck.store(false, Relaxed);
        slot.last_completed.store(now, Relaxed);
        slot.publish_options(&options);
        let bdi = Bdi::new(Arc::clone(&self.shared), index, options, now);
        self.divide(now, 0);
        Ok(bdi)
    }

    /// Sets the limit in bytes (at least 1 MiB). A higher limit takes effect at once, a lower one as devices
    /// drain, so that writers are slowed and not stopped: [`WritebackStats::limit`] is the limit in force.
    pub fn set_limit(&mut self, bytes: u64, now: Nanos) {
        self.limit = bytes.clamp(MIN_LIMIT, MAX_LIMIT);
        self.follow(now);
    }

    /// Sets the host's memory pressure: from L1 on all dirty data is written, and the limit is a half, a
    /// quarter or an eighth of the one set.
    pub fn set_pressure(&mut self, level: PressureLevel, now: Nanos) {
        self.pressure = level;
        self.shared.pressure.store(level.level(), Relaxed);
        self.follow(now);
    }

    fn follow(&mut self, now: Nanos) {
        self.shared.goal.store(self.pressure.lowered(self.limit), Relaxed);
        self.update(now);
    }

    /// Divides the limit anew. Call it every 10 to 50 ms while anything is dirty, and once a second
    /// otherwise; costs about a microsecond per device.
    pub fn update(&mut self, now: Nanos) {
        let passed = self.kept_at.map_or(0, |then| now.saturating_sub(then));
        self.kept_at = Some(self.kept_at.map_or(now, |then| then.max(now)));
        self.divide(now, passed);
    }

    fn claim(slot: &DeviceSlot, goal: u64, now: Nanos) -> DeviceClaim {
        let held = slot.held();
        let busy = slot.writeback.load(Relaxed) > 0;
        let silent = now.saturating_sub(slot.last_completed.load(Relaxed)) > STUCK;
        let last_request = slot.last_request.load(Relaxed);
        let requested_within = |time| last_request > 0 && now.saturating_sub(last_request) < time;
        let activity = if (busy && silent) || slot.failing.load(Relaxed) {
            Activity::Stuck
        } else if requested_within(if held > 0 { DRAINING } else { ACTIVE }) {
            Activity::Active
        } else if held > 0 {
            Activity::Draining
        } else {
            Activity::Idle
        };
        let ratio = |ppm: u64| part(goal, u32::try_from(ppm).unwrap_or(WHOLE));
        DeviceClaim {
            activity,
            rate: slot.rate.load(Relaxed),
            proven: slot.proven.load(Relaxed),
            dirty: held,
            least: ratio(slot.min_ratio.load(Relaxed)),
            most: ratio(slot.max_ratio.load(Relaxed)).min(slot.max_bytes.load(Relaxed)),
            before: slot.threshold.load(Relaxed),
        }
    }

    fn divide(&mut self, now: Nanos, passed: Nanos) {
        let shared = &self.shared;
        let goal = shared.goal.load(Relaxed);
        let used = || shared.slots.iter().filter(|slot| slot.used.load(Relaxed));
        self.claims.clear();
        self.claims.extend(used().map(|slot| Self::claim(slot, goal, now)));
        self.shares.clear();
        self.shares.resize(self.claims.len(), DeviceShare::default());
        let limits = (shared.limit.load(Relaxed), goal);
        let division = divide(&self.claims, &mut self.shares, limits, shared.horizon_most, passed);
        let mut reserve = 0_u64;
        for ((slot, claim), share) in used().zip(&self.claims).zip(&self.shares) {
            slot.threshold.store(share.threshold, Relaxed);
            slot.kept.store(share.kept, Relaxed);
            slot.stuck.store(claim.activity == Activity::Stuck, Relaxed);
            reserve = reserve.saturating_add(share.kept.saturating_sub(claim.dirty));
        }
        shared.reserve.store(reserve, Relaxed);
        shared.horizon.store(division.horizon, Relaxed);
        shared.limit.store(division.limit, Relaxed);
    }

    /// Statistics of all devices together.
    #[must_use]
    pub fn stats(&self) -> WritebackStats {
        let shared = &self.shared;
        WritebackStats {
            limit: shared.limit.load(Relaxed),
            goal: shared.goal.load(Relaxed),
            held: shared.total.load(Relaxed),
            horizon: shared.horizon.load(Relaxed),
            bdis: shared.slots.iter().filter(|slot| slot.used.load(Relaxed)).count(),
        }
    }
}
