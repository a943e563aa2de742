//! The rules of all threads: system calls that the daemon does not need.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use landlock::{Ruleset, RulesetAttr, RulesetStatus, Scope};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpOp, SeccompCondition, SeccompRule,
    sock_filter,
};

use crate::Mechanism;
use crate::filter::{Rules, compile, condition, refuse};

/// No program can be run.
static NO_PROGRAMS: AtomicBool = AtomicBool::new(false);

/// Whether the process is under rules by which it can run no program.
pub fn programs_are_denied() -> bool {
    NO_PROGRAMS.load(Ordering::Relaxed)
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
    /// Always, but for the broker, which takes descriptors from the daemon.
    NotBroker,
    /// If the process that the first argument names is another one.
    OtherProcess,
    /// If it makes a process and not a thread.
    NewProcess,
    /// If it makes a namespace.
    Namespace,
    /// If the family is none that the daemon uses, or if it is netlink with another protocol than
    /// `NETLINK_ROUTE`.
    Family,
    /// Unless the first argument is this process: its number, or zero.
    OwnProcess,
    /// Unless the first argument is zero, for one thread or process, and the second one zero, for the calling one.
    OwnThread,
    /// If it chooses who gets the signals of a descriptor, or which signal.
    Owner,
    /// If it acts on more than the descriptor: types into a terminal, opens a file by a handle,
    /// freezes or changes a file system.
    Request,
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
    Always: SYS_execve SYS_execveat SYS_setpgid;
    NewProcess: SYS_clone;
    Namespace: SYS_clone;
    // Other processes.
    Always: SYS_ptrace SYS_process_vm_readv SYS_process_vm_writev SYS_process_mrelease SYS_kcmp
        SYS_pidfd_send_signal SYS_tkill;
    NotBroker: SYS_pidfd_getfd;
    OtherProcess: SYS_kill SYS_tgkill SYS_rt_sigqueueinfo SYS_rt_tgsigqueueinfo;
    Family: SYS_socket;
    // Objects that processes share by a number or a name: using one, as well as making one.
    Always: SYS_shmget SYS_shmat SYS_shmctl SYS_msgget SYS_msgsnd SYS_msgrcv SYS_msgctl SYS_semget SYS_semop
        SYS_semtimedop SYS_semctl SYS_mq_open SYS_mq_unlink;
    // Their limits, and what share of the processors and disks they get.
    OwnProcess: SYS_prlimit64 SYS_sched_setaffinity SYS_sched_setattr SYS_sched_setparam SYS_sched_setscheduler;
    OwnThread: SYS_setpriority;
    Always: SYS_ioprio_set SYS_migrate_pages SYS_move_pages;
    Owner: SYS_fcntl SYS_ioctl;
    Request: SYS_ioctl;
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
    Always: SYS_fork SYS_vfork SYS_kexec_file_load SYS_iopl SYS_ioperm SYS_modify_ldt SYS_uselib;
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
/// `AF_NETLINK`.
const NETLINK: u64 = 16;
/// Requests to a terminal, of Linux's include/uapi/asm-generic/ioctls.h: `TIOCSCTTY`, `TIOCSPGRP`,
/// `TIOCSTI`, which types for its user, `TIOCLINUX`, which pastes, `TIOCCONS` and `TIOCSETD`.
const TERMINAL: [u64; 6] = [0x540e, 0x5410, 0x5412, 0x541c, 0x541d, 0x5423];
/// The type and the number, which are the lower 16 bits, of requests that get around paths:
/// `XFS_IOC_PATH_TO_FSHANDLE`, `XFS_IOC_FD_TO_HANDLE`, `XFS_IOC_PATH_TO_HANDLE`,
/// `XFS_IOC_OPEN_BY_HANDLE`, `XFS_IOC_READLINK_BY_HANDLE`, `XFS_IOC_SWAPEXT`, `FIFREEZE`, `FITHAW`,
/// `XFS_IOC_FSSETDM_BY_HANDLE`, `XFS_IOC_ATTRLIST_BY_HANDLE`, `XFS_IOC_ATTRMULTI_BY_HANDLE`,
/// `XFS_IOC_GOINGDOWN`, `FS_IOC_FSSETXATTR` and `FS_IOC_SETFLAGS`, of fs/xfs/libxfs/xfs_fs.h and
/// include/uapi/linux/fs.h.
const BY_HANDLE: [u64; 14] = [
    0x5864, 0x5868, 0x5869, 0x586b, 0x586c, 0x586d, 0x5877, 0x5878, 0x5879, 0x587a, 0x587b, 0x587d,
    0x5820, 0x6602,
];
const TYPE_AND_NUMBER: u64 = 0xffff;
/// The type of requests to btrfs, which make, delete and search subvolumes by name; `FICLONE` and
/// `FICLONERANGE`, which are of two descriptors, have it as well.
const BTRFS: u64 = 0x9400;
const TYPE: u64 = 0xff00;
const CLONES: [u64; 2] = [0x4004_9409, 0x4020_940d];
/// The bit of the numbers of x32's calls, which do what those without it do.
#[cfg(target_arch = "x86_64")]
const X32: u32 = 0x4000_0000;

impl Denied {
    /// The rules with which a call is denied: if there are none, whatever its arguments.
    fn rules(self) -> Result<Vec<SeccompRule>, BackendError> {
        let each = |all: Vec<SeccompCondition>| -> Result<Vec<SeccompRule>, BackendError> {
            all.into_iter().map(|one| SeccompRule::new(vec![one])).collect()
        };
        let not = |argument, values: &[u64]| -> Result<Vec<SeccompCondition>, BackendError> {
            values.iter().map(|value| condition(argument, SeccompCmpOp::Ne, *value)).collect()
        };
        let masked =
            |argument, mask, value| condition(argument, SeccompCmpOp::MaskedEq(mask), value);
        let own = u64::from(std::process::id());
        match self {
            Denied::Always | Denied::NotBroker => Ok(Vec::new()),
            Denied::OtherProcess => each(not(0, &[own])?),
            Denied::OwnProcess => Ok(vec![SeccompRule::new(not(0, &[0, own])?)?]),
            Denied::OwnThread => each([not(0, &[0])?, not(1, &[0])?].concat()),
            Denied::NewProcess => each(vec![masked(0, CLONE_THREAD, 0)?]),
            Denied::Namespace => {
                let with = |flag: u64| masked(0, flag, flag);
                each(NAMESPACES.into_iter().map(with).collect::<Result<_, _>>()?)
            }
            Denied::Family => {
                let is_netlink = condition(0, SeccompCmpOp::Eq, NETLINK)?;
                let protocol = condition(2, SeccompCmpOp::Ne, 0)?;
                Ok(vec![
                    SeccompRule::new(not(0, &FAMILIES)?)?,
                    SeccompRule::new(vec![is_netlink, protocol])?,
                ])
            }
            Denied::Owner => {
                let one = |number| condition(1, SeccompCmpOp::Eq, number);
                each(OWNERS.into_iter().map(one).collect::<Result<_, _>>()?)
            }
            Denied::Request => {
                let terminal = TERMINAL.iter().map(|n| condition(1, SeccompCmpOp::Eq, *n));
                let by_handle = BY_HANDLE.iter().map(|n| masked(1, TYPE_AND_NUMBER, *n));
                let mut rules = each(terminal.chain(by_handle).collect::<Result<_, _>>()?)?;
                let mut btrfs = not(1, &CLONES)?;
                btrfs.push(masked(1, TYPE, BTRFS)?);
                rules.push(SeccompRule::new(btrfs)?);
                Ok(rules)
            }
        }
    }
}

fn rules(broker: bool) -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    let all = DENIED_CALLS.iter().chain(DENIED_HERE);
    for call in all.filter(|call| !broker || call.denied != Denied::NotBroker) {
        rules.entry(call.number).or_default().extend(call.denied.rules()?);
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
pub fn restrict_process() -> Mechanism {
    restrict(false)
}

/// As [`restrict_process`], for the broker, which takes descriptors from the daemon.
pub fn restrict_broker() -> Mechanism {
    restrict(true)
}

fn restrict(broker: bool) -> Mechanism {
    static RESTRICTED: OnceLock<Mechanism> = OnceLock::new();
    RESTRICTED.get_or_init(|| restrict_once(broker)).clone()
}

fn restrict_once(broker: bool) -> Mechanism {
    let name = Mechanism::PROCESS_CALLS;
    // Its flags are in memory, where a filter does not see them: the C library then takes clone.
    let no_clone3 = Rules::from([(libc::SYS_clone3, Vec::new())]);
    let allow = SeccompAction::Allow;
    let filters = || {
        let first = compile(no_clone3, refuse(libc::ENOSYS), allow.clone())?;
        Ok([first, no_x32(), compile(rules(broker)?, refuse(libc::EPERM), allow.clone())?])
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
    NO_PROGRAMS.store(true, Ordering::Relaxed);
    Mechanism::in_force(
        name,
        "no thread can run a program, make a process, or trace or signal a process",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filters_are_valid_and_the_broker_takes_descriptors() {
        let (daemon, broker) = (rules(false).unwrap(), rules(true).unwrap());
        assert!(daemon.contains_key(&libc::SYS_execve) && broker.contains_key(&libc::SYS_execve));
        let takes = libc::SYS_pidfd_getfd;
        assert!(daemon.contains_key(&takes) && !broker.contains_key(&takes));
        for rules in [daemon, broker] {
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
