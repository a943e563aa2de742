//! The volume's limits, which a request passes before memory is charged for it and its data is received: while it
//! waits, the socket is not read.

use std::pin::pin;

use ebb_volume::{LimitStage, RequestCost, RequestKind};

use super::{Connection, ConnectionEnd};
use crate::decode::NbdRequest;

/// What a request takes of the limits; `None` if they do not count it.
pub(super) fn cost(operation: &NbdRequest) -> Option<RequestCost> {
    let (kind, bytes) = match operation {
        NbdRequest::Read { length, .. } => (RequestKind::Read, u64::from(*length)),
        NbdRequest::Write { length, .. } => (RequestKind::Write, u64::from(*length)),
        NbdRequest::Trim { .. } | NbdRequest::WriteZeroes { .. } => (RequestKind::Write, 0),
        NbdRequest::Flush
        | NbdRequest::Cache { .. }
        | NbdRequest::BlockStatus { .. }
        | NbdRequest::Disconnect => return None,
    };
    Some(RequestCost { kind, bytes })
}

/// A request that has to wait, and where.
pub(super) struct ThrottledRequest(RequestCost, LimitStage);

impl Connection {
    /// Lets a request pass the limits, or returns what has to be waited for.
    #[inline]
    pub(super) fn throttled(&self, operation: &NbdRequest) -> Option<ThrottledRequest> {
        let limits = self.volume.limits()?;
        let cost = cost(operation)?;
        let stage = limits.try_take(cost).err()?;
        Some(ThrottledRequest(cost, stage))
    }

    /// Waits until a request may pass. Ends at once when the connection is to end, and soon after the client has
    /// disconnected.
    pub(super) async fn throttle(
        &self,
        ThrottledRequest(cost, stage): ThrottledRequest,
    ) -> Result<(), ConnectionEnd> {
        let Some(limits) = self.volume.limits() else { return Ok(()) };
        let wanted = || !self.transport.is_abandoned();
        let passing = pin!(limits.wait(&self.io, cost, stage, wanted));
        match self.unless_halted(passing).await? {
            true => Ok(()),
            false => Err(ConnectionEnd::Closed),
        }
    }
}
