//! The rules of workers: the list of their system calls, and no path.

use landlock::{
    ABI, Access, AccessFs, AccessNet, LandlockStatus, Ruleset, RulesetAttr, RulesetStatus, Scope,
};
use seccompiler::{BackendError, SeccompAction, SeccompCmpOp, SeccompCondition, SeccompRule};

use crate::filter::{Rules, compile, condition, refuse};
use crate::{Mechanism, signals, threads};

/// The arguments with which a call is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallRule {
    /// Any.
    Any,
    /// Memory that no code can be run from: without `PROT_EXEC`.
    NoCode,
    /// To this process.
    OwnProcess,
    /// One of these numbers as the argument at this place.
    Numbers(u8, &'static [u64]),
    /// Of sockets in general, one of these options.
    SocketOptions(&'static [u64]),
}

/// A system call that a worker may make.
#[derive(Clone, Copy, Debug)]
pub struct WorkerCall {
    /// Its name.
    pub name: &'static str,
    /// Its number.
    number: libc::c_long,
    /// With which arguments.
    pub rule: CallRule,
    /// What for.
    pub purpose: &'static str,
}

const fn any(name: &'static str, number: libc::c_long, purpose: &'static str) -> WorkerCall {
    WorkerCall { name, number, rule: CallRule::Any, purpose }
}

const fn only(
    name: &'static str,
    number: libc::c_long,
    rule: CallRule,
    purpose: &'static str,
) -> WorkerCall {
    WorkerCall { name, number, rule, purpose }
}

/// `SO_PEERNAME`, `SO_PEERCRED` and `SO_PEERGROUPS` of Linux's include/uapi/asm-generic/socket.h.
const PEER_OPTIONS: &[u64] = &[28, 17, 59];
/// `FIONBIO` of sockets and eventfds; of Linux's include/uapi/xen/: `IOCTL_GNTDEV_MAP_GRANT_REF`,
/// `IOCTL_GNTDEV_UNMAP_GRANT_REF`, `IOCTL_GNTDEV_GRANT_COPY`, `IOCTL_EVTCHN_NOTIFY`.
const DEVICE_REQUESTS: &[u64] = &[0x5421, 0x18_4700, 0x10_4701, 0x10_4708, 0x4_4504];
/// What crashes are reported with: the handlers of this process give these back to the kernel.
const CRASHES: &[u64] = &[6, 7, 11];

/// All system calls that a worker may make once it runs. docs/sandbox.md has the same list; at most 25.
pub const WORKER_CALLS: &[WorkerCall] = &[
    any("io_uring_enter", libc::SYS_io_uring_enter, "all of a worker's I/O, and its only wait"),
    any("futex", libc::SYS_futex, "locks, and wake-ups of other threads"),
    any("read", libc::SYS_read, "takes the wake-ups of an eventfd"),
    any(
        "write",
        libc::SYS_write,
        "wakes other threads and guests by an eventfd; the message of a panic",
    ),
    any("sendmsg", libc::SYS_sendmsg, "a reply at light load, without the ring"),
    any(
        "preadv2",
        libc::SYS_preadv2,
        "a read of the page cache, or of guest memory, without the ring",
    ),
    any("pwritev2", libc::SYS_pwritev2, "a write from guest memory, without the ring"),
    any("ppoll", libc::SYS_ppoll, "whether a client has disconnected"),
    any("shutdown", libc::SYS_shutdown, "ends a connection"),
    any("close", libc::SYS_close, "closes what nothing uses any more"),
    only(
        "getsockopt",
        libc::SYS_getsockopt,
        CallRule::SocketOptions(PEER_OPTIONS),
        "who a client is",
    ),
    only(
        "ioctl",
        libc::SYS_ioctl,
        CallRule::Numbers(1, DEVICE_REQUESTS),
        "maps, copies and unmaps grants, and notifies guests of Xen; makes an eventfd of a guest non-blocking",
    ),
    only("mmap", libc::SYS_mmap, CallRule::NoCode, "memory, and grants of guests"),
    only("mprotect", libc::SYS_mprotect, CallRule::NoCode, "memory"),
    any("munmap", libc::SYS_munmap, "memory, and grants of guests"),
    any("madvise", libc::SYS_madvise, "returns memory"),
    any("brk", libc::SYS_brk, "memory of the C library, which takes a refusal for an address"),
    any("clock_gettime", libc::SYS_clock_gettime, "the time where the vDSO cannot tell it"),
    any("getrandom", libc::SYS_getrandom, "seeds of TLS and of hash tables"),
    any("getpid", libc::SYS_getpid, "OpenSSL looks whether the process was copied; a crash"),
    any(
        "gettid",
        libc::SYS_gettid,
        "the number of the thread, for the message of a panic and for a crash",
    ),
    only("tgkill", libc::SYS_tgkill, CallRule::OwnProcess, "a crash: abort(3)"),
    only(
        "rt_sigaction",
        libc::SYS_rt_sigaction,
        CallRule::Numbers(0, CRASHES),
        "a crash: SIGSEGV, SIGBUS and SIGABRT end the process",
    ),
    any("rt_sigreturn", libc::SYS_rt_sigreturn, "the end of a handler of a signal"),
    any("exit", libc::SYS_exit, "the end of the thread"),
];

/// Calls of the C library and of Rust's that are refused, and whose refusal is without consequence there.
const NOT_NEEDED: &[WorkerCall] = &[
    any("mremap", libc::SYS_mremap, "`realloc` copies instead"),
    any("sched_yield", libc::SYS_sched_yield, "a spin goes on"),
    any(
        "rt_sigprocmask",
        libc::SYS_rt_sigprocmask,
        "at the end of a thread, where no signal of ours is expected",
    ),
    any("sigaltstack", libc::SYS_sigaltstack, "as well"),
    any(
        "restart_syscall",
        libc::SYS_restart_syscall,
        "after SIGSTOP a wait with a time limit ends early, in a loop",
    ),
    any(
        "sched_getaffinity",
        libc::SYS_sched_getaffinity,
        "the C library's arenas are then those of two processors",
    ),
    only(
        "fcntl",
        libc::SYS_fcntl,
        CallRule::Numbers(1, &[1]),
        "debug builds look whether what they close is open",
    ),
];

/// What becomes of a system call of a worker that is not on the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unlisted {
    /// It fails with `EPERM`.
    Fails,
    /// The process ends (`SIGSYS`), except for calls whose refusal is without consequence: for tests.
    Ends,
}

impl Default for Unlisted {
    /// In debug builds the process ends, so that each test that makes a worker call what it may not fails.
    fn default() -> Unlisted {
        if cfg!(debug_assertions) { Unlisted::Ends } else { Unlisted::Fails }
    }
}

impl CallRule {
    fn rules(self) -> Result<Vec<SeccompRule>, BackendError> {
        let equal = SeccompCmpOp::Eq;
        let each = |conditions: Vec<Vec<SeccompCondition>>| {
            conditions.into_iter().map(SeccompRule::new).collect()
        };
        match self {
            CallRule::Any => Ok(Vec::new()),
            CallRule::NoCode => {
                let code = u64::from(libc::PROT_EXEC.unsigned_abs());
                each(vec![vec![condition(2, SeccompCmpOp::MaskedEq(code), 0)?]])
            }
            CallRule::OwnProcess => {
                let own = u64::from(std::process::id());
                each(vec![vec![condition(0, equal, own)?]])
            }
            CallRule::Numbers(place, numbers) => {
                let one = |number: &u64| Ok(vec![condition(place, equal.clone(), *number)?]);
                each(numbers.iter().map(one).collect::<Result<_, BackendError>>()?)
            }
            CallRule::SocketOptions(options) => {
                let general = u64::from(libc::SOL_SOCKET.unsigned_abs());
                let one = |option: &u64| {
                    Ok(vec![
                        condition(1, equal.clone(), general)?,
                        condition(2, equal.clone(), *option)?,
                    ])
                };
                each(options.iter().map(one).collect::<Result<_, BackendError>>()?)
            }
        }
    }
}

/// Puts the calling thread, a worker, under its rules, for good. It must have made its ring. From now on [`threads`] makes
/// threads for it. Returns what is in force: the list of calls, and the rule about paths.
pub fn restrict_worker(unlisted: Unlisted) -> [Mechanism; 2] {
    let name = Mechanism::WORKER_CALLS;
    if let Err(error) = threads::start_maker().and_then(|()| signals::leave_to_others()) {
        let why = format!("cannot prepare the worker: {error}");
        return [Mechanism::missing(name, &*why), Mechanism::missing(Mechanism::WORKER_PATHS, why)];
    }
    settle_heap();
    threads::note_restricted();
    // The calls of Landlock are not on the list.
    let paths = forbid_paths();
    let calls = match restrict_calls(unlisted) {
        Ok(()) => Mechanism::in_force(
            name,
            format!("workers may make {} system calls", WORKER_CALLS.len()),
        ),
        Err(why) => Mechanism::missing(name, why),
    };
    [calls, paths]
}

/// Has the C library look at `vm.overcommit_memory`, which it does once, when the heap of a thread first shrinks.
fn settle_heap() {
    const BLOCK: usize = 64 << 10;
    let blocks: Vec<Vec<u8>> = (0..64).map(|_| Vec::with_capacity(BLOCK)).collect();
    drop(std::hint::black_box(blocks));
}

fn restrict_calls(unlisted: Unlisted) -> Result<(), String> {
    let install = |rules: Result<Rules, BackendError>, matched, otherwise| {
        let program = rules.and_then(|rules| compile(rules, matched, otherwise));
        let program = program.map_err(|error| format!("the filter is not valid: {error}"))?;
        seccompiler::apply_filter(&program).map_err(|error| format!("seccomp: {error}"))
    };
    let rules = |calls: &'static [WorkerCall]| {
        calls.iter().map(|call| Ok((call.number, call.rule.rules()?)))
    };
    let (listed, not_needed) = (rules(WORKER_CALLS), || rules(NOT_NEEDED));
    let allow = SeccompAction::Allow;
    if unlisted == Unlisted::Fails {
        return install(listed.collect(), allow, refuse(libc::EPERM));
    }
    // The stricter one of two filters counts: this one is installed last, since the other one denies installing filters.
    install(not_needed().collect(), refuse(libc::EPERM), allow.clone())?;
    install(listed.chain(not_needed()).collect(), allow, SeccompAction::Trap)
}

/// Denies the thread all paths, binding and connecting TCP sockets, and signals and abstract sockets of other processes, as
/// far as the kernel can.
fn forbid_paths() -> Mechanism {
    let name = Mechanism::WORKER_PATHS;
    let restrict = || {
        Ruleset::default()
            .handle_access(AccessFs::from_all(ABI::V5))?
            .handle_access(AccessNet::from_all(ABI::V5))?
            .scope(Scope::from_all(ABI::V6))?
            .create()?
            .restrict_self()
    };
    match restrict() {
        Ok(found) if found.ruleset == RulesetStatus::FullyEnforced => {
            Mechanism::in_force(name, "workers can open no path, and connect no TCP socket")
        }
        Ok(found) if found.ruleset == RulesetStatus::PartiallyEnforced => Mechanism::in_force(
            name,
            "workers can open no path; this kernel's Landlock has no rules for some of sockets, signals and devices",
        ),
        Ok(found) => Mechanism::missing(name, missing(&found.landlock)),
        Err(error) => Mechanism::missing(name, format!("Landlock: {error}")),
    }
}

fn missing(status: &LandlockStatus) -> &'static str {
    match status {
        LandlockStatus::NotEnabled => {
            "Landlock is disabled: add landlock to the kernel's parameter lsm="
        }
        LandlockStatus::NotImplemented => "this kernel has no Landlock: Linux 5.13 or newer has it",
        _ => "Landlock cannot be used",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last_error() -> Option<i32> {
        std::io::Error::last_os_error().raw_os_error()
    }

    #[test]
    fn workers_may_make_25_system_calls_and_each_has_another_number() {
        assert!(WORKER_CALLS.len() <= 25, "{}", WORKER_CALLS.len());
        let numbers: std::collections::BTreeSet<_> =
            WORKER_CALLS.iter().chain(NOT_NEEDED).map(|call| call.number).collect();
        assert_eq!(numbers.len(), WORKER_CALLS.len() + NOT_NEEDED.len());
    }

    #[test]
    fn the_documentation_has_the_list() {
        let text = include_str!("../../../docs/sandbox.md");
        let table = text.split("## System calls of workers").nth(1).unwrap();
        let rows = table.lines().filter_map(|line| line.strip_prefix("| `"));
        let documented: Vec<_> = rows.filter_map(|row| row.split_once('`')).collect();
        let names: Vec<_> = documented.iter().map(|(name, _)| *name).collect();
        let listed: Vec<_> = WORKER_CALLS.iter().map(|call| call.name).collect();
        assert_eq!(names, listed, "the table of docs/sandbox.md and the list differ");
        for (call, (_, rest)) in WORKER_CALLS.iter().zip(&documented) {
            let limited = !rest.starts_with(" | any |");
            assert_eq!(limited, call.rule != CallRule::Any, "the arguments of {}", call.name);
        }
    }

    /// On a thread of its own, which keeps its rules.
    fn restricted<T: Send + 'static>(then: impl FnOnce() -> T + Send + 'static) -> T {
        let run = || {
            restrict_calls(Unlisted::Fails).unwrap();
            then()
        };
        // Its end is a call of the list, too.
        std::thread::spawn(run).join().unwrap()
    }

    #[test]
    fn arguments_are_looked_at() {
        let map = |protection: i32| {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: a new mapping touches no memory that is in use; it is not used.
            let at = unsafe { libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0) };
            if at == libc::MAP_FAILED { last_error() } else { None }
        };
        let signal = |process: i32| {
            // SAFETY: signal 0 is sent to no thread.
            let sent = unsafe { libc::syscall(libc::SYS_tgkill, process, process, 0) };
            if sent == 0 { None } else { last_error() }
        };
        let parent = i32::try_from(std::os::unix::process::parent_id()).unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        let code = libc::PROT_READ | libc::PROT_EXEC;
        let all = move || [map(libc::PROT_READ), map(code), signal(own), signal(parent)];
        assert_eq!(all()[..3], [None; 3], "without rules");
        let eperm = Some(libc::EPERM);
        assert_eq!(restricted(all), [None, eperm, None, eperm]);
    }

    #[test]
    fn what_is_not_on_the_list_is_refused() {
        let opened = restricted(|| std::fs::File::open("/dev/null").map(drop));
        assert_eq!(opened.unwrap_err().raw_os_error(), Some(libc::EPERM));
        let made = restricted(|| std::thread::Builder::new().spawn(|| {}).map(drop));
        assert!(made.is_err(), "a thread");
    }
}
