//! Enters the sandbox ([`ebb_sandbox`]) once the workers and their rings exist, and says what of it is in force.

use std::sync::{Arc, OnceLock};

use ebb_api::stat::SandboxStat;
use ebb_broker::Broker;
use ebb_config::{Config, KeySource, SandboxMode, ServeArgs, VolumeConfig};
use ebb_io::{Worker, WorkerHandle, fd_from};
use ebb_sandbox::{Mechanism, Programs, Unlisted, isolate_process, restrict_process};

use crate::broker;
use crate::control::DaemonState;

/// Whether clients may send data with the first packet of a connection: bit 0.
const FAST_OPEN: &str = "/proc/sys/net/ipv4/tcp_fastopen";
/// What `ebbd stat` says when the broker has ended.
const BROKER_ENDED: &str =
    "it has ended: restart the daemon, which can open and connect to nothing any more";

/// The broker, or why there is none.
static BROKER: OnceLock<Result<Broker, Mechanism>> = OnceLock::new();

/// Makes the broker, and forbids this thread, and all that it makes later, to reach other processes. To be called while the process has
/// one thread; `begin_log` starts the log of the broker.
pub fn prepare(config: &Config, args: &ServeArgs, begin_log: impl FnOnce()) {
    if config.sandbox != SandboxMode::Off {
        BROKER.get_or_init(|| broker::start(config, args, begin_log).map_err(missing));
        let _ = isolate_process();
    }
}

/// Why there is no broker.
fn missing(error: impl Into<anyhow::Error>) -> Mechanism {
    Mechanism::missing(Mechanism::BROKER, format!("{:#}", error.into()))
}

/// Puts the daemon into the hands of the broker, once.
fn guard(config: &Config, programs: Programs) -> anyhow::Result<Mechanism> {
    static GUARDED: OnceLock<Mechanism> = OnceLock::new();
    if let Some(known) = GUARDED.get() {
        return Ok(known.clone());
    }
    let mechanism = match BROKER.get() {
        None => Mechanism::missing(Mechanism::BROKER, "it was not started"),
        Some(Err(missing)) => missing.clone(),
        Some(Ok(broker)) => match broker.guard(programs) {
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

/// Reports the end of the broker, after which nothing can be opened or connected to.
pub(crate) fn watch_broker(worker: &WorkerHandle, state: Arc<DaemonState>) {
    let Some(broker) = in_charge(&state) else { return };
    let Ok(end) = broker.end() else { return };
    worker.spawn(move |io| async move {
        // An error would only be one of the daemon's own: it is no reason to report an end.
        if io.readable(&fd_from(end)).await.is_ok() {
            tracing::error!("the broker has ended, so that no file is opened and no server connected to any more: restart the daemon");
            state.set_sandbox_part(&stat(Mechanism::missing(Mechanism::BROKER, BROKER_ENDED)));
        }
    });
}

/// Says what the broker refuses by a new configuration.
pub(crate) fn follow(config: &Config, state: &DaemonState) {
    if in_charge(state).is_some_and(|broker| !broker.has_ended()) {
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
    let runs = |volume: &VolumeConfig| matches!(volume.encryption, Some(KeySource::Command(_)));
    let programs = match config.volumes.values().any(runs) {
        true => Programs::Run,
        false => Programs::None,
    };
    // Workers' rules deny the call that sets those of all threads.
    let broker = guard(config, programs)?;
    let process = restrict_process(programs);
    let of_workers = workers.iter().flat_map(|worker| worker.restrict(Unlisted::default()));
    let mut all: Vec<Mechanism> = vec![isolate_process(), process, broker];
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
    SandboxStat { mechanism: name.to_owned(), in_force, detail }
}

fn off() -> Vec<SandboxStat> {
    const ALL: [&str; 6] = [
        Mechanism::OTHER_PROCESSES,
        Mechanism::PROCESS_CALLS,
        Mechanism::BROKER,
        Mechanism::RING,
        Mechanism::WORKER_CALLS,
        Mechanism::WORKER_PATHS,
    ];
    ALL.map(|name| stat(Mechanism::missing(name, "switched off by `sandbox`"))).into()
}
