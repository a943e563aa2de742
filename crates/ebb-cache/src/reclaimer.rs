//! The reclaimer thread: offers idle buffers to the advisor of `ebb-mem`, which lends them, evicts, and detects
//! discarded pages, so that no I/O thread has to.
//!
//! Each iteration, about ten per second while there is work, it handles pressure, offers idle buffers
//! (one-pass data at once) and evicts what is above the limit. When the kernel's counter of discarded
//! `MADV_FREE` pages has moved, it scans for pages of the cache among them, so that `bufspace` is right
//! within a second. While nothing is held it runs once a second, and does not read the counter. Between iterations it samples the free
//! memory of the host and of its control groups for proactive reclaim (`proactive_reclaim.rs`).

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, PoisonError, Weak};
use std::time::{Duration, Instant};

use ebb_mem::pressure::{Level, Room, Rooms, Roots};
use ebb_mem::{IdlePolicy, Residency, WorkerMemory};

use crate::cache::Cache;
use crate::pages::PAGE;
use crate::proactive_reclaim::{MemorySample, ProactiveReclaim};
use crate::shard::{FreeBatch, SHARDS};
use crate::volume::VolumeCache;

/// Time between two iterations.
const INTERVAL: Duration = Duration::from_millis(100);
/// The same while nothing is held.
const IDLE_INTERVAL: Duration = Duration::from_secs(1);
/// Length of a tick.
const TICK_MILLIS: u64 = 250;
const TICKS_A_SECOND: u64 = 1000 / TICK_MILLIS;
/// A buffer is lent when it was not used for this many ticks. Lending a buffer and reading it in place costs
/// less than a microsecond, so this may be short; data in constant use stays wired.
const IDLE_TICKS: u8 = 4;
/// Iterations in which each wired buffer is checked once.
const ROUND: usize = 8;
/// Minimum time between two scans for discarded pages.
const SCAN_EVERY: Duration = Duration::from_millis(400);
/// Interval of scans when the kernel gives no counter, or the counter does not move.
const SCAN_ANYWAY: Duration = Duration::from_secs(30);
/// Proactive reclaim ignores a cache smaller than this.
const RECLAIM_FROM: u64 = 1 << 20;
/// One part in this many is evicted per iteration while the kernel refuses address space.
const REFUSED_SHARE: u64 = 8;
/// Pages evicted between two checks for new requests.
const EVICT_AT_ONCE: u64 = 4096;

/// What the reclaimer is asked to do.
#[derive(Debug, Default)]
pub(crate) struct ReclaimRequests {
    /// A pressure level plus one; 0: none.
    level: AtomicU8,
    /// Memory was short: lend everything that may be lent.
    short: AtomicBool,
    asleep: std::sync::Mutex<bool>,
    bell: Condvar,
}

impl ReclaimRequests {
    pub(crate) fn pressure(&self, level: Level) {
        self.level.fetch_max(level.number() + 1, Ordering::Relaxed);
        self.wake();
    }

    pub(crate) fn short(&self) {
        if !self.short.swap(true, Ordering::Relaxed) {
            self.wake();
        }
    }

    /// Ends the reclaimer's sleep.
    pub(crate) fn wake(&self) {
        *self.asleep.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.bell.notify_one();
    }

    /// Sleeps for `time`, or until there are requests: then it returns true.
    fn sleep(&self, time: Duration) -> bool {
        let mut asleep = self.asleep.lock().unwrap_or_else(PoisonError::into_inner);
        let mut called = true;
        if self.level.load(Ordering::Relaxed) == 0 && !self.short.load(Ordering::Relaxed) {
            *asleep = true;
            let result = self.bell.wait_timeout_while(asleep, time, |asleep| *asleep);
            asleep = result.unwrap_or_else(PoisonError::into_inner).0;
            called = !*asleep;
        }
        *asleep = false;
        called
    }
}

/// Pages marked `MADV_FREE` that the kernel has discarded since boot, of all processes; `None` if unknown.
pub type DiscardCounter = Box<dyn FnMut() -> Option<u64> + Send>;

/// Replaces the list with the current memory figures of the host and of each control group with a limit;
/// empties it if neither is known. Returns false if the set of groups differs from the previous call.
pub type MemoryProbe = Box<dyn FnMut(&mut Vec<Room>) -> bool + Send>;

/// See the module. Belongs to one thread.
pub struct Reclaimer {
    worker: WorkerMemory,
    discard_counter: DiscardCounter,
    last_discarded: Option<u64>,
    last_scan: Option<Instant>,
    ticks: u64,
    residency: Residency,
    memory_probe: Option<MemoryProbe>,
    /// The last memory figures, and one [`ProactiveReclaim`] for each.
    rooms: Vec<Room>,
    instances: Vec<ProactiveReclaim>,
    /// Some was lent since free memory was last sampled.
    lending: bool,
    /// Refusals of address space handled so far.
    refusals: u64,
}

impl Reclaimer {
    /// A reclaimer for `cache`; `discard_counter` counts the pages the kernel has discarded
    /// ([`pages_discarded_by_kernel`]).
    #[must_use]
    pub fn new(cache: &Cache, discard_counter: DiscardCounter) -> Reclaimer {
        let worker = cache.memory.worker(|| ());
        Reclaimer {
            worker,
            discard_counter,
            last_discarded: None,
            last_scan: None,
            ticks: 0,
            residency: Residency::default(),
            memory_probe: None,
            rooms: Vec::new(),
            instances: Vec::new(),
            lending: false,
            refusals: 0,
        }
    }

    /// Enables proactive reclaim ([`Reclaimer::proactive_reclaim`]); `memory_probe` gives the memory figures.
    #[must_use]
    pub fn with_memory_probe(self, memory_probe: MemoryProbe) -> Reclaimer {
        Reclaimer { memory_probe: Some(memory_probe), ..self }
    }

    /// Starts the thread. It ends when the cache is dropped.
    pub(crate) fn spawn(cache: &Arc<Cache>) -> io::Result<()> {
        let weak = Arc::downgrade(cache);
        let builder = std::thread::Builder::new().name("ebb-reclaimer".to_owned());
        builder.stack_size(256 << 10).spawn(move || run(&weak))?;
        Ok(())
    }

    /// One iteration. Returns whether there is work for another one soon.
    pub fn run_once(&mut self, cache: &Cache, now: Instant) -> bool {
        let ticks = cache.millis(now) / TICK_MILLIS;
        let passed = ticks.saturating_sub(self.ticks);
        self.ticks = ticks;
        cache.tick.store(u8::try_from(ticks & 0xff).unwrap_or(0), Ordering::Relaxed);
        let held = cache.held.load(Ordering::Relaxed) * PAGE;
        cache.adjust(|size_limit| size_limit.advance(held, now));
        let volumes = cache.volumes();
        if passed > 0 {
            let passed = u32::try_from(passed).unwrap_or(u32::MAX);
            volumes.iter().for_each(|volume| volume.advance_time(passed));
            if ticks / TICKS_A_SECOND != (ticks - u64::from(passed)) / TICKS_A_SECOND {
                volumes.iter().for_each(|volume| volume.age());
            }
            cache.divide_shares(&volumes);
        }
        let level = cache.reclaim_requests.level.swap(0, Ordering::Relaxed);
        // Requests also wait at the ceiling, below which lent pages do not count.
        let short = cache.reclaim_requests.short.swap(false, Ordering::Relaxed)
            || cache.memory.has_waiters();
        let all = level > Level::L1.number() || short;
        if cache.memory.lends() {
            self.lend(cache, &volumes, all);
        }
        let refused = self.handle_refusals(cache, now);
        self.shrink(cache, refused || level > Level::L2.number());
        self.scan(cache, &volumes, now);
        self.worker.poll(now);
        held > 0 || cache.size_limit.lock().is_restricted()
    }

    /// Samples the memory of the host and of its control groups, and evicts cached data that other processes
    /// are about to need. Returns when to sample again; `None`: not before the next iteration.
    pub fn proactive_reclaim(&mut self, cache: &Cache, now: Instant) -> Option<Duration> {
        let keeps = matches!(cache.memory.policy(), IdlePolicy::UntilPressure | IdlePolicy::Static);
        let returnable = if keeps { 0 } else { cache.spare() };
        let Some(memory_probe) = self.memory_probe.as_mut().filter(|_| returnable >= RECLAIM_FROM)
        else {
            // Nothing could be returned; old figures are useless once there is something again.
            self.instances.clear();
            return None;
        };
        let arena = cache.memory.arena_stats();
        // Pages that were just lent are no longer wired and not yet counted as available.
        if std::mem::take(&mut self.lending) {
            self.lending = arena.advising > 0;
            return self.instances.iter_mut().map(|instance| instance.skip(now)).min();
        }
        if !memory_probe(&mut self.rooms) {
            self.instances.clear();
        }
        self.instances.resize(self.rooms.len(), ProactiveReclaim::default());
        let wired = u64::try_from(arena.wired).unwrap_or(u64::MAX);
        let (mut left, mut soon) = (0, None::<Duration>);
        for (instance, room) in self.instances.iter_mut().zip(&self.rooms) {
            let sample = MemorySample { room: *room, wired, returnable };
            left = left.max(instance.update(now, &sample) / PAGE);
            let interval = instance.interval(&sample);
            soon = Some(soon.map_or(interval, |soon| soon.min(interval)));
        }
        if left > 0 {
            let mut spent = Vec::new();
            while left > 0 {
                let most = cache.most_above_share(cache.fair_share(), &spent);
                let most = most.or_else(|| cache.most_above_share(0, &spent));
                let Some(volume) = most else { break };
                let got = volume.evict(&self.worker, left.min(EVICT_AT_ONCE), true);
                cache.proactively_reclaimed.fetch_add(got, Ordering::Relaxed);
                left = left.saturating_sub(got);
                if got == 0 {
                    // All of it is dirty or in use: other volumes may have some.
                    spent.push(Arc::as_ptr(&volume));
                }
            }
            let held = cache.held.load(Ordering::Relaxed) * PAGE;
            cache.adjust(|size_limit| size_limit.shrink_to(held, now));
        }
        soon
    }

    /// Lends idle buffers; with `all`, everything that may be lent.
    fn lend(&mut self, cache: &Cache, volumes: &[Arc<VolumeCache>], all: bool) {
        let tick = cache.tick.load(Ordering::Relaxed);
        for volume in volumes {
            for number in 0..SHARDS {
                let wired = volume.lock(number).wired_buffers();
                let mut left = if all { wired } else { wired.div_ceil(ROUND).max(64).min(wired) };
                while left > 0 {
                    let lent = volume.lock(number).lend(&self.worker, tick, IDLE_TICKS, all, left);
                    if lent.checked == 0 {
                        break;
                    }
                    self.lending |= lent.pages > 0;
                    left = left.saturating_sub(lent.checked);
                }
            }
        }
    }

    /// When the kernel refuses address space (a limit on committed memory), lent pages are no room for
    /// requests, and part of the cache must be freed. True if memory was refused since the last iteration.
    fn handle_refusals(&mut self, cache: &Cache, now: Instant) -> bool {
        let refusals = cache.memory.refusals();
        let refused = std::mem::replace(&mut self.refusals, refusals) != refusals;
        if refused {
            let held = cache.held.load(Ordering::Relaxed) * PAGE;
            cache.adjust(|size_limit| size_limit.shrink_to(held - held / REFUSED_SHARE, now));
        }
        refused
    }

    /// Evicts what is above the limit, first from volumes above their share.
    fn shrink(&mut self, cache: &Cache, now: bool) {
        let mut spent = Vec::new();
        loop {
            let excess = cache.excess();
            if excess == 0 {
                return;
            }
            let Some(volume) = cache.most_above_share(0, &spent) else { return };
            if volume.evict(&self.worker, excess.min(EVICT_AT_ONCE), now) == 0 {
                spent.push(Arc::as_ptr(&volume));
            }
        }
    }

    /// Scans for discarded pages if the kernel's counter has moved.
    fn scan(&mut self, cache: &Cache, volumes: &[Arc<VolumeCache>], now: Instant) {
        let since = self.last_scan.map(|at| now.saturating_duration_since(at));
        if cache.held.load(Ordering::Relaxed) == 0 {
            return;
        }
        if since.is_some_and(|since| since < SCAN_EVERY) {
            return;
        }
        let discarded = (self.discard_counter)();
        let moved = discarded.is_none() || discarded != self.last_discarded;
        if self.last_scan.is_some() && !moved && since.is_some_and(|since| since < SCAN_ANYWAY) {
            return;
        }
        self.last_scan = Some(now);
        self.last_discarded = discarded;
        cache.scans.fetch_add(1, Ordering::Relaxed);
        self.residency.begin();
        for volume in volumes {
            for number in 0..SHARDS {
                if volume.lock(number).lent_pages() == 0 {
                    continue;
                }
                loop {
                    let mut batch = FreeBatch::new();
                    let scanned =
                        volume.lock(number).scan(&cache.memory, &mut self.residency, &mut batch);
                    batch.free(&self.worker, false);
                    if scanned.ended {
                        break;
                    }
                }
            }
        }
    }
}

impl std::fmt::Debug for Reclaimer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reclaimer").field("ticks", &self.ticks).finish_non_exhaustive()
    }
}

fn run(cache: &Weak<Cache>) {
    let Some(first) = cache.upgrade() else { return };
    let mut rooms = Rooms::open(&Roots::default());
    let mut reclaimer = Reclaimer::new(&first, Box::new(pages_discarded_by_kernel))
        .with_memory_probe(Box::new(move |list| rooms.now(list)));
    drop(first);
    let (mut called, mut next) = (true, ebb_mem::clock::now());
    loop {
        let Some(cache) = cache.upgrade() else { return };
        let mut now = ebb_mem::clock::now();
        if called || now >= next {
            let busy = reclaimer.run_once(&cache, now);
            next = now + if busy { INTERVAL } else { IDLE_INTERVAL };
            now = ebb_mem::clock::now();
        }
        let time = next.saturating_duration_since(now);
        let time = reclaimer.proactive_reclaim(&cache, now).map_or(time, |soon| soon.min(time));
        called = cache.reclaim_requests.sleep(time);
    }
}

/// Pages marked `MADV_FREE` that the kernel has discarded, of all processes (`pglazyfreed` of
/// `/proc/vmstat`).
#[must_use]
pub fn pages_discarded_by_kernel() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/vmstat").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("pglazyfreed "))?;
    line.trim().parse().ok()
}
