//! Operations: long work in the daemon that a client can follow.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{ErrorBody, KeyChangeView, OperationState, ResizeView};

/// An operation. It is listed for ten minutes after its end.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OperationView {
    /// Its number, from 1.
    pub id: u64,
    /// `add`, `remove`, `rename`, `snapshot`, `flatten`, `persist`, `resize`, `limit`, `add key`,
    /// `remove key`, `use key`, `flush` or `reload`.
    pub kind: String,
    /// The volume it concerns; absent for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// Who requested it: `uid:NUMBER` of a user of the control socket, or `token:NAME`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub by: String,
    /// Whether it goes on, or how it has ended.
    pub state: OperationState,
    /// What it is doing now, in a few words, such as `writing dirty data`; after a reload what it has done, and empty after
    /// any other operation.
    pub step: String,
    /// The part that is done, in `unit`.
    pub done: u64,
    /// The whole, in `unit`; 0 if unknown.
    pub total: u64,
    /// `bytes`, `requests` or `volumes`.
    pub unit: String,
    /// Seconds since it began.
    pub since_seconds: f64,
    /// Estimated seconds until its end; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_seconds: Option<f64>,
    /// Whether `DELETE` cancels it now.
    pub cancellable: bool,
    /// What a resize has changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resized: Option<ResizeView>,
    /// The key slot that was added.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_added: Option<KeyChangeView>,
    /// After a reload that was applied: volumes that are not served all the same, each as `volume NAME: REASON`, at most
    /// [`OperationView::MAX_NOT_SERVED`]. They are tried again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_served: Vec<String>,
    /// The number of further ones.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub more_not_served: u64,
    /// After a reload that was applied: volumes that are served, but not over their vhost-user
    /// socket, each as `volume NAME: REASON`, at most [`OperationView::MAX_NOT_SERVED`]. They are
    /// tried again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub without_socket: Vec<String>,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<ErrorBody>,
    /// The status that a request which fails so at once has: 4xx if it is at fault, 5xx otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure_status: Option<u16>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl OperationView {
    /// The most volumes in [`OperationView::not_served`].
    pub const MAX_NOT_SERVED: usize = 20;
}
