//! The identity of a store, by which a volume is recognised after a restart of the daemon, and that of the device it
//! is on.

use std::fmt;
use std::hash::{BuildHasher, Hasher};

/// Identifies a store: two identities are equal if the stores hold the same data. Writing and
/// resizing do not change it, and another process that opens the store gets the same one. A store
/// in memory has a new identity in each process, since its data is lost with the process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// What is compared.
    pub key: String,
    /// Where it is, for the operator. Not compared: a file may be renamed.
    pub place: String,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.place.is_empty() {
            return f.write_str(&self.key);
        }
        write!(f, "{} ({})", self.place, self.key)
    }
}

impl Identity {
    /// For a store that has no name other than its key.
    pub fn of_key(key: String) -> Identity {
        Identity { key, place: String::new() }
    }
}

/// What a store's writes are limited by. Volumes on the same device share its limit of dirty data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceIdentity {
    /// A disk, or the device of a file system, by its number (`dev_t`).
    Disk(u64),
    /// A server, by its address.
    Server(String),
}

/// A number that no other store has, in this process or another.
pub fn nonce() -> u64 {
    std::hash::RandomState::new().build_hasher().finish()
}
