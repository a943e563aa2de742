//! The limit of all dirty data: a part of the available memory, less under pressure.

use crate::config::MIN_LIMIT;
use crate::units::{WHOLE, mul_div};

/// Memory pressure of the host, from calm to last resort.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum PressureLevel {
    /// L0: no sign of pressure.
    #[default]
    Calm,
    /// L1: the first stall, or free memory near its target.
    Squeeze,
    /// L2: pressure continues, or all tasks stall.
    Drain,
    /// L3: almost no memory is left.
    LastResort,
}

impl PressureLevel {
    /// What remains of a limit at this level: all, a half, a quarter, an eighth.
    #[must_use]
    pub fn lowered(self, limit: u64) -> u64 {
        (limit >> self.level()).max(MIN_LIMIT.min(limit))
    }

    pub(crate) fn level(self) -> u8 {
        match self {
            PressureLevel::Calm => 0,
            PressureLevel::Squeeze => 1,
            PressureLevel::Drain => 2,
            PressureLevel::LastResort => 3,
        }
    }
}

/// A limit for this much available memory (free, and clean cache that can be dropped): `ratio` parts per
/// million of it, at least 1 MiB. Linux uses 20 %.
#[must_use]
pub fn limit_for(available: u64, ratio: u32) -> u64 {
    mul_div(available, u64::from(ratio.min(WHOLE)), u64::from(WHOLE)).max(MIN_LIMIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_follows_memory_and_pressure() {
        assert_eq!(limit_for(10 << 30, 200_000), (10 << 30) / 5);
        assert_eq!(limit_for(0, 200_000), MIN_LIMIT);
        assert_eq!(PressureLevel::Squeeze.lowered(100 << 20), 50 << 20);
        assert_eq!(PressureLevel::LastResort.lowered(2 << 20), MIN_LIMIT);
        assert!(PressureLevel::Calm < PressureLevel::Squeeze);
    }
}
