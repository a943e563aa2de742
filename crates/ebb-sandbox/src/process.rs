//! The rules of all threads: system calls that the daemon does not need.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use landlock::{Ruleset, RulesetAttr, RulesetStatus, Scope};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpOp, SeccompRule, sock_filter,
};

use crate::Mechanism;
use crate::filter::{Rules, compile, condition, refuse};

/// No program can be run.
static NO_PROGRAMS: AtomicBool = AtomicBool::new(false);

/// Whether the process is under rules by which it can run no program.
pub fn programs_are_denied() -> bool {
    NO_PROGRAMS.load(Ordering::Relaxed)
}

/// Whether the daemon runs programs: those that print the keys of encrypted volumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Programs {
    /// It does, so that making processes, running programs and signals to them are allowed.
    Run,
    /// It does not.
    None,
}

/// A system call that no thread may make.
#[derive(Clone, Copy, Debug)]
pub struct DeniedCall {
    /// Its name.
    pub name: &'static str,
    number: libc::c_long,
    denied: Denied,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Denied {
    Always,
    /// Unless programs are run.
    Program,
    /// If the process that the first argument names is another one.
    OtherProcess,
    /// As `OtherProcess`, unless programs are run.
    OtherThanProgram,
    /// If it makes a process and not a thread, unless programs are run.
    NewProcess,
    /// If it makes a namespace.
    Namespace,
    /// If the family is none that the daemon uses.
    Family,
    /// Unless the first argument is this process: its number, or zero.
    OwnProcess,
    /// Unless the first argument is zero, for one thread or process, and the second one zero, for the calling one.
    OwnThread,
    /// If it chooses who gets the signals of a descriptor, or which signal.
    Owner,
}

macro_rules! denied {
    ($($rule:ident: $($name:ident)+;)+) => {
        &[$($(DeniedCall {
            name: const { stringify!($name).split_at(4).1 },
            number: libc::$name,
            denied: Denied::$rule,
        },)+)+]
    };
}

/// The system calls that no thread may make, some of them with certain arguments only.
pub const DENIED_CALLS: &[DeniedCall] = denied! {
    Program: SYS_execve SYS_execveat SYS_setpgid;
    NewProcess: SYS_clone;
    Namespace: SYS_clone;
    // Other processes.
    Always: SYS_ptrace SYS_process_vm_readv SYS_process_vm_writev SYS_process_mrelease SYS_kcmp SYS_pidfd_getfd
        SYS_pidfd_send_signal SYS_tkill;
    OtherThanProgram: SYS_kill;
    OtherProcess: SYS_tgkill SYS_rt_sigqueueinfo SYS_rt_tgsigqueueinfo;
    Family: SYS_socket;
    // Their limits, and what share of the processors and disks they get.
    OwnProcess: SYS_prlimit64 SYS_sched_setaffinity SYS_sched_setattr SYS_sched_setparam SYS_sched_setscheduler;
    OwnThread: SYS_setpriority;
    Program: SYS_ioprio_set;
    Always: SYS_migrate_pages SYS_move_pages;
    Owner: SYS_fcntl SYS_ioctl;
    // Mounts, namespaces and roots.
    Always: SYS_mount SYS_umount2 SYS_pivot_root SYS_chroot SYS_move_mount SYS_open_tree SYS_fsopen SYS_fsconfig
        SYS_fsmount SYS_fspick SYS_mount_setattr SYS_setns SYS_unshare SYS_swapon SYS_swapoff SYS_quotactl
        SYS_open_by_handle_at SYS_fanotify_init;
    // Code in the kernel, and what has often been a way into it.
    Always: SYS_init_module SYS_finit_module SYS_delete_module SYS_kexec_load SYS_bpf
        SYS_perf_event_open SYS_userfaultfd SYS_add_key SYS_request_key SYS_keyctl SYS_personality;
    // The host.
    Always: SYS_reboot SYS_acct SYS_syslog SYS_settimeofday SYS_clock_settime SYS_adjtimex SYS_clock_adjtime
        SYS_sethostname SYS_setdomainname;
    // Other users.
    Always: SYS_setuid SYS_setgid SYS_setreuid SYS_setregid SYS_setresuid SYS_setresgid SYS_setgroups SYS_setfsuid
        SYS_setfsgid SYS_capset;
};

/// Those that only some architectures have.
#[cfg(target_arch = "x86_64")]
const DENIED_HERE: &[DeniedCall] = denied! {
    Program: SYS_fork SYS_vfork;
    Always: SYS_kexec_file_load SYS_iopl SYS_ioperm SYS_modify_ldt SYS_uselib;
};
#[cfg(not(target_arch = "x86_64"))]
const DENIED_HERE: &[DeniedCall] = &[];

/// Flags of `clone` that make namespaces: of time, mounts, control groups, UTS, IPC, users, processes and the network.
const NAMESPACES: [u64; 8] = [
    0x0000_0080,
    0x0002_0000,
    0x0200_0000,
    0x0400_0000,
    0x0800_0000,
    0x1000_0000,
    0x2000_0000,
    0x4000_0000,
];
/// The families of sockets that are used: unix, IPv4, IPv6, and netlink, by which the C library asks for addresses.
const FAMILIES: [u64; 4] = [1, 2, 10, 16];
const CLONE_THREAD: u64 = 0x0001_0000;
/// `F_SETOWN`, `F_SETSIG` and `F_SETOWN_EX` of Linux's include/uapi/asm-generic/fcntl.h, and `FIOSETOWN` and `SIOCSPGRP` of
/// sockios.h there. Neither call knows the other's numbers.
const OWNERS: [u64; 5] = [8, 10, 15, 0x8901, 0x8902];
/// The bit of the numbers of x32's calls, which do what those without it do.
#[cfg(target_arch = "x86_64")]
const X32: u32 = 0x4000_0000;

impl Denied {
    /// The rules with which a call is denied: if there are none, whatever its arguments. `None`: it is allowed.
    fn rules(self, programs: Programs) -> Result<Option<Vec<SeccompRule>>, BackendError> {
        let other = |argument| {
            let own = u64::from(std::process::id());
            SeccompRule::new(vec![condition(argument, SeccompCmpOp::Ne, own)?])
        };
        Ok(match (self, programs) {
            (Denied::Always, _) | (Denied::Program, Programs::None) => Some(Vec::new()),
            // A program signals its own threads, of which the rules do not know the process.
            (
                Denied::Program
                | Denied::NewProcess
                | Denied::OtherThanProgram
                | Denied::OtherProcess,
                Programs::Run,
            ) => None,
            (Denied::OtherProcess | Denied::OtherThanProgram, Programs::None) => {
                Some(vec![other(0)?])
            }
            (Denied::NewProcess, Programs::None) => {
                let no_thread = condition(0, SeccompCmpOp::MaskedEq(CLONE_THREAD), 0)?;
                Some(vec![SeccompRule::new(vec![no_thread])?])
            }
            (Denied::Namespace, _) => {
                let with = |flag: u64| {
                    SeccompRule::new(vec![condition(0, SeccompCmpOp::MaskedEq(flag), flag)?])
                };
                Some(NAMESPACES.into_iter().map(with).collect::<Result<_, BackendError>>()?)
            }
            (Denied::Family, _) => {
                let not = |family| condition(0, SeccompCmpOp::Ne, family);
                let all = FAMILIES.into_iter().map(not).collect::<Result<_, BackendError>>()?;
                Some(vec![SeccompRule::new(all)?])
            }
            (Denied::OwnThread, _) => {
                let not_zero =
                    |argument| SeccompRule::new(vec![condition(argument, SeccompCmpOp::Ne, 0)?]);
                Some([0, 1].into_iter().map(not_zero).collect::<Result<_, BackendError>>()?)
            }
            (Denied::OwnProcess, _) => {
                let all = [0, u64::from(std::process::id())]
                    .into_iter()
                    .map(|process| condition(0, SeccompCmpOp::Ne, process))
                    .collect::<Result<_, BackendError>>()?;
                Some(vec![SeccompRule::new(all)?])
            }
            (Denied::Owner, _) => {
                let one = |number| SeccompRule::new(vec![condition(1, SeccompCmpOp::Eq, number)?]);
                Some(OWNERS.into_iter().map(one).collect::<Result<_, BackendError>>()?)
            }
        })
    }
}

fn rules(programs: Programs) -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    for call in DENIED_CALLS.iter().chain(DENIED_HERE) {
        if let Some(more) = call.denied.rules(programs)? {
            rules.entry(call.number).or_default().extend(more);
        }
    }
    Ok(rules)
}

/// Denies the calls of the x32 ABI, of which the other filters know no number. By hand: a filter of `seccompiler` compares
/// numbers for equality only.
#[cfg(target_arch = "x86_64")]
fn no_x32() -> BpfProgram {
    let instruction = |code, jt, jf, k| sock_filter { code, jt, jf, k };
    vec![
        // BPF_LD, BPF_W, BPF_ABS: the first field of `seccomp_data`, the number of the call.
        instruction(0x20, 0, 0, 0),
        // BPF_JMP, BPF_JGE, BPF_K.
        instruction(0x35, 0, 1, X32),
        // BPF_RET, BPF_K.
        instruction(0x06, 0, 0, refuse(libc::EPERM).into()),
        instruction(0x06, 0, 0, SeccompAction::Allow.into()),
    ]
}
#[cfg(not(target_arch = "x86_64"))]
fn no_x32() -> BpfProgram {
    Vec::new()
}

/// Keeps the calling thread, and all that it makes, from other processes than this one and the programs that it runs: their
/// memory cannot be read or written, also by `/proc`, and no signal is sent to them, also by the kernel for a descriptor. For good. To be
/// called before there are other threads; later calls return what the first one has.
pub fn isolate_process() -> Mechanism {
    static ISOLATED: OnceLock<Mechanism> = OnceLock::new();
    let isolate = || {
        let name = Mechanism::OTHER_PROCESSES;
        let rules = Ruleset::default().scope(Scope::Signal);
        match rules.and_then(|rules| rules.create()?.restrict_self()) {
            Ok(found) if found.ruleset == RulesetStatus::FullyEnforced => Mechanism::in_force(
                name,
                "no thread reaches the memory of another process, or signals one",
            ),
            Ok(_) => Mechanism::missing(
                name,
                "this kernel's Landlock cannot: it needs Linux 6.12, and landlock in the kernel's parameter lsm=",
            ),
            Err(error) => Mechanism::missing(name, format!("Landlock: {error}")),
        }
    };
    ISOLATED.get_or_init(isolate).clone()
}

/// Puts all threads of the process under its rules, for good, and with them `no_new_privs`. No worker may be
/// under its own rules yet. Rings may be made later: a daemon whose takeover has failed makes new ones. Returns what is in force.
/// Later calls return what the first one has: each further filter would count against the kernel's limit.
pub fn restrict_process(programs: Programs) -> Mechanism {
    static RESTRICTED: OnceLock<Mechanism> = OnceLock::new();
    RESTRICTED.get_or_init(|| restrict_once(programs)).clone()
}

fn restrict_once(programs: Programs) -> Mechanism {
    let name = Mechanism::PROCESS_CALLS;
    // Its flags are in memory, where a filter does not see them: the C library then takes clone.
    let no_clone3 = Rules::from([(libc::SYS_clone3, Vec::new())]);
    let allow = SeccompAction::Allow;
    let filters = || {
        let first = compile(no_clone3, refuse(libc::ENOSYS), allow.clone())?;
        Ok([first, no_x32(), compile(rules(programs)?, refuse(libc::EPERM), allow.clone())?])
    };
    let filters: Result<[_; 3], BackendError> = filters();
    let filters = match filters {
        Ok(filters) => filters,
        Err(error) => return Mechanism::missing(name, format!("the filter is not valid: {error}")),
    };
    for filter in filters.iter().filter(|filter| !filter.is_empty()) {
        if let Err(error) = seccompiler::apply_filter_all_threads(filter) {
            return Mechanism::missing(name, format!("seccomp: {error}"));
        }
    }
    NO_PROGRAMS.store(programs == Programs::None, Ordering::Relaxed);
    Mechanism::in_force(
        name,
        match programs {
            Programs::None => {
                "no thread can run a program, make a process, or trace or signal a process"
            }
            Programs::Run => {
                "no thread can trace a process; programs can be run, since one prints the key of a volume"
            }
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filter_is_valid_with_and_without_programs() {
        let (without, with) = (rules(Programs::None).unwrap(), rules(Programs::Run).unwrap());
        assert!(without.contains_key(&libc::SYS_execve) && !with.contains_key(&libc::SYS_execve));
        assert!(with[&libc::SYS_clone].len() < without[&libc::SYS_clone].len());
        for rules in [without, with] {
            compile(rules, refuse(libc::EPERM), SeccompAction::Allow).unwrap();
        }
        assert!(DENIED_CALLS.iter().all(|call| !call.name.is_empty()));
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn calls_of_x32_are_denied() {
        let call = || {
            // SAFETY: has no arguments and no effect.
            let result = unsafe { libc::syscall(libc::SYS_getppid | i64::from(X32)) };
            if result < 0 { std::io::Error::last_os_error().raw_os_error() } else { None }
        };
        assert_ne!(call(), Some(libc::EPERM), "without the filter");
        let filtered = move || {
            seccompiler::apply_filter(&no_x32()).unwrap();
            // SAFETY: as above.
            (call(), unsafe { libc::syscall(libc::SYS_getppid) })
        };
        let (x32, parent) = std::thread::spawn(filtered).join().unwrap();
        assert_eq!(x32, Some(libc::EPERM));
        assert_eq!(parent, i64::from(std::os::unix::process::parent_id()));
    }
}
