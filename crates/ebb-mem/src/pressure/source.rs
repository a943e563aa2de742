//! The interface of the monitor to a source of signals. Every source is optional.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::Instant;

use rustix::event::PollFlags;

use super::report::SourceKind;
use super::signals::Signals;

/// A source that has failed for good, with the reason: the monitor closes and reports it.
#[derive(Debug)]
pub(super) struct SourceLost(pub(super) String);

pub(super) trait Source: Send {
    fn kind(&self) -> SourceKind;

    fn path(&self) -> Option<&Path>;

    /// The descriptor and events to poll, for a source that can wake the monitor.
    fn wait(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        None
    }

    /// Handles the events that were polled.
    fn ready(&mut self, _: PollFlags, _: Instant, _: &mut Signals) -> Result<(), SourceLost> {
        Ok(())
    }

    /// Samples the source. `awake`: there is pressure, or a sign is close. Some sources must not be read
    /// otherwise (see `psi.rs`).
    fn sample(&mut self, _now: Instant, _awake: bool, _: &mut Signals) -> Result<(), SourceLost> {
        Ok(())
    }
}
