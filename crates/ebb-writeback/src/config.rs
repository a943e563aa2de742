//! Options: the limit, and the bounds of single backing devices.
//!
//! Nothing here needs tuning for the hardware: the defaults suit a USB stick and a disk array alike. Ratios
//! are in parts per million ([`WHOLE`] = 100 %).

use crate::units::{MILLISECOND, Nanos, SECOND, WHOLE};

/// Options that apply to all backing devices together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WritebackOptions {
    /// The most bytes dirty and under writeback, of all devices; see [`crate::limit_for`]. At least 1 MiB.
    pub limit: u64,
    /// The longest time that a device may need to write its dirty data (10 ms to 60 s). Less where memory is
    /// short.
    pub horizon: Nanos,
    /// Data dirty for longer than this is written regardless of everything else.
    pub expire: Nanos,
    /// The most backing devices; memory for their records is allocated at the start.
    pub bdis: usize,
    /// The most volumes of one backing device.
    pub volumes: usize,
}

impl WritebackOptions {
    /// The defaults, with this limit in bytes.
    #[must_use]
    pub fn new(limit: u64) -> Self {
        Self { limit, horizon: 2 * SECOND, expire: 30 * SECOND, bdis: 256, volumes: 1 << 16 }
    }

    /// Checks the bounds against each other.
    ///
    /// # Errors
    /// A ratio is out of range, or a chunk too small or larger than all writes in flight.
    pub fn checked(&self) -> Result<(), WritebackError> {
        let within = |value: Nanos| (10 * MILLISECOND..=60 * SECOND).contains(&value);
        if self.limit < MIN_LIMIT {
            return Err(WritebackError::Limit { bytes: self.limit });
        }
        if !within(self.horizon) {
            return Err(WritebackError::Horizon { nanos: self.horizon });
        }
        Ok(())
    }
}

/// The smallest limit a controller accepts.
pub const MIN_LIMIT: u64 = 1 << 20;

/// The largest limit: an exbibyte, in bytes. Larger values are reduced to this.
pub const MAX_LIMIT: u64 = 1 << 60;

/// Bounds of one backing device; they can be changed at run time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BdiOptions {
    /// Part of the limit that is reserved for this device.
    pub min_ratio: u32,
    /// Largest part of the limit this device may have.
    pub max_ratio: u32,
    /// The most bytes dirty and under writeback for this device.
    pub max_bytes: u64,
    /// Not even one write may exceed the device's threshold, except a write that is larger than all of it.
    pub strict_limit: bool,
    /// The device's rate in bytes per second when it was last in use, if known.
    pub rate: Option<u64>,
    /// Largest single write to the store, in bytes (at least 4096).
    pub max_chunk: u64,
    /// The most bytes in flight to the store; seldom used up.
    pub max_in_flight: u64,
    /// The fixed cost of one write in bytes, where volumes share a device.
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
    /// Checks the bounds against each other.
    ///
    /// # Errors
    /// A ratio is out of range, or a chunk too small or larger than all writes in flight.
    pub fn checked(&self) -> Result<(), WritebackError> {
        if self.max_ratio > WHOLE || self.max_ratio == 0 {
            return Err(WritebackError::Ratio { name: "max_ratio", ppm: self.max_ratio });
        }
        if self.min_ratio > self.max_ratio {
            return Err(WritebackError::Ratio { name: "min_ratio", ppm: self.min_ratio });
        }
        if self.max_chunk < 4096 || self.max_in_flight < self.max_chunk {
            return Err(WritebackError::Chunk {
                chunk: self.max_chunk,
                in_flight: self.max_in_flight,
            });
        }
        Ok(())
    }
}

/// Why options were refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WritebackError {
    /// The limit is too small.
    #[error("a dirty limit of {bytes} bytes is too small: give at least {MIN_LIMIT}")]
    Limit {
        /// The requested limit.
        bytes: u64,
    },
    /// The horizon is out of range.
    #[error("a horizon of {nanos} ns is out of range: give 10 ms to 60 s")]
    Horizon {
        /// The requested horizon.
        nanos: Nanos,
    },
    /// A ratio is out of range, or min and max contradict each other.
    #[error("{name} of {ppm} parts per million is out of range: min_ratio <= max_ratio <= 1000000")]
    Ratio {
        /// The name of the ratio.
        name: &'static str,
        /// The requested value.
        ppm: u32,
    },
    /// The minimum ratios of all devices together exceed the whole.
    #[error("all min_ratio together make {ppm} parts per million: lower one of them, or this one")]
    MinRatios {
        /// The sum, including this one.
        ppm: u64,
    },
    /// The sizes of writes contradict each other.
    #[error("max_chunk {chunk} and max_in_flight {in_flight}: 4096 <= max_chunk <= max_in_flight")]
    Chunk {
        /// The largest single write.
        chunk: u64,
        /// The most bytes in flight.
        in_flight: u64,
    },
    /// No slot is free for another backing device.
    #[error(
        "{most} backing devices are in use, and there are no more: have several volumes share one \
             (the same `bdi = NAME` in the entry of each)"
    )]
    ManyBdis {
        /// The number of slots.
        most: usize,
    },
    /// No slot is free for another volume.
    #[error("{most} volumes are on this backing device: remove one, or make it for more")]
    ManyVolumes {
        /// The number of slots.
        most: usize,
    },
    /// The weight is out of range.
    #[error("a volume's weight is 1 to 1000, not {weight}")]
    Weight {
        /// The requested weight.
        weight: u32,
    },
}
