//! The volume's limits, which a request passes after it was consumed and before it is carried out: while it waits, those
//! behind it stay in the guest's ring, and it holds no memory.

use std::rc::Rc;

use ebb_volume::{LimitStage, RequestCost, RequestKind, VolumeLimits};

use crate::queue::{DiskQueue, WaitingRequest};
use crate::request::{BlkAction, BlkRequest};

/// What a request takes of the limits; `None` if they do not count it.
fn cost(request: &BlkRequest) -> Option<RequestCost> {
    let (kind, bytes) = match request.action {
        BlkAction::Read { bytes, .. } => (RequestKind::Read, bytes),
        BlkAction::Write { bytes, .. } => (RequestKind::Write, bytes),
        BlkAction::Discard { .. } | BlkAction::WriteZeroes { .. } => (RequestKind::Write, 0),
        BlkAction::Flush | BlkAction::GetId | BlkAction::Unsupported | BlkAction::Invalid => {
            return None;
        }
    };
    Some(RequestCost { kind, bytes })
}

/// A request that has to wait for the limits.
#[derive(Debug)]
pub(crate) struct Throttled {
    cost: RequestCost,
    stage: LimitStage,
}

/// Lets a request pass, unless it has to wait.
#[inline]
pub(crate) fn throttle(limits: &VolumeLimits, request: &BlkRequest) -> Option<Throttled> {
    let cost = cost(request)?;
    let stage = limits.try_take(cost).err()?;
    Some(Throttled { cost, stage })
}

impl DiskQueue {
    /// Waits until the held request may pass, and carries it out. A queue that is to stop does not wait.
    pub(crate) async fn wait_for_limits(
        self: &Rc<Self>,
        throttled: Throttled,
        held: WaitingRequest,
    ) {
        let Throttled { cost, stage } = throttled;
        if let Some(limits) = self.disk.volume.limits() {
            let passing = limits.wait(&self.io, cost, stage, || true);
            let halted = async {
                self.halt.wait().await;
                // For the queue's loop, which waits for it next.
                self.halt.set();
                false
            };
            futures_lite::future::or(passing, halted).await;
        }
        self.begin_held(held);
    }
}
