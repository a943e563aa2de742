//! The history of figures: three rings for the daemon and for each volume that was not idle, sampled once a second.
//!
//! The ranges are 5 min at 1 s, 1 h at 12 s and 24 h at 288 s. The control thread samples, and reads only what the
//! workers share: no worker waits for it. Without a control socket or page nothing is sampled.
//!
//! A volume without requests is at rest ([`VolumeStats::rest`]) and costs nothing but its turn: each second [`CACHES`] of
//! them are checked, whose clients and cache may have changed. When a volume was woken, all have their turn once, at most
//! [`CHECKS`] each second. A volume with requests is sampled each second until the end of its interval of 288 s. While a
//! client asks for the list of volumes, all are sampled.
//!
//! # Invariants
//! - A volume that was idle for 24 h, or always, has no rings; its record has a fixed size.
//! - The rings, the heat map and the counters of a volume have at most [`MOST_BYTES`].
//! - From pressure level 2 on, volumes that no client asks for have no heat map; at level 3 all volumes have only the
//!   points of 1 s, so that the last five minutes show how the pressure arose.

mod heat;
mod ring;
mod sample;

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ebb_api::{HeatmapView, HistoryView};
use ebb_volume::{Volume, VolumeStats, Volumes};

use self::heat::HeatColumn;
use self::ring::{POINTS, Ring, SERIES, VOLUME_SERIES, at, four_digits};
use self::sample::{HistoryCounters, point};

/// The most memory of the history of a volume, bytes.
pub const MOST_BYTES: usize = 64 << 10;
/// How many idle volumes are checked each second after one was woken, while no client asks for the list.
const CHECKS: usize = 512;
/// How many are checked while none was woken.
const CACHES: usize = 64;
/// For how long a client counts as watching after its request, seconds.
const LOOK: u64 = 30;
/// The steps of the ranges, seconds.
const STEPS: [u64; 3] = [1, 12, 288];
/// The points of a summary's curve: 5 minutes.
const SPARK_POINTS: u64 = 25;

/// A range of the history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Range {
    FiveMinutes,
    OneHour,
    OneDay,
}

impl Range {
    /// The range with this name.
    pub(crate) fn parse(name: &str) -> Option<Range> {
        match name {
            "5m" => Some(Range::FiveMinutes),
            "1h" => Some(Range::OneHour),
            "24h" => Some(Range::OneDay),
            _ => None,
        }
    }

    const fn index(self) -> usize {
        match self {
            Range::FiveMinutes => 0,
            Range::OneHour => 1,
            Range::OneDay => 2,
        }
    }

    const fn step(self) -> u64 {
        STEPS[self.index()]
    }
}

/// Figures of the daemon that no volume has.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DaemonFigures {
    pub(crate) level: u8,
    pub(crate) clients: u64,
    pub(crate) lent_bytes: u64,
    pub(crate) wired_bytes: u64,
}

/// The rings, and the counters at the last point of each.
#[derive(Debug)]
struct Rings {
    rings: [Ring; 3],
    before: [HistoryCounters; 3],
}

impl Rings {
    /// Rings whose first point of 1 s is `first`.
    fn new(width: usize, first: u64, counters: &HistoryCounters) -> Rings {
        Rings {
            rings: STEPS.map(|step| Ring::new(width, first / step)),
            before: std::array::from_fn(|_| counters.clone()),
        }
    }

    /// Adds a point to each ring of which one ends at `second`, for the counts since its last one. `gap`: seconds
    /// since the last point of 1 s.
    fn push(
        &mut self,
        second: u64,
        gap: u64,
        now: &HistoryCounters,
        keep: Kept,
        level: [Option<f64>; 3],
    ) {
        for ((range, step), level) in STEPS.into_iter().enumerate().zip(level) {
            let begun = second.saturating_sub(gap);
            if second / step == begun / step {
                continue;
            }
            let before = std::mem::replace(&mut self.before[range], now.clone());
            if range > 0 && !keep.long_ranges {
                continue;
            }
            let (mut point, times) = point(&before, now, if range == 0 { gap } else { step });
            point[at::PRESSURE] = level;
            let heat = keep.heat.then(|| HeatColumn::of(&times));
            // A volume that was found to be no longer idle had the same rate all the time.
            let last = second / step - 1;
            let from = if range == 0 { second - gap.clamp(1, POINTS) } else { last };
            for number in from..=last {
                self.rings[range].push(number, &point, heat.as_ref().filter(|_| number == last));
            }
        }
    }

    fn bytes(&self) -> usize {
        let rings: usize = self.rings.iter().map(Ring::bytes).sum();
        rings + size_of::<Rings>() + self.before.iter().map(HistoryCounters::bytes).sum::<usize>()
    }
}

/// The parts of a history that are kept under memory pressure.
#[derive(Clone, Copy, Debug)]
struct Kept {
    /// The points of 12 s and 288 s.
    long_ranges: bool,
    heat: bool,
}

impl Kept {
    const ALL: Kept = Kept { long_ranges: true, heat: true };

    fn at(level: u8, is_looked_at: bool) -> Kept {
        Kept { long_ranges: level < 3, heat: level < 2 || (level < 3 && is_looked_at) }
    }
}

/// What is kept of a volume that is not idle.
#[derive(Debug)]
struct Detail {
    /// The counters at the last sample.
    last: HistoryCounters,
    rings: Option<Box<Rings>>,
    /// The last second in which it was not idle.
    active: u64,
}

/// A volume.
#[derive(Debug)]
struct Tracked {
    name: Arc<str>,
    volume: Weak<Volume>,
    /// Its number of [`ebb_volume::VolumeStats::activity`] at the last check.
    activity: u64,
    /// The second of the last check, and its exact moment.
    checked: u64,
    checked_at: f64,
    /// The second since which it is known.
    since: u64,
    /// A client watches it until this second.
    looked_at: u64,
    /// Its place is in [`History::active`].
    listed: bool,
    cached: u64,
    dirty: u64,
    clients: u64,
    detail: Option<Box<Detail>>,
}

/// See the module.
pub(crate) struct History {
    started: Instant,
    /// Seconds from 1970 to `started`.
    epoch: f64,
    /// The last second that was sampled.
    second: u64,
    volumes: Vec<Tracked>,
    /// The places in `volumes` of those that are sampled each second.
    active: Vec<usize>,
    /// `Volumes::changes` when the list of volumes was read.
    listed: Option<u64>,
    /// Where the next checks of idle volumes begin.
    turn: usize,
    /// [`VolumeStats::woken`] at the last sample, and how many volumes were not checked since it changed.
    woken: u64,
    unchecked: usize,
    /// A client watches the list until this second.
    looked_at: u64,
    /// The sums of all volumes.
    total: HistoryCounters,
    daemon: Rings,
    /// The highest level of pressure since the last point of each ring.
    levels: [u8; 3],
}

impl History {
    /// A history that begins now.
    pub(crate) fn new(started: Instant) -> History {
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let total = HistoryCounters::default();
        History {
            started,
            epoch: epoch.as_secs_f64(),
            second: 0,
            volumes: Vec::new(),
            active: Vec::new(),
            listed: None,
            turn: 0,
            woken: 0,
            unchecked: 0,
            looked_at: 0,
            daemon: Rings::new(SERIES.len(), 0, &total),
            total,
            levels: [0; 3],
        }
    }

    /// Samples what is due at `now`; `connections` has the clients of a volume.
    pub(crate) fn sample(
        &mut self,
        now: Instant,
        volumes: &Volumes,
        connections: &dyn Fn(&str) -> u64,
        figures: DaemonFigures,
    ) {
        let second = now.saturating_duration_since(self.started).as_secs();
        let gap = second.saturating_sub(self.second);
        if gap == 0 {
            return;
        }
        // The wall clock may have been set.
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        self.epoch = wall.as_secs_f64() - now.saturating_duration_since(self.started).as_secs_f64();
        let moment = now.saturating_duration_since(self.started).as_secs_f64();
        self.list((second, moment), volumes);
        self.release_memory(second, figures.level);
        self.sample_volumes((second, moment), connections, figures.level);
        self.total.gauges(figures);
        self.total.taken = moment;
        self.levels = self.levels.map(|level| level.max(figures.level));
        self.daemon.push(
            second,
            gap,
            &self.total,
            Kept::ALL,
            self.levels.map(|l| Some(f64::from(l))),
        );
        for (level, step) in self.levels.iter_mut().zip(STEPS) {
            if second / step != self.second / step {
                *level = 0;
            }
        }
        self.second = second;
    }

    /// Samples the active volumes, and those idle ones whose turn it is.
    fn sample_volumes(
        &mut self,
        (second, moment): (u64, f64),
        connections: &dyn Fn(&str) -> u64,
        level: u8,
    ) {
        let count = self.volumes.len();
        let woken = VolumeStats::woken();
        if std::mem::replace(&mut self.woken, woken) != woken {
            self.unchecked = count;
        }
        let checks = match (second <= self.looked_at, self.unchecked) {
            (true, _) => count,
            (false, 0) => CACHES.min(count),
            (false, _) => CHECKS.min(count),
        };
        self.unchecked = self.unchecked.saturating_sub(checks);
        let active = std::mem::take(&mut self.active);
        let turns = (self.turn..self.turn + checks).map(|turn| turn % count.max(1));
        for place in active.into_iter().chain(turns) {
            let Some(tracked) = self.volumes.get_mut(place) else { continue };
            if tracked.checked < second {
                tracked.sample((second, moment), connections, level, &mut self.total);
                tracked.listed = tracked.is_active(second);
                self.active.extend(tracked.listed.then_some(place));
            }
        }
        self.turn = (self.turn + checks) % count.max(1);
    }

    /// Reads the list of volumes, if it has changed.
    fn list(&mut self, at: (u64, f64), volumes: &Volumes) {
        // Before the list: a later change is seen the next time.
        let changes = Some(volumes.changes());
        if std::mem::replace(&mut self.listed, changes) == changes {
            return;
        }
        let mut before = std::mem::take(&mut self.volumes).into_iter().peekable();
        let fresh = (self.second > 0).then_some(self.total.taken);
        for volume in volumes.list() {
            while before.next_if(|known| *known.name < **volume.name()).is_some() {}
            let known = before.next_if(|known| known.name == *volume.name());
            let same = known.filter(|known| Weak::as_ptr(&known.volume) == Arc::as_ptr(&volume));
            self.volumes.push(same.unwrap_or_else(|| Tracked::new(&volume, at, fresh)));
        }
        let places = self.volumes.iter().enumerate().filter(|(_, tracked)| tracked.listed);
        self.active = places.map(|(place, _)| place).collect();
        self.total.dirty = self.volumes.iter().map(|tracked| tracked.dirty).sum();
        self.total.cached = self.volumes.iter().map(|tracked| tracked.cached).sum();
        self.unchecked = self.volumes.len();
    }

    /// Returns memory under memory pressure.
    fn release_memory(&mut self, second: u64, level: u8) {
        if level < 2 {
            return;
        }
        for tracked in &mut self.volumes {
            let keep = Kept::at(level, second <= tracked.looked_at);
            let rings = tracked.detail.as_mut().and_then(|detail| detail.rings.as_mut());
            for (range, ring) in
                rings.into_iter().flat_map(|rings| rings.rings.iter_mut()).enumerate()
            {
                if range > 0 && !keep.long_ranges {
                    ring.forget(second / STEPS[range]);
                } else if !keep.heat {
                    ring.forget_heat();
                }
            }
        }
    }

    /// The volume of this name; that a client looks at it is noted.
    fn look_at(&mut self, name: &str) -> Option<&Tracked> {
        let place = self.volumes.binary_search_by(|tracked| (*tracked.name).cmp(name)).ok()?;
        let tracked = self.volumes.get_mut(place)?;
        tracked.looked_at = self.second + LOOK;
        if !std::mem::replace(&mut tracked.listed, true) {
            self.active.push(place);
        }
        Some(tracked)
    }

    /// The numbers of the points of a range, and the time of the last one.
    fn numbers(&self, range: Range) -> (impl Iterator<Item = Option<u64>> + use<>, f64) {
        let complete = self.second / range.step();
        let numbers = (0..POINTS).map(move |place| (complete + place).checked_sub(POINTS));
        #[allow(clippy::cast_precision_loss, reason = "seconds")]
        let end = self.epoch + (complete * range.step()) as f64;
        (numbers, end)
    }

    /// The history of the daemon, or of a volume; `None` if it is not known. That a volume is looked at is noted.
    pub(crate) fn view(&mut self, range: Range, volume: Option<&str>) -> Option<HistoryView> {
        let step = range.step();
        let (numbers, end) = self.numbers(range);
        let (ring, since, width) = match volume {
            None => (Some(&self.daemon.rings[range.index()]), 0, SERIES.len()),
            Some(name) => {
                let tracked = self.look_at(name)?;
                (tracked.ring(range), tracked.since / step, VOLUME_SERIES)
            }
        };
        let idle = Ring::new(width, since);
        let ring = ring.unwrap_or(&idle);
        let numbers: Vec<Option<u64>> = numbers.collect();
        let series = |(series, name): (usize, &&str)| {
            let value = |number: &Option<u64>| ring.value((*number)?, series);
            ((*name).to_owned(), numbers.iter().map(value).collect())
        };
        let names = SERIES.iter().take(width).enumerate();
        #[allow(clippy::cast_precision_loss, reason = "at most 288")]
        Some(HistoryView { step_seconds: step as f64, end, series: names.map(series).collect() })
    }

    /// The history of a volume that is not served.
    pub(crate) fn unknown(&self, range: Range) -> HistoryView {
        let (numbers, end) = self.numbers(range);
        let unknown: Vec<Option<f64>> = numbers.map(|_| None).collect();
        let series = SERIES.iter().take(VOLUME_SERIES);
        let series = series.map(|name| ((*name).to_owned(), unknown.clone())).collect();
        #[allow(clippy::cast_precision_loss, reason = "at most 288")]
        HistoryView { step_seconds: range.step() as f64, end, series }
    }

    /// The latency heat map of a volume; `None` if it is not known.
    pub(crate) fn heatmap(&mut self, range: Range, volume: &str) -> Option<HeatmapView> {
        let step = range.step();
        let (numbers, end) = self.numbers(range);
        let tracked = self.look_at(volume)?;
        let idle = Ring::new(VOLUME_SERIES, tracked.since / step);
        let ring = tracked.ring(range).unwrap_or(&idle);
        let column = |number: Option<u64>| ring.heat(number?).map(|column| column.rows());
        #[allow(clippy::cast_precision_loss, reason = "at most 288")]
        let step_seconds = step as f64;
        let columns = numbers.map(column).collect();
        Some(HeatmapView { step_seconds, end, bounds: heat::bounds(), columns })
    }

    /// Notes that a client watches the list of all volumes.
    pub(crate) fn note_list_viewed(&mut self) {
        self.looked_at = self.second + LOOK;
    }

    /// The last point of a volume and the last requests per second of the range `1h`, for a list.
    pub(crate) fn summary(&self, name: &str) -> Option<LatestFigures> {
        let place = self.volumes.binary_search_by(|tracked| (*tracked.name).cmp(name)).ok()?;
        let tracked = self.volumes.get(place)?;
        #[allow(clippy::cast_precision_loss, reason = "rounded above 2^53")]
        let gauge = |value: u64| value as f64;
        let mut summary = LatestFigures {
            dirty: gauge(tracked.dirty),
            clients: gauge(tracked.clients),
            ..LatestFigures::default()
        };
        let Some(rings) = tracked.detail.as_ref().and_then(|detail| detail.rings.as_ref()) else {
            return Some(summary);
        };
        let [fine, coarse, _] = &rings.rings;
        let sum = |ring: &Ring, number: u64, of: [usize; 2]| -> f64 {
            of.into_iter().filter_map(|series| ring.value(number, series)).sum()
        };
        let (iops, bytes) = ([at::READ_IOPS, at::WRITE_IOPS], [at::READ_BYTES, at::WRITE_BYTES]);
        if let Some(last) = self.second.checked_sub(1) {
            summary.iops = four_digits(sum(fine, last, iops));
            summary.bytes = four_digits(sum(fine, last, bytes));
            (summary.p99, summary.hit_ratio) =
                (fine.value(last, at::P99), fine.value(last, at::HIT_RATIO));
        }
        let complete = self.second / STEPS[1];
        summary.spark = (complete.saturating_sub(SPARK_POINTS - 1)..complete)
            .map(|number| four_digits(sum(coarse, number, iops)))
            .chain([summary.iops])
            .collect();
        if summary.spark.iter().all(|iops| *iops == 0.0) {
            summary.spark = Vec::new();
        }
        Some(summary)
    }

    /// The memory of the history of the daemon and its volumes, bytes; the largest of a volume.
    pub(crate) fn bytes(&self) -> (usize, usize) {
        let of = |tracked: &Tracked| tracked.bytes();
        let volumes: usize = self.volumes.iter().map(of).sum();
        let most = self.volumes.iter().map(of).max().unwrap_or(0);
        (self.daemon.bytes() + volumes, most)
    }
}

/// A volume in a list.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct LatestFigures {
    pub(crate) iops: f64,
    pub(crate) bytes: f64,
    pub(crate) p99: Option<f64>,
    pub(crate) hit_ratio: Option<f64>,
    pub(crate) dirty: f64,
    pub(crate) clients: f64,
    pub(crate) spark: Vec<f64>,
}

impl Tracked {
    /// A volume; `fresh` is the moment of the last sample, if the volume was opened since then.
    fn new(volume: &Arc<Volume>, (second, moment): (u64, f64), fresh: Option<f64>) -> Tracked {
        let activity = if fresh.is_some() { 0 } else { volume.stats().activity() };
        // Its requests before the first sample are in no point.
        let detail = (activity > 0).then(|| {
            let mut last = HistoryCounters::of(volume);
            last.taken = moment;
            Box::new(Detail { last, rings: None, active: second })
        });
        Tracked {
            name: volume.name().clone(),
            volume: Arc::downgrade(volume),
            activity,
            checked: second.saturating_sub(1),
            checked_at: fresh.unwrap_or(moment),
            since: second.saturating_sub(1),
            looked_at: 0,
            listed: false,
            cached: 0,
            dirty: 0,
            clients: 0,
            detail,
        }
    }

    fn ring(&self, range: Range) -> Option<&Ring> {
        let rings = self.detail.as_ref()?.rings.as_ref()?;
        rings.rings.get(range.index())
    }

    /// Whether it was not idle in the present interval of the longest range.
    fn is_active(&self, second: u64) -> bool {
        let since = |detail: &Detail| (detail.active / STEPS[2]) == (self.checked / STEPS[2]);
        second <= self.looked_at || self.detail.as_ref().is_some_and(|detail| since(detail))
    }

    fn sample(
        &mut self,
        (second, moment): (u64, f64),
        connections: &dyn Fn(&str) -> u64,
        level: u8,
        total: &mut HistoryCounters,
    ) {
        let Some(volume) = self.volume.upgrade() else { return };
        let (stats, active) = (volume.stats(), self.is_active(second));
        let mut activity = stats.activity();
        if activity == self.activity && !active && stats.rest() {
            // What completed before the volume was at rest wakes it no more.
            activity = stats.activity();
        }
        let changed = activity != std::mem::replace(&mut self.activity, activity);
        let gap = second.saturating_sub(self.checked);
        let checked = std::mem::replace(&mut self.checked_at, moment);
        self.checked = second;
        self.read_gauges(&volume, connections, total);
        if !changed && !active {
            self.end_of_activity(second, moment);
            return;
        }
        let detail = self.detail.get_or_insert_with(|| {
            let mut last = HistoryCounters::default();
            last.taken = checked;
            Box::new(Detail { last, rings: None, active: second })
        });
        if changed {
            detail.active = second;
        }
        let mut now = match changed {
            true => HistoryCounters::of(&volume),
            false => detail.last.clone(),
        };
        now.taken = moment;
        (now.dirty, now.cached, now.clients) = (self.dirty, self.cached, self.clients);
        total.add(&detail.last, &now);
        let (last, since) = (&detail.last, self.since);
        let rings =
            detail.rings.get_or_insert_with(|| Box::new(Rings::new(VOLUME_SERIES, since, last)));
        let keep = Kept::at(level, second <= self.looked_at);
        rings.push(second, gap.max(1), &now, keep, [None; 3]);
        detail.last = now;
    }

    fn read_gauges(
        &mut self,
        volume: &Volume,
        connections: &dyn Fn(&str) -> u64,
        total: &mut HistoryCounters,
    ) {
        self.clients = connections(&self.name);
        if let Some(cache) = volume.cache() {
            let stats = cache.stats();
            total.dirty = total.dirty.wrapping_sub(self.dirty).wrapping_add(stats.dirty);
            total.cached = total.cached.wrapping_sub(self.cached).wrapping_add(stats.bufspace);
            (self.dirty, self.cached) = (stats.dirty, stats.bufspace);
        }
    }

    /// Frees the rings of a volume that is idle again, once nothing is in them.
    fn end_of_activity(&mut self, second: u64, moment: f64) {
        let Some(detail) = &mut self.detail else { return };
        detail.last.taken = moment;
        if let Some(rings) = &mut detail.rings {
            rings.before[0].taken = moment;
        }
        // The points since then are idle: after a day the last ring has no others.
        let day = STEPS[2] * (POINTS + 1);
        if second.saturating_sub(detail.active) > day {
            detail.rings = None;
        }
        // The 5-minute ring and the 1-hour ring earlier.
        if let Some(rings) = &mut detail.rings {
            for (ring, step) in rings.rings.iter_mut().zip(STEPS) {
                if second.saturating_sub(detail.active) > step * (POINTS + 1) && !ring.is_idle() {
                    ring.clear();
                }
            }
        }
    }

    fn bytes(&self) -> usize {
        let of = |detail: &Detail| {
            let rings = detail.rings.as_ref().map_or(0, |rings| rings.bytes());
            size_of::<Detail>() + detail.last.bytes() + rings
        };
        size_of::<Tracked>() + self.detail.as_ref().map_or(0, |detail| of(detail))
    }
}

#[cfg(test)]
mod tests;
