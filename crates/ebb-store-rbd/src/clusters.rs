//! The cluster handles of the process, which images of the same cluster and user share.
//!
//! librados starts about sixteen threads for each handle, and some 370 KiB are used for each further image on one. A handle
//! is one client of the cluster: a blocklist entry of its address takes all of its images offline. Then a new one is made for
//! images that are opened later.

use std::ffi::CString;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use ebb_io::clock;

use crate::ffi::Librbd;
use crate::figures::{ClusterFigures, CountedConnection};
use crate::handles::{ClusterHandle, c_string};
use crate::lock_watch::WatchedImages;
use crate::options::{RbdCall, RbdError, RbdOptions};

/// What two images must have in common to share a handle.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ClusterKey {
    conf: Option<PathBuf>,
    id: Option<String>,
    keyring: Option<PathBuf>,
}

/// A connected handle. Who drops the last reference waits until the handle is released; only then its client is dropped.
pub(crate) struct Cluster {
    pub(crate) handle: Arc<ClusterHandle>,
    pub(crate) fsid: String,
    pub(crate) client: Arc<ClusterClient>,
}

/// What is known of the client that a handle is, without the handle.
#[derive(Debug)]
pub(crate) struct ClusterClient {
    /// The address by which locks and blocklists name it.
    pub(crate) address: String,
    /// An image on it went offline: it is not used for further ones.
    retired: AtomicBool,
    /// Whether the cluster has put it on the blocklist: then all of its images are offline.
    pub(crate) connection: CountedConnection,
    /// The images on it that are written.
    pub(crate) watched: Arc<WatchedImages>,
}

impl ClusterClient {
    /// Keeps it from being used for further images.
    pub(crate) fn retire(&self) {
        self.retired.store(true, Ordering::Release);
    }

    /// The cluster does not let it write any more.
    pub(crate) fn fence(&self) {
        self.retire();
        self.connection.fence();
    }
}

/// The clients of this process. One that is being released is among them until that is done.
static OWN_CLIENTS: Mutex<Vec<Weak<ClusterClient>>> = Mutex::new(Vec::new());

/// Whether this is a client of this process that the cluster has not fenced: breaking its lock would end its other images.
pub(crate) fn is_own_address(address: &str) -> bool {
    let all = OWN_CLIENTS.lock().unwrap_or_else(PoisonError::into_inner);
    let found = all.iter().filter_map(Weak::upgrade).find(|client| client.address == address);
    found.is_some_and(|client| !client.connection.is_fenced())
}

static CLUSTERS: Mutex<Vec<(ClusterKey, Weak<Cluster>)>> = Mutex::new(Vec::new());

/// A cluster and user to which handles are made: one at a time, so that images that are opened side by side share it.
struct Connector {
    key: ClusterKey,
    /// When the last attempt failed, and how.
    failure: Mutex<Option<(Instant, &'static str, i32)>>,
}

static CONNECTORS: Mutex<Vec<Arc<Connector>>> = Mutex::new(Vec::new());

/// That of a cluster and user. Clusters do not wait for each other: one may not answer.
fn connector(key: &ClusterKey) -> Arc<Connector> {
    let mut all = CONNECTORS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = all.iter().find(|known| known.key == *key) {
        return known.clone();
    }
    // Those that are in use have a reference elsewhere.
    all.retain(|known| Arc::strong_count(known) > 1);
    let new = Arc::new(Connector { key: key.clone(), failure: Mutex::new(None) });
    all.push(new.clone());
    new
}

/// The handle with the fewest images, or a new one if fewer exist than `options` allow.
fn existing(key: &ClusterKey, most: u32) -> Option<Arc<Cluster>> {
    let mut clusters = CLUSTERS.lock().unwrap_or_else(PoisonError::into_inner);
    clusters.retain(|(_, cluster)| cluster.strong_count() > 0);
    let known = clusters.iter().filter(|(other, _)| other == key);
    let mut known: Vec<_> = known.filter_map(|(_, cluster)| cluster.upgrade()).collect();
    // Dropping a last reference blocks.
    drop(clusters);
    known.retain(|cluster| !cluster.client.retired.load(Ordering::Acquire));
    if known.len() < usize::try_from(most).unwrap_or(1) {
        return None;
    }
    known.into_iter().min_by_key(Arc::strong_count)
}

/// A connected handle for an image.
///
/// # Errors
/// [`RbdError::Configuration`], [`RbdError::Connect`].
pub(crate) fn connect(
    library: &'static Librbd,
    options: &RbdOptions,
    figures: &Arc<ClusterFigures>,
) -> Result<Arc<Cluster>, RbdError> {
    let (conf, id, keyring) = (options.conf.clone(), options.id.clone(), options.keyring.clone());
    let key = ClusterKey { conf, id, keyring };
    let (connector, began) = (connector(&key), clock::now());
    let mut failure = connector.failure.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(cluster) = existing(&key, options.connections) {
        return Ok(cluster);
    }
    let image = options.image_spec();
    let configuration = |source| RbdError::Configuration { image: image.clone(), source };
    // An attempt that failed while this one waited: many images of a cluster that does not answer wait once together.
    if let Some((_, call, code)) = failure.filter(|(at, ..)| *at >= began) {
        return Err(RbdError::Connect { image, source: RbdCall::failed(call, code) });
    }
    let mut unreachable = |source: RbdCall| {
        *failure = Some((clock::now(), source.call, source.code()));
        RbdError::Connect { image: image.clone(), source }
    };
    let mut settings = vec![
        // ebbd has the cache. Buffers belong to their request until it has completed, so that none is copied.
        (c"rbd_cache", CString::from(c"false")),
        (c"rbd_disable_zero_copy_writes", CString::from(c"false")),
        // A request that waits for a place among these blocks a thread of librbd, and with it other images. How much is in
        // flight is limited for each image (`left.rs`).
        (c"objecter_inflight_op_bytes", CString::from(c"4294967296")),
        (c"objecter_inflight_ops", CString::from(c"1048576")),
        // How long the monitors may take to answer when a handle connects, seconds.
        (c"client_mount_timeout", CString::from(c"10")),
        // What librados logs to standard error would be mixed with the log.
        (c"log_to_stderr", CString::from(c"false")),
        (c"err_to_stderr", CString::from(c"false")),
    ];
    if let Some(keyring) = &options.keyring {
        settings.push((c"keyring", c_string(&keyring.to_string_lossy())));
    }
    let id = options.id.as_deref().map(c_string);
    let handle = ClusterHandle::new(library, id.as_deref(), options.conf.as_deref(), &settings);
    let handle = handle.map_err(configuration)?;
    handle.connect().map_err(&mut unreachable)?;
    let address = handle.address().map_err(&mut unreachable)?;
    let fsid = handle.fsid().map_err(&mut unreachable)?;
    let client = Arc::new(ClusterClient {
        address,
        retired: AtomicBool::new(false),
        connection: CountedConnection::new(figures.clone()),
        watched: Arc::default(),
    });
    let mut own = OWN_CLIENTS.lock().unwrap_or_else(PoisonError::into_inner);
    own.retain(|client| client.strong_count() > 0);
    own.push(Arc::downgrade(&client));
    drop(own);
    let cluster = Arc::new(Cluster { handle: Arc::new(handle), fsid, client });
    let mut clusters = CLUSTERS.lock().unwrap_or_else(PoisonError::into_inner);
    clusters.push((key, Arc::downgrade(&cluster)));
    Ok(cluster)
}
