//! The eviction policy: which clean buffer is evicted first.
//!
//! A policy belongs to one shard and knows slot numbers, not buffers; it keeps its state in a table of its
//! own. The choice of the policy and its figures are in docs/adr/0002-eviction.md. The policy also decides
//! what is lent first: one-pass data, then the coldest.
//!
//! # Invariants
//! - A slot that was inserted is in the policy until it is evicted, removed or lost, exactly once.
//! - [`EvictionPolicy::evict`] never returns a slot that `may` refused.
//! - No call panics, whatever slot it is given; one that is not in the policy is ignored.
//! - State is bounded: one entry per slot number ever used and as many remembered keys. Once a table is as
//!   large as the highest slot, no call allocates.

mod ghosts;
mod queue;
mod s3fifo;

pub use s3fifo::S3Fifo;

/// The policy in use.
pub type Eviction = S3Fifo;

/// One pass over all data that was used again, in the unit of [`NextVictim::Used`].
pub const FULL_ROUND: u64 = 1_000_000;

/// What would be evicted next, the least valuable first ([`NextVictim::rank`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextVictim {
    /// One-pass data; the number of pages of it.
    Cold(u64),
    /// New data; the number of pages beyond its share.
    New(u64),
    /// Data that was used again; how far the clock has advanced over it since the start, in millionths of a
    /// full pass ([`FULL_ROUND`]).
    Used(u64),
    /// The policy is empty.
    Nothing,
}

impl NextVictim {
    /// The lower, the sooner this should be evicted: cold data from where there is most of it, new data from
    /// where it exceeds its share most, used data from where the clock has advanced least.
    #[must_use]
    pub fn rank(self) -> (u8, u64) {
        match self {
            NextVictim::Cold(pages) => (0, u64::MAX - pages),
            NextVictim::New(pages) => (1, u64::MAX - pages),
            NextVictim::Used(turned) => (2, turned),
            NextVictim::Nothing => (3, 0),
        }
    }
}

/// The order in which a shard's buffers are evicted. Slots are small numbers that are reused after they were
/// freed: the tables are as long as the highest one.
pub trait EvictionPolicy {
    /// An empty policy with tables for `slots` slots; a higher slot makes them grow, by doubling.
    fn with_capacity(slots: u32) -> Self;

    /// Inserts `slot`, which now holds `key` (frame index and page, remembered after eviction) and counts as
    /// `pages` (1 to 128; shares are in pages, not in slots). `cold` data is expected to be used once, by
    /// read-ahead or one pass: it is evicted before all other data.
    fn insert(&mut self, slot: u32, key: u64, pages: u32, cold: bool);

    /// `slot` was used. Called on each hit: a few instructions, nothing is moved.
    fn hit(&mut self, slot: u32);

    /// `slot` was dropped because its data is no longer valid (discard, resize). Its key is not remembered.
    fn remove(&mut self, slot: u32);

    /// The kernel discarded the data of `slot`, which was lent. Like [`EvictionPolicy::remove`], but a key worth
    /// keeping is remembered for when it is read again.
    fn lose(&mut self, slot: u32) {
        self.remove(slot);
    }

    /// Removes the coldest slot that `may` allows to be evicted (not pinned, dirty or in flight). Each call
    /// examines a bounded number of slots, so that no hit waits long for the shard's lock: `None` means that
    /// none of those could be evicted. The next call starts with other slots.
    fn evict(&mut self, may: impl FnMut(u32) -> bool) -> Option<u32>;

    /// What [`EvictionPolicy::evict`] would remove, for the choice between several policies: the one with the lowest
    /// [`NextVictim::rank`] should evict. A few instructions.
    fn next(&self) -> NextVictim {
        NextVictim::Used(0)
    }

    /// Raises the position of [`NextVictim::Used`] to at least `turned`, so that a policy that was empty is
    /// not chosen to make up for the time before.
    fn catch_up(&mut self, turned: u64) {
        let _ = turned;
    }

    /// Ages `n` slots as if [`EvictionPolicy::evict`] had examined them and left them in place. Uses are forgotten
    /// only by eviction; while there is memory for everything nothing is evicted, and data that was hot long
    /// ago would look hot for ever. The reclaimer calls this while nothing is evicted, for a fraction of the
    /// slots each time. Costs some nanoseconds per slot.
    fn age(&mut self, n: u32) {
        let _ = n;
    }

    /// Appends to `out` up to `n` slots, the coldest first: what to lend first. Changes nothing. Costs a walk
    /// over at most all slots.
    fn coldest(&mut self, n: usize, out: &mut Vec<u32>);
}
