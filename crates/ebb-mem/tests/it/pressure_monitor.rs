//! The monitor against fake kernel files, FIFOs and sockets, and once against this host.
//!
//! Nothing here asserts how fast something happens, only that it happens: each wait has a generous
//! limit, after which the test fails.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use ebb_mem::pressure::{
    Cause, Level, LimitSource, Monitor, MonitorOptions, PressureState, Roots, SourceKind,
    SourceReport, Subscription, Watch, available, limit, limit_of_process,
};
use proptest::prelude::*;
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(90);
const CALM_PSI: &str = "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 total=0\n";

/// Fake kernel files.
struct Fake(TempDir);

impl Fake {
    fn empty() -> Self {
        let fake = Self(tempfile::tempdir().unwrap());
        fs::create_dir_all(fake.path("proc")).unwrap();
        fs::create_dir_all(fake.path("cgroup")).unwrap();
        fake
    }

    /// A host of 1000 MiB with version 2 and the process in `/app`.
    fn v2() -> Self {
        let fake = Self::empty();
        fake.memory(500, 800);
        fake.put(
            "proc/zoneinfo",
            "Node 0, zone Normal\n  pages free 9\n min 1536\n low 2048\n high 2560\n",
        );
        fake.put("proc/pressure/memory", CALM_PSI);
        fake.put("proc/self/cgroup", "0::/slice/app\n");
        fake.put("proc/sys/vm/swappiness", "60\n");
        fake.put("cgroup/cgroup.controllers", "memory\n");
        fake.put("cgroup/slice/memory.max", "max\n");
        fake.put("cgroup/slice/memory.high", "max\n");
        fake.put("cgroup/slice/app/memory.pressure", CALM_PSI);
        fake.put("cgroup/slice/app/memory.current", "1048576\n");
        fake.put("cgroup/slice/app/memory.high", "max\n");
        fake.put("cgroup/slice/app/memory.max", "104857600\n");
        fake.put("cgroup/slice/app/memory.events", "low 0\nhigh 5\nmax 5\noom 5\n");
        fake.put("cgroup/slice/app/memory.stat", "anon 1\ninactive_file 524288\n");
        fake
    }

    /// The same with version 1's memory hierarchy.
    fn v1() -> Self {
        let fake = Self::empty();
        fake.memory(500, 800);
        fake.put("proc/self/cgroup", "7:cpu:/\n4:memory:/app\n0::/\n");
        for (name, text) in [
            ("memory.usage_in_bytes", "1048576\n"),
            ("memory.limit_in_bytes", "104857600\n"),
            ("memory.failcnt", "3\n"),
            ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\n"),
            ("memory.pressure_level", ""),
            ("cgroup.event_control", ""),
        ] {
            fake.put(&format!("cgroup/memory/app/{name}"), text);
        }
        fake.put("cgroup/memory/memory.usage_in_bytes", "1048576\n");
        fake.put("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        fake
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Replaces the content in place: the monitor keeps its files open.
    fn put(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn memory(&self, free: u64, available: u64) {
        let kib = |mib: u64| mib * 1024;
        self.put(
            "proc/meminfo",
            &format!(
                "MemTotal: {} kB\nMemFree: {} kB\nMemAvailable: {} kB\n",
                kib(1000),
                kib(free),
                kib(available)
            ),
        );
    }

    fn roots(&self) -> Roots {
        Roots { proc: self.path("proc"), cgroup: self.path("cgroup") }
    }

    fn options(&self) -> MonitorOptions {
        let mut options = MonitorOptions::new(42);
        options.roots = self.roots();
        options.sysinfo = false;
        options.triggers = false;
        // No decay ticks.
        options.thresholds.decay = Duration::from_secs(3600);
        options
    }

    fn start(&self) -> Running {
        Running::start(self.options())
    }
}

/// Whether a source of this kind is in use.
fn listens_to(report: &SourceReport, kind: SourceKind) -> bool {
    report.listening.iter().any(|finding| finding.kind == kind)
}

struct Running {
    monitor: Monitor,
    report: SourceReport,
    said: Receiver<PressureState>,
    _subscription: Subscription,
}

impl Running {
    fn start(options: MonitorOptions) -> Self {
        let (monitor, report) = Monitor::start(options).unwrap();
        let (tell, said) = channel();
        let _subscription = monitor.pressure().subscribe(move |state| {
            let _ = tell.send(state);
        });
        Self { monitor, report, said, _subscription }
    }

    /// Waits for a publication; skips earlier ones.
    fn wait(&self, level: Level, cause: Cause) -> PressureState {
        let until = Instant::now() + PATIENCE;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.said.recv_timeout(left) {
                Ok(state) if (state.level, state.cause) == (level, cause) => return state,
                Ok(_) => {}
                Err(_) => panic!("no {level} by {cause} within {PATIENCE:?}"),
            }
        }
    }

    fn listens_to(&self, kind: SourceKind) -> bool {
        listens_to(&self.report, kind)
    }

    fn missing(&self, kind: SourceKind) -> &str {
        &self.report.missing.iter().find(|finding| finding.kind == kind).unwrap().detail
    }

    /// Injects a level and waits for it: the monitor runs.
    fn assert_runs(&self) {
        self.monitor.handle().inject(Level::L2);
        self.wait(Level::L2, Cause::Injected);
    }
}

fn watch(path: &Path, write: Option<&str>) -> Watch {
    Watch { watch: path.into(), write: write.map(Into::into) }
}

fn fifo(path: &Path) {
    rustix::fs::mkfifoat(rustix::fs::CWD, path, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)
        .unwrap();
}

#[test]
fn the_report_lists_found_and_missing_sources() {
    let fake = Fake::v2();
    let running = fake.start();
    for kind in [
        SourceKind::HostMemory,
        SourceKind::Watermarks,
        SourceKind::HostStall,
        SourceKind::CgroupStall,
        SourceKind::CgroupV2,
    ] {
        assert!(running.listens_to(kind), "{kind}: {:?}", running.report.missing);
    }
    assert_eq!(running.missing(SourceKind::HostTrigger), "turned off");
    assert_eq!(running.missing(SourceKind::CgroupV1), "no such hierarchy");
    assert_eq!(running.missing(SourceKind::Systemd), "not set");
    assert_eq!(running.report.notes, Vec::<String>::new());
    let lines: Vec<_> = running.report.listening.iter().map(ToString::to_string).collect();
    assert!(
        lines.iter().any(|l| l.starts_with("zone watermarks (") && l.ends_with("10240 KiB free"))
    );
    assert!(lines.iter().any(|l| l.starts_with("cgroup v2 (") && l.ends_with("limit 102400 KiB")));
    assert_eq!(running.monitor.report(), running.report);

    let nothing = Fake::empty().start();
    assert_eq!(nothing.report.listening, []);
    nothing.assert_runs();
}

#[test]
fn high_swappiness_is_noted() {
    let fake = Fake::v2();
    fake.put("proc/sys/vm/swappiness", "200\n");
    let notes = fake.start().report.notes;
    assert!(notes.len() == 1 && notes[0].contains("vm.swappiness is 200"), "{notes:?}");
}

#[test]
fn free_and_available_memory_are_followed() {
    let fake = Fake::v2();
    let running = fake.start();
    fake.memory(15, 800);
    running.wait(Level::L1, Cause::FreeNearTarget);
    fake.memory(15, 90);
    running.wait(Level::L2, Cause::AvailableLow);
    fake.memory(7, 15);
    running.wait(Level::L3, Cause::AvailableLow);
    fake.memory(500, 800);
    let calm = running.wait(Level::L0, Cause::Easing);
    assert_eq!(running.monitor.pressure().state(), calm);
}

#[test]
fn stalls_are_polled_from_both_files() {
    let fake = Fake::v2();
    let running = fake.start();
    // Counting starts with the first reading, which the monitor has made when it publishes.
    running.assert_runs();
    running.wait(Level::L0, Cause::Easing);
    fake.put("proc/pressure/memory", "some avg10=1.00 total=5000\nfull avg10=0.00 total=0\n");
    running.wait(Level::L1, Cause::Stall);
    running.wait(Level::L0, Cause::Easing);
    fake.put("cgroup/slice/app/memory.pressure", "some total=50000\nfull total=50000\n");
    running.wait(Level::L2, Cause::FullStall);
}

#[test]
fn cgroup_v2_events_and_limits_are_followed() {
    let fake = Fake::v2();
    let running = fake.start();
    running.assert_runs();
    running.wait(Level::L0, Cause::Easing);
    fake.put("cgroup/slice/app/memory.events", "low 0\nhigh 6\nmax 5\noom 5\n");
    running.wait(Level::L1, Cause::CgroupNearLimit);
    fake.put("cgroup/slice/app/memory.events", "low 0\nhigh 6\nmax 5\noom 6\n");
    running.wait(Level::L3, Cause::CgroupOutOfMemory);
    running.monitor.handle().inject(Level::L0);
    running.wait(Level::L0, Cause::Easing);
    // A limit set later counts too.
    fake.put("cgroup/slice/app/memory.high", "1048577\n");
    running.wait(Level::L1, Cause::CgroupNearLimit);
}

#[test]
fn cgroup_v1_counters_and_out_of_memory_are_followed() {
    let fake = Fake::v1();
    let mut options = fake.options();
    options.triggers = true;
    let running = Running::start(options);
    assert!(running.listens_to(SourceKind::CgroupV1), "{:?}", running.report.missing);
    assert!(running.listens_to(SourceKind::CgroupV1Pressure));
    let request = fs::read_to_string(fake.path("cgroup/memory/app/cgroup.event_control")).unwrap();
    let words: Vec<_> = request.split(' ').collect();
    assert!(words.len() == 3 && words[2] == "medium", "{request:?}");
    running.assert_runs();
    running.wait(Level::L0, Cause::Easing);
    fake.put("cgroup/memory/app/memory.failcnt", "4\n");
    running.wait(Level::L1, Cause::CgroupNearLimit);
    fake.put("cgroup/memory/app/memory.oom_control", "oom_kill_disable 0\nunder_oom 1\n");
    running.wait(Level::L3, Cause::CgroupOutOfMemory);
}

#[test]
fn nearly_full_cgroup_drains_without_stall_information() {
    for (fake, folder, used, stat) in [
        (Fake::v2(), "cgroup/slice/app", "memory.current", "inactive_file"),
        (Fake::v1(), "cgroup/memory/app", "memory.usage_in_bytes", "total_inactive_file"),
    ] {
        fake.put(&format!("{folder}/memory.stat"), &format!("anon 1\n{stat} 1\n"));
        let running = fake.start();
        running.assert_runs();
        running.wait(Level::L0, Cause::Easing);
        // Page cache only.
        fake.put(&format!("{folder}/memory.stat"), &format!("anon 1\n{stat} 99000000\n"));
        fake.put(&format!("{folder}/{used}"), "104000000\n");
        running.wait(Level::L1, Cause::CgroupNearLimit);
        fake.put(&format!("{folder}/memory.stat"), &format!("anon 1\n{stat} 3000000\n"));
        running.wait(Level::L2, Cause::CgroupNearLimit);
        fake.put(&format!("{folder}/memory.stat"), &format!("anon 1\n{stat} 1000\n"));
        running.wait(Level::L3, Cause::CgroupNearLimit);
    }
}

#[test]
fn triggers_are_set_with_the_shortest_window_first() {
    let fake = Fake::v2();
    let mut options = fake.options();
    options.triggers = true;
    let running = Running::start(options);
    assert!(running.listens_to(SourceKind::HostTrigger));
    assert!(running.listens_to(SourceKind::CgroupTrigger));
    for file in ["proc/pressure/memory", "cgroup/slice/app/memory.pressure"] {
        let text = fs::read(fake.path(file)).unwrap();
        assert!(text.starts_with(b"some 20000 500000\0"));
    }
    // Text that is not a pressure report counts as no information.
    running.assert_runs();
}

#[test]
fn a_fifo_injects_notices_and_false_alarms_stay_at_a_squeeze() {
    let fake = Fake::v2();
    let path = fake.path("watch");
    fifo(&path);
    let mut options = fake.options();
    options.systemd = Some(watch(&path, Some("c29tZSAyMDAwMDAgMjAwMDAwMAA=")));
    options.thresholds.herd_delay = Duration::ZERO;
    let running = Running::start(options);
    assert!(running.listens_to(SourceKind::Systemd), "{:?}", running.report.missing);
    // The monitor's own write at the start is no event.
    running.assert_runs();
    running.wait(Level::L0, Cause::Easing);
    assert_eq!(running.monitor.pressure().sequence(), 3);
    let flags = rustix::fs::OFlags::NONBLOCK.bits();
    let mut writer = fs::OpenOptions::new()
        .write(true)
        .custom_flags(i32::try_from(flags).unwrap())
        .open(&path)
        .unwrap();
    writer.write_all(b"x").unwrap();
    running.wait(Level::L1, Cause::Notice);
    // A flood of twenty times the capacity of a FIFO: the monitor reads it, and stays at a squeeze.
    let flood = [b'x'; 4096];
    let until = Instant::now() + PATIENCE;
    let mut written = 0;
    while written < 20 * 64 * 1024 {
        match writer.write(&flood) {
            Ok(bytes) => written += bytes,
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
        }
        assert!(Instant::now() < until, "the FIFO is not read");
        std::thread::yield_now();
    }
    let squeezes = running.said.try_iter().inspect(|s| assert!(s.level <= Level::L1, "{s:?}"));
    assert!(squeezes.filter(|state| state.cause == Cause::Notice).count() <= 5);
    // The last writer closes and another one opens: the FIFO is still watched.
    drop(writer);
    running.assert_runs();
    assert!(listens_to(&running.monitor.report(), SourceKind::Systemd));
}

#[test]
fn a_socket_is_written_watched_and_reported_lost_when_it_closes() {
    let fake = Fake::v2();
    let path = fake.path("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let mut options = fake.options();
    options.systemd = Some(watch(&path, Some("Zm9v")));
    let (tell, lost) = channel();
    options.on_lost_source = Some(Box::new(move |finding| tell.send(finding.clone()).unwrap()));
    let running = Running::start(options);
    let (mut peer, _) = listener.accept().unwrap();
    let mut greeting = [0; 3];
    peer.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting, b"foo");
    peer.write_all(b"pressure!").unwrap();
    running.wait(Level::L1, Cause::Notice);
    drop(peer);
    let finding = lost.recv_timeout(PATIENCE).unwrap();
    assert_eq!(finding.kind, SourceKind::Systemd);
    assert_eq!(finding.detail, "lost: the other end has closed");
    let report = running.monitor.report();
    assert!(!listens_to(&report, SourceKind::Systemd) && report.missing.contains(&finding));
    running.assert_runs();
}

#[test]
fn a_pressure_file_of_systemd_is_written_and_not_used_twice() {
    let fake = Fake::v2();
    let path = fake.path("cgroup/slice/app/memory.pressure");
    let mut options = fake.options();
    options.triggers = true;
    options.systemd = Some(watch(&path, Some("c29tZSAyMDAwMDAgMjAwMDAwMAA=")));
    let running = Running::start(options);
    assert!(running.listens_to(SourceKind::Systemd));
    // Neither read nor set a trigger of our own.
    assert!(!running.listens_to(SourceKind::CgroupTrigger));
    assert!(!running.listens_to(SourceKind::CgroupStall));
    assert!(running.listens_to(SourceKind::HostStall));
    assert!(fs::read(&path).unwrap().starts_with(b"some 200000 2000000\0"));
}

#[test]
fn dev_null_turns_monitoring_off_but_not_injection() {
    let fake = Fake::v2();
    let mut options = fake.options();
    options.systemd = Some(watch(Path::new("/dev/null"), None));
    let running = Running::start(options);
    assert_eq!(running.report.listening, []);
    assert_eq!(running.report.notes.len(), 1);
    fake.memory(1, 1);
    running.assert_runs();
    running.monitor.handle().inject(Level::L1);
    running.wait(Level::L1, Cause::Injected);
    running.wait(Level::L0, Cause::Easing);
}

#[test]
fn an_invalid_watch_is_reported_with_its_reason() {
    let fake = Fake::v2();
    let problem = |watch| {
        let mut options = fake.options();
        options.systemd = Some(watch);
        let running = Running::start(options);
        running.assert_runs();
        running.missing(SourceKind::Systemd).to_owned()
    };
    assert_eq!(problem(watch(Path::new("relative"), None)), "must be an absolute path");
    assert!(problem(watch(&fake.path("absent"), None)).contains("No such file"));
    assert!(problem(watch(fake.0.path(), None)).contains("neither a pressure file"));
    let file = fake.path("proc/pressure/memory");
    assert!(problem(watch(&file, Some("no base64!"))).contains("not valid Base64"));
    assert!(problem(watch(&file, Some(&"A".repeat(65_540)))).contains("longer than"));
    let socket = fake.path("deaf");
    drop(UnixListener::bind(&socket).unwrap());
    assert!(problem(watch(&socket, None)).contains("refused"));
}

#[test]
fn a_source_that_fails_is_dropped_and_the_other_sources_stay() {
    let fake = Fake::v2();
    // A directory opens and does not read.
    fs::remove_file(fake.path("proc/pressure/memory")).unwrap();
    fs::create_dir(fake.path("proc/pressure/memory")).unwrap();
    let running = fake.start();
    assert!(running.missing(SourceKind::HostStall).contains("directory"));
    assert!(running.listens_to(SourceKind::CgroupStall));
    running.assert_runs();
}

#[test]
fn the_monitor_runs_on_this_host() {
    let running = Running::start(MonitorOptions::new(1));
    assert!(running.listens_to(SourceKind::HostMemory), "{:?}", running.report);
    assert!(running.listens_to(SourceKind::Watermarks), "{:?}", running.report);
    running.assert_runs();
    let limit = limit(&Roots::default()).unwrap();
    assert!(limit.bytes > 0 && available(&Roots::default()).unwrap() <= limit.bytes);
}

#[test]
fn a_callback_may_drop_the_monitor() {
    let (monitor, _) = Monitor::start(Fake::empty().options()).unwrap();
    let pressure = monitor.pressure();
    let handle = monitor.handle();
    let slot = std::sync::Mutex::new(Some(monitor));
    let (tell, told) = channel();
    let _subscription = pressure.subscribe(move |_| {
        drop(slot.lock().unwrap().take());
        let _ = tell.send(());
    });
    handle.inject(Level::L1);
    told.recv_timeout(PATIENCE).unwrap();
    // A handle without a monitor has no effect.
    handle.inject(Level::L1);
}

#[test]
fn a_threshold_out_of_range_is_refused_by_name() {
    let mut options = Fake::empty().options();
    options.thresholds.available_last = 999;
    let error = Monitor::start(options).unwrap_err().to_string();
    assert_eq!(error, "memory pressure threshold `available_last` is above `available_drain`");
}

#[test]
fn the_least_limit_up_the_tree_applies() {
    const MIB: u64 = 1 << 20;
    let fake = Fake::v2();
    let source = |limit: &ebb_mem::pressure::Limit| match &limit.source {
        LimitSource::Cgroup { dir, .. } => {
            dir.strip_prefix(fake.path("cgroup")).unwrap().to_path_buf()
        }
        _ => PathBuf::from("RAM"),
    };
    let own = limit(&fake.roots()).unwrap();
    assert_eq!((own.bytes, source(&own)), (100 * MIB, PathBuf::from("slice/app")));
    // 100 MiB less 1 MiB used, of which half is inactive file.
    assert_eq!(available(&fake.roots()), Some(100 * MIB - MIB / 2));
    fake.put("cgroup/slice/memory.high", &format!("{}\n", 50 * MIB));
    fake.put("cgroup/slice/memory.current", &format!("{}\n", 60 * MIB));
    let slice = limit(&fake.roots()).unwrap();
    assert_eq!(
        (own.source.setting(), slice.source.setting()),
        (Some("MemoryMax"), Some("MemoryHigh"))
    );
    fake.put("proc/77/cgroup", "0::/slice/app\n");
    fake.put("proc/78/cgroup", "0::/\n");
    assert_eq!(limit_of_process(&fake.roots(), 77).as_ref(), Some(&slice));
    assert_eq!(limit_of_process(&fake.roots(), 78).map(|it| it.source), Some(LimitSource::Ram));
    assert_eq!((slice.bytes, source(&slice)), (50 * MIB, PathBuf::from("slice")));
    assert_eq!(available(&fake.roots()), Some(0));
    // The monitor watches the limit that is reached first.
    let report = fake.start().report;
    let watched = report.listening.iter().find(|found| found.kind == SourceKind::CgroupV2);
    assert_eq!(watched.unwrap().path, Some(fake.path("cgroup/slice")));
    // A path that leads out of the tree is not followed.
    fake.put("proc/self/cgroup", "0::/../../etc\n");
    let out = limit(&fake.roots()).unwrap();
    assert_eq!((out.bytes, source(&out)), (1000 * MIB, PathBuf::from("RAM")));

    let old = Fake::v1();
    assert_eq!(limit(&old.roots()).unwrap().bytes, 100 * MIB);
    assert_eq!(available(&old.roots()), Some(99 * MIB));
    assert_eq!(limit(&Fake::empty().roots()), None);
}

/// Content of files: valid, unusual and invalid.
fn text() -> impl Strategy<Value = Vec<u8>> {
    let words = "((some|full|high|max|oom|min|low|MemTotal:|MemFree:|MemAvailable:|0::|4:memory:)\
                 |[0-9]{1,22}|total=|kB|/|\\.\\.|[ \n]|\\PC){0,80}";
    prop_oneof![
        words.prop_map(String::into_bytes),
        prop::collection::vec(any::<u8>(), 0..300),
        (any::<u8>(), 4_000usize..40_000).prop_map(|(byte, length)| vec![byte; length]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 48,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn no_content_of_any_file_stops_the_monitor(
        texts in prop::collection::vec(text(), 12),
        later in prop::collection::vec(text(), 12),
        v2: bool,
    ) {
        let fake = if v2 { Fake::v2() } else { Fake::v1() };
        let mut names = vec!["meminfo", "zoneinfo", "pressure/memory", "sys/vm/swappiness"]
            .into_iter()
            .map(|name| format!("proc/{name}"))
            .collect::<Vec<_>>();
        names.extend(if v2 {
            ["pressure", "current", "high", "max", "events"]
                .map(|name| format!("cgroup/slice/app/memory.{name}"))
        } else {
            ["usage_in_bytes", "limit_in_bytes", "failcnt", "oom_control", "stat"]
                .map(|name| format!("cgroup/memory/app/memory.{name}"))
        });
        let write = |texts: &[Vec<u8>]| {
            for (name, text) in names.iter().zip(texts) {
                fs::create_dir_all(fake.path(name).parent().unwrap()).unwrap();
                fs::write(fake.path(name), text).unwrap();
            }
        };
        write(&texts);
        let mut options = fake.options();
        options.triggers = v2;
        let running = Running::start(options);
        running.monitor.handle().inject(Level::L1);
        write(&later);
        let _ = limit(&fake.roots());
        let _ = available(&fake.roots());
        fs::write(fake.path("proc/self/cgroup"), texts.last().unwrap()).unwrap();
        let _ = limit(&fake.roots());
        running.assert_runs();
    }
}
