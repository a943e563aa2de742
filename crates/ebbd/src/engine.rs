//! The engine: opens, changes and closes the volumes of a daemon, without signals, sockets and blocking calls.
//!
//! Everything here is a future on a worker: the main thread (`daemon.rs`) only drives it, and a test can drive the same
//! code with one thread. Opening a store may block, and is done by an [`Opener`].
//!
//! # Invariants
//! - Volumes are independent: no step of one waits for another. A store that hangs, while its volume is opened,
//!   withdrawn or closed, delays no other volume, and delays a reload or a stop by no more than their limits.
//! - Clients of a volume that cannot be opened are refused with the reason. Opening is tried again with pauses that
//!   double, until it succeeds, the volume is changed or removed, or the daemon stops.
//! - A volume stays served until its replacement was opened or, if both are the same file or export, checked.
//! - Acknowledged data is dropped only when the process ends, and then it is listed: writing back a withdrawn volume is
//!   tried again until it succeeds or the stop lists it.

mod access;
mod change;
mod claims;
mod commit;
mod countdown;
mod created;
mod definitions;
mod delete_snapshot;
mod delta_users;
mod flatten;
mod flush;
mod group_overrides;
mod io_memory;
mod keys;
mod lasting;
mod manage;
mod memory_stores;
mod moved_files;
mod new_file;
mod open;
mod open_lines;
mod overlay;
mod overrides;
mod persist;
mod protected;
mod rename;
mod shared_layers;
mod slot;
mod snapshot;
mod sockets;
mod stop;
mod store_sizes;
#[cfg(test)]
mod tests;
mod warnings;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_api::stat::DefinedIn;
use ebb_cache::{BaseLayers, Cache, Mode};
use ebb_config::params::Parameters;
use ebb_config::{CacheMode, Config, StateDir, VolumeConfig, VolumeOrigin};
use ebb_export_nbd::Server;
use ebb_export_xen::XenParameters;
use ebb_io::{Io, WorkerHandle};
use ebb_mem::Memory;
use ebb_mem::pressure::PressureState;
use ebb_volume::{Stop, Volume, Volumes};
use futures_lite::future::or;

pub use self::change::EndedReload;
pub use self::claims::{StoreClaim, StoreClaims};
pub(crate) use self::created::{explain_missing, must_be_creatable};
pub use self::memory_stores::MemoryStores;
pub use self::open::{Comparing, HelperThreads, Opened, Opener, Opening};
pub(crate) use self::overlay::{chain_of, snapshot_beside};
pub(crate) use self::persist::place_of;
pub(crate) use self::protected::{ProtectedFiles, is_confined};
pub use self::slot::{OpenFailure, VolumePhase, VolumeState};
pub use self::stop::{StableFailure, StopReport, Unflushed, UnstablePart};
use crate::bdi::{BdiKey, Bdis};
use crate::ceiling::Finding;
use crate::guests::Guests;
use crate::limits::LimitSettings;
use crate::stores::{Expected, StoreError, StoreTarget, make_volume, with_cache};
use crate::volume_key::wait_for_program;
use change::Reloads;
use countdown::{Countdown, FirstTries};
use definitions::Definitions;
use moved_files::MovedFiles;
use open_lines::OpenLines;
use slot::{Claimed, VolumeSlot};

/// The first and the longest pause before a store that could not be opened is tried again.
const RETRY_FIRST: Duration = Duration::from_secs(1);
const RETRY_MOST: Duration = Duration::from_secs(60);
/// How often a volume that waits for another one to release its file checks whether that is still being withdrawn.
const CHECK: Duration = Duration::from_millis(100);

/// Stores that are opened at the same time, each on a thread; those that take longer than [`OPENING_SOON`] do not
/// count.
const OPENINGS: usize = 64;
const OPENING_SOON: Duration = Duration::from_millis(250);

/// The parts that an engine is made of.
pub struct EngineParts {
    /// Serves the volumes to NBD clients.
    pub server: Server,
    /// The registry in which volumes are served; the server's and the guests'.
    pub volumes: Volumes,
    /// The run-time parameters.
    pub parameters: Parameters,
    /// The cache of all volumes.
    pub cache: Arc<Cache>,
    /// The workers, at least one.
    pub workers: Vec<WorkerHandle>,
    /// Keeps volumes that are added at run time.
    pub state: Option<StateDir>,
    /// The configuration file, at which no volume may be added.
    pub config_file: Option<PathBuf>,
    /// Opens stores.
    pub opener: Arc<dyn Opener>,
    /// How long a stop, or withdrawing a volume, may take.
    pub drain: Duration,
    /// Limit of the dirty data of all volumes, bytes.
    pub dirty_max: u64,
    /// When the daemon started.
    pub started: Instant,
}

/// See the module.
pub struct Engine {
    server: Server,
    volumes: Volumes,
    parameters: Parameters,
    cache: Arc<Cache>,
    /// The layers below overlays, which these share.
    bases: Arc<BaseLayers>,
    bdis: Arc<Bdis>,
    limits: Arc<LimitSettings>,
    workers: Vec<WorkerHandle>,
    next_worker: AtomicUsize,
    opener: Arc<dyn Opener>,
    drain: Duration,
    guests: Guests,
    definitions: Mutex<Definitions>,
    state: Option<Arc<StateDir>>,
    /// The device and the inode of its folder of volumes at the start.
    state_folder: Option<(u64, u64)>,
    config_file: Option<PathBuf>,
    slots: Mutex<BTreeMap<String, Arc<VolumeSlot>>>,
    claims: Arc<StoreClaims>,
    /// Volumes that a reload has withdrawn without a successful flush, until they are served again.
    lost: Mutex<BTreeMap<String, Unflushed>>,
    /// Stores in memory from before this engine, until their volumes are served.
    kept_memory: Mutex<MemoryStores>,
    reloading: tokio::sync::Mutex<()>,
    reloads: Reloads,
    /// The findings about limits that were logged last.
    findings: Mutex<Vec<Finding>>,
    openings: async_lock::Semaphore,
    open_lines: OpenLines,
    moved_files: Mutex<MovedFiles>,
    stopping: Stop,
    deadline: stop::StopDeadline,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An origin as one word.
fn defined_in(origin: &VolumeOrigin) -> DefinedIn {
    match origin {
        VolumeOrigin::Configuration(_) => DefinedIn::Configuration,
        VolumeOrigin::State => DefinedIn::State,
        VolumeOrigin::RunTime => DefinedIn::RunTime,
    }
}

impl Engine {
    /// An engine without volumes.
    ///
    /// # Errors
    /// None: the options made here are valid.
    pub fn new(parts: EngineParts) -> Result<Arc<Engine>, ebb_writeback::WritebackError> {
        let EngineParts {
            server,
            volumes,
            parameters,
            cache,
            workers,
            state,
            config_file,
            opener,
            drain,
            dirty_max,
            started,
        } = parts;
        let bdis = Bdis::new(&cache, &parameters, dirty_max, started)?;
        // There is at least one worker.
        let limits = LimitSettings::new(parameters.clone(), workers[0].clone());
        Ok(Arc::new(Engine {
            server,
            volumes,
            parameters,
            bases: Arc::new(BaseLayers::new(&cache)),
            cache,
            bdis,
            limits,
            workers,
            next_worker: AtomicUsize::new(0),
            opener,
            drain,
            guests: Guests::default(),
            definitions: Mutex::default(),
            state_folder: state.as_ref().and_then(StateDir::folder_number),
            state: state.map(Arc::new),
            config_file,
            slots: Mutex::default(),
            claims: Arc::default(),
            lost: Mutex::default(),
            kept_memory: Mutex::default(),
            reloading: tokio::sync::Mutex::default(),
            reloads: Reloads::default(),
            findings: Mutex::default(),
            openings: async_lock::Semaphore::new(OPENINGS),
            open_lines: OpenLines::default(),
            moved_files: Mutex::default(),
            stopping: Stop::default(),
            deadline: stop::StopDeadline::default(),
        }))
    }

    /// The limits of volumes and groups.
    pub(crate) fn limits(&self) -> &Arc<LimitSettings> {
        &self.limits
    }

    /// The backing devices.
    pub(crate) fn bdis(&self) -> &Arc<Bdis> {
        &self.bdis
    }

    /// Divides the limit of dirty data among the backing devices, for as long as this worker runs.
    pub fn keep_dirty_limits(&self, worker: &WorkerHandle) {
        self.bdis.keep(worker);
    }

    /// Responds to memory pressure, or its end, as the daemon does when the host signals it.
    pub fn pressure(&self, memory: &Memory, grants: &XenParameters, state: PressureState) {
        crate::pressure_response::act(memory, &self.cache, state);
        self.bdis.pressure(state.level);
        crate::pressure_response::shrink(grants, state);
    }

    /// Serves Xen guests with this backend, too.
    pub fn serve_guests(&self, backend: ebb_export_xen::Backend) {
        self.guests.set(backend);
    }

    /// Serves frontends of vhost-user with this backend, instead of one with its own thread.
    pub fn serve_frontends(&self, backend: ebb_export_vhost::VhostBackend) {
        self.guests.vhost.set(backend);
    }

    /// Ends the exports for guests, after [`Engine::stop`]. Blocks for a bounded time.
    pub fn end_guests(&self) {
        self.guests.end();
    }

    /// Begins to open all volumes of `config` concurrently, and serves each as soon as it is opened. Returns when
    /// opening all was tried once, or, with `patience`, when none was tried for that long. The remaining volumes are
    /// opened in the background.
    pub async fn start(self: &Arc<Self>, io: &Io, config: Config, patience: Option<Duration>) {
        let tries = self.begin_start(io, config);
        self.complete_start(io, &tries, Duration::ZERO, patience).await;
    }

    /// The beginning of [`Engine::start`]: all volumes are known when this returns.
    pub(crate) fn begin_start(self: &Arc<Self>, io: &Io, config: Config) -> FirstTries {
        self.server.set_default(config.default_volume());
        crate::ceiling::apportion(&config, self.cache.memory());
        let tried = Rc::new(Countdown::new(config.volumes.len()));
        self.refuse_broken(&config);
        self.keep_memory_of(&config.volumes);
        for (name, volume) in &config.volumes {
            self.volumes.set_allowed(name, volume.allow.clone());
            let slot = Arc::new(VolumeSlot::new(name));
            slot.want(Some(volume.clone()));
            lock(&self.slots).insert(name.clone(), slot.clone());
            let tried = tried.clone();
            self.attempt(io, &slot, move || tried.count());
        }
        lock(&self.definitions).put_in_force(config);
        FirstTries(tried)
    }

    /// Waits until opening all volumes was tried once, or none was for `patience`; while a key is
    /// read or derived it waits on, for `keys` in all unless that is zero; true if a key still is
    /// then.
    pub(crate) async fn wait_for_tries(
        &self,
        io: &Io,
        tries: &FirstTries,
        patience: Duration,
        keys: Duration,
    ) -> bool {
        let tried = tries.wait(io, Duration::ZERO, Some(patience), keys);
        or(tried, async {
            self.stopping.wait().await;
            false
        })
        .await
    }

    /// The remainder of [`Engine::start`]; no volume was tried for `waited` before.
    pub(crate) async fn complete_start(
        &self,
        io: &Io,
        tries: &FirstTries,
        waited: Duration,
        patience: Option<Duration>,
    ) {
        let tried = async {
            tries.wait(io, waited, patience, Duration::ZERO).await;
        };
        or(tried, self.stopping.wait()).await;
        self.open_lines.sum_up();
        self.bdis.settle();
        if let Some(config) = &lock(&self.definitions).config {
            crate::ceiling::report(config, self.cache.memory(), &mut lock(&self.findings));
        }
    }

    /// Tries to open the volume of `slot` until that succeeds or is cancelled; `tried` is called after the first
    /// attempt.
    fn attempt(self: &Arc<Self>, io: &Io, slot: &Arc<VolumeSlot>, tried: impl FnOnce() + 'static) {
        let (engine, slot, on) = (self.clone(), slot.clone(), io.clone());
        self.volumes.refuse(slot.name(), "the volume is being opened: try again in a moment");
        let current = slot.begin_attempt();
        let task = async move {
            let mut tried = Some(tried);
            let mut pause = RETRY_FIRST;
            while let Some(config) = slot.wanted() {
                let expected = slot.expected(&config);
                slot.wait_for(config.encryption.as_ref().and_then(wait_for_program));
                let opened = or(
                    async { Some(engine.open(&on, slot.name(), &config, expected).await) },
                    or(engine.stopped(), async {
                        current.wait().await;
                        None
                    }),
                );
                match opened.await {
                    None => break,
                    Some(Ok(volume)) => {
                        engine.offer(&slot, &current, volume, config);
                        break;
                    }
                    Some(Err(error)) => engine.report_failure(&slot, &current, &error, pause),
                }
                if let Some(tried) = tried.take() {
                    tried();
                }
                let slept = async {
                    on.sleep(pause).await;
                    Some(())
                };
                let cancelled = async {
                    current.wait().await;
                    None
                };
                if or(slept, or(engine.stopped(), cancelled)).await.is_none() {
                    break;
                }
                pause = (pause * 2).min(RETRY_MOST);
            }
            if let Some(tried) = tried.take() {
                tried();
            }
        };
        // The slot cancels it.
        io.spawn(task).detach();
    }

    /// Waits for the stop, and returns `None`.
    async fn stopped<T>(&self) -> Option<T> {
        self.stopping.wait().await;
        None
    }

    fn report_failure(
        &self,
        slot: &VolumeSlot,
        current: &Arc<Stop>,
        error: &StoreError,
        pause: Duration,
    ) {
        let reason = error.full_text();
        let Some(attempts) = slot.fail(current, (&reason, lasting::lasting(error)), pause) else {
            return;
        };
        if attempts == 1 {
            self.open_lines.failed(slot.name(), &reason);
        } else {
            tracing::debug!(volume = slot.name(), "still cannot open the volume: {reason}");
        }
        let refusal = format!("the volume cannot be opened at present: {reason}");
        self.volumes.refuse(slot.name(), &refusal);
    }

    /// Serves a volume of `slot`, unless its opening was cancelled.
    fn offer(&self, slot: &VolumeSlot, current: &Arc<Stop>, volume: Claimed, config: VolumeConfig) {
        let name = slot.name().to_owned();
        let add = |volume: &Arc<Volume>| {
            lock(&self.lost).remove(&name);
            lock(&self.kept_memory).remove(&name);
            let pool = Arc::new(crate::parameters::pool(&self.parameters, &name));
            self.limits.follow(volume);
            self.volumes.add(volume.clone(), pool);
        };
        match slot.serve(current, &self.stopping, (volume, config), add) {
            Some(0) => self.guests.look_again(),
            Some(attempts) => {
                self.guests.look_again();
                self.open_lines.opened(slot.name(), attempts);
            }
            None => {}
        }
    }

    /// Opens a volume, if its file is the expected one. Waits for another volume that is about to release the file.
    async fn open(
        &self,
        io: &Io,
        name: &str,
        config: &VolumeConfig,
        mut expected: Expected,
    ) -> Result<Claimed, StoreError> {
        let deadline = ebb_mem::clock::now() + self.drain;
        loop {
            let opened = self.open_now(io, name, config, expected.clone()).await;
            let Err(StoreError::SameFile { store, other, file, held, gone }) = opened else {
                return opened;
            };
            // The file exists: no new one is created in its place when the other volume has released it.
            // That of an overlay may be the file of its base.
            if expected == Expected::Any && config.base.is_none() {
                expected = Expected::file(Some(file.clone()));
            }
            let slot = lock(&self.slots).get(name).cloned();
            let waited_for = slot.as_ref().and_then(|slot| slot.waits_for());
            if let Some(slot) = &slot {
                slot.wait_for(Some(self.release_waited_for(&other, &file)));
            }
            let released = async {
                while !gone.is_stopped() {
                    if !self.will_be_released(&other, &file) {
                        let (gone, file) = (gone.clone(), file.clone());
                        return Err(StoreError::SameFile { store, other, file, held, gone });
                    }
                    if ebb_mem::clock::now() >= deadline {
                        return Err(StoreError::NotReleased { store, other, kind: file.kind() });
                    }
                    or(gone.wait(), io.sleep(CHECK)).await;
                }
                Ok(())
            };
            let released = released.await;
            if let Some(slot) = slot {
                slot.wait_for(waited_for);
            }
            released?;
        }
    }

    /// Tells that a volume waits since `other` still has its file or export.
    fn release_waited_for(&self, other: &str, file: &StoreTarget) -> String {
        let slot = lock(&self.slots).get(other).cloned();
        match slot.and_then(|slot| slot.wanted()) {
            None => {
                format!("waits for the removal of volume {other} from the same {}", file.kind())
            }
            Some(_) => format!("waits until volume {other} has closed the same {}", file.kind()),
        }
    }

    /// Whether a volume is being withdrawn, will be, or was and may still write to its file or export.
    fn will_be_released(&self, volume: &str, file: &StoreTarget) -> bool {
        self.claims.is_kept(file) || self.is_leaving(volume)
    }

    /// Whether a volume is being withdrawn, or will be to reach its wanted configuration.
    fn is_leaving(&self, name: &str) -> bool {
        let slot = lock(&self.slots).get(name).cloned();
        slot.is_none_or(|slot| slot.is_leaving())
    }

    /// Opens a store and makes a volume of it, and starts its writeback if its cache has that mode.
    async fn open_now(
        &self,
        io: &Io,
        name: &str,
        config: &VolumeConfig,
        expected: Expected,
    ) -> Result<Claimed, StoreError> {
        let creation = self.creation(name, config).await?;
        let expected = creation.as_ref().map_or(expected.clone(), |it| it.expected(expected));
        if config.base.is_some() {
            let opened = Box::pin(self.open_overlay(io, name, config, expected)).await;
            return self.end_creation((name, config), creation, opened).await;
        }
        let opened = self.open_store(io, name, config, expected).await;
        let opened = self.end_creation((name, config), creation, opened).await?;
        let Opened { store, claim, device, format } = opened;
        let memory = memory_stores::memory_of(&store);
        let store = with_cache(name, config, store, &self.cache)?;
        let volume = make_volume(name, config, store, &device.text(), &self.cache);
        self.start_writeback(config, device, &volume).await?;
        Ok(Claimed { volume, claim, base_claims: Vec::new(), format, memory })
    }

    /// Opens a store, in its turn.
    async fn open_store(
        &self,
        io: &Io,
        name: &str,
        config: &VolumeConfig,
        expected: Expected,
    ) -> Result<Opened, StoreError> {
        match self.kept_memory(name, config) {
            Some(kept) => Ok(kept),
            None => self.open_unkept(io, name, config, expected).await,
        }
    }

    /// As [`Engine::open_store`], of a store that is not kept in memory for the volume.
    async fn open_unkept(
        &self,
        io: &Io,
        name: &str,
        config: &VolumeConfig,
        expected: Expected,
    ) -> Result<Opened, StoreError> {
        self.must_be_unprotected(name, config).await?;
        let place = self.openings.acquire().await;
        let mut opening = self.opener.open(name, config, expected, &self.claims);
        let soon = async {
            io.sleep(OPENING_SOON).await;
            None
        };
        let opened = or(async { Some(opening.as_mut().await) }, soon).await;
        // A store that hangs does not delay other stores.
        drop(place);
        match opened {
            Some(opened) => opened,
            None => opening.await,
        }
    }

    /// Starts the writeback of a volume with a writeback cache on one of the workers; does nothing for other volumes.
    async fn start_writeback(
        &self,
        config: &VolumeConfig,
        device: BdiKey,
        volume: &Arc<Volume>,
    ) -> Result<(), StoreError> {
        let Some(cache) = volume.cache().filter(|_| config.cache == CacheMode::Writeback) else {
            return Ok(());
        };
        debug_assert_eq!(volume.cache_mode(), Mode::Writeback);
        let control = self.bdis.control(device, &cache)?;
        let turn = self.next_worker.fetch_add(1, Ordering::Relaxed);
        let Some(worker) = self.workers.get(turn % self.workers.len().max(1)) else {
            return Ok(());
        };
        let volume = volume.clone();
        let (sender, started) = tokio::sync::oneshot::channel();
        worker.spawn(move |io| async move {
            volume.start_writeback(&io, control);
            let _ = sender.send(());
        });
        // This fails if the worker has ended.
        let _ = started.await;
        Ok(())
    }

    /// Whether [`Engine::stop`] has begun.
    pub fn is_stopping(&self) -> bool {
        self.stopping.is_stopped()
    }

    /// Whether a volume is not served yet: it is being opened, or that is tried again.
    pub fn awaits(&self, name: &str) -> bool {
        let slot = lock(&self.slots).get(name).cloned();
        let phase = slot.map(|slot| slot.state().phase);
        matches!(phase, Some(VolumePhase::Opening | VolumePhase::Failed))
            || lock(&self.definitions).broken(name).is_some()
    }

    /// The states of all volumes, by name.
    pub fn states(&self) -> Vec<VolumeState> {
        let definitions = lock(&self.definitions);
        let slots: Vec<_> = lock(&self.slots).values().cloned().collect();
        let of_slot = |slot: &Arc<VolumeSlot>| {
            let origin = definitions.origin(slot.name()).map_or(DefinedIn::Unset, defined_in);
            VolumeState { origin, ..slot.state() }
        };
        let mut states: Vec<_> = slots.iter().map(of_slot).collect();
        let config = definitions.config.as_ref();
        let broken = config.into_iter().flat_map(|config| &config.broken);
        let broken = broken.filter(|(name, _)| definitions.broken(name).is_some());
        let before = states.len();
        states.extend(broken.map(|(name, reason)| {
            let removed = definitions.unremoved_since(name);
            let since = removed.unwrap_or_else(|| definitions.read_at());
            VolumeState::broken(name, reason, (since, removed.is_some()))
        }));
        if states.len() > before {
            states.sort_by(|one, other| one.name.cmp(&other.name));
        }
        states
    }

    /// Refuses clients of volumes whose files in the state directory cannot be used.
    fn refuse_broken(&self, config: &Config) {
        config.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        for (name, reason) in &config.broken {
            self.open_lines.broken(name, reason);
            if !config.volumes.contains_key(name) {
                // Its list is in that file.
                self.volumes.admit_none_unless_known(name);
                let refusal = format!("the volume cannot be opened at present: {reason}");
                self.volumes.refuse(name, &refusal);
            }
        }
    }
}
