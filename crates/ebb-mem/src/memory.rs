//! The whole: arena, zones, workers and the advisor, and how they give back.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::advise::{self, Books, Orders};
use crate::arena::{Arena, Give, Shortage};
use crate::class::{CLASSES, EXTENT_BYTES, PAGE_BYTES, class_bytes};
use crate::gauge::{PURGE, Retired, SQUEEZE, STARVED, UNCACHED, WAITERS, WorkerShared};
use crate::options::{Options, Policy};
use crate::overcommit::Overcommit;
use crate::owners::Owners;
use crate::share::Shares;
use crate::space::{Core, WORD};
use crate::spare::Spares;
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering};
use crate::sys::{self, Advice, Reservation};
use crate::wait::WaitList;
use crate::worker::Worker;
use crate::zone::Zone;

/// Period of the working-set estimator.
const ESTIMATE_EVERY: Duration = Duration::from_secs(1);
/// Purging every worker happens at most this often.
const PURGE_EVERY: Duration = Duration::from_secs(1);
/// How long after a low-memory event idle stock does not grow, unless calm is called before: the
/// window in which the ladder looks for a second sign. What is freed meanwhile beyond what the
/// event left in the caches is lent, so that two who watch the same memory do not take turns in
/// giving and taking it (`elastic-memory.md` 4.3, T14).
const GROWTH_PAUSE: Duration = Duration::from_secs(1);
/// Bytes a zone's depot may always keep, whatever the estimate says.
const ZONE_FLOOR_BYTES: usize = 256 << 10;

/// Why a memory cannot be made or used so.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address space could not be reserved.
    #[error("cannot reserve {bytes} bytes of address space: raise `ulimit -v` or lower the limit")]
    Reserve {
        /// Bytes asked for.
        bytes: usize,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// The advisor's threads could not be started.
    #[error("cannot start the memory advisor's threads")]
    Thread(#[source] std::io::Error),
    /// All owners are taken.
    #[error("more than {0} owners of memory, such as volumes with a cache: have fewer of them")]
    Owners(u16),
    /// The size cannot be reserved: zero, or more than 8 TiB.
    #[error("cannot manage {0} bytes: between 2 MiB and 8 TiB are possible")]
    Size(usize),
}

/// How hard to reclaim (seed `004`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reclaim {
    /// Every zone down to its working set; buckets one smaller; the surplus is lent.
    Trim,
    /// Every zone down to nothing, buckets one smaller, free memory returned at once.
    Drain,
    /// As `Drain`, and every worker's caches are purged, once; buckets half as large; caching is
    /// off until [`Memory::calm`].
    DrainWorkers,
}

#[derive(Default)]
pub(crate) struct Workers {
    pub(crate) list: Vec<Arc<WorkerShared>>,
    /// Owners there is room for, in each worker's table.
    pub(crate) owners: usize,
    pub(crate) retired: Retired,
    pub(crate) pools: Vec<std::sync::Weak<crate::pool::PoolShared>>,
}

struct Pace {
    estimated: Instant,
    purged: Option<Instant>,
    /// When growth was paused, while it is.
    paused: Option<Instant>,
    returned: bool,
}

/// Elastic memory: see the [crate documentation](crate).
pub struct Memory {
    pub(crate) core: Arc<Core>,
    pub(crate) zones: [Zone; CLASSES],
    pub(crate) waits: WaitList,
    pub(crate) workers: Mutex<Workers>,
    pub(crate) owners: Mutex<Owners>,
    pub(crate) options: Options,
    /// Nanoseconds after `options.started` of the last squeeze, and how many there were.
    squeezed: AtomicU64,
    pub(crate) squeezes: AtomicU64,
    uncached: AtomicBool,
    /// See [`Memory::draining`].
    draining: AtomicBool,
    /// Pages rewired that were still there, and that were not.
    pub(crate) kept: AtomicU64,
    pub(crate) lost: AtomicU64,
    /// Times the kernel refused to open address space.
    pub(crate) refusals: AtomicU64,
    pace: Mutex<Pace>,
    shares: Shares,
    spares: Spares,
    advisors: Vec<JoinHandle<()>>,
    /// When [`Memory::advise`] sweeps next.
    #[cfg(feature = "sim")]
    advised: Mutex<Option<Instant>>,
}

impl Memory {
    /// Reserves address space and starts the advisor's threads. No memory is used yet.
    ///
    /// # Errors
    /// [`Error::Size`], [`Error::Reserve`] or [`Error::Thread`].
    pub fn new(options: Options) -> Result<Arc<Memory>, Error> {
        // A simulation does the advisor's work itself: `Memory::advise`.
        Memory::build(options, !crate::clock::is_virtual())
    }

    /// Does what the advisor would do now, on this thread: for simulations, whose memory has none.
    /// Returns when to come again, if anything is cooling.
    #[cfg(feature = "sim")]
    #[must_use]
    pub fn advise(&self, now: Instant) -> Option<Duration> {
        let mut real = advise::Real::new(&self.core);
        self.core.books.turn(&mut real, &mut self.advised.lock(), now)
    }

    /// For models and tests, which step the advisor themselves.
    #[cfg(test)]
    pub(crate) fn without_advisor(options: Options) -> Result<Arc<Memory>, Error> {
        Memory::build(options, false)
    }

    fn build(options: Options, advised: bool) -> Result<Arc<Memory>, Error> {
        let small = options.reserve_bytes.div_ceil(EXTENT_BYTES);
        let huge = options.huge_bytes.div_ceil(EXTENT_BYTES);
        let fits = |extents: usize| {
            let bytes = extents.checked_mul(EXTENT_BYTES);
            bytes.filter(|&bytes| small > 0 && bytes <= 8 << 40)
        };
        let chunk = small.checked_add(huge).filter(|&extents| fits(extents).is_some());
        let chunk = Arena::chunk_extents(chunk.ok_or(Error::Size(options.reserve_bytes))?);
        let (small, huge) = (small.next_multiple_of(chunk), huge.next_multiple_of(chunk));
        let bytes = (small + huge) * EXTENT_BYTES;
        let reserve =
            |bytes| Reservation::new(bytes).map_err(|source| Error::Reserve { bytes, source });
        let reservation = reserve(bytes)?;
        let split = small * EXTENT_BYTES;
        reservation.set_huge(0, split, false);
        if huge > 0 {
            reservation.set_huge(split, bytes - split, true);
        }
        let saved = reserve((bytes / PAGE_BYTES * WORD).next_multiple_of(EXTENT_BYTES))?;
        saved.set_huge(0, saved.bytes(), false);
        let lending = options.lend && !options.policy.keeps() && sys::lending_works();
        let mut arena = Arena::new(small, huge, options.ceiling_bytes / PAGE_BYTES, lending);
        arena.set_keep_freed(options.policy.keeps());
        let charge = Overcommit::now();
        arena.close_all(chunk, charge.is_any());
        let (books, orders) = (Books::new(arena), Orders::default());
        let touches = AtomicBool::new(lending && crate::kernel::touches());
        let core = Arc::new(Core { reservation, saved, split, charge, touches, books, orders });
        let advisors =
            if advised { advise::start(&core).map_err(Error::Thread)? } else { Vec::new() };
        let ceiling = options.ceiling_bytes;
        let names = vec![Some("cache".to_owned())];
        Ok(Arc::new(Memory {
            core,
            zones: std::array::from_fn(|class| Zone::new(class, ceiling)),
            waits: WaitList::default(),
            workers: Mutex::new(Workers { owners: names.len(), ..Workers::default() }),
            owners: Mutex::new(Owners::new(names)),
            squeezed: AtomicU64::new(0),
            squeezes: AtomicU64::new(0),
            kept: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            refusals: AtomicU64::new(0),
            uncached: AtomicBool::new(options.policy == Policy::Uncached),
            draining: AtomicBool::new(false),
            pace: Mutex::new(Pace {
                estimated: options.started,
                purged: None,
                paused: None,
                returned: false,
            }),
            shares: Shares::new(ceiling / 4 * 3),
            spares: Spares::new(ceiling),
            options,
            advisors,
            #[cfg(feature = "sim")]
            advised: Mutex::default(),
        }))
    }

    /// A worker's way to this memory, to be used by one thread. `wake` is called from any thread
    /// when [`Worker::poll`] should be called soon: it must make the worker's loop turn. It is called
    /// with a lock held and must do no more than that (write to an eventfd, say).
    pub fn worker(self: &Arc<Self>, wake: impl Fn() + Send + Sync + 'static) -> Worker {
        let mut workers = self.workers.lock();
        let shared = Arc::new(WorkerShared::new(workers.owners, Box::new(wake)));
        if self.uncached.load(Ordering::Relaxed) {
            shared.flags.fetch_or(UNCACHED, Ordering::Relaxed);
        }
        if self.waits.len() > 0 {
            shared.flags.fetch_or(WAITERS, Ordering::Relaxed);
        }
        workers.list.push(shared.clone());
        drop(workers);
        Worker::new(self.clone(), shared)
    }

    /// Limits the blocks of the zone that serves `len` bytes (1 to 1 MiB) to `bytes` in use and in
    /// caches; `None`: no limit. Takes effect at the next block taken from the slabs; those that
    /// wait for the old limit are woken.
    pub fn set_zone_limit(&self, len: usize, bytes: Option<usize>) {
        let class = crate::class::class_of(len).min(CLASSES - 1);
        // Two at least: a read-modify-write holds one while it waits for another.
        let blocks = bytes.map_or(usize::MAX, |bytes| (bytes / class_bytes(class)).max(2));
        self.core.books.lock().set_limit(class, blocks);
        self.waits.wake();
    }

    /// Changes the ceiling over all wired memory (bytes). A lower one is reached as memory is
    /// freed; nothing in use is taken away.
    pub fn set_ceiling(&self, bytes: usize) {
        self.core.books.lock().set_ceiling(bytes / PAGE_BYTES);
        self.shares.set_total(bytes / 4 * 3);
        self.spares.set_ceiling(bytes);
        self.waits.wake();
    }

    /// Whether anybody waits for memory.
    pub fn has_waiters(&self) -> bool {
        self.waits.len() > 0
    }

    /// What the ceiling has for requests, shared out among volumes: three quarters of it.
    pub fn shares(&self) -> &Shares {
        &self.shares
    }

    /// Memory for work that helps but does not have to be done.
    pub fn spares(&self) -> &Spares {
        &self.spares
    }

    /// Gives back as `level` says, and pauses the growth of idle stock: for a second (until the first
    /// [`Memory::tick`] after it), or until [`Memory::calm`]. Never allocates; may be called from any
    /// thread but those of workers in a hurry: it walks all caches.
    pub fn reclaim(&self, level: Reclaim, now: Instant) {
        match self.options.policy {
            Policy::LastResortOnly if level < Reclaim::DrainWorkers => return,
            Policy::Static => return,
            _ => {}
        }
        let again = self.draining();
        if level >= Reclaim::Drain {
            self.core.books.lock().set_prefer_return(true);
            self.draining.store(true, Ordering::Relaxed);
        }
        // All workers once, each for all its zones: they act while the zones are walked here.
        if level == Reclaim::DrainWorkers {
            self.purge_workers(now);
        }
        let lends = level == Reclaim::Trim && !self.options.policy.keeps();
        let give = if lends { Give::Lend } else { Give::Return };
        for zone in &self.zones {
            let keep = {
                let mut depot = zone.depot();
                depot.estimate.update();
                if level == Reclaim::Trim { depot.estimate.wss() } else { 0 }
            };
            self.cut(zone, keep, give);
            match level {
                Reclaim::DrainWorkers => zone.halve_target(),
                _ => zone.shrink_target(),
            }
        }
        // Once drained, what is free is in turnover, or the sweep returns it.
        if !again {
            let advice = if lends { Advice::Lend } else { Advice::Return };
            self.core.books.lock().offer_free(advice);
        }
        self.serve_waiters();
        self.pace.lock().paused = Some(now);
        self.zones.iter().for_each(Zone::pause);
    }

    fn resume_growth(&self) {
        self.zones.iter().for_each(Zone::resume);
    }

    fn purge_workers(&self, now: Instant) {
        {
            let mut pace = self.pace.lock();
            let early = |at: Instant| now.saturating_duration_since(at) < PURGE_EVERY;
            if pace.purged.is_some_and(early) {
                return;
            }
            pace.purged = Some(now);
        }
        self.uncached.store(true, Ordering::Relaxed);
        for worker in &self.workers.lock().list {
            worker.ask(PURGE | UNCACHED);
        }
    }

    /// The pressure is over: caching is on again, idle stock may grow, and idle memory is lent
    /// rather than returned.
    pub fn calm(&self) {
        self.core.books.lock().set_prefer_return(false);
        self.draining.store(false, Ordering::Relaxed);
        if self.pace.lock().paused.take().is_some() {
            self.resume_growth();
        }
        if self.options.policy != Policy::Uncached && self.uncached.swap(false, Ordering::Relaxed) {
            for worker in &self.workers.lock().list {
                worker.flags.fetch_and(!UNCACHED, Ordering::Relaxed);
            }
        }
    }

    /// How memory is kept and given back, as it was made with.
    #[must_use]
    pub fn policy(&self) -> Policy {
        self.options.policy
    }

    /// Whether idle memory is lent at all: for owners that lend of their own, as a cache does.
    #[must_use]
    pub fn lends(&self) -> bool {
        self.options.lend && !self.options.policy.keeps()
    }

    /// A memory-pressure event for the page pools (seed `000`): each drops to nothing at once and
    /// stays so for its `buffer_squeeze_duration_ms` from `now`. Every event starts that time anew.
    /// Idle workers are woken. Under [`Policy::Static`] it is no event at all.
    pub fn squeeze(&self, now: Instant) {
        if self.options.policy == Policy::Static {
            return;
        }
        self.squeezed.store(self.nanos(now), Ordering::Relaxed);
        self.squeezes.fetch_add(1, Ordering::Release);
        for worker in &self.workers.lock().list {
            worker.ask(SQUEEZE);
        }
    }

    /// Whether pressure goes on: a drain has been asked for and calm has not come since. Until then
    /// free memory is kept in the slabs alone, where all queues and workers share it, and as long
    /// as it is in turnover: what nobody takes for some tens of milliseconds is returned. Returning
    /// all of it would have each request fault its memory in again, for as long as pressure lasts.
    #[inline]
    #[must_use]
    pub fn draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// When the last squeeze was, and a number that is another one for each event. The number is
    /// read first: a new number never comes with an old time.
    pub(crate) fn last_squeeze(&self) -> (u64, u64) {
        let event = self.squeezes.load(Ordering::Acquire);
        (self.squeezed.load(Ordering::Relaxed), event)
    }

    pub(crate) fn nanos(&self, now: Instant) -> u64 {
        let since = now.saturating_duration_since(self.options.started);
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX - 1)
    }

    /// The controller's beat; call it about once a second, more often does no harm. Updates the
    /// estimates and lends what no zone needs, without any pressure: memory that could serve the
    /// page cache goes back even while the kernel still meets its targets.
    pub fn tick(&self, now: Instant) {
        {
            let mut pace = self.pace.lock();
            if now.saturating_duration_since(pace.estimated) < ESTIMATE_EVERY {
                return;
            }
            pace.estimated = now;
            let over = |at: Instant| now.saturating_duration_since(at) >= GROWTH_PAUSE;
            if pace.paused.is_some_and(over) {
                pace.paused = None;
                drop(pace);
                self.resume_growth();
            }
        }
        // The kernel may have refused what others have given back since: nobody here is told.
        if self.refusals.load(Ordering::Relaxed) > 0 && self.waits.len() > 0 {
            self.serve_waiters();
        }
        if self.options.policy != Policy::Elastic {
            return;
        }
        let idle_ticks = self.options.idle_after.as_secs();
        let mut all_idle = true;
        for zone in &self.zones {
            let (keep, surplus) = {
                let mut depot = zone.depot();
                depot.estimate.update();
                let estimate = depot.estimate;
                let floor = (ZONE_FLOOR_BYTES / class_bytes(zone.class)) as u64;
                let idle = u64::from(estimate.timin()) >= idle_ticks;
                all_idle &= idle;
                let keep = estimate.wss() + estimate.wss() / 3 + floor;
                (keep, if idle { estimate.limin().div_ceil(4) } else { 0 })
            };
            if surplus > 0 {
                let items = zone.depot().items();
                // At least one bucket, or the rest would stay for ever.
                let surplus = surplus.max(zone.max_target() as u64);
                self.cut(zone, items.saturating_sub(surplus), Give::Return);
            }
            self.cut(zone, keep, Give::Lend);
        }
        // Long quiet: lent memory is returned too, so that what others see of us is true.
        let mut pace = self.pace.lock();
        if all_idle && !pace.returned {
            self.core.books.lock().offer_free(Advice::Return);
        }
        pace.returned = all_idle;
    }

    /// Empties the zone's oldest full buckets until at most `keep` blocks are cached in the depot.
    fn cut(&self, zone: &Zone, keep: u64, give: Give) {
        loop {
            let Some(mut bucket) = zone.depot().reclaim_above(keep) else { break };
            {
                let mut arena = self.core.books.lock();
                while let Some(page) = bucket.pop() {
                    arena.give(page as usize, zone.class, give);
                }
            }
            zone.depot().put_empty(bucket);
        }
        zone.depot().drop_spare();
    }

    /// Makes room for `pages` under the ceiling out of the depots, those first whose zone has not
    /// run out of cache for the longest time. True if it helped.
    pub(crate) fn relieve(&self, pages: usize) -> bool {
        let lends = {
            let mut arena = self.core.books.lock();
            arena.offer_free(Advice::Lend);
            arena.has_room(pages)
        };
        if lends {
            return true;
        }
        let last_resort = self.options.policy == Policy::LastResortOnly;
        if last_resort {
            for zone in &self.zones {
                self.cut(zone, 0, Give::Return);
            }
            for worker in &self.workers.lock().list {
                worker.ask(PURGE);
            }
            let mut arena = self.core.books.lock();
            arena.offer_free(Advice::Return);
            return arena.has_room(pages);
        }
        let mut order: [(u32, usize); CLASSES] =
            std::array::from_fn(|class| (self.zones[class].depot().estimate.timin(), class));
        order.sort_unstable_by(|a, b| b.cmp(a));
        // A little more than asked for: who is short once is short again soon.
        let goal = pages + self.options.ceiling_bytes / PAGE_BYTES / 64;
        for (_, class) in order {
            let zone = &self.zones[class];
            loop {
                if self.core.books.lock().has_room(goal) {
                    return true;
                }
                let Some(mut bucket) = zone.depot().reclaim_above(0) else { break };
                let mut arena = self.core.books.lock();
                while let Some(page) = bucket.pop() {
                    arena.give(page as usize, class, Give::Lend);
                }
                drop(arena);
                zone.depot().put_empty(bucket);
            }
        }
        self.core.books.lock().has_room(pages)
    }

    /// Somebody has begun to wait: every worker gives back what it caches.
    pub(crate) fn starve(&self, lane_was_empty: bool) {
        for worker in &self.workers.lock().list {
            if lane_was_empty {
                worker.ask(STARVED | WAITERS);
            } else {
                worker.flags.fetch_or(WAITERS, Ordering::SeqCst);
            }
        }
    }

    /// Nobody waits any more.
    pub(crate) fn fed(&self) {
        let workers = self.workers.lock();
        if self.waits.len() == 0 {
            for worker in &workers.list {
                worker.flags.fetch_and(!WAITERS, Ordering::Relaxed);
            }
        }
    }

    /// Wakes the first waiters, if any.
    pub(crate) fn serve_waiters(&self) {
        self.waits.wake();
    }

    /// Whether this shortage leaves a waiter in front of a newcomer.
    pub(crate) fn must_queue(&self, class: usize) -> bool {
        self.waits.has(crate::wait::BUDGET) || self.waits.has(1 + class)
    }

    /// Everything the depots hold goes back: for those who wait.
    pub(crate) fn empty_depots(&self, give: Give) {
        for zone in &self.zones {
            self.cut(zone, 0, give);
        }
    }

    /// Pages rewired so far: (still there, lost). The share of the lost is the best sign of being
    /// reclaimed.
    pub fn rewires(&self) -> (u64, u64) {
        (self.kept.load(Ordering::Relaxed), self.lost.load(Ordering::Relaxed))
    }

    /// Blocks until the advisor has done all there is to do. For tests, benches and shutdown: not
    /// for a worker.
    pub fn settle(&self) {
        self.core.books.settle();
    }

    /// Whether idle memory can be lent here; if not, it is returned.
    pub fn lending(&self) -> bool {
        self.core.books.lock().lending()
    }

    pub(crate) fn lane(shortage: Shortage, class: usize) -> usize {
        match shortage {
            Shortage::Zone if class < CLASSES => 1 + class,
            _ => crate::wait::BUDGET,
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.core.books.stop(&self.core.orders);
        for advisor in self.advisors.drain(..) {
            let _ = advisor.join();
        }
        if self.stats().blocks_out() != 0 {
            // A block is still out somewhere: its memory must stay mapped.
            std::mem::forget(self.core.clone());
        }
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory").field("options", &self.options).finish_non_exhaustive()
    }
}
