//! How Linux divides its limit: by each device's share of the recently completed pages (`lib/proportions.c`
//! of Linux 2.6.24 to 3.5, `lib/flex_proportions.c` since 3.6).
//!
//! *Floating* proportions: a device's count halves each time half a period of pages has completed on any
//! device; its share is count ÷ (half a period + pages since it began), so that even a lone device climbs
//! from 0, 1 − 2⁻ᵏ after k half-periods. *Flexible* proportions: counts and their sum halve every 3 s.
//!
//! Invariants: all updates are O(1) in the number of devices; shares are at most 1.

use ebb_writeback::units::{Nanos, SECOND, narrow};

/// The page size of Linux, the unit of its periods.
pub(super) const PAGE: u64 = 4096;
/// A fraction of 1 in fixed point.
pub(super) const ONE: u64 = 1 << 20;
/// Time after which flexible proportions halve.
const HALVING: Nanos = 3 * SECOND;

/// The kind of proportions and its parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProportionKind {
    /// Half a period, in bytes.
    Floating {
        /// At least one page.
        half: u64,
    },
    Flexible,
}

impl ProportionKind {
    /// Linux's period for this limit: 2^(shift + log2(pages − 1) rounded down) pages, and half of it.
    pub(super) fn floating(limit: u64, shift: i8) -> Self {
        let pages = (limit / PAGE).max(2);
        let exponent = i64::from((pages - 1).ilog2()) + i64::from(shift);
        let half = u32::try_from(exponent - 1).map_or(PAGE, |bits| PAGE << bits.min(48));
        ProportionKind::Floating { half }
    }
}

/// The global counters: bytes completed, and the number of the period.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct GlobalProportion {
    /// Bytes: all of them when floating, halved each period when flexible.
    pub(super) events: u64,
    /// Periods so far.
    pub(super) period: u64,
}

impl GlobalProportion {
    /// The current period of floating proportions, from the number of events alone.
    fn floating_period(self, half: u64) -> u64 {
        self.events / half.max(1)
    }
}

/// How many periods of flexible proportions have passed since `start`.
pub(super) fn periods_since(start: Nanos, now: Nanos) -> u64 {
    now.saturating_sub(start) / HALVING
}

/// The counter of one device.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LocalProportion {
    count: u64,
    period: u64,
}

impl LocalProportion {
    /// Halves the count for each missed period.
    fn settle(&mut self, period: u64) {
        let missed = period.saturating_sub(self.period);
        self.count =
            u32::try_from(missed).ok().and_then(|m| self.count.checked_shr(m)).unwrap_or(0);
        self.period = self.period.max(period);
    }

    /// Counts completed bytes; `global` already includes them.
    pub(super) fn add(&mut self, kind: ProportionKind, global: GlobalProportion, bytes: u64) {
        self.settle(match kind {
            ProportionKind::Floating { half } => global.floating_period(half),
            ProportionKind::Flexible => global.period,
        });
        self.count = self.count.saturating_add(bytes);
    }

    /// This device's share, as a fraction of [`ONE`].
    pub(super) fn part(&mut self, kind: ProportionKind, global: GlobalProportion) -> u64 {
        let whole = match kind {
            ProportionKind::Floating { half } => {
                self.settle(global.floating_period(half));
                half + global.events % half.max(1)
            }
            ProportionKind::Flexible => {
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
    fn periods_are_those_of_linux() {
        // 782 MB: 2^17 pages and some; +2 makes half a period of 2^18 pages.
        let half = |shift| ProportionKind::floating(782_000_000, shift);
        assert_eq!(half(2), ProportionKind::Floating { half: PAGE << 18 });
        assert_eq!(half(0), ProportionKind::Floating { half: PAGE << 16 });
        assert_eq!(half(-1), ProportionKind::Floating { half: PAGE << 15 });
    }

    #[test]
    fn a_lone_device_climbs_by_halves() {
        let kind = ProportionKind::floating(782_000_000, 0);
        let ProportionKind::Floating { half } = kind else { return };
        let (mut global, mut local) = (GlobalProportion::default(), LocalProportion::default());
        for k in 1..6 {
            global.events += half;
            // Counted one page before the period ends, as happens when counting page by page.
            local.add(kind, GlobalProportion { events: global.events - 1, ..global }, half);
            let expected = ONE - (ONE >> k);
            assert!(local.part(kind, global).abs_diff(expected) < 4, "after {k} half-periods");
        }
    }

    #[test]
    fn flexible_parts_halve_with_time_and_begin_at_one() {
        let (mut global, mut a, mut b) =
            (GlobalProportion::default(), LocalProportion::default(), LocalProportion::default());
        global.events += 1000;
        a.add(ProportionKind::Flexible, global, 1000);
        assert_eq!(a.part(ProportionKind::Flexible, global), ONE);
        global = GlobalProportion { events: 500 + 500, period: 1 };
        b.add(ProportionKind::Flexible, global, 500);
        assert_eq!(a.part(ProportionKind::Flexible, global), ONE / 2);
        assert_eq!(b.part(ProportionKind::Flexible, global), ONE / 2);
        global.period = 200;
        assert_eq!(a.part(ProportionKind::Flexible, global), 0);
    }
}
