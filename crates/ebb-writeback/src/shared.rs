//! State shared by the handles of all backing devices: atomics only, no lock.
//!
//! One writer per value: a device's own figures are written by its handle, its threshold by the control
//! thread; only the total is changed by all. Figures may be slightly stale; the limit, which must hold at
//! every moment, depends on one read-modify-write of the total.
//!
//! Invariant: [`SharedState::reserve`] never raises the total above the limit in force.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};

use crate::config::{BdiOptions, MAX_LIMIT, WritebackError, WritebackOptions};
use crate::units::{Nanos, WHOLE};

/// One backing device, as seen by the other handles.
#[derive(Debug, Default)]
pub(crate) struct DeviceSlot {
    /// In use by a handle.
    pub(crate) used: AtomicBool,
    /// Written by the device's handle.
    pub(crate) dirty: AtomicU64,
    pub(crate) writeback: AtomicU64,
    pub(crate) rate: AtomicU64,
    pub(crate) proven: AtomicU64,
    /// The time of the last request for dirty data; 0 for never.
    pub(crate) last_request: AtomicU64,
    pub(crate) last_completed: AtomicU64,
    pub(crate) failing: AtomicBool,
    pub(crate) min_ratio: AtomicU64,
    pub(crate) max_ratio: AtomicU64,
    pub(crate) max_bytes: AtomicU64,
    /// Written by the control thread.
    pub(crate) threshold: AtomicU64,
    pub(crate) kept: AtomicU64,
    pub(crate) stuck: AtomicBool,
}

impl DeviceSlot {
    /// Dirty and under writeback.
    pub(crate) fn held(&self) -> u64 {
        self.dirty.load(Relaxed).saturating_add(self.writeback.load(Relaxed))
    }

    /// Publishes the bounds of the device to the control thread.
    pub(crate) fn publish_options(&self, options: &BdiOptions) {
        self.min_ratio.store(u64::from(options.min_ratio), Relaxed);
        self.max_ratio.store(u64::from(options.max_ratio), Relaxed);
        self.max_bytes.store(options.max_bytes, Relaxed);
    }
}

/// The shared state.
#[derive(Debug)]
pub(crate) struct SharedState {
    pub(crate) horizon_most: Nanos,
    pub(crate) expire: Nanos,
    pub(crate) volumes: usize,
    pub(crate) slots: Box<[DeviceSlot]>,
    /// The requested limit, and the limit in force (a lowered limit takes effect gradually).
    pub(crate) goal: AtomicU64,
    pub(crate) limit: AtomicU64,
    /// Dirty and under writeback, of all devices.
    pub(crate) total: AtomicU64,
    /// The common horizon that resulted from the last division.
    pub(crate) horizon: AtomicU64,
    /// Bytes that stay free for devices below their reserved part.
    pub(crate) reserve: AtomicU64,
    pub(crate) pressure: AtomicU8,
}

impl SharedState {
    pub(crate) fn new(options: &WritebackOptions) -> Self {
        let limit = options.limit.min(MAX_LIMIT);
        Self {
            horizon_most: options.horizon,
            expire: options.expire,
            volumes: options.volumes,
            slots: (0..options.bdis).map(|_| DeviceSlot::default()).collect(),
            goal: AtomicU64::new(limit),
            limit: AtomicU64::new(limit),
            total: AtomicU64::new(0),
            horizon: AtomicU64::new(options.horizon),
            reserve: AtomicU64::new(0),
            pressure: AtomicU8::new(0),
        }
    }

    /// Checks that the minimum ratios of all other slots leave room for `more`.
    pub(crate) fn check_min_ratios(
        &self,
        except: Option<usize>,
        more: u32,
    ) -> Result<(), WritebackError> {
        let others = self.slots.iter().enumerate().filter(|(index, _)| Some(*index) != except);
        let sum: u64 = others.map(|(_, slot)| slot.min_ratio.load(Relaxed)).sum();
        let ppm = sum + u64::from(more);
        if ppm > u64::from(WHOLE) { Err(WritebackError::MinRatios { ppm }) } else { Ok(()) }
    }

    /// Reserves `bytes` of the limit, leaving `leave` free; false if there is not that much.
    pub(crate) fn reserve(&self, bytes: u64, leave: u64) -> bool {
        let most = self.limit.load(Relaxed).saturating_sub(leave);
        let take = |total: u64| total.checked_add(bytes).filter(|total| *total <= most);
        self.total.try_update(Relaxed, Relaxed, take).is_ok()
    }

    pub(crate) fn release(&self, bytes: u64) {
        let less = |total: u64| Some(total.saturating_sub(bytes));
        // Cannot fail: the function always returns a value.
        let _ = self.total.try_update(Relaxed, Relaxed, less);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_other_devices_may_need_stay_free() {
        let shared = SharedState::new(&WritebackOptions::new(100));
        assert!(shared.reserve(90, 10));
        assert!(!shared.reserve(1, 10));
        assert!(shared.reserve(10, 0) && !shared.reserve(1, 0), "the last byte of the limit");
        shared.release(1);
        assert!(!shared.reserve(1, 1) && shared.reserve(1, 0));
    }
}
