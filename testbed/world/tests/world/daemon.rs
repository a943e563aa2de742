//! One life of the daemon: from its start to a shutdown, a kill or a power cut.
//!
//! Everything is product code except what starts threads: the reclaimer, the memory advisor and the
//! timer of the memory's estimates are stepped here. The world can make the opening of stores fail.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use ebb_cache::{Cache, CacheOptions, Reclaimer};
use ebb_config::params::{CACHE_MAX, CACHE_MIN, Configured, ParameterOwner, Parameters};
use ebb_config::{Config, ServeArgs, Size, StoreUri, VolumeConfig};
use ebb_control::VolumeManager;
use ebb_export_nbd::{Server, TlsMode};
use ebb_export_xen::shm::World as Machine;
use ebb_export_xen::{Backend, BackendOptions, Figures, NextRun, XenParameters, XenstoreControl};
use ebb_io::fd_from;
use ebb_io::sim::SimWorker;
use ebb_mem::Memory;
use ebb_mem::pressure::{Cause, Level, PressureState};
use ebb_store::{MemoryStore, NbdStore, Store, TestStore};
use ebb_volume::Io;
use ebb_volume::{Mode, Volume, Volumes};
use ebbd::engine::{Comparing, Engine, EngineParts, Opened, Opener, Opening, StoreClaims};
use ebbd::stores::{Expected, StoreError, StoreTarget, nbd_options};

use crate::folder::Folder;
use crate::random::Random;
use crate::remote::Remote;

/// The interval of the reclaimer, and that of the memory's ticks.
const RECLAIM_INTERVAL: Duration = Duration::from_millis(100);
const TICK_INTERVAL: Duration = Duration::from_secs(1);

/// The settings of a daemon, drawn for each life.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    ceiling: usize,
    cache_max: u64,
    cache_min: u64,
    lend: bool,
    pub(crate) drain: Duration,
}

impl Settings {
    pub(crate) fn draw(random: &mut Random) -> Settings {
        let cache_max = random.pick(&[1 << 20, 1 << 20, 2 << 20, 8 << 20]);
        Settings {
            ceiling: random.pick(&[32 << 20, 64 << 20]),
            cache_max,
            cache_min: random.pick(&[0, 0, 128 << 10]),
            lend: random.chance(30),
            drain: Duration::from_millis(random.pick(&[500, 5_000, 60_000])),
        }
    }

    /// Settings with little memory.
    pub(crate) fn draw_small(random: &mut Random) -> Settings {
        Settings { ceiling: 8 << 20, cache_max: 1 << 20, ..Settings::draw(random) }
    }
}

/// The store of a volume.
#[derive(Clone)]
pub(crate) enum Place {
    Disk(Arc<TestStore>),
    Memory(u64),
    /// An export of an NBD server, and the further parameters of its URI.
    Remote(Remote, &'static str),
    Overlay(Overlay),
}

/// The delta of a volume, and the volume below it.
#[derive(Clone)]
pub(crate) struct Overlay {
    pub(crate) folder: Folder,
    /// The name of its file.
    pub(crate) file: String,
    pub(crate) base: String,
}

/// A volume as it is configured.
#[derive(Clone)]
pub(crate) struct Wanted {
    pub(crate) name: String,
    pub(crate) place: Place,
    pub(crate) mode: Mode,
    /// The backing device that it shares with other volumes, if any.
    pub(crate) bdi: Option<String>,
    /// Xen guests and NBD clients may write to it at the same time.
    pub(crate) shared: bool,
    /// It is a base.
    pub(crate) read_only: bool,
}

/// The configuration file, parsed.
fn configuration(settings: &Settings, volumes: &[Wanted]) -> Config {
    use std::fmt::Write as _;
    let Settings { cache_max, cache_min, .. } = settings;
    let mut text = format!(
        "listen = [\"unix:/world.sock\"]\ncache_max = \"{cache_max}\"\ncache_min = \"{cache_min}\"\n"
    );
    for Wanted { name, place, mode, bdi, shared, read_only } in volumes {
        let store = match place {
            Place::Disk(_) => format!("file:/world/{name}"),
            Place::Memory(size) => format!("memory:{size}"),
            Place::Overlay(Overlay { folder, file, .. }) => {
                format!("file:{}", folder.path(file).display())
            }
            Place::Remote(server, rest) => {
                format!("nbd+unix:///{name}?socket={}{rest}", server.path().display())
            }
        };
        let _ = write!(text, "[volume.{name}]\nstore = \"{store}\"\ncache = \"{mode}\"\n");
        if let (Some(bdi), Mode::Writeback) = (bdi, mode) {
            let _ = writeln!(text, "bdi = \"{bdi}\"");
        }
        if *shared {
            text.push_str("shared = true\n");
        }
        if *read_only {
            text.push_str("read_only = true\n");
        }
        if let Place::Overlay(Overlay { base, .. }) = place {
            let _ = writeln!(text, "base = \"{base}\"\ncreate = true");
        }
    }
    Config::parse(&text, Path::new("world.toml"), &ServeArgs::default()).unwrap()
}

/// A store that the daemon can open.
struct Slot {
    place: Place,
    fails: bool,
    /// The store that was opened last in this life.
    opened: Option<Store>,
    /// It was opened again after its predecessor was closed with a loss.
    lost: bool,
}

/// The stores of the world, by volume.
#[derive(Default)]
pub(crate) struct Disks(Mutex<BTreeMap<String, Slot>>);

impl Disks {
    pub(crate) fn put(&self, name: &str, place: &Place) {
        let slot = Slot { place: place.clone(), fails: false, opened: None, lost: false };
        self.0.lock().unwrap().insert(name.to_owned(), slot);
    }

    /// Makes attempts to open it fail, or succeed.
    pub(crate) fn fail(&self, name: &str, fails: bool) {
        if let Some(found) = self.0.lock().unwrap().get_mut(name) {
            found.fails = fails;
        }
    }

    /// Whether it was opened again after a loss since the last call.
    pub(crate) fn take_lost(&self, name: &str) -> bool {
        let mut disks = self.0.lock().unwrap();
        disks.get_mut(name).is_some_and(|slot| std::mem::take(&mut slot.lost))
    }

    /// Whether it was closed with a loss, or is served with one.
    pub(crate) fn is_lost(&self, name: &str) -> bool {
        let disks = self.0.lock().unwrap();
        disks.get(name).and_then(|slot| slot.opened.as_ref()).is_some_and(Store::is_lost)
    }

    /// The directory that a path is in.
    fn folder_of(&self, path: &Path) -> Option<Folder> {
        let disks = self.0.lock().unwrap();
        let mut folders = disks.values().filter_map(|slot| match &slot.place {
            Place::Overlay(overlay) => Some(&overlay.folder),
            _ => None,
        });
        folders.find(|folder| folder.has(path)).cloned()
    }

    /// The daemon has ended.
    pub(crate) fn end_life(&self) {
        for slot in self.0.lock().unwrap().values_mut() {
            (slot.opened, slot.lost) = (None, false);
        }
    }
}

/// The opener that the engine gets: opens [`Disks`].
struct OpenDisks(Arc<Disks>);

impl OpenDisks {
    /// A file of a directory of the world.
    fn file(
        &self,
        name: &str,
        config: &VolumeConfig,
        (folder, path): (&Folder, &Path),
        expected: &Expected,
    ) -> Result<Store, StoreError> {
        let create = config.size.filter(|_| config.create).map(Size::bytes);
        let opened = folder.open(path, create, *expected == Expected::None);
        let store = config.store.to_string();
        let disk = Arc::new(opened.map_err(|found| StoreError::Moved { store, found })?);
        if let Some(slot) = self.0.0.lock().unwrap().get_mut(name).filter(|_| !config.read_only) {
            let before = slot.opened.replace(Store::Test(disk.clone()));
            slot.lost |= before.is_some_and(|before| before.is_lost());
        }
        Ok(Store::Test(disk))
    }

    fn store(
        &self,
        name: &str,
        config: &VolumeConfig,
        expected: &Expected,
    ) -> Result<Store, StoreError> {
        let failing = self.0.0.lock().unwrap().get(name).is_some_and(|slot| slot.fails);
        let mut of = name;
        if let StoreUri::File(path) = &config.store {
            if let Some(folder) = self.0.folder_of(path).filter(|_| !failing) {
                return self.file(name, config, (&folder, path), expected);
            }
            // That of a base, if an overlay opens it.
            of = path.file_name().and_then(|file| file.to_str()).unwrap_or(name);
        }
        let mut disks = self.0.0.lock().unwrap();
        let name = if failing { name } else { of };
        let slot = disks.get_mut(name).filter(|slot| !slot.fails);
        let slot = slot.ok_or(StoreError::Interrupted)?;
        Ok(match (&slot.place, &config.store) {
            (Place::Disk(disk), _) => {
                let disk = Arc::new(disk.open_anew());
                let before = slot.opened.replace(Store::Test(disk.clone()));
                slot.lost |= before.is_some_and(|before| before.is_lost());
                Store::Test(disk)
            }
            // With the same pauses between attempts in every run.
            (Place::Remote(..), StoreUri::Nbd(uri)) => {
                Store::Nbd(NbdStore::open(nbd_options(uri))?.0)
            }
            (Place::Remote(..) | Place::Overlay(_), _) => return Err(StoreError::Interrupted),
            (Place::Memory(size), _) => Store::Memory(MemoryStore::new(*size)),
        })
    }
}

impl Opener for OpenDisks {
    fn open(
        &self,
        name: &str,
        config: &VolumeConfig,
        expected: Expected,
        claims: &Arc<StoreClaims>,
    ) -> Opening {
        let opened = claims.claim(name, config).and_then(|mut claim| {
            let store = self.store(name, config, &expected)?;
            if let Some(claim) = &mut claim {
                claim.opened(&store)?;
            }
            Ok(Opened::new(name, config, store, claim))
        });
        Box::pin(std::future::ready(opened))
    }

    fn compare(&self, old: &VolumeConfig, _: Option<StoreTarget>, new: &VolumeConfig) -> Comparing {
        Box::pin(std::future::ready(Ok(old.store == new.store)))
    }
}

/// The Xen host, as a daemon sees it.
#[derive(Clone)]
pub(crate) struct Xen {
    pub(crate) machine: Machine,
    /// The directory of the journals.
    pub(crate) journals: PathBuf,
}

/// The result of something that was submitted to the worker.
pub(crate) type Later<T> = Rc<RefCell<Option<T>>>;

/// See the module.
pub(crate) struct Daemon {
    // First, so that it is dropped first: its tasks use the other fields.
    pub(crate) worker: SimWorker,
    pub(crate) server: Server,
    volumes: Volumes,
    pub(crate) engine: Arc<Engine>,
    /// Carries out changes of volumes.
    pub(crate) manager: Arc<dyn VolumeManager>,
    parameters: Parameters,
    pub(crate) settings: Settings,
    address: SocketAddr,
    memory: Arc<Memory>,
    cache: Arc<Cache>,
    grants: Arc<XenParameters>,
    reclaimer: Reclaimer,
    started: Instant,
    keep_at: Instant,
    tick_at: Instant,
    advise_at: Option<Instant>,
    /// The Xen host, if it is to serve guests: it does so after the first attempt to open all
    /// volumes, and then this is `None`.
    xen: Option<Xen>,
    tried: Later<()>,
    control: Option<XenstoreControl>,
    figures: Option<Figures>,
    control_at: Option<Instant>,
}

/// The objects that must be released when a daemon has ended.
pub(crate) struct Remains {
    memory: Weak<Memory>,
    cache: Weak<Cache>,
    engine: Weak<Engine>,
    volumes: Vec<Weak<Volume>>,
}

impl Remains {
    pub(crate) fn check(&self) -> Result<(), String> {
        let volumes = self.volumes.iter().filter(|volume| volume.strong_count() > 0).count();
        let (memory, cache) = (self.memory.strong_count(), self.cache.strong_count());
        let engine = self.engine.strong_count();
        if memory + cache + engine + volumes > 0 {
            return Err(format!(
                "not released: memory {memory}, cache {cache}, engine {engine}, {volumes} volumes"
            ));
        }
        Ok(())
    }
}

impl Daemon {
    pub(crate) fn start(
        settings: Settings,
        volumes: &[Wanted],
        disks: &Arc<Disks>,
        xen: Option<Xen>,
        now: Instant,
    ) -> Daemon {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let config = configuration(&settings, volumes);
        let parameters = Parameters::new(&Configured::from(&config));
        let mut options = ebb_mem::MemoryOptions::new(settings.ceiling, now);
        options.lend = settings.lend;
        let memory = Memory::new(options).unwrap();
        ebbd::parameters::limit_zones(&parameters, &memory);
        let grants = ebbd::parameters::rings(&parameters);
        let (cache, reclaimer) = start_cache(&memory, &parameters, now);
        let worker = SimWorker::new("world", &memory).unwrap();
        let volumes = Volumes::default();
        let limits = ebbd::parameters::clients(&parameters);
        let server = Server::new(volumes.clone(), limits, TlsMode::Off, None);
        let engine = Engine::new(EngineParts {
            server: server.clone(),
            volumes: volumes.clone(),
            parameters: parameters.clone(),
            cache: cache.clone(),
            workers: vec![worker.handle()],
            state: None,
            config_file: None,
            opener: Arc::new(OpenDisks(disks.clone())),
            drain: settings.drain,
            dirty_max: (settings.ceiling / 2) as u64,
            started: now,
        })
        .unwrap();
        engine.keep_dirty_limits(&worker.handle());
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("ebb-world-{}-{number}", std::process::id());
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        let (serving, socket, handles) = (server.clone(), fd_from(listener), vec![worker.handle()]);
        let io = worker.io().clone();
        worker.io().spawn(async move { serving.listen(io, socket, handles).await }).detach();
        let parts = (server.clone(), volumes.clone());
        let manager = ebbd::manager_of(&engine, parts, worker.handle());
        let mut daemon = Daemon {
            worker,
            server,
            volumes,
            engine,
            manager,
            parameters,
            settings,
            address,
            memory,
            cache,
            grants,
            reclaimer,
            started: now,
            keep_at: now + RECLAIM_INTERVAL,
            tick_at: now + TICK_INTERVAL,
            advise_at: None,
            xen,
            tried: Later::default(),
            control: None,
            figures: None,
            control_at: None,
        };
        let engine = daemon.engine.clone();
        daemon.tried = daemon.submit(|io| async move { engine.start(&io, config, None).await });
        daemon
    }

    /// Reloads the configuration.
    pub(crate) fn reload(&self, volumes: &[Wanted]) -> Later<()> {
        let (engine, config) = (self.engine.clone(), configuration(&self.settings, volumes));
        self.submit(|io| async move { drop(engine.reload(&io, config).await) })
    }

    pub(crate) fn volume(&self, name: &str) -> Option<Arc<Volume>> {
        self.volumes.get(name).map(|served| served.volume)
    }

    pub(crate) fn connect(&self) -> UnixStream {
        UnixStream::connect_addr(&self.address).unwrap()
    }

    pub(crate) fn remains(&self) -> Remains {
        let states = self.engine.states();
        let volumes = states.iter().filter_map(|state| state.volume.as_ref());
        Remains {
            memory: Arc::downgrade(&self.memory),
            cache: Arc::downgrade(&self.cache),
            engine: Arc::downgrade(&self.engine),
            volumes: volumes.map(Arc::downgrade).collect(),
        }
    }

    /// Runs a future on the worker.
    pub(crate) fn submit<T: 'static, F: Future<Output = T> + 'static>(
        &self,
        call: impl FnOnce(Io) -> F,
    ) -> Later<T> {
        let later = Later::default();
        let (answer, future) = (later.clone(), call(self.worker.io().clone()));
        self.worker.io().spawn(async move { *answer.borrow_mut() = Some(future.await) }).detach();
        later
    }

    /// One step of each thread that a real daemon has. False if none had work.
    pub(crate) fn step(&mut self, now: Instant) -> bool {
        let mut busy = self.step_xen(now);
        busy |= self.worker.iterate();
        busy |= ebb_sandbox::threads::sim::make_call();
        if now >= self.keep_at {
            self.reclaimer.run_once(&self.cache, now);
            self.keep_at = now + RECLAIM_INTERVAL;
            busy = true;
        }
        if now >= self.tick_at {
            self.memory.tick(now);
            self.tick_at = now + TICK_INTERVAL;
            busy = true;
        }
        if self.advise_at.is_none_or(|at| at <= now) {
            let rest = self.memory.advise(now).unwrap_or(RECLAIM_INTERVAL);
            self.advise_at = Some(now + rest);
        }
        busy
    }

    /// One step of the thread that handles xenstore, if it has work.
    fn step_xen(&mut self, now: Instant) -> bool {
        if self.tried.borrow().is_some()
            && let Some(xen) = self.xen.take()
        {
            self.serve_guests(xen);
            self.control_at = Some(now);
        }
        let Some(control) = &mut self.control else { return false };
        if self.control_at.is_none_or(|at| at > now) && !control.has_events() {
            return false;
        }
        match control.run_once(now) {
            NextRun::Wait(until) => self.control_at = until,
            NextRun::Ended => (self.control, self.control_at) = (None, None),
        }
        true
    }

    /// Starts the Xen backend as `ebbd` does.
    fn serve_guests(&mut self, xen: Xen) {
        let workers = vec![self.worker.handle()];
        let mut options = BackendOptions::new(Arc::new(xen.machine), workers, self.volumes.clone());
        options.parameters = self.grants.clone();
        let engine = Arc::downgrade(&self.engine);
        options.awaited =
            Arc::new(move |name| engine.upgrade().is_some_and(|engine| engine.awaits(name)));
        options.journals = Some(xen.journals);
        let (backend, control) = Backend::prepare(options).unwrap();
        self.figures = Some(backend.figures());
        self.control = Some(control);
        self.engine.serve_guests(backend);
    }

    /// Whether a disk of this guest is served and not closing; and whether one is served at all.
    pub(crate) fn serves_guest(&self, guest: u16) -> (bool, bool) {
        let disks = self.figures.as_ref().map(Figures::read).unwrap_or_default();
        let of_this: Vec<_> = disks.iter().filter(|disk| disk.guest == guest).collect();
        (of_this.iter().any(|disk| !disk.closing), !of_this.is_empty())
    }

    /// When it needs its next step if nothing happens before.
    pub(crate) fn wants(&self) -> Instant {
        let own = [Some(self.keep_at), Some(self.tick_at), self.advise_at];
        let all = own.into_iter().chain([self.worker.next_deadline(), self.control_at]);
        all.flatten().min().unwrap_or(self.keep_at)
    }

    /// Sets a parameter, or resets it to its configured value.
    pub(crate) fn set(&self, name: &str, value: Option<u64>) -> bool {
        let owner = ParameterOwner::Daemon;
        let changed = match value {
            Some(value) => self.parameters.set(name, owner, &serde_json::json!(value)),
            None => self.parameters.unset(name, owner),
        };
        changed.is_ok()
    }

    /// Reports memory pressure, as the host does.
    pub(crate) fn pressure(&self, level: Level, now: Instant) {
        let cause = if level == Level::L0 { Cause::Easing } else { Cause::Stall };
        let state = PressureState { level, cause, since: now, event: now, sequence: 1 };
        debug_assert!(now >= self.started);
        self.engine.pressure(&self.memory, &self.grants, state);
    }
}

/// The cache, which follows its parameters as the daemon's does, and the reclaimer.
fn start_cache(
    memory: &Arc<Memory>,
    parameters: &Parameters,
    started: Instant,
) -> (Arc<Cache>, Reclaimer) {
    let options = CacheOptions {
        max_bytes: Some(parameters.daemon(CACHE_MAX).get()),
        min_bytes: parameters.daemon(CACHE_MIN).get(),
        started,
    };
    let cache = Cache::without_reclaimer(memory, options);
    // The limit of the machine would make runs of one seed differ.
    let limit = |cache: &Cache, bytes: u64| cache.set_max(Some(bytes.clamp(64 << 10, 16 << 20)));
    parameters.daemon(CACHE_MAX).watch_for(&cache, limit);
    parameters.daemon(CACHE_MIN).watch_for(&cache, |cache, bytes| cache.set_min(bytes));
    // The kernel's counter does not depend on the seed. Without it the reclaimer looks for discarded pages each time.
    let reclaimer = Reclaimer::new(&cache, Box::new(|| None));
    (cache, reclaimer)
}

impl Drop for Daemon {
    /// What its helper threads have not done yet is not done.
    fn drop(&mut self) {
        ebb_sandbox::threads::sim::keep_calls(true);
    }
}
