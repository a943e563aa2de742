//! What all volumes share, and room for what is inserted. From which volume pages are evicted: `fair_share.rs`.
//!
//! A hit touches nothing in this file. The shared state is a few atomics (pages held, the limit), the list of
//! volumes, and the requests to the reclaimer.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use ebb_block::BlockStore;
use ebb_mem::pressure::{Level, Roots};
use ebb_mem::{IdlePolicy, Memory, WorkerMemory};
use ebb_store::Store;

use crate::fair_share::{SharedLayer, StackShare};
use crate::pages::PAGE;
use crate::reclaimer::{ReclaimRequests, Reclaimer};
use crate::size_limit::SizeLimit;
use crate::stats::{CacheStats, Mode};
use crate::sync::Mutex;
use crate::volume::{StoreCache, VolumeCache};

/// Part of the host's memory that the cache may hold, in percent.
const SHARE_PERCENT: u64 = 80;
/// Pages evicted beyond the request, so that not every insertion has to evict.
const SPARE_PAGES: u64 = 16;
/// Attempts of an insertion to make room before it gives up.
const TRIES: usize = 4;

/// Options of a cache.
#[derive(Clone, Copy, Debug)]
pub struct CacheOptions {
    /// The most bytes it may hold; `None`: 80 % of the host's memory or of the control group's limit.
    pub max_bytes: Option<u64>,
    /// Bytes it may hold under pressure; only a last resort (L3) goes below.
    pub min_bytes: u64,
    /// The moment that time is counted from.
    pub started: Instant,
}

impl CacheOptions {
    /// No fixed size: as much as the host allows, down to nothing.
    #[must_use]
    pub fn new(started: Instant) -> CacheOptions {
        CacheOptions { max_bytes: None, min_bytes: 0, started }
    }
}

/// Why a volume cannot have a cache.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The memory pool has no room for another owner.
    #[error("cannot create a cache for volume {name}")]
    Owner {
        /// The volume's name.
        name: String,
        /// The error of the memory pool.
        source: ebb_mem::MemoryError,
    },
}

/// A buffer cache for any number of volumes: see the [crate documentation](crate).
pub struct Cache {
    pub(crate) memory: Arc<Memory>,
    pub(crate) volumes: Mutex<Vec<Weak<VolumeCache>>>,
    /// Pages held by buffers, over all volumes; and pages reserved for insertions in progress.
    pub(crate) held: AtomicU64,
    /// Pages that must stay in memory until their store is flushed, over all volumes.
    pub(crate) unstable: AtomicU64,
    reserved: AtomicU64,
    /// [`SizeLimit::limit`] in pages, and [`SizeLimit::admits`].
    pub(crate) limit: AtomicU64,
    admits: AtomicBool,
    /// Time in quarters of a second, counted by the reclaimer.
    pub(crate) tick: AtomicU8,
    /// Recently used volumes; layers that volumes share do not count.
    pub(crate) active: AtomicU32,
    /// Volumes of several layers.
    pub(crate) stacks: Mutex<Vec<Weak<StackShare>>>,
    pub(crate) size_limit: Mutex<SizeLimit>,
    pub(crate) reclaim_requests: ReclaimRequests,
    pub(crate) refused: AtomicU64,
    pub(crate) scans: AtomicU64,
    /// Pages returned by proactive reclaim.
    pub(crate) proactively_reclaimed: AtomicU64,
    /// The default maximum, used when none is configured.
    share: u64,
    started: Instant,
}

impl Cache {
    /// A cache with buffers from `memory`, and a reclaimer thread that ends when the cache is dropped.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(memory: &Arc<Memory>, options: CacheOptions) -> io::Result<Arc<Cache>> {
        let cache = Cache::without_reclaimer(memory, options);
        Reclaimer::spawn(&cache)?;
        Ok(cache)
    }

    /// A cache whose reclaimer the caller runs ([`Reclaimer::new`]): for tests and simulations.
    #[must_use]
    pub fn without_reclaimer(memory: &Arc<Memory>, options: CacheOptions) -> Arc<Cache> {
        // Reserving address space that is never used costs nothing, but there is a limit to it.
        let space = memory.stats().arena.reserved as u64 / 2;
        let machine =
            ebb_mem::pressure::limit(&Roots::default()).map_or(space, |limit| limit.bytes);
        let share = (machine / 100 * SHARE_PERCENT).min(space);
        let max = options.max_bytes.map_or(share, |max| max.min(space));
        let size_limit = SizeLimit::new(max, options.min_bytes, options.started);
        let cache = Cache {
            memory: memory.clone(),
            volumes: Mutex::default(),
            held: AtomicU64::new(0),
            unstable: AtomicU64::new(0),
            reserved: AtomicU64::new(0),
            limit: AtomicU64::new(0),
            admits: AtomicBool::new(true),
            tick: AtomicU8::new(0),
            active: AtomicU32::new(1),
            stacks: Mutex::default(),
            size_limit: Mutex::new(size_limit),
            reclaim_requests: ReclaimRequests::default(),
            refused: AtomicU64::new(0),
            scans: AtomicU64::new(0),
            proactively_reclaimed: AtomicU64::new(0),
            share,
            started: options.started,
        };
        cache.adjust(|_| ());
        Arc::new(cache)
    }

    /// A part of the cache for the volume on `store`. Dropping it frees its buffers. With [`Mode::Writeback`] the
    /// caller must run [`StoreCache::run_flusher`], and flush before the volume is dropped; until
    /// [`VolumeCache::set_control`] its writes go through to the store.
    ///
    /// # Errors
    /// [`CacheError::Owner`] when the memory pool has no room for another owner.
    pub fn volume(
        self: &Arc<Self>,
        name: &str,
        store: &Arc<Store>,
        mode: Mode,
    ) -> Result<StoreCache, CacheError> {
        self.part(name, store, mode, None)
    }

    /// A part of the cache for a layer that volumes share: it counts as no volume (`fair_share.rs`).
    pub(crate) fn shared_layer(
        self: &Arc<Self>,
        name: &str,
        store: &Arc<Store>,
        mode: Mode,
    ) -> Result<StoreCache, CacheError> {
        self.part(name, store, mode, Some(SharedLayer::default()))
    }

    fn part(
        self: &Arc<Self>,
        name: &str,
        store: &Arc<Store>,
        mode: Mode,
        shared: Option<SharedLayer>,
    ) -> Result<StoreCache, CacheError> {
        let owner = self
            .memory
            .owner(&format!("cache {name}"))
            .map_err(|source| CacheError::Owner { name: name.to_owned(), source })?;
        let volume = VolumeCache::new(self.clone(), name, store.size(), mode, owner, shared);
        let volume = Arc::new(volume);
        let mut volumes = self.volumes.lock();
        volumes.retain(|volume| volume.strong_count() > 0);
        volumes.push(Arc::downgrade(&volume));
        Ok(StoreCache::new(store.clone(), volume))
    }

    /// The pressure level changed (L0: pressure is over). The limits change at once, and the reclaimer is
    /// woken to free memory. Does not wait for it; may be called from any thread. Has no effect with
    /// [`ebb_mem::IdlePolicy::Static`].
    pub fn pressure(&self, level: Level, now: Instant) {
        if self.memory.policy() == IdlePolicy::Static {
            return;
        }
        let held = self.held.load(Ordering::Relaxed) * PAGE;
        self.adjust(|size_limit| size_limit.apply_pressure(level, held, now));
        self.reclaim_requests.pressure(level);
    }

    /// Lends all idle clean data now without pausing growth: for pressure signs that other processes may have
    /// caused.
    pub fn lend_idle(&self) {
        self.reclaim_requests.pressure(Level::L1);
    }

    /// Sets the most bytes the cache may hold; `None`: the default part of the host's memory. The reclaimer
    /// evicts the excess soon after.
    pub fn set_max(&self, max: Option<u64>) {
        let max = max.unwrap_or(self.share);
        self.adjust(|size_limit| size_limit.set_max(max));
        self.reclaim_requests.wake();
    }

    /// Sets the bytes the cache may hold under pressure.
    pub fn set_min(&self, min: u64) {
        self.adjust(|size_limit| size_limit.min = min);
    }

    /// The memory pool its buffers come from.
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Current statistics.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        let mut stats = CacheStats::default();
        for volume in self.volumes() {
            stats.push(volume.name(), volume.stats());
        }
        {
            let size_limit = self.size_limit.lock();
            (stats.limit, stats.max, stats.admits) =
                (size_limit.limit(), size_limit.max, size_limit.admits());
            stats.min = size_limit.min;
        }
        stats.refused = self.refused.load(Ordering::Relaxed);
        stats.scans = self.scans.load(Ordering::Relaxed);
        stats.proactively_reclaimed = self.proactively_reclaimed.load(Ordering::Relaxed) * PAGE;
        stats
    }

    /// Changes the limits and publishes them to requests.
    pub(crate) fn adjust(&self, change: impl FnOnce(&mut SizeLimit)) {
        let mut size_limit = self.size_limit.lock();
        change(&mut size_limit);
        self.limit.store(size_limit.limit() / PAGE, Ordering::Relaxed);
        self.admits.store(size_limit.admits(), Ordering::Relaxed);
    }

    pub(crate) fn volumes(&self) -> Vec<Arc<VolumeCache>> {
        self.volumes.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Whether new data may be inserted at all.
    #[inline]
    pub(crate) fn admits(&self) -> bool {
        self.admits.load(Ordering::Relaxed)
    }

    /// Pages above the limit.
    pub(crate) fn excess(&self) -> u64 {
        let held = self.held.load(Ordering::Relaxed) + self.reserved.load(Ordering::Relaxed);
        held.saturating_sub(self.limit.load(Ordering::Relaxed))
    }

    /// The current limit in bytes, without visiting any volume.
    #[must_use]
    pub fn limit_bytes(&self) -> u64 {
        self.limit.load(Ordering::Relaxed) * PAGE
    }

    /// Whether there is enough room to load data that no request has asked for yet.
    pub(crate) fn has_room_ahead(&self) -> bool {
        self.admits() && self.limit.load(Ordering::Relaxed) >= 16 * crate::read_streams::WINDOW_MAX
    }

    /// Bytes that may be evicted for other processes: what is held above the minimum.
    pub(crate) fn spare(&self) -> u64 {
        let held = self.held.load(Ordering::Relaxed) * PAGE;
        held.saturating_sub(self.size_limit.lock().min)
    }

    /// Makes room for `pages` of `volume`: evicts the volume's own coldest pages if it has its share (`fair_share.rs`),
    /// else pages of volumes above their share. On success the pages are reserved until [`Cache::settle`].
    pub(crate) fn make_room(
        &self,
        volume: &VolumeCache,
        worker: &WorkerMemory,
        pages: u64,
    ) -> bool {
        self.reserved.fetch_add(pages, Ordering::Relaxed);
        // Volumes that could evict nothing: all they hold is dirty or in use.
        let mut spent = [std::ptr::null(); TRIES];
        for attempt in 0..TRIES {
            if self.excess() == 0 {
                return true;
            }
            let share = self.fair_share();
            let own = volume.held() + pages > volume.allowance(share);
            let want = pages + SPARE_PAGES;
            let victim = if own { None } else { self.most_above_share(share, &spent) };
            let Some(other) = victim else {
                if !own {
                    volume.note_short();
                }
                if volume.evict(worker, want, false) == 0 {
                    break;
                }
                continue;
            };
            if other.evict(worker, want, false) == 0 {
                spent[attempt] = Arc::as_ptr(&other);
            }
        }
        if self.excess() > 0 {
            volume.evict(worker, pages + SPARE_PAGES, false);
        }
        let room = self.excess() == 0;
        if !room {
            self.settle(pages);
        }
        room
    }

    /// Ends a reservation: the pages are now counted as held, or are not inserted after all.
    pub(crate) fn settle(&self, pages: u64) {
        self.reserved.fetch_sub(pages, Ordering::Relaxed);
    }

    /// Milliseconds since the start.
    pub(crate) fn millis(&self, now: Instant) -> u64 {
        let since = now.saturating_duration_since(self.started);
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    }
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cache").field("held", &self.held).finish_non_exhaustive()
    }
}
