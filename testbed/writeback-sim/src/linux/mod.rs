//! A controller with the laws of Linux, for comparison: what all devices share, and the handle of one.
//!
//! It runs on the simulator's one thread and counts successful writes only. As in Linux, the limit is not
//! reserved first: a write is charged when it was granted.
//!
//! Invariant: bytes are dirty, then under writeback, then written.

mod law;
mod proportion;

use std::cell::Cell;
use std::rc::Rc;

use self::law::{LinuxBounds, LinuxState, LinuxTask};
use self::proportion::{GlobalProportion, ProportionKind, periods_since};
use crate::control::{Control, DeviceControl};
use crate::law::Law;
use ebb_writeback::units::{MILLISECOND, Nanos, RATE_MOST, SECOND, part};
use ebb_writeback::{
    BdiOptions, BdiStats, FlushPlan, PressureLevel, Verdict, WritebackError, WritebackStats,
};
use ebb_writeback::{MAX_LIMIT, MIN_LIMIT};

/// Linux lowers its limit by 1/32 of the difference at this interval.
const LOWERING: Nanos = 200 * MILLISECOND;
/// Data dirty for longer than this is written regardless of everything else.
const EXPIRE: Nanos = 30 * SECOND;

/// What all devices share.
#[derive(Debug)]
struct LinuxShared {
    law: Law,
    background: u32,
    /// The requested limit, and the limit in force (a lowered limit takes effect gradually).
    goal: Cell<u64>,
    limit: Cell<u64>,
    /// Dirty and under writeback, of all devices.
    total: Cell<u64>,
    /// The sum of all minimum ratios.
    min_ratios: Cell<u64>,
    /// Completed bytes, and periods.
    events: Cell<u64>,
    period: Cell<u64>,
}

impl LinuxShared {
    /// The kind of proportions that the law uses with the requested limit.
    fn proportions(&self) -> ProportionKind {
        match self.law {
            Law::LinuxOld { shift } => ProportionKind::floating(self.goal.get(), shift),
            _ => ProportionKind::Flexible,
        }
    }

    fn events(&self) -> GlobalProportion {
        GlobalProportion { events: self.events.get(), period: self.period.get() }
    }

    /// The threshold and the background threshold.
    fn thresholds(&self) -> (u64, u64) {
        let threshold = self.goal.get();
        let background = part(threshold, self.background);
        (threshold, if background >= threshold { threshold / 2 } else { background })
    }
}

/// All devices under a law of Linux.
#[derive(Debug)]
pub(super) struct LinuxWriteback {
    shared: Rc<LinuxShared>,
    /// As set, before pressure.
    limit: u64,
    pressure: PressureLevel,
    /// When the current series of flexible periods began, and how many of them have ended.
    periods: Option<(Nanos, u64)>,
    lowered_at: Nanos,
}

impl LinuxWriteback {
    pub(super) fn new(law: Law, limit: u64, background: u32) -> Self {
        let limit = limit.min(MAX_LIMIT);
        let shared = LinuxShared {
            law,
            background,
            goal: Cell::new(limit),
            limit: Cell::new(limit),
            total: Cell::new(0),
            min_ratios: Cell::new(0),
            events: Cell::new(0),
            period: Cell::new(0),
        };
        let (shared, pressure) = (Rc::new(shared), PressureLevel::Calm);
        Self { shared, limit, pressure, periods: None, lowered_at: 0 }
    }

    fn follow(&mut self, now: Nanos) {
        self.shared.goal.set(self.pressure.lowered(self.limit));
        self.update(now);
    }

    /// While the limit is lowered, it stays above what is held, so that no writer is stopped.
    fn lower_limit(&mut self, now: Nanos) {
        let shared = &self.shared;
        let (goal, limit) = (shared.goal.get(), shared.limit.get());
        let lowest = goal.max(shared.total.get());
        if limit <= goal {
            shared.limit.set(goal);
            self.lowered_at = now;
        } else if limit > lowest && now.saturating_sub(self.lowered_at) >= LOWERING {
            shared.limit.set(limit - (limit - lowest).div_ceil(32));
            self.lowered_at = now;
        }
    }

    /// Halves flexible proportions with time.
    fn end_periods(&mut self, now: Nanos) {
        let shared = &self.shared;
        let Some((start, done)) = self.periods else {
            // The timer does not run while nothing completes.
            self.periods = (shared.events.get() > 0).then_some((now, 0));
            return;
        };
        let missed = periods_since(start, now).saturating_sub(done);
        if missed > 0 {
            let shift = u32::try_from(missed).unwrap_or(u32::MAX);
            shared.events.set(shared.events.get().checked_shr(shift).unwrap_or(0));
            shared.period.set(shared.period.get() + missed);
            self.periods = (shared.events.get() > 1).then_some((start, done + missed));
        }
    }
}

impl Control for LinuxWriteback {
    fn add_bdi(&mut self, options: BdiOptions) -> Result<Box<dyn DeviceControl>, WritebackError> {
        options.checked()?;
        let shared = Rc::clone(&self.shared);
        shared.min_ratios.set(shared.min_ratios.get() + u64::from(options.min_ratio));
        let state = LinuxState::new(options.rate.map(|rate| rate.clamp(1, RATE_MOST)), 0);
        let bandwidth = state.estimate();
        let (tasks, dirty, writeback, written) = (Vec::new(), 0, 0, 0);
        let bdi = LinuxBdi { shared, options, state, tasks, dirty, writeback, written, bandwidth };
        Ok(Box::new(bdi))
    }

    fn set_limit(&mut self, bytes: u64, now: Nanos) {
        self.limit = bytes.clamp(MIN_LIMIT, MAX_LIMIT);
        self.follow(now);
    }

    fn set_pressure(&mut self, level: PressureLevel, now: Nanos) {
        self.pressure = level;
        self.follow(now);
    }

    fn update(&mut self, now: Nanos) {
        self.lower_limit(now);
        if self.shared.law == Law::Linux {
            self.end_periods(now);
        }
    }

    fn stats(&self) -> WritebackStats {
        let shared = &self.shared;
        WritebackStats {
            limit: shared.limit.get(),
            goal: shared.goal.get(),
            held: shared.total.get(),
            ..WritebackStats::default()
        }
    }
}

/// One device under a law of Linux.
#[derive(Debug)]
struct LinuxBdi {
    shared: Rc<LinuxShared>,
    options: BdiOptions,
    state: LinuxState,
    /// One for each volume.
    tasks: Vec<LinuxTask>,
    dirty: u64,
    writeback: u64,
    written: u64,
    /// The estimate when bytes were last counted.
    bandwidth: u64,
}

impl LinuxBdi {
    fn held(&self) -> u64 {
        self.dirty + self.writeback
    }

    fn bounds(&self) -> LinuxBounds {
        let BdiOptions { min_ratio, max_ratio, max_bytes, strict_limit: strict, .. } = self.options;
        LinuxBounds { min_ratio, max_ratio, max_bytes, strict }
    }
}

impl DeviceControl for LinuxBdi {
    fn add_volume(&mut self) -> Result<usize, WritebackError> {
        self.tasks.push(LinuxTask::default());
        Ok(self.tasks.len() - 1)
    }

    fn reserve(&mut self, volume: usize, bytes: u64, _requested: Nanos, now: Nanos) -> Verdict {
        let (held, bounds) = (self.held(), self.bounds());
        let Some(task) = self.tasks.get_mut(volume) else {
            return Verdict::PauseUntil(now.saturating_add(SECOND));
        };
        let around = (&*self.shared, &bounds);
        let until = self.state.reserve(task, around, held, now);
        if until > now {
            return Verdict::PauseUntil(until);
        }
        self.shared.total.set(self.shared.total.get() + bytes);
        self.state.dirtied(task, around, (held + bytes, bytes), now);
        self.dirty += bytes;
        self.bandwidth = self.state.estimate();
        Verdict::Go
    }

    fn plan(&mut self, now: Nanos) -> FlushPlan {
        let shared = &*self.shared;
        let over = shared.total.get() > shared.thresholds().1
            || self.dirty > self.state.background(shared);
        FlushPlan {
            start: self.dirty > 0 && over,
            in_flight: self.options.max_in_flight,
            chunk: self.options.max_chunk,
            expired: now.saturating_sub(EXPIRE),
            not_before: 0,
        }
    }

    fn on_writeback(&mut self, _volume: usize, bytes: u64, now: Nanos) {
        let bytes = bytes.min(self.dirty);
        if self.writeback == 0 && bytes > 0 && self.shared.law == Law::Linux {
            self.state.busy(now);
        }
        self.dirty -= bytes;
        self.writeback += bytes;
        self.bandwidth = self.state.estimate();
    }

    fn on_written(&mut self, _volume: usize, bytes: u64, _sent: Nanos, now: Nanos) -> bool {
        let bytes = bytes.min(self.writeback);
        self.writeback -= bytes;
        self.written += bytes;
        self.shared.total.set(self.shared.total.get().saturating_sub(bytes));
        let bounds = self.bounds();
        self.state.written(&self.shared, &bounds, bytes, now);
        self.bandwidth = self.state.estimate();
        false
    }

    fn stats(&mut self, _now: Nanos) -> BdiStats {
        let (held, bounds) = (self.held(), self.bounds());
        BdiStats {
            dirty: self.dirty,
            writeback: self.writeback,
            threshold: self.state.threshold(&self.shared, &bounds, held),
            bandwidth: self.bandwidth,
            written: self.written,
            ..BdiStats::default()
        }
    }
}
