//! The whole: what all volumes share, and whose buffers go when there is no room.
//!
//! Nothing here is touched by a hit. Shared are a few atomics (what is held, what may be), the list of
//! volumes, and the orders to the reclaimer.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use ebb_mem::pressure::{Level, Roots};
use ebb_mem::{Memory, Policy, Worker};

use crate::pages::PAGE;
use crate::reclaimer::{Orders, Reclaimer};
use crate::size_limit::SizeLimit;
use crate::stats::{CacheStats, Mode};
use crate::sync::Mutex;
use crate::volume::VolumeCache;

/// Share of the machine's memory that the cache may hold, in percent.
const SHARE_PERCENT: u64 = 80;
/// Pages evicted beyond what is asked for, so that not each insertion has to.
const SPARE_PAGES: u64 = 16;
/// Times an insertion looks for room before it gives up.
const TRIES: usize = 4;

/// What a cache is made with.
#[derive(Clone, Copy, Debug)]
pub struct CacheOptions {
    /// Most bytes it may hold; `None`: 80 % of the machine's memory or of the control group's limit.
    pub max_bytes: Option<u64>,
    /// Bytes it may hold under pressure; only a last resort goes below.
    pub min_bytes: u64,
    /// From when time counts.
    pub started: Instant,
}

impl CacheOptions {
    /// No size of its own: as much as the machine allows, down to nothing.
    #[must_use]
    pub fn new(started: Instant) -> CacheOptions {
        CacheOptions { max_bytes: None, min_bytes: 0, started }
    }
}

/// Why a volume cannot have a cache.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The memory knows too many owners.
    #[error("no cache for volume {name}")]
    Owner {
        /// The volume.
        name: String,
        /// What the memory says.
        source: ebb_mem::Error,
    },
}

/// A buffer cache for any number of volumes: see the [crate documentation](crate).
pub struct Cache {
    pub(crate) memory: Arc<Memory>,
    volumes: Mutex<Vec<Weak<VolumeCache>>>,
    /// Pages that memory is behind, over all volumes; and pages that are about to be.
    pub(crate) held: AtomicU64,
    /// Pages that must stay in memory until the stores were flushed, over all volumes.
    pub(crate) unstable: AtomicU64,
    reserved: AtomicU64,
    /// [`SizeLimit::limit`] in pages, and [`SizeLimit::admits`].
    limit: AtomicU64,
    admits: AtomicBool,
    /// Quarters of a second, as the reclaimer counts them.
    pub(crate) tick: AtomicU8,
    /// Volumes that were used lately.
    pub(crate) active: AtomicU32,
    pub(crate) growth: Mutex<SizeLimit>,
    pub(crate) orders: Orders,
    pub(crate) refused: AtomicU64,
    pub(crate) scans: AtomicU64,
    /// Pages returned ahead of the kernel.
    pub(crate) receded: AtomicU64,
    /// The machine's share, for when no maximum is given.
    share: u64,
    started: Instant,
}

impl Cache {
    /// A cache out of `memory`, with a reclaimer thread that ends when the last user has gone.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(memory: &Arc<Memory>, options: CacheOptions) -> io::Result<Arc<Cache>> {
        let cache = Cache::without_reclaimer(memory, options);
        Reclaimer::spawn(&cache)?;
        Ok(cache)
    }

    /// A cache whose reclaimer is yours to turn ([`Reclaimer::new`]): for tests and simulations.
    #[must_use]
    pub fn without_reclaimer(memory: &Arc<Memory>, options: CacheOptions) -> Arc<Cache> {
        // Address space that is reserved and never used costs nothing, but it is not endless.
        let space = memory.stats().arena.reserved as u64 / 2;
        let machine =
            ebb_mem::pressure::limit(&Roots::default()).map_or(space, |limit| limit.bytes);
        let share = (machine / 100 * SHARE_PERCENT).min(space);
        let max = options.max_bytes.map_or(share, |max| max.min(space));
        let growth = SizeLimit::new(max, options.min_bytes, options.started);
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
            growth: Mutex::new(growth),
            orders: Orders::default(),
            refused: AtomicU64::new(0),
            scans: AtomicU64::new(0),
            receded: AtomicU64::new(0),
            share,
            started: options.started,
        };
        cache.adjust(|_| ());
        Arc::new(cache)
    }

    /// A part of the cache for a volume of `size` bytes. When it is dropped, its buffers are freed.
    ///
    /// # Errors
    /// [`Error::Owner`] when the memory knows no more owners.
    pub fn volume(self: &Arc<Self>, name: &str, size: u64) -> Result<Arc<VolumeCache>, Error> {
        self.volume_as(name, size, Mode::Writethrough)
    }

    /// As [`Cache::volume`], with a mode. With [`Mode::Writeback`] somebody must run
    /// [`VolumeCache::run_flusher`], and flush before the volume is dropped; until
    /// [`VolumeCache::set_control`] its writes go through to the store.
    ///
    /// # Errors
    /// As [`Cache::volume`].
    pub fn volume_as(
        self: &Arc<Self>,
        name: &str,
        size: u64,
        mode: Mode,
    ) -> Result<Arc<VolumeCache>, Error> {
        let owner = self
            .memory
            .owner(&format!("cache {name}"))
            .map_err(|source| Error::Owner { name: name.to_owned(), source })?;
        let volume = Arc::new(VolumeCache::new(self.clone(), name, size, mode, owner));
        let mut volumes = self.volumes.lock();
        volumes.retain(|volume| volume.strong_count() > 0);
        volumes.push(Arc::downgrade(&volume));
        Ok(volume)
    }

    /// Memory pressure has been seen (or, with L0, has ceased): the limits change at once, the reclaimer
    /// is woken to give memory back. Never waits long; from any thread. No event at all with
    /// [`ebb_mem::Policy::Static`].
    pub fn pressure(&self, level: Level, now: Instant) {
        if self.memory.policy() == Policy::Static {
            return;
        }
        let held = self.held.load(Ordering::Relaxed) * PAGE;
        self.adjust(|growth| growth.press(level, held, now));
        self.orders.pressure(level);
    }

    /// Lends all idle clean data now, without a pause in growth: for signs that may be anybody's.
    pub fn lend_idle(&self) {
        self.orders.pressure(Level::L1);
    }

    /// Changes the most bytes the cache may hold; `None`: the machine's share. What is beyond goes within
    /// a moment.
    pub fn set_max(&self, max: Option<u64>) {
        let max = max.unwrap_or(self.share);
        self.adjust(|growth| growth.set_max(max));
        self.orders.wake();
    }

    /// Changes the bytes the cache may hold under pressure.
    pub fn set_min(&self, min: u64) {
        self.adjust(|growth| growth.min = min);
    }

    /// The memory its buffers come from.
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// The figures of now.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        let mut stats = CacheStats::default();
        for volume in self.volumes() {
            stats.push(volume.name(), volume.stats());
        }
        {
            let growth = self.growth.lock();
            (stats.limit, stats.max, stats.admits) = (growth.limit(), growth.max, growth.admits());
            stats.min = growth.min;
        }
        stats.refused = self.refused.load(Ordering::Relaxed);
        stats.scans = self.scans.load(Ordering::Relaxed);
        stats.receded = self.receded.load(Ordering::Relaxed) * PAGE;
        stats
    }

    /// Changes the limits, and what requests see of them.
    pub(crate) fn adjust(&self, change: impl FnOnce(&mut SizeLimit)) {
        let mut growth = self.growth.lock();
        change(&mut growth);
        self.limit.store(growth.limit() / PAGE, Ordering::Relaxed);
        self.admits.store(growth.admits(), Ordering::Relaxed);
    }

    pub(crate) fn volumes(&self) -> Vec<Arc<VolumeCache>> {
        self.volumes.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Whether new data may be put in at all.
    #[inline]
    pub(crate) fn admits(&self) -> bool {
        self.admits.load(Ordering::Relaxed)
    }

    /// Pages above the limit.
    pub(crate) fn excess(&self) -> u64 {
        let held = self.held.load(Ordering::Relaxed) + self.reserved.load(Ordering::Relaxed);
        held.saturating_sub(self.limit.load(Ordering::Relaxed))
    }

    /// What may be held now, in bytes: one number, without a look at any volume.
    #[must_use]
    pub fn limit_bytes(&self) -> u64 {
        self.limit.load(Ordering::Relaxed) * PAGE
    }

    /// Whether there is so much room that data may be loaded that nobody has asked for yet.
    pub(crate) fn has_room_ahead(&self) -> bool {
        self.admits() && self.limit.load(Ordering::Relaxed) >= 16 * crate::read_ahead::WINDOW_MAX
    }

    /// Bytes that may go if others need them: what is held beyond the floor.
    pub(crate) fn spare(&self) -> u64 {
        let held = self.held.load(Ordering::Relaxed) * PAGE;
        held.saturating_sub(self.growth.lock().min)
    }

    /// What a volume may hold while others want more.
    pub(crate) fn fair_share(&self) -> u64 {
        let active = u64::from(self.active.load(Ordering::Relaxed)).max(1);
        self.limit.load(Ordering::Relaxed) / active
    }

    /// Makes room for `pages` of `volume`, at the cost of its own coldest if it has its share, else of
    /// those that have more than theirs. If it can, the pages are reserved until [`Cache::settle`].
    pub(crate) fn make_room(&self, volume: &VolumeCache, worker: &Worker, pages: u64) -> bool {
        self.reserved.fetch_add(pages, Ordering::Relaxed);
        // Those that gave nothing: what they hold is dirty, or in use.
        let mut spent = [std::ptr::null(); TRIES];
        for turn in 0..TRIES {
            if self.excess() == 0 {
                return true;
            }
            let share = self.fair_share();
            let own = volume.held() + pages > share;
            let want = pages + SPARE_PAGES;
            let victim = if own { None } else { self.most_above(share, &spent) };
            let Some(other) = victim else {
                if volume.evict(worker, want, false) == 0 {
                    break;
                }
                continue;
            };
            if other.evict(worker, want, false) == 0 {
                spent[turn] = Arc::as_ptr(&other);
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

    /// Reserved pages are counted as held now, or will not be.
    pub(crate) fn settle(&self, pages: u64) {
        self.reserved.fetch_sub(pages, Ordering::Relaxed);
    }

    /// The volume that is most above its share (idle ones have none), as far as that is clean: what is
    /// dirty cannot go. Not one of those `but`, which gave nothing.
    pub(crate) fn most_above(
        &self,
        share: u64,
        but: &[*const VolumeCache],
    ) -> Option<Arc<VolumeCache>> {
        let volumes = self.volumes.lock();
        let above = |volume: &Arc<VolumeCache>| {
            let held = volume.held();
            let above = held.saturating_sub(if volume.is_active() { share } else { 0 });
            above.min(held.saturating_sub(volume.dirty() / PAGE))
        };
        let all = volumes.iter().filter_map(Weak::upgrade);
        let all = all.filter(|volume| !but.contains(&Arc::as_ptr(volume)));
        all.filter(|volume| above(volume) > 0).max_by_key(above)
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
