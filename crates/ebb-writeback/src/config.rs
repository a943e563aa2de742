//! What the caller chooses: the law, the limit, and bounds of single backing devices.
//!
//! Nothing here must be tuned for hardware: the defaults serve a stick and an array alike. Ratios are
//! in parts per million ([`WHOLE`] = 100 %).

use crate::units::{MILLISECOND, Nanos, SECOND, WHOLE};

/// How thresholds are divided and writers are paced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Law {
    /// Linux 2.6.24 to 3.5: floating proportions counted in completed pages, with a period of
    /// 2^(`shift` + log2(limit in pages)) pages. It shipped with +2; the patch of seed `001` made
    /// it +0, an earlier form −1. For comparison only.
    LinuxOld {
        /// Added to the exponent, −8 to 8; the thread tried +2, +0 and −1.
        shift: i8,
    },
    /// Linux since 3.6: flexible proportions that halve every 3 s, position control, estimated
    /// bandwidth, pauses, strict limits. For comparison, or where its behaviour is wanted.
    Linux,
    /// Measured rate × a horizon common to all devices, enforced from the first byte.
    #[default]
    Horizon,
}

/// What holds for all backing devices together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The law; it stays for the life of a controller.
    pub law: Law,
    /// Most bytes dirty and under writeback, of all devices; see [`crate::limit_for`]. At least 1 MiB.
    pub limit: u64,
    /// The Linux laws' background threshold as a part of the limit; the other law has no use for it.
    pub background: u32,
    /// Longest time a device may need to drain what is dirty for it (10 ms to 60 s).
    /// Less where memory is short.
    pub horizon: Nanos,
    /// Data dirty for longer than this is to be written whatever else holds.
    pub expire: Nanos,
    /// Most backing devices at once; memory for their figures is taken at the start.
    pub bdis: usize,
    /// Most volumes of one backing device.
    pub volumes: usize,
}

impl Options {
    /// The defaults, with this limit in bytes.
    #[must_use]
    pub fn new(limit: u64) -> Self {
        Self {
            law: Law::Horizon,
            limit,
            background: WHOLE / 2,
            horizon: 2 * SECOND,
            expire: 30 * SECOND,
            bdis: 256,
            volumes: 1 << 16,
        }
    }

    pub(crate) fn checked(&self) -> Result<(), Error> {
        let within = |value: Nanos| (10 * MILLISECOND..=60 * SECOND).contains(&value);
        if self.limit < MIN_LIMIT {
            return Err(Error::Limit { bytes: self.limit });
        }
        if !within(self.horizon) {
            return Err(Error::Horizon { nanos: self.horizon });
        }
        if self.background > WHOLE {
            return Err(Error::Ratio { name: "background", ppm: self.background });
        }
        match self.law {
            Law::LinuxOld { shift } if !(-8..=8).contains(&shift) => Err(Error::Shift { shift }),
            _ => Ok(()),
        }
    }
}

/// The smallest limit a controller works with.
pub const MIN_LIMIT: u64 = 1 << 20;

/// The largest: an exbibyte, in bytes. What is above counts as this.
pub(crate) const MAX_LIMIT: u64 = 1 << 60;

/// Bounds of one backing device; they can be changed while it runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BdiOptions {
    /// Part of the limit that is kept for this device whatever the others do.
    pub min_ratio: u32,
    /// Largest part of the limit this device may have.
    pub max_ratio: u32,
    /// Most bytes dirty and under writeback for this device.
    pub max_bytes: u64,
    /// Count this device's own threshold alone, even while the others leave room. The Linux laws
    /// need this to be told. The other does nothing else; to it this says that not even one write may
    /// exceed the threshold, but for one that is larger than all of it.
    pub strict_limit: bool,
    /// Bytes per second the device made when it was here before, if that is remembered.
    pub rate: Option<u64>,
    /// Largest single write to the store, in bytes (at least 4096).
    pub max_chunk: u64,
    /// Most bytes in flight to the store. The Linux laws always fill it, the other seldom does.
    pub max_in_flight: u64,
    /// What one write costs beside its bytes, in bytes, where volumes share a device fairly.
    pub io_cost: u64,
}

impl Default for BdiOptions {
    fn default() -> Self {
        Self {
            min_ratio: 0,
            max_ratio: WHOLE,
            max_bytes: u64::MAX,
            strict_limit: false,
            rate: None,
            max_chunk: 1 << 20,
            max_in_flight: 64 << 20,
            io_cost: 4096,
        }
    }
}

impl BdiOptions {
    pub(crate) fn checked(&self) -> Result<(), Error> {
        if self.max_ratio > WHOLE || self.max_ratio == 0 {
            return Err(Error::Ratio { name: "max_ratio", ppm: self.max_ratio });
        }
        if self.min_ratio > self.max_ratio {
            return Err(Error::Ratio { name: "min_ratio", ppm: self.min_ratio });
        }
        if self.max_chunk < 4096 || self.max_in_flight < self.max_chunk {
            return Err(Error::Chunk { chunk: self.max_chunk, in_flight: self.max_in_flight });
        }
        Ok(())
    }
}

/// Why something was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A limit too small to work with.
    #[error("a dirty limit of {bytes} bytes is too small: give at least {MIN_LIMIT}")]
    Limit {
        /// What was asked for.
        bytes: u64,
    },
    /// A horizon out of range.
    #[error("a horizon of {nanos} ns is out of range: give 10 ms to 60 s")]
    Horizon {
        /// What was asked for.
        nanos: Nanos,
    },
    /// A ratio out of range, or beyond its counterpart.
    #[error("{name} of {ppm} parts per million is out of range: min_ratio <= max_ratio <= 1000000")]
    Ratio {
        /// Which one.
        name: &'static str,
        /// What was asked for.
        ppm: u32,
    },
    /// The minimum ratios of all devices together exceed the whole.
    #[error("all min_ratio together make {ppm} parts per million: lower one of them, or this one")]
    MinRatios {
        /// The sum, this one included.
        ppm: u64,
    },
    /// A shift nobody can mean.
    #[error("a period shift of {shift} is out of range: give -8 to 8")]
    Shift {
        /// What was asked for.
        shift: i8,
    },
    /// Sizes of writes that do not fit together.
    #[error("max_chunk {chunk} and max_in_flight {in_flight}: 4096 <= max_chunk <= max_in_flight")]
    Chunk {
        /// Largest single write.
        chunk: u64,
        /// Most in flight.
        in_flight: u64,
    },
    /// No slot is free for another backing device.
    #[error(
        "{most} backing devices are in use, and there are no more: have several volumes share one \
             (the same `bdi = NAME` in the entry of each)"
    )]
    ManyBdis {
        /// How many there are slots for.
        most: usize,
    },
    /// No slot is free for another volume.
    #[error("{most} volumes are on this backing device: remove one, or make it for more")]
    ManyVolumes {
        /// How many there are slots for.
        most: usize,
    },
    /// A weight of 0.
    #[error("a volume's weight is 1 to 1000, not {weight}")]
    Weight {
        /// What was asked for.
        weight: u32,
    },
}
