//! Writeback control: how much dirty data each backing device may hold, how fast its writers may add more,
//! and how its flusher keeps it busy. Nothing needs tuning for the hardware.
//!
//! Linux divides one global dirty limit by each device's share of recent completions. Its thresholds took 90
//! s to follow the load in one report, or 25 s with a smaller constant at the price of noise where memory is
//! small (docs/adr/0003-writeback-law.md). Here the threshold of a device is its **measured rate times one
//! horizon common to all devices**, at most 2 s and less where memory is short. It is enforced from the first
//! byte, is right as soon as the rate is known, and its dirty data drains within the horizon by construction.
//!
//! A library without I/O, clock, threads, logging or globals: time is passed in as nanoseconds, so hours can
//! be simulated in seconds (`testbed/writeback-sim`, which runs the scenarios of `docs/results/writeback`,
//! also under two laws of Linux for comparison).
//!
//! # Vocabulary
//! - **bdi**, backing device: whatever can be slow as a unit: a disk, a server, a pool.
//! - **dirty**: accepted and not yet sent to the store. **Writeback**: sent and not yet completed. What is
//!   *held* is both.
//! - **threshold**: what one device may hold. **Limit**: what all devices together may hold.
//! - **rate**: bytes per second that a device completes while it is busy. **Horizon**: the time in which
//!   every device can write what it may hold.
//! - **pause**: the time a write waits before it may become dirty data.
//!
//! # Invariants
//! - What is held never exceeds the limit in force ([`Verdict::Go`] reserves first), and the sum of
//!   thresholds does not either; a lowered limit comes into force as devices drain.
//! - While a device holds at most half of its threshold none of its writers is paced.
//! - A slow, stuck or dead device keeps what it holds, at most its horizon, and costs other devices nothing
//!   else.
//! - Volumes of a device share its rate by weight, in bytes and I/O cost; a volume that writes less than its
//!   share does not wait for the others.
//! - Every call of [`Bdi`] is O(1) and allocates nothing (except adding a volume); state is bounded by
//!   [`WritebackOptions::bdis`] and [`WritebackOptions::volumes`].
//!
//! # Calls and threads
//! - A write calls [`Bdi::reserve`], on the thread that owns the device or under a lock per device. No lock is
//!   shared between devices: handles share atomics only, of which a write changes one (the total).
//! - The flusher calls [`Bdi::plan`], then [`Bdi::on_writeback`] and [`Bdi::on_written`] around each write to
//!   the store. The latter says when waiting writers should retry early.
//! - One control thread calls [`Writeback::update`] every 10 to 50 ms, and [`Writeback::set_limit`] and
//!   [`Writeback::set_pressure`] when memory changes. It takes no lock either.
//!
//! # Example
//! ```
//! use ebb_writeback::{BdiOptions, MILLISECOND, Verdict, WriteOutcome, Writeback, WritebackOptions};
//!
//! # fn main() -> Result<(), ebb_writeback::WritebackError> {
//! let mut now = 0; // nanoseconds, from a monotonic clock
//! let mut writeback = Writeback::new(&WritebackOptions::new(800 << 20))?;
//! let mut disk = writeback.add_bdi(BdiOptions::default(), now)?;
//! let volume = disk.add_volume(1)?;
//!
//! // A guest writes as fast as it can; the store takes 50 MB/s, one write at a time.
//! let (mut in_flight, mut done_at) = (None, 0);
//! while now < 3_000 * MILLISECOND {
//!     if let Some((bytes, sent)) = in_flight && done_at <= now {
//!         let _retry_now = disk.on_written(volume, bytes, sent, WriteOutcome::Written, now);
//!         in_flight = None;
//!     }
//! // The data path: the write is copied into the cache and acknowledged, or retried later.
//!     while disk.reserve(volume, 65_536, now, now) == Verdict::Go {}
//!     // The flusher.
//!     let plan = disk.plan(now);
//!     let dirty = disk.stats(now).dirty;
//!     if in_flight.is_none() && plan.start {
//!         let bytes = dirty.min(plan.chunk);
//!         disk.on_writeback(volume, bytes, now);
//!         in_flight = Some((bytes, now));
//!         done_at = now + bytes * 20; // 20 ns per byte
//!     }
//!     now += MILLISECOND;
//!     writeback.update(now);
//! }
//!
//! // The threshold is two seconds of the device's rate, and the device is never idle.
//! let stats = disk.stats(now);
//! assert!(stats.bandwidth.abs_diff(50_000_000) < 3_000_000);
//! assert!(stats.threshold.abs_diff(100_000_000) < 6_000_000);
//! assert!(stats.dirty + stats.writeback <= stats.threshold);
//! assert!(stats.utilisation > 980_000); // parts per million
//! # Ok(())
//! # }
//! ```

mod bdi;
mod config;
mod dirty_limit;
mod fair;
mod flush;
mod horizon;
mod rate;
mod shared;
mod shares;
mod stats;
pub mod units;
mod writeback;

pub use bdi::{Bdi, Verdict, VolumeId, WriteOutcome};
pub use config::{BdiOptions, MAX_LIMIT, MIN_LIMIT, WritebackError, WritebackOptions};
pub use dirty_limit::{PressureLevel, limit_for};
pub use flush::FlushPlan;
pub use stats::{BdiStats, BdiVolumeStats, Pauses, WritebackStats};
pub use units::{MILLISECOND, Nanos, SECOND, WHOLE};
pub use writeback::Writeback;
