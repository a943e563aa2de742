//! The process that runs programs for keys, which was made before the daemon had threads
//! ([`ebb_broker::ProgramHelper`]).

use std::sync::OnceLock;

use ebb_broker::ProgramHelper;

static HELPER: OnceLock<Option<ProgramHelper>> = OnceLock::new();

/// Makes it, once. `start` returns `None` if the configuration names no program.
pub(crate) fn begin(start: impl FnOnce() -> Option<ProgramHelper>) {
    HELPER.get_or_init(start);
}

/// Returns true if the daemon can run programs until it ends.
pub(crate) fn can_run() -> bool {
    !ebb_sandbox::programs_are_denied() || helper().is_some()
}

/// The process, if the configuration named a program at the start.
pub(crate) fn helper() -> Option<&'static ProgramHelper> {
    HELPER.get()?.as_ref()
}
