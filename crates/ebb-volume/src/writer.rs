//! Writers of a volume: only one may write at a time, either one guest or the clients of the NBD server, unless
//! the operator states that the writers are prepared for each other (`shared`).
//!
//! NBD has no identity of a client, and one client may have several connections and reconnect before its old
//! ones have ended: all NBD clients together are one writer. Two file systems that are mounted from one disk
//! and do not know of each other destroy it; Xen's own `block` script prevents that as well.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A writer, or a client that requests to be one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Writer {
    /// Its name for the operator, such as `Xen guest 3 (disk 51728)`.
    pub name: Arc<str>,
    /// Writers of one group do not conflict.
    pub group: Option<Arc<str>>,
}

impl Writer {
    /// The clients of the NBD server.
    pub fn nbd() -> Writer {
        Writer { name: "an NBD client".into(), group: Some("nbd".into()) }
    }
}

/// The volume has another writer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "volume `{volume}` is written to by {by}: detach it there, or set shared = true for the volume if all \
             writers are prepared for each other, as cluster file systems are"
)]
pub struct WriterConflict {
    /// The volume.
    pub volume: Arc<str>,
    /// Its present writer.
    pub by: Arc<str>,
}

#[derive(Debug, Default)]
struct WriterList {
    next: u64,
    writers: Vec<(u64, Writer)>,
}

/// The writers of a volume.
#[derive(Debug, Default)]
pub(crate) struct Writers(Mutex<WriterList>);

impl Writers {
    fn lock(&self) -> MutexGuard<'_, WriterList> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The name of a writer that `writer` conflicts with.
    pub(crate) fn conflict(&self, writer: &Writer) -> Option<Arc<str>> {
        self.lock().conflict(writer)
    }

    pub(crate) fn claim(self: &Arc<Self>, writer: Writer, share: bool) -> Result<Lease, Arc<str>> {
        let mut held = self.lock();
        if let Some(by) = held.conflict(&writer).filter(|_| !share) {
            return Err(by);
        }
        held.next += 1;
        let number = held.next;
        held.writers.push((number, writer));
        Ok(Lease { writers: self.clone(), number })
    }
}

impl WriterList {
    fn conflict(&self, writer: &Writer) -> Option<Arc<str>> {
        let shares = |other: &Writer| other.group.is_some() && other.group == writer.group;
        let other = self.writers.iter().find(|(_, other)| !shares(other));
        other.map(|(_, other)| other.name.clone())
    }
}

/// The right to write to a volume, until it is dropped. It does not keep the volume open.
pub struct Lease {
    writers: Arc<Writers>,
    number: u64,
}

impl Lease {
    pub(crate) fn is_of(&self, writers: &Arc<Writers>) -> bool {
        Arc::ptr_eq(&self.writers, writers)
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lease").field(&self.number).finish()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.writers.lock().writers.retain(|(number, _)| *number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Volume, VolumeOptions};
    use ebb_store::{NullStore, Store};

    fn volume(shared: bool) -> Arc<Volume> {
        let options = VolumeOptions { shared, ..VolumeOptions::default() };
        Volume::new("disk", Store::Null(NullStore::new(1 << 20)), options)
    }

    fn guest(name: &str, machine: Option<&str>) -> Writer {
        Writer { name: name.into(), group: machine.map(Arc::from) }
    }

    #[test]
    fn one_writer_at_a_time_and_nbd_clients_are_one() {
        let volume = volume(false);
        let first = volume.claim_writer(Writer::nbd(), false).unwrap();
        let second = volume.claim_writer(Writer::nbd(), false).unwrap();
        let refused = volume.claim_writer(guest("guest 1", None), false).unwrap_err();
        assert_eq!(&*refused.by, "an NBD client");
        drop(first);
        assert!(volume.claim_writer(guest("guest 1", None), false).is_err());
        drop(second);
        let lease = volume.claim_writer(guest("guest 1", None), false).unwrap();
        assert_eq!(&*volume.claim_writer(Writer::nbd(), false).unwrap_err().by, "guest 1");
        assert!(volume.writer_conflict(&Writer::nbd()).is_some());
        assert!(volume.claim_writer(guest("guest 1", None), false).is_err(), "no group of its own");
        drop(lease);
        assert!(volume.writer_conflict(&Writer::nbd()).is_none());
    }

    #[test]
    fn a_guest_that_is_migrated_has_its_disk_twice_for_a_while() {
        let volume = volume(false);
        let old = volume.claim_writer(guest("guest 1", Some("m")), false).unwrap();
        let _new = volume.claim_writer(guest("guest 2", Some("m")), false).unwrap();
        assert!(volume.claim_writer(guest("guest 3", Some("n")), false).is_err());
        drop(old);
        assert_eq!(&*volume.claim_writer(Writer::nbd(), false).unwrap_err().by, "guest 2");
    }

    #[test]
    fn shared_volumes_and_forced_claims_allow_several_writers() {
        let shared = volume(true);
        let _leases = ["a", "b"].map(|name| shared.claim_writer(guest(name, None), false).unwrap());
        let volume = volume(false);
        let _first = volume.claim_writer(guest("a", None), false).unwrap();
        let forced = volume.claim_writer(guest("b", None), true).unwrap();
        drop(forced);
        assert!(volume.claim_writer(guest("b", None), false).is_err());
    }
}
