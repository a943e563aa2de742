//! The keeper's side: devices come and go, the limit changes, and the shares are divided anew.
//!
//! Invariant: nothing here is on the way of a write; handles go on while the keeper runs.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::bdi::Bdi;
use crate::config::{BdiOptions, Error, Law, MAX_LIMIT, MIN_LIMIT, Options};
use crate::limit::Pressure;
use crate::proportion::periods_since;
use crate::shared::{Shared, Slot};
use crate::shares::{Claim, Doing, Share, divide};
use crate::stats::Stats;
use crate::units::{MILLISECOND, Nanos, SECOND, WHOLE, part};

/// A device with nothing dirty is active still for this long after its last write.
const ACTIVE: Nanos = SECOND;
/// One that holds something and was not asked for more for this long only drains. More than the time
/// after which those who wait ask again.
const DRAINING: Nanos = 250 * MILLISECOND;
/// Busy without a completion for this long: stuck.
const STUCK: Nanos = SECOND;
/// Linux lowers its limit by 1/32 of the gap each of these.
const LOWERING: Nanos = 200 * MILLISECOND;

/// All backing devices: made once, [kept](Writeback::keep) by one thread.
#[derive(Debug)]
pub struct Writeback {
    shared: Arc<Shared>,
    /// As it was set, before pressure.
    limit: u64,
    pressure: Pressure,
    kept_at: Option<Nanos>,
    /// When the current series of flexible periods began, and how many of it are over.
    periods: Option<(Nanos, u64)>,
    lowered_at: Nanos,
    claims: Vec<Claim>,
    shares: Vec<Share>,
}

/// Whether the minimum ratios of all other slots leave room for `more`.
pub(crate) fn check_min_ratios(
    shared: &Shared,
    except: Option<usize>,
    more: u32,
) -> Result<(), Error> {
    let others = shared.slots.iter().enumerate().filter(|(index, _)| Some(*index) != except);
    let sum: u64 = others.map(|(_, slot)| slot.min_ratio.load(Relaxed)).sum();
    let ppm = sum + u64::from(more);
    if ppm > u64::from(WHOLE) { Err(Error::MinRatios { ppm }) } else { Ok(()) }
}

/// Tells the keeper of a device's bounds.
pub(crate) fn publish_options(slot: &Slot, options: &BdiOptions) {
    slot.min_ratio.store(u64::from(options.min_ratio), Relaxed);
    slot.max_ratio.store(u64::from(options.max_ratio), Relaxed);
    slot.max_bytes.store(options.max_bytes, Relaxed);
}

impl Writeback {
    /// A controller without devices.
    ///
    /// # Errors
    /// [`Error`] for options out of range.
    pub fn new(options: &Options) -> Result<Self, Error> {
        options.checked()?;
        Ok(Self {
            shared: Arc::new(Shared::new(options)),
            limit: options.limit.min(MAX_LIMIT),
            pressure: Pressure::Calm,
            kept_at: None,
            periods: None,
            lowered_at: 0,
            claims: Vec::with_capacity(options.bdis),
            shares: Vec::with_capacity(options.bdis),
        })
    }

    /// Adds a backing device. It is gone when the handle is dropped.
    ///
    /// # Errors
    /// [`Error`] for options out of range, minimum ratios above the whole, or too many devices.
    pub fn add_bdi(&mut self, options: BdiOptions, now: Nanos) -> Result<Bdi, Error> {
        options.checked()?;
        check_min_ratios(&self.shared, None, options.min_ratio)?;
        let free = self.shared.slots.iter().position(|slot| !slot.used.load(Relaxed));
        let most = self.shared.slots.len();
        let index = free.ok_or(Error::ManyBdis { most })?;
        let slot = &self.shared.slots[index];
        slot.used.store(true, Relaxed);
        slot.asked.store(0, Relaxed);
        slot.threshold.store(0, Relaxed);
        slot.kept.store(0, Relaxed);
        slot.failing.store(false, Relaxed);
        slot.stuck.store(false, Relaxed);
        slot.last_completed.store(now, Relaxed);
        publish_options(slot, &options);
        let bdi = Bdi::new(Arc::clone(&self.shared), index, options, now);
        self.divide(now, 0);
        Ok(bdi)
    }

    /// Sets the limit in bytes (at least 1 MiB). Up at once; down as devices drain, so that writers
    /// are slowed and not stopped: [`Stats::limit`] tells the way.
    pub fn set_limit(&mut self, bytes: u64, now: Nanos) {
        self.limit = bytes.clamp(MIN_LIMIT, MAX_LIMIT);
        self.follow(now);
    }

    /// The host's memory pressure: from L1 on everything dirty is written, and the limit is a half, a
    /// quarter, an eighth of the one set.
    pub fn set_pressure(&mut self, level: Pressure, now: Nanos) {
        self.pressure = level;
        self.shared.pressure.store(level.level(), Relaxed);
        self.follow(now);
    }

    fn follow(&mut self, now: Nanos) {
        self.shared.goal.store(self.pressure.lowered(self.limit), Relaxed);
        self.keep(now);
    }

    /// Divides the limit anew. To be called each 10 to 50 ms while anything is dirty, and
    /// once a second otherwise; costs about a microsecond per device.
    pub fn keep(&mut self, now: Nanos) {
        let passed = self.kept_at.map_or(0, |then| now.saturating_sub(then));
        self.kept_at = Some(self.kept_at.map_or(now, |then| then.max(now)));
        match self.shared.law {
            Law::Horizon => self.divide(now, passed),
            Law::Linux | Law::LinuxOld { .. } => self.keep_linux(now),
        }
    }

    fn claim(slot: &Slot, goal: u64, now: Nanos) -> Claim {
        let held = slot.held();
        let busy = slot.writeback.load(Relaxed) > 0;
        let silent = now.saturating_sub(slot.last_completed.load(Relaxed)) > STUCK;
        let asked = slot.asked.load(Relaxed);
        let asked_within = |time| asked > 0 && now.saturating_sub(asked) < time;
        let doing = if (busy && silent) || slot.failing.load(Relaxed) {
            Doing::Stuck
        } else if asked_within(if held > 0 { DRAINING } else { ACTIVE }) {
            Doing::Active
        } else if held > 0 {
            Doing::Draining
        } else {
            Doing::Idle
        };
        let ratio = |ppm: u64| part(goal, u32::try_from(ppm).unwrap_or(WHOLE));
        Claim {
            doing,
            rate: slot.rate.load(Relaxed),
            proven: slot.proven.load(Relaxed),
            dirty: held,
            least: ratio(slot.min_ratio.load(Relaxed)),
            most: ratio(slot.max_ratio.load(Relaxed)).min(slot.max_bytes.load(Relaxed)),
            before: slot.threshold.load(Relaxed),
        }
    }

    fn divide(&mut self, now: Nanos, passed: Nanos) {
        if self.shared.law != Law::Horizon {
            return;
        }
        let shared = &self.shared;
        let goal = shared.goal.load(Relaxed);
        let used = || shared.slots.iter().filter(|slot| slot.used.load(Relaxed));
        self.claims.clear();
        self.claims.extend(used().map(|slot| Self::claim(slot, goal, now)));
        self.shares.clear();
        self.shares.resize(self.claims.len(), Share::default());
        let limits = (shared.limit.load(Relaxed), goal);
        let division = divide(&self.claims, &mut self.shares, limits, shared.horizon_most, passed);
        let mut reserve = 0_u64;
        for ((slot, claim), share) in used().zip(&self.claims).zip(&self.shares) {
            slot.threshold.store(share.threshold, Relaxed);
            slot.kept.store(share.kept, Relaxed);
            slot.stuck.store(claim.doing == Doing::Stuck, Relaxed);
            reserve = reserve.saturating_add(share.kept.saturating_sub(claim.dirty));
        }
        shared.reserve.store(reserve, Relaxed);
        shared.horizon.store(division.horizon, Relaxed);
        shared.limit.store(division.limit, Relaxed);
    }

    /// Halves flexible proportions as time passes, and lowers the limit smoothly.
    fn keep_linux(&mut self, now: Nanos) {
        let shared = &self.shared;
        let goal = shared.goal.load(Relaxed);
        // On its way down it stays above what is held, so that nobody stops.
        let lowest = goal.max(shared.total.load(Relaxed));
        let limit = shared.limit.load(Relaxed);
        if limit <= goal {
            shared.limit.store(goal, Relaxed);
            self.lowered_at = now;
        } else if limit > lowest && now.saturating_sub(self.lowered_at) >= LOWERING {
            shared.limit.store(limit - (limit - lowest).div_ceil(32), Relaxed);
            self.lowered_at = now;
        }
        if shared.law != Law::Linux {
            return;
        }
        let events = shared.events.load(Relaxed);
        let Some((start, done)) = self.periods else {
            // The timer sleeps while nothing completes.
            self.periods = (events > 0).then_some((now, 0));
            return;
        };
        let missed = periods_since(start, now).saturating_sub(done);
        if missed > 0 {
            let shift = u32::try_from(missed).unwrap_or(u32::MAX);
            let halve = |events: u64| Some(events.checked_shr(shift).unwrap_or(0));
            // Cannot fail: the function always gives a value.
            let _ = shared.events.fetch_update(Relaxed, Relaxed, halve);
            shared.period.fetch_add(missed, Relaxed);
            self.periods = Some((start, done + missed));
            if shared.events.load(Relaxed) <= 1 {
                self.periods = None;
            }
        }
    }

    /// The figures of all devices together.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let shared = &self.shared;
        Stats {
            limit: shared.limit.load(Relaxed),
            goal: shared.goal.load(Relaxed),
            held: shared.total.load(Relaxed),
            horizon: shared.horizon.load(Relaxed),
            bdis: shared.slots.iter().filter(|slot| slot.used.load(Relaxed)).count(),
        }
    }
}
