//! What the simulated world needs of a controller: the crate's own, or that of Linux for comparison.
//!
//! Invariant: the crate's controller runs through its public functions only.

use super::law::Law;
use super::linux::LinuxWriteback;
use crate::{
    Bdi, BdiOptions, BdiStats, FlushPlan, Nanos, PressureLevel, Verdict, VolumeId, WriteOutcome,
    Writeback, WritebackError, WritebackOptions, WritebackStats,
};

/// The control thread's side; see [`Writeback`].
pub(super) trait Control {
    fn add_bdi(&mut self, options: BdiOptions) -> Result<Box<dyn DeviceControl>, WritebackError>;
    fn set_limit(&mut self, bytes: u64, now: Nanos);
    fn set_pressure(&mut self, level: PressureLevel, now: Nanos);
    fn update(&mut self, now: Nanos);
    fn stats(&self) -> WritebackStats;
}

/// One device; see [`Bdi`].
pub(super) trait DeviceControl {
    fn add_volume(&mut self) -> Result<VolumeId, WritebackError>;
    fn reserve(&mut self, volume: VolumeId, bytes: u64, requested: Nanos, now: Nanos) -> Verdict;
    fn plan(&mut self, now: Nanos) -> FlushPlan;
    fn on_writeback(&mut self, volume: VolumeId, bytes: u64, now: Nanos);
    /// The store has the bytes. Returns true if waiting writers should retry now.
    fn on_written(&mut self, volume: VolumeId, bytes: u64, sent: Nanos, now: Nanos) -> bool;
    fn stats(&mut self, now: Nanos) -> BdiStats;
}

/// The controller of a law. `background` is the background threshold of the Linux laws as a fraction of the
/// limit.
pub(super) fn control(
    law: Law,
    limit: u64,
    background: u32,
) -> Result<Box<dyn Control>, WritebackError> {
    Ok(match law {
        Law::Horizon => Box::new(Writeback::new(&WritebackOptions::new(limit))?),
        Law::Linux | Law::LinuxOld { .. } => Box::new(LinuxWriteback::new(law, limit, background)),
    })
}

impl Control for Writeback {
    fn add_bdi(&mut self, options: BdiOptions) -> Result<Box<dyn DeviceControl>, WritebackError> {
        Ok(Box::new(Writeback::add_bdi(self, options, 0)?))
    }

    fn set_limit(&mut self, bytes: u64, now: Nanos) {
        Writeback::set_limit(self, bytes, now);
    }

    fn set_pressure(&mut self, level: PressureLevel, now: Nanos) {
        Writeback::set_pressure(self, level, now);
    }

    fn update(&mut self, now: Nanos) {
        Writeback::update(self, now);
    }

    fn stats(&self) -> WritebackStats {
        Writeback::stats(self)
    }
}

impl DeviceControl for Bdi {
    fn add_volume(&mut self) -> Result<VolumeId, WritebackError> {
        Bdi::add_volume(self, 1)
    }

    fn reserve(&mut self, volume: VolumeId, bytes: u64, requested: Nanos, now: Nanos) -> Verdict {
        Bdi::reserve(self, volume, bytes, requested, now)
    }

    fn plan(&mut self, now: Nanos) -> FlushPlan {
        Bdi::plan(self, now)
    }

    fn on_writeback(&mut self, volume: VolumeId, bytes: u64, now: Nanos) {
        Bdi::on_writeback(self, volume, bytes, now);
    }

    fn on_written(&mut self, volume: VolumeId, bytes: u64, sent: Nanos, now: Nanos) -> bool {
        Bdi::on_written(self, volume, bytes, sent, WriteOutcome::Written, now)
    }

    fn stats(&mut self, now: Nanos) -> BdiStats {
        Bdi::stats(self, now)
    }
}
