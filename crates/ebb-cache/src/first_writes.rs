//! [`FirstWrites`]: ranges of blocks that are written to a delta for the first time.
//!
//! # Invariants
//! - Ranges that are held do not overlap.
//! - A range whose holder is dropped before it has allowed the release stays held for good, and later requests for it are
//!   refused: the store may still carry out what was begun.

use std::future::poll_fn;
use std::ops::Range;
use std::task::{Poll, Waker};

use crate::sync::Mutex;

/// See the module.
#[derive(Default)]
pub(crate) struct FirstWrites(Mutex<LockedBlocks>);

#[derive(Default)]
struct LockedBlocks {
    /// With a number each; and whether the write was dropped, so that the range is locked for good.
    held: Vec<(u64, Range<u64>, bool)>,
    waiting: Vec<Waker>,
    last: u64,
}

/// Holds a range of blocks.
pub(crate) struct BlockGuard<'a> {
    lock: &'a FirstWrites,
    number: u64,
    /// Dropping it releases the range.
    pub(crate) releases: bool,
}

impl FirstWrites {
    /// Waits until no other range that overlaps this one is held; `None` if one of them never will be released.
    pub(crate) async fn lock(&self, blocks: &Range<u64>) -> Option<BlockGuard<'_>> {
        poll_fn(|cx| {
            let mut locked = self.0.lock();
            let overlaps = |(_, held, _): &&(u64, Range<u64>, bool)| {
                held.start < blocks.end && blocks.start < held.end
            };
            let mut dropped = false;
            let mut found = false;
            for (_, _, is_dropped) in locked.held.iter().filter(overlaps) {
                found = true;
                dropped |= *is_dropped;
            }
            if dropped {
                return Poll::Ready(None);
            }
            if found {
                if !locked.waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
                    locked.waiting.push(cx.waker().clone());
                }
                return Poll::Pending;
            }
            locked.last += 1;
            let number = locked.last;
            locked.held.push((number, blocks.clone(), false));
            Poll::Ready(Some(BlockGuard { lock: self, number, releases: true }))
        })
        .await
    }
}

impl Drop for BlockGuard<'_> {
    fn drop(&mut self) {
        let waiting = {
            let mut locked = self.lock.0.lock();
            let at = locked.held.iter().position(|(number, _, _)| *number == self.number);
            match at {
                Some(at) if self.releases => drop(locked.held.swap_remove(at)),
                Some(at) => locked.held[at].2 = true,
                None => {}
            }
            std::mem::take(&mut locked.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }
}

impl std::fmt::Debug for FirstWrites {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FirstWrites").finish_non_exhaustive()
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use std::pin::pin;
    use std::task::Context;

    use super::*;

    #[test]
    fn overlapping_first_writes_exclude_each_other_and_a_dropped_copy_keeps_its_blocks() {
        let lock = FirstWrites::default();
        let mut cx = Context::from_waker(Waker::noop());
        let mut poll = |range: &Range<u64>| match pin!(lock.lock(range)).poll(&mut cx) {
            Poll::Ready(guard) => Ok(guard.is_some()),
            Poll::Pending => Err("waits"),
        };
        let mut again = Context::from_waker(Waker::noop());
        let Poll::Ready(Some(mut first)) = pin!(lock.lock(&(2..5))).poll(&mut again) else {
            panic!("it is free")
        };
        assert_eq!(poll(&(4..6)), Err("waits"));
        assert_eq!(poll(&(5..6)), Ok(true));
        first.releases = false;
        drop(first);
        assert_eq!(poll(&(4..6)), Ok(false));
        assert_eq!(poll(&(0..2)), Ok(true));
    }
}
