//! The engine over stores that fail, hang and come back, driven by futures on one worker.

use std::collections::BTreeMap;
use std::path::Path;

use ebb_cache::CacheOptions;
use ebb_config::ServeArgs;
use ebb_config::params::Configured;
use ebb_export_nbd::{ServerLimits, TlsMode};
use ebb_io::Worker;
use ebb_mem::Memory;
use ebb_store::{NbdAddress, NbdError, NbdOptions, NbdStore, Store, TestStore};
use ebb_volume::{BlockError, ErrorKind, Operation};

use super::*;
use crate::stores::StoreTarget;

mod access;
mod checked;
mod created;
mod delta_users;
mod files;
mod flatten;
mod full_disk;
mod guest_layers;
mod guests;
mod kept_bases;
mod last_flush;
mod manage;
mod moved;
mod overlay;
mod overlay_sizes;
mod remote;
mod reopen;
mod sizes_without_state;
mod sockets;
mod state;
mod state_model;
mod unfinished;
mod unstable_snapshot;
mod waiting;

const SIZE: u64 = 1 << 20;
/// Nothing here takes so long, unless it hangs.
const SOON: Duration = Duration::from_secs(60);

/// What becomes of a store that is opened.
#[derive(Clone)]
enum Fate {
    Opens(Arc<TestStore>),
    /// An export of this name of a server with a socket here.
    Remote(NbdOptions),
    Fails,
    Hangs,
}

/// Opens stores as it is told.
#[derive(Default)]
struct Stores {
    fates: Mutex<BTreeMap<String, Fate>>,
    opened: Mutex<Vec<String>>,
    /// Openings that are under way, and the most there were.
    under_way: Arc<Mutex<(usize, usize)>>,
}

/// An opening that is under way.
struct UnderWay(Arc<Mutex<(usize, usize)>>);

impl UnderWay {
    fn begin(all: &Arc<Mutex<(usize, usize)>>) -> UnderWay {
        let mut counts = lock(all);
        counts.0 += 1;
        counts.1 = counts.1.max(counts.0);
        drop(counts);
        UnderWay(all.clone())
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        lock(&self.0).0 -= 1;
    }
}

impl Stores {
    fn set(&self, name: &str, fate: Fate) {
        lock(&self.fates).insert(name.to_owned(), fate);
    }
}

fn failure() -> StoreError {
    let source = std::io::Error::other("not today");
    StoreError::Nbd(NbdError::Connect { address: "here".to_owned(), source })
}

impl Opener for Stores {
    fn open(
        &self,
        name: &str,
        config: &VolumeConfig,
        _: Expected,
        claims: &Arc<StoreClaims>,
    ) -> Opening {
        lock(&self.opened).push(name.to_owned());
        // By its path, if that has a fate, else by its name.
        let path = config.store.to_string().replacen("file:/", "", 1);
        let fates = lock(&self.fates);
        let fate = fates.get(&path).or_else(|| fates.get(name)).cloned();
        let claim = claims.claim(name, config);
        let all = self.under_way.clone();
        let (name, config) = (name.to_owned(), config.clone());
        Box::pin(async move {
            let _under_way = UnderWay::begin(&all);
            futures_lite::future::yield_now().await;
            let claim = claim?;
            match fate {
                Some(Fate::Opens(store)) => {
                    Ok(Opened::new(&name, &config, Store::Test(store), claim))
                }
                Some(Fate::Remote(options)) => {
                    let (store, _) = NbdStore::open(options)?;
                    Ok(Opened::new(&name, &config, Store::Nbd(store), claim))
                }
                Some(Fate::Fails) | None => Err(failure()),
                Some(Fate::Hangs) => std::future::pending().await,
            }
        })
    }

    fn compare(&self, _: &VolumeConfig, _: Option<StoreTarget>, _: &VolumeConfig) -> Comparing {
        Box::pin(std::future::ready(Ok(false)))
    }
}

struct World {
    engine: Arc<Engine>,
    stores: Arc<Stores>,
    volumes: Volumes,
    /// The last: its tasks hold on to the rest.
    worker: Worker,
}

fn config(text: &str) -> Config {
    let text = format!("listen = [\"unix:/never\"]\n{text}");
    Config::parse(&text, Path::new("test"), &ServeArgs::default()).unwrap()
}

fn volumes(names: &[&str], cache: &str) -> Config {
    let volume = |name: &&str| format!("[volume.{name}]\nstore='file:/{name}'\ncache='{cache}'\n");
    config(&names.iter().map(volume).collect::<String>())
}

impl World {
    fn new(config: &Config, drain: Duration) -> World {
        let stores = Arc::<Stores>::default();
        World::over(config, drain, None, stores.clone(), stores)
    }

    /// On files.
    fn on_files(config: &Config) -> World {
        World::over(
            config,
            SOON,
            None,
            Arc::default(),
            Arc::new(HelperThreads { workers: 1, ..HelperThreads::default() }),
        )
    }

    fn over(
        config: &Config,
        drain: Duration,
        state: Option<StateDir>,
        stores: Arc<Stores>,
        opener: Arc<dyn Opener>,
    ) -> World {
        let started = ebb_mem::clock::now();
        let memory = Memory::new(ebb_mem::MemoryOptions::new(64 << 20, started)).unwrap();
        let worker = Worker::start("engine", &memory).unwrap();
        let options = CacheOptions { max_bytes: Some(16 << 20), min_bytes: 0, started };
        let volumes = Volumes::default();
        let server = Server::new(volumes.clone(), ServerLimits::default(), TlsMode::Off, None);
        let engine = Engine::new(EngineParts {
            server,
            volumes: volumes.clone(),
            parameters: Parameters::new(&Configured::from(config)),
            cache: Cache::without_reclaimer(&memory, options),
            workers: vec![worker.handle()],
            state,
            config_file: None,
            opener,
            drain,
            dirty_max: 8 << 20,
            started,
        });
        World { engine: engine.unwrap(), stores, volumes, worker }
    }

    fn store(&self, name: &str) -> Arc<TestStore> {
        let store = Arc::new(TestStore::new(SIZE, 1));
        self.stores.set(name, Fate::Opens(store.clone()));
        store
    }

    fn run<Fut, T: Send + 'static>(
        &self,
        step: impl FnOnce(Arc<Engine>, Io) -> Fut + Send + 'static,
    ) -> T
    where
        Fut: Future<Output = T> + 'static,
    {
        let engine = self.engine.clone();
        let step = |io: Io| async move {
            let inner = io.clone();
            inner.timeout(SOON, step(engine, io)).await.expect("it hangs")
        };
        self.worker.handle().block_on(step).expect("the worker ended")
    }

    /// The volume served under this name.
    fn volume(&self, name: &str) -> Option<Arc<Volume>> {
        self.volumes.get(name).map(|served| served.volume)
    }

    fn start(&self, config: Config, patience: Option<Duration>) {
        self.run(move |engine, io| async move { engine.start(&io, config, patience).await });
    }

    fn reload(&self, config: Config) {
        self.run(move |engine, io| async move { drop(engine.reload(&io, config).await) });
    }

    fn stop(&self) -> StopReport {
        self.run(|engine, io| async move { engine.stop(&io).await })
    }

    fn write(&self, name: &str, byte: u8) -> Result<(), BlockError> {
        let volume = self.volume(name).expect("it is served");
        self.run(move |_, io| async move {
            let mut buf = io.pool().take(4096).await;
            buf.fill(byte);
            volume.write(&io, buf, 0, false).await.0
        })
    }

    /// Begins a write and does not wait for it.
    fn leave_a_write(&self, name: &str) {
        let volume = self.volume(name).expect("it is served");
        self.worker.handle().spawn(move |io| async move {
            let buf = io.pool().take(4096).await;
            let _ = volume.write(&io, buf, 8192, false).await;
        });
    }

    fn phases(&self) -> Vec<(String, VolumePhase)> {
        self.engine.states().into_iter().map(|state| (state.name, state.phase)).collect()
    }

    fn wait_for(&self, what: &str, seen: impl Fn(&World) -> bool) {
        let deadline = std::time::Instant::now() + SOON;
        while !seen(self) {
            assert!(std::time::Instant::now() < deadline, "not seen: {what}");
            std::thread::park_timeout(Duration::from_millis(2));
        }
    }
}

fn phase(name: &str, phase: VolumePhase) -> (String, VolumePhase) {
    (name.to_owned(), phase)
}

#[test]
fn a_store_that_hangs_while_it_is_opened_delays_neither_start_nor_stop_nor_a_change_of_it() {
    let first = volumes(&["good", "hangs"], "none");
    let world = World::new(&first, SOON);
    world.store("good");
    world.stores.set("hangs", Fate::Hangs);
    world.start(first.clone(), Some(Duration::from_millis(50)));
    assert_eq!(
        world.phases(),
        [phase("good", VolumePhase::Serving), phase("hangs", VolumePhase::Opening)]
    );
    assert!(world.volume("hangs").is_none());
    // What is wanted of it now opens at once; the old attempt is forgotten.
    world.store("hangs");
    world.reload(config(
        "[volume.good]\nstore='file:/good'\n[volume.hangs]\nstore='file:/elsewhere'\n",
    ));
    assert_eq!(
        world.phases(),
        [phase("good", VolumePhase::Serving), phase("hangs", VolumePhase::Serving)]
    );
    assert_eq!(world.stop(), StopReport::default());
}

/// The time that a start waits for silent stores begins anew when a store was opened, at once.
#[test]
fn a_start_waits_for_silent_stores_since_the_last_store_was_opened() {
    const PATIENCE: Duration = Duration::from_secs(4);
    let both = volumes(&["good", "hangs"], "none");
    let world = World::new(&both, SOON);
    world.store("good");
    world.stores.set("hangs", Fate::Hangs);
    let started = world.run(move |engine, io| async move {
        let start = async {
            engine.start(&io, both, Some(PATIENCE)).await;
            true
        };
        let twice = async {
            io.sleep(2 * PATIENCE - PATIENCE / 4).await;
            false
        };
        or(start, twice).await
    });
    assert!(started, "it has waited twice");
    assert_eq!(world.phases()[0], phase("good", VolumePhase::Serving));
}

#[test]
fn stores_are_opened_in_limited_numbers_and_a_store_that_hangs_delays_no_other_store() {
    let names: Vec<_> = (0..1000).map(|number| format!("disk{number:04}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let world = World::new(&volumes(&names, "none"), SOON);
    names.iter().for_each(|name| drop(world.store(name)));
    world.start(volumes(&names, "none"), None);
    let serving = |world: &World| {
        world.phases().iter().filter(|(_, phase)| *phase == VolumePhase::Serving).count()
    };
    assert_eq!(serving(&world), 1000);
    let (left, most) = *lock(&world.stores.under_way);
    assert_eq!(left, 0);
    assert!((2..=64).contains(&most), "{most} at once");
    assert_eq!(world.stop(), StopReport::default());
    // As many hang as are opened at once, and come first.
    let world = World::new(&volumes(&names, "none"), SOON);
    names[..100].iter().for_each(|name| world.stores.set(name, Fate::Hangs));
    names[100..200].iter().for_each(|name| drop(world.store(name)));
    let first = volumes(&names[..200], "none");
    world.start(first, Some(Duration::from_secs(1)));
    world.wait_for("all others are served", |world| serving(world) == 100);
    assert_eq!(world.stop(), StopReport::default());
}

#[test]
fn a_store_that_cannot_be_opened_is_tried_again_until_it_can() {
    let both = volumes(&["bad", "good"], "none");
    let world = World::new(&both, SOON);
    world.store("good");
    world.stores.set("bad", Fate::Fails);
    world.start(both, None);
    assert_eq!(
        world.phases(),
        [phase("bad", VolumePhase::Failed), phase("good", VolumePhase::Serving)]
    );
    let failure = world.engine.states()[0].failure.clone().unwrap();
    assert!(failure.reason.contains("not today"), "{}", failure.reason);
    world.store("bad");
    world.wait_for("it is served", |world| world.volume("bad").is_some());
    assert_eq!(lock(&world.stores.opened).iter().filter(|name| *name == "bad").count(), 2);
    assert!(world.stop().is_clean());
}

#[test]
fn a_stop_writes_what_can_be_written_and_lists_the_store_that_hangs_alone() {
    for cache in ["none", "writethrough", "writeback"] {
        let both = volumes(&["dead", "good"], cache);
        let world = World::new(&both, Duration::from_millis(300));
        let (dead, good) = (world.store("dead"), world.store("good"));
        world.start(both, None);
        world.write("dead", 1).unwrap();
        world.write("good", 2).unwrap();
        dead.hang();
        let report = world.stop();
        let listed: Vec<_> = report.unflushed.iter().map(|left| left.volume.as_str()).collect();
        assert_eq!(listed, ["dead"], "{cache}: {report:?}");
        let bytes = if cache == "writeback" { 4096 } else { 0 };
        assert_eq!(report.unflushed[0].bytes, bytes, "{cache}");
        assert!(report.abandoned.is_empty());
        assert_eq!(good.stable_bytes()[..4096], [2; 4096], "{cache}: it is flushed");
        dead.release();
    }
}

#[test]
fn a_stop_counts_only_data_that_the_store_does_not_have_as_unwritten() {
    let all = volumes(&["lost", "slow"], "writeback");
    let world = World::new(&all, Duration::from_secs(3));
    let (lost, slow) = (world.store("lost"), world.store("slow"));
    lost.flush_faults.store(1000, Ordering::SeqCst);
    world.start(all, None);
    world.wait_for("the flush after the opening has failed", |world| {
        world.volume("lost").is_some_and(|volume| volume.is_lost())
    });
    world.wait_for("the other one has succeeded", |_| slow.flushes.load(Ordering::SeqCst) > 0);
    world.write("lost", 1).unwrap();
    world.write("slow", 2).unwrap();
    slow.hang_only(&[Operation::Flush]);
    let report = world.stop();
    let listed = report.unflushed.iter().map(|left| (&*left.volume, left.bytes, left.unstable));
    let listed: Vec<_> = listed.collect();
    assert_eq!(listed, [("lost", 0, 0), ("slow", 0, 4096)], "{report:?}");
    assert_eq!((lost.content()[0], slow.content()[0]), (1, 2));
    slow.release();
}

#[test]
fn a_store_that_hangs_without_lost_data_is_not_listed_by_a_stop() {
    let text =
        "[volume.dead]\nstore='file:/dead'\n[volume.still]\nstore='file:/still'\nread_only=true\n";
    let both = config(text);
    let world = World::new(&both, Duration::from_millis(300));
    let (dead, still) = (world.store("dead"), world.store("still"));
    world.start(both, None);
    dead.hang();
    still.hang();
    world.leave_a_write("dead");
    world.wait_for("a write that hangs", |_| dead.hanging() == 1);
    let report = world.stop();
    // Nothing was acknowledged.
    assert_eq!((report.unflushed, report.abandoned), (Vec::new(), vec!["dead".to_owned()]));
    dead.release();
    still.release();
}

#[test]
fn a_hurried_stop_ends_and_has_flushed_what_could_be() {
    let both = volumes(&["dead", "good"], "writeback");
    let world = World::new(&both, Duration::from_secs(3600));
    let (dead, good) = (world.store("dead"), world.store("good"));
    world.start(both, None);
    world.write("dead", 1).unwrap();
    world.write("good", 2).unwrap();
    dead.hang();
    world.engine.hurry(Duration::from_millis(300));
    let report = world.stop();
    assert_eq!(report.unflushed.len(), 1, "{report:?}");
    assert_eq!(good.stable_bytes()[..4096], [2; 4096]);
    dead.release();
}

#[test]
fn a_stop_interrupts_a_reload_that_waits_for_a_dead_store() {
    let all = volumes(&["dead", "gone", "good"], "none");
    let world = World::new(&all, Duration::from_millis(500));
    let (dead, gone, good) = (world.store("dead"), world.store("gone"), world.store("good"));
    world.start(all, None);
    world.write("dead", 1).unwrap();
    world.write("gone", 3).unwrap();
    world.write("good", 2).unwrap();
    dead.hang();
    let next = volumes(&["good"], "none");
    world.worker.handle().spawn({
        let engine = world.engine.clone();
        |io| async move { drop(engine.reload(&io, next).await) }
    });
    // The other one that goes does not wait for it.
    world.wait_for("gone is gone", |world| {
        world.phases() == [phase("dead", VolumePhase::Closing), phase("good", VolumePhase::Serving)]
    });
    assert_eq!(gone.stable_bytes()[..4096], [3; 4096]);
    let report = world.stop();
    let listed: Vec<_> = report.unflushed.iter().map(|left| left.volume.as_str()).collect();
    assert_eq!(listed, ["dead"]);
    assert_eq!(good.stable_bytes()[..4096], [2; 4096]);
    dead.release();
}

#[test]
fn keys_that_need_a_restart_keep_their_values_and_are_logged_at_each_reload() {
    let old = volumes(&["disk"], "none");
    let world = World::new(&old, SOON);
    world.store("disk");
    world.start(old.clone(), None);
    let more = "control='/c'\nweb='tcp:localhost:1'\nweb_names=['n']\nworkers=3\nidle_memory='keep'\nxen=true\n";
    let more = format!(
        "{more}[volume.disk]\nstore='file:/disk'\n[nbd]\ntls='on'\ntls_certificates='/t'\n"
    );
    let new = Config::parse(
        &format!("listen=['unix:/other']\n{more}"),
        Path::new("test"),
        &ServeArgs::default(),
    );
    let new = new.unwrap();
    let told = old.reload_diff(&new).needs_restart;
    assert_eq!(told.len(), 9, "{told:?}");
    world.reload(new.clone());
    let kept = lock(&world.engine.definitions).config.clone().unwrap();
    assert_eq!(kept.reload_diff(&new).needs_restart, told);
    assert!(world.stop().is_clean());
}

#[test]
fn a_reload_keeps_what_is_served_when_its_successor_cannot_be_opened() {
    let old = volumes(&["disk"], "none");
    let world = World::new(&old, SOON);
    let first = world.store("disk");
    world.start(old.clone(), None);
    let served = world.volume("disk").unwrap();
    world.stores.set("disk", Fate::Fails);
    let new = config("[volume.disk]\nstore='file:/other'\n");
    world.reload(new.clone());
    assert!(Arc::ptr_eq(&served, &world.volume("disk").unwrap()));
    world.write("disk", 4).unwrap();
    // The same file again: it was not changed, so that it is tried again.
    let second = world.store("disk");
    world.reload(new);
    assert!(!Arc::ptr_eq(&served, &world.volume("disk").unwrap()));
    assert_eq!(first.stable_bytes()[..4096], [4; 4096], "flushed on its way out");
    world.write("disk", 5).unwrap();
    assert!(world.stop().is_clean());
    assert_eq!(second.stable_bytes()[..4096], [5; 4096]);
}

#[test]
fn a_volume_that_is_removed_and_cannot_be_written_is_tried_until_it_can() {
    let both = volumes(&["disk", "other"], "writeback");
    let world = World::new(&both, Duration::from_millis(200));
    let disk = world.store("disk");
    world.store("other");
    world.start(both, None);
    world.write("disk", 6).unwrap();
    disk.hang();
    // The reload ends at its limit, and nothing is dropped.
    world.reload(volumes(&["other"], "writeback"));
    assert_eq!(
        world.phases(),
        [phase("disk", VolumePhase::Closing), phase("other", VolumePhase::Serving)]
    );
    disk.release();
    world
        .wait_for("it is closed", |world| world.phases() == [phase("other", VolumePhase::Serving)]);
    assert_eq!(disk.stable_bytes()[..4096], [6; 4096]);
    assert!(world.stop().is_clean());
}

#[test]
fn a_stop_lists_a_volume_that_a_reload_withdrew_with_a_loss_unless_it_is_served_anew() {
    for anew in [false, true] {
        let both = volumes(&["disk", "other"], "none");
        let world = World::new(&both, SOON);
        let disk = world.store("disk");
        world.store("other");
        world.start(both.clone(), None);
        world.write("disk", 6).unwrap();
        disk.faults(&ebb_store::Faults { flushes: 1000, ..ebb_store::Faults::default() });
        world.reload(volumes(&["other"], "none"));
        assert_eq!(world.phases(), [phase("other", VolumePhase::Serving)]);
        if anew {
            // What the log told the operator to do.
            world.stores.set("disk", Fate::Opens(Arc::new(TestStore::new(SIZE, 2))));
            world.reload(both);
        }
        let listed: Vec<_> = world.stop().unflushed.into_iter().map(|left| left.volume).collect();
        assert_eq!(listed, if anew { vec![] } else { vec!["disk"] });
    }
}

/// A removal that a second reload repeats waits for the first one. When it continues, a third reload may
/// have added the volume again: in every order, the volume is served and the engine knows it.
#[test]
fn a_repeated_removal_does_not_remove_a_volume_that_was_added_again() {
    let both = volumes(&["disk", "other"], "writeback");
    let one = volumes(&["other"], "writeback");
    for turns in 0..60 {
        let world = World::new(&both, SOON);
        let disk = world.store("disk");
        world.store("other");
        world.start(both.clone(), None);
        world.write("disk", 6).unwrap();
        disk.hang();
        let (without, with) = (one.clone(), both.clone());
        let freed = disk.clone();
        world.run(move |engine, io| async move {
            for config in [without.clone(), without] {
                let (engine, on) = (engine.clone(), io.clone());
                io.spawn(async move { drop(engine.reload(&on, config).await) }).detach();
                for _ in 0..20 {
                    futures_lite::future::yield_now().await;
                }
            }
            freed.release();
            for _ in 0..turns {
                futures_lite::future::yield_now().await;
            }
            engine.reload(&io, with).await;
        });
        let both_served =
            [phase("disk", VolumePhase::Serving), phase("other", VolumePhase::Serving)];
        world.wait_for("both are served", |world| world.phases() == both_served);
        assert!(world.volume("disk").is_some(), "after {turns} turns");
        assert!(world.stop().is_clean());
    }
}

/// The store of a volume that a stop has given up completes a write afterwards: it is not acknowledged, since it
/// would be lost without being listed.
#[test]
fn a_write_that_completes_after_its_volume_was_given_up_is_not_acknowledged() {
    for cache in ["none", "writeback"] {
        let disk = volumes(&["disk"], cache);
        let world = World::new(&disk, Duration::from_millis(100));
        let store = world.store("disk");
        world.start(disk, None);
        store.hang();
        let volume = world.volume("disk").unwrap();
        let (sender, written) = std::sync::mpsc::channel();
        world.worker.handle().spawn(move |io| async move {
            // Not a whole page: a cache reads the rest of it first.
            let buf = io.pool().take(512).await;
            let _ = sender.send(volume.write(&io, buf, 8192, false).await.0);
        });
        let volume = world.volume("disk").unwrap();
        world.wait_for("the write is in flight", |_| volume.in_flight() > 0);
        let report = world.stop();
        assert_eq!((report.unflushed.len(), &*report.abandoned), (0, &["disk".to_owned()][..]));
        store.release();
        let outcome = written.recv_timeout(SOON).unwrap();
        assert_eq!(outcome.map_err(|error| error.kind), Err(ErrorKind::Closing), "cache {cache}");
    }
}
