//! Mistakes in entries, each with a remedy.

use crate::{ENTRIES_MAX, ENTRY_BYTES_MAX};

/// Why a text is no entry, or entries are no list. The texts of entries are not repeated: the caller names the place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are the words of the messages")]
pub enum AccessError {
    /// It does not begin with one of the kinds.
    #[error("the entry does not say what kind of client it means")]
    NoKind,
    /// The kind does not exist.
    #[error("there is no such kind of client")]
    UnknownKind,
    /// Nothing follows the kind.
    #[error("nothing follows `{kind}:`")]
    Empty { kind: &'static str },
    /// It is too long.
    #[error("the entry is longer than {ENTRY_BYTES_MAX} bytes")]
    TooLong,
    /// It has a control character.
    #[error("the entry has a control character")]
    Control,
    /// The system has no such user or group.
    #[error("this host has no {what} of that name")]
    UnknownName { what: &'static str },
    /// The system could not say whether there is such a user or group.
    #[error("cannot look the {what} up: {why}")]
    LookUp { what: &'static str, why: String },
    /// The number is not that of a user or group.
    #[error("the number is not that of a {what}")]
    BadNumber { what: &'static str },
    /// It is not an IP network.
    #[error("this is not an IP address or network")]
    BadNetwork,
    /// The address has bits that the prefix excludes.
    #[error("the address has bits beyond the prefix")]
    BitsBeyondPrefix { network: String },
    /// There are too many entries.
    #[error("{count} entries are more than {ENTRIES_MAX}")]
    TooMany { count: usize },
}

impl AccessError {
    /// What to do about it.
    pub fn remedy(&self) -> String {
        match self {
            AccessError::NoKind | AccessError::UnknownKind | AccessError::Empty { .. } => {
                "write psk:NAME, cn:NAME, uid:USER, gid:GROUP, net:NETWORK or xen:GUEST".to_owned()
            }
            AccessError::TooLong => "shorten it".to_owned(),
            AccessError::Control => "remove it".to_owned(),
            AccessError::UnknownName { what } => {
                format!("check the spelling, create the {what} first, or write its number")
            }
            AccessError::LookUp { what, .. } => format!("write the number of the {what}"),
            AccessError::BadNumber { .. } => "write a number from 0 to 4294967294".to_owned(),
            AccessError::BadNetwork => {
                "write an address and a prefix, such as net:10.0.0.0/8 or net:fd00::/8, or one address".to_owned()
            }
            AccessError::BitsBeyondPrefix { network } => {
                format!("write net:{network}, or the address without a prefix for one host")
            }
            AccessError::TooMany { .. } => {
                "use groups (gid:), networks (net:) or patterns (cn:) for several clients".to_owned()
            }
        }
    }
}
