//! The end of the broker before the daemon's, and the changes that it makes impossible.

use std::sync::OnceLock;

use ebb_api::Refusal;
use ebb_control::Refused;

/// Why the broker makes no more calls.
static FAULT: OnceLock<BrokerFault> = OnceLock::new();

/// The fault of a broker that was in charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BrokerFault {
    /// It has ended.
    Ended,
    /// It did not make a call in time, and was ended.
    Hung,
}

impl BrokerFault {
    /// What to do.
    pub(crate) const REMEDY: &str = "restart the daemon: it serves the volumes that are open, and can open, create and connect to nothing \
                                     until then; add volumes of the run time again after that: `ebbd volume list` names them";

    /// What has happened.
    pub(crate) fn text(self) -> &'static str {
        match self {
            BrokerFault::Ended => "the broker, which opens files for the daemon, has ended",
            BrokerFault::Hung => {
                "the broker, which opens files for the daemon, did not respond, and was ended"
            }
        }
    }

    /// The refusal of a change that it makes impossible.
    pub(crate) fn refusal(self) -> Refused {
        Refused::new(Refusal::Busy, "broker_ended", self.text(), BrokerFault::REMEDY)
    }
}

/// Notes the first fault, and returns it.
pub(crate) fn note_fault(fault: BrokerFault) -> BrokerFault {
    *FAULT.get_or_init(|| fault)
}

/// The fault that was noted of the broker of this process.
pub(crate) fn noted_fault() -> Option<BrokerFault> {
    FAULT.get().copied()
}

/// The fault of a broker that no longer makes the daemon's calls. The one place that knows: health,
/// `stat`, the log and refused changes follow it.
pub(crate) fn broker_fault() -> Option<BrokerFault> {
    #[cfg(feature = "sim")]
    if let Some(fault) = sim::fault() {
        return Some(fault);
    }
    noted_fault()
}

/// The refusal of a change that `error` has failed, if the broker has ended and did not make the
/// call.
pub(crate) fn broker_refusal(error: &(dyn std::error::Error + 'static)) -> Option<Refused> {
    let fault = broker_fault()?;
    let causes = std::iter::successors(Some(error), |error| error.source());
    let was_not_made = |cause: &(dyn std::error::Error + 'static)| {
        let cause = cause.downcast_ref::<std::io::Error>();
        cause.is_some_and(|cause| cause.raw_os_error() == Some(libc::ENOSYS))
    };
    causes.into_iter().any(was_not_made).then(|| fault.refusal())
}

/// The broker of a simulation (feature `sim`), which has no process for it.
#[cfg(feature = "sim")]
pub mod sim {
    use std::cell::Cell;

    use super::BrokerFault;

    thread_local! {
        static HUNG: Cell<Option<bool>> = const { Cell::new(None) };
    }

    /// Sets the fault that the daemon of this thread knows of its broker: it has hung (true) or
    /// ended (false). `None`: it works.
    pub fn set_fault(hung: Option<bool>) {
        HUNG.set(hung);
    }

    pub(super) fn fault() -> Option<BrokerFault> {
        let hung = HUNG.get()?;
        Some(if hung { BrokerFault::Hung } else { BrokerFault::Ended })
    }
}
