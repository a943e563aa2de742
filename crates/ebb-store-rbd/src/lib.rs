//! Images of Ceph clusters (RBD) as stores.
//!
//! A thin layer over librbd, which is opened when the first image is ([`RbdStore::open`]): the program is not linked with it.
//!
//! # Guarantees
//! - A volume that is written has the exclusive lock of its image from the opening on, in the mode in which librbd does not
//!   hand it over when another client asks. An image that another client has locked is refused. Only the lock of a process of this host
//!   that has ended is broken, recognised by its recorded address (`owner_record.rs`).
//! - When the lock is lost, or the cluster has put this client on its blocklist, the image is offline: all requests fail with
//!   [`ErrorKind::Offline`](ebb_block::ErrorKind::Offline), and none is sent again.
//! - librbd's cache is off, unless the image itself turns one on: then a write is on the OSDs after a flush, as on a disk.
//! - A request that the cluster does not answer within [`RbdOptions::timeout`] fails. librbd still carries it out when the
//!   cluster answers again, before later requests for the same object; its buffer is kept until then.
//! - Snapshots and read-only volumes take no lock. One whose snapshot was removed is offline.
//!
//! # Times
//! | what | limit | where |
//! |---|---|---|
//! | connecting to the monitors | 10 s | `clusters.rs` |
//! | opening an image, with its lock | 30 s; 5 s of it for the same image, if it is being closed | `open.rs` |
//! | a request, its turn included; a call that blocks | [`RbdOptions::timeout`], 60 s by default | `requests.rs` |
//! | the lock of an image with a request in flight is checked | after 400 ms | `state.rs` |
//! | the lock of an idle image is checked | one image of a handle each 500 ms | `lock_watch.rs` |
//! | closing images at the end of the process | 5 s, for all together | `open.rs` |
//!
//! # Limits
//! - What librbd itself allocates is not part of the memory that ebbd manages.
//! - An image without the feature `exclusive-lock` is read-only here.
//! - Where librbd encrypts an image, all of it counts as data: versions of librbd differ in where they say that its holes are.

mod clusters;
mod completions;
mod encryption;
mod ffi;
mod figures;
mod handles;
mod left;
mod lock_check;
mod lock_watch;
mod open;
mod options;
mod owner_record;
mod requests;
mod state;
mod store;
mod wakeups;

pub use ffi::{RbdLibrary, end_process_with_librbd};
pub use figures::{RbdClusterState, rbd_clusters};
pub use handles::rbd_changes;
pub use open::wait_for_closed_images;
pub use options::{
    RBD_CONNECTIONS_MOST, RBD_TIMEOUT_DEFAULT, RbdCall, RbdEncryption, RbdEncryptionFormat,
    RbdError, RbdOptions,
};
pub use state::RbdState;
pub use store::RbdStore;
