//! The filter by which calls reach the broker.

use std::collections::BTreeMap;

use libc::c_long;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule,
};

/// The calls that the broker makes for the daemon.
pub(crate) const BROKERED: &[c_long] = &[
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_unlinkat,
    libc::SYS_renameat2,
    libc::SYS_linkat,
    libc::SYS_mkdirat,
    libc::SYS_fchmodat,
    libc::SYS_socket,
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_io_uring_setup,
];

/// Those of older programs, which only some architectures have.
#[cfg(target_arch = "x86_64")]
pub(crate) const BROKERED_OLD: &[c_long] = &[
    libc::SYS_open,
    libc::SYS_creat,
    libc::SYS_unlink,
    libc::SYS_rmdir,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_link,
    libc::SYS_mkdir,
    libc::SYS_chmod,
];
#[cfg(not(target_arch = "x86_64"))]
pub(crate) const BROKERED_OLD: &[c_long] = &[];

/// What the daemon does not need, and could get around the broker with: links that lead elsewhere,
/// another folder to run in, and what changes files by path without opening them.
const DENIED: &[c_long] = &[
    libc::SYS_symlinkat,
    libc::SYS_mknodat,
    libc::SYS_fchownat,
    libc::SYS_fchown,
    libc::SYS_truncate,
    libc::SYS_utimensat,
    libc::SYS_chdir,
    libc::SYS_fchdir,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_fremovexattr,
    libc::SYS_name_to_handle_at,
];

#[cfg(target_arch = "x86_64")]
const DENIED_OLD: &[c_long] = &[
    libc::SYS_symlink,
    libc::SYS_mknod,
    libc::SYS_chown,
    libc::SYS_lchown,
    libc::SYS_utime,
    libc::SYS_utimes,
    libc::SYS_futimesat,
];
#[cfg(not(target_arch = "x86_64"))]
const DENIED_OLD: &[c_long] = &[];

/// `fchmodat2`, `setxattrat`, `removexattrat`, `open_tree_attr` and `file_setattr`, of Linux 6.6 to 6.17. They have these numbers on all
/// architectures.
const DENIED_NEW: &[c_long] = &[452, 463, 466, 467, 469];
/// `SOCK_DGRAM` and `SOCK_RAW`, which send to addresses that the broker does not see.
const PAIRS: [u64; 2] = [2, 3];
/// Options by which packets go elsewhere than to their address: `IPPROTO_IP` with `IP_OPTIONS`, and `IPPROTO_IPV6` with
/// `IPV6_2292PKTOPTIONS`, `IPV6_HOPOPTS`, `IPV6_RTHDRDSTOPTS`, `IPV6_RTHDR` and `IPV6_DSTOPTS`, of Linux's include/uapi/linux/in.h and in6.h.
const ROUTES: [(u64, u64); 6] = [(0, 4), (41, 6), (41, 54), (41, 55), (41, 57), (41, 59)];
/// `MSG_FASTOPEN`: connects, and sends at once.
const FAST_OPEN: u64 = 0x2000_0000;
/// Any value that no other action has: the compiler knows of no notification, so that this stands for it.
const NOTIFY: u16 = 0x6e6f;
/// `BPF_RET | BPF_K` of Linux's include/uapi/linux/bpf_common.h.
const RETURN: u16 = 0x06;

type CallList = BTreeMap<i64, Vec<SeccompRule>>;

fn condition(
    argument: u8,
    length: SeccompCmpArgLen,
    operator: SeccompCmpOp,
    value: u64,
) -> Result<SeccompRule, BackendError> {
    SeccompRule::new(vec![SeccompCondition::new(argument, length, operator, value)?])
}

fn compile(rules: CallList, matched: SeccompAction) -> Result<BpfProgram, BackendError> {
    let arch = std::env::consts::ARCH.try_into()?;
    SeccompFilter::new(rules, SeccompAction::Allow, matched, arch)?.try_into()
}

/// The filter by which calls notify the broker.
pub(crate) fn brokered() -> Result<BpfProgram, BackendError> {
    let mut rules: CallList =
        BROKERED.iter().chain(BROKERED_OLD).map(|number| (*number, Vec::new())).collect();
    // With an address: without one it is a write.
    let address = condition(4, SeccompCmpArgLen::Qword, SeccompCmpOp::Ne, 0)?;
    rules.insert(libc::SYS_sendto, vec![address]);
    let mut program = compile(rules, SeccompAction::Trace(NOTIFY.into()))?;
    let marked = u32::from(SeccompAction::Trace(NOTIFY.into()));
    for instruction in &mut program {
        if instruction.code == RETURN && instruction.k == marked {
            instruction.k = libc::SECCOMP_RET_USER_NOTIF;
        }
    }
    Ok(program)
}

/// The filter that denies what would get around the broker.
pub(crate) fn denied() -> Result<BpfProgram, BackendError> {
    let all = DENIED.iter().chain(DENIED_OLD).chain(DENIED_NEW);
    let mut rules: CallList = all.map(|number| (*number, Vec::new())).collect();
    let low = |argument, operator, value| {
        SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)
    };
    for kind in PAIRS {
        let rule = SeccompRule::new(vec![low(1, SeccompCmpOp::MaskedEq(0xf), kind)?])?;
        rules.entry(libc::SYS_socketpair).or_default().push(rule);
    }
    for (level, name) in ROUTES {
        let of = vec![low(1, SeccompCmpOp::Eq, level)?, low(2, SeccompCmpOp::Eq, name)?];
        rules.entry(libc::SYS_setsockopt).or_default().push(SeccompRule::new(of)?);
    }
    let operator = || SeccompCmpOp::MaskedEq(FAST_OPEN);
    for (number, flags) in [(libc::SYS_sendto, 3), (libc::SYS_sendmsg, 2), (libc::SYS_sendmmsg, 3)]
    {
        let fast = condition(flags, SeccompCmpArgLen::Dword, operator(), FAST_OPEN)?;
        rules.insert(number, vec![fast]);
    }
    compile(rules, SeccompAction::Errno(libc::EPERM.unsigned_abs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filters_are_valid_and_one_notifies() {
        let returns = |program: &BpfProgram, value| {
            program.iter().any(|one| one.code == RETURN && one.k == value)
        };
        let brokered = brokered().unwrap();
        assert!(returns(&brokered, libc::SECCOMP_RET_USER_NOTIF));
        assert!(!returns(&brokered, SeccompAction::Trace(NOTIFY.into()).into()));
        assert!(!returns(&denied().unwrap(), libc::SECCOMP_RET_USER_NOTIF));
    }
}
