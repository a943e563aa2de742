//! Statistics of one device, and of all devices.

use crate::units::Nanos;

/// Waits of writers, each from its first request until it was granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pauses {
    /// How many writes waited.
    pub count: u64,
    /// The total time.
    pub total: Nanos,
    /// The longest wait.
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
    /// Dirty, and not under writeback.
    pub dirty: u64,
    /// Under writeback.
    pub writeback: u64,
    /// The maximum of the sum of both.
    pub threshold: u64,
    /// Estimated bandwidth.
    pub bandwidth: u64,
    /// The threshold's part of the limit.
    pub share: u32,
    /// Busy time of the last one to two seconds.
    pub utilisation: u32,
    /// Total bytes written.
    pub written: u64,
    /// Total bytes dirtied.
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
pub struct BdiVolumeStats {
    /// Dirty, and not under writeback.
    pub dirty: u64,
    /// Under writeback.
    pub writeback: u64,
    /// Waits of its writers.
    pub pauses: Pauses,
}

/// All devices together. Bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WritebackStats {
    /// The limit in force: a lowered limit takes effect gradually.
    pub limit: u64,
    /// The requested limit, lowered by pressure.
    pub goal: u64,
    /// Dirty and under writeback.
    pub held: u64,
    /// The common horizon: every device can write what it holds within this time.
    pub horizon: Nanos,
    /// Backing devices in use.
    pub bdis: usize,
}
