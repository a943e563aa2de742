//! Which clean buffer goes first: the eviction policy behind one small interface.
//!
//! A policy belongs to one shard and knows slot numbers, not buffers: it keeps its state in a table of
//! its own, beside the shard's. It answers design section 7 (the choice and its figures are in ADR
//! 0002), and seed `002` in what is lent first: one-pass data, then the coldest.
//!
//! # Invariants
//! - A slot that was inserted is in the policy until it is evicted, removed or lost, exactly once.
//! - [`Policy::evict`] never returns a slot that `may` refused.
//! - No call panics, whatever slot it is given; one that is not in the policy is ignored.
//! - State is bounded: one entry per slot number ever used and as many remembered keys. Once a table is as
//!   large as the highest slot, no call allocates.

mod ghosts;
mod queue;
mod s3fifo;

pub use s3fifo::S3Fifo;

/// The policy in use.
pub type Eviction = S3Fifo;

/// The order in which a shard's buffers go. Slots are small numbers, used again after they were freed:
/// the tables are as long as the highest one.
pub trait Policy {
    /// An empty policy with tables for `slots` slots; a higher slot makes them grow, by doubling.
    fn with_capacity(slots: u32) -> Self;

    /// Takes in `slot`, which now holds `key` (frame index and page: what is remembered of it after it
    /// has gone). `cold` data is expected to be used once, read-ahead or one pass: it goes before all other.
    fn insert(&mut self, slot: u32, key: u64, cold: bool);

    /// `slot` was used. Called on each hit: a few instructions, nothing is moved.
    fn hit(&mut self, slot: u32);

    /// `slot` was dropped because its data is no longer valid (discard, resize). Nothing is remembered.
    fn remove(&mut self, slot: u32);

    /// The kernel took the data of `slot`, which was lent. Like [`Policy::remove`], but if it was worth
    /// keeping, its key will be when it comes back.
    fn lose(&mut self, slot: u32) {
        self.remove(slot);
    }

    /// Takes out the coldest slot that `may` allows to go (not pinned, dirty or in flight). Each call
    /// looks at a bounded number of slots, so that no hit waits long for the shard: `None` says that none
    /// was found among those. The next call looks at others first.
    fn evict(&mut self, may: impl FnMut(u32) -> bool) -> Option<u32>;

    /// Lets time pass for `n` slots, as if so many had been looked at by [`Policy::evict`] and let stay. Uses
    /// are forgotten only as the policy evicts; while there is memory for all, nothing does, and what was hot
    /// long ago looks hot for ever. Whoever lends calls this while nothing is evicted, for a share of the
    /// slots each time. Costs some nanoseconds per slot.
    fn age(&mut self, n: u32) {
        let _ = n;
    }

    /// Appends to `out` up to `n` slots, the coldest first: what to lend first. Nothing changes. Its cost is
    /// a walk over at most all slots.
    fn coldest(&mut self, n: usize, out: &mut Vec<u32>);
}
