//! One life of the daemon: from its start to a shutdown, a kill or a power cut.
//!
//! Everything is product code except what starts threads: the reclaimer, the memory advisor and the
//! timer of the memory's estimates are stepped here. The world can make the opening of stores fail.

use std::cell::RefCell;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use ebb_cache::{Cache, CacheOptions, Reclaimer};
use ebb_config::params::{CACHE_MAX, CACHE_MIN, Configured, ParameterOwner, Parameters};
use ebb_config::{Config, ServeArgs, StateLock};
use ebb_control::VolumeManager;
use ebb_export_nbd::{KeptConnection, Server, TlsMode};
use ebb_export_vhost::VhostDisk;
use ebb_export_xen::shm::World as Machine;
use ebb_export_xen::{Backend, BackendOptions, Figures, NextRun, XenParameters, XenstoreControl};
use ebb_io::fd_from;
use ebb_io::sim::SimWorker;
use ebb_mem::Memory;
use ebb_mem::pressure::{Cause, Level, PressureState};
use ebb_store::TestStore;
use ebb_volume::Io;
use ebb_volume::{Mode, Volume, Volumes};
use ebbd::engine::{Engine, EngineParts, MemoryStores, StopReport};

use crate::broker::SimBroker;
use crate::disks::{Disks, OpenDisks};
use crate::folder::Folder;
use crate::frontends::{Frontends, Sockets};
use crate::random::Random;
use crate::remote::Remote;
use crate::state::KeptState;

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
    /// The name of the delta's file.
    pub(crate) file: String,
    pub(crate) base: String,
}

/// A volume as it is configured.
#[derive(Clone)]
pub(crate) struct Wanted {
    pub(crate) name: String,
    /// The name of the volume's disk.
    pub(crate) disk: String,
    pub(crate) place: Place,
    pub(crate) mode: Mode,
    /// The backing device that the volume shares with others, if any.
    pub(crate) bdi: Option<String>,
    /// Xen guests and NBD clients may write to the volume at the same time.
    pub(crate) shared: bool,
    /// The volume is a base.
    pub(crate) read_only: bool,
    /// The daemon makes the file of the volume if it does not exist.
    pub(crate) create: bool,
    /// The configuration has a path at which there is nothing.
    pub(crate) wrong: bool,
}

impl Wanted {
    /// A volume on the disk of its name.
    pub(crate) fn new(name: &str, place: Place, mode: Mode) -> Wanted {
        Wanted {
            name: name.to_owned(),
            disk: name.to_owned(),
            place,
            mode,
            bdi: None,
            shared: false,
            read_only: false,
            create: false,
            wrong: false,
        }
    }
}

/// The text of the configuration file.
pub(crate) fn configuration(settings: &Settings, volumes: &[Wanted]) -> String {
    use std::fmt::Write as _;
    let Settings { cache_max, cache_min, .. } = settings;
    let mut text = format!(
        "listen = [\"unix:/world.sock\"]\ncache_max = \"{cache_max}\"\ncache_min = \"{cache_min}\"\n"
    );
    for Wanted { name, disk, place, mode, bdi, shared, read_only, create, wrong } in volumes {
        let store = match place {
            Place::Disk(_) if *wrong => format!("file:/nowhere/{disk}"),
            Place::Disk(_) => format!("file:/world/{disk}"),
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
        if let (Place::Disk(disk), true, false) = (place, create, wrong) {
            let _ = writeln!(text, "size = \"{}\"\ncreate = true", disk.size());
        }
        if let Place::Overlay(Overlay { base, .. }) = place {
            let _ = writeln!(text, "base = \"{base}\"\ncreate = true");
        }
    }
    text
}

/// The configuration of a daemon without a state directory.
pub(crate) fn parsed(text: &str) -> Config {
    Config::parse(text, Path::new("world.toml"), &ServeArgs::default()).unwrap()
}

/// The Xen host, as a daemon sees it.
#[derive(Clone)]
pub(crate) struct Xen {
    pub(crate) machine: Machine,
    /// The directory of the journals.
    pub(crate) journals: PathBuf,
}

/// The means by which a daemon serves guests, if the world has any.
#[derive(Clone, Default)]
pub(crate) struct Hosts {
    pub(crate) xen: Option<Xen>,
    pub(crate) sockets: Option<Sockets>,
}

/// The state of the host at the start of a daemon.
pub(crate) struct Host {
    pub(crate) disks: Arc<Disks>,
    pub(crate) guests: Hosts,
    pub(crate) state: Option<KeptState>,
    pub(crate) lock: Option<StateLock>,
    pub(crate) inherited: Inherited,
}

/// The listener and connections that a predecessor has left.
#[derive(Default)]
pub(crate) struct Inherited {
    pub(crate) listener: Option<UnixListener>,
    pub(crate) connections: Vec<KeptConnection>,
    /// The stores in memory of a daemon that serves again.
    pub(crate) memory: MemoryStores,
    /// The predecessor waits, and lets this daemon use none of the connections.
    pub(crate) is_held: bool,
}

impl Inherited {
    /// The same sockets, for a second daemon.
    pub(crate) fn copy_sockets(&self) -> Inherited {
        let again = |kept: &KeptConnection| {
            let (socket, rest) = (kept.socket().clone(), kept.rest().into());
            KeptConnection::new(socket, kept.state(), rest).unwrap()
        };
        Inherited {
            listener: self.listener.as_ref().map(|listener| listener.try_clone().unwrap()),
            connections: self.connections.iter().map(again).collect(),
            ..Inherited::default()
        }
    }
}

/// The result of a future that was submitted to the worker.
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
    listener: UnixListener,
    listens: bool,
    /// The connections of a predecessor, until all volumes have been tried.
    inherited: Vec<KeptConnection>,
    is_held: bool,
    memory: Arc<Memory>,
    cache: Arc<Cache>,
    grants: Arc<XenParameters>,
    reclaimer: Reclaimer,
    started: Instant,
    keep_at: Instant,
    tick_at: Instant,
    advise_at: Option<Instant>,
    /// Taken when the daemon begins to serve guests, after the first attempt to open all volumes.
    hosts: Hosts,
    tried: Later<()>,
    control: Option<XenstoreControl>,
    figures: Option<Figures>,
    control_at: Option<Instant>,
    frontends: Option<Frontends>,
    _lock: Option<StateLock>,
    broker: SimBroker,
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
    pub(crate) fn start(settings: Settings, config: Config, host: Host, now: Instant) -> Daemon {
        static NEXT: AtomicU64 = AtomicU64::new(0);
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
            state: host.state.as_ref().map(KeptState::directory),
            config_file: host.state.as_ref().map(KeptState::config_file),
            opener: Arc::new(OpenDisks(host.disks.clone())),
            drain: settings.drain,
            dirty_max: (settings.ceiling / 2) as u64,
            started: now,
        })
        .unwrap();
        engine.keep_dirty_limits(&worker.handle());
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("ebb-world-{}-{number}", std::process::id());
        let Inherited { listener, connections, memory: stores, is_held } = host.inherited;
        engine.keep_memory(stores);
        let listens = listener.is_none();
        let listener = listener.unwrap_or_else(|| {
            let address = SocketAddr::from_abstract_name(name).unwrap();
            UnixListener::bind_addr(&address).unwrap()
        });
        // A successor listens when its volumes were tried.
        if listens {
            listen(&server, &worker, &listener);
        }
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
            listener,
            listens,
            inherited: connections,
            is_held,
            memory,
            cache,
            grants,
            reclaimer,
            started: now,
            keep_at: now + RECLAIM_INTERVAL,
            tick_at: now + TICK_INTERVAL,
            advise_at: None,
            hosts: host.guests,
            _lock: host.lock,
            broker: host.disks.broker(),
            tried: Later::default(),
            control: None,
            figures: None,
            control_at: None,
            frontends: None,
        };
        let engine = daemon.engine.clone();
        daemon.tried = daemon.submit(|io| async move { engine.start(&io, config, None).await });
        daemon
    }

    /// Reloads the configuration, which was read `pause` before.
    pub(crate) fn reload(&self, config: Config, pause: Duration) -> Later<()> {
        let engine = self.engine.clone();
        self.submit(move |io| async move {
            if !pause.is_zero() {
                io.sleep(pause).await;
            }
            drop(engine.reload(&io, config).await);
        })
    }

    pub(crate) fn volume(&self, name: &str) -> Option<Arc<Volume>> {
        self.volumes.get(name).map(|served| served.volume)
    }

    pub(crate) fn connect(&self) -> UnixStream {
        UnixStream::connect_addr(&self.listener.local_addr().unwrap()).unwrap()
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

    /// Makes one step of each thread that a real daemon has. Returns false if none had work.
    pub(crate) fn step(&mut self, now: Instant) -> bool {
        let mut busy = self.take_over();
        busy |= self.step_xen(now);
        busy |= self.step_frontends();
        busy |= self.worker.iterate();
        busy |= !self.broker.hangs() && ebb_sandbox::threads::sim::make_call();
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

    pub(crate) fn is_listening(&self) -> bool {
        self.listens
    }

    /// Returns true once opening each volume was tried.
    pub(crate) fn has_tried_all(&self) -> bool {
        self.tried.borrow().is_some()
    }

    /// Continues the connections of a predecessor, once all volumes have been tried. Returns true
    /// if it did.
    fn take_over(&mut self) -> bool {
        if self.listens || self.is_held || self.tried.borrow().is_none() {
            return false;
        }
        let connections = std::mem::take(&mut self.inherited);
        let writers = self.server.claim_writers(&connections);
        self.listens = true;
        listen(&self.server, &self.worker, &self.listener);
        self.server.adopt(connections, &writers, &[self.worker.handle()]);
        true
    }

    /// Returns the connections that a stopped daemon leaves to its successor, after a round trip
    /// through the description that daemons exchange. Connections of volumes that could not be
    /// closed are left out.
    pub(crate) fn leave_connections(&self, report: &StopReport) -> Inherited {
        let open = |name: &str| {
            report.unflushed.iter().any(|left| left.volume == name)
                || report.abandoned.iter().any(|volume| volume == name)
        };
        let mut connections = self.server.take_kept();
        connections.retain(|kept| !open(kept.export()));
        let again = |kept: KeptConnection| {
            let text = serde_json::to_vec(&kept.state()).unwrap();
            let state = serde_json::from_slice(&text).unwrap();
            let (socket, rest) = (kept.socket().clone(), kept.rest().into());
            KeptConnection::new(socket, state, rest).unwrap()
        };
        let listener = Some(self.listener.try_clone().unwrap());
        Inherited {
            listener,
            connections: connections.into_iter().map(again).collect(),
            memory: self.engine.memory_stores(),
            is_held: false,
        }
    }

    /// One step of the thread that handles xenstore, if it has work.
    fn step_xen(&mut self, now: Instant) -> bool {
        if self.tried.borrow().is_some()
            && let Some(xen) = self.hosts.xen.take()
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

    /// One step of the thread that serves frontends of vhost-user.
    fn step_frontends(&mut self) -> bool {
        if self.tried.borrow().is_some()
            && let Some(sockets) = self.hosts.sockets.take()
        {
            let workers = vec![self.worker.handle()];
            self.frontends = Some(sockets.serve(&self.engine, workers, &self.volumes));
        }
        self.frontends.as_mut().is_some_and(Frontends::step)
    }

    /// The frontends that are connected.
    pub(crate) fn frontends(&self) -> Vec<VhostDisk> {
        self.frontends.as_ref().map(Frontends::disks).unwrap_or_default()
    }

    /// Returns two values: a disk of this guest is served and not closing; a disk of it is served
    /// at all.
    pub(crate) fn serves_guest(&self, guest: u16) -> (bool, bool) {
        let disks = self.figures.as_ref().map(Figures::read).unwrap_or_default();
        let of_this: Vec<_> = disks.iter().filter(|disk| disk.guest == guest).collect();
        (of_this.iter().any(|disk| !disk.closing), !of_this.is_empty())
    }

    /// Returns the time of the daemon's next step, if nothing happens before.
    pub(crate) fn wants(&self) -> Instant {
        let own = [Some(self.keep_at), Some(self.tick_at), self.advise_at];
        let frontends = self.frontends.as_ref().and_then(Frontends::wants);
        let all = own.into_iter().chain([self.worker.next_deadline(), self.control_at, frontends]);
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

/// Accepts clients.
fn listen(server: &Server, worker: &SimWorker, listener: &UnixListener) {
    let socket = fd_from(listener.try_clone().unwrap());
    let (serving, handles, io) = (server.clone(), vec![worker.handle()], worker.io().clone());
    worker.io().spawn(async move { serving.listen(io, socket, handles).await }).detach();
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
    // The kernel's counter does not depend on the seed. Without it the reclaimer looks for
    // discarded pages each time.
    let reclaimer = Reclaimer::new(&cache, Box::new(|| None));
    (cache, reclaimer)
}

impl Drop for Daemon {
    /// Drops the calls that helper threads have not made yet.
    fn drop(&mut self) {
        ebb_sandbox::threads::sim::keep_calls(true);
    }
}
