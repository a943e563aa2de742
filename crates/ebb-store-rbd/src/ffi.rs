//! librbd, opened when it is first needed: the functions that are used, as Ceph declares them.
//!
//! The program is not linked with librbd, so that it starts and runs where Ceph is not installed. One library is opened, and
//! stays open until the process ends: librbd's threads run its code. It brings librados with it, whose functions are found
//! through the same handle.
//!
//! # Invariants
//! - Each declaration is that of `librbd.h` and `librados.h` of Ceph 16 and later. A library that lacks one of the functions
//!   is refused as a whole, but for those that only some images need.

use std::ffi::{c_char, c_int, c_void};
use std::sync::{Mutex, PoisonError};

use dlopen2::raw::Library;

use crate::options::RbdError;

/// The name of the library, with the version of its binary interface.
const LIBRARY: &str = "librbd.so.1";

/// `rados_t`, `rados_ioctx_t`, `rbd_image_t` and `rbd_completion_t`: pointers to what only the library knows.
pub(crate) type Opaque = *mut c_void;
/// What librbd calls when a request has completed: the completion, and the argument that it was created with.
pub(crate) type CompletionCallback = unsafe extern "C" fn(Opaque, *mut c_void);
/// What librbd calls for each extent: first byte, bytes, whether there is data, and an argument. A negative result ends it.
pub(crate) type DiffCallback = unsafe extern "C" fn(u64, usize, c_int, *mut c_void) -> c_int;
/// What librbd calls when the header of an image changes.
pub(crate) type UpdateCallback = unsafe extern "C" fn(*mut c_void);

/// `RBD_LOCK_MODE_EXCLUSIVE`
pub(crate) const LOCK_EXCLUSIVE: c_int = 0;
/// `RBD_FEATURE_EXCLUSIVE_LOCK`
pub(crate) const FEATURE_EXCLUSIVE_LOCK: u64 = 1 << 2;
/// `RBD_FEATURE_FAST_DIFF`
pub(crate) const FEATURE_FAST_DIFF: u64 = 1 << 4;
/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`
pub(crate) const ZEROES_THICK: c_int = 1;

/// `rbd_image_info_t`
#[repr(C)]
pub(crate) struct ImageInfo {
    pub(crate) size: u64,
    pub(crate) object_size: u64,
    pub(crate) objects: u64,
    order: c_int,
    block_name_prefix: [c_char; 24],
    parent_pool: i64,
    parent_name: [c_char; 96],
}

impl ImageInfo {
    pub(crate) fn empty() -> ImageInfo {
        ImageInfo {
            size: 0,
            object_size: 0,
            objects: 0,
            order: 0,
            block_name_prefix: [0; 24],
            parent_pool: 0,
            parent_name: [0; 96],
        }
    }
}

/// `RBD_ENCRYPTION_FORMAT_LUKS1`
pub(crate) const FORMAT_LUKS1: c_int = 0;
/// `RBD_ENCRYPTION_FORMAT_LUKS2`
pub(crate) const FORMAT_LUKS2: c_int = 1;

/// `rbd_encryption_luks1_format_options_t`, and the same of LUKS2.
#[repr(C)]
pub(crate) struct LuksOptions {
    /// `RBD_ENCRYPTION_ALGORITHM_AES256`: not used where an encrypted image is opened.
    pub(crate) algorithm: c_int,
    pub(crate) passphrase: *const c_char,
    pub(crate) passphrase_bytes: usize,
}

/// `rbd_encryption_load`: an image, a format, its options and their size.
pub(crate) type EncryptionLoad =
    unsafe extern "C" fn(Opaque, c_int, *mut LuksOptions, usize) -> c_int;

/// The functions that a library may lack.
pub(crate) struct OptionalFunctions {
    /// Since Ceph 16.
    pub(crate) rbd_encryption_load: Option<EncryptionLoad>,
}

impl OptionalFunctions {
    fn of(library: &Library) -> OptionalFunctions {
        // SAFETY: the type is that of the function's declaration in Ceph's headers.
        let load = unsafe { library.symbol::<EncryptionLoad>("rbd_encryption_load") };
        OptionalFunctions { rbd_encryption_load: load.ok() }
    }
}

macro_rules! functions {
    ($($name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of the library.
        pub(crate) struct Librbd {
            pub(crate) optional: OptionalFunctions,
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Librbd {
            fn of(library: &Library) -> Result<Librbd, dlopen2::Error> {
                Ok(Librbd {
                    optional: OptionalFunctions::of(library),
                    $($name: {
                        // SAFETY: the type is that of the function's declaration in Ceph's headers.
                        unsafe { library.symbol(stringify!($name)) }?
                    },)*
                })
            }
        }
    };
}

functions! {
    rados_create(*mut Opaque, *const c_char) -> c_int;
    rados_conf_read_file(Opaque, *const c_char) -> c_int;
    rados_conf_set(Opaque, *const c_char, *const c_char) -> c_int;
    rados_connect(Opaque) -> c_int;
    rados_shutdown(Opaque);
    rados_cluster_fsid(Opaque, *mut c_char, usize) -> c_int;
    rados_getaddrs(Opaque, *mut *mut c_char) -> c_int;
    rados_buffer_free(*mut c_char);
    rados_ioctx_create(Opaque, *const c_char, *mut Opaque) -> c_int;
    rados_ioctx_destroy(Opaque);
    rados_ioctx_set_namespace(Opaque, *const c_char);
    rados_ioctx_get_id(Opaque) -> i64;
    rados_set_pool_full_try(Opaque);
    rbd_version(*mut c_int, *mut c_int, *mut c_int);
    rbd_open(Opaque, *const c_char, *mut Opaque, *const c_char) -> c_int;
    rbd_open_read_only(Opaque, *const c_char, *mut Opaque, *const c_char) -> c_int;
    rbd_close(Opaque) -> c_int;
    rbd_stat(Opaque, *mut ImageInfo, usize) -> c_int;
    rbd_get_id(Opaque, *mut c_char, usize) -> c_int;
    rbd_get_features(Opaque, *mut u64) -> c_int;
    rbd_get_flags(Opaque, *mut u64) -> c_int;
    rbd_snap_get_id(Opaque, *const c_char, *mut u64) -> c_int;
    rbd_snap_is_protected(Opaque, *const c_char, *mut c_int) -> c_int;
    rbd_lock_acquire(Opaque, c_int) -> c_int;
    rbd_lock_release(Opaque) -> c_int;
    rbd_lock_get_owners(Opaque, *mut c_int, *mut *mut c_char, *mut usize) -> c_int;
    rbd_lock_get_owners_cleanup(*mut *mut c_char, usize);
    rbd_lock_break(Opaque, c_int, *const c_char) -> c_int;
    rbd_is_exclusive_lock_owner(Opaque, *mut c_int) -> c_int;
    rbd_resize(Opaque, u64) -> c_int;
    rbd_update_watch(Opaque, *mut u64, UpdateCallback, *mut c_void) -> c_int;
    rbd_update_unwatch(Opaque, u64) -> c_int;
    rbd_diff_iterate2(Opaque, *const c_char, u64, u64, u8, u8, DiffCallback, *mut c_void) -> c_int;
    rbd_aio_create_completion(*mut c_void, CompletionCallback, *mut Opaque) -> c_int;
    rbd_aio_get_return_value(Opaque) -> isize;
    rbd_aio_release(Opaque);
    rbd_aio_read(Opaque, u64, usize, *mut c_char, Opaque) -> c_int;
    rbd_aio_write(Opaque, u64, usize, *const c_char, Opaque) -> c_int;
    rbd_aio_flush(Opaque, Opaque) -> c_int;
    rbd_aio_discard(Opaque, u64, u64, Opaque) -> c_int;
    rbd_aio_write_zeroes(Opaque, u64, usize, Opaque, c_int, c_int) -> c_int;
}

/// The library, once it was opened. A failure is not kept: it may be installed later.
static OPENED: Mutex<Option<&'static Librbd>> = Mutex::new(None);

impl Librbd {
    /// Opens the library, if that was not done before. Blocks for some ten milliseconds then.
    ///
    /// # Errors
    /// [`RbdError::Library`].
    pub(crate) fn get() -> Result<&'static Librbd, RbdError> {
        // Set as a whole, so that it is valid also after a panic of another thread.
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(library) = *opened {
            return Ok(library);
        }
        let flags = libc::RTLD_NOW | libc::RTLD_LOCAL;
        let library = Library::open_with_flags(LIBRARY, Some(flags));
        let library = library.map_err(|error| RbdError::Library { what: error.to_string() })?;
        let functions = Librbd::of(&library);
        let functions = functions.map_err(|error| RbdError::Library { what: error.to_string() })?;
        // Its threads run until the process ends.
        std::mem::forget(library);
        let functions: &'static Librbd = Box::leak(Box::new(functions));
        *opened = Some(functions);
        Ok(functions)
    }

    /// The version of its interface, such as 1.16.0.
    pub(crate) fn version(&self) -> String {
        let (mut major, mut minor, mut extra) = (0, 0, 0);
        // SAFETY: three places for numbers.
        unsafe { (self.rbd_version)(&raw mut major, &raw mut minor, &raw mut extra) };
        format!("{major}.{minor}.{extra}")
    }
}

/// What is known of the library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RbdLibrary {
    /// The version of its interface, such as 1.16.0.
    pub version: String,
    /// Whether it can open encrypted images.
    pub encryption: bool,
}

impl RbdLibrary {
    /// Opens the library. Blocks for some ten milliseconds.
    ///
    /// # Errors
    /// [`RbdError::Library`].
    pub fn find() -> Result<RbdLibrary, RbdError> {
        let library = Librbd::get()?;
        let encryption = library.optional.rbd_encryption_load.is_some();
        Ok(RbdLibrary { version: library.version(), encryption })
    }
}

/// Ends the process with this exit status if librbd was opened; else it returns. Exit handlers of its libraries destroy what
/// its threads use: a process that ran them while an image is open, or is being closed, would crash. What was printed must
/// have been flushed.
pub fn end_process_with_librbd(status: u8) {
    if OPENED.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
        // SAFETY: it runs nothing more of this process.
        unsafe { libc::_exit(i32::from(status)) }
    }
}
