//! Handles of librados and librbd as values: a cluster, and an image of it. All calls block, except those that submit a
//! request.
//!
//! # Invariants
//! - A handle is released once, when its value is dropped, and an image before its cluster. Releasing blocks: it is done on
//!   threads that may.
//! - librados and librbd are safe to call from several threads, so the handles may be shared.
//! - What the library writes into memory of ours is bounded by the length that it is given.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ebb_block::Operation;
use ebb_io::Buf;

use crate::ffi::{self, EncryptionLoad, ImageInfo, Librbd, LuksOptions, Opaque};
use crate::options::RbdCall;

/// The longest identity of a cluster or an image, bytes.
const ID_BYTES: usize = 128;
/// The most owners of a lock that are listed.
const OWNERS: usize = 8;
/// The most extents of one list.
const DIFF_EXTENTS: usize = 1 << 16;

/// A connection to a cluster.
pub(crate) struct ClusterHandle {
    library: &'static Librbd,
    raw: Opaque,
}

// SAFETY: librados locks what its threads and callers share.
unsafe impl Send for ClusterHandle {}
// SAFETY: as above.
unsafe impl Sync for ClusterHandle {}

impl ClusterHandle {
    /// A handle that is configured and not connected.
    pub(crate) fn new(
        library: &'static Librbd,
        id: Option<&CStr>,
        conf: Option<&Path>,
        settings: &[(&CStr, CString)],
    ) -> Result<ClusterHandle, RbdCall> {
        let mut raw = ptr::null_mut();
        let id = id.map_or(ptr::null(), CStr::as_ptr);
        // SAFETY: a place for the handle, and a string that ends with a zero byte, or none.
        let created = unsafe { (library.rados_create)(&raw mut raw, id) };
        RbdCall::check("rados_create", created)?;
        let cluster = ClusterHandle { library, raw };
        let conf = conf.map(|path| c_string(&path.to_string_lossy()));
        let path = conf.as_ref().map_or(ptr::null(), |path| path.as_ptr());
        // SAFETY: a handle, and a string as above.
        let read = unsafe { (library.rados_conf_read_file)(raw, path) };
        RbdCall::check("rados_conf_read_file", read)?;
        for (name, value) in settings {
            // SAFETY: a handle, and two strings.
            let set = unsafe { (library.rados_conf_set)(raw, name.as_ptr(), value.as_ptr()) };
            RbdCall::check("rados_conf_set", set)?;
        }
        Ok(cluster)
    }

    pub(crate) fn connect(&self) -> Result<(), RbdCall> {
        // SAFETY: a handle that was configured.
        RbdCall::check("rados_connect", unsafe { (self.library.rados_connect)(self.raw) })?;
        Ok(())
    }

    /// The address by which the cluster knows this client, and a blocklist names it.
    pub(crate) fn address(&self) -> Result<String, RbdCall> {
        let mut text: *mut c_char = ptr::null_mut();
        // SAFETY: a handle that is connected, and a place for the text.
        let got = unsafe { (self.library.rados_getaddrs)(self.raw, &raw mut text) };
        RbdCall::check("rados_getaddrs", got)?;
        if text.is_null() {
            return Err(RbdCall::failed("rados_getaddrs", libc::EIO));
        }
        // SAFETY: a string of the library, which it made for us.
        let address = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        // SAFETY: as above, freed once.
        unsafe { (self.library.rados_buffer_free)(text) };
        Ok(address)
    }

    /// The identity of the cluster.
    pub(crate) fn fsid(&self) -> Result<String, RbdCall> {
        let mut text = [0; ID_BYTES];
        // SAFETY: a handle that is connected, and a buffer with its length.
        let got =
            unsafe { (self.library.rados_cluster_fsid)(self.raw, text.as_mut_ptr(), text.len()) };
        RbdCall::check("rados_cluster_fsid", got)?;
        Ok(text_of(&text))
    }
}

impl Drop for ClusterHandle {
    fn drop(&mut self) {
        // SAFETY: a handle, released once; its pools were released before.
        unsafe { (self.library.rados_shutdown)(self.raw) };
    }
}

/// A text with a zero byte after it. Names with zero bytes are refused before.
pub(crate) fn c_string(text: &str) -> CString {
    CString::new(text).unwrap_or_default()
}

/// The text in a buffer, up to its zero byte.
fn text_of(buffer: &[c_char]) -> String {
    let bytes = buffer.iter().take_while(|byte| **byte != 0);
    let bytes: Vec<u8> = bytes.map(|byte| byte.to_ne_bytes()[0]).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A pool, with a namespace of it.
pub(crate) struct PoolHandle {
    library: &'static Librbd,
    raw: Opaque,
    _cluster: Arc<ClusterHandle>,
}

// SAFETY: as for the cluster.
unsafe impl Send for PoolHandle {}
// SAFETY: as for the cluster.
unsafe impl Sync for PoolHandle {}

impl PoolHandle {
    pub(crate) fn new(
        cluster: &Arc<ClusterHandle>,
        pool: &CStr,
        namespace: &CStr,
    ) -> Result<PoolHandle, RbdCall> {
        let library = cluster.library;
        let mut raw = ptr::null_mut();
        // SAFETY: a handle that is connected, a string, and a place for the handle.
        let made =
            unsafe { (library.rados_ioctx_create)(cluster.raw, pool.as_ptr(), &raw mut raw) };
        RbdCall::check("rados_ioctx_create", made)?;
        let handle = PoolHandle { library, raw, _cluster: cluster.clone() };
        // Requests to a cluster or pool that is full fail with ENOSPC then. Else they would wait.
        // SAFETY: a handle.
        unsafe { (library.rados_set_pool_full_try)(raw) };
        if !namespace.is_empty() {
            // SAFETY: a handle and a string.
            unsafe { (library.rados_ioctx_set_namespace)(raw, namespace.as_ptr()) };
        }
        Ok(handle)
    }

    /// The number of the pool.
    pub(crate) fn id(&self) -> i64 {
        // SAFETY: a handle.
        unsafe { (self.library.rados_ioctx_get_id)(self.raw) }
    }
}

impl Drop for PoolHandle {
    fn drop(&mut self) {
        // SAFETY: a handle, released once; its images were closed before.
        unsafe { (self.library.rados_ioctx_destroy)(self.raw) };
    }
}

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RbdRequest {
    /// Fills the buffer.
    Read(u64),
    /// Writes the buffer.
    Write(u64),
    /// Waits for the writes before it.
    Flush,
    /// Frees a range.
    Discard(u64, u64),
    /// Writes zeroes to a range; `true`: keeps its space.
    Zeroes(u64, u64, bool),
}

impl RbdRequest {
    /// What it is counted as.
    pub(crate) fn operation(self) -> Operation {
        match self {
            RbdRequest::Read(_) => Operation::Read,
            RbdRequest::Write(_) => Operation::Write,
            RbdRequest::Flush => Operation::Flush,
            RbdRequest::Discard(..) => Operation::Discard,
            RbdRequest::Zeroes(..) => Operation::WriteZeroes,
        }
    }
}

/// An open image.
pub(crate) struct ImageHandle {
    pub(crate) library: &'static Librbd,
    raw: Opaque,
    /// The number of the watch, and what its callback sets.
    watch: Option<(u64, Arc<AtomicBool>)>,
    // Last, so that it is released last.
    pool: PoolHandle,
}

// SAFETY: librbd locks what its threads and callers share.
unsafe impl Send for ImageHandle {}
// SAFETY: as above.
unsafe impl Sync for ImageHandle {}

/// Notes that the image has changed. It runs on a thread of librbd, which must not be used for other calls.
unsafe extern "C" fn header_changed(changed: *mut c_void) {
    // SAFETY: the flag lives until the watch has ended.
    unsafe { &*changed.cast::<AtomicBool>() }.store(true, Ordering::Release);
    CHANGES.fetch_add(1, Ordering::Release);
}

/// How often an image of this process has changed.
static CHANGES: AtomicU64 = AtomicU64::new(0);

/// How often an open image was changed by any client, its size or its snapshots: where this is as before, none has a new
/// size.
pub fn rbd_changes() -> u64 {
    CHANGES.load(Ordering::Acquire)
}

impl ImageHandle {
    /// Opens an image as one that may be written, also if it will only be read: only then does librbd watch its header, and
    /// notice that a snapshot was removed, or a new size. A user who may not do that reads it without (the second value).
    pub(crate) fn open(
        pool: PoolHandle,
        name: &CStr,
        snapshot: Option<&CStr>,
        written: bool,
    ) -> Result<(ImageHandle, bool), RbdCall> {
        let library = pool.library;
        let mut raw = ptr::null_mut();
        let snapshot = snapshot.map_or(ptr::null(), CStr::as_ptr);
        // SAFETY: a pool, a string, a place for the handle, and a string or none.
        let opened = unsafe { (library.rbd_open)(pool.raw, name.as_ptr(), &raw mut raw, snapshot) };
        let denied = [-libc::EPERM, -libc::EACCES, -libc::EROFS].contains(&opened);
        if written || !denied {
            RbdCall::check("rbd_open", opened)?;
            return Ok((ImageHandle { library, raw, watch: None, pool }, true));
        }
        // SAFETY: as above.
        let opened = unsafe {
            (library.rbd_open_read_only)(pool.raw, name.as_ptr(), &raw mut raw, snapshot)
        };
        RbdCall::check("rbd_open_read_only", opened)?;
        Ok((ImageHandle { library, raw, watch: None, pool }, false))
    }

    /// Whether a snapshot is protected: then it cannot be removed.
    pub(crate) fn is_protected(&self, snapshot: &CStr) -> Result<bool, RbdCall> {
        let mut protected = 0;
        let (library, raw) = (self.library, self.raw);
        // SAFETY: a handle, a string, and a place for the answer.
        let got =
            unsafe { (library.rbd_snap_is_protected)(raw, snapshot.as_ptr(), &raw mut protected) };
        RbdCall::check("rbd_snap_is_protected", got)?;
        Ok(protected != 0)
    }

    pub(crate) fn pool(&self) -> &PoolHandle {
        &self.pool
    }

    /// Sets `changed` from now on when the header of the image changes, as with a resize.
    pub(crate) fn watch(&mut self, changed: Arc<AtomicBool>) -> Result<(), RbdCall> {
        let mut number = 0;
        let flag = Arc::as_ptr(&changed).cast_mut().cast();
        let (library, raw) = (self.library, self.raw);
        // SAFETY: a handle, a place for the number; the flag is kept until the watch has ended.
        let set = unsafe { (library.rbd_update_watch)(raw, &raw mut number, header_changed, flag) };
        RbdCall::check("rbd_update_watch", set)?;
        self.watch = Some((number, changed));
        Ok(())
    }

    pub(crate) fn info(&self) -> Result<ImageInfo, RbdCall> {
        let mut info = ImageInfo::empty();
        let bytes = size_of::<ImageInfo>();
        // SAFETY: a handle, and a structure with its size.
        let got = unsafe { (self.library.rbd_stat)(self.raw, &raw mut info, bytes) };
        RbdCall::check("rbd_stat", got)?;
        Ok(info)
    }

    /// The number that `call` returns.
    fn number(
        &self,
        name: &'static str,
        call: unsafe extern "C" fn(Opaque, *mut u64) -> c_int,
    ) -> Result<u64, RbdCall> {
        let mut number = 0;
        // SAFETY: a handle, and a place for the number.
        RbdCall::check(name, unsafe { call(self.raw, &raw mut number) })?;
        Ok(number)
    }

    /// The size; of an encrypted image without its header, which `rbd_get_size` of Ceph 16 includes.
    pub(crate) fn size(&self) -> Result<u64, RbdCall> {
        Ok(self.info()?.size)
    }

    pub(crate) fn features(&self) -> Result<u64, RbdCall> {
        self.number("rbd_get_features", self.library.rbd_get_features)
    }

    pub(crate) fn flags(&self) -> Result<u64, RbdCall> {
        self.number("rbd_get_flags", self.library.rbd_get_flags)
    }

    /// The identity of the image in its pool, which stays if it is renamed.
    pub(crate) fn id(&self) -> Result<String, RbdCall> {
        let mut text = [0; ID_BYTES];
        // SAFETY: a handle, and a buffer with its length.
        let got = unsafe { (self.library.rbd_get_id)(self.raw, text.as_mut_ptr(), text.len()) };
        RbdCall::check("rbd_get_id", got)?;
        Ok(text_of(&text))
    }

    pub(crate) fn snapshot_id(&self, snapshot: &CStr) -> Result<u64, RbdCall> {
        let mut number = 0;
        let (library, raw) = (self.library, self.raw);
        // SAFETY: a handle, a string, and a place for the number.
        let got = unsafe { (library.rbd_snap_get_id)(raw, snapshot.as_ptr(), &raw mut number) };
        RbdCall::check("rbd_snap_get_id", got)?;
        Ok(number)
    }

    /// Decrypts what is read from now on, and encrypts what is written.
    pub(crate) fn load_encryption(
        &self,
        load: EncryptionLoad,
        format: c_int,
        passphrase: &[u8],
    ) -> Result<(), RbdCall> {
        let mut options = LuksOptions {
            algorithm: 1,
            passphrase: passphrase.as_ptr().cast(),
            passphrase_bytes: passphrase.len(),
        };
        let (options, bytes) = (&raw mut options, size_of::<LuksOptions>());
        // SAFETY: a handle, and options with their size and a passphrase with its length, which librbd copies.
        RbdCall::check("rbd_encryption_load", unsafe { load(self.raw, format, options, bytes) })?;
        Ok(())
    }

    /// Takes the lock, and does not give it up when another client asks for it.
    pub(crate) fn acquire_lock(&self) -> Result<(), RbdCall> {
        // SAFETY: a handle.
        let got = unsafe { (self.library.rbd_lock_acquire)(self.raw, ffi::LOCK_EXCLUSIVE) };
        RbdCall::check("rbd_lock_acquire", got)?;
        Ok(())
    }

    pub(crate) fn release_lock(&self) -> Result<(), RbdCall> {
        // SAFETY: a handle.
        let released = unsafe { (self.library.rbd_lock_release)(self.raw) };
        RbdCall::check("rbd_lock_release", released)?;
        Ok(())
    }

    /// Whether this handle has the lock.
    pub(crate) fn has_lock(&self) -> Result<bool, RbdCall> {
        let mut owner = 0;
        // SAFETY: a handle, and a place for the answer.
        let got = unsafe { (self.library.rbd_is_exclusive_lock_owner)(self.raw, &raw mut owner) };
        RbdCall::check("rbd_is_exclusive_lock_owner", got)?;
        Ok(owner != 0)
    }

    /// The addresses of the clients that have the lock.
    pub(crate) fn lock_owners(&self) -> Result<Vec<String>, RbdCall> {
        let mut mode = 0;
        let mut owners: [*mut c_char; OWNERS] = [ptr::null_mut(); OWNERS];
        let mut count = OWNERS;
        let (library, raw) = (self.library, self.raw);
        let (mode, list, number) = (&raw mut mode, owners.as_mut_ptr(), &raw mut count);
        // SAFETY: a handle, and a list with its length, which becomes the number of owners.
        let got = unsafe { (library.rbd_lock_get_owners)(raw, mode, list, number) };
        match RbdCall::check("rbd_lock_get_owners", got) {
            Err(error) if error.code() == libc::ENOENT => return Ok(Vec::new()),
            result => result?,
        };
        let listed = owners.iter().take(count).filter(|text| !text.is_null());
        // SAFETY: strings of the library, which it made for us.
        let texts = listed.map(|text| unsafe { CStr::from_ptr(*text) });
        let texts = texts.map(|text| text.to_string_lossy().into_owned()).collect();
        // SAFETY: as above, freed once.
        unsafe { (library.rbd_lock_get_owners_cleanup)(owners.as_mut_ptr(), count.min(OWNERS)) };
        Ok(texts)
    }

    /// Breaks the lock of the client at `owner`, and puts that on the blocklist.
    pub(crate) fn break_lock(&self, owner: &CStr) -> Result<(), RbdCall> {
        let (library, raw) = (self.library, self.raw);
        // SAFETY: a handle and a string.
        let broken = unsafe { (library.rbd_lock_break)(raw, ffi::LOCK_EXCLUSIVE, owner.as_ptr()) };
        RbdCall::check("rbd_lock_break", broken)?;
        Ok(())
    }

    /// Resizes the image; `header` are the bytes by which an encrypted one is larger than its size.
    pub(crate) fn resize(&self, size: u64, header: u64) -> Result<(), RbdCall> {
        let resize = |to: u64| {
            // SAFETY: a handle.
            RbdCall::check("rbd_resize", unsafe { (self.library.rbd_resize)(self.raw, to) })
        };
        // Librbd of Ceph 16 takes the size with the header, later ones without it. The larger one first, so that no data is
        // cut off.
        let whole =
            size.checked_add(header).ok_or_else(|| RbdCall::failed("rbd_resize", libc::EFBIG))?;
        resize(whole)?;
        if header > 0 && self.size()? == whole {
            resize(size)?;
        }
        Ok(())
    }

    /// The ranges of `offset..offset + length` that have data, or had it in a parent, in whole objects; `None` if there are
    /// too many.
    pub(crate) fn data(
        &self,
        offset: u64,
        length: u64,
    ) -> Result<Option<Vec<(u64, u64)>>, RbdCall> {
        let mut found: Vec<(u64, u64)> = Vec::new();
        let argument = (&raw mut found).cast::<c_void>();
        let (library, raw, from) = (self.library, self.raw, ptr::null());
        let (parents, whole) = (1, 1);
        // SAFETY: a handle; the callback gets the list, which is used by nothing else meanwhile.
        let done = unsafe {
            (library.rbd_diff_iterate2)(
                raw, from, offset, length, parents, whole, note_data, argument,
            )
        };
        if done == -libc::E2BIG {
            return Ok(None);
        }
        RbdCall::check("rbd_diff_iterate2", done)?;
        found.sort_unstable();
        Ok(Some(found))
    }

    /// Submits a request, whose `completion` says when it has completed.
    ///
    /// # Safety
    /// The memory of `buf` must stay where it is, and be used by nothing else, until the completion was called.
    pub(crate) unsafe fn submit(
        &self,
        request: RbdRequest,
        buf: Option<&mut Buf>,
        completion: Opaque,
    ) -> c_int {
        let (library, raw) = (self.library, self.raw);
        let (memory, bytes): (*mut c_char, usize) = match buf {
            Some(buf) => (buf.as_mut_ptr().cast(), buf.len()),
            None => (ptr::null_mut(), 0),
        };
        match request {
            // SAFETY: a handle, memory of that length that the caller keeps, and a completion.
            RbdRequest::Read(at) => unsafe {
                (library.rbd_aio_read)(raw, at, bytes, memory, completion)
            },
            // SAFETY: as above.
            RbdRequest::Write(at) => unsafe {
                (library.rbd_aio_write)(raw, at, bytes, memory, completion)
            },
            // SAFETY: a handle and a completion.
            RbdRequest::Flush => unsafe { (library.rbd_aio_flush)(raw, completion) },
            // SAFETY: as above.
            RbdRequest::Discard(at, length) => unsafe {
                (library.rbd_aio_discard)(raw, at, length, completion)
            },
            RbdRequest::Zeroes(at, length, keeps_space) => {
                let length = usize::try_from(length).unwrap_or(usize::MAX);
                let flags = if keeps_space { ffi::ZEROES_THICK } else { 0 };
                // SAFETY: as above.
                unsafe { (library.rbd_aio_write_zeroes)(raw, at, length, completion, flags, 0) }
            }
        }
    }
}

/// Adds a range with data to the list at `found`.
unsafe extern "C" fn note_data(
    offset: u64,
    length: usize,
    exists: c_int,
    found: *mut c_void,
) -> c_int {
    // SAFETY: `data` passes its own list, and waits.
    let found = unsafe { &mut *found.cast::<Vec<(u64, u64)>>() };
    if exists == 0 {
        return 0;
    }
    if found.len() >= DIFF_EXTENTS {
        return -libc::E2BIG;
    }
    found.push((offset, length as u64));
    0
}

impl Drop for ImageHandle {
    fn drop(&mut self) {
        if let Some((number, _)) = &self.watch {
            // SAFETY: a handle and a watch of it. After this its callback is not called.
            unsafe { (self.library.rbd_update_unwatch)(self.raw, *number) };
        }
        // SAFETY: a handle, released once, after all calls on it.
        unsafe { (self.library.rbd_close)(self.raw) };
    }
}
