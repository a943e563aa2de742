//! The Linux laws, for comparison: position control, estimated bandwidth and rate, pauses, strict limits.
//!
//! Written from the formulas of Linux's `mm/page-writeback.c` (6.13), in bytes instead of pages; the older
//! law differs only in its proportions. As in Linux, a write is charged afterwards, so that the limit can be
//! exceeded by what is written between two checks, and only the total is enforced until it is above the
//! middle of background and limit (*free run*).
//!
//! Invariants: integers only; rates at least 1; ratios in 1/1024.

use super::LinuxShared;
use super::proportion::{LocalProportion, ONE, PAGE, ProportionKind};
use crate::time_of;
use ebb_writeback::units::{
    MILLISECOND, Nanos, RATE_MOST, SECOND, bytes_in, mul_div, narrow, part,
};

/// Bits of the position ratio.
const BITS: u32 = 10;
const UNIT: u64 = 1 << BITS;
/// Longest pause of a writer.
const MAX_PAUSE: Nanos = 200 * MILLISECOND;
/// Interval of rate updates.
const UPDATE: Nanos = 200 * MILLISECOND;
/// The tick of a kernel with HZ = 1000.
const TICK: Nanos = MILLISECOND;
/// The rate assumed of a device before it is measured, in bytes per second.
const PRIOR: u64 = 100 << 20;
/// Smoothing period of the bandwidth: 3 s rounded up to a power of two of ticks.
const SMOOTHING: Nanos = 4_096 * MILLISECOND;
/// Fewer bytes than this are not worth a short pause.
const FEW: u64 = 32 * PAGE;

/// The inputs of the law. Bytes, and bytes per second.
#[derive(Debug, Clone, Copy)]
struct LinuxView {
    dirty: u64,
    threshold: u64,
    background: u64,
    limit: u64,
    wb_dirty: u64,
    wb_threshold: u64,
    bandwidth: u64,
    strict: bool,
}

impl LinuxView {
    fn freerun(&self) -> u64 {
        (self.threshold + self.background) / 2
    }

    fn wb_background(&self) -> u64 {
        mul_div(self.wb_threshold, self.background, self.threshold)
    }

    /// Whether writers are not paced at all.
    fn is_free(&self) -> bool {
        if self.strict {
            self.wb_dirty <= u64::midpoint(self.wb_threshold, self.wb_background())
        } else {
            self.dirty <= self.freerun()
        }
    }

    /// 1 + ((setpoint − dirty) / (limit − setpoint))³, from 0 to 2.
    fn cubic(setpoint: u64, dirty: u64, limit: u64) -> u64 {
        let span = i128::from(limit.saturating_sub(setpoint).max(1));
        let x = (i128::from(setpoint) - i128::from(dirty)) * (1 << 20) / span;
        let cube = (((x * x) >> 20) * x) >> 20;
        let ratio = (1_i128 << 20) + cube;
        u64::try_from(ratio.clamp(0, 2 << 20)).unwrap_or(0) >> (20 - BITS)
    }

    /// The position ratio, in 1/1024.
    fn position(&self) -> u64 {
        if self.dirty >= self.limit {
            return 0;
        }
        let setpoint = u64::midpoint(self.freerun(), self.limit);
        let ratio = Self::cubic(setpoint, self.dirty, self.limit);
        if self.strict {
            return ratio.min(self.strict_position());
        }
        let wb = self.wb_threshold.min(self.threshold).max((self.limit - self.dirty) / 8);
        let wb_setpoint = mul_div(setpoint, wb, self.threshold);
        let window = (self.threshold - wb.min(self.threshold)).saturating_add(8 * self.bandwidth);
        let span = mul_div(window, wb, self.threshold).max(1);
        let end = wb_setpoint.saturating_add(span);
        let ratio = if self.wb_dirty < end - span / 4 {
            mul_div(ratio, end - self.wb_dirty, span)
        } else {
            ratio / 4
        };
        // The reserve at the end of `wb_position_ratio`: throttle less while the device runs low.
        let low = wb / 2;
        if self.wb_dirty >= low {
            ratio
        } else if self.wb_dirty > low / 8 {
            mul_div(ratio, low, self.wb_dirty)
        } else {
            ratio * 8
        }
    }

    fn strict_position(&self) -> u64 {
        if self.wb_dirty < 8 * PAGE {
            return 2 * UNIT;
        }
        let setpoint = u64::midpoint(self.wb_threshold, self.wb_background());
        if self.wb_dirty >= self.wb_threshold || setpoint == 0 || setpoint == self.wb_threshold {
            return 0;
        }
        Self::cubic(setpoint, self.wb_dirty, self.wb_threshold)
    }
}

/// One writer, as Linux sees a task.
#[derive(Debug, Clone, Default)]
pub(super) struct LinuxTask {
    /// Bytes written since the last pause, and the number of bytes until the next check.
    dirtied: u64,
    look_at: u64,
    /// Paused until then.
    until: Nanos,
    /// When the last pause ended in terms of payment: later than `until` while a debt remains.
    paid: Nanos,
    /// Check again after the pause, since the position ratio was 0.
    again: bool,
}

/// The bandwidth and rates of one device.
#[derive(Debug, Clone)]
pub(super) struct LinuxState {
    local: LocalProportion,
    /// The smoothed bandwidth, and the one that all decisions use.
    bandwidth: u64,
    average: u64,
    /// The rate of one task before position control, and the latest balanced one.
    rate: u64,
    balanced: u64,
    dirtied: u64,
    written: u64,
    stamp_at: Nanos,
    stamp_dirtied: u64,
    stamp_written: u64,
    dirty_stamp_at: Nanos,
}

/// The bounds of a device's threshold.
#[derive(Debug, Clone, Copy)]
pub(super) struct LinuxBounds {
    pub(super) min_ratio: u32,
    pub(super) max_ratio: u32,
    pub(super) max_bytes: u64,
    pub(super) strict: bool,
}

impl LinuxState {
    pub(super) fn new(remembered: Option<u64>, now: Nanos) -> Self {
        let bandwidth = remembered.unwrap_or(PRIOR).max(1);
        Self {
            local: LocalProportion::default(),
            bandwidth,
            average: bandwidth,
            rate: bandwidth,
            balanced: bandwidth,
            dirtied: 0,
            written: 0,
            stamp_at: now,
            stamp_dirtied: 0,
            stamp_written: 0,
            dirty_stamp_at: now,
        }
    }

    pub(super) fn estimate(&self) -> u64 {
        self.average
    }

    /// The device's threshold.
    pub(super) fn threshold(
        &mut self,
        shared: &LinuxShared,
        bounds: &LinuxBounds,
        wb_dirty: u64,
    ) -> u64 {
        let (threshold, _) = shared.thresholds();
        let share = self.local.part(shared.proportions(), shared.events());
        let common = u64::from(ebb_writeback::units::WHOLE).saturating_sub(shared.min_ratios.get());
        let common = mul_div(threshold, common, u64::from(ebb_writeback::units::WHOLE));
        let wb = mul_div(common, share, ONE).saturating_add(part(threshold, bounds.min_ratio));
        let most = part(threshold, bounds.max_ratio).min(bounds.max_bytes);
        let wb = wb.min(most);
        if bounds.strict {
            // A floor; otherwise an idle device could never begin again (6.13).
            let limit = shared.limit.get();
            wb.max((limit.saturating_sub(wb_dirty) / 100).min(most / 4))
        } else {
            wb
        }
    }

    fn view(&mut self, shared: &LinuxShared, bounds: &LinuxBounds, wb_dirty: u64) -> LinuxView {
        let (threshold, background) = shared.thresholds();
        LinuxView {
            dirty: shared.total.get(),
            threshold,
            background,
            limit: shared.limit.get().max(threshold),
            wb_dirty,
            wb_threshold: self.threshold(shared, bounds, wb_dirty),
            bandwidth: self.average,
            strict: bounds.strict,
        }
    }

    /// When the task may write: now, or later.
    pub(super) fn reserve(
        &mut self,
        task: &mut LinuxTask,
        (shared, bounds): (&LinuxShared, &LinuxBounds),
        wb_dirty: u64,
        now: Nanos,
    ) -> Nanos {
        if task.until > now {
            return task.until;
        }
        if std::mem::take(&mut task.again) {
            self.balance(task, (shared, bounds), wb_dirty, now);
        }
        task.until.max(now)
    }

    /// The task has dirtied `bytes`.
    pub(super) fn dirtied(
        &mut self,
        task: &mut LinuxTask,
        (shared, bounds): (&LinuxShared, &LinuxBounds),
        (wb_dirty, bytes): (u64, u64),
        now: Nanos,
    ) {
        self.dirtied = self.dirtied.saturating_add(bytes);
        task.dirtied = task.dirtied.saturating_add(bytes);
        if task.dirtied >= task.look_at {
            self.balance(task, (shared, bounds), wb_dirty, now);
        }
    }

    /// `balance_dirty_pages`: decides whether the task pauses, and for how long.
    fn balance(
        &mut self,
        task: &mut LinuxTask,
        (shared, bounds): (&LinuxShared, &LinuxBounds),
        wb_dirty: u64,
        now: Nanos,
    ) {
        let mut view = self.view(shared, bounds, wb_dirty);
        if view.is_free() {
            let (room, dirty) = if view.strict {
                (view.wb_threshold, view.wb_dirty)
            } else {
                (view.threshold, view.dirty)
            };
            let pages = (room.saturating_sub(dirty) / PAGE).max(1);
            task.look_at = PAGE << (pages.ilog2() / 2);
            task.dirtied = 0;
            task.paid = now;
            return;
        }
        if now.saturating_sub(self.dirty_stamp_at) >= UPDATE {
            self.update(Some(&view), now);
            view.bandwidth = self.average;
        }
        let ratio = view.position();
        let rate = mul_div(self.rate, ratio, UNIT);
        let max_pause = self.max_pause(wb_dirty);
        let (min_pause, look_at) = self.min_pause(max_pause, rate);
        if rate == 0 {
            self.sleep(task, max_pause, look_at, now);
            task.again = true;
            return;
        }
        let period = time_of(task.dirtied, rate);
        let thought = now.saturating_sub(task.paid);
        let due = period.saturating_add(task.paid.saturating_sub(now));
        if due < thought.saturating_add(min_pause) {
            // Too short to pause: carried over as credit, but for at most a second.
            if thought > due.saturating_add(SECOND) {
                task.paid = now;
                task.dirtied = 0;
            } else if period > 0 {
                task.paid = task.paid.saturating_add(period);
                task.dirtied = 0;
            }
            task.look_at = look_at;
            return;
        }
        let pause = due - thought;
        self.sleep(task, pause.min(max_pause), look_at, now);
        // What exceeds the longest pause is owed, up to one more such pause.
        task.paid = task.until.saturating_add(pause.saturating_sub(max_pause).min(max_pause));
    }

    fn sleep(&self, task: &mut LinuxTask, pause: Nanos, look_at: u64, now: Nanos) {
        task.until = now.saturating_add(pause);
        task.paid = task.until;
        task.dirtied = 0;
        task.look_at = look_at;
    }

    /// An eighth of the time the device needs for its dirty data, at most 200 ms.
    fn max_pause(&self, wb_dirty: u64) -> Nanos {
        let drain = time_of(wb_dirty, self.average);
        (drain.saturating_mul(128) / 1000).saturating_add(TICK).min(MAX_PAUSE)
    }

    /// The shortest pause worth making, and the number of bytes until the next check.
    fn min_pause(&self, max_pause: Nanos, task_rate: u64) -> (Nanos, u64) {
        let log = |rate: u64| u64::from((rate / PAGE).max(1).ilog2());
        let more = log(self.average).saturating_sub(log(self.rate));
        let mut target = (10 * MILLISECOND * (1 + more)).min(TICK + max_pause / 2);
        let mut bytes = bytes_in(self.rate, target);
        if bytes < FEW {
            target = max_pause;
            bytes = bytes_in(self.rate, target);
            if bytes > FEW {
                bytes = FEW;
                target = time_of(FEW, self.rate);
            }
        }
        if time_of(bytes, task_rate) > max_pause {
            target = max_pause;
            bytes = bytes_in(task_rate, target);
        }
        let least = if bytes >= FEW { TICK + target / 2 } else { target };
        (least, bytes.max(PAGE))
    }

    /// The first write after idle time is sent: long idle time must not count (5.15).
    pub(super) fn busy(&mut self, now: Nanos) {
        if now.saturating_sub(self.stamp_at) > SECOND {
            self.stamp_at = now;
            self.stamp_written = self.written;
        }
        if now.saturating_sub(self.dirty_stamp_at) > SECOND {
            self.dirty_stamp_at = now;
            self.stamp_dirtied = self.dirtied;
        }
    }

    /// Bytes have been written.
    pub(super) fn written(
        &mut self,
        shared: &LinuxShared,
        bounds: &LinuxBounds,
        bytes: u64,
        now: Nanos,
    ) {
        self.written = self.written.saturating_add(bytes);
        let kind = shared.proportions();
        let most =
            mul_div(ONE, u64::from(bounds.max_ratio), u64::from(ebb_writeback::units::WHOLE));
        if most >= ONE || self.local.part(kind, shared.events()) <= most {
            self.count(shared, kind, bytes);
        }
        if now.saturating_sub(self.stamp_at) >= UPDATE {
            self.update(None, now);
        }
    }

    /// The threshold of this device alone at which its flusher begins.
    pub(super) fn background(&mut self, shared: &LinuxShared) -> u64 {
        let share = self.local.part(shared.proportions(), shared.events());
        mul_div(shared.thresholds().1, share, ONE)
    }

    /// Counts completed bytes without crossing the end of a half-period, as the kernel's page-by-page
    /// counting does.
    fn count(&mut self, shared: &LinuxShared, kind: ProportionKind, mut bytes: u64) {
        while bytes > 0 {
            let step = match kind {
                ProportionKind::Floating { half } => {
                    let half = half.max(1);
                    bytes.min(half - shared.events.get() % half)
                }
                ProportionKind::Flexible => bytes,
            };
            // The last byte determines the period, as it does before the period ends.
            let mut global = shared.events();
            global.events = global.events.saturating_add(step - 1);
            self.local.add(kind, global, step);
            shared.events.set(shared.events.get().saturating_add(step));
            bytes -= step;
        }
    }

    /// Updates the bandwidth, and with a view also the rate of a task.
    fn update(&mut self, view: Option<&LinuxView>, now: Nanos) {
        let elapsed = now.saturating_sub(self.stamp_at).max(1);
        if let Some(view) = view {
            let dirtied = self.dirtied.saturating_sub(self.stamp_dirtied);
            let since = now.saturating_sub(self.dirty_stamp_at).max(1);
            self.update_rate(view, mul_div(dirtied, SECOND, since));
            self.stamp_dirtied = self.dirtied;
            self.dirty_stamp_at = now;
        }
        self.update_bandwidth(elapsed);
        self.stamp_written = self.written;
        self.stamp_at = now;
    }

    fn update_bandwidth(&mut self, elapsed: Nanos) {
        let written = self.written.saturating_sub(self.stamp_written);
        let newest = mul_div(written, SECOND, elapsed).min(RATE_MOST);
        if elapsed > SMOOTHING {
            self.bandwidth = newest.max(1);
            self.average = self.bandwidth;
            return;
        }
        let old = self.bandwidth;
        let kept = u128::from(old) * u128::from(SMOOTHING - elapsed);
        let mixed = (u128::from(newest) * u128::from(elapsed) + kept) / u128::from(SMOOTHING);
        let mixed = narrow(mixed);
        // The average follows only while all three values are in one order.
        if self.average > old && old >= mixed {
            self.average -= (self.average - old) / 8;
        } else if self.average < old && old <= mixed {
            self.average += (old - self.average) / 8;
        }
        self.average = self.average.max(1);
        self.bandwidth = mixed.max(1);
    }

    fn update_rate(&mut self, view: &LinuxView, dirty_rate: u64) {
        let task = mul_div(self.rate, view.position(), UNIT).saturating_add(1).min(RATE_MOST);
        let balanced = mul_div(task, self.average, dirty_rate.max(1)).min(self.average);
        let (dirty, setpoint) = if view.strict {
            let middle = u64::midpoint(view.wb_threshold, view.wb_background());
            let few = view.wb_dirty < 8 * PAGE;
            (view.wb_dirty, if few { view.wb_dirty + 1 } else { middle })
        } else {
            (view.dirty, u64::midpoint(view.freerun(), view.limit))
        };
        let step = if dirty < setpoint {
            self.balanced.min(balanced).min(task).saturating_sub(self.rate)
        } else {
            self.rate.saturating_sub(self.balanced.max(balanced).max(task))
        };
        let shift = u32::try_from(self.rate / (2 * step + 1)).unwrap_or(u32::MAX);
        let step = step.checked_shr(shift).unwrap_or(0).div_ceil(8);
        self.rate = if self.rate < balanced {
            self.rate.saturating_add(step)
        } else {
            self.rate.saturating_sub(step)
        };
        self.rate = self.rate.max(1);
        self.balanced = balanced;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(dirty: u64, wb_dirty: u64) -> LinuxView {
        LinuxView {
            dirty,
            threshold: 800 << 20,
            background: 400 << 20,
            limit: 800 << 20,
            wb_dirty,
            wb_threshold: 800 << 20,
            bandwidth: 50 << 20,
            strict: false,
        }
    }

    #[test]
    fn the_cubic_is_2_at_freerun_1_at_the_setpoint_0_at_the_limit() {
        assert_eq!(LinuxView::cubic(700, 600, 800), 2 * UNIT);
        assert_eq!(LinuxView::cubic(700, 700, 800), UNIT);
        assert_eq!(LinuxView::cubic(700, 800, 800), 0);
        assert_eq!(view(800 << 20, 800 << 20).position(), 0);
        assert!(view(700 << 20, 700 << 20).position().abs_diff(UNIT) < 4);
    }

    #[test]
    fn a_device_that_runs_low_is_not_throttled_and_one_far_over_gets_a_quarter() {
        let low = view(700 << 20, 1 << 20).position();
        assert!(low >= 8 * UNIT, "{low}");
        let over = LinuxView { wb_threshold: 20 << 20, ..view(700 << 20, 600 << 20) };
        assert!(over.position().abs_diff(UNIT / 4) < 4);
        let strict = LinuxView { strict: true, wb_threshold: 20 << 20, ..view(1 << 20, 20 << 20) };
        assert_eq!(strict.position(), 0);
    }
}
