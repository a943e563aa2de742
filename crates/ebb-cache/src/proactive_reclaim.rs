//! Receding ahead of the kernel: memory that others are about to need is returned before they need it.
//!
//! Lent pages cost nobody I/O, but the kernel takes them one by one out of its lists, and on behalf of
//! whoever allocates: several microseconds for each, which doubles what a page costs. Returned in
//! batches they cost a tenth. So while somebody takes memory, so fast that what is free will not last for
//! [`HORIZON`], our part of what is wanted is returned; all else stays lent, for the kernel to take
//! if it must. Answers seed `002` (the neighbour does not feel the cache) and design section 3.
//!
//! What somebody takes shows in what is *available*: page cache that grows, lent pages and returned ones
//! change nothing in that, and what we wire ourselves is known. Where the page cache fills all that is free, as
//! it mostly does, free memory alone would say that memory is short for ever.
//!
//! The same holds in a control group that has a limit, for its other processes: what it may use more is
//! its free memory, and the kernel begins to reclaim at the limit. The reclaimer has one of these for the host
//! and one for each group with a limit that it is in; what is returned is what the one that wants most asks for.
//!
//! A state machine without clock or I/O: the reclaimer looks and returns.

use std::time::{Duration, Instant};

use ebb_mem::pressure::Room;

/// Free memory shall last for so long at the rate at which it goes: some looks, and the time in which
/// as much is returned.
const HORIZON: Duration = Duration::from_millis(15);
/// Between two looks while memory goes, and while it rests.
const FAST: Duration = Duration::from_millis(5);
const REST: Duration = Duration::from_millis(25);
const SLOW: Duration = Duration::from_millis(100);
/// Bytes per second at which memory may suddenly begin to go.
const SURPRISE: u64 = 2 << 30;
/// The rate that is reckoned with halves in this time, once memory goes less fast.
const HALF_LIFE: Duration = Duration::from_millis(50);
/// Falls of what is available that say nothing: the kernel sums up in batches, for each processor. They add up
/// for [`SLOW`] at most. Bytes at the least; [`Room::behind`] may be more.
const NOISE: u64 = 512 << 10;
/// Less is not worth a call.
const LEAST: u64 = 256 << 10;

/// What is known at a look, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) room: Room,
    /// Memory of ours that is not lent: it is no part of what is available.
    pub(crate) wired: u64,
    /// What the cache could return.
    pub(crate) ours: u64,
}

/// See the module.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ProactiveReclaim {
    /// What there was for all, and when.
    last: Option<(Instant, u64)>,
    /// When the rate was last reckoned.
    looked: Option<Instant>,
    /// Bytes per second that others take.
    rate: u64,
    /// Of what was returned, what was not yet wanted.
    given: u64,
}

fn bytes_in(rate: u64, time: Duration) -> u64 {
    rate.saturating_mul(as_micros(time)) / 1_000_000
}

fn rate_of(bytes: u64, time: Duration) -> u64 {
    bytes.saturating_mul(1_000_000) / as_micros(time).max(1)
}

/// A rate after some time in which nothing was added to it.
fn decayed(mut rate: u64, time: Duration) -> u64 {
    let mut left = time;
    while left >= HALF_LIFE && rate > 0 {
        rate /= 2;
        left -= HALF_LIFE;
    }
    // Between two halvings a straight line will do.
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
    /// A look. The bytes to return now.
    pub(crate) fn look(&mut self, now: Instant, seen: &Seen) -> u64 {
        let all = seen.room.available.saturating_add(seen.wired);
        let Some((at, before)) = self.last else {
            *self = ProactiveReclaim { last: Some((now, all)), looked: Some(now), ..*self };
            return 0;
        };
        let since = now.saturating_duration_since(self.looked.unwrap_or(now));
        self.looked = Some(now);
        let passed = now.saturating_duration_since(at);
        let taken = before.saturating_sub(all);
        self.rate = decayed(self.rate, since);
        let noise = NOISE.max(seen.room.behind);
        let mut wanted = 0;
        if taken >= noise || all >= before || passed >= SLOW {
            self.last = Some((now, all));
            if taken >= noise && passed > Duration::ZERO {
                // Half of what it is more: a single look may have seen two looks' worth.
                let measured = rate_of(taken, passed);
                self.rate += measured.saturating_sub(self.rate) / 2;
                wanted = taken;
            }
        }
        let whole = seen.room.reclaimable().max(seen.ours);
        self.given = self.given.saturating_sub(share(wanted, seen.ours, whole));
        let margin = bytes_in(self.rate, HORIZON);
        let short = margin.saturating_sub(seen.room.headroom());
        self.given = self.given.min(margin);
        let part = share(margin, seen.ours, whole).saturating_sub(self.given);
        let give = part.min(short).min(seen.ours);
        if give < LEAST.min(seen.ours) {
            return 0;
        }
        self.given += give;
        give
    }

    /// What there is changed by our own doing, and is not all accounted for yet: the next look compares with
    /// nothing.
    pub(crate) fn skip(&mut self, now: Instant) -> Duration {
        let since = now.saturating_duration_since(self.looked.unwrap_or(now));
        *self = ProactiveReclaim {
            last: None,
            looked: Some(now),
            rate: decayed(self.rate, since),
            ..*self
        };
        FAST
    }

    /// When to look again.
    pub(crate) fn interval(&self, seen: &Seen) -> Duration {
        let headroom = seen.room.headroom();
        if bytes_in(self.rate, HORIZON * 4) > headroom.max(NOISE) {
            return FAST;
        }
        Duration::from_millis(headroom.saturating_mul(1000) / SURPRISE / 2).clamp(REST, SLOW)
    }
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A host with a cache, a page cache and somebody who allocates.
    struct Host {
        recede: ProactiveReclaim,
        now: Instant,
        seen: Seen,
        next: Duration,
        returned: u64,
        looks: u32,
        /// The least headroom there was.
        least: u64,
    }

    impl Host {
        fn new(total: u64, headroom: u64, ours: u64, page_cache: u64) -> Host {
            let floor = total / 64;
            let free = headroom + floor;
            let available = headroom + ours + page_cache;
            let room = Room { total, free, available, floor, behind: total >> 14 };
            let seen = Seen { room, wired: 0, ours };
            let now = Instant::now();
            let (recede, next, looks) = (ProactiveReclaim::default(), Duration::ZERO, 0);
            Host { recede, now, seen, next, returned: 0, looks, least: headroom }
        }

        /// A millisecond, in which `anonymous` bytes are allocated and `cached` more go to the page cache.
        fn step(&mut self, anonymous: u64, cached: u64) {
            let room = &mut self.seen.room;
            room.free = room.free.saturating_sub(anonymous + cached);
            room.available = room.available.saturating_sub(anonymous);
            // The kernel keeps free memory about its floor at the cost of all it can take.
            if room.free < room.floor {
                let lacks = room.floor - room.free;
                self.seen.ours -= share(lacks, self.seen.ours, room.reclaimable());
                room.free = room.floor;
            }
            self.least = self.least.min(room.headroom());
            let millisecond = Duration::from_millis(1);
            self.now += millisecond;
            self.next = self.next.saturating_sub(millisecond);
            if self.next.is_zero() {
                self.looks += 1;
                let give = self.recede.look(self.now, &self.seen);
                self.seen.ours -= give;
                self.seen.room.free += give;
                self.returned += give;
                self.next = self.recede.interval(&self.seen);
            }
        }
    }

    #[test]
    fn who_allocates_finds_free_memory_and_the_rest_stays_lent() {
        for rate in [100, 500, 2000_u64] {
            let mut host = Host::new(8192 * MIB, 200 * MIB, 4096 * MIB, 0);
            (0..500).for_each(|_| host.step(0, 0));
            let mut taken = 0;
            while taken < 1000 * MIB {
                host.step(rate * MIB / 1000, 0);
                taken += rate * MIB / 1000;
            }
            assert!(host.least > 0, "{rate} MiB/s: the kernel had to look");
            (0..1000).for_each(|_| host.step(0, 0));
            // What was wanted and not free, and the margin.
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
    fn nothing_is_returned_while_there_is_plenty_or_only_page_cache_grows() {
        let mut host = Host::new(8192 * MIB, 4000 * MIB, 2000 * MIB, 0);
        (0..2000).for_each(|_| host.step(MIB, 0));
        assert_eq!(host.returned, 0);
        let mut host = Host::new(8192 * MIB, 0, 2000 * MIB, 4000 * MIB);
        (0..2000).for_each(|_| host.step(0, MIB));
        assert_eq!(host.returned, 0);
    }

    #[test]
    fn the_page_cache_gives_its_part() {
        let mut host = Host::new(8192 * MIB, 0, 1000 * MIB, 3000 * MIB);
        (0..500).for_each(|_| host.step(0, 0));
        (0..1000).for_each(|_| host.step(MIB, 0));
        let part = 1000 * MIB / 4;
        assert!(host.returned > part / 2 && host.returned < part * 3 / 2, "{}", host.returned);
    }

    #[test]
    fn a_host_at_rest_is_looked_at_seldom() {
        let mut host = Host::new(8192 * MIB, 0, 1000 * MIB, 3000 * MIB);
        (0..10_000).for_each(|n| host.step(if n % 10 == 0 { 4096 } else { 0 }, 0));
        assert!(host.looks <= 410 && host.returned == 0, "{} looks", host.looks);
        let mut host = Host::new(8192 * MIB, 4000 * MIB, 1000 * MIB, 0);
        (0..10_000).for_each(|_| host.step(0, 0));
        assert!(host.looks <= 101, "{} looks", host.looks);
    }

    #[test]
    fn values_of_any_size_are_borne() {
        let mut recede = ProactiveReclaim::default();
        let now = Instant::now();
        let most =
            Room { total: u64::MAX, available: u64::MAX, floor: u64::MAX, ..Room::default() };
        let none = Room { floor: u64::MAX, behind: u64::MAX, ..Room::default() };
        for (step, room) in [most, none, most, none].into_iter().enumerate() {
            let seen = Seen { room, wired: u64::MAX, ours: u64::MAX };
            recede.look(now + Duration::from_millis(step as u64 / 2), &seen);
            recede.interval(&seen);
        }
    }
}
