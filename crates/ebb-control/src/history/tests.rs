use ebb_mem::PoolParameters;
use ebb_store::{NullStore, Store};
use ebb_volume::VolumeOptions;

use super::*;

/// Volumes that a worker reads from, and their history.
struct Rig {
    volumes: Volumes,
    worker: ebb_io::Worker,
    history: History,
    started: Instant,
    second: u64,
    level: u8,
}

impl Rig {
    fn new(count: usize) -> Rig {
        let started = Instant::now();
        let rig = Rig {
            volumes: Volumes::default(),
            worker: ebb_io::Worker::start_alone("history").unwrap(),
            history: History::new(started),
            started,
            second: 0,
            level: 0,
        };
        (0..count).for_each(|number| rig.add(&format!("v{number:05}")));
        rig
    }

    fn add(&self, name: &str) {
        let store = Store::Null(NullStore::new(1 << 20));
        let volume = Volume::new(name, store, VolumeOptions::default());
        self.volumes.add(volume, Arc::<PoolParameters>::default());
    }

    fn read(&self, name: &str, times: u32) {
        let volume = self.volumes.get(name).unwrap().volume;
        let (sender, receiver) = std::sync::mpsc::channel();
        self.worker.handle().spawn(move |io| async move {
            for _ in 0..times {
                let buf = io.pool().take(4096).await;
                let (result, _) = volume.read(&io, buf, 0).await;
                result.unwrap();
            }
            sender.send(()).unwrap();
        });
        receiver.recv().unwrap();
    }

    fn pass(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.second += 1;
            let now = self.started + Duration::from_secs(self.second);
            let figures = DaemonFigures {
                level: self.level,
                clients: 2,
                lent_bytes: 4096,
                wired_bytes: 8192,
            };
            self.history.sample(now, &self.volumes, &|_| 1, figures);
        }
    }

    fn series(&mut self, range: Range, volume: Option<&str>, name: &str) -> Vec<Option<f64>> {
        let view = self.history.view(range, volume).unwrap();
        assert!(view.series.values().all(|points| points.len() == 300));
        view.series[name].clone()
    }

    fn last(&mut self, range: Range, volume: Option<&str>, name: &str) -> Option<f64> {
        *self.series(range, volume, name).last().unwrap()
    }
}

#[test]
fn requests_are_shown_in_all_ranges_of_their_volume_and_the_daemon() {
    let mut rig = Rig::new(2);
    rig.pass(3);
    rig.read("v00000", 24);
    rig.pass(1);
    for volume in [Some("v00000"), None] {
        assert_eq!(rig.last(Range::FiveMinutes, volume, "read_iops"), Some(24.0), "{volume:?}");
        assert_eq!(rig.last(Range::FiveMinutes, volume, "read_bytes"), Some(98_300.0));
        assert!(rig.last(Range::FiveMinutes, volume, "p99_seconds").unwrap() > 0.0);
    }
    assert_eq!(rig.last(Range::FiveMinutes, Some("v00001"), "read_iops"), Some(0.0));
    assert_eq!(rig.last(Range::FiveMinutes, Some("v00001"), "p99_seconds"), None);
    let fine = rig.series(Range::FiveMinutes, Some("v00000"), "read_iops");
    assert_eq!(fine[296..], [Some(0.0), Some(0.0), Some(0.0), Some(24.0)]);
    assert_eq!(fine[0], None, "before the start");
    rig.pass(8);
    assert_eq!(rig.last(Range::OneHour, Some("v00000"), "read_iops"), Some(2.0));
    rig.pass(276);
    for volume in [Some("v00000"), None] {
        let iops = rig.last(Range::OneDay, volume, "read_iops").unwrap();
        assert!((iops - 24.0 / 288.0).abs() < 0.001, "{iops}");
    }
    rig.pass(400);
    assert_eq!(rig.last(Range::FiveMinutes, Some("v00000"), "read_iops"), Some(0.0));
    let day = rig.series(Range::OneDay, Some("v00000"), "read_iops");
    assert!(day[298].unwrap() > 0.0 && day[299] == Some(0.0), "{:?}", &day[297..]);
    assert_eq!(rig.last(Range::FiveMinutes, None, "clients"), Some(2.0));
    assert_eq!(rig.last(Range::FiveMinutes, None, "wired_bytes"), Some(8192.0));
    assert!(rig.history.view(Range::OneDay, Some("other")).is_none());
}

#[test]
fn the_heat_map_has_every_request_once() {
    let mut rig = Rig::new(1);
    rig.pass(1);
    rig.read("v00000", 100);
    rig.pass(1);
    let view = rig.history.heatmap(Range::FiveMinutes, "v00000").unwrap();
    let columns: Vec<_> = view.columns.iter().flatten().filter(|rows| !rows.is_empty()).collect();
    assert_eq!(columns.len(), 1, "only the second with requests");
    let count: u64 = columns[0].iter().map(|(_, count)| count).sum();
    assert!((50..=200).contains(&count), "{count}");
    assert!(columns[0].iter().all(|(row, _)| usize::from(*row) + 1 < view.bounds.len()));
    rig.pass(301);
    let view = rig.history.heatmap(Range::FiveMinutes, "v00000").unwrap();
    assert!(view.columns.iter().flatten().all(Vec::is_empty), "it has moved out");
}

#[test]
fn a_volume_costs_little_and_nothing_again_after_a_day_without_requests() {
    let mut rig = Rig::new(2);
    for _ in 0..310 {
        rig.read("v00000", 3);
        rig.pass(1);
    }
    let (all, most) = rig.history.bytes();
    assert!(most < MOST_BYTES && all < 3 * MOST_BYTES, "{most} {all}");
    rig.pass(288 * 302);
    let (_, later) = rig.history.bytes();
    assert!(later < 4096, "{later}");
    assert_eq!(rig.last(Range::OneDay, Some("v00000"), "read_iops"), Some(0.0));
}

/// The rings of a volume with requests all the time, of all sizes, for a day: filled directly, as a day of samples takes
/// too long.
#[test]
fn the_rings_of_a_busy_volume_keep_to_their_limit() {
    let mut rig = Rig::new(1);
    rig.read("v00000", 1);
    let mut counters = HistoryCounters::of(&rig.volumes.get("v00000").unwrap().volume);
    let mut rings = Rings::new(VOLUME_SERIES, 0, &HistoryCounters::default());
    counters.taken = 1.0;
    let (mut point, times) = sample::point(&HistoryCounters::default(), &counters, 1);
    let heat = HeatColumn::of(&times);
    for number in 0..1000u32 {
        point[at::DIRTY] = Some(f64::from(number) * 4096.0);
        for ring in &mut rings.rings {
            ring.push(u64::from(number), &point, Some(&heat));
        }
    }
    let bytes = rings.bytes() + size_of::<Detail>() + size_of::<Tracked>();
    println!("{bytes} bytes");
    assert!((20_000..MOST_BYTES).contains(&bytes), "{bytes}");
    rig.pass(1);
}

#[test]
fn memory_pressure_leaves_the_last_five_minutes() {
    let mut rig = Rig::new(2);
    for _ in 0..30 {
        rig.read("v00000", 1);
        rig.read("v00001", 1);
        rig.pass(1);
    }
    let (before, _) = rig.history.bytes();
    rig.history.view(Range::FiveMinutes, Some("v00001"));
    rig.level = 2;
    rig.pass(1);
    assert!(rig.history.bytes().0 < before);
    let heat = |rig: &Rig, place: usize, number: u64| {
        rig.history.volumes[place].ring(Range::FiveMinutes).unwrap().heat(number).unwrap()
    };
    assert!(heat(&rig, 0, 29).is_empty() && !heat(&rig, 1, 29).is_empty());
    assert_eq!(rig.history.volumes[0].ring(Range::FiveMinutes).unwrap().value(29, 0), Some(1.0));
    assert_eq!(rig.history.volumes[1].ring(Range::FiveMinutes).unwrap().value(29, 0), Some(1.0));
    assert_eq!(rig.history.volumes[0].ring(Range::OneHour).unwrap().value(1, 0), Some(1.0));
    rig.level = 3;
    rig.read("v00000", 5);
    rig.pass(1);
    for volume in &rig.history.volumes {
        assert_eq!(volume.ring(Range::OneHour).unwrap().value(1, 0), None);
        assert_eq!(volume.ring(Range::FiveMinutes).unwrap().value(29, 0), Some(1.0));
    }
    assert!(heat(&rig, 1, 29).is_empty());
    assert_eq!(rig.last(Range::FiveMinutes, None, "read_iops"), Some(5.0), "the daemon's stays");
    assert_eq!(rig.last(Range::FiveMinutes, None, "pressure"), Some(3.0));
    assert_eq!(rig.last(Range::FiveMinutes, Some("v00000"), "read_iops"), Some(5.0));
    rig.level = 0;
    rig.read("v00000", 7);
    rig.pass(1);
    assert_eq!(rig.last(Range::FiveMinutes, Some("v00000"), "read_iops"), Some(7.0));
    assert_eq!(rig.last(Range::OneHour, None, "pressure"), Some(0.0));
    rig.pass(4);
    assert_eq!(rig.last(Range::OneHour, None, "pressure"), Some(3.0), "the highest level");
}

/// A late sample covers more than a second: the rate is per second of the time that passed.
#[test]
fn late_samples_do_not_change_the_rate() {
    let mut rig = Rig::new(1);
    let figures = DaemonFigures::default();
    let (mut last, mut moment) = (0, 0);
    for at in (0..60).map(|number| number * 1000 + [20, 980, 500][number % 3]) {
        // 100 requests in 100 ms, as with a limit of 1,000 per second.
        while moment < at {
            rig.read("v00000", 20);
            moment += 20;
        }
        let now = rig.started + Duration::from_millis(at as u64);
        rig.history.sample(now, &rig.volumes, &|_| 1, figures);
        last = at;
    }
    assert!(last > 59_000);
    for volume in [Some("v00000"), None] {
        let series = rig.series(Range::FiveMinutes, volume, "read_iops");
        let rates: Vec<f64> = series.into_iter().flatten().skip(1).collect();
        assert!(rates.len() > 50, "{rates:?}");
        assert!(rates.iter().all(|rate| (950.0..1050.0).contains(rate)), "{volume:?} {rates:?}");
    }
}

#[test]
fn volumes_come_and_go() {
    let mut rig = Rig::new(1);
    rig.pass(1);
    rig.add("a");
    rig.read("a", 4);
    rig.pass(1);
    assert_eq!(rig.last(Range::FiveMinutes, Some("a"), "read_iops"), Some(4.0));
    let gone = rig.volumes.remove("a").unwrap();
    rig.pass(1);
    assert!(rig.history.view(Range::FiveMinutes, Some("a")).is_none());
    rig.worker = ebb_io::Worker::start_alone("other").unwrap();
    assert_eq!(Arc::strong_count(&gone), 1, "the history keeps no volume");
    // Another volume of the same name begins anew.
    rig.add("a");
    rig.pass(1);
    assert_eq!(rig.last(Range::FiveMinutes, Some("a"), "read_iops"), Some(0.0));
}

#[test]
fn of_thousands_of_volumes_each_has_its_turn() {
    let mut rig = Rig::new(1200);
    rig.pass(1);
    rig.read("v01199", 60);
    rig.pass(3);
    // It may have been found one to three seconds later: then it had the same rate all the time.
    let series = rig.series(Range::FiveMinutes, Some("v01199"), "read_iops");
    let sum: f64 = series.iter().flatten().sum();
    assert!((59.0..61.0).contains(&sum), "{sum}");
    let summary = rig.history.summary("v01199").unwrap();
    assert_eq!((summary.clients, summary.spark.is_empty()), (1.0, summary.iops == 0.0));
}

#[test]
fn a_volume_at_rest_is_woken_by_its_next_request() {
    let mut rig = Rig::new(1);
    // It is listed.
    rig.pass(1);
    rig.read("v00000", 1);
    rig.pass(1);
    let volume = rig.volumes.get("v00000").unwrap().volume;
    assert!(!rig.history.active.is_empty());
    rig.pass(2 * STEPS[2]);
    assert!(rig.history.active.is_empty(), "it is not sampled each second any more");
    assert!(!volume.stats().rest(), "it is at rest");
    let woken = VolumeStats::woken();
    rig.read("v00000", 7);
    assert_ne!(VolumeStats::woken(), woken);
    assert!(volume.stats().rest(), "it was awake");
    rig.pass(1);
    assert_eq!(rig.last(Range::FiveMinutes, Some("v00000"), "read_iops"), Some(7.0));
    assert_eq!(rig.history.active, [0]);
}
