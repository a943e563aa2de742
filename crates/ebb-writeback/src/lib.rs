//! Writeback control: how much dirty data each backing device may hold, how fast its writers may make
//! more, and how its flusher keeps it busy. No number to tune for hardware.
//!
//! Answers seed `001` (Linux's thresholds took 90 s to follow the load, 25 s with a smaller magic
//! number, at the price of noise where memory is small). Here a device's threshold is its **measured
//! rate × one horizon common to all**, at most 2 s and less where memory is short, enforced from the
//! first byte: right as soon as the rate is known, and what is dirty drains within the horizon by
//! construction. The two laws of Linux are there, too, behind the same interface, to be compared with.
//!
//! A library without I/O, clock, threads, logging or globals: time comes in as nanoseconds, and hours
//! can be simulated in seconds (feature `sim`, which runs the scenarios of `docs/results/writeback`).
//!
//! # Vocabulary
//! - **bdi**, backing device: what can be slow as a unit: a disk, a server, a pool.
//! - **dirty**: accepted and not yet sent to the store. **Writeback**: sent and not yet done. What is
//!   *held* is both.
//! - **threshold**: what one device may hold. **Limit**: what all may.
//! - **rate**: bytes per second a device makes while it is busy. **Horizon**: the time in which
//!   every device can drain what it may hold.
//! - **pause**: the time a write waits before it may become dirty data.
//!
//! # Invariants
//! - What is held never exceeds the limit in force ([`Verdict::Go`] reserves first), and thresholds
//!   add up to no more than it; a limit that is lowered comes into force as devices drain.
//! - While a device holds at most half of its threshold none of its writers waits for pace.
//! - A device that is slow, stuck or dead keeps what it holds, at most its horizon, and costs the
//!   others nothing else.
//! - Volumes of a device share its pace by weight, by bytes and I/O cost; a light one waits for nobody.
//! - Every call of [`Bdi`] is O(1) and allocates nothing (but adding a volume); state is bounded by
//!   [`Options::bdis`] and [`Options::volumes`].
//!
//! # Who calls what, from which thread
//! - A write: [`Bdi::ask`], from the thread that owns the device, or under a lock per device. There is no
//!   lock between devices: handles share atomics only, of which a write changes one (the total).
//! - The flusher: [`Bdi::plan`], then [`Bdi::on_writeback`] and [`Bdi::on_written`] around each write to
//!   the store. The latter says when those who wait should ask again before their time.
//! - A keeper, any one thread: [`Writeback::keep`] each 10 to 50 ms, [`Writeback::set_limit`] and
//!   [`Writeback::set_pressure`] when memory changes. It takes no lock either.
//!
//! # Example
//! ```
//! use ebb_writeback::{BdiOptions, MILLISECOND, Options, Outcome, Verdict, Writeback};
//!
//! # fn main() -> Result<(), ebb_writeback::Error> {
//! let mut now = 0; // nanoseconds, from a monotonic clock
//! let mut writeback = Writeback::new(&Options::new(800 << 20))?;
//! let mut disk = writeback.add_bdi(BdiOptions::default(), now)?;
//! let volume = disk.add_volume(1)?;
//!
//! // A guest writes as fast as it can; the store takes 50 MB/s, one write at a time.
//! let (mut in_flight, mut done_at) = (None, 0);
//! while now < 3_000 * MILLISECOND {
//!     if let Some((bytes, sent)) = in_flight && done_at <= now {
//!         let _ask_again = disk.on_written(volume, bytes, sent, Outcome::Written, now);
//!         in_flight = None;
//!     }
//!     // The data path: copied into the cache and acknowledged, or asked again later.
//!     while disk.ask(volume, 65_536, now, now) == Verdict::Go {}
//!     // The flusher.
//!     let plan = disk.plan(now);
//!     let dirty = disk.stats(now).dirty;
//!     if in_flight.is_none() && plan.start {
//!         let bytes = dirty.min(plan.chunk);
//!         disk.on_writeback(volume, bytes, now);
//!         in_flight = Some((bytes, now));
//!         done_at = now + bytes * 20; // 20 ns a byte
//!     }
//!     now += MILLISECOND;
//!     writeback.keep(now);
//! }
//!
//! // Its threshold is two seconds of what it makes, and it is never idle.
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
mod fair;
mod flush;
mod horizon;
mod limit;
mod linux;
mod proportion;
mod rate;
mod shared;
mod shares;
#[cfg(feature = "sim")]
pub mod sim;
mod stats;
mod units;
mod writeback;

pub use bdi::{Bdi, Outcome, Verdict, VolumeId};
pub use config::{BdiOptions, Error, Law, MIN_LIMIT, Options};
pub use flush::FlushPlan;
pub use limit::{Pressure, limit_for};
pub use stats::{BdiStats, Pauses, Stats, VolumeStats};
pub use units::{MILLISECOND, Nanos, SECOND, WHOLE};
pub use writeback::Writeback;
