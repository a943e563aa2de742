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

/// One round over all data that was used again, as [`Next::Used`] counts.
pub const TURN: u64 = 1_000_000;

/// What would go next, the least valuable first ([`Next::rank`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// One-pass data; pages of it.
    Cold(u64),
    /// Data that is new; pages of it beyond its share.
    New(u64),
    /// Data that was used again; how far what there is of that was gone round, since the beginning, in
    /// millionths of a turn ([`TURN`]).
    Used(u64),
    /// There is nothing.
    Nothing,
}

impl Next {
    /// A number that is the less, the sooner this should go: cold data from where there is most, new data
    /// from where there is most too much, used data from where it has had most time.
    #[must_use]
    pub fn rank(self) -> (u8, u64) {
        match self {
            Next::Cold(pages) => (0, u64::MAX - pages),
            Next::New(pages) => (1, u64::MAX - pages),
            Next::Used(turned) => (2, turned),
            Next::Nothing => (3, 0),
        }
    }
}

/// The order in which a shard's buffers go. Slots are small numbers, used again after they were freed:
/// the tables are as long as the highest one.
pub trait Policy {
    /// An empty policy with tables for `slots` slots; a higher slot makes them grow, by doubling.
    fn with_capacity(slots: u32) -> Self;

    /// Takes in `slot`, which now holds `key` (frame index and page: what is remembered of it after it
    /// has gone) and is worth `pages` (1 to 128; shares are of those, not of slots). `cold` data is expected to
    /// be used once, read-ahead or one pass: it goes before all other.
    fn insert(&mut self, slot: u32, key: u64, pages: u32, cold: bool);

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

    /// What [`Policy::evict`] would take, for a choice between several policies: the one whose next slot is
    /// worth least is that with the least value. A few instructions.
    fn next(&self) -> Next {
        Next::Used(0)
    }

    /// From now on it counts as gone round so far at least ([`Next::Used`]): a policy that is new to a choice
    /// between several does not pay for the time before.
    fn catch_up(&mut self, turned: u64) {
        let _ = turned;
    }

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
