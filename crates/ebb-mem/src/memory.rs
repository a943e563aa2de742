//! [`Memory`]: the arena, the zones, the workers and the advisor, and how memory is reclaimed.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::advise::{self, AdvisorControl, SharedArena};
use crate::arena::{Arena, Give, Shortage};
use crate::class::{CLASSES, EXTENT_BYTES, PAGE_BYTES, class_bytes};
use crate::gauge::{PURGE, RELEASE_CACHES, Retired, SQUEEZE, UNCACHED, WAITERS, WorkerShared};
use crate::options::{IdlePolicy, MemoryOptions};
use crate::overcommit::Overcommit;
use crate::owners::Owners;
use crate::share::Shares;
use crate::space::{Core, WORD};
use crate::spare::Spares;
use crate::sync::{AtomicBool, AtomicU64, AtomicUsize, Mutex, Ordering};
use crate::sys::{self, PageAdvice, Reservation};
use crate::wait::WaitList;
use crate::worker::WorkerMemory;
use crate::zone::Zone;

/// Period of the working-set estimator.
const ESTIMATE_EVERY: Duration = Duration::from_secs(1);
/// Shortest time between two purges of all workers.
const PURGE_EVERY: Duration = Duration::from_secs(1);
/// How long the caches do not grow after a low-memory event, unless [`Memory::calm`] is called before:
/// the window in which the ladder waits for a second sign. Blocks freed in this time that exceed what
/// the event left in the caches are lent, so that two daemons that watch the same free memory do not
/// alternate between releasing and using it.
const GROWTH_PAUSE: Duration = Duration::from_secs(1);
/// Bytes a zone's depot may always keep, whatever the estimate says.
const ZONE_FLOOR_BYTES: usize = 256 << 10;
/// The part of the ceiling that is divided among the requests of volumes, in eighths.
const SHARE_EIGHTHS: usize = 6;
/// The most address space of a memory.
const MOST_BYTES: usize = 8 << 40;

/// Why a memory cannot be created or used in this way.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The address space could not be reserved.
    #[error("cannot reserve {bytes} bytes of address space: raise `ulimit -v` or lower the limit")]
    Reserve {
        /// Requested bytes.
        bytes: usize,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// The advisor's threads could not be started.
    #[error("cannot start the memory advisor's threads")]
    Thread(#[source] std::io::Error),
    /// All owners are in use.
    #[error("more than {0} owners of memory: use fewer volumes with a cache")]
    Owners(u16),
    /// The size cannot be reserved: zero, or more than 8 TiB.
    #[error("cannot manage {0} bytes of memory: set between 2 MiB and 8 TiB")]
    Size(usize),
}

/// How much to reclaim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reclaim {
    /// Reduces every zone to its working set and its buckets by one block; the surplus is lent.
    Trim,
    /// Empties every zone and reduces its buckets by one block; free memory is returned at once.
    Drain,
    /// As `Drain`; also purges every worker's caches once, halves the buckets, and turns caching off
    /// until [`Memory::calm`].
    DrainWorkers,
}

#[derive(Default)]
pub(crate) struct Workers {
    pub(crate) list: Vec<Arc<WorkerShared>>,
    /// Number of owners that each worker's table has gauges for.
    pub(crate) owners: usize,
    pub(crate) retired: Retired,
    pub(crate) pools: Vec<std::sync::Weak<crate::pool::PoolShared>>,
}

struct TickState {
    estimated: Instant,
    purged: Option<Instant>,
    /// While growth is paused: since when.
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
    pub(crate) options: MemoryOptions,
    /// Time of the last squeeze in nanoseconds after `options.started`, and the number of squeezes.
    squeezed: AtomicU64,
    pub(crate) squeezes: AtomicU64,
    uncached: AtomicBool,
    /// See [`Memory::draining`].
    draining: AtomicBool,
    /// Times the kernel refused to open address space.
    pub(crate) refusals: AtomicU64,
    tick_state: Mutex<TickState>,
    shares: Shares,
    /// The part of the ceiling in `shares`.
    share_eighths: AtomicUsize,
    spares: Spares,
    advisors: Vec<JoinHandle<()>>,
    /// When [`Memory::advise`] sweeps next time.
    #[cfg(feature = "sim")]
    advised: Mutex<Option<Instant>>,
}

impl Memory {
    /// Reserves address space and starts the advisor's threads. No memory is used yet.
    ///
    /// # Errors
    /// [`MemoryError::Size`], [`MemoryError::Reserve`] or [`MemoryError::Thread`].
    pub fn new(options: MemoryOptions) -> Result<Arc<Memory>, MemoryError> {
        // A simulation runs the advisor itself: `Memory::advise`.
        Memory::build(options, !crate::clock::is_virtual())
    }

    /// Does the advisor's work on this thread: for simulations, whose memory has no advisor thread.
    /// Returns the time until the next call, if freed pages wait for a sweep.
    #[cfg(feature = "sim")]
    #[must_use]
    pub fn advise(&self, now: Instant) -> Option<Duration> {
        let mut real = advise::SystemKernel::new(&self.core);
        self.core.arena.run_once(&mut real, &mut self.advised.lock(), now)
    }

    /// For models and tests, which run the advisor step by step.
    #[cfg(test)]
    pub(crate) fn without_advisor(options: MemoryOptions) -> Result<Arc<Memory>, MemoryError> {
        Memory::build(options, false)
    }

    fn build(options: MemoryOptions, advised: bool) -> Result<Arc<Memory>, MemoryError> {
        let extents = options.reserve_bytes.div_ceil(EXTENT_BYTES);
        if extents == 0 || extents > MOST_BYTES / EXTENT_BYTES {
            return Err(MemoryError::Size(options.reserve_bytes));
        }
        let chunk = Arena::chunk_extents(extents);
        let extents = extents.next_multiple_of(chunk);
        let bytes = extents * EXTENT_BYTES;
        let reserve = |bytes| {
            Reservation::new(bytes).map_err(|source| MemoryError::Reserve { bytes, source })
        };
        let reservation = reserve(bytes)?;
        reservation.use_small_pages(0, bytes);
        let saved = reserve((bytes / PAGE_BYTES * WORD).next_multiple_of(EXTENT_BYTES))?;
        saved.use_small_pages(0, saved.bytes());
        let lending = options.lend && !options.policy.keeps() && sys::lending_works();
        let mut arena = Arena::new(extents, options.ceiling_bytes / PAGE_BYTES, lending);
        arena.set_keep_freed(options.policy.keeps());
        let charge = Overcommit::now();
        arena.close_all(chunk, charge.is_any());
        let (arena, control) = (SharedArena::new(arena), AdvisorControl::default());
        let touches = AtomicBool::new(lending && crate::kernel::touches());
        let core = Arc::new(Core { reservation, saved, charge, touches, arena, control });
        let advisors =
            if advised { advise::start(&core).map_err(MemoryError::Thread)? } else { Vec::new() };
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
            refusals: AtomicU64::new(0),
            uncached: AtomicBool::new(options.policy == IdlePolicy::Uncached),
            draining: AtomicBool::new(false),
            tick_state: Mutex::new(TickState {
                estimated: options.started,
                purged: None,
                paused: None,
                returned: false,
            }),
            shares: Shares::new(ceiling / 8 * SHARE_EIGHTHS),
            share_eighths: AtomicUsize::new(SHARE_EIGHTHS),
            spares: Spares::new(ceiling),
            options,
            advisors,
            #[cfg(feature = "sim")]
            advised: Mutex::default(),
        }))
    }

    /// Creates the interface of one thread to this memory. `wake` is called from any thread when
    /// [`WorkerMemory::poll`] should be called soon: it must wake the worker's loop. It is called with a lock
    /// held and must do nothing else (for example, write to an eventfd).
    pub fn worker(self: &Arc<Self>, wake: impl Fn() + Send + Sync + 'static) -> WorkerMemory {
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
        WorkerMemory::new(self.clone(), shared)
    }

    /// Limits the blocks of the zone that serves `len` bytes (1 to 1 MiB) to `bytes` in use and in
    /// caches; `None`: no limit. Takes effect at the next allocation from the slabs; allocations that
    /// wait because of the old limit are woken.
    pub fn set_zone_limit(&self, len: usize, bytes: Option<usize>) {
        let class = crate::class::class_of(len).min(CLASSES - 1);
        // Two at least: a read-modify-write holds one while it waits for another.
        let blocks = bytes.map_or(usize::MAX, |bytes| (bytes / class_bytes(class)).max(2));
        self.core.arena.lock().set_limit(class, blocks);
        self.waits.wake();
    }

    /// Changes the ceiling on wired memory (bytes). A lower ceiling takes effect as memory is
    /// freed; memory in use is not affected. `most`, at least `bytes`, is the ceiling when no other
    /// process needs memory: a block of more than half of `bytes` waits for room under that, so
    /// that a request that was admitted before the ceiling fell gets its memory.
    pub fn set_ceiling(&self, bytes: usize, most: usize) {
        self.core.arena.lock().set_ceiling(bytes / PAGE_BYTES, most / PAGE_BYTES);
        self.shares.set_total(bytes / 8 * self.share_eighths.load(Ordering::Relaxed));
        self.spares.set_ceiling(bytes);
        self.waits.wake();
    }

    /// Sets the part of the ceiling that is divided among the requests of volumes, in eighths.
    pub fn set_share_eighths(&self, eighths: usize) {
        self.share_eighths.store(eighths.min(8), Ordering::Relaxed);
        let ceiling = self.core.arena.lock().ceiling() * PAGE_BYTES;
        self.shares.set_total(ceiling / 8 * eighths.min(8));
    }

    /// Whether an allocation waits for memory.
    pub fn has_waiters(&self) -> bool {
        self.waits.len() > 0
    }

    /// The part of the ceiling that is divided among the requests of volumes: three quarters of it,
    /// unless [`Memory::set_share_eighths`] changes that. The daemon sets three eighths while
    /// volumes have writeback caches, whose dirty data may have half of the ceiling.
    pub fn shares(&self) -> &Shares {
        &self.shares
    }

    /// Memory for optional work: larger writebacks, read-ahead, cache fills.
    pub fn spares(&self) -> &Spares {
        &self.spares
    }

    /// Reclaims as `level` says, and pauses the growth of the caches for a second (until the first
    /// [`Memory::tick`] after it) or until [`Memory::calm`]. Never allocates. May be called from any
    /// thread, but takes time: it walks all caches.
    pub fn reclaim(&self, level: Reclaim, now: Instant) {
        if self.options.policy == IdlePolicy::Static {
            return;
        }
        let again = self.draining();
        if level >= Reclaim::Drain {
            self.core.arena.lock().set_prefer_return(true);
            self.draining.store(true, Ordering::Relaxed);
        }
        // Each worker is notified once, for all its zones: workers purge while the zones are walked here.
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
        // After the first drain, free memory is either reused soon or returned by the sweep.
        if !again {
            let advice = if lends { PageAdvice::Lend } else { PageAdvice::Return };
            self.core.arena.lock().offer_free(advice);
        }
        self.wake_waiters();
        self.tick_state.lock().paused = Some(now);
        self.zones.iter().for_each(Zone::pause);
    }

    fn resume_growth(&self) {
        self.zones.iter().for_each(Zone::resume);
    }

    fn purge_workers(&self, now: Instant) {
        {
            let mut tick_state = self.tick_state.lock();
            let early = |at: Instant| now.saturating_duration_since(at) < PURGE_EVERY;
            if tick_state.purged.is_some_and(early) {
                return;
            }
            tick_state.purged = Some(now);
        }
        self.uncached.store(true, Ordering::Relaxed);
        for worker in &self.workers.lock().list {
            worker.request(PURGE | UNCACHED);
        }
    }

    /// The pressure has ended: turns caching on, lets the caches grow, and lends idle memory instead of
    /// returning it.
    pub fn calm(&self) {
        self.core.arena.lock().set_prefer_return(false);
        self.draining.store(false, Ordering::Relaxed);
        if self.tick_state.lock().paused.take().is_some() {
            self.resume_growth();
        }
        if self.options.policy != IdlePolicy::Uncached
            && self.uncached.swap(false, Ordering::Relaxed)
        {
            for worker in &self.workers.lock().list {
                worker.flags.fetch_and(!UNCACHED, Ordering::Relaxed);
            }
        }
    }

    /// The policy for idle memory, from the options.
    #[must_use]
    pub fn policy(&self) -> IdlePolicy {
        self.options.policy
    }

    /// Whether idle memory may be lent: for owners that lend buffers themselves, as a cache does.
    #[must_use]
    pub fn lends(&self) -> bool {
        self.options.lend && !self.options.policy.keeps()
    }

    /// A memory-pressure event for the page pools: each pool releases all its free pages at once and keeps
    /// none for its `buffer_squeeze_duration_ms` from `now`, as in Linux's xen-blkback. Every event
    /// restarts that time. Idle workers are woken. Does nothing under [`IdlePolicy::Static`].
    pub fn squeeze(&self, now: Instant) {
        if self.options.policy == IdlePolicy::Static {
            return;
        }
        self.squeezed.store(self.nanos(now), Ordering::Relaxed);
        self.squeezes.fetch_add(1, Ordering::Release);
        for worker in &self.workers.lock().list {
            worker.request(SQUEEZE);
        }
    }

    /// Whether pressure continues: [`Memory::reclaim`] has drained, and [`Memory::calm`] was not called
    /// since. Until then free memory is kept in the slabs only, where all queues and workers share it, and
    /// only while it is being reused: what stays unused for some tens of milliseconds is returned. If all
    /// of it were returned at once, every request would fault its memory in again while pressure lasts.
    #[inline]
    #[must_use]
    pub fn draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// The time of the last squeeze, and its sequence number. The number is read first, so that a new
    /// number is never combined with an old time.
    pub(crate) fn last_squeeze(&self) -> (u64, u64) {
        let event = self.squeezes.load(Ordering::Acquire);
        (self.squeezed.load(Ordering::Relaxed), event)
    }

    pub(crate) fn nanos(&self, now: Instant) -> u64 {
        let since = now.saturating_duration_since(self.options.started);
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX - 1)
    }

    /// Periodic work of the controller; call it about once a second (more often is harmless). Updates the
    /// estimates and lends what no zone needs, without any pressure: memory that the page cache could use
    /// is released even while the kernel has enough free memory.
    pub fn tick(&self, now: Instant) {
        {
            let mut tick_state = self.tick_state.lock();
            if now.saturating_duration_since(tick_state.estimated) < ESTIMATE_EVERY {
                return;
            }
            tick_state.estimated = now;
            let over = |at: Instant| now.saturating_duration_since(at) >= GROWTH_PAUSE;
            if tick_state.paused.is_some_and(over) {
                tick_state.paused = None;
                drop(tick_state);
                self.resume_growth();
            }
        }
        // After a refusal by the kernel, other processes may have freed memory since; nothing reports that.
        if self.refusals.load(Ordering::Relaxed) > 0 && self.waits.len() > 0 {
            self.wake_waiters();
        }
        if self.options.policy != IdlePolicy::Elastic {
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
                // At least one bucket, or the remainder would stay for ever.
                let surplus = surplus.max(zone.max_target() as u64);
                self.cut(zone, items.saturating_sub(surplus), Give::Return);
            }
            self.cut(zone, keep, Give::Lend);
        }
        // After a long idle time lent memory is returned, too, so that RSS shows what is in use.
        let mut tick_state = self.tick_state.lock();
        if all_idle && !tick_state.returned {
            self.core.arena.lock().offer_free(PageAdvice::Return);
        }
        tick_state.returned = all_idle;
    }

    /// Empties the zone's oldest full buckets until at most `keep` blocks are cached in the depot.
    fn cut(&self, zone: &Zone, keep: u64, give: Give) {
        loop {
            let Some(mut bucket) = zone.depot().reclaim_above(keep) else { break };
            {
                let mut arena = self.core.arena.lock();
                while let Some(page) = bucket.pop() {
                    arena.give(page as usize, zone.class, give);
                }
            }
            zone.depot().put_empty(bucket);
        }
        zone.depot().drop_spare();
    }

    /// Makes room for `pages` under the ceiling: lends free blocks of the depots, beginning with the zone
    /// that has not run out of cached blocks for the longest time. True if there is room then.
    pub(crate) fn relieve(&self, pages: usize) -> bool {
        let lends = {
            let mut arena = self.core.arena.lock();
            arena.offer_free(PageAdvice::Lend);
            arena.has_room(pages)
        };
        if lends {
            return true;
        }
        let mut order: [(u32, usize); CLASSES] =
            std::array::from_fn(|class| (self.zones[class].depot().estimate.timin(), class));
        order.sort_unstable_by(|a, b| b.cmp(a));
        // A little more than needed: the next allocation is likely to need room, too.
        let goal = pages + self.options.ceiling_bytes / PAGE_BYTES / 64;
        for (_, class) in order {
            let zone = &self.zones[class];
            loop {
                if self.core.arena.lock().has_room(goal) {
                    return true;
                }
                let Some(mut bucket) = zone.depot().reclaim_above(0) else { break };
                let mut arena = self.core.arena.lock();
                while let Some(page) = bucket.pop() {
                    arena.give(page as usize, class, Give::Lend);
                }
                drop(arena);
                zone.depot().put_empty(bucket);
            }
        }
        self.core.arena.lock().has_room(pages)
    }

    /// An allocation has begun to wait: every worker must free what it caches.
    pub(crate) fn waiter_added(&self, was_empty: bool) {
        for worker in &self.workers.lock().list {
            if was_empty {
                worker.request(RELEASE_CACHES | WAITERS);
            } else {
                worker.flags.fetch_or(WAITERS, Ordering::SeqCst);
            }
        }
    }

    /// An allocation has stopped waiting: clears the workers' flags if it was the last one.
    pub(crate) fn waiter_removed(&self) {
        let workers = self.workers.lock();
        if self.waits.len() == 0 {
            for worker in &workers.list {
                worker.flags.fetch_and(!WAITERS, Ordering::Relaxed);
            }
        }
    }

    /// Wakes the first waiter of each queue, if any.
    pub(crate) fn wake_waiters(&self) {
        self.waits.wake();
    }

    /// Whether an allocation of this class must wait behind earlier ones.
    pub(crate) fn must_queue(&self, class: usize) -> bool {
        self.waits.has(crate::wait::BUDGET) || self.waits.has(1 + class)
    }

    /// Frees everything in the depots, for allocations that wait.
    pub(crate) fn empty_depots(&self, give: Give) {
        for zone in &self.zones {
            self.cut(zone, 0, give);
        }
    }

    /// Blocks until the advisor has nothing to do. For tests, benches and shutdown: not for a worker.
    pub fn settle(&self) {
        self.core.arena.settle();
    }

    /// Whether idle memory can be lent on this host; if not, it is returned.
    pub fn lending(&self) -> bool {
        self.core.arena.lock().lending()
    }

    /// The queue in which an allocation waits for the end of this shortage.
    pub(crate) fn wait_queue(shortage: Shortage, class: usize) -> usize {
        match shortage {
            Shortage::Zone if class < CLASSES => 1 + class,
            _ => crate::wait::BUDGET,
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.core.arena.stop(&self.core.control);
        for advisor in self.advisors.drain(..) {
            let _ = advisor.join();
        }
        if self.stats().blocks_out() != 0 {
            // A block was not freed: its memory must stay mapped.
            std::mem::forget(self.core.clone());
        }
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory").field("options", &self.options).finish_non_exhaustive()
    }
}
