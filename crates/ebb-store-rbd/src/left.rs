//! What librbd still holds of requests that are not waited for any longer, and how much of an image's requests it is given
//! at a time.
//!
//! librbd keeps the buffer of a request until the cluster has answered, also when the time of the request has passed and
//! its client has had an error. That memory is no longer charged to the share of a volume.
//!
//! # Invariants
//! - Requests whose time has passed hold at most one part in [`LEFT_PART`] of the memory of all shares together. Where that is
//!   used up, further ones wait for the cluster, and stay charged to their volumes.
//! - A worker gives librbd at most [`WINDOW`] bytes of one image. Further requests wait for their turn, with their own time
//!   limit, so that an image with many requests delays those of others on the same cluster handle by no more than that.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ebb_io::{Budget, Shares};

use crate::state::RbdShared;

/// See the module.
const LEFT_PART: usize = 16;
const WINDOW: usize = 16 << 20;
/// What a request without data, or with little, counts as in a window, for each object it may change: with requests of this
/// size a window has 256 of them.
pub(crate) const REQUEST_COST: usize = 64 << 10;
/// From so many windows on, those without requests are removed before a new one is added.
const WINDOWS: usize = 64;

/// Bytes that all images together have left.
static LEFT: AtomicUsize = AtomicUsize::new(0);

/// Memory of a request that was left, until librbd is done with it.
#[derive(Debug)]
pub(crate) struct LeftMemory(usize);

impl LeftMemory {
    /// Counts `bytes` in any case: there is no future any more that could wait.
    pub(crate) fn of(bytes: usize) -> LeftMemory {
        LEFT.fetch_add(bytes, Ordering::Relaxed);
        LeftMemory(bytes)
    }

    /// Counts `bytes` if there is room for them.
    pub(crate) fn within(shares: &Shares, bytes: usize) -> Option<LeftMemory> {
        let left = LeftMemory::of(bytes);
        // If two threads do this at once, both may have to wait; they try again.
        let fits = LEFT.load(Ordering::Relaxed) <= shares.total() / LEFT_PART;
        fits.then_some(left)
    }
}

impl Drop for LeftMemory {
    fn drop(&mut self) {
        LEFT.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// The windows of a worker, by image.
#[derive(Default)]
pub(crate) struct Windows(RefCell<HashMap<usize, Weak<Budget>>>);

impl Windows {
    /// That of an image. It is the same as long as a request of the image has a part of it.
    pub(crate) fn of(&self, store: &Arc<RbdShared>) -> Rc<Budget> {
        let mut all = self.0.borrow_mut();
        let key = Arc::as_ptr(store).addr();
        if let Some(window) = all.get(&key).and_then(Weak::upgrade) {
            return window;
        }
        if all.len() >= WINDOWS {
            all.retain(|_, window| window.strong_count() > 0);
        }
        let window = Budget::new(WINDOW);
        all.insert(key, Rc::downgrade(&window));
        window
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::figures::ClusterFigures;

    #[test]
    fn what_is_left_is_bounded_and_free_again_when_librbd_is_done() {
        let shares = Shares::new(64 << 20);
        let most = shares.total() / LEFT_PART;
        let first = LeftMemory::within(&shares, most).unwrap();
        assert!(LeftMemory::within(&shares, 1).is_none());
        // A refused one counts nothing.
        assert_eq!(LEFT.load(Ordering::Relaxed), most);
        let gone = LeftMemory::of(most);
        drop(first);
        assert!(LeftMemory::within(&shares, 1).is_none());
        drop(gone);
        assert!(LeftMemory::within(&shares, most).is_some());
    }

    #[test]
    fn an_image_has_one_window_while_it_is_used() {
        let windows = Windows::default();
        let cluster = ClusterFigures::of(None, Some("left"));
        let new = || RbdShared::new(cluster.clone(), "rbd/a".into(), true, Duration::ZERO);
        let store = || Arc::new(new());
        let (one, other) = (store(), store());
        let part = windows.of(&one).try_take(WINDOW).unwrap();
        assert!(windows.of(&one).try_take(1).is_none());
        assert!(windows.of(&other).try_take(WINDOW).is_some());
        drop(part);
        assert!(windows.of(&one).try_take(1).is_some());
    }
}
