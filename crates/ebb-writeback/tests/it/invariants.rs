//! T10: invariants. Random devices, volumes, writes, completions, failures, limits and pressure, checked by
//! an oracle that counts bytes.

use ebb_writeback::{
    Bdi, BdiOptions, MILLISECOND, Nanos, PressureLevel, SECOND, Verdict, VolumeId, WHOLE,
    WriteOutcome, Writeback, WritebackOptions,
};
use proptest::prelude::*;
use std::collections::VecDeque;

const MB: u64 = 1 << 20;

/// One step; numbers are taken modulo the number of devices or volumes.
#[derive(Debug, Clone)]
enum Step {
    Write { volume: usize, bytes: u64 },
    Send { device: usize },
    Done { device: usize, fails: bool },
    Drop { volume: usize, bytes: u64 },
    Limit { bytes: u64 },
    Pressure { level: usize },
    Options { device: usize, min_ratio: u32, max_ratio: u32, max_bytes: u64 },
    Wait { time: Nanos },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (any::<usize>(), 1..2 * MB).prop_map(|(volume, bytes)| Step::Write { volume, bytes }),
        6 => any::<usize>().prop_map(|device| Step::Send { device }),
        6 => (any::<usize>(), prop::bool::weighted(0.1))
            .prop_map(|(device, fails)| Step::Done { device, fails }),
        1 => (any::<usize>(), 1..2 * MB).prop_map(|(volume, bytes)| Step::Drop { volume, bytes }),
        1 => (0..400 * MB).prop_map(|bytes| Step::Limit { bytes }),
        1 => (0..4_usize).prop_map(|level| Step::Pressure { level }),
        1 => (any::<usize>(), 0..300_000_u32, 1..=WHOLE, any::<u64>()).prop_map(
            |(device, min_ratio, max_ratio, max_bytes)| Step::Options {
                device, min_ratio, max_ratio, max_bytes
            }
        ),
        4 => (0..200 * MILLISECOND).prop_map(|time| Step::Wait { time }),
    ]
}

struct Device {
    bdi: Bdi,
    volume: VolumeId,
    /// What the oracle counts.
    dirty: u64,
    in_flight: Vec<(u64, Nanos)>,
}

impl Device {
    fn held(&self) -> u64 {
        self.dirty + self.in_flight.iter().map(|(bytes, _)| bytes).sum::<u64>()
    }
}

struct World {
    now: Nanos,
    writeback: Writeback,
    devices: Vec<Device>,
}

impl World {
    fn new(count: usize, rates: &[Option<u64>]) -> World {
        let options = WritebackOptions { bdis: count, ..WritebackOptions::new(100 * MB) };
        let mut writeback = Writeback::new(&options).unwrap();
        let mut devices = Vec::new();
        for index in 0..count {
            let options = BdiOptions { rate: rates[index % rates.len()], ..BdiOptions::default() };
            let mut bdi = writeback.add_bdi(options, 0).unwrap();
            let volume = bdi.add_volume(1).unwrap();
            devices.push(Device { bdi, volume, dirty: 0, in_flight: Vec::new() });
        }
        assert!(writeback.add_bdi(BdiOptions::default(), 0).is_err());
        World { now: 1, writeback, devices }
    }

    /// The results of all devices, to compare different orders of them.
    fn step(&mut self, step: &Step) -> Option<Verdict> {
        let (now, count) = (self.now, self.devices.len());
        match *step {
            Step::Write { volume, bytes } => {
                let device = &mut self.devices[volume % count];
                let verdict = device.bdi.reserve(device.volume, bytes, now, now);
                match verdict {
                    Verdict::Go => device.dirty += bytes,
                    Verdict::PauseUntil(until) => assert!(until > now),
                    Verdict::Split(most) => assert!(most > 0 && most < bytes),
                }
                return Some(verdict);
            }
            Step::Send { device } => {
                let device = &mut self.devices[device % count];
                let plan = device.bdi.plan(now);
                assert!(plan.chunk > 0 && plan.in_flight >= plan.chunk);
                let bytes = plan.chunk.min(device.dirty);
                device.bdi.on_writeback(device.volume, bytes, now);
                device.dirty -= bytes;
                if bytes > 0 {
                    device.in_flight.push((bytes, now));
                }
            }
            Step::Done { device, fails } => {
                let device = &mut self.devices[device % count];
                if let Some((bytes, sent)) = device.in_flight.pop() {
                    let outcome = if fails { WriteOutcome::Failed } else { WriteOutcome::Written };
                    device.dirty += if fails { bytes } else { 0 };
                    let _ = device.bdi.on_written(device.volume, bytes, sent, outcome, now);
                }
            }
            Step::Drop { volume, bytes } => {
                let device = &mut self.devices[volume % count];
                device.bdi.on_dropped(device.volume, bytes);
                device.dirty -= bytes.min(device.dirty);
            }
            Step::Limit { bytes } => self.writeback.set_limit(bytes, now),
            Step::Pressure { level } => {
                use PressureLevel::{Calm, Drain, LastResort, Squeeze};
                self.writeback.set_pressure([Calm, Squeeze, Drain, LastResort][level], now);
            }
            Step::Options { device, min_ratio, max_ratio, max_bytes } => {
                let device = &mut self.devices[device % count];
                let options =
                    BdiOptions { min_ratio, max_ratio, max_bytes, ..BdiOptions::default() };
                // Refused when the minimums do not fit: then nothing changes.
                let before = device.bdi.options().clone();
                if device.bdi.set_options(options).is_err() {
                    assert_eq!(*device.bdi.options(), before);
                }
            }
            Step::Wait { time } => {
                self.now += time;
                self.writeback.update(self.now);
            }
        }
        None
    }

    fn check(&mut self, before: u64) {
        let now = self.now;
        let mut held = 0;
        let mut sum = 0;
        for device in &mut self.devices {
            let stats = device.bdi.stats(now);
            let in_flight: u64 = device.in_flight.iter().map(|(bytes, _)| bytes).sum();
            assert_eq!((stats.dirty, stats.writeback), (device.dirty, in_flight));
            let volume = device.bdi.volume_stats(device.volume).unwrap();
            assert_eq!((volume.dirty, volume.writeback), (device.dirty, in_flight));
            assert!(stats.bandwidth > 0 && stats.utilisation <= WHOLE && stats.share <= WHOLE);
            assert!(stats.threshold > 0);
            held += device.held();
            sum += stats.threshold;
        }
        let stats = self.writeback.stats();
        assert_eq!(stats.held, held);
        assert!(stats.limit >= stats.goal);
        // Granted bytes are within the limit; after a limit was lowered the excess may only shrink.
        assert!(held <= stats.limit.max(before), "{held} of {}, {before} before", stats.limit);
        let quanta = u64::try_from(self.devices.len()).unwrap();
        assert!(sum <= stats.limit + quanta, "thresholds {sum} of {}", stats.limit);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn counters_are_right_and_the_limit_holds_under_random_events(
        count in 1..9_usize,
        rates in prop::collection::vec(prop::option::of(1..2_000_000_000_u64), 1..4),
        steps in prop::collection::vec(step(), 1..300),
    ) {
        let mut world = World::new(count, &rates);
        for step in &steps {
            let before = world.writeback.stats().held;
            world.step(step);
            world.check(before);
        }
        // Dropped handles release what they held.
        world.devices.clear();
        prop_assert_eq!(world.writeback.stats().held, 0);
        prop_assert_eq!(world.writeback.stats().bdis, 0);
    }

    /// No argument causes a panic or an overflow; figures are from the whole range.
    #[test]
    fn extreme_arguments_do_not_panic(
        limit in MB..=u64::MAX,
        rate in prop::option::of(any::<u64>()),
        strict_limit in any::<bool>(),
        steps in prop::collection::vec((0..9_u8, any::<u64>(), any::<u64>(), any::<u64>()), 1..100),
    ) {
        let mut writeback = Writeback::new(&WritebackOptions::new(limit)).unwrap();
        let (max_chunk, max_in_flight) = (u64::MAX, u64::MAX);
        let options =
            BdiOptions { rate, strict_limit, max_chunk, max_in_flight, io_cost: u64::MAX, ..BdiOptions::default() };
        let mut bdi = writeback.add_bdi(options, 0).unwrap();
        let volume = bdi.add_volume(1000).unwrap();
        for (what, a, b, now) in steps {
            match what {
                0..=2 => drop(bdi.reserve(volume, a >> (b % 64), b, now)),
                3 => bdi.on_writeback(volume, a, now),
                4 => drop(bdi.on_written(volume, a, b, WriteOutcome::Written, now)),
                5 => drop(bdi.on_written(volume, a >> (b % 64), b, WriteOutcome::Failed, now)),
                6 => bdi.on_dropped(volume, a >> (b % 64)),
                7 => writeback.set_limit(a, now),
                _ => writeback.update(now),
            }
            bdi.plan(now);
            bdi.stats(now);
            let held = bdi.volume_stats(volume).unwrap();
            prop_assert_eq!(writeback.stats().held, held.dirty + held.writeback);
        }
    }

    #[test]
    fn the_order_of_devices_does_not_matter(
        count in 2..6_usize,
        rates in prop::collection::vec(prop::option::of(1..2_000_000_000_u64), 6),
        turn in 1..5_usize,
        steps in prop::collection::vec(step(), 1..200),
    ) {
        // The same devices, numbered from another one on.
        let place = |device: usize| (device % count + turn) % count;
        let mut turned_rates = rates[..count].to_vec();
        for device in 0..count {
            turned_rates[place(device)] = rates[device];
        }
        let mut one = World::new(count, &rates[..count]);
        let mut other = World::new(count, &turned_rates);
        for step in &steps {
            let turned = match step.clone() {
                Step::Write { volume, bytes } => Step::Write { volume: place(volume), bytes },
                Step::Send { device } => Step::Send { device: place(device) },
                Step::Done { device, fails } => Step::Done { device: place(device), fails },
                Step::Drop { volume, bytes } => Step::Drop { volume: place(volume), bytes },
                Step::Options { device, min_ratio, max_ratio, max_bytes } => {
                    Step::Options { device: place(device), min_ratio, max_ratio, max_bytes }
                }
                step => step,
            };
            prop_assert_eq!(one.step(step), other.step(&turned));
        }
        for device in 0..count {
            let now = one.now;
            let here = one.devices[device].bdi.stats(now);
            prop_assert_eq!(here, other.devices[place(device)].bdi.stats(now));
        }
    }

    #[test]
    fn a_limit_that_is_lowered_never_stops_writers_of_devices_that_drain(
        rate in 5_000_000..1_000_000_000_u64,
        cut in 2..9_u64,
        at in SECOND..3 * SECOND,
    ) {
        // One device, fed as fast as permitted, in writes of 1/200 of a second.
        let bytes = rate / 200;
        let limit = rate;
        let mut writeback = Writeback::new(&WritebackOptions::new(limit)).unwrap();
        let mut bdi = writeback.add_bdi(BdiOptions::default(), 0).unwrap();
        let volume = bdi.add_volume(1).unwrap();
        let (mut asked, mut longest, mut in_flight) = (None, 0, None);
        let mut cut_at = Some(at);
        for now in (0..6 * SECOND).step_by(1_000_000) {
            if cut_at.take_if(|at| *at <= now).is_some() {
                writeback.set_limit(limit / cut, now);
            }
            if let Some((size, sent, done)) = in_flight && done <= now {
                let _ = bdi.on_written(volume, size, sent, WriteOutcome::Written, now);
                in_flight = None;
            }
            loop {
                let since = *asked.get_or_insert(now);
                if bdi.reserve(volume, bytes, since, now) != Verdict::Go {
                    break;
                }
                longest = longest.max(now - since);
                asked = None;
            }
            let stats = bdi.stats(now);
            if in_flight.is_none() && stats.dirty > 0 && bdi.plan(now).start {
                let size = stats.dirty.min(rate / 200);
                bdi.on_writeback(volume, size, now);
                in_flight = Some((size, now, now + size * SECOND / rate));
            }
            if now % (10 * MILLISECOND) == 0 {
                writeback.update(now);
            }
        }
        prop_assert!(longest <= 200 * MILLISECOND, "{} ms", longest / MILLISECOND);
        let stats = writeback.stats();
        prop_assert_eq!(stats.limit, stats.goal);
        prop_assert!(stats.held <= stats.limit);
    }
}

/// While a device holds at most half of its threshold, no write waits for pace.
#[test]
fn a_device_that_runs_low_is_never_throttled() {
    let mut writeback = Writeback::new(&WritebackOptions::new(1 << 30)).unwrap();
    let options = BdiOptions { rate: Some(50 * MB), ..BdiOptions::default() };
    let mut bdi = writeback.add_bdi(options, 0).unwrap();
    let volume = bdi.add_volume(1).unwrap();
    writeback.update(0);
    let threshold = bdi.stats(0).threshold;
    assert_eq!(threshold, 100 * MB);
    let mut held = 0;
    while held + 65536 <= threshold / 2 {
        assert_eq!(bdi.reserve(volume, 65536, 0, 0), Verdict::Go);
        held += 65536;
    }
    // From there on writes are paced, and at the threshold they stop.
    while bdi.reserve(volume, 65536, 0, 0) == Verdict::Go {
        held += 65536;
        assert!(held < threshold / 2 + 4 * MB, "unpaced above half");
    }
    let mut now = 0;
    while now < 60 * SECOND {
        now += 10 * MILLISECOND;
        if bdi.reserve(volume, 65536, now, now) == Verdict::Go {
            held += 65536;
        }
        assert!(held <= threshold);
    }
    assert!(held > threshold / 10 * 9);
}

/// A bound in bytes holds from the first byte, also for a device that was never measured, whatever room other
/// devices leave; with a strict limit not even one write exceeds it. Set at run time, it holds as soon as the
/// excess has drained.
#[test]
fn max_bytes_hold_from_the_first_byte_and_strictly_to_the_last() {
    // A small write leaves more than half free, and the large one after it does not fit.
    const SIZES: [u64; 2] = [10_000, 95_000];
    for (strict_limit, most) in [(true, 100_000), (false, 105_000)] {
        let mut writeback = Writeback::new(&WritebackOptions::new(1 << 30)).unwrap();
        let options = BdiOptions { max_bytes: 100_000, strict_limit, ..BdiOptions::default() };
        let mut bdi = writeback.add_bdi(options.clone(), 0).unwrap();
        let volume = bdi.add_volume(1).unwrap();
        assert_eq!(bdi.stats(0).threshold, 100_000);
        let (mut held, mut fullest, mut now) = (VecDeque::new(), 0, 0);
        let mut sizes = SIZES.iter().cycle().copied().peekable();
        for turn in 0..8000_u64 {
            now += MILLISECOND;
            writeback.update(now);
            while let Some(bytes) =
                sizes.next_if(|bytes| bdi.reserve(volume, *bytes, now, now) == Verdict::Go)
            {
                held.push_back(bytes);
                fullest = fullest.max(held.iter().sum());
            }
            if turn % 4 == 3
                && let Some(bytes) = held.pop_front()
            {
                bdi.on_writeback(volume, bytes, now);
                let _ = bdi.on_written(volume, bytes, now, WriteOutcome::Written, now);
            }
        }
        assert!(bdi.stats(now).written > 1 << 20);
        if strict_limit {
            assert!(fullest <= most && fullest >= 95_000, "{fullest}");
        } else {
            assert_eq!(fullest, most, "a write is granted as a whole while half of it is free");
        }
        // Without the bound the threshold is two seconds of the rate; when the bound is set again, the excess
        // drains.
        bdi.set_options(BdiOptions::default()).unwrap();
        writeback.update(now);
        assert!(bdi.stats(now).threshold > 1 << 20);
        bdi.set_options(options.clone()).unwrap();
        writeback.update(now + SECOND);
        assert!(bdi.stats(now).threshold <= 200_000, "{}", bdi.stats(now).threshold);
    }
}

/// Writes that were in flight together when the disk filled up count as one failure; otherwise a disk that
/// is full for a moment would look like a long outage, and retries would be delayed as long.
#[test]
fn concurrent_write_failures_count_as_one_attempt() {
    let mut writeback = Writeback::new(&WritebackOptions::new(100 * MB)).unwrap();
    let mut full = writeback.add_bdi(BdiOptions::default(), 0).unwrap();
    let volume = full.add_volume(1).unwrap();
    assert_eq!(full.reserve(volume, MB, 0, 0), Verdict::Go);
    for _ in 0..16 {
        full.on_writeback(volume, MB / 16, 0);
    }
    for at in 1..=16 {
        let _ = full.on_written(volume, MB / 16, 0, WriteOutcome::Failed, at * MILLISECOND);
        assert_eq!(full.plan(at * MILLISECOND).not_before, at * MILLISECOND + SECOND / 10);
    }
}

/// A failing store delays only its own writers, and is retried at growing intervals.
#[test]
fn a_failing_store_keeps_its_data_and_slows_no_other_device() {
    let mut writeback = Writeback::new(&WritebackOptions::new(100 * MB)).unwrap();
    let mut bad = writeback.add_bdi(BdiOptions::default(), 0).unwrap();
    let volume = bad.add_volume(1).unwrap();
    assert_eq!(bad.reserve(volume, MB, 0, 0), Verdict::Go);
    let mut now = 0;
    let mut waits = Vec::new();
    for _ in 0..10 {
        bad.on_writeback(volume, MB, now);
        let _ = bad.on_written(volume, MB, now, WriteOutcome::Failed, now);
        let again = bad.plan(now).not_before;
        waits.push(again - now);
        now = again;
        writeback.update(now);
    }
    assert!(waits.is_sorted() && waits[0] == SECOND / 10 && waits[9] == SECOND, "{waits:?}");
    let stats = bad.stats(now);
    assert!(stats.stuck && stats.failures == 10 && stats.dirty == MB);
    bad.on_writeback(volume, MB, now);
    let _ = bad.on_written(volume, MB, now, WriteOutcome::Written, now + MILLISECOND);
    writeback.update(now + MILLISECOND);
    assert!(!bad.stats(now).stuck);
    assert_eq!(writeback.stats().held, 0);
}
