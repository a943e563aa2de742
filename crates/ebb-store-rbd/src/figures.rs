//! The figures of images, and of the clusters that they are in: what the operator sees of them.
//!
//! # Invariants
//! - A request changes the figures of its image only. Those of a cluster are sums that are made when they are read.
//! - Counts of a cluster do not decrease: those of an image that is closed are added to the cluster's own.
//! - A cluster is listed while it has images or handles, and for [`KEPT`] after the last attempt to open an image. Of those
//!   that have neither, at most [`CLUSTERS`] are.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_block::{Histogram, LatencySnapshot, Operation};
use ebb_io::{WorkerSlot, clock};

/// From when on a request is slow.
const SLOW: Duration = Duration::from_secs(1);
/// How long a cluster without images stays listed.
const KEPT: Duration = Duration::from_secs(600);
/// The most clusters that are listed.
const CLUSTERS: usize = 64;

/// What images do, in the order of [`ImageFigures::times`].
const OPERATIONS: [Operation; 5] = {
    use Operation::{Discard, Flush, Read, Write, WriteZeroes};
    [Read, Write, Flush, Discard, WriteZeroes]
};

/// The state of a cluster, as volumes name it: by `ceph.conf` and user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RbdClusterState {
    /// `ceph.conf`; `None`: where librados looks for it.
    pub conf: Option<PathBuf>,
    /// The user, without `client.`; `None`: `admin`.
    pub id: Option<String>,
    /// Its identity; empty until it was reached.
    pub fsid: String,
    /// Cluster handles, those that are fenced included.
    pub connections: u64,
    /// Open images.
    pub images: u64,
    /// Of these, those that are offline.
    pub offline: u64,
    /// Whether it has fenced a handle or an open image of this process.
    pub fenced: bool,
    /// Whether the last attempt to connect has failed.
    pub unreachable: bool,
    /// Requests in flight.
    pub in_flight: u64,
    /// Of these, those that have waited for more than a second.
    pub slow: u64,
    /// The longest time for which it has not answered an image with requests in flight, seconds; 0 if it answers.
    pub silent_seconds: u64,
    /// Requests so far that took more than a second.
    pub slow_requests: u64,
    /// Requests so far that failed, or whose time has passed.
    pub errors: u64,
    /// The last error of a request or of an attempt to connect.
    pub last_error: Option<String>,
    /// How long requests took, of those operations that there were.
    pub times: Vec<(Operation, LatencySnapshot)>,
}

/// Counts that only grow.
#[derive(Debug, Default)]
struct RequestCounts {
    slow: u64,
    errors: u64,
    last_error: Option<(Instant, String)>,
    times: [LatencySnapshot; OPERATIONS.len()],
}

impl RequestCounts {
    fn add(&mut self, image: &ImageFigures) {
        self.slow += image.slow_requests.load(Ordering::Relaxed);
        self.errors += image.errors.load(Ordering::Relaxed);
        for (sum, histogram) in self.times.iter_mut().zip(&image.times) {
            sum.add(&LatencySnapshot::of([histogram].into_iter()));
        }
        self.note_error(image.last_error().clone());
    }

    fn note_error(&mut self, error: Option<(Instant, String)>) {
        let newer = |(at, _): &(Instant, String)| {
            self.last_error.as_ref().is_none_or(|(known, _)| known < at)
        };
        if let Some(error) = error.filter(newer) {
            self.last_error = Some(error);
        }
    }
}

/// The figures of an image, which the workers of its requests write.
#[derive(Debug)]
pub(crate) struct ImageFigures {
    opened: Instant,
    in_flight: AtomicU64,
    /// When a request was last answered, or sent while none was in flight: milliseconds after `opened`.
    answered: AtomicU64,
    /// Of the requests in flight those that are known to be slow.
    slow: AtomicU64,
    slow_requests: AtomicU64,
    errors: AtomicU64,
    last_error: Mutex<Option<(Instant, String)>>,
    offline: AtomicBool,
    fenced: AtomicBool,
    /// Its store was dropped; requests may still be in flight.
    closed: AtomicBool,
    /// Written by all workers, in the shared slot.
    times: [Histogram; OPERATIONS.len()],
}

impl ImageFigures {
    fn new() -> ImageFigures {
        ImageFigures {
            opened: clock::now(),
            in_flight: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            slow: AtomicU64::new(0),
            slow_requests: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            last_error: Mutex::new(None),
            offline: AtomicBool::new(false),
            fenced: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            times: Default::default(),
        }
    }

    fn since_opened(&self, now: Instant) -> u64 {
        let time = now.saturating_duration_since(self.opened);
        u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
    }

    /// A request is sent.
    pub(crate) fn begin(&self) {
        if self.in_flight.fetch_add(1, Ordering::Relaxed) == 0 {
            self.answered.store(self.since_opened(clock::now()), Ordering::Relaxed);
        }
    }

    /// It was not sent, after all.
    pub(crate) fn refused(&self) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }

    /// A request that was sent at `since` was answered; `slow`: it was counted as slow.
    pub(crate) fn answered(&self, operation: Operation, since: Instant, slow: bool) {
        let now = clock::now();
        let time = now.saturating_duration_since(since);
        self.answered.store(self.since_opened(now), Ordering::Relaxed);
        if let Some(at) = OPERATIONS.iter().position(|known| *known == operation) {
            self.times[at].record(WorkerSlot::SHARED, time);
        }
        if slow {
            self.slow.fetch_sub(1, Ordering::Relaxed);
        } else if time >= SLOW {
            self.slow_requests.fetch_add(1, Ordering::Relaxed);
        }
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether a request in flight that was sent at `since` is slow: then it is counted, and the answer says so.
    pub(crate) fn count_slow(&self, since: Instant) -> bool {
        let slow = clock::since(since) >= SLOW;
        if slow {
            self.slow.fetch_add(1, Ordering::Relaxed);
            self.slow_requests.fetch_add(1, Ordering::Relaxed);
        }
        slow
    }

    /// A request has failed.
    #[cold]
    pub(crate) fn failed(&self, error: String) {
        self.errors.fetch_add(1, Ordering::Relaxed);
        *self.last_error() = Some((clock::now(), error));
    }

    /// The image went offline, because of a fence or for another reason.
    pub(crate) fn went_offline(&self, fenced: bool) {
        self.fenced.fetch_or(fenced, Ordering::Relaxed);
        self.offline.store(true, Ordering::Relaxed);
    }

    /// Its store is dropped.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    /// The last error of a request, and when it was.
    pub(crate) fn last_error(&self) -> MutexGuard<'_, Option<(Instant, String)>> {
        // A text and a time: valid also after a panic of another thread.
        self.last_error.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// For how many seconds the cluster has not answered a request in flight; 0 if it answers.
    pub(crate) fn silent_seconds(&self) -> u64 {
        if self.in_flight() == 0 {
            return 0;
        }
        let answered = self.answered.load(Ordering::Relaxed);
        self.since_opened(clock::now()).saturating_sub(answered) / 1000
    }
}

/// The figures of a cluster. See the module.
#[derive(Debug)]
pub(crate) struct ClusterFigures {
    conf: Option<PathBuf>,
    id: Option<String>,
    connections: AtomicU64,
    /// Of these, those that the cluster has fenced.
    fenced: AtomicU64,
    /// Calls of its images on helper threads.
    pub(crate) calls: AtomicUsize,
    parts: Mutex<ClusterParts>,
}

#[derive(Debug)]
struct ClusterParts {
    fsid: String,
    images: Vec<Arc<ImageFigures>>,
    /// Those of images that were closed.
    closed: RequestCounts,
    /// Why the last attempt to connect has failed.
    failure: Option<(Instant, String)>,
    /// When an image was last opened, or that was tried.
    used: Instant,
}

static ALL: Mutex<Vec<Arc<ClusterFigures>>> = Mutex::new(Vec::new());

impl ClusterFigures {
    fn new(conf: Option<&Path>, id: Option<&str>) -> ClusterFigures {
        let parts = ClusterParts {
            fsid: String::new(),
            images: Vec::new(),
            closed: RequestCounts::default(),
            failure: None,
            used: clock::now(),
        };
        ClusterFigures {
            conf: conf.map(Path::to_owned),
            id: id.map(str::to_owned),
            connections: AtomicU64::new(0),
            fenced: AtomicU64::new(0),
            calls: AtomicUsize::new(0),
            parts: Mutex::new(parts),
        }
    }

    /// Those of a cluster and user, for an attempt to open an image.
    pub(crate) fn of(conf: Option<&Path>, id: Option<&str>) -> Arc<ClusterFigures> {
        // A list of pointers: valid also after a panic of another thread.
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |known: &&Arc<ClusterFigures>| {
            known.conf.as_deref() == conf && known.id.as_deref() == id
        };
        if let Some(known) = all.iter().find(same) {
            known.parts().used = clock::now();
            return known.clone();
        }
        forget_unused(&mut all);
        if all.len() >= CLUSTERS
            && let Some(at) = all.iter().position(|known| !known.is_used())
        {
            all.remove(at);
        }
        let new = Arc::new(ClusterFigures::new(conf, id));
        all.push(new.clone());
        new
    }

    fn parts(&self) -> MutexGuard<'_, ClusterParts> {
        // Counts are added one after the other: a panic between two leaves each of them valid.
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_used(self: &Arc<ClusterFigures>) -> bool {
        Arc::strong_count(self) > 1
    }

    /// An image was opened.
    pub(crate) fn add_image(&self) -> Arc<ImageFigures> {
        let image = Arc::new(ImageFigures::new());
        self.parts().images.push(image.clone());
        image
    }

    /// No request of the image is in flight any more, and its store was dropped.
    pub(crate) fn remove_image(&self, image: &Arc<ImageFigures>) {
        let mut parts = self.parts();
        let before = parts.images.len();
        parts.images.retain(|known| !Arc::ptr_eq(known, image));
        if parts.images.len() < before {
            parts.closed.add(image);
        }
    }

    /// An image was opened, or could have been: the cluster `fsid` answers.
    pub(crate) fn reached(&self, fsid: &str) {
        let mut parts = self.parts();
        fsid.clone_into(&mut parts.fsid);
        parts.failure = None;
    }

    /// An attempt to connect has failed, or was not answered.
    pub(crate) fn not_reached(&self, why: String) {
        self.parts().failure = Some((clock::now(), why));
    }

    fn state(&self) -> RbdClusterState {
        let parts = self.parts();
        let mut counts = RequestCounts {
            slow: parts.closed.slow,
            errors: parts.closed.errors,
            last_error: parts.closed.last_error.clone(),
            times: parts.closed.times.clone(),
        };
        let mut state = RbdClusterState {
            conf: self.conf.clone(),
            id: self.id.clone(),
            fsid: parts.fsid.clone(),
            connections: self.connections.load(Ordering::Relaxed),
            fenced: self.fenced.load(Ordering::Relaxed) > 0,
            unreachable: parts.failure.is_some(),
            ..RbdClusterState::default()
        };
        for image in &parts.images {
            counts.add(image);
            state.in_flight += image.in_flight();
            state.slow += image.slow.load(Ordering::Relaxed);
            if !image.closed.load(Ordering::Relaxed) {
                state.images += 1;
                state.offline += u64::from(image.offline.load(Ordering::Relaxed));
                state.fenced |= image.fenced.load(Ordering::Relaxed);
                state.silent_seconds = state.silent_seconds.max(image.silent_seconds());
            }
        }
        counts.note_error(parts.failure.clone());
        state.slow_requests = counts.slow;
        state.errors = counts.errors;
        state.last_error = counts.last_error.map(|(_, text)| text);
        let times = OPERATIONS.into_iter().zip(counts.times);
        state.times = times.filter(|(_, times)| times.count() > 0).collect();
        state
    }
}

fn forget_unused(all: &mut Vec<Arc<ClusterFigures>>) {
    all.retain(|known| known.is_used() || clock::since(known.parts().used) < KEPT);
}

/// The clusters that volumes of this process use, or have tried to.
pub fn rbd_clusters() -> Vec<RbdClusterState> {
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    forget_unused(&mut all);
    let listed = all.clone();
    drop(all);
    listed.iter().map(|cluster| cluster.state()).collect()
}

/// A cluster handle, as its cluster counts it.
#[derive(Debug)]
pub(crate) struct CountedConnection {
    cluster: Arc<ClusterFigures>,
    fenced: AtomicBool,
}

impl CountedConnection {
    pub(crate) fn new(cluster: Arc<ClusterFigures>) -> CountedConnection {
        cluster.connections.fetch_add(1, Ordering::Relaxed);
        CountedConnection { cluster, fenced: AtomicBool::new(false) }
    }

    /// The cluster has fenced it.
    pub(crate) fn fence(&self) {
        if !self.fenced.swap(true, Ordering::AcqRel) {
            self.cluster.fenced.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether the cluster has fenced it.
    pub(crate) fn is_fenced(&self) -> bool {
        self.fenced.load(Ordering::Acquire)
    }
}

impl Drop for CountedConnection {
    fn drop(&mut self) {
        self.cluster.connections.fetch_sub(1, Ordering::Relaxed);
        if *self.fenced.get_mut() {
            self.cluster.fenced.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(state: &RbdClusterState, operation: Operation) -> u64 {
        let times = state.times.iter().find(|(known, _)| *known == operation);
        times.map_or(0, |(_, times)| times.count())
    }

    #[test]
    fn a_cluster_has_the_sums_of_its_images_and_keeps_those_of_closed_ones() {
        let cluster = ClusterFigures::new(None, Some("me"));
        let [one, other] = [(); 2].map(|()| cluster.add_image());
        let now = clock::now();
        let earlier = now.checked_sub(SLOW).unwrap();
        for image in [&one, &one, &other, &other] {
            image.begin();
        }
        one.answered(Operation::Read, now, false);
        assert!(one.count_slow(earlier) && !one.count_slow(clock::now()));
        other.answered(Operation::Write, earlier, false);
        other.failed("no space".into());
        let state = cluster.state();
        assert_eq!((state.images, state.in_flight, state.slow, state.slow_requests), (2, 2, 1, 2));
        assert_eq!((state.errors, state.last_error.as_deref()), (1, Some("no space")));
        assert_eq!([Operation::Read, Operation::Write].map(|one| count(&state, one)), [1, 1]);
        one.answered(Operation::Flush, earlier, true);
        other.refused();
        one.went_offline(true);
        let state = cluster.state();
        assert_eq!((state.in_flight, state.slow, state.slow_requests), (0, 0, 2));
        assert!(state.fenced && state.offline == 1 && state.images == 2);
        for image in [&one, &other, &other] {
            image.close();
            cluster.remove_image(image);
        }
        let state = cluster.state();
        assert!(!state.fenced && state.offline == 0 && state.images == 0);
        assert_eq!((state.errors, state.slow_requests, count(&state, Operation::Flush)), (1, 2, 1));
        assert_eq!(state.last_error.as_deref(), Some("no space"));
    }

    #[test]
    fn a_cluster_is_unreachable_until_it_is_reached() {
        let cluster = ClusterFigures::new(None, None);
        cluster.not_reached("timed out".into());
        let state = cluster.state();
        assert!(state.unreachable && state.last_error.as_deref() == Some("timed out"));
        cluster.reached("2d9d");
        let state = cluster.state();
        assert!(!state.unreachable && state.fsid == "2d9d");
    }

    #[test]
    fn a_fenced_handle_counts_until_it_is_dropped() {
        let cluster = Arc::new(ClusterFigures::new(None, None));
        let [fenced, other] = [(); 2].map(|()| CountedConnection::new(cluster.clone()));
        fenced.fence();
        fenced.fence();
        assert!(fenced.is_fenced() && !other.is_fenced());
        assert!(cluster.state().fenced && cluster.state().connections == 2);
        drop(fenced);
        assert!(!cluster.state().fenced && cluster.state().connections == 1);
    }

    #[test]
    fn clusters_without_images_are_listed_to_a_limit() {
        let used = ClusterFigures::of(Some(Path::new("/used")), None);
        for number in 0..200 {
            ClusterFigures::of(Some(Path::new("/unused")), Some(&number.to_string()));
        }
        let again = ClusterFigures::of(Some(Path::new("/used")), None);
        assert!(Arc::ptr_eq(&used, &again) && rbd_clusters().len() <= CLUSTERS);
    }
}
