//! Batches grant copies by the hypervisor (`GNTTABOP_copy`): one hypercall costs as much as copying
//! several pages, so one call copies the segments of all requests that are ready.
//!
//! Invariant: the copier owns a buffer while the hypervisor copies from or to it.

use std::cell::RefCell;
use std::rc::Rc;

use ebb_io::{Buf, Signal};

use crate::abi::Segment;
use crate::platform::{CopyOp, Domain, Grants};
use crate::request_task::SegmentTask;

/// About this many segments are copied per call, so that the worker's other tasks are not delayed.
const SEGMENTS_PER_CALL: usize = 512;

struct CopyJob {
    task: Rc<SegmentTask>,
    buf: Buf,
    to_guest: bool,
}

/// The copy operation between a segment and `part`, which has its length.
pub(crate) fn operation_on(
    guest: Domain,
    segment: Segment,
    part: &mut [u8],
    to_guest: bool,
) -> CopyOp {
    let (gref, offset) = (segment.gref, u16::from(segment.first) * 512);
    let len = u16::try_from(part.len()).unwrap_or_default();
    let part = part.as_mut_ptr();
    match to_guest {
        true => CopyOp::to_guest(guest, gref, offset, len, part),
        false => CopyOp::from_guest(guest, gref, offset, len, part),
    }
}

/// See the module.
#[derive(Default)]
pub(crate) struct Copier {
    jobs: RefCell<Vec<CopyJob>>,
    requested: Signal,
    operations: RefCell<Vec<CopyOp>>,
}

impl Copier {
    /// Copies the segments that a task has not copied itself; returns the buffer, and whether all succeeded.
    pub(crate) async fn copy(
        &self,
        task: &Rc<SegmentTask>,
        buf: Buf,
        to_guest: bool,
    ) -> (Buf, bool) {
        self.jobs.borrow_mut().push(CopyJob { task: task.clone(), buf, to_guest });
        self.requested.set();
        task.scratch().copied().await
    }

    pub(crate) async fn requested(&self) {
        self.requested.wait().await;
    }

    /// Copies what is queued; returns the number of segments.
    pub(crate) fn run(&self, guest: Domain, grants: &dyn Grants) -> u64 {
        let mut jobs = self.jobs.borrow_mut();
        let mut operations = self.operations.borrow_mut();
        operations.clear();
        let mut count = 0;
        for job in jobs.iter_mut() {
            if operations.len() >= SEGMENTS_PER_CALL {
                break;
            }
            count += 1;
            for (segment, at) in job.task.scratch().uncopied().iter() {
                let Some(part) = job.buf.get_mut(*at..*at + segment.bytes()) else { continue };
                operations.push(operation_on(guest, *segment, part, job.to_guest));
            }
        }
        // SAFETY: the operations point into buffers that the jobs own, within their bounds; nothing else
        // uses the buffers until they are passed on below.
        let outcome = unsafe { grants.copy(&mut operations) };
        let mut results = operations.iter();
        for CopyJob { task, buf, .. } in jobs.drain(..count) {
            let expected = task.scratch().uncopied().len();
            let done = results.by_ref().take(expected).filter(|op| op.is_done()).count();
            task.scratch().put_copied(buf, outcome.is_ok() && done == expected);
        }
        if !jobs.is_empty() {
            self.requested.set();
        }
        operations.len() as u64
    }
}
