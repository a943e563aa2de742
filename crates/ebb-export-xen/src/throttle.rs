//! The volume's limits, which a request passes before it is consumed: while it waits, it and those behind it stay in the
//! guest's ring, and hold nothing of the daemon.
//!
//! Invariant: a request is charged by the copy that is carried out. A guest that changes a request in the ring while it
//! waits pays for both.

use ebb_volume::{LimitStage, RequestCost, RequestKind, VolumeLimits};

use crate::abi::{Abi, MAX_DIRECT_SEGMENTS, PAGE_BYTES, Slot, op};
use crate::device_shared::MAX_SEGMENTS;
use crate::queue::Queue;

/// A request in the ring that has to wait.
#[derive(Debug)]
pub(crate) struct ThrottledSlot {
    cost: RequestCost,
    stage: LimitStage,
}

/// What a request takes of the limits; `None` if they do not count it. The descriptors of an indirect request are not
/// known yet: each counts as a whole page.
pub(crate) fn cost(abi: Abi, slot: &Slot) -> Option<RequestCost> {
    let head = abi.head(slot);
    let direct = || {
        let segments = usize::from(head.count()).min(MAX_DIRECT_SEGMENTS);
        let bytes = (0..segments).map(|at| head.segment(at)).filter(|segment| segment.is_valid());
        bytes.map(|segment| segment.bytes() as u64).sum()
    };
    let (kind, bytes) = match head.code() {
        op::READ => (RequestKind::Read, direct()),
        op::WRITE | op::WRITE_BARRIER => (RequestKind::Write, direct()),
        op::FLUSH_DISKCACHE if head.count() > 0 => (RequestKind::Write, direct()),
        op::DISCARD => (RequestKind::Write, 0),
        op::INDIRECT => {
            let (inner, count, _) = head.indirect();
            let kind = if inner == op::READ { RequestKind::Read } else { RequestKind::Write };
            (kind, u64::from(count.min(MAX_SEGMENTS)) * PAGE_BYTES as u64)
        }
        _ => return None,
    };
    Some(RequestCost { kind, bytes })
}

impl Queue {
    /// Lets the next request pass, of which `slot` is a copy, unless it has to wait.
    pub(crate) fn throttle_next(
        &self,
        limits: &VolumeLimits,
        slot: &Slot,
        abi: Abi,
    ) -> Option<ThrottledSlot> {
        let cost = cost(abi, slot)?;
        if self.passed.take() == Some(cost) {
            return None;
        }
        let stage = limits.try_take(cost).err()?;
        Some(ThrottledSlot { cost, stage })
    }

    /// Waits until the next request may pass, or the ring is to stop.
    pub(crate) async fn throttle(&self, ThrottledSlot { cost, stage }: ThrottledSlot) {
        let Some(limits) = self.disk.volume.limits() else { return };
        let passing = async {
            limits.wait(&self.io, cost, stage, || true).await;
            true
        };
        let halted = async {
            self.halt.wait().await;
            false
        };
        if futures_lite::future::or(passing, halted).await {
            self.passed.set(Some(cost));
        } else {
            // For the ring's loop, which waits for it next.
            self.halt.set();
        }
    }
}
