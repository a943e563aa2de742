//! One life of the daemon: from its start to a stop, a kill or a power cut.
//!
//! Everything is the product's but what starts threads: the keeper, the memory's advisor and the timer of
//! its estimates are given their turns here.

use std::cell::RefCell;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use ebb_cache::{Cache, CacheOptions, FixedLimit, Keeper};
use ebb_export_nbd::{Limits, Server, Tls};
use ebb_io::fd_from;
use ebb_io::sim::SimWorker;
use ebb_mem::pressure::Level;
use ebb_mem::{Memory, PoolParameters, Reclaim};
use ebb_store::{Io, MemoryStore, Store, TestStore};
use ebb_volume::{Mode, Volume, VolumeOptions};

use crate::random::Random;

/// Between two looks of the keeper, and two ticks of the memory.
const KEEPER: Duration = Duration::from_millis(100);
const TICK: Duration = Duration::from_secs(1);

/// What a daemon is configured with; drawn once for each life.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    ceiling: usize,
    cache_max: u64,
    cache_min: u64,
    lend: bool,
    dirty_max: u64,
    age_ms: u64,
    cluster: usize,
    limits: Limits,
}

impl Settings {
    pub(crate) fn draw(random: &mut Random) -> Settings {
        Settings {
            ceiling: random.pick(&[16 << 20, 32 << 20, 64 << 20]),
            cache_max: random.pick(&[256 << 10, 1 << 20, 4 << 20, 8 << 20]),
            cache_min: random.pick(&[0, 0, 128 << 10]),
            lend: random.chance(30),
            dirty_max: random.pick(&[512 << 10, 1 << 20, 4 << 20]),
            age_ms: random.pick(&[5, 50, 5000]),
            cluster: random.pick(&[4096, 65536, 1 << 20]),
            limits: Limits::default(),
        }
    }
}

/// Where a volume's bytes are.
#[derive(Clone)]
pub(crate) enum Place {
    Disk(Arc<TestStore>),
    Memory(u64),
}

/// A volume as the configuration has it.
#[derive(Clone)]
pub(crate) struct VolumeConfig {
    pub(crate) name: String,
    pub(crate) place: Place,
    pub(crate) mode: Mode,
}

/// What became of something that was asked of the worker.
pub(crate) type Later<T> = Rc<RefCell<Option<T>>>;

/// See the module.
pub(crate) struct Daemon {
    // First: its tasks end before what they use.
    pub(crate) worker: SimWorker,
    pub(crate) server: Server,
    address: SocketAddr,
    pub(crate) memory: Arc<Memory>,
    pub(crate) cache: Arc<Cache>,
    keeper: Keeper,
    pub(crate) pool: Arc<PoolParameters>,
    settings: Settings,
    keep_at: Instant,
    tick_at: Instant,
    advise_at: Option<Instant>,
}

/// What must be gone when a daemon is.
pub(crate) struct Remains {
    memory: Weak<Memory>,
    cache: Weak<Cache>,
    volumes: Vec<Weak<Volume>>,
}

impl Remains {
    pub(crate) fn check(&self) -> Result<(), String> {
        let volumes = self.volumes.iter().filter(|volume| volume.strong_count() > 0).count();
        let (memory, cache) = (self.memory.strong_count(), self.cache.strong_count());
        if memory + cache + volumes > 0 {
            return Err(format!("left behind: memory {memory}, cache {cache}, {volumes} volumes"));
        }
        Ok(())
    }
}

impl Daemon {
    pub(crate) fn start(settings: Settings, volumes: &[VolumeConfig], now: Instant) -> Daemon {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let mut options = ebb_mem::Options::new(settings.ceiling, now);
        options.lend = settings.lend;
        let memory = Memory::new(options).unwrap();
        let options = CacheOptions {
            max_bytes: Some(settings.cache_max),
            min_bytes: settings.cache_min,
            started: now,
        };
        let cache = Cache::without_keeper(&memory, options);
        // What the kernel takes is not for a seed to say; it is said to have taken some each time.
        let keeper = Keeper::new(&cache, Box::new(|| None));
        let worker = SimWorker::new("world", &memory).unwrap();
        let server = Server::new(settings.limits, Tls::Off, None);
        let name =
            format!("ebb-world-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        let (serving, socket, handles) = (server.clone(), fd_from(listener), vec![worker.handle()]);
        let io = worker.io().clone();
        worker.io().spawn(async move { serving.listen(io, socket, handles).await }).detach();
        let daemon = Daemon {
            worker,
            server,
            address,
            memory,
            cache,
            keeper,
            pool: Arc::default(),
            settings,
            keep_at: now + KEEPER,
            tick_at: now + TICK,
            advise_at: None,
        };
        volumes.iter().for_each(|volume| daemon.offer(volume));
        daemon
    }

    /// Opens a volume and offers it.
    pub(crate) fn offer(&self, config: &VolumeConfig) {
        let store = match &config.place {
            Place::Disk(store) => Store::Test(store.clone()),
            Place::Memory(size) => Store::Memory(MemoryStore::new(*size)),
        };
        let options = VolumeOptions::default();
        let volume = if config.mode == Mode::None {
            Volume::new(&config.name, store, options)
        } else {
            let cache = self.cache.volume_as(&config.name, store.size(), config.mode).unwrap();
            let volume = Volume::with_cache(&config.name, store, options, cache);
            let control = FixedLimit {
                dirty_max: self.settings.dirty_max,
                age_max: Duration::from_millis(self.settings.age_ms),
                cluster: self.settings.cluster,
            };
            volume.start_writeback(self.worker.io(), Arc::new(control));
            volume
        };
        self.server.add(volume, self.pool.clone());
    }

    pub(crate) fn volume(&self, name: &str) -> Option<Arc<Volume>> {
        let mut all = self.server.volumes().into_iter().map(|(volume, _)| volume);
        all.find(|volume| &**volume.name() == name)
    }

    pub(crate) fn connect(&self) -> UnixStream {
        UnixStream::connect_addr(&self.address).unwrap()
    }

    pub(crate) fn remains(&self) -> Remains {
        let volumes =
            self.server.volumes().iter().map(|(volume, _)| Arc::downgrade(volume)).collect();
        let (memory, cache) = (Arc::downgrade(&self.memory), Arc::downgrade(&self.cache));
        Remains { memory, cache, volumes }
    }

    /// Has the worker do something beside its requests.
    pub(crate) fn ask<T: 'static, F: Future<Output = T> + 'static>(
        &self,
        call: impl FnOnce(Io) -> F,
    ) -> Later<T> {
        let later = Later::default();
        let (answer, future) = (later.clone(), call(self.worker.io().clone()));
        self.worker.io().spawn(async move { *answer.borrow_mut() = Some(future.await) }).detach();
        later
    }

    /// A turn of each thread it would have. False if none had anything to do.
    pub(crate) fn turn(&mut self, now: Instant) -> bool {
        let mut busy = self.worker.turn();
        if now >= self.keep_at {
            self.keeper.turn(&self.cache, now);
            self.keep_at = now + KEEPER;
            busy = true;
        }
        if now >= self.tick_at {
            self.memory.tick(now);
            self.tick_at = now + TICK;
            busy = true;
        }
        if self.advise_at.is_none_or(|at| at <= now) {
            let rest = self.memory.advise(now).unwrap_or(KEEPER);
            self.advise_at = Some(now + rest);
        }
        busy
    }

    /// When it wants a turn if nothing happens.
    pub(crate) fn wants(&self) -> Instant {
        let all =
            [Some(self.keep_at), Some(self.tick_at), self.advise_at, self.worker.next_deadline()];
        all.into_iter().flatten().min().unwrap_or(self.keep_at)
    }

    /// Memory pressure, answered as the daemon does.
    pub(crate) fn pressure(&self, level: Level, now: Instant) {
        self.cache.pressure(level, now);
        let reclaim = match level {
            Level::L0 => {
                self.memory.calm();
                return;
            }
            Level::L1 => Reclaim::Trim,
            Level::L2 => Reclaim::Drain,
            Level::L3 => Reclaim::DrainWorkers,
        };
        self.memory.squeeze(now);
        self.memory.reclaim(reclaim, now);
    }
}
