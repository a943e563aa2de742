//! What the monitor asks of a source, so that each is optional and none is special.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::Instant;

use rustix::event::PollFlags;

use super::report::SourceKind;
use super::signals::Signals;

/// A source that can give no more: it is closed, and the reason is told.
#[derive(Debug)]
pub(super) struct Gone(pub(super) String);

pub(super) trait Source: Send {
    fn kind(&self) -> SourceKind;

    fn path(&self) -> Option<&Path>;

    /// What to wait for, for a source that can wake the monitor.
    fn wait(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        None
    }

    /// What was waited for has come.
    fn ready(&mut self, _: PollFlags, _: Instant, _: &mut Signals) -> Result<(), Gone> {
        Ok(())
    }

    /// Looks. `awake`: something is going on, so that sources which are better left alone while
    /// calm may be read too.
    fn sample(&mut self, _now: Instant, _awake: bool, _: &mut Signals) -> Result<(), Gone> {
        Ok(())
    }
}
