//! A part of shared memory that holds a ring, or what is noted about one: all loads and stores of rings go through it.
//!
//! Invariants: a load reads its word once. No access leaves the mapping; the callers keep within the area, whose size is
//! checked when it is found.

use std::sync::Arc;

use ebb_guest_ring::{Mapping, SharedMemory};

use crate::dirty_log::DirtyLog;
use crate::memory::{GuestMemory, Region};

/// Memory that a peer shares.
pub(crate) trait PeerMemory {
    /// Its mapping.
    fn mapping(&self) -> &Mapping;
}

impl PeerMemory for Region {
    #[inline]
    fn mapping(&self) -> &Mapping {
        &self.memory
    }
}

impl PeerMemory for SharedMemory {
    #[inline]
    fn mapping(&self) -> &Mapping {
        self
    }
}

/// See the module. Offsets are bytes from its start on.
#[derive(Debug)]
pub(crate) struct Area<M> {
    memory: Arc<M>,
    offset: usize,
    bytes: usize,
    /// Notes what is stored, while the guest is migrated: with the guest physical address of the area.
    log: Option<(Arc<DirtyLog>, u64)>,
}

impl Area<Region> {
    /// The area of `bytes` bytes at an address of the VMM's process, which is a multiple of `align`; nothing if it is not,
    /// or no region has all of it.
    pub(crate) fn find(memory: &GuestMemory, user: u64, bytes: u32, align: u64) -> Option<Self> {
        let span = memory.find_user(user, bytes)?;
        let region = memory.region(span.region)?.clone();
        let aligned = user.is_multiple_of(align) && (span.offset as u64).is_multiple_of(align);
        let bytes = usize::try_from(bytes).ok()?;
        // A region ends within the address space.
        let guest = region.guest + span.offset as u64;
        let log = memory.log().map(|log| (log.clone(), guest));
        aligned.then_some(Area { memory: region, offset: span.offset, bytes, log })
    }
}

impl Area<SharedMemory> {
    /// The area of `bytes` bytes at `offset`, a multiple of 8; nothing if it is not, or the memory does not have all of it.
    pub(crate) fn part(memory: &Arc<SharedMemory>, offset: usize, bytes: usize) -> Option<Self> {
        let end = offset.checked_add(bytes)?;
        let within = end <= memory.bytes() && offset.is_multiple_of(8);
        within.then(|| Area { memory: memory.clone(), offset, bytes, log: None })
    }
}

impl<M> Clone for Area<M> {
    fn clone(&self) -> Self {
        let (memory, log) = (self.memory.clone(), self.log.clone());
        Area { memory, offset: self.offset, bytes: self.bytes, log }
    }
}

impl<M: PeerMemory> Area<M> {
    #[inline]
    fn at(&self, at: usize, len: usize) -> usize {
        debug_assert!(at + len <= self.bytes, "{at} + {len} in {} bytes", self.bytes);
        self.offset + at
    }

    #[inline]
    pub(crate) fn load_u16(&self, at: usize) -> u16 {
        self.memory.mapping().load_u16(self.at(at, 2))
    }

    #[inline]
    pub(crate) fn load_u32(&self, at: usize) -> u32 {
        self.memory.mapping().load(self.at(at, 4))
    }

    #[inline]
    pub(crate) fn load_u64(&self, at: usize) -> u64 {
        self.memory.mapping().load_u64(self.at(at, 8))
    }

    #[inline]
    pub(crate) fn store_u16(&self, at: usize, value: u16) {
        #[cfg(any(test, feature = "sim"))]
        if !crash::outlives_store() {
            return;
        }
        self.memory.mapping().store_u16(self.at(at, 2), value);
        self.note_stored(at, 2);
    }

    #[inline]
    pub(crate) fn store_u32(&self, at: usize, value: u32) {
        #[cfg(any(test, feature = "sim"))]
        if !crash::outlives_store() {
            return;
        }
        self.memory.mapping().store(self.at(at, 4), value);
        self.note_stored(at, 4);
    }

    #[inline]
    pub(crate) fn store_u64(&self, at: usize, value: u64) {
        #[cfg(any(test, feature = "sim"))]
        if !crash::outlives_store() {
            return;
        }
        let stored = self.memory.mapping().write_words(self.at(at, 8), &[value]);
        debug_assert!(stored, "within the area and aligned");
        self.note_stored(at, 8);
    }

    #[inline]
    fn note_stored(&self, at: usize, len: u32) {
        if let Some((log, guest)) = &self.log {
            log.mark(guest.saturating_add(at as u64), len);
        }
    }
}

/// The death of this process after some store, for tests and simulations: later stores have no
/// effect.
#[cfg(any(test, feature = "sim"))]
pub(crate) mod crash {
    use std::cell::Cell;

    thread_local! {
        static LEFT: Cell<u64> = const { Cell::new(u64::MAX) };
    }

    /// From now on, `stores` stores of this thread have effect.
    pub(crate) fn die_after(stores: u64) {
        LEFT.set(stores);
    }

    /// Stores have effect again; true if all were done before.
    pub(crate) fn revive() -> bool {
        LEFT.replace(u64::MAX) > 0
    }

    /// Whether a store had no effect since the last call of `die_after`: no store is left.
    pub(crate) fn is_dead() -> bool {
        LEFT.get() == 0
    }

    pub(super) fn outlives_store() -> bool {
        let left = LEFT.get();
        LEFT.set(left.saturating_sub(1));
        left > 0
    }
}
