//! What the requests of one image share, on all workers: whether it is online, and its figures.
//!
//! # Invariants
//! - An image that went offline stays offline: its lock or its client's right to write is lost, so that another client may
//!   have written to it. No request is sent after that, until it is opened anew.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ebb_block::Operation;
use ebb_io::clock;

use crate::figures::{ClusterFigures, ImageFigures};
use crate::lock_check::LockCheck;
use crate::lock_watch::WatchedImage;
use crate::wakeups;

/// Why an image is offline.
pub(crate) const FENCED: &str = "the cluster has fenced this client (it is on the blocklist)";
pub(crate) const LOCK_LOST: &str = "its exclusive lock is lost";
pub(crate) const REMOVED: &str = "the image or the snapshot was removed";
/// How long a request has to wait before the lock is checked.
const CHECK_AFTER: Duration = Duration::from_millis(400);

/// The most calls on helper threads, of an image and of all images of a cluster: those on a cluster that does not answer hang, and the helper
/// threads of the process are limited, too.
const IMAGE_CALLS: usize = 2;
const CLUSTER_CALLS: usize = 64;

/// See [`RbdShared::take_call_place`].
#[derive(Debug)]
pub(crate) struct CallPlace(Arc<RbdShared>);

impl Drop for CallPlace {
    fn drop(&mut self) {
        self.0.calls.fetch_sub(1, Ordering::Relaxed);
        self.0.cluster.calls.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The state of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RbdState {
    /// The image, as `rbd` writes it.
    pub image: String,
    /// Why it is offline, if it is.
    pub offline: Option<String>,
    /// Requests in flight.
    pub in_flight: u64,
    /// The last error of a request.
    pub last_error: Option<String>,
    /// Seconds since it was opened or went offline.
    pub since_seconds: u64,
    /// For how many seconds the cluster has not answered a request in flight; 0 if it answers.
    pub silent_seconds: u64,
}

/// Why a request is not waited for any longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitEnd {
    /// The store was aborted.
    Aborted,
    /// The image is offline.
    Offline,
    /// Its time has passed.
    Late,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct RbdShared {
    image: String,
    /// Whether it has the lock: only then does a refused write mean that the lock is lost.
    written: bool,
    timeout: Duration,
    aborted: AtomicBool,
    offline: AtomicBool,
    /// Calls on helper threads.
    calls: AtomicUsize,
    figures: Arc<ImageFigures>,
    cluster: Arc<ClusterFigures>,
    /// Checks the lock of an image that is written, from the opening on.
    lock: OnceLock<LockCheck>,
    texts: Mutex<RbdTexts>,
}

#[derive(Debug)]
struct RbdTexts {
    offline: Option<String>,
    since: Instant,
}

impl Drop for RbdShared {
    fn drop(&mut self) {
        self.cluster.remove_image(&self.figures);
    }
}

impl WatchedImage for RbdShared {
    fn begin_check(self: Arc<Self>) {
        if let Some(lock) = self.lock.get().filter(|_| !self.is_offline() && !self.is_aborted()) {
            let store = self.clone();
            lock.begin(move || store.go_offline(LOCK_LOST));
        }
    }
}

impl RbdShared {
    pub(crate) fn new(
        cluster: Arc<ClusterFigures>,
        image: String,
        written: bool,
        timeout: Duration,
    ) -> RbdShared {
        RbdShared {
            image,
            written,
            timeout,
            aborted: AtomicBool::new(false),
            offline: AtomicBool::new(false),
            calls: AtomicUsize::new(0),
            figures: cluster.add_image(),
            cluster,
            lock: OnceLock::new(),
            texts: Mutex::new(RbdTexts { offline: None, since: clock::now() }),
        }
    }

    fn texts(&self) -> MutexGuard<'_, RbdTexts> {
        // Texts and times: they are valid also after a panic of another thread.
        self.texts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn image(&self) -> &str {
        &self.image
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The image has the lock, which is checked from now on.
    pub(crate) fn guard(&self, lock: LockCheck) {
        let _ = self.lock.set(lock);
    }

    /// Has the lock checked, on another thread, if a request that was sent at `since` has waited for long: librbd may
    /// wait for ever for a lock that it has lost.
    pub(crate) fn check_lock(self: &Arc<RbdShared>, since: Instant) {
        if let Some(lock) = self.lock.get().filter(|_| clock::since(since) >= CHECK_AFTER)
            && !self.is_offline()
        {
            let store = self.clone();
            lock.begin(move || store.go_offline(LOCK_LOST));
        }
    }

    /// Takes one of the places for calls that block, of the image and of its cluster, until it is dropped; `None` if all are
    /// taken, as by calls that hang.
    pub(crate) fn take_call_place(self: &Arc<RbdShared>) -> Option<CallPlace> {
        let take = |count: &AtomicUsize, most| {
            let more = |now| (now < most).then_some(now + 1);
            count.try_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
        };
        if !take(&self.calls, IMAGE_CALLS) {
            return None;
        }
        if !take(&self.cluster.calls, CLUSTER_CALLS) {
            self.calls.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(CallPlace(self.clone()))
    }

    /// Whether a request that was sent at `since` is not to be waited for any longer.
    pub(crate) fn end_of(&self, since: Instant) -> Option<WaitEnd> {
        if self.is_aborted() {
            Some(WaitEnd::Aborted)
        } else if self.is_offline() {
            Some(WaitEnd::Offline)
        } else {
            self.is_late(since).then_some(WaitEnd::Late)
        }
    }

    /// The figures of its requests.
    pub(crate) fn figures(&self) -> &ImageFigures {
        &self.figures
    }

    /// A request was answered. See [`ImageFigures::answered`].
    pub(crate) fn note_answer(
        &self,
        (operation, since, slow): (Operation, Instant, bool),
        result: isize,
    ) {
        self.figures.answered(operation, since, slow);
        self.note_result(result);
    }

    /// The result of a request: some errors take the image offline.
    pub(crate) fn note_result(&self, result: isize) {
        if result >= 0 {
            return;
        }
        let code = i32::try_from(result.saturating_neg()).unwrap_or(libc::EIO);
        match code {
            libc::ESHUTDOWN => self.go_offline(FENCED),
            libc::EROFS if self.written => self.go_offline(LOCK_LOST),
            // Objects that do not exist are read as zeroes.
            libc::ENOENT => self.go_offline(REMOVED),
            _ => {}
        }
        let error = std::io::Error::from_raw_os_error(code).to_string();
        self.figures.failed(error);
    }

    /// Takes the image offline, for good.
    pub(crate) fn go_offline(&self, why: &str) {
        let mut texts = self.texts();
        if texts.offline.is_none() {
            texts.offline = Some(why.to_owned());
            texts.since = clock::now();
            self.figures.went_offline(why == FENCED);
        }
        drop(texts);
        self.offline.store(true, Ordering::Release);
    }

    pub(crate) fn is_offline(&self) -> bool {
        if self.offline.load(Ordering::Acquire) {
            return true;
        }
        let fenced = self.lock.get().is_some_and(LockCheck::is_fenced);
        if fenced {
            self.go_offline(FENCED);
        }
        fenced
    }

    pub(crate) fn offline_reason(&self) -> String {
        self.texts().offline.clone().unwrap_or_default()
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    /// Ends all requests: those in flight stay with librbd.
    pub(crate) fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        wakeups::end_requests();
    }

    /// Whether the time of a request that was sent at `since` has passed.
    pub(crate) fn is_late(&self, since: Instant) -> bool {
        !self.timeout.is_zero() && clock::since(since) >= self.timeout
    }

    pub(crate) fn state(&self) -> RbdState {
        // The fence of another image of the handle is noticed here.
        let _ = self.is_offline();
        let last_error = self.figures.last_error().clone().map(|(_, text)| text);
        let texts = self.texts();
        RbdState {
            image: self.image.clone(),
            offline: texts.offline.clone(),
            in_flight: self.figures.in_flight(),
            last_error: texts.offline.clone().or(last_error),
            since_seconds: clock::since(texts.since).as_secs(),
            silent_seconds: self.figures.silent_seconds(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_lost_lock_or_a_fence_takes_an_image_offline() {
        let cluster = ClusterFigures::of(None, Some("state"));
        let new =
            |written| RbdShared::new(cluster.clone(), "rbd/a".into(), written, Duration::ZERO);
        let image = new(true);
        for code in [libc::EIO, libc::ENOSPC, libc::EINVAL] {
            image.note_result(-isize::try_from(code).unwrap());
        }
        assert!(!image.is_offline() && image.state().last_error.is_some());
        image.note_result(-isize::try_from(libc::EROFS).unwrap());
        let state = image.state();
        assert!(
            image.is_offline() && state.offline.unwrap().contains("lock"),
            "{:?}",
            state.last_error
        );
        // The first reason stays.
        image.note_result(-isize::try_from(libc::ESHUTDOWN).unwrap());
        assert!(image.offline_reason().contains("lock"));
        let reader = new(false);
        reader.note_result(-isize::try_from(libc::EROFS).unwrap());
        assert!(!reader.is_offline());
        reader.note_result(-isize::try_from(libc::ESHUTDOWN).unwrap());
        assert!(reader.is_offline());
    }
}
