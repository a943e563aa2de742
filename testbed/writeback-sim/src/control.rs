//! What the simulated world needs of a controller: the daemon's, or Linux's for comparison.
//!
//! Invariant: the daemon's controller runs through its public functions only.

use crate::law::Law;
use crate::linux::LinuxWriteback;
use ebb_writeback::{
    Bdi, BdiOptions, BdiStats, FlushPlan, Nanos, PressureLevel, Verdict, VolumeId, WriteOutcome,
    Writeback, WritebackError, WritebackOptions, WritebackStats,
};

/// The control thread's side; see [`Writeback`].
pub(crate) trait Control {
    fn add_bdi(&mut self, options: BdiOptions) -> Result<Box<dyn DeviceControl>, WritebackError>;
    fn set_limit(&mut self, bytes: u64, now: Nanos);
    fn set_pressure(&mut self, level: PressureLevel, now: Nanos);
    fn update(&mut self, now: Nanos);
    fn stats(&self) -> WritebackStats;
}

/// One device; see [`Bdi`].
pub(crate) trait DeviceControl {
    /// Returns the number by which the other calls name the volume.
    fn add_volume(&mut self) -> Result<usize, WritebackError>;
    fn reserve(&mut self, volume: usize, bytes: u64, requested: Nanos, now: Nanos) -> Verdict;
    fn plan(&mut self, now: Nanos) -> FlushPlan;
    fn on_writeback(&mut self, volume: usize, bytes: u64, now: Nanos);
    /// The store has the bytes. Returns true if waiting writers should retry now.
    fn on_written(&mut self, volume: usize, bytes: u64, sent: Nanos, now: Nanos) -> bool;
    fn stats(&mut self, now: Nanos) -> BdiStats;
}

/// The controller of a law. `background` is the background threshold of the Linux laws as a fraction of the
/// limit.
pub(crate) fn control(
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
        let bdi = Writeback::add_bdi(self, options, 0)?;
        Ok(Box::new(HorizonBdi { bdi, volumes: Vec::new() }))
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

/// A device of the daemon's controller.
struct HorizonBdi {
    bdi: Bdi,
    volumes: Vec<VolumeId>,
}

impl DeviceControl for HorizonBdi {
    fn add_volume(&mut self) -> Result<usize, WritebackError> {
        self.volumes.push(self.bdi.add_volume(1)?);
        Ok(self.volumes.len() - 1)
    }

    fn reserve(&mut self, volume: usize, bytes: u64, requested: Nanos, now: Nanos) -> Verdict {
        self.bdi.reserve(self.volumes[volume], bytes, requested, now)
    }

    fn plan(&mut self, now: Nanos) -> FlushPlan {
        self.bdi.plan(now)
    }

    fn on_writeback(&mut self, volume: usize, bytes: u64, now: Nanos) {
        self.bdi.on_writeback(self.volumes[volume], bytes, now);
    }

    fn on_written(&mut self, volume: usize, bytes: u64, sent: Nanos, now: Nanos) -> bool {
        self.bdi.on_written(self.volumes[volume], bytes, sent, WriteOutcome::Written, now)
    }

    fn stats(&mut self, now: Nanos) -> BdiStats {
        self.bdi.stats(now)
    }
}
