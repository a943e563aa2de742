//! The process that runs programs for keys, which was made before the daemon had threads
//! ([`ebb_broker::ProgramHelper`]).

use std::sync::OnceLock;

use ebb_broker::ProgramHelper;

static HELPER: OnceLock<Option<ProgramHelper>> = OnceLock::new();

/// Makes it, once. `start` returns `None` if the configuration names no program.
pub(crate) fn begin(start: impl FnOnce() -> Option<ProgramHelper>) {
    HELPER.get_or_init(start);
}

/// The process, if the configuration named a program at the start.
pub(crate) fn helper() -> Option<&'static ProgramHelper> {
    HELPER.get()?.as_ref()
}
