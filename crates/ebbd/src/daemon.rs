//! Start, reload and stop of the daemon, as far as they concern signals, the service manager and sockets. Volumes are
//! the engine's ([`crate::engine`]).
//!
//! The main thread waits for events: signals, and steps that the engine has completed on a worker. On SIGTERM or
//! SIGINT the daemon stops accepting connections, completes the requests in flight, flushes every volume and exits. A
//! second signal meanwhile leaves some seconds for data that can still be written; a third one exits at once. SIGHUP
//! reloads the configuration file. A stop interrupts a start and a reload. Connections of NBD clients can survive a
//! restart ([`crate::handover`]).

mod handover;
mod reload;
mod stop;

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use ebb_advice::Advised;
use ebb_api::stat::DaemonPhase;
use ebb_cache::Cache;
use ebb_config::params::{Configured, Parameters};
use ebb_config::{Config, ConfigError, LogLevel, ServeArgs, StateDir};
use ebb_control::figures::StatSources;
use ebb_control::{ControlContext, ControlServer, EventLog};
use ebb_export_nbd::Server;
use ebb_export_xen::{Figures, XenParameters};
use ebb_io::{Io, Worker, WorkerHandle, fd_from};
use ebb_mem::Memory;
use ebb_mem::pressure::{Monitor, Subscription};
use ebb_volume::Volumes;
use signal_hook::consts::SIGHUP;
use tokio::sync::oneshot;

use self::handover::{AfterFlush, Inheritance, WaitingSuccessor, accepted, lock};
pub use self::handover::{NoControlSocket, serve};
use self::reload::{Loaded, answer};
use crate::config_source::DaemonConfig;
use crate::control::{
    ControlSockets, DaemonState, certificates, limit_group_stats, page_access, socket_peers,
    volume_briefs, volume_stats,
};
use crate::engine::{Engine, EngineParts, HelperThreads, StopReport, VolumePhase};
use crate::handover::takeover::Successor;
use crate::listener::{self, ListenError, Listener};
use crate::manager::{Manager, ReloadOutcome};
use crate::operations::Operations;
use crate::outages::{OutageMonitor, Outages};
use crate::setup::{self, tls_context};
use crate::signals::{self, EarlySignals};
use crate::{notify, parameters, pressure_response, sandbox, socket_watch, xen};

/// Changes the level of the log while the daemon runs.
pub type SetLogLevel = Arc<dyn Fn(LogLevel) + Send + Sync>;

/// The log, as the daemon uses it.
#[derive(Clone)]
pub struct LogHandle {
    /// Changes the level.
    pub set_level: SetLogLevel,
    /// The last lines at `info` and above.
    pub events: EventLog,
}

impl std::fmt::Debug for LogHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LogHandle")
    }
}

/// How long a start waits while no further store is opened, before it reports that it is ready without the missing
/// ones, or with `--strict` fails. Longer than a successor waits for the lock of an image.
const START_PATIENCE: Duration = Duration::from_secs(6);
/// How long a start without `--strict` waits while no further store is opened, before it serves those that are.
const EXPORT_PATIENCE: Duration = Duration::from_secs(2);

/// What the main thread waits for.
enum Event {
    Signal(i32),
    /// A client has requested a reload, and waits for its outcome.
    ReloadRequested(oneshot::Sender<ReloadOutcome>),
    /// The engine knows all volumes, and opens them.
    Opening,
    /// All stores were opened, or none was for [`EXPORT_PATIENCE`]; true if keys are late.
    Quiet(bool),
    /// The engine has started.
    Started,
    /// The configuration file was read for a reload.
    Loaded(Box<Result<Loaded, ConfigError>>),
    /// A reload has ended for these clients.
    Reloaded(Vec<oneshot::Sender<ReloadOutcome>>, ReloadOutcome),
    Stopped(StopReport),
    /// A successor waits for what this daemon hands over.
    TakeoverRequested(Successor),
    /// All dirty data was written, or why it was not.
    Flushed(Result<(), String>),
}

/// Why the daemon stops.
enum RunEnd {
    Signal,
    Takeover(Successor),
}

/// A daemon whose volumes are being opened or are served.
struct Daemon {
    engine: Arc<Engine>,
    args: ServeArgs,
    server: Server,
    volumes: Volumes,
    parameters: Parameters,
    memory: Arc<Memory>,
    cache: Arc<Cache>,
    rings: Arc<XenParameters>,
    listeners: Mutex<Vec<Listener>>,
    workers: Vec<Worker>,
    events: Receiver<Event>,
    /// The configuration that the daemon was started with.
    config: Config,
    control: OnceLock<Arc<ControlServer>>,
    /// The figures of the guests' disks, as soon as guests are served.
    guests: Arc<OnceLock<Figures>>,
    log: EventLog,
    outages: Outages,
    state: Arc<DaemonState>,
    passed: Mutex<Option<PassedSocket>>,
    /// The connections of a predecessor, and itself if it waits.
    inherited: Mutex<Inheritance>,
    /// Cloned for every thread and task that sends events.
    sender: Sender<Event>,
    /// Monitors memory pressure until it is dropped.
    monitor: Option<Monitor>,
    started: Instant,
}

/// What shows the state of a daemon until it has stopped, and returns memory under pressure.
#[derive(Default)]
struct DroppedLast {
    _control: Option<(Arc<ControlServer>, ControlSockets)>,
    _response: Option<Subscription>,
}

/// A socket for vhost-user-blk that was passed to this process, and the volume to serve at it.
#[derive(Debug)]
pub struct PassedSocket {
    /// It listens, or is connected.
    pub socket: OwnedFd,
    /// The volume's name.
    pub volume: String,
}

/// With `--strict` the start fails unless all volumes are served.
fn refuse_if_degraded(config: &Config, engine: &Engine) -> anyhow::Result<()> {
    if let Some((name, reason)) = config.broken.iter().next() {
        anyhow::bail!("volume {name}: {reason} (--strict)");
    }
    let states = engine.states();
    let Some(state) = states.iter().find(|state| state.phase != VolumePhase::Serving) else {
        return Ok(());
    };
    let reason = state.failure.as_ref().map(|failure| failure.reason.clone());
    let reason = reason.unwrap_or_else(|| {
        format!(
            "its store has not replied within {} s: check it, or start without --strict, so that the other volumes \
             are served and this one is tried again",
            START_PATIENCE.as_secs()
        )
    });
    anyhow::bail!("volume {}: {reason} (--strict)", state.name)
}

/// Gives back what only the start has used: pages of the program, and free memory of the heap.
fn release_start_memory() {
    let bytes = ebb_mem::release_program_pages();
    tracing::debug!(bytes, "unmapped what only the start has used of the program");
    ebb_mem::trim_heap();
}

impl Daemon {
    /// The parts of a daemon, before a volume is opened; `None` if a signal requested a stop meanwhile.
    fn create(
        config: &Config,
        args: ServeArgs,
        log: LogHandle,
        signals: &EarlySignals,
        mut inherited: Inheritance,
    ) -> anyhow::Result<Option<Daemon>> {
        let started = ebb_mem::clock::now();
        setup::warn_of_certificates(config);
        let (sender, events) = channel();
        let signal = sender.clone();
        // The receiver is dropped when the process ends.
        signals::watch(signals, move |number| drop(signal.send(Event::Signal(number))))?;
        let passed = inherited.handed.take_passed();
        let mut listeners: Vec<_> =
            passed.into_iter().map(|handed| handed.into_listener().0).collect();
        let parameters = Parameters::new(&Configured::from(config));
        parameters::log_level(&parameters, move |level| (log.set_level)(level));
        let volumes = Volumes::default();
        let (policy, keys) = (setup::tls_policy(config.nbd.tls), tls_context(&config.nbd)?);
        let server = Server::new(volumes.clone(), parameters::clients(&parameters), policy, keys);
        let memory = setup::daemon_memory(config, started)?;
        parameters::limit_zones(&parameters, &memory);
        let options = parameters::cache_options(&parameters, started);
        let cache = Cache::start(&memory, options).context("cache")?;
        parameters::limit_cache(&parameters, &cache);
        for address in &config.listen {
            if inherited.has_listener(address) {
                let bound = inherited.handed.bound_at(address);
                listeners.extend(listener::open_others(address, &inherited.resolved, &bound));
                continue;
            }
            match listener::open_resolved(address, &inherited.resolved, &signals.end) {
                Err(ListenError::Interrupted) => return Ok(None),
                opened => listeners.extend(opened.map_err(Advised)?),
            }
        }
        let polling = parameters::polling(&parameters);
        let count = (config.workers, config.sandbox);
        let workers = setup::start_workers(count, &memory, &polling)?;
        let sandbox = sandbox::enter(config, &workers)?;
        let engine = Engine::new(EngineParts {
            server: server.clone(),
            volumes: volumes.clone(),
            parameters: parameters.clone(),
            cache: cache.clone(),
            workers: workers.iter().map(Worker::handle).collect(),
            state: config.state.as_deref().map(StateDir::new),
            config_file: args.config.clone(),
            opener: Arc::new(HelperThreads {
                workers: workers.len(),
                state: config.state.clone(),
                config_file: args.config.clone(),
            }),
            drain: Duration::from_secs(args.drain),
            // Half of the I/O memory may be dirty; the other half is left for requests and reads.
            dirty_max: u64::try_from(memory.arena_stats().ceiling / 2).unwrap_or(u64::MAX),
            started,
        })
        .context("writeback")?;
        engine.keep_memory(std::mem::take(&mut inherited.memory));
        let monitor = setup::monitor_pressure();
        let state = Arc::new(DaemonState::default());
        state.set_certificates(certificates(config));
        state.set_sandbox(sandbox);
        let rings = parameters::rings(&parameters);
        Ok(Some(Daemon {
            engine,
            args,
            server,
            volumes,
            parameters,
            memory,
            cache,
            rings,
            listeners: listeners.into(),
            workers,
            config: config.clone(),
            control: OnceLock::new(),
            guests: Arc::default(),
            log: log.events,
            passed: Mutex::default(),
            inherited: Mutex::new(inherited),
            outages: Outages::default(),
            state,
            events,
            sender,
            monitor,
            started,
        }))
    }

    /// Starts what accompanies the volumes from the first to the last: the response to memory pressure, and the
    /// periodic work on the first worker.
    fn attend(&self) -> DroppedLast {
        let (bdis, first) = (self.engine.bdis(), self.first_worker());
        let response = self.monitor.as_ref().map(|monitor| {
            pressure_response::subscribe(monitor, &self.memory, &self.cache, bdis, &self.rings)
        });
        let (memory, outages) = (self.memory.clone(), OutageMonitor::new(self.outages.clone()));
        setup::keep_time(&first, self.started, memory, self.volumes.clone(), outages);
        sandbox::watch_broker(&first, self.state.clone());
        self.engine.keep_dirty_limits(&first);
        self.engine.keep_ceiling(&first, self.started);
        self.engine.keep_log(&first);
        self.engine.keep_sockets(&first, self.started);
        self.engine.keep_descriptor_limits(&first, self.started);
        self.engine.keep_store_sizes(&first, self.started);
        DroppedLast { _response: response, ..DroppedLast::default() }
    }

    /// Opens the volumes and everything that gives access to them, and reports that the daemon is ready; false if a
    /// signal requested a stop meanwhile. A reload that is requested meanwhile follows.
    ///
    /// The control socket and the page are open while the stores are opened, and exports are open as soon as the stores
    /// that respond are. With `--strict` nothing is before all volumes are served.
    fn start(
        &self,
        config: &Config,
        signals: &EarlySignals,
        last: &mut DroppedLast,
    ) -> anyhow::Result<bool> {
        let early = !self.args.strict;
        let (mut controlled, mut exported) = (false, false);
        let (mut hangup, mut requests) = (false, Vec::new());
        if config.xen {
            xen::make_directory()?;
        }
        self.open_volumes(config);
        loop {
            match self.next_event()? {
                Event::Signal(SIGHUP) => hangup = true,
                request @ Event::ReloadRequested(_) => requests.push(request),
                Event::Signal(_) => return Ok(false),
                Event::TakeoverRequested(successor) => {
                    successor.refuse("the running daemon is still starting: try again");
                }
                Event::Opening if early => match ControlSockets::open(config, &signals.end) {
                    // A predecessor that still writes its data has it: there is another attempt below.
                    Err(error) if error.is_in_use() => {}
                    Err(ListenError::Interrupted) => return self.await_stop(),
                    sockets => {
                        self.serve_control(sockets.map_err(Advised)?, config, last)?;
                        controlled = true;
                    }
                },
                // Not before all that can fail: clients' data must not be lost by that.
                Event::Quiet(late) => {
                    self.check_keys(late)?;
                    self.refuse_if_hopeless()?;
                    if controlled {
                        self.export(config, &signals.end)?;
                        exported = true;
                    }
                }
                Event::Started => break,
                _ => {}
            }
        }
        if self.args.strict {
            refuse_if_degraded(config, &self.engine)?;
        }
        if !controlled {
            match ControlSockets::open(config, &signals.end) {
                Err(ListenError::Interrupted) => return self.await_stop(),
                sockets => self.serve_control(sockets.map_err(Advised)?, config, last)?,
            }
        }
        if !exported {
            self.refuse_if_hopeless()?;
            self.export(config, &signals.end)?;
        }
        release_start_memory();
        self.watch_sockets(last);
        self.report_ready();
        // `self` has the receiver.
        let later = hangup.then_some(Event::Signal(SIGHUP)).into_iter().chain(requests);
        later.for_each(|event| drop(self.sender.send(event)));
        Ok(true)
    }

    /// A start for volumes of the command line fails if no volume can be opened, for reasons that
    /// last: another command line is needed. The volumes of a file are corrected there, and
    /// reloaded.
    fn refuse_if_hopeless(&self) -> anyhow::Result<()> {
        let is_back = self.inherited.lock().unwrap_or_else(PoisonError::into_inner).is_back;
        if self.args.volumes.is_empty() || is_back {
            return Ok(());
        }
        match self.engine.lasting_failure() {
            Some((name, reason)) => anyhow::bail!("volume {name}: {reason}"),
            None => Ok(()),
        }
    }

    /// Waits for the signal that has interrupted the start.
    fn await_stop(&self) -> anyhow::Result<bool> {
        while !matches!(self.next_event()?, Event::Signal(signal) if signal != SIGHUP) {}
        Ok(false)
    }

    /// Serves the control socket and the page, as far as they are configured.
    fn serve_control(
        &self,
        sockets: ControlSockets,
        config: &Config,
        last: &mut DroppedLast,
    ) -> anyhow::Result<()> {
        let control = sockets.serve(config, self.control_context(), page_access(config)?)?;
        last._control = control.map(|control| {
            let control = Arc::new(control);
            (self.control.get_or_init(|| control).clone(), sockets)
        });
        Ok(())
    }

    /// Watches the files of the sockets of NBD and of the control socket.
    fn watch_sockets(&self, last: &DroppedLast) {
        let mut places: Vec<_> = lock(&self.listeners).iter().filter_map(Listener::place).collect();
        places.extend(last._control.as_ref().and_then(|(_, sockets)| sockets.place()));
        socket_watch::watch(&self.first_worker(), self.started, places, self.state.clone());
    }

    /// Serves the volumes to NBD clients, and to guests if that is configured.
    fn export(&self, config: &Config, end: &AtomicBool) -> anyhow::Result<()> {
        let (handed, predecessor) = self.await_turn(end)?;
        // Before a guest that waits for a volume can write to it.
        let writers = self.server.claim_writers(&handed.connections);
        if config.xen {
            self.serve_guests()?;
        }
        self.engine.begin_sockets();
        if self.args.strict
            && let Some(failed) = self.engine.failed_sockets().into_iter().next()
        {
            anyhow::bail!(
                "volume {}: not served over vhost-user: {}",
                failed.volume,
                failed.reason
            );
        }
        let passed = self.passed.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(PassedSocket { socket, volume }) = passed {
            self.engine.serve_passed_socket(socket, &volume).context("vhost-user")?;
        }
        // Now, so that the first client finds a small daemon, and after the start again.
        release_start_memory();
        let files = self.inherit_listeners(handed.listeners);
        self.listen(config)?;
        // Last: whatever has failed before leaves the sockets and the connections to the predecessor.
        if let Some(predecessor) = predecessor {
            predecessor.done();
        }
        self.own_files(config, files);
        self.adopt(handed.connections, &writers);
        // Until now these connections were descriptors of others.
        self.engine.limit_descriptors();
        Ok(())
    }

    /// Serves the volumes to Xen guests, too.
    fn serve_guests(&self) -> anyhow::Result<()> {
        let backend = xen::serve(&self.volumes, self.handles(), self.rings.clone(), &self.engine)?;
        self.guests.get_or_init(|| backend.figures());
        self.engine.serve_guests(backend);
        Ok(())
    }

    /// What the control socket shows and changes.
    fn control_context(&self) -> ControlContext {
        let (bdis, engine) = (self.engine.bdis().clone(), self.engine.clone());
        let (server, sender) = (self.server.clone(), self.sender.clone());
        let takeover = self.sender.clone();
        let manager = Manager {
            engine: engine.clone(),
            server: server.clone(),
            volumes: self.volumes.clone(),
            worker: self.first_worker(),
            operations: Operations::default(),
            outages: self.outages.clone(),
            reload: Box::new(move |reply| sender.send(Event::ReloadRequested(reply)).is_ok()),
            takeover: Box::new(move |successor| {
                takeover.send(Event::TakeoverRequested(successor)).is_ok()
            }),
        };
        let [outages, known_outages] = [(); 2].map(|()| self.outages.clone());
        let states = [(); 5].map(|()| self.state.clone());
        let [phase, reload, expiring, sandbox, lost] = states;
        let of_limits = self.engine.clone();
        let named = self.engine.clone();
        let [defined, connected] = [(); 2].map(|()| self.engine.clone());
        ControlContext {
            server: self.server.clone(),
            volumes: Box::new(move || volume_stats(&server, &engine, &outages)),
            briefs: Box::new(move || volume_briefs(&named, &known_outages)),
            parameters: self.parameters.clone(),
            limit_groups: Box::new(move || limit_group_stats(&of_limits)),
            sources: StatSources {
                phase: Some(Box::new(move || phase.phase())),
                reload: Some(Box::new(move || reload.reload())),
                certificates: Some(Box::new(move || expiring.certificates())),
                problems: Some(Box::new(move || defined.problems())),
                lost_sockets: Some(Box::new(move || lost.lost_sockets())),
                sandbox: Some(Box::new(move || sandbox.sandbox())),
                ..StatSources::new(Some(self.memory.clone()), self.monitor.as_ref())
                    .with_cache(self.cache.clone())
                    .with_bdis(move || bdis.stats())
            },
            xen: self.guests.clone(),
            vhost: self.engine.vhost_figures(),
            disconnect_frontend: Box::new(move |number| connected.disconnect_frontend(number)),
            manager: Arc::new(manager),
            config: Arc::new(DaemonConfig { engine: self.engine.clone(), args: self.args.clone() }),
            workers: self.handles(),
            listen: self.listener_names(),
            events: self.log.clone(),
            peers: socket_peers(),
            started: self.started,
        }
    }

    fn handles(&self) -> Vec<WorkerHandle> {
        self.workers.iter().map(Worker::handle).collect()
    }

    fn first_worker(&self) -> WorkerHandle {
        // The configuration has at least one worker.
        self.workers[0].handle()
    }

    fn listen(&self, config: &Config) -> anyhow::Result<()> {
        self.engine.limit_descriptors();
        for listener in lock(&self.listeners).iter().filter(|listener| listener.is_wanted(config)) {
            let fd: OwnedFd = listener.fd.try_clone().context("socket")?;
            rustix::net::listen(&fd, 1024).context("socket")?;
            let (server, fd, workers) = (self.server.clone(), fd_from(fd), self.handles());
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

    /// Begins to open the volumes.
    fn open_volumes(&self, config: &Config) {
        let (config, sender) = (config.clone(), self.sender.clone());
        let keys = self.key_patience();
        self.drive(move |engine, io| async move {
            // The receiver is dropped when the process ends.
            let report = |event| drop(sender.send(event));
            let tries = engine.begin_start(&io, config);
            report(Event::Opening);
            let late = engine.wait_for_tries(&io, &tries, EXPORT_PATIENCE, keys).await;
            report(Event::Quiet(late));
            engine.complete_start(&io, &tries, EXPORT_PATIENCE, Some(START_PATIENCE)).await;
            Event::Started
        });
    }

    fn report_ready(&self) {
        let states = self.engine.states();
        let served = states.iter().filter(|state| state.phase == VolumePhase::Serving).count();
        for state in states.iter().filter(|state| state.phase == VolumePhase::Opening) {
            tracing::warn!(
                volume = state.name,
                "its store is not open yet: it is served as soon as that is"
            );
        }
        let is_opening = states.iter().any(|state| state.phase == VolumePhase::Opening);
        if served == 0 && !is_opening && !states.is_empty() {
            tracing::error!(
                of = states.len(),
                "no volume is served: the line about each says why; ebbd tries them again"
            );
        }
        tracing::info!(volumes = served, of = states.len(), "ready");
        self.state.set_phase(DaemonPhase::Serving);
        notify::ready(&notify::status(&self.engine));
        notify::keep_status(&self.first_worker(), self.engine.clone());
        self.engine.watch_files(&self.first_worker(), self.started);
    }

    /// Reloads the configuration on SIGHUP and on request, until a signal requests a stop.
    fn run(&self, end: &AtomicBool) -> anyhow::Result<RunEnd> {
        // The clients that wait for the reload in progress, if it is still being read, and for the next one.
        let (mut reading, mut again) = (None, None);
        // Reloads that the engine carries out. All of them end: an earlier one is cut short by a later one.
        let mut applied: u32 = 0;
        let mut successor = WaitingSuccessor::<Successor>::NONE;
        loop {
            match self.next_event()? {
                Event::Signal(SIGHUP) => {
                    notify::reloading();
                    self.request_reload(None, &mut reading, &mut again);
                }
                Event::ReloadRequested(reply) => {
                    notify::reloading();
                    self.request_reload(Some(reply), &mut reading, &mut again);
                }
                Event::Signal(_) => return Ok(RunEnd::Signal),
                Event::TakeoverRequested(other) => match successor.get() {
                    Some(earlier) if earlier.is_waiting() => {
                        other.refuse("another takeover is in progress");
                    }
                    _ if other.greets(end) => {
                        // What an earlier one waited for is still being written.
                        if successor.replace(other) {
                            self.flush_everything();
                        }
                    }
                    _ => {
                        tracing::warn!("no takeover: what listens there is no successor");
                        other.refuse("the successor has not greeted in time; try again");
                    }
                },
                Event::Flushed(flushed) => match successor.flushed(flushed) {
                    AfterFlush::Nothing => {}
                    AfterFlush::Again => self.flush_everything(),
                    AfterFlush::Answer(successor, flushed) => {
                        // Volumes may have been added meanwhile.
                        let kept = || self.engine.must_keep_all().map_err(|it| it.body.message);
                        if let Some(successor) = accepted(successor, flushed.and_then(|()| kept()))
                        {
                            return Ok(RunEnd::Takeover(successor));
                        }
                    }
                },
                Event::Loaded(loaded) => {
                    let replies = reading.take().unwrap_or_default();
                    applied += u32::from(self.reload(*loaded, replies));
                    if let Some(replies) = again.take() {
                        reading = self.read_configuration(replies);
                    }
                }
                Event::Reloaded(replies, outcome) => {
                    applied = applied.saturating_sub(1);
                    answer(replies, &outcome);
                }
                Event::Opening | Event::Quiet(_) | Event::Started | Event::Stopped(_) => continue,
            }
            if reading.is_none() && applied == 0 {
                notify::ready(&notify::status(&self.engine));
            }
        }
    }
}
