//! Events: what the daemon has logged at `info` and above.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// An event.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EventView {
    /// Its number, from 1 since the daemon started, without gaps.
    pub id: u64,
    /// Seconds since 1970.
    pub time: f64,
    /// `error`, `warn` or `info`.
    pub level: String,
    /// The text of the log line, without its fields.
    pub message: String,
    /// The fields of the log line, such as `volume`, `client` and `error`.
    #[serde(default)]
    pub fields: BTreeMap<String, String>,
}
