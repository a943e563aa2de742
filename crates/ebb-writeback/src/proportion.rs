//! How Linux divides its limit: by each device's part of the recently completed pages.
//!
//! Two kinds. *Floating* (2.6.24 to 3.5): a device's count halves each time half a period of pages has
//! completed anywhere; its part is count ÷ (half a period + pages since it began), so that even a
//! lone device climbs from 0, 1 − 2⁻ᵏ after k half-periods. *Flexible* (3.6 on): counts and their sum
//! halve every 3 s of time.
//!
//! Invariants: all updates are O(1) in the number of devices; parts are at most 1.

use crate::units::{Nanos, SECOND, narrow};

/// Pages of Linux, the unit of its periods.
pub(crate) const PAGE: u64 = 4096;
/// A fraction of 1 in fixed point.
pub(crate) const ONE: u64 = 1 << 20;
/// Time after which flexible proportions halve.
const HALVING: Nanos = 3 * SECOND;

/// Which kind, with what they need to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Half a period, in bytes.
    Floating {
        /// At least one page.
        half: u64,
    },
    Flexible,
}

impl Kind {
    /// Linux's period for this limit: 2^(shift + log2(pages − 1) floored) pages, and half of it.
    pub(crate) fn floating(limit: u64, shift: i8) -> Self {
        let pages = (limit / PAGE).max(2);
        let exponent = i64::from((pages - 1).ilog2()) + i64::from(shift);
        let half = u32::try_from(exponent - 1).map_or(PAGE, |bits| PAGE << bits.min(48));
        Kind::Floating { half }
    }
}

/// The global side: how much has completed, and which period it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Global {
    /// Bytes: all of them when floating, halved each period when flexible.
    pub(crate) events: u64,
    /// Periods so far.
    pub(crate) period: u64,
}

impl Global {
    /// The current period of floating proportions, from the number of events alone.
    fn floating_period(self, half: u64) -> u64 {
        self.events / half.max(1)
    }
}

/// How many periods of flexible proportions have passed since `start`.
pub(crate) fn periods_since(start: Nanos, now: Nanos) -> u64 {
    now.saturating_sub(start) / HALVING
}

/// One device's count.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Local {
    count: u64,
    period: u64,
}

impl Local {
    /// Halves for the periods that were missed.
    fn settle(&mut self, period: u64) {
        let missed = period.saturating_sub(self.period);
        self.count =
            u32::try_from(missed).ok().and_then(|m| self.count.checked_shr(m)).unwrap_or(0);
        self.period = self.period.max(period);
    }

    /// Counts completed bytes; `global` already includes them.
    pub(crate) fn add(&mut self, kind: Kind, global: Global, bytes: u64) {
        self.settle(match kind {
            Kind::Floating { half } => global.floating_period(half),
            Kind::Flexible => global.period,
        });
        self.count = self.count.saturating_add(bytes);
    }

    /// This device's part of [`ONE`].
    pub(crate) fn part(&mut self, kind: Kind, global: Global) -> u64 {
        let whole = match kind {
            Kind::Floating { half } => {
                self.settle(global.floating_period(half));
                half + global.events % half.max(1)
            }
            Kind::Flexible => {
                self.settle(global.period);
                global.events.max(1)
            }
        };
        narrow(u128::from(self.count) * u128::from(ONE) / u128::from(whole.max(1))).min(ONE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn periods_are_those_of_the_thread() {
        // 782 MB: 2^17 pages and some; +2 makes half a period of 2^18 pages.
        let half = |shift| Kind::floating(782_000_000, shift);
        assert_eq!(half(2), Kind::Floating { half: PAGE << 18 });
        assert_eq!(half(0), Kind::Floating { half: PAGE << 16 });
        assert_eq!(half(-1), Kind::Floating { half: PAGE << 15 });
    }

    #[test]
    fn a_lone_device_climbs_by_halves() {
        let kind = Kind::floating(782_000_000, 0);
        let Kind::Floating { half } = kind else { return };
        let (mut global, mut local) = (Global::default(), Local::default());
        for k in 1..6 {
            global.events += half;
            // Counted a page before the period ends, as it happens page by page.
            local.add(kind, Global { events: global.events - 1, ..global }, half);
            let expected = ONE - (ONE >> k);
            assert!(local.part(kind, global).abs_diff(expected) < 4, "after {k} half-periods");
        }
    }

    #[test]
    fn flexible_parts_halve_with_time_and_begin_at_one() {
        let (mut global, mut a, mut b) = (Global::default(), Local::default(), Local::default());
        global.events += 1000;
        a.add(Kind::Flexible, global, 1000);
        assert_eq!(a.part(Kind::Flexible, global), ONE);
        global = Global { events: 500 + 500, period: 1 };
        b.add(Kind::Flexible, global, 500);
        assert_eq!(a.part(Kind::Flexible, global), ONE / 2);
        assert_eq!(b.part(Kind::Flexible, global), ONE / 2);
        global.period = 200;
        assert_eq!(a.part(Kind::Flexible, global), 0);
    }
}
