//! Compiles lists of system calls into seccomp filters.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule,
};

/// Rules by the number of the call. Without rules a call matches always, otherwise if one of them does.
pub(crate) type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// A condition on the lower 32 bits of an argument: all that the kernel looks at for the arguments that are compared here.
pub(crate) fn condition(
    argument: u8,
    operator: SeccompCmpOp,
    value: u64,
) -> Result<SeccompCondition, BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)
}

/// A filter with one action for what the rules match, and one for all else.
pub(crate) fn compile(
    rules: Rules,
    matched: SeccompAction,
    otherwise: SeccompAction,
) -> Result<BpfProgram, BackendError> {
    let arch = std::env::consts::ARCH.try_into()?;
    SeccompFilter::new(rules, otherwise, matched, arch)?.try_into()
}

/// A refusal with this error.
pub(crate) fn refuse(number: i32) -> SeccompAction {
    SeccompAction::Errno(number.unsigned_abs())
}
