//! Enters the sandbox ([`ebb_sandbox`]) once the workers and their rings exist, and says what of it is in force.

use ebb_api::stat::SandboxStat;
use ebb_config::{Config, KeySource, SandboxMode, VolumeConfig};
use ebb_io::Worker;
use ebb_sandbox::{Mechanism, Programs, Unlisted, isolate_process, restrict_process};

/// Forbids this thread, and all that it makes later, to reach other processes. To be called while the process has one thread.
pub fn prepare(config: &Config) {
    if config.sandbox != SandboxMode::Off {
        let _ = isolate_process();
    }
}

/// Puts all threads under their rules, and the workers under theirs, unless that is switched off. The workers have no
/// work yet.
pub(crate) fn enter(config: &Config, workers: &[Worker]) -> Vec<SandboxStat> {
    if config.sandbox == SandboxMode::Off {
        tracing::info!("the sandbox is switched off");
        return off();
    }
    let runs = |volume: &VolumeConfig| matches!(volume.encryption, Some(KeySource::Command(_)));
    let programs = match config.volumes.values().any(runs) {
        true => Programs::Run,
        false => Programs::None,
    };
    // Workers' rules deny the call that sets those of all threads.
    let process = restrict_process(programs);
    let of_workers = workers.iter().flat_map(|worker| worker.restrict(Unlisted::default()));
    let mut all: Vec<Mechanism> = vec![isolate_process(), process];
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
    all.into_iter().map(stat).collect()
}

fn stat(mechanism: Mechanism) -> SandboxStat {
    let Mechanism { name, in_force, detail } = mechanism;
    SandboxStat { mechanism: name.to_owned(), in_force, detail }
}

fn off() -> Vec<SandboxStat> {
    const ALL: [&str; 5] = [
        Mechanism::OTHER_PROCESSES,
        Mechanism::PROCESS_CALLS,
        Mechanism::RING,
        Mechanism::WORKER_CALLS,
        Mechanism::WORKER_PATHS,
    ];
    ALL.map(|name| stat(Mechanism::missing(name, "switched off by `sandbox`"))).into()
}
