//! The checks of the host.

use ebb_config::Config;

use super::{mistake, ok, warning};
use crate::check::CheckLine;
use crate::descriptors::{limit_of_daemon, too_few};
use crate::setup;

/// Enough for some ten thousand volumes and clients.
const DESCRIPTORS: u64 = 65_536;
/// The kernel's default; lent buffers and grants of thousands of volumes need more mappings than
/// most programs.
const MAPPINGS: u64 = 65_530;

/// The checks of the host.
pub(super) fn checks(config: Option<&Config>) -> Vec<CheckLine> {
    let number =
        |path: &str| -> Option<u64> { std::fs::read_to_string(path).ok()?.trim().parse().ok() };
    let mut lines = vec![io_uring(number("/proc/sys/kernel/io_uring_disabled"), ring())];
    lines.extend(descriptors(limit_of_daemon(), config));
    lines.extend([
        pressure(std::fs::read_to_string("/proc/pressure/memory").is_ok()),
        mappings(number("/proc/sys/vm/max_map_count")),
        overcommit(number("/proc/sys/vm/overcommit_memory")),
    ]);
    lines
}

/// Starts a worker, as a daemon does.
fn ring() -> Result<(), String> {
    let memory = setup::tool_memory().map_err(|error| format!("{error:#}"))?;
    let worker = ebb_io::Worker::start("ebbd-doctor", &memory);
    worker.map(drop).map_err(|error| error.to_string())
}

fn io_uring(disabled: Option<u64>, ring: Result<(), String>) -> CheckLine {
    match (ring, disabled) {
        (Ok(()), _) => ok("io_uring works"),
        (Err(error), Some(1 | 2)) => mistake(format!(
            "io_uring is disabled ({error}): set kernel.io_uring_disabled to 0 (sysctl), or to 1 with io_uring_group"
        )),
        (Err(error), _) => mistake(format!(
            "io_uring does not work ({error}): use Linux 5.15 or later, and let seccomp allow io_uring_setup, \
             io_uring_enter and io_uring_register"
        )),
    }
}

/// The limit of open files; `None` if it is too low for these volumes, of which their check warns.
fn descriptors(limit: Option<u64>, config: Option<&Config>) -> Option<CheckLine> {
    let is_too_low = |limit| config.is_some_and(|all| too_few(limit, all).is_some());
    match limit {
        Some(limit) if is_too_low(limit) => None,
        Some(limit) if limit < DESCRIPTORS => Some(warning(format!(
            "at most {limit} open files: raise LimitNOFILE= of the service (or ulimit -Hn) to 1048576 for thousands of \
             volumes"
        ))),
        _ => Some(ok("the limit of open files is high enough for thousands of volumes")),
    }
}

fn pressure(available: bool) -> CheckLine {
    match available {
        true => ok("pressure stall information is available"),
        false => warning(
            "no pressure stall information (/proc/pressure): memory is returned later; boot with psi=1",
        ),
    }
}

fn mappings(most: Option<u64>) -> CheckLine {
    match most {
        Some(most) if most < MAPPINGS => warning(format!(
            "vm.max_map_count is {most}: set it to {MAPPINGS} or more (sysctl), or idle memory is lent in larger pieces"
        )),
        _ => ok("vm.max_map_count is high enough"),
    }
}

fn overcommit(mode: Option<u64>) -> CheckLine {
    match mode {
        Some(2) => warning(
            "vm.overcommit_memory is 2: I/O memory is limited to what the host promises; 0 lets it follow the load",
        ),
        _ => ok("memory overcommit is allowed"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::is_bad;
    use super::*;

    #[test]
    fn what_is_wrong_with_a_host_is_told_with_a_remedy() {
        let refused = || Err("Operation not permitted".to_owned());
        assert!(is_bad(
            &io_uring(Some(2), refused()),
            &["not permitted", "io_uring_disabled to 0"]
        ));
        assert!(is_bad(&io_uring(None, refused()), &["Linux 5.15", "seccomp"]));
        assert!(is_bad(&descriptors(Some(1024), None).unwrap(), &["1024", "LimitNOFILE="]));
        assert!(is_bad(&pressure(false), &["psi=1"]));
        assert!(is_bad(&mappings(Some(100)), &["100", "sysctl"]));
        assert!(is_bad(&overcommit(Some(2)), &["overcommit_memory"]));
        let well = [
            io_uring(Some(0), Ok(())),
            descriptors(None, None).unwrap(),
            pressure(true),
            mappings(Some(65_530)),
            overcommit(Some(0)),
        ];
        assert!(well.iter().all(|line| matches!(line, CheckLine::Ok(_))), "{well:?}");
    }

    #[test]
    fn limit_that_is_too_low_for_the_volumes_is_in_their_check() {
        let text = "listen = ['unix:/s']\n[volume.a]\nstore = 'null:1M'\n";
        let args = ebb_config::ServeArgs::default();
        let config = Config::parse(text, "f".as_ref(), &args).unwrap();
        assert!(descriptors(Some(20), Some(&config)).is_none());
        assert!(descriptors(Some(1024), Some(&config)).is_some());
    }
}
