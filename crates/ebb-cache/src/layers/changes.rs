//! What has been written to an overlay between two of its snapshots, or since one.
//!
//! # Invariants
//! - A block that any layer above the one snapshot and not above the other holds has changed, whatever later layers hold of
//!   it. So what is said between two snapshots does not change with later writes.
//! - What a resize has added since, or taken away and added again, has changed. Beyond the end of the later snapshot nothing has.
//! - A call looks at a bounded number of runs, and says how far it came.

use ebb_block::{BlockError, ErrorKind, Io, Operation};

use super::Layers;

/// Runs that a request for changes looks at; it may end early.
const CHANGES_AT_ONCE: usize = 1024;
/// Runs after which the worker serves other tasks: a run that is in memory is found in a microsecond.
const YIELD_AFTER: usize = 32;

impl Layers {
    /// The size of the volume when a snapshot was made; `None` if there is no such snapshot.
    pub fn snapshot_size(&self, name: &str) -> Option<u64> {
        let deltas = self.deltas();
        let above = deltas.iter().find(|delta| delta.header.parent.snapshot() == Some(name))?;
        Some(above.header.parent.size)
    }

    /// Which parts of a range have been written since a snapshot, in order, at most `limit`: their lengths, and whether they
    /// have. With `until` only what was written before that later snapshot. The list may end before the range does.
    ///
    /// # Errors
    /// Those of the stores; [`ErrorKind::Invalid`] if there are no such snapshots, or not in this order.
    pub async fn changes(
        &self,
        io: &Io,
        (since, until): (&str, Option<&str>),
        (offset, length): (u64, u64),
        limit: usize,
    ) -> Result<Vec<(u64, bool)>, BlockError> {
        let refuse = || BlockError::new(ErrorKind::Invalid, Operation::Extents, offset, length);
        let stack = self.stacked().ok_or_else(refuse)?.kept_stack();
        let stack = stack.view();
        // The layer directly above a snapshot names it.
        let above = |name: &str| {
            let mut deltas = stack.lower.deltas().iter();
            deltas.position(|delta| delta.header().parent.snapshot() == Some(name))
        };
        let last = above(since).ok_or_else(refuse)?;
        let skipped = match until {
            Some(until) => above(until).ok_or_else(refuse)? + 1,
            None => 0,
        };
        if skipped > last {
            return Err(refuse());
        }
        // Beyond, these layers show nothing of what the snapshot holds.
        let above = stack.lower.deltas().get(skipped..=last).unwrap_or_default();
        let shown = above.iter().map(|delta| delta.shown()).min().unwrap_or(0);
        let size = above.first().map_or(0, |delta| delta.layout().size());
        let (mut list, mut at, end) = (Vec::<(u64, bool)>::new(), offset, offset + length);
        for looked_at in 0..CHANGES_AT_ONCE {
            if at >= end || list.len() > limit {
                break;
            }
            if looked_at > 0 && looked_at % YIELD_AFTER == 0 {
                io.yield_iteration().await;
            }
            let run = stack.find_loaded_below(io, skipped, (at, end - at)).await?;
            let changed = run.layer <= last || (shown..size).contains(&at);
            match list.last_mut() {
                Some((length, same)) if *same == changed => *length += run.length,
                _ => list.push((run.length, changed)),
            }
            at += run.length.max(1);
        }
        list.truncate(limit);
        Ok(list)
    }
}
