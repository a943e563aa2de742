//! Who may open a volume: an [`AccessList`] is the value of the key `allow`, and a [`ClientIdentity`] is what a client is
//! known by. No I/O but the look-up of names of users, groups and hosts, and of a socket's peer.
//!
//! # Invariants
//! - Any text is either an entry or an error with a remedy; none panics. An entry has at most [`ENTRY_BYTES_MAX`] bytes, a
//!   list at most [`ENTRIES_MAX`] entries, so that a check of one client takes a bounded time.
//! - A client is admitted only if an entry matches it: what is not known of a client matches nothing.
//! - Names of users and groups are looked up when an entry is parsed, and never when a client is checked.

mod entry;
mod error;
mod identity;
mod names;
mod network;
mod pattern;
mod peer_address;
mod peer_groups;
mod socket_addresses;

use std::sync::Arc;

pub use entry::{AccessEntry, TlsIdentity};
pub use error::AccessError;
pub use identity::{ClientIdentity, SocketCredentials, XenGuest};
pub use names::{NameLookup, SystemNames};
pub use network::Network;
pub use peer_address::peer_address;
pub use peer_groups::peer_groups;
pub use socket_addresses::socket_addresses;

/// The longest entry, bytes.
pub const ENTRY_BYTES_MAX: usize = 512;
/// The most entries of a list.
pub const ENTRIES_MAX: usize = 1024;

/// The clients that may open a volume. Cheap to clone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessList(Arc<[AccessEntry]>);

impl AccessList {
    /// A list of these entries.
    ///
    /// # Errors
    /// If there are too many.
    pub fn new(entries: Vec<AccessEntry>) -> Result<AccessList, AccessError> {
        if entries.len() > ENTRIES_MAX {
            return Err(AccessError::TooMany { count: entries.len() });
        }
        Ok(AccessList(entries.into()))
    }

    /// The entries.
    pub fn entries(&self) -> impl Iterator<Item = &AccessEntry> {
        self.0.iter()
    }

    /// The entries as they were written.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(AccessEntry::text)
    }

    /// The entries whose user or group is not known, each with the reason.
    pub fn unknown(&self) -> impl Iterator<Item = (&str, &AccessError)> {
        self.0.iter().filter_map(|entry| Some((entry.text(), entry.unknown()?)))
    }

    /// Whether the client may open the volume: an entry matches it. An empty list admits no client.
    pub fn admits(&self, client: &ClientIdentity) -> bool {
        self.0.iter().any(|entry| entry.matches(client))
    }
}
