//! Start, reload and stop of the daemon, as far as they concern signals, the service manager and sockets. Volumes are
//! the engine's ([`crate::engine`]).
//!
//! The main thread waits for events: signals, and steps that the engine has completed on a worker. On SIGTERM or
//! SIGINT the daemon stops accepting connections, completes the requests in flight, flushes every volume and exits. A
//! second signal meanwhile leaves [`HURRY`] for data that can still be written; a third one exits at once. SIGHUP
//! reloads the configuration file. A stop interrupts a start and a reload.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::Context;
use ebb_cache::{Cache, CacheOptions};
use ebb_config::params::{Configured, Key, Live, Parameters};
use ebb_config::{
    Choice, Config, ConfigError, IdleMemory, LogLevel, NbdConfig, ServeArgs, TlsSetting,
};
use ebb_control::ControlContext;
use ebb_control::figures::StatSources;
use ebb_export_nbd::{Server, ServerLimits, ServerTls};
use ebb_export_xen::XenParameters;
use ebb_io::{Io, Worker, WorkerHandle, fd_from};
use ebb_mem::pressure::{Monitor, Watch};
use ebb_mem::{IdlePolicy, Memory};
use ebb_volume::Volumes;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};

use crate::control::{ControlSockets, volume_stats};
use crate::engine::{Engine, EngineParts, HelperThreads, StopReport, VolumePhase};
use crate::listener::{self, ListenError, Listener};
use crate::outages;
use crate::pressure_response;

/// Bounds of the ceiling of I/O memory, and its value if no limit of the host is known, bytes.
const CEILING_MIN: usize = 64 << 20;
const CEILING_MAX: usize = 1 << 40;
const CEILING_UNKNOWN: u64 = 1 << 30;

/// Changes the level of the log while the daemon runs.
pub type SetLogLevel = Box<dyn Fn(LogLevel) + Send + Sync>;

/// How long a start waits while no further store is opened, before it reports that it is ready without the missing
/// ones, or with `--strict` fails. Longer than a successor waits for the lock of an image.
const START_PATIENCE: Duration = Duration::from_secs(6);
/// How long a stop may still take after a second signal.
const HURRY: Duration = Duration::from_secs(3);

/// What the main thread waits for.
enum Event {
    Signal(i32),
    /// The engine has started.
    Started,
    /// The configuration file was read for a reload.
    Loaded(Box<Result<Loaded, ConfigError>>),
    Reloaded,
    Stopped(StopReport),
}

/// The files that a reload has read.
struct Loaded {
    config: Config,
    tls: anyhow::Result<Option<ServerTls>>,
}

struct Daemon {
    engine: Arc<Engine>,
    args: ServeArgs,
    server: Server,
    workers: Vec<Worker>,
    nbd: NbdConfig,
    events: Receiver<Event>,
    /// Cloned for every thread and task that sends events.
    sender: Sender<Event>,
    /// Monitors memory pressure until it is dropped.
    _monitor: Option<Monitor>,
}

/// Signals that would end the process before the daemon is ready for them.
#[derive(Debug)]
pub struct EarlySignals {
    hangup: Arc<AtomicBool>,
    /// A signal has requested the end of the daemon.
    end: Arc<AtomicBool>,
}

impl EarlySignals {
    /// From now on SIGHUP requests a reload, which takes place when the daemon has started, and a write beyond the
    /// process's limit of file size (`RLIMIT_FSIZE`) fails with an error and does not end the process. Call this before
    /// the configuration is read: a reload that is requested meanwhile must not be lost.
    ///
    /// # Errors
    /// If the signal handlers cannot be installed.
    pub fn watch() -> std::io::Result<EarlySignals> {
        let hangup = Arc::<AtomicBool>::default();
        signal_hook::flag::register(SIGHUP, hangup.clone())?;
        // With a handler the write fails with EFBIG, as if the signal were ignored.
        signal_hook::flag::register(SIGXFSZ, Arc::default())?;
        Ok(EarlySignals { hangup, end: Arc::default() })
    }
}

/// Serves until a signal stops the daemon.
///
/// # Errors
/// If it cannot start, or if data could not be flushed at the end.
pub fn serve(
    config: &Config,
    args: ServeArgs,
    set_log_level: SetLogLevel,
    signals: &EarlySignals,
) -> anyhow::Result<()> {
    let started = ebb_mem::clock::now();
    raise_descriptor_limit();
    warn_of_certificates(config);
    let (sender, events) = channel();
    watch_signals(sender.clone(), signals)?;
    let mut listeners = listener::inherited().context("LISTEN_FDS")?;
    let parameters = Parameters::new(&Configured::from(config));
    let limits = LiveLimits::new(&parameters);
    let volumes = Volumes::default();
    let (policy, context) = (tls_policy(config.nbd.tls), tls_context(&config.nbd)?);
    let server = Server::new(volumes.clone(), limits.now(), policy, context);
    follow(&parameters, server.clone(), limits, set_log_level);
    let memory = elastic_memory(started, config.idle_memory)?;
    parameters.govern(&memory);
    let cache = start_cache(&memory, &parameters, started)?;
    for address in &config.listen {
        match listener::open(address, &signals.end) {
            Err(ListenError::Interrupted) => {
                tracing::info!("stopped before anything was served");
                return Ok(());
            }
            opened => listeners.push(opened?),
        }
    }
    let workers = start_workers(config.workers, &memory)?;
    let engine = Engine::new(EngineParts {
        server: server.clone(),
        volumes: volumes.clone(),
        parameters: parameters.clone(),
        cache: cache.clone(),
        workers: handles(&workers),
        opener: Arc::new(HelperThreads),
        drain: Duration::from_secs(args.drain),
        // Half of the I/O memory may be dirty; the other half is left for requests and reads.
        dirty_max: u64::try_from(memory.arena_stats().ceiling / 2).unwrap_or(u64::MAX),
        started,
    })
    .context("writeback")?;
    let monitor = monitor_pressure();
    let grants = Arc::<XenParameters>::default();
    crate::xen::govern_grants(&parameters, &grants);
    let response = monitor.as_ref().map(|monitor| {
        pressure_response::subscribe(monitor, &memory, &cache, engine.bdis(), &grants)
    });
    maintain_memory(&workers[0].handle(), memory.clone());
    engine.keep_dirty_limits(&workers[0].handle());
    outages::monitor(&workers[0].handle(), volumes.clone());
    let daemon = Daemon {
        engine: engine.clone(),
        args,
        server: server.clone(),
        workers,
        nbd: config.nbd.clone(),
        events,
        sender,
        _monitor: monitor,
    };
    if !daemon.start(config)? {
        return daemon.stop(listeners);
    }
    if daemon.args.strict {
        refuse_if_degraded(&engine)?;
    }
    let workers = handles(&daemon.workers);
    let xen = match config.xen {
        true => {
            let backend = crate::xen::serve(&volumes, workers.clone(), grants, &engine)?;
            let figures = backend.figures();
            engine.serve_guests(backend);
            Some(figures)
        }
        false => None,
    };
    let bdis = engine.bdis().clone();
    let sources = StatSources::new(Some(memory), daemon._monitor.as_ref())
        .with_cache(cache)
        .with_bdis(move || bdis.stats());
    let sockets = match ControlSockets::open(config, &signals.end) {
        // The event of the signal is in the queue already.
        Err(ListenError::Interrupted) => return daemon.run(listeners),
        opened => opened?,
    };
    let of_volumes = server.clone();
    let volumes = Box::new(move || volume_stats(&of_volumes, &engine));
    let context = ControlContext { server, volumes, parameters, sources, xen, workers, started };
    let control = sockets.serve(config, context)?;
    daemon.listen(&listeners)?;
    daemon.report_ready();
    let outcome = daemon.run(listeners);
    // Kept until here, so that the control socket shows what a stop waits for.
    drop((control, response));
    outcome
}

/// Warns of expired certificates. They are used nevertheless, because some clients do not verify them.
fn warn_of_certificates(config: &Config) {
    if let (Some(folder), true) = (&config.nbd.tls_certificates, config.nbd.tls != TlsSetting::Off)
        && let Err(error) = ServerTls::check_dates(folder, config.nbd.tls_verify_peer)
    {
        tracing::warn!("TLS: {error}");
    }
}

fn start_workers(count: usize, memory: &Arc<Memory>) -> anyhow::Result<Vec<Worker>> {
    (0..count)
        .map(|number| Worker::start(&format!("ebbd-{number}"), memory))
        .collect::<std::io::Result<Vec<_>>>()
        .context("worker")
}

fn handles(workers: &[Worker]) -> Vec<WorkerHandle> {
    workers.iter().map(Worker::handle).collect()
}

/// With `--strict` the start fails unless all volumes are served.
fn refuse_if_degraded(engine: &Engine) -> anyhow::Result<()> {
    let states = engine.states();
    let Some(state) = states.iter().find(|state| state.phase != VolumePhase::Serving) else {
        return Ok(());
    };
    let reason = state.failure.as_ref().map(|failure| failure.reason.clone());
    let reason = reason.unwrap_or_else(|| {
        format!(
            "its store has not answered within {} s: check it, or start without --strict, so that the other volumes \
             are served and this one is tried again",
            START_PATIENCE.as_secs()
        )
    });
    anyhow::bail!("volume {}: {reason} (--strict)", state.name)
}

/// Sends signals as events. The third SIGTERM or SIGINT ends the process, whatever the main thread does.
fn watch_signals(sender: Sender<Event>, early: &EarlySignals) -> anyhow::Result<()> {
    let mut signals = signal_hook::iterator::Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    if early.hangup.load(Ordering::SeqCst) {
        // The caller has the receiver.
        let _ = sender.send(Event::Signal(SIGHUP));
    }
    let end = early.end.clone();
    let watch = move || {
        let mut ends = 0;
        for signal in signals.forever() {
            if signal != SIGHUP {
                ends += 1;
                end.store(true, Ordering::SeqCst);
            }
            if ends > 2 {
                signal_hook::low_level::exit(1);
            }
            // The receiver is dropped when the process ends.
            let _ = sender.send(Event::Signal(signal));
        }
    };
    let thread = std::thread::Builder::new().name("ebbd-signals".into()).stack_size(128 << 10);
    thread.spawn(watch).context("the thread for signals")?;
    Ok(())
}

/// Raises the limit of open files to the maximum: each volume and each client needs a descriptor.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
}

/// The parameters that limit the NBD server.
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

    fn now(&self) -> ServerLimits {
        let size = |live: &Live| usize::try_from(live.get()).unwrap_or(usize::MAX);
        ServerLimits {
            max_clients: size(&self.max_clients),
            // The parameter's range ends at 64 MiB.
            max_request: u32::try_from(self.max_request.get()).unwrap_or(u32::MAX),
            connection_memory: size(&self.connection_memory),
        }
    }
}

/// Applies changes of parameters to the server and the log.
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
        // The other parameters are read where they are used.
        _ => {}
    });
}

/// The daemon's I/O memory: at most half of the memory of the host or of the control group.
fn elastic_memory(started: Instant, idle: IdleMemory) -> anyhow::Result<Arc<Memory>> {
    let limit = ebb_mem::pressure::limit(&ebb_mem::pressure::Roots::default());
    let bytes = limit.map_or(CEILING_UNKNOWN, |limit| limit.bytes / 2);
    let ceiling = usize::try_from(bytes).unwrap_or(usize::MAX).clamp(CEILING_MIN, CEILING_MAX);
    tracing::debug!(bytes = ceiling, "the ceiling of I/O memory");
    let mut options = ebb_mem::MemoryOptions::new(ceiling, started);
    options.lend = idle == IdleMemory::Lend;
    options.policy = match idle {
        IdleMemory::Lend => IdlePolicy::Elastic,
        IdleMemory::Drop => IdlePolicy::UntilPressure,
        IdleMemory::Keep => IdlePolicy::Static,
        IdleMemory::None => IdlePolicy::Uncached,
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

/// Updates the memory's estimates once a second.
fn maintain_memory(worker: &WorkerHandle, memory: Arc<Memory>) {
    worker.spawn(move |io| async move {
        loop {
            io.sleep(Duration::from_secs(1)).await;
            memory.tick(ebb_mem::clock::now());
        }
    });
}

/// Starts the monitor of the host's memory pressure. Without it the daemon serves nevertheless.
fn monitor_pressure() -> Option<Monitor> {
    let mut options = ebb_mem::pressure::MonitorOptions::new(u64::from(std::process::id()));
    options.systemd = Watch::from_environment();
    options.on_lost_source = Some(Box::new(|finding| {
        tracing::warn!("a source of memory pressure has failed: {finding}");
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
            tracing::warn!(error = %anyhow::Error::from(error), "cannot monitor memory pressure");
            None
        }
    }
}

fn tls_policy(tls: TlsSetting) -> ebb_export_nbd::TlsMode {
    match tls {
        TlsSetting::Off => ebb_export_nbd::TlsMode::Off,
        TlsSetting::On => ebb_export_nbd::TlsMode::On,
        TlsSetting::Require => ebb_export_nbd::TlsMode::Require,
    }
}

pub(crate) fn tls_context(nbd: &NbdConfig) -> anyhow::Result<Option<ServerTls>> {
    if nbd.tls == TlsSetting::Off {
        return Ok(None);
    }
    let context = match (&nbd.tls_psk, &nbd.tls_certificates) {
        (Some(file), _) => ServerTls::from_psk(file),
        (None, Some(folder)) => ServerTls::from_certificates(folder, nbd.tls_verify_peer),
        // The configuration requires one of the two.
        (None, None) => return Ok(None),
    };
    Ok(Some(context.context("TLS")?))
}

impl Daemon {
    fn first_worker(&self) -> WorkerHandle {
        // The configuration has at least one worker.
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

    /// Runs a future of the engine on a worker, and sends its event when it has completed.
    fn drive<Fut>(&self, step: impl FnOnce(Arc<Engine>, Io) -> Fut + Send + 'static)
    where
        Fut: Future<Output = Event> + 'static,
    {
        let (engine, sender) = (self.engine.clone(), self.sender.clone());
        self.first_worker().spawn(move |io| {
            let step = step(engine, io);
            async move {
                // The receiver is dropped when the process ends.
                let _ = sender.send(step.await);
            }
        });
    }

    fn next_event(&self) -> anyhow::Result<Event> {
        // `self` has a sender, so that this cannot fail.
        self.events.recv().context("the threads of the daemon have ended")
    }

    /// Opens the volumes; false if a signal requested a stop meanwhile. A reload that was requested meanwhile follows.
    fn start(&self, config: &Config) -> anyhow::Result<bool> {
        let config = config.clone();
        self.drive(move |engine, io| async move {
            engine.start(&io, config, Some(START_PATIENCE)).await;
            Event::Started
        });
        let mut reload = false;
        loop {
            match self.next_event()? {
                Event::Signal(SIGHUP) => reload = true,
                Event::Signal(_) => return Ok(false),
                _ => break,
            }
        }
        if reload {
            // `self` has the receiver.
            let _ = self.sender.send(Event::Signal(SIGHUP));
        }
        Ok(true)
    }

    fn report_ready(&self) {
        let states = self.engine.states();
        let served = states.iter().filter(|state| state.phase == VolumePhase::Serving).count();
        for state in states.iter().filter(|state| state.phase == VolumePhase::Opening) {
            tracing::warn!(
                volume = state.name,
                "its store does not respond: it is served as soon as the store is opened"
            );
        }
        tracing::info!(volumes = served, of = states.len(), "ready");
        // This fails without a service manager.
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    }

    fn run(self, listeners: Vec<Listener>) -> anyhow::Result<()> {
        let (mut reading, mut again) = (false, false);
        loop {
            match self.next_event()? {
                Event::Signal(SIGHUP) if reading => {
                    tracing::info!(
                        "the configuration file is still being read: it is read once more afterwards"
                    );
                    again = true;
                }
                Event::Signal(SIGHUP) => reading = self.read_configuration(),
                Event::Signal(_) => return self.stop(listeners),
                Event::Loaded(loaded) => {
                    self.reload(*loaded);
                    reading = std::mem::take(&mut again) && self.read_configuration();
                }
                Event::Started | Event::Reloaded | Event::Stopped(_) => {}
            }
        }
    }

    fn stop(self, listeners: Vec<Listener>) -> anyhow::Result<()> {
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
        tracing::info!(clients = self.server.clients(), "stopping: completing requests");
        drop(listeners);
        self.drive(|engine, io| async move { Event::Stopped(engine.stop(&io).await) });
        let report = loop {
            match self.next_event()? {
                Event::Stopped(report) => break report,
                Event::Signal(signal) if signal != SIGHUP => {
                    tracing::warn!(
                        "second signal: data that is not written within 3 s is given up"
                    );
                    self.engine.hurry(HURRY);
                }
                _ => {}
            }
        };
        self.engine.end_guests();
        if report.is_clean() {
            tracing::info!("stopped: all volumes flushed");
            return Ok(());
        }
        // Workers may be blocked by a store that does not respond: they end with the process.
        std::mem::forget(self);
        if report.unflushed.is_empty() {
            tracing::info!("stopped: all volumes flushed, unacknowledged requests abandoned");
            return Ok(());
        }
        let list = report.unflushed.iter().map(|volume| {
            format!("{} ({} bytes unwritten: {})", volume.volume, volume.bytes, volume.why)
        });
        let list: Vec<_> = list.collect();
        anyhow::bail!("{} volume(s) could not be flushed: {}", list.len(), list.join("; "))
    }

    /// Begins to read the configuration again, on a thread of its own: its file system may hang, and a stop must not
    /// wait for it. False if the thread cannot be started.
    fn read_configuration(&self) -> bool {
        let (args, nbd, sender) = (self.args.clone(), self.nbd.clone(), self.sender.clone());
        let read = move || {
            let loaded =
                Config::load(&args).map(|config| Loaded { config, tls: tls_context(&nbd) });
            // The receiver is dropped when the process ends.
            let _ = sender.send(Event::Loaded(Box::new(loaded)));
        };
        let thread = std::thread::Builder::new().name("ebbd-config".into());
        if let Err(error) = thread.spawn(read) {
            tracing::error!(%error, "not reloaded: cannot start a thread to read the file: raise TasksMax");
            return false;
        }
        true
    }

    /// Begins to apply what can change while the daemon runs. A mistake in the configuration is logged, and the old
    /// configuration stays in force.
    fn reload(&self, loaded: Result<Loaded, ConfigError>) {
        let Loaded { config: new, tls } = match loaded {
            Ok(loaded) => loaded,
            Err(error) => {
                tracing::error!("not reloaded, the old configuration stays in force: {error}");
                return;
            }
        };
        match tls {
            Ok(context) => self.server.set_tls_context(context),
            Err(error) => tracing::error!("the old TLS keys stay in force: {error:#}"),
        }
        self.drive(|engine, io| async move {
            let volumes = new.volumes.len();
            engine.reload(&io, new).await;
            // A stop interrupts a reload.
            if !engine.is_stopping() {
                tracing::info!(volumes, "reloaded");
            }
            Event::Reloaded
        });
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::{Signal, getpid, kill_process};

    use super::*;

    #[test]
    fn a_hangup_before_the_start_requests_a_reload_and_a_file_size_signal_does_not_end_the_process()
    {
        let early = EarlySignals::watch().unwrap();
        kill_process(getpid(), Signal::HUP).unwrap();
        kill_process(getpid(), Signal::XFSZ).unwrap();
        while !early.hangup.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        let (sender, events) = channel();
        watch_signals(sender, &early).unwrap();
        let event = events.recv_timeout(Duration::from_secs(60)).expect("the reload is lost");
        assert!(matches!(event, Event::Signal(SIGHUP)));
    }
}
