//! The sandbox: hostile code in a worker and in another thread, and the threads of a real daemon.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use testbed::harness::server::Setup;
use testbed::{Error, Result, Server, check};

const MIB: u64 = 1 << 20;
const SUCCEEDED: i32 = 0;
const REFUSED: i32 = 10;

/// Runs hostile code in a process of its own, without and with the sandbox.
fn attack(name: &str, place: &str) -> Result {
    let run = |sandbox: &str| {
        let program = env!("CARGO_BIN_EXE_hostile");
        let done = Command::new(program).args([name, place, sandbox]).output();
        let done = done.map_err(Error::io("run hostile code"))?;
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        Ok::<_, Error>((done.status.code(), said))
    };
    let (without, said) = run("off")?;
    check(without == Some(SUCCEEDED), || {
        format!("{name} by a {place} without the sandbox: {said}")
    })?;
    let (with, said) = run("on")?;
    check(with == Some(REFUSED), || format!("{name} by a {place} in the sandbox: {with:?} {said}"))
}

fn attacks(names: &[&str], place: &str) -> Result {
    names.iter().try_for_each(|name| attack(name, place))
}

#[test]
fn a_hijacked_worker_opens_nothing() -> Result {
    attacks(&["open", "ring-open"], "worker")
}

#[test]
fn a_hijacked_worker_connects_to_nothing() -> Result {
    attacks(&["socket", "connect", "ring-socket", "ring-connect"], "worker")
}

#[test]
fn a_hijacked_worker_runs_no_program_and_no_code_of_its_own() -> Result {
    attacks(&["exec", "code"], "worker")
}

#[test]
fn a_hijacked_worker_traces_no_process_and_writes_to_the_memory_of_none() -> Result {
    attacks(&["ptrace", "write-memory", "open-memory"], "worker")
}

#[test]
fn a_hijacked_worker_signals_no_other_process() -> Result {
    attacks(&["signal", "signal-thread", "signal-descriptor", "owner", "socket-owner"], "worker")
}

#[test]
fn a_hijacked_worker_makes_no_ring() -> Result {
    attack("ring", "worker")
}

#[test]
fn a_hijacked_worker_makes_no_thread_process_or_namespace() -> Result {
    attacks(&["thread", "process", "namespace"], "worker")
}

#[test]
fn a_hijacked_thread_slows_no_other_process_down() -> Result {
    let names = ["priority", "user-priority", "scheduler", "processors", "io-priority"];
    attacks(&names, "thread")?;
    attacks(&names, "worker")
}

#[test]
fn another_hijacked_thread_runs_no_program_and_reaches_no_process() -> Result {
    let names = ["exec", "ptrace", "write-memory", "signal", "signal-thread", "signal-descriptor"];
    attacks(&names, "thread")?;
    attacks(&["open-memory", "owner", "socket-owner", "limits", "process", "namespace"], "thread")
}

#[test]
fn hijacked_code_types_into_no_terminal() -> Result {
    attack("type", "thread")?;
    attack("type", "worker")
}

#[test]
fn hijacked_code_uses_no_object_of_other_processes() -> Result {
    attacks(&["attach", "queues", "semaphores"], "thread")
}

#[test]
fn hijacked_code_gets_around_paths_by_no_handle_or_netlink() -> Result {
    attacks(&["open-by-handle", "netlink"], "thread")
}

/// `cap_ipc_lock` and `cap_sys_resource`.
const KEPT_CAPABILITIES: u64 = 1 << 14 | 1 << 24;

#[test]
fn no_thread_of_a_daemon_has_capabilities_that_get_around_the_broker() -> Result {
    let server = Setup::new()?.image("disk", MIB)?.start()?;
    let threads = std::fs::read_dir(format!("/proc/{}/task", server.pid()?));
    for thread in threads.map_err(Error::io("read /proc"))?.flatten() {
        let Ok(text) = std::fs::read_to_string(thread.path().join("status")) else { continue };
        let permitted = text.lines().find_map(|line| line.strip_prefix("CapPrm:"));
        let permitted = permitted.and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
        check(permitted.is_some_and(|all| all & !KEPT_CAPABILITIES == 0), || text.clone())?;
    }
    Ok(())
}

/// A field of `/proc/PID/task/TID/status` of each thread, with the thread's name.
fn threads(process: u32, field: &str) -> Result<Vec<(String, u32)>> {
    let io = Error::io("read /proc");
    let mut found = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{process}/task")).map_err(io)? {
        let path = entry.map_err(Error::io("read /proc"))?.path().join("status");
        // A thread may have ended.
        let Ok(text) = std::fs::read_to_string(path) else { continue };
        let fields: BTreeMap<&str, &str> =
            text.lines().filter_map(|line| line.split_once(":\t")).collect();
        let value = fields.get(field).and_then(|value| value.parse().ok());
        let name = fields.get("Name").copied().unwrap_or_default().to_owned();
        found.push((name, value.ok_or_else(|| Error::unexpected(format!("no {field}")))?));
    }
    Ok(found)
}

fn is_worker(name: &str) -> bool {
    name.strip_prefix("ebbd-").is_some_and(|rest| rest.parse::<u32>().is_ok())
}

/// Checks the filters of all threads of a daemon with three workers.
fn have_filters(process: u32) -> Result {
    let modes = threads(process, "Seccomp")?;
    check(modes.iter().all(|(_, mode)| *mode == 2), || format!("one has no filter: {modes:?}"))?;
    let privileges = threads(process, "NoNewPrivs")?;
    check(privileges.iter().all(|(_, set)| *set == 1), || format!("{privileges:?}"))?;
    let mut filters = threads(process, "Seccomp_filters")?;
    // The kernel's own threads for a ring.
    filters.retain(|(name, _)| !name.starts_with("iou-"));
    let (workers, others): (Vec<_>, Vec<_>) = filters.iter().partition(|(name, _)| is_worker(name));
    let least = workers.iter().map(|(_, count)| *count).min();
    let most = others.iter().map(|(_, count)| *count).max();
    // The kernel's own threads have the name of their worker at first.
    let names: BTreeSet<_> = workers.iter().map(|(name, _)| name).collect();
    check(names.len() == 3 && least > most, || format!("workers have their own: {filters:?}"))
}

#[test]
fn every_thread_of_a_daemon_under_load_has_its_filters() -> Result {
    let setup = Setup::new()?.image("disk", 64 * MIB)?.arg("--workers").arg("3");
    let mut server = setup.start()?;
    let process = server.pid()?;
    let load = server.verified_load();
    let ended = std::thread::scope(|scope| {
        let load = scope.spawn(|| load.ok().map(drop));
        while !load.is_finished() {
            have_filters(process)?;
        }
        load.join().map_err(|_| Error::unexpected("the load panicked"))
    });
    ended??;
    server.healthy()
}

#[test]
fn what_is_in_force_is_told_and_can_be_switched_off() -> Result {
    let parts = |server: &Server| -> Result<Vec<(String, bool)>> {
        let stat = server.operator(&["stat", "--json"])?.ok()?.json()?;
        let parts = stat["sandbox"].as_array().cloned().unwrap_or_default();
        let part = |part: &serde_json::Value| {
            let name = part["mechanism"].as_str().unwrap_or_default().to_owned();
            (name, part["in_force"] == true)
        };
        Ok(parts.iter().map(part).collect())
    };
    let names = [
        "other_processes",
        "process_calls",
        "broker",
        "capabilities",
        "ring",
        "worker_calls",
        "worker_paths",
    ];
    for (mode, in_force) in [("on", true), ("off", false)] {
        let setup = Setup::new()?.image("disk", MIB)?.arg("--sandbox").arg(mode);
        let control = format!("unix:{}", setup.dir().join("control.sock").display());
        let server = setup.arg("--control").arg(control).start()?;
        let found = parts(&server)?;
        let expected: Vec<_> = names.iter().map(|name| ((*name).to_owned(), in_force)).collect();
        check(found == expected, || format!("--sandbox {mode}: {found:?}"))?;
        let modes = threads(server.pid()?, "Seccomp")?;
        let mode_of_all = if in_force { 2 } else { 0 };
        check(modes.iter().all(|(_, found)| *found == mode_of_all), || {
            format!("--sandbox {mode}: {modes:?}")
        })?;
    }
    Ok(())
}
