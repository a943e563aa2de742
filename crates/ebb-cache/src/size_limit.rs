//! How much the cache may hold: a state machine of pressure and time, without clock or I/O.
//!
//! There is no size to tune. Up to `max` the cache grows as data comes; each sign of pressure takes some
//! of that away, and time gives it back:
//!
//! | event | limit |
//! |---|---|
//! | L1 squeeze | what is held now, or a 32nd of `max`; no growth for [`PAUSE`] |
//! | L2 drain | half of what is held now, never below `min`; no growth for [`PAUSE`] |
//! | L3 last resort | nothing, and the cache is off until calm |
//! | memory was returned ahead of the kernel | what is held then; no growth for [`BREATH`] |
//! | calm | on again; no growth for [`PAUSE`] |
//! | time | after the pause: twice as much each second, [`STEP`] at least |
//!
//! While growth is paused the limit follows downwards what the kernel takes of the lent pages: memory that
//! somebody needed is not filled again at once.

use std::time::{Duration, Instant};

use ebb_mem::pressure::Level;

/// No growth for so long after a sign of pressure.
pub(crate) const PAUSE: Duration = Duration::from_secs(3);
/// The same after memory was returned because somebody takes it.
pub(crate) const BREATH: Duration = Duration::from_secs(1);
/// Share of `max` that signs short of L2 reservation room for: where they never cease, a cache that is cold
/// still becomes one. The kernel takes it from us by itself if it must.
pub(crate) const ROOM: u64 = 32;
/// Less below the limit is no loss, bytes.
const SPARE: u64 = 256 << 10;
/// Least growth per second after the pause, bytes.
pub(crate) const STEP: u64 = 64 << 20;

/// The limit in force, in bytes, and how it moves.
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

    /// What may be held now.
    pub(crate) fn limit(&self) -> u64 {
        if self.off { 0 } else { self.limit.clamp(self.min, self.max.max(self.min)) }
    }

    /// See [`ROOM`].
    fn room(&self) -> u64 {
        self.max / ROOM
    }

    /// Whether anything is cached at all.
    pub(crate) fn admits(&self) -> bool {
        !self.off
    }

    /// Whether growth is paused or slow.
    pub(crate) fn is_held_back(&self) -> bool {
        self.off || self.limit < self.max
    }

    /// An event of pressure while `held` bytes are held.
    pub(crate) fn press(&mut self, level: Level, held: u64, now: Instant) {
        let held = held.min(self.limit);
        self.hard = level > Level::L1 || (self.hard && level == Level::L1 && self.resume.is_some());
        match level {
            Level::L0 => {
                if !std::mem::take(&mut self.off) {
                    return;
                }
            }
            // Nothing is held, and calm decides what comes next.
            Level::L1 if self.off => self.limit = 0,
            Level::L1 => self.limit = held.max(self.room()),
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

    /// Memory was returned ahead of the kernel; `held` bytes are left.
    pub(crate) fn recede(&mut self, held: u64, now: Instant) {
        self.limit = self.limit.min(held.max(self.min));
        self.resume = self.resume.max(Some(now + BREATH));
        self.updated = self.updated.max(now);
    }

    /// Time has passed; `held` bytes are held.
    pub(crate) fn pass(&mut self, held: u64, now: Instant) {
        let since = now.saturating_duration_since(self.updated);
        self.updated = self.updated.max(now);
        if !self.is_held_back() || self.off {
            return;
        }
        if self.resume.is_some_and(|resume| now < resume) {
            let room = if self.hard { 0 } else { self.room() };
            // What is evicted to make room is a little more than needed, and comes back at once.
            if held.saturating_add(SPARE) < self.limit {
                self.limit = self.limit.min(held.max(room)).max(self.min);
            }
            return;
        }
        self.resume = None;
        let millis = u64::try_from(since.as_millis()).unwrap_or(u64::MAX).min(1000);
        let grown = self.limit.max(STEP).saturating_mul(millis) / 1000;
        self.limit = self.limit.saturating_add(grown).min(self.max);
    }

    pub(crate) fn set_max(&mut self, max: u64) {
        if !self.is_held_back() || self.limit > max {
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
        let (mut growth, start) = rig();
        assert_eq!(growth.limit(), 8 * GIB);
        growth.press(Level::L1, 4 * GIB, start);
        assert_eq!(growth.limit(), 4 * GIB);
        // The kernel takes some: that is not filled again during the pause.
        growth.pass(3 * GIB, start + Duration::from_secs(1));
        growth.pass(4 * GIB, start + Duration::from_secs(2));
        assert_eq!(growth.limit(), 3 * GIB);
        growth.pass(3 * GIB, start + PAUSE);
        assert_eq!(growth.limit(), 6 * GIB, "one second of growth since the last look");
        growth.pass(3 * GIB, start + PAUSE * 2);
        assert_eq!(growth.limit(), 8 * GIB);
        assert!(!growth.is_held_back());
    }

    #[test]
    fn what_was_returned_is_not_filled_again_at_once() {
        let (mut growth, start) = rig();
        growth.recede(4 * GIB, start);
        growth.pass(4 * GIB, start + BREATH / 2);
        assert_eq!(growth.limit(), 4 * GIB);
        growth.recede(GIB / 32, start + BREATH / 2);
        assert_eq!(growth.limit(), GIB / 16, "the floor stays");
        growth.press(Level::L1, 0, start + BREATH);
        growth.recede(0, start + BREATH);
        growth.pass(0, start + BREATH * 2);
        assert!(growth.limit() < GIB, "a sign's longer pause holds");
        growth.pass(0, start + PAUSE * 2);
        assert!(growth.limit() > GIB / 16);
    }

    #[test]
    fn signs_that_never_cease_leave_room_for_a_cold_cache() {
        let (mut growth, start) = rig();
        for second in 0..20 {
            let now = start + Duration::from_secs(second);
            growth.press(Level::L1, 0, now);
            growth.pass(0, now + Duration::from_millis(100));
            assert_eq!(growth.limit(), 8 * GIB / ROOM);
        }
        growth.press(Level::L2, 0, start + PAUSE * 10);
        growth.pass(0, start + PAUSE * 10);
        assert_eq!(growth.limit(), GIB / 16, "a drain leaves the floor alone");
    }

    #[test]
    fn l2_halves_at_each_event_down_to_the_floor() {
        let (mut growth, start) = rig();
        let mut held = 4 * GIB;
        for _ in 0..10 {
            growth.press(Level::L2, held, start);
            held = held.min(growth.limit());
        }
        assert_eq!(held, GIB / 16);
    }

    #[test]
    fn l3_is_off_until_calm() {
        let (mut growth, start) = rig();
        growth.press(Level::L3, GIB, start);
        assert!(!growth.admits() && growth.limit() == 0);
        growth.pass(0, start + PAUSE * 10);
        growth.press(Level::L1, 0, start + PAUSE * 10);
        assert!(!growth.admits(), "only calm ends it");
        growth.press(Level::L0, 0, start + PAUSE * 11);
        assert!(growth.admits() && growth.limit() == GIB / 16);
        let mut now = start + PAUSE * 12;
        let mut seconds = 0;
        while growth.is_held_back() {
            now += Duration::from_millis(100);
            seconds += 1;
            growth.pass(0, now);
        }
        assert!(seconds <= 100, "8 GiB again within ten seconds: {seconds}");
    }

    #[test]
    fn a_lower_maximum_holds_at_once() {
        let (mut growth, start) = rig();
        growth.set_max(GIB);
        assert_eq!(growth.limit(), GIB);
        growth.press(Level::L1, 2 * GIB, start);
        assert_eq!(growth.limit(), GIB);
        growth.set_max(2 * GIB);
        assert_eq!(growth.limit(), GIB * 2);
    }
}
