//! The daemon's life: open everything, serve, reload, drain, stop.
//!
//! The main thread waits for signals; workers serve. SIGTERM or SIGINT: nobody is let in any more,
//! requests under way end and are answered, every volume is flushed, exit. A second one while that
//! lasts gives up at once. SIGHUP: the configuration file is read again.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use ebb_cache::{Cache, CacheOptions};
use ebb_export_nbd::{Limits, Server, ServerTls};
use ebb_export_xen::{Backend, XenParameters};
use ebb_io::{Worker, WorkerHandle, fd_from};
use ebb_mem::pressure::{Monitor, Watch};
use ebb_mem::{Memory, Policy};
use ebb_volume::Volume;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::answers;
use crate::bdi::Bdis;
use crate::cli::ServeArgs;
use crate::config::{
    CacheMode, Changes, Choice, Config, IdleMemory, LogLevel, Nbd, Tls, VolumeConfig,
};
use crate::control::{Control, Shared};
use crate::drain::drain;
use crate::listener::{self, Listener};
use crate::params::{Configured, Key, Live, Parameters};
use crate::stat;
use crate::stores::{StoreError, open_store, open_volume};

/// Bounds of the ceiling of I/O memory, and what it is where no limit can be found, bytes.
const CEILING_MIN: usize = 64 << 20;
const CEILING_MAX: usize = 1 << 40;
const CEILING_UNKNOWN: u64 = 1 << 30;

/// Changes the level of the log while the daemon runs.
pub type SetLogLevel = Box<dyn Fn(LogLevel) + Send + Sync>;

struct Daemon {
    config: Config,
    args: ServeArgs,
    inherited: usize,
    server: Server,
    workers: Vec<Worker>,
    parameters: Parameters,
    cache: Arc<Cache>,
    /// Serves Xen guests.
    xen: Option<Backend>,
    bdis: Arc<Bdis>,
    /// Listens to memory pressure as long as it is here.
    _monitor: Option<Monitor>,
}

/// The configuration names something that cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("the configuration was checked and cannot be served")]
pub struct CheckFailed;

/// Opens what the configuration names and says `ok` for each on the way, without serving.
///
/// # Errors
/// The first thing that cannot be opened.
pub fn check(config: &Config, say: impl FnMut(String)) -> anyhow::Result<()> {
    open_all(config, say).map_err(|error| error.context(CheckFailed))
}

fn open_all(config: &Config, mut say: impl FnMut(String)) -> anyhow::Result<()> {
    tls_context(&config.nbd)?;
    for (name, volume) in &config.volumes {
        let store = open_store(name, volume).with_context(|| format!("volume {name}"))?;
        let direct = if store.capabilities().direct { ", direct" } else { "" };
        say(format!("ok volume {name}: {} bytes{direct}", store.size()));
    }
    say("ok configuration".to_owned());
    Ok(())
}

/// Serves until told to stop.
///
/// # Errors
/// What kept it from starting, or data that could not be made stable at the end.
pub fn serve(config: Config, args: ServeArgs, set_log_level: SetLogLevel) -> anyhow::Result<()> {
    let started = ebb_mem::clock::now();
    raise_descriptor_limit();
    let (give_up, mut signals) = watch_signals()?;
    let inherited = listener::inherited().context("LISTEN_FDS")?;
    let parameters = Parameters::new(&Configured::from(&config));
    let limits = LiveLimits::new(&parameters);
    let server = Server::new(limits.now(), tls_policy(config.nbd.tls), tls_context(&config.nbd)?);
    follow(&parameters, server.clone(), limits, set_log_level);
    let memory = elastic_memory(started, config.idle_memory)?;
    parameters.govern(&memory);
    let cache = start_cache(&memory, &parameters, started)?;
    // Of I/O memory half may be dirty: requests and reads need some, too.
    let most = u64::try_from(memory.arena_stats().ceiling / 2).unwrap_or(u64::MAX);
    let bdis = Bdis::new(&cache, &parameters, most, started).context("writeback")?;
    for (name, volume) in &config.volumes {
        let opened = open_volume(name, volume, &cache).with_context(|| format!("volume {name}"))?;
        server.add(opened, parameters.pool(Some(name)));
    }
    server.set_default(config.default_volume());
    let inherited_count = inherited.len();
    let mut listeners = inherited;
    for address in &config.listen {
        listeners.push(listener::open(address)?);
    }
    let workers = (0..config.workers)
        .map(|number| Worker::start(&format!("ebbd-{number}"), &memory))
        .collect::<std::io::Result<Vec<_>>>()
        .context("worker")?;
    let monitor = listen_to_pressure();
    let grants = Arc::<XenParameters>::default();
    parameters.govern_grants(&grants);
    let answers =
        monitor.as_ref().map(|monitor| answers::answer(monitor, &memory, &cache, &bdis, &grants));
    let handles = || workers.iter().map(Worker::handle).collect();
    let xen = match config.xen {
        true => Some(crate::xen::serve(&server, &parameters, handles(), grants)?),
        false => None,
    };
    keep_time(&workers[0].handle(), memory.clone());
    bdis.keep(&workers[0].handle());
    for (volume, worker) in server.volumes().into_iter().map(|(v, _)| v).zip(workers.iter().cycle())
    {
        if let Some(config) = config.volumes.get(&**volume.name()) {
            start_writeback(&bdis, config, &volume, &worker.handle())
                .with_context(|| format!("volume {}", volume.name()))?;
        }
    }
    bdis.settle();
    let control = if config.control.is_some() || config.web.is_some() {
        let shared = Shared {
            server: server.clone(),
            parameters: parameters.clone(),
            memory: stat::Memory::new(Some(memory.clone()), monitor.as_ref())
                .with_cache(cache.clone())
                .with_bdis(bdis.clone()),
            workers: workers.iter().map(Worker::handle).collect(),
            xen: xen.as_ref().map(Backend::figures),
            started,
        };
        let (socket, web) = (config.control.as_deref(), config.web.as_deref());
        Some(Control::start(socket, web, Arc::new(shared))?)
    } else {
        None
    };
    let daemon = Daemon {
        config,
        args,
        inherited: inherited_count,
        server,
        workers,
        parameters,
        cache,
        xen,
        bdis,
        _monitor: monitor,
    };
    daemon.listen(&listeners)?;
    tracing::info!(volumes = daemon.config.volumes.len(), "ready");
    // Without a service manager there is nobody to tell.
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    let outcome = daemon.run(&mut signals, &give_up, listeners);
    // To the end it shows what the daemon waits for.
    drop((control, answers));
    outcome
}

fn watch_signals() -> anyhow::Result<(Arc<AtomicBool>, signal_hook::iterator::Signals)> {
    let give_up = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        signal_hook::flag::register_conditional_shutdown(signal, 1, give_up.clone())?;
    }
    Ok((give_up, signal_hook::iterator::Signals::new([SIGTERM, SIGINT, SIGHUP])?))
}

/// Each volume and each client takes a descriptor: use what the system allows.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "could not raise the limit of open files");
    }
}

/// The parameters that are limits of the NBD server.
struct LiveLimits {
    max_clients: Live,
    max_request: Live,
    connection_memory: Live,
}

impl LiveLimits {
    fn new(parameters: &Parameters) -> Self {
        Self {
            max_clients: parameters.live(Key::MaxClients),
            max_request: parameters.live(Key::MaxRequest),
            connection_memory: parameters.live(Key::ConnectionMemory),
        }
    }

    fn now(&self) -> Limits {
        let size = |live: &Live| usize::try_from(live.get()).unwrap_or(usize::MAX);
        Limits {
            max_clients: size(&self.max_clients),
            // The parameter's range ends at 64 MiB.
            max_request: u32::try_from(self.max_request.get()).unwrap_or(u32::MAX),
            connection_memory: size(&self.connection_memory),
        }
    }
}

/// Has the server and the log follow their parameters.
fn follow(parameters: &Parameters, server: Server, limits: LiveLimits, set_log_level: SetLogLevel) {
    parameters.watch(move |change| match change.key {
        Key::MaxClients | Key::MaxRequest | Key::ConnectionMemory => {
            server.set_limits(limits.now());
        }
        Key::Log => {
            let at = usize::try_from(change.to).unwrap_or(usize::MAX);
            if let Some((_, level)) = LogLevel::ALL.get(at) {
                set_log_level(*level);
            }
        }
        // Users of the others read them where they need them.
        _ => {}
    });
}

/// The daemon's I/O memory: at most half of what the host, or the control group, allows.
fn elastic_memory(started: Instant, idle: IdleMemory) -> anyhow::Result<Arc<Memory>> {
    let limit = ebb_mem::pressure::limit(&ebb_mem::pressure::Roots::default());
    let bytes = limit.map_or(CEILING_UNKNOWN, |limit| limit.bytes / 2);
    let ceiling = usize::try_from(bytes).unwrap_or(usize::MAX).clamp(CEILING_MIN, CEILING_MAX);
    tracing::debug!(bytes = ceiling, "ceiling of I/O memory");
    let mut options = ebb_mem::Options::new(ceiling, started);
    options.lend = idle == IdleMemory::Lend;
    options.policy = match idle {
        IdleMemory::Lend => Policy::Elastic,
        IdleMemory::Drop => Policy::Told,
        IdleMemory::Keep => Policy::Static,
        IdleMemory::None => Policy::Uncached,
    };
    if idle != IdleMemory::Lend {
        tracing::info!("idle I/O memory: {idle}");
    }
    Memory::new(options).context("I/O memory")
}

/// The cache of all volumes, which follows `cache_max` and `cache_min`.
fn start_cache(
    memory: &Arc<Memory>,
    parameters: &Parameters,
    started: Instant,
) -> anyhow::Result<Arc<Cache>> {
    let max = |bytes: u64| (bytes != 0).then_some(bytes);
    let options = CacheOptions {
        max_bytes: max(parameters.live(Key::CacheMax).get()),
        min_bytes: parameters.live(Key::CacheMin).get(),
        started,
    };
    let cache = Cache::start(memory, options).context("cache")?;
    let governed = cache.clone();
    parameters.watch(move |change| match change.key {
        Key::CacheMax => governed.set_max(max(change.to)),
        Key::CacheMin => governed.set_min(change.to),
        _ => {}
    });
    Ok(cache)
}

/// Has a volume with a writeback cache written back, on this worker; others stay as they are.
fn start_writeback(
    bdis: &Arc<Bdis>,
    config: &VolumeConfig,
    volume: &Arc<Volume>,
    worker: &WorkerHandle,
) -> Result<(), StoreError> {
    let Some(cache) = volume.cache().filter(|_| config.cache == CacheMode::Writeback) else {
        return Ok(());
    };
    let control = bdis.control(config, cache)?;
    let volume = volume.clone();
    worker.block_on(move |io| async move { volume.start_writeback(&io, control) });
    Ok(())
}

/// The memory's estimates go by the second.
fn keep_time(worker: &WorkerHandle, memory: Arc<Memory>) {
    worker.spawn(move |io| async move {
        loop {
            io.sleep(Duration::from_secs(1)).await;
            memory.tick(ebb_mem::clock::now());
        }
    });
}

/// Listens to what the host says of memory. A host that says nothing is no reason not to serve.
fn listen_to_pressure() -> Option<Monitor> {
    let mut options = ebb_mem::pressure::Options::new(u64::from(std::process::id()));
    options.systemd = Watch::from_environment();
    options.on_lost_source = Some(Box::new(|finding| {
        tracing::warn!("no longer listening to memory pressure: {finding}");
    }));
    match Monitor::start(options) {
        Ok((monitor, report)) => {
            for finding in &report.listening {
                tracing::info!("memory pressure: {finding}");
            }
            for finding in &report.missing {
                tracing::debug!("memory pressure, not used: {finding}");
            }
            for note in &report.notes {
                tracing::warn!("memory pressure: {note}");
            }
            Some(monitor)
        }
        Err(error) => {
            tracing::warn!(error = %anyhow::Error::from(error), "nobody listens to memory pressure");
            None
        }
    }
}

fn tls_policy(tls: Tls) -> ebb_export_nbd::Tls {
    match tls {
        Tls::Off => ebb_export_nbd::Tls::Off,
        Tls::On => ebb_export_nbd::Tls::On,
        Tls::Require => ebb_export_nbd::Tls::Require,
    }
}

fn tls_context(nbd: &Nbd) -> anyhow::Result<Option<ServerTls>> {
    if nbd.tls == Tls::Off {
        return Ok(None);
    }
    let context = match (&nbd.tls_psk, &nbd.tls_certificates) {
        (Some(file), _) => ServerTls::from_psk(file),
        (None, Some(folder)) => ServerTls::from_certificates(folder, nbd.tls_verify_peer),
        // The configuration demands one of the two.
        (None, None) => return Ok(None),
    };
    Ok(Some(context.context("TLS")?))
}

impl Daemon {
    fn first_worker(&self) -> WorkerHandle {
        // There is at least one: the configuration says so.
        self.workers[0].handle()
    }

    fn listen(&self, listeners: &[Listener]) -> anyhow::Result<()> {
        for listener in listeners {
            let fd: OwnedFd = listener.fd.try_clone().context("socket")?;
            rustix::net::listen(&fd, 1024).context("socket")?;
            let (server, fd) = (self.server.clone(), fd_from(fd));
            let workers = self.workers.iter().map(Worker::handle).collect();
            self.first_worker()
                .spawn(move |io| async move { server.listen(io, fd, workers).await });
            tracing::info!(address = listener.name, "listening");
        }
        Ok(())
    }

    fn run(
        mut self,
        signals: &mut signal_hook::iterator::Signals,
        give_up: &AtomicBool,
        listeners: Vec<Listener>,
    ) -> anyhow::Result<()> {
        for signal in signals.forever() {
            if signal == SIGHUP {
                self.reload();
            } else {
                break;
            }
        }
        give_up.store(true, Ordering::SeqCst);
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
        tracing::info!(clients = self.server.clients(), "stopping: draining requests");
        drop(listeners);
        self.stop()
    }

    fn stop(self) -> anyhow::Result<()> {
        // Guests stay connected and wait for a successor; what they asked for is answered.
        let guests = self.xen.as_ref().map(Backend::begin_stop);
        let volumes: Vec<_> = self.server.volumes().into_iter().map(|(v, _)| v).collect();
        let server = self.server.clone();
        let seen_off = move |_| async move {
            if let Some(guests) = guests {
                guests.over().await;
            }
            server.stop().await;
        };
        let limit = Duration::from_secs(self.args.drain);
        let failures = drain(&self.first_worker(), &volumes, seen_off, limit)?;
        if failures.is_empty() {
            tracing::info!("stopped: all volumes flushed");
            return Ok(());
        }
        // Workers may be held by what could not be written: they end with the process.
        std::mem::forget(self);
        anyhow::bail!("{} volume(s) could not be flushed", failures.len())
    }

    /// Reads the configuration again and does what can be done while running. What is wrong with
    /// it is logged, and the old one stays in force.
    fn reload(&mut self) {
        let overrides = self.args.overrides(self.inherited);
        let new = match Config::load(self.args.config.as_deref(), &overrides) {
            Ok(new) => new,
            Err(error) => {
                tracing::error!("not reloaded, the old configuration stays: {error}");
                return;
            }
        };
        let changes = self.config.reload_diff(&new);
        for key in &changes.needs_restart {
            tracing::warn!(key, "changed in the configuration: takes effect at the next start");
        }
        match tls_context(&self.config.nbd) {
            Ok(context) => self.server.set_tls_context(context),
            Err(error) => tracing::error!("the old TLS keys stay: {error:#}"),
        }
        for change in self.parameters.reload(&Configured::from(&new)) {
            let definition = change.key.definition();
            let (from, to) = (definition.text(change.from), definition.text(change.to));
            let (volume, bdi) = (change.volume, change.bdi);
            tracing::info!(parameter = %change.key, volume, bdi, from, to, "changed");
        }
        self.reload_volumes(&new, &changes);
        tracing::info!(volumes = self.config.volumes.len(), "reloaded");
    }

    /// Takes a volume away: its clients first, then what is in memory only goes to its store.
    fn withdraw(&self, name: &str) {
        let volumes = self.server.volumes().into_iter().map(|(volume, _)| volume);
        let volume: Vec<_> = volumes.filter(|volume| &**volume.name() == name).collect();
        let (server, removed) = (self.server.clone(), name.to_owned());
        let seen_off = move |io| async move { server.withdraw(&io, &removed).await };
        let limit = Duration::from_secs(self.args.drain);
        // What failed was logged.
        let _ = drain(&self.first_worker(), &volume, seen_off, limit);
    }

    fn reload_volumes(&mut self, new: &Config, changes: &Changes) {
        for name in changes.volumes_removed.iter().chain(&changes.volumes_changed) {
            if let Some(xen) = &self.xen {
                // The requests of its guests end by themselves; closing the volume waits for them.
                let _ = xen.withdraw(name);
            }
            self.withdraw(name);
            self.config.volumes.remove(name);
            tracing::info!(volume = name, "withdrawn");
        }
        for name in changes.volumes_added.iter().chain(&changes.volumes_changed) {
            let Some(volume) = new.volumes.get(name) else { continue };
            match open_volume(name, volume, &self.cache) {
                Ok(opened) => {
                    let worker = self.first_worker();
                    if let Err(error) = start_writeback(&self.bdis, volume, &opened, &worker) {
                        tracing::error!(volume = name, "not offered: {error}");
                        continue;
                    }
                    self.server.add(opened, self.parameters.pool(Some(name)));
                    self.config.volumes.insert(name.clone(), volume.clone());
                    tracing::info!(volume = name, "offered");
                }
                Err(error) => tracing::error!(volume = name, "not offered: {error}"),
            }
        }
        self.bdis.settle();
        self.config.bdis.clone_from(&new.bdis);
        self.config.cache_max = new.cache_max;
        self.config.cache_min = new.cache_min;
        self.config.nbd.max_clients = new.nbd.max_clients;
        self.config.nbd.max_request = new.nbd.max_request;
        self.config.nbd.connection_memory = new.nbd.connection_memory;
        self.config.log = new.log;
        self.config.max_buffer_pages = new.max_buffer_pages;
        self.config.buffer_squeeze_duration_ms = new.buffer_squeeze_duration_ms;
        for (name, volume) in &mut self.config.volumes {
            let Some(new) = new.volumes.get(name) else { continue };
            volume.default = new.default;
            volume.max_buffer_pages = new.max_buffer_pages;
            volume.buffer_squeeze_duration_ms = new.buffer_squeeze_duration_ms;
        }
        self.server.set_default(self.config.default_volume());
    }
}
