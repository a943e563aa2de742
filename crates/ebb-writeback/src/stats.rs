//! What there is to see: one device's figures, and those of all.

use crate::units::Nanos;

/// Waits of writers, each from its first question to its leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pauses {
    /// How many writes waited.
    pub count: u64,
    /// For how long, in all.
    pub total: Nanos,
    /// The longest.
    pub longest: Nanos,
}

impl Pauses {
    pub(crate) fn add(&mut self, pause: Nanos) {
        if pause > 0 {
            self.count = self.count.saturating_add(1);
            self.total = self.total.saturating_add(pause);
            self.longest = self.longest.max(pause);
        }
    }
}

/// One backing device. Bytes, bytes per second, parts per million.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BdiStats {
    /// Dirty, and not on its way to the store.
    pub dirty: u64,
    /// On its way.
    pub writeback: u64,
    /// Most of both.
    pub threshold: u64,
    /// Estimated bandwidth.
    pub bandwidth: u64,
    /// The threshold's part of the limit.
    pub share: u32,
    /// Busy time of the last second or two.
    pub utilisation: u32,
    /// Written in all.
    pub written: u64,
    /// Dirtied in all.
    pub dirtied: u64,
    /// Writes to the store that failed.
    pub failures: u64,
    /// Nothing has completed for a second, or everything fails.
    pub stuck: bool,
    /// Waits of this device's writers.
    pub pauses: Pauses,
    /// As configured.
    pub min_ratio: u32,
    /// As configured.
    pub max_ratio: u32,
    /// As configured.
    pub max_bytes: u64,
    /// As configured.
    pub strict_limit: bool,
}

/// One volume on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VolumeStats {
    /// Dirty, and not on its way to the store.
    pub dirty: u64,
    /// On its way.
    pub writeback: u64,
    /// Its waits.
    pub pauses: Pauses,
}

/// All devices together. Bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// The limit in force: on its way down it follows the goal.
    pub limit: u64,
    /// What was asked for, lowered by pressure.
    pub goal: u64,
    /// Dirty and under writeback.
    pub held: u64,
    /// The common horizon: within this every device can drain.
    pub horizon: Nanos,
    /// Backing devices in use.
    pub bdis: usize,
}
