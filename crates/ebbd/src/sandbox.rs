//! Enters the sandbox ([`ebb_sandbox`]) once the workers and their rings exist, and says what of it is in force.

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ebb_api::stat::SandboxStat;
use ebb_broker::{Broker, ProgramHelper};
use ebb_config::{Config, SandboxMode, ServeArgs};
use ebb_io::{Worker, WorkerHandle, fd_from};
use ebb_sandbox::{Mechanism, Unlisted, give_up_capabilities, isolate_process, restrict_process};

use crate::broker;
#[cfg(feature = "sim")]
pub use crate::broker_fault::sim;
use crate::broker_fault::{BrokerFault, note_fault, noted_fault};
use crate::control::DaemonState;
use crate::key_programs;

/// Whether clients may send data with the first packet of a connection: bit 0.
const FAST_OPEN: &str = "/proc/sys/net/ipv4/tcp_fastopen";
/// How often it is looked whether the broker makes calls, how long one may take, and how long after
/// that it is asked again: a daemon that was frozen with its broker has not waited.
const LOOK_EVERY: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(8);
const GRACE: Duration = Duration::from_secs(2);

/// The broker, or why there is none.
static BROKER: OnceLock<Result<Broker, Mechanism>> = OnceLock::new();
/// Whether that process has ended before the daemon.
static KEYS_ENDED: AtomicBool = AtomicBool::new(false);
const KEYS_END: &str = "the process that runs programs for keys has ended";
const KEYS_REMEDY: &str = "restart the daemon: volumes that are open are served, and no key is read from a program until then";

/// Makes the broker, and the process that runs programs, and forbids this thread, and all that it
/// makes later, to reach other processes. To be called while the process has one thread;
/// `begin_log` starts the log of the broker.
pub fn prepare(config: &Config, args: &ServeArgs, begin_log: impl FnOnce()) {
    if config.sandbox != SandboxMode::Off {
        key_programs::begin(|| broker::start_programs(config, args).ok().flatten());
        BROKER.get_or_init(|| broker::start(config, args, begin_log).map_err(missing));
        let _ = isolate_process();
    }
}

/// Lets the kernel reclaim memory for this process, and those that it makes, only where that needs
/// no I/O: a daemon that serves a disk of its own host would otherwise wait for itself. To be
/// called while the process has one thread, and has its capabilities.
///
/// # Errors
/// Without `CAP_SYS_RESOURCE`.
pub fn flush_without_own_reclaim() -> std::io::Result<()> {
    Ok(rustix::process::configure_io_flusher_behavior(true)?)
}

/// Why there is no broker.
fn missing(error: impl Into<anyhow::Error>) -> Mechanism {
    Mechanism::missing(Mechanism::BROKER, format!("{:#}", error.into()))
}

/// Puts the daemon into the hands of the broker, once.
fn guard(config: &Config) -> anyhow::Result<Mechanism> {
    static GUARDED: OnceLock<Mechanism> = OnceLock::new();
    if let Some(known) = GUARDED.get() {
        return Ok(known.clone());
    }
    let mechanism = match BROKER.get() {
        None => Mechanism::missing(Mechanism::BROKER, "it was not started"),
        Some(Err(missing)) => missing.clone(),
        Some(Ok(broker)) => match broker.guard() {
            Ok(()) => Mechanism::in_force(Mechanism::BROKER, limits(config)),
            Err(error) if error.is_fatal() => return Err(error.into()),
            Err(error) => missing(error),
        },
    };
    Ok(GUARDED.get_or_init(|| mechanism).clone())
}

/// The broker, if the daemon is in its hands and knows of no end of it.
fn in_charge(state: &DaemonState) -> Option<&'static Broker> {
    let broker = BROKER.get()?.as_ref().ok()?;
    let parts = state.sandbox();
    let in_force = parts.iter().any(|it| it.mechanism == Mechanism::BROKER && it.in_force);
    in_force.then_some(broker)
}

/// Reports the end of the broker, after which nothing can be opened or connected to, and ends one
/// that hangs, so that nothing waits for it, a stop least of all.
pub(crate) fn watch_broker(worker: &WorkerHandle, state: Arc<DaemonState>) {
    let Some(broker) = in_charge(&state) else { return };
    if let Some(Ok(end)) = key_programs::helper().map(ProgramHelper::end) {
        let state = state.clone();
        worker.spawn(move |io| async move {
            if io.readable(&fd_from(end)).await.is_ok() {
                KEYS_ENDED.store(true, Ordering::SeqCst);
                tracing::error!("{KEYS_END}: {KEYS_REMEDY}");
                let part = Mechanism::in_force(Mechanism::BROKER, KEYS_END);
                let remedy = Some(KEYS_REMEDY.to_owned());
                state.set_sandbox_part(&SandboxStat { remedy, ..stat(part) });
            }
        });
    }
    let Ok(end) = broker.end() else { return };
    worker.spawn(move |io| async move {
        // An error would only be one of the daemon's own: it is no reason to report an end.
        if io.readable(&fd_from(end)).await.is_ok() {
            let fault = note_fault(BrokerFault::Ended);
            tracing::error!("{}: {}", fault.text(), BrokerFault::REMEDY);
            let part = Mechanism::missing(Mechanism::BROKER, fault.text());
            let remedy = Some(BrokerFault::REMEDY.to_owned());
            state.set_sandbox_part(&SandboxStat { remedy, ..stat(part) });
        }
    });
    worker.spawn(move |io| async move {
        while noted_fault().is_none() {
            io.sleep(LOOK_EVERY).await;
            let mut call = std::pin::pin!(io.offload(|| File::open("/dev/null").is_ok()));
            if io.timeout(PATIENCE, call.as_mut()).await.is_none()
                && io.timeout(GRACE, call.as_mut()).await.is_none()
            {
                note_fault(BrokerFault::Hung);
                broker.kill();
            }
        }
    });
}

/// Says what the broker refuses by a new configuration.
pub(crate) fn follow(config: &Config, state: &DaemonState) {
    let keys_ended = KEYS_ENDED.load(Ordering::SeqCst);
    if !keys_ended && in_charge(state).is_some_and(|broker| !broker.has_ended()) {
        let mechanism = Mechanism::in_force(Mechanism::BROKER, limits(config));
        state.set_sandbox_part(&stat(mechanism));
    }
}

/// What the broker refuses.
fn limits(config: &Config) -> String {
    let limits = match (&config.open_paths, &config.connect_to) {
        (Some(_), Some(_)) => "it opens and connects to what the configuration names",
        (Some(_), None) => {
            "it opens what the configuration names, and connects to any address: set connect_to"
        }
        (None, Some(_)) => {
            "it connects to what the configuration names, and opens all that the user may open: set open_paths"
        }
        (None, None) => {
            "it opens all that the user may open, and connects to any address: set open_paths and connect_to"
        }
    };
    let fast_open = std::fs::read_to_string(FAST_OPEN).unwrap_or_default();
    let connects = fast_open.trim().parse::<u32>().is_ok_and(|bits| bits & 1 != 0);
    match config.connect_to.is_some() && connects {
        true => format!(
            "{limits}; TCP Fast Open gets around connect_to: set the sysctl net.ipv4.tcp_fastopen to 0"
        ),
        false => limits.to_owned(),
    }
}

/// Puts all threads under their rules, and the workers under theirs, unless that is switched off. The workers have no
/// work yet.
///
/// # Errors
/// If the broker ended in the middle: nothing can be opened any more.
pub(crate) fn enter(config: &Config, workers: &[Worker]) -> anyhow::Result<Vec<SandboxStat>> {
    if config.sandbox == SandboxMode::Off {
        tracing::info!("the sandbox is switched off");
        return Ok(off());
    }
    // Workers' rules deny the call that sets those of all threads.
    let broker = guard(config)?;
    let capabilities = match broker.in_force {
        true => give_up_capabilities(),
        false => Mechanism::missing(
            Mechanism::CAPABILITIES,
            "the daemon opens files itself, without a broker",
        ),
    };
    let process = restrict_process();
    let of_workers = workers.iter().flat_map(|worker| worker.restrict(Unlisted::default()));
    let mut all: Vec<Mechanism> = vec![isolate_process(), process, broker, capabilities];
    for mechanism in of_workers {
        match all.iter_mut().find(|known| known.name == mechanism.name) {
            // One worker without it is worth telling.
            Some(known) if known.in_force && !mechanism.in_force => *known = mechanism,
            Some(_) => {}
            None => all.push(mechanism),
        }
    }
    // That a kernel is too old for one part, `ebbd doctor` says: nothing else can be done about it at a start.
    let told = |it: &&Mechanism| !it.in_force && it.name != Mechanism::OTHER_PROCESSES;
    let missing: Vec<_> = all.iter().filter(told).collect();
    if missing.is_empty() {
        tracing::debug!("the sandbox is in force");
    } else {
        let why: Vec<_> = missing.iter().map(|it| format!("{}: {}", it.name, it.detail)).collect();
        tracing::warn!("the sandbox is not in force in part: {}", why.join("; "));
    }
    Ok(all.into_iter().map(stat).collect())
}

fn stat(mechanism: Mechanism) -> SandboxStat {
    let Mechanism { name, in_force, detail } = mechanism;
    SandboxStat { mechanism: name.to_owned(), in_force, detail, remedy: None }
}

fn off() -> Vec<SandboxStat> {
    const ALL: [&str; 7] = [
        Mechanism::OTHER_PROCESSES,
        Mechanism::PROCESS_CALLS,
        Mechanism::BROKER,
        Mechanism::CAPABILITIES,
        Mechanism::RING,
        Mechanism::WORKER_CALLS,
        Mechanism::WORKER_PATHS,
    ];
    ALL.map(|name| stat(Mechanism::missing(name, "switched off by `sandbox`"))).into()
}
