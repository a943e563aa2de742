//! The key slots of encrypted volumes. No body has a key: a request names where it is, and the daemon reads it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A key slot of an encrypted volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KeySlotView {
    /// Its number.
    pub slot: u32,
    /// What derives its key, such as `argon2id` or `pbkdf2`.
    pub kdf: String,
    /// Whether ebbd can open it with the right key.
    pub usable: bool,
    /// Why ebbd cannot open it, if it cannot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The remedy, after which it can be opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
    /// Whether it is not tried, because of its priority in the header.
    pub ignored: bool,
}

/// The key slots of an encrypted volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KeySlotsView {
    /// The volume.
    pub volume: String,
    /// Its slots.
    pub slots: Vec<KeySlotView>,
    /// If one of the two copies of its header is damaged: which, and what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

/// The body that adds a key slot, or names the key that is used from now on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct KeyBody {
    /// Where the key is: `key-file:PATH` or `credential:NAME`, as in `encryption`; the daemon reads it.
    pub key: String,
}

/// A key slot that was added.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KeyChangeView {
    /// The volume.
    pub volume: String,
    /// The number of the slot.
    pub slot: u32,
}
