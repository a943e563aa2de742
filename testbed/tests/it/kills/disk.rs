//! A volume under load: its stamps, and its possible content.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use testbed::harness::ledger::Ledger;
use testbed::harness::pattern::{Random, SECTOR};

/// The part of a volume that is under load; a resize changes only the rest.
pub(crate) const LOADED: usize = 1 << 20;
/// One request in flight per slot at most, so that the order of writes to a sector is known.
pub(crate) const SLOT: usize = 16 << 10;
/// The stamps of a volume begin with its number.
const NUMBER_SHIFT: u32 = 40;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cache {
    None,
    Writethrough,
    Writeback,
}

impl Cache {
    pub(crate) const ALL: [Cache; 3] = [Cache::None, Cache::Writethrough, Cache::Writeback];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Cache::None => "none",
            Cache::Writethrough => "writethrough",
            Cache::Writeback => "writeback",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum User {
    Nbd,
    Split,
    Packed,
}

pub(crate) struct Disk {
    pub(crate) name: String,
    pub(crate) cache: Cache,
    pub(crate) user: User,
    number: u64,
    writes: AtomicU64,
    ledger: Mutex<Ledger>,
}

impl Disk {
    /// `below` is the stamp of what it reads as before the first write.
    pub(crate) fn new(number: u64, cache: Cache, user: User, below: u64) -> Disk {
        let name = format!("{}-{user:?}", cache.name()).to_lowercase();
        let ledger = Mutex::new(Ledger::filled(LOADED, below));
        Disk { name, cache, user, number, writes: AtomicU64::new(0), ledger }
    }

    /// Overlays have a base; without a cache there are none.
    pub(crate) fn is_overlay(&self) -> bool {
        self.cache != Cache::None
    }

    pub(crate) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The stamp of the next write.
    pub(crate) fn stamp(&self) -> u64 {
        self.number << NUMBER_SHIFT | (self.writes.fetch_add(1, Ordering::Relaxed) + 1)
    }
}

/// A range of sectors that lies in a slot.
pub(crate) fn sectors_in(slot: usize, random: &mut Random) -> Range<usize> {
    let most = SLOT / SECTOR;
    let first = index(random.below(most as u64));
    let count = 1 + index(random.below((most - first) as u64));
    let first = slot * most + first;
    first..first + count
}

/// A slot of these that is not busy.
pub(crate) fn free_slot(slots: &Range<usize>, busy: &[usize], random: &mut Random) -> usize {
    loop {
        let slot = slots.start + index(random.below(slots.len() as u64));
        if !busy.contains(&slot) {
            return slot;
        }
    }
}

/// Numbers here are below the size of a small disk.
pub(crate) fn index(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
