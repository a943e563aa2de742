//! How much the cache may hold: a state machine of pressure and time, without clock or I/O.
//!
//! There is no size to tune. The cache grows up to `max` as data arrives; each sign of pressure lowers the
//! limit, and it rises again with time:
//!
//! | event | limit |
//! |---|---|
//! | L1 squeeze | what is held now, or a 32nd of `max`; no growth for [`PAUSE`] |
//! | L2 drain | half of what is held now, never below `min`; no growth for [`PAUSE`] |
//! | L3 last resort | nothing, and the cache is off until L0 |
//! | proactive reclaim | what is held afterwards; no growth for [`SHORT_PAUSE`] |
//! | L0 calm | on again; no growth for [`PAUSE`] |
//! | time | after the pause: doubles each second, by [`STEP`] at least |
//!
//! While growth is paused, the limit follows the held size down as the kernel discards lent pages, so that
//! memory which other processes needed is not filled again at once.

use std::time::{Duration, Instant};

use ebb_mem::pressure::Level;

/// Growth is paused for this long after a sign of pressure.
pub(crate) const PAUSE: Duration = Duration::from_secs(3);
/// Growth is paused for this long after proactive reclaim.
pub(crate) const SHORT_PAUSE: Duration = Duration::from_secs(1);
/// At L1 the limit stays at least this fraction of `max`, so that a cold cache can fill even under permanent
/// L1 pressure. The kernel can still discard its lent pages.
pub(crate) const L1_MIN_SHARE: u64 = 32;
/// Held size may fall this far below the limit before the limit follows, in bytes.
const SPARE: u64 = 256 << 10;
/// Minimum growth per second after the pause, in bytes.
pub(crate) const STEP: u64 = 64 << 20;

/// The current limit, in bytes, and its state.
#[derive(Clone, Debug)]
pub(crate) struct SizeLimit {
    pub(crate) max: u64,
    pub(crate) min: u64,
    /// Below `max` only after pressure.
    limit: u64,
    off: bool,
    /// The last sign was L2 or worse.
    hard: bool,
    /// No growth before this.
    resume: Option<Instant>,
    updated: Instant,
}

impl SizeLimit {
    pub(crate) fn new(max: u64, min: u64, now: Instant) -> SizeLimit {
        SizeLimit {
            max,
            min: min.min(max),
            limit: max,
            off: false,
            hard: false,
            resume: None,
            updated: now,
        }
    }

    /// What the cache may hold now.
    pub(crate) fn limit(&self) -> u64 {
        if self.off { 0 } else { self.limit.clamp(self.min, self.max.max(self.min)) }
    }

    /// See [`L1_MIN_SHARE`].
    fn l1_minimum(&self) -> u64 {
        self.max / L1_MIN_SHARE
    }

    /// Whether anything may be cached.
    pub(crate) fn admits(&self) -> bool {
        !self.off
    }

    /// Whether growth is paused or slow.
    pub(crate) fn is_restricted(&self) -> bool {
        self.off || self.limit < self.max
    }

    /// A pressure event while `held` bytes are held.
    pub(crate) fn apply_pressure(&mut self, level: Level, held: u64, now: Instant) {
        let held = held.min(self.limit);
        self.hard = level > Level::L1 || (self.hard && level == Level::L1 && self.resume.is_some());
        match level {
            Level::L0 => {
                if !std::mem::take(&mut self.off) {
                    return;
                }
            }
            // Nothing is held; the limit rises again after L0.
            Level::L1 if self.off => self.limit = 0,
            Level::L1 => self.limit = held.max(self.l1_minimum()),
            Level::L2 => self.limit = held / 2,
            Level::L3 => {
                self.limit = 0;
                self.off = true;
            }
        }
        self.limit = self.limit.max(self.min);
        self.resume = Some(now + PAUSE);
        self.updated = now;
    }

    /// Memory was returned by proactive reclaim; `held` bytes remain.
    pub(crate) fn shrink_to(&mut self, held: u64, now: Instant) {
        self.limit = self.limit.min(held.max(self.min));
        self.resume = self.resume.max(Some(now + SHORT_PAUSE));
        self.updated = self.updated.max(now);
    }

    /// Time has passed; `held` bytes are held.
    pub(crate) fn advance(&mut self, held: u64, now: Instant) {
        let since = now.saturating_duration_since(self.updated);
        self.updated = self.updated.max(now);
        if !self.is_restricted() || self.off {
            return;
        }
        if self.resume.is_some_and(|resume| now < resume) {
            let l1_minimum = if self.hard { 0 } else { self.l1_minimum() };
            // An eviction frees slightly more than needed, and that is refilled at once.
            if held.saturating_add(SPARE) < self.limit {
                self.limit = self.limit.min(held.max(l1_minimum)).max(self.min);
            }
            return;
        }
        self.resume = None;
        let millis = u64::try_from(since.as_millis()).unwrap_or(u64::MAX).min(1000);
        let grown = self.limit.max(STEP).saturating_mul(millis) / 1000;
        self.limit = self.limit.saturating_add(grown).min(self.max);
    }

    pub(crate) fn set_max(&mut self, max: u64) {
        if !self.is_restricted() || self.limit > max {
            self.limit = max;
        }
        self.max = max;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn rig() -> (SizeLimit, Instant) {
        let now = Instant::now();
        (SizeLimit::new(8 * GIB, GIB / 16, now), now)
    }

    #[test]
    fn l1_stops_growth_and_it_comes_back_after_the_pause() {
        let (mut limit_state, start) = rig();
        assert_eq!(limit_state.limit(), 8 * GIB);
        limit_state.apply_pressure(Level::L1, 4 * GIB, start);
        assert_eq!(limit_state.limit(), 4 * GIB);
        // The kernel discards some: that is not filled again during the pause.
        limit_state.advance(3 * GIB, start + Duration::from_secs(1));
        limit_state.advance(4 * GIB, start + Duration::from_secs(2));
        assert_eq!(limit_state.limit(), 3 * GIB);
        limit_state.advance(3 * GIB, start + PAUSE);
        assert_eq!(limit_state.limit(), 6 * GIB, "one second of growth since the last update");
        limit_state.advance(3 * GIB, start + PAUSE * 2);
        assert_eq!(limit_state.limit(), 8 * GIB);
        assert!(!limit_state.is_restricted());
    }

    #[test]
    fn memory_returned_by_proactive_reclaim_is_not_filled_again_at_once() {
        let (mut limit_state, start) = rig();
        limit_state.shrink_to(4 * GIB, start);
        limit_state.advance(4 * GIB, start + SHORT_PAUSE / 2);
        assert_eq!(limit_state.limit(), 4 * GIB);
        limit_state.shrink_to(GIB / 32, start + SHORT_PAUSE / 2);
        assert_eq!(limit_state.limit(), GIB / 16, "the minimum holds");
        limit_state.apply_pressure(Level::L1, 0, start + SHORT_PAUSE);
        limit_state.shrink_to(0, start + SHORT_PAUSE);
        limit_state.advance(0, start + SHORT_PAUSE * 2);
        assert!(limit_state.limit() < GIB, "the longer pause after a pressure event holds");
        limit_state.advance(0, start + PAUSE * 2);
        assert!(limit_state.limit() > GIB / 16);
    }

    #[test]
    fn permanent_l1_pressure_leaves_room_for_a_cold_cache() {
        let (mut limit_state, start) = rig();
        for second in 0..20 {
            let now = start + Duration::from_secs(second);
            limit_state.apply_pressure(Level::L1, 0, now);
            limit_state.advance(0, now + Duration::from_millis(100));
            assert_eq!(limit_state.limit(), 8 * GIB / L1_MIN_SHARE);
        }
        limit_state.apply_pressure(Level::L2, 0, start + PAUSE * 10);
        limit_state.advance(0, start + PAUSE * 10);
        assert_eq!(limit_state.limit(), GIB / 16, "a drain keeps the minimum");
    }

    #[test]
    fn l2_halves_the_limit_at_each_event_down_to_the_minimum() {
        let (mut limit_state, start) = rig();
        let mut held = 4 * GIB;
        for _ in 0..10 {
            limit_state.apply_pressure(Level::L2, held, start);
            held = held.min(limit_state.limit());
        }
        assert_eq!(held, GIB / 16);
    }

    #[test]
    fn l3_turns_the_cache_off_until_l0() {
        let (mut limit_state, start) = rig();
        limit_state.apply_pressure(Level::L3, GIB, start);
        assert!(!limit_state.admits() && limit_state.limit() == 0);
        limit_state.advance(0, start + PAUSE * 10);
        limit_state.apply_pressure(Level::L1, 0, start + PAUSE * 10);
        assert!(!limit_state.admits(), "only L0 ends it");
        limit_state.apply_pressure(Level::L0, 0, start + PAUSE * 11);
        assert!(limit_state.admits() && limit_state.limit() == GIB / 16);
        let mut now = start + PAUSE * 12;
        let mut seconds = 0;
        while limit_state.is_restricted() {
            now += Duration::from_millis(100);
            seconds += 1;
            limit_state.advance(0, now);
        }
        assert!(seconds <= 100, "8 GiB again within ten seconds: {seconds}");
    }

    #[test]
    fn a_lower_maximum_takes_effect_at_once() {
        let (mut limit_state, start) = rig();
        limit_state.set_max(GIB);
        assert_eq!(limit_state.limit(), GIB);
        limit_state.apply_pressure(Level::L1, 2 * GIB, start);
        assert_eq!(limit_state.limit(), GIB);
        limit_state.set_max(2 * GIB);
        assert_eq!(limit_state.limit(), GIB * 2);
    }
}
