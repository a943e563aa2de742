//! Proactive reclaim: returning memory to the host before the kernel has to search for it.
//!
//! Lent pages cost no I/O, but the kernel discards them one by one from its LRU lists, and in the context of
//! the process that allocates: several microseconds each, which doubles the cost of a page. Returned in
//! batches they cost a tenth of that. So while other processes take memory so fast that free memory will not
//! last for [`HORIZON`], the cache returns its part of what is wanted. Everything else stays lent, for the
//! kernel to discard if it must.
//!
//! Demand is measured by the fall of *available* memory. A growing page cache, lent pages and returned pages
//! do not change it, and the memory this process wires itself is known. Free memory alone would not do: the
//! page cache usually fills it, so memory would always seem short.
//!
//! The same holds in a control group with a limit: its free memory is the distance to the limit, where the
//! kernel begins to reclaim. The reclaimer has one instance for the host and one for each limited group, and
//! returns the largest of their results.
//!
//! A state machine without clock or I/O: the reclaimer samples memory and evicts.

use std::time::{Duration, Instant};

use ebb_mem::pressure::Room;

/// Free memory should last for this long at the current rate: a few samples, and the time to return as much.
const HORIZON: Duration = Duration::from_millis(15);
/// Interval of samples while memory falls, and while it does not.
const FAST: Duration = Duration::from_millis(5);
const NORMAL: Duration = Duration::from_millis(25);
const SLOW: Duration = Duration::from_millis(100);
/// Rate, in bytes per second, at which demand may suddenly begin.
const ONSET_RATE: u64 = 2 << 30;
/// The estimated rate halves in this time once demand slows down.
const HALF_LIFE: Duration = Duration::from_millis(50);
/// Falls of available memory below this are noise: the kernel sums its counters in batches per CPU. They
/// accumulate for [`SLOW`] at most. This is the minimum; [`Room::behind`] may be more.
const NOISE: u64 = 512 << 10;
/// Returning less than this is not worth a system call.
const LEAST: u64 = 256 << 10;

/// One sample, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MemorySample {
    pub(crate) room: Room,
    /// Memory of this process that is not lent, and so not part of available memory.
    pub(crate) wired: u64,
    /// What the cache could return.
    pub(crate) returnable: u64,
}

/// See the module.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ProactiveReclaim {
    /// Memory available to all processes, and when it was sampled.
    last: Option<(Instant, u64)>,
    /// When the rate was last updated.
    last_sample: Option<Instant>,
    /// Bytes per second that other processes take.
    rate: u64,
    /// Bytes already returned beyond the demand so far.
    returned_ahead: u64,
}

fn bytes_in(rate: u64, time: Duration) -> u64 {
    rate.saturating_mul(as_micros(time)) / 1_000_000
}

fn rate_of(bytes: u64, time: Duration) -> u64 {
    bytes.saturating_mul(1_000_000) / as_micros(time).max(1)
}

/// A rate after some time without demand.
fn decayed(mut rate: u64, time: Duration) -> u64 {
    let mut left = time;
    while left >= HALF_LIFE && rate > 0 {
        rate /= 2;
        left -= HALF_LIFE;
    }
    // Between two halvings, interpolate linearly.
    rate - share(rate / 2, as_micros(left.min(HALF_LIFE)), as_micros(HALF_LIFE))
}

fn as_micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// `part` of `whole` parts of `of`.
fn share(of: u64, part: u64, whole: u64) -> u64 {
    let product = u128::from(of) * u128::from(part.min(whole));
    u64::try_from(product / u128::from(whole.max(1))).unwrap_or(of)
}

impl ProactiveReclaim {
    /// Takes a sample. Returns the bytes to return now.
    pub(crate) fn update(&mut self, now: Instant, sample: &MemorySample) -> u64 {
        let all = sample.room.available.saturating_add(sample.wired);
        let Some((at, before)) = self.last else {
            *self = ProactiveReclaim { last: Some((now, all)), last_sample: Some(now), ..*self };
            return 0;
        };
        let since = now.saturating_duration_since(self.last_sample.unwrap_or(now));
        self.last_sample = Some(now);
        let passed = now.saturating_duration_since(at);
        let taken = before.saturating_sub(all);
        self.rate = decayed(self.rate, since);
        let noise = NOISE.max(sample.room.behind);
        let mut wanted = 0;
        if taken >= noise || all >= before || passed >= SLOW {
            self.last = Some((now, all));
            if taken >= noise && passed > Duration::ZERO {
                // Half of the excess only: one sample may have seen the demand of two intervals.
                let measured = rate_of(taken, passed);
                self.rate += measured.saturating_sub(self.rate) / 2;
                wanted = taken;
            }
        }
        let whole = sample.room.reclaimable().max(sample.returnable);
        self.returned_ahead =
            self.returned_ahead.saturating_sub(share(wanted, sample.returnable, whole));
        let margin = bytes_in(self.rate, HORIZON);
        let short = margin.saturating_sub(sample.room.headroom());
        self.returned_ahead = self.returned_ahead.min(margin);
        let part = share(margin, sample.returnable, whole).saturating_sub(self.returned_ahead);
        let give = part.min(short).min(sample.returnable);
        if give < LEAST.min(sample.returnable) {
            return 0;
        }
        self.returned_ahead += give;
        give
    }

    /// Available memory is changing through the cache's own lending and is not fully accounted for: the next
    /// sample is not compared with the last.
    pub(crate) fn skip(&mut self, now: Instant) -> Duration {
        let since = now.saturating_duration_since(self.last_sample.unwrap_or(now));
        *self = ProactiveReclaim {
            last: None,
            last_sample: Some(now),
            rate: decayed(self.rate, since),
            ..*self
        };
        FAST
    }

    /// When to sample again.
    pub(crate) fn interval(&self, sample: &MemorySample) -> Duration {
        let headroom = sample.room.headroom();
        if bytes_in(self.rate, HORIZON * 4) > headroom.max(NOISE) {
            return FAST;
        }
        Duration::from_millis(headroom.saturating_mul(1000) / ONSET_RATE / 2).clamp(NORMAL, SLOW)
    }
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A host with a cache, a page cache and a process that allocates.
    struct SimulatedHost {
        reclaim: ProactiveReclaim,
        now: Instant,
        sample: MemorySample,
        next: Duration,
        returned: u64,
        samples: u32,
        /// The least headroom there was.
        least: u64,
    }

    impl SimulatedHost {
        fn new(total: u64, headroom: u64, returnable: u64, page_cache: u64) -> SimulatedHost {
            let floor = total / 64;
            let free = headroom + floor;
            let available = headroom + returnable + page_cache;
            let room = Room { total, free, available, floor, behind: total >> 14 };
            let sample = MemorySample { room, wired: 0, returnable };
            let now = Instant::now();
            let (reclaim, next, samples) = (ProactiveReclaim::default(), Duration::ZERO, 0);
            SimulatedHost { reclaim, now, sample, next, returned: 0, samples, least: headroom }
        }

        /// One millisecond, in which `anonymous` bytes are allocated and the page cache grows by `cached`.
        fn step(&mut self, anonymous: u64, cached: u64) {
            let room = &mut self.sample.room;
            room.free = room.free.saturating_sub(anonymous + cached);
            room.available = room.available.saturating_sub(anonymous);
            // The kernel keeps its floor of free memory at the cost of everything it can reclaim.
            if room.free < room.floor {
                let lacks = room.floor - room.free;
                self.sample.returnable -= share(lacks, self.sample.returnable, room.reclaimable());
                room.free = room.floor;
            }
            self.least = self.least.min(room.headroom());
            let millisecond = Duration::from_millis(1);
            self.now += millisecond;
            self.next = self.next.saturating_sub(millisecond);
            if self.next.is_zero() {
                self.samples += 1;
                let give = self.reclaim.update(self.now, &self.sample);
                self.sample.returnable -= give;
                self.sample.room.free += give;
                self.returned += give;
                self.next = self.reclaim.interval(&self.sample);
            }
        }
    }

    #[test]
    fn a_process_that_allocates_finds_free_memory_and_the_remaining_cache_stays_lent() {
        for rate in [100, 500, 2000_u64] {
            let mut host = SimulatedHost::new(8192 * MIB, 200 * MIB, 4096 * MIB, 0);
            (0..500).for_each(|_| host.step(0, 0));
            let mut taken = 0;
            while taken < 1000 * MIB {
                host.step(rate * MIB / 1000, 0);
                taken += rate * MIB / 1000;
            }
            assert!(host.least > 0, "{rate} MiB/s: the kernel had to reclaim");
            (0..1000).for_each(|_| host.step(0, 0));
            // The demand beyond free memory, and the margin.
            let needed = 800 * MIB;
            let margin = bytes_in(rate * MIB, HORIZON * 2);
            assert!(
                host.returned >= needed && host.returned <= needed + margin,
                "{}",
                host.returned
            );
        }
    }

    #[test]
    fn nothing_is_returned_while_memory_is_plentiful_or_only_the_page_cache_grows() {
        let mut host = SimulatedHost::new(8192 * MIB, 4000 * MIB, 2000 * MIB, 0);
        (0..2000).for_each(|_| host.step(MIB, 0));
        assert_eq!(host.returned, 0);
        let mut host = SimulatedHost::new(8192 * MIB, 0, 2000 * MIB, 4000 * MIB);
        (0..2000).for_each(|_| host.step(0, MIB));
        assert_eq!(host.returned, 0);
    }

    #[test]
    fn the_cache_returns_only_its_part_beside_a_page_cache() {
        let mut host = SimulatedHost::new(8192 * MIB, 0, 1000 * MIB, 3000 * MIB);
        (0..500).for_each(|_| host.step(0, 0));
        (0..1000).for_each(|_| host.step(MIB, 0));
        let part = 1000 * MIB / 4;
        assert!(host.returned > part / 2 && host.returned < part * 3 / 2, "{}", host.returned);
    }

    #[test]
    fn an_idle_host_is_sampled_seldom() {
        let mut host = SimulatedHost::new(8192 * MIB, 0, 1000 * MIB, 3000 * MIB);
        (0..10_000).for_each(|n| host.step(if n % 10 == 0 { 4096 } else { 0 }, 0));
        assert!(host.samples <= 410 && host.returned == 0, "{} samples", host.samples);
        let mut host = SimulatedHost::new(8192 * MIB, 4000 * MIB, 1000 * MIB, 0);
        (0..10_000).for_each(|_| host.step(0, 0));
        assert!(host.samples <= 101, "{} samples", host.samples);
    }

    #[test]
    fn extreme_values_do_not_overflow() {
        let mut reclaim = ProactiveReclaim::default();
        let now = Instant::now();
        let most =
            Room { total: u64::MAX, available: u64::MAX, floor: u64::MAX, ..Room::default() };
        let none = Room { floor: u64::MAX, behind: u64::MAX, ..Room::default() };
        for (step, room) in [most, none, most, none].into_iter().enumerate() {
            let sample = MemorySample { room, wired: u64::MAX, returnable: u64::MAX };
            reclaim.update(now + Duration::from_millis(step as u64 / 2), &sample);
            reclaim.interval(&sample);
        }
    }
}
