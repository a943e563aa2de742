//! Opening an image: its cluster, its lock, its size. All of it blocks, and runs on a thread of its own, so that a cluster
//! that does not answer delays the caller for a limited time.
//!
//! # Invariants
//! - The address of this client is recorded before the lock is taken (`owner_record.rs`).
//! - A lock is broken only if the record has its owner's address. That of any other client is left alone, whether that client
//!   lives or not: it may be on a host that is only cut off.

use std::ffi::CString;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use ebb_block::SECTOR;
use ebb_io::clock;
use ebb_sandbox::threads;

use crate::clusters::{self, Cluster};
use crate::encryption;
use crate::ffi::{FEATURE_EXCLUSIVE_LOCK, FEATURE_FAST_DIFF, Librbd};
use crate::figures::ClusterFigures;
use crate::handles::{ImageHandle, PoolHandle};
use crate::options::{RbdCall, RbdError, RbdOptions};
use crate::owner_record::{OwnerRecord, RecordError};

/// How long an image may take to be opened.
const OPEN_LIMIT: Duration = Duration::from_secs(30);

/// How long an opening waits for the same image, if this process is closing it.
const CLOSING_LIMIT: Duration = Duration::from_secs(5);

/// The identities of the images that are being closed.
static CLOSING: Mutex<Vec<String>> = Mutex::new(Vec::new());
static CLOSED: Condvar = Condvar::new();

/// An image that is being closed.
pub(crate) struct ClosingImage(String);

impl ClosingImage {
    pub(crate) fn begin(key: &str) -> ClosingImage {
        CLOSING.lock().unwrap_or_else(PoisonError::into_inner).push(key.to_owned());
        ClosingImage(key.to_owned())
    }

    /// Waits until none of these is being closed, for a limited time: a cluster that does not answer lets none be closed.
    fn wait(which: impl Fn(&str) -> bool) {
        let closing = CLOSING.lock().unwrap_or_else(PoisonError::into_inner);
        let some = |keys: &mut Vec<String>| keys.iter().any(|key| which(key));
        let waited = CLOSED.wait_timeout_while(closing, CLOSING_LIMIT, some);
        drop(waited);
    }
}

impl Drop for ClosingImage {
    fn drop(&mut self) {
        let mut closing = CLOSING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = closing.iter().position(|key| *key == self.0) {
            closing.swap_remove(at);
        }
        drop(closing);
        CLOSED.notify_all();
    }
}

/// Waits until the images that were dropped are closed, for five seconds at most: a process that ends before leaves their
/// locks and watches to the cluster, which keeps them for half a minute.
pub fn wait_for_closed_images() {
    ClosingImage::wait(|_| true);
}

/// An image that was opened, with its lock if it is written.
pub(crate) struct OpenRbdImage {
    pub(crate) image: Arc<ImageHandle>,
    pub(crate) record: Option<OwnerRecord>,
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) figures: Arc<ClusterFigures>,
    /// Its identity.
    pub(crate) key: String,
    pub(crate) size: u64,
    /// The bytes of its header, by which an encrypted image is larger than its size.
    pub(crate) header: u64,
    pub(crate) object_size: u64,
    /// Extents are known without asking the OSDs.
    pub(crate) fast_diff: bool,
    /// Set when the header of the image has changed.
    pub(crate) changed: Arc<AtomicBool>,
    /// What the operator should know.
    pub(crate) notes: Vec<String>,
}

/// The images that are being opened, each by one thread.
static OPENING: Mutex<Vec<RbdOptions>> = Mutex::new(Vec::new());
static OPENED: Condvar = Condvar::new();

/// An image that is being opened.
struct OpeningImage(RbdOptions);

impl OpeningImage {
    /// Waits until no other thread opens the image, at most until `end`: a cluster that does not answer keeps that thread, and
    /// each further attempt would add one. `None`: the other one still waits.
    fn begin(options: &RbdOptions, end: Instant) -> Option<OpeningImage> {
        let mut all = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
        while all.contains(options) {
            let left = end.checked_duration_since(clock::now()).filter(|left| !left.is_zero())?;
            all = OPENED.wait_timeout(all, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        all.push(options.clone());
        Some(OpeningImage(options.clone()))
    }
}

impl Drop for OpeningImage {
    fn drop(&mut self) {
        OPENING.lock().unwrap_or_else(PoisonError::into_inner).retain(|other| *other != self.0);
        OPENED.notify_all();
    }
}

/// Opens an image; blocks for at most [`OPEN_LIMIT`].
pub(crate) fn open(options: &RbdOptions) -> Result<OpenRbdImage, RbdError> {
    let figures = ClusterFigures::of(options.conf.as_deref(), options.id.as_deref());
    let opened = open_in_time(options, &figures);
    match &opened {
        Ok(open) => figures.reached(&open.cluster.fsid),
        Err(RbdError::Configuration { source, .. } | RbdError::Connect { source, .. }) => {
            figures.not_reached(source.to_string());
        }
        Err(RbdError::Silent { seconds, .. }) => {
            figures.not_reached(format!("no answer within {seconds} s"));
        }
        Err(_) => {}
    }
    opened
}

fn open_in_time(
    options: &RbdOptions,
    figures: &Arc<ClusterFigures>,
) -> Result<OpenRbdImage, RbdError> {
    let silent = || {
        let (image, seconds) = (options.image_spec(), OPEN_LIMIT.as_secs());
        RbdError::Silent { image, seconds }
    };
    let end = clock::now() + OPEN_LIMIT;
    let opening = OpeningImage::begin(options, end).ok_or_else(silent)?;
    let (sender, receiver) = mpsc::sync_channel(1);
    let on_thread = (options.clone(), figures.clone());
    let builder = std::thread::Builder::new().name("rbd-open".to_owned());
    threads::spawn(builder, move || {
        // An image that was opened too late is closed here.
        let _ = sender.send(open_now(&on_thread.0, &on_thread.1));
        drop(opening);
    })
    .map_err(RbdError::Thread)?;
    let left = end.saturating_duration_since(clock::now());
    receiver.recv_timeout(left).unwrap_or_else(|_| Err(silent()))
}

fn name(what: &'static str, text: &str) -> Result<CString, RbdError> {
    CString::new(text).map_err(|_| RbdError::Name { what })
}

/// The error of a call on something that may be missing.
fn failed(options: &RbdOptions, what: &'static str) -> impl FnOnce(RbdCall) -> RbdError {
    let image = options.image_spec();
    move |source| match source.code() {
        libc::ENOENT => RbdError::Missing { image, what },
        libc::EPERM | libc::EACCES => RbdError::Denied { image },
        _ => RbdError::Open { image, source },
    }
}

fn open_now(options: &RbdOptions, figures: &Arc<ClusterFigures>) -> Result<OpenRbdImage, RbdError> {
    let pool_name = name("the name of the pool", &options.pool)?;
    let namespace = name("the name of the namespace", &options.namespace)?;
    let image_name = name("the name of the image", &options.image)?;
    let snapshot = options.snapshot.as_deref().map(|text| name("the name of the snapshot", text));
    let snapshot = snapshot.transpose()?;
    let library = Librbd::get()?;
    let cluster = clusters::connect(library, options, figures)?;
    let pool = PoolHandle::new(&cluster.handle, &pool_name, &namespace);
    let pool = pool.map_err(failed(options, "pool"))?;
    let missing = if snapshot.is_some() { "image or snapshot" } else { "image" };
    let written = options.is_written();
    let image = ImageHandle::open(pool, &image_name, snapshot.as_deref(), written);
    let (mut image, watched) = image.map_err(failed(options, missing))?;
    let other = || failed(options, "image");
    let whole = image.info().map_err(other())?.size;
    if let Some(encryption) = &options.encryption {
        encryption::load(options, encryption, &image)?;
    }
    let info = image.info().map_err(other())?;
    check_size(options, info.size)?;
    let features = image.features().map_err(other())?;
    let mut key = format!(
        "RBD image {} of pool {} in cluster {}",
        image.id().map_err(other())?,
        image.pool().id(),
        cluster.fsid
    );
    if !options.namespace.is_empty() {
        key.push_str(&format!(", namespace {}", options.namespace));
    }
    let mut notes = Vec::new();
    let mut record = None;
    if written {
        if features & FEATURE_EXCLUSIVE_LOCK == 0 {
            return Err(RbdError::NoLockFeature { image: options.image_spec() });
        }
        ClosingImage::wait(|closing| closing == key);
        record = lock_record(options, &key)?;
        take_lock(options, &image, &cluster, record.as_mut(), &mut notes)?;
    }
    if let Some(snapshot) = &snapshot {
        let id = image.snapshot_id(snapshot).map_err(other())?;
        key.push_str(&format!(", snapshot {id}"));
        if !image.is_protected(snapshot).map_err(other())? {
            let text = options.image_spec();
            notes.push(format!(
                "the snapshot is not protected, and can be removed while it is served: `rbd snap protect {text}`"
            ));
        }
    }
    if !watched {
        let what = if snapshot.is_some() { "the removal of the snapshot" } else { "a new size" };
        notes.push(format!(
            "{what} will not be noticed: the user may not watch the image, give it the capabilities `profile rbd`"
        ));
    }
    let changed = Arc::new(AtomicBool::new(false));
    if watched && let Err(error) = image.watch(changed.clone()) {
        notes.push(format!("changes of the image by other clients will not be noticed: {error}"));
    }
    // With the lock: nothing else changes it now.
    let size = image.size().map_err(other())?;
    check_size(options, size)?;
    Ok(OpenRbdImage {
        image: Arc::new(image),
        record,
        cluster,
        figures: figures.clone(),
        key,
        size,
        header: whole.saturating_sub(info.size),
        object_size: info.object_size.max(SECTOR),
        fast_diff: features & FEATURE_FAST_DIFF != 0,
        changed,
        notes,
    })
}

/// Refuses a size that a disk cannot have.
fn check_size(options: &RbdOptions, size: u64) -> Result<(), RbdError> {
    if size == 0 || !size.is_multiple_of(SECTOR) || i64::try_from(size).is_err() {
        return Err(RbdError::Size { image: options.image_spec(), size });
    }
    Ok(())
}

fn lock_record(options: &RbdOptions, key: &str) -> Result<Option<OwnerRecord>, RbdError> {
    let Some(folder) = &options.records else { return Ok(None) };
    let image = options.image_spec();
    match OwnerRecord::lock(folder, key) {
        Ok(record) => Ok(Some(record)),
        Err(RecordError::InUse(path)) => {
            Err(RbdError::InUse { image, record: path.display().to_string() })
        }
        Err(RecordError::Io(path, source)) => {
            Err(RbdError::Record { image, record: path.display().to_string(), source })
        }
    }
}

/// Takes the exclusive lock, if no other client has it. See the module.
fn take_lock(
    options: &RbdOptions,
    image: &ImageHandle,
    cluster: &Cluster,
    mut record: Option<&mut OwnerRecord>,
    notes: &mut Vec<String>,
) -> Result<(), RbdError> {
    let other = || failed(options, "image");
    let spec = options.image_spec();
    for owner in image.lock_owners().map_err(other())? {
        let ours = record.as_ref().is_some_and(|record| record.has(&owner));
        // An image of this process that is still being closed has the address of one of its own handles.
        if !ours || clusters::is_own_address(&owner) {
            return Err(RbdError::Locked { image: spec, owner });
        }
        let address = name("the address of an owner", &owner)?;
        match image.break_lock(&address) {
            // It is gone already.
            Err(error) if error.code() == libc::ENOENT => {}
            result => result.map_err(other())?,
        }
        notes.push(format!("the lock of an ebbd of this host that has ended, {owner}, was broken"));
    }
    let unusable = |record: &OwnerRecord, source| {
        let (image, record) = (options.image_spec(), record.path().display().to_string());
        RbdError::Record { image, record, source }
    };
    if let Some(record) = &mut record {
        record.add(&cluster.client.address).map_err(|source| unusable(record, source))?;
    }
    match image.acquire_lock() {
        Err(error) if error.code() == libc::EROFS => {
            let owner = image.lock_owners().map_err(other())?.pop();
            let owner = owner.unwrap_or_else(|| "an unknown address".to_owned());
            return Err(RbdError::Locked { image: spec, owner });
        }
        result => result.map_err(other())?,
    }
    if !image.has_lock().map_err(other())? {
        return Err(RbdError::Locked { image: spec, owner: "an unknown address".to_owned() });
    }
    if let Some(record) = record {
        record.keep_only(&cluster.client.address).map_err(|source| unusable(record, source))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_at_a_time_opens_an_image() {
        let options = |image: &str| RbdOptions::new("rbd", image);
        let now = clock::now();
        let first = OpeningImage::begin(&options("a"), now);
        assert!(first.is_some());
        assert!(OpeningImage::begin(&options("a"), now).is_none(), "it is being opened");
        let other = OpeningImage::begin(&options("b"), now);
        assert!(other.is_some(), "another image does not wait");
        let waits = std::thread::spawn(move || {
            OpeningImage::begin(&options("a"), now + Duration::from_secs(60)).is_some()
        });
        drop(first);
        assert!(waits.join().unwrap());
    }
}
