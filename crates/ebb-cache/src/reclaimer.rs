//! The reclaimer: the one thread that lends, gives back and finds out, so that no I/O thread has to.
//!
//! Each turn, about ten a second while there is something to do: it answers pressure, lends buffers that
//! rest (one-pass data at once), evicts what is above the limit, and when the kernel says that it has
//! taken lent memory from anybody it looks what it was of ours, so that `bufspace` is right within a
//! second. While nothing is held it looks once a second. Between turns it looks at the free memory of the host and of
//! its control groups, and returns what others are about to need (`proactive_reclaim.rs`).

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, PoisonError, Weak};
use std::time::{Duration, Instant};

use ebb_mem::pressure::{Level, Room, Rooms, Roots};
use ebb_mem::{Policy, Residency, Worker};

use crate::cache::Cache;
use crate::pages::PAGE;
use crate::proactive_reclaim::{ProactiveReclaim, Seen};
use crate::shard::Batch;
use crate::volume::{SHARDS, VolumeCache};

/// Between two turns.
const TURN: Duration = Duration::from_millis(100);
/// The same while nothing is held.
const REST: Duration = Duration::from_secs(1);
/// Length of a tick.
const TICK_MILLIS: u64 = 250;
const TICKS_A_SECOND: u64 = 1000 / TICK_MILLIS;
/// A buffer is lent when it was not used for so many ticks. Measured: lending and reading back where
/// it lies costs less than a microsecond, so this need not be long; what is in constant use stays wired.
const IDLE_TICKS: u8 = 4;
/// Turns in which each wired buffer is looked at once.
const ROUND: usize = 8;
/// Least time between two scans for taken pages.
const SCAN_EVERY: Duration = Duration::from_millis(400);
/// Without a hint from the kernel a scan is made so often.
const SCAN_ANYWAY: Duration = Duration::from_secs(30);
/// A cache that holds less has nothing that others would miss.
const RECEDE_FROM: u64 = 1 << 20;
/// One part in so many goes in a turn while the kernel refuses address space.
const REFUSED_SHARE: u64 = 8;
/// Pages evicted between two looks at the orders.
const EVICT_AT_ONCE: u64 = 4096;

/// What the reclaimer is asked to do.
#[derive(Debug, Default)]
pub(crate) struct Orders {
    /// A level of pressure plus one; 0: none.
    level: AtomicU8,
    /// Memory was short: lend all that may be lent.
    short: AtomicBool,
    asleep: std::sync::Mutex<bool>,
    bell: Condvar,
}

impl Orders {
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

    /// Sleeps for `time`, or until there are orders: then it is true.
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

/// Pages of lent memory that the kernel has taken from anybody, since the machine started; `None` if it
/// does not say.
pub type Taken = Box<dyn FnMut() -> Option<u64> + Send>;

/// Has the memory now of the host and of each control group with a limit replace what is in the list; nothing
/// if neither says. False if these are not the same places as at the look before.
pub type Look = Box<dyn FnMut(&mut Vec<Room>) -> bool + Send>;

/// See the module. Belongs to one thread.
pub struct Reclaimer {
    worker: Worker,
    taken: Taken,
    seen: Option<u64>,
    scanned: Option<Instant>,
    ticks: u64,
    residency: Residency,
    look: Option<Look>,
    /// What was seen last, and one [`ProactiveReclaim`] for each of it.
    rooms: Vec<Room>,
    recede: Vec<ProactiveReclaim>,
    /// Some was lent since the last look at free memory.
    lending: bool,
    /// Refusals of the kernel that were answered.
    refusals: u64,
}

impl Reclaimer {
    /// A reclaimer for `cache`; `taken` tells how much the kernel has taken so far ([`pages_taken`]).
    #[must_use]
    pub fn new(cache: &Cache, taken: Taken) -> Reclaimer {
        let worker = cache.memory.worker(|| ());
        Reclaimer {
            worker,
            taken,
            seen: None,
            scanned: None,
            ticks: 0,
            residency: Residency::default(),
            look: None,
            rooms: Vec::new(),
            recede: Vec::new(),
            lending: false,
            refusals: 0,
        }
    }

    /// Has it return memory that others are about to need ([`Reclaimer::recede`]); `look` tells how much there
    /// is.
    #[must_use]
    pub fn watching(self, look: Look) -> Reclaimer {
        Reclaimer { look: Some(look), ..self }
    }

    /// Starts the thread. It ends when the cache has gone.
    pub(crate) fn spawn(cache: &Arc<Cache>) -> io::Result<()> {
        let weak = Arc::downgrade(cache);
        let builder = std::thread::Builder::new().name("ebb-reclaimer".to_owned());
        builder.stack_size(256 << 10).spawn(move || run(&weak))?;
        Ok(())
    }

    /// One turn. Returns whether there is anything left that needs another one soon.
    pub fn turn(&mut self, cache: &Cache, now: Instant) -> bool {
        let ticks = cache.millis(now) / TICK_MILLIS;
        let passed = ticks.saturating_sub(self.ticks);
        self.ticks = ticks;
        cache.tick.store(u8::try_from(ticks & 0xff).unwrap_or(0), Ordering::Relaxed);
        let held = cache.held.load(Ordering::Relaxed) * PAGE;
        cache.adjust(|growth| growth.pass(held, now));
        let volumes = cache.volumes();
        if passed > 0 {
            let passed = u32::try_from(passed).unwrap_or(u32::MAX);
            volumes.iter().for_each(|volume| volume.note_time(passed));
            if ticks / TICKS_A_SECOND != (ticks - u64::from(passed)) / TICKS_A_SECOND {
                volumes.iter().for_each(|volume| volume.age());
            }
            let active = volumes.iter().filter(|volume| volume.is_active()).count();
            cache.active.store(u32::try_from(active).unwrap_or(u32::MAX).max(1), Ordering::Relaxed);
        }
        let level = cache.orders.level.swap(0, Ordering::Relaxed);
        // Requests wait at the ceiling, too, below which lent pages do not count.
        let short = cache.orders.short.swap(false, Ordering::Relaxed) || cache.memory.has_waiters();
        let all = level > Level::L1.number() || short;
        if cache.memory.lends() {
            self.lend(cache, &volumes, all);
        }
        let refused = self.answer_refusals(cache, now);
        self.shrink(cache, refused || level > Level::L2.number());
        self.scan(cache, &volumes, now);
        self.worker.poll(now);
        held > 0 || cache.growth.lock().is_held_back()
    }

    /// Looks at the memory of the host and of its control groups, and returns of the cache what others are about
    /// to need. Returns when to look again; `None`: not before the next turn.
    pub fn recede(&mut self, cache: &Cache, now: Instant) -> Option<Duration> {
        let keeps = matches!(cache.memory.policy(), Policy::Told | Policy::Static);
        let ours = if keeps { 0 } else { cache.spare() };
        let Some(look) = self.look.as_mut().filter(|_| ours >= RECEDE_FROM) else {
            // Nothing could be returned: what was seen is of no use when there is something again.
            self.recede.clear();
            return None;
        };
        let arena = cache.memory.arena_stats();
        // What was just lent is neither wired nor, yet, available.
        if std::mem::take(&mut self.lending) {
            self.lending = arena.advising > 0;
            return self.recede.iter_mut().map(|recede| recede.skip(now)).min();
        }
        if !look(&mut self.rooms) {
            self.recede.clear();
        }
        self.recede.resize(self.rooms.len(), ProactiveReclaim::default());
        let wired = u64::try_from(arena.wired).unwrap_or(u64::MAX);
        let (mut left, mut soon) = (0, None::<Duration>);
        for (recede, room) in self.recede.iter_mut().zip(&self.rooms) {
            let seen = Seen { room: *room, wired, ours };
            left = left.max(recede.look(now, &seen) / PAGE);
            let interval = recede.interval(&seen);
            soon = Some(soon.map_or(interval, |soon| soon.min(interval)));
        }
        if left > 0 {
            let mut spent = Vec::new();
            while left > 0 {
                let most = cache.most_above(cache.fair_share(), &spent);
                let most = most.or_else(|| cache.most_above(0, &spent));
                let Some(volume) = most else { break };
                let got = volume.evict(&self.worker, left.min(EVICT_AT_ONCE), true);
                cache.receded.fetch_add(got, Ordering::Relaxed);
                left = left.saturating_sub(got);
                if got == 0 {
                    // All of it is dirty, or in use: others may have some.
                    spent.push(Arc::as_ptr(&volume));
                }
            }
            let held = cache.held.load(Ordering::Relaxed) * PAGE;
            cache.adjust(|growth| growth.recede(held, now));
        }
        soon
    }

    /// Lends what rests; with `all` everything that may be.
    fn lend(&mut self, cache: &Cache, volumes: &[Arc<VolumeCache>], all: bool) {
        let tick = cache.tick.load(Ordering::Relaxed);
        for volume in volumes {
            for number in 0..SHARDS {
                let wired = volume.lock(number).wired_buffers();
                let mut left = if all { wired } else { wired.div_ceil(ROUND).max(64).min(wired) };
                while left > 0 {
                    let lent = volume.lock(number).lend(&self.worker, tick, IDLE_TICKS, all, left);
                    if lent.looked == 0 {
                        break;
                    }
                    self.lending |= lent.pages > 0;
                    left = left.saturating_sub(lent.looked);
                }
            }
        }
    }

    /// Where the kernel has no address space for the memory any more (a limit on what it promises), what is
    /// lent is no room for requests: some of the cache must go. True if it was refused since the last turn.
    fn answer_refusals(&mut self, cache: &Cache, now: Instant) -> bool {
        let refusals = cache.memory.refusals();
        let refused = std::mem::replace(&mut self.refusals, refusals) != refusals;
        if refused {
            let held = cache.held.load(Ordering::Relaxed) * PAGE;
            cache.adjust(|growth| growth.recede(held - held / REFUSED_SHARE, now));
        }
        refused
    }

    /// Evicts what is above the limit, from those first that have more than their share.
    fn shrink(&mut self, cache: &Cache, now: bool) {
        let mut spent = Vec::new();
        loop {
            let excess = cache.excess();
            if excess == 0 {
                return;
            }
            let Some(volume) = cache.most_above(0, &spent) else { return };
            if volume.evict(&self.worker, excess.min(EVICT_AT_ONCE), now) == 0 {
                spent.push(Arc::as_ptr(&volume));
            }
        }
    }

    /// Looks for taken pages, if the kernel says it has taken some.
    fn scan(&mut self, cache: &Cache, volumes: &[Arc<VolumeCache>], now: Instant) {
        let since = self.scanned.map(|at| now.saturating_duration_since(at));
        if since.is_some_and(|since| since < SCAN_EVERY) {
            return;
        }
        let taken = (self.taken)();
        let moved = taken.is_none() || taken != self.seen;
        if self.scanned.is_some() && !moved && since.is_some_and(|since| since < SCAN_ANYWAY) {
            return;
        }
        self.scanned = Some(now);
        self.seen = taken;
        cache.scans.fetch_add(1, Ordering::Relaxed);
        self.residency.begin();
        for volume in volumes {
            for number in 0..SHARDS {
                if volume.lock(number).lent_pages() == 0 {
                    continue;
                }
                loop {
                    let mut batch = Batch::new();
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
    let mut reclaimer = Reclaimer::new(&first, Box::new(pages_taken))
        .watching(Box::new(move |list| rooms.now(list)));
    drop(first);
    let (mut called, mut next) = (true, ebb_mem::clock::now());
    loop {
        let Some(cache) = cache.upgrade() else { return };
        let mut now = ebb_mem::clock::now();
        if called || now >= next {
            let busy = reclaimer.turn(&cache, now);
            next = now + if busy { TURN } else { REST };
            now = ebb_mem::clock::now();
        }
        let time = next.saturating_duration_since(now);
        let time = reclaimer.recede(&cache, now).map_or(time, |soon| soon.min(time));
        called = cache.orders.sleep(time);
    }
}

/// Pages of lent memory the kernel has taken from anybody (`pglazyfreed` of `/proc/vmstat`).
#[must_use]
pub fn pages_taken() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/vmstat").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("pglazyfreed "))?;
    line.trim().parse().ok()
}
