//! What the handles of all backing devices share: atomics only, no lock.
//!
//! One writer per figure: a device's own figures are written by its handle, its threshold by the
//! keeper; only the total is changed by all. Figures may be seen a moment late; what must hold at
//! every moment (the limit) rests on one read-modify-write of the total.
//!
//! Invariant: the total never exceeds the limit in force by what [`Shared::reserve`] lets in.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};

use crate::config::{Law, MAX_LIMIT, Options};
use crate::proportion::{Global, Kind};
use crate::units::{Nanos, part};

/// One backing device, as others see it.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    /// Taken by a handle.
    pub(crate) used: AtomicBool,
    /// Written by the device's handle.
    pub(crate) dirty: AtomicU64,
    pub(crate) writeback: AtomicU64,
    pub(crate) rate: AtomicU64,
    pub(crate) proven: AtomicU64,
    /// When somebody last asked; 0 for never.
    pub(crate) asked: AtomicU64,
    pub(crate) last_completed: AtomicU64,
    pub(crate) failing: AtomicBool,
    pub(crate) min_ratio: AtomicU64,
    pub(crate) max_ratio: AtomicU64,
    pub(crate) max_bytes: AtomicU64,
    /// Written by the keeper.
    pub(crate) threshold: AtomicU64,
    pub(crate) kept: AtomicU64,
    pub(crate) stuck: AtomicBool,
}

impl Slot {
    /// Dirty and under writeback.
    pub(crate) fn held(&self) -> u64 {
        self.dirty.load(Relaxed).saturating_add(self.writeback.load(Relaxed))
    }
}

/// What all share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) law: Law,
    pub(crate) background: u32,
    pub(crate) horizon_most: Nanos,
    pub(crate) expire: Nanos,
    pub(crate) volumes: usize,
    pub(crate) slots: Box<[Slot]>,
    /// What was asked for, and what is in force (on the way down it follows).
    pub(crate) goal: AtomicU64,
    pub(crate) limit: AtomicU64,
    /// Dirty and under writeback, of all.
    pub(crate) total: AtomicU64,
    /// The common horizon that came out of the last division.
    pub(crate) horizon: AtomicU64,
    /// What is left free for devices below what is kept for them.
    pub(crate) reserve: AtomicU64,
    pub(crate) pressure: AtomicU8,
    /// Completed bytes and periods, for the Linux laws.
    pub(crate) events: AtomicU64,
    pub(crate) period: AtomicU64,
}

impl Shared {
    pub(crate) fn new(options: &Options) -> Self {
        let limit = options.limit.min(MAX_LIMIT);
        Self {
            law: options.law,
            background: options.background,
            horizon_most: options.horizon,
            expire: options.expire,
            volumes: options.volumes,
            slots: (0..options.bdis).map(|_| Slot::default()).collect(),
            goal: AtomicU64::new(limit),
            limit: AtomicU64::new(limit),
            total: AtomicU64::new(0),
            horizon: AtomicU64::new(options.horizon),
            reserve: AtomicU64::new(0),
            pressure: AtomicU8::new(0),
            events: AtomicU64::new(0),
            period: AtomicU64::new(0),
        }
    }

    /// Takes `bytes` of the limit, leaving `leave` free; false when there is not that much.
    pub(crate) fn reserve(&self, bytes: u64, leave: u64) -> bool {
        let most = self.limit.load(Relaxed).saturating_sub(leave);
        let take = |total: u64| total.checked_add(bytes).filter(|total| *total <= most);
        self.total.fetch_update(Relaxed, Relaxed, take).is_ok()
    }

    /// Takes `bytes` whatever the limit says: Linux bills afterwards.
    pub(crate) fn take(&self, bytes: u64) {
        let add = |total: u64| Some(total.saturating_add(bytes));
        // Cannot fail: the function always gives a value.
        let _ = self.total.fetch_update(Relaxed, Relaxed, add);
    }

    pub(crate) fn give_back(&self, bytes: u64) {
        let less = |total: u64| Some(total.saturating_sub(bytes));
        let _ = self.total.fetch_update(Relaxed, Relaxed, less);
    }

    /// The kind of proportions the Linux laws use with the limit asked for.
    pub(crate) fn proportions(&self) -> Kind {
        match self.law {
            Law::LinuxOld { shift } => Kind::floating(self.goal.load(Relaxed), shift),
            _ => Kind::Flexible,
        }
    }

    pub(crate) fn events(&self) -> Global {
        Global { events: self.events.load(Relaxed), period: self.period.load(Relaxed) }
    }

    /// The Linux laws' threshold and background threshold.
    pub(crate) fn thresholds(&self) -> (u64, u64) {
        let threshold = self.goal.load(Relaxed);
        let background = part(threshold, self.background);
        (threshold, if background >= threshold { threshold / 2 } else { background })
    }
}
