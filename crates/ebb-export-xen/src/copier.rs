//! Copies by the hypervisor, many at a time: a hypercall costs as much as several pages, so the
//! segments of all requests that are ready go into one call.
//!
//! Invariant: a buffer that is copied from or to is owned here while that lasts.

use std::cell::RefCell;
use std::rc::Rc;

use ebb_io::{Buf, Signal};

use crate::abi::Segment;
use crate::platform::{CopyOp, Domain, Grants};
use crate::request_task::Lane;

/// Segments in one call, more or less: the worker has other work, too.
const SEGMENTS_TURN: usize = 512;

struct Job {
    lane: Rc<Lane>,
    buf: Buf,
    to_guest: bool,
}

/// The copy between a segment and `part`, which has its length.
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
    jobs: RefCell<Vec<Job>>,
    asked: Signal,
    operations: RefCell<Vec<CopyOp>>,
}

impl Copier {
    /// Has the segments a lane has left over copied; gives the buffer back, and whether all were.
    pub(crate) async fn copy(&self, lane: &Rc<Lane>, buf: Buf, to_guest: bool) -> (Buf, bool) {
        self.jobs.borrow_mut().push(Job { lane: lane.clone(), buf, to_guest });
        self.asked.set();
        lane.copied().await
    }

    pub(crate) async fn asked(&self) {
        self.asked.wait().await;
    }

    /// Does what has gathered; how many segments were asked for.
    pub(crate) fn run(&self, guest: Domain, grants: &dyn Grants) -> u64 {
        let mut jobs = self.jobs.borrow_mut();
        let mut operations = self.operations.borrow_mut();
        operations.clear();
        let mut count = 0;
        for job in jobs.iter_mut() {
            if operations.len() >= SEGMENTS_TURN {
                break;
            }
            count += 1;
            for (segment, at) in job.lane.left_over().iter() {
                let Some(part) = job.buf.get_mut(*at..*at + segment.bytes()) else { continue };
                operations.push(operation_on(guest, *segment, part, job.to_guest));
            }
        }
        // SAFETY: the operations point into buffers the jobs own, within their bounds; nobody else
        // has them until the jobs are over, below.
        let outcome = unsafe { grants.copy(&mut operations) };
        let mut results = operations.iter();
        for Job { lane, buf, .. } in jobs.drain(..count) {
            let expected = lane.left_over().len();
            let done = results.by_ref().take(expected).filter(|op| op.is_done()).count();
            lane.put_copied(buf, outcome.is_ok() && done == expected);
        }
        if !jobs.is_empty() {
            self.asked.set();
        }
        operations.len() as u64
    }
}
