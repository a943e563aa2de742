//! The parts of a daemon that are created before its volumes are opened: I/O memory, workers, the pressure monitor, keys
//! of TLS, and the limit of open files.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use ebb_advice::Advised;
use ebb_config::{
    Config, IdleMemory, NbdConfig, SandboxMode, StateDir, StateError, StateLock, TlsSetting,
};
use ebb_export_nbd::ServerTls;
use ebb_io::{PollParameters, Worker, WorkerHandle};
use ebb_mem::pressure::{Limit, Monitor, Watch};
use ebb_mem::{IdlePolicy, Memory};
use ebb_volume::Volumes;

use crate::budget::{self, DaemonLoad};
use crate::outages::OutageMonitor;
use crate::ticks::until_tick;

/// How often the memory's estimates are updated, and stores are sampled.
const TICK: Duration = Duration::from_secs(1);

/// How long a start waits for another daemon, which may be stopping, to release the state directory, and how often it looks.
const STATE_PATIENCE: Duration = Duration::from_secs(5);
const STATE_PAUSE: Duration = Duration::from_millis(100);

/// Raises the limit of open files to the maximum: each volume and each client needs a descriptor.
pub(crate) fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
}

/// Warns of expired certificates, and of keys that other users may read. They are used nevertheless: some clients do not verify
/// certificates.
pub(crate) fn warn_of_certificates(config: &Config) {
    for warning in crate::key_files::exposed_keys(config) {
        tracing::warn!("{warning}");
    }
    if let (Some(folder), true) = (&config.nbd.tls_certificates, config.nbd.tls != TlsSetting::Off)
        && let Err(error) = ServerTls::check_dates(folder, config.nbd.tls_verify_peer)
    {
        tracing::warn!("TLS: {}", Advised(error));
    }
    if let (Some(folder), Some(_)) = (&config.web_tls_certificates, &config.web)
        && let Err(error) = ServerTls::check_dates(folder, false)
    {
        tracing::warn!("the page: {}", Advised(error));
    }
}

/// A state directory that was prepared, as far as that was possible.
#[derive(Debug, Default)]
pub(crate) struct PreparedState {
    /// Keeps other daemons from using the directory.
    _lock: Option<StateLock>,
    /// Whether another daemon had it at first: it may have changed since it was read.
    pub(crate) waited: bool,
}

/// Prepares the state directory, and waits for another daemon to release it. If it cannot be used otherwise, the daemon
/// serves nevertheless. Blocks: to be called before signals are watched, so that one ends the process.
///
/// # Errors
/// If another daemon uses it.
pub(crate) fn prepare_state(config: &Config) -> Result<PreparedState, StateError> {
    let Some(state) = config.state.as_deref().map(StateDir::new) else {
        return Ok(PreparedState::default());
    };
    let deadline = Instant::now() + STATE_PATIENCE;
    let mut waited = false;
    loop {
        match state.prepare() {
            Ok(lock) => {
                if let Some(error) = lock.failure() {
                    tracing::warn!(
                        "a power cut may undo what the state directory has, until a change is kept there: {}",
                        Advised(error)
                    );
                }
                return Ok(PreparedState { _lock: Some(lock), waited });
            }
            Err(StateError::InUse { .. }) if Instant::now() < deadline => {
                waited = true;
                std::thread::park_timeout(STATE_PAUSE);
            }
            Err(error @ StateError::InUse { .. }) => return Err(error),
            Err(error) => {
                tracing::warn!(
                    "volumes that are added at run time cannot be kept: {}",
                    Advised(error)
                );
                return Ok(PreparedState { waited, ..PreparedState::default() });
            }
        }
    }
}

/// The memory limit that applies to this process.
fn memory_limit() -> Option<Limit> {
    ebb_mem::pressure::limit(&ebb_mem::pressure::Roots::default())
}

/// The daemon's I/O memory: half of the limit of the host or of the control group, less everything
/// else.
///
/// # Errors
/// If the control group is too small for the volumes.
pub(crate) fn daemon_memory(config: &Config, started: Instant) -> anyhow::Result<Arc<Memory>> {
    let volumes = config.volumes.len();
    let load = DaemonLoad::of_volumes(config.workers, volumes, 0);
    let ceiling = budget::ceiling(memory_limit().as_ref(), load).map_err(Advised)?;
    elastic_memory(ceiling, started, config.idle_memory)
}

/// The I/O memory of a program that is not a daemon.
pub(crate) fn tool_memory() -> anyhow::Result<Arc<Memory>> {
    let ceiling = budget::tool_ceiling(memory_limit().as_ref());
    elastic_memory(ceiling, Instant::now(), IdleMemory::Lend)
}

fn elastic_memory(ceiling: u64, started: Instant, idle: IdleMemory) -> anyhow::Result<Arc<Memory>> {
    let ceiling = usize::try_from(ceiling).unwrap_or(usize::MAX);
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

/// Once a second updates the memory's estimates and samples the stores of volumes, in one task.
pub(crate) fn keep_time(
    worker: &WorkerHandle,
    started: Instant,
    memory: Arc<Memory>,
    volumes: Volumes,
    mut outages: OutageMonitor,
) {
    worker.spawn(move |io| async move {
        loop {
            io.sleep(until_tick(ebb_mem::clock::now(), started, TICK)).await;
            memory.tick(ebb_mem::clock::now());
            outages.sample(&volumes);
        }
    });
}

/// Starts `count` workers, whose rings are restricted if the daemon is to be in the sandbox.
pub(crate) fn start_workers(
    (count, sandbox): (usize, SandboxMode),
    memory: &Arc<Memory>,
    polling: &Arc<PollParameters>,
) -> anyhow::Result<Vec<Worker>> {
    let start = match sandbox {
        SandboxMode::On => Worker::start_restricted,
        SandboxMode::Off => Worker::start_polling,
    };
    (0..count)
        .map(|number| start(&format!("ebbd-{number}"), memory, polling))
        .collect::<std::io::Result<Vec<_>>>()
        .context("worker")
}

/// Starts the monitor of the host's memory pressure. Without it the daemon serves nevertheless.
pub(crate) fn monitor_pressure() -> Option<Monitor> {
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

/// Whether TLS is offered or required.
pub(crate) fn tls_policy(tls: TlsSetting) -> ebb_export_nbd::TlsMode {
    match tls {
        TlsSetting::Off => ebb_export_nbd::TlsMode::Off,
        TlsSetting::On => ebb_export_nbd::TlsMode::On,
        TlsSetting::Require => ebb_export_nbd::TlsMode::Require,
    }
}

/// The keys for TLS, if it is on.
///
/// # Errors
/// If they cannot be read, or do not fit together.
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
    Ok(Some(context.map_err(Advised).context("TLS")?))
}
